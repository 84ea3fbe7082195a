//! One session with RabbitMQ: a channel on a connection that sessions of other queues may share, and the consumer on
//! it. Decides how a session is set up and how deliveries are converted. Owns the handles. The supervisor in
//! `consumer.rs` opens a new session when one ends.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::{
    BasicCancelOptions, BasicConsumeOptions, BasicQosOptions, ExchangeDeclareOptions, QueueBindOptions,
    QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Error, ExchangeKind};
use sconce_broker_stream::RawStrings;
use tokio::sync::watch;

use super::connect::{CLOSE_TIMEOUT, Connector, Failure};
use super::convert::{milliseconds, properties_from, short};
use super::shared_connection::{SharedConnection, SharedConnector};
use super::topology::{Topology, declare_reply_queue};
use crate::broker::{Delivery, DeliveryTag, Source};
use crate::protocol::Message;

/// RabbitMQ's default consumer timeout. If the setting equals it, no timeout is sent to the broker.
const DEFAULT_CONSUMER_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// What to consume.
pub enum Subscription {
    /// One of a pool's queues.
    Tasks {
        /// The queue's name.
        queue: String,
        /// The pool's queues. Those that belong to this one are declared if they are missing. None: nothing is
        /// declared.
        topology: Option<Topology>,
        /// Which of the pool's queues it is.
        source: Source,
    },
    /// The durable queue of a job's replies, which is declared if it is missing. The broker deletes it when nobody has
    /// consumed from it for `keep`.
    Job {
        /// The queue's name.
        queue: String,
        /// How long it is kept without a consumer.
        keep: Duration,
    },
    /// A private queue, which the broker names, and deletes with the connection. Its name is sent here once per
    /// session. Unsettled messages are lost with the session.
    Private(watch::Sender<Option<String>>),
    /// A private queue bound to a topic exchange, which is declared if it is missing. Deliveries carry their
    /// routing keys.
    Topic {
        /// The exchange's name.
        exchange: String,
        /// The binding keys.
        keys: Vec<String>,
        /// The most messages that wait in the queue. The broker refuses further ones.
        max_length: i32,
        /// The most bytes of the bodies of these messages.
        max_bytes: i64,
    },
}

/// An open channel with its connection and its consumer.
pub(super) struct Session {
    pub(super) connection: Arc<SharedConnection>,
    pub(super) channel: Channel,
    pub(super) consumer: lapin::Consumer,
    pub(super) prefetch: u16,
    /// Whether deliveries carry their routing keys.
    pub(super) with_routing_key: bool,
    /// Delivery tag of the first delivery to the current consumer.
    pub(super) first_tag: Option<u64>,
    queue: String,
    /// Consumer tag of the first consumer; later ones append their number.
    tag: String,
    /// Number of consumers that this session has had.
    consumer_count: u32,
}

impl Subscription {
    /// The source that its deliveries carry.
    pub(super) fn source(&self) -> Source {
        match self {
            Self::Tasks { source, .. } => *source,
            Self::Job { .. } | Self::Private(_) | Self::Topic { .. } => Source::FIRST,
        }
    }
}

impl Session {
    /// Connects and starts consuming.
    pub(super) async fn open(
        connector: &SharedConnector,
        subscription: &Subscription,
        prefetch: u16,
    ) -> Result<Self, Failure> {
        let connection = connector.connect().await?;
        let broker = connection.broker.clone();
        let session = Self::set_up(connection, subscription, prefetch, connector);
        let limit = connector.settings.connect_timeout;
        let failure = match tokio::time::timeout(limit, session).await {
            Ok(Ok(session)) => {
                if let Subscription::Topic { exchange, .. } = subscription {
                    tracing::info!(broker, exchange, "listening");
                } else {
                    tracing::info!(broker, queue = session.queue, "consuming");
                }
                return Ok(session);
            }
            Ok(Err(error)) => Failure::of(broker, &error),
            Err(_) => {
                let reason = format!("the queue could not be opened within {limit:?}");
                Failure::without_answer(broker, reason)
            }
        };
        connector.use_next_address();
        Err(failure)
    }

