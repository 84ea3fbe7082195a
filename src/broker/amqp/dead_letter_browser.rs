//! Reads the messages of a dead-letter queue in batches, and holds each unacked until it is acked or, at the end,
//! returned to the queue. Decides which messages may not be returned, because RabbitMQ would soon drop them. Owns one
//! connection with one channel. When it is lost, all messages that were not acked are in the queue again.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicGetOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Error};
use tokio::time::timeout;

use super::admin::{connect, ready_count};
use super::cause::{Cause, message};
use super::connect::{CLOSE_TIMEOUT, Connector, OpenConnection};
use super::convert::short;
use super::publisher::AmqpPublisher;
use super::session::{cancel, delivery_from};
use super::topology::{HIGH_LIMIT, has_high_limit};
use crate::broker::{BrokerError, Delivery, DeliveryTag, Published, Publisher, Source};
use crate::protocol::message::without_broker_directives;

/// Deliveries after which RabbitMQ 4 drops a message of a quorum queue whose arguments set no limit.
const ASSUMED_LIMIT: u64 = 20;
/// A message with at most this many deliveries left is published to the queue again: returning it uses up one
/// delivery, and other readers may use up more.
const LIMIT_MARGIN: u64 = 3;
/// After this many acks, a `basic_get` is sent as a barrier: the queue answers it after the acks before it, so by then
/// none of them is under way. A channel with more than 32 acks and returns under way on a quorum queue holds back
/// further ones, and forgets them when it closes: those messages would be in the queue again as if not acked.
const ACKS_PER_FLUSH: usize = 16;
/// Messages read at once. It bounds the memory: 64 messages may all be of the largest size.
const BATCH_SIZE: u32 = 64;
/// After this long without a message, the queue is inspected: other readers may have taken the rest.
const IDLE_AFTER: Duration = Duration::from_millis(250);
/// Interval of the checks whether all returned messages are in the queue again.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The messages of one dead-letter queue, held unacked.
pub struct DeadLetterBrowser {
    connection: OpenConnection,
    channel: Channel,
    queue: String,
    /// Longest wait for the next message, or for the answer to a `basic_get`.
    answer_timeout: Duration,
    publisher: AmqpPublisher,
    /// Number of deliveries after which the queue drops a message; none: it is not known.
    limit: Option<u64>,
    /// How many of the messages that were ready at the start `next` has still to return.
    remaining: u32,
    /// Messages received but not yet returned by `next`. Bound: [`BATCH_SIZE`], and one for each [`ACKS_PER_FLUSH`]
    /// acks between two calls of `next`.
    buffered: VecDeque<Delivery>,
    /// How many messages the channel holds unacked.
    held: u32,
    /// Acks that the broker may not have acted on yet: sent since it last answered a `basic_get` or a cancel.
    unflushed_acks: usize,
    near_limit: NearLimit,
}

/// The number of messages near their delivery limit, by what happened to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NearLimit {
    /// Published to the queue again, at its end.
    pub republished: usize,
    /// Returned nevertheless, because publishing them again failed. The queue will drop them soon.
    pub returned: usize,
}

impl DeadLetterBrowser {
    /// Starts reading the messages that are ready in `queue` now.
    ///
    /// # Errors
    /// No address could be reached, or the broker refuses; a queue that does not exist is refused.
    pub async fn open(connector: Connector, queue: &str) -> Result<Self, BrokerError> {
        let connection = connect(&connector).await?;
        let to_error = |error| broker_error(&connection.broker, queue, &error);
        let remaining = ready_count(&connection, queue).await.map_err(to_error)?;
        // The check declares the queue, which the settings may forbid.
        let has_our_limit =
            connector.settings.declare && has_high_limit(&connection, queue).await.map_err(to_error)?;
        Ok(Self {
            channel: connection.create_channel().await.map_err(to_error)?,
            connection,
            queue: queue.to_owned(),
            answer_timeout: connector.settings.connect_timeout,
            publisher: AmqpPublisher::new(connector),
            limit: has_our_limit.then_some(HIGH_LIMIT),
            remaining,
            buffered: VecDeque::new(),
            held: 0,
            unflushed_acks: 0,
            near_limit: NearLimit::default(),
        })
    }

