//! One batch through the model, and what a failure means. A batch that fails is halved until the
//! culprit is alone. Before that one is blamed, and before the worker takes any work at all, a known
//! input has to pass: where it does not, the device is broken, and no task is answered for it. The
//! one boundary where a panic of a model is caught. Owns the model; announces every pass.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::engine::{DEPTH, Item, Loaded};
use super::report::Reporter;
use super::ticket::{Complete, Pass};
use crate::model::{
    Codec, Costed, ForwardError, InputOf, LoadError, LoadSpec, Model, OutputOf, Prepared, Rest, Step, Steps,
};
use crate::protocol::control::TaskName;
use crate::protocol::{TaskError, TaskErrorKind};

/// A loaded model, at work.
pub(super) struct Forward<M: Model> {
    model: M,
    /// The known input; none where the model has no such.
    known: Vec<InputOf<M>>,
    /// Tokens of the smallest batch that has found no memory since this was last asked for.
    too_large: Option<usize>,
    /// Tasks that were completed since this was last asked for.
    complete: Vec<Complete<OutputOf<M>>>,
    reporter: Reporter,
}

type Outputs<M> = Vec<Result<OutputOf<M>, TaskError>>;
/// What a forward pass gave: one entry an input, or nothing.
pub(super) type Outcome<M> = Result<Outputs<M>, ForwardError>;

impl<M: Model> Forward<M> {
    /// Has the device prove itself, loads the model, and has it compute the known input.
    ///
    /// # Errors
    /// It cannot be loaded, or its device computes nothing, wrongly, or more slowly than `min_speed` allows.
    pub(super) fn load(
        spec: &LoadSpec,
        min_speed: f64,
        reporter: Reporter,
    ) -> Result<(Self, Loaded<M::Codec>), LoadError> {
        // Kept while the model opens the device for itself.
        let _proven = M::prove(spec, min_speed)?;
        let (model, codec) = M::load(spec)?;
        let device = model.device();
        let mut forward = Self { model, known: Vec::new(), too_large: None, complete: Vec::new(), reporter };
        forward.try_known(&codec).map_err(|reason| LoadError::Device { device: device.clone(), reason })?;
        let depth = if forward.model.computes_aside() { DEPTH } else { DEPTH - 1 };
        Ok((forward, Loaded { codec, device, depth }))
    }

    fn try_known(&mut self, codec: &M::Codec) -> Result<(), String> {
        let Some(message) = codec.known_input() else { return Ok(()) };
        let failed = |error: TaskError| format!("a known input fails: {error}");
        let Prepared { request, inputs } = codec.prepare(&message).map_err(failed)?;
        self.known = inputs.into_iter().map(|Costed { input, .. }| input).collect();
        let outputs = self.compute_known()?;
        codec.respond(request, outputs).map(drop).map_err(failed)
    }

    fn compute_known(&mut self) -> Result<Vec<OutputOf<M>>, String> {
        let inputs: Vec<&InputOf<M>> = self.known.iter().collect();
        let outputs = attempt(&mut self.model, &inputs);
        let outputs = outputs.map_err(|error| format!("a known input fails: {error}"))?;
        outputs.into_iter().collect::<Result<_, _>>().map_err(|error| format!("a known input fails: {error}"))
    }

    /// Whether the device is well, after something failed with these words.
    fn prove_device(&mut self, words: &str) -> Result<(), String> {
        if self.known.is_empty() {
            return Ok(());
        }
        self.compute_known().map(drop).map_err(|error| format!("{error} (after: {words})"))
    }

    /// Hands `items` to a device that computes beside this thread; `beside` are those that it computes
    /// meanwhile. None: the device does not, and the caller takes its time with [`Forward::pass`].
    pub(super) fn begin(
        &mut self,
        items: &[Item<M::Codec>],
        beside: Option<&[Item<M::Codec>]>,
    ) -> Option<Result<Rest<M>, ForwardError>> {
        self.announce(beside.unwrap_or_default(), items);
        let inputs: Vec<&InputOf<M>> = items.iter().map(|item| &item.input).collect();
        guarded(|| self.model.begin(&inputs)).transpose()
    }

    /// Computes `items`, which have been announced.
    pub(super) fn pass(&mut self, items: &[Item<M::Codec>]) -> Outcome<M> {
        let inputs: Vec<&InputOf<M>> = items.iter().map(|item| &item.input).collect();
        let outcome = attempt(&mut self.model, &inputs);
        self.mark_idle();
        outcome
    }

    /// Waits for what was begun with so many inputs.
    pub(super) fn wait(&mut self, rest: Rest<M>, inputs: usize) -> Outcome<M> {
        complete::<M>(guarded(|| rest(&mut self.model))?, inputs)
    }

