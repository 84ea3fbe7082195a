//! `sconce run-batch`: a launcher with an embedded queue. Publishes the file's lines as tasks, then one
//! sentinel per worker; collects the replies and writes them in the order of the lines.
//!
//! There are two runtimes: the launcher's has one thread, the main one, to which workers are tied; the queue
//! and both files use the other.

mod made_by;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use futures_util::{StreamExt as _, stream};
use indicatif::ProgressBar;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use self::made_by::MadeBy;
use super::show::Show;
use super::{Registry, batch_errors, is_read, load, pool_named, progress, start_logging};
use crate::broker::embedded::{self, EmbeddedBroker, QueueSpec};
use crate::cli::RunBatch;
use crate::client::answer::Answer;
use crate::client::batch_file::{
    CountedInput, ErrorCounts, InputLine, MAX_LINE, RepeatedIds, ResumePoint, claim,
};
use crate::client::tally::Tally;
use crate::client::{Bounds, Client, Request, Sink, Task};
use crate::commands::exits::ExitsWith as _;
use crate::config::{Pool, Secret, Sentinels, Settings};
use crate::launcher::{Host, Launching};
use crate::protocol::batch_line::{self, BatchRequest, InvalidLine};
use crate::protocol::requests::{count_inputs, model_of};
use crate::protocol::task::SHUTDOWN;
use crate::protocol::{Message, Properties};
use crate::shutdown::{Exit, Patience, Phase, Stop, listen};
use crate::telemetry::QUIET;

/// Lines under way or waiting for an earlier one to finish.
const WINDOW: usize = 4_096;
/// Replies that the queue sends before they are acked.
const PREFETCH: NonZeroU16 = NonZeroU16::new(256).expect("256 is not zero");
/// The queue of replies, inside this process.
const REPLIES: &str = "replies";

pub(super) fn run(arguments: &RunBatch, registry: &Registry) -> anyhow::Result<Exit> {
    let settings = settings(arguments, registry)?;
    let names = settings.pools.iter().map(|pool| pool.name.as_str()).collect::<Vec<_>>().join(", ");
    start_logging(Some(QUIET))?;
    let digest = |pool: &Pool| Ok::<_, anyhow::Error>((pool.clone(), registry.weights(pool)?));
    let pools = settings.pools.iter().map(digest).collect::<anyhow::Result<Vec<_>>>();
    let (output, point) = files(arguments, &pools.exits_with(Exit::ModelFailed)?).exits_with(Exit::Usage)?;
    let total = point.input.lines;
    if point.done == total {
        return nothing_left(arguments, &names, &point);
    }
    let input = point.open_input(std::slice::from_ref(&arguments.input))?;

    let folder = std::env::temp_dir().join(format!("sconce-{}", uuid::Uuid::new_v4().simple()));
    let socket = folder.join("queue");
    let mut assignments = registry.plan(&settings, &Host::here())?;
    for assignment in &mut assignments {
        // By which this run ends its workers, whatever the pool takes from others.
        assignment.pool.sentinels = Sentinels::Type;
        assignment.broker.url = vec![Secret::new(format!("embedded:{}", socket.display()))];
    }
    let program = std::env::current_exe().context("cannot find this program's file")?;
    let queues = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let broker = {
        let _inside = queues.enter();
        let bound = EmbeddedBroker::bind(&socket, &queues_of(&settings.pools));
        Arc::new(bound.with_context(|| format!("TMPDIR: {}", folder.display())).exits_with(Exit::Config)?)
    };
    let output = Arc::new(Mutex::new(Output {
        file: BufWriter::new(output),
        done: point.done,
        errors: 0,
        in_output: point.errors.clone(),
        tally: arguments.json.then(Tally::default),
        show: arguments.show.then(|| Show::new(io::stdout())),
        repeated_ids: None,
        input_changed: None,
        bar: progress::bar(Some(total as u64), point.done as u64, "lines"),
    }));
    let stop = Stop::default();
    let run = Run {
        socket,
        queues: assignments.iter().map(|slot| slot.pool.task_queue.clone()).collect(),
        answering: Answering::new(&settings.pools, registry),
        grace: settings.launcher.shutdown_grace,
        output: output.clone(),
        stop: stop.clone(),
    };
    let fed = queues.spawn(run.run(input));
    let launching = Launching::new(&program, Some(&program), &settings.launcher, &stop, None);
    let launched = launching.run(&assignments);
    let exit = launched_and_fed(launched, fed, total, &output, &broker, &stop)?;
    queues.block_on(broker.shutdown());
    let mut output = lock(&output);
    output.bar.finish_and_clear();
    conclude(&mut output, &names, exit, &point)
}

