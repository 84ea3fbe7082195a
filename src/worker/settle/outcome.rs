//! Decides what becomes of a task's message from what happened to the task, in one function with an exhaustive match.
//! `settle` carries out the decision. A task that is handed back before it reaches the device has no outcome: the
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
    /// Every worker that computed this task as the only one in its batch crashed. It is not computed again.
    Poison,
    /// `reply_to` names this queue, which no reply may go to: a task, retry or dead-letter queue.
    Misaddressed(String),
    /// The task has been delivered this many times before, without an answer.
    OutOfDeliveries(i64),
    /// Not a task but a control message of an unknown type.
    UnknownControl(String),
    /// The reply queue accepts nothing, so the task was not computed.
    ReplyQueueBlocked(ReplyQueueBlocked),
    /// The task must wait before it can be computed; this says what for.
    PutOff(WaitsFor),
    /// The task was not computed to its end, because this queue, its `reply_to`, does not exist any more.
    RequesterLeft(String),
}

/// Why a task is not computed: its reply queue accepts nothing.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::worker) struct ReplyQueueBlocked {
    /// The reply queue.
    pub(in crate::worker) queue: String,
    /// How long the task may still wait for the queue.
    pub(in crate::worker) time_left: Duration,
    /// Another task is being computed as a trial: its reply shows whether the queue accepts messages again. This task
    /// may wait for the result, even if `time_left` is zero.
    pub(in crate::worker) may_wait_for_trial: bool,
}

impl From<TaskError> for Outcome {
    fn from(error: TaskError) -> Self {
        Self::Failed(error)
    }
}

/// The values that decide whether and when a task is tried again.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) struct Tries<'a> {
    pub(in crate::worker) retry: &'a Retry,
    /// Which attempt this was, counting from 1.
    pub(in crate::worker) attempt: u32,
    /// Time until the deadline; none if it has none.
    pub(in crate::worker) time_left: Option<Duration>,
    /// A random number from 0 to 1, as [`Backoff::delay`](crate::backoff::Backoff::delay) takes it.
    pub(in crate::worker) jitter: f64,
}

/// What a task that is put off waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::worker) enum WaitsFor {
    /// Its reply queue accepts nothing. The task waits for `pool.reply_timeout` at most.
    ReplyQueue,
    /// Fetched files hold too many bytes for those of this task. The task is put off as often as necessary.
    Memory,
}

/// What becomes of the task's message.
#[derive(Debug)]
pub(in crate::worker) enum Disposition {
    /// Publish the reply, then ack.
    ReplyAndAck(Body),
    /// Publish the error as the reply, then ack.
    ReplyErrorAndAck(TaskError),
    /// Publish the task again with this delay after this error, then ack.
    Retry(Delay, TaskError),
    /// The same, without counting an attempt.
    PutOff(Delay, WaitsFor),
    /// Publish a dead letter, then the error reply if possible, then ack.
    DeadLetter(Reason, TaskError),
    /// Publish a dead letter, then ack. No error reply: no queue would accept one.
    DeadLetterOnly(Reason, TaskError),
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
            TaskErrorKind::Fault | TaskErrorKind::Unavailable | TaskErrorKind::OutOfMemory => {
                try_again(error, tries)
            }
        },
        Outcome::Poison => {
            let message = "every worker that computed this task as the only one in its batch crashed; it is not \
                           tried again";
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
            let error = TaskError::new(TaskErrorKind::Undecodable, message).with_param("type");
            Disposition::DeadLetter(Reason::UnknownControl, error)
        }
        Outcome::ReplyQueueBlocked(blocked) => put_off_or_dead_letter(blocked, tries),
        Outcome::PutOff(waits_for) => {
            let time_left = tries.time_left.unwrap_or(Duration::MAX);
            let longest = longest_delay(tries.retry, time_left, tries.jitter);
            Disposition::PutOff(longest.unwrap_or_else(|| shortest_delay(tries)), waits_for)
        }
        Outcome::RequesterLeft(queue) => {
            let message = format!(
                "reply queue {queue:?} does not exist any more; the answer was not computed to its end"
            );
            Disposition::DeadLetterOnly(Reason::Unroutable, TaskError::new(TaskErrorKind::Internal, message))
        }
    }
}

