//! Carries out what `outcome` and `follow` decide: publish, confirm, ack, always in this order (`confirm-before-ack`).
//! A delivery of a session that is over is not settled, because the broker has taken it back. Owns nothing.
//!
//! | file | decides |
//! |---|---|
//! | `outcome` | what becomes of a task's message, from what happened to the task |
//! | `follow` | what is done after a publish, from what was published and what became of it |
//! | `publishing` | how long to wait for a queue that does not accept a message |
//! | `breaker` | which tasks are computed although their reply queue accepted nothing lately |
//! | `stalled` | how many computed replies may wait for such queues |
//! | `parts` | when parts of a reply are sent |
//! | `counting` | which values of an answer are counted |
//! | `error_log` | which errors of tasks are logged |

mod breaker;
mod counting;
mod error_log;
mod follow;
mod outcome;
mod parts;
mod publishing;
mod stalled;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use tokio::time::timeout;

use self::breaker::Admission;
use self::counting::Answered;
use self::follow::{DeadLettering, Next, Publication, PublishOutcome, Reply, next_step};
use self::outcome::{Disposition, Tries, disposition, longest_delay};
use self::publishing::{Destination, QueueOwner};
use super::WorkerError;
use super::report::{Counters, Traced};
use crate::broker::{Acker, Delay, DeliveryTag, Publisher, Source};
use crate::config::{Retry, TaskQueue};
use crate::protocol::control::CrashRecord;
use crate::protocol::dead_letter::{Cause, Reason, dead_letter, with_deaths};
use crate::protocol::reply::reply;
use crate::protocol::{Body, Message, Task, TaskError, TaskErrorKind, Timings, WorkerInfo};
use crate::shutdown::{Phase, Stop};

pub(super) use self::breaker::{Breakers, Trial};
pub(super) use self::error_log::ErrorLog;
pub(super) use self::outcome::{Outcome, ReplyQueueBlocked, WaitsFor};
pub(super) use self::parts::{Parts, PartsAnswered};
pub(super) use self::stalled::Stalled;

/// After this time an unconfirmed reply counts as stalled; see [`Stalled`] and [`Breakers`].
const STALLED_AFTER: Duration = Duration::from_secs(2);
/// The least time for publishing a reply, however close the task's deadline is.
const MIN_PUBLISH_TIME: Duration = Duration::from_secs(1);
/// How long a task with no time left may wait for the trial of its reply queue.
const TRIAL_TIME: Duration = Duration::from_secs(5);
/// How long finished results are still published once the worker hands tasks back.
const PUBLISH_GRACE: Duration = Duration::from_secs(4);
/// How often a waiting publish checks whether the broker accepts messages.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// What settling a task needs; shared by all tasks of a worker.
pub(super) struct Settlement {
    pub(super) acker: Arc<dyn Acker>,
    pub(super) publisher: Arc<dyn Publisher>,
    pub(super) worker_info: WorkerInfo,
    pub(super) queues: Queues,
    pub(super) retry: Retry,
    pub(super) queue_timeouts: QueueTimeouts,
    /// Tasks that wait for a reply queue that accepts nothing.
    pub(super) stalled: Stalled,
    /// Reply queues that accept nothing.
    pub(super) breakers: Breakers,
    pub(super) counters: Arc<Counters>,
    pub(super) error_log: ErrorLog,
    pub(super) stop: Stop,
    /// For each source, the number of the latest session that is over. Written by the intake, read before a reply is
    /// published: a task of that session will be delivered again, and should not be answered twice.
    pub(super) lost_sessions: Vec<AtomicU64>,
}

/// The pool's queues, and the queues that no reply may go to.
pub(super) struct Queues {
    /// The queues that tasks come from, by source.
    pub(super) tasks: Vec<TaskQueue>,
    pub(super) reply: Option<String>,
    pub(super) dead_letter: String,
    /// Task queues and dead-letter queues of all pools.
    pub(super) reserved: Vec<String>,
}

/// How long to wait for a queue that does not accept a message.
#[derive(Clone, Copy)]
pub(super) struct QueueTimeouts {
    /// For a requester's queue: `pool.reply_timeout`.
    pub(super) requester: Duration,
    /// For the pool's own queues: three quarters of the broker's delivery timeout, at which it takes back the delivery.
    pub(super) pool: Duration,
}

