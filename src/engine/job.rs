//! One task in the engine, through its states: its inputs are to be made ([`Prepared::Later`]), are made
//! ([`PreparedJob`]), are enqueued ([`EnqueuedJob`]). If inputs are made on demand, a [`FurtherInputs`] makes the later ones.
//! The worker holds the job, and the loop its inputs; they share an [`Outputs`].

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;

use super::memory::Reservation;
use super::outputs::{Outputs, Sizes};
use super::queue::{InputQueue, Item};
use super::reply::{BRIEF_PARTS, Reply};
use super::{InputSource, Job, JobEvent, Memory, Prepared, PreparedJob, Queue, Unwritten, now};
use crate::batching::Group;
use crate::model::{
    Announced, Body, Effort, FileUrl, Files, Inputs, Message, Processor, Route, SizedInput, Slices,
    Streaming, TaskError,
};

/// The engine as the worker holds it: the processor and the queue to the loop. Dropping it closes the queue.
pub(super) struct Handle<P: Processor> {
    parts: Arc<EngineParts<P>>,
    /// The queue of `parts`.
    queue: Arc<dyn Queue>,
}

/// The parts of an engine that jobs use.
struct EngineParts<P: Processor> {
    processor: P,
    queue: Arc<dyn InputQueue<P>>,
    memory: Arc<Memory>,
}

impl<P: Processor> Handle<P> {
    pub(super) fn new(processor: P, queue: Arc<dyn InputQueue<P>>, memory: Arc<Memory>) -> Self {
        Self { queue: queue.clone(), parts: Arc::new(EngineParts { processor, queue, memory }) }
    }
}

impl<P: Processor> Drop for Handle<P> {
    fn drop(&mut self) {
        self.parts.queue.close();
    }
}

impl<P: Processor> super::Engine for Handle<P> {
    fn routes(&self) -> &[Route] {
        self.parts.processor.routes()
    }

    fn preprocess(&self, message: &Message, files: &Files) -> Result<Prepared, TaskError> {
        let engine = self.parts.clone();
        let (context, inputs) = engine.processor.preprocess_with(message, files)?;
        Ok(match inputs {
            Inputs::Later(_) => Prepared::Later(Box::new(move || engine.prepared(context, inputs))),
            Inputs::All(_) | Inputs::Slices(_) => Prepared::Made(engine.prepared(context, inputs)?),
        })
    }

    fn file_urls(&self, message: &Message) -> Vec<FileUrl> {
        self.parts.processor.file_urls(message)
    }

    fn effort(&self, message: &Message) -> Effort {
        self.parts.processor.effort(message)
    }

    fn memory(&self) -> &Arc<Memory> {
        &self.parts.memory
    }

    fn queue(&self) -> &Arc<dyn Queue> {
        &self.queue
    }
}

/// Inputs of a task that were made together.
struct Slice<P: Processor> {
    inputs: Vec<SizedInput<P::Input>>,
    /// Until the inputs are enqueued, each with a reservation of its own.
    _memory: Option<Reservation>,
    /// The source of the inputs after these, if there are any.
    further: Option<Slices<P::Input>>,
}

impl<P: Processor> Slice<P> {
    fn sizes(&self) -> Sizes {
        let tokens = self.inputs.iter().map(|input| input.tokens).sum();
        Sizes { inputs: self.inputs.len(), tokens }
    }
}

