//! One task in the engine. The worker holds the [`Job`]: what the reply needs beside the outputs. The loop
//! holds the [`Item`]s: the inputs. Both share an [`Outputs`], which the loop writes and the job reads.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::task::AtomicWaker;

use super::panics::caught;
use super::{Computed, Expect, Job, JobEvent, Pass, TaskState, Told};
use crate::batching::Policy;
use crate::model::{Body, Message, Processor, Route, SizedInput, TaskError, TaskErrorKind};

/// One input of a task, on its way through the device.
pub(super) struct Item<R: Processor> {
    pub(super) input: R::Input,
    pub(super) tokens: usize,
    pub(super) answer_tokens: usize,
    /// Index of the input within its task.
    pub(super) index: usize,
    pub(super) outputs: Arc<Outputs<R>>,
}

impl<R: Processor> Item<R> {
    pub(super) fn task(&self) -> &Arc<TaskState> {
        &self.outputs.task
    }
}

/// The queue of items for a loop. Written by jobs on the worker's thread, read by the loop.
pub(super) trait Queue<R: Processor>: Send + Sync {
    /// Enqueues the items of one task; they stay adjacent.
    fn enqueue(&self, items: Vec<Item<R>>, isolated: bool);
    /// As [`Engine::expect`](super::Engine::expect).
    fn expect(&self, one: Expect);
    /// As [`Engine::set_policy`](super::Engine::set_policy).
    fn set_policy(&self, policy: Policy);
    /// As [`Engine::isolate`](super::Engine::isolate).
    fn isolate(&self, isolated: bool);
    /// Refuses inputs that this model can never compute.
    fn check(&self, inputs: &[SizedInput<R::Input>]) -> Result<(), TaskError>;
    /// As [`Job::estimate`].
    fn estimate(&self, _: &[SizedInput<R::Input>]) -> Option<Duration> {
        None
    }
    /// As [`Engine::depth`](super::Engine::depth).
    fn depth(&self) -> usize;
    /// As [`Engine::sequences`](super::Engine::sequences).
    fn sequences(&self) -> Option<usize>;
    /// Nothing is enqueued any more; the loop may end.
    fn close(&self);
}

/// The engine of one model type, without its loop.
pub(super) struct Handle<R: Processor> {
    pub(super) processor: Arc<R>,
    pub(super) queue: Arc<dyn Queue<R>>,
}

impl<R: Processor> Drop for Handle<R> {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl<R: Processor> super::Engine for Handle<R> {
    fn routes(&self) -> &[Route] {
        self.processor.routes()
    }

    fn preprocess(&self, message: &Message) -> Result<Box<dyn Job>, TaskError> {
        let (context, inputs) = self.processor.preprocess(message)?;
        if inputs.is_empty() {
            return Err(TaskError::new(TaskErrorKind::Internal, "the model made no input of this task"));
        }
        self.queue.check(&inputs)?;
        let sizes = Sizes { inputs: inputs.len(), tokens: inputs.iter().map(|input| input.tokens).sum() };
        let is_streamed = self.processor.is_streamed(&context);
        let (processor, queue) = (self.processor.clone(), self.queue.clone());
        Ok(Box::new(Task { processor, queue, context, sizes, is_streamed, inputs, outputs: None }))
    }

    fn expect(&self, one: Expect) {
        self.queue.expect(one);
    }

    fn set_policy(&self, policy: Policy) {
        self.queue.set_policy(policy);
    }

    fn isolate(&self, isolated: bool) {
        self.queue.isolate(isolated);
    }

    fn depth(&self) -> usize {
        self.queue.depth()
    }

