//! One task in the engine. The worker holds the [`Job`] and the data from which the reply is written ([`Reply`]). The
//! loop holds the inputs ([`Item`]s). Both share an [`Outputs`], which the loop writes and the job reads. If inputs are
//! made on demand, a [`FurtherInputs`] makes the later ones.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;

use super::memory::Reservation;
use super::reply::{BRIEF_PARTS, MAX_PIECES, Reply};
use super::{
    Completion, Computed, Expect, InputSource, Job, JobEvent, Memory, Pass, TaskState, Unwritten, now,
};
use crate::batching::Group;
use crate::model::{
    Announced, Body, Effort, FileUrl, Files, Inputs, Later, Message, Processor, Route, SizedInput, Slices,
    Streaming, TaskError,
};

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
    /// Reserves the memory of the slice to which the input belongs.
    _memory: Option<Reservation>,
}

impl<P: Processor> Item<P> {
    pub(super) fn task(&self) -> &Arc<TaskState> {
        &self.outputs.task
    }
}

/// The number of inputs and tokens of one task that may wait for the model. While that many wait, no more of its inputs
/// are prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lookahead {
    pub(super) inputs: usize,
    pub(super) tokens: usize,
}

/// The queue of items for a loop. Written by jobs on the worker's thread and by their [`FurtherInputs`] on the
/// preprocess threads, read by the loop.
pub(super) trait Queue<P: Processor>: Send + Sync {
    /// Enqueues items of one task: all, or a slice of them. They stay adjacent.
    fn enqueue(&self, items: Vec<Item<P>>, group: Option<Group>);
    /// As [`Engine::expect`](super::Engine::expect).
    fn expect(&self, one: Expect);
    /// As [`Engine::isolate`](super::Engine::isolate).
    fn isolate(&self, isolated: Option<Group>);
    /// Refuses inputs that this model can never compute.
    fn check(&self, inputs: &[SizedInput<P::Input>]) -> Result<(), TaskError>;
    /// As [`Job::estimate`], for a number of inputs that each take at most this many steps.
    fn estimate(&self, _inputs: usize, _steps: usize) -> Option<Duration> {
        None
    }
    /// As [`Engine::depth`](super::Engine::depth).
    fn depth(&self) -> usize;
    /// As [`Engine::sequences`](super::Engine::sequences).
    fn sequences(&self) -> Option<usize>;
    /// How much of a task may wait for the model. The default is the number of inputs that run at once, plus one that
    /// joins as soon as another leaves.
    fn lookahead(&self) -> Lookahead {
        Lookahead { inputs: self.sequences().unwrap_or_default() + 1, tokens: usize::MAX }
    }
    /// Called when nothing more will be enqueued. The loop may then end.
    fn close(&self);
}

/// The engine as the worker holds it: the processor and the queue to the loop. Dropping it closes the queue.
pub(super) struct Handle<P: Processor>(Arc<EngineParts<P>>);

/// The parts of an engine that jobs use.
struct EngineParts<P: Processor> {
    processor: P,
    queue: Arc<dyn Queue<P>>,
    memory: Arc<Memory>,
}

impl<P: Processor> Handle<P> {
    pub(super) fn new(processor: P, queue: Arc<dyn Queue<P>>, memory: Arc<Memory>) -> Self {
        Self(Arc::new(EngineParts { processor, queue, memory }))
    }
}

impl<P: Processor> Drop for Handle<P> {
    fn drop(&mut self) {
        self.0.queue.close();
    }
}

impl<P: Processor> EngineParts<P> {
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

    /// Makes the first inputs of a task, unless that takes long.
    fn first_slice(&self, inputs: Inputs<P::Input>) -> Result<FirstSlice<P>, TaskError> {
        Ok(match inputs {
            Inputs::All(inputs) => FirstSlice::Made(self.checked_slice(inputs, None)?),
            Inputs::Slices(slices) => FirstSlice::Made(self.next_slice(slices)?),
            Inputs::Later(later) => FirstSlice::Later(later),
        })
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
            let SizedInput { input, encode_tokens, tokens, answer_tokens } = sized;
            let bytes = self.processor.bytes(&input);
            let _memory = self.memory.reserve(Some(outputs.task.owner), bytes);
            let outputs = outputs.clone();
            Item { input, encode_tokens, tokens, answer_tokens, index, outputs, _memory }
        };
        if !inputs.is_empty() {
            self.queue.enqueue((first_index..).zip(inputs).map(item).collect(), group);
        }
        further
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

impl<P: Processor> super::Engine for Handle<P> {
    fn routes(&self) -> &[Route] {
        self.0.processor.routes()
    }