impl<P: Processor> EngineParts<P> {
    /// Makes all inputs of a task, or the first slice of them.
    fn prepared(
        self: Arc<Self>,
        context: P::Context,
        inputs: Inputs<P::Input>,
    ) -> Result<PreparedJob, TaskError> {
        let first = self.first_slice(inputs)?;
        let Sizes { inputs, tokens } = first.sizes();
        let estimate = self.estimate(&context, &first.inputs);
        let streaming = self.processor.streaming(&context);
        let are_parts_brief = streaming != Streaming::Off && self.processor.are_parts_brief(&context);
        let enqueue = move |task, group| -> Box<dyn Job> {
            let (engine, outputs) = (self, Arc::new(Outputs::new(task, streaming)));
            let further = engine.enqueue(first, &outputs, group).map(|slices| {
                let (engine, outputs) = (engine.clone(), outputs.clone());
                Arc::new(FurtherInputs { engine, outputs, group, slices: Mutex::new(Some(slices)) })
            });
            let reply = Arc::new(Mutex::new(Reply::new(context)));
            Box::new(EnqueuedJob {
                engine,
                reply,
                streaming,
                are_parts_brief,
                outputs: WantedOutputs(outputs),
                further,
            })
        };
        Ok(PreparedJob { inputs, tokens, estimate, enqueue: Box::new(enqueue) })
    }

    /// Makes the first inputs of a task.
    fn first_slice(&self, inputs: Inputs<P::Input>) -> Result<Slice<P>, TaskError> {
        match inputs {
            Inputs::All(inputs) => self.checked_slice(inputs, None),
            Inputs::Slices(slices) => self.next_slice(slices),
            Inputs::Later(later) => self.first_slice(later()?),
        }
    }

    /// Makes the next slice.
    fn next_slice(&self, mut slices: Slices<P::Input>) -> Result<Slice<P>, TaskError> {
        match slices.next().transpose()? {
            None => self.checked_slice(Vec::new(), None),
            Some(inputs) => {
                let is_last = slices.size_hint().1 == Some(0);
                self.checked_slice(inputs, (!is_last).then_some(slices))
            }
        }
    }

    /// Checks prepared inputs. `further`: the source of the inputs after these.
    fn checked_slice(
        &self,
        inputs: Vec<SizedInput<P::Input>>,
        further: Option<Slices<P::Input>>,
    ) -> Result<Slice<P>, TaskError> {
        self.queue.check(&inputs)?;
        let bytes = inputs.iter().map(|sized| self.processor.bytes(&sized.input)).sum();
        self.memory.learn_slice(bytes);
        Ok(Slice { inputs, _memory: self.memory.reserve(None, bytes), further })
    }

    /// As [`PreparedJob::estimate`](PreparedJob), for a task with these first inputs.
    fn estimate(&self, context: &P::Context, first: &[SizedInput<P::Input>]) -> Option<Duration> {
        let steps_of = |input: &SizedInput<P::Input>| steps(input.encode_tokens > 0, input.answer_tokens);
        let (inputs, steps) = match self.processor.announced(context) {
            // Inputs that are made on demand are windows, which are encoded.
            Some(Announced { inputs, answer_tokens }) => (inputs, steps(true, answer_tokens)),
            None => (first.len(), first.iter().map(steps_of).max()?),
        };
        self.queue.estimate(inputs, steps)
    }

    /// Hands a slice to the model thread, and returns the source of the next one.
    fn enqueue(
        &self,
        slice: Slice<P>,
        outputs: &Arc<Outputs<P>>,
        group: Option<Group>,
    ) -> Option<Slices<P::Input>> {
        let sizes = slice.sizes();
        let Slice { inputs, _memory, further } = slice;
        let first_index = outputs.grow(sizes, further.is_some());
        let item = |(index, sized): (usize, SizedInput<P::Input>)| {
            let bytes = self.processor.bytes(&sized.input);
            let memory = self.memory.reserve(Some(outputs.task.owner), bytes);
            Item::new(sized, index, outputs.clone(), memory)
        };
        if !inputs.is_empty() {
            self.queue.enqueue((first_index..).zip(inputs).map(item).collect(), group);
        }
        further
    }
}

/// The steps of a sequence: those that encode its window, compute its prompt, and generate its tokens.
fn steps(is_encoded: bool, answer_tokens: usize) -> usize {
    usize::from(is_encoded) + 1 + answer_tokens
}

