//! Writes and reads the stream that stores withdrawals (of jobs, and of runs of `sconce stop`) for launchers that start
//! later. The stream is bound to the control exchange. Owns no connection for longer than one call.

use std::time::{Duration, Instant, SystemTime};

use futures_util::StreamExt as _;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ExchangeDeclareOptions,
    QueueBindOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, Error, ExchangeKind};
use sconce_broker_stream::Strings;
use tokio::time::timeout;

use super::admin::connect;
use super::cause::{Cause, refused};
use super::connect::{Connector, OpenConnection};
use super::convert::{properties_from, properties_to, short};
use super::topology::declare_stream;
use crate::broker::BrokerError;
use crate::protocol::{JSON, Message, Properties};

/// The routing key of the stream's entries.
const ROUTING_KEY: &str = "withdrawal";
/// Maximum size of the stream in bytes. The broker drops old entries in segments of a tenth of this size.
const STREAM_BYTES: u32 = 5_000_000;
/// The largest body that is read, in bytes. Entries with larger ones are ignored.
const MAX_ENTRY_BYTES: usize = 1_024;
/// The pause between two attempts to read the stream.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// The longest time for which a broker that accepts connections may lack the stream.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How long reading the stream may take.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// How many unacknowledged entries the broker sends.
const PREFETCH: u16 = 200;

/// Declares the exchange and the stream, and binds the stream to it. Returns the stream's name.
async fn declare(connection: &Connection, exchange: &str, max_age: Duration) -> Result<String, Error> {
    let stream = format!("{exchange}.withdrawals");
    declare_stream(connection, &stream, max_age, STREAM_BYTES).await?;
    let channel = connection.create_channel().await?;
    let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    channel.exchange_declare(short(exchange), ExchangeKind::Topic, durable, FieldTable::default()).await?;
    let (queue, options) = (short(&stream), QueueBindOptions::default());
    channel.queue_bind(queue, short(exchange), ROUTING_KEY.into(), options, FieldTable::default()).await?;
    channel.close(200, "done".into()).await?;
    Ok(stream)
}

/// Declares the stream, and adds an entry with the current time to it. Returns when the broker has confirmed it.
pub(super) async fn add(
    connection: &OpenConnection,
    channel: &Channel,
    exchange: &str,
    body: &[u8],
    max_age: Duration,
) -> Result<(), Error> {
    declare(connection, exchange, max_age).await?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let properties = Properties { timestamp: Some(now.as_secs()), ..Properties::default() };
    publish(channel, &connection.strings, exchange, body, properties).await
}

/// Reads the entries that were published to `exchange` in the last `max_age` by this host's clock, oldest first. A few
/// older ones may be among them, because the broker finds the beginning only roughly. Tries again while no broker
/// accepts the connection, and while a broker that is starting lacks the stream.
///
/// # Errors
/// The broker refuses, or the end of the stream is not reached in time.
pub async fn read_withdrawals(
    connector: &Connector,
    exchange: &str,
    max_age: Duration,
) -> Result<Vec<Message>, BrokerError> {
    let mut connected_since = None;
    loop {
        // A failure to connect is not logged here, because the workers log it.
        if let Ok(connection) = connect(connector).await {
            let since = *connected_since.get_or_insert_with(Instant::now);
            let is_late = since.elapsed() > START_TIMEOUT;
            match timeout(READ_TIMEOUT, read(&connection, exchange, max_age)).await {
                Ok(Ok(Some(entries))) => {
                    let _ = connection.close(200, "done".into()).await;
                    return Ok(entries);
                }
                Ok(Err(error)) if !is_late && is_temporary(&error) => {}
                Ok(Err(error)) => return Err(refused(&connection.broker, &error)),
                Ok(Ok(None)) => {
                    let broker = connection.broker.clone();
                    let reason = "the broker ended the consumer before the last entry".to_owned();
                    return Err(BrokerError::Refused { broker, reason });
                }
                Err(_) => {
                    let broker = connection.broker.clone();
                    let reason = format!("no end of the stream within {READ_TIMEOUT:?}");
                    return Err(BrokerError::Refused { broker, reason });
                }
            }
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

/// Whether a broker that is starting may give this error: it cannot reach a stream before it has read it from its disk.
fn is_temporary(error: &Error) -> bool {
    matches!(Cause::of(error), Cause::Unavailable | Cause::Connection | Cause::LimitReached | Cause::Other)
}

/// Returns the entries, or `None` if the consumer ended before the last of them.
async fn read(
    connection: &OpenConnection,
    exchange: &str,
    max_age: Duration,
) -> Result<Option<Vec<Message>>, Error> {
    let stream = declare(connection, exchange, max_age).await?;
    let channel = connection.create_channel().await?;
    // The broker requires a prefetch of each consumer of a stream.
    channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
    let since = SystemTime::now().checked_sub(max_age).unwrap_or(SystemTime::UNIX_EPOCH);
    let seconds = since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut start = FieldTable::default();
    start.insert("x-stream-offset".into(), AMQPValue::Timestamp(seconds));
    let mut deliveries =
        channel.basic_consume(short(&stream), "".into(), BasicConsumeOptions::default(), start).await?;
    // The broker does not report that a consumer has read all entries of a stream. So an end mark is published, and all
    // entries before it are read.
    let end_mark = uuid::Uuid::new_v4().to_string();
    let properties = Properties { correlation_id: Some(end_mark.clone()), ..Properties::default() };
    publish(&channel, &connection.strings, exchange, b"null", properties).await?;
    let mut entries = Vec::new();
    while let Some(delivery) = deliveries.next().await {
        let delivery = delivery?;
        delivery.ack(BasicAckOptions::default()).await?;
        // Producers may write to any queue through the default exchange; such entries are forged.
        if delivery.exchange.as_str() != exchange {
            continue;
        }
        let raw = connection.strings.take(channel.id(), delivery.delivery_tag);
        let properties = properties_from(&delivery.properties, raw.as_ref());
        if properties.correlation_id.as_ref() == Some(&end_mark) {
            return Ok(Some(entries));
        }
        if delivery.data.len() <= MAX_ENTRY_BYTES {
            entries.push(Message { properties, body: delivery.data.into() });
        }
    }
    Ok(None)
}

#[expect(clippy::disallowed_methods, reason = "`AmqpPublisher` publishes to queues only, not to an exchange")]
async fn publish(
    channel: &Channel,
    strings: &Strings,
    exchange: &str,
    body: &[u8],
    properties: Properties,
) -> Result<(), Error> {
    let properties = Properties { content_type: Some(JSON.into()), delivery_mode: Some(2), ..properties };
    let options = BasicPublishOptions::default();
    let (exchange, properties) = (short(exchange), properties_to(&properties, strings));
    channel.basic_publish(exchange, ROUTING_KEY.into(), options, body, properties).await?.await?;
    Ok(())
}
