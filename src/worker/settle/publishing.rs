//! Publishes the messages of settled tasks. Decides how long to wait for a queue that does not accept a message, and
//! when it is certain that the broker does not have a message. Owns nothing.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::follow::PublishOutcome;
use super::{Accepted, MIN_PUBLISH_TIME, POLL_INTERVAL, STALLED_AFTER, Settlement};
use crate::backoff::Backoff;
use crate::broker::{Delay, Published};
use crate::protocol::Message;
use crate::protocol::dead_letter::{Reason, without_producer_headers};
use crate::protocol::stats::Stats;
use crate::worker::WorkerError;

/// The pause between attempts to publish into a queue that refuses a message.
const RETRY_BACKOFF: Backoff = Backoff { first: Duration::from_millis(200), max: Duration::from_secs(10) };
/// How often a message that was given up checks whether the broker has answered its last attempt.
const LAST_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long a message that was given up waits for the broker's answer to its last attempt, if its queue has refused it
/// before. Such a queue answers, but a busy broker may take seconds. Without an answer the task becomes a dead letter.
const ANSWER_TIME: Duration = Duration::from_secs(10);

/// The queue that a message is published to, directly or through a retry queue.
#[derive(Clone, Copy)]
pub(super) struct Destination<'a> {
    pub(super) queue: &'a str,
    /// How long the message first waits in a retry queue. None: it goes directly to `queue`.
    pub(super) delay: Option<Delay>,
    pub(super) owner: QueueOwner,
}

/// Who owns the queue of a message. A queue of the pool may block the pool, a requester's queue only its own tasks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueOwner {
    Pool,
    Requester,
}

/// The state of a message that is being published. Written by [`Settlement::publish`], read by whoever waits for it.
#[derive(Default)]
struct Attempts {
    /// The message was sent, and the broker has not answered yet.
    is_unanswered: AtomicBool,
    /// The broker has refused the message at least once.
    was_refused: AtomicBool,
    /// Notifies whoever waits for the message of its first refusal.
    refusal: Notify,
}

impl Settlement {
    /// Publishes a message, and gives up when the time to wait for this queue is over. A reply is published after its
    /// parts.
    pub(super) async fn publish_in_time(
        &self,
        accepted: &Accepted,
        to: Destination<'_>,
        message: &Arc<Message>,
    ) -> Result<PublishOutcome, WorkerError> {
        let limit = match to.owner {
            QueueOwner::Pool => self.queue_timeouts.pool,
            // The reply of a task that has waited before is tried at least once more.
            QueueOwner::Requester => self
                .time_to_wait(accepted)
                .max(STALLED_AFTER + MIN_PUBLISH_TIME)
                .min(self.queue_timeouts.requester),
        };
        let limit = accepted.time_left().map_or(limit, |left| limit.min(left.max(MIN_PUBLISH_TIME)));
        let attempts = Attempts::default();
        let parts = accepted.parts.clone().filter(|_| to.delay.is_none());
        let mut published = pin!(async {
            if let Some(parts) = parts {
                parts.await;
            }
            self.publish(to, message, &attempts).await
        });
        if let Ok(sent) = timeout(limit.min(POLL_INTERVAL), &mut published).await {
            return sent;
        }
        let given_up = tokio::select! {
            biased;
            sent = &mut published => return sent,
            given_up = self.wait_until_given_up(to, message.body.len(), limit, &attempts) => given_up,
        };
        // A message that the broker has not answered may yet arrive.
        let given_up_at = Instant::now();
        let will_answer =
            matches!(given_up, PublishOutcome::Evicted(_)) && attempts.was_refused.load(Ordering::Relaxed);
        let answer_time = if will_answer { ANSWER_TIME } else { MIN_PUBLISH_TIME };
        while attempts.is_unanswered.load(Ordering::Relaxed) && given_up_at.elapsed() < answer_time {
            if let Ok(sent) = timeout(LAST_POLL_INTERVAL, &mut published).await {
                return sent;
            }
        }
        Ok(match given_up {
            PublishOutcome::Evicted(message) if attempts.is_unanswered.load(Ordering::Relaxed) => {
                PublishOutcome::Unconfirmed(message)
            }
            other => other,
        })
    }

    /// Waits until the time for this queue is over, or until too many tasks wait for such queues. Returns the result
    /// that then counts for the message, whose body has `bytes` bytes. The message is entered into `stalled` at its
    /// first refusal, or after [`STALLED_AFTER`] without one. Its queue is entered into `breakers` after
    /// [`STALLED_AFTER`], or as soon as the message must stop waiting: before that, the queue may be full or slow for a
    /// moment only.
    async fn wait_until_given_up(
        &self,
        to: Destination<'_>,
        bytes: usize,
        limit: Duration,
        attempts: &Attempts,
    ) -> PublishOutcome {
        let queue = to.queue;
        let timed_out = || {
            PublishOutcome::Unconfirmed(format!("queue {queue:?} has not taken the message for {limit:?}"))
        };
        if to.owner == QueueOwner::Pool {
            self.broker_takes_messages_for(limit).await;
            return timed_out();
        }
        let began = Instant::now();
        // The task's deadline may be near, or over.
        let stalled_after = STALLED_AFTER.min(limit);
        tokio::select! {
            () = self.broker_takes_messages_for(stalled_after) => {}
            () = attempts.refusal.notified() => {}
        }
        let mut evicted = self.stalled.enter(bytes);
        let remaining = stalled_after.saturating_sub(began.elapsed());
        let is_evicted = tokio::select! {
            biased;
            _ = &mut evicted => true,
            () = self.broker_takes_messages_for(remaining) => false,
        };
        let was_refused = attempts.was_refused.load(Ordering::Relaxed);
        // In less time than [`STALLED_AFTER`], a queue that has refused nothing may only be slow.
        let is_stalled = was_refused || limit > STALLED_AFTER;
        let _waiting = is_stalled.then(|| self.breakers.wait(queue, was_refused, Instant::now()));
        let is_evicted = is_evicted
            || tokio::select! {
                () = self.broker_takes_messages_for(limit - stalled_after) => false,
                _ = evicted => true,
            };
        if !is_evicted {
            return timed_out();
        }
        PublishOutcome::Evicted(format!(
            "queue {queue:?} takes no message now, and too many tasks wait for such queues"
        ))
    }

