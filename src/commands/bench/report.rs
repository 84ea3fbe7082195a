//! The report of a load, as JSON and as a table for people. Does no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};

use serde::Serialize;

use super::summary::{Sizes, Summary};
use crate::client::replies::{Audio, WorkerShare};

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) pool: String,
    pub(super) queue: String,
    pub(super) model: String,
    pub(super) seed: u64,
    pub(super) tasks: usize,
    pub(super) warmup: usize,
    pub(super) load: Load,
    #[serde(flatten)]
    pub(super) measured: Measured,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(super) enum Load {
    /// The next task is published when a reply arrives.
    Closed {
        /// Tasks under way at once.
        in_flight: usize,
    },
    /// Tasks are published when they are due, independently of replies.
    Open {
        /// Requested tasks per second.
        rate: f64,
        /// Tasks per second by the broker's confirms. None for a single task, which has no rate.
        achieved_rate: Option<f64>,
    },
}

/// The tally's results. Times are in milliseconds unless the name says otherwise.
#[derive(Debug, Serialize)]
pub(super) struct Measured {
    /// The measured tasks per second by the broker's confirms. `bench::run` moves it to [`Load::Open`].
    #[serde(skip)]
    pub(super) achieved_rate: Option<f64>,
    /// The models named by the replies. `bench::run` moves them to [`Report::model`].
    #[serde(skip)]
    pub(super) model: BTreeSet<String>,
    pub(super) device: BTreeSet<String>,
    pub(super) inputs_per_task: f64,
    pub(super) succeeded: u64,
    /// Number of errors by status code.
    pub(super) errors: BTreeMap<String, u64>,
    pub(super) duplicates: u64,
    /// Published tasks whose reply did not arrive in time, including those before and after the measured ones.
    pub(super) unanswered: usize,
    /// The measured time: from the last warm-up reply, or without a warm-up from the first task, to the last measured
    /// reply.
    pub(super) seconds: f64,
    pub(super) tasks_per_second: f64,
    pub(super) inputs_per_second: f64,
    pub(super) tokens_per_second: Option<f64>,
    /// Tokens of generated text per second.
    pub(super) generated_tokens_per_second: Option<f64>,
    /// The sound of the measured replies.
    pub(super) audio: Option<Audio>,
    /// From the time at which a task was due to its reply.
    pub(super) latency_ms: Option<Summary>,
    /// Time in the broker's queue.
    pub(super) queue_ms: Option<Summary>,
    /// Preprocessing.
    pub(super) prepare_ms: Option<Summary>,
    /// Time in the worker until a batch takes the task.
    pub(super) wait_ms: Option<Summary>,
    /// Forward passes.
    pub(super) compute_ms: Option<Summary>,
    pub(super) batch: BatchSizes,
    pub(super) workers: Vec<WorkerShare>,
    pub(super) device_busy_percent: Option<f64>,
}

/// The sizes of the batches. A batch that several replies report counts once.
#[derive(Debug, Serialize)]
pub(super) struct BatchSizes {
    pub(super) inputs: Option<Sizes>,
    pub(super) tokens: Option<Sizes>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, queue, model, seed, tasks, warmup, load, measured } = self;
        let devices: Vec<&str> = measured.device.iter().map(String::as_str).collect();
        writeln!(f, "pool      {pool}: {model} on {}, via queue {queue}", devices.join(", "))?;
        let inputs = measured.inputs_per_task;
        writeln!(f, "load      {load}; seed {seed}, inputs per task: {inputs}")?;
        let errors: u64 = measured.errors.values().sum();
        write!(f, "tasks     {} of {tasks} succeeded", measured.succeeded)?;
        writeln!(
            f,
            ", {errors} failed, {} duplicates; {warmup} before these, as a warm-up",
            measured.duplicates
        )?;
        for (code, count) in &measured.errors {
            writeln!(f, "          status {code}: {count}")?;
        }
        if measured.unanswered > 0 {
            writeln!(f, "          without a reply: {}", measured.unanswered)?;
        }
        write!(f, "rate      {:.1} tasks/s", measured.tasks_per_second)?;
        write!(f, ", {:.1} inputs/s", measured.inputs_per_second)?;
        if let Some(tokens) = measured.tokens_per_second {
            write!(f, ", {tokens:.0} tokens/s")?;
        }
        if let Some(tokens) = measured.generated_tokens_per_second {
            write!(f, ", {tokens:.0} of them generated")?;
        }
        writeln!(f, " in {:.2} s", measured.seconds)?;
        if let Some(Audio { seconds, times_real_time }) = measured.audio {
            writeln!(f, "sound     {seconds:.1} s, {times_real_time:.1} times real time")?;
        }
        f.write_str(&times_table(measured))?;
        f.write_str(&batches_table(&measured.batch))?;
        f.write_str(&workers_table(measured))
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed { in_flight } => write!(f, "closed loop, {in_flight} tasks in flight"),
            Self::Open { rate, achieved_rate } => {
                write!(f, "open loop, {rate} tasks/s")?;
                match achieved_rate {
                    Some(achieved) => write!(f, " ({achieved:.1} achieved)"),
                    None => Ok(()),
                }
            }
        }
    }
}

