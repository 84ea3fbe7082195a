//! `sconce publish`: publishes tasks, and with `--wait` prints their replies, in the order of the
//! tasks.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use indicatif::ProgressBar;
use serde_json::{Map, Value as Json, json, value::RawValue};
use tokio::sync::{Semaphore, mpsc, watch};

use super::{link, load, pool_named, progress, start_logging};
use crate::broker::amqp::{AmqpPublisher, Connector, Subscription, declare, subscribe};
use crate::broker::{BrokerError, Consumer, Event, Published, Publisher, Settler};
use crate::cli::Publish;
use crate::protocol::{Headers, JSON, Message, Properties, Value, shorten};
use crate::shutdown::Exit;
use crate::telemetry::QUIET;

/// Tasks published and not yet printed: bounds what is held back for the order.
const WINDOW: usize = 4_096;
/// Publishes under way at once.
const PIPELINED: usize = 256;

/// A task to publish.
struct Request {
    custom_id: Option<String>,
    body: Bytes,
}

/// Publishes.
pub(super) fn run(arguments: Publish) -> anyhow::Result<Exit> {
    let settings = load(&arguments.settings, &[])?.settings;
    start_logging(Some(QUIET));
    let (_, pool) = pool_named(&settings.pools, arguments.pool.as_deref())?;
    let lines = read_ahead(lines(&arguments).context(Exit::Usage)?)?;
    let total = match &arguments.input {
        None => Some(arguments.texts.len() as u64),
        Some(path) if path == Path::new("-") => None,
        Some(path) => Some(tasks_in(path)?),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let connector = || Connector::new(settings.broker.clone(), "sconce publish");
        if let Some(topology) = link::topology(&settings.broker, pool) {
            declare(&connector(), &topology).await?;
        }
        let publisher = AmqpPublisher::new(connector());
        let bar = progress::bar(total, 0, "tasks");
        let feed = Feed { publisher: &publisher, queue: &pool.task_queue, bar: &bar };
        if !arguments.wait {
            let (published, bad) = feed.run(lines, None).await?;
            publisher.close().await;
            bar.finish_and_clear();
            writeln!(io::stdout(), "published {published} tasks to {}", pool.task_queue)?;
            return ended(bad);
        }
        let (told, name) = watch::channel(None);
        let (consumer, settler) = subscribe(connector(), Subscription::Private(told), 256);
        let mut replies = Replies { consumer, settler, timeout: arguments.timeout, bar: &bar };
        let queue = replies.queue(name).await?;
        let (asked, window) = watch::channel(Asked::default());
        let permits = Arc::new(Semaphore::new(WINDOW));
        let fed = feed.run(lines, Some((queue, asked, permits.clone())));
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
            under_way.push(self.publish(task(number, request, reply_to), answers.is_none()));
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

    fn refused(&self, reason: String) -> BrokerError {
        BrokerError::Refused { broker: format!("queue {:?}", self.queue), reason }
    }

    async fn publish(&self, message: Message, counts: bool) -> anyhow::Result<()> {
        match self.publisher.publish(self.queue, message).await? {
            Published::Confirmed if counts => self.bar.inc(1),
            Published::Confirmed => {}
            Published::Unroutable => bail!(self.refused("it does not exist".into())),
            Published::Nacked => bail!(self.refused("a negative confirm; is it full?".into())),
            Published::Refused(words) => bail!(self.refused(words)),
        }
        Ok(())
    }
}

fn task(number: u64, request: Request, reply_to: Option<String>) -> Message {
    let now = jiff::Timestamp::now();
    let properties = Properties {
        content_type: Some(JSON.into()),
        correlation_id: Some(number.to_string()),
        message_id: Some(request.custom_id.unwrap_or_else(|| uuid::Uuid::new_v4().to_string())),
        delivery_mode: Some(2),
        timestamp: u64::try_from(now.as_second()).ok(),
        headers: Headers::from([("timestamp_in_ms".into(), now.as_millisecond().into())]),
        reply_to,
        ..Properties::default()
    };
    Message { properties, body: request.body }
}

struct Replies<'a, S> {
    consumer: crate::broker::amqp::AmqpConsumer,
    settler: S,
    timeout: Duration,
    bar: &'a ProgressBar,
}

impl<S: Settler> Replies<'_, S> {
    /// The name of our reply queue, once the broker has made it.
    async fn queue(&mut self, mut name: watch::Receiver<Option<String>>) -> anyhow::Result<String> {
        tokio::select! {
            named = name.wait_for(Option::is_some) => named?.clone().context("no name"),
            event = self.consumer.next() => bail!("no reply queue: {:?}", event?),
        }
    }

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
            self.settler.ack(delivery.receipt).await;
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

type Requests = Box<dyn Iterator<Item = anyhow::Result<Request>> + Send>;

/// The tasks of the command line or of a file.
fn lines(arguments: &Publish) -> anyhow::Result<Requests> {
    let Some(path) = &arguments.input else {
        let texts = arguments.texts.clone();
        return Ok(Box::new(texts.into_iter().map(|text| Ok(embed(&text)))));
    };
    let read: Box<dyn BufRead + Send> = if path == Path::new("-") {
        Box::new(BufReader::new(io::stdin()))
    } else {
        Box::new(BufReader::new(File::open(path).with_context(|| path.display().to_string())?))
    };
    let numbered = read.split(b'\n').enumerate();
    Ok(Box::new(numbered.filter_map(|(index, line)| {
        let parsed = line.map_err(anyhow::Error::from).and_then(|line| request(&line));
        parsed.with_context(|| format!("line {}", index + 1)).transpose()
    })))
}

fn embed(text: &str) -> Request {
    Request { custom_id: None, body: json!({"input": text}).to_string().into() }
}

/// One line of a file; none for a blank one.
fn request(line: &[u8]) -> anyhow::Result<Option<Request>> {
    let line = line.trim_ascii();
    if line.is_empty() {
        return Ok(None);
    }
    let wanted = || {
        let shown = shorten(&String::from_utf8_lossy(line), 80);
        format!("expected a JSON object or a JSON string, got {shown:?}")
    };
    Ok(Some(match serde_json::from_slice::<Json>(line).with_context(wanted)? {
        Json::String(text) => embed(&text),
        Json::Object(object) => match (object.get("custom_id"), object.get("body")) {
            (Some(Json::String(id)), Some(body @ Json::Object(_))) => {
                Request { custom_id: Some(id.clone()), body: body.to_string().into() }
            }
            (Some(Json::String(id)), Some(_)) => bail!("the body of {id:?} is no JSON object"),
            _ => Request { custom_id: None, body: Bytes::copy_from_slice(line) },
        },
        _ => bail!(wanted()),
    }))
}
