//! `sconce run-batch`: runs a launcher with an embedded queue. Publishes the file's lines as tasks, then one sentinel
//! per worker. Collects the replies and writes them in the order of the lines.
//!
//! There are two runtimes. The launcher's runtime uses only the main thread, because the kernel signals workers when
//! the thread that spawned them ends. The embedded queue and both files use the other runtime.

mod provenance;

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use futures_util::{StreamExt as _, stream};
use indicatif::ProgressBar;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use self::provenance::Provenance;
use super::requests::batch_of;
use super::show::Show;
use super::{Registry, batch_errors, load, pool_named, progress, start_logging, tolerate_broken_pipe};
use crate::broker::embedded::{self, EmbeddedBroker, QueueSpec};
use crate::cli::RunBatch;
use crate::client::answer::{Answer, truncated_in};
use crate::client::batch_file::{
    Batch, CommonFields, ErrorCounts, InputRow, OpenBatch, RepeatedIds, Results, ResumePoint, Rows,
};
use crate::client::tally::Tally;
use crate::client::{Bounds, Client, ClientTask, Sink, TaskMessage};
use crate::commands::exits::ExitsWith as _;
use crate::config::{Pool, Secret, Settings, python_class_name};
use crate::launcher::{Host, LaunchSpec, PreparedLauncher};
use crate::model::LoadError;
use crate::protocol::batch_line::{self, BatchRequest};
use crate::protocol::endpoints::TRANSCRIPTIONS_URL;
use crate::protocol::requests::{count_inputs, model_of};
use crate::protocol::task::SHUTDOWN;
use crate::protocol::{Message, Properties, Sentinels};
use crate::shutdown::{Exit, Phase, SecondSignal, Stop, listen_for_signals};
use crate::telemetry::QUIET;

/// Maximum number of lines that are under way, or answered and waiting for an earlier one.
const WINDOW: usize = 4_096;
/// Unacked replies that the queue may send ahead.
const PREFETCH: NonZeroU16 = NonZeroU16::new(256).expect("256 is not zero");
/// The name of the reply queue inside this process.
const REPLIES: &str = "replies";
/// How long the last replies may take to be written once all workers have ended.
const LAST_REPLIES_TIME: Duration = Duration::from_secs(5);

pub(super) fn run(arguments: &RunBatch, registry: &Registry) -> anyhow::Result<Exit> {
    let settings = settings(arguments, registry)?;
    start_logging(Some(QUIET))?;
    let with_digest = |pool: &Pool| Ok::<_, anyhow::Error>((pool.clone(), registry.weights_digest(pool)?));
    let pools = settings.pools.iter().map(with_digest).collect::<anyhow::Result<Vec<_>>>();
    let pools = pools.map_err(|error| {
        let is_unavailable = matches!(error.downcast_ref(), Some(LoadError::Hub { is_lasting: false, .. }));
        error.exits_with(if is_unavailable { Exit::ModelUnavailable } else { Exit::ModelFailed })
    });
    let pools = pools?;
    // The URL of a line decides which of several pools it is for.
    let registry = &match &settings.pools[..] {
        [_] => registry.clone(),
        pools => registry.with_classes(pools)?,
    };
    let pool_names = settings.pools.iter().map(|pool| pool.name.as_str()).collect::<Vec<_>>().join(", ");
    let batch = batch_of(&arguments.batch, &settings.pools, registry).exits_with(Exit::Usage)?;
    let OpenBatch { results, point, rows } = open_files(&batch, &pools).exits_with(Exit::Usage)?;
    let total = point.total;
    let output = Arc::new(Mutex::new(Output {
        fields: batch.common_fields(Some(&point)),
        results,
        done: point.done,
        errors: 0,
        all_errors: point.errors.clone(),
        truncated: 0,
        tally: arguments.json.then(Tally::default),
        show: arguments.show.then(|| Show::new(io::stdout())),
        repeated_ids: None,
        input_changed: None,
        bar: progress::bar(Some(total as u64), point.done as u64, "lines"),
    }));
    if point.done == total {
        return conclude(&mut output.lock(), &pool_names, Exit::Done, &point);
    }

    let folder = std::env::temp_dir().join(format!("sconce-{}", uuid::Uuid::new_v4().simple()));
    let socket = folder.join("queue");
    let mut assignments = registry.plan(&settings, &Host::here())?;
    for assignment in &mut assignments {
        // This run ends its workers by sentinels, whichever kind of sentinels the pool accepts otherwise.
        assignment.pool.sentinels = Sentinels::Type;
        assignment.broker.url = vec![Secret::new(format!("embedded:{}", socket.display()))];
    }
    note_idle_workers(&settings.pools, registry, assignments.len(), total - point.done);
    let program = std::env::current_exe().context("cannot find this program's file")?;
    let queue_runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let broker = {
        let _guard = queue_runtime.enter();
        let bound = EmbeddedBroker::bind(&socket, &queues_of(&settings.pools));
        Arc::new(bound.with_context(|| format!("TMPDIR: {}", folder.display())).exits_with(Exit::Config)?)
    };
    let stop = Stop::default();
    let feeder = Feeder {
        socket,
        queues: assignments.iter().map(|slot| slot.pool.task_queue.clone()).collect(),
        router: Router::new(&settings.pools, registry),
        output: output.clone(),
        stop: stop.clone(),
    };
    let feeder = queue_runtime.spawn(feeder.run(rows));
    let launching = PreparedLauncher::new(LaunchSpec {
        worker_program: &program,
        guard_program: Some(&program),
        policy: &settings.launcher,
        stop: &stop,
        raw_lines: None,
    });
    let launched = launching.run(&assignments);
    let exit = run_with_feeder(launched, feeder, settings.launcher.shutdown_grace, &broker, &stop)?;
    queue_runtime.block_on(broker.shutdown());
    conclude(&mut output.lock(), &pool_names, exit, &point)
}

