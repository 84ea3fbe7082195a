//! The client of remote control: publishes requests to the control exchange and collects the answers, on one
//! connection, over RabbitMQ's direct reply-to. The caller needs no queue and only the permission to write to
//! that exchange. Owns the connection, and does not reconnect.

use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Consumer, Error};
use tokio::time::timeout;

use super::admin::{QueueDepth, connect};
use super::cause::refused;
use super::confirmed_publish::DIRECT_REPLY_TO;
use super::connect::{Connector, OpenConnection};
use super::convert::{properties_from, properties_to, short};
use super::topology::inspect;
use super::withdrawals;
use crate::broker::{BrokerError, Published};
use crate::protocol::{JSON, Message, Properties};

/// Longest wait for the broker, which does not answer under a memory or disk alarm.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection for requests to launchers.
pub struct ControlClient {
    exchange: String,
    connection: OpenConnection,
    channel: Channel,
    answers: Consumer,
}

impl ControlClient {
    /// Connects.
    ///
    /// # Errors
    /// No address could be reached, or the broker refuses.
    pub async fn connect(connector: &Connector, exchange: &str) -> Result<Self, BrokerError> {
        let connection = connect(connector).await?;
        let limit = connector.settings.connect_timeout;
        let set_up = async {
            let channel = connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            // RabbitMQ requires this of a consumer of direct replies.
            let no_ack = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
            let answers = channel
                .basic_consume(DIRECT_REPLY_TO.into(), "".into(), no_ack, FieldTable::default())
                .await?;
            Ok::<_, Error>((channel, answers))
        };
        let (channel, answers) = in_time(&connection.broker, limit, set_up).await?;
        Ok(Self { exchange: exchange.to_owned(), connection, channel, answers })
    }

    /// Publishes a request, which expires after `expires`. Unroutable: no launcher is bound to this routing key. Nacked:
    /// the queue of one of them is full.
    ///
    /// # Errors
    /// The broker refuses or is lost, or there is no such exchange.
    pub async fn publish_request(
        &self,
        routing_key: &str,
        body: &[u8],
        correlation_id: &str,
        expires: Duration,
    ) -> Result<Published, BrokerError> {
        let properties = Properties {
            content_type: Some(JSON.into()),
            correlation_id: Some(correlation_id.to_owned()),
            reply_to: Some(DIRECT_REPLY_TO.into()),
            expiration: Some(expires.as_millis().to_string()),
            ..Properties::default()
        };
        self.publish(routing_key, &properties, body).await
    }

    /// Publishes a message, with the outcomes of [`publish_request`](Self::publish_request).
    ///
    /// # Errors
    /// The broker refuses or is lost, or there is no such exchange.
    #[expect(clippy::disallowed_methods, reason = "the other publisher speaks to queues only")]
    pub async fn publish(
        &self,
        routing_key: &str,
        properties: &Properties,
        body: &[u8],
    ) -> Result<Published, BrokerError> {
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let (exchange, key) = (short(&self.exchange), short(routing_key));
        let properties = properties_to(properties, &self.connection.strings);
        let published = async {
            let confirm = self.channel.basic_publish(exchange, key, options, body, properties).await?.await?;
            let is_ack = confirm.is_ack();
            Ok(match confirm.take_message() {
                Some(_) => Published::Unroutable,
                None if is_ack => Published::Confirmed,
                None => Published::Nacked,
            })
        };
        let exchange = format!("exchange {:?}", self.exchange);
        in_time(&exchange, ANSWER_TIMEOUT, published).await.map_err(|error| match error {
            BrokerError::Missing { broker, reason } => {
                let hint = "no launcher has made it: is admin.control_exchange the same there?";
                BrokerError::Missing { broker, reason: format!("{reason}; {hint}") }
            }
            other => other,
        })
    }

    /// Adds a withdrawal to the stream that launchers read when they start. It is kept for `max_age`.
    ///
    /// # Errors
    /// The broker refuses or is lost.
    pub async fn keep_withdrawal(&self, body: &[u8], max_age: Duration) -> Result<(), BrokerError> {
        let added = withdrawals::add(&self.connection, &self.channel, &self.exchange, body, max_age);
        in_time(&self.connection.broker, ANSWER_TIMEOUT, added).await
    }

    /// The next answer; none if the connection is lost. Safe to cancel.
    pub async fn next(&mut self) -> Option<Message> {
        let delivery = self.answers.next().await?.ok()?;
        let raw = self.connection.strings.take(self.channel.id(), delivery.delivery_tag);
        let properties = properties_from(&delivery.properties, raw.as_ref());
        Some(Message { properties, body: delivery.data.into() })
    }

    /// The depth of a queue; none if the queue cannot be inspected.
    ///
    /// # Errors
    /// The broker is lost.
    pub async fn depth(&self, queue: &str) -> Result<Option<QueueDepth>, BrokerError> {
        let inspected = timeout(ANSWER_TIMEOUT, inspect(&self.connection, queue))
            .await
            .map_err(|_| unanswered(&self.connection.broker, ANSWER_TIMEOUT))?;
        if !self.connection.status().connected() {
            let reason = format!("{}: the connection is lost", self.connection.broker);
            return Err(BrokerError::Unreachable { seconds: 0, reason });
        }
        let Ok(queue) = inspected else { return Ok(None) };
        Ok(Some(QueueDepth { ready: queue.message_count(), consumers: queue.consumer_count() }))
    }

    /// Closes the connection gracefully.
    pub async fn close(self) {
        let _ = timeout(ANSWER_TIMEOUT, self.connection.close(200, "done".into())).await;
    }
}

/// The broker's answer, or an error when it takes longer than `limit`.
async fn in_time<T>(
    broker: &str,
    limit: Duration,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, BrokerError> {
    let answered = timeout(limit, work).await.map_err(|_| unanswered(broker, limit))?;
    answered.map_err(|error| refused(broker, &error))
}

/// The error of a request that the broker did not answer within `limit`.
fn unanswered(broker: &str, limit: Duration) -> BrokerError {
    let reason = format!("{broker}: no answer; is an alarm active (rabbitmq-diagnostics check_alarms)?");
    BrokerError::Unreachable { seconds: limit.as_secs(), reason }
}
