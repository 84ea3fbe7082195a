//! Carries out a disposition: publish, confirm, ack, always in this order (`confirm-before-ack`). Decides how
//! long to wait for a queue that does not accept a message, and what becomes of the task then. Owns nothing. A
//! delivery of a session that is over is not settled, since the broker has it again.
//!
//! | file | decides |
//! |---|---|
//! | `outcome` | what happened to a task → what becomes of its message |
//! | `parts` | when parts of a reply are sent |
//! | `stalled` | how many tasks may wait for a reply queue that accepts nothing |

mod outcome;
mod parts;
mod stalled;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use tokio::time::timeout;

use self::outcome::{Disposition, Tries, disposition};
use super::WorkerError;
use super::report::{Counters, Traced};
use crate::backoff::Backoff;
use crate::broker::{Acker, Delay, DeliveryTag as DeliveryReceipt, Published, Publisher};
use crate::config::Retry;
use crate::protocol::control::CrashRecord;
use crate::protocol::dead_letter::{Cause, Reason, dead_letter, with_deaths, without_producer_headers};
use crate::protocol::reply::reply;
use crate::protocol::stats::{Generated, SECONDS, Stage, Stats};
use crate::protocol::{Body, Message, Task, TaskError, TaskErrorKind, Timings, WorkerInfo};
use crate::shutdown::{Phase, Stop};

pub(super) use self::outcome::Outcome;
pub(super) use self::parts::Parts;
pub(super) use self::stalled::Stalled;

/// The pause between attempts to publish into a queue that refuses a message.
const NACKED: Backoff = Backoff { first: Duration::from_millis(200), most: Duration::from_secs(10) };
/// After this time an unconfirmed reply counts as stalled; see [`Stalled`].
const STALLED: Duration = Duration::from_secs(2);
/// The least time for publishing a reply, however close the task's deadline is.
const LEAST: Duration = Duration::from_secs(1);
/// How long finished results are still published after the worker is told to hand tasks back.
const PARTING: Duration = Duration::from_secs(4);
/// How often a waiting publish checks whether the broker accepts messages.
const TICK: Duration = Duration::from_millis(250);

/// What settling a task needs; shared by all tasks of a worker.
pub(super) struct Settlement {
    pub(super) acker: Arc<dyn Acker>,
    pub(super) publisher: Arc<dyn Publisher>,
    pub(super) worker_info: WorkerInfo,
    pub(super) queues: Queues,
    pub(super) retry: Retry,
    pub(super) waits: Waits,
    /// Tasks whose reply queue accepts nothing.
    pub(super) stalled: Stalled,
    pub(super) counters: Arc<Counters>,
    pub(super) stop: Stop,
    /// The numbers of the latest sessions that are over, of the task queue and of the background queue. Written by the
    /// intake, read before a reply is published: the task will be delivered again, and should be answered only once.
    pub(super) lost: [AtomicU64; 2],
}

/// The pool's queues, and the queues that no reply may go to.
pub(super) struct Queues {
    pub(super) task: String,
    pub(super) reply: Option<String>,
    pub(super) dead_letter: String,
    /// Task and dead-letter queues of all pools.
    pub(super) reserved: Vec<String>,
}

/// How long to wait for a queue that does not accept a message.
#[derive(Clone, Copy)]
pub(super) struct Waits {
    /// For a requester's queue: `pool.reply_timeout`.
    pub(super) requesters: Duration,
    /// For the pool's own queues: until shortly before the broker takes back the delivery.
    pub(super) own: Duration,
}

pub(super) struct Accepted {
    pub(super) task: Arc<Task>,
    pub(super) delivery: DeliveryReceipt,
    /// Earlier deliveries of this message, as the broker counts them. 1 if the broker only says that there were
    /// some.
    pub(super) redeliveries: i64,
    /// Whether the broker counts deliveries.
    pub(super) counted: bool,
    /// The time after which the answer is not wanted. An unreadable one becomes the task's error in its run.
    pub(super) deadline: Option<SystemTime>,
    /// The record of workers that died with this task on their device.
    pub(super) deaths: Option<CrashRecord>,
    /// The task's span, which ends when this is dropped.
    pub(super) traced: Traced,
}

