//! `sconce submit`: a front of a job over the fleet: its files and flags, its progress on the terminal or as JSON
//! lines, Ctrl-C, and exit codes.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::time::Duration;

use anyhow::Context as _;
use indicatif::ProgressBar;
use serde_json::Value as Json;
use tokio::time::Instant;

use super::stop::tell_all;
use super::{batch_errors, is_read, load, pool_named, progress, start_logging};
use crate::cli::Submit;
use crate::client::Resend;
use crate::client::job::{Job, JobError, JobFiles, JobOptions, JobRun, Progress};
use crate::commands::exits::ExitsWith as _;
use crate::config::{Pool, Settings};
use crate::protocol::control::Cancellation;
use crate::shutdown::{Exit, Patience, Phase, Stop, listen};
use crate::telemetry::QUIET;

/// Time between two JSON lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);
/// Time between two looks at the job for the bar.
const BAR_INTERVAL: Duration = Duration::from_millis(125);
/// How long nobody consumes from the queue before that is said, and how often it is said again.
const NOBODY_AFTER: Duration = Duration::from_secs(10);
const NOBODY_INTERVAL: Duration = Duration::from_secs(60);

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
    let files = JobFiles::open(&arguments.input, output, queue).exits_with(Exit::Usage)?;
    let job = files.job(arguments.attempts);
    let report_for = arguments.json.then_some(pool.name.as_str());
    if job.borrow().is_complete() {
        return conclude(&mut job.borrow_mut(), report_for, queue, Ok(()));
    }
    let options = JobOptions {
        queue: queue.to_owned(),
        inputs: arguments.input.clone(),
        rows_per_task: arguments.rows_per_task,
        max_inputs: pool.max_inputs,
        resend: Resend { after: arguments.reply_timeout, attempts: arguments.attempts },
    };
    let ended = runtime.block_on(drive(arguments, &settings, &options, &job));
    let exit = ended.and_then(|ended| conclude(&mut job.borrow_mut(), report_for, queue, ended));
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

/// Runs the job, until it ends or Ctrl-C ends the wait for it. The inner error is why a job ended that had begun.
async fn drive(
    arguments: &Submit,
    settings: &Settings,
    options: &JobOptions,
    job: &RefCell<Job>,
) -> anyhow::Result<anyhow::Result<()>> {
    let stop = Stop::default();
    listen(stop.clone(), Patience::SecondAborts)?;
    let mut run = JobRun::begin(job, &settings.broker, options).await.map_err(with_exit)?;
    writeln!(io::stderr(), "job {}, through {}", job.borrow().id(), options.queue)?;
    let bar = {
        let job = job.borrow();
        progress::bar(job.total().map(|total| total as u64), job.before(), "rows")
    };
    let ended = tokio::select! {
        ended = run.drive(stop.reached(Phase::Returning)) => ended.map_err(with_exit),
        () = left(&stop, arguments.grace) => Ok(()),
        error = show(job, &options.queue, &bar, arguments.json) => Err(error),
    };
    run.close().await;
    bar.finish_and_clear();
    Ok(ended)
}

/// Who has to act on an error of a job; an error of the client tells that itself.
fn with_exit(error: JobError) -> anyhow::Error {
    match error {
        JobError::Client(error) => error.into(),
        JobError::InputChanged(_) => anyhow::Error::new(error).exits_with(Exit::Usage),
        JobError::Withdrawn(_) => anyhow::Error::new(error).exits_with(Exit::Aborted),
        JobError::Input { .. } | JobError::Output(_) => error.into(),
    }
}

/// Returns when the run is not to wait any longer for what is under way.
async fn left(stop: &Stop, grace: Duration) {
    stop.reached(Phase::Returning).await;
    let seconds = grace.as_secs();
    let _ = writeln!(io::stderr(), "waiting {seconds} s at most for the tasks under way; Ctrl-C again ends the wait");
    tokio::select! {
        () = tokio::time::sleep(grace) => {}
        () = stop.reached(Phase::Aborting) => {}
    }
}

/// Shows how the job stands, from time to time. Returns only an error of the output.
async fn show(job: &RefCell<Job>, queue: &str, bar: &ProgressBar, mut json: bool) -> anyhow::Error {
    let (mut told, mut answered) = (Instant::now(), 0);
    let mut consumers = Consumers::default();
    loop {
        tokio::time::sleep(BAR_INTERVAL).await;
        let job = job.borrow();
        let progress = job.progress();
        draw(bar, &progress);
        // A bar says the same at all times.
        if let Some(words) = consumers.news(progress.consumed, Instant::now()).filter(|_| bar.is_hidden()) {
            let _ = writeln!(io::stderr(), "{words} {queue}");
        }
        if json && told.elapsed() >= PROGRESS_INTERVAL {
            let rate = (progress.answered - answered) as f64 / told.elapsed().as_secs_f64();
            (told, answered) = (Instant::now(), progress.answered);
            match is_read(print_progress(&progress, rate)) {
                Ok(still) => json = still,
                Err(error) => return error.into(),
            }
        }
    }
}

