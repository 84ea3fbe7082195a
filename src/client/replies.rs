//! Computes rates and busy shares from replies as they arrive. Owns the sums. Has no clock: times are passed in,
//! counted from an instant that the caller chooses.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::answer::Answer;

/// Sums over replies.
#[derive(Debug, Default)]
pub(crate) struct ReplyStats {
    /// When the measured time began. Set by the owner of these sums.
    pub(crate) began: Duration,
    /// Time of the last reply.
    pub(crate) ended: Duration,
    pub(crate) succeeded: u64,
    pub(crate) inputs: u64,
    /// None if no reply states any.
    pub(crate) tokens: Option<u64>,
    /// Tokens of generated text; none if no reply states any.
    pub(crate) generated: Option<u64>,
    /// Milliseconds of sound; none if no reply states any.
    audio_ms: Option<u64>,
    workers: BTreeMap<String, WorkerTotals>,
}

#[derive(Debug, Default)]
struct WorkerTotals {
    device: String,
    tasks: u64,
    busy_ms: f64,
}

/// The tasks of one worker, and the share of the measured time that its device computed.
#[derive(Debug, Serialize)]
pub(crate) struct WorkerShare {
    pub(crate) worker: String,
    pub(crate) device: String,
    pub(crate) tasks: u64,
    pub(crate) busy_percent: f64,
}

/// The sound that was transcribed or spoken.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Audio {
    pub(crate) seconds: f64,
    /// Seconds of sound for each second of the measured time.
    pub(crate) times_real_time: f64,
}

impl ReplyStats {
    /// Counts the reply to a task with this many inputs.
    pub(crate) fn count(&mut self, inputs: usize, at: Duration, answer: &Answer<'_>) {
        self.ended = at;
        if answer.succeeded() {
            self.succeeded += 1;
            self.inputs += inputs as u64;
        }
        for (sum, count) in [
            (&mut self.tokens, answer.tokens),
            (&mut self.generated, answer.generated),
            (&mut self.audio_ms, answer.audio_ms),
        ] {
            // A reply may hold any number.
            *sum = count.map_or(*sum, |count| Some(sum.unwrap_or(0).saturating_add(count)));
        }
        let Some(name) = answer.worker else { return };
        if !self.workers.contains_key(name) {
            let device = answer.device.to_owned();
            self.workers.insert(name.to_owned(), WorkerTotals { device, ..WorkerTotals::default() });
        }
        if let Some(worker) = self.workers.get_mut(name) {
            worker.tasks += 1;
            worker.busy_ms += answer.device_ms(inputs);
        }
    }

    /// The measured time in seconds.
    pub(crate) fn seconds(&self) -> f64 {
        self.ended.saturating_sub(self.began).as_secs_f64()
    }

    /// `count` in the measured time as a rate per second; 0 if that time is empty.
    pub(crate) fn per_second(&self, count: u64) -> f64 {
        let seconds = self.seconds();
        if seconds > 0.0 { rounded(count as f64 / seconds) } else { 0.0 }
    }

    /// The sound of all replies; none if no reply states any.
    pub(crate) fn audio(&self) -> Option<Audio> {
        let (ms, seconds) = (self.audio_ms? as f64, self.seconds());
        let times_real_time = if seconds > 0.0 { rounded(ms / 1e3 / seconds) } else { 0.0 };
        Some(Audio { seconds: rounded(ms / 1e3), times_real_time })
    }

    /// The share of each worker, by name.
    pub(crate) fn shares(&self) -> Vec<WorkerShare> {
        let seconds = self.seconds();
        // The first batch may have begun before the measured time, which would give over 100 %.
        let percent = |ms: f64| if seconds > 0.0 { (ms / seconds / 10.0).min(100.0) } else { 0.0 };
        let share = |(name, totals): (&String, &WorkerTotals)| WorkerShare {
            worker: name.clone(),
            device: totals.device.clone(),
            tasks: totals.tasks,
            busy_percent: rounded(percent(totals.busy_ms)),
        };
        self.workers.iter().map(share).collect()
    }
}

/// The mean busy share of all workers, in percent; none without workers.
pub(crate) fn busy_percent(workers: &[WorkerShare]) -> Option<f64> {
    let busy: f64 = workers.iter().map(|worker| worker.busy_percent).sum();
    (!workers.is_empty()).then(|| rounded(busy / workers.len() as f64))
}

/// Rounded to three decimal places: more is noise.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}
