//! `sconce publish`: publishes tasks, and with `--wait` prints their replies, in the order of the tasks.

use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal as _, Write};
use std::ops::Range;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use futures_util::stream;
use indicatif::ProgressBar;
use serde_json::value::RawValue;
use serde_json::{Map, Value as Json, json};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::published_files::ResultFile;
use super::requests::{self, Requests, check_fields, fields_of, of_file, requests_in};
use super::show::Show;
use super::{Registry, broker_session, load, pool_named, progress, queue_named, start_logging};
use crate::broker::BrokerError;
use crate::broker::amqp::{Connector, depth_of};
use crate::cli::Publish;
use crate::client::fleet::Control;
use crate::client::{Bounds, Client, ClientError, ClientTask, Sink, TaskMessage};
use crate::commands::exits::ExitsWith as _;
use crate::config::{Broker, Pool, Settings};
use crate::model::Route;
use crate::protocol::batch_line::{body_value, notes_of};
use crate::protocol::endpoints::EMBEDDINGS_URL;
use crate::protocol::requests::bodies_of_texts;
use crate::protocol::{JSON, Message, Value};
use crate::shutdown::Exit;
use crate::telemetry::QUIET;

/// Maximum number of tasks published and not yet printed. It bounds the replies that wait for an earlier one.
const WINDOW: usize = 4_096;
/// Unacked replies that the broker may send ahead.
const PREFETCH: u16 = 256;
/// How long to wait for a queue that does not exist yet.
const DECLARE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the cancellation of unanswered tasks may take.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of lines that are read ahead of publishing.
const READ_AHEAD: usize = 256;
/// A list of more numbers, such as a vector, is shortened on a terminal. So are the pairs of a sparse vector.
const MAX_NUMBERS: usize = 16;
/// How many numbers of a shortened list are shown.
const SHOWN_NUMBERS: usize = 4;

pub(super) fn run(arguments: &Publish, registry: &Registry) -> anyhow::Result<Exit> {
    let mut loaded = load(&arguments.settings, &[])?;
    registry.resolve_folders(&mut loaded);
    let settings = loaded.settings;
    let waits = arguments.wait || arguments.stream || arguments.output.is_some();
    start_logging(Some(QUIET))?;
    let (_, pool) = pool_named(&settings.pools, arguments.pool.as_deref())?;
    let queue = queue_named(pool, arguments.queue.as_deref())?;
    let registry = &match &arguments.input {
        None => registry.for_tasks(pool, arguments.url.as_deref())?,
        Some(_) => registry.clone(),
    };
    let mut file = None;
    let (requests, total): (Requests, _) = match &arguments.input {
        None => {
            let mut tasks = requests_of_arguments(arguments, pool, registry).exits_with(Exit::Usage)?;
            let fields = fields_of(&arguments.field).exits_with(Exit::Usage)?;
            let url = arguments.url.as_deref().or_else(|| model_url(pool, registry));
            check_fields(url, &fields).exits_with(Exit::Usage)?;
            let added = tasks.iter_mut().try_for_each(|task| task.body.add_fields(&fields));
            added.map_err(|problem| anyhow!("--field: {problem}")).exits_with(Exit::Usage)?;
            if let Some(path) = &arguments.output {
                let [task] = &mut tasks[..] else {
                    let problem = "--output takes the result of one task; `sconce submit --output-dir` writes a file for each";
                    return Err(anyhow!(problem).exits_with(Exit::Usage));
                };
                file = Some(ResultFile::new(path, url, task).exits_with(Exit::Usage)?);
            }
            let total = tasks.len() as u64;
            (Box::new(tasks.into_iter().map(Ok)), Some(total))
        }
        Some(path) => {
            // A pipe, which `/dev/stdin` may be too, can be read only once.
            let total = if path.is_file() { Some(count_tasks(path)?) } else { None };
            (requests_in(path).exits_with(Exit::Usage)?, total)
        }
    };
    let mut lines = read_ahead(requests)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let topology = broker_session::topology(&settings.broker, pool).filter(|_| arguments.declare);
        if topology.is_none() {
            check_queue(&settings.broker, &queue, waits).await?;
        }
        let prefetch = waits.then_some(PREFETCH);
        let mut client =
            Client::connect(&settings.broker, "sconce publish", &queue, topology.as_ref(), prefetch).await?;
        let show = arguments.stream.then(|| Show::new(io::stdout()));
        // A progress bar would be mixed with the texts.
        let bar = if show.is_some() { ProgressBar::hidden() } else { progress::bar(total, 0, "tasks") };
        let shortens = io::stdout().is_terminal();
        let mut output =
            Output { bar, show, file, shortens, has_shortened: false, begun: 0, done: 0, errors: 0 };
        // An invalid line ends the input; the tasks before it are published and answered.
        let mut invalid = None;
        let tasks = stream::poll_fn(|context| {
            lines.poll_recv(context).map(|line| match line? {
                Ok(request) => Some(Ok(task(request, arguments.url.as_deref(), arguments.stream))),
                Err(error) => {
                    invalid = Some(error);
                    None
                }
            })
        });
        let bounds =
            Bounds { max_tasks: WINDOW, timeout: Some(arguments.timeout), in_order: true, resend: None };
        let ended = tokio::select! {
            ended = client.run(0, tasks, &bounds, &mut output) => Some(ended),
            _ = tokio::signal::ctrl_c() => None,
        };
        output.bar.finish_and_clear();
        output.explain_shortened();
        if ended.is_none() {
            let verb = if waits { "answered" } else { "published" };
            let _ = writeln!(io::stderr(), "interrupted: {} tasks were {verb}", output.done);
        }
        if ended.as_ref().is_none_or(leaves_tasks)
            && let Some(reply_queue) = client.reply_queue()
        {
            cancel(&settings, output.done..output.begun, reply_queue).await;
        }
        client.close().await;
        let Some(ended) = ended else { return Ok(Exit::Aborted) };
        ended?;
        if !waits {
            writeln!(io::stdout(), "published {} tasks to {queue}", output.done)?;
        }
        match invalid {
            Some(error) => Err(error.exits_with(Exit::Usage)),
            None if output.errors > 0 => {
                let (errors, done) = (output.errors, output.done);
                // A closed stderr does not change the exit code.
                let _ = writeln!(io::stderr(), "{errors} of {done} tasks were answered with an error");
                Ok(Exit::DoneWithErrors)
            }
            None => Ok(Exit::Done),
        }
    })
}

