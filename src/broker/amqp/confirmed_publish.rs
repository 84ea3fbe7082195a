//! Publishes one message, on a given channel or on a new one, and waits for the broker's answer. Finds the
//! returned message of a publish. Owns no state.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::BoxFuture;
use lapin::message::BasicReturnMessage;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{Channel, Confirmation, Connection, Error};
use sconce_broker_stream::Strings;
use tokio::sync::oneshot;

use super::channel_choice::Publishable;
use super::connect::OpenConnection;
use super::convert::{as_received, properties_to, short_or_raw};
use crate::broker::PublishResult;
use crate::protocol::Message;

/// Prefix of RabbitMQ's direct reply-to addresses. These are not queues: a message is delivered at most once, the
/// publisher cannot know whether anybody still consumes, and a slow consumer does not hold up messages to other
/// addresses.
pub(super) const DIRECT_REPLY_TO: &str = "amq.rabbitmq.reply-to";

/// A message to be published, and the sender that returns the result to the caller.
pub(super) struct QueuedMessage {
    pub(super) queue: Arc<str>,
    pub(super) message: Arc<Message>,
    /// Number of connections that ended, perhaps because of this message, while it was under way.
    pub(super) suspicions: u32,
    pub(super) result_sender: oneshot::Sender<PublishResult>,
}

impl Publishable for QueuedMessage {
    fn bytes(&self) -> usize {
        self.message.body.len()
    }

    fn is_wanted(&self) -> bool {
        !self.result_sender.is_closed()
    }

    fn is_suspect(&self) -> bool {
        self.suspicions > 0
    }
}

/// One attempt to publish a message, and its result.
pub(super) struct PublishAttempt {
    pub(super) id: u64,
    /// The channel that it was sent on; none if no channel could be opened.
    pub(super) channel: Option<Channel>,
    pub(super) result: Result<Confirmation, Error>,
}

/// Tests whether the broker answers: sends `confirm.select` on this channel, where it changes nothing, or on a new
/// one.
pub(super) fn send_ping(
    channel: Option<Channel>,
    connection: Arc<OpenConnection>,
) -> BoxFuture<'static, Result<Channel, Error>> {
    Box::pin(async move {
        let Some(channel) = channel else { return confirming_channel(&connection).await };
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(channel)
    })
}

async fn confirming_channel(connection: &Connection) -> Result<Channel, Error> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}

/// Publishes a message on this channel, or on a new one of the connection, and waits for the answer.
pub(super) fn publish_confirmed(
    id: u64,
    channel: Option<Channel>,
    connection: Arc<OpenConnection>,
    queue: Arc<str>,
    message: Arc<Message>,
) -> BoxFuture<'static, PublishAttempt> {
    Box::pin(async move {
        let channel = match channel {
            Some(channel) => channel,
            None => match confirming_channel(&connection).await {
                Ok(channel) => channel,
                Err(error) => return PublishAttempt { id, channel: None, result: Err(error) },
            },
        };
        // The connection is closed when its owner drops it. Waiting for the confirm, which may take long, must not
        // hold this `Arc`.
        let strings = connection.strings.clone();
        drop(connection);
        let result = publish_and_confirm(&channel, &strings, &queue, message).await;
        PublishAttempt { id, channel: Some(channel), result }
    })
}

#[expect(clippy::disallowed_methods, reason = "this is the publisher that all others go through")]
async fn publish_and_confirm(
    channel: &Channel,
    strings: &Strings,
    queue: &str,
    message: Arc<Message>,
) -> Result<Confirmation, Error> {
    let properties = properties_to(&message.properties, strings);
    // RabbitMQ 4.0 returns a mandatory message to a direct reply-to although it also delivers it.
    let mandatory = !queue.starts_with(DIRECT_REPLY_TO);
    let options = BasicPublishOptions { mandatory, immediate: false };
    // The first poll of this future enqueues the message behind earlier ones; the future ends once lapin's
    // thread has written it.
    let queue = short_or_raw(queue, strings);
    let confirm = channel.basic_publish("".into(), queue, options, &message.body, properties).await?;
    // The confirm may take long; this future does not keep the message in memory meanwhile.
    drop(message);
    confirm.await
}

/// A message that the broker has returned.
pub(super) struct Returned {
    pub(super) message: BasicReturnMessage,
    pub(super) received: Instant,
}

/// Removes the returned message that belongs to `sent` from `returns`; false when there is none.
pub(super) fn take_return(returns: &mut Vec<Returned>, sent: &QueuedMessage) -> bool {
    let found = returns.iter().position(|returned| is_return_of(&returned.message, sent));
    found.map(|index| returns.swap_remove(index)).is_some()
}

/// Whether a returned message may be `sent`. Two messages that are equal in everything compared here have the
/// same queue, and therefore the same outcome, so it does not matter to which of them the message belongs.
fn is_return_of(returned: &BasicReturnMessage, sent: &QueuedMessage) -> bool {
    let (theirs, ours) = (&returned.delivery.properties, &sent.message.properties);
    let same = |theirs: &Option<ShortString>, ours: &Option<String>| {
        theirs.as_ref().map(ShortString::as_str)
            == ours.as_deref().map(as_received).as_ref().map(ShortString::as_str)
    };
    returned.delivery.routing_key == as_received(&sent.queue)
        && same(theirs.message_id(), &ours.message_id)
        && same(theirs.correlation_id(), &ours.correlation_id)
        && returned.delivery.data == sent.message.body
}
