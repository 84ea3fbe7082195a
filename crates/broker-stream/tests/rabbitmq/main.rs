//! Lapin behind the filter, connected to a real RabbitMQ.

#[allow(dead_code, reason = "the workspace's tests need more of it")]
#[path = "../../../../tests/support/engine.rs"]
mod engine;
#[allow(dead_code, clippy::print_stderr, reason = "the workspace's tests need more of it")]
#[path = "../../../../tests/support/rabbit.rs"]
mod rabbit;
#[allow(dead_code, reason = "the workspace's tests need more of it")]
#[path = "../../../../tests/support/wait.rs"]
mod wait;

#[allow(dead_code, reason = "the workspace's tests need more of it")]
#[path = "../../../../tests/support/raw_amqp.rs"]
mod raw;

use std::fs;
use std::sync::Arc;

use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicConsumeOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::tcp::OwnedTLSConfig;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use sconce_broker_stream::{Property, RawStrings, Socket, Strings, connect};

use self::rabbit::{Conf, Rabbit};
use self::raw::{Message, Raw, short};
use self::wait::{bounded, until};

/// The bytes of a UUID.
const ID: &[u8] = b"\x9b\xdc\x3f\x00\xc1\x5e\x4a\xd6\x9f\x80\xff\x41\x00\xce\x7f\xfe";
const CLEAN_ID: &str = "???\0?^J\u{59f}??A\0?\u{7f}?";

/// The properties of which RabbitMQ checks nothing, with their flags.
const UNCHECKED: [(Property, u16); 7] = [
    (Property::ContentType, 1 << 15),
    (Property::ContentEncoding, 1 << 14),
    (Property::CorrelationId, 1 << 10),
    (Property::ReplyTo, 1 << 9),
    (Property::MessageId, 1 << 7),
    (Property::Type, 1 << 5),
    (Property::AppId, 1 << 3),
];
const HEADERS: u16 = 1 << 13;

/// Lapin, connected through the filter, with one channel.
struct Lapin {
    connection: Connection,
    channel: Channel,
    strings: Arc<Strings>,
    socket: Socket,
}

impl Lapin {
    async fn connect(url: &str, ca: Option<String>) -> Self {
        let tls = OwnedTLSConfig { identity: None, cert_chain: ca };
        let uri = url.parse().expect("an address");
        let attempt = tokio::spawn(connect(uri, tls, ConnectionProperties::default()));
        let connection = bounded("a connection", attempt).await.expect("no panic");
        let (connection, socket, strings) = connection.expect("a connection");
        let channel = connection.create_channel().await.expect("a channel");
        Self { connection, channel, strings, socket }
    }

    async fn to(rabbit: &Rabbit) -> Self {
        Self::connect(&rabbit.url(), None).await
    }

    async fn declare(&self, queue: &str) {
        let options = QueueDeclareOptions::default();
        self.channel.queue_declare(queue.into(), options, FieldTable::default()).await.expect("a queue");
    }

    async fn consume(&self, queue: &str) -> lapin::Consumer {
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let none = FieldTable::default();
        self.channel.basic_consume(queue.into(), "".into(), options, none).await.expect("a consumer")
    }

    async fn get(&self, queue: &str) -> Delivery {
        let options = BasicGetOptions { no_ack: true };
        let got = self.channel.basic_get(queue.into(), options).await.expect("a channel");
        got.expect("a message").delivery
    }

    fn raw(&self, delivery: &Delivery) -> Option<RawStrings> {
        self.strings.take(self.channel.id(), delivery.delivery_tag)
    }

    #[expect(clippy::disallowed_methods, reason = "the filter is below the publisher")]
    async fn publish(&self, exchange: &str, key: &str, body: &[u8], properties: BasicProperties) {
        let options = BasicPublishOptions::default();
        let sent = self.channel.basic_publish(exchange.into(), key.into(), options, body, properties).await;
        sent.expect("an open channel");
    }

    /// Proves that the connection still works.
    async fn still_works(&self) {
        let channel = self.connection.create_channel().await.expect("an open connection");
        let options = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
        channel.queue_declare("".into(), options, FieldTable::default()).await.expect("a queue");
    }
}

async fn next(consumer: &mut lapin::Consumer) -> Delivery {
    bounded("a delivery", consumer.next()).await.expect("a consumer").expect("a delivery")
}

async fn next_of(raw: &mut Raw, queue: &[u8]) -> Message {
    let mut message = None;
    until("a reply", || {
        message = raw.get(queue);
        let has_come = message.is_some();
        async move { has_come.then_some(()) }
    })
    .await;
    message.expect("a message")
}