/// Makes the further inputs of a task.
struct FurtherInputs<P: Processor> {
    engine: Arc<EngineParts<P>>,
    outputs: Arc<Outputs<P>>,
    group: Option<Group>,
    /// None: all slices are made, or one failed. Locked while a slice is made; the worker requests one at a time.
    slices: Mutex<Option<Slices<P::Input>>>,
}

impl<P: Processor> InputSource for FurtherInputs<P> {
    fn poll_wanted(&self, context: &mut Context<'_>) -> Poll<bool> {
        self.outputs.poll_wanted(context, self.engine.queue.lookahead())
    }

    fn pull(&self) -> Result<(), TaskError> {
        if self.outputs.is_over() {
            return Ok(());
        }
        if let Some(error) = self.outputs.task.unwanted(now()) {
            return Err(error);
        }
        let mut further = self.slices.lock();
        if let Some(slices) = further.take() {
            *further = self.engine.enqueue(self.engine.next_slice(slices)?, &self.outputs, self.group);
        }
        Ok(())
    }
}

/// The job's reference to its outputs. Once it is dropped, they are not needed any more.
struct WantedOutputs<P: Processor>(Arc<Outputs<P>>);

impl<P: Processor> Drop for WantedOutputs<P> {
    fn drop(&mut self) {
        self.0.end();
    }
}

struct EnqueuedJob<P: Processor> {
    engine: Arc<EngineParts<P>>,
    /// Locked by whoever writes parts of the reply, on the worker's thread or on a reply thread, and by the job between
    /// two writes. They never contend, because the worker waits until parts are written. The model thread never locks
    /// it.
    reply: Arc<Mutex<Reply<P>>>,
    streaming: Streaming,
    are_parts_brief: bool,
    outputs: WantedOutputs<P>,
    /// None if all inputs are in the first slice.
    further: Option<Arc<FurtherInputs<P>>>,
}

impl<P: Processor> Job for EnqueuedJob<P> {
    fn inputs(&self) -> usize {
        self.outputs.0.sizes().inputs
    }

    fn tokens(&self) -> usize {
        self.outputs.0.sizes().tokens
    }

    fn is_streamed(&self) -> bool {
        self.streaming != Streaming::Off
    }

    fn source(&self) -> Option<Arc<dyn InputSource>> {
        self.further.clone().map(|further| further as Arc<dyn InputSource>)
    }

    fn poll_event(&mut self, context: &mut Context<'_>, parts: bool) -> Poll<JobEvent> {
        let outputs = &self.outputs.0;
        if let Poll::Ready(computed) = outputs.poll_done(context) {
            return Poll::Ready(JobEvent::Done(computed));
        }
        if parts && let Some(unwritten) = self.unwritten() {
            return Poll::Ready(JobEvent::Parts(unwritten));
        }
        outputs.want_part(context, parts);
        Poll::Pending
    }

    fn unwritten(&self) -> Option<Unwritten> {
        let outputs = &self.outputs.0;
        // The outputs are not locked while the reply is, because the model thread locks them for each piece.
        let (pieces, next) = outputs.take_for_parts()?;
        let mut reply = self.reply.lock();
        reply.add(pieces, next);
        if !reply.has_parts() {
            return None;
        }
        let is_brief = self.are_parts_brief && reply.has_at_most(BRIEF_PARTS);
        drop(reply);
        let (engine, reply, task) = (self.engine.clone(), self.reply.clone(), outputs.task.clone());
        let write = Box::new(move || reply.lock().write_parts(&engine.processor, &task.name.id));
        Some(Unwritten { write, is_brief })
    }

    fn is_finish_slow(&self) -> bool {
        self.reply.lock().is_finish_slow(&self.engine.processor)
    }

    fn finish(self: Box<Self>) -> Result<Body, TaskError> {
        let Self { engine, reply, outputs, .. } = *self;
        let outputs = outputs.0.take()?;
        let reply = Arc::into_inner(reply).ok_or_else(|| TaskError::internal("a part is being written"))?;
        reply.into_inner().finish(&engine.processor, outputs)
    }
}