impl Accepted {
    pub(super) fn new(task: Task, delivery: DeliveryReceipt, (redeliveries, counted): (i64, bool)) -> Self {
        let (deadline, task) = (task.deadline().ok().flatten(), Arc::new(task));
        Self { task, delivery, redeliveries, counted, deadline, deaths: None, traced: Traced::not() }
    }

    /// Which attempt this is, for the reply. Counts attempts that failed and those in which a worker died,
    /// except in an isolated group. A task handed back by a drain or a lost connection has used none.
    pub(super) fn attempt(&self) -> i64 {
        let deaths = self.deaths.as_ref().map_or(0, |deaths| deaths.count);
        i64::from(self.task.attempt()) + i64::from(deaths)
    }

    fn time_left(&self) -> Option<Duration> {
        self.deadline.map(|at| at.duration_since(SystemTime::now()).unwrap_or_default())
    }
}

impl Queues {
    /// The queue for the task's reply; none if there is none, or if no reply may go there.
    fn of_reply<'a>(&'a self, task: &'a Task) -> Option<&'a str> {
        match task.reply_to() {
            Some(queue) => Some(queue).filter(|queue| !self.is_reserved(queue)),
            None => self.reply.as_deref(),
        }
    }

    /// Whether a message in this queue would come back as a task, or be taken for a dead letter.
    pub(super) fn is_reserved(&self, queue: &str) -> bool {
        let retry = |of: &String| queue.strip_prefix(of.as_str()).is_some_and(|it| it.starts_with(".retry"));
        queue == self.task
            || queue == self.dead_letter
            || retry(&self.task)
            || self.reserved.iter().any(|other| queue == other || retry(other))
    }
}

impl Settlement {
    /// Settles one task.
    ///
    /// # Errors
    /// [`WorkerError`] if the broker cannot be used: the task stays unacked.
    pub(super) async fn settle(
        &self,
        accepted: &Accepted,
        outcome: Outcome,
        timings: &Timings,
    ) -> Result<(), WorkerError> {
        let lost = &self.lost[usize::from(accepted.delivery.is_background())];
        if accepted.delivery.is_over_with(lost.load(Ordering::Acquire)) {
            return Ok(());
        }
        let tries = Tries {
            retry: &self.retry,
            attempt: accepted.task.attempt(),
            time_left: accepted.time_left(),
            jitter: rand::random(),
        };
        let mut carried_out = pin!(self.carry_out(accepted, disposition(outcome, tries), timings));
        // Nearly all finish within this time; waiting for several events at once costs more.
        let soon = timeout(TICK, &mut carried_out).await;
        let published = tokio::select! {
            biased;
            published = async { match soon { Ok(published) => published, Err(_) => carried_out.await } } => published,
            () = self.leaving() => {
                tracing::info!(task.id = accepted.task.id, "no queue takes what came of the task; handing it back");
                self.counters.count(|stats| stats.requeued += 1);
                self.acker.requeue(accepted.delivery).await;
                return Ok(());
            }
        };
        published?;
        if !self.acker.ack(accepted.delivery).await {
            tracing::info!(task.id = accepted.task.id, "late ack discarded; the task will come again");
        }
        accepted.traced.settled();
        Ok(())
    }

    /// Returns when the task must be handed back although its result is not published: [`PARTING`] after the
    /// worker was told to hand back, or shortly before the broker takes back the delivery and all others.
    async fn leaving(&self) {
        let told = async {
            self.stop.reached(Phase::Returning).await;
            tokio::time::sleep(PARTING).await;
        };
        tokio::select! {
            () = told => {}
            () = tokio::time::sleep(self.waits.own.saturating_add(LEAST)) => {}
        }
    }

