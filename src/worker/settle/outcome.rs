//! Decides a task's fate: what happened to it → what becomes of its message. One function with one exhaustive match;
//! `settle` carries out its decision. A task that is handed back before it reaches the device has no outcome: the
//! intake requeues it, in delivery order.

use std::time::Duration;

use crate::broker::Delay;
use crate::config::Retry;
use crate::protocol::admin::CANCEL;
use crate::protocol::dead_letter::Reason;
use crate::protocol::{Body, TaskError, TaskErrorKind};

/// What happened to a task.
#[derive(Debug)]
pub(in crate::worker) enum Outcome {
    /// The model's answer: the reply's body.
    Answered(Body),
    /// The task has no result.
    Failed(TaskError),
    /// The task killed the workers that computed it alone, so it was not computed again.
    Poison,
    /// `reply_to` names this queue, which no reply may go to: a task, retry or dead-letter queue.
    Misaddressed(String),
    /// The task has been delivered this often before, each time in vain.
    OutOfDeliveries(i64),
    /// Not a task but a control message of an unknown type.
    UnknownControl(String),
    /// The reply queue accepts nothing, so the task was not computed.
    Held(Held),
    /// Its requester has too many tasks here, so it was not computed.
    PutOff(WaitsFor),
    /// The task was not computed to its end, because this queue, its `reply_to`, does not exist any more.
    RequesterLeft(String),
}

/// A task that is not computed because its reply queue accepts nothing.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::worker) struct Held {
    pub(in crate::worker) queue: String,
    /// How long the task may still wait for the queue.
    pub(in crate::worker) left: Duration,
    /// The task may wait once more although it has no time left: another task is being computed in order to try the
    /// queue.
    pub(in crate::worker) may_wait_for_probe: bool,
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

/// What a task that is put off waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::worker) enum WaitsFor {
    /// Its reply queue, for `pool.reply_timeout` at most.
    ReplyQueue,
    /// Its turn to be prepared, for as long as that takes.
    Turn,
    /// A place, of which its requester holds too many. It may return soon: few tasks wait for this.
    Place,
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
    /// Dead letter, then ack, without an error reply: no queue would accept one.
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
        Outcome::PutOff(waits_for) => {
            let time = tries.time_left.unwrap_or(Duration::MAX);
            let longest = wait(tries.retry, time, tries.jitter).filter(|_| waits_for != WaitsFor::Place);
            Disposition::PutOff(longest.unwrap_or_else(|| shortest(tries)), waits_for)
        }
        Outcome::RequesterLeft(queue) => {
            let message = format!(
                "reply queue {queue:?} does not exist any more; the answer was not computed to its end"
            );
            Disposition::Park(Reason::Unroutable, TaskError::new(TaskErrorKind::Internal, message))
        }
    }
}

/// Puts the task off to a retry queue while it has time to wait. With no time left, the task becomes a dead letter,
/// unless it may wait for a probe whose result may let it be computed: then it is put off with the shortest delay.
fn hold(held: Held, tries: Tries<'_>) -> Disposition {
    let Held { queue, left, may_wait_for_probe } = held;
    match wait(tries.retry, left, tries.jitter) {
        Some(delay) => Disposition::PutOff(delay, WaitsFor::ReplyQueue),
        None if may_wait_for_probe => Disposition::PutOff(shortest(tries), WaitsFor::ReplyQueue),
        None => {
            let message = format!(
                "queue {queue:?} takes no message, and the time to wait for it is over; not computed"
            );
            Disposition::Park(Reason::Unconfirmed, TaskError::new(TaskErrorKind::Internal, message))
        }
    }
}

/// The shortest delay for which there is a retry queue.
fn shortest(tries: Tries<'_>) -> Delay {
    jittered(tries.retry.shortest(), tries.jitter)
}

/// The longest delay, up to [`Retry::PUT_OFF`], after which a task has some of its time left. None: it is too late for
/// any delay.
pub(super) fn wait(retry: &Retry, left: Duration, jitter: f64) -> Option<Delay> {
    let fits = |ceiling: &Duration| *ceiling <= Retry::PUT_OFF && *ceiling < left;
    retry.ceilings().into_iter().rfind(fits).map(|ceiling| jittered(ceiling, jitter))
}

