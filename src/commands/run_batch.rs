//! `sconce run-batch`: a launcher with a queue of its own. Feeds the file's lines as tasks, then one
//! sentinel a worker; collects the replies and writes them in the order of the lines.
//!
//! Two runtimes: the launcher's has one thread, the main one, to which workers are tied; the queue
//! and both files run on another.

mod report;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use indicatif::ProgressBar;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use self::report::Tally;
use super::batch_file::{
    CountedInput, InputChanged, InputLine, MAX_LINE, MadeBy, OrderedWriter, ResumePoint, claim,
};
use super::bench::{Answer, inputs_of};
use super::{Registry, load, pool_named, progress, start_logging};
use crate::broker::Published;
use crate::broker::embedded::{DeliveryLimit, EmbeddedBroker, LocalConsumer, QueueSpec};
use crate::cli::RunBatch;
use crate::config::{Pool, Secret, Settings};
use crate::launcher::{self, Host};
use crate::protocol::batch_line::{self, BatchRequest, InvalidLine};
use crate::protocol::reply::error_body;
use crate::protocol::task::{SHUTDOWN, URL};
use crate::protocol::{Headers, JSON, Message, Properties, TaskError, TaskErrorKind};
use crate::shutdown::{Exit, Patience, Phase, Stop, listen};
use crate::telemetry::QUIET;

/// Lines in work or finished early: what the order may hold back.
const WINDOW: usize = 4_096;
/// Ready messages in a queue before the feed waits.
const MAX_READY: usize = 1_024;

/// Runs the file.
pub(super) fn run(arguments: &RunBatch, registry: &Registry) -> anyhow::Result<Exit> {
    let (settings, pool) = settings(arguments)?;
    start_logging(Some(QUIET));
    let weights = registry.weights(&pool.model).context(Exit::ModelFailed)?;
    let (output, point) = files(arguments, &pool, weights).context(Exit::Usage)?;
    let total = point.input.lines;
    if point.done == total {
        return nothing_left(arguments, &pool, total);
    }
    let input = point.open_input(&arguments.input)?;

    let folder = std::env::temp_dir().join(format!("sconce-{}", uuid::Uuid::new_v4().simple()));
    let socket = folder.join("queue");
    let mut assignments = registry.plan(&settings, &Host::here())?;
    for assignment in &mut assignments {
        assignment.broker.url = vec![Secret::new(format!("embedded:{}", socket.display()))];
    }
    let program = std::env::current_exe().context("where is this program?")?;
    let queues = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let broker = {
        let _inside = queues.enter();
        Arc::new(EmbeddedBroker::bind(&socket, &queues_of(&pool, settings.broker.delivery_limit))?)
    };
    let bar = progress::bar(Some(total as u64), point.done as u64, "lines");
    let run = Arc::new(Run {
        pool,
        broker: broker.clone(),
        grace: settings.launcher.shutdown_grace,
        begun: Mutex::default(),
        writer: Mutex::new(OrderedWriter::new(BufWriter::new(output), point.done, WINDOW)),
        written: Notify::new(),
        errors: AtomicU64::new(0),
        input_changed: OnceLock::new(),
        tally: arguments.json.then(Mutex::default),
        bar: bar.clone(),
    });
    let stop = Stop::default();
    let mut tasks = JoinSet::new();
    tasks.spawn_on(run.clone().feed(input, point.done, assignments.len(), stop.clone()), queues.handle());
    let replies = run.consumer(run.pool.reply_queue.as_deref().unwrap_or_default())?;
    tasks.spawn_on(run.clone().collect(replies), queues.handle());
    let letters = run.consumer(&run.pool.dead_letter_queue)?;
    tasks.spawn_on(run.clone().collect_dead(letters), queues.handle());

    let launch = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let exit = launch.block_on(async {
        listen(stop.clone(), Patience::SecondAborts)?;
        let mut launched = pin!(launcher::run(&program, &assignments, &settings.launcher, &stop));
        let exit = tokio::select! {
            exit = &mut launched => exit,
            error = first_failure(&mut tasks) => {
                // A full disk, say: nothing that the workers compute could be kept.
                stop.advance(Phase::Returning, "the run failed");
                launched.await;
                return Err(error);
            }
        };
        // The workers' last replies are in the queue; they only have to be written.
        let _ = tokio::time::timeout(Duration::from_secs(5), run.written_up_to(total, exit, &stop)).await;
        Ok(exit)
    })?;
    queues.block_on(broker.shutdown());
    bar.finish_and_clear();
    conclude(&run, exit, &point, arguments)
}

