//! `sconce publish`: publishes tasks, and with `--wait` prints their replies, in the order of the
//! tasks.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use indicatif::ProgressBar;
use serde_json::{Map, Value as Json, json, value::RawValue};
use tokio::sync::{Semaphore, mpsc, watch};

use super::requests::{Request, Requests, embed, requests_in};
use super::{broker_session, load, pool_named, producer, progress, start_logging};
use crate::broker::amqp::{AmqpPublisher, Connector, Subscription, declare, subscribe};
use crate::broker::{Acker, Consumer, Event, Publisher};
use crate::cli::Publish;
use crate::protocol::reply::is_part;
use crate::protocol::{Message, Value};
use crate::shutdown::Exit;
use crate::telemetry::QUIET;

/// Tasks published and not yet printed: bounds what is held back for the order.
const WINDOW: usize = 4_096;
/// Publishes under way at once.
const PIPELINED: usize = 256;

/// Publishes.
pub(super) fn run(arguments: Publish) -> anyhow::Result<Exit> {
    let settings = load(&arguments.settings, &[])?.settings;
    start_logging(Some(QUIET));
    let (_, pool) = pool_named(&settings.pools, arguments.pool.as_deref())?;
    let requests = read_ahead(requests(&arguments).context(Exit::Usage)?)?;
    let total = match &arguments.input {
        None => Some(arguments.texts.len() as u64),
        Some(path) if path == Path::new("-") => None,
        Some(path) => Some(tasks_in(path)?),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let connector = || Connector::new(settings.broker.clone(), "sconce publish");
        if let Some(topology) = broker_session::topology(&settings.broker, pool) {
            declare(&connector(), &topology).await?;
        }
        let publisher = AmqpPublisher::new(connector());
        let bar = progress::bar(total, 0, "tasks");
        let feed = Feed { publisher: &publisher, queue: &pool.task_queue, bar: &bar };
        if !arguments.wait {
            let (published, bad) = feed.run(requests, None).await?;
            publisher.close().await;
            bar.finish_and_clear();
            writeln!(io::stdout(), "published {published} tasks to {}", pool.task_queue)?;
            return ended(bad);
        }
        let (told, name) = watch::channel(None);
        let (consumer, acker) = subscribe(connector(), Subscription::Private(told), 256);
        let mut replies = Replies { consumer, acker, timeout: arguments.timeout, bar: &bar };
        let queue = producer::reply_queue(&mut replies.consumer, name).await?;
        let (asked, window) = watch::channel(Asked::default());
        let permits = Arc::new(Semaphore::new(WINDOW));
        let fed = feed.run(requests, Some((queue, asked, permits.clone())));
        let worked = tokio::try_join!(fed, replies.print(window, &permits));
        bar.finish_and_clear();
        publisher.close().await;
        replies.consumer.close().await;
        let ((_, bad), ()) = worked?;
        ended(bad)
    })
}

/// A line that is no task is the caller's to mend; what came before it has been published.
fn ended(bad: Option<anyhow::Error>) -> anyhow::Result<Exit> {
    match bad {
        Some(error) => Err(error.context(Exit::Usage)),
        None => Ok(Exit::Done),
    }
}

/// What has been asked, for those who print: written by the feed, read by the printer.
#[derive(Default)]
struct Asked {
    custom_ids: BTreeMap<u64, String>,
    count: u64,
    all: bool,
}

impl Asked {
    fn add(&mut self, number: u64, request: &Request) {
        self.count += 1;
        if let Some(id) = &request.custom_id {
            self.custom_ids.insert(number, id.clone());
        }
    }
}

struct Feed<'a> {
    publisher: &'a AmqpPublisher,
    queue: &'a str,
    bar: &'a ProgressBar,
}

type Answers = (String, watch::Sender<Asked>, Arc<Semaphore>);

impl Feed<'_> {
    /// Publishes what `requests` brings. Returns how many tasks that were, and the request that
    /// could not be read, which ended them.
    async fn run(
        &self,
        mut requests: mpsc::Receiver<anyhow::Result<Request>>,
        answers: Option<Answers>,
    ) -> anyhow::Result<(u64, Option<anyhow::Error>)> {
        let mut number = 0;
        let mut under_way = FuturesUnordered::new();
        let bad = loop {
            let next = async {
                // First the place for the reply, given back by the printer: a request that has been
                // taken must not be dropped again.
                let place = match &answers {
                    Some((.., places)) => Some(places.acquire().await),
                    None => None,
                };
                (place, requests.recv().await)
            };
            let request = tokio::select! {
                Some(published) = under_way.next() => {
                    published?;
                    continue;
                }
                (place, request) = next, if under_way.len() < PIPELINED => {
                    if let Some(place) = place.transpose()?.filter(|_| request.is_some()) {
                        place.forget();
                    }
                    request
                }
            };
            let request = match request {
                Some(Ok(request)) => request,
                Some(Err(error)) => break Some(error),
                None => break None,
            };
            if let Some((_, asked, _)) = &answers {
                asked.send_modify(|asked| asked.add(number, &request));
            }
            let reply_to = answers.as_ref().map(|(queue, ..)| queue.clone());
            let id = request.custom_id.unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
            let message = producer::task(number, id, request.body, reply_to);
            under_way.push(self.publish(message, answers.is_none()));
            number += 1;
        };
        while let Some(published) = under_way.next().await {
            published?;
        }
        if let Some((_, asked, _)) = answers {
            asked.send_modify(|asked| asked.all = true);
        }
        Ok((number, bad))
    }

    async fn publish(&self, message: Message, counts: bool) -> anyhow::Result<()> {
        producer::publish(self.publisher, self.queue, message).await?;
        if counts {
            self.bar.inc(1);
        }
        Ok(())
    }
}

