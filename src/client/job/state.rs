//! The state of a job: which rows are under way, answered, and written. Decides what follows from a reply. Owns the
//! output.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::task::{Context, Poll};

use futures_util::{Stream, stream};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::JobError;
use super::ordered::{MAX_WAITING, Ordered};
use super::read::Unit;
use super::rows::{PackedTask, failed_line, line_of, shared_lines};
use crate::client::answer::Answer;
use crate::client::batch_file::{CommonFields, ErrorCounts, Results, ResumePoint, Rows};
use crate::client::tally::{RunReport, Tally};
use crate::client::{self, ClientTask, TaskMessage};
use crate::protocol::Message;
use crate::protocol::control::new_run_id;

/// The `status_code` of a task that was withdrawn.
const CANCELLED: i64 = 499;

/// A job. The client's run changes it, and the report of its progress reads it.
pub(crate) struct Job {
    id: String,
    ordered: Ordered,
    fields: CommonFields,
    /// The rows that are left; none once their reading has begun, and if the input can be read only once.
    rows: Option<Box<dyn Rows>>,
    /// Number of rows that earlier runs answered.
    answered_before: u64,
    /// The number of rows; none if the input can be read only once.
    total: Option<usize>,
    attempts: u32,
    /// Tasks of one row each, split from shared tasks that failed. Bound: the rows under way.
    split: VecDeque<PackedTask>,
    /// Why the broker will never take a task, by the task's number; until it is answered.
    refused: HashMap<u64, String>,
    /// The error that ended the input early. It ends the run once all rows read before are answered.
    input_failed: Option<JobError>,
    /// Whether all rows were read.
    is_exhausted: bool,
    /// Number of tasks that several rows share, and that may still be split.
    shared_tasks: usize,
    counts: Counts,
    /// The errors of the output, those of earlier runs included.
    output_errors: ErrorCounts,
    tally: Tally,
}

/// What a run of a job has done.
#[derive(Default, Serialize)]
pub(crate) struct Counts {
    /// Rows published by this run.
    pub(crate) published: u64,
    /// Rows answered in this run, including those whose line waits for an earlier one.
    pub(crate) answered: u64,
    /// Answered rows that hold an error.
    pub(crate) errors: u64,
    /// Tasks that are published, and neither answered nor given up yet.
    pub(crate) in_flight: u64,
    /// Tasks published again.
    pub(crate) resent: u64,
    /// Duplicate replies.
    pub(crate) duplicates: u64,
    /// Whether any worker consumes from the queue.
    pub(crate) consumed: bool,
}

/// The progress of a job.
#[derive(Serialize)]
pub(crate) struct Progress<'a> {
    pub(crate) job: &'a str,
    #[serde(flatten)]
    pub(crate) counts: &'a Counts,
    /// Rows in the output, those of earlier runs included.
    pub(crate) written: u64,
    /// Tasks that each worker has answered.
    pub(crate) tasks_by_worker: BTreeMap<String, u64>,
}

impl Job {
    /// A job whose rows are answered in `output`, and have these fields in common. Without `left`, the input can be read
    /// only once. A task without a reply is published `attempts` times in all.
    pub(super) fn new(
        output: Ordered,
        fields: CommonFields,
        left: Option<(ResumePoint, Box<dyn Rows>)>,
        attempts: u32,
    ) -> Self {
        let id = new_run_id();
        let answered_before = output.written();
        let (point, rows) = left.unzip();
        let total = point.as_ref().map(|point| point.total);
        let output_errors = point.map(|point| point.errors).unwrap_or_default();
        Self {
            id,
            answered_before,
            ordered: output,
            fields,
            rows,
            total,
            attempts,
            split: VecDeque::new(),
            refused: HashMap::new(),
            input_failed: None,
            is_exhausted: total.is_some_and(|total| total as u64 == answered_before),
            shared_tasks: 0,
            counts: Counts { consumed: true, ..Counts::default() },
            output_errors,
            tally: Tally::default(),
        }
    }

