//! The part of a look that one channel holds: consumers of its own take messages, acks and returns
//! settle them. Decides how many commands settle how many messages. Owns the channel and the account of
//! what is unsettled on it.
//!
//! RabbitMQ holds back what a channel settles on a quorum queue while more than 32 such commands are
//! under way: what it then sends at once has lost its order, and what it still holds at the channel's
//! end is forgotten. So there are never as many, without a pause: making and cancelling a consumer takes
//! its turn behind them, and its answer says that they have been acted on.

use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, Consumer, Error};

use super::convert::short;
use super::ledger::{Ack, Ledger};
use super::session::{FAREWELL, cancel};

/// Most messages of a page.
pub(super) const FULL: u16 = 512;
/// Messages that one command hands back: of more, a quorum queue forgets the order. A full page takes
/// half of the commands that may be under way.
const RETURNED_AT_ONCE: usize = 32;
/// Acks under way at once, the other half.
const ACKS: usize = 15;

/// See the module.
pub(super) struct Page {
    channel: Channel,
    ledger: Ledger,
    consumers: u32,
    /// Acks since the broker was last known to have acted on all.
    acks: usize,
}

impl Page {
    /// An empty one.
    pub(super) async fn open(connection: &Connection) -> Result<Self, Error> {
        let channel = connection.create_channel().await?;
        Ok(Self { channel, ledger: Ledger::default(), consumers: 0, acks: 0 })
    }

    /// A consumer that brings so many messages. Until it has been cancelled nothing may be settled, or
    /// it would bring more.
    pub(super) async fn consume(&mut self, queue: &str, most: u16) -> Result<Consumer, Error> {
        self.consumers += 1;
        self.channel.basic_qos(most, BasicQosOptions::default()).await?;
        let name = short(&format!("look {:06}", self.consumers));
        let options = BasicConsumeOptions::default();
        self.channel.basic_consume(short(queue), name, options, FieldTable::default()).await
    }

    /// The consumer has brought this.
    pub(super) fn came(&mut self, delivery: &Delivery) {
        self.ledger.delivered(delivery.delivery_tag);
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
        Ok(last)
    }

    /// To be acked with the next [`Page::settle`].
    pub(super) fn ack(&mut self, tag: u64) {
        self.ledger.ack(tag);
    }

    /// Whether the message is neither acked nor to be acked.
    pub(super) fn holds(&self, tag: u64) -> bool {
        self.ledger.is_unsettled(tag)
    }

    /// Acks what is to be acked. Returns messages that the pauses have brought: whoever consumes may be
    /// given one.
    pub(super) async fn settle(&mut self, queue: &str) -> Result<Vec<Delivery>, Error> {
        let mut brought = Vec::new();
        loop {
            let acks = self.ledger.take();
            if acks.is_empty() {
                return Ok(brought);
            }
            for Ack { tag, multiple } in acks {
                self.channel.basic_ack(tag, BasicAckOptions { multiple }).await?;
                self.acks += 1;
                if self.acks == ACKS {
                    let consumer = self.consume(queue, 1).await?;
                    brought.extend(self.cancel(consumer).await?);
                    self.acks = 0;
                }
            }
        }
    }

    /// Hands these back to their places: all that is unsettled up to the last of them, in order. When it
    /// returns the queue has been told.
    pub(super) async fn hand_back(&mut self, tags: &[u64]) -> Result<(), Error> {
        for last in tags.chunks(RETURNED_AT_ONCE).filter_map(<[u64]>::last) {
            let all = BasicNackOptions { multiple: true, requeue: true };
            self.channel.basic_nack(*last, all).await?;
        }
        // Answered by the channel, behind all that.
        self.channel.basic_qos(1, BasicQosOptions::default()).await
    }
}
