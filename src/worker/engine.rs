//! The model thread: loads the model, then computes one batch after the other, for life. Where the device
//! computes beside this thread, it is given the next batch before the last is waited for, so that it never
//! waits for us. Owns the thread and its channels; what happens to a batch is in `forward`. A device fault
//! ends the thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime};
use std::{io, thread};

use tokio::sync::{mpsc, oneshot};

use super::batches::still_wanted;
use super::forward::{Forward, Outcome};
use super::report::Reporter;
use super::ticket::{Complete, Pass, Ticket};
use super::traced::passed;
use crate::batching::Batch;
use crate::model::{Codec, LoadError, LoadSpec, Model, OutputOf, Rest};
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
pub(super) enum Done<O> {
    /// These tasks are to be told. `too_large`: so many tokens found no memory at once.
    Computed {
        complete: Vec<Complete<O>>,
        inputs: usize,
        tokens: usize,
        took: Duration,
        too_large: Option<usize>,
    },
    /// Nobody waited for any of its inputs any more.
    Unwanted,
    /// The device is gone; the batch's inputs are unanswered. Last word of the thread.
    Fault(String),
}

/// What is known once the model is loaded.
pub(super) struct Loaded<C> {
    pub(super) codec: C,
    pub(super) device: String,
    /// Batches that may be under way: one computes, one is at hand; and one more where the device is given
    /// the next while it computes.
    pub(super) depth: usize,
}

/// The model thread's ends.
pub(super) struct Engine<C: Codec> {
    /// Written by the batch former, read by the model thread. Bound: the batches that can be under way, so
    /// that sending one never waits.
    pub(super) batches: SyncSender<Batch<Item<C>>>,
    /// Written by the model thread after each batch, read by the batch former. Bound: one for each
    /// batch that can be under way.
    pub(super) done: mpsc::Receiver<Done<C::Output>>,
    /// The load's end.
    pub(super) loaded: oneshot::Receiver<Result<Loaded<C>, LoadError>>,
}

/// Batches under way at most.
pub(super) const DEPTH: usize = 3;

/// How long the device is idle before the launcher hears of it, if it hears of nothing else. That takes a core
/// for a moment: on a small machine the one that the replies to the last batch are sent from.
const PAUSE: Duration = Duration::from_millis(5);

/// Starts the model thread.
///
/// # Errors
/// The system has no thread for us.
pub(super) fn start<M: Model>(
    (spec, min_speed): (LoadSpec, f64),
    reporter: Reporter,
    traces: Traces,
) -> io::Result<Engine<M::Codec>> {
    let (batches, queued) = sync_channel::<Batch<Item<M::Codec>>>(DEPTH);
    let (done_in, done) = mpsc::channel(DEPTH);
    let (loaded_in, loaded) = oneshot::channel();
    thread::Builder::new().name("model".into()).spawn(move || {
        match Forward::<M>::load(&spec, min_speed, reporter) {
            Ok((forward, known)) => {
                drop(loaded_in.send(Ok(known)));
                let mut service =
                    Service { forward, done: done_in, traces, number: 0, ahead: None, freed: Instant::now() };
                service.serve(queued);
                // The process is about to end, and a driver takes back all it had. To give it back here, while
                // the process and with it the driver may be ending already, would be a race with a crash.
                std::mem::forget((service.forward, service.ahead));
            }
            Err(error) => drop(loaded_in.send(Err(error))),
        }
    })?;
    Ok(Engine { batches, done, loaded })
}

/// The model thread at work.
struct Service<M: Model> {
    forward: Forward<M>,
    done: mpsc::Sender<Done<OutputOf<M>>>,
    traces: Traces,
    /// Batches so far.
    number: u64,
    /// On the device, which computes it beside this thread.
    ahead: Option<UnderWay<M>>,
    /// When the last batch was done.
    freed: Instant,
}

/// A batch whose computation has begun.
struct UnderWay<M: Model> {
    batch: Batch<Item<M::Codec>>,
    number: u64,
    began: Instant,
    /// The same for spans.
    began_at: Option<SystemTime>,
    rest: Rest<M>,
}