/// Says that workers will be idle, if there are more of them than recordings: no recording is shared.
fn note_idle_workers(pools: &[Pool], registry: &Registry, workers: usize, lines: usize) {
    // Of several pools, only the lines tell which one gets how many.
    let [pool] = pools else { return };
    if workers > lines && registry.route(pool).is_some_and(|route| route.url == TRANSCRIPTIONS_URL) {
        let idle = workers - lines;
        // A closed stderr does not end the run.
        let _ = writeln!(
            io::stderr(),
            "note: one worker computes a whole recording, so {idle} of {workers} workers will be idle; fewer `devices` \
             give each more cores"
        );
    }
}

/// Runs the launcher until it ends. Beside it runs the feeder, which publishes the lines and ends once all are answered. If
/// the feeder fails, the launcher is stopped and the error returned. After `grace` from the feeder's end, the launcher
/// stops the workers that still run: a worker that died after it took its sentinel has been restarted, and no sentinel is
/// left for it.
fn run_with_feeder(
    launched: impl Future<Output = Exit>,
    mut feeder: JoinHandle<anyhow::Result<()>>,
    grace: Duration,
    broker: &EmbeddedBroker,
    stop: &Stop,
) -> anyhow::Result<Exit> {
    let launcher_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    launcher_runtime.block_on(async {
        listen_for_signals(stop.clone(), SecondSignal::Aborts)?;
        let mut launched = pin!(launched);
        let fed = tokio::select! {
            exit = &mut launched => {
                if exit == Exit::Done {
                    write_last(feeder, broker).await?;
                }
                return Ok(exit);
            }
            ended = &mut feeder => ended.map_err(Into::into).flatten(),
        };
        if fed.is_ok()
            && let Ok(exit) = timeout(grace, &mut launched).await
        {
            return Ok(exit);
        }
        // The run fails, for example, if the disk is full and further results cannot be saved.
        stop.advance(Phase::Returning, if fed.is_ok() { "every line is answered" } else { "the run failed" });
        let exit = launched.await;
        fed.map(|()| exit)
    })
}

/// Waits until the feeder has written the last replies of the workers, which have ended: they may still be in the queue.
async fn write_last(feeder: JoinHandle<anyhow::Result<()>>, broker: &EmbeddedBroker) -> anyhow::Result<()> {
    tokio::select! {
        biased;
        ended = feeder => ended.map_err(Into::into).flatten(),
        // The feeder acks a reply once it is written. After a stop, some lines have none.
        () = broker.drained(REPLIES) => Ok(()),
        () = tokio::time::sleep(LAST_REPLIES_TIME) => Ok(()),
    }
}

