//! `sconce check-config`.

use std::io::Write;

use anyhow::Context as _;

use super::{Registry, load};
use crate::cli::{CheckConfig, Settings};
use crate::shutdown::Exit;

/// Prints the effective settings, and the code that serves each pool's model.
pub(super) fn run(arguments: &CheckConfig, registry: &Registry) -> anyhow::Result<Exit> {
    let mut config = arguments.settings.config.clone();
    config.extend(arguments.file.clone());
    let loaded = load(&Settings { config, set: arguments.settings.set.clone() }, &[])?;
    let mut out = std::io::stdout();
    out.write_all(loaded.effective.as_bytes())?;
    writeln!(out)?;
    for pool in &loaded.settings.pools {
        let served = registry.describe(pool).context(Exit::ModelFailed)?;
        let served = served.as_deref().unwrap_or("its files are not on this host yet");
        writeln!(out, "# pool {:?} will load {:?}: {served}", pool.name, pool.model)?;
    }
    Ok(Exit::Done)
}
