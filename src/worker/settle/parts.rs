//! The parts of one task's reply, before the reply itself: published while the task is computed, the first at
//! once and then at most one each [`EVERY`] a sequence. Advisory: what is lost is in the reply. Owns the part
//! that is under way; while it is, or while its queue takes nothing, further pieces gather in the engine.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::Settlement;
use crate::broker::Published;
use crate::engine::Job;
use crate::protocol::reply::{Place, part};
use crate::protocol::{Body, Task};

/// Between two parts of a sequence, at least.
const EVERY: Duration = Duration::from_millis(50);
/// How long the reply waits for the last part to be taken.
const LAST: Duration = Duration::from_millis(250);

/// The parts of a task that asked for them.
pub(in crate::worker) struct Parts<'a> {
    settlement: &'a Settlement,
    task: &'a Arc<Task>,
    queue: &'a str,
    place: Place,
    /// The parts under way, one after the other. True: they reached nobody.
    sending: Option<BoxFuture<'a, bool>>,
    not_before: Instant,
    reaches_nobody: bool,
}

impl<'a> Parts<'a> {
    /// None: the task did not ask for parts, or nobody waits for them.
    pub(in crate::worker) fn of(
        settlement: &'a Settlement,
        task: &'a Arc<Task>,
        job: &dyn Job,
    ) -> Option<Self> {
        if !job.is_streamed() {
            return None;
        }
        let Some(queue) = task.reply_to() else {
            tracing::info!(task.id = task.id, "asks for a reply in parts, and has no reply_to");
            return None;
        };
        let place = Place { stream_id: uuid::Uuid::new_v4().to_string(), seq: 0 };
        let not_before = Instant::now();
        Some(Self { settlement, task, queue, place, sending: None, not_before, reaches_nobody: false })
    }

    /// The next may be sent.
    pub(in crate::worker) fn is_ready(&self) -> bool {
        self.sending.is_none() && !self.reaches_nobody && self.not_before <= Instant::now()
    }

    /// Nobody listens: the broker has returned one.
    pub(in crate::worker) fn reaches_nobody(&self) -> bool {
        self.reaches_nobody
    }

    /// Sends these, behind those under way.
    pub(in crate::worker) fn send(&mut self, bodies: Vec<Body>) {
        let before = self.sending.take();
        let mut messages = Vec::with_capacity(bodies.len());
        for body in bodies {
            messages.push(Arc::new(part(self.task, body, &self.place)));
            self.place.seq += 1;
        }
        let (publisher, queue) = (self.settlement.publisher.clone(), self.queue);
        self.not_before = Instant::now() + EVERY;
        self.sending = Some(Box::pin(async move {
            if let Some(before) = before
                && before.await
            {
                return true;
            }
            for message in messages {
                // What else may come of it concerns the reply, which will find out.
                if let Ok(Published::Unroutable) = publisher.publish(queue, message).await {
                    return true;
                }
            }
            false
        }));
    }

    /// Returns when those under way are taken, or when the next may be sent.
    pub(in crate::worker) async fn progress(&mut self) {
        match &mut self.sending {
            Some(sending) => {
                self.reaches_nobody |= sending.await;
                self.sending = None;
            }
            None if self.reaches_nobody => std::future::pending().await,
            None => tokio::time::sleep_until(self.not_before).await,
        }
    }

    /// Waits for those under way, not for ever. True: one of them has reached nobody.
    pub(in crate::worker) async fn finish(self) -> bool {
        match self.sending {
            Some(sending) => tokio::time::timeout(LAST, sending).await.unwrap_or(false),
            None => self.reaches_nobody,
        }
    }
}