/// A task that is accepted and not yet acked, or a control message of an unknown type.
pub(super) struct Accepted {
    pub(super) task: Arc<Task>,
    pub(super) delivery: DeliveryTag,
    /// The number of earlier deliveries of this message. If the broker does not count them and only reports that there
    /// were some, it is 1.
    pub(super) redeliveries: i64,
    /// Whether the broker counts deliveries.
    pub(super) is_counted: bool,
    /// The time after which the answer is not wanted. An unreadable one becomes the task's error in its run.
    pub(super) deadline: Option<SystemTime>,
    /// The record of workers that died with this task on their device.
    pub(super) deaths: Option<CrashRecord>,
    /// Resolves when the broker has answered the parts of the reply, which are published before it. None if the reply
    /// has no parts.
    pub(super) parts: Option<PartsAnswered>,
    /// The task's span, which ends when this is dropped.
    pub(super) traced: Traced,
}

/// Whether a task is settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Settled {
    Yes,
    /// The task was to be put off, but no retry queue has taken it, so it must be computed.
    MustCompute,
}

impl Accepted {
    pub(super) fn new(task: Task, delivery: DeliveryTag, redeliveries: i64, is_counted: bool) -> Self {
        let (deadline, task) = (task.deadline().ok().flatten(), Arc::new(task));
        Self {
            task,
            delivery,
            redeliveries,
            is_counted,
            deadline,
            deaths: None,
            parts: None,
            traced: Traced::off(),
        }
    }

    /// Returns the number of this attempt, for the reply. Earlier attempts count if they failed, or if a worker died
    /// with the task, unless the task was in an isolated group of several. A drain or a lost connection that hands a
    /// task back does not count.
    pub(super) fn attempt(&self) -> i64 {
        let deaths = self.deaths.as_ref().map_or(0, |deaths| deaths.count);
        i64::from(self.task.attempt()) + i64::from(deaths)
    }

    /// Time until the deadline; none if it has none.
    pub(super) fn time_left(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.duration_since(SystemTime::now()).unwrap_or_default())
    }
}

impl Queues {
    /// The queue to which a task from `source` returns when it is tried again: its own, or the first one.
    fn returns_to(&self, source: Source) -> &str {
        let own = &self.tasks[source.0];
        if own.returns_to_first { &self.tasks[Source::FIRST.0].name } else { &own.name }
    }

    /// The queue for the task's reply. None: the task has none, or no reply may go there.
    fn for_reply<'a>(&'a self, task: &'a Task) -> Option<&'a str> {
        match task.reply_to() {
            Some(queue) => Some(queue).filter(|queue| !self.is_reserved(queue)),
            None => self.reply.as_deref(),
        }
    }

    /// Whether a reply in this queue would come back as a task, or be taken for a dead letter.
    pub(super) fn is_reserved(&self, queue: &str) -> bool {
        let is_retry_of =
            |other: &String| queue.strip_prefix(other.as_str()).is_some_and(|it| it.starts_with(".retry"));
        queue == self.dead_letter
            || self.tasks.iter().any(|tasks| queue == tasks.name || is_retry_of(&tasks.name))
            || self.reserved.iter().any(|other| queue == other || is_retry_of(other))
    }
}

