//! Counts answers for the metrics.

use std::time::Duration;

use super::Settlement;
use crate::broker::Source;
use crate::protocol::reply::ErrorNames;
use crate::protocol::stats::{Generated, SECONDS, Stage};
use crate::protocol::{Body, TaskError, Timings};

/// The values of one answer that are counted.
pub(super) struct Answered {
    /// The reply's `status`.
    pub(super) status: &'static str,
    /// The error's code; empty for a result.
    reason: &'static str,
    generated: Option<Generated>,
}

impl Answered {
    pub(super) fn of(body: &Result<Body, &TaskError>) -> Self {
        match body {
            Ok(body) => Self { status: "succeeded", reason: "", generated: body.generated.clone() },
            Err(error) => {
                let ErrorNames { status, code: reason, .. } = error.kind.names();
                Self { status, reason, generated: None }
            }
        }
    }
}

impl Settlement {
    /// Counts an answer to a task from `source` that took `publishing` to publish.
    pub(super) fn count(&self, answered: Answered, source: Source, timings: &Timings, publishing: Duration) {
        let Answered { status, reason, generated } = answered;
        self.counters.count(|stats| {
            stats.count_answers(status, reason, 1);
            *stats.queues.entry(self.queues.tasks[source.0].name.clone()).or_default() += 1;
            let seconds = |us: i64| us as f64 / 1e6;
            stats.observe_stage(Stage::Queue, seconds(timings.queue_us));
            stats.observe_stage(Stage::Prepare, seconds(timings.prepare_us));
            stats.observe_stage(Stage::Publish, publishing.as_secs_f64());
            // A task that never was on the device has not waited for the device.
            if timings.batch_size > 0 {
                stats.observe_stage(Stage::Wait, seconds(timings.wait_us));
                stats.observe_stage(Stage::Compute, seconds(timings.compute_us));
            }
            if let Some(first) = timings.first_token_us {
                stats.first_token.observe(&SECONDS, seconds(first));
            }
            if let Some(Generated { user, answers, tokens }) = generated {
                stats.count_tokens(&user, tokens);
                // All tokens but the first of each answer. The answers count as generated at the same time.
                let later = tokens.answer.saturating_sub(answers);
                if later > 0 {
                    let each = seconds(timings.answer_us) * answers as f64 / later as f64;
                    stats.output_token.observe(&SECONDS, each);
                }
            }
        });
    }
}