/// Prints how many lines are answered and whether all are, and chooses the exit code.
fn conclude(output: &mut Output, pools: &str, exit: Exit, point: &ResumePoint) -> anyhow::Result<Exit> {
    output.bar.finish_and_clear();
    output.results.sync(output.done == point.total).context("the output")?;
    let Output { done, errors, all_errors, .. } = output;
    if let Some(tally) = &mut output.tally {
        let report = serde_json::to_string(&tally.report(pools, *errors, all_errors))?;
        tolerate_broken_pipe(writeln!(io::stdout(), "{report}"))?;
    }
    let (now, total, before) = (*done - point.done, point.total, point.done);
    let failed = all_errors.total();
    let mut summary = if before == total {
        format!("all {total} lines are answered already; {failed} with an error\n")
    } else {
        format!("{now} of {total} lines answered now, {before} before; {failed} with an error\n")
    };
    let (remarks, names_errors) = (output.results.remarks(), output.results.names_errors());
    summary += &batch_errors::summary(&remarks, names_errors, all_errors, output.truncated);
    if let Some(repeated) = &output.repeated_ids {
        let _ = writeln!(summary, "warning: {repeated}");
    }
    let (is_complete, changed) = (*done == total, output.input_changed.take());
    if !is_complete && changed.is_none() {
        let once = if exit == Exit::ModelFailed { "once the cause is mended, " } else { "" };
        let _ = writeln!(
            summary,
            "stopped at line {done} of {total}; {once}run the same command again to continue"
        );
    }
    // A closed stderr does not change the exit code.
    let _ = io::stderr().write_all(summary.as_bytes());
    if let Some(changed) = changed {
        return Err(anyhow!(changed).exits_with(Exit::Usage));
    }
    // If all lines are written, it does not matter how the workers ended.
    Ok(match exit {
        _ if is_complete => batch_errors::exit_of(all_errors),
        Exit::Done => Exit::Aborted,
        other => other,
    })
}

/// Opens and locks the output, and finds where to continue. Refuses an output that was made by other models or settings.
fn open_files(batch: &Batch, pools: &[(Pool, Option<String>)]) -> anyhow::Result<OpenBatch> {
    if let Batch::Rows { source, output } = batch {
        check_files(source.paths(), output)?;
    }
    let record = batch.record_of();
    batch.open(|point| {
        let provenance = Provenance::new(pools, point.input.clone());
        let unknown_lines = provenance.continue_output(&record, point.done)?;
        if unknown_lines > 0 {
            let output = record.display();
            writeln!(
                io::stderr(),
                "warning: nothing tells what made the first {unknown_lines} lines of {output}"
            )?;
        }
        Ok(())
    })
}

/// Checked before the output is created, so that a wrong input name leaves no file.
fn check_files(inputs: &[PathBuf], output: &Path) -> anyhow::Result<()> {
    let is_file = |path: &Path| path != Path::new("-") && path.metadata().is_ok_and(|it| it.is_file());
    for input in inputs {
        let shown = input.display();
        input
            .metadata()
            .map(drop)
            .or_else(|error| if input == Path::new("-") { Ok(()) } else { Err(error) })
            .with_context(|| shown.to_string())?;
        if !is_file(input) {
            bail!(
                "--input {shown} is not a file: a run reads it twice (over a broker, `sconce submit` reads pipes)"
            );
        }
        fs::File::open(input).with_context(|| shown.to_string())?;
    }
    if !is_file(output) && (output == Path::new("-") || output.exists()) {
        bail!("--output {} is not a file: an interrupted run could not continue it", output.display());
    }
    Ok(())
}

