//! A producer and a reader of replies, through lapin: what any AMQP client does, and the questions
//! of an operator (how many wait, who consumes).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::StreamExt;
use lapin::options::{
    BasicConsumeOptions, BasicGetOptions, BasicNackOptions, BasicPublishOptions, ConfirmSelectOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use serde_json::Value;

use super::sconce::Gate;
use super::wait::{bounded, until};

/// One connection with a confirming channel.
pub struct Client {
    url: String,
    connection: Connection,
    channel: Channel,
}

/// A message to publish: persistent JSON unless said otherwise.
#[derive(Clone, Debug)]
pub struct Task {
    pub body: Vec<u8>,
    pub properties: BasicProperties,
}

/// A message that was received, reply or dead letter.
#[derive(Clone, Debug)]
pub struct Received {
    pub correlation_id: String,
    pub kind: String,
    /// Scalars as JSON values; other field types are left out.
    pub headers: BTreeMap<String, Value>,
    /// Null when it is not JSON.
    pub body: Value,
    pub raw: Vec<u8>,
    pub properties: BasicProperties,
    pub redelivered: bool,
}

/// A stream of what arrives in one queue, acked as it is taken.
pub struct Inbox {
    pub queue: String,
    consumer: lapin::Consumer,
    /// For as long as it is held, its connection stands.
    _channel: Channel,
}

impl Task {
    /// The same, whose forward pass waits at a gate.
    pub fn held_at(mut self, gate: &Gate) -> Self {
        let mut body: Value = serde_json::from_slice(&self.body).expect("JSON");
        body["hold"] = gate.name.as_str().into();
        self.body = body.to_string().into_bytes();
        self
    }

    /// A task with this JSON body, and a correlation id of its own.
    pub fn new(body: Value) -> Self {
        Self::raw(body.to_string())
    }

    /// A task with these bytes, and a correlation id of its own.
    pub fn raw(body: impl Into<Vec<u8>>) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let id = format!("c{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let properties = BasicProperties::default().with_delivery_mode(2).with_correlation_id(id.into());
        Self { body: body.into(), properties }
    }

    /// A sentinel.
    pub fn sentinel() -> Self {
        Self::raw("").with(|properties| properties.with_type("control.shutdown".into()))
    }

    /// Sets the correlation id.
    pub fn id(self, id: impl Into<String>) -> Self {
        let id: String = id.into();
        self.with(|properties| properties.with_correlation_id(id.into()))
    }

    /// Sets `reply_to`.
    pub fn reply_to(self, queue: &str) -> Self {
        self.with(|properties| properties.with_reply_to(queue.into()))
    }

    /// Sets a header.
    pub fn header(self, name: &str, value: &str) -> Self {
        let mut headers = self.properties.headers().clone().unwrap_or_default();
        headers.insert(name.into(), AMQPValue::LongString(value.into()));
        self.with(|properties| properties.with_headers(headers))
    }

    /// Changes the properties.
    pub fn with(mut self, change: impl FnOnce(BasicProperties) -> BasicProperties) -> Self {
        self.properties = change(self.properties);
        self
    }
}

impl Received {
    /// What was delivered.
    pub fn new(data: Vec<u8>, properties: BasicProperties, redelivered: bool) -> Self {
        let text = |it: &Option<lapin::types::ShortString>| {
            it.as_ref().map(|text| text.as_str().to_owned()).unwrap_or_default()
        };
        let headers = properties.headers().as_ref().map(FieldTable::inner).into_iter().flatten();
        Self {
            correlation_id: text(properties.correlation_id()),
            kind: text(properties.kind()),
            headers: headers.filter_map(|(name, it)| Some((name.to_string(), scalar(it)?))).collect(),
            body: serde_json::from_slice(&data).unwrap_or_default(),
            raw: data,
            properties,
            redelivered,
        }
    }

    /// A header as text; empty when it is missing.
    pub fn header(&self, name: &str) -> String {
        match self.headers.get(name) {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => String::new(),
        }
    }

    /// The header `status_code`; 0 when it is missing.
    pub fn status_code(&self) -> i64 {
        self.headers.get("status_code").and_then(Value::as_i64).unwrap_or(0)
    }
}

impl Client {
    /// Connects.
    pub async fn connect(url: &str) -> Self {
        let name = ConnectionProperties::default().with_connection_name("test client".into());
        let connection = bounded("the test client connects", Connection::connect(url, name)).await;
        let connection = connection.expect("a connection");
        let channel = connection.create_channel().await.expect("a channel");
        channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
        Self { url: url.to_owned(), connection, channel }
    }

    /// A further channel.
    pub async fn channel(&self) -> Channel {
        self.connection.create_channel().await.expect("a channel")
    }

    /// Publishes to a queue by name, and returns when the broker has it there.
    pub async fn publish(&self, queue: &str, task: Task) {
        self.publish_all(queue, [task]).await;
    }

    /// Publishes many, pipelined.
    pub async fn publish_all(&self, queue: &str, tasks: impl IntoIterator<Item = Task>) {
        let mut confirms = Vec::new();
        for task in tasks {
            confirms.push(send(&self.channel, queue, task).await);
        }
        for confirm in confirms {
            let confirmed = bounded("a confirm", confirm).await.expect("a confirm");
            assert!(confirmed.is_ack() && confirmed.take_message().is_none(), "not put into {queue}");
        }
    }

    /// A reply queue of our own, gone with this connection.
    pub async fn private_inbox(&self) -> Inbox {
        let channel = self.channel().await;
        let own = QueueDeclareOptions { exclusive: true, auto_delete: true, ..Default::default() };
        let queue = channel.queue_declare("".into(), own, FieldTable::default()).await.expect("a queue");
        self.consume(queue.name().as_str()).await.expect("a consumer")
    }

    /// Consumes a queue, once somebody has made it. On a connection of its own, which RabbitMQ 3.10 closes
    /// (541 INTERNAL_ERROR) over a quorum queue that shows already and has no leader yet.
    pub async fn inbox(&self, queue: &str) -> Inbox {
        self.wait_for_queue(queue).await;
        until(&format!("{queue} can be consumed"), || async {
            Self::connect(&self.url).await.consume(queue).await.ok()
        })
        .await
    }

    async fn consume(&self, queue: &str) -> Result<Inbox, lapin::Error> {
        let channel = self.channel().await;
        let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
        let none = FieldTable::default();
        let consumer = channel.basic_consume(queue.into(), "".into(), options, none).await?;
        Ok(Inbox { queue: queue.to_owned(), consumer, _channel: channel })
    }

    /// Makes a durable queue with these arguments.
    pub async fn declare(&self, queue: &str, arguments: &[(&str, AMQPValue)]) {
        let mut table = FieldTable::default();
        for (name, value) in arguments {
            table.insert((*name).into(), value.clone());
        }
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        let channel = self.channel().await;
        channel.queue_declare(queue.into(), durable, table).await.expect("a queue");
    }

    /// Deletes a queue, with what it holds.
    pub async fn delete(&self, queue: &str) {
        let all = QueueDeleteOptions::default();
        self.channel().await.queue_delete(queue.into(), all).await.expect("a deletion");
    }

    /// Ready messages and consumers of a queue; none when it does not exist.
    pub async fn look(&self, queue: &str) -> Option<(u32, u32)> {
        // A disposable channel: the broker closes it to say no.
        let channel = self.channel().await;
        let passive = QueueDeclareOptions { passive: true, ..Default::default() };
        let declared = channel.queue_declare(queue.into(), passive, FieldTable::default()).await.ok()?;
        let counts = (declared.message_count(), declared.consumer_count());
        let _ = channel.close(200, "done".into()).await;
        Some(counts)
    }

    /// Waits until the queue exists.
    pub async fn wait_for_queue(&self, queue: &str) {
        until(&format!("queue {queue} exists"), || self.look(queue)).await;
    }

    /// Waits until so many messages are ready and so many consume: the broker forgets a worker a
    /// moment after it has ended.
    pub async fn becomes(&self, queue: &str, counts: (u32, u32)) {
        let what = format!("{queue} has {counts:?} messages ready and consumers");
        until(&what, || async { self.look(queue).await.filter(|it| *it == counts) }).await;
    }

    /// Waits until so many messages are ready.
    pub async fn ready_becomes(&self, queue: &str, count: u32) {
        let what = format!("{count} messages ready in {queue}");
        until(&what, || async { self.look(queue).await.filter(|(ready, _)| *ready == count) }).await;
    }

    /// Waits until so many consume the queue.
    pub async fn consumers_become(&self, queue: &str, count: u32) {
        let what = format!("{count} consumers of {queue}");
        until(&what, || async { self.look(queue).await.filter(|(_, consumers)| *consumers == count) }).await;
    }

    /// Takes the next message out of a queue, waiting for it: a dead letter, say.
    pub async fn get(&self, queue: &str) -> Received {
        until(&format!("a message in {queue}"), || async {
            let options = BasicGetOptions { no_ack: true };
            let got = self.channel().await.basic_get(queue.into(), options).await.ok().flatten()?;
            let message = got.delivery;
            Some(Received::new(message.data, message.properties, message.redelivered))
        })
        .await
    }
}

impl Client {
    /// Takes the next message of a queue and hands it back.
    pub async fn return_one(&self, queue: &str) {
        until(&format!("a message in {queue}"), || async {
            let channel = self.channel().await;
            let got = channel.basic_get(queue.into(), BasicGetOptions::default()).await;
            let requeue = BasicNackOptions { requeue: true, multiple: false };
            got.ok().flatten()?.delivery.nack(requeue).await.ok()?.then_some(())
        })
        .await;
    }
}

impl Inbox {
    /// The next message.
    pub async fn next(&mut self) -> Received {
        let what = format!("a message in {}", self.queue);
        bounded(&what, self.received()).await.expect("an open inbox")
    }

    /// The next message, whenever it comes; none: the queue is gone.
    pub async fn received(&mut self) -> Option<Received> {
        let message = self.consumer.next().await?.expect("a delivery");
        Some(Received::new(message.data, message.properties, message.redelivered))
    }

    /// The next `count` messages.
    pub async fn take(&mut self, count: usize) -> Vec<Received> {
        let mut taken = Vec::new();
        for _ in 0..count {
            taken.push(self.next().await);
        }
        taken
    }
}

#[expect(clippy::disallowed_methods, reason = "a test client publishes as any producer does")]
async fn send(channel: &Channel, queue: &str, task: Task) -> lapin::PublisherConfirm {
    let mandatory = BasicPublishOptions { mandatory: true, immediate: false };
    let Task { body, properties } = task;
    let sent = channel.basic_publish("".into(), queue.into(), mandatory, &body, properties).await;
    sent.expect("an open channel")
}

fn scalar(value: &AMQPValue) -> Option<Value> {
    Some(match value {
        AMQPValue::Boolean(it) => (*it).into(),
        AMQPValue::ShortShortInt(it) => (*it).into(),
        AMQPValue::ShortShortUInt(it) => (*it).into(),
        AMQPValue::ShortInt(it) => (*it).into(),
        AMQPValue::ShortUInt(it) => (*it).into(),
        AMQPValue::LongInt(it) => (*it).into(),
        AMQPValue::LongUInt(it) => (*it).into(),
        AMQPValue::LongLongInt(it) => (*it).into(),
        AMQPValue::Float(it) => (*it).into(),
        AMQPValue::Double(it) => (*it).into(),
        AMQPValue::ShortString(it) => it.as_str().into(),
        AMQPValue::LongString(it) => String::from_utf8_lossy(it.as_bytes()).into(),
        AMQPValue::Timestamp(it) => (*it).into(),
        _ => return None,
    })
}
