//! The part of a dead-letter browser that one channel holds: consumers of its own take messages, acks and returns
//! settle them. Decides how many commands settle how many messages. Owns the channel and the account of
//! what is unsettled on it.
//!
//! RabbitMQ holds back what a channel settles on a quorum queue while more than 32 such commands are
//! under way: what it then sends at once has lost its order, and what it still holds at the channel's
//! end is forgotten. So there are never as many, without a pause: making and cancelling a consumer takes
//! its turn behind them, and its answer says that they have been acted on. What each consumer has brought
//! is settled by commands of its own, also where one of ours settles it all.

use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, Consumer, Error};

use super::ack_tracker::{Ack, AckTracker};
use super::connect::FAREWELL;
use super::convert::short;
use super::session::cancel;

/// Messages that one command hands back: of more, a quorum queue forgets the order.
const RETURNED_AT_ONCE: usize = 32;
/// Commands that hand back a full page: half of those that may be under way.
const RETURNS: usize = 16;
/// Acks under way at once, the other half.
const ACKS: usize = 15;

/// The messages that one channel holds for a browser.
pub(super) struct Page {
    channel: Channel,
    ack_tracker: AckTracker,
    consumers: u32,
    /// The last tag of each consumer of which something is unsettled, in order; others may be among them.
    ends: Vec<u64>,
    /// Acks since the broker was last known to have acted on all.
    acks: usize,
}

impl Page {
    /// An empty one.
    pub(super) async fn open(connection: &Connection) -> Result<Self, Error> {
        let channel = connection.create_channel().await?;
        Ok(Self { channel, ack_tracker: AckTracker::default(), consumers: 0, ends: Vec::new(), acks: 0 })
    }

    /// A consumer that brings so many messages. Until it has been cancelled nothing may be settled, or
    /// it would bring more.
    pub(super) async fn consume(&mut self, queue: &str, most: u16) -> Result<Consumer, Error> {
        self.consumers += 1;
        self.ends.push(self.ends.last().copied().unwrap_or_default());
        self.channel.basic_qos(most, BasicQosOptions::default()).await?;
        let name = short(&format!("look {:06}", self.consumers));
        let options = BasicConsumeOptions::default();
        self.channel.basic_consume(short(queue), name, options, FieldTable::default()).await
    }

    /// The consumer has brought this.
    pub(super) fn came(&mut self, delivery: &Delivery) {
        self.ack_tracker.delivered(delivery.delivery_tag, false);
        if let Some(end) = self.ends.last_mut() {
            *end = delivery.delivery_tag;
        }
    }

    /// How many messages another consumer may bring.
    pub(super) fn room(&self) -> u16 {
        let held: Vec<u64> = self.ack_tracker.unsettled().collect();
        let left = RETURNS.saturating_sub(self.runs(&held).count());
        u16::try_from(left * RETURNED_AT_ONCE).unwrap_or(u16::MAX)
    }

    /// Those of `tags` that one command hands back, for each such command.
    fn runs<'a>(&self, tags: &'a [u64]) -> impl Iterator<Item = &'a [u64]> {
        let of_one_consumer = tags.chunk_by(|one, other| self.consumer_of(*one) == self.consumer_of(*other));
        of_one_consumer.flat_map(|tags| tags.chunks(RETURNED_AT_ONCE))
    }

    /// The place among `ends` of the consumer that brought it.
    fn consumer_of(&self, tag: u64) -> usize {
        self.ends.partition_point(|end| *end < tag)
    }

    /// Cancels the consumer. What was on its way still comes, then its stream ends.
    pub(super) async fn cancel(&mut self, mut consumer: Consumer) -> Result<Vec<Delivery>, Error> {
        cancel(&self.channel, consumer.tag()).await;
        let mut last = Vec::new();
        while let Ok(Some(delivery)) = tokio::time::timeout(FAREWELL, consumer.next()).await {
            let delivery = delivery?;
            self.came(&delivery);
            last.push(delivery);
        }
        self.acks = 0;
        Ok(last)
    }

    /// To be acked with the next [`Page::settle`].
    pub(super) fn ack(&mut self, tag: u64) {
        self.ack_tracker.ack(tag);
    }

    /// Whether the message is neither acked nor to be acked.
    pub(super) fn holds(&self, tag: u64) -> bool {
        self.ack_tracker.is_unsettled(tag)
    }

    /// Acks what is to be acked. Returns messages that the pauses have brought: whoever consumes may be
    /// given one.
    pub(super) async fn settle(&mut self, queue: &str) -> Result<Vec<Delivery>, Error> {
        let mut brought = Vec::new();
        loop {
            let acks = self.ack_tracker.take();
            if acks.is_empty() {
                return Ok(brought);
            }
            for Ack { tag, multiple } in acks {
                self.channel.basic_ack(tag, BasicAckOptions { multiple }).await?;
                self.acks += if multiple { self.consumer_of(tag) + 1 } else { 1 };
                if self.acks >= ACKS {
                    let consumer = self.consume(queue, 1).await?;
                    brought.extend(self.cancel(consumer).await?);
                }
            }
            let first = self.ack_tracker.unsettled().next().unwrap_or(u64::MAX);
            self.ends.drain(..self.consumer_of(first));
        }
    }

    /// Hands these back to their places: all that is unsettled up to the last of them, in order. When it
    /// returns the queue has been told.
    pub(super) async fn hand_back(&mut self, tags: &[u64]) -> Result<(), Error> {
        let ends: Vec<u64> = self.runs(tags).filter_map(|run| run.last().copied()).collect();
        for last in ends {
            let all = BasicNackOptions { multiple: true, requeue: true };
            self.channel.basic_nack(last, all).await?;
        }
        // Answered by the channel, behind all that.
        self.channel.basic_qos(1, BasicQosOptions::default()).await
    }
}
