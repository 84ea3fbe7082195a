//! Decides a task's fate: what happened to it → what becomes of its message. One function with one exhaustive
//! match; `settle` carries it out. (A task that is taken back before it reaches the device has no outcome: the
//! intake requeues it, in delivery order.)

use std::time::Duration;

use crate::broker::Delay;
use crate::config::Retry;
use crate::protocol::admin::CANCEL;
use crate::protocol::dead_letter::Reason;
use crate::protocol::{Body, TaskError, TaskErrorKind};

#[derive(Debug)]
pub(in crate::worker) enum Outcome {
    /// The model's answer: the reply's body.
    Answered(Body),
    /// The task has no result.
    Failed(TaskError),
    /// The task killed the workers that computed it alone; it was not computed again.
    Poison,
    /// `reply_to` names this queue, which no reply may go to: a task, retry or dead-letter queue.
    Misaddressed(String),
    /// The task has been delivered this often before, each time in vain.
    OutOfDeliveries(i64),
    /// Not a task but a control message of an unknown type.
    UnknownControl(String),
    /// The reply queue takes nothing, so the task was not computed.
    Held(Held),
    /// Too many tasks of its requester wait to be prepared, so it was not computed.
    Crowded,
    /// The task was not computed to its end, because this queue, its `reply_to`, does not exist any more.
    RequesterLeft(String),
}

/// A task whose reply queue takes nothing.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::worker) struct Held {
    pub(in crate::worker) queue: String,
    /// How long the task may still wait for the queue.
    pub(in crate::worker) left: Duration,
    /// The queue has refused a reply a moment ago. Otherwise another task is being computed in order to try it.
    pub(in crate::worker) is_refused: bool,
}

impl From<TaskError> for Outcome {
    fn from(error: TaskError) -> Self {
        Self::Failed(error)
    }
}

/// How a task may be tried again.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) struct Tries<'a> {
    pub(in crate::worker) retry: &'a Retry,
    /// Which attempt this was, counting from 1.
    pub(in crate::worker) attempt: u32,
    /// Time until the deadline; none if it has none.
    pub(in crate::worker) time_left: Option<Duration>,
    /// As [`Backoff::delay`](crate::backoff::Backoff::delay) takes it.
    pub(in crate::worker) jitter: f64,
}

/// What a task waits for that is put off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::worker) enum WaitsFor {
    /// For `pool.reply_timeout` at most.
    ReplyQueue,
    /// For as long as it takes.
    Turn,
}

/// What becomes of the task's message.
#[derive(Debug)]
pub(in crate::worker) enum Disposition {
    ReplyAndAck(Body),
    ReplyErrorAndAck(TaskError),
    /// Publish the task again with this delay, then ack.
    Retry(Delay, TaskError),
    /// The same, without counting an attempt.
    PutOff(Delay, WaitsFor),
    /// Dead letter, error reply if possible, then ack.
    DeadLetter(Reason, TaskError),
    /// Dead letter, then ack: no queue would take an error reply.
    Park(Reason, TaskError),
}

