//! The state of one accepted task, from its acceptance to its ack: whether it is answered or handed back (the first
//! decision wins), and whether it is cancelled. Owns only flags.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Instant;

use crate::batching::Owner;
use crate::protocol::control::TaskName;
use crate::protocol::{TaskError, TaskErrorKind};

const ENQUEUED: u8 = 0;
const COMMITTED: u8 = 1;
const WITHDRAWN: u8 = 2;

/// One accepted task.
pub struct TaskState {
    /// The task's id and fingerprint.
    pub name: TaskName,
    /// The time after which the answer is no longer wanted.
    pub deadline: Option<Instant>,
    /// The priority of the broker's message.
    pub priority: u8,
    /// Whose it is: queues get the device by their shares, and the requesters of a queue get equal shares. A background
    /// task only fills up batches until it has waited long.
    pub owner: Owner,
    /// Changed by the worker (claim, withdraw, commit) and by the loop of one-pass models (commit).
    stage: AtomicU8,
    /// Set by the worker. Read by the model thread between passes, and by the worker's own threads.
    cancelled: AtomicBool,
}

impl TaskState {
    /// The state of a task that was just accepted.
    pub fn new(name: TaskName, deadline: Option<Instant>) -> Self {
        Self {
            name,
            deadline,
            priority: 0,
            owner: Owner::default(),
            stage: AtomicU8::new(ENQUEUED),
            cancelled: AtomicBool::new(false),
        }
    }

    /// Commits this worker to answer the task without computing it. Returns false if the task was committed or
    /// withdrawn before.
    pub fn claim(&self) -> bool {
        self.stage.compare_exchange(ENQUEUED, COMMITTED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Commits this worker to answer the task. Returns false if the task has been withdrawn.
    pub fn commit(&self) -> bool {
        let exchanged = self.stage.compare_exchange(ENQUEUED, COMMITTED, Ordering::AcqRel, Ordering::Acquire);
        exchanged.is_ok() || exchanged == Err(COMMITTED)
    }

    /// Marks the task as one that goes back to the broker. Returns false if it is committed or withdrawn already. A
    /// one-pass task is committed when its batch begins; a task with sequences is committed when they have ended.
    pub fn withdraw(&self) -> bool {
        self.stage.compare_exchange(ENQUEUED, WITHDRAWN, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Records that the answer is no longer wanted: inputs that wait for the device are dropped, sequences end between
    /// two steps, and the task is answered with an error.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Why the answer is no longer wanted; none if it is wanted.
    pub fn unwanted(&self, now: Instant) -> Option<TaskError> {
        let is_late = self.deadline.is_some_and(|deadline| deadline <= now);
        let message = "the task's deadline passed before its answer was complete";
        let late = || is_late.then(|| TaskError::new(TaskErrorKind::Expired, message));
        self.cancellation().or_else(late)
    }

    /// The error of the task if it was cancelled.
    pub fn cancellation(&self) -> Option<TaskError> {
        let is_cancelled = self.cancelled.load(Ordering::Acquire);
        is_cancelled.then(|| TaskError::new(TaskErrorKind::Cancelled, "the task was cancelled"))
    }

    /// Whether the task goes back to the broker.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.stage.load(Ordering::Acquire) == WITHDRAWN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_either_committed_or_withdrawn() {
        let state = || TaskState::new(TaskName { id: "t".into(), fingerprint: "f".into() }, None);
        let committed = state();
        assert!(committed.commit() && committed.commit() && !committed.withdraw());
        let withdrawn = state();
        assert!(withdrawn.withdraw() && !withdrawn.withdraw() && !withdrawn.commit());
        assert!(withdrawn.is_withdrawn() && !committed.is_withdrawn());
    }
}
