//! Counts a load's replies, and decides which ones are measured. Latencies, stages, batches and errors cover the
//! *tasks* after the warm-up, so that no slow task is left out. Rates and busy shares cover the same number of
//! *replies*, by arrival, so that the load is constant while they are measured. Owns the published tasks and their
//! replies. Has no clock: times are passed in, as durations since the start of the run.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::report::{BatchSizes, Measured};
use super::summary::{Sizes, Summary, Weighted};
use crate::client::answer::{Answer, STAGES};
use crate::client::replies::{ReplyStats, busy_percent, rounded};

/// A published task.
#[derive(Clone, Copy, Debug)]
struct Sent {
    /// When the task was due; in a closed loop, when it was published.
    due: Duration,
    inputs: usize,
}

/// The published tasks and the replies of one load.
#[derive(Debug, Default)]
pub(super) struct Tally {
    warmup: usize,
    tasks: usize,
    /// Indexed by task number.
    sent: Vec<Sent>,
    answered: usize,
    duplicates: u64,
    /// The confirms of measured tasks; none before the first one.
    confirms: Option<Confirms>,
    models: BTreeSet<String>,
    devices: BTreeSet<String>,
    task_stats: TaskStats,
    reply_stats: ReplyStats,
}

/// The number of confirms, and when the first and the last arrived.
#[derive(Clone, Copy, Debug)]
struct Confirms {
    first: Duration,
    last: Duration,
    count: u32,
}

/// Results of the measured tasks.
#[derive(Debug, Default)]
struct TaskStats {
    succeeded: u64,
    errors: BTreeMap<String, u64>,
    latency_ms: Vec<f64>,
    stages_ms: [Vec<f64>; STAGES.len()],
    /// Inputs in each task's batch.
    batch_inputs: Vec<Weighted>,
    /// Tokens in each task's batch.
    batch_tokens: Vec<Weighted>,
}

impl Tally {
    /// Measures `tasks` tasks after the first `warmup` ones.
    pub(super) fn new(warmup: usize, tasks: usize) -> Self {
        Self { warmup, tasks, ..Self::default() }
    }

    /// Records a published task. Calls are in the order of task numbers. `due` is as in [`Sent`].
    pub(super) fn published(&mut self, due: Duration, inputs: usize) {
        // Without a warm-up, the measured time starts when the first task is due.
        if self.sent.is_empty() {
            self.reply_stats.began = due;
        }
        self.sent.push(Sent { due, inputs });
    }

    /// Records the broker's confirm of a task.
    pub(super) fn confirmed(&mut self, number: usize, at: Duration) {
        if self.measures(number) {
            let Confirms { first, last, count } =
                self.confirms.unwrap_or(Confirms { first: at, last: at, count: 0 });
            self.confirms = Some(Confirms { first: first.min(at), last: last.max(at), count: count + 1 });
        }
    }

    /// Whether the task or reply with this number is measured.
    fn measures(&self, number: usize) -> bool {
        (self.warmup..self.warmup + self.tasks).contains(&number)
    }

    /// Records `count` replies to tasks that had a reply already.
    pub(super) fn duplicates(&mut self, count: u64) {
        self.duplicates += count;
    }

    /// Records the reply to a task.
    pub(super) fn reply(&mut self, number: usize, at: Duration, answer: &Answer<'_>) {
        let Some(sent) = self.sent.get(number).copied() else { return };
        let reply_number = self.answered;
        self.answered += 1;
        if self.measures(number) {
            self.task_stats.count(sent, at, answer);
        }
        // The measured time starts at the last warm-up reply.
        if self.answered == self.warmup {
            self.reply_stats.began = at;
        }
        if self.measures(reply_number) {
            self.reply_stats.count(sent.inputs, at, answer);
            for (seen, name) in [(&mut self.models, answer.model), (&mut self.devices, answer.device)] {
                if !name.is_empty() && !seen.contains(name) {
                    seen.insert(name.to_owned());
                }
            }
        }
    }

    /// Computes the results.
    pub(super) fn measured(self) -> Measured {
        let achieved_rate = self.confirms.and_then(|Confirms { first, last, count }| {
            let seconds = (last - first).as_secs_f64();
            (seconds > 0.0).then(|| rounded(f64::from(count - 1) / seconds))
        });
        let TaskStats { succeeded, errors, latency_ms, stages_ms, batch_inputs, batch_tokens } =
            self.task_stats;
        let measured = self.sent.iter().skip(self.warmup).take(self.tasks);
        let inputs: usize = measured.map(|sent| sent.inputs).sum();
        let seconds = self.reply_stats.seconds();
        let unanswered = self.sent.len() - self.answered;
        let [queue_ms, prepare_ms, wait_ms, compute_ms] = stages_ms.map(Summary::of);
        let workers = self.reply_stats.shares();
        Measured {
            achieved_rate,
            model: self.models,
            device: self.devices,
            inputs_per_task: rounded(inputs as f64 / self.tasks as f64),
            succeeded,
            errors,
            duplicates: self.duplicates,
            unanswered,
            seconds: rounded(seconds),
            tasks_per_second: self.reply_stats.per_second(self.reply_stats.succeeded),
            inputs_per_second: self.reply_stats.per_second(self.reply_stats.inputs),
            tokens_per_second: self.reply_stats.tokens.map(|count| self.reply_stats.per_second(count)),
            generated_tokens_per_second: self
                .reply_stats
                .generated
                .map(|count| self.reply_stats.per_second(count)),
            audio: self.reply_stats.audio(),
            latency_ms: Summary::of(latency_ms),
            queue_ms,
            prepare_ms,
            wait_ms,
            compute_ms,
            batch: BatchSizes { inputs: Sizes::of(batch_inputs), tokens: Sizes::of(batch_tokens) },
            device_busy_percent: busy_percent(&workers),
            workers,
        }
    }
}

impl TaskStats {
    fn count(&mut self, sent: Sent, at: Duration, answer: &Answer<'_>) {
        if !answer.succeeded() {
            let code = answer.status_code.map_or_else(|| "none".to_owned(), |code| code.to_string());
            *self.errors.entry(code).or_default() += 1;
            return;
        }
        self.succeeded += 1;
        self.latency_ms.push(at.saturating_sub(sent.due).as_secs_f64() * 1e3);
        for (values, value) in self.stages_ms.iter_mut().zip(answer.stages_ms.into_iter().flatten()) {
            values.push(value);
        }
        if let Some(batch) = answer.batch {
            let share = batch.share(sent.inputs);
            self.batch_inputs.push(Weighted { size: batch.inputs, share });
            self.batch_tokens.push(Weighted { size: batch.tokens, share });
        }
    }
}

#[cfg(test)]
#[path = "tally_tests.rs"]
mod tests;