/// Runs the launcher until it ends, beside what feeds it; whose failure ends the launcher.
fn launched_and_fed(
    launched: impl Future<Output = Exit>,
    mut fed: JoinHandle<anyhow::Result<()>>,
    total: usize,
    output: &Mutex<Output>,
    broker: &EmbeddedBroker,
    stop: &Stop,
) -> anyhow::Result<Exit> {
    let launch = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    launch.block_on(async {
        listen(stop.clone(), Patience::SecondAborts)?;
        let mut launched = pin!(launched);
        let mut is_fed = false;
        let exit = loop {
            tokio::select! {
                exit = &mut launched => break exit,
                ended = &mut fed, if !is_fed => match ended.map_err(Into::into).flatten() {
                    Ok(()) => is_fed = true,
                    Err(error) => {
                        // For example, the disk is full: further results could not be saved.
                        stop.advance(Phase::Returning, "the run failed");
                        launched.await;
                        return Err(error);
                    }
                }
            }
        };
        // The workers' last replies are in the queue; they only have to be written.
        written_up_to(total, output, broker, exit, stop).await;
        Ok(exit)
    })
}

fn nothing_left(arguments: &RunBatch, pools: &str, point: &ResumePoint) -> anyhow::Result<Exit> {
    if arguments.json {
        print(&mut Tally::default(), pools, 0, &point.errors)?;
    }
    let (lines, errors) = (point.input.lines, point.errors.total());
    let mut told = format!("all {lines} lines are answered already; {errors} with an error\n");
    told += &batch_errors::told(&point.errors);
    // A closed stderr changes no exit code.
    let _ = io::stderr().write_all(told.as_bytes());
    Ok(batch_errors::exit_of(&point.errors))
}

/// Prints what was done, and what is missing.
fn conclude(output: &mut Output, pools: &str, exit: Exit, point: &ResumePoint) -> anyhow::Result<Exit> {
    output.file.get_ref().sync_all().context("the output")?;
    let Output { done, errors, in_output, .. } = output;
    if let Some(tally) = &mut output.tally {
        print(tally, pools, *errors, in_output)?;
    }
    let (now, total, before) = (*done - point.done, point.input.lines, point.done);
    let all = in_output.total();
    let mut told = format!("{now} of {total} lines answered now, {before} before; {all} with an error\n");
    told += &batch_errors::told(in_output);
    if let Some(repeated) = &output.repeated_ids {
        let _ = writeln!(told, "warning: {repeated}");
    }
    let (is_complete, changed) = (*done == total, output.input_changed.take());
    if !is_complete && changed.is_none() {
        let _ = writeln!(told, "stopped at line {done} of {total}; the same command goes on from there");
    }
    // A closed stderr changes no exit code.
    let _ = io::stderr().write_all(told.as_bytes());
    if let Some(changed) = changed {
        return Err(anyhow!(changed).exits_with(Exit::Usage));
    }
    // When all lines are written it does not matter how the workers ended.
    Ok(match exit {
        _ if is_complete => batch_errors::exit_of(in_output),
        Exit::Done => Exit::Aborted,
        other => other,
    })
}

fn print(tally: &mut Tally, pools: &str, errors: u64, in_output: &ErrorCounts) -> anyhow::Result<()> {
    let report = tally.report(pools, errors, in_output);
    is_read(writeln!(io::stdout(), "{}", serde_json::to_string(&report)?))?;
    Ok(())
}

fn parse(line: &InputLine) -> Result<BatchRequest, InvalidLine> {
    let Some(bytes) = &line.bytes else {
        let problem = format!("longer than {MAX_LINE} bytes");
        return Err(InvalidLine { custom_id: None, problem });
    };
    batch_line::parse(bytes)
}