/// Whether a run that ended like this leaves tasks whose replies nobody will read, while the broker can be reached.
fn leaves_tasks(ended: &anyhow::Result<()>) -> bool {
    let lost = |error: &anyhow::Error| {
        matches!(error.downcast_ref(), Some(ClientError::Broker(_) | ClientError::Lost { .. }))
    };
    ended.as_ref().is_err_and(|error| !lost(error))
}

/// Cancels the tasks with these numbers, and says whether that succeeded. Takes [`CANCEL_TIMEOUT`] at most, and ends at
/// another Ctrl-C.
async fn cancel(settings: &Settings, numbers: Range<u64>, reply_queue: &str) {
    let count = numbers.end.saturating_sub(numbers.start);
    if count == 0 {
        return;
    }
    let cancelling = async {
        let control = Control::open(settings).await?;
        let taken = control.cancel_tasks(numbers, reply_queue).await;
        control.close().await;
        taken
    };
    let unanswered = "the tasks that are not answered";
    let failed =
        |why: &str| format!("workers compute {unanswered} ({count}), which could not be cancelled: {why}");
    let said = tokio::select! {
        cancelled = tokio::time::timeout(CANCEL_TIMEOUT, cancelling) => match cancelled {
            Ok(Ok(0)) => failed("no launcher takes cancellations now"),
            Ok(Ok(taken)) if taken == count => {
                format!("the workers are asked to cancel {unanswered}: {count}")
            }
            Ok(Ok(taken)) => format!(
                "the workers are asked to cancel {unanswered}: {taken} of {count}; the broker refuses further \
                 cancellations now"
            ),
            Ok(Err(error)) => failed(&error.to_string()),
            Err(_) => failed(&format!("the broker does not answer within {CANCEL_TIMEOUT:?}")),
        },
        _ = tokio::signal::ctrl_c() => failed("interrupted again"),
    };
    // A closed stderr changes nothing.
    let _ = writeln!(io::stderr(), "{said}");
}

