//! The state of one accepted task, from its acceptance to its ack: whether it is answered, handed back or
//! cancelled. Whoever moves it first decides. Owns nothing but flags.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Instant;

use crate::protocol::control::TaskName;
use crate::protocol::{TaskError, TaskErrorKind};
use crate::telemetry::traces::TaskLink;

const ENQUEUED: u8 = 0;
const COMMITTED: u8 = 1;
const WITHDRAWN: u8 = 2;

/// One accepted task.
pub struct TaskState {
    /// What the task is called.
    pub name: TaskName,
    /// Until when its answer is wanted.
    pub deadline: Option<Instant>,
    /// The broker's priority.
    pub priority: u8,
    /// Its span, where it is recorded, for the spans of its batches.
    pub link: Option<Box<TaskLink>>,
    /// Moved by the worker (withdraw, commit) and by the loop of one-pass models (commit).
    stage: AtomicU8,
    /// Written by the worker, read by the model thread between steps.
    cancelled: AtomicBool,
    /// The job was dropped: nobody waits for its outputs.
    abandoned: AtomicBool,
}

impl TaskState {
    /// A task that was just accepted.
    pub fn new(name: TaskName, deadline: Option<Instant>) -> Self {
        Self {
            name,
            deadline,
            priority: 0,
            link: None,
            stage: AtomicU8::new(ENQUEUED),
            cancelled: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
        }
    }

    /// The task will be answered by this worker. False: it has been withdrawn.
    pub fn commit(&self) -> bool {
        let moved = self.stage.compare_exchange(ENQUEUED, COMMITTED, Ordering::AcqRel, Ordering::Acquire);
        moved.is_ok() || moved == Err(COMMITTED)
    }

    /// The task goes back to the broker. False: it is committed, or withdrawn already. A task of one pass is
    /// committed when its batch begins; one with sequences when they have ended.
    pub fn withdraw(&self) -> bool {
        self.stage.compare_exchange(ENQUEUED, WITHDRAWN, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Nobody wants its answer any more: what waits for the device does not begin, and its sequences end
    /// between two steps. It is answered with an error.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Why its answer is not wanted any more, if it is not.
    pub fn unwanted(&self, now: Instant) -> Option<TaskError> {
        let is_late = self.deadline.is_some_and(|deadline| deadline <= now);
        let message = "the task's deadline passed before it was computed to its end";
        let late = || is_late.then(|| TaskError::new(TaskErrorKind::Expired, message));
        self.cancellation().or_else(late)
    }

    /// The error of a task that was cancelled.
    pub fn cancellation(&self) -> Option<TaskError> {
        let is_cancelled = self.cancelled.load(Ordering::Acquire);
        is_cancelled.then(|| TaskError::new(TaskErrorKind::Cancelled, "the task was cancelled"))
    }

    pub(super) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Release);
    }

    /// Nobody waits for its outputs: it is withdrawn, or its job was dropped.
    pub(super) fn is_over(&self) -> bool {
        self.stage.load(Ordering::Acquire) == WITHDRAWN || self.abandoned.load(Ordering::Acquire)
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
        assert!(withdrawn.is_over() && !committed.is_over());
        committed.abandon();
        assert!(committed.is_over());
    }
}
