//! What a loop's queue takes from jobs: inputs of tasks. Each of the loops has its own queue.

use std::sync::Arc;
use std::time::Duration;

use super::memory::Reservation;
use super::outputs::{Lookahead, Outputs};
use super::{Queue, TaskState};
use crate::batching::Group;
use crate::model::{Processor, SizedInput, TaskError};

/// One input of a task, on its way through the device.
pub(super) struct Item<P: Processor> {
    pub(super) input: P::Input,
    /// This and the next two fields are those of [`SizedInput`].
    pub(super) encode_tokens: usize,
    pub(super) tokens: usize,
    pub(super) answer_tokens: usize,
    /// Index of the input within its task.
    pub(super) index: usize,
    pub(super) outputs: Arc<Outputs<P>>,
    _memory: Option<Reservation>,
}

impl<P: Processor> Item<P> {
    /// `memory`: what is reserved for the input until it is computed.
    pub(super) fn new(
        sized: SizedInput<P::Input>,
        index: usize,
        outputs: Arc<Outputs<P>>,
        memory: Option<Reservation>,
    ) -> Self {
        let SizedInput { input, encode_tokens, tokens, answer_tokens } = sized;
        Self { input, encode_tokens, tokens, answer_tokens, index, outputs, _memory: memory }
    }

    pub(super) fn task(&self) -> &Arc<TaskState> {
        &self.outputs.task
    }
}

/// The queue of items for a loop. Written by jobs on the worker's thread and by their further inputs on the preprocess
/// threads, read by the loop.
pub(super) trait InputQueue<P: Processor>: Queue {
    /// Enqueues items of one task: all, or a slice of them. They stay adjacent.
    fn enqueue(&self, items: Vec<Item<P>>, group: Option<Group>);
    /// Refuses inputs that this model can never compute.
    fn check(&self, inputs: &[SizedInput<P::Input>]) -> Result<(), TaskError>;
    /// As [`PreparedJob::estimate`](super::PreparedJob), for a number of inputs that each take at most this many
    /// steps.
    fn estimate(&self, _inputs: usize, _steps: usize) -> Option<Duration> {
        None
    }
    /// How much of a task may wait for the model. The default is the number of inputs that run at once, plus one that
    /// joins as soon as another leaves.
    fn lookahead(&self) -> Lookahead {
        Lookahead { inputs: self.sequences().unwrap_or_default() + 1, tokens: usize::MAX }
    }
    /// Called when nothing more will be enqueued. The loop may then end.
    fn close(&self);
}