    fn preprocess(&self, message: &Message, files: &Files) -> Result<Box<dyn Job>, TaskError> {
        let engine = self.0.clone();
        let (context, inputs) = engine.processor.preprocess_with(message, files)?;
        let first = engine.first_slice(inputs)?;
        let streaming = engine.processor.streaming(&context);
        let are_parts_brief = streaming != Streaming::Off && engine.processor.are_parts_brief(&context);
        let announced = engine.processor.announced(&context);
        let reply = Arc::new(Mutex::new(Reply::new(context)));
        Ok(Box::new(Task {
            engine,
            reply,
            streaming,
            are_parts_brief,
            announced,
            first,
            outputs: None,
            further: None,
        }))
    }

    fn file_urls(&self, message: &Message) -> Vec<FileUrl> {
        self.0.processor.file_urls(message)
    }

    fn effort(&self, message: &Message) -> Effort {
        self.0.processor.effort(message)
    }

    fn memory(&self) -> &Arc<Memory> {
        &self.0.memory
    }

    fn expect(&self, one: Expect) {
        self.0.queue.expect(one);
    }

    fn isolate(&self, isolated: Option<Group>) {
        self.0.queue.isolate(isolated);
    }

    fn depth(&self) -> usize {
        self.0.queue.depth()
    }

    fn sequences(&self) -> Option<usize> {
        self.0.queue.sequences()
    }
}

/// The number of some inputs, and of their tokens.
#[derive(Clone, Copy, Default)]
struct Sizes {
    inputs: usize,
    tokens: usize,
}

/// The first inputs of a task, until they are enqueued.
enum FirstSlice<P: Processor> {
    /// They must still be made.
    Later(Later<P::Input>),
    Made(Slice<P>),
    Enqueued,
}

/// The steps of a sequence: those that encode its window, compute its prompt, and generate its tokens.
fn steps(is_encoded: bool, answer_tokens: usize) -> usize {
    usize::from(is_encoded) + 1 + answer_tokens
}

struct Task<P: Processor> {
    engine: Arc<EngineParts<P>>,
    /// Locked by whoever writes parts of the reply, on the worker's thread or on a reply thread, and by the job between
    /// two writes. They never contend, because the worker waits until parts are written. The model thread never locks
    /// it.
    reply: Arc<Mutex<Reply<P>>>,
    streaming: Streaming,
    are_parts_brief: bool,
    announced: Option<Announced>,
    first: FirstSlice<P>,
    /// None until the job is enqueued.
    outputs: Option<WantedOutputs<P>>,
    /// None if all inputs are in the first slice.
    further: Option<Arc<FurtherInputs<P>>>,
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
        // Registered before the state is read, so that a change after the read wakes this task.
        self.outputs.source_waker.register(context.waker());
        self.outputs.poll_wanted(self.engine.queue.lookahead())
    }

    fn pull(&self) -> Result<(), TaskError> {
        let Outputs { task, .. } = &*self.outputs;
        if self.outputs.is_over() {
            return Ok(());
        }
        if let Some(error) = task.unwanted(now()) {
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
        self.0.gathered.lock().is_complete = true;
    }
}

impl<P: Processor> Job for Task<P> {
    fn inputs(&self) -> usize {
        self.sizes().inputs
    }

    fn tokens(&self) -> usize {
        self.sizes().tokens
    }

    fn is_streamed(&self) -> bool {
        self.streaming != Streaming::Off
    }

    fn estimate(&self) -> Option<Duration> {
        let FirstSlice::Made(first) = &self.first else { return None };
        let steps = |input: &SizedInput<P::Input>| steps(input.encode_tokens > 0, input.answer_tokens);
        let (inputs, steps) = match self.announced {
            // Inputs that are made on demand are windows, which are encoded.
            Some(Announced { inputs, answer_tokens }) => (inputs, self::steps(true, answer_tokens)),
            None => (first.inputs.len(), first.inputs.iter().map(steps).max()?),
        };
        self.engine.queue.estimate(inputs, steps)
    }

    fn takes_long(&self) -> bool {
        matches!(self.first, FirstSlice::Later(_))
    }

    fn make(&mut self) -> Result<(), TaskError> {
        loop {
            match mem::replace(&mut self.first, FirstSlice::Enqueued) {
                FirstSlice::Later(later) => self.first = self.engine.first_slice(later()?)?,
                first => {
                    self.first = first;
                    return Ok(());
                }
            }
        }
    }

    fn enqueue(&mut self, task: Arc<TaskState>, group: Option<Group>) {
        let FirstSlice::Made(first) = mem::replace(&mut self.first, FirstSlice::Enqueued) else { return };
        let outputs = Arc::new(Outputs::new(task, self.streaming));
        self.outputs = Some(WantedOutputs(outputs.clone()));
        if let Some(slices) = self.engine.enqueue(first, &outputs, group) {
            let (engine, slices) = (self.engine.clone(), Mutex::new(Some(slices)));
            self.further = Some(Arc::new(FurtherInputs { engine, outputs, group, slices }));
        }
    }

