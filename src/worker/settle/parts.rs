//! The parts of one task's reply, published while the task is computed: the first at once, then at most one per
//! [`EVERY`] and sequence. Parts may be lost: the reply has everything. Owns the part that is being published;
//! until it is confirmed, further pieces gather in the engine.
//!
//! The reply is published only once the broker has answered each part: on a channel of its own, or after a connection
//! was lost, it might overtake one that is still under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use tokio::time::{Instant, timeout};

use super::Settlement;
use crate::broker::Published;
use crate::engine::Job;
use crate::protocol::reply::{Place, part};
use crate::protocol::{Body, Task};

/// The least time between two parts of a sequence.
const EVERY: Duration = Duration::from_millis(50);
/// The same after a part that reached no queue: the queue may be made again.
const UNROUTABLE: Duration = Duration::from_secs(1);
/// How long the reply waits for parts that are not sent yet. After it, they are left out.
const LAST: Duration = Duration::from_millis(250);

/// Returns once the broker has answered all parts that were sent to it.
pub(in crate::worker) type PartsAnswered = Shared<BoxFuture<'static, ()>>;

/// The parts of a task's reply.
pub(in crate::worker) struct Parts<'a> {
    settlement: &'a Settlement,
    task: &'a Arc<Task>,
    queue: Arc<str>,
    place: Place,
    /// The parts that are being published, one after the other. Returns true if the broker could not route the last.
    sending: Option<BoxFuture<'static, bool>>,
    /// Those that are not sent yet are left out. Written when the reply is ready, read before each part.
    leave_out: Arc<AtomicBool>,
    not_before: Instant,
    is_unroutable: bool,
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
        let (queue, leave_out, not_before) = (queue.into(), Arc::default(), Instant::now());
        Some(Self {
            settlement,
            task,
            queue,
            place,
            sending: None,
            leave_out,
            not_before,
            is_unroutable: false,
        })
    }

    pub(in crate::worker) fn is_ready(&self) -> bool {
        self.sending.is_none() && self.not_before <= Instant::now()
    }

    /// The broker has returned the latest part as unroutable.
    pub(in crate::worker) fn is_unroutable(&self) -> bool {
        self.is_unroutable
    }

    /// Sends these parts after those already being published.
    pub(in crate::worker) fn send(&mut self, bodies: Vec<Body>) {
        let before = self.sending.take();
        let mut messages = Vec::with_capacity(bodies.len());
        for body in bodies {
            messages.push(Arc::new(part(self.task, body, &self.place)));
            self.place.seq += 1;
        }
        let (publisher, queue) = (self.settlement.publisher.clone(), self.queue.clone());
        let leave_out = self.leave_out.clone();
        self.not_before = Instant::now() + EVERY;
        self.sending = Some(Box::pin(async move {
            let mut is_unroutable = match before {
                Some(before) => before.await,
                None => false,
            };
            for message in messages {
                if leave_out.load(Ordering::Relaxed) {
                    break;
                }
                // Any other failure concerns the reply too, which handles it.
                is_unroutable = matches!(publisher.publish(&queue, message).await, Ok(Published::Unroutable));
            }
            is_unroutable
        }));
    }

    /// Returns when the broker has answered the parts being published, or when the next may be sent.
    pub(in crate::worker) async fn progress(&mut self) {
        match &mut self.sending {
            Some(sending) => {
                self.is_unroutable = sending.await;
                self.sending = None;
                if self.is_unroutable {
                    self.not_before = Instant::now() + UNROUTABLE;
                }
            }
            None => tokio::time::sleep_until(self.not_before).await,
        }
    }

    /// No more parts follow. Those not sent within [`LAST`] are left out.
    pub(in crate::worker) fn finish(self) -> PartsAnswered {
        let Self { sending, leave_out, .. } = self;
        let answered = async move {
            let Some(mut sending) = sending else { return };
            if timeout(LAST, &mut sending).await.is_err() {
                leave_out.store(true, Ordering::Relaxed);
                sending.await;
            }
        };
        answered.boxed().shared()
    }
}
