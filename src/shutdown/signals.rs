//! The signal source: SIGTERM and SIGINT move a [`Stop`], SIGHUP asks for settings to be loaded again.
//! Decides what a second one means, and when a SIGHUP is but the end of a terminal.

use std::io::{self, IsTerminal};

use tokio::signal::unix::{Signal, SignalKind, signal};

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
    if patience == Patience::Drain {
        // Whoever tells all processes of this name to load their settings again means the launcher. The
        // handler stays once it is there, and does nothing.
        drop(signal(SignalKind::hangup())?);
    }
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

/// SIGHUP, as it comes.
pub struct Hangups {
    signal: Signal,
    /// Started in a terminal, whose end is a SIGHUP too.
    in_terminal: bool,
}

impl Hangups {
    /// Listens from now on. Call inside the runtime.
    ///
    /// # Errors
    /// When the handler cannot be installed.
    pub fn listen() -> io::Result<Self> {
        Ok(Self { signal: signal(SignalKind::hangup())?, in_terminal: io::stdin().is_terminal() })
    }

    /// Waits for the next. False: it says that the terminal is gone.
    pub async fn next(&mut self) -> bool {
        if self.signal.recv().await.is_none() {
            return std::future::pending().await;
        }
        !self.in_terminal || io::stdin().is_terminal()
    }
}