    fn source(&self) -> Option<Arc<dyn InputSource>> {
        self.further.clone().map(|further| further as Arc<dyn InputSource>)
    }

    fn poll_event(&mut self, context: &mut Context<'_>, parts: bool) -> Poll<JobEvent> {
        let Some(WantedOutputs(outputs)) = &self.outputs else { return Poll::Pending };
        // Registered before the state is read, so that a change after the read wakes this task.
        outputs.waker.register(context.waker());
        if outputs.notified.load(Ordering::Acquire) {
            return Poll::Ready(JobEvent::Done(outputs.gathered.lock().computed));
        }
        if parts && let Some(unwritten) = self.unwritten() {
            return Poll::Ready(JobEvent::Parts(unwritten));
        }
        let gathered = outputs.gathered.lock();
        outputs.part_wanted.store(parts, Ordering::Release);
        // Anything that arrived before `part_wanted` was set has woken nobody.
        if parts && (!gathered.pieces.is_empty() || outputs.has_next(&gathered)) {
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }

    fn unwritten(&self) -> Option<Unwritten> {
        let WantedOutputs(outputs) = self.outputs.as_ref()?;
        let mut gathered = outputs.gathered.lock();
        if self.streaming == Streaming::Outputs && gathered.error.is_some() {
            return None;
        }
        let (pieces, next) = (mem::take(&mut gathered.pieces), outputs.take_next(&mut gathered));
        // Released before the reply is locked, because the model thread takes this lock for each piece.
        drop(gathered);
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
        let Some(WantedOutputs(outputs)) = &outputs else {
            return Err(TaskError::internal("the task was never enqueued"));
        };
        let outputs = outputs.gathered.lock().take()?;
        let reply = Arc::into_inner(reply).ok_or_else(|| TaskError::internal("a part is being written"))?;
        reply.into_inner().finish(&engine.processor, outputs)
    }
}

impl<P: Processor> Task<P> {
    fn sizes(&self) -> Sizes {
        match (&self.outputs, &self.first) {
            (Some(WantedOutputs(outputs)), _) => outputs.gathered.lock().sizes,
            (None, FirstSlice::Made(slice)) => slice.sizes(),
            (None, FirstSlice::Later(_) | FirstSlice::Enqueued) => Sizes::default(),
        }
    }
}

/// The pieces and outputs that the loop delivers to a task. Written by the model thread, read by the job.
pub(super) struct Outputs<P: Processor> {
    pub(super) task: Arc<TaskState>,
    streaming: Streaming,
    /// Whether the job may report that it is done. Set by the worker when it receives the notice of a whole batch, and
    /// by `grow` if the task is done without a further pass.
    notified: AtomicBool,
    /// Whether the job waits for pieces or outputs from which a part can be written. Set by the job, cleared by the
    /// model thread when they arrive.
    part_wanted: AtomicBool,
    /// Wakes the job when `notified` is set, or when it waits for a part and can write one.
    waker: AtomicWaker,
    /// Wakes the worker when it waits to prepare more inputs and few are pending.
    source_waker: AtomicWaker,
    /// Locked only for the few instructions that store an output; never across an await.
    gathered: Mutex<Gathered<P>>,
}

struct Gathered<P: Processor> {
    /// One entry for each input that was enqueued, from the input `first_index` on.
    outputs: VecDeque<Option<P::Output>>,
    /// The index of the first input whose output was not taken for a part of the reply.
    first_index: usize,
    /// The number of inputs that were enqueued and are not computed.
    pending: usize,
    /// The size of all inputs that were enqueued.
    sizes: Sizes,
    /// Whether further inputs may follow.
    is_open: bool,
    /// When fewer inputs than this are pending, more are to be prepared; 0 if nobody waits for that.
    wanted_below: usize,
    error: Option<TaskError>,
    computed: Computed,
    /// Pieces that are in no part yet, in the order in which parts are written. Each entry has pieces of one input.
    /// Bound: the tokens that the task's answers may have.
    pieces: Vec<(usize, Vec<P::Piece>)>,
    /// Whether nothing more is needed: the task is done, or its job was dropped.
    is_complete: bool,
}

impl<P: Processor> Outputs<P> {
    fn new(task: Arc<TaskState>, streaming: Streaming) -> Self {
        let gathered = Gathered {
            outputs: VecDeque::new(),
            first_index: 0,
            pending: 0,
            sizes: Sizes::default(),
            is_open: true,
            wanted_below: 0,
            error: None,
            computed: Computed::default(),
            pieces: Vec::new(),
            is_complete: false,
        };
        let (notified, part_wanted) = (AtomicBool::new(false), AtomicBool::new(false));
        let (waker, source_waker) = (AtomicWaker::new(), AtomicWaker::new());
        Self { task, streaming, notified, part_wanted, waker, source_waker, gathered: Mutex::new(gathered) }
    }

