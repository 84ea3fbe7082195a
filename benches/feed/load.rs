//! The load: a closed loop of tasks with texts of thirty tokens, over either queue; and what of it came
//! back within the time that counts.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};
use sconce::broker::amqp::{AmqpPublisher, Connector, Subscription, Topology, declare, subscribe};
use sconce::broker::embedded::{self, EmbeddedBroker, QueueSpec};
use sconce::broker::{Event, Link, Published, Publisher};
use sconce::config::{self, Secret};
use sconce::protocol::{JSON, Message, Properties};
use serde_json::json;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use super::worker::{TICKS, Worker};

/// The task queue.
pub const TASKS: &str = "feed.tasks";
const REPLIES: &str = "feed.replies";
/// The pool's dead-letter queue.
const LETTERS: &str = "sconce.dead";
/// Replies that are not acked.
const PREFETCH: u16 = 1_024;
/// Texts under way: some batches of a card, and as many tasks that wait.
const TEXTS: usize = 16_384;
/// Tasks under way at most.
const MESSAGES: usize = 4_096;
/// Publishes at once.
const PUBLISHERS: usize = 512;
/// Different tasks.
const BODIES: usize = 64;
/// Words of a text: thirty tokens with the two that frame it.
const WORDS: usize = 24;
/// Longest wait for a reply.
const PATIENCE: Duration = Duration::from_secs(30);
/// Replies that are taken and acked together.
const BURST: usize = 512;

/// What tasks hold.
pub struct Load {
    pub inputs: usize,
    pub encoding: String,
    /// Words with accents, which the tokenizer strips.
    pub accents: bool,
}

impl Load {
    fn bodies(&self) -> Vec<Bytes> {
        let listed = include_str!("../../examples/demo/sentences.txt");
        let mut vocabulary: Vec<&str> =
            listed.split(|it: char| !it.is_ascii_lowercase()).filter(|word| word.len() > 1).collect();
        vocabulary.sort_unstable();
        vocabulary.dedup();
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let mut text = || {
            let word = |_| vocabulary[random.random_range(0..vocabulary.len() as u32) as usize];
            let text = (0..WORDS).map(word).collect::<Vec<_>>().join(" ");
            if self.accents { text.chars().map(accented).collect() } else { text }
        };
        let mut body = |_| {
            let texts: Vec<String> = (0..self.inputs).map(|_| text()).collect();
            let input = if let [alone] = &texts[..] { json!(alone) } else { json!(texts) };
            Bytes::from(json!({"input": input, "encoding_format": self.encoding}).to_string())
        };
        (0..BODIES).map(&mut body).collect()
    }
}

fn accented(letter: char) -> char {
    match letter {
        'a' => 'á',
        'e' => 'é',
        'i' => 'í',
        'o' => 'ó',
        'u' => 'ú',
        _ => letter,
    }
}

/// Where tasks go and replies come from.
pub struct Queue {
    /// As in the settings.
    pub url: String,
    link: Link,
    reply_to: String,
    /// The embedded one lives here.
    _broker: Option<EmbeddedBroker>,
}

impl Queue {
    /// RabbitMQ at that address; without, the embedded queue.
    pub async fn open(url: Option<String>) -> anyhow::Result<Self> {
        match url {
            Some(url) => Self::rabbit(url).await,
            None => Self::embedded().await,
        }
    }

    async fn embedded() -> anyhow::Result<Self> {
        let folder = std::env::temp_dir().join(format!("feed-{}", uuid::Uuid::new_v4().simple()));
        let spec = |name: &str| QueueSpec { name: name.into(), max_ready: MESSAGES, delivery_limit: None };
        let broker = EmbeddedBroker::bind(folder.join("queue"), &[TASKS, REPLIES, LETTERS].map(spec))?;
        let prefetch = NonZeroU16::new(PREFETCH).context("no prefetch")?;
        let subscription = embedded::Subscription { queue: REPLIES.into(), prefetch };
        let link = embedded::connect(broker.path(), subscription).await?;
        let url = format!("embedded:{}", broker.path().display());
        Ok(Self { url, link, reply_to: REPLIES.into(), _broker: Some(broker) })
    }