    async fn set_up(
        connection: Arc<SharedConnection>,
        subscription: &Subscription,
        prefetch: u16,
        connector: &Connector,
    ) -> Result<Self, Error> {
        let channel = connection.create_channel().await?;
        let queue = match subscription {
            Subscription::Tasks { queue, topology, .. } => {
                if let Some(topology) = topology {
                    topology.declare_for(&connection, queue).await?;
                }
                queue.clone()
            }
            Subscription::Job { queue, keep } => {
                declare_reply_queue(&connection, queue, *keep).await?;
                queue.clone()
            }
            Subscription::Private(name) => {
                let queue = declare_private_queue(&channel, FieldTable::default()).await?;
                name.send_replace(Some(queue.clone()));
                queue
            }
            Subscription::Topic { exchange, keys, max_length, max_bytes } => {
                let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
                let empty = FieldTable::default;
                channel.exchange_declare(short(exchange), ExchangeKind::Topic, durable, empty()).await?;
                let mut arguments = empty();
                arguments.insert("x-max-length".into(), AMQPValue::LongInt(*max_length));
                arguments.insert("x-max-length-bytes".into(), AMQPValue::LongLongInt(*max_bytes));
                // Dropping the oldest would lose the orders of operators without a word.
                arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
                let queue = declare_private_queue(&channel, arguments).await?;
                for key in keys {
                    let options = QueueBindOptions::default();
                    channel.queue_bind(short(&queue), short(exchange), short(key), options, empty()).await?;
                }
                queue
            }
        };
        let with_routing_key = matches!(subscription, Subscription::Topic { .. });
        let tag = connector.name.clone();
        let consumer = consume(&channel, &queue, &tag, prefetch, connector).await?;
        Ok(Self {
            connection,
            channel,
            consumer,
            prefetch,
            with_routing_key,
            first_tag: None,
            queue,
            tag,
            consumer_count: 1,
        })
    }

    /// Whether neither the channel nor its connection has failed.
    pub(super) fn is_open(&self) -> bool {
        self.channel.status().connected() && self.connection.status().connected()
    }

    /// The short strings of a delivery that are not UTF-8. They can be taken once.
    pub(super) fn raw_strings(&self, delivery_tag: u64) -> Option<RawStrings> {
        self.connection.strings.take(self.channel.id(), delivery_tag)
    }

    /// Starts a new consumer with another prefetch, because RabbitMQ applies a prefetch only to later consumers. The
    /// old consumer must have been cancelled, and its stream must have ended.
    pub(super) async fn consume_again(&mut self, prefetch: u16, connector: &Connector) -> Result<(), Error> {
        self.consumer_count += 1;
        // Another tag, so that lapin does not confuse the old consumer with the new one.
        let tag = format!("{} #{}", self.tag, self.consumer_count);
        let consumer = consume(&self.channel, &self.queue, &tag, prefetch, connector);
        let answered = tokio::time::timeout(connector.settings.connect_timeout, consumer).await;
        self.consumer =
            answered.map_err(|_| Error::from(std::io::Error::from(std::io::ErrorKind::TimedOut)))??;
        (self.prefetch, self.first_tag) = (prefetch, None);
        Ok(())
    }
}

/// Declares a queue that only this connection may use. Returns the name that the broker has given it.
async fn declare_private_queue(channel: &Channel, arguments: FieldTable) -> Result<String, Error> {
    let options = QueueDeclareOptions { exclusive: true, auto_delete: true, ..Default::default() };
    let queue = channel.queue_declare("".into(), options, arguments).await?;
    Ok(queue.name().as_str().to_owned())
}

async fn consume(
    channel: &Channel,
    queue: &str,
    tag: &str,
    prefetch: u16,
    connector: &Connector,
) -> Result<lapin::Consumer, Error> {
    channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    let mut arguments = FieldTable::default();
    let timeout = connector.settings.consumer_timeout;
    // RabbitMQ 4.3 accepts the argument on quorum queues and prefers it to the queue's own; earlier versions ignore
    // it.
    if timeout != DEFAULT_CONSUMER_TIMEOUT {
        arguments.insert("x-consumer-timeout".into(), milliseconds(timeout));
    }
    channel.basic_consume(short(queue), short(tag), BasicConsumeOptions::default(), arguments).await
}

/// Cancels a consumer. Returns when the broker has confirmed, or after [`CLOSE_TIMEOUT`]. A missing answer is ignored:
/// the session with a broker that does not answer ends anyway.
pub(super) async fn cancel(channel: &Channel, consumer_tag: ShortString) {
    let cancel = channel.basic_cancel(consumer_tag, BasicCancelOptions::default());
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, cancel).await;
}

/// Converts a delivery of this session of this source. `raw` holds its short strings that are not UTF-8.
pub(super) fn delivery_from(
    delivery: lapin::message::Delivery,
    raw: Option<&RawStrings>,
    source: Source,
    session: u64,
    with_routing_key: bool,
) -> Delivery {
    let mut properties = properties_from(&delivery.properties, raw);
    // The header is the broker's count for this message, or was copied with all headers of a redelivered message. So it
    // is ignored in a message that is not redelivered.
    let counted = properties.headers.remove("x-delivery-count").and_then(|count| count.as_i64());
    let counted = counted.map(|count| count.max(1) as u64);
    let delivery_count = if delivery.redelivered { counted } else { Some(0) };
    Delivery {
        message: Message { properties, body: delivery.data.into() },
        delivery_tag: DeliveryTag { source, session, tag: delivery.delivery_tag },
        routing_key: with_routing_key.then(|| delivery.routing_key.as_str().to_owned()),
        redelivered: delivery.redelivered,
        delivery_count,
    }
}
