//! The signal source: SIGTERM and SIGINT advance a [`Stop`], SIGHUP asks to reload the settings. Decides what
//! a second signal means, and when a SIGHUP only reports that the terminal was closed.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use nix::sys::signal::{self as raw, SigHandler};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{Phase, Stop};

/// A signal within this time after the first counts as the same signal: `timeout`, a shell and a service manager
/// signal the process and then its group. A person does not press Ctrl-C twice so fast.
const REPEAT_WINDOW: Duration = Duration::from_millis(100);

/// What a second signal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecondSignal {
    /// It aborts the process. For a process that a person stops.
    Aborts,
    /// Nothing new: the drain goes on. For a worker under a launcher: the terminal or the service manager may signal
    /// both, and the launcher sends `abort` itself when needed.
    Ignored,
}

/// When the first signal came.
#[derive(Default)]
struct FirstSignal(Option<Instant>);

impl FirstSignal {
    /// The phase to which a signal at the time `now` moves the stop.
    fn phase_at(&mut self, second_signal: SecondSignal, now: Instant) -> Phase {
        let first = *self.0.get_or_insert(now);
        let is_second = now.saturating_duration_since(first) >= REPEAT_WINDOW;
        if is_second && second_signal == SecondSignal::Aborts { Phase::Aborting } else { Phase::Returning }
    }
}

/// Starts to listen for SIGTERM and SIGINT. Call it inside the runtime, and before anything slow: until then a signal
/// kills the process.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn listen_for_signals(stop: Stop, second_signal: SecondSignal) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    if second_signal == SecondSignal::Ignored {
        // A SIGHUP to all processes with the name of this program is meant for the launcher. tokio's handler stays
        // installed when the stream is dropped, so the worker ignores the signal.
        drop(signal(SignalKind::hangup())?);
    }
    tokio::spawn(async move {
        let mut first_signal = FirstSignal::default();
        loop {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            stop.advance(first_signal.phase_at(second_signal, Instant::now()), name);
        }
    });
    Ok(())
}

/// Ignores the signals that stop a service, in this process and those that it starts afterwards.
///
/// # Errors
/// The system refuses that.
#[expect(unsafe_code, reason = "sigaction(2) is unsafe for the handlers that it could install")]
pub fn ignore_stop_signals() -> io::Result<()> {
    for ignored in [raw::Signal::SIGTERM, raw::Signal::SIGINT, raw::Signal::SIGHUP] {
        // SAFETY: SIG_IGN is not a handler function, so no code of ours runs at a signal.
        let _before = unsafe { raw::signal(ignored, SigHandler::SigIgn) }?;
    }
    Ok(())
}

/// The stream of SIGHUPs.
pub struct Hangups {
    signal: Signal,
    /// Whether the process was started in a terminal. Closing a terminal sends a SIGHUP, too.
    in_terminal: bool,
}

impl Hangups {
    /// Starts to listen. Call it inside the runtime.
    ///
    /// # Errors
    /// When the handler cannot be installed.
    pub fn listen() -> io::Result<Self> {
        Ok(Self { signal: signal(SignalKind::hangup())?, in_terminal: io::stdin().is_terminal() })
    }

    /// Waits for the next SIGHUP. Returns whether it asks for a reload; false if it reports that the terminal was
    /// closed.
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
    fn a_repeated_signal_counts_once_and_a_later_one_aborts() {
        let now = Instant::now();
        let phases = |second_signal| {
            let mut first_signal = FirstSignal::default();
            [Duration::ZERO, REPEAT_WINDOW / 2, REPEAT_WINDOW]
                .map(|after| first_signal.phase_at(second_signal, now + after))
        };
        assert_eq!(phases(SecondSignal::Aborts), [Phase::Returning, Phase::Returning, Phase::Aborting]);
        assert_eq!(phases(SecondSignal::Ignored), [Phase::Returning; 3]);
    }
}
