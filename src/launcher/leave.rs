//! How one worker is brought to its end: asked to finish, then to drain, then to abort, then killed,
//! each within a time. Owns how far that has gone.

use std::time::{Duration, Instant};

use tokio::time::sleep_until;

use super::child::Worker;
use crate::protocol::control::Command;
use crate::shutdown::{Phase, Stop};

/// From the abort command to the kill.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What is done next to end a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing has been asked of it. Tell it to drain, when the launcher's stop says so.
    Drain,
    /// It was told to finish. Tell it to drain, if it has not ended by then or the launcher stops.
    DrainAt(Instant),
    /// Tell it to abort: when the grace is over, or the stop is pressed.
    Abort(Instant),
    /// Kill it, if it has not ended by then.
    Kill(Instant),
    /// Wait for its end.
    Wait,
}

impl Step {
    /// Whether its end has been asked for.
    pub(super) fn is_begun(self) -> bool {
        self != Self::Drain
    }

    /// Whether it has been told to leave what it has.
    pub(super) fn is_forced(self) -> bool {
        matches!(self, Self::Kill(_) | Self::Wait)
    }

    /// Tells the worker to finish what it has taken and to end.
    pub(super) async fn finish(&mut self, worker: &mut Worker, grace: Duration) {
        if !self.is_begun() {
            worker.tell(&Command::Finish).await;
            *self = Self::DrainAt(Instant::now() + grace);
        }
    }

    pub(super) async fn is_due(self, stop: &Stop) {
        match self {
            Self::Drain => stop.reached(Phase::Returning).await,
            Self::DrainAt(deadline) => tokio::select! {
                () = sleep_until(deadline.into()) => {}
                () = stop.reached(Phase::Returning) => {}
            },
            Self::Abort(deadline) => tokio::select! {
                () = sleep_until(deadline.into()) => {}
                () = stop.reached(Phase::Aborting) => {}
            },
            Self::Kill(deadline) => sleep_until(deadline.into()).await,
            Self::Wait => std::future::pending().await,
        }
    }

    /// Does it; returns the next.
    pub(super) async fn take(self, worker: &mut Worker, grace: Duration) -> Self {
        match self {
            Self::Drain | Self::DrainAt(_) => {
                worker.tell(&Command::Drain).await;
                Self::Abort(Instant::now() + grace)
            }
            Self::Abort(_) => {
                worker.tell(&Command::Abort).await;
                Self::Kill(Instant::now() + LAST_WORDS)
            }
            Self::Kill(_) | Self::Wait => {
                worker.kill();
                Self::Wait
            }
        }
    }
}
