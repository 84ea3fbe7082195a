//! Decides which queues are declared, and with which arguments. An existing queue is used as it is, whatever its
//! arguments. Nothing here deletes a queue; the broker deletes a job's reply queue that nobody uses.

use std::time::Duration;

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::protocol::{AMQPError, AMQPSoftError};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, Error, ErrorKind, ExchangeKind, Queue};

use super::cause::{Cause, names_stream};
use super::convert::{milliseconds, short};
use crate::broker::IS_STREAM;
use crate::config::{Pool, TaskQueue};
use crate::protocol::control::QUEUE_MADE;

/// The options of a queue that outlives the broker's restart, as all queues that are declared here do.
const DURABLE: QueueDeclareOptions = QueueDeclareOptions {
    durable: true,
    passive: false,
    exclusive: false,
    auto_delete: false,
    nowait: false,
};

/// A queue that a pool's tasks are consumed from.
#[derive(Clone, Debug)]
pub struct Consumed {
    /// The queue's name.
    pub name: String,
    /// Whether it has retry queues of its own. Otherwise its tasks return through those of the first queue.
    pub has_retries: bool,
}

/// The queues of a pool.
#[derive(Clone, Debug)]
pub struct Topology {
    /// The queues that tasks are consumed from, at least one. The dead-letter exchange has the name of the first.
    pub consumed: Vec<Consumed>,
    /// The queue for replies to tasks without a `reply_to`.
    pub reply_queue: Option<String>,
    /// The queue for messages that cannot be processed.
    pub dead_letter_queue: String,
    /// Number of deliveries after which the broker itself dead-letters a task.
    pub delivery_limit: u32,
    /// Upper bounds of the delays between two attempts at a task, one retry queue each.
    pub retry_ceilings: Vec<Duration>,
}

/// Returns the name of the retry queue with this ceiling. A task waits there for its next attempt, until the broker
/// moves it into the task queue. RabbitMQ expires messages only at the head of a queue, so messages with very different
/// delays must not share one. Each ceiling has a queue of its own, whose delays are from half of the ceiling to the
/// ceiling. So an earlier message holds up a later one for at most half of the ceiling. The queue's TTL equals the
/// ceiling. Without the TTL, a message without an expiration would hold up all messages after it.
pub fn retry_queue(task_queue: &str, ceiling: Duration) -> String {
    format!("{task_queue}.retry-{}ms", ceiling.as_millis())
}

impl Topology {
    /// Declares all missing queues, and what they need.
    pub(super) async fn declare(&self, connection: &Connection) -> Result<(), Error> {
        self.declare_shared(connection).await?;
        for consumed in &self.consumed {
            self.declare_consumed(connection, consumed).await?;
        }
        Ok(())
    }

    /// Declares one of the queues that tasks are consumed from, if it is missing, and what it needs.
    pub(super) async fn declare_for(&self, connection: &Connection, queue: &str) -> Result<(), Error> {
        self.declare_shared(connection).await?;
        match self.consumed.iter().find(|consumed| consumed.name == queue) {
            Some(consumed) => self.declare_consumed(connection, consumed).await,
            None => Ok(()),
        }
    }

    /// Declares the queues for dead letters and for replies.
    async fn declare_shared(&self, connection: &Connection) -> Result<(), Error> {
        if exists(connection, &self.dead_letter_queue).await? {
            refuse_stream(connection, &self.dead_letter_queue, high_limit_arguments()).await?;
        } else {
            declare_queue(connection, &self.dead_letter_queue, high_limit_arguments()).await?;
            // The bindings of the dead-letter exchange were deleted with the queue.
            for consumed in &self.consumed {
                self.declare_dead_letter_exchange(connection, consumed).await?;
            }
        }
        if let Some(queue) = &self.reply_queue
            && !exists(connection, queue).await?
        {
            // Not a classic queue, which is on one node of a cluster: while that node is down, all replies would be
            // unroutable.
            declare_queue(connection, queue, high_limit_arguments()).await?;
        }
        Ok(())
    }

