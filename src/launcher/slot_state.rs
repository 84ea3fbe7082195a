//! A slot: what it knows of the workers that fill it in turn. What is done with that is in `slot`, `replace` and
//! `shown`.

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
    /// Its worker was stopped by a sentinel, or on an operator's order.
    StoppedOnRequest,
    /// It drained with the launcher.
    Drained,
    /// It was aborted or killed at the launcher's stop.
    Aborted,
    /// It failed too often.
    GivenUp(Exit),
}

/// What comes after a worker's end, or after a wait.
pub(super) enum NextAction {
    /// As its death is judged.
    Judge,
    /// A new worker, at once.
    Start,
    /// Nothing, until somebody orders something.
    Hold,
    End(SlotEnd),
}

/// One slot and the workers that fill it in turn.
pub(super) struct Slot {
    pub(super) launch: Arc<Launch>,
    pub(super) assignment: Assignment,
    /// Written by the fleet, read here. Bound: those beyond are refused.
    pub(super) orders: mpsc::Receiver<Ordered>,
    pub(super) overrides: Overrides,
    /// Workers that were replaced and are finishing.
    pub(super) leaving: FuturesUnordered<BoxFuture<'static, Option<Exit>>>,
    pub(super) quick_failures: u32,
    pub(super) found_in_a_row: u32,
    /// Not before this is it tried again to replace a worker that is spent.
    pub(super) next_turn: Option<Instant>,
    /// Settings by which no worker has been ready yet.
    pub(super) trial: Option<Probation>,
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
            trial: None,
        }
    }
}

/// Why a worker is replaced.
pub(super) struct ReplaceReason {
    /// As a name, for counting.
    pub(super) reason: &'static str,
    /// While it is held, no other slot replaces its worker.
    pub(super) permit: OwnedSemaphorePermit,
    /// Who waits to hear of it.
    pub(super) answer: Option<oneshot::Sender<Result<(), String>>>,
}

impl ReplaceReason {
    /// Tells whoever waits what came of it.
    pub(super) fn say(self, outcome: Result<(), String>) {
        if let Some(answer) = self.answer {
            let _ = answer.send(outcome);
        }
    }
}

/// A worker that is to take the place of the one that runs.
pub(super) struct Successor {
    pub(super) running: WorkerHandle,
    pub(super) why: ReplaceReason,
}

impl Successor {
    /// Whether what the worker before it is told is for it too: bounds of batches go with the settings
    /// that they change.
    pub(super) fn is_to_hear(&self, command: &Command, assignment: &Assignment) -> bool {
        !matches!(command, Command::SetBatch(_)) || self.running.assignment == *assignment
    }
}

/// Settings by which a worker is started in the place of one that has drained.
pub(super) struct Probation {
    pub(super) before: Assignment,
    pub(super) why: ReplaceReason,
}