/// Decides when it is said that nobody consumes from the queue. Times are passed in.
#[derive(Default)]
struct Consumers {
    /// Since when nobody consumes.
    missing_since: Option<Instant>,
    /// When that was said last.
    said: Option<Instant>,
}

impl Consumers {
    /// What is to be said now of the queue, whose name follows.
    fn news(&mut self, is_consumed: bool, now: Instant) -> Option<&'static str> {
        if is_consumed {
            self.missing_since = None;
            return self.said.take().map(|_| "workers consume again from");
        }
        let since = *self.missing_since.get_or_insert(now);
        let due = self.said.map_or(since + NOBODY_AFTER, |said| said + NOBODY_INTERVAL);
        if now < due {
            return None;
        }
        self.said = Some(now);
        Some("waiting for workers: nobody consumes from")
    }
}

fn draw(bar: &ProgressBar, progress: &Progress<'_>) {
    let mut words = Vec::new();
    if progress.errors > 0 {
        words.push(format!("{} errors", progress.errors));
    }
    if !progress.consumed {
        words.push("no worker consumes".to_owned());
    }
    bar.set_message(words.join(", "));
    bar.set_position(progress.written);
}

/// Prints how the job stands, with its rate since the last line.
fn print_progress(progress: &Progress<'_>, rate: f64) -> io::Result<()> {
    let mut line = serde_json::to_value(progress)?;
    if let Some(line) = line.as_object_mut() {
        line.insert("rows_per_second".to_owned(), ((rate * 10.0).round() / 10.0).into());
    }
    writeln!(io::stdout(), "{line}")
}

/// Prints what was done, and what is missing; with a pool's name, also a report.
///
/// # Errors
/// Why the run ended before its rows were answered.
fn conclude(
    job: &mut Job,
    report_for: Option<&str>,
    queue: &str,
    ended: anyhow::Result<()>,
) -> anyhow::Result<Exit> {
    let ended = ended.and(job.sync().map_err(with_exit));
    if let Some(pool) = report_for {
        let report = serde_json::to_value(job.report(pool))?;
        let mut line = serde_json::to_value(job.progress())?;
        if let (Some(line), Json::Object(report)) = (line.as_object_mut(), report) {
            line.extend(report);
        }
        is_read(writeln!(io::stdout(), "{line}"))?;
    }
    let Progress { written, in_flight, .. } = job.progress();
    let (before, errors) = (job.before(), job.errors());
    let of = job.total().map_or(String::new(), |total| format!(" of {total}"));
    let (now, total) = (written - before, errors.total());
    let mut told = format!("{now}{of} rows answered now, {before} before; {total} with an error\n");
    told += &batch_errors::told(errors);
    let is_complete = job.is_complete();
    if !is_complete && ended.is_ok() {
        let _ = writeln!(told, "stopped behind row {written}{of}; the same command goes on from there");
        if in_flight > 0 {
            let id = job.id();
            let withdraws = format!("`sconce submit --cancel {id}` withdraws them");
            let _ = writeln!(told, "{in_flight} tasks are left in {queue}; {withdraws}");
        }
    }
    // A closed stderr changes no exit code.
    let _ = io::stderr().write_all(told.as_bytes());
    ended?;
    Ok(if is_complete { batch_errors::exit_of(job.errors()) } else { Exit::Aborted })
}

/// Withdraws a job.
async fn cancel(settings: &Settings, job: &str) -> anyhow::Result<Exit> {
    let of_job = Cancellation { job: Some(job.to_owned()), ..Cancellation::default() };
    let launchers = tell_all(settings, of_job).await?;
    let words = "for an hour, their workers answer tasks of job";
    writeln!(io::stdout(), "told {launchers} launchers: {words} {job} with 499")?;
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_after_ten_seconds_and_then_each_minute_that_nobody_consumes() {
        let (mut consumers, start) = (Consumers::default(), Instant::now());
        let mut said = Vec::new();
        let mut look = |second: u64, is_consumed| {
            if let Some(words) = consumers.news(is_consumed, start + Duration::from_secs(second)) {
                said.push((second, words));
            }
        };
        (0..135).for_each(|second| look(second, false));
        look(135, true);
        look(136, true);
        (137..146).for_each(|second| look(second, false));
        look(146, true);
        let waiting = "waiting for workers: nobody consumes from";
        let expected = [(10, waiting), (70, waiting), (130, waiting), (135, "workers consume again from")];
        assert_eq!(said, expected);
    }
}