    async fn declare_consumed(&self, connection: &Connection, consumed: &Consumed) -> Result<(), Error> {
        let queue = &consumed.name;
        let mut arguments = quorum_arguments();
        let limit = i64::from(self.delivery_limit);
        arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(limit));
        arguments.insert("x-dead-letter-exchange".into(), text(&self.dead_letter_exchange()));
        if exists(connection, queue).await? {
            refuse_stream(connection, queue, arguments).await?;
        } else {
            self.declare_dead_letter_exchange(connection, consumed).await?;
            declare_queue(connection, queue, arguments).await?;
        }
        for (retry_queue, ceiling) in self.retry_queues(consumed) {
            if !exists(connection, &retry_queue).await? {
                // The bindings come first, because a task that waited in this queue may reach its delivery limit later.
                self.declare_dead_letter_exchange(connection, consumed).await?;
                declare_queue(connection, &retry_queue, retry_arguments(queue, ceiling)).await?;
            }
        }
        Ok(())
    }

    /// The retry queues of a queue, with their ceilings; none if its tasks return through the first queue.
    fn retry_queues(&self, consumed: &Consumed) -> impl Iterator<Item = (String, Duration)> {
        let ceilings = if consumed.has_retries { self.retry_ceilings.as_slice() } else { &[] };
        ceilings.iter().map(|ceiling| (retry_queue(&consumed.name, *ceiling), *ceiling))
    }

    /// The name of the exchange through which the broker dead-letters.
    fn dead_letter_exchange(&self) -> String {
        dead_letter_exchange(self.consumed.first().map_or("", |first| &first.name))
    }

    /// Declares that exchange, and binds it for the tasks of one queue. It is a headers exchange that passes on messages
    /// that exceeded the delivery limit, and drops those that only expired. A plain dead-letter route would put expired
    /// tasks and old sentinels among the dead letters.
    ///
    /// The queue may have been another pool's, or may have been listed in another order, when it was declared. Its
    /// arguments, which nobody can read or change, then name the exchange of another of the queues. So all of these
    /// exchanges that exist are bound, too.
    async fn declare_dead_letter_exchange(
        &self,
        connection: &Connection,
        consumed: &Consumed,
    ) -> Result<(), Error> {
        let exchange = self.dead_letter_exchange();
        let channel = connection.create_channel().await?;
        let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let no_arguments = FieldTable::default();
        channel.exchange_declare(short(&exchange), ExchangeKind::Headers, durable, no_arguments).await?;
        channel.close(200, "done".into()).await?;
        self.bind(connection, &exchange, consumed).await?;
        for other in self.consumed.iter().skip(1) {
            let exchange = dead_letter_exchange(&other.name);
            if exchange_exists(connection, &exchange).await? {
                self.bind(connection, &exchange, consumed).await?;
            }
        }
        Ok(())
    }

    async fn bind(&self, connection: &Connection, exchange: &str, consumed: &Consumed) -> Result<(), Error> {
        let channel = connection.create_channel().await?;
        // The bindings match two kinds of messages. The first kind has died for the first time, by the delivery limit.
        // The second kind was retried: its headers still name its first death, in a retry queue, so the reason of its
        // later death cannot be matched. RabbitMQ removed its expiration in the retry queue, so only the delivery limit
        // can have sent it here.
        let retried = self.retry_queues(consumed).map(|(queue, _)| ("x-first-death-queue", queue));
        let limit = ("x-first-death-reason", "delivery_limit".to_owned());
        for (header, value) in retried.chain([limit]) {
            let mut binding = FieldTable::default();
            // `x-match: all` ignores headers that begin with `x-`.
            binding.insert("x-match".into(), text("all-with-x"));
            binding.insert(header.into(), text(&value));
            let queue = short(&self.dead_letter_queue);
            channel
                .queue_bind(queue, short(exchange), "".into(), QueueBindOptions::default(), binding)
                .await?;
        }
        channel.close(200, "done".into()).await
    }
}

/// The names of the retry queues of all queues of a pool.
pub fn retry_queues(pool: &Pool) -> Vec<String> {
    let ceilings = pool.retry.ceilings();
    let own = pool.queues().into_iter().filter(|queue| !queue.returns_to_first);
    let names = |queue: TaskQueue| ceilings.iter().map(move |ceiling| retry_queue(&queue.name, *ceiling));
    own.flat_map(names).collect()
}

/// The name of the dead-letter exchange of a pool whose first queue has this name.
fn dead_letter_exchange(first_queue: &str) -> String {
    format!("{first_queue}.dlx")
}

/// Returns the arguments of a retry queue, whose messages move into the task queue when they expire. The broker removes
/// a message here only when the task queue has confirmed it (`at-least-once`).
fn retry_arguments(task_queue: &str, ceiling: Duration) -> FieldTable {
    let mut arguments = quorum_arguments();
    arguments.insert("x-message-ttl".into(), milliseconds(ceiling));
    arguments.insert("x-dead-letter-exchange".into(), text(""));
    arguments.insert("x-dead-letter-routing-key".into(), text(task_queue));
    arguments.insert("x-dead-letter-strategy".into(), text("at-least-once"));
    arguments.insert("x-overflow".into(), text("reject-publish"));
    arguments
}

/// Refuses an existing queue that is a stream. A stream of tasks would give every task to each worker, and no task from
/// before the worker's start. A stream of dead letters could not be emptied. The queue is declared again, because the
/// broker's answer says what it is: `arguments` are those of our own queue, which the broker accepts if the queue is one
/// of ours. A task queue whose arguments do not show what it is, or that we may not declare, is refused at its first
/// delivery.
async fn refuse_stream(connection: &Connection, queue: &str, arguments: FieldTable) -> Result<(), Error> {
    for arguments in [arguments, quorum_arguments()] {
        let Err(error) = queue_declare(connection, queue, DURABLE, arguments).await else { return Ok(()) };
        match Cause::of(&error) {
            Cause::PreconditionFailed if names_stream(&error) => return Err(stream_refused(queue)),
            Cause::PreconditionFailed => {}
            Cause::AccessRefused | Cause::Unavailable => return Ok(()),
            _ => return Err(error),
        }
    }
    Ok(())
}

