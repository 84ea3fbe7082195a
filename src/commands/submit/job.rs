//! The state of a job: which rows are under way, answered, and written. Decides what becomes of a reply. Owns the
//! output.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, Write as _};
use std::task::{Context, Poll};

use anyhow::{Context as _, anyhow};
use futures_util::{Stream, stream};
use indicatif::ProgressBar;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::ordered::{MOST_WAITING, Ordered};
use super::read::Unit;
use super::rows::{Packed, failed_line, line_of, shared_lines};
use crate::cli::Submit;
use crate::client::answer::Answer;
use crate::client::tally::Tally;
use crate::client::{self, Request, Task};
use crate::commands::exits::ExitsWith as _;
use crate::commands::progress;
use crate::protocol::Message;
use crate::shutdown::Exit;

/// The `status_code` of a task that was withdrawn.
const CANCELLED: i64 = 499;

/// A job. Changed by the client's run, read by the reports of progress.
pub(super) struct Job {
    id: String,
    ordered: Ordered,
    /// Rows that earlier runs answered.
    before: u64,
    total: Option<usize>,
    attempts: u32,
    json: bool,
    /// Rows whose task failed because of one of them, each to be asked alone. Bound: the rows under way.
    apart: VecDeque<Packed>,
    /// Why the broker will never take a task, by the task's number; until it is answered.
    refused: HashMap<u64, String>,
    /// What ended the input before its time. Told when all that was read is answered.
    input_failed: Option<anyhow::Error>,
    /// All rows were read.
    is_exhausted: bool,
    /// Tasks under way that may still be taken apart.
    shared: usize,
    published: u64,
    under_way: u64,
    resent: u64,
    duplicates: u64,
    errors: u64,
    is_consumed: bool,
    tally: Tally,
    bar: ProgressBar,
    /// When progress was told last, and the rows answered by then.
    told: (Instant, u64),
    answered: u64,
}

/// How a job stands: a line of `--json`.
#[derive(Serialize)]
struct Progress<'a> {
    job: &'a str,
    /// Rows published by this run.
    published: u64,
    /// Rows answered in this run, those that wait for an earlier one included.
    answered: u64,
    /// Answered rows that hold an error.
    errors: u64,
    /// Tasks without a reply.
    in_flight: u64,
    /// Rows in the output, those of earlier runs included.
    written: u64,
    /// Tasks published again.
    resent: u64,
    /// Replies that came a second time.
    duplicates: u64,
    /// Since the last line.
    rows_per_second: f64,
    /// Whether any worker consumes from the queue.
    consumed: bool,
    /// Tasks that each worker has answered.
    tasks_by_worker: BTreeMap<String, u64>,
}