    async fn rabbit(url: String) -> anyhow::Result<Self> {
        let mut settings = config::load(&[], [], &[])?.settings.broker;
        settings.urls = vec![Secret::new(url.clone())];
        let connector = |name: &str| Connector::new(settings.clone(), name);
        let topology = Topology {
            task_queue: TASKS.into(),
            reply_queue: None,
            dead_letter_queue: LETTERS.into(),
            delivery_limit: settings.delivery_limit,
            retry_ceilings: Vec::new(),
        };
        declare(&connector("feed"), &topology).await?;
        let (named, mut name) = watch::channel(None);
        let (consumer, settler) = subscribe(connector("feed"), Subscription::Private(named), PREFETCH);
        let publisher = Arc::new(AmqpPublisher::new(connector("feed (publisher)")));
        let reply_to = name.wait_for(Option::is_some).await?.clone().context("no name")?;
        let link = Link { consumer: Box::new(consumer), settler: Arc::new(settler), publisher };
        Ok(Self { url, link, reply_to, _broker: None })
    }

    /// Keeps tasks under way, and says what came back once the warm-up was over.
    pub async fn drive(
        mut self,
        load: &Load,
        worker: &Worker,
        times: (Duration, Duration),
    ) -> anyhow::Result<Row> {
        let room = Arc::new(Semaphore::new((TEXTS / load.inputs).min(MESSAGES)));
        let tasks = Arc::new(Tasks {
            bodies: load.bodies(),
            reply_to: self.reply_to.clone(),
            publisher: self.link.publisher.clone(),
            room: room.clone(),
        });
        let mut publishers = JoinSet::new();
        (0..PUBLISHERS).for_each(|number| drop(publishers.spawn(tasks.clone().publish(number))));
        let count = Arc::new(Count::default());
        let counted = async {
            tokio::time::sleep(times.0).await;
            let before = (Instant::now(), count.now(), worker.seconds()?, idle()?);
            tokio::time::sleep(times.1).await;
            anyhow::Ok((before, (Instant::now(), count.now(), worker.seconds()?, idle()?)))
        };
        let (before, after) = tokio::select! {
            counted = counted => counted?,
            error = self.collect(&count, &room, load.inputs) => return Err(error),
            Some(ended) = publishers.join_next() => return Err(ended?),
        };
        Ok(Row::between(before, after))
    }

    /// Takes replies; ends with an error only.
    async fn collect(&mut self, count: &Count, room: &Semaphore, inputs: usize) -> anyhow::Error {
        loop {
            let mut receipts = Vec::with_capacity(BURST);
            let first = tokio::time::timeout(PATIENCE, self.link.consumer.next()).await;
            let mut next = match first {
                Ok(event) => Some(event),
                Err(_) => return anyhow!("no reply within {PATIENCE:?}"),
            };
            while let Some(event) = next {
                match event {
                    Ok(Event::Delivery(delivery)) => {
                        if let Err(error) = count.add(&delivery.message, inputs) {
                            return error;
                        }
                        receipts.push(delivery.receipt);
                    }
                    other => return anyhow!("no reply: {other:?}"),
                }
                next = if receipts.len() < BURST { self.link.consumer.next().now_or_never() } else { None };
            }
            room.add_permits(receipts.len());
            join_all(receipts.into_iter().map(|receipt| self.link.settler.ack(receipt))).await;
        }
    }
}

/// What the publishers share.
struct Tasks {
    bodies: Vec<Bytes>,
    reply_to: String,
    publisher: Arc<dyn Publisher>,
    /// Taken for each task, given for each reply.
    room: Arc<Semaphore>,
}