    /// Makes room for the outputs of further inputs, and returns the index of the first. `is_open`: more may follow. If
    /// no more may follow and none are pending, the task is done.
    fn grow(&self, more: Sizes, is_open: bool) -> usize {
        let mut gathered = self.gathered.lock();
        let first_index = gathered.sizes.inputs;
        let entries = gathered.outputs.len();
        gathered.outputs.resize_with(entries + more.inputs, || None);
        gathered.pending += more.inputs;
        gathered.sizes.inputs += more.inputs;
        gathered.sizes.tokens += more.tokens;
        gathered.is_open = is_open;
        let is_done = !is_open && gathered.pending == 0 && !mem::replace(&mut gathered.is_complete, true);
        drop(gathered);
        if is_done {
            // No further pass will end and wake the job.
            self.notify();
        }
        first_index
    }

    /// `Ready(true)`: few inputs are pending, so more are to be prepared. `Ready(false)`: no more are needed.
    /// `Pending`: enough are pending, and `source_waker` is woken when that changes.
    fn poll_wanted(&self, lookahead: Lookahead) -> Poll<bool> {
        let mut gathered = self.gathered.lock();
        if gathered.is_complete || !gathered.is_open {
            return Poll::Ready(false);
        }
        // Assumes that the further inputs are as large as those so far.
        let Sizes { inputs, tokens } = gathered.sizes;
        let by_tokens = lookahead.tokens.saturating_mul(inputs).checked_div(tokens).unwrap_or(usize::MAX);
        let max_pending = lookahead.inputs.min(by_tokens).max(1);
        if gathered.pending < max_pending {
            return Poll::Ready(true);
        }
        gathered.wanted_below = max_pending;
        Poll::Pending
    }

    /// Records a pass that computed one of the task's inputs.
    pub(super) fn record_pass(&self, began: Instant, took: Duration, pass: Pass) {
        let computed = &mut self.gathered.lock().computed;
        // One pass may compute several inputs of the task; it counts once.
        if computed.last.number != pass.number {
            computed.compute += took;
            computed.last = pass;
        }
        computed.started.get_or_insert(began);
    }

    /// Records that the model gave a piece, and keeps it if the parts of the reply are made from pieces.
    pub(super) fn record_piece(&self, input: usize, piece: P::Piece, now: Instant) {
        let mut gathered = self.gathered.lock();
        gathered.computed.first_piece.get_or_insert(now);
        if self.streaming != Streaming::Pieces {
            return;
        }
        // Searched from the back, because the latest pieces are from the sequences that run now.
        match gathered.pieces.iter_mut().rev().find(|(index, _)| *index == input) {
            Some((_, pieces)) if pieces.len() < MAX_PIECES => pieces.push(piece),
            _ => gathered.pieces.push((input, vec![piece])),
        }
        self.wake_for_part();
    }

    /// Wakes the job if it waits for a part. Called with `gathered` locked, because the job sets `part_wanted` under
    /// that lock.
    fn wake_for_part(&self) {
        if self.part_wanted.swap(false, Ordering::AcqRel) {
            self.waker.wake();
        }
    }

    /// Whether the first input that is in no part yet is finished.
    fn has_next(&self, gathered: &Gathered<P>) -> bool {
        self.streaming == Streaming::Outputs
            && gathered.error.is_none()
            && gathered.outputs.front().is_some_and(Option::is_some)
    }

    /// Takes the outputs from which parts can be written, in the order of their inputs.
    fn take_next(&self, gathered: &mut Gathered<P>) -> Vec<P::Output> {
        let mut next = Vec::new();
        while self.has_next(gathered)
            && let Some(output) = gathered.outputs.pop_front().flatten()
        {
            gathered.first_index += 1;
            next.push(output);
        }
        next
    }

    /// Stores the output of one input, or fails the task. Returns true if the task has become done.
    #[must_use]
    pub(super) fn deliver(&self, index: usize, output: Result<P::Output, TaskError>) -> bool {
        let mut guard = self.gathered.lock();
        let gathered = &mut *guard;
        match output {
            Ok(output) => {
                let position = index.checked_sub(gathered.first_index);
                if let Some(entry) = position.and_then(|position| gathered.outputs.get_mut(position)) {
                    gathered.pending -= usize::from(entry.is_none());
                    *entry = Some(output);
                }
            }
            Err(error) => _ = gathered.error.get_or_insert(error),
        }
        if gathered.pending < gathered.wanted_below {
            gathered.wanted_below = 0;
            self.source_waker.wake();
        }
        gathered.computed.failed = gathered.error.is_some();
        let is_complete = gathered.computed.failed || gathered.pending == 0 && !gathered.is_open;
        if !is_complete && self.has_next(gathered) {
            self.wake_for_part();
        }
        is_complete && !mem::replace(&mut gathered.is_complete, true)
    }

