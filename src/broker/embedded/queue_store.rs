//! Holds the queues of one launcher and moves messages between them and their consumers. Decides when a
//! publisher waits. Owns every queue, behind one lock; never uses a socket.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU16;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::consumer_sender::{ConsumerSender, Outgoing};
use super::queue::{ConsumerId, Queue, Stats};
use super::wire::too_long;
use crate::broker::Published;
use crate::protocol::Message;

/// A queue to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueSpec {
    /// Its name, which is unique.
    pub name: String,
    /// Publishers wait while this many messages are ready. A message is accepted even then and only its confirm
    /// is delayed, so a connection can exceed the limit by the messages it publishes at once. None: messages
    /// are confirmed and dropped, because nobody reads them.
    pub max_ready: Option<usize>,
}

/// Names one consumer among all queues.
#[derive(Clone, Copy, Debug)]
pub(super) struct Membership {
    queue: usize,
    consumer: ConsumerId,
}

/// A confirm delayed because the queue is full: the worker publishes more slowly, while its acks go on.
struct HeldConfirm {
    consumer_sender: ConsumerSender,
    id: u64,
}

struct Slot {
    spec: QueueSpec,
    queue: Queue,
    consumer_senders: HashMap<ConsumerId, ConsumerSender>,
    /// In the order of publishing. Bound: [`super::wire::MAX_PIPELINE`] for each connection.
    held: VecDeque<HeldConfirm>,
}

impl Slot {
    fn is_full(&self) -> bool {
        self.spec.max_ready.is_some_and(|most| self.queue.ready() >= most)
    }
}

pub(super) struct QueueStore {
    /// Locked by every connection, for map operations only, never across an await. Messages to consumers are
    /// sent under the lock, so that each consumer receives them in the order of the queue's decisions.
    slots: Mutex<Vec<Slot>>,
    /// Name → index in `slots`; fixed at start.
    names: HashMap<String, usize>,
}

impl QueueStore {
    /// Makes the queues of `specs`. The error is a text: a name is used twice.
    pub fn new(specs: &[QueueSpec]) -> Result<Self, String> {
        let mut names = HashMap::new();
        for (index, spec) in specs.iter().enumerate() {
            if names.insert(spec.name.clone(), index).is_some() {
                return Err(format!("queue {:?} is named twice", spec.name));
            }
        }
        let slots = specs.iter().map(new_slot).collect();
        Ok(Self { slots: Mutex::new(slots), names })
    }

    fn slots(&self) -> MutexGuard<'_, Vec<Slot>> {
        // A panic poisons the lock; each operation leaves the queues consistent before anything in it can
        // panic.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts a worker's message at once; the confirm is sent when the queue is below its depth.
    pub fn publish_from(&self, consumer_sender: &ConsumerSender, id: u64, queue: &str, message: Message) {
        let answer = |outcome| consumer_sender.send(Outgoing::Published { id, outcome });
        let Some(&index) = self.names.get(queue) else {
            return answer(Published::Unroutable);
        };
        if let Some(reason) = too_long(&message) {
            return answer(Published::Refused(reason));
        }
        let slot = &mut self.slots()[index];
        if slot.is_full() {
            slot.held.push_back(HeldConfirm { consumer_sender: consumer_sender.clone(), id });
        } else {
            answer(Published::Confirmed);
        }
        put(slot, message);
    }

