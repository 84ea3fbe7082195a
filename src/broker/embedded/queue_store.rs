//! Holds the queues of one launcher and moves messages between them and their consumers. Owns every queue, behind
//! one lock. Does no I/O.

use std::collections::HashMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use super::queue::{ConsumerId, Queue, QueueCounts, QueueDelivery};
use super::wire::LauncherHead;
use crate::protocol::Message;

/// A queue to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueSpec {
    /// Its name, which is unique.
    pub name: String,
    /// False: messages are confirmed and dropped, because nobody reads them.
    pub kept: bool,
}

/// Sends answers to one connection's writer.
#[derive(Clone, Debug)]
pub(super) struct ConnectionOutlet {
    /// The connection's number.
    pub id: u64,
    /// Responses and the bodies of deliveries. The queue store and the connection's reader write; its writer reads.
    /// Bound: [`OUTLET_BOUND`]. A peer within its prefetch and pipelining limits never fills it.
    pub frames: mpsc::Sender<(LauncherHead, Bytes)>,
    /// Cancelled when a frame cannot be sent: the peer has exceeded the bound, or the writer has failed. The
    /// connection's reader then disconnects the peer.
    pub disconnect: CancellationToken,
}

/// Bound of a connection's frames: the largest prefetch, and 8,192 others for the confirms of the publishes under
/// way and the few answers to consume, cancel, leave and close.
pub(super) const OUTLET_BOUND: usize = u16::MAX as usize + 8_192;

impl ConnectionOutlet {
    /// Sends without waiting. If the channel is full, the peer has exceeded its bounds: it is disconnected, and
    /// its deliveries return to the queue when its connection ends.
    pub fn send(&self, head: LauncherHead, body: Bytes) {
        if self.frames.try_send((head, body)).is_err() {
            self.disconnect.cancel();
        }
    }
}

/// Identifies one consumer among those of all queues.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConsumerKey {
    queue: usize,
    id: ConsumerId,
}

/// A queue and the connections of its consumers.
struct StoredQueue {
    kept: bool,
    queue: Queue,
    outlets: HashMap<ConsumerId, ConnectionOutlet>,
}

pub(super) struct QueueStore {
    /// Locked by every connection, for map operations only, never across an await. Messages to consumers are
    /// sent under the lock, so that each consumer receives them in the order of the queue's decisions.
    /// Each operation leaves the queues consistent before anything in it can panic.
    queues: Mutex<Vec<StoredQueue>>,
    /// Index in `queues` by name; fixed at start.
    index_by_name: HashMap<String, usize>,
    /// Wakes [`QueueStore::drained`] when a consumer has settled a message.
    settled: Notify,
}

impl QueueStore {
    /// Creates the queues of `specs`. The error is a message that names the queue that occurs twice.
    pub fn new(specs: &[QueueSpec]) -> Result<Self, String> {
        let mut index_by_name = HashMap::new();
        for (index, spec) in specs.iter().enumerate() {
            if index_by_name.insert(spec.name.clone(), index).is_some() {
                return Err(format!("queue {:?} is named twice", spec.name));
            }
        }
        let stored = |kept| StoredQueue { kept, queue: Queue::default(), outlets: HashMap::new() };
        let queues = specs.iter().map(|spec| stored(spec.kept)).collect();
        Ok(Self { queues: Mutex::new(queues), index_by_name, settled: Notify::new() })
    }

