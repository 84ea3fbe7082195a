//! The text of `sconce --version`: version, commit, target and features, as `build.rs` found them.

/// The text is one line, so that a bug report can quote it as a whole.
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
