//! The loop of one-pass models: forms the next batch when it is full or due, or when the device is idle, and computes
//! it. If the device computes asynchronously, the next batch is submitted before the last is waited for. Owns the
//! waiting inputs and the network; `batch` decides what a failure means. A device fault ends the loop.

use std::mem;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::batch::{Network, Outcome};
use super::outputs::Lookahead;
use super::queue::{InputQueue, Item};
use super::run_loop::{Idle, Loop, Next, Waker};
use super::sizing::{Sizing, Unit};
use super::{EndedPass, Expect, Notice, Pass, Queue, now};
use crate::batching::{Batch, Batcher, DeviceState, Group, Policy};
use crate::model::{Forward, Processor, SizedInput, TaskError};

/// The queue of inputs that wait for a batch.
pub(super) struct WaitingInputs<P: Processor> {
    state: Mutex<State<P>>,
    waker: Waker,
    /// The number of batches that may be submitted, plus the one being formed.
    depth: usize,
}

struct State<P: Processor> {
    ordinary: Batcher<Item<P>>,
    /// Inputs of the isolated group. They go first, one batch at a time.
    isolated: Batcher<Item<P>>,
    /// The isolated group. While there is one, no other input goes to the device.
    isolated_group: Option<Group>,
    sizing: Sizing,
    /// The number of tasks that are on their way.
    expected: usize,
    /// Until when the loop sleeps unless it is woken; none if it does not sleep.
    asleep: Option<Asleep>,
    is_closed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Asleep {
    UntilWoken,
    Until(Instant),
}

/// What the loop finds in the queue.
enum Take<P: Processor> {
    Batch(Batch<Item<P>>),
    /// No batch before this time, or before something is enqueued.
    Nothing(Option<Instant>),
    /// No batch, and nothing will be enqueued any more.
    Closed,
}

impl<P: Processor> WaitingInputs<P> {
    pub(super) fn new(policy: Policy, asynchronous: bool, waker: Waker) -> Self {
        let state = State {
            ordinary: Batcher::new(policy, |item| item.tokens),
            isolated: Batcher::new(policy, |item| item.tokens),
            isolated_group: None,
            sizing: Sizing::new(policy.max_tokens, Unit::Tokens),
            expected: 0,
            asleep: None,
            is_closed: false,
        };
        Self { state: Mutex::new(state), waker, depth: if asynchronous { 3 } else { 2 } }
    }

    /// Changes the state, and wakes the loop if that makes a batch due earlier than the loop will wake.
    fn change(&self, change: impl FnOnce(&mut State<P>)) {
        let mut state = self.state.lock();
        change(&mut state);
        let Some(asleep) = state.asleep else { return };
        let is_due = match (state.peek(now()), asleep) {
            (Ok(()), _) => true,
            // The loop sleeps without a deadline. It must be woken to learn when the first input is due.
            (Err(due), Asleep::UntilWoken) => due.is_some(),
            (Err(due), Asleep::Until(time)) => due.is_some_and(|due| due < time),
        };
        if is_due || state.is_closed {
            state.asleep = None;
            drop(state);
            (self.waker)();
        }
    }

    /// Takes the next batch for the device out of the queue. `busy`: the device is still computing another.
    fn take(&self, busy: bool, now: Instant) -> Take<P> {
        let mut state = self.state.lock();
        state.asleep = None;
        match state.next_batch(busy, now) {
            Some(batch) => Take::Batch(batch),
            None if state.is_closed => Take::Closed,
            None => Take::Nothing(if busy { None } else { state.peek(now).err().flatten() }),
        }
    }

    /// Records that the loop is about to sleep, so that a change wakes it. `until`: when a batch is due, as far as the
    /// loop knows. Returns false if there is something to do.
    pub(super) fn sleep(&self, until: Option<Instant>, now: Instant) -> bool {
        let mut state = self.state.lock();
        let is_due = match state.peek(now) {
            Ok(()) => true,
            // Something may have been enqueued since the loop last called `take`.
            Err(due) => due.is_some_and(|due| until.is_none_or(|until| due < until)),
        };
        if state.is_closed || is_due {
            return false;
        }
        state.asleep = Some(until.map_or(Asleep::UntilWoken, Asleep::Until));
        true
    }

