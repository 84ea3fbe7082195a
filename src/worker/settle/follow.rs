//! Decides the next step after a publish, from what was published for a task and what became of it, in one function
//! with an exhaustive match. Publishing a dead letter is not handled here: `publishing` repeats it until it is
//! confirmed, so there is nothing to decide.

use crate::broker::Delay;
use crate::protocol::dead_letter::Reason;
use crate::protocol::raw_text::visible;
use crate::protocol::{TaskError, TaskErrorKind};

/// What is known of a published message when it is confirmed or given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PublishOutcome {
    Confirmed,
    Unroutable,
    /// The broker will never accept it, for this reason.
    Refused(String),
    /// It was not confirmed in time, for this reason. The broker may or may not have it.
    Unconfirmed(String),
    /// It waited for a queue that accepts nothing, and was dropped because too many tasks wait for such queues
    /// (`stalled`). The broker does not have it.
    Evicted(String),
}

/// What was published.
#[derive(Clone, Copy, Debug)]
pub(super) enum Publication<'a> {
    /// The task, for another attempt after this error.
    NextAttempt(&'a TaskError),
    /// The task, which is put off before it is computed ([`WaitsFor`](super::WaitsFor) has the reasons).
    PutOff,
    /// The task, after its computed reply was not accepted by the reply queue, for this reason.
    PutOffAfterReply(&'a str),
    Reply(Reply<'a>),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Reply<'a> {
    pub(super) queue: &'a str,
    pub(super) bytes: usize,
    /// The error that it reports; none for a result.
    pub(super) error: Option<&'a TaskError>,
    pub(super) dead_lettering: DeadLettering,
    /// It is an error reply that replaces a reply that the broker refused.
    pub(super) is_second: bool,
    /// The delay with which the task is put off, once this reply is evicted. None: the task has no time left or cannot
    /// be put off, so it becomes a dead letter.
    pub(super) delay: Option<Delay>,
}

/// Whether a task whose reply cannot be published may become a dead letter, which must not happen twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeadLettering {
    /// The task may become a dead letter.
    Allowed,
    /// The task has already become one.
    Done,
    /// The task was cancelled on request. It becomes a dead letter, unless its reply queue is gone: then nobody wants
    /// it any more.
    UnlessUnroutable,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The task is acked.
    Ack,
    /// The task is acked although its error reply could not be published, for this reason.
    AckWithoutReply(String),
    /// It is answered with this error instead.
    ReplyError(TaskError),
    /// It is published again with this delay, for this reason.
    PutOff(Delay, String),
    /// It cannot be put off, so it is computed.
    Compute,
    /// The task is published as a dead letter, then acked.
    DeadLetter(Reason, TaskError),
    /// The task is published as a dead letter, answered with the error if possible, then acked.
    DeadLetterAndReply(Reason, TaskError),
}

pub(super) fn next_step(sent: PublishOutcome, publication: Publication<'_>) -> Next {
    match publication {
        Publication::NextAttempt(error) => {
            match failure(sent, "there is no queue to wait in for another attempt") {
                None => Next::Ack,
                Some(message) => {
                    let error = TaskError::new(error.kind, format!("{error}; {message}"));
                    Next::DeadLetterAndReply(Reason::Attempts, error)
                }
            }
        }
        Publication::PutOff => match sent {
            PublishOutcome::Confirmed => Next::Ack,
            // The broker may have the message. If the task were also computed here, it would be answered twice.
            PublishOutcome::Unconfirmed(message) => unconfirmed(message),
            PublishOutcome::Unroutable | PublishOutcome::Refused(_) | PublishOutcome::Evicted(_) => {
                Next::Compute
            }
        },
        Publication::PutOffAfterReply(reason) => match failure(sent, "there is no queue to wait in") {
            None => Next::Ack,
            Some(message) => unconfirmed(format!("{reason}; {message}")),
        },
        Publication::Reply(reply) => after_reply(sent, reply),
    }
}

fn after_reply(sent: PublishOutcome, reply: Reply<'_>) -> Next {
    let Reply { queue, bytes, error, dead_lettering, is_second, delay } = reply;
    let (reason, message) = match sent {
        PublishOutcome::Confirmed => return Next::Ack,
        PublishOutcome::Refused(refusal) if !is_second => {
            let message = format!("the broker refuses the reply of {bytes} bytes: {refusal}");
            return Next::ReplyError(TaskError::new(TaskErrorKind::TooLarge, message));
        }
        PublishOutcome::Unroutable => {
            (Reason::Unroutable, format!("reply queue \"{}\" does not exist", visible(queue)))
        }
        // The error reply is refused too: no reply can reach this queue.
        PublishOutcome::Refused(refusal) => {
            (Reason::Unroutable, format!("reply queue \"{}\": {refusal}", visible(queue)))
        }
        PublishOutcome::Unconfirmed(message) => (Reason::Unconfirmed, message),
        PublishOutcome::Evicted(message) => match delay {
            Some(delay) if dead_lettering == DeadLettering::Allowed => return Next::PutOff(delay, message),
            _ => (Reason::Unconfirmed, message),
        },
    };
    match (dead_lettering, reason, error) {
        (DeadLettering::Done, ..) => Next::AckWithoutReply(message),
        (DeadLettering::UnlessUnroutable, Reason::Unroutable, _) => Next::Ack,
        // The task itself is refused: if it were computed again, it would be refused again.
        (_, Reason::Unroutable, Some(error)) if error.kind.is_refusal() => {
            let message = format!("{error}; {message}");
            Next::DeadLetter(Reason::Refused, TaskError::new(TaskErrorKind::Internal, message))
        }
        _ => Next::DeadLetter(reason, TaskError::new(TaskErrorKind::Internal, message)),
    }
}

fn unconfirmed(message: String) -> Next {
    Next::DeadLetter(Reason::Unconfirmed, TaskError::new(TaskErrorKind::Internal, message))
}

/// Why a publish is not confirmed. None if it is.
fn failure(sent: PublishOutcome, no_queue: &str) -> Option<String> {
    match sent {
        PublishOutcome::Confirmed => None,
        PublishOutcome::Unroutable => Some(no_queue.to_owned()),
        PublishOutcome::Refused(message)
        | PublishOutcome::Unconfirmed(message)
        | PublishOutcome::Evicted(message) => Some(message),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const DELAY: Delay = Delay { after: Duration::from_secs(1), ceiling: Duration::from_secs(2) };

    fn reply(dead_lettering: DeadLettering) -> Reply<'static> {
        Reply { queue: "q", bytes: 9, error: None, dead_lettering, is_second: false, delay: Some(DELAY) }
    }

    fn every_failure() -> [PublishOutcome; 4] {
        let message = || "w".to_owned();
        [
            PublishOutcome::Unroutable,
            PublishOutcome::Refused(message()),
            PublishOutcome::Unconfirmed(message()),
            PublishOutcome::Evicted(message()),
        ]
    }

    #[test]
    fn a_confirm_leads_to_an_ack_whatever_was_published() {
        let error = TaskError::internal("x");
        for publication in [
            Publication::NextAttempt(&error),
            Publication::PutOff,
            Publication::PutOffAfterReply("full"),
            Publication::Reply(reply(DeadLettering::Allowed)),
            Publication::Reply(reply(DeadLettering::UnlessUnroutable)),
        ] {
            assert_eq!(next_step(PublishOutcome::Confirmed, publication), Next::Ack, "{publication:?}");
        }
    }

    #[test]
    fn an_unpublished_reply_leads_to_a_dead_letter_or_another_try() {
        let next =
            every_failure().map(|sent| next_step(sent, Publication::Reply(reply(DeadLettering::Allowed))));
        assert!(
            matches!(&next[0], Next::DeadLetter(Reason::Unroutable, error) if error.message.contains("\"q\""))
        );
        assert!(matches!(&next[1], Next::ReplyError(error) if error.message.contains("9 bytes")));
        assert!(matches!(&next[2], Next::DeadLetter(Reason::Unconfirmed, _)));
        assert!(matches!(&next[3], Next::PutOff(DELAY, _)));
        let late = Reply { delay: None, ..reply(DeadLettering::Allowed) };
        let evicted = next_step(PublishOutcome::Evicted("w".into()), Publication::Reply(late));
        assert!(matches!(evicted, Next::DeadLetter(Reason::Unconfirmed, _)), "its time is over");
        let second = Reply { is_second: true, ..reply(DeadLettering::Allowed) };
        let refused = next_step(PublishOutcome::Refused("w".into()), Publication::Reply(second));
        assert!(matches!(refused, Next::DeadLetter(Reason::Unroutable, _)));
    }

    #[test]
    fn cancelled_tasks_are_not_recomputed_and_dead_letters_not_duplicated() {
        let cancelled = every_failure()
            .map(|sent| next_step(sent, Publication::Reply(reply(DeadLettering::UnlessUnroutable))));
        assert_eq!(cancelled[0], Next::Ack, "nobody wants it any more");
        assert!(matches!(cancelled[3], Next::DeadLetter(Reason::Unconfirmed, _)));
        let second = Reply { is_second: true, ..reply(DeadLettering::Done) };
        for sent in every_failure() {
            assert!(matches!(next_step(sent, Publication::Reply(second)), Next::AckWithoutReply(_)));
        }
    }

    #[test]
    fn a_refusal_that_reaches_nobody_is_parked_as_refused() {
        let error = TaskError::bad_input("input", "is missing");
        let refused = Reply { error: Some(&error), ..reply(DeadLettering::Allowed) };
        let Next::DeadLetter(reason, parked) =
            next_step(PublishOutcome::Unroutable, Publication::Reply(refused))
        else {
            panic!("it is not parked");
        };
        assert_eq!(reason, Reason::Refused);
        assert!(parked.message.contains("is missing") && parked.message.contains("\"q\""), "{parked}");
    }

    #[test]
    fn without_a_retry_queue_a_task_is_computed_or_becomes_a_dead_letter() {
        assert_eq!(next_step(PublishOutcome::Unroutable, Publication::PutOff), Next::Compute);
        let unsure = next_step(PublishOutcome::Unconfirmed("w".into()), Publication::PutOff);
        assert!(matches!(unsure, Next::DeadLetter(Reason::Unconfirmed, _)), "it may be in its queue");
        let error = TaskError::new(TaskErrorKind::Fault, "x");
        for sent in every_failure() {
            let Next::DeadLetterAndReply(Reason::Attempts, parked) =
                next_step(sent, Publication::NextAttempt(&error))
            else {
                panic!("it is lost");
            };
            assert!(parked.kind == TaskErrorKind::Fault && parked.message.starts_with("x; "), "{parked}");
        }
        for sent in every_failure() {
            let next = next_step(sent, Publication::PutOffAfterReply("full"));
            assert!(matches!(next, Next::DeadLetter(Reason::Unconfirmed, _)));
        }
    }
}
