//! The parts of one task's reply, published while the task is computed: the first at once, then at most one per
//! [`EVERY`] and sequence. Parts may be lost: the reply has everything. Owns the part that is being published;
//! until it is confirmed, further pieces gather in the engine.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::Settlement;
use crate::broker::Published;
use crate::engine::Job;
use crate::protocol::reply::{Place, part};
use crate::protocol::{Body, Task};

/// The least time between two parts of a sequence.
const EVERY: Duration = Duration::from_millis(50);
/// How long the reply waits for the last part to be confirmed.
const LAST: Duration = Duration::from_millis(250);

/// The parts of a task's reply.
pub(in crate::worker) struct Parts<'a> {
    settlement: &'a Settlement,
    task: &'a Arc<Task>,
    queue: &'a str,
    place: Place,
    /// The parts that are being published, one after the other. Returns true if the broker could not route one.
    sending: Option<BoxFuture<'a, bool>>,
    not_before: Instant,
    reaches_nobody: bool,
}

impl<'a> Parts<'a> {
    /// None: the task did not ask for parts, or has no `reply_to`.
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

    pub(in crate::worker) fn is_ready(&self) -> bool {
        self.sending.is_none() && !self.reaches_nobody && self.not_before <= Instant::now()
    }

    /// The broker has returned a part as unroutable: nobody listens.
    pub(in crate::worker) fn reaches_nobody(&self) -> bool {
        self.reaches_nobody
    }

    /// Sends these parts after those already being published.
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
                // Any other failure concerns the reply too, which handles it.
                if let Ok(Published::Unroutable) = publisher.publish(queue, message).await {
                    return true;
                }
            }
            false
        }));
    }

    /// Returns when the parts being published are confirmed, or when the next may be sent.
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

    /// Waits, at most [`LAST`], for the parts being published. True: the broker could not route one.
    pub(in crate::worker) async fn finish(self) -> bool {
        match self.sending {
            Some(sending) => tokio::time::timeout(LAST, sending).await.unwrap_or(false),
            None => self.reaches_nobody,
        }
    }
}