impl Job {
    pub(super) fn new(ordered: Ordered, total: Option<usize>, arguments: &Submit) -> RefCell<Self> {
        let id = uuid::Uuid::new_v4().simple().to_string()[..12].to_owned();
        let before = ordered.written();
        RefCell::new(Self {
            id,
            before,
            ordered,
            total,
            attempts: arguments.attempts,
            json: arguments.json,
            apart: VecDeque::new(),
            refused: HashMap::new(),
            input_failed: None,
            is_exhausted: total.is_some_and(|total| total as u64 == before),
            shared: 0,
            published: 0,
            under_way: 0,
            resent: 0,
            duplicates: 0,
            errors: 0,
            is_consumed: true,
            tally: Tally::default(),
            bar: progress::bar(total.map(|total| total as u64), before, "rows"),
            told: (Instant::now(), 0),
            answered: 0,
        })
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// The next task to publish; `Ready(None)`: there will be no more. A pending one is asked for again after each
    /// event of the client.
    fn next(
        &mut self,
        units: &mut mpsc::Receiver<anyhow::Result<Unit>>,
        context: &mut Context<'_>,
    ) -> Poll<Option<anyhow::Result<Unit>>> {
        if let Some(packed) = self.apart.pop_front() {
            return Poll::Ready(Some(Ok(Unit::Task(packed))));
        }
        if self.ordered.waiting() >= MOST_WAITING {
            return Poll::Pending;
        }
        if self.input_failed.is_some() {
            let is_answered = self.under_way == 0;
            return if is_answered { Poll::Ready(self.input_failed.take().map(Err)) } else { Poll::Pending };
        }
        match units.poll_recv(context) {
            Poll::Ready(Some(Err(error))) => {
                self.input_failed = Some(error);
                self.next(units, context)
            }
            Poll::Ready(None) if self.shared > 0 => Poll::Pending,
            Poll::Ready(None) => {
                self.is_exhausted = true;
                Poll::Ready(None)
            }
            Poll::Ready(Some(Ok(Unit::Task(packed)))) => {
                self.published += packed.rows.len() as u64;
                self.shared += usize::from(packed.rows.len() > 1);
                Poll::Ready(Some(Ok(Unit::Task(packed))))
            }
            Poll::Ready(Some(Ok(invalid))) => Poll::Ready(Some(Ok(invalid))),
            Poll::Pending => Poll::Pending,
        }
    }

    /// Each row of a task gets an error line.
    fn fail(&mut self, packed: &Packed, code: &'static str, problem: &str) -> anyhow::Result<()> {
        self.errors += packed.rows.len() as u64;
        self.tally.count_unasked(packed.rows.len() as u64);
        self.show();
        let mut rows = packed.rows.iter();
        rows.try_for_each(|row| self.put(row.number, failed_line(row, code, problem.to_owned())))
    }

    fn put(&mut self, number: u64, line: Vec<u8>) -> anyhow::Result<()> {
        self.ordered.put(number, line).context("the output")?;
        self.answered += 1;
        self.bar.set_position(self.ordered.written());
        Ok(())
    }

    /// A task has its reply, or was given up.
    fn answer(&mut self, number: u64, packed: Packed, reply: Option<Message>) -> anyhow::Result<()> {
        self.under_way -= 1;
        let is_shared = packed.rows.len() > 1;
        self.shared -= usize::from(is_shared);
        let refused = self.refused.remove(&number);
        let Some(reply) = reply else {
            return match refused {
                Some(_) if is_shared => {
                    self.apart.extend(packed.apart());
                    Ok(())
                }
                Some(words) => {
                    self.fail(&packed, "refused", &format!("the broker refuses the task: {words}"))
                }
                None => {
                    let problem = format!("no reply, though it was published {} times", self.attempts);
                    self.fail(&packed, "no_reply", &problem)
                }
            };
        };
        let status =
            reply.properties.headers.get("status_code").and_then(|code| code.as_i64()).unwrap_or(500);
        if status == CANCELLED {
            let words = "was withdrawn, or one of its tasks cancelled; the same command goes on from there";
            let error = anyhow!("job {} {words}", self.id);
            return Err(error.exits_with(Exit::Aborted));
        }
        if status != 200 && is_shared {
            // One row must not spoil the others.
            self.apart.extend(packed.apart());
            return Ok(());
        }
        let lines = match &packed.rows[..] {
            [row] => vec![line_of(row, status as u16, &reply)],
            rows => match shared_lines(rows, status as u16, &reply) {
                Ok(lines) => lines,
                // A model that answers otherwise cannot be asked for several rows at once.
                Err(_) => {
                    self.apart.extend(packed.apart());
                    return Ok(());
                }
            },
        };
        if status != 200 {
            self.errors += 1;
            self.show();
        }
        let inputs = packed.rows.iter().map(|row| row.inputs).sum();
        self.tally.count(packed.rows.len() as u64, inputs, &Answer::of(&reply));
        packed.rows.iter().zip(lines).try_for_each(|(row, line)| self.put(row.number, line))
    }

    /// Shows what the bar does not count.
    fn show(&self) {
        let mut words = Vec::new();
        if self.errors > 0 {
            words.push(format!("{} errors", self.errors));
        }
        if !self.is_consumed {
            words.push("no worker consumes".to_owned());
        }
        self.bar.set_message(words.join(", "));
    }

    /// Prints how the job stands.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(super) fn print_progress(&mut self) -> anyhow::Result<()> {
        let (at, answered) = std::mem::replace(&mut self.told, (Instant::now(), self.answered));
        let seconds = at.elapsed().as_secs_f64().max(1e-3);
        let progress = self.progress((self.answered - answered) as f64 / seconds);
        Ok(writeln!(io::stdout(), "{}", serde_json::to_string(&progress)?)?)
    }