/// Opens and locks the output, and finds where to continue, provided that the same models and settings made its
/// lines.
fn files(arguments: &RunBatch, pools: &[(Pool, Option<String>)]) -> anyhow::Result<(File, ResumePoint)> {
    let RunBatch { input, output, .. } = arguments;
    let is_file = |path: &Path| path != Path::new("-") && path.metadata().is_ok_and(|it| it.is_file());
    // Looked at before the output is made, so that a wrong name leaves no file.
    input
        .metadata()
        .map(drop)
        .or_else(|error| if input == Path::new("-") { Ok(()) } else { Err(error) })
        .with_context(|| input.display().to_string())?;
    if !is_file(input) {
        let input = input.display();
        bail!(
            "--input {input} is no file: a run reads it twice (over a broker, `sconce submit` reads pipes)"
        );
    }
    if !is_file(output) && (output == Path::new("-") || output.exists()) {
        bail!("--output {} is no file: an interrupted run could not continue it", output.display());
    }
    File::open(input).with_context(|| input.display().to_string())?;
    let mut claimed = claim(output)?;
    let point = ResumePoint::find(std::slice::from_ref(input), output)?;
    let made_by = MadeBy::new(pools, point.input.clone());
    let unknown = made_by.continue_output(output, point.done)?;
    if unknown > 0 {
        let output = output.display();
        writeln!(io::stderr(), "warning: nothing tells what made the first {unknown} lines of {output}")?;
    }
    point.cut(&mut claimed, output)?;
    Ok((claimed, point))
}

/// The settings with the flags of this command, reduced to the pools that run: those that are named, else all.
fn settings(arguments: &RunBatch, registry: &Registry) -> anyhow::Result<Settings> {
    let RunBatch { pool: names, model, devices, .. } = arguments;
    let loaded = load(&arguments.settings, &[])?.settings;
    let named = |name: &String| Ok(pool_named(&loaded.pools, Some(name))?.0);
    let mut chosen: Vec<usize> = match names.is_empty() {
        true => (0..loaded.pools.len()).collect(),
        false => names.iter().map(named).collect::<anyhow::Result<_>>()?,
    };
    chosen.sort_unstable();
    chosen.dedup();
    let mut flags = Vec::new();
    if model.is_some() || devices.is_some() {
        let [index] = chosen[..] else {
            let error = anyhow!("--model and --devices are of one pool: choose it with --pool");
            return Err(error.exits_with(Exit::Usage));
        };
        let flag = |name: &str, value: &Option<String>| {
            value.clone().map(|value| (format!("pool[{index}].{name}"), value))
        };
        flags.extend([flag("model", model), flag("devices", devices)].into_iter().flatten());
    }
    let mut settings = registry.load(&arguments.settings, &flags)?.settings;
    let pools = settings.pools.into_iter().enumerate().filter(|(index, _)| chosen.contains(index));
    settings.pools = pools.map(|(_, pool)| pool).collect();
    Ok(settings)
}

fn queues_of(pools: &[Pool]) -> Vec<QueueSpec> {
    let spec = |(name, kept): (&str, bool)| QueueSpec { name: name.to_owned(), kept };
    // A dead-lettered task has been answered too, so nobody reads its dead letter.
    let of_pool =
        |pool: &Pool| [(pool.task_queue.as_str(), true), (pool.dead_letter_queue.as_str(), false)].map(spec);
    let mut queues: Vec<_> = pools.iter().flat_map(of_pool).chain([spec((REPLIES, true))]).collect();
    queues.sort_by(|a, b| a.name.cmp(&b.name));
    queues.dedup_by(|a, b| a.name == b.name);
    queues
}

/// Which pool answers a line.
struct Answering {
    pools: Vec<OfPool>,
    /// The pools that answer a URL, by the URLs seen so far. Bound: [`URLS`].
    known: HashMap<String, Vec<usize>>,
    registry: Registry,
}

struct OfPool {
    pool: Pool,
    queue: Arc<str>,
    /// Names of its model; those with a folder or owner also without.
    names: Vec<String>,
}

/// The most URLs that are remembered; a file has a few.
const URLS: usize = 100;