    /// The rows that are left; none where the input is read from its start, once.
    pub(super) fn take_rows(&mut self) -> Option<Box<dyn Rows>> {
        self.rows.take()
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// The number of rows, where it is known.
    pub(crate) fn total(&self) -> Option<usize> {
        self.total
    }

    /// Number of rows that earlier runs answered.
    pub(crate) fn answered_before(&self) -> u64 {
        self.answered_before
    }

    /// The errors of the output, those of earlier runs included.
    pub(crate) fn output_errors(&self) -> &ErrorCounts {
        &self.output_errors
    }

    /// Whether every row is answered in the output.
    pub(crate) fn is_complete(&self) -> bool {
        let is_answered = self.counts.in_flight == 0 && self.split.is_empty() && self.ordered.waiting() == 0;
        // A run that was stopped may have read and answered the last row without having seen the input's end.
        let all_written = self.total.is_some_and(|total| total as u64 == self.ordered.written());
        (self.is_exhausted || all_written) && is_answered
    }

    /// The next task to publish; `Ready(None)`: there will be no more. After `Pending`, the client polls again after
    /// each of its events.
    fn next(
        &mut self,
        units: &mut mpsc::Receiver<Result<Unit, JobError>>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Unit, JobError>>> {
        if let Some(packed) = self.split.pop_front() {
            return Poll::Ready(Some(Ok(Unit::Task(packed))));
        }
        if self.ordered.waiting() >= MAX_WAITING {
            return Poll::Pending;
        }
        if self.input_failed.is_some() {
            let is_answered = self.counts.in_flight == 0;
            return if is_answered { Poll::Ready(self.input_failed.take().map(Err)) } else { Poll::Pending };
        }
        match units.poll_recv(context) {
            Poll::Ready(Some(Err(error))) => {
                self.input_failed = Some(error);
                self.next(units, context)
            }
            Poll::Ready(None) if self.shared_tasks > 0 => Poll::Pending,
            Poll::Ready(None) => {
                self.is_exhausted = true;
                Poll::Ready(None)
            }
            Poll::Ready(Some(Ok(Unit::Task(packed)))) => {
                self.counts.published += packed.rows.len() as u64;
                self.shared_tasks += usize::from(packed.rows.len() > 1);
                Poll::Ready(Some(Ok(Unit::Task(packed))))
            }
            Poll::Ready(Some(Ok(invalid))) => Poll::Ready(Some(Ok(invalid))),
            Poll::Pending => Poll::Pending,
        }
    }

    /// Writes an error line for each row of a task.
    fn fail(&mut self, packed: &PackedTask, code: &'static str, problem: &str) -> Result<(), JobError> {
        self.tally.count_without_reply(packed.rows.len() as u64);
        let mut rows = packed.rows.iter();
        rows.try_for_each(|row| self.put_error(row.number, failed_line(row, code, problem.to_owned())))
    }

    /// Takes the output line of the row with this number, which holds an error.
    fn put_error(&mut self, number: u64, line: Vec<u8>) -> Result<(), JobError> {
        self.counts.errors += 1;
        self.output_errors.add_line(&line);
        self.put(number, line)
    }

    /// Takes the output line of the row with this number.
    fn put(&mut self, number: u64, line: Vec<u8>) -> Result<(), JobError> {
        for error in self.ordered.put(number, line).map_err(JobError::Output)? {
            self.counts.errors += 1;
            self.output_errors.add(error);
        }
        self.counts.answered += 1;
        Ok(())
    }

    /// Handles the reply to the task with this number. None: the broker refused the task, or it was given up.
    fn handle(&mut self, number: u64, packed: PackedTask, reply: Option<Message>) -> Result<(), JobError> {
        self.counts.in_flight -= 1;
        let is_shared = packed.rows.len() > 1;
        self.shared_tasks -= usize::from(is_shared);
        let refused = self.refused.remove(&number);
        let Some(reply) = reply else {
            return match refused {
                Some(_) if is_shared => {
                    self.split.extend(packed.split());
                    Ok(())
                }
                Some(reason) => {
                    self.fail(&packed, "refused", &format!("the broker refuses the task: {reason}"))
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
            return Err(JobError::Withdrawn(self.id.clone()));
        }
        if let Some(problem) = self.fields.refusal_in(status, &reply) {
            return Err(JobError::Refused(problem));
        }
        if status != 200 && is_shared {
            // One row must not make the others fail.
            self.split.extend(packed.split());
            return Ok(());
        }
        let lines = match &packed.rows[..] {
            [row] => vec![line_of(row, status as u16, &reply)],
            rows => match shared_lines(rows, status as u16, &reply) {
                Some(lines) => lines,
                // The model's replies cannot be divided, so each row needs a task of its own.
                None => {
                    self.split.extend(packed.split());
                    return Ok(());
                }
            },
        };
        let inputs = packed.rows.iter().map(|row| row.share.inputs).sum();
        self.tally.count(packed.rows.len() as u64, inputs, &Answer::of(&reply));
        packed.rows.iter().zip(lines).try_for_each(|(row, line)| match status {
            200 => self.put(row.number, line),
            _ => self.put_error(row.number, line),
        })
    }

    /// The progress now.
    pub(crate) fn progress(&self) -> Progress<'_> {
        Progress {
            job: &self.id,
            counts: &self.counts,
            written: self.ordered.written(),
            tasks_by_worker: self.tally.by_worker(),
        }
    }

    /// What this run has measured, for a pool of this name.
    pub(crate) fn report(&mut self, pool: &str) -> RunReport {
        self.tally.report(pool, self.counts.errors, &self.output_errors)
    }

    /// The texts that were cut in this run.
    pub(crate) fn truncated(&self) -> u64 {
        self.tally.truncated()
    }

    /// The output.
    pub(crate) fn results(&self) -> &Results {
        &self.ordered.results
    }

    /// Flushes the output to the disk.
    ///
    /// # Errors
    /// The output cannot be written.
    pub(crate) fn sync(&mut self) -> Result<(), JobError> {
        self.ordered.results.sync(self.is_complete()).map_err(JobError::Output)
    }
}

/// The tasks of a job.
pub(super) fn tasks<'a>(
    job: &'a RefCell<Job>,
    units: &'a mut mpsc::Receiver<Result<Unit, JobError>>,
) -> impl Stream<Item = Result<ClientTask<Unit>, JobError>> + 'a {
    let task = |unit: Unit| match &unit {
        Unit::Task(PackedTask { url, body, .. }) => {
            let id = uuid::Uuid::new_v4().to_string();
            let message = TaskMessage::new(id, Some(url), body.clone());
            ClientTask { meta: unit, message: Some(message) }
        }
        Unit::Invalid { .. } => ClientTask { meta: unit, message: None },
    };
    stream::poll_fn(move |context| {
        job.borrow_mut().next(units, context).map(|unit| unit.map(|unit| unit.map(task)))
    })
}

/// Receives the client's events.
pub(super) struct Sink<'a>(pub(super) &'a RefCell<Job>);

