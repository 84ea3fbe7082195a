//! Decides who gets which message of one queue, and in what order: a pure state machine, time
//! passed in. Owns the ready messages, the consumers and what each has not settled. Never reads a
//! clock, never sends, knows no socket; what has to happen elsewhere (a dead letter) is returned.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use crate::protocol::{Message, Value};

/// Names a consumer of one queue. Never reused within the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConsumerId(u64);

/// A message on its way to a consumer, to be settled by `tag`.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueDelivery {
    /// Who gets it.
    pub consumer: ConsumerId,
    /// Its name for settling, counting from 1 for each consumer.
    pub tag: u64,
    /// It was delivered before.
    pub redelivered: bool,
    /// Earlier deliveries that were not acked.
    pub delivery_count: u64,
    /// The message.
    pub message: Message,
}

/// How full a queue is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Messages waiting for a consumer.
    pub ready: usize,
    /// Messages delivered and not settled.
    pub unacked: usize,
}

/// An `expiration` that is not a number of milliseconds in decimal digits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expiration {0:?} is not a number of milliseconds")]
pub struct BadExpiration(String);

/// What settling did.
#[derive(Debug, Default, PartialEq)]
pub struct Returned {
    /// The tag was known. False: settled before, or never delivered to this consumer.
    pub known: bool,
    /// Messages over the delivery limit, no longer in this queue: for the dead-letter queue, their
    /// `reason` already in the headers.
    pub dead: Vec<Message>,
}

#[derive(Debug)]
struct Entry {
    message: Message,
    returns: u64,
    expires: Option<Instant>,
}

#[derive(Debug)]
struct Consumer {
    prefetch: NonZeroU16,
    cancelled: bool,
    next_tag: u64,
    /// By tag: the message and the position that it returns to.
    unacked: BTreeMap<u64, (u64, Entry)>,
}

impl Consumer {
    fn has_room(&self) -> bool {
        !self.cancelled && self.unacked.len() < usize::from(self.prefetch.get())
    }
}

/// One queue.
#[derive(Debug, Default)]
pub struct Queue {
    delivery_limit: Option<u64>,
    next_position: u64,
    /// By position, which a message keeps for life: a return is an insert at the old key.
    ready: BTreeMap<u64, Entry>,
    next_consumer: u64,
    consumers: BTreeMap<ConsumerId, Consumer>,
    /// Whose turn it is: the front was served longest ago.
    turns: VecDeque<ConsumerId>,
}

impl Queue {
    /// An empty queue. A message that returns more often than `delivery_limit` leaves it as a dead
    /// letter; none: it returns for ever.
    pub fn new(delivery_limit: Option<u64>) -> Self {
        Self { delivery_limit, ..Self::default() }
    }

    /// Puts a message at the end.
    ///
    /// # Errors
    /// [`BadExpiration`]: refuse the message.
    pub fn publish(&mut self, message: Message, now: Instant) -> Result<(), BadExpiration> {
        let expires = match &message.properties.expiration {
            // A time beyond what the clock can hold is never.
            Some(text) => now.checked_add(milliseconds(text)?),
            None => None,
        };
        self.append(message, expires);
        Ok(())
    }

    /// Puts a dead letter at the end. Its `expiration` was for the queue it comes from: here it
    /// stays until someone takes it.
    pub fn publish_dead_letter(&mut self, message: Message) {
        self.append(message, None);
    }