fn nothing_left(arguments: &RunBatch, pool: &Pool, lines: usize) -> anyhow::Result<Exit> {
    if arguments.json {
        print(&mut Tally::default(), pool, 0)?;
    }
    writeln!(io::stderr(), "all {lines} lines are answered already")?;
    Ok(Exit::Done)
}

/// Says what was done, and what is missing.
fn conclude(run: &Run, exit: Exit, point: &ResumePoint, arguments: &RunBatch) -> anyhow::Result<Exit> {
    File::options().write(true).open(&arguments.output)?.sync_all().context("the output")?;
    let done = run.lock_writer().next();
    let errors = run.errors.load(Ordering::Relaxed);
    if let Some(tally) = &run.tally {
        print(&mut tally.lock().unwrap_or_else(PoisonError::into_inner), &run.pool, errors)?;
    }
    let mut says = io::stderr();
    let (now, total) = (done - point.done, point.input.lines);
    writeln!(says, "{now} of {total} lines answered now, {} before; {errors} with an error", point.done)?;
    if let Some(changed) = run.input_changed.get() {
        return Err(anyhow::Error::new(*changed).context(Exit::Usage));
    }
    if done == total {
        // However its workers ended.
        return Ok(Exit::Done);
    }
    writeln!(says, "stopped at line {done} of {total}; the same command goes on from there")?;
    Ok(if exit == Exit::Done { Exit::Aborted } else { exit })
}

fn print(tally: &mut Tally, pool: &Pool, errors: u64) -> anyhow::Result<()> {
    Ok(writeln!(io::stdout(), "{}", serde_json::to_string(&tally.report(&pool.name, errors))?)?)
}

/// The first task that fails; for ever pending while none does.
async fn first_failure(tasks: &mut JoinSet<anyhow::Result<()>>) -> anyhow::Error {
    while let Some(ended) = tasks.join_next().await {
        match ended {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error,
            Err(error) => return error.into(),
        }
    }
    std::future::pending().await
}

/// A line as a request.
fn parse(line: &InputLine) -> Result<BatchRequest, InvalidLine> {
    let Some(bytes) = &line.bytes else {
        let problem = format!("longer than {MAX_LINE} bytes");
        return Err(InvalidLine { custom_id: None, problem });
    };
    batch_line::parse(bytes)
}

/// The output, ours alone, and where to go on in it, provided that what made its lines is what runs now.
fn files(arguments: &RunBatch, pool: &Pool, weights: Option<String>) -> anyhow::Result<(File, ResumePoint)> {
    let RunBatch { input, output, .. } = arguments;
    // Before the output is made, so that a wrong name leaves nothing behind.
    File::open(input).with_context(|| input.display().to_string())?;
    let mut claimed = claim(output)?;
    let point = ResumePoint::find(input, output)?;
    let made_by = MadeBy::new(pool, weights, point.input.clone());
    let unknown = made_by.continue_output(output, point.done)?;
    if unknown > 0 {
        let output = output.display();
        writeln!(io::stderr(), "warning: nothing tells what made the first {unknown} lines of {output}")?;
    }
    point.cut(&mut claimed, output)?;
    Ok((claimed, point))
}

