//! The report of `run-batch --json` and `submit --json`: rates, batches, and which devices answered. Owns the sums.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::answer::Answer;
use super::batch_file::{CommonError, ErrorCounts};
use super::replies::{Audio, ReplyStats, WorkerShare, busy_percent, rounded};

pub(crate) struct Tally {
    /// When the tally was created. Other times are counted from it.
    created: Instant,
    /// When the first line reached a worker; the time before is the workers' start.
    began: Option<Duration>,
    answered: u64,
    /// Lines that got an error without a worker's reply: they are not requests, or no reply came.
    without_reply: u64,
    replies: ReplyStats,
    devices: BTreeMap<String, u64>,
    dtypes: BTreeMap<String, u64>,
    model: String,
    truncated: u64,
    batches: Batches,
}

/// Sums over forward passes. Each reply adds its share of its pass, so that a pass counts once.
#[derive(Clone, Copy, Debug, Default)]
struct Batches {
    passes: f64,
    inputs: f64,
    tokens: f64,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            created: Instant::now(),
            began: None,
            answered: 0,
            without_reply: 0,
            replies: ReplyStats::default(),
            devices: BTreeMap::new(),
            dtypes: BTreeMap::new(),
            model: String::new(),
            truncated: 0,
            batches: Batches::default(),
        }
    }
}

impl Tally {
    /// Counts this many lines that got an error without a worker's reply.
    pub(crate) fn count_without_reply(&mut self, lines: u64) {
        self.without_reply += lines;
    }

    /// Counts the reply to this many lines, with this many inputs in all.
    pub(crate) fn count(&mut self, lines: u64, inputs: usize, answer: &Answer<'_>) {
        self.count_at(self.created.elapsed(), lines, inputs, answer);
    }

    fn count_at(&mut self, at: Duration, lines: u64, inputs: usize, answer: &Answer<'_>) {
        self.answered += lines;
        // The wait in the queue is left out: for the first lines it includes the workers' start.
        let worker_ms = answer
            .stages_ms
            .map_or(0.0, |[_queue, prepare, wait_for_batch, compute]| prepare + wait_for_batch + compute);
        let delivered = at.saturating_sub(Duration::from_secs_f64(worker_ms / 1e3));
        self.began = Some(self.began.map_or(delivered, |earliest| earliest.min(delivered)));
        self.truncated = self.truncated.saturating_add(answer.truncated);
        self.replies.count(inputs, at, answer);
        *self.devices.entry(answer.device.to_owned()).or_default() += lines;
        *self.dtypes.entry(answer.dtype.to_owned()).or_default() += lines;
        if self.model.is_empty() {
            self.model = answer.model.to_owned();
        }
        if let Some(batch) = answer.batch.filter(|_| answer.succeeded()) {
            let share = batch.share(inputs);
            self.batches.passes += share;
            self.batches.inputs += share * batch.inputs;
            self.batches.tokens += share * batch.tokens;
        }
    }

    /// The texts that were cut in this run.
    pub(crate) fn truncated(&self) -> u64 {
        self.truncated
    }

    /// The tasks that each worker has answered.
    pub(crate) fn by_worker(&self) -> BTreeMap<String, u64> {
        self.replies.shares().into_iter().map(|share| (share.worker, share.tasks)).collect()
    }

