//! `sconce submit`: publishes a file's rows to a running pool, and writes the answers in the order of the rows. Each
//! run is a job with a reply queue of its own, which outlives this process for a while, so that answers to a client
//! that died are no dead letters. Nothing but the output says what is done: a run continues behind its last line.

mod job;
mod ordered;
mod read;
mod record;
mod rows;

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};

use self::job::{Job, Sink};
use self::ordered::Ordered;
use self::record::Record;
use self::rows::Most;
use super::stop::tell_all;
use super::{load, pool_named, start_logging};
use crate::cli::Submit;
use crate::client::batch_file::{ResumePoint, claim};
use crate::client::{Bounds, Client, Resend};
use crate::commands::exits::ExitsWith as _;
use crate::config::{Pool, Settings};
use crate::protocol::control::{Cancellation, job_queue};
use crate::shutdown::{Exit, Patience, Phase, Stop, listen};
use crate::telemetry::QUIET;

/// The most tasks under way.
const WINDOW: usize = 4_096;
/// Replies that the broker sends before they are acked; fewer where each answers many rows.
const PREFETCH: u16 = 512;
const LEAST_PREFETCH: u16 = 8;
/// How long the broker keeps the replies of a job whose client is gone.
const KEEP: Duration = Duration::from_secs(24 * 60 * 60);
/// Time between two reports of progress.
const PROGRESS: Duration = Duration::from_secs(5);

pub(super) fn run(arguments: &Submit) -> anyhow::Result<Exit> {
    let settings = load(&arguments.settings, &[])?.settings;
    start_logging(Some(QUIET))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    if let Some(job) = &arguments.cancel {
        return runtime.block_on(cancel(&settings, job));
    }
    let (_, pool) = pool_named(&settings.pools, arguments.pool.as_deref())?;
    let queue = queue_of(pool, arguments.background).exits_with(Exit::Usage)?;
    let output = arguments.output.as_deref().context("--output is missing").exits_with(Exit::Usage)?;
    let (file, point) = files(arguments, output, queue).exits_with(Exit::Usage)?;
    let (done, total) = point.as_ref().map_or((0, None), |point| (point.done, Some(point.input.lines)));
    let ordered = Ordered::new(file, output, done as u64);
    let job = Job::new(ordered, total, arguments);
    if total == Some(done) {
        return job.borrow_mut().conclude(&pool.name, queue, Ok(()));
    }
    let exit = runtime.block_on(drive(arguments, &settings, (queue, pool), point, &job));
    // The thread that reads standard input may wait there for ever.
    runtime.shutdown_background();
    exit
}

/// The queue that rows are published to.
fn queue_of(pool: &Pool, background: bool) -> anyhow::Result<&str> {
    if !background {
        return Ok(&pool.task_queue);
    }
    let queue = pool.background_queue.as_deref();
    queue.with_context(|| format!("pool {:?} has no background_queue in the settings", pool.name))
}

/// Opens and locks the output, and finds where to continue; none where the input can only be read once.
fn files(arguments: &Submit, output: &Path, queue: &str) -> anyhow::Result<(File, Option<ResumePoint>)> {
    let inputs = &arguments.input;
    if output == Path::new("-") || output.metadata().is_ok_and(|it| !it.is_file()) {
        bail!("--output {} is no file: an interrupted run could not continue it", output.display());
    }
    // Before the output is made, so that a wrong name leaves no file. Nothing is opened here: whoever writes to a FIFO
    // would lose its reader.
    let mut are_files = true;
    for input in inputs {
        let is_stdin = input == Path::new("-");
        let is_file = || input.metadata().map(|it| it.is_file()).with_context(|| input.display().to_string());
        are_files &= !is_stdin && is_file()?;
    }
    if !are_files && inputs.len() > 1 {
        bail!("an input that is no file, such as standard input or a pipe, must be the only one");
    }
    let mut claimed = claim(output)?;
    if are_files {
        let point = ResumePoint::find(inputs, output)?;
        let input = Some(point.input.clone());
        Record { queue: queue.to_owned(), input }.continue_output(output, point.done)?;
        point.cut(&mut claimed, output)?;
        return Ok((claimed, Some(point)));
    }
    if claimed.metadata()?.len() > 0 {
        let output = output.display();
        bail!(
            "{output} has lines already, and an input that is no file cannot be read again to continue them"
        );
    }
    Record { queue: queue.to_owned(), input: None }.continue_output(output, 0)?;
    Ok((claimed, None))
}

/// Publishes the rows and writes the answers.
async fn drive(
    arguments: &Submit,
    settings: &Settings,
    (queue, pool): (&str, &Pool),
    point: Option<ResumePoint>,
    job: &RefCell<Job>,
) -> anyhow::Result<Exit> {
    let stop = Stop::default();
    listen(stop.clone(), Patience::SecondAborts)?;
    let (replies, id) = {
        let job = job.borrow();
        (job_queue(job.id()), job.id().to_owned())
    };
    let name = format!("sconce submit {id}");
    let prefetch = (PREFETCH / arguments.rows_per_task).max(LEAST_PREFETCH);
    let mut client = Client::for_job(&settings.broker, &name, queue, (&replies, KEEP), prefetch).await?;
    writeln!(io::stderr(), "job {id}, through {queue}")?;
    let most = Most { rows: arguments.rows_per_task.into(), inputs: pool.max_inputs };
    let mut units = read::read(&arguments.input, point, most)?;
    let stopped = stop.clone();
    let tasks = futures_util::StreamExt::take_until(job::tasks(job, &mut units), async move {
        stopped.reached(Phase::Returning).await;
    });
    let resend = Resend { after: arguments.reply_timeout, attempts: arguments.attempts };
    let bounds = Bounds { under_way: WINDOW, timeout: None, in_order: false, resend: Some(resend) };
    let mut sink = Sink(job);
    let ended = tokio::select! {
        ended = client.run(0, tasks, &bounds, &mut sink) => ended,
        () = left(&stop, arguments.grace) => Ok(()),
        error = progress(job, arguments.json) => Err(error),
    };
    client.close().await;
    let mut job = job.borrow_mut();
    job.conclude(&pool.name, queue, ended)
}

/// Returns when the run is not to wait any longer for what is under way.
async fn left(stop: &Stop, grace: Duration) {
    stop.reached(Phase::Returning).await;
    tokio::select! {
        () = tokio::time::sleep(grace) => {}
        () = stop.reached(Phase::Aborting) => {}
    }
}

/// Shows how the job stands, from time to time. Returns only an error of the output.
async fn progress(job: &RefCell<Job>, json: bool) -> anyhow::Error {
    let mut tick = tokio::time::interval(PROGRESS);
    tick.tick().await;
    loop {
        tick.tick().await;
        if json && let Err(error) = job.borrow_mut().print_progress() {
            return error;
        }
    }
}

/// Withdraws a job.
async fn cancel(settings: &Settings, job: &str) -> anyhow::Result<Exit> {
    let of_job = Cancellation { job: Some(job.to_owned()), ..Cancellation::default() };
    let launchers = tell_all(settings, of_job).await?;
    let words = "for an hour, their workers answer tasks of job";
    writeln!(io::stdout(), "told {launchers} launchers: {words} {job} with 499")?;
    Ok(Exit::Done)
}
