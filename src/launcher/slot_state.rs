//! A slot: its state from one worker to the next. `slot`, `replace` and `shown` act on it.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::Launch;
use super::order::Ordered;
use super::worker_handle::{Overrides, WorkerHandle};
use crate::config::Assignment;
use crate::protocol::control::Command;
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
    pub(super) next_turn: Option<Instant>,
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
            next_turn: None,
            probation: None,
        }
    }
}

/// Why a worker is replaced.
pub(super) struct ReplaceReason {
    /// The reason as a name, for counting.
    pub(super) reason: &'static str,
    /// While this is held, no other slot replaces its worker.
    pub(super) permit: OwnedSemaphorePermit,
    /// Who waits for the outcome.
    pub(super) answer: Option<oneshot::Sender<Result<(), String>>>,
}

impl ReplaceReason {
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
    pub(super) why: ReplaceReason,
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
    pub(super) why: ReplaceReason,
}
