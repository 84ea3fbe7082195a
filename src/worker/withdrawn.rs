//! Remembers which jobs and which runs of `sconce stop` were withdrawn: their messages come from the queue later than
//! the order. Owns that list.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a job is remembered. Each run of `sconce submit` is another job.
const REMEMBERED: Duration = Duration::from_secs(60 * 60);
/// The most jobs that are remembered; the oldest are forgotten first.
const MOST: usize = 1_000;

/// The jobs that were withdrawn lately. Written by the reader of the launcher's commands, read by the intake for each
/// task.
#[derive(Clone, Debug, Default)]
pub struct Withdrawn(Arc<Mutex<VecDeque<(String, Instant)>>>);

impl Withdrawn {
    /// The tasks whose replies go to this queue are not wanted any more.
    pub fn add(&self, reply_queue: String, now: Instant) {
        let mut jobs = self.lock();
        if jobs.len() == MOST {
            jobs.pop_front();
        }
        jobs.push_back((reply_queue, now));
    }

    /// The sentinels of this run of `sconce stop` are not wanted any more.
    pub fn add_stop(&self, stop: &str, now: Instant) {
        self.add(of_stop(stop), now);
    }

    /// Whether the sentinels of this run of `sconce stop` were withdrawn.
    pub fn has_stop(&self, stop: &str, now: Instant) -> bool {
        self.has(Some(&of_stop(stop)), now)
    }

    /// Whether a task with this `reply_to` was withdrawn.
    pub fn has(&self, reply_to: Option<&str>, now: Instant) -> bool {
        let mut jobs = self.lock();
        while jobs.front().is_some_and(|(_, since)| now.saturating_duration_since(*since) > REMEMBERED) {
            jobs.pop_front();
        }
        reply_to.is_some_and(|queue| jobs.iter().any(|(withdrawn, _)| withdrawn == queue))
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(String, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Not the name of a queue: those have at most 255 bytes.
fn of_stop(stop: &str) -> String {
    format!("{:256}{stop}", "stop")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_remembered_for_an_hour_and_the_list_is_bounded() {
        let (withdrawn, now) = (Withdrawn::default(), Instant::now());
        withdrawn.add("one".to_owned(), now);
        assert!(withdrawn.has(Some("one"), now + REMEMBERED));
        assert!(!withdrawn.has(Some("two"), now) && !withdrawn.has(None, now));
        assert!(!withdrawn.has(Some("one"), now + REMEMBERED + Duration::from_secs(1)));
        (0..=MOST).for_each(|job| withdrawn.add(job.to_string(), now));
        assert!(!withdrawn.has(Some("0"), now) && withdrawn.has(Some("1"), now));
        assert_eq!(withdrawn.lock().len(), MOST);
    }
}
