//! Remembers which jobs (runs of `sconce submit`) and which runs of `sconce stop` a user has withdrawn. Their messages
//! may arrive from the queue later: tasks of a withdrawn job are answered as cancelled, and sentinels of a withdrawn
//! stop are ignored. Owns the list of both.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::protocol::control::{Cancellation, MAX_WITHDRAWN, WITHDRAWN_FOR, job_queue};

/// What was withdrawn.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Unwanted {
    /// The tasks whose replies go to this queue.
    Job(String),
    /// The sentinels of this run of `sconce stop`.
    Stop(String),
}

/// The jobs and stops that were withdrawn recently. Written by the reader of the launcher's commands, read by the
/// intake for each task and sentinel. Clones share the list.
#[derive(Clone, Debug, Default)]
pub struct Withdrawn(Arc<WithdrawnState>);

#[derive(Debug, Default)]
struct WithdrawnState {
    entries: Mutex<VecDeque<(Unwanted, Instant)>>,
    /// Whether the launcher has yet to send what was withdrawn before the worker started.
    is_incomplete: watch::Sender<bool>,
}

impl Withdrawn {
    /// Marks the list as incomplete until [`Withdrawn::add_earlier`] is called.
    pub fn mark_incomplete(&self) {
        self.0.is_incomplete.send_replace(true);
    }

    /// Adds what was withdrawn before the worker started, and marks the list as complete.
    pub fn add_earlier(&self, cancellations: &[Cancellation], now: Instant) {
        cancellations.iter().for_each(|it| self.add_cancelled(it, now));
        self.0.is_incomplete.send_replace(false);
    }

    /// Returns when the list is complete.
    pub(super) async fn wait_until_complete(&self) {
        // `self` owns the sender, so waiting cannot fail.
        let _ = self.0.is_incomplete.subscribe().wait_for(|is_incomplete| !is_incomplete).await;
    }

    /// Withdraws the job or the stop that is cancelled, if one is.
    pub fn add_cancelled(&self, cancellation: &Cancellation, now: Instant) {
        let job = cancellation.job.as_deref().map(|job| Unwanted::Job(job_queue(job)));
        let stop = cancellation.stop.clone().map(Unwanted::Stop);
        let mut entries = self.0.entries.lock();
        for unwanted in job.into_iter().chain(stop) {
            if entries.len() == MAX_WITHDRAWN {
                entries.pop_front();
            }
            entries.push_back((unwanted, now));
        }
    }

    /// Whether a task with this `reply_to` was withdrawn.
    pub fn has(&self, reply_to: Option<&str>, now: Instant) -> bool {
        reply_to
            .is_some_and(|queue| self.contains(now, |it| matches!(it, Unwanted::Job(job) if job == queue)))
    }

    /// Whether the sentinels of this run of `sconce stop` were withdrawn.
    pub fn has_stop(&self, stop: &str, now: Instant) -> bool {
        self.contains(now, |it| matches!(it, Unwanted::Stop(withdrawn) if withdrawn == stop))
    }

    fn contains(&self, now: Instant, matches_entry: impl Fn(&Unwanted) -> bool) -> bool {
        let mut entries = self.0.entries.lock();
        while entries.front().is_some_and(|(_, since)| now.saturating_duration_since(*since) > WITHDRAWN_FOR)
        {
            entries.pop_front();
        }
        entries.iter().any(|(unwanted, _)| matches_entry(unwanted))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_job_is_remembered_for_an_hour_and_the_list_is_bounded() {
        let (withdrawn, now) = (Withdrawn::default(), Instant::now());
        let add = |job: Option<&str>, stop: Option<&str>| {
            let (job, stop) = (job.map(str::to_owned), stop.map(str::to_owned));
            withdrawn.add_cancelled(&Cancellation { job, stop, ..Cancellation::default() }, now);
        };
        let has = |job: &str, now: Instant| withdrawn.has(Some(&job_queue(job)), now);
        add(Some("one"), None);
        assert!(has("one", now + WITHDRAWN_FOR));
        assert!(!has("two", now) && !withdrawn.has(None, now));
        assert!(!has("one", now + WITHDRAWN_FOR + Duration::from_secs(1)));
        (0..=MAX_WITHDRAWN).for_each(|job| add(Some(&job.to_string()), None));
        assert!(!has("0", now) && has("1", now));
        assert_eq!(withdrawn.0.entries.lock().len(), MAX_WITHDRAWN);
        add(None, Some("two"));
        assert!(withdrawn.has_stop("two", now) && !withdrawn.has_stop("1", now) && !has("two", now));
    }
}
