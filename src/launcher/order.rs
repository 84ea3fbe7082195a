//! The requests that a running launcher takes through its handle: orders to slots, and new settings. This room
//! does not know who asks or over which connection.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::status_board::StatusBoard;
use crate::config::{Assignment, Launcher};
use crate::protocol::admin::{Request, Target};

/// The most requests that may wait.
const WAITING: usize = 64;

/// The outcome of an order at one slot: what is done, or why nothing is.
pub type Outcome = Result<Done, String>;

/// What a slot has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// In words.
    pub what: &'static str,
    /// How many tasks are cancelled; only after the cancellation of a task by its id.
    pub cancelled: Option<u64>,
}

impl Done {
    /// After the cancellation of a task by its id.
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
pub(super) enum Ordered {
    /// An order from outside.
    Order(Request, oneshot::Sender<Outcome>),
    /// From the fleet: replace the worker by one with other settings, in the order of the settings. While the
    /// permit exists, no other slot replaces its worker.
    Replace(Box<Assignment>, OwnedSemaphorePermit, oneshot::Sender<Result<(), String>>),
}

/// A request to the launcher.
pub(super) enum Ask {
    Order { target: Target, order: Request, answer: oneshot::Sender<Vec<(String, Outcome)>> },
    Reload { slots: Vec<Assignment>, policy: Box<Launcher>, answer: oneshot::Sender<Result<String, String>> },
}

/// Sends requests to a running launcher. Clones reach the same launcher.
#[derive(Clone, Debug)]
pub struct Handle {
    /// Written by callers, read by the fleet. Bound: when it is full, callers wait.
    asks: mpsc::Sender<Ask>,
    board: Arc<StatusBoard>,
}

impl Handle {
    pub(super) fn new(board: Arc<StatusBoard>) -> (Self, mpsc::Receiver<Ask>) {
        let (asks, asked) = mpsc::channel(WAITING);
        (Self { asks, board }, asked)
    }

    /// Counts reloaded settings that are invalid.
    pub fn refuse_reload(&self) {
        self.board.write(|status| status.reloads_refused += 1);
    }

    /// Gives an order to the slots of `target`; returns the outcome of each. (What only asks is answered from the board.) Long orders are still in progress
    /// when this returns.
    pub async fn order(&self, target: Target, order: Request) -> Vec<(String, Outcome)> {
        let (answer, answered) = oneshot::channel();
        let _ = self.asks.send(Ask::Order { target, order, answer }).await;
        answered.await.unwrap_or_default()
    }

    /// Applies new settings, slot by slot. Returns what was done.
    ///
    /// # Errors
    /// Why they cannot be applied. Slots before the one that failed keep the new settings.
    pub async fn reload(&self, slots: Vec<Assignment>, policy: Launcher) -> Result<String, String> {
        let (answer, answered) = oneshot::channel();
        let _ = self.asks.send(Ask::Reload { slots, policy: Box::new(policy), answer }).await;
        answered.await.unwrap_or_else(|_| Err("the launcher has ended".to_owned()))
    }
}
