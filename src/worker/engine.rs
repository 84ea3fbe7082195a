//! The model thread: loads the model, then computes one batch after the other, for life. Owns the
//! thread and its channels; what happens to a batch is in `forward`. A device fault ends the thread.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, oneshot};

use super::batches::still_wanted;
use super::forward::Forward;
use super::report::Reporter;
use super::ticket::{Pass, Ticket};
use super::traced::passed;
use crate::batching::Batch;
use crate::model::{Codec, LoadError, LoadSpec, Model};
use crate::telemetry::traces::Traces;

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
    /// Its outputs are with their tickets. `too_large`: so many tokens found no memory at once.
    Computed { inputs: usize, tokens: usize, took: Duration, too_large: Option<usize> },
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
pub(super) fn start<M: Model>(
    spec: LoadSpec,
    reporter: Reporter,
    traces: Traces,
) -> io::Result<Engine<M::Codec>> {
    let (batches, queued) = mpsc::channel::<Batch<Item<M::Codec>>>(1);
    let (done_in, done) = mpsc::channel(2);
    let (loaded_in, loaded) = oneshot::channel();
    thread::Builder::new().name("model".into()).spawn(move || match Forward::<M>::load(&spec, reporter) {
        Ok((forward, known)) => {
            drop(loaded_in.send(Ok(known)));
            serve(forward, queued, &done_in, &traces);
        }
        Err(error) => drop(loaded_in.send(Err(error))),
    })?;
    Ok(Engine { batches, done, loaded })
}

/// Computes batches until nobody sends or wants any more.
fn serve<M: Model>(
    mut forward: Forward<M>,
    mut queued: mpsc::Receiver<Batch<Item<M::Codec>>>,
    done: &mpsc::Sender<Done>,
    traces: &Traces,
) {
    let mut number = 0;
    let mut idle = true;
    loop {
        let next = match queued.try_recv() {
            Err(TryRecvError::Empty) => {
                if !std::mem::replace(&mut idle, true) {
                    forward.announce_idle();
                }
                queued.blocking_recv()
            }
            next => next.ok(),
        };
        let Some(batch) = next else { return };
        // Not before: a batch that waits here for the device can still be handed back.
        let said = match still_wanted(batch) {
            None => Done::Unwanted,
            Some(batch) => {
                idle = false;
                number += 1;
                let began = traces.now();
                let said = compute(&mut forward, &batch, number);
                passed(traces, began, &batch, &said);
                said
            }
        };
        let over = matches!(said, Done::Fault(_));
        if done.blocking_send(said).is_err() || over {
            return;
        }
    }
}

fn compute<M: Model>(forward: &mut Forward<M>, batch: &Batch<Item<M::Codec>>, number: u64) -> Done {
    let began = Instant::now();
    let (inputs, tokens) = (batch.inputs.len(), batch.tokens);
    let pass = Pass { number, size: inputs, tokens };
    match forward.compute(&batch.inputs, began, pass) {
        Ok(()) => Done::Computed { inputs, tokens, took: began.elapsed(), too_large: forward.too_large() },
        Err(fault) => Done::Fault(fault),
    }
}