    fn sequences(&self) -> Option<usize> {
        self.queue.sequences()
    }
}

#[derive(Clone, Copy)]
struct Sizes {
    inputs: usize,
    tokens: usize,
}

struct Task<R: Processor> {
    processor: Arc<R>,
    queue: Arc<dyn Queue<R>>,
    context: R::Context,
    sizes: Sizes,
    is_streamed: bool,
    /// Empty once the job is enqueued.
    inputs: Vec<SizedInput<R::Input>>,
    /// None until the job is enqueued.
    outputs: Option<Waiting<R>>,
}

/// The job's reference to its outputs. Dropping it abandons the task.
struct Waiting<R: Processor>(Arc<Outputs<R>>);

impl<R: Processor> Drop for Waiting<R> {
    fn drop(&mut self) {
        self.0.task.abandon();
    }
}

impl<R: Processor> Job for Task<R> {
    fn inputs(&self) -> usize {
        self.sizes.inputs
    }

    fn tokens(&self) -> usize {
        self.sizes.tokens
    }

    fn is_streamed(&self) -> bool {
        self.is_streamed
    }

    fn estimate(&self) -> Option<Duration> {
        self.queue.estimate(&self.inputs)
    }

    fn enqueue(&mut self, task: Arc<TaskState>, isolated: bool) {
        let outputs = Arc::new(Outputs::new(task, self.sizes.inputs, self.is_streamed));
        self.outputs = Some(Waiting(outputs.clone()));
        let item = |(index, sized): (usize, SizedInput<R::Input>)| {
            let SizedInput { input, tokens, answer_tokens } = sized;
            Item { input, tokens, answer_tokens, index, outputs: outputs.clone() }
        };
        let items = mem::take(&mut self.inputs).into_iter().enumerate().map(item).collect();
        self.queue.enqueue(items, isolated);
    }

    fn poll_event(&mut self, context: &mut Context<'_>, parts: bool) -> Poll<JobEvent> {
        let Some(Waiting(outputs)) = &self.outputs else { return Poll::Pending };
        // Registered before the state is read, so that a change after the read wakes this task.
        outputs.waker.register(context.waker());
        let is_told = outputs.told.load(Ordering::Acquire);
        let mut gathered = outputs.lock();
        if parts || is_told {
            let pieces = mem::take(&mut gathered.pieces);
            // The lock is released first: the model thread takes it for each piece.
            drop(gathered);
            let part = |(input, pieces)| {
                let written = caught(|| self.processor.parts(&mut self.context, input, pieces));
                // If a part fails, the final reply still holds everything.
                written.unwrap_or_else(|panic| {
                    tracing::error!(task.id = outputs.task.name.id, panic, "a part of a reply is left out");
                    Vec::new()
                })
            };
            let written = pieces.into_iter().flat_map(part);
            let written: Vec<Body> = written.collect();
            if !written.is_empty() {
                return Poll::Ready(JobEvent::Parts(written));
            }
            gathered = outputs.lock();
        }
        if is_told {
            return Poll::Ready(JobEvent::Done(gathered.computed));
        }
        outputs.part_wanted.store(parts, Ordering::Release);
        // A piece that arrived before `part_wanted` was set has woken nobody.
        if parts && !gathered.pieces.is_empty() {
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }

    fn finish(self: Box<Self>) -> Result<Body, TaskError> {
        let Self { processor, context, outputs, .. } = *self;
        let Some(Waiting(outputs)) = &outputs else {
            return Err(TaskError::new(TaskErrorKind::Internal, "the task was never enqueued"));
        };
        let outputs = outputs.lock().take()?;
        processor.finish(context, outputs)
    }
}

/// What the loop gives a task: pieces and outputs. Written by the model thread, read by the job.
pub(super) struct Outputs<R: Processor> {
    pub(super) task: Arc<TaskState>,
    is_streamed: bool,
    /// The job may report that it is done. Written by the worker once a whole batch is done.
    told: AtomicBool,
    /// The job waits for a piece. Set by the job, cleared by the model thread when a piece arrives.
    part_wanted: AtomicBool,
    /// Wakes the job when it is told, or when it waits for a piece and one arrives.
    waker: AtomicWaker,
    /// Locked for the few instructions of storing an output; never across an await.
    gathered: Mutex<Gathered<R>>,
}

struct Gathered<R: Processor> {
    outputs: Vec<Option<R::Output>>,
    left: usize,
    error: Option<TaskError>,
    computed: Computed,
    /// Pieces that are in no part yet, by input. Bound: the tokens that the task's answers may have.
    pieces: Vec<(usize, Vec<R::Piece>)>,
    is_complete: bool,
}

impl<R: Processor> Outputs<R> {
    pub(super) fn new(task: Arc<TaskState>, inputs: usize, is_streamed: bool) -> Self {
        let gathered = Gathered {
            outputs: (0..inputs).map(|_| None).collect(),
            left: inputs,
            error: None,
            computed: Computed::default(),
            pieces: Vec::new(),
            is_complete: false,
        };
        let (told, part_wanted, waker) = (AtomicBool::new(false), AtomicBool::new(false), AtomicWaker::new());
        Self { task, is_streamed, told, part_wanted, waker, gathered: Mutex::new(gathered) }
    }

