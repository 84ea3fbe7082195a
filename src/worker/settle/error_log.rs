//! Logs why tasks are answered with errors, at most once in [`INTERVAL`]: a requester may send any number of wrong
//! tasks. Owns the time of the last line.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::protocol::TaskError;

/// The shortest time between two lines.
const INTERVAL: Duration = Duration::from_secs(5);

/// The errors that were not logged; shared by all tasks of a worker.
#[derive(Default)]
pub(in crate::worker) struct ErrorLog(Mutex<Last>);

#[derive(Default)]
struct Last {
    /// When a line was last logged.
    logged: Option<Instant>,
    /// Errors since then.
    unlogged: u64,
}

impl ErrorLog {
    /// Logs the error of a task, unless an error was logged just before.
    pub(super) fn add(&self, task: &str, error: &TaskError) {
        if let Some(unlogged) = self.due(Instant::now()) {
            let (status, _, _, reason) = error.kind.wire();
            tracing::info!(task.id = task, status, reason, %error, unlogged, "a task is answered with an error");
        }
    }

    /// The number of errors that were not logged since the last line; none: no line is due.
    fn due(&self, now: Instant) -> Option<u64> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.logged.is_some_and(|logged| now < logged + INTERVAL) {
            last.unlogged += 1;
            return None;
        }
        last.logged = Some(now);
        Some(std::mem::take(&mut last.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_logged_every_five_seconds_and_the_others_are_counted() {
        let (log, begun) = (ErrorLog::default(), Instant::now());
        let due = [0, 1, 4_999, 5_000, 5_001, 60_000].map(|ms| log.due(begun + Duration::from_millis(ms)));
        assert_eq!(due, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
