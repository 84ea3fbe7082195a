//! Publishes a load and takes its replies. Decides when the next task is published: when a reply has made room,
//! or when it is due. Owns the clock of a run; the tally interprets replies.

use std::time::Duration;

use futures_util::{Stream, stream};
use indicatif::ProgressBar;
use tokio::time::Instant;

use super::load::{Arrivals, Bodies};
use super::report::Measured;
use super::tally::Tally;
use crate::client::answer::Answer;
use crate::client::{Bounds, Client, ClientError, Request, Sink, Task};
use crate::protocol::Message;

/// A task expires after waiting in its queue for this many time-outs.
const KEPT: u32 = 10;

#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) warmup: usize,
    pub(super) tasks: usize,
    /// Tasks after the measured ones, which keep the loop full.
    pub(super) behind: usize,
}

impl Plan {
    pub(super) fn total(self) -> usize {
        self.warmup + self.tasks + self.behind
    }
}

/// When the next task is published.
pub(super) enum Pace {
    /// When fewer than this many are under way.
    Closed(usize),
    /// When it is due.
    Open(Arrivals),
}

/// When a task was due, and its inputs.
type Due = (Duration, usize);

/// Publishes all tasks and waits for all replies. If a reply does not come in time, returns the error together
/// with the measurements until then.
///
/// # Errors
/// The broker refuses a task, or is lost.
pub(super) async fn drive(
    client: &mut Client,
    plan: Plan,
    bodies: Bodies,
    pace: Pace,
    timeout: Duration,
    bar: &ProgressBar,
) -> anyhow::Result<(Measured, Option<anyhow::Error>)> {
    let start = Instant::now();
    let (under_way, arrivals) = match pace {
        Pace::Closed(in_flight) => (in_flight, None),
        Pace::Open(arrivals) => (usize::MAX, Some(arrivals)),
    };
    let tasks = tasks(bodies.take(plan.total()), arrivals, start, timeout);
    let bounds = Bounds { under_way, timeout: Some(timeout), in_order: false, resend: None };
    let mut counts = Counts { tally: Tally::new(plan.warmup, plan.tasks), start, bar };
    let unanswered = match client.run(0, tasks, &bounds, &mut counts).await {
        Ok(()) => None,
        Err(error @ ClientError::NoReply { .. }) => Some(error.into()),
        Err(error) => return Err(error.into()),
    };
    Ok((counts.tally.measured(), unanswered))
}

/// Yields each task when it may be published; a task without a due time at once.
fn tasks(
    bodies: impl Iterator<Item = super::load::Work>,
    arrivals: Option<Arrivals>,
    start: Instant,
    timeout: Duration,
) -> impl Stream<Item = Result<Task<Due>, ClientError>> {
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
        let request = Request::new(format!("{run}/{number}"), work.url.as_deref(), work.body);
        // Expires, because nobody else wants it: if this run ends early, it does not stay in the queue.
        let request = Request { expires: Some(KEPT * timeout), ..request };
        let task = Task { meta: (due, work.inputs), request: Some(request) };
        Some((Ok(task), (bodies, arrivals)))
    })
}

/// Passes events to the tally, with times from the start.
struct Counts<'a> {
    tally: Tally,
    start: Instant,
    bar: &'a ProgressBar,
}

impl Sink<Due, ClientError> for Counts<'_> {
    fn begun(&mut self, _: u64, (due, inputs): &Due) {
        self.tally.published(*due, *inputs);
    }

    fn confirmed(&mut self, number: u64) {
        self.tally.confirmed(number as usize, self.start.elapsed());
    }

    fn answered(
        &mut self,
        number: u64,
        _: Due,
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