    /// Called after each batch. `too_large`: the tokens of its smallest part that was too large for the memory.
    fn learn(&self, too_large: Option<usize>) {
        let mut state = self.state.lock();
        if let Some(max_tokens) = state.sizing.learn(too_large) {
            state.ordinary.limit_tokens(max_tokens);
            state.isolated.limit_tokens(max_tokens);
        }
    }
}

impl<P: Processor> State<P> {
    /// The next batch, if one is full or due. `busy`: the device is still computing another.
    fn next_batch(&mut self, busy: bool, now: Instant) -> Option<Batch<Item<P>>> {
        if !self.isolated.is_empty() {
            // An isolated batch runs alone, so that only a few tasks can be the cause of a crash.
            return if busy { None } else { self.isolated.take(now, DeviceState::Idle, false) };
        }
        if self.isolated_group.is_some() {
            return None;
        }
        let device = if busy { DeviceState::Busy } else { DeviceState::Idle };
        self.ordinary.take(now, device, self.expected > 0)
    }

    /// Ok if an idle device would get a batch now. Otherwise the time at which it would, if that is known.
    fn peek(&self, now: Instant) -> Result<(), Option<Instant>> {
        if !self.isolated.is_empty() {
            return Ok(());
        }
        if self.isolated_group.is_some() {
            return Err(None);
        }
        if self.ordinary.is_ready(now, DeviceState::Idle, self.expected > 0) {
            Ok(())
        } else {
            Err(self.ordinary.due())
        }
    }
}

impl<P: Processor> Queue for WaitingInputs<P> {
    fn expect(&self, one: Expect) {
        match one {
            // One more expected task never makes a batch due, so the loop is not woken.
            Expect::More => self.state.lock().expected += 1,
            Expect::Less => self.change(|state| state.expected -= 1),
        }
    }

    fn isolate(&self, isolated: Option<Group>) {
        let now = now();
        self.change(|state| {
            // Inputs of the previous group that are not computed yet join the ordinary ones.
            while let Some(Batch { mut inputs, .. }) = state.isolated.take(now, DeviceState::Idle, false) {
                let owner = inputs.first().map(|first| first.task().owner);
                owner.into_iter().for_each(|owner| state.ordinary.push(mem::take(&mut inputs), owner, now));
            }
            state.isolated_group = isolated;
        });
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn sequences(&self) -> Option<usize> {
        None
    }
}

impl<P: Processor> InputQueue<P> for WaitingInputs<P> {
    fn enqueue(&self, items: Vec<Item<P>>, group: Option<Group>) {
        let now = now();
        self.change(|state| {
            // The group of a later slice may not be isolated any more.
            let is_isolated = group.is_some() && group == state.isolated_group;
            let batcher = if is_isolated { &mut state.isolated } else { &mut state.ordinary };
            let Some(first) = items.first() else { return };
            let owner = first.task().owner;
            if first.index == 0 {
                return batcher.push(items, owner, now);
            }
            // A further slice joins the waiting inputs of its task, so that the task has one place in the queue.
            let outputs = first.outputs.clone();
            batcher.extend(items, owner, now, |item| Arc::ptr_eq(&item.outputs, &outputs));
        });
    }

    /// An input larger than a batch is computed alone.
    fn check(&self, _: &[SizedInput<P::Input>]) -> Result<(), TaskError> {
        Ok(())
    }

    /// Enough to fill the batches that may be submitted, and the one being formed.
    fn lookahead(&self) -> Lookahead {
        let Policy { max_tokens, max_requests, .. } = self.state.lock().ordinary.policy();
        let of_all_batches = |per_batch: usize| per_batch.saturating_mul(self.depth);
        Lookahead { inputs: of_all_batches(max_requests), tokens: of_all_batches(max_tokens) }
    }

    fn close(&self) {
        self.change(|state| state.is_closed = true);
    }
}

pub(super) struct OnePass<P: Processor, F: Forward> {
    network: Network<P, F>,
    waiting: Arc<WaitingInputs<P>>,
    /// The number of batches so far.
    number: u64,
    /// The batch that was submitted last and is not waited for yet.
    submitted: Option<Submitted<P, F>>,
    /// When the device finished the last batch.
    free_since: Instant,
    idle: Idle,
}

struct Submitted<P: Processor, F: Forward> {
    batch: Batch<Item<P>>,
    submission: Submission,
    pending: F::Pending,
}

/// The number of a batch, and when it was submitted.
#[derive(Clone, Copy)]
struct Submission {
    number: u64,
    at: Instant,
}

impl<P: Processor, F: Forward<Input = P::Input, Output = P::Output>> OnePass<P, F> {
    pub(super) fn new(network: Network<P, F>, waiting: Arc<WaitingInputs<P>>) -> Self {
        Self { network, waiting, number: 0, submitted: None, free_since: now(), idle: Idle::default() }
    }