    /// Accepts a message, which reaches its queue at once or after a delay. The number of delayed messages is bounded
    /// by the tasks that `run-batch` has under way.
    pub fn publish(
        self: &Arc<Self>,
        outlet: &ConnectionOutlet,
        id: u64,
        queue: &str,
        delay: Option<Duration>,
        message: Message,
    ) {
        let Some(&index) = self.index_by_name.get(queue) else {
            return outlet.send(LauncherHead::Unroutable { id }, Bytes::new());
        };
        outlet.send(LauncherHead::Confirmed { id }, Bytes::new());
        let Some(delay) = delay else { return enqueue(&mut self.queues.lock()[index], message) };
        let store = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            enqueue(&mut store.queues.lock()[index], message);
        });
    }

    /// Adds a consumer, and sends `Consuming` before its first message. None: the queue does not exist.
    pub fn add_consumer(
        &self,
        queue: &str,
        prefetch: NonZeroU16,
        outlet: ConnectionOutlet,
    ) -> Option<ConsumerKey> {
        let index = *self.index_by_name.get(queue)?;
        let mut queues = self.queues.lock();
        let stored = &mut queues[index];
        let id = stored.queue.add_consumer(prefetch);
        outlet.send(LauncherHead::Consuming, Bytes::new());
        stored.outlets.insert(id, outlet);
        deliver_ready(stored);
        Some(ConsumerKey { queue: index, id })
    }

    /// Applies `change` to a consumer's queue, and delivers what may be delivered after it.
    pub fn change<T>(&self, consumer: ConsumerKey, change: impl FnOnce(&mut Queue, ConsumerId) -> T) -> T {
        let result = {
            let stored = &mut self.queues.lock()[consumer.queue];
            let result = change(&mut stored.queue, consumer.id);
            deliver_ready(stored);
            result
        };
        self.settled.notify_waiters();
        result
    }

    /// Stops deliveries to a consumer, and sends `Cancelled` after its last message.
    pub fn cancel_consumer(&self, consumer: ConsumerKey) {
        let stored = &mut self.queues.lock()[consumer.queue];
        stored.queue.cancel(consumer.id);
        if let Some(outlet) = stored.outlets.get(&consumer.id) {
            outlet.send(LauncherHead::Cancelled, Bytes::new());
        }
    }

    /// Removes a consumer; its unsettled messages return.
    pub fn remove_consumer(&self, consumer: ConsumerKey) {
        let stored = &mut self.queues.lock()[consumer.queue];
        stored.outlets.remove(&consumer.id);
        stored.queue.remove_consumer(consumer.id);
        deliver_ready(stored);
    }

    /// The number of messages of a queue, by their state; none: the queue does not exist.
    pub fn stats(&self, queue: &str) -> Option<QueueCounts> {
        self.index_by_name.get(queue).map(|index| self.queues.lock()[*index].queue.stats())
    }

    /// Returns once a queue holds no message, or if it does not exist.
    pub async fn drained(&self, queue: &str) {
        loop {
            // Created before the queue is read, so that what is settled after the read is noticed.
            let settled = self.settled.notified();
            if self.stats(queue).is_none_or(|stats| stats.ready + stats.unacked == 0) {
                return;
            }
            settled.await;
        }
    }
}

fn enqueue(stored: &mut StoredQueue, message: Message) {
    if stored.kept {
        stored.queue.publish(message);
        deliver_ready(stored);
    }
}

/// Delivers ready messages while a consumer has room. Called after every change of a queue.
fn deliver_ready(stored: &mut StoredQueue) {
    while let Some(delivery) = stored.queue.deliver() {
        if let Some(outlet) = stored.outlets.get(&delivery.consumer) {
            let QueueDelivery { tag, redelivered, delivery_count, message, .. } = delivery;
            let properties = Box::new(message.properties);
            let head = LauncherHead::Deliver { tag, redelivered, delivery_count, properties };
            outlet.send(head, message.body);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_queue_is_drained_once_its_last_message_is_acked() {
        let store = Arc::new(QueueStore::new(&[QueueSpec { name: "replies".into(), kept: true }]).unwrap());
        let (frames, _received) = mpsc::channel(8);
        let outlet = ConnectionOutlet { id: 0, frames, disconnect: CancellationToken::new() };
        assert!(store.drained("replies").now_or_never().is_some(), "it is empty");
        store.publish(&outlet, 1, "replies", None, Message::default());
        let waiter = store.clone();
        let drained = tokio::spawn(async move { waiter.drained("replies").await });
        let consumer = store.add_consumer("replies", NonZeroU16::MIN, outlet).unwrap();
        tokio::task::yield_now().await;
        assert!(!drained.is_finished(), "its message is delivered and not acked");
        assert!(store.change(consumer, |queue, id| queue.ack(id, 1)));
        drained.await.unwrap();
    }
}
