//! Why a process stops, and how far the stop has gone: causes, phases, exit codes, the signal source. The only
//! state is a [`Stop`], which its clones share and whose phase only moves forward.

mod exit;
mod signals;

pub use exit::Exit;
pub use signals::{Hangups, SecondSignal, ignore_stop_signals, listen_for_signals};

use tokio::sync::watch;

/// How far the stop has gone. A later phase implies the earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The process is not stopping.
    Running,
    /// The process takes no more tasks, and finishes those that it has accepted.
    Finishing,
    /// The process finishes the tasks on the device, and requeues those that wait.
    Returning,
    /// The process exits without waiting for anything.
    Aborting,
}

/// The stop state of a process. Clones share it.
#[derive(Clone, Debug)]
pub struct Stop {
    /// Written by [`Stop::advance`], read by every task that waits for a phase. One value, because only the
    /// latest phase matters.
    state: watch::Sender<State>,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// The cause of the first change of phase.
    cause: Option<String>,
}

impl Default for Stop {
    fn default() -> Self {
        Self { state: watch::Sender::new(State { phase: Phase::Running, cause: None }) }
    }
}

impl Stop {
    /// The phase now.
    pub fn phase(&self) -> Phase {
        self.state.borrow().phase
    }

    /// Moves to `phase`. Returns false, without effect, if that phase has been reached already.
    pub fn advance(&self, phase: Phase, cause: impl Into<String>) -> bool {
        self.state.send_if_modified(|state| {
            let is_later = phase > state.phase;
            if is_later {
                state.phase = phase;
                state.cause.get_or_insert(cause.into());
            }
            is_later
        })
    }

    /// Waits until `phase` is reached.
    pub async fn reached(&self, phase: Phase) {
        // `self` holds the sender, so waiting cannot fail.
        let _ = self.state.subscribe().wait_for(|state| state.phase >= phase).await;
    }

    /// The first cause of the stop.
    pub fn cause(&self) -> Option<String> {
        self.state.borrow().cause.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stop_only_moves_forward_and_keeps_its_first_cause() {
        let stop = Stop::default();
        assert!(stop.advance(Phase::Returning, "SIGTERM"));
        assert!(!stop.advance(Phase::Finishing, "sentinel"));
        assert!(stop.advance(Phase::Aborting, "deadline"));
        assert_eq!(stop.phase(), Phase::Aborting);
        assert_eq!(stop.cause().as_deref(), Some("SIGTERM"));
        stop.reached(Phase::Finishing).await;
    }
}