    /// Records a pass that computed one of the task's inputs.
    pub(super) fn passed(&self, began: Instant, took: Duration, pass: Pass) {
        let computed = &mut self.lock().computed;
        // One pass may compute several inputs of the task; it counts once.
        if computed.last.number != pass.number {
            computed.compute += took;
            computed.last = pass;
        }
        computed.started.get_or_insert(began);
    }

    pub(super) fn piece(&self, input: usize, piece: R::Piece, now: Instant) {
        let mut gathered = self.lock();
        gathered.computed.first_piece.get_or_insert(now);
        if !self.is_streamed {
            return;
        }
        match gathered.pieces.iter_mut().find(|(of, _)| *of == input) {
            Some((_, pieces)) => pieces.push(piece),
            None => gathered.pieces.push((input, vec![piece])),
        }
        // Swapped under the lock, as the job sets it under the lock.
        if self.part_wanted.swap(false, Ordering::AcqRel) {
            self.waker.wake();
        }
    }

    /// Stores the output of one input, or fails the task. True: the task is done now.
    #[must_use]
    pub(super) fn deliver(&self, index: usize, output: Result<R::Output, TaskError>) -> bool {
        let mut guard = self.lock();
        let gathered = &mut *guard;
        match output {
            Ok(output) => {
                if let Some(place) = gathered.outputs.get_mut(index) {
                    gathered.left -= usize::from(place.is_none());
                    *place = Some(output);
                }
            }
            Err(error) => _ = gathered.error.get_or_insert(error),
        }
        gathered.computed.failed = gathered.error.is_some();
        let is_complete = gathered.computed.failed || gathered.left == 0;
        is_complete && !mem::replace(&mut gathered.is_complete, true)
    }

    /// Whether the task is done, so that its other inputs need not be computed.
    pub(super) fn is_complete(&self) -> bool {
        self.lock().is_complete
    }