    fn append(&mut self, message: Message, expires: Option<Instant>) {
        self.ready.insert(self.next_position, Entry { message, returns: 0, expires });
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

    /// The consumer holds at most so many unsettled messages from now on; what it holds, it keeps.
    pub fn set_prefetch(&mut self, id: ConsumerId, prefetch: NonZeroU16) {
        if let Some(consumer) = self.consumers.get_mut(&id) {
            consumer.prefetch = prefetch;
        }
    }

    /// The consumer gets no more; what it holds stays its own until settled.
    pub fn cancel(&mut self, id: ConsumerId) {
        if let Some(consumer) = self.consumers.get_mut(&id) {
            consumer.cancelled = true;
        }
        self.turns.retain(|turn| *turn != id);
    }

    /// The consumer is gone: what it holds returns to its old places.
    pub fn remove_consumer(&mut self, id: ConsumerId) -> Returned {
        self.turns.retain(|turn| *turn != id);
        let Some(consumer) = self.consumers.remove(&id) else {
            return Returned::default();
        };
        let dead = consumer
            .unacked
            .into_values()
            .filter_map(|(position, entry)| self.put_back(position, entry))
            .collect();
        Returned { known: true, dead }
    }

    /// Removes a message for good. False: the tag is not known.
    pub fn ack(&mut self, id: ConsumerId, tag: u64) -> bool {
        self.take_unacked(id, tag).is_some()
    }

    /// Returns a message to its old place.
    pub fn requeue(&mut self, id: ConsumerId, tag: u64) -> Returned {
        let Some((position, entry)) = self.take_unacked(id, tag) else {
            return Returned::default();
        };
        Returned { known: true, dead: self.put_back(position, entry).into_iter().collect() }
    }

    fn take_unacked(&mut self, id: ConsumerId, tag: u64) -> Option<(u64, Entry)> {
        self.consumers.get_mut(&id)?.unacked.remove(&tag)
    }

    /// The message itself when it is over the delivery limit.
    fn put_back(&mut self, position: u64, mut entry: Entry) -> Option<Message> {
        entry.returns += 1;
        if self.delivery_limit.is_some_and(|limit| entry.returns > limit) {
            return Some(out_of_attempts(entry));
        }
        self.ready.insert(position, entry);
        None
    }

    /// The next message for the next consumer with room, or none. Call until none.
    pub fn deliver(&mut self, now: Instant) -> Option<QueueDelivery> {
        self.drop_expired_head(now);
        if self.ready.is_empty() {
            return None;
        }
        let turn = self.turns.iter().position(|id| self.consumers[id].has_room())?;
        let id = self.turns.remove(turn)?;
        self.turns.push_back(id);
        let consumer = self.consumers.get_mut(&id)?;
        let (position, entry) = self.ready.pop_first()?;
        let tag = consumer.next_tag;
        consumer.next_tag += 1;
        let queue_delivery = QueueDelivery {
            consumer: id,
            tag,
            redelivered: entry.returns > 0,
            delivery_count: entry.returns,
            message: entry.message.clone(),
        };
        consumer.unacked.insert(tag, (position, entry));
        Some(queue_delivery)
    }

    /// Drops what has expired at the head. As in RabbitMQ, one that expires further back stays
    /// until it gets there.
    fn drop_expired_head(&mut self, now: Instant) {
        while let Some(head) = self.ready.first_entry() {
            if head.get().expires.is_none_or(|at| at >= now) {
                return;
            }
            head.remove();
        }
    }

    /// How full the queue is.
    pub fn stats(&mut self, now: Instant) -> Stats {
        self.drop_expired_head(now);
        let unacked = self.consumers.values().map(|consumer| consumer.unacked.len()).sum();
        Stats { ready: self.ready.len(), unacked }
    }

    /// Messages waiting for a consumer.
    pub fn ready(&self) -> usize {
        self.ready.len()
    }
}

fn milliseconds(text: &str) -> Result<Duration, BadExpiration> {
    // `parse` alone would take a sign.
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(number) if digits => Ok(Duration::from_millis(number)),
        _ => Err(BadExpiration(text.to_owned())),
    }
}

fn out_of_attempts(entry: Entry) -> Message {
    let mut message = entry.message;
    let properties = &mut message.properties;
    let id = properties.message_id.as_ref().or(properties.correlation_id.as_ref()).cloned();
    let error = format!("delivered {} times without an ack", entry.returns);
    properties.headers.insert("reason".to_owned(), Value::from("attempts"));
    properties.headers.insert("error".to_owned(), Value::from(error));
    if let Some(id) = id {
        properties.headers.insert("task_id".to_owned(), Value::from(id));
    }
    message
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