    /// Whether the pending inputs need not be computed: the task is withdrawn or done, or its job was dropped.
    pub(super) fn is_over(&self) -> bool {
        self.task.is_withdrawn() || self.gathered.lock().is_complete
    }

    /// Whether further inputs may follow those that were enqueued.
    pub(super) fn is_open(&self) -> bool {
        self.gathered.lock().is_open
    }
}

impl<P: Processor> Completion for Outputs<P> {
    fn notify(&self) {
        self.notified.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl<P: Processor> Gathered<P> {
    /// Takes the outputs that are in no part, or the error of the task.
    fn take(&mut self) -> Result<Vec<P::Output>, TaskError> {
        match self.error.take() {
            Some(error) => Err(error),
            None => Ok(mem::take(&mut self.outputs).into_iter().flatten().collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::task::noop_waker;

    use super::super::reply::WRITE_TIME;
    use super::*;
    use crate::batching::QueueBytes;
    use crate::model::{Preprocessed, TaskErrorKind};
    use crate::protocol::control::TaskName;

    /// Inputs are numbers; a part lists its pieces, or is an output.
    struct Numbers;

    /// A piece whose part takes long.
    const SLOW: u32 = 1_000;
    /// A piece whose part cannot be written.
    const BAD: u32 = 1_001;

    impl Processor for Numbers {
        type Context = Streaming;
        type Input = u32;
        type Piece = u32;
        type Output = u32;

        fn routes(&self) -> &[Route] {
            &[]
        }

        fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
            let inputs: Vec<_> =
                message.body.iter().map(|byte| SizedInput::new(u32::from(*byte), 2)).collect();
            // One slice for each input. A 0 is an error.
            let mut slices = inputs.into_iter().map(|sized| match sized.input {
                0 => Err(TaskError::bad_input("input", "zero")),
                _ => Ok(vec![sized]),
            });
            let inputs = match message.properties.kind.as_deref() {
                Some("counted") => Inputs::Slices(Box::new(slices)),
                // This iterator does not know its length.
                Some("open") => Inputs::Slices(Box::new(std::iter::from_fn(move || slices.next()))),
                _ => Inputs::All(slices.flatten().flatten().collect()),
            };
            let is_of_outputs = message.properties.user_id.as_deref() == Some("outputs");
            Ok((if is_of_outputs { Streaming::Outputs } else { Streaming::Pieces }, inputs))
        }

        fn streaming(&self, context: &Streaming) -> Streaming {
            *context
        }

        fn are_parts_brief(&self, _: &Streaming) -> bool {
            true
        }

        fn parts(&self, _: &mut Streaming, input: usize, pieces: Vec<u32>) -> Vec<Body> {
            assert_ne!(pieces[0], BAD);
            if pieces[0] == SLOW {
                std::thread::sleep(WRITE_TIME);
            }
            vec![Body::json(format!("{input}: {pieces:?}"))]
        }

        fn output_parts(&self, _: &mut Streaming, input: usize, output: &u32) -> Vec<Body> {
            assert_ne!(*output, BAD);
            vec![Body::json(format!("{input}: {output}"))]
        }

        fn finish(&self, _: Streaming, outputs: Vec<u32>) -> Result<Body, TaskError> {
            Ok(Body::json(format!("{outputs:?}")))
        }
    }

    /// A queue that keeps its items until a test computes them.
    #[derive(Default)]
    struct ItemStore(Mutex<Vec<Item<Numbers>>>);

    impl Queue<Numbers> for ItemStore {
        fn enqueue(&self, items: Vec<Item<Numbers>>, _: Option<Group>) {
            self.0.lock().extend(items);
        }
        fn expect(&self, _: Expect) {}
        fn isolate(&self, _: Option<Group>) {}
        fn check(&self, inputs: &[SizedInput<u32>]) -> Result<(), TaskError> {
            let bad = inputs.iter().any(|sized| sized.input == 9);
            if bad { Err(TaskError::bad_input("input", "nine")) } else { Ok(()) }
        }
        fn depth(&self) -> usize {
            1
        }
        fn sequences(&self) -> Option<usize> {
            None
        }
        fn close(&self) {}
    }

    fn handle(queue: Arc<ItemStore>) -> Handle<Numbers> {
        Handle::new(Numbers, queue, Memory::new(QueueBytes::new(1, &[])))
    }

    fn job(message: &Message) -> (Box<dyn Job>, Arc<ItemStore>) {
        use crate::engine::Engine as _;
        let queue = Arc::new(ItemStore::default());
        let mut job = handle(queue.clone()).preprocess(message, &Files::default()).unwrap();
        let name = TaskName { id: "t".into(), fingerprint: "f".into() };
        job.enqueue(Arc::new(TaskState::new(name, None)), None);
        (job, queue)
    }

    fn enqueued(body: &'static [u8]) -> (Box<dyn Job>, Arc<Outputs<Numbers>>) {
        let (job, queue) = job(&Message { body: body.into(), ..Message::default() });
        let outputs = queue.0.lock()[0].outputs.clone();
        (job, outputs)
    }

    /// A task whose parts are made from outputs.
    fn streamed_outputs(kind: &str, body: &'static [u8]) -> (Box<dyn Job>, Arc<ItemStore>) {
        let mut message = Message { body: body.into(), ..Message::default() };
        (message.properties.kind, message.properties.user_id) =
            (Some(kind.to_owned()), Some("outputs".into()));
        job(&message)
    }

    /// A task whose inputs are made one by one. `kind`: "counted" if their number is known, "open" if not.
    fn on_demand(kind: &str, body: &'static [u8]) -> (Box<dyn Job>, Arc<ItemStore>) {
        let mut message = Message { body: body.into(), ..Message::default() };
        message.properties.kind = Some(kind.to_owned());
        job(&message)
    }

    fn wanted(source: &Arc<dyn InputSource>) -> Option<bool> {
        match source.poll_wanted(&mut Context::from_waker(&noop_waker())) {
            Poll::Ready(wanted) => Some(wanted),
            Poll::Pending => None,
        }
    }

    /// Computes the waiting items, each of which is its own output. Returns true if the task has become done.
    fn compute(queue: &ItemStore) -> bool {
        let items = mem::take(&mut *queue.0.lock());
        let done = items.into_iter().map(|item| item.outputs.deliver(item.index, Ok(item.input)));
        done.filter(|is_done| *is_done).count() > 0
    }

    fn poll(job: &mut Box<dyn Job>, parts: bool) -> Option<JobEvent> {
        match job.poll_event(&mut Context::from_waker(&noop_waker()), parts) {
            Poll::Ready(event) => Some(event),
            Poll::Pending => None,
        }
    }

    fn texts(unwritten: Option<Unwritten>) -> Vec<String> {
        let parts = unwritten.map(Unwritten::write).unwrap_or_default();
        parts.iter().map(|part| String::from_utf8(part.bytes.to_vec()).unwrap()).collect()
    }

    fn parts(event: Option<JobEvent>) -> Vec<String> {
        match event {
            Some(JobEvent::Parts(unwritten)) => texts(Some(unwritten)),
            Some(JobEvent::Done(_)) => panic!("it is done"),
            None => Vec::new(),
        }
    }

    #[test]
    fn outputs_are_in_input_order_and_the_job_is_done_once_it_is_notified() {
        let (mut job, outputs) = enqueued(&[5, 6, 7]);
        assert_eq!((job.inputs(), job.tokens()), (3, 6));
        let pass = |number, size| Pass { number, size, tokens: 2 * size };
        for index in [2, 0] {
            outputs.record_pass(Instant::now(), Duration::from_millis(3), pass(1, 2));
            assert!(!outputs.deliver(index, Ok(index as u32)));
        }
        outputs.record_pass(Instant::now(), Duration::from_millis(4), pass(2, 1));
        assert!(outputs.deliver(1, Ok(1)));
        assert!(poll(&mut job, true).is_none(), "not before it is notified");
        outputs.notify();
        let Some(JobEvent::Done(computed)) = poll(&mut job, true) else { panic!("it is done") };
        assert_eq!((computed.compute, computed.last), (Duration::from_millis(7), pass(2, 1)));
        assert_eq!(job.finish().unwrap().bytes, "[0, 1, 2]");
    }

    #[test]
    fn the_first_error_ends_a_task_once() {
        let (job, outputs) = enqueued(&[5, 6]);
        let error = |text: &str| Err(TaskError::new(TaskErrorKind::Internal, text));
        assert!(outputs.deliver(0, error("first")));
        assert!(!outputs.deliver(1, error("second")) && !outputs.deliver(1, Ok(6)));
        assert_eq!(job.finish().unwrap_err().message, "first");
    }

    #[test]
    fn pieces_gather_until_a_part_is_wanted_and_the_last_follow_after_the_end() {
        let (mut job, outputs) = enqueued(&[5, 6]);
        let piece = |input, piece| outputs.record_piece(input, piece, Instant::now());
        piece(0, 1);
        piece(1, 2);
        piece(0, 3);
        assert!(poll(&mut job, false).is_none());
        assert_eq!(parts(poll(&mut job, true)), ["0: [1, 3]", "1: [2]"]);
        assert!(poll(&mut job, true).is_none());
        piece(1, 4);
        assert!(!outputs.deliver(0, Ok(5)) && outputs.deliver(1, Ok(6)));
        outputs.notify();
        assert!(matches!(poll(&mut job, true), Some(JobEvent::Done(_))));
        assert_eq!(texts(job.unwritten()), ["1: [4]"]);
        assert!(job.unwritten().is_none());
    }

    #[test]
    fn many_pieces_are_no_brief_work_and_are_written_in_several_parts() {
        let (job, outputs) = enqueued(&[5, 6]);
        let give = |input, count: u32| {
            (0..count).for_each(|piece| outputs.record_piece(input, piece, Instant::now()))
        };
        let is_brief = || job.unwritten().unwrap().is_brief();
        let max_brief = BRIEF_PARTS as u32;
        give(0, max_brief - 1);
        give(1, 1);
        assert!(is_brief(), "parts that were not written are still there");
        give(1, 1);
        assert!(!is_brief());
        texts(job.unwritten());
        give(0, 2 * MAX_PIECES as u32 + 1);
        let all = texts(job.unwritten());
        assert_eq!((all.len(), &*all[2]), (3, "0: [512]"));
    }

    #[test]
    fn other_replies_have_their_turn_while_many_parts_are_written() {
        let (job, outputs) = enqueued(&[5]);
        // Each piece's part takes all of `WRITE_TIME` to write.
        (0..2 * MAX_PIECES).for_each(|_| outputs.record_piece(0, SLOW, Instant::now()));
        assert_eq!(
            [job.unwritten(), job.unwritten(), job.unwritten()].map(texts).map(|it| it.len()),
            [1, 1, 0]
        );
    }

    #[test]
    fn a_part_that_cannot_be_written_is_left_out_and_the_reply_has_everything() {
        let (mut job, outputs) = enqueued(&[5, 6]);
        outputs.record_piece(0, BAD, Instant::now());
        outputs.record_piece(1, 1, Instant::now());
        // Printing a panic's backtrace may take all of `WRITE_TIME`, so the second part may need another call.
        let written = [parts(poll(&mut job, true)), texts(job.unwritten())].concat();
        assert_eq!(written, ["1: [1]"]);
        assert!(!outputs.deliver(0, Ok(5)) && outputs.deliver(1, Ok(6)));
        assert_eq!(job.finish().unwrap().bytes, "[5, 6]");
    }

    #[test]
    fn parts_have_each_output_once_in_input_order_and_the_reply_has_all() {
        let (mut job, queue) = streamed_outputs("all", &[5, 6, 7, 8]);
        let outputs = queue.0.lock()[0].outputs.clone();
        let deliver = |index: u32| outputs.deliver(index as usize, Ok(10 + index));
        outputs.record_piece(0, 1, Instant::now());
        assert!(!deliver(1) && !deliver(2));
        assert!(poll(&mut job, true).is_none(), "they wait for the first");
        assert!(!deliver(0));
        assert!(poll(&mut job, false).is_none(), "no part is asked for");
        assert_eq!(parts(poll(&mut job, true)), ["0: 10", "1: 11", "2: 12"]);
        assert!(poll(&mut job, true).is_none());
        assert!(deliver(3));
        outputs.notify();
        assert!(matches!(poll(&mut job, true), Some(JobEvent::Done(_))));
        assert_eq!(texts(job.unwritten()), ["3: 13"]);
        assert!(job.unwritten().is_none());
        assert_eq!(job.finish().unwrap().bytes, "[10, 11, 12, 13]");
    }

    #[test]
    fn only_an_output_that_is_next_in_order_wakes_the_job() {
        use futures_util::task::{ArcWake, waker};
        struct Woken(AtomicBool);
        impl ArcWake for Woken {
            fn wake_by_ref(this: &Arc<Self>) {
                this.0.store(true, Ordering::SeqCst);
            }
        }
        let (mut job, queue) = streamed_outputs("all", &[5, 6, 7]);
        let outputs = queue.0.lock()[0].outputs.clone();
        let woken = Arc::new(Woken(AtomicBool::new(false)));
        let waker = waker(woken.clone());
        assert!(job.poll_event(&mut Context::from_waker(&waker), true).is_pending());
        assert!(!outputs.deliver(1, Ok(6)) && !woken.0.swap(false, Ordering::SeqCst));
        assert!(!outputs.deliver(0, Ok(5)) && woken.0.swap(false, Ordering::SeqCst));
        assert_eq!(parts(poll(&mut job, true)).len(), 2);
    }

    #[test]
    fn outputs_on_demand_are_in_parts_before_all_inputs_are_known() {
        let (mut job, queue) = streamed_outputs("open", &[5, 6]);
        let source = job.source().unwrap();
        assert!(!compute(&queue));
        assert_eq!(parts(poll(&mut job, true)), ["0: 5"]);
        source.pull().unwrap();
        assert!(!compute(&queue));
        assert_eq!(parts(poll(&mut job, true)), ["1: 6"]);
        source.pull().unwrap();
        assert!(matches!(poll(&mut job, true), Some(JobEvent::Done(_))));
        assert_eq!(job.finish().unwrap().bytes, "[5, 6]");
    }

    #[test]
    fn after_an_error_outputs_are_in_no_more_parts() {
        let (mut job, queue) = streamed_outputs("all", &[5, 6, 7]);
        let outputs = queue.0.lock()[0].outputs.clone();
        assert!(!outputs.deliver(0, Ok(5)));
        assert!(job.unwritten().is_some(), "it is not written");
        assert!(outputs.deliver(1, Err(TaskError::internal("no"))));
        assert!(job.unwritten().is_none());
        outputs.notify();
        assert!(matches!(poll(&mut job, true), Some(JobEvent::Done(computed)) if computed.failed));
        assert_eq!(job.finish().unwrap_err().message, "no");
    }

    #[test]
    fn many_outputs_are_no_brief_work_and_an_unwritable_one_is_left_out() {
        let (job, queue) = streamed_outputs("all", &[5; BRIEF_PARTS + 2]);
        let outputs = queue.0.lock()[0].outputs.clone();
        (0..BRIEF_PARTS)
            .for_each(|index| assert!(!outputs.deliver(index, Ok(if index == 0 { BAD } else { 5 }))));
        assert!(job.unwritten().unwrap().is_brief());
        assert!(!outputs.deliver(BRIEF_PARTS, Ok(5)));
        assert!(!job.unwritten().unwrap().is_brief());
        let written: Vec<_> = std::iter::from_fn(|| job.unwritten()).flat_map(|it| texts(Some(it))).collect();
        assert_eq!((written.len(), &*written[0]), (BRIEF_PARTS, "1: 5"));
    }

    #[test]
    fn inputs_that_can_never_be_computed_are_refused_before_they_are_enqueued() {
        use crate::engine::Engine as _;
        let body = &[9][..];
        let message = Message { body: body.into(), ..Message::default() };
        assert!(handle(Arc::default()).preprocess(&message, &Files::default()).is_err());
        let (job, queue) = on_demand("counted", &[5, 9]);
        assert!(job.source().unwrap().pull().is_err());
        assert_eq!(queue.0.lock().len(), 1);
    }

    #[test]
    fn a_task_without_inputs_is_done_when_it_is_enqueued() {
        for mut job in [job(&Message::default()).0, on_demand("counted", &[]).0, on_demand("open", &[]).0] {
            assert!(job.source().is_none());
            assert!(matches!(poll(&mut job, false), Some(JobEvent::Done(_))));
            assert_eq!(job.finish().unwrap().bytes, "[]");
        }
    }

    #[test]
    fn inputs_on_demand_are_made_while_few_wait_until_the_source_is_exhausted() {
        let (mut job, queue) = on_demand("open", &[5, 6, 7, 8]);
        let source = job.source().unwrap();
        // `ItemStore` has no sequences: one input may wait.
        assert_eq!((job.inputs(), job.tokens(), wanted(&source)), (1, 2, None));
        for made in [2, 3, 4] {
            assert!(!compute(&queue));
            assert_eq!(wanted(&source), Some(true));
            source.pull().unwrap();
            assert_eq!((job.inputs(), job.tokens(), wanted(&source)), (made, 2 * made, None));
        }
        assert!(poll(&mut job, false).is_none());
        assert!(!compute(&queue), "nobody knows that there are no more");
        assert_eq!(wanted(&source), Some(true));
        source.pull().unwrap();
        assert_eq!(wanted(&source), Some(false));
        assert!(matches!(poll(&mut job, false), Some(JobEvent::Done(_))));
        assert_eq!(job.finish().unwrap().bytes, "[5, 6, 7, 8]");
    }

    #[test]
    fn a_task_is_done_with_its_last_slice_if_that_is_known_to_be_the_last() {
        let (job, queue) = on_demand("counted", &[5]);
        assert!(job.source().is_none() && compute(&queue));
        let (job, queue) = on_demand("counted", &[5, 6]);
        assert!(!compute(&queue));
        job.source().unwrap().pull().unwrap();
        assert_eq!(wanted(&job.source().unwrap()), Some(false));
        assert!(compute(&queue));
    }

    #[test]
    fn what_is_not_wanted_any_more_is_not_prepared() {
        let (job, queue) = on_demand("open", &[5, 6]);
        let (source, outputs) = (job.source().unwrap(), queue.0.lock()[0].outputs.clone());
        outputs.task.cancel();
        assert_eq!(source.pull().unwrap_err().kind, TaskErrorKind::Cancelled);
        drop(job);
        assert!(source.pull().is_ok() && queue.0.lock().len() == 1);
    }

    #[test]
    fn pull_returns_the_error_of_a_later_input() {
        let (job, _) = on_demand("open", &[5, 0, 6]);
        let source = job.source().unwrap();
        assert_eq!(source.pull().unwrap_err().message, "zero");
    }

    #[test]
    fn a_job_that_is_dropped_is_over() {
        let (job, outputs) = enqueued(&[5]);
        assert!(!outputs.is_over());
        drop(job);
        assert!(outputs.is_over());
    }
}