    fn lock(&self) -> MutexGuard<'_, Gathered<R>> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: Processor> Told for Outputs<R> {
    fn tell(&self) {
        self.told.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl<R: Processor> Gathered<R> {
    fn take(&mut self) -> Result<Vec<R::Output>, TaskError> {
        match self.error.take() {
            Some(error) => Err(error),
            None => Ok(mem::take(&mut self.outputs).into_iter().flatten().collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::task::noop_waker;

    use super::*;
    use crate::model::Preprocessed;
    use crate::protocol::control::TaskName;

    /// Inputs are numbers; a part lists its pieces.
    struct Numbers;

    impl Processor for Numbers {
        type Context = ();
        type Input = u32;
        type Piece = u32;
        type Output = u32;

        fn routes(&self) -> &[Route] {
            &[]
        }

        fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
            Ok(((), message.body.iter().map(|byte| SizedInput::new(u32::from(*byte), 2)).collect()))
        }

        fn is_streamed(&self, (): &()) -> bool {
            true
        }

        fn parts(&self, (): &mut (), input: usize, pieces: Vec<u32>) -> Vec<Body> {
            vec![Body::json(format!("{input}: {pieces:?}"))]
        }

        fn finish(&self, (): (), outputs: Vec<u32>) -> Result<Body, TaskError> {
            Ok(Body::json(format!("{outputs:?}")))
        }
    }

    #[derive(Default)]
    struct Kept(Mutex<Vec<Item<Numbers>>>);

    impl Queue<Numbers> for Kept {
        fn enqueue(&self, items: Vec<Item<Numbers>>, _: bool) {
            self.0.lock().unwrap().extend(items);
        }
        fn expect(&self, _: Expect) {}
        fn set_policy(&self, _: Policy) {}
        fn isolate(&self, _: bool) {}
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

    fn enqueued(body: &'static [u8]) -> (Box<dyn Job>, Arc<Outputs<Numbers>>) {
        use crate::engine::Engine as _;
        let queue = Arc::new(Kept::default());
        let handle = Handle { processor: Arc::new(Numbers), queue: queue.clone() };
        let mut job = handle.preprocess(&Message { body: body.into(), ..Message::default() }).unwrap();
        let name = TaskName { id: "t".into(), fingerprint: "f".into() };
        job.enqueue(Arc::new(TaskState::new(name, None)), false);
        let outputs = queue.0.lock().unwrap()[0].outputs.clone();
        (job, outputs)
    }

    fn poll(job: &mut Box<dyn Job>, parts: bool) -> Option<JobEvent> {
        match job.poll_event(&mut Context::from_waker(&noop_waker()), parts) {
            Poll::Ready(event) => Some(event),
            Poll::Pending => None,
        }
    }

    fn parts(event: Option<JobEvent>) -> Vec<String> {
        match event {
            Some(JobEvent::Parts(parts)) => {
                parts.iter().map(|part| String::from_utf8(part.bytes.to_vec()).unwrap()).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn outputs_come_together_in_the_order_of_the_inputs_and_once_they_are_told() {
        let (mut job, outputs) = enqueued(&[5, 6, 7]);
        assert_eq!((job.inputs(), job.tokens()), (3, 6));
        let pass = |number, size| Pass { number, size, tokens: 2 * size };
        for index in [2, 0] {
            outputs.passed(Instant::now(), Duration::from_millis(3), pass(1, 2));
            assert!(!outputs.deliver(index, Ok(index as u32)));
        }
        outputs.passed(Instant::now(), Duration::from_millis(4), pass(2, 1));
        assert!(outputs.deliver(1, Ok(1)));
        assert!(poll(&mut job, true).is_none(), "not before it is told");
        outputs.tell();
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
    fn pieces_gather_until_a_part_is_asked_for_and_the_last_come_before_the_end() {
        let (mut job, outputs) = enqueued(&[5, 6]);
        let piece = |input, piece| outputs.piece(input, piece, Instant::now());
        piece(0, 1);
        piece(1, 2);
        piece(0, 3);
        assert!(poll(&mut job, false).is_none());
        assert_eq!(parts(poll(&mut job, true)), ["0: [1, 3]", "1: [2]"]);
        assert!(poll(&mut job, true).is_none());
        piece(1, 4);
        assert!(!outputs.deliver(0, Ok(5)) && outputs.deliver(1, Ok(6)));
        outputs.tell();
        assert_eq!(parts(poll(&mut job, false)), ["1: [4]"]);
        assert!(matches!(poll(&mut job, false), Some(JobEvent::Done(_))));
    }

    #[test]
    fn inputs_that_can_never_be_computed_are_refused_before_they_are_enqueued() {
        use crate::engine::Engine as _;
        let handle = Handle { processor: Arc::new(Numbers), queue: Arc::new(Kept::default()) };
        for body in [&[][..], &[9]] {
            assert!(handle.preprocess(&Message { body: body.into(), ..Message::default() }).is_err());
        }
    }

    #[test]
    fn a_job_that_is_dropped_is_over() {
        let (job, outputs) = enqueued(&[5]);
        assert!(!outputs.task.is_over());
        drop(job);
        assert!(outputs.task.is_over());
    }
}
