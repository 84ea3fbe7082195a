//! Logs why tasks are answered with errors. At most one line is logged in [`INTERVAL`], because a requester may send
//! any number of wrong tasks. Each line has the number of errors that were not logged since the line before. Owns that
//! number, and the time of the last line.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::protocol::TaskError;

/// The shortest time between two lines.
const INTERVAL: Duration = Duration::from_secs(5);

/// Logs errors of tasks at a bounded rate; shared by all tasks of a worker.
#[derive(Default)]
pub(in crate::worker) struct ErrorLog(Mutex<State>);

#[derive(Default)]
struct State {
    /// When the last line was logged; `None` before the first one.
    logged: Option<Instant>,
    /// The number of errors since then.
    unlogged: u64,
}

impl ErrorLog {
    /// Logs the error of a task, or counts it if the last line is younger than [`INTERVAL`].
    pub(super) fn add(&self, task: &str, error: &TaskError) {
        if let Some(unlogged) = self.take_unlogged(Instant::now()) {
            let (status, _, _, reason) = error.kind.wire();
            tracing::info!(task.id = task, status, reason, %error, unlogged, "a task is answered with an error");
        }
    }

    /// Returns the number of errors that were not logged since the last line, if a line is due. Otherwise counts this
    /// error as not logged, and returns `None`.
    fn take_unlogged(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.logged.is_some_and(|logged| now < logged + INTERVAL) {
            state.unlogged += 1;
            return None;
        }
        state.logged = Some(now);
        Some(std::mem::take(&mut state.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_error_in_five_seconds_is_logged_and_the_others_are_counted() {
        let (log, begun) = (ErrorLog::default(), Instant::now());
        let at = |ms| log.take_unlogged(begun + Duration::from_millis(ms));
        let unlogged = [0, 1, 4_999, 5_000, 5_001, 60_000].map(at);
        assert_eq!(unlogged, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
