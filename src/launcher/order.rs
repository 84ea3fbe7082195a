//! The requests that a running launcher accepts through its handle: orders to slots, and new settings. This module does
//! not know who sends them, or over which connection.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::restart::RestartReason;
use super::status_board::StatusBoard;
use crate::config::{Assignment, Launcher};
use crate::protocol::admin::{ControlRequest, Target};

/// The maximum number of requests that may wait for the fleet.
const MAX_WAITING_REQUESTS: usize = 64;

/// The outcome of an order at one slot: what the slot does, or why it does nothing.
pub type Outcome = Result<Done, String>;

/// What a slot has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// A description for people.
    pub what: &'static str,
    /// The number of cancelled tasks, if the order was to cancel a task by its id.
    pub cancelled: Option<u64>,
}

impl Done {
    /// The outcome of cancelling a task by its id.
    pub(super) fn cancelled(tasks: u64) -> Self {
        let what = if tasks > 0 { "its worker has cancelled it" } else { "its worker holds no such task" };
        Self { what, cancelled: Some(tasks) }
    }
}

impl From<&'static str> for Done {
    fn from(what: &'static str) -> Self {
        Self { what, cancelled: None }
    }
}

/// A command on its way to one slot.
pub(super) enum SlotCommand {
    /// An order from outside.
    Order(ControlRequest, oneshot::Sender<Outcome>),
    /// An order from the fleet to replace the worker by one with other settings, in the way that `launcher.replace`
    /// sets.
    Replace(Box<Assignment>, Replacement),
}

/// A replacement of a worker: its reason, its turn among all slots, and who waits for the outcome.
pub(super) struct Replacement {
    pub(super) reason: RestartReason,
    /// While this is held, no other slot replaces its worker.
    pub(super) permit: OwnedSemaphorePermit,
    /// Where the outcome is reported, if anybody waits for it.
    pub(super) answer: Option<oneshot::Sender<Result<(), String>>>,
}

impl Replacement {
    /// Reports the outcome, if anybody waits for it.
    pub(super) fn report(self, outcome: Result<(), String>) {
        if let Some(answer) = self.answer {
            let _ = answer.send(outcome);
        }
    }
}

/// A request to the launcher.
pub(super) enum LauncherRequest {
    Order { target: Target, order: ControlRequest, answer: oneshot::Sender<Vec<(String, Outcome)>> },
    Reload { slots: Vec<Assignment>, policy: Box<Launcher>, answer: oneshot::Sender<Result<String, String>> },
}

/// Sends requests to a running launcher. Clones reach the same launcher.
#[derive(Clone, Debug)]
pub struct Handle {
    /// Written by callers, read by the fleet. When it is full, callers wait.
    requests: mpsc::Sender<LauncherRequest>,
    board: Arc<StatusBoard>,
}

impl Handle {
    pub(super) fn new(board: Arc<StatusBoard>) -> (Self, mpsc::Receiver<LauncherRequest>) {
        let (requests, receiver) = mpsc::channel(MAX_WAITING_REQUESTS);
        (Self { requests, board }, receiver)
    }

    /// Counts a reload whose settings are invalid.
    pub fn record_failed_reload(&self) {
        self.board.write(|status| status.reloads_refused += 1);
    }

    /// Gives an order to the slots of `target`; returns the outcome of each. Long orders are still in progress when
    /// this returns. Queries change nothing.
    pub async fn order(&self, target: Target, order: ControlRequest) -> Vec<(String, Outcome)> {
        let (answer, answered) = oneshot::channel();
        let _ = self.requests.send(LauncherRequest::Order { target, order, answer }).await;
        answered.await.unwrap_or_default()
    }

    /// Applies new settings, slot by slot. Returns what was done.
    ///
    /// # Errors
    /// Why they cannot be applied. Slots before the one that failed keep the new settings.
    pub async fn reload(&self, slots: Vec<Assignment>, policy: Launcher) -> Result<String, String> {
        let (answer, answered) = oneshot::channel();
        let _ = self.requests.send(LauncherRequest::Reload { slots, policy: Box::new(policy), answer }).await;
        answered.await.unwrap_or_else(|_| Err("the launcher has ended".to_owned()))
    }
}
