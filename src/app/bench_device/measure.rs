//! Prepares tasks and computes their batches, over and over, with a clock. Owns the model, on the thread
//! that calls it.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};

use crate::app::bench::Work;
use crate::batching::{Batch, Batcher, Device};
use crate::config::Assignment;
use crate::model::{Codec, ForwardError, InputOf, Model, Rest, Steps};
use crate::protocol::Message;
use crate::shutdown::Exit;
use crate::worker::{WorkerError, load_spec, policy};

/// [`measure`], of one model type.
pub(in crate::app) type Measure = fn(&Assignment, &[Work], Duration) -> anyhow::Result<Measured>;

/// The part of the time that goes before the measured one, to warm up.
const WARMUP: u32 = 4;

/// What was measured.
pub(in crate::app) struct Measured {
    pub(super) loading: Duration,
    pub(super) inputs: usize,
    pub(super) tokens: usize,
    /// All tasks, once, on one thread.
    pub(super) preparing: Duration,
    pub(super) passes: Vec<Pass>,
    /// The passes, from the first's beginning to the last's end.
    pub(super) computing: Duration,
}

/// One batch through the model.
pub(super) struct Pass {
    pub(super) inputs: usize,
    pub(super) tokens: usize,
    pub(super) took: Duration,
}

/// Loads the model of a slot, prepares `tasks`, and computes them for so long.
///
/// # Errors
/// The model, its device, or a task, with its number.
pub(in crate::app) fn measure<M: Model>(
    slot: &Assignment,
    tasks: &[Work],
    time: Duration,
) -> anyhow::Result<Measured> {
    let begun = Instant::now();
    let (mut model, codec) = M::load(&load_spec(slot)).map_err(WorkerError::from)?;
    let loading = begun.elapsed();
    let (found, own) = (model.device(), &slot.device);
    ensure!(found == *own, WorkerError::Device(format!("the model is on {found}, and not on {own}")));

    let mut batcher = Batcher::new(policy(slot));
    let (mut inputs, mut tokens) = (0, 0);
    let begun = Instant::now();
    for (task, number) in tasks.iter().zip(1..) {
        let message = Message { body: task.body.clone(), ..Message::default() };
        let prepared = codec.prepare(&message).map_err(|error| anyhow!("task {number}: {error}"));
        for costed in prepared.context(Exit::Usage)?.inputs {
            inputs += 1;
            tokens += costed.tokens;
            batcher.push(costed.input, costed.tokens, begun);
        }
    }
    let preparing = begun.elapsed();
    let cut = || batcher.take(begun, Device::Idle, false);
    let batches: Vec<Batch<InputOf<M>>> = std::iter::from_fn(cut).collect();

    compute(&mut model, &batches, time / WARMUP)?;
    let begun = Instant::now();
    let passes = compute(&mut model, &batches, time)?;
    Ok(Measured { loading, inputs, tokens, preparing, passes, computing: begun.elapsed() })
}

/// Goes round the batches for so long; ends with a whole one. A device that computes beside this thread has
/// its next batch before the last is waited for, as in a worker.
fn compute<M: Model>(
    model: &mut M,
    batches: &[Batch<InputOf<M>>],
    time: Duration,
) -> anyhow::Result<Vec<Pass>> {
    let begun = Instant::now();
    let mut turns = Turns { model, passes: Vec::new(), ahead: None, freed: begun };
    for batch in batches.iter().cycle() {
        turns.take(batch)?;
        if begun.elapsed() >= time {
            break;
        }
    }
    turns.finish_ahead()?;
    Ok(turns.passes)
}

/// A batch that was begun, and when.
type Ahead<'a, M> = (&'a Batch<InputOf<M>>, Instant, Rest<M>);

/// Batches that take turns on a device.
struct Turns<'a, M: Model> {
    model: &'a mut M,
    passes: Vec<Pass>,
    ahead: Option<Ahead<'a, M>>,
    /// When the last batch was done.
    freed: Instant,
}

impl<'a, M: Model> Turns<'a, M> {
    fn take(&mut self, batch: &'a Batch<InputOf<M>>) -> anyhow::Result<()> {
        let began = Instant::now();
        let inputs: Vec<&InputOf<M>> = batch.inputs.iter().collect();
        match self.model.begin(&inputs) {
            Ok(Some(rest)) => match self.ahead.replace((batch, began, rest)) {
                Some(before) => self.finish(before),
                None => Ok(()),
            },
            Ok(None) => {
                let outcome = self.model.forward(&inputs);
                self.end(batch, began, outcome)
            }
            Err(error) => Err(failed(batch, &error)),
        }
    }

    fn finish_ahead(&mut self) -> anyhow::Result<()> {
        self.ahead.take().map_or(Ok(()), |ahead| self.finish(ahead))
    }

    fn finish(&mut self, (batch, began, rest): Ahead<'a, M>) -> anyhow::Result<()> {
        let outcome = rest(self.model);
        self.end(batch, began, outcome)
    }

    fn end(
        &mut self,
        batch: &Batch<InputOf<M>>,
        began: Instant,
        outcome: Result<Steps<M>, ForwardError>,
    ) -> anyhow::Result<()> {
        let steps = outcome.map_err(|error| failed(batch, &error))?;
        if let Some(error) = steps.iter().find_map(|step| step.as_ref().err()) {
            return Err(failed(batch, error));
        }
        let began = began.max(self.freed);
        self.freed = Instant::now();
        let (inputs, tokens) = (batch.inputs.len(), batch.tokens);
        self.passes.push(Pass { inputs, tokens, took: self.freed - began });
        Ok(())
    }
}

fn failed<I>(batch: &Batch<I>, error: &dyn std::error::Error) -> anyhow::Error {
    let (inputs, tokens) = (batch.inputs.len(), batch.tokens);
    WorkerError::Device(format!("a batch of {inputs} inputs, {tokens} tokens: {error}")).into()
}