    /// The assumed delivery limit, if the queue's own is not known.
    pub fn assumed_limit(&self) -> Option<u64> {
        self.limit.is_none().then_some(ASSUMED_LIMIT)
    }

    /// Publishes to any queue, on a connection of its own.
    pub fn publisher(&self) -> &AmqpPublisher {
        &self.publisher
    }

    /// The next message; none when all that were ready at the start have been read or taken by others. The caller
    /// passes each to [`DeadLetterBrowser::ack`] or [`DeadLetterBrowser::leave`].
    ///
    /// # Errors
    /// The connection is lost, or the broker refuses: all messages that were not acked are in the queue again.
    pub async fn next(&mut self) -> Result<Option<Delivery>, BrokerError> {
        if self.remaining == 0 {
            return Ok(None);
        }
        if self.buffered.is_empty() {
            self.fetch().await?;
        }
        let next = self.buffered.pop_front();
        self.remaining = if next.is_some() { self.remaining - 1 } else { 0 };
        Ok(next)
    }

    /// Reads a batch with a consumer, which is then cancelled. `basic_get` alone would be too slow: a quorum queue
    /// treats each get as a consumer, and a get takes longer the more messages are held (on RabbitMQ 3.10, reading
    /// 10,000 messages took 10 s and 30,000 took 70 s).
    async fn fetch(&mut self) -> Result<(), BrokerError> {
        let size = self.remaining.min(BATCH_SIZE);
        let to_error = |error| broker_error(&self.connection.broker, &self.queue, &error);
        self.channel.basic_qos(size as u16, BasicQosOptions::default()).await.map_err(to_error)?;
        let options = BasicConsumeOptions::default();
        let (queue, tag) = (short(&self.queue), short(""));
        let consumer = self.channel.basic_consume(queue, tag, options, FieldTable::default()).await;
        let (mut consumer, mut waited) = (consumer.map_err(to_error)?, Duration::ZERO);
        let mut read = Vec::new();
        while read.len() < size as usize {
            match timeout(IDLE_AFTER, consumer.next()).await {
                Ok(Some(delivery)) => read.push(delivery.map_err(to_error)?),
                Ok(None) => break,
                // No message is ready: other readers have taken the rest, or the broker has sent it, and it arrives
                // before the answer to the cancel below.
                Err(_) if ready_count(&self.connection, &self.queue).await.map_err(to_error)? == 0 => break,
                // A message is ready, and not delivered yet.
                Err(_) if waited < self.answer_timeout => waited += IDLE_AFTER,
                Err(_) => return Err(to_error(io::Error::from(io::ErrorKind::TimedOut).into())),
            }
        }
        // The broker answers the cancel after the messages that it has sent; then the consumer ends.
        cancel(&self.channel, consumer.tag()).await;
        while let Ok(Some(delivery)) = timeout(self.answer_timeout, consumer.next()).await {
            read.push(delivery.map_err(to_error)?);
        }
        self.held += read.len() as u32;
        let read: Vec<Delivery> = read.into_iter().map(|delivery| self.delivery_of(delivery)).collect();
        self.buffered.extend(read);
        self.unflushed_acks = 0;
        Ok(())
    }

    /// Reads one message with `basic_get`, which also flushes the acks before it.
    async fn get(&mut self) -> Result<Option<Delivery>, BrokerError> {
        let get = self.channel.basic_get(short(&self.queue), BasicGetOptions::default());
        let late = |_| Error::from(io::Error::from(io::ErrorKind::TimedOut));
        let got = timeout(self.answer_timeout, get).await.map_err(late).flatten();
        let got = got.map_err(|error| self.broker_error(&error))?;
        self.unflushed_acks = 0;
        self.held += u32::from(got.is_some());
        Ok(got.map(|got| self.delivery_of(got.delivery)))
    }