struct Replies<'a, S> {
    consumer: crate::broker::amqp::AmqpConsumer,
    acker: S,
    timeout: Duration,
    bar: &'a ProgressBar,
}

impl<S: Acker> Replies<'_, S> {
    /// Prints each reply once all before it are printed.
    async fn print(&mut self, mut asked: watch::Receiver<Asked>, permits: &Semaphore) -> anyhow::Result<()> {
        let mut early = BTreeMap::<u64, Message>::new();
        let mut next = 0;
        loop {
            let (count, all) = {
                let asked = asked.borrow_and_update();
                (asked.count, asked.all)
            };
            if all && next == count {
                return Ok(());
            }
            let event = tokio::select! {
                event = tokio::time::timeout(self.timeout, self.consumer.next()), if next < count => {
                    event.with_context(|| format!("no reply for {:?}; {} are missing", self.timeout, count - next))
                        .context(Exit::Aborted)??
                }
                // Not once the feed is over: an error at once, each time, would starve the timeout.
                Ok(()) = asked.changed() => continue,
            };
            let Event::Delivery(delivery) = event else {
                let error = format!(
                    "the reply queue was lost with the connection; {} replies are missing",
                    count - next
                );
                return Err(anyhow::Error::msg(error).context(Exit::BrokerLost));
            };
            self.acker.ack(delivery.delivery_tag).await;
            // The reply behind it says all.
            if is_part(&delivery.message) {
                continue;
            }
            let number = delivery.message.properties.correlation_id.as_deref().and_then(|id| id.parse().ok());
            // At least once: a reply that has been printed may come again.
            if let Some(number) = number.filter(|number| *number >= next) {
                early.insert(number, delivery.message);
            }
            while let Some(message) = early.remove(&next) {
                let custom_id = asked.borrow().custom_ids.get(&next).cloned();
                let mut line = reply_line(next, custom_id, &message)?;
                line.push(b'\n');
                self.bar.suspend(|| io::stdout().write_all(&line))?;
                self.bar.inc(1);
                permits.add_permits(1);
                next += 1;
            }
        }
    }
}

/// `{"index", "custom_id"?, …headers, "body"}`.
fn reply_line(number: u64, custom_id: Option<String>, reply: &Message) -> anyhow::Result<Vec<u8>> {
    let mut line = Map::from_iter([("index".to_owned(), json!(number))]);
    line.extend(custom_id.map(|id| ("custom_id".to_owned(), json!(id))));
    line.extend(reply.properties.headers.iter().map(|(name, value)| (name.clone(), scalar(value))));
    let mut bytes = serde_json::to_vec(&line)?;
    let body: &RawValue = serde_json::from_slice(&reply.body).context("a reply's body is not JSON")?;
    bytes.pop();
    bytes.extend_from_slice(b",\"body\":");
    bytes.extend_from_slice(body.get().as_bytes());
    bytes.push(b'}');
    Ok(bytes)
}

fn scalar(value: &Value) -> Json {
    match value {
        Value::F64(number) => json!((number * 1e3).round() / 1e3),
        Value::Bool(yes) => json!(yes),
        other => other.as_i64().map_or_else(|| json!(other.as_str()), |number| json!(number)),
    }
}

fn tasks_in(path: &Path) -> anyhow::Result<u64> {
    let mut tasks = 0;
    for line in BufReader::new(File::open(path)?).split(b'\n') {
        tasks += u64::from(!line?.trim_ascii().is_empty());
    }
    Ok(tasks)
}

/// Reads on a thread of its own: stdin may bring a line now and the next tomorrow.
fn read_ahead(mut requests: Requests) -> io::Result<mpsc::Receiver<anyhow::Result<Request>>> {
    // Written by the thread, read by the feed. Bound: what the feed takes next.
    let (read, requested) = mpsc::channel(PIPELINED);
    thread::Builder::new()
        .name("input".into())
        .spawn(move || while requests.next().is_some_and(|request| read.blocking_send(request).is_ok()) {})?;
    Ok(requested)
}

/// The tasks of the command line or of a file.
fn requests(arguments: &Publish) -> anyhow::Result<Requests> {
    let texts = arguments.texts.clone();
    match &arguments.input {
        Some(path) => requests_in(path),
        None => Ok(Box::new(texts.into_iter().map(|text| Ok(embed(&text))))),
    }
}
