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
pub struct Withdrawn(Arc<List>);

#[derive(Debug, Default)]
struct List {
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
        if let Some(job) = &cancellation.job {
            self.add(job_queue(job), now);
        }
        if let Some(stop) = &cancellation.stop {
            self.add_stop(stop.clone(), now);
        }
    }

    /// Withdraws the tasks whose replies go to this queue.
    pub fn add(&self, reply_queue: String, now: Instant) {
        self.remember(Unwanted::Job(reply_queue), now);
    }

    /// Withdraws the sentinels of this run of `sconce stop`.
    pub fn add_stop(&self, stop: String, now: Instant) {
        self.remember(Unwanted::Stop(stop), now);
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

    fn remember(&self, unwanted: Unwanted, now: Instant) {
        let mut entries = self.0.entries.lock();
        if entries.len() == MAX_WITHDRAWN {
            entries.pop_front();
        }
        entries.push_back((unwanted, now));
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
        withdrawn.add("one".to_owned(), now);
        assert!(withdrawn.has(Some("one"), now + WITHDRAWN_FOR));
        assert!(!withdrawn.has(Some("two"), now) && !withdrawn.has(None, now));
        assert!(!withdrawn.has(Some("one"), now + WITHDRAWN_FOR + Duration::from_secs(1)));
        (0..=MAX_WITHDRAWN).for_each(|job| withdrawn.add(job.to_string(), now));
        assert!(!withdrawn.has(Some("0"), now) && withdrawn.has(Some("1"), now));
        assert_eq!(withdrawn.0.entries.lock().len(), MAX_WITHDRAWN);
        withdrawn.add_stop("two".to_owned(), now);
        assert!(
            withdrawn.has_stop("two", now)
                && !withdrawn.has_stop("1", now)
                && !withdrawn.has(Some("two"), now)
        );
    }
}