    /// The report for this pool. `errors` counts the lines of this run that hold an error, and `output_errors` those of
    /// the whole output.
    pub(crate) fn report(&mut self, pool: &str, errors: u64, output_errors: &ErrorCounts) -> RunReport {
        self.replies.began = self.began.unwrap_or_default();
        let replies = &self.replies;
        let Batches { passes, inputs, tokens } = self.batches;
        let workers = replies.shares();
        RunReport {
            pool: pool.to_owned(),
            model: self.model.clone(),
            lines: self.answered + self.without_reply,
            errors,
            errors_in_output: output_errors.total(),
            commonest_errors: output_errors.commonest(),
            truncated: self.truncated,
            devices: self.devices.clone(),
            dtypes: self.dtypes.clone(),
            inputs: replies.inputs,
            tokens: replies.tokens,
            seconds: rounded(replies.seconds()),
            lines_per_second: replies.per_second(self.answered),
            inputs_per_second: replies.per_second(replies.inputs),
            tokens_per_second: replies.tokens.map(|tokens| replies.per_second(tokens)),
            generated_tokens_per_second: replies.generated.map(|tokens| replies.per_second(tokens)),
            audio: replies.audio(),
            batch: (passes > 0.0).then(|| MeanBatch {
                passes: passes.round() as u64,
                mean_inputs: rounded(inputs / passes),
                mean_tokens: rounded(tokens / passes),
            }),
            device_busy_percent: busy_percent(&workers),
            workers,
        }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct RunReport {
    pool: String,
    /// The model as the first reply names it.
    model: String,
    /// Lines answered in this run, by a worker's reply or by an error without one.
    lines: u64,
    /// Lines written in this run that hold an error, invalid requests included.
    errors: u64,
    /// Lines in the output that hold an error, those of earlier runs included.
    errors_in_output: u64,
    /// The commonest of these errors.
    commonest_errors: Vec<CommonError>,
    /// Texts that were cut in this run, because they are longer than the model takes.
    truncated: u64,
    /// Number of lines that each device has answered, by its name in the reply.
    devices: BTreeMap<String, u64>,
    /// Number of lines that were answered in each number format, by its name in the reply.
    dtypes: BTreeMap<String, u64>,
    inputs: u64,
    tokens: Option<u64>,
    /// Seconds from the first line's reaching a worker to the last reply.
    seconds: f64,
    lines_per_second: f64,
    inputs_per_second: f64,
    tokens_per_second: Option<f64>,
    /// Tokens of generated text.
    generated_tokens_per_second: Option<f64>,
    audio: Option<Audio>,
    batch: Option<MeanBatch>,
    workers: Vec<WorkerShare>,
    device_busy_percent: Option<f64>,
}

#[derive(Debug, Serialize)]
struct MeanBatch {
    passes: u64,
    mean_inputs: f64,
    mean_tokens: f64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Message, Properties, Value};

    /// A reply to a line of one input, in a batch of four inputs. The worker had the line for 300 ms.
    fn reply(device: &str) -> Message {
        let headers = [
            ("status_code", Value::from(200)),
            ("worker", format!("h/p/{device}").into()),
            ("device", device.into()),
            ("dtype", "int8".into()),
            ("model", "m".into()),
            ("queue_us", 9_000_000.into()),
            ("prepare_us", 50_000.into()),
            ("wait_us", 50_000.into()),
            ("compute_us", 200_000.into()),
            ("batch_size", 4.into()),
            ("batch_tokens", 40.into()),
        ];
        let headers = headers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let body = r#"{"usage":{"total_tokens":10}}"#;
        Message { properties: Properties { headers, ..Properties::default() }, body: body.into() }
    }

    #[test]
    fn time_runs_from_the_first_delivery_to_the_last_reply() {
        let mut tally = Tally::default();
        let ms = Duration::from_millis;
        for (at, device) in [(ms(9_300), "a"), (ms(9_300), "a"), (ms(9_400), "b"), (ms(9_500), "a")] {
            tally.count_at(at, 1, 1, &Answer::of(&reply(device)));
        }
        let report = serde_json::to_value(tally.report("embed", 1, &ErrorCounts::default())).unwrap();
        assert_eq!((&report["seconds"], &report["tokens_per_second"]), (&0.5.into(), &80.0.into()));
        assert_eq!(
            (&report["lines"], &report["errors"], &report["tokens"]),
            (&4.into(), &1.into(), &40.into())
        );
        assert_eq!(report["devices"], serde_json::json!({"a": 3, "b": 1}));
        assert_eq!(report["dtypes"], serde_json::json!({"int8": 4}));
        let batch = serde_json::json!({"passes": 1, "mean_inputs": 4.0, "mean_tokens": 40.0});
        assert_eq!(report["batch"], batch);
        // The mean of the busy shares of two workers: 150 ms of 500 ms, and 50 ms of 500 ms.
        assert_eq!(report["device_busy_percent"], 20.0);
    }

    #[test]
    fn the_sound_of_all_replies_is_compared_with_the_time_that_it_took() {
        let mut tally = Tally::default();
        for (at, audio_ms) in [(9_300, 1_250), (9_500, 2_000)] {
            let mut reply = reply("a");
            reply.properties.headers.insert("audio_ms".into(), audio_ms.into());
            reply.properties.headers.insert("truncated".into(), 2.into());
            tally.count_at(Duration::from_millis(at), 1, 1, &Answer::of(&reply));
        }
        let report = serde_json::to_value(tally.report("speech", 0, &ErrorCounts::default())).unwrap();
        assert_eq!(report["seconds"], 0.5);
        assert_eq!((&report["truncated"], tally.truncated()), (&4.into(), 4));
        assert_eq!(report["audio"], serde_json::json!({"seconds": 3.25, "times_real_time": 6.5}));
    }

    #[test]
    fn a_run_without_a_reply_reports_no_batch_and_no_busy_share() {
        let report =
            serde_json::to_value(Tally::default().report("embed", 3, &ErrorCounts::default())).unwrap();
        assert_eq!((&report["lines_per_second"], &report["errors"]), (&0.0.into(), &3.into()));
        assert!(report["batch"].is_null() && report["device_busy_percent"].is_null());
        assert!(report["audio"].is_null(), "there is no sound");
    }
}
