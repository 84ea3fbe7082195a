//! Carries out a disposition: publish, confirm, ack, in this order and no other
//! (`confirm-before-ack`). Owns nothing; a delivery of a session that is over is left alone, since
//! it is the broker's again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use super::WorkerError;
use super::outcome::{Disposition, Outcome, Tries, disposition};
use super::report::Counters;
use super::traced::Traced;
use crate::backoff::Backoff;
use crate::broker::{Delay, Published, Publisher, Receipt as DeliveryReceipt, Settler};
use crate::config::Retry;
use crate::protocol::control::Deaths;
use crate::protocol::dead_letter::{
    Cause, Reason, dead_letter, parked_reply, with_deaths, without_foreign_headers,
};
use crate::protocol::reply::reply;
use crate::protocol::stats::{Stage, Stats};
use crate::protocol::{Message, Receipt, Signature, Task, TaskError, TaskErrorKind};

/// Between two attempts to publish into a queue that takes nothing.
const NACKED: Backoff = Backoff { first: Duration::from_millis(200), most: Duration::from_secs(10) };

/// What settling needs; shared by all tasks of a worker.
pub(super) struct Settlement {
    pub(super) settler: Arc<dyn Settler>,
    pub(super) publisher: Arc<dyn Publisher>,
    pub(super) signature: Signature,
    pub(super) reply_queue: Option<String>,
    pub(super) dead_letter_queue: String,
    pub(super) task_queue: String,
    pub(super) retry: Retry,
    pub(super) counters: Arc<Counters>,
    /// The latest session that is over. Written by the intake, read before a reply is published:
    /// the task will be delivered again, and one reply is enough.
    pub(super) lost: AtomicU64,
}

/// A task with its delivery.
pub(super) struct Accepted {
    pub(super) task: Arc<Task>,
    pub(super) delivery: DeliveryReceipt,
    /// Earlier deliveries of this message, as the broker counts them: where it knows only that there
    /// were some, 1.
    pub(super) redeliveries: i64,
    /// Until when it is wanted. One that cannot be read is the task's error, found again in its life.
    pub(super) deadline: Option<SystemTime>,
    /// Of workers that had it on their device.
    pub(super) deaths: Option<Deaths>,
    /// Its span, which ends with it.
    pub(super) traced: Traced,
}

impl Accepted {
    pub(super) fn new(task: Task, delivery: DeliveryReceipt, redeliveries: i64) -> Self {
        let deadline = task.deadline().ok().flatten();
        Self { task: Arc::new(task), delivery, redeliveries, deadline, deaths: None, traced: Traced::not() }
    }

    /// Which attempt this is, for the reply: those that failed, and those that a worker died in.
    /// What a drain or a lost connection hands back has used none.
    pub(super) fn attempt(&self) -> i64 {
        let deaths = self.deaths.as_ref().map_or(0, |deaths| deaths.count);
        i64::from(self.task.attempt()) + i64::from(deaths)
    }
}

impl Settlement {
    /// Settles one task.
    ///
    /// # Errors
    /// [`WorkerError`] when no broker takes our messages: the task stays unacked.
    pub(super) async fn settle(
        &self,
        accepted: &Accepted,
        outcome: Outcome,
        receipt: &Receipt,
    ) -> Result<(), WorkerError> {
        if self.lost.load(Ordering::Acquire) >= accepted.delivery.session {
            return Ok(());
        }
        let now = SystemTime::now();
        let tries = Tries {
            retry: &self.retry,
            attempt: accepted.task.attempt(),
            time_left: accepted.deadline.map(|at| at.duration_since(now).unwrap_or_default()),
            jitter: rand::random(),
        };
        match disposition(outcome, tries) {
            Disposition::ReplyAndAck(body) => self.answer(accepted, Ok(body), receipt).await?,
            Disposition::ReplyErrorAndAck(error) => {
                tracing::debug!(task.id = accepted.task.id, %error, "answering with an error");
                self.answer(accepted, Err(&error), receipt).await?;
            }
            Disposition::Retry(delay, error) => self.put_off(accepted, delay, &error, receipt).await?,
            Disposition::DeadLetter(reason, error) => {
                self.dead_letter(accepted, reason, &error, receipt).await?;
            }
        }
        if !self.settler.ack(accepted.delivery).await {
            tracing::info!(task.id = accepted.task.id, "late ack discarded; the task will come again");
        }
        accepted.traced.settled();
        Ok(())
    }

