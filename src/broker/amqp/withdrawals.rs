//! The stream that keeps withdrawals for launchers that start later. It is bound to the control exchange. Owns no
//! connection for longer than one call.

use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ExchangeDeclareOptions,
    QueueBindOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, Error, ExchangeKind};

use super::admin::connect;
use super::cause::refused;
use super::connect::Connector;
use super::convert::{properties_from, properties_to, short};
use super::topology::declare_stream;
use crate::broker::BrokerError;
use crate::protocol::{JSON, Message, Properties};

/// The routing key of the stream's entries.
const KEY: &str = "withdrawal";
/// The most bytes of the stream. Old entries are dropped in segments of a tenth of this.
const STREAM_BYTES: u32 = 5_000_000;
/// Larger entries are ignored.
const ENTRY_BYTES: usize = 1_024;
/// Entries that the broker sends ahead.
const PREFETCH: u16 = 200;

/// Declares the exchange, and the stream that is bound to it. Returns the stream's name.
async fn declare(connection: &Connection, exchange: &str, max_age: Duration) -> Result<String, Error> {
    let stream = format!("{exchange}.withdrawals");
    declare_stream(connection, &stream, max_age, STREAM_BYTES).await?;
    let channel = connection.create_channel().await?;
    let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    channel.exchange_declare(short(exchange), ExchangeKind::Topic, durable, FieldTable::default()).await?;
    let (queue, options) = (short(&stream), QueueBindOptions::default());
    channel.queue_bind(queue, short(exchange), KEY.into(), options, FieldTable::default()).await?;
    channel.close(200, "done".into()).await?;
    Ok(stream)
}

/// Adds an entry with the current time, after the stream was declared.
pub(super) async fn add(
    connection: &Connection,
    channel: &Channel,
    exchange: &str,
    body: &[u8],
    max_age: Duration,
) -> Result<(), Error> {
    declare(connection, exchange, max_age).await?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let properties = Properties { timestamp: Some(now.as_secs()), ..Properties::default() };
    publish(channel, exchange, body, properties).await
}

/// The entries that were published to `exchange` in the last `max_age`, oldest first, as far as the clocks agree.
///
/// # Errors
/// No address could be reached, or the broker refuses.
pub async fn read_withdrawals(
    connector: &Connector,
    exchange: &str,
    max_age: Duration,
) -> Result<Vec<Message>, BrokerError> {
    let (connection, broker) = connect(connector).await?;
    let entries = read(&connection, exchange, max_age).await.map_err(|error| refused(broker, &error))?;
    let _ = connection.close(200, "done".into()).await;
    Ok(entries)
}

async fn read(connection: &Connection, exchange: &str, max_age: Duration) -> Result<Vec<Message>, Error> {
    let stream = declare(connection, exchange, max_age).await?;
    let channel = connection.create_channel().await?;
    // A stream requires it.
    channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
    let since = SystemTime::now().checked_sub(max_age).unwrap_or(SystemTime::UNIX_EPOCH);
    let seconds = since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut from = FieldTable::default();
    from.insert("x-stream-offset".into(), AMQPValue::Timestamp(seconds));
    let mut deliveries =
        channel.basic_consume(short(&stream), "".into(), BasicConsumeOptions::default(), from).await?;
    // A stream has no end: this is the last entry that matters.
    let end = uuid::Uuid::new_v4().to_string();
    let properties = Properties { correlation_id: Some(end.clone()), ..Properties::default() };
    publish(&channel, exchange, b"null", properties).await?;
    let mut entries = Vec::new();
    while let Some(delivery) = deliveries.next().await {
        let delivery = delivery?;
        delivery.ack(BasicAckOptions::default()).await?;
        // Producers may write to any queue through the default exchange.
        if delivery.exchange.as_str() != exchange {
            continue;
        }
        let properties = properties_from(&delivery.properties);
        if properties.correlation_id.as_ref() == Some(&end) {
            break;
        }
        if delivery.data.len() <= ENTRY_BYTES {
            entries.push(Message { properties, body: delivery.data.into() });
        }
    }
    Ok(entries)
}

#[expect(clippy::disallowed_methods, reason = "the other publisher speaks to queues only")]
async fn publish(
    channel: &Channel,
    exchange: &str,
    body: &[u8],
    properties: Properties,
) -> Result<(), Error> {
    let properties = Properties { content_type: Some(JSON.into()), delivery_mode: Some(2), ..properties };
    let options = BasicPublishOptions::default();
    let (to, properties) = (short(exchange), properties_to(&properties));
    channel.basic_publish(to, KEY.into(), options, body, properties).await?.await?;
    Ok(())
}
