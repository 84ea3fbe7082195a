//! The producers: several connections to the broker itself that publish the plan's tasks in bursts,
//! wait for each confirm, and publish again, under another id, what was not confirmed. Own their
//! connections; the ledger is told before anything leaves.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, PublisherConfirm};
use tokio::time::{sleep, timeout};

use super::ledger::Ledger;
use super::plan::{self, Dice, Kind, Planned};

/// Tasks that may be unanswered before the producers wait.
const MOST_OPEN: usize = 2_000;
const MOST_IN_A_BURST: u64 = 60;
/// A quorum queue that confirms nothing.
pub const STUCK: &str = "soak.stuck";
/// The queue of a requester who listens.
pub const REQUESTER: &str = "soak.requester";
/// A queue that has no room.
pub const FULL: &str = "soak.full";
/// The message that fills it.
pub const FILLER: &str = "filler";
const CONNECT: Duration = Duration::from_secs(5);
const CONFIRM: Duration = Duration::from_secs(20);
const AGAIN: Duration = Duration::from_millis(200);

/// What producers, readers and the storm share.
pub struct Desk {
    pub url: String,
    pub seed: u64,
    pub tasks: String,
    /// Tasks a second.
    pub rate: f64,
    /// Locked for map operations only.
    ledger: Mutex<Ledger>,
    next: AtomicU64,
    closed: AtomicBool,
}

/// A message to publish, until the broker has it.
pub struct Outgoing {
    /// The first publish has this id; the next ones a mark behind it.
    pub name: String,
    /// None: a sentinel, which nothing answers.
    pub task: Option<Planned>,
    /// The `type` property and the body of a sentinel.
    pub typed: bool,
}

/// A producer's connection, made anew when it is lost.
#[derive(Default)]
pub struct Press {
    link: Option<(Connection, Channel)>,
    /// Publishes that were not confirmed.
    again: u64,
}

impl Desk {
    pub fn new(url: String, tasks: String, seed: u64, rate: f64) -> Self {
        let (ledger, next, closed) = (Mutex::default(), AtomicU64::new(0), AtomicBool::new(false));
        Self { url, seed, tasks, rate, ledger, next, closed }
    }

    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No further tasks.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Tasks of the plan that were begun.
    pub fn drawn(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }
}

/// Milliseconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a time after 1970").as_millis() as u64
}

/// Publishes the plan, burst by burst and all in all at the desk's rate, until it closes.
pub async fn produce(desk: Arc<Desk>, producer: u64) {
    let mut dice = Dice::of_producer(desk.seed, producer);
    let mut press = Press::default();
    let begun = Instant::now();
    while !desk.is_closed() {
        let size = 1 + dice.below(MOST_IN_A_BURST);
        let first = desk.next.fetch_add(size, Ordering::SeqCst);
        let due = begun + Duration::from_secs_f64(first as f64 / desk.rate);
        while !desk.is_closed() && (Instant::now() < due || desk.ledger().open() > MOST_OPEN) {
            sleep(Duration::from_millis(20)).await;
        }
        let named = |number: u64| Outgoing {
            name: number.to_string(),
            task: Some(plan::task(desk.seed, number)),
            typed: false,
        };
        press.publish(&desk, (first..first + size).map(named).collect()).await;
    }
}

impl Press {
    /// Publishes until all are confirmed.
    pub async fn publish(&mut self, desk: &Desk, mut left: Vec<Outgoing>) {
        loop {
            left = self.attempt(desk, left).await;
            if left.is_empty() {
                return;
            }
            self.again += left.len() as u64;
            self.link = None;
            sleep(AGAIN).await;
        }
    }

    /// Gives back what was not confirmed.
    async fn attempt(&mut self, desk: &Desk, messages: Vec<Outgoing>) -> Vec<Outgoing> {
        let Some(channel) = self.channel(&desk.url).await else { return messages };
        let mut sent = Vec::new();
        for message in messages {
            let mark = if self.again == 0 { String::new() } else { format!("~{}", self.again) };
            let id = format!("{}{mark}", message.name);
            let published = now();
            if let Some(task) = &message.task {
                desk.ledger().publishes(&id, task.kind, &task.answer, published);
            }
            let confirm = timeout(CONFIRM, send(&channel, &desk.tasks, &id, (&message, published))).await;
            sent.push((message, id, confirm.ok().and_then(Result::ok)));
        }
        let mut left = Vec::new();
        for (message, id, confirm) in sent {
            let confirmed = match confirm {
                Some(confirm) => timeout(CONFIRM, confirm).await.ok().and_then(Result::ok),
                None => None,
            };
            match confirmed {
                Some(confirmed) if confirmed.is_ack() => {
                    if confirmed.take_message().is_some() {
                        desk.ledger().strange.push(format!("{id}: the task queue is gone"));
                    }
                    if message.task.is_some() {
                        desk.ledger().confirmed(&id);
                    }
                }
                _ => left.push(message),
            }
        }
        left
    }

    async fn channel(&mut self, url: &str) -> Option<Channel> {
        if let Some((connection, channel)) = &self.link
            && connection.status().connected()
            && channel.status().connected()
        {
            return Some(channel.clone());
        }
        self.link = timeout(CONNECT, connect(url)).await.ok().and_then(Result::ok);
        self.link.as_ref().map(|(_, channel)| channel.clone())
    }
}

async fn connect(url: &str) -> lapin::Result<(Connection, Channel)> {
    let name = ConnectionProperties::default().with_connection_name("soak producer".into());
    let connection = Connection::connect(url, name).await?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok((connection, channel))
}

#[expect(clippy::disallowed_methods, reason = "a test producer publishes as any producer does")]
async fn send(
    channel: &Channel,
    queue: &str,
    id: &str,
    (message, published): (&Outgoing, u64),
) -> lapin::Result<PublisherConfirm> {
    let mandatory = BasicPublishOptions { mandatory: true, immediate: false };
    let mut headers = FieldTable::default();
    headers.insert("timestamp_in_ms".into(), AMQPValue::LongLongInt(published as i64));
    let mut properties = BasicProperties::default().with_delivery_mode(2).with_correlation_id(id.into());
    let body: &[u8] = match &message.task {
        None if message.typed => {
            properties = properties.with_type("control.shutdown".into());
            b""
        }
        None => b"null",
        Some(task) => {
            match task.kind {
                Kind::UnknownControl => properties = properties.with_type("control.dance".into()),
                Kind::NoReplyQueue => properties = properties.with_reply_to("soak.nowhere".into()),
                Kind::StuckReplyQueue => properties = properties.with_reply_to(STUCK.into()),
                Kind::FullReplyQueue => properties = properties.with_reply_to(FULL.into()),
                Kind::Expired => {
                    let past = AMQPValue::LongString("2020-01-01T00:00:00Z".into());
                    headers.insert("expires".into(), past);
                }
                // A quarter of them is a requester's who listens.
                Kind::Good if task.body.len().is_multiple_of(4) => {
                    properties = properties.with_reply_to(REQUESTER.into());
                }
                Kind::Good
                | Kind::Undecodable
                | Kind::Misshapen
                | Kind::Failing
                | Kind::Poison
                | Kind::Oversized => {}
            }
            &task.body
        }
    };
    channel.basic_publish("".into(), queue.into(), mandatory, body, properties.with_headers(headers)).await
}