impl Answering {
    fn new(pools: &[Pool], registry: &Registry) -> Self {
        let of_pool = |pool: &Pool| OfPool {
            pool: pool.clone(),
            queue: pool.task_queue.as_str().into(),
            names: pool.served_names.iter().chain([&pool.model]).map(|name| last(name).to_owned()).collect(),
        };
        Self { pools: pools.iter().map(of_pool).collect(), known: HashMap::new(), registry: registry.clone() }
    }

    /// The queue of the pool that answers `url`. If several do, the one that the body's `model` names; else the
    /// first. If none does, the first pool, which says so.
    fn queue(&mut self, url: &str, body: &[u8]) -> Arc<str> {
        if !self.known.contains_key(url) && self.known.len() < URLS {
            let answers = |index: &usize| self.registry.answers(&self.pools[*index].pool, url);
            self.known.insert(url.to_owned(), (0..self.pools.len()).filter(answers).collect());
        }
        let pools: &[usize] = self.known.get(url).map_or(&[], Vec::as_slice);
        let named = || {
            let model = model_of(body)?;
            pools.iter().find(|index| self.pools[**index].names.iter().any(|name| name == last(&model)))
        };
        let index = if pools.len() > 1 { named() } else { None };
        let index = index.or_else(|| pools.first()).copied().unwrap_or(0);
        self.pools[index].queue.clone()
    }
}

/// A model's name without folder or owner.
fn last(name: &str) -> &str {
    name.trim_end_matches('/').rsplit('/').next().unwrap_or(name)
}

/// A line of the input.
enum Line {
    Request {
        custom_id: String,
        /// Number of inputs for the report; 0 without a report.
        inputs: usize,
    },
    /// Not a request: its output line is known.
    Invalid(Vec<u8>),
}

/// The lines of the input after the first `done`, as tasks.
fn tasks(
    input: &mut CountedInput,
    mut answering: Answering,
    counts_inputs: bool,
    ids: &mut RepeatedIds,
) -> impl Iterator<Item = anyhow::Result<Task<Line>>> {
    input.map(move |line| {
        let line = line.context("the input")?;
        Ok(match parse(&line) {
            Ok(BatchRequest { custom_id, url, body }) => {
                ids.take(&custom_id, line.number);
                let inputs = if counts_inputs { count_inputs(&body) } else { 0 };
                let message_id = format!("line-{}", line.number);
                let queue = Some(answering.queue(&url, &body));
                let request = Request { queue, ..Request::new(message_id, Some(&url), body) };
                Task { meta: Line::Request { custom_id, inputs }, request: Some(request) }
            }
            Err(invalid) => {
                Task { meta: Line::Invalid(batch_line::error_line(line.number, &invalid)), request: None }
            }
        })
    })
}

/// The output. Shared by the run, which writes, and `conclude`, which prints the summary.
struct Output {
    file: BufWriter<File>,
    /// Lines written, those of earlier runs included.
    done: usize,
    /// Lines with an error written in this run.
    errors: u64,
    /// The errors of the output, those of earlier runs included.
    in_output: ErrorCounts,
    /// The counts for the report, if one is requested.
    tally: Option<Tally>,
    /// The texts on their way to stdout, if they are requested.
    show: Option<Show<io::Stdout>>,
    /// What is to be told of repeated ids.
    repeated_ids: Option<String>,
    /// How the input has changed since it was counted, in words; known after the last line.
    input_changed: Option<String>,
    bar: ProgressBar,
}

/// Each line is flushed, so that an interrupted run can continue after it.
impl Sink<Line, anyhow::Error> for Arc<Mutex<Output>> {
    fn begun(&mut self, number: u64, line: &Line) {
        if let (Some(show), Line::Request { custom_id, .. }) = (&mut lock(self).show, line) {
            show.begun(number, custom_id);
        }
    }

    fn part(&mut self, number: u64, part: &Message) -> anyhow::Result<()> {
        let mut output = lock(self);
        let Output { show, bar, .. } = &mut *output;
        if let Some(shown) = show
            && !is_read(bar.suspend(|| shown.part(number, part)))?
        {
            *show = None;
        }
        Ok(())
    }

