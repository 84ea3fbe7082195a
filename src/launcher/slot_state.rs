//! A slot: its state from one worker to the next, and what the status board shows of it. `slot` and `replace` act
//! on it.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::Launch;
use super::order::Ordered;
use super::restart::RestartReason;
use super::worker_handle::{Overrides, WorkerHandle};
use crate::config::Assignment;
use crate::protocol::admin::State;
use crate::protocol::control::{BatchChange, Command};
use crate::shutdown::Exit;

/// How a slot ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotEnd {
    /// A sentinel stopped its worker, or an operator's order did.
    StoppedOnRequest,
    /// It drained with the launcher.
    Drained,
    /// It was aborted or killed when the launcher stopped.
    Aborted,
    /// It failed too often.
    GivenUp(Exit),
}

/// What follows a worker's end or a wait.
pub(super) enum NextAction {
    /// Judge the worker's death.
    Judge,
    /// Start a new worker at once.
    Start,
    /// Wait for an order.
    Hold,
    End(SlotEnd),
}

/// One slot and the workers that fill it in turn.
pub(super) struct Slot {
    pub(super) launch: Arc<Launch>,
    pub(super) assignment: Assignment,
    /// Written by the fleet, read here. Bound: when it is full, orders are refused.
    pub(super) orders: mpsc::Receiver<Ordered>,
    pub(super) overrides: Overrides,
    /// Replaced workers that are finishing.
    pub(super) leaving: FuturesUnordered<BoxFuture<'static, Option<Exit>>>,
    pub(super) quick_failures: u32,
    pub(super) found_in_a_row: u32,
    /// A spent worker is not replaced before this time.
    pub(super) next_replacement: Option<Instant>,
    /// Settings with which no worker has been ready yet.
    pub(super) probation: Option<Probation>,
}

impl Slot {
    pub(super) fn new(launch: Arc<Launch>, assignment: Assignment, orders: mpsc::Receiver<Ordered>) -> Self {
        Self {
            launch,
            assignment,
            orders,
            overrides: Overrides::default(),
            leaving: FuturesUnordered::new(),
            quick_failures: 0,
            found_in_a_row: 0,
            next_replacement: None,
            probation: None,
        }
    }

    /// Changes the slot's assignment.
    pub(super) fn take_on(&mut self, assignment: Assignment) {
        self.launch.board.assign(&assignment);
        self.assignment = assignment;
        // Bounds set by an order end with the settings that they changed.
        self.overrides.batch = BatchChange::default();
    }

    pub(super) fn show(&self, state: State) {
        self.launch.board.change(&self.assignment.slot, |entry| entry.turn(state));
    }

    /// From now on the board shows this worker.
    pub(super) fn show_worker(&self, running: &mut WorkerHandle) {
        running.shown = true;
        let (pid, is_ready) = (running.pid(), running.monitor.ready.is_some());
        self.launch.board.change(&self.assignment.slot, |entry| {
            let before = entry.report.stats.as_ref().map(|stats| stats.now.clone());
            entry.vacate();
            entry.report.pid = pid;
            if is_ready {
                entry.is_ready();
                // Kept until the new worker reports its own: the old one works on while the new one connects.
                if let (Some(stats), Some(before)) = (&mut entry.report.stats, before) {
                    stats.now = before;
                }
            }
            entry.turn(if is_ready { State::Ready } else { State::Starting });
        });
    }

    pub(super) fn show_failure(&self, state: State, message: &str) {
        self.launch.board.change(&self.assignment.slot, |entry| {
            entry.report.last_failure = Some(message.to_owned());
            entry.turn(state);
        });
    }

    pub(super) fn show_end(&self, end: SlotEnd) {
        match end {
            SlotEnd::GivenUp(_) => {}
            SlotEnd::StoppedOnRequest | SlotEnd::Drained | SlotEnd::Aborted => self.show(State::Stopped),
        }
    }

    pub(super) fn count_restart(&self, reason: RestartReason) {
        self.launch.board.change(&self.assignment.slot, |entry| {
            *entry.report.restarts.entry(reason.as_str().to_owned()).or_default() += 1;
        });
    }
}

/// Why a worker is replaced.
pub(super) struct Replacement {
    pub(super) reason: RestartReason,
    /// While this is held, no other slot replaces its worker.
    pub(super) permit: OwnedSemaphorePermit,
    /// Who waits for the outcome.
    pub(super) answer: Option<oneshot::Sender<Result<(), String>>>,
}

impl Replacement {
    /// Reports the outcome to who waits for it.
    pub(super) fn say(self, outcome: Result<(), String>) {
        if let Some(answer) = self.answer {
            let _ = answer.send(outcome);
        }
    }
}

/// A worker that will replace the current one.
pub(super) struct Successor {
    pub(super) running: WorkerHandle,
    pub(super) replacement: Replacement,
}

impl Successor {
    /// Whether a command for the current worker is for the successor too: bounds of batches belong to the
    /// settings that they change.
    pub(super) fn is_to_hear(&self, command: &Command, assignment: &Assignment) -> bool {
        !matches!(command, Command::SetBatch(_)) || self.running.assignment == *assignment
    }
}

/// A probation of settings: a worker is started with them after the old one has drained.
pub(super) struct Probation {
    pub(super) before: Assignment,
    pub(super) replacement: Replacement,
}
