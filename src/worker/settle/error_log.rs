//! Logs why tasks are answered with errors. At most one line for each reason is logged in [`LOG_INTERVAL`], because a
//! requester may send any number of wrong tasks. Each line has the number of errors of its reason that were not logged
//! since the line before. Owns these numbers, and the times of the last lines.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::protocol::TaskError;
use crate::protocol::reply::ErrorNames;
use crate::telemetry::Throttle;

/// The shortest time between two lines with the same reason.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Logs errors of tasks at a bounded rate; shared by all tasks of a worker.
#[derive(Default)]
pub(in crate::worker) struct ErrorLog(Mutex<BTreeMap<&'static str, Throttle>>);

impl ErrorLog {
    /// Logs the error of a task, or counts it if the last line with its reason is younger than [`LOG_INTERVAL`].
    pub(super) fn add(&self, task: &str, error: &TaskError) {
        let ErrorNames { status, code: reason, .. } = error.kind.names();
        let unlogged = self.0.lock().entry(reason).or_default().pass(LOG_INTERVAL, Instant::now());
        if let Some(unlogged) = unlogged {
            tracing::info!(task.id = task, status, reason, %error, unlogged, "a task is answered with an error");
        }
    }
}
