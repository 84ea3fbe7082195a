//! What a running launcher can be asked, and by which handle: orders to slots, and other settings.
//! Who asks, and how it came here, is not known in this room.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::status_board::StatusBoard;
use crate::config::{Assignment, Launcher};
use crate::protocol::admin::Target;
use crate::protocol::control::BatchChange;

/// Asks that may wait.
const WAITING: usize = 64;

/// What a slot can be told to do.
#[derive(Clone, Debug)]
pub enum Order {
    /// Take no more tasks; keep the worker.
    Pause,
    /// Take tasks again; start a worker where it was drained.
    Resume,
    /// Finish and end the worker; the slot stays empty.
    Drain,
    /// Finish and end the worker; the slot is done.
    Shutdown,
    /// Finish and end the worker, start a new one.
    Restart,
    /// Form batches by other bounds.
    SetBatch(BatchChange),
    /// Log by another filter.
    LogLevel(String),
}

/// What became of an order at one slot: what is done, or why nothing is.
pub type Outcome = Result<&'static str, String>;

/// An order on its way to one slot.
pub(super) enum Ordered {
    /// Somebody's.
    Order(Order, oneshot::Sender<Outcome>),
    /// The fleet's: a worker with other settings, ready before the one now drains. While it lasts, no
    /// other slot changes its worker.
    Replace(Box<Assignment>, OwnedSemaphorePermit, oneshot::Sender<Result<(), String>>),
}

/// What is asked of the launcher.
pub(super) enum Ask {
    Order { target: Target, order: Order, answer: oneshot::Sender<Vec<(String, Outcome)>> },
    Reload { slots: Vec<Assignment>, policy: Box<Launcher>, answer: oneshot::Sender<Result<String, String>> },
}

/// By which a running launcher is asked. Clones ask the same.
#[derive(Clone, Debug)]
pub struct Handle {
    /// Written by whoever asks, read by the fleet. Bound: those beyond wait.
    asks: mpsc::Sender<Ask>,
    board: Arc<StatusBoard>,
}

impl Handle {
    pub(super) fn new(board: Arc<StatusBoard>) -> (Self, mpsc::Receiver<Ask>) {
        let (asks, asked) = mpsc::channel(WAITING);
        (Self { asks, board }, asked)
    }

    /// Settings were loaded again, and are none that could be put in force.
    pub fn refuse_reload(&self) {
        self.board.write(|status| status.reloads_refused += 1);
    }

    /// Gives an order to the slots that `target` means; what became of it, by slot. Orders that take
    /// long are under way when this returns.
    pub async fn order(&self, target: Target, order: Order) -> Vec<(String, Outcome)> {
        let (answer, answered) = oneshot::channel();
        let _ = self.asks.send(Ask::Order { target, order, answer }).await;
        answered.await.unwrap_or_default()
    }

    /// Puts other settings in force, slot by slot. Says what was done.
    ///
    /// # Errors
    /// What is wrong with them; from the slot where that showed on, the ones before stay.
    pub async fn reload(&self, slots: Vec<Assignment>, policy: Launcher) -> Result<String, String> {
        let (answer, answered) = oneshot::channel();
        let _ = self.asks.send(Ask::Reload { slots, policy: Box::new(policy), answer }).await;
        answered.await.unwrap_or_else(|_| Err("the launcher has ended".to_owned()))
    }
}