impl Tasks {
    /// Publishes while there is room; ends with an error only.
    async fn publish(self: Arc<Self>, first: usize) -> anyhow::Error {
        for number in first.. {
            let Ok(permit) = self.room.acquire().await else { return anyhow!("no room for ever") };
            permit.forget();
            let id = Some(uuid::Uuid::new_v4().to_string());
            let properties = Properties {
                content_type: Some(JSON.into()),
                correlation_id: id.clone(),
                message_id: id,
                delivery_mode: Some(2),
                reply_to: Some(self.reply_to.clone()),
                ..Properties::default()
            };
            let message = Message { properties, body: self.bodies[number % BODIES].clone() };
            match self.publisher.publish(TASKS, Arc::new(message)).await {
                Ok(Published::Confirmed) => {}
                other => return anyhow!("a task was not taken: {other:?}"),
            }
        }
        anyhow!("no number is left")
    }
}

/// What has come so far.
#[derive(Default)]
struct Count {
    replies: AtomicU64,
    texts: AtomicU64,
    bytes: AtomicU64,
    /// The sums of their batches' sizes, in texts and in tokens.
    batched: AtomicU64,
    tokens: AtomicU64,
}

impl Count {
    fn add(&self, reply: &Message, inputs: usize) -> anyhow::Result<()> {
        let header = |name: &str| reply.properties.headers.get(name);
        let status = header("status").and_then(|status| status.as_str()).unwrap_or("none");
        ensure!(status == "succeeded", "a reply says {status}: {}", String::from_utf8_lossy(&reply.body));
        let number = |name: &str| header(name).and_then(|size| size.as_i64()).map_or(0, i64::unsigned_abs);
        self.replies.fetch_add(1, Ordering::Relaxed);
        self.texts.fetch_add(inputs as u64, Ordering::Relaxed);
        self.bytes.fetch_add(reply.body.len() as u64, Ordering::Relaxed);
        self.batched.fetch_add(number("batch_size"), Ordering::Relaxed);
        self.tokens.fetch_add(number("batch_tokens"), Ordering::Relaxed);
        Ok(())
    }

    fn now(&self) -> [f64; 5] {
        let counts = [&self.replies, &self.texts, &self.bytes, &self.batched, &self.tokens];
        counts.map(|count| count.load(Ordering::Relaxed) as f64)
    }
}

/// A moment: its time, what had come, CPU seconds of the worker's threads and idle ones of the machine.
type Moment = (Instant, [f64; 5], BTreeMap<String, f64>, f64);

/// What came back in the time that counts, a second.
pub struct Row {
    texts: f64,
    megabytes: f64,
    /// Tokens of a text, and texts of a batch.
    tokens: f64,
    batch: f64,
    /// CPU seconds by threads' names.
    cpu: BTreeMap<String, f64>,
    idle: f64,
}

impl Row {
    fn between((begun, first, mut cpu, idle): Moment, (ended, last, spent, idle_then): Moment) -> Self {
        let seconds = (ended - begun).as_secs_f64();
        for (name, spent) in spent {
            let before = cpu.entry(name).or_default();
            *before = (spent - *before) / seconds;
        }
        let came = [0, 1, 2, 3, 4].map(|index| last[index] - first[index]);
        let [replies, texts, bytes, batched, tokens] = came;
        Self {
            texts: texts / seconds,
            megabytes: bytes / seconds / 1e6,
            tokens: tokens / batched.max(1.0),
            batch: batched / replies.max(1.0),
            cpu,
            idle: (idle_then - idle) / seconds,
        }
    }

    /// As the headings say.
    pub fn cells(&self) -> impl Iterator<Item = String> {
        let threads = ["main", "prepare", "respond"];
        let named = threads.map(|name| self.cpu.get(name).copied().unwrap_or_default());
        let all: f64 = self.cpu.values().sum();
        let others = all - named.iter().sum::<f64>();
        let whole = [self.texts, self.megabytes, self.tokens, self.batch].map(|it| format!("{it:.0}"));
        let cores = [all, named[0], named[1], named[2], others, self.idle].map(|it| format!("{it:.2}"));
        whole.into_iter().chain(cores)
    }
}

/// Seconds that the machine's cores had nothing to do, all together.
fn idle() -> anyhow::Result<f64> {
    let stat = fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().context("/proc/stat")?;
    // user, nice, system, idle, waiting for a disk.
    let ticks = line.split_whitespace().skip(4).take(2).filter_map(|it| it.parse::<f64>().ok());
    Ok(ticks.sum::<f64>() / TICKS)
}