/// The settings with the flags of this command, cut down to the one pool that runs.
fn settings(arguments: &RunBatch) -> anyhow::Result<(Settings, Pool)> {
    let loaded = load(&arguments.settings, &[])?.settings;
    let (index, _) = pool_named(&loaded.pools, arguments.pool.as_deref())?;
    let flag = |name: &str, value: &Option<String>| {
        value.clone().map(|value| (format!("pool[{index}].{name}"), value))
    };
    let flags = [flag("model", &arguments.model), flag("devices", &arguments.devices)];
    let mut settings = load(&arguments.settings, &flags.into_iter().flatten().collect::<Vec<_>>())?.settings;
    let mut pool = settings.pools.swap_remove(index);
    // Names inside this process; a pool without a reply queue needs one here.
    pool.reply_queue = Some("replies".into());
    settings.pools = vec![pool.clone()];
    Ok((settings, pool))
}

fn queues_of(pool: &Pool, delivery_limit: u32) -> Vec<QueueSpec> {
    let dead_letter_queue = pool.dead_letter_queue.clone();
    let limit =
        DeliveryLimit { returns: delivery_limit.into(), dead_letter_queue: dead_letter_queue.clone() };
    let queue = |name: String, delivery_limit| QueueSpec { name, max_ready: MAX_READY, delivery_limit };
    vec![
        queue(pool.task_queue.clone(), Some(limit)),
        queue(pool.reply_queue.clone().unwrap_or_default(), None),
        queue(dead_letter_queue, None),
    ]
}

/// What feed and collectors share.
struct Run {
    pool: Pool,
    broker: Arc<EmbeddedBroker>,
    /// From the sentinels to the end of workers that took none.
    grace: Duration,
    /// The lines in work, by their sequence numbers. Written by the feed, taken by the collectors.
    /// Bound: the window.
    begun: Mutex<HashMap<usize, Begun>>,
    /// Written by the collectors, and by the feed for lines that are no requests.
    writer: Mutex<OrderedWriter<BufWriter<File>>>,
    /// Told by whoever wrote lines, heard by the feed, which waits for room in the window.
    written: Notify,
    /// Lines written that hold an error.
    errors: AtomicU64,
    /// Set by the feed, behind the last line; read at the end of the run.
    input_changed: OnceLock<InputChanged>,
    /// What a report is made of, where one was asked for. Written by the collectors.
    tally: Option<Mutex<Tally>>,
    bar: ProgressBar,
}

/// A line in work.
struct Begun {
    custom_id: String,
    /// As a report counts them; none is asked for: 0.
    inputs: usize,
}

impl Run {
    fn consumer(&self, queue: &str) -> anyhow::Result<LocalConsumer> {
        self.broker.consume(queue).with_context(|| format!("no queue {queue:?}"))
    }

    /// Publishes every line that was counted and, once all are answered, a sentinel for each worker: until
    /// then a task may wait somewhere for another attempt, and the input may still grow.
    async fn feed(
        self: Arc<Self>,
        mut input: CountedInput,
        done: usize,
        workers: usize,
        stop: Stop,
    ) -> anyhow::Result<()> {
        for (sequence, line) in (done..).zip(&mut input) {
            let line = line.context("the input")?;
            tokio::select! {
                () = self.room_for(sequence) => {}
                () = stop.reached(Phase::Returning) => return Ok(()),
            }
            match parse(&line) {
                Ok(request) => {
                    let inputs = self.tally.as_ref().map_or(0, |_| inputs_of(&request.body));
                    let begun = Begun { custom_id: request.custom_id, inputs };
                    self.begun.lock().unwrap_or_else(PoisonError::into_inner).insert(sequence, begun);
                    let properties = Properties {
                        content_type: Some(JSON.into()),
                        correlation_id: Some(sequence.to_string()),
                        message_id: Some(format!("line-{}", line.number)),
                        headers: Headers::from([(URL.into(), request.url.into())]),
                        ..Properties::default()
                    };
                    self.publish(Message { properties, body: request.body }).await?;
                }
                Err(invalid) => {
                    self.errors.fetch_add(1, Ordering::Relaxed);
                    self.write(sequence, batch_line::error_line(line.number, &invalid))?;
                }
            }
        }
        tokio::select! {
            () = self.all_answered() => {}
            () = stop.reached(Phase::Returning) => return Ok(()),
        }
        if let Some(changed) = input.changed().context("the input")? {
            let _ = self.input_changed.set(changed);
        }
        for _ in 0..workers {
            let properties = Properties { kind: Some(SHUTDOWN.into()), ..Properties::default() };
            self.publish(Message { properties, body: "null".into() }).await?;
        }
        // A worker that died behind its sentinel has been started again, and none is left for it.
        tokio::time::sleep(self.grace).await;
        stop.advance(Phase::Returning, "every line is answered");
        Ok(())
    }

