//! Publishes the parts of one task's reply while the task is computed: the first at once, and then at most one per
//! [`PART_INTERVAL`] and sequence. Parts may be lost, because the reply contains everything. Until the parts are
//! confirmed, further pieces gather in the engine. Owns the parts that are being published.
//!
//! The reply is published only once the broker has answered each part. On a channel of its own, or after a lost
//! connection, it might otherwise overtake a part that is still under way.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use super::Settlement;
use crate::broker::{Published, Publisher};
use crate::engine::Job;
use crate::protocol::reply::{PartPosition, part};
use crate::protocol::{Body, Message, Task};

/// The shortest time between two parts of a sequence.
const PART_INTERVAL: Duration = Duration::from_millis(50);
/// The pause after a part that reached no queue. The queue may be declared again.
const UNROUTABLE_PAUSE: Duration = Duration::from_secs(1);
/// How long the reply waits for parts that are not sent yet. After that time they are left out.
const SEND_GRACE: Duration = Duration::from_millis(250);

/// Resolves once the broker has confirmed, returned or refused each part that was sent to it.
pub(in crate::worker) type PartsAnswered = Shared<BoxFuture<'static, ()>>;

/// The parts of a task's reply.
pub(in crate::worker) struct Parts {
    publisher: Arc<dyn Publisher>,
    task: Arc<Task>,
    queue: Arc<str>,
    place: PartPosition,
    unsent: Unsent,
    /// Publishes the unsent parts, one after the other. Resolves with true if the broker could not route the last one.
    sending: Option<BoxFuture<'static, bool>>,
    not_before: Instant,
    /// Time until which the reply waits for parts that are not sent yet. None while the task is computed.
    send_until: Option<Instant>,
    is_unroutable: bool,
}

/// Parts that are written and not sent. Filled by the task's run, emptied by `sending`, both on the worker's thread.
/// Bound: what is written in about 10 ms ([`Job::unwritten`]), since more is written only once these are sent.
#[derive(Clone, Default)]
struct Unsent(Arc<Mutex<VecDeque<Arc<Message>>>>);

impl Unsent {
    fn next(&self) -> Option<Arc<Message>> {
        self.0.lock().pop_front()
    }
}

impl Parts {
    /// Starts the parts of a task's reply. None: the task did not request parts, or has no `reply_to`.
    pub(in crate::worker) fn start(settlement: &Settlement, task: &Arc<Task>, job: &dyn Job) -> Option<Self> {
        if !job.is_streamed() {
            return None;
        }
        let Some(queue) = task.reply_to() else {
            tracing::info!(task.id = task.id, "asks for a reply in parts, and has no reply_to");
            return None;
        };
        Some(Self {
            publisher: settlement.publisher.clone(),
            task: task.clone(),
            queue: queue.into(),
            place: PartPosition { stream_id: uuid::Uuid::new_v4().to_string(), seq: 0 },
            unsent: Unsent::default(),
            sending: None,
            not_before: Instant::now(),
            send_until: None,
            is_unroutable: false,
        })
    }

    /// Returns whether the next part may be sent: none is being published, and the pause after the last is over.
    pub(in crate::worker) fn is_ready(&self) -> bool {
        self.sending.is_none() && self.not_before <= Instant::now()
    }

    /// Whether the broker has returned the latest part as unroutable.
    pub(in crate::worker) fn is_unroutable(&self) -> bool {
        self.is_unroutable
    }

    /// Sends these parts after those already being published.
    pub(in crate::worker) fn send(&mut self, bodies: Vec<Body>) {
        if bodies.is_empty() {
            return;
        }
        let mut unsent = self.unsent.0.lock();
        for body in bodies {
            unsent.push_back(Arc::new(part(&self.task, body, &self.place)));
            self.place.seq += 1;
        }
        drop(unsent);
        self.not_before = Instant::now() + PART_INTERVAL;
        let (publisher, queue, unsent) = (self.publisher.clone(), self.queue.clone(), self.unsent.clone());
        let publish = async move {
            let mut is_unroutable = false;
            while let Some(message) = unsent.next() {
                // Any other failure also affects the reply, and is handled there.
                is_unroutable = matches!(publisher.publish(&queue, message).await, Ok(Published::Unroutable));
            }
            is_unroutable
        };
        self.sending.get_or_insert_with(|| Box::pin(publish));
    }

    /// Returns when the broker has answered the parts being published, or when the next may be sent.
    pub(in crate::worker) async fn progress(&mut self) {
        match &mut self.sending {
            Some(sending) => {
                self.is_unroutable = sending.await;
                self.sending = None;
                if self.is_unroutable {
                    self.not_before = Instant::now() + UNROUTABLE_PAUSE;
                }
            }
            None => tokio::time::sleep_until(self.not_before).await,
        }
    }

    /// Waits until all parts are sent, now that the task is computed; all such waits together take at most
    /// [`SEND_GRACE`]. Returns false if that time is over: parts that are not under way by then are left out, and no
    /// more should be written.
    pub(in crate::worker) async fn send_last(&mut self) -> bool {
        let send_until = *self.send_until.get_or_insert_with(|| Instant::now() + SEND_GRACE);
        let Some(sending) = &mut self.sending else { return true };
        let is_sent = timeout_at(send_until, sending).await.is_ok();
        if is_sent {
            self.sending = None;
        } else {
            self.unsent.0.lock().clear();
        }
        is_sent
    }

    /// Ends the parts. Returns a future that resolves once the broker has answered all that were sent. Those that are
    /// not sent in time are left out.
    pub(in crate::worker) fn finish(mut self) -> PartsAnswered {
        let answered = async move {
            if !self.send_last().await
                && let Some(sending) = self.sending
            {
                sending.await;
            }
        };
        answered.boxed().shared()
    }
}
