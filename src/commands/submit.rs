//! `sconce submit`: the command line of a job that the fleet computes (`client/job`). Handles files and flags, progress
//! on the terminal or as JSON lines, Ctrl-C, and exit codes.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::time::Duration;

use anyhow::Context as _;
use indicatif::ProgressBar;
use serde_json::Value as Json;
use tokio::time::Instant;

use super::requests::batch_of;
use super::stop::withdraw;
use super::{
    Registry, batch_errors, load, pool_named, progress, queue_named, start_logging, tolerate_broken_pipe,
};
use crate::cli::Submit;
use crate::client::Resend;
use crate::client::job::{Job, JobError, JobOptions, JobRun, Progress, RunEnd, end_run, open_job};
use crate::commands::exits::ExitsWith as _;
use crate::config::{Pool, Settings};
use crate::protocol::control::Cancellation;
use crate::shutdown::{Exit, Phase, SecondSignal, Stop, listen_for_signals};
use crate::telemetry::QUIET;

/// How long it may take to tell a client that its job is withdrawn.
const TELL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two progress lines of `--json`.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);
/// Time between two updates of the progress bar.
const BAR_INTERVAL: Duration = Duration::from_millis(125);

pub(super) fn run(arguments: &Submit, registry: &Registry) -> anyhow::Result<Exit> {
    let mut loaded = load(&arguments.settings, &[])?;
    registry.resolve_folders(&mut loaded);
    let settings = loaded.settings;
    start_logging(Some(QUIET))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    if let Some(job) = &arguments.cancel {
        return runtime.block_on(cancel(&settings, job));
    }
    let (_, pool) = pool_named(&settings.pools, arguments.pool.as_deref())?;
    let queue = &queue_of(pool, arguments)?;
    let batch = batch_of(&arguments.batch, std::slice::from_ref(pool), registry).exits_with(Exit::Usage)?;
    let job = open_job(&batch, queue, arguments.attempts).exits_with(Exit::Usage)?;
    let report_for = arguments.json.then_some(pool.name.as_str());
    if job.borrow().is_complete() {
        return conclude(&mut job.borrow_mut(), report_for, Ok(()));
    }
    let options = JobOptions {
        queue: queue.to_owned(),
        once: arguments.batch.input.first().cloned().unwrap_or_default(),
        rows_per_task: arguments.rows_per_task,
        max_inputs: pool.max_inputs,
        resend: Resend { after: arguments.reply_timeout, attempts: arguments.attempts },
    };
    let ended = runtime.block_on(async {
        let ended = drive(arguments, &settings, &options, &job).await?;
        let (id, left) = (job.borrow().id().to_owned(), job.borrow().progress().counts.in_flight);
        if ended.is_ok() && left > 0 {
            withdraw_left(&settings, &id, left, queue).await;
        }
        anyhow::Ok(ended)
    });
    let exit = ended.and_then(|ended| conclude(&mut job.borrow_mut(), report_for, ended));
    // Does not wait for the thread that reads standard input, because it may block for ever.
    runtime.shutdown_background();
    exit
}

/// The queue that rows are published to.
fn queue_of(pool: &Pool, arguments: &Submit) -> anyhow::Result<String> {
    if !arguments.background {
        return queue_named(pool, arguments.queue.as_deref());
    }
    let queue = pool.queues().into_iter().find(|queue| queue.background).map(|queue| queue.name);
    queue
        .with_context(|| format!("pool {:?} has no background queue in the settings", pool.name))
        .exits_with(Exit::Usage)
}

