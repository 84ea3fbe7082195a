//! The signal source: SIGTERM and SIGINT move a [`Stop`]. Decides what a second one means.

use std::io;

use tokio::signal::unix::{SignalKind, signal};

use super::{Phase, Stop};

/// What a second signal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Abort. For a process that a person stops.
    SecondAborts,
    /// Nothing more than the first. For a worker under a launcher: the terminal or the service
    /// manager may signal both, and the launcher then says `abort` itself when it must.
    Drain,
}

/// Listens from now on. Call inside the runtime, before anything that takes time.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn listen(stop: Stop, patience: Patience) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        loop {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            let first = stop.advance(Phase::Returning, name);
            if !first && patience == Patience::SecondAborts {
                stop.advance(Phase::Aborting, name);
            }
        }
    });
    Ok(())
}