/// The settings with the flags of this command, reduced to the pools that run: those named by `--pool`, else all.
fn settings(arguments: &RunBatch, registry: &Registry) -> anyhow::Result<Settings> {
    let RunBatch { pool: names, model, devices, .. } = arguments;
    let loaded = load(&arguments.settings, &[])?.settings;
    let index_of = |name: &String| Ok(pool_named(&loaded.pools, Some(name))?.0);
    let mut chosen: Vec<usize> = if names.is_empty() {
        (0..loaded.pools.len()).collect()
    } else {
        names.iter().map(index_of).collect::<anyhow::Result<_>>()?
    };
    chosen.sort_unstable();
    chosen.dedup();
    let mut flags = Vec::new();
    if model.is_some() || devices.is_some() {
        let [index] = chosen[..] else {
            let error = anyhow!("--model and --devices apply to one pool: choose it with --pool");
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

/// The queues of these pools, without duplicates, and the reply queue.
fn queues_of(pools: &[Pool]) -> Vec<QueueSpec> {
    let spec = |name: &str, kept| QueueSpec { name: name.to_owned(), kept };
    // A dead-lettered task has been answered too, so nobody reads its dead letter.
    let of_pool = |pool: &Pool| [spec(&pool.task_queue, true), spec(&pool.dead_letter_queue, false)];
    let mut queues: Vec<_> = pools.iter().flat_map(of_pool).chain([spec(REPLIES, true)]).collect();
    queues.sort_by(|a, b| a.name.cmp(&b.name));
    queues.dedup_by(|a, b| a.name == b.name);
    queues
}

/// Decides which pool answers a line.
struct Router(Vec<PoolRoute>);

struct PoolRoute {
    /// The pool's name.
    pool: String,
    queue: Arc<str>,
    /// The URLs that it answers; none: any.
    urls: Option<Vec<&'static str>>,
    /// The names of its model, without folder or owner.
    models: Vec<String>,
    is_python: bool,
}

impl Router {
    fn new(pools: &[Pool], registry: &Registry) -> Self {
        let of_pool = |pool: &Pool| {
            let model = python_class_name(&pool.model).unwrap_or(&pool.model);
            let models = pool.served_names.iter().map(String::as_str).chain([model]);
            PoolRoute {
                pool: pool.name.clone(),
                queue: pool.task_queue.as_str().into(),
                urls: registry.urls(pool),
                models: models.map(|name| base_name(name).to_owned()).collect(),
                is_python: pool.python_class().is_some(),
            }
        };
        Self(pools.iter().map(of_pool).collect())
    }

    /// Returns the queue of the pool that answers `url`. If several pools do, chooses the one that the body's `model`
    /// names, else the first of them. If no pool does, chooses the first pool, which answers with an error.
    ///
    /// # Errors
    /// Several pools are left, and one of them is a class in Python: it may do something else for this URL.
    fn queue(&self, url: &str, body: &[u8]) -> anyhow::Result<Arc<str>> {
        let answers = |it: &&PoolRoute| it.urls.as_ref().is_none_or(|urls| urls.contains(&url));
        let mut fitting: Vec<&PoolRoute> = self.0.iter().filter(answers).collect();
        let model = if fitting.len() > 1 { model_of(body) } else { None };
        let is_named = |it: &PoolRoute| {
            model.as_ref().is_some_and(|model| it.models.iter().any(|name| name == base_name(model)))
        };
        if fitting.iter().any(|it| is_named(it)) {
            fitting.retain(|it| is_named(it));
        }
        if fitting.len() > 1 && fitting.iter().any(|it| it.is_python) {
            let names: Vec<_> = fitting.iter().map(|it| format!("{:?}", it.pool)).collect();
            let names = names.join(", ");
            bail!(
                "the pools {names} answer {url}: name the model of one of them as `model`, or choose one with --pool"
            );
        }
        let chosen = fitting.first().copied().or(self.0.first()).context("there is no pool")?;
        Ok(chosen.queue.clone())
    }
}

/// A model's name without folder or owner.
fn base_name(name: &str) -> &str {
    name.trim_end_matches('/').rsplit('/').next().unwrap_or(name)
}

/// A row of the input, until it is answered.
enum Line {
    Request {
        custom_id: String,
        /// Number of inputs for the report; 0 without a report.
        inputs: usize,
    },
    /// A line that is not a valid request, with the output line that reports the error.
    Invalid(Vec<u8>),
}

/// The remaining rows of the input, as tasks.
fn tasks(
    rows: &mut dyn Rows,
    router: Router,
    counts_inputs: bool,
    ids: &mut RepeatedIds,
) -> impl Iterator<Item = anyhow::Result<ClientTask<Line>>> {
    rows.map(move |row| {
        let InputRow { number, request } = row.context("the input")?;
        Ok(match request {
            Ok(BatchRequest { custom_id, url, body }) => {
                ids.add(&custom_id, number);
                let inputs = if counts_inputs { count_inputs(&body) } else { 0 };
                let message_id = format!("line-{number}");
                let queue = router.queue(&url, &body).with_context(|| format!("line {number} of the input"));
                let queue = Some(queue.exits_with(Exit::Usage)?);
                let message = TaskMessage { queue, ..TaskMessage::new(message_id, Some(&url), body) };
                ClientTask { meta: Line::Request { custom_id, inputs }, message: Some(message) }
            }
            Err(invalid) => {
                ClientTask { meta: Line::Invalid(batch_line::error_line(number, &invalid)), message: None }
            }
        })
    })
}

/// The output. Shared by the feeder, which writes it, and `conclude`, which prints the summary.
struct Output {
    results: Results,
    fields: CommonFields,
    /// Lines written, including those of earlier runs.
    done: usize,
    /// Lines with an error written in this run.
    errors: u64,
    /// The errors of the whole output, including those of earlier runs.
    all_errors: ErrorCounts,
    /// Texts that were cut in this run.
    truncated: u64,
    /// The counts for the report, if one is requested.
    tally: Option<Tally>,
    /// Writes the texts of answers to stdout, if that is requested.
    show: Option<Show<io::Stdout>>,
    /// A warning about repeated ids, if there are any.
    repeated_ids: Option<String>,
    /// A message about how the input has changed since it was counted; known after the last line.
    input_changed: Option<String>,
    bar: ProgressBar,
}

/// Each line is written at once, so that an interrupted run can continue after it.
impl Sink<Line, anyhow::Error> for Arc<Mutex<Output>> {
    fn begun(&mut self, number: u64, line: &Line) {
        if let (Some(show), Line::Request { custom_id, .. }) = (&mut self.lock().show, line) {
            show.begun(number, custom_id);
        }
    }

    fn part(&mut self, number: u64, part: &Message) -> anyhow::Result<()> {
        let mut output = self.lock();
        let Output { show, bar, .. } = &mut *output;
        if let Some(shown) = show
            && !tolerate_broken_pipe(bar.suspend(|| shown.part(number, part)))?
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
        let mut output = self.lock();
        let Output { show, bar, .. } = &mut *output;
        if let (Some(shown), Some(reply)) = (show.as_mut(), &reply)
            && !tolerate_broken_pipe(bar.suspend(|| shown.answered(number, reply)))?
        {
            *show = None;
        }
        let (written, is_error) = match (line, reply) {
            (Line::Request { custom_id, inputs }, Some(reply)) => {
                let properties = &reply.properties;
                let status = properties.headers.get("status_code").and_then(|code| code.as_i64());
                let status = status.unwrap_or(500);
                if let Some(problem) = output.fields.refusal_in(status, &reply) {
                    return Err(
                        anyhow!("stopped, since it concerns all rows: {problem}").exits_with(Exit::Usage)
                    );
                }
                if let Some(tally) = &mut output.tally {
                    tally.count(1, inputs, &Answer::of(&reply));
                }
                output.truncated = output.truncated.saturating_add(truncated_in(&reply));
                let id = properties.message_id.as_deref().unwrap_or_default();
                let body = batch_line::body_value(&reply);
                let notes = batch_line::notes_of(&reply);
                (batch_line::response_line(&custom_id, status as u16, id, &notes, &body), status != 200)
            }
            (Line::Invalid(line), _) => {
                if let Some(tally) = &mut output.tally {
                    tally.count_without_reply(1);
                }
                (line, true)
            }
            (Line::Request { custom_id, .. }, None) => bail!("no reply to {custom_id:?}"),
        };
        let failed = output.results.write(&written).map_err(|error| {
            let is_of_no_use = error.kind() == io::ErrorKind::Unsupported;
            let error = anyhow::Error::new(error).context("the output");
            if is_of_no_use { error.exits_with(Exit::Usage) } else { error }
        })?;
        if failed.is_some() || is_error {
            output.errors += 1;
        }
        match failed {
            Some(failed) => output.all_errors.add(failed),
            None if is_error => output.all_errors.add_line(&written),
            None => {}
        }
        output.done += 1;
        output.bar.inc(1);
        Ok(())
    }
}

/// The feeder: publishes the lines and writes the answers.
struct Feeder {
    socket: PathBuf,
    /// The task queue of each worker. Each worker gets a sentinel at the end.
    queues: Vec<String>,
    router: Router,
    output: Arc<Mutex<Output>>,
    stop: Stop,
}

impl Feeder {
    /// Publishes every line that was counted at the start. Once all are answered, publishes a sentinel for each worker.
    /// An earlier sentinel could stop the workers while a task still waits for another attempt.
    async fn run(mut self, mut rows: Box<dyn Rows>) -> anyhow::Result<()> {
        let session = embedded::connect(&self.socket, REPLIES.to_owned(), PREFETCH).await?;
        let mut client = Client::over(session, "", REPLIES);
        let (first, counts_inputs, in_order) = {
            let output = self.output.lock();
            (output.done as u64, output.tally.is_some(), output.results.is_ordered())
        };
        let stopped = self.stop.clone();
        let mut ids = RepeatedIds::default();
        let tasks = stream::iter(tasks(&mut *rows, self.router, counts_inputs, &mut ids))
            .take_until(async move { stopped.reached(Phase::Returning).await });
        let bounds = Bounds { max_tasks: WINDOW, timeout: None, in_order, resend: None };
        client.run(first, tasks, &bounds, &mut self.output).await?;
        self.output.lock().repeated_ids = ids.warning();
        if self.stop.phase() >= Phase::Returning {
            return Ok(());
        }
        let changed = rows.changed().context("the input")?;
        self.output.lock().input_changed = changed;
        for queue in &self.queues {
            let properties = Properties { kind: Some(SHUTDOWN.into()), ..Properties::default() };
            client.publish(queue, Message { properties, body: "null".into() }).await?;
        }
        Ok(())
    }
}
