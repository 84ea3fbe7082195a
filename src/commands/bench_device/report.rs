//! The report of a measured device, as JSON and as a table for people. Does no I/O.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::measure::{Measured, Pass};
use crate::client::replies::rounded;
use crate::commands::bench::{Sizes, Summary, Weighted};
use crate::config::Assignment;
use crate::worker::load_spec;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    model: String,
    dtype: &'static str,
    device: String,
    threads: usize,
    load_ms: f64,
    tasks: usize,
    inputs: usize,
    tokens: usize,
    prepare: Rate,
    forward: Rate,
    passes: usize,
    forward_ms: Option<Summary>,
    batch: BatchSizes,
}

/// Inputs and tokens per second.
#[derive(Debug, Serialize)]
struct Rate {
    seconds: f64,
    inputs_per_second: f64,
    tokens_per_second: f64,
}

#[derive(Debug, Serialize)]
struct BatchSizes {
    inputs: Option<Sizes>,
    tokens: Option<Sizes>,
}

impl Rate {
    fn of(inputs: usize, tokens: usize, took: Duration) -> Self {
        let seconds = took.as_secs_f64();
        let per_second = |count: usize| if seconds > 0.0 { rounded(count as f64 / seconds) } else { 0.0 };
        Self {
            seconds: rounded(seconds),
            inputs_per_second: per_second(inputs),
            tokens_per_second: per_second(tokens),
        }
    }
}

impl Report {
    /// The report of the measurement of `tasks` tasks on a slot's device.
    pub(super) fn new(slot: &Assignment, tasks: usize, measured: Measured) -> Self {
        let Measured { loading, dtype, inputs, tokens, preprocessing, passes, computing } = measured;
        let sizes = |count: fn(&Pass) -> usize| {
            Sizes::of(passes.iter().map(|pass| Weighted { size: count(pass) as f64, share: 1.0 }).collect())
        };
        let sum = |count: fn(&Pass) -> usize| passes.iter().map(count).sum();
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        Self {
            model: load_spec(slot).model_name().to_owned(),
            dtype: dtype.name(),
            device: slot.device.clone(),
            threads: slot.threads,
            load_ms: rounded(ms(loading)),
            tasks,
            inputs,
            tokens,
            prepare: Rate::of(inputs, tokens, preprocessing),
            forward: Rate::of(sum(|pass| pass.inputs), sum(|pass| pass.tokens), computing),
            passes: passes.len(),
            forward_ms: Summary::of(passes.iter().map(|pass| ms(pass.took)).collect()),
            batch: BatchSizes { inputs: sizes(|pass| pass.inputs), tokens: sizes(|pass| pass.tokens) },
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, dtype, device, threads, load_ms, tasks, inputs, tokens, .. } = self;
        writeln!(
            f,
            "model     {model} in {dtype} on {device}, {threads} threads; loaded in {load_ms:.0} ms"
        )?;
        let mean = *tokens as f64 / (*inputs).max(1) as f64;
        writeln!(f, "load      {tasks} tasks, {inputs} inputs, {mean:.1} tokens per input")?;
        writeln!(f, "prepare   {}: one thread", self.prepare)?;
        writeln!(f, "forward   {}: {} batches", self.forward, self.passes)?;
        if let Some(Summary { mean, p50, p99, max, .. }) = self.forward_ms {
            writeln!(f, "          {mean:.1} ms on average, p50 {p50:.1}, p99 {p99:.1}, max {max:.1}")?;
        }
        for (name, sizes) in [("inputs", self.batch.inputs), ("tokens", self.batch.tokens)] {
            let Some(Sizes { mean, p50, max }) = sizes else { continue };
            writeln!(f, "per batch {mean:.1} {name} on average, p50 {p50}, max {max}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, inputs_per_second, tokens_per_second } = self;
        write!(f, "{inputs_per_second:.1} inputs/s, {tokens_per_second:.0} tokens/s in {seconds:.2} s")
    }
}
