//! Computes rates from the counts of a slot at two times. Does no I/O.

use crate::protocol::stats::{SECONDS, Stage, Stats};

/// What a slot did between two times.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    /// Tasks answered per second.
    pub(crate) tasks: f64,
    /// Tokens computed per second.
    pub(crate) tokens: f64,
    /// Tasks answered with an error per second.
    pub(crate) errors: f64,
    /// Share of the time that the device computed, from 0 to 1.
    pub(crate) busy: f64,
    /// Mean tokens of a batch divided by the allowed maximum.
    pub(crate) fill: Option<f64>,
    /// Median and 99th percentile of the time on the device, in seconds.
    pub(crate) compute: Option<(f64, f64)>,
    /// Median time in the queue, in seconds.
    pub(crate) queued: Option<f64>,
}

impl Rates {
    /// The rates of the `seconds` between two counts, with batches of at most `max_tokens` tokens.
    pub(crate) fn between(before: &Stats, now: &Stats, seconds: f64, max_tokens: Option<usize>) -> Self {
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        let errors = |stats: &Stats| stats.tasks() - stats.of_status("succeeded");
        let stage = |stage: Stage| now.stages[stage as usize].since(&before.stages[stage as usize]);
        let (compute, queued) = (stage(Stage::Compute), stage(Stage::Queue));
        let tokens = now.batch_tokens.since(&before.batch_tokens);
        let max_tokens = max_tokens.filter(|_| tokens.count() > 0);
        Self {
            tasks: rate(now.tasks(), before.tasks()),
            tokens: rate(now.tokens, before.tokens),
            errors: rate(errors(now), errors(before)),
            busy: (rate(now.busy_us, before.busy_us) / 1e6).min(1.0),
            fill: max_tokens.map(|max| tokens.sum() / tokens.count() as f64 / max as f64),
            compute: compute.quantile(&SECONDS, 0.5).zip(compute.quantile(&SECONDS, 0.99)),
            queued: queued.quantile(&SECONDS, 0.5),
        }
    }
}