/// Maps an outcome to a disposition.
pub(in crate::worker) fn disposition(outcome: Outcome, tries: Tries<'_>) -> Disposition {
    match outcome {
        Outcome::Answered(body) => Disposition::ReplyAndAck(body),
        Outcome::Failed(error) => match error.kind {
            TaskErrorKind::Undecodable => Disposition::DeadLetter(Reason::Undecodable, error),
            TaskErrorKind::BadInput
            | TaskErrorKind::UnknownModel
            | TaskErrorKind::UnknownUrl
            | TaskErrorKind::Expired
            | TaskErrorKind::TooLarge
            | TaskErrorKind::Cancelled
            | TaskErrorKind::Internal => Disposition::ReplyErrorAndAck(error),
            TaskErrorKind::Fault | TaskErrorKind::OutOfMemory => try_again(error, tries),
        },
        Outcome::Poison => {
            let message = "each worker that computed this task alone died of it; it is not tried again";
            Disposition::DeadLetter(Reason::Poison, TaskError::new(TaskErrorKind::Internal, message))
        }
        Outcome::Misaddressed(queue) => {
            let message = format!(
                "reply_to is {queue:?}, a task, retry or dead-letter queue: a reply there would come back as a \
                 task, or be taken for a dead letter"
            );
            Disposition::DeadLetter(Reason::Unroutable, TaskError::bad_input("reply_to", message))
        }
        Outcome::OutOfDeliveries(deliveries) => {
            let message = format!("delivered {deliveries} times without an answer; it is not tried again");
            Disposition::DeadLetter(Reason::Attempts, TaskError::new(TaskErrorKind::Internal, message))
        }
        Outcome::UnknownControl(kind) => {
            let mut message = format!("type {kind:?} is no control message that this version knows");
            if kind == CANCEL {
                message = format!(
                    "{kind} is published to the exchange admin.control_exchange, not to a task queue"
                );
            }
            let error = TaskError::new(TaskErrorKind::Undecodable, message).at("type");
            Disposition::DeadLetter(Reason::UnknownControl, error)
        }
        Outcome::Held(held) => hold(held, tries),
        Outcome::Crowded => {
            let time = tries.time_left.unwrap_or(Duration::MAX);
            let delay = wait(tries.retry, time, tries.jitter);
            Disposition::PutOff(delay.unwrap_or_else(|| shortest(tries)), WaitsFor::Turn)
        }
        Outcome::RequesterLeft(queue) => {
            let message = format!(
                "reply queue {queue:?} does not exist any more; the answer was not computed to its end"
            );
            Disposition::Park(Reason::Unroutable, TaskError::new(TaskErrorKind::Internal, message))
        }
    }
}

/// Puts the task off to a retry queue, for as long as its time to wait allows. With no time left: a dead letter if the reply
/// queue is known to take nothing; the shortest delay if a probe is under way, because its result may let the task be
/// computed.
fn hold(held: Held, tries: Tries<'_>) -> Disposition {
    let Held { queue, left, is_refused } = held;
    match wait(tries.retry, left, tries.jitter) {
        Some(delay) => Disposition::PutOff(delay, WaitsFor::ReplyQueue),
        None if is_refused => {
            let message = format!(
                "queue {queue:?} takes no message, and the time to wait for it is over; not computed"
            );
            Disposition::Park(Reason::Unconfirmed, TaskError::new(TaskErrorKind::Internal, message))
        }
        None => Disposition::PutOff(shortest(tries), WaitsFor::ReplyQueue),
    }
}

/// The shortest delay for which there is a queue.
fn shortest(tries: Tries<'_>) -> Delay {
    within(tries.retry.ceilings().first().copied().unwrap_or(Retry::PUT_OFF), tries.jitter)
}

/// The longest delay, up to [`Retry::PUT_OFF`], after which a task has some of its time left; none: it is too late for
/// any.
pub(super) fn wait(retry: &Retry, left: Duration, jitter: f64) -> Option<Delay> {
    let fits = |ceiling: &Duration| *ceiling <= Retry::PUT_OFF && *ceiling < left;
    retry.ceilings().into_iter().rfind(fits).map(|ceiling| within(ceiling, jitter))
}

/// A delay in the upper half of its ceiling, as [`Backoff::delay`](crate::backoff::Backoff::delay) has it.
fn within(ceiling: Duration, jitter: f64) -> Delay {
    Delay { after: ceiling.mul_f64(0.5 + 0.5 * jitter.clamp(0.0, 1.0)), ceiling }
}