    /// Removes the message from the queue. This is certain only after [`DeadLetterBrowser::flush`].
    ///
    /// # Errors
    /// As [`DeadLetterBrowser::next`].
    pub async fn ack(&mut self, message: DeliveryTag) -> Result<(), BrokerError> {
        let acked = self.channel.basic_ack(message.tag, BasicAckOptions::default()).await;
        acked.map_err(|error| self.broker_error(&error))?;
        self.held -= 1;
        self.unflushed_acks += 1;
        if self.unflushed_acks == ACKS_PER_FLUSH { self.flush().await } else { Ok(()) }
    }

    /// Waits until the broker has acted on all acks.
    ///
    /// # Errors
    /// As [`DeadLetterBrowser::next`]. Messages that were acked may be delivered again.
    pub async fn flush(&mut self) -> Result<(), BrokerError> {
        if self.unflushed_acks > 0 {
            let fetched = self.get().await?;
            self.buffered.extend(fetched);
        }
        Ok(())
    }

    /// Keeps the message, to return it at the end. A message near its delivery limit is instead published again, at the
    /// queue's end, and acked once the broker has confirmed that.
    ///
    /// # Errors
    /// As [`DeadLetterBrowser::next`], and if the connection that publishes is lost.
    pub async fn leave(&mut self, delivery: Delivery) -> Result<(), BrokerError> {
        // A queue that does not count deliveries (a classic one) has no limit either.
        let deliveries = delivery.delivery_count.unwrap_or(1);
        if deliveries.saturating_add(LIMIT_MARGIN) < self.limit.unwrap_or(ASSUMED_LIMIT) {
            return Ok(());
        }
        let message = Arc::new(without_broker_directives(delivery.message));
        let published = self.publisher.publish(&self.queue, message).await?;
        if published == Published::Confirmed {
            self.near_limit.republished += 1;
            return self.ack(delivery.delivery_tag).await;
        }
        tracing::debug!(queue = self.queue, "cannot publish a message near its delivery limit again");
        self.near_limit.returned += 1;
        Ok(())
    }

    /// Returns all messages that were not acked, by closing the channel, and waits until they are in the queue again:
    /// a quorum queue requeues them only after the close is answered, and a command that followed at once would miss
    /// them.
    ///
    /// # Errors
    /// As [`DeadLetterBrowser::next`].
    pub async fn close(mut self) -> Result<NearLimit, BrokerError> {
        self.flush().await?;
        while let Some(delivery) = self.buffered.pop_front() {
            self.leave(delivery).await?;
        }
        let ready =
            ready_count(&self.connection, &self.queue).await.map_err(|error| self.broker_error(&error))?;
        // The flush may fetch a ready message, which does not change the sum.
        let all = ready + self.held;
        self.flush().await?;
        self.channel.close(200, "done".into()).await.map_err(|error| self.broker_error(&error))?;
        let returned = async {
            while ready_count(&self.connection, &self.queue).await.is_ok_and(|ready| ready < all) {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        // The wait is bounded, because other readers may take messages meanwhile.
        let _ = timeout(CLOSE_TIMEOUT, returned).await;
        let closed =
            async { tokio::join!(self.connection.close(200, "done".into()), self.publisher.close()) };
        let _ = timeout(CLOSE_TIMEOUT, closed).await;
        Ok(self.near_limit)
    }

    /// A delivery of the browser, which has only one session and needs no routing keys.
    fn delivery_of(&self, delivery: lapin::message::Delivery) -> Delivery {
        let raw = self.connection.strings.take(self.channel.id(), delivery.delivery_tag);
        delivery_from(delivery, raw.as_ref(), Source::FIRST, 0, false)
    }

    fn broker_error(&self, error: &Error) -> BrokerError {
        broker_error(&self.connection.broker, &self.queue, error)
    }
}

fn broker_error(broker: &str, queue: &str, error: &Error) -> BrokerError {
    let reason = format!("queue {queue:?}: {}", message(error));
    match Cause::of(error) {
        Cause::Connection | Cause::Tls => {
            BrokerError::Unreachable { seconds: 0, reason: format!("{broker}: {reason}") }
        }
        _ => BrokerError::Refused { broker: broker.to_owned(), reason },
    }
}