    /// Gives each ticket of `items` its output, or finds the cause of the failure. What is complete then is
    /// in [`Forward::complete`]. Fails when the device did.
    pub(super) fn settle(
        &mut self,
        items: &[Item<M::Codec>],
        outcome: Outcome<M>,
        began: Instant,
        pass: Pass,
    ) -> Result<(), String> {
        let (kind, words) = match outcome {
            Ok(outputs) => return self.deliver(items, outputs, began, pass),
            Err(ForwardError::Device(fault)) => return Err(fault),
            Err(ForwardError::OutOfMemory(words)) => (TaskErrorKind::OutOfMemory, words),
            Err(ForwardError::Failed(words)) => (TaskErrorKind::Fault, words),
        };
        if let [alone] = items {
            self.prove_device(&words)?;
            let error = TaskError::new(kind, words);
            tracing::warn!(task.id = alone.ticket.name.id, %error, "the model failed on an input");
            self.complete.extend(alone.ticket.deliver(alone.index, Err(error), began, pass));
            return Ok(());
        }
        if kind == TaskErrorKind::OutOfMemory {
            let tokens = items.iter().map(|item| item.tokens).sum();
            self.too_large = Some(self.too_large.map_or(tokens, |smallest| smallest.min(tokens)));
        }
        tracing::warn!(batch.size = items.len(), error = words, "a batch failed; trying its halves");
        let (first, second) = items.split_at(items.len() / 2);
        for half in [first, second] {
            self.announce(&[], half);
            let outcome = self.pass(half);
            self.settle(half, outcome, began, pass)?;
            // At once: the other half may end this process.
            self.complete().into_iter().for_each(Complete::tell);
        }
        Ok(())
    }

    fn deliver(
        &mut self,
        items: &[Item<M::Codec>],
        outputs: Outputs<M>,
        began: Instant,
        pass: Pass,
    ) -> Result<(), String> {
        // A model that blames itself for an input (a result that is no number, say) may stand on a
        // broken device.
        let own_fault = |output: &Result<_, TaskError>| {
            let error = output.as_ref().err()?;
            let own = matches!(error.kind, TaskErrorKind::Internal | TaskErrorKind::Fault);
            (own || error.kind == TaskErrorKind::OutOfMemory).then(|| error.message.clone())
        };
        if let Some(words) = outputs.iter().find_map(own_fault) {
            self.prove_device(&words)?;
        }
        for (item, output) in items.iter().zip(outputs) {
            self.complete.extend(item.ticket.deliver(item.index, output, began, pass));
        }
        Ok(())
    }

    /// Tells the launcher which tasks are on the device, before they are; or were, where it failed with them.
    pub(super) fn announce(&self, there: &[Item<M::Codec>], items: &[Item<M::Codec>]) {
        let mut tasks: Vec<TaskName> = Vec::with_capacity(there.len() + items.len());
        for item in there.iter().chain(items) {
            // The inputs of a task stand together.
            if tasks.last() != Some(&item.ticket.name) {
                tasks.push(item.ticket.name.clone());
            }
        }
        self.reporter.forward(tasks);
    }

    /// Nothing is on the device any more. The launcher hears of it before anything else, so before anything
    /// that comes of the outputs.
    pub(super) fn mark_idle(&self) {
        self.reporter.mark_idle();
    }

    /// Tells the launcher that nothing is on the device, if it has not heard.
    pub(super) fn tell_idle(&self) {
        self.reporter.tell_idle();
    }

    /// The tasks that were completed since the last call, to be told.
    pub(super) fn complete(&mut self) -> Vec<Complete<OutputOf<M>>> {
        std::mem::take(&mut self.complete)
    }

    /// Tokens of the smallest batch that has found no memory since the last call.
    pub(super) fn too_large(&mut self) -> Option<usize> {
        self.too_large.take()
    }
}

fn attempt<M: Model>(model: &mut M, inputs: &[&InputOf<M>]) -> Outcome<M> {
    complete::<M>(guarded(|| model.forward(inputs))?, inputs.len())
}

/// The error of a panic in its place.
fn guarded<T>(call: impl FnOnce() -> Result<T, ForwardError>) -> Result<T, ForwardError> {
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|panic| Err(ForwardError::Failed(format!("panic: {}", panic_words(panic.as_ref())))))
}

fn complete<M: Model>(steps: Steps<M>, inputs: usize) -> Outcome<M> {
    if steps.len() != inputs {
        let words = format!("the model returned {} results for {inputs} inputs", steps.len());
        return Err(ForwardError::Failed(words));
    }
    Ok(steps.into_iter().map(|step| step.map(|Step::Done(output)| output)).collect())
}

/// What a panic said.
pub(super) fn panic_words(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<&str>().map(|words| (*words).to_owned());
    words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no words".into())
}