    /// Publishes what a disposition says, and waits for the confirms.
    async fn carry_out(
        &self,
        accepted: &Accepted,
        disposition: Disposition,
        timings: &Timings,
    ) -> Result<(), WorkerError> {
        match disposition {
            Disposition::ReplyAndAck(body) => self.answer(accepted, Ok(body), (timings, Parked::No)).await,
            Disposition::ReplyErrorAndAck(error) => {
                // Nobody may be left to receive the answer of a cancelled task.
                let wanted = error.kind != TaskErrorKind::Cancelled;
                let parked = if wanted { Parked::No } else { Parked::Never };
                self.answer(accepted, Err(&error), (timings, parked)).await
            }
            Disposition::Retry(delay, error) => self.put_off(accepted, delay, &error, timings).await,
            Disposition::DeadLetter(reason, error) => {
                self.dead_letter(accepted, reason, &error).await?;
                self.answer(accepted, Err(&error), (timings, Parked::Already)).await
            }
        }
    }

    /// Publishes the task again with a delay. If the broker cannot take it, this was the last attempt.
    async fn put_off(
        &self,
        accepted: &Accepted,
        delay: Delay,
        error: &TaskError,
        timings: &Timings,
    ) -> Result<(), WorkerError> {
        let task = &accepted.task;
        let message = Arc::new(accepted.traced.passed_on(task.next_attempt(accepted.deadline)));
        let waiting = (&*self.queues.task, Some(delay));
        let words = match self.within(accepted, (waiting, Owner::Pool), &message).await? {
            Sent::Confirmed => {
                accepted.traced.retried(error);
                let delay_ms = delay.after.as_millis() as u64;
                tracing::warn!(task.id = task.id, %error, delay_ms, "the task failed; it is tried again");
                self.counters.count(|stats| stats.retried += 1);
                return Ok(());
            }
            Sent::Unroutable => "there is no queue to wait in for another attempt".to_owned(),
            Sent::Unconfirmed(words) | Sent::Refused(words) => words,
        };
        tracing::warn!(task.id = task.id, queue = self.queues.task, error = words, "cannot try again");
        let error = TaskError::new(error.kind, format!("{error}; {words}"));
        self.dead_letter(accepted, Reason::Attempts, &error).await?;
        self.answer(accepted, Err(&error), (timings, Parked::Already)).await
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
        let cause = Cause { reason, error: &error.message, worker, at: SystemTime::now() };
        let message = accepted.traced.passed_on(dead_letter(&accepted.task, &cause));
        let message = match &accepted.deaths {
            Some(deaths) => with_deaths(message, deaths),
            None => message,
        };
        self.park(message, reason).await
    }

    async fn answer(
        &self,
        accepted: &Accepted,
        body: Result<Body, &TaskError>,
        (timings, parked): (&Timings, Parked),
    ) -> Result<(), WorkerError> {
        let (status, reason) = match &body {
            Ok(_) => ("succeeded", ""),
            Err(error) => {
                let (status, _, _, code) = error.kind.wire();
                (status, code)
            }
        };
        let generated = body.as_ref().ok().and_then(|body| body.generated.clone());
        let began = Instant::now();
        let error = body.as_ref().err().map(|error| tracing::field::display(*error));
        let (task, compute_us) = (&accepted.task, timings.compute_us);
        tracing::debug!(
            task.id = task.id,
            reply_to = task.reply_to(),
            status,
            error,
            compute_us,
            "answering"
        );
        self.reply(accepted, body, (timings, parked)).await?;
        self.counters.count(|stats| {
            stats.answered(status, reason, 1);
            let seconds = |us: i64| us as f64 / 1e6;
            stats.took(Stage::Queue, seconds(timings.queue_us));
            stats.took(Stage::Prepare, seconds(timings.prepare_us));
            stats.took(Stage::Publish, began.elapsed().as_secs_f64());
            // A task that never was on the device has not waited for the device.
            if timings.batch_size > 0 {
                stats.took(Stage::Wait, seconds(timings.wait_us));
                stats.took(Stage::Compute, seconds(timings.compute_us));
            }
            if let Some(first) = timings.first_token_us {
                stats.first_token.observe(&SECONDS, seconds(first));
            }
            if let Some(Generated { user, answers, tokens }) = generated {
                stats.used(&user, tokens);
                let later = tokens.answer.saturating_sub(answers);
                if later > 0 {
                    let each = seconds(timings.answer_us) * answers as f64 / later as f64;
                    stats.output_token.observe(&SECONDS, each);
                }
            }
        });
        Ok(())
    }

