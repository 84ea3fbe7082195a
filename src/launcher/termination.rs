//! How one worker is ended: it is told to finish, then to drain, then to abort, and then it is killed, each after a
//! time limit. Owns the current step.

use std::time::{Duration, Instant};

use tokio::time::sleep_until;

use super::child::WorkerProcess;
use crate::config::Drain;
use crate::protocol::control::Command;
use crate::shutdown::{Phase, Stop};

/// The time from the abort command to the kill, in which the worker can write its last lines.
const KILL_DELAY: Duration = Duration::from_secs(1);

/// The next step in ending a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The end has not been requested. When the launcher stops, the worker is told to drain, or to finish if
    /// `pool.drain` says so.
    Drain,
    /// The worker was told to finish. It is told to drain at this time, or when the launcher stops.
    DrainAt(Instant),
    /// The worker was told to finish because the launcher stops. It is told to drain at this time, or when the stop
    /// becomes an abort.
    HandBackAt(Instant),
    /// The worker is told to abort at this time, or when the launcher's stop becomes an abort.
    Abort(Instant),
    /// The worker is killed at this time.
    Kill(Instant),
    /// The worker was killed, and its end is awaited.
    Wait,
}

impl Step {
    /// Whether the worker's end has been requested.
    pub(super) fn has_begun(self) -> bool {
        self != Self::Drain
    }

    /// Whether the worker has been told to abort.
    pub(super) fn is_forced(self) -> bool {
        matches!(self, Self::Kill(_) | Self::Wait)
    }

    /// Tells the worker to finish the tasks that it has, and then to end.
    pub(super) async fn finish(&mut self, worker: &mut WorkerProcess, grace: Duration) {
        if !self.has_begun() {
            worker.send(&Command::Finish).await;
            *self = Self::DrainAt(Instant::now() + grace);
        }
    }

    /// Waits until the step is due.
    pub(super) async fn due(self, stop: &Stop) {
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

    /// Carries out the step, and returns the next one. `drain` is the setting of the worker's pool.
    pub(super) async fn carry_out(self, worker: &mut WorkerProcess, grace: Duration, drain: Drain) -> Self {
        match self {
            Self::Drain if drain == Drain::Finish => {
                worker.send(&Command::Finish).await;
                // The last quarter of the grace is left for the drain.
                Self::HandBackAt(Instant::now() + grace - grace / 4)
            }
            Self::Drain | Self::DrainAt(_) => {
                worker.send(&Command::Drain).await;
                Self::Abort(Instant::now() + grace)
            }
            Self::HandBackAt(_) => {
                worker.send(&Command::Drain).await;
                Self::Abort(Instant::now() + grace / 4)
            }
            Self::Abort(_) => {
                worker.send(&Command::Abort).await;
                Self::Kill(Instant::now() + KILL_DELAY)
            }
            Self::Kill(_) | Self::Wait => {
                worker.kill();
                Self::Wait
            }
        }
    }
}