impl Settlement {
    /// Decides whether a task is computed now. With a trial, the task tries its reply queue for as long as the trial
    /// exists. Tasks of the short form `background_queue` are always computed, because they would return through the task
    /// queue.
    ///
    /// # Errors
    /// [`ReplyQueueBlocked`]: the task is to be put off, because its reply queue accepts nothing.
    pub(super) fn admit(&self, accepted: &Accepted) -> Result<Option<Trial<'_>>, ReplyQueueBlocked> {
        let Some(queue) =
            self.queues.for_reply(&accepted.task).filter(|queue| !self.is_pool_reply_queue(queue))
        else {
            return Ok(None);
        };
        if self.queues.tasks[accepted.delivery.source.0].returns_to_first {
            return Ok(None);
        }
        let blocked = |is_on_trial: bool| {
            let time_left = self.time_to_wait(accepted);
            // The header with the time of the first put-off comes with the message, so a requester can set it. Without
            // this limit, a task with an old time would be put off again and again for as long as the trial takes.
            let may_wait_for_trial = is_on_trial
                && self.time_since_first_put_off(accepted) < self.queue_timeouts.requester + TRIAL_TIME;
            ReplyQueueBlocked { queue: queue.to_owned(), time_left, may_wait_for_trial }
        };
        match self.breakers.admit(queue, tokio::time::Instant::now()) {
            Admission::Compute => Ok(None),
            Admission::Trial(trial) => Ok(Some(trial)),
            Admission::OnTrial => Err(blocked(true)),
            Admission::Refused => Err(blocked(false)),
        }
    }

    /// Settles one task.
    ///
    /// # Errors
    /// [`WorkerError`] if the broker cannot be used: the task stays unacked.
    pub(super) async fn settle(
        &self,
        accepted: &Accepted,
        outcome: Outcome,
        timings: &Timings,
    ) -> Result<Settled, WorkerError> {
        let source = accepted.delivery.source;
        if accepted.delivery.is_over_with(source, self.lost_sessions[source.0].load(Ordering::Acquire)) {
            return Ok(Settled::Yes);
        }
        let tries = Tries {
            retry: &self.retry,
            attempt: accepted.task.attempt(),
            time_left: accepted.time_left(),
            jitter: rand::random(),
        };
        let mut carried_out = pin!(self.carry_out(accepted, disposition(outcome, tries), timings));
        // Nearly all tasks are settled within this time. After it, `must_hand_back` is polled too, which costs more.
        let soon = timeout(POLL_INTERVAL, &mut carried_out).await;
        let settled = tokio::select! {
            biased;
            settled = async { match soon { Ok(settled) => settled, Err(_) => carried_out.await } } => settled,
            () = self.must_hand_back() => {
                tracing::info!(
                    task.id = accepted.task.id,
                    "the outcome could not be published in time; handing the task back"
                );
                self.counters.count(|stats| stats.requeued += 1);
                self.acker.requeue(accepted.delivery).await;
                return Ok(Settled::Yes);
            }
        };
        if settled? == Settled::MustCompute {
            return Ok(Settled::MustCompute);
        }
        if !self.acker.ack(accepted.delivery).await {
            tracing::info!(
                task.id = accepted.task.id,
                "late ack discarded; the task will be delivered again"
            );
        }
        accepted.traced.settled();
        Ok(Settled::Yes)
    }

    /// Returns when the task must be handed back although its outcome is not published: [`PUBLISH_GRACE`] after the
    /// worker began to hand tasks back, or shortly before the broker takes back this delivery and all others.
    async fn must_hand_back(&self) {
        let grace_is_over = async {
            self.stop.reached(Phase::Returning).await;
            tokio::time::sleep(PUBLISH_GRACE).await;
        };
        tokio::select! {
            () = grace_is_over => {}
            () = tokio::time::sleep(self.queue_timeouts.pool.saturating_add(MIN_PUBLISH_TIME)) => {}
        }
    }

    /// Publishes the message of a disposition and the messages that follow from it, and waits for the confirms.
    async fn carry_out(
        &self,
        accepted: &Accepted,
        disposition: Disposition,
        timings: &Timings,
    ) -> Result<Settled, WorkerError> {
        match disposition {
            Disposition::ReplyAndAck(body) => {
                self.answer(accepted, Ok(body), timings, DeadLettering::Allowed).await?
            }
            Disposition::ReplyErrorAndAck(error) => {
                // The requester of a cancelled task may have left.
                let is_cancelled = error.kind == TaskErrorKind::Cancelled;
                let dead_lettering =
                    if is_cancelled { DeadLettering::UnlessUnroutable } else { DeadLettering::Allowed };
                self.answer(accepted, Err(&error), timings, dead_lettering).await?;
            }
            Disposition::Retry(delay, error) => self.try_again(accepted, delay, &error, timings).await?,
            Disposition::PutOff(delay, waits_for) => {
                let sent = self.put_off(accepted, delay, waits_for).await?;
                match next_step(sent, Publication::PutOff) {
                    Next::Compute => return Ok(Settled::MustCompute),
                    next => self.conclude(accepted, next).await?,
                }
            }
            Disposition::DeadLetter(reason, error) => {
                self.dead_letter(accepted, reason, &error).await?;
                self.answer(accepted, Err(&error), timings, DeadLettering::Done).await?;
            }
            Disposition::DeadLetterOnly(reason, error) => self.dead_letter(accepted, reason, &error).await?,
        }
        Ok(Settled::Yes)
    }

    /// Publishes the task again with a delay. If the broker cannot take it, this was the last attempt.
    async fn try_again(
        &self,
        accepted: &Accepted,
        delay: Delay,
        error: &TaskError,
        timings: &Timings,
    ) -> Result<(), WorkerError> {
        let task = &accepted.task;
        let message =
            Arc::new(accepted.traced.propagate(task.next_attempt(accepted.deadline, SystemTime::now())));
        let queue = self.queues.returns_to(accepted.delivery.source);
        let to = Destination { queue, delay: Some(delay), owner: QueueOwner::Pool };
        let sent = self.publish_in_time(accepted, to, &message).await?;
        if sent == PublishOutcome::Confirmed {
            accepted.traced.retried(error);
            let delay_ms = delay.after.as_millis() as u64;
            tracing::warn!(task.id = task.id, %error, delay_ms, "the task failed; it is tried again");
            self.counters.count(|stats| stats.retried += 1);
        } else {
            tracing::warn!(task.id = task.id, queue, ?sent, "cannot try again");
        }
        match next_step(sent, Publication::NextAttempt(error)) {
            Next::DeadLetterAndReply(reason, error) => {
                self.dead_letter(accepted, reason, &error).await?;
                self.answer(accepted, Err(&error), timings, DeadLettering::Done).await
            }
            next => self.conclude(accepted, next).await,
        }
    }

    /// Publishes the task again with a delay, without counting an attempt.
    async fn put_off(
        &self,
        accepted: &Accepted,
        delay: Delay,
        waits_for: WaitsFor,
    ) -> Result<PublishOutcome, WorkerError> {
        let task = &accepted.task;
        let waits_for_queue = waits_for == WaitsFor::ReplyQueue;
        let now = SystemTime::now();
        let since = waits_for_queue.then(|| task.put_off_since(now));
        let message = Arc::new(accepted.traced.propagate(task.put_off(since, accepted.deadline, now)));
        let queue = self.queues.returns_to(accepted.delivery.source);
        let to = Destination { queue, delay: Some(delay), owner: QueueOwner::Pool };
        let mut sent = self.publish_in_time(accepted, to, &message).await?;
        if sent == PublishOutcome::Unroutable && matches!(self.publisher.restore().await, Ok(true)) {
            sent = self.publish_in_time(accepted, to, &message).await?;
        }
        if sent == PublishOutcome::Confirmed {
            accepted.traced.put_off();
            let (reply_to, delay_ms) = (task.reply_to(), delay.after.as_millis() as u64);
            tracing::debug!(task.id = task.id, reply_to, delay_ms, ?waits_for, "put off");
            self.counters.count(|stats| stats.put_off += 1);
        }
        Ok(sent)
    }

    async fn dead_letter(
        &self,
        accepted: &Accepted,
        reason: Reason,
        error: &TaskError,
    ) -> Result<(), WorkerError> {
        tracing::warn!(task.id = accepted.task.id, reason = reason.as_str(), %error, "dead letter");
        accepted.traced.dead_lettered(reason);
        let worker = &self.worker_info.worker;
        let queue = &self.queues.tasks[accepted.delivery.source.0].name;
        let cause = Cause { reason, error: &error.message, worker, queue, at: SystemTime::now() };
        let message = accepted.traced.propagate(dead_letter(&accepted.task, &cause));
        let message = match &accepted.deaths {
            Some(deaths) => with_deaths(message, deaths),
            None => message,
        };
        self.publish_dead_letter(message, reason).await
    }

    /// Publishes the reply, if one is wanted. Counts the answer, unless the task is put off.
    async fn answer(
        &self,
        accepted: &Accepted,
        body: Result<Body, &TaskError>,
        timings: &Timings,
        dead_lettering: DeadLettering,
    ) -> Result<(), WorkerError> {
        let answered = Answered::of(&body);
        if let Err(error) = &body {
            self.error_log.add(&accepted.task.id, error);
        }
        let began = Instant::now();
        let error = body.as_ref().err().map(|error| tracing::field::display(*error));
        let (task, compute_us) = (&accepted.task, timings.compute_us);
        let status = answered.status;
        tracing::debug!(
            task.id = task.id,
            reply_to = task.reply_to(),
            status,
            error,
            compute_us,
            "answering"
        );
        let next = match self.queues.for_reply(task) {
            Some(queue) => self.reply_or_error(accepted, queue, body, timings, dead_lettering).await?,
            None => {
                accepted.traced.answered(body.as_ref().err().copied());
                Next::Ack
            }
        };
        let is_put_off = matches!(next, Next::PutOff(..));
        self.conclude(accepted, next).await?;
        if !is_put_off {
            self.count(answered, accepted.delivery.source, timings, began.elapsed());
        }
        Ok(())
    }

    /// Publishes the reply, or an error in its place. If the queue does not accept it, the task is kept and not the
    /// reply: the task can be computed again, and is usually far smaller than its result.
    async fn reply_or_error(
        &self,
        accepted: &Accepted,
        queue: &str,
        body: Result<Body, &TaskError>,
        timings: &Timings,
        dead_lettering: DeadLettering,
    ) -> Result<Next, WorkerError> {
        let (task, attempt) = (&accepted.task, accepted.attempt());
        let owner = if self.is_pool_reply_queue(queue) { QueueOwner::Pool } else { QueueOwner::Requester };
        let error = body.as_ref().err().copied();
        accepted.traced.answered(error);
        let message = accepted.traced.propagate_in(reply(task, body, timings, &self.worker_info, attempt));
        let mut publication =
            Reply { queue, bytes: message.body.len(), error, dead_lettering, is_second: false, delay: None };
        let mut next = self.publish_reply(accepted, publication, owner, message).await?;
        if let Next::ReplyError(error) = &next {
            tracing::warn!(task.id = task.id, %error, "answering with an error instead");
            accepted.traced.answered(Some(error));
            let error_reply =
                accepted.traced.propagate_in(reply(task, Err(error), timings, &self.worker_info, attempt));
            publication.is_second = true;
            next = self.publish_reply(accepted, publication, owner, error_reply).await?;
        }
        Ok(next)
    }

    async fn publish_reply(
        &self,
        accepted: &Accepted,
        mut reply: Reply<'_>,
        owner: QueueOwner,
        message: Message,
    ) -> Result<Next, WorkerError> {
        let to = Destination { queue: reply.queue, delay: None, owner };
        let sent = self.publish_in_time(accepted, to, &Arc::new(message)).await?;
        if owner == QueueOwner::Requester
            && matches!(sent, PublishOutcome::Confirmed | PublishOutcome::Unroutable)
        {
            self.breakers.record_accepted(reply.queue, tokio::time::Instant::now());
        }
        let may_be_put_off = !self.queues.tasks[accepted.delivery.source.0].returns_to_first;
        if matches!(sent, PublishOutcome::Evicted(_)) && may_be_put_off {
            reply.delay = longest_delay(&self.retry, self.time_to_wait(accepted), rand::random());
        }
        Ok(next_step(sent, Publication::Reply(reply)))
    }

    /// Carries out a next step, except the ack, which [`Settlement::settle`] sends.
    async fn conclude(&self, accepted: &Accepted, mut next: Next) -> Result<(), WorkerError> {
        loop {
            next = match next {
                Next::PutOff(delay, reason) => {
                    let sent = self.put_off(accepted, delay, WaitsFor::ReplyQueue).await?;
                    next_step(sent, Publication::PutOffAfterReply(&reason))
                }
                Next::DeadLetter(reason, error) | Next::DeadLetterAndReply(reason, error) => {
                    return self.dead_letter(accepted, reason, &error).await;
                }
                Next::AckWithoutReply(error) => {
                    let task = &accepted.task;
                    tracing::warn!(
                        task.id = task.id,
                        error,
                        "the error reply to a dead letter could not be published"
                    );
                    return Ok(());
                }
                // After `ReplyError` the caller has answered with the error; after `Compute` it computes the task.
                Next::Ack | Next::ReplyError(_) | Next::Compute => return Ok(()),
            };
        }
    }

    /// How long the task may still wait for its reply queue: for `pool.reply_timeout` since it was first put off, and
    /// until its deadline.
    fn time_to_wait(&self, accepted: &Accepted) -> Duration {
        let timeout_left =
            self.queue_timeouts.requester.saturating_sub(self.time_since_first_put_off(accepted));
        accepted.time_left().map_or(timeout_left, |time_left| time_left.min(timeout_left))
    }

    /// How long ago the task was first put off because of its reply queue; zero if it was not.
    fn time_since_first_put_off(&self, accepted: &Accepted) -> Duration {
        let now = SystemTime::now();
        now.duration_since(accepted.task.put_off_since(now)).unwrap_or_default()
    }

    fn is_pool_reply_queue(&self, queue: &str) -> bool {
        self.queues.reply.as_deref() == Some(queue)
    }
}
