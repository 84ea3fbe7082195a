//! How one worker is ended: told to finish, then to drain, then to abort, then killed, each after a time limit.
//! Owns how far this has gone.

use std::time::{Duration, Instant};

use tokio::time::sleep_until;

use super::child::Worker;
use crate::config::Drain;
use crate::protocol::control::Command;
use crate::shutdown::{Phase, Stop};

/// The time from the abort command to the kill.
const LAST_LINES: Duration = Duration::from_secs(1);

/// The next step in ending a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The end has not been requested. Tell the worker to drain when the launcher stops.
    Drain,
    /// It was told to finish. Tell it to drain at this time, or when the launcher stops.
    DrainAt(Instant),
    /// It was told to finish because the launcher stops. Tell it to drain at this time.
    HandBackAt(Instant),
    /// Tell it to abort when the grace is over, or when the launcher's stop becomes an abort.
    Abort(Instant),
    /// Kill it at this time.
    Kill(Instant),
    /// It was killed: wait for its end.
    Wait,
}

impl Step {
    /// Whether the worker's end has been requested.
    pub(super) fn is_begun(self) -> bool {
        self != Self::Drain
    }

    /// Whether the worker has been told to abort.
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
            Self::HandBackAt(deadline) | Self::Abort(deadline) => tokio::select! {
                () = sleep_until(deadline.into()) => {}
                () = stop.reached(Phase::Aborting) => {}
            },
            Self::Kill(deadline) => sleep_until(deadline.into()).await,
            Self::Wait => std::future::pending().await,
        }
    }

    /// Carries out the step of a worker whose pool drains like `drain`; returns the next.
    pub(super) async fn take(self, worker: &mut Worker, grace: Duration, drain: Drain) -> Self {
        match self {
            Self::Drain if drain == Drain::Finish => {
                worker.tell(&Command::Finish).await;
                Self::HandBackAt(Instant::now() + grace - grace / 4)
            }
            Self::Drain | Self::DrainAt(_) => {
                worker.tell(&Command::Drain).await;
                Self::Abort(Instant::now() + grace)
            }
            Self::HandBackAt(_) => {
                worker.tell(&Command::Drain).await;
                Self::Abort(Instant::now() + grace / 4)
            }
            Self::Abort(_) => {
                worker.tell(&Command::Abort).await;
                Self::Kill(Instant::now() + LAST_LINES)
            }
            Self::Kill(_) | Self::Wait => {
                worker.kill();
                Self::Wait
            }
        }
    }
}
