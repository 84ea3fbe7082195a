//! Logs why tasks are answered with errors. At most one line for each reason is logged in [`LOG_INTERVAL`], because a
//! requester may send any number of wrong tasks. Each line has the number of errors of its reason that were not logged
//! since the line before. Owns these numbers, and the times of the last lines.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::protocol::TaskError;
use crate::protocol::reply::ErrorNames;

/// The shortest time between two lines with the same reason.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Logs errors of tasks at a bounded rate; shared by all tasks of a worker.
#[derive(Default)]
pub(in crate::worker) struct ErrorLog(Mutex<BTreeMap<&'static str, Logged>>);

/// What was logged for one reason.
struct Logged {
    /// The time of the last line.
    last: Instant,
    /// The number of errors since then.
    unlogged: u64,
}

impl ErrorLog {
    /// Logs the error of a task, or counts it if the last line with its reason is younger than [`LOG_INTERVAL`].
    pub(super) fn add(&self, task: &str, error: &TaskError) {
        let ErrorNames { status, code: reason, .. } = error.kind.names();
        if let Some(unlogged) = self.take_unlogged(reason, Instant::now()) {
            tracing::info!(task.id = task, status, reason, %error, unlogged, "a task is answered with an error");
        }
    }

    /// Returns the number of errors with this reason that were not logged since the last line, if a line is due.
    /// Otherwise counts this error as not logged, and returns `None`.
    fn take_unlogged(&self, reason: &'static str, now: Instant) -> Option<u64> {
        let mut all = self.0.lock();
        let Some(logged) = all.get_mut(reason) else {
            all.insert(reason, Logged { last: now, unlogged: 0 });
            return Some(0);
        };
        if now < logged.last + LOG_INTERVAL {
            logged.unlogged += 1;
            return None;
        }
        logged.last = now;
        Some(std::mem::take(&mut logged.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_error_of_a_reason_in_five_seconds_is_logged_and_the_rest_counted() {
        let (log, begun) = (ErrorLog::default(), Instant::now());
        let at = |ms| log.take_unlogged("bad_input", begun + Duration::from_millis(ms));
        let unlogged = [0, 1, 4_999, 5_000, 5_001, 60_000].map(at);
        assert_eq!(unlogged, [Some(0), None, None, Some(2), None, Some(1)]);
        assert_eq!(log.take_unlogged("too_large", begun + Duration::from_millis(60_001)), Some(0));
    }
}