/// All unchecked properties, each with `value`.
fn properties(value: &[u8]) -> Vec<u8> {
    let flags: u16 = UNCHECKED.iter().map(|(_, flag)| flag).sum();
    [&flags.to_be_bytes()[..], &short(value).repeat(UNCHECKED.len())].concat()
}

/// A property, as lapin has it.
fn received(delivery: &Delivery, property: Property) -> Option<&str> {
    let properties = &delivery.properties;
    let value = match property {
        Property::ContentType => properties.content_type(),
        Property::ContentEncoding => properties.content_encoding(),
        Property::CorrelationId => properties.correlation_id(),
        Property::ReplyTo => properties.reply_to(),
        Property::MessageId => properties.message_id(),
        Property::Type => properties.kind(),
        Property::AppId => properties.app_id(),
        _ => return None,
    };
    value.as_ref().map(|value| value.as_str())
}

/// Lapin receives messages whose properties are not UTF-8, and sends them back.
async fn echoes(rabbit: &Rabbit, lapin: &Lapin) {
    let mut raw = Raw::connect(rabbit.address());
    lapin.declare("echo").await;
    raw.declare(b"echoed");
    let mut consumer = lapin.consume("echo").await;
    // The longest body takes many frames.
    for (value, length) in [(ID, 5), (&[0xff; 255], 0), (b"text", 3), (&[0x80], 3_000_000)] {
        let body: Vec<u8> = (0..length).map(|n: u32| n as u8).collect();
        raw.publish(b"", &Message { key: b"echo".into(), properties: properties(value), body: body.clone() });
        let delivery = next(&mut consumer).await;
        assert!(delivery.data == body);
        let strings = lapin.raw(&delivery).unwrap_or_default();
        let mut reply = BasicProperties::default();
        for (property, _) in UNCHECKED {
            let clean = received(&delivery, property).expect("a property").to_owned();
            let text = match strings.property(property) {
                Some(bytes) => {
                    assert_eq!(bytes, value, "{property:?}");
                    assert_eq!(clean.len(), value.len());
                    lapin.strings.token(bytes)
                }
                None => clean,
            };
            reply = match property {
                Property::ContentType => reply.with_content_type(text.into()),
                Property::ContentEncoding => reply.with_content_encoding(text.into()),
                Property::CorrelationId => reply.with_correlation_id(text.into()),
                Property::ReplyTo => reply.with_reply_to(text.into()),
                Property::MessageId => reply.with_message_id(text.into()),
                Property::Type => reply.with_type(text.into()),
                _ => reply.with_app_id(text.into()),
            };
        }
        lapin.publish("", "echoed", &delivery.data, reply).await;
        let reply = next_of(&mut raw, b"echoed").await;
        assert!(reply.body == body);
        assert_eq!(reply.properties, properties(value));
    }
    lapin.still_works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn properties_that_are_not_utf_8_are_received_and_sent() {
    let rabbit = Rabbit::shared();
    echoes(rabbit, &Lapin::to(rabbit).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_filter_works_above_tls() {
    let folder = tempfile::tempdir().expect("a folder");
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let (certificate, key) = (folder.path().join("node.pem"), folder.path().join("node.key"));
    fs::write(&certificate, made.cert.pem()).expect("a file");
    fs::write(&key, made.signing_key.serialize_pem()).expect("a file");
    let conf = Conf::default()
        .tls()
        .line("ssl_options.certfile", certificate.display())
        .line("ssl_options.keyfile", key.display())
        .line("ssl_options.verify", "verify_none");
    let rabbit = Rabbit::private_with(conf);
    let lapin = Lapin::connect(&rabbit.tls_url(), Some(made.cert.pem())).await;
    echoes(&rabbit, &lapin).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_headers_that_are_not_utf_8_are_received() {
    let rabbit = Rabbit::shared();
    let (mut raw, lapin) = (Raw::connect(rabbit.address()), Lapin::to(rabbit).await);
    lapin.declare("headers").await;
    let inner = [short(ID), b"I\0\0\0\x02".to_vec()].concat();
    let nested = [b"F".to_vec(), (inner.len() as u32).to_be_bytes().to_vec(), inner].concat();
    let table = [short(b"outer\xff"), nested, short(b"plain"), b"S\0\0\0\x02\xff\xfe".to_vec()].concat();
    let size = (table.len() as u32).to_be_bytes();
    let properties = [&HEADERS.to_be_bytes()[..], &size, &table].concat();
    raw.publish(b"", &Message { key: b"headers".into(), properties, body: b"x".into() });
    let delivery = next(&mut lapin.consume("headers").await).await;
    let headers = delivery.properties.headers().as_ref().expect("headers");
    assert_eq!(headers.inner().get("plain"), Some(&AMQPValue::LongString(b"\xff\xfe".to_vec().into())));
    let Some(AMQPValue::FieldTable(inner)) = headers.inner().get("outer?") else { panic!("{headers:?}") };
    assert_eq!(inner.inner().get(CLEAN_ID), Some(&AMQPValue::LongInt(2)));
    let strings = lapin.raw(&delivery).expect("a record");
    assert_eq!(strings.header_names, [b"outer\xff".to_vec(), ID.to_vec()]);
    let names = strings.header_names();
    assert_eq!((names.get(CLEAN_ID), names.get("plain")), (Some(&ID), None));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_routing_key_that_is_not_utf_8_is_received() {
    let rabbit = Rabbit::shared();
    let (mut raw, lapin) = (Raw::connect(rabbit.address()), Lapin::to(rabbit).await);
    lapin.declare("topics").await;
    raw.bind(b"topics", b"topic", b"#");
    let message = Message { key: b"key.\xff\xfe".into(), properties: properties(b"text"), body: Vec::new() };
    for _ in 0..2 {
        raw.publish(b"topic", &message);
        until("a message", || async {
            let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            let queue = lapin.channel.queue_declare("topics".into(), passive, FieldTable::default()).await;
            (queue.expect("a queue").message_count() == 1).then_some(())
        })
        .await;
        let delivery = lapin.get("topics").await;
        assert_eq!((delivery.exchange.as_str(), delivery.routing_key.as_str()), ("topic", "key.??"));
        let strings = lapin.raw(&delivery).expect("a record");
        assert_eq!(strings.properties, [(Property::RoutingKey, b"key.\xff\xfe".to_vec())]);
    }
    raw.publish(b"topic", &message);
    let delivery = next(&mut lapin.consume("topics").await).await;
    let strings = lapin.raw(&delivery).expect("a record");
    assert_eq!(strings.property(Property::RoutingKey), Some(&b"key.\xff\xfe"[..]));
    assert_eq!(lapin.raw(&delivery), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_is_sent_with_a_routing_key_that_is_not_utf_8() {
    let rabbit = Rabbit::shared();
    let (mut raw, lapin) = (Raw::connect(rabbit.address()), Lapin::to(rabbit).await);
    raw.declare(b"replies");
    raw.bind(b"replies", b"replied", b"#");
    for key in [ID, &[0xff; 255]] {
        let [exchange, token] = [b"replied", key].map(|bytes| lapin.strings.token(bytes));
        lapin.publish(&exchange, &token, b"reply", BasicProperties::default()).await;
        let reply = next_of(&mut raw, b"replies").await;
        assert_eq!((&reply.key[..], &reply.body[..]), (key, &b"reply"[..]));
    }
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::disallowed_methods, reason = "the filter is below the publisher")]
async fn a_message_that_cannot_be_routed_comes_back_without_ending_the_connection() {
    let lapin = Lapin::to(Rabbit::shared()).await;
    lapin.channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
    let mandatory = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    let id = BasicProperties::default().with_correlation_id(lapin.strings.token(ID).into());
    let key = lapin.strings.token(b"nobody\xff");
    let sent = lapin.channel.basic_publish("".into(), key.into(), mandatory, b"lost", id).await;
    let confirmation = bounded("a confirm", sent.expect("an open channel")).await.expect("a confirm");
    let Confirmation::Ack(Some(returned)) = confirmation else { panic!("{confirmation:?}") };
    assert_eq!(returned.delivery.routing_key.as_str(), "nobody?");
    assert_eq!(received(&returned.delivery, Property::CorrelationId), Some(CLEAN_ID));
    assert_eq!(lapin.raw(&returned.delivery), None);
    lapin.still_works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reason_that_is_not_utf_8_closes_only_the_channel() {
    let lapin = Lapin::to(Rabbit::shared()).await;
    // The reason names the exchange.
    let exchange = lapin.strings.token(b"no such \xff");
    lapin.publish(&exchange, "key", b"", BasicProperties::default()).await;
    until("the channel closes", || async { (!lapin.channel.status().connected()).then_some(()) }).await;
    lapin.still_works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_socket_ends_the_connection() {
    let Lapin { connection, channel: _channel, socket, .. } = Lapin::to(Rabbit::shared()).await;
    drop(socket);
    until("the connection ends", || async { (!connection.status().connected()).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_connection_has_sent_everything() {
    let rabbit = Rabbit::shared();
    let (mut raw, lapin) = (Raw::connect(rabbit.address()), Lapin::to(rabbit).await);
    raw.declare(b"last");
    for _ in 0..100 {
        lapin.publish("", "last", &[7; 200_000], BasicProperties::default()).await;
    }
    bounded("a close", lapin.connection.close(200, "done".into())).await.expect("a close");
    for _ in 0..100 {
        assert_eq!(next_of(&mut raw, b"last").await.body.len(), 200_000);
    }
}