fn times_table(measured: &Measured) -> String {
    let mut table = String::new();
    let names = ["mean", "p50", "p90", "p99", "p99.9", "max"].map(|name| format!("{name:>10}"));
    let _ = writeln!(table, "\n{:10}{}", "ms", names.concat());
    for (name, summary) in [
        ("latency", measured.latency_ms),
        ("queue", measured.queue_ms),
        ("prepare", measured.prepare_ms),
        ("wait", measured.wait_ms),
        ("compute", measured.compute_ms),
    ] {
        let Some(Summary { mean, p50, p90, p99, p99_9, max }) = summary else { continue };
        let values = [mean, p50, p90, p99, p99_9, max].map(|value| format!("{value:>10.1}"));
        let _ = writeln!(table, "{name:10}{}", values.concat());
    }
    table
}

fn batches_table(batch: &BatchSizes) -> String {
    let mut table = String::new();
    let _ = writeln!(table, "\n{:10}{:>10}{:>10}{:>10}", "per batch", "mean", "p50", "max");
    for (name, sizes) in [("inputs", batch.inputs), ("tokens", batch.tokens)] {
        let Some(Sizes { mean, p50, max }) = sizes else { continue };
        let _ = writeln!(table, "{name:10}{mean:>10.1}{p50:>10}{max:>10}");
    }
    table
}

fn workers_table(measured: &Measured) -> String {
    // At least 8, so that this column is as wide as the first one of the other tables.
    let width = measured.workers.iter().map(|it| it.worker.len()).max().unwrap_or(0).max(8);
    let device_width =
        measured.workers.iter().map(|it| it.device.len()).max().unwrap_or(0).max("device".len());
    let mut table = String::new();
    let _ = writeln!(table, "\n{:width$}  {:device_width$}{:>10}{:>10}", "worker", "device", "tasks", "busy");
    for WorkerShare { worker, device, tasks, busy_percent } in &measured.workers {
        let _ = writeln!(table, "{worker:width$}  {device:device_width$}{tasks:>10}{busy_percent:>8.1} %");
    }
    if let Some(busy) = measured.device_busy_percent {
        let _ = writeln!(table, "devices busy with this load: {busy:.1} %");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let summary = Summary { mean: 5.25, p50: 5.0, p90: 6.0, p99: 7.0, p99_9: 8.0, max: 9.0 };
        let sizes = Some(Sizes { mean: 3.5, p50: 4.0, max: 8.0 });
        let share =
            WorkerShare { worker: "h/p/0".into(), device: "cpu".into(), tasks: 9, busy_percent: 87.5 };
        Report {
            pool: "embed".into(),
            queue: "sconce.tasks".into(),
            model: "m".into(),
            seed: 1,
            tasks: 10,
            warmup: 2,
            load: Load::Open { rate: 50.0, achieved_rate: Some(49.5) },
            measured: Measured {
                achieved_rate: None,
                model: BTreeSet::new(),
                device: BTreeSet::from(["cpu".into()]),
                inputs_per_task: 1.0,
                succeeded: 9,
                errors: BTreeMap::from([("400".into(), 1)]),
                duplicates: 0,
                unanswered: 0,
                seconds: 0.2,
                tasks_per_second: 45.0,
                inputs_per_second: 45.0,
                tokens_per_second: None,
                generated_tokens_per_second: None,
                audio: Some(Audio { seconds: 12.5, times_real_time: 62.5 }),
                latency_ms: Some(summary),
                queue_ms: Some(summary),
                prepare_ms: Some(summary),
                wait_ms: Some(summary),
                compute_ms: None,
                batch: BatchSizes { inputs: sizes, tokens: sizes },
                workers: vec![share],
                device_busy_percent: Some(87.5),
            },
        }
    }

    #[test]
    fn the_json_is_one_flat_object_with_the_documented_names() {
        let json = serde_json::to_value(report()).unwrap();
        assert_eq!(json["load"], serde_json::json!({"kind": "open", "rate": 50.0, "achieved_rate": 49.5}));
        assert_eq!(json["errors"]["400"], 1);
        assert_eq!(json["latency_ms"]["p99_9"], 8.0);
        assert_eq!(json["batch"]["inputs"]["max"], 8.0);
        assert_eq!(json["workers"][0]["busy_percent"], 87.5);
        assert_eq!(json["device"][0], "cpu");
        assert_eq!(json["audio"]["seconds"], 12.5);
        assert!(json["tokens_per_second"].is_null() && json["compute_ms"].is_null());
    }

    #[test]
    fn the_table_has_units_and_omits_unknown_values() {
        let table = report().to_string();
        for part in [
            "embed: m on cpu",
            "50 tasks/s (49.5 achieved)",
            "9 of 10 succeeded, 1 failed, 0 duplicates; 2 before",
            "status 400: 1",
            "45.0 tasks/s, 45.0 inputs/s in 0.20 s",
            "sound     12.5 s, 62.5 times real time",
            "latency          5.2       5.0",
            "inputs           3.5         4         8",
            "87.5 %",
        ] {
            assert!(table.contains(part), "no {part:?} in\n{table}");
        }
        assert!(!table.contains("compute") && !table.contains("tokens/s"), "{table}");
    }
}