/// Runs the job until it ends, or until Ctrl-C ends the wait for it. The outer error means that the job could not
/// begin; the inner error means that it failed later.
async fn drive(
    arguments: &Submit,
    settings: &Settings,
    options: &JobOptions,
    job: &RefCell<Job>,
) -> anyhow::Result<anyhow::Result<()>> {
    let stop = Stop::default();
    listen_for_signals(stop.clone(), SecondSignal::Aborts)?;
    let mut run = JobRun::begin(job, &settings.broker, options).await.map_err(with_exit)?;
    writeln!(io::stderr(), "job {}, through {}", job.borrow().id(), options.queue)?;
    let bar = {
        let job = job.borrow();
        progress::bar(job.total().map(|total| total as u64), job.answered_before(), "rows")
    };
    let ended = tokio::select! {
        ended = run.drive(stop.reached(Phase::Returning)) => ended.map_err(with_exit),
        () = interrupted(&stop, arguments.grace, job) => Ok(()),
        error = show_progress(job, &options.queue, &bar, arguments.json) => Err(error),
    };
    run.close().await;
    bar.finish_and_clear();
    Ok(ended)
}

/// Adds the exit code to an error of a job. The exit code of a client error follows from its kind.
fn with_exit(error: JobError) -> anyhow::Error {
    match error {
        JobError::Client(error) => error.into(),
        JobError::Output(ref cause) if cause.kind() == io::ErrorKind::Unsupported => {
            anyhow::Error::new(error).exits_with(Exit::Usage)
        }
        JobError::InputChanged(_) | JobError::Refused(_) => anyhow::Error::new(error).exits_with(Exit::Usage),
        JobError::Withdrawn(_) => anyhow::Error::new(error).exits_with(Exit::Aborted),
        JobError::Input { .. } | JobError::Output(_) => error.into(),
    }
}

/// Returns when the run has to stop waiting for the tasks under way: `grace` after the first Ctrl-C, or at the second
/// one. If nobody consumes from the queue, returns at the first one.
async fn interrupted(stop: &Stop, grace: Duration, job: &RefCell<Job>) {
    stop.reached(Phase::Returning).await;
    if !job.borrow().progress().counts.consumed {
        return;
    }
    let seconds = grace.as_secs();
    let _ = writeln!(
        io::stderr(),
        "waiting at most {seconds} s for the tasks under way; Ctrl-C again ends the wait"
    );
    tokio::select! {
        () = tokio::time::sleep(grace) => {}
        () = stop.reached(Phase::Aborting) => {}
    }
}

/// Shows the progress of the job periodically. Returns only if the output fails.
async fn show_progress(job: &RefCell<Job>, queue: &str, bar: &ProgressBar, mut json: bool) -> anyhow::Error {
    let (mut printed_at, mut answered_before, mut was_consumed) = (Instant::now(), 0, true);
    loop {
        tokio::time::sleep(BAR_INTERVAL).await;
        let job = job.borrow();
        let progress = job.progress();
        draw_bar(bar, &progress);
        // A visible bar always shows whether workers consume.
        if progress.counts.consumed != was_consumed && bar.is_hidden() {
            let notice =
                if was_consumed { "waiting for workers: nobody consumes" } else { "workers consume again" };
            let _ = writeln!(io::stderr(), "{notice} from {queue}");
        }
        was_consumed = progress.counts.consumed;
        if json && printed_at.elapsed() >= PROGRESS_INTERVAL {
            let rate =
                (progress.counts.answered - answered_before) as f64 / printed_at.elapsed().as_secs_f64();
            (printed_at, answered_before) = (Instant::now(), progress.counts.answered);
            match tolerate_broken_pipe(print_progress(&progress, rate)) {
                Ok(is_open) => json = is_open,
                Err(error) => return error.into(),
            }
        }
    }
}

fn draw_bar(bar: &ProgressBar, progress: &Progress<'_>) {
    let mut notes = Vec::new();
    if progress.counts.errors > 0 {
        notes.push(format!("{} errors", progress.counts.errors));
    }
    if !progress.counts.consumed {
        notes.push("no worker consumes".to_owned());
    }
    bar.set_message(notes.join(", "));
    bar.set_position(progress.written);
}

/// Prints the progress of the job, with its rate since the last line.
fn print_progress(progress: &Progress<'_>, rate: f64) -> io::Result<()> {
    let mut line = serde_json::to_value(progress)?;
    if let Some(line) = line.as_object_mut() {
        line.insert("rows_per_second".to_owned(), ((rate * 10.0).round() / 10.0).into());
    }
    writeln!(io::stdout(), "{line}")
}