    /// Accepts a worker's message that reaches its queue after a delay. Bound: the tasks of that queue, which
    /// were acked for it.
    pub fn publish_later(
        self: Arc<Self>,
        consumer_sender: &ConsumerSender,
        id: u64,
        queue: String,
        (delay, message): (Duration, Message),
    ) {
        let outcome = match (self.names.contains_key(&queue), too_long(&message)) {
            (false, _) => Published::Unroutable,
            (true, Some(reason)) => Published::Refused(reason),
            (true, None) => Published::Confirmed,
        };
        let taken = outcome == Published::Confirmed;
        consumer_sender.send(Outgoing::Published { id, outcome });
        if taken {
            tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                if let Some(index) = self.names.get(&queue) {
                    put(&mut self.slots()[*index], message);
                }
            });
        }
    }

    /// Adds a consumer, and sends `Consuming` before its first message. None: the queue does not exist.
    pub fn join(
        &self,
        queue: &str,
        prefetch: NonZeroU16,
        consumer_sender: ConsumerSender,
    ) -> Option<Membership> {
        let index = *self.names.get(queue)?;
        let mut slots = self.slots();
        let slot = &mut slots[index];
        let consumer = slot.queue.add_consumer(prefetch);
        consumer_sender.send(Outgoing::Consuming);
        slot.consumer_senders.insert(consumer, consumer_sender);
        pump(slot);
        Some(Membership { queue: index, consumer })
    }

    /// Changes a consumer's prefetch.
    pub fn set_prefetch(&self, member: Membership, prefetch: NonZeroU16) {
        let mut slots = self.slots();
        let slot = &mut slots[member.queue];
        slot.queue.set_prefetch(member.consumer, prefetch);
        pump(slot);
    }

    /// Stops deliveries to a consumer, and sends `Cancelled` after its last message.
    pub fn cancel(&self, member: Membership) {
        let mut slots = self.slots();
        let slot = &mut slots[member.queue];
        slot.queue.cancel(member.consumer);
        if let Some(consumer_sender) = slot.consumer_senders.get(&member.consumer) {
            consumer_sender.send(Outgoing::Cancelled);
        }
    }

    /// Removes a message for good. False: the tag is not known.
    pub fn ack(&self, member: Membership, tag: u64) -> bool {
        let mut slots = self.slots();
        let slot = &mut slots[member.queue];
        let known = slot.queue.ack(member.consumer, tag);
        pump(slot);
        known
    }

    /// Returns a message to its place. False: the tag is not known.
    pub fn requeue(&self, member: Membership, tag: u64) -> bool {
        let slot = &mut self.slots()[member.queue];
        let known = slot.queue.requeue(member.consumer, tag);
        pump(slot);
        known
    }

    /// Removes a consumer; its unsettled messages return.
    pub fn leave(&self, member: Membership) {
        let slot = &mut self.slots()[member.queue];
        slot.consumer_senders.remove(&member.consumer);
        slot.queue.remove_consumer(member.consumer);
        pump(slot);
    }

    /// The connection has ended: drops its delayed confirms.
    pub fn forget(&self, consumer_sender: &ConsumerSender) {
        for slot in self.slots().iter_mut() {
            slot.held.retain(|held| held.consumer_sender.id != consumer_sender.id);
        }
    }

    /// Removes every consumer: nothing more is delivered.
    pub fn end(&self) {
        for slot in self.slots().iter_mut() {
            slot.consumer_senders.clear();
        }
    }

    /// How full a queue is; none: the queue does not exist.
    pub fn stats(&self, queue: &str) -> Option<Stats> {
        self.names.get(queue).map(|index| self.slots()[*index].queue.stats())
    }
}

fn new_slot(spec: &QueueSpec) -> Slot {
    Slot {
        queue: Queue::default(),
        spec: spec.clone(),
        consumer_senders: HashMap::new(),
        held: VecDeque::new(),
    }
}

fn put(slot: &mut Slot, message: Message) {
    if slot.spec.max_ready.is_some() {
        slot.queue.publish(message);
        pump(slot);
    }
}

/// Delivers as much as possible, then sends delayed confirms if there is room. Called after every change of a
/// queue.
fn pump(slot: &mut Slot) {
    while let Some(queue_delivery) = slot.queue.deliver() {
        if let Some(consumer_sender) = slot.consumer_senders.get(&queue_delivery.consumer) {
            consumer_sender.send(Outgoing::Deliver(Box::new(queue_delivery)));
        }
    }
    if slot.is_full() {
        return;
    }
    // The messages of these confirms are in the queue already, so confirming all of them adds none.
    for held in slot.held.drain(..) {
        let outcome = Published::Confirmed;
        held.consumer_sender.send(Outgoing::Published { id: held.id, outcome });
    }
}