impl client::Sink<Unit, JobError> for Sink<'_> {
    fn begun(&mut self, _: u64, unit: &Unit) {
        if let Unit::Task(_) = unit {
            self.0.borrow_mut().counts.in_flight += 1;
        }
    }

    fn refused(&mut self, number: u64, reason: String) {
        self.0.borrow_mut().refused.insert(number, reason);
    }

    fn answered(
        &mut self,
        task: u64,
        unit: Unit,
        reply: Option<Message>,
        _: Instant,
    ) -> Result<(), JobError> {
        let mut job = self.0.borrow_mut();
        match unit {
            Unit::Task(packed) => job.handle(task, packed, reply),
            Unit::Invalid { number, line } => {
                job.tally.count_without_reply(1);
                job.put_error(number, line)
            }
        }
    }

    fn withdrawn(&mut self) -> Result<(), JobError> {
        Err(JobError::Withdrawn(self.0.borrow().id.clone()))
    }

    fn duplicates(&mut self, count: usize) {
        self.0.borrow_mut().counts.duplicates += count as u64;
    }

    fn resent(&mut self, count: usize) {
        self.0.borrow_mut().counts.resent += count as u64;
    }

    fn consumed(&mut self, is_consumed: bool) {
        self.0.borrow_mut().counts.consumed = is_consumed;
    }
}