/// Fails if the queue does not exist. Without this check, a mistyped name would be noticed only when the replies time
/// out. With `waits`, gives a launcher that has just been started [`DECLARE_TIMEOUT`] to declare the queue, and prints
/// a note if nobody consumes from it.
async fn check_queue(broker: &Broker, queue: &str, waits: bool) -> anyhow::Result<()> {
    let deadline = Instant::now() + if waits { DECLARE_TIMEOUT } else { Duration::ZERO };
    let consumers = loop {
        let depth = depth_of(&Connector::new(broker.clone(), "sconce publish"), queue).await;
        let consumers = depth.map(|depth| depth.consumers);
        if !matches!(consumers, Err(BrokerError::Missing { .. })) || Instant::now() >= deadline {
            break consumers;
        }
        tokio::time::sleep(DECLARE_TIMEOUT / 10).await;
    };
    match consumers {
        Ok(0) if waits => {
            Ok(writeln!(io::stderr(), "nobody consumes from {queue} now; waiting for workers")?)
        }
        Ok(_) => Ok(()),
        Err(error @ BrokerError::Missing { .. }) => {
            let message = format!("queue {queue:?} does not exist; start a launcher, or give --declare");
            Err(anyhow::Error::from(error).context(message))
        }
        // A user may be allowed to publish, but not to inspect the queue.
        Err(BrokerError::Refused { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Turns a request into a task that remembers the user's id. `url` replaces the URL of the request. `stream` asks for the
/// parts of a transcript if the body is a recording.
fn task(request: requests::Request, url: Option<&str>, stream: bool) -> ClientTask<Option<String>> {
    let message_id = request.custom_id.clone().unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let is_sound = request.body.media_type.as_deref().is_some_and(|it| it.starts_with("audio/"));
    let mut message = TaskMessage::new(message_id, url.or(request.url.as_deref()), request.body);
    if stream && is_sound {
        message.headers.insert("stream".to_owned(), "true".into());
    }
    ClientTask { meta: request.custom_id, message: Some(message) }
}

/// Prints replies, or counts published tasks.
struct Output {
    bar: ProgressBar,
    /// With `--stream`: prints the texts of replies while they are generated, instead of the replies.
    show: Option<Show<io::Stdout>>,
    /// With `--output`: the file of the only task's result.
    file: Option<ResultFile>,
    /// The number of tasks that were begun.
    begun: u64,
    /// Whether stdout is a terminal, on which long lists of numbers are shortened.
    shortens: bool,
    /// Whether that was done.
    has_shortened: bool,
    /// The number of tasks answered or, if no replies are awaited, published.
    done: u64,
    /// The number of replies that are errors.
    errors: u64,
}

impl Output {
    /// Says how all numbers are printed, if some were not.
    fn explain_shortened(&self) {
        if self.has_shortened {
            // A closed stderr does not change the exit code.
            let _ = writeln!(
                io::stderr(),
                "long lists of numbers are shortened on a terminal; a file or a pipe (`| cat`) gets all numbers"
            );
        }
    }
}

impl Sink<Option<String>, anyhow::Error> for Output {
    fn begun(&mut self, number: u64, custom_id: &Option<String>) {
        self.begun = number + 1;
        if let Some(show) = &mut self.show {
            show.begun(number, custom_id.as_deref().unwrap_or_default());
        }
    }

    fn part(&mut self, number: u64, part: &Message) -> anyhow::Result<()> {
        if let Some(show) = &mut self.show {
            show.part(number, part)?;
        }
        Ok(())
    }

    fn answered(
        &mut self,
        number: u64,
        custom_id: Option<String>,
        reply: Option<Message>,
        _: Instant,
    ) -> anyhow::Result<()> {
        self.done += 1;
        if let Some(reply) = reply {
            let status = reply.properties.headers.get("status_code").and_then(Value::as_i64);
            let mut is_error = status.is_some_and(|status| status != 200);
            if let Some(show) = &mut self.show {
                show.answered(number, &reply)?;
            }
            if let (Some(file), false) = (&self.file, is_error)
                && let Some(problem) = file.write(&reply)?
            {
                is_error = true;
                self.bar.suspend(|| writeln!(io::stderr(), "reply {number} is not written: {problem}"))?;
            }
            self.errors += u64::from(is_error);
            let is_written = self.show.is_some() || self.file.is_some();
            // Elsewhere the headers of the reply are printed.
            if is_written && !is_error {
                for (name, value) in notes_of(&reply) {
                    self.bar.suspend(|| writeln!(io::stderr(), "note on reply {number}: {name}: {value}"))?;
                }
            }
            if !is_written || is_error {
                let body = body_value(&reply);
                let shortened = if self.shortens { shortened(&body) } else { None };
                self.has_shortened |= shortened.is_some();
                let body = shortened.as_deref().unwrap_or(body.get());
                let mut line = reply_line(number, custom_id, &reply, body)?;
                line.push(b'\n');
                self.bar.suspend(|| match is_written {
                    true => io::stderr().write_all(&line),
                    false => io::stdout().write_all(&line),
                })?;
            }
        }
        self.bar.inc(1);
        Ok(())
    }
}

/// Whether a value is a number of a vector: of a sparse one, with its index.
fn is_of_vector(value: &Json) -> bool {
    let is_pair = |pair: &Map<String, Json>| {
        pair.len() == 2 && ["index", "value"].iter().all(|name| pair.get(*name).is_some_and(Json::is_number))
    };
    value.is_number() || value.as_object().is_some_and(is_pair)
}

/// A body in which each list of more than [`MAX_NUMBERS`] numbers has the first [`SHOWN_NUMBERS`] and a text with their
/// count. None if it has no such list.
fn shortened(body: &RawValue) -> Option<String> {
    fn shorten(value: &mut Json) -> bool {
        match value {
            Json::Array(items) if items.len() > MAX_NUMBERS && items.iter().all(is_of_vector) => {
                let count = items.len();
                items.truncate(SHOWN_NUMBERS);
                items.push(json!(format!("… of {count} numbers")));
                true
            }
            Json::Array(items) => items.iter_mut().fold(false, |any, item| shorten(item) | any),
            Json::Object(fields) => fields.values_mut().fold(false, |any, field| shorten(field) | any),
            _ => false,
        }
    }
    let mut body = serde_json::from_str(body.get()).ok()?;
    shorten(&mut body).then(|| body.to_string())
}

/// The output line of a reply: a JSON object with `index`, `custom_id` (if there is one), the reply's headers, and
/// `body`, which is JSON.
fn reply_line(
    number: u64,
    custom_id: Option<String>,
    reply: &Message,
    body: &str,
) -> anyhow::Result<Vec<u8>> {
    let mut line = Map::from_iter([("index".to_owned(), json!(number))]);
    line.extend(custom_id.map(|id| ("custom_id".to_owned(), json!(id))));
    line.extend(reply.properties.headers.iter().map(|(name, value)| (name.clone(), header_json(value))));
    let mut bytes = serde_json::to_vec(&line)?;
    bytes.pop();
    bytes.extend_from_slice(b",\"body\":");
    bytes.extend_from_slice(body.as_bytes());
    bytes.push(b'}');
    Ok(bytes)
}

/// A header's value as JSON; floating-point numbers are rounded to three decimals.
fn header_json(value: &Value) -> Json {
    match value {
        Value::F64(number) => json!((number * 1e3).round() / 1e3),
        Value::Bool(switch) => json!(switch),
        other => match other.as_i64() {
            Some(number) => json!(number),
            None => json!(other.as_str()),
        },
    }
}

/// The number of lines that are not blank.
fn count_tasks(path: &Path) -> anyhow::Result<u64> {
    let mut tasks = 0;
    let file = File::open(path).with_context(|| path.display().to_string()).exits_with(Exit::Usage)?;
    for line in BufReader::new(file).split(b'\n') {
        tasks += u64::from(!line?.trim_ascii().is_empty());
    }
    Ok(tasks)
}

/// Reads the requests on a separate thread, because stdin may block for any length of time between two lines.
fn read_ahead(mut requests: Requests) -> io::Result<mpsc::Receiver<anyhow::Result<requests::Request>>> {
    // Written by the thread, read by the publishing task.
    let (sender, receiver) = mpsc::channel(READ_AHEAD);
    thread::Builder::new().name("input".into()).spawn(move || {
        while requests.next().is_some_and(|request| sender.blocking_send(request).is_ok()) {}
    })?;
    Ok(receiver)
}

/// The first URL that a pool's model answers; none if its files are not on this host, or it answers any URL.
fn model_url(pool: &Pool, registry: &Registry) -> Option<&'static str> {
    registry.route(pool).map(|route| route.url).filter(|url| *url != Route::ANY)
}

/// Makes requests from the arguments. They name files if the pool takes a media type other than JSON; a pool that embeds
/// images also takes texts. Otherwise they are texts, which are put into bodies that the pool answers.
///
/// # Errors
/// A file cannot be read, or the pool does not take its type.
fn requests_of_arguments(
    arguments: &Publish,
    pool: &Pool,
    registry: &Registry,
) -> anyhow::Result<Vec<requests::Request>> {
    let Publish { texts, url, stream, .. } = arguments;
    let route = registry.route(pool);
    let media_types = route.map_or(&[][..], |route| route.media_types);
    let file_types: Vec<&str> =
        media_types.iter().copied().filter(|media_type| *media_type != JSON).collect();
    if !file_types.is_empty() {
        // A model that embeds images takes texts too, and so does a class in Python that takes everything.
        let takes_all = file_types.contains(&Route::ANY_TYPE);
        let takes_texts = takes_all || route.is_some_and(|route| route.url == EMBEDDINGS_URL);
        let is_file = |word: &str| {
            let has_ending =
                |ending: &str| word.len() > ending.len() && word.to_lowercase().ends_with(ending);
            let has_image_ending = [".jpg", ".jpeg", ".png", ".webp"].into_iter().any(has_ending);
            // Of a name that is mistyped, nobody would notice that its letters were embedded.
            let names_image = has_image_ending && !word.contains(' ');
            Path::new(word).is_file() || names_image || word.contains("://") || word.starts_with("data:")
        };
        let request = |word: &String| match takes_texts && !is_file(word) {
            true => Ok(requests::embed(word)),
            false => of_file(word, &file_types, *stream),
        };
        return texts.iter().map(request).collect();
    }
    if let Some(file) = texts.iter().find(|text| Path::new(text).is_file()) {
        let name = &pool.name;
        writeln!(
            io::stderr(),
            "note: pool {name:?} takes texts, so the words {file:?} are sent, and not the file of that name"
        )?;
    }
    let url = url.as_deref().or_else(|| model_url(pool, registry));
    let bodies = bodies_of_texts(url.unwrap_or_default(), texts, *stream);
    let request = |body: String| {
        let url = url.map(str::to_owned);
        requests::Request { custom_id: None, url, body: body.into() }
    };
    Ok(bodies.into_iter().map(request).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_lists_of_numbers_are_shortened() {
        let body = |value: Json| serde_json::value::to_raw_value(&value).unwrap();
        let vector: Vec<f64> = (0..384).map(|n| f64::from(n) / 8.0).collect();
        let reply =
            json!({"data": [{"index": 0, "embedding": vector}], "model": "m", "usage": {"total_tokens": 9}});
        let printed: Json = serde_json::from_str(&shortened(&body(reply.clone())).unwrap()).unwrap();
        let mut expected = reply;
        expected["data"][0]["embedding"] = json!([0.0, 0.125, 0.25, 0.375, "… of 384 numbers"]);
        assert_eq!(printed, expected);
        let pairs =
            |count: usize| (0..count).map(|index| json!({"index": index, "value": 0.5})).collect::<Vec<_>>();
        let printed: Json =
            serde_json::from_str(&shortened(&body(json!([pairs(100), pairs(2)]))).unwrap()).unwrap();
        let mut first = pairs(4);
        first.push(json!("… of 100 numbers"));
        assert_eq!(printed, json!([first, pairs(2)]));
        let ranked: Vec<Json> =
            (0..99).map(|index| json!({"index": index, "relevance_score": 0.5})).collect();
        assert_eq!(shortened(&body(json!({"results": ranked}))), None);
        let (few, texts) = (vec![1; MAX_NUMBERS], vec!["a text"; 100]);
        assert_eq!(
            shortened(&body(json!({"scores": few, "texts": texts, "text": "long".repeat(999)}))),
            None
        );
    }
}
