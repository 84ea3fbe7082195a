//! The signal source: SIGTERM and SIGINT move a [`Stop`], SIGHUP asks to load the settings again. Decides what
//! a second signal means, and when a SIGHUP only reports the end of a terminal.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{Phase, Stop};

/// A signal that comes so soon after the first is the first: `timeout`, a shell and a service manager signal the
/// process and then its group.
const ECHO: Duration = Duration::from_millis(300);

/// What a second signal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Abort. For a process that a person stops.
    SecondAborts,
    /// The same as the first. For a worker under a launcher: the terminal or the service manager may signal
    /// both, and the launcher sends `abort` itself when needed.
    Drain,
}

/// When the first signal came.
#[derive(Default)]
struct Heard(Option<Instant>);

impl Heard {
    /// How far a signal at this time moves the stop.
    fn signal(&mut self, patience: Patience, now: Instant) -> Phase {
        let first = *self.0.get_or_insert(now);
        let is_second = now.saturating_duration_since(first) >= ECHO;
        if is_second && patience == Patience::SecondAborts { Phase::Aborting } else { Phase::Returning }
    }
}

/// Listens from now on. Call inside the runtime, before anything that takes time.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn listen(stop: Stop, patience: Patience) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    if patience == Patience::Drain {
        // A SIGHUP to all processes of this name is meant for the launcher. The handler stays installed, and
        // ignores the signal.
        drop(signal(SignalKind::hangup())?);
    }
    tokio::spawn(async move {
        let mut heard = Heard::default();
        loop {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            stop.advance(heard.signal(patience, Instant::now()), name);
        }
    });
    Ok(())
}

/// The stream of SIGHUPs.
pub struct Hangups {
    signal: Signal,
    /// Whether the process was started in a terminal, whose end is a SIGHUP too.
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

    /// Waits for the next SIGHUP. False: it reports the end of the terminal.
    pub async fn next(&mut self) -> bool {
        if self.signal.recv().await.is_none() {
            return std::future::pending().await;
        }
        !self.in_terminal || io::stdin().is_terminal()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_comes_at_once_again_is_the_first_and_a_later_one_aborts() {
        let now = Instant::now();
        let phases = |patience| {
            let mut heard = Heard::default();
            [Duration::ZERO, ECHO / 2, ECHO].map(|after| heard.signal(patience, now + after))
        };
        assert_eq!(phases(Patience::SecondAborts), [Phase::Returning, Phase::Returning, Phase::Aborting]);
        assert_eq!(phases(Patience::Drain), [Phase::Returning; 3]);
    }
}
