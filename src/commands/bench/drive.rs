//! Publishes a load and receives its replies. Decides when the next task is published: after a reply (closed loop), or
//! when the task is due (open loop). Owns the clock of a run; the tally interprets replies.

use std::time::Duration;

use futures_util::{Stream, stream};
use indicatif::ProgressBar;
use tokio::time::Instant;

use super::load::{Arrivals, Bodies};
use super::report::Measured;
use super::tally::Tally;
use crate::client::answer::Answer;
use crate::client::{Bounds, Client, ClientError, ClientTask, Sink, TaskMessage};
use crate::protocol::Message;

/// A task expires after it has waited in its queue for this multiple of `--timeout`.
const EXPIRY_TIMEOUTS: u32 = 10;

/// How many tasks a run publishes, in this order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) warmup: usize,
    pub(super) tasks: usize,
    /// Tasks after the measured ones, which keep a closed loop full until the last measured reply.
    pub(super) trailing: usize,
}

impl Plan {
    pub(super) fn total(self) -> usize {
        self.warmup + self.tasks + self.trailing
    }
}

/// When the next task is published.
pub(super) enum Pace {
    /// When fewer than this number are under way.
    Closed(usize),
    /// When it is due.
    Open(Arrivals),
}

/// The data of a task that the tally needs.
struct TaskData {
    /// When the task was due, since the start.
    due: Duration,
    inputs: usize,
}

/// Publishes all tasks and waits for all replies. If a reply does not arrive in time, returns that error together with
/// the measurements until then.
///
/// # Errors
/// The broker refuses a task, or the connection is lost.
pub(super) async fn drive(
    client: &mut Client,
    plan: Plan,
    bodies: Bodies,
    pace: Pace,
    timeout: Duration,
    bar: &ProgressBar,
) -> anyhow::Result<(Measured, Option<anyhow::Error>)> {
    let start = Instant::now();
    let (max_tasks, arrivals) = match pace {
        Pace::Closed(in_flight) => (in_flight, None),
        Pace::Open(arrivals) => (usize::MAX, Some(arrivals)),
    };
    let tasks = tasks(bodies.take(plan.total()), arrivals, start, timeout);
    let bounds = Bounds { max_tasks, timeout: Some(timeout), in_order: false, resend: None };
    let mut sink = TallySink { tally: Tally::new(plan.warmup, plan.tasks), start, bar };
    let unanswered = match client.run(0, tasks, &bounds, &mut sink).await {
        Ok(()) => None,
        Err(error @ ClientError::NoReply { .. }) => Some(error.into()),
        Err(error) => return Err(error.into()),
    };
    Ok((sink.tally.measured(), unanswered))
}

/// Yields each task when it is due. Without `arrivals`, a task is due at once.
fn tasks(
    bodies: impl Iterator<Item = super::load::Work>,
    arrivals: Option<Arrivals>,
    start: Instant,
    timeout: Duration,
) -> impl Stream<Item = Result<ClientTask<TaskData>, ClientError>> {
    let run = uuid::Uuid::new_v4();
    stream::unfold((bodies.enumerate(), arrivals), move |(mut bodies, mut arrivals)| async move {
        let (number, work) = bodies.next()?;
        let due = match &mut arrivals {
            None => start.elapsed(),
            Some(arrivals) => {
                let due = arrivals.next();
                tokio::time::sleep_until(start + due).await;
                due
            }
        };
        let message = TaskMessage::new(format!("{run}/{number}"), work.url.as_deref(), work.body);
        // The task expires, so that it does not stay in the queue if this run ends early. Nobody else reads its reply.
        let message = TaskMessage { expires: Some(EXPIRY_TIMEOUTS * timeout), ..message };
        let task = ClientTask { meta: TaskData { due, inputs: work.inputs }, message: Some(message) };
        Some((Ok(task), (bodies, arrivals)))
    })
}

/// Passes events to the tally, with times since the start.
struct TallySink<'a> {
    tally: Tally,
    start: Instant,
    bar: &'a ProgressBar,
}

impl Sink<TaskData, ClientError> for TallySink<'_> {
    fn begun(&mut self, _: u64, task: &TaskData) {
        self.tally.published(task.due, task.inputs);
    }

    fn confirmed(&mut self, number: u64) {
        self.tally.confirmed(number as usize, self.start.elapsed());
    }

    fn answered(
        &mut self,
        number: u64,
        _: TaskData,
        reply: Option<Message>,
        at: Instant,
    ) -> Result<(), ClientError> {
        if let Some(reply) = reply {
            self.tally.reply(number as usize, at - self.start, &Answer::of(&reply));
            self.bar.inc(1);
        }
        Ok(())
    }

    fn duplicates(&mut self, count: usize) {
        self.tally.duplicates(count as u64);
    }
}

#[cfg(test)]
#[path = "drive_tests.rs"]
mod tests;