    fn progress(&self, rate: f64) -> Progress<'_> {
        Progress {
            job: &self.id,
            published: self.published,
            answered: self.answered,
            errors: self.errors,
            in_flight: self.under_way,
            written: self.ordered.written(),
            resent: self.resent,
            duplicates: self.duplicates,
            rows_per_second: (rate * 10.0).round() / 10.0,
            consumed: self.is_consumed,
            tasks_by_worker: self.tally.by_worker(),
        }
    }

    /// Ends the job after its run: prints what was done, and what is missing.
    ///
    /// # Errors
    /// Why the run ended before its rows were answered.
    pub(super) fn conclude(
        &mut self,
        pool: &str,
        queue: &str,
        ended: anyhow::Result<()>,
    ) -> anyhow::Result<Exit> {
        self.bar.finish_and_clear();
        let written = self.ordered.written();
        let ended = ended.and(self.ordered.sync().context("the output"));
        if self.json {
            let report = serde_json::to_value(self.tally.report(pool, self.errors))?;
            let mut line = serde_json::to_value(self.progress(0.0))?;
            if let (Some(line), serde_json::Value::Object(report)) = (line.as_object_mut(), report) {
                line.remove("rows_per_second");
                line.extend(report);
            }
            writeln!(io::stdout(), "{line}")?;
        }
        let mut says = io::stderr();
        let now = written - self.before;
        let of = self.total.map_or(String::new(), |total| format!(" of {total}"));
        let (errors, before) = (self.errors, self.before);
        writeln!(says, "{now}{of} rows answered now, {before} before; {errors} with an error")?;
        ended?;
        let is_answered = self.under_way == 0 && self.apart.is_empty() && self.ordered.waiting() == 0;
        if self.is_exhausted && is_answered {
            return Ok(Exit::Done);
        }
        writeln!(says, "stopped behind row {written}{of}; the same command goes on from there")?;
        if self.under_way > 0 {
            let (under_way, id) = (self.under_way, &self.id);
            writeln!(
                says,
                "{under_way} tasks are left in {queue}; `sconce submit --cancel {id}` withdraws them"
            )?;
        }
        Ok(Exit::Aborted)
    }
}

/// The tasks of a job.
pub(super) fn tasks<'a>(
    job: &'a RefCell<Job>,
    units: &'a mut mpsc::Receiver<anyhow::Result<Unit>>,
) -> impl Stream<Item = anyhow::Result<Task<Unit>>> + 'a {
    let task = |unit: Unit| match &unit {
        Unit::Task(Packed { url, body, .. }) => {
            let id = uuid::Uuid::new_v4().to_string();
            let request = Request::new(id, Some(url), body.clone());
            Task { meta: unit, request: Some(request) }
        }
        Unit::Invalid { .. } => Task { meta: unit, request: None },
    };
    stream::poll_fn(move |context| {
        job.borrow_mut().next(units, context).map(|unit| unit.map(|unit| unit.map(task)))
    })
}

/// Where the client tells what happens.
pub(super) struct Sink<'a>(pub(super) &'a RefCell<Job>);

impl client::Sink<Unit, anyhow::Error> for Sink<'_> {
    fn begun(&mut self, _: u64, unit: &Unit) {
        if let Unit::Task(_) = unit {
            self.0.borrow_mut().under_way += 1;
        }
    }

    fn refused(&mut self, number: u64, words: String) {
        self.0.borrow_mut().refused.insert(number, words);
    }

    fn answered(&mut self, task: u64, unit: Unit, reply: Option<Message>, _: Instant) -> anyhow::Result<()> {
        let mut job = self.0.borrow_mut();
        match unit {
            Unit::Task(packed) => job.answer(task, packed, reply),
            Unit::Invalid { number, line } => {
                job.errors += 1;
                job.tally.count_unasked(1);
                job.show();
                job.put(number, line)
            }
        }
    }

    fn duplicates(&mut self, count: usize) {
        self.0.borrow_mut().duplicates += count as u64;
    }

    fn resent(&mut self, count: usize) {
        self.0.borrow_mut().resent += count as u64;
    }

    fn consumed(&mut self, is_consumed: bool) {
        let mut job = self.0.borrow_mut();
        if job.is_consumed != is_consumed {
            job.is_consumed = is_consumed;
            job.show();
        }
    }
}
