//! RabbitMQ's rigs for the conformance suite: queues as sconce declares them, and classic ones as a
//! user may have made them. Each link has a proxy of its own, so that it can be lost without a word.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use lapin::types::AMQPValue;
use sconce::broker::amqp::{
    AmqpPublisher, Connector, Consumed, Subscription, Topology, declare, retry_queue, subscribe,
};
use sconce::broker::{Published, Publisher, Source};
use sconce::config::{Broker, Secret, Tls};
use sconce::protocol::{Message, Properties, Value};

use crate::rig::{CEILING, Link, Rig};
use crate::support::client::Client;
use crate::support::proxy::Proxy;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::Settings;
use crate::support::wait::bounded;

/// The queues that `broker.declare = true` makes.
pub struct DeclaredRig(Common);

/// Classic durable queues.
pub struct ClassicRig(Common);

struct Common {
    rabbit: &'static Rabbit,
    client: Client,
    publisher: AmqpPublisher,
    /// The way of the link that was opened last. Written by `open`, taken by `crash`.
    latest: Mutex<Option<Proxy>>,
    /// The ways of the links before it, held open.
    earlier: Mutex<Vec<Proxy>>,
}

/// The way to a node, with nothing declared.
pub fn connector(url: String) -> Connector {
    let settings = Broker {
        url: vec![Secret::new(url)],
        declare: false,
        delivery_limit: 20,
        heartbeat: Duration::from_secs(20),
        connect_timeout: Duration::from_secs(10),
        confirm_timeout: Duration::from_secs(10),
        give_up_after: Duration::from_secs(30),
        consumer_timeout: Duration::from_secs(1_800),
        tls: Tls { ca_file: None, cert_file: None, key_file: None },
    };
    Connector::new(settings, "conformance")
}

/// Makes the queues of a pool on the shared node, as a worker of these settings does.
pub async fn declare_queues(settings: &Settings, delivery_limit: u32) {
    let topology = Topology {
        consumed: vec![Consumed { name: settings.tasks.clone(), has_retries: true }],
        reply_queue: Some(settings.replies.clone()),
        dead_letter_queue: settings.dead.clone(),
        delivery_limit,
        retry_ceilings: Vec::new(),
    };
    declare(&connector(Rabbit::shared().url()), &topology).await.expect("queues");
}

fn fresh_name() -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    format!("conformance.{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

impl Common {
    async fn start() -> Self {
        // Ours is the only process here whose log a broker test can show: SCONCE_LOG=debug.
        if let Ok(filter) = std::env::var("SCONCE_LOG") {
            let _ = sconce::telemetry::start(Some(&filter), sconce::telemetry::Format::Human);
        }
        let rabbit = Rabbit::shared();
        let client = Client::connect(&rabbit.url()).await;
        let publisher = AmqpPublisher::new(connector(rabbit.url()));
        Self { rabbit, client, publisher, latest: Mutex::default(), earlier: Mutex::default() }
    }

    async fn open(&self, queue: &str, prefetch: u16) -> Link {
        let proxy = Proxy::before(self.rabbit.address()).await;
        let way = || connector(proxy.url());
        let tasks = Subscription::Tasks { queue: queue.to_owned(), topology: None, source: Source::FIRST };
        let (consumer, acker) = subscribe(way(), tasks, prefetch);
        let publisher = AmqpPublisher::new(way());
        let before = self.latest.lock().expect("the latest").replace(proxy);
        self.earlier.lock().expect("the earlier").extend(before);
        Link { consumer: Box::new(consumer), acker: Arc::new(acker), publisher: Arc::new(publisher) }
    }

    /// The link whose proxy is gone can neither say anything nor come back.
    fn crash(&self, link: Link) {
        drop(self.latest.lock().expect("the latest").take().expect("only the latest link is crashed"));
        drop(link);
    }

    async fn publish(&self, queue: &str, message: Message) {
        let published = bounded("a confirm", self.publisher.publish(queue, message.into())).await;
        assert_eq!(published.ok(), Some(Published::Confirmed));
    }

    async fn ready(&self, queue: &str) -> usize {
        self.client.look(queue).await.expect("a queue of the rig").0 as usize
    }
}

impl Rig for DeclaredRig {
    /// Erlang has none.
    const INFINITE_HEADERS: bool = false;

    async fn start() -> Self {
        Self(Common::start().await)
    }

    async fn fresh_queue(&self) -> String {
        let task_queue = fresh_name();
        let dead_letter_queue = format!("{task_queue}.dead");
        let topology = Topology {
            consumed: vec![Consumed { name: task_queue.clone(), has_retries: true }],
            reply_queue: None,
            dead_letter_queue,
            delivery_limit: 20,
            retry_ceilings: vec![CEILING],
        };
        declare(&connector(self.0.rabbit.url()), &topology).await.expect("queues");
        task_queue
    }

    async fn open(&self, queue: &str, prefetch: u16) -> Link {
        self.0.open(queue, prefetch).await
    }

    async fn crash(&self, link: Link) {
        self.0.crash(link);
    }

    async fn publish(&self, queue: &str, message: Message) {
        self.0.publish(queue, message).await;
    }

    async fn ready(&self, queue: &str) -> usize {
        self.0.ready(queue).await
    }
}

impl Rig for ClassicRig {
    /// Erlang has none.
    const INFINITE_HEADERS: bool = false;

    async fn start() -> Self {
        Self(Common::start().await)
    }

    async fn fresh_queue(&self) -> String {
        let queue = fresh_name();
        self.0.client.declare(&queue, &[]).await;
        let text = |text: &str| AMQPValue::LongString(text.into());
        let way_back = [("x-dead-letter-exchange", text("")), ("x-dead-letter-routing-key", text(&queue))];
        self.0.client.declare(&retry_queue(&queue, CEILING), &way_back).await;
        queue
    }

    async fn open(&self, queue: &str, prefetch: u16) -> Link {
        self.0.open(queue, prefetch).await
    }

    async fn crash(&self, link: Link) {
        self.0.crash(link);
    }

    async fn publish(&self, queue: &str, message: Message) {
        self.0.publish(queue, message).await;
    }

    async fn ready(&self, queue: &str) -> usize {
        self.0.ready(queue).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_makes_the_broker_close_the_connection_is_refused_alone() {
    let rig = ClassicRig::start().await;
    let queue = rig.fresh_queue().await;
    let message = |number: f64| {
        let headers = [("number".to_owned(), Value::F64(number))].into();
        Message { properties: Properties { headers, ..Properties::default() }, body: "{}".into() }
    };
    let numbers = [1.0, f64::INFINITY, 2.0];
    let publishes = numbers.map(|number| rig.0.publisher.publish(&queue, message(number).into()));
    let answers = bounded("three answers", join_all(publishes)).await;
    for (number, answer) in numbers.into_iter().zip(answers) {
        match answer.expect("an answer") {
            Published::Confirmed => assert!(number.is_finite()),
            Published::Refused(_) => assert!(number.is_infinite()),
            Published::Unroutable | Published::Nacked | Published::Forbidden(_) => {
                panic!("the queue exists and has room")
            }
        }
    }
}
