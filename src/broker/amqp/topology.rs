//! Which queues are made, and with which arguments. An existing queue is used as it is, whatever
//! its arguments; none is ever deleted.

use std::time::Duration;

use lapin::options::{
    BasicAckOptions, BasicGetOptions, BasicNackOptions, BasicPublishOptions, ConfirmSelectOptions,
    ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, Error, ErrorKind, ExchangeKind};

use super::convert::{properties_from, properties_to, short};
use crate::protocol::Properties;

/// The queues of a pool.
#[derive(Clone, Debug)]
pub struct Topology {
    /// Where tasks come from.
    pub task_queue: String,
    /// Where replies go by default.
    pub reply_queue: Option<String>,
    /// Where messages go that cannot be worked on.
    pub dead_letter_queue: String,
    /// Deliveries after which the broker itself dead-letters a task.
    pub delivery_limit: u32,
    /// Ceilings of the delays between two attempts at a task.
    pub retry_ceilings: Vec<Duration>,
}

/// Where tasks wait for another attempt, which the broker then puts back into the task queue. One
/// queue for each ceiling, because only what is at its head expires: a delay is at least half of its
/// ceiling, so that none waits behind another for longer than that half. The queue lets nothing wait
/// beyond the ceiling: a message without an expiration would hold up all behind it.
pub fn retry_queue(task_queue: &str, ceiling: Duration) -> String {
    format!("{task_queue}.retry-{}ms", ceiling.as_millis())
}

/// The same as earlier versions had it, without that bound.
fn unbounded_retry_queue(task_queue: &str, ceiling: Duration) -> String {
    format!("{task_queue}.retry.{}ms", ceiling.as_millis())
}

impl Topology {
    /// Makes what is missing.
    pub(super) async fn declare(&self, connection: &Connection) -> Result<(), Error> {
        if !exists(connection, &self.dead_letter_queue).await? {
            make(connection, &self.dead_letter_queue, with_high_limit()).await?;
            // With the queue went what the broker's own dead-lettering goes by.
            self.backstop(connection).await?;
        }
        if let Some(queue) = &self.reply_queue
            && !exists(connection, queue).await?
        {
            // Not classic: that lives on one node of a cluster, and with it all replies would be unroutable.
            make(connection, queue, with_high_limit()).await?;
        }
        if !exists(connection, &self.task_queue).await? {
            let mut arguments = quorum();
            let limit = i64::from(self.delivery_limit);
            arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(limit));
            arguments.insert("x-dead-letter-exchange".into(), text(&self.backstop(connection).await?));
            make(connection, &self.task_queue, arguments).await?;
        }
        for ceiling in &self.retry_ceilings {
            let queue = retry_queue(&self.task_queue, *ceiling);
            if !exists(connection, &queue).await? {
                // The bindings first: who waited there may die of the limit later.
                self.backstop(connection).await?;
                make(connection, &queue, self.way_back(*ceiling)).await?;
                // Asked with the first start of this version alone: the broker logs each such question as an
                // error where there is no such queue.
                let unbounded = unbounded_retry_queue(&self.task_queue, *ceiling);
                if exists(connection, &unbounded).await? {
                    let unblocked = unblock(connection, &unbounded, &self.task_queue);
                    let failed =
                        |error| tracing::warn!(queue = unbounded, %error, "its first message stays there");
                    unblocked.await.unwrap_or_else(failed);
                }
            }
        }
        Ok(())
    }

    /// Arguments of a queue whose messages go into the task queue when they expire, each confirmed
    /// there before it is gone here.
    fn way_back(&self, ceiling: Duration) -> FieldTable {
        let mut arguments = quorum();
        let most = i64::try_from(ceiling.as_millis()).unwrap_or(i64::MAX);
        arguments.insert("x-message-ttl".into(), AMQPValue::LongLongInt(most));
        arguments.insert("x-dead-letter-exchange".into(), text(""));
        arguments.insert("x-dead-letter-routing-key".into(), text(&self.task_queue));
        arguments.insert("x-dead-letter-strategy".into(), text("at-least-once"));
        arguments.insert("x-overflow".into(), text("reject-publish"));
        arguments
    }

    /// The exchange through which the broker dead-letters: a headers exchange that lets through what
    /// died of the delivery limit, and drops what merely expired there. A plain dead-letter route would
    /// park expired tasks and left-over sentinels among the dead letters.
    async fn backstop(&self, connection: &Connection) -> Result<String, Error> {
        let exchange = format!("{}.dlx", self.task_queue);
        let channel = connection.create_channel().await?;
        let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let none = FieldTable::default();
        channel.exchange_declare(short(&exchange), ExchangeKind::Headers, durable, none).await?;
        // A task that was tried again died first in the queue where it waited: it has no expiration
        // any more, so a second death is one of the limit.
        let waited = self.retry_ceilings.iter().map(|it| retry_queue(&self.task_queue, *it));
        let limit = ("x-first-death-reason", "delivery_limit".to_owned());
        for (header, value) in waited.map(|queue| ("x-first-death-queue", queue)).chain([limit]) {
            let mut died = FieldTable::default();
            // Plain `all` ignores headers that begin with `x-`.
            died.insert("x-match".into(), text("all-with-x"));
            died.insert(header.into(), text(&value));
            let queue = short(&self.dead_letter_queue);
            channel.queue_bind(queue, short(&exchange), "".into(), QueueBindOptions::default(), died).await?;
        }
        channel.close(200, "done".into()).await?;
        Ok(exchange)
    }
}

fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

fn quorum() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text("quorum"));
    arguments
}

/// Deliveries after which a queue drops a message whose messages may be read and handed back.
pub(super) const HIGH_LIMIT: u64 = 1_000_000;

/// Arguments of a quorum queue whose messages may be read and handed back: without a limit of its own
/// RabbitMQ 4 drops a message after 20 deliveries.
fn with_high_limit() -> FieldTable {
    let mut arguments = quorum();
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(HIGH_LIMIT as i64));
    arguments
}

/// Whether a queue that exists has the arguments that we give to a dead-letter queue. AMQP tells nobody a
/// queue's arguments, but to declare it again succeeds only with the same ones.
pub(super) async fn has_high_limit(connection: &Connection, queue: &str) -> Result<bool, Error> {
    // A channel of its own, because the broker closes it to say no.
    let channel = connection.create_channel().await?;
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    match channel.queue_declare(short(queue), durable, with_high_limit()).await {
        Ok(_) => channel.close(200, "done".into()).await.map(|()| true),
        // Other arguments (406), or no permission to declare (403).
        Err(error) if matches!(code(&error), Some(403 | 406)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Messages that are moved on at most.
const UNBLOCKED: usize = 100;

/// Moves on what stands first in a queue of an earlier version and never expires; what is behind it does.
/// Confirmed in the task queue before it is gone here.
#[expect(clippy::disallowed_methods, reason = "the publisher is not there yet, and needs this to be done")]
async fn unblock(connection: &Connection, from: &str, to: &str) -> Result<(), Error> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    for _ in 0..UNBLOCKED {
        let Some(first) = channel.basic_get(short(from), BasicGetOptions::default()).await? else { break };
        let message = first.delivery;
        if message.properties.expiration().is_some() {
            let back = BasicNackOptions { requeue: true, multiple: false };
            channel.basic_nack(message.delivery_tag, back).await?;
            break;
        }
        let mandatory = BasicPublishOptions { mandatory: true, immediate: false };
        // Another's name would have the broker refuse it.
        let properties = Properties { user_id: None, ..properties_from(&message.properties) };
        let (queue, properties) = (short(to), properties_to(&properties));
        let confirm =
            channel.basic_publish("".into(), queue, mandatory, &message.data, properties).await?.await?;
        if !confirm.is_ack() || confirm.take_message().is_some() {
            break;
        }
        tracing::warn!(from, to, "a message that would have held up all behind it was moved on");
        channel.basic_ack(message.delivery_tag, BasicAckOptions::default()).await?;
    }
    channel.close(200, "done".into()).await
}

/// Asks on a channel of its own, because the broker closes the channel to say no.
async fn exists(connection: &Connection, queue: &str) -> Result<bool, Error> {
    let channel = connection.create_channel().await?;
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    match channel.queue_declare(short(queue), passive, FieldTable::default()).await {
        Ok(_) => channel.close(200, "done".into()).await.map(|()| true),
        Err(error) if code(&error) == Some(404) => Ok(false),
        Err(error) => Err(error),
    }
}

async fn make(connection: &Connection, queue: &str, arguments: FieldTable) -> Result<(), Error> {
    let channel = connection.create_channel().await?;
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    match channel.queue_declare(short(queue), durable, arguments).await {
        Ok(_) => {
            tracing::info!(queue, "queue made");
            channel.close(200, "done".into()).await
        }
        // Somebody made it since we looked, with other arguments: it exists, which is enough.
        Err(error) if code(&error) == Some(406) => Ok(()),
        Err(error) => Err(error),
    }
}

fn code(error: &Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(amqp) => Some(amqp.get_id()),
        _ => None,
    }
}