    /// Returns once the broker has accepted messages for `time` in all. Time during a lost connection or an alarm does
    /// not count, because that is not the fault of the queue.
    async fn broker_takes_messages_for(&self, time: Duration) {
        let mut left = time;
        while !left.is_zero() {
            let tick = left.min(POLL_INTERVAL);
            tokio::time::sleep(tick).await;
            if self.publisher.takes_messages() {
                left -= tick;
            }
        }
    }

    /// Publishes until the broker accepts the message or refuses it for good.
    async fn publish(
        &self,
        Destination { queue, delay, .. }: Destination<'_>,
        message: &Arc<Message>,
        attempts: &Attempts,
    ) -> Result<PublishOutcome, WorkerError> {
        let mut failures = 0;
        loop {
            let publishing = match delay {
                None => self.publisher.publish(queue, message.clone()),
                Some(delay) => self.publisher.publish_later(queue, delay, message.clone()),
            };
            attempts.is_unanswered.store(true, Ordering::Relaxed);
            let failure = match publishing.await? {
                Published::Confirmed => return Ok(PublishOutcome::Confirmed),
                Published::Unroutable => return Ok(PublishOutcome::Unroutable),
                Published::Refused(message) => return Ok(PublishOutcome::Refused(message)),
                Published::Nacked => {
                    "the broker did not accept the message (nack); the queue may be full".to_owned()
                }
                Published::Forbidden(message) => message,
            };
            attempts.is_unanswered.store(false, Ordering::Relaxed);
            attempts.was_refused.store(true, Ordering::Relaxed);
            failures += 1;
            if failures == 1 {
                attempts.refusal.notify_one();
                tracing::warn!(queue, why = failure, "the queue takes no message now; trying again");
            }
            tokio::time::sleep(RETRY_BACKOFF.delay(failures, rand::random())).await;
        }
    }

    /// Publishes a dead letter, however long that takes: an ack without it would lose the message, and a requeue
    /// would loop. Other tasks go on meanwhile, as far as the prefetch allows.
    pub(super) async fn publish_dead_letter(
        &self,
        mut dead_letter: Message,
        reason: Reason,
    ) -> Result<(), WorkerError> {
        let queue = &self.queues.dead_letter;
        let (mut failures, mut has_dropped_headers) = (0, false);
        let mut waiting = None;
        loop {
            let message = Arc::new(dead_letter.clone());
            let to = Destination { queue, delay: None, owner: QueueOwner::Pool };
            let attempts = Attempts::default();
            let publish = self.publish(to, &message, &attempts);
            tokio::pin!(publish);
            let sent = tokio::select! {
                sent = &mut publish => sent?,
                () = self.broker_takes_messages_for(STALLED_AFTER) => {
                    let message = format!("dead-letter queue {queue:?} takes no message now");
                    waiting = Some(self.counters.count_waiting_dead_letter(message, waiting));
                    publish.await?
                }
            };
            let failure = match sent {
                PublishOutcome::Confirmed => {
                    let reason = reason.as_str().to_owned();
                    self.counters
                        .count(|stats: &mut Stats| *stats.dead_lettered.entry(reason).or_default() += 1);
                    return Ok(());
                }
                PublishOutcome::Refused(message) if !has_dropped_headers => {
                    tracing::warn!(
                        queue,
                        error = message,
                        "dead letter refused; dropping its producer's headers"
                    );
                    (dead_letter, has_dropped_headers) = (without_producer_headers(dead_letter), true);
                    continue;
                }
                PublishOutcome::Unroutable => match self.publisher.restore().await {
                    Ok(true) if failures == 0 => "it did not exist, and was made again".to_owned(),
                    Ok(true) => "it does not exist, though it was made again".to_owned(),
                    Ok(false) => "it does not exist; make it, or set broker.declare = true".to_owned(),
                    Err(error) => format!("it does not exist, and cannot be made: {error}"),
                },
                PublishOutcome::Unconfirmed(message)
                | PublishOutcome::Evicted(message)
                | PublishOutcome::Refused(message) => message,
            };
            failures += 1;
            let message = format!("dead-letter queue {queue:?}: {failure}");
            tracing::warn!(error = message, failures, "a dead letter waits");
            waiting = Some(self.counters.count_waiting_dead_letter(message, waiting));
            tokio::time::sleep(RETRY_BACKOFF.delay(failures, rand::random())).await;
        }
    }
}
