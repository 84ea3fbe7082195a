//! What `sconce --version` says: version, commit, target and features, as `build.rs` found them.

/// One line, so that a report can quote it whole.
pub(super) const LONG: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (commit ",
    env!("BUILD_COMMIT"),
    ", ",
    env!("BUILD_TARGET"),
    "; features: ",
    env!("BUILD_FEATURES"),
    ")",
);
