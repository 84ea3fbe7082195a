//! The model thread: loads the model, then computes one batch after the other, for life. The one
//! boundary where a panic of a model is caught. A batch that fails is halved until the culprit is
//! alone, so that only it is answered with an error; a device fault ends the thread.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use tokio::sync::{mpsc, oneshot};

use super::batches::still_wanted;
use super::ticket::{Pass, Ticket};
use crate::batching::Batch;
use crate::model::{Codec, ForwardError, InputOf, LoadError, LoadSpec, Model, OutputOf, Step};
use crate::protocol::{TaskError, TaskErrorKind};

/// One input on its way through the device.
pub(super) struct Item<C: Codec> {
    pub(super) input: C::Input,
    /// Its cost.
    pub(super) tokens: usize,
    /// Its place among the inputs of its task.
    pub(super) index: usize,
    pub(super) ticket: Arc<Ticket<C::Output>>,
}

/// What the model thread says of a batch.
#[derive(Debug)]
pub(super) enum Done {
    /// Its outputs are with their tickets.
    Computed { inputs: usize, tokens: usize, took: Duration },
    /// Nobody waited for any of its inputs any more.
    Unwanted,
    /// The device is gone; the batch's inputs are unanswered. Last word of the thread.
    Fault(String),
}

/// What is known once the model is loaded.
pub(super) struct Loaded<C> {
    pub(super) codec: C,
    pub(super) device: String,
}

/// The model thread's ends.
pub(super) struct Engine<C: Codec> {
    /// Written by the batch former, read by the model thread. Bound 1: one batch computes, one is
    /// at hand.
    pub(super) batches: mpsc::Sender<Batch<Item<C>>>,
    /// Written by the model thread after each batch, read by the batch former. Bound: one for each
    /// batch that can be under way.
    pub(super) done: mpsc::Receiver<Done>,
    /// The load's end.
    pub(super) loaded: oneshot::Receiver<Result<Loaded<C>, LoadError>>,
}

/// Starts the model thread.
///
/// # Errors
/// The system has no thread for us.
pub(super) fn start<M: Model>(spec: LoadSpec) -> io::Result<Engine<M::Codec>> {
    let (batches, mut queued) = mpsc::channel::<Batch<Item<M::Codec>>>(1);
    let (done_in, done) = mpsc::channel(2);
    let (loaded_in, loaded) = oneshot::channel();
    thread::Builder::new().name("model".into()).spawn(move || {
        let mut model = match M::load(&spec) {
            Ok((model, codec)) => {
                let device = model.device();
                drop(loaded_in.send(Ok(Loaded { codec, device })));
                model
            }
            Err(error) => return drop(loaded_in.send(Err(error))),
        };
        let mut number = 0;
        while let Some(batch) = queued.blocking_recv() {
            // Not before: a batch that waits here for the device can still be handed back.
            let Some(batch) = still_wanted(batch) else {
                match done_in.blocking_send(Done::Unwanted) {
                    Ok(()) => continue,
                    Err(_) => return,
                }
            };
            let began = Instant::now();
            number += 1;
            let pass = Pass { number, size: batch.inputs.len(), tokens: batch.tokens };
            let done = match compute(&mut model, &batch.inputs, began, pass) {
                Ok(()) => Done::Computed { inputs: pass.size, tokens: pass.tokens, took: began.elapsed() },
                Err(fault) => Done::Fault(fault),
            };
            let faulty = matches!(done, Done::Fault(_));
            if done_in.blocking_send(done).is_err() || faulty {
                return;
            }
        }
    })?;
    Ok(Engine { batches, done, loaded })
}

/// Computes `items` and gives each ticket its output. Fails when the device did.
fn compute<M: Model>(
    model: &mut M,
    items: &[Item<M::Codec>],
    began: Instant,
    pass: Pass,
) -> Result<(), String> {
    let kind = match attempt(model, items) {
        Ok(outputs) => {
            for (item, output) in items.iter().zip(outputs) {
                item.ticket.deliver(item.index, output, began, pass);
            }
            return Ok(());
        }
        Err(ForwardError::Device(fault)) => return Err(fault),
        Err(ForwardError::OutOfMemory(words)) => (TaskErrorKind::OutOfMemory, words),
        Err(ForwardError::Failed(words)) => (TaskErrorKind::Internal, words),
    };
    if let [alone] = items {
        let error = TaskError::new(kind.0, kind.1);
        tracing::error!(%error, "the model failed on an input");
        alone.ticket.deliver(alone.index, Err(error), began, pass);
        return Ok(());
    }
    tracing::warn!(batch.size = items.len(), error = kind.1, "a batch failed; trying its halves");
    let (first, second) = items.split_at(items.len() / 2);
    compute(model, first, began, pass)?;
    compute(model, second, began, pass)
}

type Outputs<M> = Vec<Result<OutputOf<M>, TaskError>>;

fn attempt<M: Model>(model: &mut M, items: &[Item<M::Codec>]) -> Result<Outputs<M>, ForwardError> {
    let inputs: Vec<&InputOf<M>> = items.iter().map(|item| &item.input).collect();
    let steps = catch_unwind(AssertUnwindSafe(|| model.forward(&inputs))).unwrap_or_else(|panic| {
        Err(ForwardError::Failed(format!("panic: {}", panic_words(panic.as_ref()))))
    })?;
    if steps.len() != items.len() {
        let words = format!("the model returned {} results for {} inputs", steps.len(), items.len());
        return Err(ForwardError::Failed(words));
    }
    Ok(steps.into_iter().map(|step| step.map(|Step::Done(output)| output)).collect())
}

/// What a panic said.
pub(super) fn panic_words(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<&str>().map(|words| (*words).to_owned());
    words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no words".into())
}
