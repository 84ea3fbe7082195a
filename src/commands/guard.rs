//! `sconce guard`: started by a launcher beside its workers, never by hand. Reads no settings and has one
//! thread; `launcher::guard` does the work.

use std::io;

use anyhow::Context;

use super::start_logging;
use crate::launcher::guard_workers;
use crate::shutdown::Exit;

/// Guards the workers of the launcher that writes to stdin, until none of them is left.
pub(super) fn run() -> anyhow::Result<Exit> {
    start_logging(None);
    guard_workers(io::stdin().lock()).context("cannot ignore the signals that stop a service")?;
    Ok(Exit::Done)
}