/// Puts the task off to a retry queue while it has time to wait. With no time left, it is put off with the shortest
/// delay if it may wait for a trial; otherwise it becomes a dead letter.
fn put_off_or_dead_letter(blocked: ReplyQueueBlocked, tries: Tries<'_>) -> Disposition {
    let ReplyQueueBlocked { queue, time_left, may_wait_for_trial } = blocked;
    match longest_delay(tries.retry, time_left, tries.jitter) {
        Some(delay) => Disposition::PutOff(delay, WaitsFor::ReplyQueue),
        None if may_wait_for_trial => Disposition::PutOff(shortest_delay(tries), WaitsFor::ReplyQueue),
        None => {
            let message = format!(
                "queue {queue:?} takes no message, and the time to wait for it is over; not computed"
            );
            Disposition::DeadLetterOnly(Reason::Unconfirmed, TaskError::new(TaskErrorKind::Internal, message))
        }
    }
}

/// The shortest delay for which there is a retry queue.
fn shortest_delay(tries: Tries<'_>) -> Delay {
    jittered(tries.retry.shortest(), tries.jitter)
}

/// The longest delay, up to [`Retry::PUT_OFF`], that is shorter than `time_left`. None: every delay is too long.
/// `jitter` is from 0 to 1.
pub(super) fn longest_delay(retry: &Retry, time_left: Duration, jitter: f64) -> Option<Delay> {
    let fits = |ceiling: &Duration| *ceiling <= Retry::PUT_OFF && *ceiling < time_left;
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
        for kind in [TaskErrorKind::Fault, TaskErrorKind::Unavailable, TaskErrorKind::OutOfMemory] {
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

    fn blocked(left: u64, may_wait_for_trial: bool) -> Disposition {
        let tries = Tries { retry: &RETRY, attempt: 1, time_left: None, jitter: 1.0 };
        let time_left = Duration::from_secs(left);
        let blocked = ReplyQueueBlocked { queue: "q".into(), time_left, may_wait_for_trial };
        disposition(Outcome::ReplyQueueBlocked(blocked), tries)
    }

    #[test]
    fn a_task_with_a_blocked_reply_queue_is_put_off_until_its_time_is_over() {
        for (left, waits) in [(90, 15), (16, 15), (15, 2), (3, 2), (2, 1)] {
            let Disposition::PutOff(delay, WaitsFor::ReplyQueue) = blocked(left, false) else {
                panic!("{left} s are left")
            };
            assert_eq!((delay.ceiling.as_secs(), delay.after), (waits, delay.ceiling), "{left}");
        }
        assert!(matches!(blocked(1, false), Disposition::DeadLetterOnly(Reason::Unconfirmed, _)));
        let Disposition::PutOff(delay, _) = blocked(0, true) else { panic!("the queue may take it again") };
        assert_eq!(delay.ceiling.as_secs(), 1);
    }

    #[test]
    fn a_task_that_is_put_off_gets_the_longest_delay_before_its_deadline() {
        for (left, waits) in [(None, 15), (Some(10), 2), (Some(1), 1)] {
            let time_left = left.map(Duration::from_secs);
            let tries = Tries { retry: &RETRY, attempt: 1, time_left, jitter: 1.0 };
            let outcome = Outcome::PutOff(WaitsFor::Memory);
            let Disposition::PutOff(delay, WaitsFor::Memory) = disposition(outcome, tries) else {
                panic!("{left:?} s are left");
            };
            assert_eq!(delay.ceiling.as_secs(), waits, "{left:?}");
        }
    }

    #[test]
    fn the_task_of_a_departed_requester_becomes_a_dead_letter() {
        let tries = Tries { retry: &RETRY, attempt: 1, time_left: None, jitter: 1.0 };
        let Disposition::DeadLetterOnly(reason, error) =
            disposition(Outcome::RequesterLeft("q".into()), tries)
        else {
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