    /// Publishes the reply, if one is wanted. If its queue does not accept it, the task becomes a dead letter:
    /// the task can be computed again, and is usually far smaller than its result.
    async fn reply(
        &self,
        accepted: &Accepted,
        body: Result<Body, &TaskError>,
        (timings, parked): (&Timings, Parked),
    ) -> Result<(), WorkerError> {
        let (task, traced) = (&accepted.task, &accepted.traced);
        let refusal = body.as_ref().err().copied();
        traced.answered(refusal);
        let Some(queue) = self.queues.of_reply(task) else { return Ok(()) };
        let message = reply(task, body, timings, &self.worker_info, accepted.attempt());
        let message = Arc::new(traced.reply(message));
        let own = self.queues.reply.as_deref() == Some(queue);
        let owner = if own { Owner::Pool } else { Owner::Requester };
        let mut sent = self.within(accepted, ((queue, None), owner), &message).await?;
        if let Sent::Refused(refusal) = &sent {
            let words = format!("the broker refuses the reply of {} bytes: {refusal}", message.body.len());
            tracing::warn!(task.id = task.id, error = words, "answering with an error instead");
            let error = TaskError::new(TaskErrorKind::TooLarge, words);
            traced.answered(Some(&error));
            let smaller = reply(task, Err(&error), timings, &self.worker_info, accepted.attempt());
            let smaller = Arc::new(traced.reply(smaller));
            sent = self.within(accepted, ((queue, None), owner), &smaller).await?;
        }
        let (mut reason, mut words) = match sent {
            Sent::Confirmed => return Ok(()),
            Sent::Unroutable => (Reason::Unroutable, format!("reply queue {queue:?} does not exist")),
            Sent::Refused(words) => (Reason::Unroutable, format!("reply queue {queue:?}: {words}")),
            Sent::Unconfirmed(words) => (Reason::Unconfirmed, words),
        };
        match parked {
            Parked::No => {}
            Parked::Already => {
                let task = &task.id;
                tracing::warn!(
                    task.id = task,
                    error = words,
                    "the error reply to a dead letter reaches nobody"
                );
                return Ok(());
            }
            Parked::Never if reason == Reason::Unroutable => return Ok(()),
            Parked::Never => {}
        }
        // Computing it again would bring the same refusal.
        if let (Reason::Unroutable, Some(refusal)) = (reason, refusal.filter(|it| it.kind.is_refusal())) {
            (reason, words) = (Reason::Refused, format!("{refusal}; {words}"));
        }
        self.dead_letter(accepted, reason, &TaskError::new(TaskErrorKind::Internal, words)).await
    }

    /// Publishes, for as long as this queue may be waited for.
    async fn within(
        &self,
        accepted: &Accepted,
        (to, owner): ((&str, Option<Delay>), Owner),
        message: &Arc<Message>,
    ) -> Result<Sent, WorkerError> {
        let limit = if owner == Owner::Pool { self.waits.own } else { self.waits.requesters };
        let limit = accepted.time_left().map_or(limit, |left| limit.min(left.max(LEAST)));
        let mut published = pin!(self.publish(to, message));
        if let Ok(sent) = timeout(limit.min(TICK), &mut published).await {
            return sent;
        }
        let unconfirmed = async {
            let queue = to.0;
            let in_vain = || format!("queue {queue:?} has not taken the message for {limit:?}");
            if owner == Owner::Pool || limit <= STALLED {
                self.broker_takes_messages_for(limit).await;
                return in_vain();
            }
            self.broker_takes_messages_for(STALLED).await;
            let evicted = self.stalled.enter(message.body.len());
            tokio::select! {
                () = self.broker_takes_messages_for(limit - STALLED) => in_vain(),
                _ = evicted => format!(
                    "queue {queue:?} takes no message now, and too many tasks wait for such queues"
                ),
            }
        };
        tokio::select! {
            biased;
            sent = published => sent,
            words = unconfirmed => Ok(Sent::Unconfirmed(words)),
        }
    }