/// The error about a queue that is a stream.
fn stream_refused(queue: &str) -> Error {
    let reason = format!("queue '{queue}' {IS_STREAM}");
    ErrorKind::ProtocolError(AMQPError::new(AMQPSoftError::PRECONDITIONFAILED.into(), short(&reason))).into()
}

fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

fn quorum_arguments() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text("quorum"));
    arguments
}

/// Delivery limit of queues whose messages are read and returned (reply and dead-letter queues).
pub(super) const HIGH_LIMIT: u64 = 1_000_000;

/// Arguments of a quorum queue whose messages may be read and returned. Without a limit in the arguments,
/// RabbitMQ 4 drops a message after 20 deliveries.
fn high_limit_arguments() -> FieldTable {
    let mut arguments = quorum_arguments();
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(HIGH_LIMIT as i64));
    arguments
}

/// Declares the queue of a job's replies, if it does not exist. The broker deletes it after `keep` without a consumer.
pub(super) async fn declare_reply_queue(
    connection: &Connection,
    queue: &str,
    keep: Duration,
) -> Result<(), Error> {
    if exists(connection, queue).await? {
        return Ok(());
    }
    // A quorum queue, like a pool's reply queue: while a classic queue's node is down, replies would be unroutable, and
    // their tasks would become dead letters.
    let mut arguments = high_limit_arguments();
    arguments.insert("x-expires".into(), milliseconds(keep));
    declare_queue(connection, queue, arguments).await
}

/// Whether an existing queue has the arguments that we give to a dead-letter queue. AMQP has no command to read
/// a queue's arguments, but declaring it again succeeds only with the same ones.
pub(super) async fn has_high_limit(connection: &Connection, queue: &str) -> Result<bool, Error> {
    match queue_declare(connection, queue, DURABLE, high_limit_arguments()).await {
        Ok(_) => Ok(true),
        // Other arguments, or no permission to declare.
        Err(error) if matches!(Cause::of(&error), Cause::AccessRefused | Cause::PreconditionFailed) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Declares a stream, if it does not exist. The broker drops its oldest entries beyond either bound, a segment at a
/// time.
pub(super) async fn declare_stream(
    connection: &Connection,
    queue: &str,
    max_age: Duration,
    max_bytes: u32,
) -> Result<(), Error> {
    if exists(connection, queue).await? {
        return Ok(());
    }
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text("stream"));
    arguments.insert("x-max-age".into(), text(&format!("{}s", max_age.as_secs())));
    arguments.insert("x-max-length-bytes".into(), AMQPValue::LongLongInt(max_bytes.into()));
    let segment = i64::from(max_bytes / 10);
    arguments.insert("x-stream-max-segment-size-bytes".into(), AMQPValue::LongLongInt(segment));
    declare_queue(connection, queue, arguments).await
}

async fn exists(connection: &Connection, queue: &str) -> Result<bool, Error> {
    match inspect(connection, queue).await {
        Ok(_) => Ok(true),
        Err(error) => match Cause::of(&error) {
            Cause::Missing => Ok(false),
            // Declaring it again would fail in the same way.
            Cause::Unavailable => Ok(true),
            _ => Err(error),
        },
    }
}

async fn exchange_exists(connection: &Connection, exchange: &str) -> Result<bool, Error> {
    // On a separate channel, because the broker closes the channel when the exchange is missing.
    let channel = connection.create_channel().await?;
    let passive = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    let declared = channel
        .exchange_declare(short(exchange), ExchangeKind::Headers, passive, FieldTable::default())
        .await;
    match declared {
        Ok(()) => channel.close(200, "done".into()).await.map(|()| true),
        Err(error) if matches!(Cause::of(&error), Cause::Missing | Cause::AccessRefused) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Inspects a queue with a passive declare.
pub(super) async fn inspect(connection: &Connection, queue: &str) -> Result<Queue, Error> {
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    queue_declare(connection, queue, passive, FieldTable::default()).await
}

/// Sends a declare on a channel of its own, because the broker closes the channel when it refuses: the queue is missing,
/// or has other arguments.
async fn queue_declare(
    connection: &Connection,
    queue: &str,
    options: QueueDeclareOptions,
    arguments: FieldTable,
) -> Result<Queue, Error> {
    let channel = connection.create_channel().await?;
    let declared = channel.queue_declare(short(queue), options, arguments).await?;
    channel.close(200, "done".into()).await?;
    Ok(declared)
}

async fn declare_queue(connection: &Connection, queue: &str, arguments: FieldTable) -> Result<(), Error> {
    match queue_declare(connection, queue, DURABLE, arguments).await {
        Ok(_) => {
            tracing::info!(queue, "{QUEUE_MADE}");
            Ok(())
        }
        // Another process has declared the queue with other arguments since our check. An existing queue is used as it
        // is.
        Err(error) if Cause::of(&error) == Cause::PreconditionFailed => Ok(()),
        Err(error) => Err(error),
    }
}
