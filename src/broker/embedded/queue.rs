//! Decides which consumer gets which message of one queue, and in what order. Owns the ready messages, the consumers
//! and their unsettled messages. Does no I/O.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU16;

use crate::protocol::Message;

/// Identifies a consumer of one queue. Never reused within the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConsumerId(u64);

/// A message for a consumer, which settles it by `tag`.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueDelivery {
    /// The consumer.
    pub consumer: ConsumerId,
    /// The tag used to settle it, counting from 1 for each consumer.
    pub tag: u64,
    /// Whether it was delivered before.
    pub redelivered: bool,
    /// Number of earlier deliveries that were not acked.
    pub delivery_count: u64,
    /// The message.
    pub message: Message,
}

/// The number of messages of a queue, by their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCounts {
    /// Messages waiting for a consumer.
    pub ready: usize,
    /// Messages delivered and not settled.
    pub unacked: usize,
}

#[derive(Debug)]
struct Entry {
    message: Message,
    /// Its position in the queue, to which it returns if it is not acked.
    position: u64,
    /// How many times the message was returned to the queue.
    returns: u64,
}

#[derive(Debug)]
struct Consumer {
    prefetch: NonZeroU16,
    cancelled: bool,
    next_tag: u64,
    /// By tag.
    unacked: BTreeMap<u64, Entry>,
}

impl Consumer {
    fn has_room(&self) -> bool {
        !self.cancelled && self.unacked.len() < usize::from(self.prefetch.get())
    }
}

/// One queue.
#[derive(Debug, Default)]
pub struct Queue {
    next_position: u64,
    /// By position.
    ready: BTreeMap<u64, Entry>,
    next_consumer: u64,
    consumers: BTreeMap<ConsumerId, Consumer>,
    /// Consumers in the order of their turns. The one at the front was served longest ago.
    turns: VecDeque<ConsumerId>,
}

impl Queue {
    /// Puts a message at the end.
    pub fn publish(&mut self, message: Message) {
        let entry = Entry { message, position: self.next_position, returns: 0 };
        self.ready.insert(entry.position, entry);
        self.next_position += 1;
    }

    /// Adds a consumer that holds at most `prefetch` unsettled messages.
    pub fn add_consumer(&mut self, prefetch: NonZeroU16) -> ConsumerId {
        let id = ConsumerId(self.next_consumer);
        self.next_consumer += 1;
        let consumer = Consumer { prefetch, cancelled: false, next_tag: 1, unacked: BTreeMap::new() };
        self.consumers.insert(id, consumer);
        self.turns.push_back(id);
        id
    }

    /// Sets how many unsettled messages the consumer holds at most; it keeps those it has.
    pub fn set_prefetch(&mut self, id: ConsumerId, prefetch: NonZeroU16) {
        if let Some(consumer) = self.consumers.get_mut(&id) {
            consumer.prefetch = prefetch;
        }
    }

    /// Stops deliveries to the consumer; it keeps its unsettled messages.
    pub fn cancel(&mut self, id: ConsumerId) {
        if let Some(consumer) = self.consumers.get_mut(&id) {
            consumer.cancelled = true;
        }
        self.turns.retain(|turn| *turn != id);
    }

    /// Removes the consumer; its unsettled messages return to their positions.
    pub fn remove_consumer(&mut self, id: ConsumerId) {
        self.turns.retain(|turn| *turn != id);
        let Some(consumer) = self.consumers.remove(&id) else { return };
        consumer.unacked.into_values().for_each(|entry| self.put_back(entry));
    }

    /// Removes a message for good. False: the tag is not known.
    pub fn ack(&mut self, id: ConsumerId, tag: u64) -> bool {
        self.take_unacked(id, tag).is_some()
    }

    /// Returns a message to its position. False: the tag is not known.
    pub fn requeue(&mut self, id: ConsumerId, tag: u64) -> bool {
        let Some(entry) = self.take_unacked(id, tag) else { return false };
        self.put_back(entry);
        true
    }

    fn take_unacked(&mut self, id: ConsumerId, tag: u64) -> Option<Entry> {
        self.consumers.get_mut(&id)?.unacked.remove(&tag)
    }

    fn put_back(&mut self, mut entry: Entry) {
        entry.returns += 1;
        self.ready.insert(entry.position, entry);
    }

    /// Delivers the next message to the next consumer with room. Call it until it returns none.
    pub fn deliver(&mut self) -> Option<QueueDelivery> {
        if self.ready.is_empty() {
            return None;
        }
        let turn = self.turns.iter().position(|id| self.consumers[id].has_room())?;
        let id = self.turns.remove(turn)?;
        self.turns.push_back(id);
        let consumer = self.consumers.get_mut(&id)?;
        let (_, entry) = self.ready.pop_first()?;
        let tag = consumer.next_tag;
        consumer.next_tag += 1;
        let queue_delivery = QueueDelivery {
            consumer: id,
            tag,
            redelivered: entry.returns > 0,
            delivery_count: entry.returns,
            message: entry.message.clone(),
        };
        consumer.unacked.insert(tag, entry);
        Some(queue_delivery)
    }

    /// The number of messages, by their state.
    pub fn stats(&self) -> QueueCounts {
        let unacked = self.consumers.values().map(|consumer| consumer.unacked.len()).sum();
        QueueCounts { ready: self.ready.len(), unacked }
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