impl<M: Model> Service<M> {
    /// Computes batches until nobody sends or wants any more.
    fn serve(&mut self, queued: Receiver<Batch<Item<M::Codec>>>) {
        let mut idle = true;
        loop {
            let goes_on = match queued.try_recv() {
                Ok(batch) => self.take(batch),
                Err(_) if self.ahead.is_some() => self.finish_ahead(true),
                Err(_) => match self.wait(&queued, idle) {
                    Some(batch) => self.take(batch),
                    None => false,
                },
            };
            if !goes_on {
                return;
            }
            idle = false;
        }
    }

    /// Waits for a batch; none will come: none. The launcher knows that the device is `idle`, or is told.
    fn wait(&self, queued: &Receiver<Batch<Item<M::Codec>>>, idle: bool) -> Option<Batch<Item<M::Codec>>> {
        if !idle {
            match queued.recv_timeout(PAUSE) {
                Ok(batch) => return Some(batch),
                Err(RecvTimeoutError::Timeout) => self.forward.tell_idle(),
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        queued.recv().ok()
    }

    /// Begins a batch, and ends the one before it. False: it was the last.
    fn take(&mut self, batch: Batch<Item<M::Codec>>) -> bool {
        // Not before: a batch that waits here for the device can still be handed back.
        let Some(batch) = still_wanted(batch) else { return self.say(Done::Unwanted) };
        self.number += 1;
        let (number, began, began_at) = (self.number, Instant::now(), self.traces.now());
        let beside = self.ahead.as_ref().map(|ahead| &*ahead.batch.inputs);
        let now = match self.forward.begin(&batch.inputs, beside) {
            Some(Ok(rest)) => {
                let before = self.ahead.replace(UnderWay { batch, number, began, began_at, rest });
                return before.is_none_or(|before| self.finish(before, false));
            }
            Some(Err(error)) => Some(error),
            None => None,
        };
        if !self.finish_ahead(false) {
            return false;
        }
        let outcome = match now {
            Some(error) => {
                self.forward.mark_idle();
                Err(error)
            }
            None => self.forward.pass(&batch.inputs),
        };
        self.end(&batch, outcome, (number, began, began_at))
    }

    fn finish_ahead(&mut self, idle: bool) -> bool {
        self.ahead.take().is_none_or(|ahead| self.finish(ahead, idle))
    }

    /// Ends a batch whose computation has begun. Behind it the device is `idle`, or has another.
    fn finish(&mut self, under_way: UnderWay<M>, idle: bool) -> bool {
        let UnderWay { batch, number, began, began_at, rest } = under_way;
        let outcome = self.forward.wait(rest, batch.inputs.len());
        if idle {
            self.forward.mark_idle();
        }
        self.end(&batch, outcome, (number, began, began_at))
    }

    /// Gives out what became of a batch. False: the thread is over.
    fn end(
        &mut self,
        batch: &Batch<Item<M::Codec>>,
        outcome: Outcome<M>,
        (number, began, began_at): (u64, Instant, Option<SystemTime>),
    ) -> bool {
        let (inputs, tokens) = (batch.inputs.len(), batch.tokens);
        // From when on the device had nothing else to do.
        let began = began.max(self.freed);
        let pass = Pass { number, size: inputs, tokens };
        let said = match self.forward.settle(&batch.inputs, outcome, began, pass) {
            Ok(()) => {
                self.freed = Instant::now();
                let (took, too_large) = (self.freed - began, self.forward.too_large());
                Done::Computed { complete: self.forward.complete(), inputs, tokens, took, too_large }
            }
            Err(fault) => {
                // The launcher has heard, or is about to, that the device is idle.
                self.forward.announce(&[], &batch.inputs);
                Done::Fault(fault)
            }
        };
        passed(&self.traces, began_at, batch, &said);
        self.say(said)
    }

    fn say(&self, said: Done<OutputOf<M>>) -> bool {
        let over = matches!(said, Done::Fault(_));
        self.done.blocking_send(said).is_ok() && !over
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
