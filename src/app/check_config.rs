//! `sconce check-config`.

use std::io::Write;

use super::load;
use crate::cli::{CheckConfig, Settings};
use crate::shutdown::Exit;

/// Prints the effective settings.
pub(super) fn run(arguments: &CheckConfig) -> anyhow::Result<Exit> {
    let mut config = arguments.settings.config.clone();
    config.extend(arguments.file.clone());
    let loaded = load(&Settings { config, set: arguments.settings.set.clone() }, &[])?;
    std::io::stdout().write_all(loaded.effective.as_bytes())?;
    Ok(Exit::Done)
}