/// A random delay between half of the ceiling and the ceiling, as by
/// [`Backoff::delay`](crate::backoff::Backoff::delay).
fn jittered(ceiling: Duration, jitter: f64) -> Delay {
    Delay { after: ceiling.mul_f64(0.5 + 0.5 * jitter.clamp(0.0, 1.0)), ceiling }
}

/// Tries the task again with a delay. After the last attempt, it becomes a dead letter and gets an error reply. If its
/// deadline is before the next attempt, it only gets an error reply.
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
    fn undecodable_tasks_are_dead_lettered_and_wrong_ones_answered_at_once() {
        use TaskErrorKind::{BadInput, Expired, Internal, TooLarge, Undecodable, UnknownModel, UnknownUrl};
        let undecodable = fate(Undecodable, 1, None);
        assert!(matches!(undecodable, Disposition::DeadLetter(Reason::Undecodable, _)));
        for kind in [BadInput, Expired, Internal, TooLarge, UnknownModel, UnknownUrl] {
            assert!(matches!(fate(kind, 1, None), Disposition::ReplyErrorAndAck(_)), "{kind:?}");
        }
    }

    #[test]
    fn transient_errors_are_retried_with_growing_delays_up_to_the_limit() {
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

    fn held(left: u64, may_wait_for_probe: bool) -> Disposition {
        let tries = Tries { retry: &RETRY, attempt: 1, time_left: None, jitter: 1.0 };
        let held = Held { queue: "q".into(), left: Duration::from_secs(left), may_wait_for_probe };
        disposition(Outcome::Held(held), tries)
    }

    #[test]
    fn a_held_task_is_put_off_while_time_remains_and_then_dead_lettered() {
        for (left, waits) in [(90, 15), (16, 15), (15, 2), (3, 2), (2, 1)] {
            let Disposition::PutOff(delay, WaitsFor::ReplyQueue) = held(left, false) else {
                panic!("{left} s are left")
            };
            assert_eq!((delay.ceiling.as_secs(), delay.after), (waits, delay.ceiling), "{left}");
        }
        assert!(matches!(held(1, false), Disposition::Park(Reason::Unconfirmed, _)));
        let Disposition::PutOff(delay, _) = held(0, true) else { panic!("the queue may take it again") };
        assert_eq!(delay.ceiling.as_secs(), 1);
    }

    #[test]
    fn a_crowded_task_is_put_off_until_shortly_before_its_deadline() {
        for (left, waits) in [(None, 15), (Some(10), 2), (Some(1), 1)] {
            let time_left = left.map(Duration::from_secs);
            let tries = Tries { retry: &RETRY, attempt: 1, time_left, jitter: 1.0 };
            for (waits_for, waits) in [(WaitsFor::Turn, waits), (WaitsFor::Place, 1)] {
                let Disposition::PutOff(delay, same) = disposition(Outcome::PutOff(waits_for), tries) else {
                    panic!("{left:?} s are left");
                };
                assert_eq!((delay.ceiling.as_secs(), same), (waits, waits_for), "{left:?}");
            }
        }
    }

    #[test]
    fn the_task_of_a_departed_requester_becomes_a_dead_letter() {
        let tries = Tries { retry: &RETRY, attempt: 1, time_left: None, jitter: 1.0 };
        let Disposition::Park(reason, error) = disposition(Outcome::RequesterLeft("q".into()), tries) else {
            panic!("the task is lost");
        };
        assert!(reason == Reason::Unroutable && error.message.contains("\"q\""), "{error}");
    }

    #[test]
    fn a_task_that_would_expire_before_its_retry_is_answered_now() {
        let left = Some(Duration::from_millis(900));
        assert!(matches!(fate(TaskErrorKind::Fault, 1, left), Disposition::ReplyErrorAndAck(_)));
        let left = Some(Duration::from_millis(1100));
        assert!(matches!(fate(TaskErrorKind::Fault, 1, left), Disposition::Retry(..)));
    }
}
