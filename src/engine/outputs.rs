//! What the loop delivers to one task: pieces and outputs, until the task is done. Decides when the job is woken, and when
//! more of its inputs are wanted. Written by the model thread, read by the job on the worker's thread.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;

use super::reply::MAX_PIECES;
use super::{Completion, Computed, Pass, TaskState};
use crate::model::{Processor, Streaming, TaskError};

/// The number of inputs and tokens of one task that may wait for the model. While that many wait, no more of its inputs
/// are prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lookahead {
    pub(super) inputs: usize,
    pub(super) tokens: usize,
}

/// The number of some inputs, and of their tokens.
#[derive(Clone, Copy, Default)]
pub(super) struct Sizes {
    pub(super) inputs: usize,
    pub(super) tokens: usize,
}

/// The pieces and outputs that the loop delivers to a task.
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

/// Pieces of inputs that are in no part of the reply yet, in the order in which parts are written. Each entry has pieces of
/// one input.
type Pieces<P> = Vec<(usize, Vec<<P as Processor>::Piece>)>;

struct Gathered<P: Processor> {
    stage: Stage,
    /// One entry for each input that was enqueued, from the input `first_index` on.
    outputs: VecDeque<Option<P::Output>>,
    /// The index of the first input whose output was not taken for a part of the reply.
    first_index: usize,
    /// The number of inputs that were enqueued and are not computed.
    pending: usize,
    /// The size of all inputs that were enqueued.
    sizes: Sizes,
    /// When fewer inputs than this are pending, more are to be prepared; 0 if nobody waits for that.
    wanted_below: usize,
    error: Option<TaskError>,
    computed: Computed,
    /// Bound: the tokens that the task's answers may have.
    pieces: Pieces<P>,
}

/// What may still come for a task.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Further inputs, and outputs.
    Open,
    /// Outputs of the inputs that were enqueued.
    Closed,
    /// Nothing: the task is done, or its job was dropped.
    Over,
}

impl<P: Processor> Outputs<P> {
    pub(super) fn new(task: Arc<TaskState>, streaming: Streaming) -> Self {
        let gathered = Gathered {
            stage: Stage::Open,
            outputs: VecDeque::new(),
            first_index: 0,
            pending: 0,
            sizes: Sizes::default(),
            wanted_below: 0,
            error: None,
            computed: Computed::default(),
            pieces: Vec::new(),
        };
        let (notified, part_wanted) = (AtomicBool::new(false), AtomicBool::new(false));
        let (waker, source_waker) = (AtomicWaker::new(), AtomicWaker::new());
        Self { task, streaming, notified, part_wanted, waker, source_waker, gathered: Mutex::new(gathered) }
    }

    /// Makes room for the outputs of further inputs, and returns the index of the first. `is_open`: more may follow. If
    /// no more may follow and none are pending, the task is done.
    pub(super) fn grow(&self, more: Sizes, is_open: bool) -> usize {
        let mut gathered = self.gathered.lock();
        let first_index = gathered.sizes.inputs;
        let entries = gathered.outputs.len();
        gathered.outputs.resize_with(entries + more.inputs, || None);
        gathered.pending += more.inputs;
        gathered.sizes.inputs += more.inputs;
        gathered.sizes.tokens += more.tokens;
        if gathered.stage == Stage::Open && !is_open {
            gathered.stage = Stage::Closed;
        }
        if gathered.end_if_complete() {
            drop(gathered);
            // No further pass will end and wake the job.
            self.notify();
        }
        first_index
    }

    /// `Ready(true)`: few inputs are pending, so more are to be prepared. `Ready(false)`: no more are needed.
    /// `Pending`: enough are pending; the caller is woken when that changes.
    pub(super) fn poll_wanted(&self, context: &mut Context<'_>, lookahead: Lookahead) -> Poll<bool> {
        // Registered before the state is read, so that a change after the read wakes the caller.
        self.source_waker.register(context.waker());
        let mut gathered = self.gathered.lock();
        if gathered.stage != Stage::Open {
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

    /// Ready once the job may report that it is done. Until then the caller is woken by that, and by parts that it waits
    /// for.
    pub(super) fn poll_done(&self, context: &mut Context<'_>) -> Poll<Computed> {
        // Registered before the state is read, so that a change after the read wakes the caller.
        self.waker.register(context.waker());
        if self.notified.load(Ordering::Acquire) {
            return Poll::Ready(self.gathered.lock().computed);
        }
        Poll::Pending
    }

    /// Says whether the job waits for pieces or outputs for a part. If some are there already, wakes the caller.
    pub(super) fn want_part(&self, context: &mut Context<'_>, wanted: bool) {
        let gathered = self.gathered.lock();
        self.part_wanted.store(wanted, Ordering::Release);
        // Anything that arrived before `part_wanted` was set has woken nobody.
        if wanted && (!gathered.pieces.is_empty() || self.has_next(&gathered)) {
            context.waker().wake_by_ref();
        }
    }

    /// Takes the pieces, and the outputs of the next inputs, from which parts can be written. None if parts are made from
    /// outputs and the task has failed.
    pub(super) fn take_for_parts(&self) -> Option<(Pieces<P>, Vec<P::Output>)> {
        let mut gathered = self.gathered.lock();
        if self.streaming == Streaming::Outputs && gathered.error.is_some() {
            return None;
        }
        Some((mem::take(&mut gathered.pieces), self.take_next(&mut gathered)))
    }

    /// Takes the outputs that are in no part, or the error of the task.
    pub(super) fn take(&self) -> Result<Vec<P::Output>, TaskError> {
        let mut gathered = self.gathered.lock();
        match gathered.error.take() {
            Some(error) => Err(error),
            None => Ok(mem::take(&mut gathered.outputs).into_iter().flatten().collect()),
        }
    }

    /// The size of all inputs that were enqueued.
    pub(super) fn sizes(&self) -> Sizes {
        self.gathered.lock().sizes
    }

    /// Records that nobody needs the outputs any more.
    pub(super) fn end(&self) {
        self.gathered.lock().stage = Stage::Over;
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
        if !gathered.is_complete() && self.has_next(gathered) {
            self.wake_for_part();
        }
        gathered.end_if_complete()
    }

    /// Whether the pending inputs need not be computed: the task is withdrawn or done, or its job was dropped.
    pub(super) fn is_over(&self) -> bool {
        self.task.is_withdrawn() || self.gathered.lock().stage == Stage::Over
    }

    /// Whether further inputs may follow those that were enqueued.
    pub(super) fn is_open(&self) -> bool {
        self.gathered.lock().stage == Stage::Open
    }
}

impl<P: Processor> Completion for Outputs<P> {
    fn notify(&self) {
        self.notified.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl<P: Processor> Gathered<P> {
    /// Whether the task has failed, or all its inputs are computed.
    fn is_complete(&self) -> bool {
        self.error.is_some() || self.pending == 0 && self.stage != Stage::Open
    }

    /// Ends the task if it is complete. Returns true if it was not over before.
    fn end_if_complete(&mut self) -> bool {
        self.is_complete() && mem::replace(&mut self.stage, Stage::Over) != Stage::Over
    }
}