    /// Publishes the task anew, to come after the delay. Where nothing was made to wait in, this was
    /// its last attempt.
    async fn put_off(
        &self,
        accepted: &Accepted,
        delay: Delay,
        error: &TaskError,
        receipt: &Receipt,
    ) -> Result<(), WorkerError> {
        let task = &accepted.task;
        let message = accepted.traced.passed_on(task.next_attempt(accepted.deadline));
        let words = match self.publish(&self.task_queue, Some(delay), &Arc::new(message)).await? {
            Sent::Confirmed => {
                accepted.traced.retried(error);
                let delay_ms = delay.after.as_millis() as u64;
                tracing::warn!(task.id = task.id, %error, delay_ms, "the task failed; it is tried again");
                self.counters.count(|stats| stats.retried += 1);
                return Ok(());
            }
            Sent::Unroutable => "there is no queue to wait in for another attempt".to_owned(),
            Sent::Refused(words) => words,
        };
        tracing::warn!(task.id = task.id, queue = self.task_queue, error = words, "cannot try again");
        let error = TaskError::new(error.kind, format!("{error}; {words}"));
        self.dead_letter(accepted, Reason::Attempts, &error, receipt).await
    }

    async fn dead_letter(
        &self,
        accepted: &Accepted,
        reason: Reason,
        error: &TaskError,
        receipt: &Receipt,
    ) -> Result<(), WorkerError> {
        tracing::warn!(task.id = accepted.task.id, reason = reason.as_str(), %error, "dead letter");
        accepted.traced.dead_lettered(reason);
        let letter = dead_letter(&accepted.task, &self.cause(reason, &error.message));
        let letter = accepted.traced.passed_on(letter);
        let letter = match &accepted.deaths {
            Some(deaths) => with_deaths(letter, deaths),
            None => letter,
        };
        self.bury(letter, reason).await?;
        self.answer(accepted, Err(error), receipt).await
    }

    /// Answers the task, and counts it.
    async fn answer(
        &self,
        accepted: &Accepted,
        body: Result<Vec<u8>, &TaskError>,
        receipt: &Receipt,
    ) -> Result<(), WorkerError> {
        let (status, reason) = match &body {
            Ok(_) => ("succeeded", ""),
            Err(error) => {
                let (status, _, _, code) = error.kind.wire();
                (status, code)
            }
        };
        let began = Instant::now();
        self.reply(accepted, body, receipt).await?;
        self.counters.count(|stats| {
            stats.answered(status, reason, 1);
            stats.took(Stage::Queue, receipt.queue_ms as f64 / 1e3);
            stats.took(Stage::Prepare, receipt.prepare_ms / 1e3);
            stats.took(Stage::Publish, began.elapsed().as_secs_f64());
            // What never was on the device has not waited for it either.
            if receipt.batch_size > 0 {
                stats.took(Stage::Wait, receipt.wait_ms / 1e3);
                stats.took(Stage::Compute, receipt.compute_ms / 1e3);
            }
        });
        Ok(())
    }

