//! What commands that publish tasks share: how a task's message is made, what a refused publish says,
//! and the name of a private reply queue. Owns nothing.

use anyhow::{Context, bail};
use bytes::Bytes;
use tokio::sync::watch;

use crate::broker::amqp::{AmqpConsumer, AmqpPublisher};
use crate::broker::{BrokerError, Consumer, Published, Publisher};
use crate::protocol::{Headers, JSON, Message, Properties};

/// The message of the task with this number, its correlation id: persistent, published now.
pub(super) fn task(number: u64, message_id: String, body: Bytes, reply_to: Option<String>) -> Message {
    let now = jiff::Timestamp::now();
    let properties = Properties {
        content_type: Some(JSON.into()),
        correlation_id: Some(number.to_string()),
        message_id: Some(message_id),
        delivery_mode: Some(2),
        timestamp: u64::try_from(now.as_second()).ok(),
        headers: Headers::from([("timestamp_in_ms".into(), now.as_millisecond().into())]),
        reply_to,
        ..Properties::default()
    };
    Message { properties, body }
}

/// Publishes until the broker has the message in the queue.
pub(super) async fn publish(publisher: &AmqpPublisher, queue: &str, message: Message) -> anyhow::Result<()> {
    let refused = |reason| BrokerError::Refused { broker: format!("queue {queue:?}"), reason };
    match publisher.publish(queue, message.into()).await? {
        Published::Confirmed => Ok(()),
        Published::Unroutable => bail!(refused("it does not exist".into())),
        Published::Nacked => bail!(refused("a negative confirm; is it full?".into())),
        Published::Refused(words) | Published::Forbidden(words) => bail!(refused(words)),
    }
}

/// The name of our private reply queue, once the broker has made it.
pub(super) async fn reply_queue(
    consumer: &mut AmqpConsumer,
    mut name: watch::Receiver<Option<String>>,
) -> anyhow::Result<String> {
    tokio::select! {
        named = name.wait_for(Option::is_some) => named?.clone().context("no name"),
        event = consumer.next() => bail!("no reply queue: {:?}", event?),
    }
}