    /// Submits a batch, and finishes the one before it. Returns false if the device has failed.
    fn submit(&mut self, batch: Batch<Item<P>>) -> bool {
        // The tasks are committed only now, so that they can be handed back as long as they wait for the device.
        let wanted = self.keep_wanted(batch);
        // Sent now, so that unwanted tasks do not wait for the batch.
        self.network.notices.send_done();
        let Some(batch) = wanted else { return true };
        self.number += 1;
        let submission = Submission { number: self.number, at: now() };
        let computing = self.submitted.as_ref().map(|submitted| &*submitted.batch.inputs);
        match self.network.submit(&batch.inputs, computing) {
            Ok(pending) => {
                let previous = self.submitted.replace(Submitted { batch, submission, pending });
                previous.is_none_or(|previous| self.finish(previous, false))
            }
            Err(error) => {
                if !self.finish_submitted(false) {
                    return false;
                }
                self.network.observer.mark_idle();
                self.end(&batch, Err(error), submission)
            }
        }
    }

    /// As `finish`, for the submitted batch if there is one.
    fn finish_submitted(&mut self, is_last: bool) -> bool {
        self.submitted.take().is_none_or(|submitted| self.finish(submitted, is_last))
    }

    /// Waits for a submitted batch and delivers its result. `is_last`: the device has no other batch afterwards.
    /// Returns false if the device has failed.
    fn finish(&mut self, submitted: Submitted<P, F>, is_last: bool) -> bool {
        let Submitted { batch, submission, pending } = submitted;
        let outcome = self.network.wait(pending, batch.inputs.len());
        if is_last {
            self.network.observer.mark_idle();
        }
        self.end(&batch, outcome, submission)
    }

    /// Delivers the result of a batch. Returns false if the device has failed.
    fn end(&mut self, batch: &Batch<Item<P>>, outcome: Outcome<P>, submission: Submission) -> bool {
        let pass = Pass { number: submission.number, size: batch.inputs.len(), tokens: batch.tokens };
        // From this time on, the device computed nothing but this batch.
        let began = submission.at.max(self.free_since);
        let settled = self.network.settle(&batch.inputs, outcome, began, pass);
        self.free_since = now();
        self.idle.begin(self.free_since);
        let took = self.free_since - began;
        let ended = EndedPass { took, pass, reserved: None, has_failed: settled.is_err() };
        self.network.observer.pass_ended(&ended);
        match settled {
            Ok(_) => {
                self.waiting.learn(self.network.take_too_large());
                self.network.notices.send_done();
                true
            }
            Err(fault) => {
                // The launcher may think that the device is idle. It must know which tasks were on it.
                self.network.announce(&[], &batch.inputs);
                self.network.notices.send(Notice::Fault(fault));
                false
            }
        }
    }

    /// Drops unwanted inputs from a batch, and commits the tasks of the other inputs, which can then no longer be
    /// handed back. None: nothing is left.
    fn keep_wanted(&mut self, mut batch: Batch<Item<P>>) -> Option<Batch<Item<P>>> {
        let now = now();
        batch.inputs.retain(|item| {
            let task = item.task();
            if item.outputs.is_over() {
                return false;
            }
            // It may take long until all inputs of a task are known. Until then the task can be handed back.
            if !item.outputs.is_open() && !task.commit() {
                return false;
            }
            let Some(error) = task.unwanted(now) else { return true };
            self.network.notices.deliver(item, Err(error));
            false
        });
        batch.tokens = batch.inputs.iter().map(|item| item.tokens).sum();
        (!batch.inputs.is_empty()).then_some(batch)
    }
}

impl<P: Processor, F: Forward<Input = P::Input, Output = P::Output>> Loop for OnePass<P, F> {
    fn turn(&mut self) -> Next {
        if self.submitted.is_some() && !self.network.is_asynchronous() {
            return Next::again_if(self.finish_submitted(true));
        }
        let time = now();
        match self.waiting.take(self.submitted.is_some(), time) {
            Take::Batch(batch) => Next::again_if(self.submit(batch)),
            Take::Nothing(_) | Take::Closed if self.submitted.is_some() => {
                Next::again_if(self.finish_submitted(true))
            }
            Take::Closed => Next::End,
            Take::Nothing(due) => {
                let report = self.idle.report_if_due(&*self.network.observer, time);
                let until = due.into_iter().chain(report).min();
                if self.waiting.sleep(due, time) { Next::Sleep(until) } else { Next::Again }
            }
        }
    }
}