    /// Returns once the broker has accepted messages for `time` in all: a lost connection or an alarm is not
    /// the fault of the queue.
    async fn broker_takes_messages_for(&self, time: Duration) {
        let mut left = time;
        while !left.is_zero() {
            let tick = left.min(TICK);
            tokio::time::sleep(tick).await;
            if self.publisher.takes_messages() {
                left -= tick;
            }
        }
    }

    /// Publishes until the broker accepts the message or refuses it for good.
    async fn publish(
        &self,
        (queue, delay): (&str, Option<Delay>),
        message: &Arc<Message>,
    ) -> Result<Sent, WorkerError> {
        let mut failures = 0;
        loop {
            let publishing = match delay {
                None => self.publisher.publish(queue, message.clone()),
                Some(delay) => self.publisher.publish_later(queue, delay, message.clone()),
            };
            let why = match publishing.await? {
                Published::Confirmed => return Ok(Sent::Confirmed),
                Published::Unroutable => return Ok(Sent::Unroutable),
                Published::Refused(words) => return Ok(Sent::Refused(words)),
                Published::Nacked => "is it full?".to_owned(),
                Published::Forbidden(words) => words,
            };
            failures += 1;
            if failures == 1 {
                tracing::warn!(queue, why, "the queue takes no message now; trying again");
            }
            tokio::time::sleep(NACKED.delay(failures, rand::random())).await;
        }
    }

    /// Publishes a dead letter, however long that takes: an ack without it would lose the message, and a
    /// requeue would loop. Other tasks go on meanwhile, within the prefetch.
    async fn park(&self, mut dead_letter: Message, reason: Reason) -> Result<(), WorkerError> {
        let queue = &self.queues.dead_letter;
        let (mut failures, mut is_bare) = (0, false);
        let mut waits = None;
        loop {
            let message = Arc::new(dead_letter.clone());
            let publish = self.publish((queue, None), &message);
            tokio::pin!(publish);
            let sent = tokio::select! {
                sent = &mut publish => sent?,
                () = self.broker_takes_messages_for(STALLED) => {
                    let words = format!("dead-letter queue {queue:?} takes no message now");
                    waits = Some(self.counters.wait_to_park(words, waits));
                    publish.await?
                }
            };
            let why = match sent {
                Sent::Confirmed => {
                    let dead = reason.as_str().to_owned();
                    self.counters
                        .count(|stats: &mut Stats| *stats.dead_lettered.entry(dead).or_default() += 1);
                    return Ok(());
                }
                Sent::Refused(words) if !is_bare => {
                    tracing::warn!(
                        queue,
                        error = words,
                        "dead letter refused; dropping its producer's headers"
                    );
                    (dead_letter, is_bare) = (without_producer_headers(dead_letter), true);
                    continue;
                }
                Sent::Unroutable => match self.publisher.restore().await {
                    Ok(true) if failures == 0 => "it did not exist, and was made again".to_owned(),
                    Ok(true) => "it does not exist, though it was made again".to_owned(),
                    Ok(false) => "it does not exist; make it, or set broker.declare = true".to_owned(),
                    Err(error) => format!("it does not exist, and cannot be made: {error}"),
                },
                Sent::Unconfirmed(words) | Sent::Refused(words) => words,
            };
            failures += 1;
            let words = format!("dead-letter queue {queue:?}: {why}");
            tracing::warn!(error = words, failures, "a dead letter waits");
            waits = Some(self.counters.wait_to_park(words, waits));
            tokio::time::sleep(NACKED.delay(failures, rand::random())).await;
        }
    }
}

/// Whose queue a message is for: the pool's own may hold up the pool, a requester's only its own tasks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    Pool,
    Requester,
}

/// Whether a task is among the dead letters already; it must not be there twice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Parked {
    No,
    Already,
    /// The task is cancelled: if its reply queue is gone, no dead letter is written.
    Never,
}

/// The final result of publishing a message.
enum Sent {
    Confirmed,
    Unroutable,
    /// Not confirmed in time, with the reason: the broker may or may not have it.
    Unconfirmed(String),
    Refused(String),
}