/// Prints how many rows are answered and whether the job is complete. With `report_for`, the name of a pool, prints a
/// JSON report too. `ended` is the result of the run.
///
/// # Errors
/// The run failed, or the output could not be written.
fn conclude(job: &mut Job, report_for: Option<&str>, ended: anyhow::Result<()>) -> anyhow::Result<Exit> {
    let ended = ended.and(job.sync().map_err(with_exit));
    if let Some(pool) = report_for {
        let report = serde_json::to_value(job.report(pool))?;
        let mut line = serde_json::to_value(job.progress())?;
        if let (Some(line), Json::Object(report)) = (line.as_object_mut(), report) {
            line.extend(report);
        }
        tolerate_broken_pipe(writeln!(io::stdout(), "{line}"))?;
    }
    let written = job.progress().written;
    let (before, errors) = (job.answered_before(), job.output_errors());
    let of_total = job.total().map(|total| format!(" of {total}")).unwrap_or_default();
    let (now, failed) = (written - before, errors.total());
    let mut summary = format!("{now}{of_total} rows answered now, {before} before; {failed} with an error\n");
    let results = job.results();
    summary += &batch_errors::summary(&results.remarks(), results.names_errors(), errors, job.truncated());
    let is_complete = job.is_complete();
    if !is_complete && ended.is_ok() {
        let _ = writeln!(
            summary,
            "stopped after row {written}{of_total}; run the same command again to continue"
        );
    }
    // A closed stderr does not change the exit code.
    let _ = io::stderr().write_all(summary.as_bytes());
    ended?;
    Ok(if is_complete { batch_errors::exit_of(job.output_errors()) } else { Exit::Aborted })
}

/// Withdraws the tasks that an interrupted job leaves in the queue, because the next run publishes their rows again.
async fn withdraw_left(settings: &Settings, id: &str, left: u64, queue: &str) {
    let cancellation = Cancellation { job: Some(id.to_owned()), ..Cancellation::default() };
    // A closed stderr changes nothing.
    let _ = match withdraw(settings, cancellation).await {
        Ok(_) => writeln!(io::stderr(), "withdrew the {left} tasks left in {queue}"),
        Err(error) => writeln!(
            io::stderr(),
            "{left} tasks are left in {queue}, because they cannot be withdrawn: {error:#}. Workers compute them, but \
             nobody reads the answers; `sconce submit --cancel {id}` tries again"
        ),
    };
}

/// Withdraws a job, so that all workers answer its tasks with 499. Ends its client, which would otherwise wait for the
/// first of these answers, and without workers for ever. Refuses an id that the broker has no queue of.
async fn cancel(settings: &Settings, job: &str) -> anyhow::Result<Exit> {
    let cancellation = Cancellation { job: Some(job.to_owned()), ..Cancellation::default() };
    let withdrawn = withdraw(settings, cancellation).await;
    let told = tokio::time::timeout(TELL_TIMEOUT, end_run(&settings.broker, job)).await;
    let told = told.map_err(anyhow::Error::from).and_then(|told| Ok(told?));
    let is_unknown = matches!(told, Ok(RunEnd::Unknown));
    match told {
        Ok(RunEnd::Told) => writeln!(io::stdout(), "the `sconce submit` of job {job} is told to end")?,
        Ok(RunEnd::Gone) => writeln!(io::stdout(), "no `sconce submit` runs job {job} any more")?,
        Ok(RunEnd::Unknown) => {
            writeln!(
                io::stderr(),
                "no job {job} is known: a job's queue of replies is kept for 24 h, and there is none"
            )?;
        }
        Err(error) => {
            writeln!(io::stderr(), "the `sconce submit` of job {job} cannot be told to end: {error:#}")?
        }
    }
    writeln!(io::stdout(), "{}: for one hour, workers answer tasks of job {job} with 499", withdrawn?)?;
    Ok(if is_unknown { Exit::Refused } else { Exit::Done })
}