/// Another attempt. After the last one: a dead letter, and an error reply. If the deadline comes before the next one: only
/// an error reply.
fn try_again(error: TaskError, tries: Tries<'_>) -> Disposition {
    let Tries { retry, attempt, .. } = tries;
    if attempt >= retry.max_attempts {
        let message = format!("{} (attempt {attempt} of {})", error.message, retry.max_attempts);
        return Disposition::DeadLetter(Reason::Attempts, TaskError::new(error.kind, message));
    }
    let backoff = retry.backoff();
    let delay = Delay { after: backoff.delay(attempt, tries.jitter), ceiling: backoff.ceiling(attempt) };
    match tries.time_left {
        Some(left) if left <= delay.after => Disposition::ReplyErrorAndAck(error),
        _ => Disposition::Retry(delay, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETRY: Retry =
        Retry { max_attempts: 3, delay: Duration::from_secs(1), delay_max: Duration::from_secs(60) };

    fn fate(kind: TaskErrorKind, attempt: u32, time_left: Option<Duration>) -> Disposition {
        let tries = Tries { retry: &RETRY, attempt, time_left, jitter: 1.0 };
        disposition(Outcome::Failed(TaskError::new(kind, "x")), tries)
    }

    #[test]
    fn what_nobody_can_read_is_dead_lettered_and_what_is_merely_wrong_is_answered_at_once() {
        use TaskErrorKind::{BadInput, Expired, Internal, TooLarge, Undecodable, UnknownModel, UnknownUrl};
        let undecodable = fate(Undecodable, 1, None);
        assert!(matches!(undecodable, Disposition::DeadLetter(Reason::Undecodable, _)));
        for kind in [BadInput, Expired, Internal, TooLarge, UnknownModel, UnknownUrl] {
            assert!(matches!(fate(kind, 1, None), Disposition::ReplyErrorAndAck(_)), "{kind:?}");
        }
    }

    #[test]
    fn what_may_pass_later_is_tried_again_with_growing_delays_until_its_attempts_are_spent() {
        for kind in [TaskErrorKind::Fault, TaskErrorKind::OutOfMemory] {
            let delays = [1, 2].map(|attempt| match fate(kind, attempt, None) {
                Disposition::Retry(delay, _) => (delay.after.as_secs(), delay.ceiling.as_secs()),
                other => panic!("{other:?}"),
            });
            assert_eq!(delays, [(1, 1), (2, 2)]);
            for attempt in [3, 4, u32::MAX] {
                let Disposition::DeadLetter(Reason::Attempts, error) = fate(kind, attempt, None) else {
                    panic!("tried for ever");
                };
                assert_eq!(error.kind, kind);
                assert!(error.message.contains("of 3"), "{error}");
            }
        }
    }

    fn held(left: u64, is_refused: bool) -> Disposition {
        let tries = Tries { retry: &RETRY, attempt: 1, time_left: None, jitter: 1.0 };
        let held = Held { queue: "q".into(), left: Duration::from_secs(left), is_refused };
        disposition(Outcome::Held(held), tries)
    }

    #[test]
    fn a_task_whose_reply_queue_takes_nothing_waits_as_long_as_it_has_time_and_is_not_computed_then() {
        for (left, waits) in [(90, 15), (16, 15), (15, 2), (3, 2), (2, 1)] {
            let Disposition::PutOff(delay, WaitsFor::ReplyQueue) = held(left, true) else {
                panic!("{left} s are left")
            };
            assert_eq!((delay.ceiling.as_secs(), delay.after), (waits, delay.ceiling), "{left}");
        }
        assert!(matches!(held(1, true), Disposition::Park(Reason::Unconfirmed, _)));
        let Disposition::PutOff(delay, _) = held(0, false) else { panic!("the queue may take it again") };
        assert_eq!(delay.ceiling.as_secs(), 1);
    }

    #[test]
    fn a_task_that_waits_for_its_turn_is_put_off_until_shortly_before_its_deadline() {
        for (left, waits) in [(None, 15), (Some(10), 2), (Some(1), 1)] {
            let time_left = left.map(Duration::from_secs);
            let tries = Tries { retry: &RETRY, attempt: 1, time_left, jitter: 1.0 };
            let Disposition::PutOff(delay, WaitsFor::Turn) = disposition(Outcome::Crowded, tries) else {
                panic!("{left:?} s are left");
            };
            assert_eq!(delay.ceiling.as_secs(), waits, "{left:?}");
        }
    }

    #[test]
    fn a_requester_that_has_left_has_not_cancelled_its_task() {
        let tries = Tries { retry: &RETRY, attempt: 1, time_left: None, jitter: 1.0 };
        let Disposition::Park(reason, error) = disposition(Outcome::RequesterLeft("q".into()), tries) else {
            panic!("the task is lost");
        };
        assert!(reason == Reason::Unroutable && error.message.contains("\"q\""), "{error}");
    }

    #[test]
    fn a_task_that_would_be_expired_by_then_is_answered_now() {
        let left = Some(Duration::from_millis(900));
        assert!(matches!(fate(TaskErrorKind::Fault, 1, left), Disposition::ReplyErrorAndAck(_)));
        let left = Some(Duration::from_millis(1100));
        assert!(matches!(fate(TaskErrorKind::Fault, 1, left), Disposition::Retry(..)));
    }
}