    /// Publishes the reply, if anybody wants one.
    async fn reply(
        &self,
        accepted: &Accepted,
        body: Result<Vec<u8>, &TaskError>,
        receipt: &Receipt,
    ) -> Result<(), WorkerError> {
        let (task, traced) = (&accepted.task, &accepted.traced);
        traced.answered(body.as_ref().err().copied());
        let Some(queue) = task.reply_to().or(self.reply_queue.as_deref()) else { return Ok(()) };
        let message = reply(task, body, receipt, &self.signature, accepted.attempt());
        let message = Arc::new(traced.reply(message));
        let refusal = match self.publish(queue, None, &message).await? {
            Sent::Confirmed => return Ok(()),
            Sent::Unroutable => return self.park(task, message, queue).await,
            Sent::Refused(words) => words,
        };
        let words = format!("the broker refuses the reply of {} bytes: {refusal}", message.body.len());
        tracing::warn!(task.id = task.id, error = words, "answering with an error instead");
        let error = TaskError::new(TaskErrorKind::TooLarge, words);
        traced.answered(Some(&error));
        let smaller = reply(task, Err(&error), receipt, &self.signature, accepted.attempt());
        let smaller = Arc::new(traced.reply(smaller));
        match self.publish(queue, None, &smaller).await? {
            Sent::Confirmed => Ok(()),
            Sent::Unroutable | Sent::Refused(_) => self.park(task, smaller, queue).await,
        }
    }

    /// A reply that has nowhere to go.
    async fn park(&self, task: &Task, reply: Arc<Message>, queue: &str) -> Result<(), WorkerError> {
        let error = format!("reply queue {queue:?} does not exist or takes no message");
        tracing::warn!(task.id = task.id, error, "parking the reply among the dead letters");
        let reply = Arc::unwrap_or_clone(reply);
        let cause = self.cause(Reason::Unroutable, &error);
        self.bury(parked_reply(reply, &task.id, queue, &cause), Reason::Unroutable).await
    }

    fn cause<'a>(&'a self, reason: Reason, error: &'a str) -> Cause<'a> {
        Cause { reason, error, worker: &self.signature.worker, at: SystemTime::now() }
    }

    async fn bury(&self, letter: Message, reason: Reason) -> Result<(), WorkerError> {
        let queue = &self.dead_letter_queue;
        let letter = Arc::new(letter);
        let mut sent = self.publish(queue, None, &letter).await?;
        if let Sent::Refused(words) = &sent {
            tracing::warn!(queue, error = words, "dead letter refused; dropping its producer's headers");
            let letter = without_foreign_headers(Arc::unwrap_or_clone(letter));
            sent = self.publish(queue, None, &Arc::new(letter)).await?;
        }
        let why = match sent {
            Sent::Confirmed => {
                let count = |stats: &mut Stats| {
                    *stats.dead_lettered.entry(reason.as_str().to_owned()).or_default() += 1;
                };
                self.counters.count(count);
                return Ok(());
            }
            Sent::Unroutable => "it does not exist".to_owned(),
            Sent::Refused(words) => words,
        };
        // Acking would lose the message and requeueing would loop: only the operator can help.
        Err(WorkerError::NoDeadLetters { queue: queue.clone(), why })
    }

    /// Publishes until the broker has taken the message or never will. While it cannot, the task
    /// stays unacked and the intake stands still: that is the back-pressure.
    async fn publish(
        &self,
        queue: &str,
        delay: Option<Delay>,
        message: &Arc<Message>,
    ) -> Result<Sent, WorkerError> {
        let mut failures = 0;
        loop {
            let publishing = match delay {
                None => self.publisher.publish(queue, message.clone()),
                Some(delay) => self.publisher.publish_later(queue, delay, message.clone()),
            };
            match publishing.await? {
                Published::Confirmed => return Ok(Sent::Confirmed),
                Published::Unroutable => return Ok(Sent::Unroutable),
                Published::Refused(words) => return Ok(Sent::Refused(words)),
                Published::Nacked => {}
            }
            failures += 1;
            if failures == 1 {
                tracing::warn!(queue, "the queue takes no message now (is it full?); trying again");
            }
            tokio::time::sleep(NACKED.delay(failures, rand::random())).await;
        }
    }
}

/// What became of a message in the end.
enum Sent {
    Confirmed,
    Unroutable,
    Refused(String),
}
