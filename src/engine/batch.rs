//! Computes one batch of a one-pass model, and decides what its failure means. A failed batch is halved until the
//! failing input is alone. Before that input is blamed, and before the worker takes any work, the probe (a known input)
//! must pass. If the probe fails, the device is broken and no task is answered. Owns the network.

use std::time::Instant;

use super::panics::guarded;
use super::probe::ProbeError;
use super::queue::Item;
use super::{Notices, Observer, Pass, now};
use crate::model::{Forward, ForwardError, Processor, TaskError, TaskErrorKind};
use crate::protocol::control::TaskName;

/// The result of a forward pass: one entry for each input, or one error for the batch.
pub(super) type Outcome<P> = Result<Vec<Result<<P as Processor>::Output, TaskError>>, ForwardError>;

/// The loaded network of a one-pass model, with its probe.
pub(super) struct Network<P: Processor, F> {
    network: F,
    /// The probe's inputs; empty if the model has no probe.
    probe: Vec<P::Input>,
    /// Tokens of the smallest batch that was too large for the memory since the last call of `take_too_large`.
    too_large: Option<usize>,
    pub(super) notices: Notices,
    pub(super) observer: Box<dyn Observer>,
}

impl<P: Processor, F: Forward<Input = P::Input, Output = P::Output>> Network<P, F> {
    pub(super) fn new(network: F, observer: Box<dyn Observer>, notices: Notices) -> Self {
        Self { network, probe: Vec::new(), too_large: None, notices, observer }
    }

    /// Computes the probe of `processor`, and keeps its inputs for later checks.
    ///
    /// # Errors
    /// The model refuses its probe, or the device cannot be trusted.
    pub(super) fn try_probe(&mut self, processor: &P) -> Result<(), ProbeError> {
        let Some(message) = processor.probe() else { return Ok(()) };
        let (context, inputs) = processor.preprocess(&message)?;
        let inputs = inputs.all()?;
        if inputs.is_empty() {
            return Err(ProbeError::Refused("it has no input".to_owned()));
        }
        self.probe = inputs.into_iter().map(|sized| sized.input).collect();
        let outputs = self.compute_probe()?;
        Ok(processor.finish(context, outputs).map(drop)?)
    }

    fn compute_probe(&mut self) -> Result<Vec<P::Output>, ProbeError> {
        let inputs: Vec<&P::Input> = self.probe.iter().collect();
        let outputs =
            guarded(|| self.network.forward(&inputs)).and_then(|it| one_per_input(it, inputs.len()));
        Ok(outputs.map_err(ProbeError::failed)?.into_iter().collect::<Result<_, _>>()?)
    }

    /// Computes the probe again, to check the device after a failure with this `error`.
    fn check_device(&mut self, error: &str) -> Result<(), String> {
        if self.probe.is_empty() {
            return Ok(());
        }
        self.compute_probe().map(drop).map_err(|failure| format!("{failure} (after: {error})"))
    }

    pub(super) fn is_asynchronous(&self) -> bool {
        self.network.is_asynchronous()
    }

    /// Submits `items` to the device. `computing`: the items that the device is already computing.
    pub(super) fn submit(
        &mut self,
        items: &[Item<P>],
        computing: Option<&[Item<P>]>,
    ) -> Result<F::Pending, ForwardError> {
        self.announce(computing.unwrap_or_default(), items);
        let inputs: Vec<&P::Input> = items.iter().map(|item| &item.input).collect();
        guarded(|| self.network.submit(&inputs))
    }

    pub(super) fn wait(&mut self, pending: F::Pending, inputs: usize) -> Outcome<P> {
        one_per_input(guarded(|| self.network.wait(pending))?, inputs)
    }