    fn answered(
        &mut self,
        number: u64,
        line: Line,
        reply: Option<Message>,
        _: Instant,
    ) -> anyhow::Result<()> {
        let mut output = lock(self);
        let Output { show, bar, .. } = &mut *output;
        if let (Some(shown), Some(reply)) = (show.as_mut(), &reply)
            && !is_read(bar.suspend(|| shown.answered(number, reply)))?
        {
            *show = None;
        }
        let (written, is_error) = match (line, reply) {
            (Line::Request { custom_id, inputs }, Some(reply)) => {
                if let Some(tally) = &mut output.tally {
                    tally.count(1, inputs, &Answer::of(&reply));
                }
                let properties = &reply.properties;
                let status = properties.headers.get("status_code").and_then(|code| code.as_i64());
                let status = status.unwrap_or(500) as u16;
                let id = properties.message_id.as_deref().unwrap_or_default();
                let body = batch_line::body_value(&reply);
                (batch_line::response_line(&custom_id, status, id, &body), status != 200)
            }
            (Line::Invalid(line), _) => {
                if let Some(tally) = &mut output.tally {
                    tally.count_unasked(1);
                }
                (line, true)
            }
            (Line::Request { custom_id, .. }, None) => bail!("no reply to {custom_id:?}"),
        };
        if is_error {
            output.errors += 1;
            output.in_output.add_line(&written);
        }
        output.file.write_all(&written).and_then(|()| output.file.flush()).context("the output")?;
        output.done += 1;
        output.bar.inc(1);
        Ok(())
    }
}

fn lock(output: &Mutex<Output>) -> MutexGuard<'_, Output> {
    output.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Publishes the lines and writes the answers.
struct Run {
    socket: PathBuf,
    /// The task queue of each worker, which gets a sentinel at the end.
    queues: Vec<String>,
    answering: Answering,
    /// Wait after the sentinels before workers that took none are ended.
    grace: Duration,
    output: Arc<Mutex<Output>>,
    stop: Stop,
}

impl Run {
    /// Publishes every counted line and, once all are answered, a sentinel for each worker: until then a task
    /// may wait for another attempt.
    async fn run(mut self, mut input: CountedInput) -> anyhow::Result<()> {
        let session = embedded::connect(&self.socket, REPLIES.to_owned(), PREFETCH).await?;
        let mut client = Client::over(session, "", REPLIES);
        let (first, counts_inputs) = {
            let output = lock(&self.output);
            (output.done as u64, output.tally.is_some())
        };
        let stopped = self.stop.clone();
        let mut ids = RepeatedIds::default();
        let tasks = stream::iter(tasks(&mut input, self.answering, counts_inputs, &mut ids))
            .take_until(async move { stopped.reached(Phase::Returning).await });
        let bounds = Bounds { under_way: WINDOW, timeout: None, in_order: true, resend: None };
        client.run(first, tasks, &bounds, &mut self.output).await?;
        lock(&self.output).repeated_ids = ids.words();
        if self.stop.phase() >= Phase::Returning {
            return Ok(());
        }
        let changed = input.changed().context("the input")?;
        lock(&self.output).input_changed = changed;
        for queue in &self.queues {
            let properties = Properties { kind: Some(SHUTDOWN.into()), ..Properties::default() };
            client.publish(queue, Message { properties, body: "null".into() }).await?;
        }
        // A worker that died after its sentinel has been started again, and none is left for it.
        tokio::time::sleep(self.grace).await;
        self.stop.advance(Phase::Returning, "every line is answered");
        Ok(())
    }
}

/// Waits until every line is written or, when the run was stopped, every available reply; does not wait when
/// the launcher failed. Bound: five seconds.
async fn written_up_to(
    total: usize,
    output: &Mutex<Output>,
    broker: &EmbeddedBroker,
    exit: Exit,
    stop: &Stop,
) {
    const POLL_INTERVAL: Duration = Duration::from_millis(20);
    let all_taken = || broker.stats(REPLIES).is_none_or(|left| left.ready + left.unacked == 0);
    let written = async {
        while exit == Exit::Done && lock(output).done < total {
            if stop.phase() >= Phase::Returning && all_taken() {
                return;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(5), written).await;
}
