//! Where a task's fate is decided: what happened to it → what becomes of its message. One function,
//! one exhaustive match; `settle` carries out what it says. (A task that is taken back before it
//! reached the device has no outcome: the intake requeues it, in delivery order.)

use crate::protocol::dead_letter::Reason;
use crate::protocol::{TaskError, TaskErrorKind};

/// What happened to a task.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The model's answer: the reply's body.
    Answered(Vec<u8>),
    /// It cannot be answered with a result.
    Failed(TaskError),
    /// It killed the workers that computed it alone; it has not been computed again.
    Poison,
    /// It has been delivered this often before, each time in vain.
    OutOfAttempts(i64),
    /// Not a task but a control message of an unknown type.
    UnknownControl(String),
}

/// What becomes of its message.
#[derive(Debug)]
pub(super) enum Disposition {
    /// Reply, then ack.
    ReplyAndAck(Vec<u8>),
    /// Error reply, then ack.
    ReplyErrorAndAck(TaskError),
    /// Dead letter, error reply where it can be answered, then ack.
    DeadLetter(Reason, TaskError),
}

/// Decides.
pub(super) fn disposition(outcome: Outcome) -> Disposition {
    match outcome {
        Outcome::Answered(body) => Disposition::ReplyAndAck(body),
        Outcome::Failed(error) => match error.kind {
            TaskErrorKind::Undecodable => Disposition::DeadLetter(Reason::Undecodable, error),
            TaskErrorKind::BadInput
            | TaskErrorKind::UnknownModel
            | TaskErrorKind::Expired
            | TaskErrorKind::TooLarge
            | TaskErrorKind::Internal
            | TaskErrorKind::OutOfMemory => Disposition::ReplyErrorAndAck(error),
        },
        Outcome::Poison => {
            let words = "each worker that computed this task alone died of it; it is not tried again";
            Disposition::DeadLetter(Reason::Poison, TaskError::new(TaskErrorKind::Internal, words))
        }
        Outcome::OutOfAttempts(attempts) => {
            let words = format!("delivered {attempts} times without an answer; it is not tried again");
            Disposition::DeadLetter(Reason::Attempts, TaskError::new(TaskErrorKind::Internal, words))
        }
        Outcome::UnknownControl(kind) => {
            let words = format!("type {kind:?} is no control message that this version knows");
            let error = TaskError::new(TaskErrorKind::Undecodable, words).at("type");
            Disposition::DeadLetter(Reason::UnknownControl, error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_can_read_is_dead_lettered_and_what_is_merely_wrong_is_answered() {
        let fate = |kind| disposition(Outcome::Failed(TaskError::new(kind, "x")));
        assert!(matches!(fate(TaskErrorKind::Undecodable), Disposition::DeadLetter(Reason::Undecodable, _)));
        assert!(matches!(fate(TaskErrorKind::BadInput), Disposition::ReplyErrorAndAck(_)));
        assert!(matches!(fate(TaskErrorKind::Expired), Disposition::ReplyErrorAndAck(_)));
    }
}