    /// Delivers the outputs of `items`, or finds the inputs at fault. Returns how many of them need more memory than there
    /// is even when they are alone. Fails if the device is broken.
    pub(super) fn settle(
        &mut self,
        items: &[Item<P>],
        outcome: Outcome<P>,
        began: Instant,
        pass: Pass,
    ) -> Result<usize, String> {
        let (kind, error) = match outcome {
            Ok(outputs) => return self.deliver(items, outputs, began, pass).map(|()| 0),
            Err(ForwardError::Device(fault)) => return Err(fault),
            Err(ForwardError::OutOfMemory(error)) => (TaskErrorKind::OutOfMemory, error),
            Err(ForwardError::Failed(error)) => (TaskErrorKind::Fault, error),
        };
        if let [alone] = items {
            self.check_device(&error)?;
            let error = TaskError::new(kind, error);
            tracing::warn!(task.id = alone.task().name.id, %error, "the model failed on an input");
            alone.outputs.record_pass(began, now() - began, pass);
            self.notices.deliver(alone, Err(error));
            return Ok(usize::from(kind == TaskErrorKind::OutOfMemory));
        }
        let mut giants = 0;
        tracing::warn!(batch.size = items.len(), error, "a batch failed; trying its halves");
        let (first, second) = items.split_at(items.len() / 2);
        for half in [first, second] {
            // The inputs of a task that has failed need no pass, however many there are.
            let half = without_ended(half);
            if half.is_empty() {
                continue;
            }
            let pending = self.submit(half, None);
            let outcome = pending.and_then(|pending| self.wait(pending, half.len()));
            self.observer.mark_idle();
            // `began` stays: the time of the failed pass counts too.
            giants += self.settle(half, outcome, began, pass)?;
            // Sent now, because computing the other half may end this process.
            self.notices.send_done();
        }
        // A few inputs that fail alone too are at fault themselves. If all do, the memory has become scarce.
        if kind == TaskErrorKind::OutOfMemory && (giants == 0 || giants == items.len()) {
            let tokens = items.iter().map(|item| item.tokens).sum();
            self.too_large = Some(self.too_large.map_or(tokens, |smallest| smallest.min(tokens)));
        }
        Ok(giants)
    }

    fn deliver(
        &mut self,
        items: &[Item<P>],
        outputs: Vec<Result<P::Output, TaskError>>,
        began: Instant,
        pass: Pass,
    ) -> Result<(), String> {
        // A model may report its own fault on an input (such as a result that is not a number) because the device is
        // broken.
        let model_fault = |output: &Result<_, TaskError>| {
            let error = output.as_ref().err()?;
            error.kind.blames_the_model().then(|| error.message.clone())
        };
        if let Some(error) = outputs.iter().find_map(model_fault) {
            self.check_device(&error)?;
        }
        let took = now() - began;
        for (item, output) in items.iter().zip(outputs) {
            item.outputs.record_pass(began, took, pass);
            self.notices.deliver(item, output);
        }
        Ok(())
    }

    /// Reports to the launcher, before a pass, which tasks will be on the device: those that it is still `computing`,
    /// and those of `items`.
    pub(super) fn announce(&self, computing: &[Item<P>], items: &[Item<P>]) {
        let mut tasks: Vec<TaskName> = Vec::with_capacity(computing.len() + items.len());
        for item in computing.iter().chain(items) {
            // The inputs of one task are adjacent.
            if tasks.last() != Some(&item.task().name) {
                tasks.push(item.task().name.clone());
            }
        }
        self.observer.on_device(tasks);
    }

    /// Tokens of the smallest batch that was too large for the memory since the last call.
    pub(super) fn take_too_large(&mut self) -> Option<usize> {
        self.too_large.take()
    }
}

/// The items between the first and the last whose task is not over. The inputs of one task are adjacent.
fn without_ended<P: Processor>(items: &[Item<P>]) -> &[Item<P>] {
    let is_wanted = |item: &Item<P>| !item.outputs.is_over();
    let first = items.iter().position(is_wanted).unwrap_or(items.len());
    let end = items.iter().rposition(is_wanted).map_or(first, |last| last + 1);
    items.get(first..end).unwrap_or_default()
}

/// Returns the outputs if there is one for each input.
fn one_per_input<O>(outputs: Vec<O>, inputs: usize) -> Result<Vec<O>, ForwardError> {
    if outputs.len() == inputs {
        return Ok(outputs);
    }
    let found = outputs.len();
    Err(ForwardError::Failed(format!("the model returned {found} results for {inputs} inputs")))
}