    async fn publish(&self, message: Message) -> anyhow::Result<()> {
        match self.broker.publish(&self.pool.task_queue, message).await {
            Published::Confirmed => Ok(()),
            refused => bail!("the embedded queue: {refused:?}"),
        }
    }

    async fn all_answered(&self) {
        loop {
            let written = self.written.notified();
            if self.begun.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
                return;
            }
            written.await;
        }
    }

    async fn room_for(&self, sequence: usize) {
        loop {
            let written = self.written.notified();
            if self.lock_writer().may_begin(sequence) {
                return;
            }
            written.await;
        }
    }

    /// Writes a line for each reply.
    async fn collect(self: Arc<Self>, mut replies: LocalConsumer) -> anyhow::Result<()> {
        while let Some(taken) = replies.next().await {
            let reply = taken.message();
            let headers = &reply.properties.headers;
            let status = headers.get("status_code").and_then(|code| code.as_i64()).unwrap_or(500) as u16;
            let id = reply.properties.message_id.clone().unwrap_or_default();
            self.answer(reply, status, &id, &reply.body)?;
            taken.ack();
        }
        Ok(())
    }

    /// Writes an error line for each task that the queue itself gave up. Dead letters of a worker
    /// have been answered too.
    async fn collect_dead(self: Arc<Self>, mut letters: LocalConsumer) -> anyhow::Result<()> {
        while let Some(taken) = letters.next().await {
            let letter = taken.message();
            if !letter.properties.headers.contains_key("worker") {
                let words = "the workers that took this task died each time, until its attempts were spent";
                let error = TaskError::new(TaskErrorKind::Internal, words);
                let id = uuid::Uuid::new_v4().to_string();
                self.answer(letter, error.kind.wire().1 as u16, &id, &error_body(&error))?;
            }
            taken.ack();
        }
        Ok(())
    }

    /// Writes the line that answers a task's message or its reply.
    fn answer(&self, message: &Message, status: u16, id: &str, body: &[u8]) -> anyhow::Result<()> {
        let sequence = message.properties.correlation_id.as_deref().and_then(|id| id.parse().ok());
        let sequence: usize = sequence.context("a reply without our correlation id")?;
        let begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner).remove(&sequence);
        // At least once: a line that has been answered may be answered again.
        let Some(Begun { custom_id, inputs }) = begun else { return Ok(()) };
        if let Some(tally) = &self.tally {
            tally.lock().unwrap_or_else(PoisonError::into_inner).count(inputs, &Answer::of(message));
        }
        if status != 200 {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
        self.write(sequence, batch_line::response_line(&custom_id, status, id, body)?)
    }

    fn write(&self, sequence: usize, line: Vec<u8>) -> anyhow::Result<()> {
        let written = self.lock_writer().submit(sequence, line).context("the output")?;
        self.bar.inc(written as u64);
        self.written.notify_waiters();
        Ok(())
    }

    fn lock_writer(&self) -> MutexGuard<'_, OrderedWriter<BufWriter<File>>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every line is written, or, when the run was stopped, all replies that there are;
    /// not at all when the launcher did not end well.
    async fn written_up_to(&self, total: usize, exit: Exit, stop: &Stop) {
        let replies = self.pool.reply_queue.as_deref().unwrap_or_default();
        let all_taken = || self.broker.stats(replies).is_none_or(|left| left.ready + left.unacked == 0);
        while exit == Exit::Done && self.lock_writer().next() < total {
            if stop.phase() >= Phase::Returning && all_taken() {
                return;
            }
            let _ = tokio::time::timeout(Duration::from_millis(50), self.written.notified()).await;
        }
    }
}
