//! The state of a slot, which outlives its workers, and what the status board shows of it. `slot` and `replace` read
//! and change the state.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;

use super::LauncherContext;
use super::order::{Replacement, SlotCommand};
use super::restart::RestartReason;
use super::worker_handle::{Overrides, WorkerHandle};
use crate::config::Assignment;
use crate::protocol::admin::State;
use crate::shutdown::Exit;

/// How a slot ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotEnd {
    /// A sentinel or an operator's order stopped its worker.
    StoppedOnRequest,
    /// It drained with the launcher.
    Drained,
    /// It was aborted or killed when the launcher stopped.
    Aborted,
    /// Its workers failed too often.
    GivenUp(Exit),
}

/// What a slot does after a worker's end or after a wait.
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
    pub(super) context: Arc<LauncherContext>,
    pub(super) assignment: Assignment,
    /// Written by the fleet, read here. Bound: when it is full, orders are refused.
    pub(super) orders: mpsc::Receiver<SlotCommand>,
    pub(super) overrides: Overrides,
    /// Replaced workers that still finish their tasks.
    pub(super) draining: FuturesUnordered<BoxFuture<'static, Option<Exit>>>,
    /// Quick failures in a row.
    pub(super) quick_failures: u32,
    /// Quick failures in a row whose cause was found to be a poison task.
    pub(super) poison_found_in_a_row: u32,
    /// A worker that is due for recycling is not replaced before this time.
    pub(super) next_replacement: Option<Instant>,
    /// New settings with which no worker has been ready yet.
    pub(super) probation: Option<Probation>,
}

impl Slot {
    pub(super) fn new(
        context: Arc<LauncherContext>,
        assignment: Assignment,
        orders: mpsc::Receiver<SlotCommand>,
    ) -> Self {
        Self {
            context,
            assignment,
            orders,
            overrides: Overrides::default(),
            draining: FuturesUnordered::new(),
            quick_failures: 0,
            poison_found_in_a_row: 0,
            next_replacement: None,
            probation: None,
        }
    }

    /// Changes the slot's assignment.
    pub(super) fn set_assignment(&mut self, assignment: Assignment) {
        self.context.board.assign(&assignment);
        self.assignment = assignment;
    }

    pub(super) fn show(&self, state: State) {
        self.context.board.change(&self.assignment.slot, |entry| entry.set_state(state));
    }

    /// Makes the board show this worker from now on.
    pub(super) fn show_worker(&self, worker: &mut WorkerHandle) {
        worker.monitor.is_shown = true;
        let (pid, is_ready) = (worker.pid(), worker.monitor.ready_at.is_some());
        let (dtype, assumptions) = (&worker.monitor.dtype, &worker.monitor.assumptions);
        self.context.board.change(&self.assignment.slot, |entry| {
            let old_values = entry.report.stats.as_ref().map(|stats| stats.now.clone());
            entry.clear_worker();
            entry.report.pid = pid;
            if is_ready {
                entry.mark_ready(dtype, assumptions);
                // The current values are kept until the new worker reports its own: the old worker works on while the
                // new one connects.
                if let (Some(stats), Some(old_values)) = (&mut entry.report.stats, old_values) {
                    stats.now = old_values;
                }
            }
            entry.set_state(if is_ready { State::Ready } else { State::Starting });
        });
    }

    pub(super) fn show_failure(&self, state: State, message: &str) {
        self.context.board.change(&self.assignment.slot, |entry| {
            entry.report.last_failure = Some(message.to_owned());
            entry.set_state(state);
        });
    }

    pub(super) fn show_end(&self, end: SlotEnd) {
        match end {
            SlotEnd::GivenUp(_) => {}
            SlotEnd::StoppedOnRequest | SlotEnd::Drained | SlotEnd::Aborted => self.show(State::Stopped),
        }
    }

    pub(super) fn count_restart(&self, reason: RestartReason) {
        self.context.board.change(&self.assignment.slot, |entry| {
            *entry.report.restarts.entry(reason.as_str().to_owned()).or_default() += 1;
        });
    }
}

/// A worker that will replace the current one.
pub(super) struct Successor {
    pub(super) worker: WorkerHandle,
    pub(super) replacement: Replacement,
}

/// New settings that still have to prove themselves: the next worker must become ready with them.
pub(super) struct Probation {
    /// The settings that are restored if it does not.
    pub(super) previous: Assignment,
    pub(super) replacement: Replacement,
}
