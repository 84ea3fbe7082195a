//! The loop of models whose sequences join and leave a running batch. Each turn takes new sequences, ends those that
//! are no longer wanted, admits sequences by the rules in `batching::sequences`, and computes one step. Owns the network
//! and the sequences; their state never leaves this thread. A slow reader of pieces does not delay a step.
//!
//! A step that fails is repeated with halves of its rows until the failing row is alone. Before that row is
//! blamed, the probe must pass, as in `batch`. A device fault ends the loop.

use std::collections::BTreeMap;
use std::iter;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::pace::PromptPace;
use super::panics::guarded;
use super::probe::ProbeError;
use super::queue::{InputQueue, Item};
use super::run_loop::{Idle, Loop, Next, Waker};
use super::sizing::{Sizing, Unit};
use super::{EndedPass, Expect, Notice, Notices, Observer, Pass, Queue, ReservedTokens, now};
use crate::batching::sequences::{Change, Limits, Row, Scheduler, SequenceSpec};
use crate::batching::{Encoding, Group, Policy};
use crate::model::{
    self, Advance, Capacity, Feed, ForwardError, Generate, Processor, SizedInput, Slot, TaskError,
    TaskErrorKind,
};
use crate::protocol::control::TaskName;

/// The maximum number of steps of the probe. A sequence that takes more counts as one that never ends.
const PROBE_STEPS: usize = 10_000;
/// How often the loop checks waiting sequences for cancellations and passed deadlines. Running sequences are checked at
/// each step; waiting ones are not, because there may be tens of thousands.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The weight of the latest step in the average duration of recent steps.
const LATEST_STEP_WEIGHT: f64 = 0.02;
/// How often the tasks on the device are reported to the launcher even if they have not changed. A worker that sends
/// nothing for long counts as stuck.
const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(1);

/// The queue of sequences that the loop has not taken in yet.
pub(super) struct SequenceQueue<P: Processor> {
    /// The network's capacity, less what is reserved for the probe.
    capacity: Capacity,
    state: Mutex<State<P>>,
    waker: Waker,
    /// The average duration of recent steps in microseconds. Written by the loop, read to estimate new tasks.
    average_step_us: AtomicU64,
}

struct State<P: Processor> {
    arrived: Vec<Arrived<P>>,
    /// The group that runs alone.
    isolated: Option<Group>,
    /// The value of `isolated` that the loop has read last.
    known_isolated: Option<Group>,
    is_asleep: bool,
    is_closed: bool,
}

/// A sequence that the loop has not taken in yet.
pub(super) struct Arrived<P: Processor> {
    pub(super) item: Item<P>,
    pub(super) group: Option<Group>,
}

/// What a loop takes from its queue.
pub(super) struct Taken<P: Processor> {
    pub(super) arrived: Vec<Arrived<P>>,
    /// The group that runs alone.
    pub(super) isolated: Option<Group>,
    /// Whether no more will come.
    pub(super) is_closed: bool,
}

impl<P: Processor> SequenceQueue<P> {
    pub(super) fn new(capacity: Capacity, waker: Waker) -> Self {
        let (isolated, known_isolated, is_asleep, is_closed) = (None, None, false, false);
        let state = State { arrived: Vec::new(), isolated, known_isolated, is_asleep, is_closed };
        Self { capacity, state: Mutex::new(state), waker, average_step_us: AtomicU64::new(0) }
    }

    fn change(&self, change: impl FnOnce(&mut State<P>)) {
        let mut state = self.state.lock();
        change(&mut state);
        if mem::take(&mut state.is_asleep) {
            drop(state);
            (self.waker)();
        }
    }

    /// The most sequences that run at once.
    pub(super) fn max_sequences(&self) -> usize {
        self.capacity.sequences
    }

    /// Takes the sequences that have arrived.
    pub(super) fn take(&self) -> Taken<P> {
        let mut state = self.state.lock();
        state.is_asleep = false;
        state.known_isolated = state.isolated;
        let (isolated, is_closed) = (state.isolated, state.is_closed);
        Taken { arrived: mem::take(&mut state.arrived), isolated, is_closed }
    }

    /// Records that the loop is about to sleep, so that a change wakes it. False: something new is in the queue, and
    /// the loop must not sleep.
    pub(super) fn sleep(&self) -> bool {
        let mut state = self.state.lock();
        let is_unchanged = state.isolated == state.known_isolated;
        state.is_asleep = state.arrived.is_empty() && is_unchanged && !state.is_closed;
        state.is_asleep
    }
}

impl<P: Processor> Queue for SequenceQueue<P> {
    /// Nothing to do: this loop never waits for further sequences.
    fn expect(&self, _: Expect) {}

    fn isolate(&self, isolated: Option<Group>) {
        self.change(|state| state.isolated = isolated);
    }

    fn depth(&self) -> usize {
        1
    }

    fn sequences(&self) -> Option<usize> {
        Some(self.capacity.sequences)
    }
}

impl<P: Processor> InputQueue<P> for SequenceQueue<P> {
    fn enqueue(&self, items: Vec<Item<P>>, group: Option<Group>) {
        self.change(|state| state.arrived.extend(items.into_iter().map(|item| Arrived { item, group })));
    }

    fn check(&self, inputs: &[SizedInput<P::Input>]) -> Result<(), TaskError> {
        let Capacity { tokens, context, .. } = self.capacity;
        let max_tokens = context.min(tokens);
        for SizedInput { encode_tokens, tokens: prompt, answer_tokens: answer, .. } in inputs {
            if prompt_tokens(*encode_tokens, *prompt).saturating_add(*answer) > max_tokens {
                let message = format!(
                    "the prompt has {prompt} tokens and the answer may have {answer}; this model holds {max_tokens} of \
                     both together"
                );
                return Err(TaskError::new(TaskErrorKind::BadInput, message));
            }
        }
        Ok(())
    }

    /// Assumes that the task's sequences run in rounds, each with the maximum number of sequences, and that steps have
    /// the average duration, because sequences of other tasks fill them.
    fn estimate(&self, inputs: usize, steps: usize) -> Option<Duration> {
        let rounds = inputs.div_ceil(self.capacity.sequences.max(1));
        let steps = u64::try_from(rounds * steps).ok()?;
        Some(Duration::from_micros(self.average_step_us.load(Ordering::Relaxed).saturating_mul(steps)))
    }

    fn close(&self) {
        self.change(|state| state.is_closed = true);
    }
}

/// The prompt tokens as the scheduler counts them. A sequence without a window and a prompt is fed one token.
fn prompt_tokens(encode_tokens: usize, tokens: usize) -> usize {
    if encode_tokens > 0 { tokens } else { tokens.max(1) }
}

/// The probe: a preprocessed task that the model must be able to answer.
pub(super) struct Probe<P: Processor> {
    pub(super) context: P::Context,
    pub(super) input: SizedInput<P::Input>,
}

impl<P: Processor> Probe<P> {
    /// The probe of `processor`, if it has one.
    ///
    /// # Errors
    /// The processor refuses the probe, or the probe is not exactly one sequence.
    pub(super) fn of(processor: &P) -> Result<Option<Self>, ProbeError> {
        let Some(message) = processor.probe() else { return Ok(None) };
        let (context, inputs) = processor.preprocess(&message)?;
        let mut inputs = inputs.all()?;
        match (inputs.pop(), inputs.len()) {
            (Some(input), 0) => Ok(Some(Self { context, input })),
            (last, before) => {
                let sequences = before + usize::from(last.is_some());
                Err(ProbeError::Refused(format!("it has {sequences} sequences, but must have one")))
            }
        }
    }

    /// `capacity` less the probe's tokens. When a sequence fails, the probe runs in its slot, and needs room there.
    pub(super) fn subtract_from(&self, capacity: Capacity) -> Capacity {
        let tokens = self.input.tokens + self.input.answer_tokens;
        Capacity { tokens: capacity.tokens.saturating_sub(tokens), ..capacity }
    }
}

/// Runs the sequence of `input`, which is open in `slot`, alone to its end: encodes its window, feeds its prompt, and
/// computes steps until it is done.
fn run_to_end<G: Generate>(
    network: &mut G,
    slot: Slot,
    input: &SizedInput<G::Prompt>,
) -> Result<G::Output, ProbeError> {
    let encode = (input.encode_tokens > 0).then_some(Feed::Encode);
    let prompt = (input.tokens > 0).then_some(Feed::Tokens(input.tokens));
    let feeds = encode.into_iter().chain(prompt).chain(iter::repeat(Feed::Tokens(1)));
    for feed in feeds.take(PROBE_STEPS) {
        let rows = [model::Row { slot, feed }];
        let mut results = guarded(|| network.step(&rows)).map_err(ProbeError::failed)?;
        let result = results.pop().ok_or_else(|| ProbeError::failed("no result"))?;
        if let Advance::Done(_, output) = result? {
            return Ok(output);
        }
    }
    Err(ProbeError::failed("it does not end"))
}

struct Sequence<P: Processor> {
    item: Item<P>,
    /// None while it waits.
    slot: Option<Slot>,
    /// The number of pieces that the model has given since the sequence was last admitted.
    given: usize,
    /// The number of pieces that the job received before this sequence was preempted. The model gives them again, but
    /// they are not delivered twice.
    delivered: usize,
}

/// How a sequence whose output is no longer wanted ends.
enum Unwanted {
    /// It is dropped: the task is withdrawn or done, or its job was dropped.
    Dropped,
    /// Its task is answered with this error.
    Failed(TaskError),
}

impl<P: Processor> Sequence<P> {
    /// How the sequence ends if its output is no longer wanted; none if it is wanted.
    fn unwanted(&self, time: Instant) -> Option<Unwanted> {
        if self.item.outputs.is_over() {
            return Some(Unwanted::Dropped);
        }
        self.item.task().unwanted(time).map(Unwanted::Failed)
    }
}

/// Identifies a sequence to the scheduler.
type Key = u64;

/// The rows of a step with their results.
type Results<G> =
    Vec<(Row<Key>, Result<Advance<<G as Generate>::Piece, <G as Generate>::Output>, TaskError>)>;

pub(super) struct Continuous<P: Processor, G: Generate> {
    network: G,
    queue: Arc<SequenceQueue<P>>,
    scheduler: Scheduler<Key>,
    /// Decides how many tokens of a step fit in the device's memory.
    sizing: Sizing,
    /// Decides how many windows fit when they are encoded together.
    encode_sizing: Sizing,
    pace: PromptPace,
    sequences: BTreeMap<Key, Sequence<P>>,
    /// The key of the newest sequence.
    last_key: Key,
    /// The probe; none if the model has none.
    probe: Option<SizedInput<P::Input>>,
    /// A computed step whose results are not delivered yet.
    computed: Option<ComputedStep<G>>,
    /// The number of steps so far.
    steps: u64,
    /// The average duration of recent steps in microseconds.
    average_step_us: f64,
    /// The sequences on the device, as last reported to the launcher.
    announced: Vec<Key>,
    announced_at: Instant,
    /// When the waiting sequences were last checked.
    checked_at: Instant,
    idle: Idle,
    notices: Notices,
    observer: Box<dyn Observer>,
}

/// Whether these are the rows of a step of windows. The scheduler mixes windows with no other rows.
fn is_encoding(rows: &[Row<Key>]) -> bool {
    rows.first().is_some_and(|row| row.feed == Feed::Encode)
}

struct ComputedStep<G: Generate> {
    rows: Vec<Row<Key>>,
    /// Whether some of its rows feed tokens of answers.
    is_decoding: bool,
    outcome: Result<model::Advances<G>, ForwardError>,
    began: Instant,
}

impl<P: Processor, G: Generate<Prompt = P::Input, Piece = P::Piece, Output = P::Output>> Continuous<P, G> {
    pub(super) fn new(
        network: G,
        queue: Arc<SequenceQueue<P>>,
        policy: Policy,
        observer: Box<dyn Observer>,
        notices: Notices,
    ) -> Self {
        let (defaults, capacity) = (network.encoding(), queue.capacity);
        let encoding = Encoding {
            interval: policy.encode_interval.unwrap_or(defaults.interval).max(1),
            batch: policy.encode_batch.unwrap_or(defaults.batch).max(1),
        };
        let limits = Limits {
            sequences: capacity.sequences.min(policy.max_requests),
            reserved_tokens: capacity.tokens,
            step_tokens: policy.max_tokens,
            encoding,
        };
        Self {
            network,
            queue,
            scheduler: Scheduler::new(limits),
            sizing: Sizing::new(policy.max_tokens, Unit::Tokens),
            encode_sizing: Sizing::new(encoding.batch, Unit::Windows),
            pace: PromptPace::new(),
            sequences: BTreeMap::new(),
            last_key: 0,
            probe: None,
            computed: None,
            steps: 0,
            average_step_us: 0.0,
            announced: Vec::new(),
            announced_at: now(),
            checked_at: now(),
            idle: Idle::default(),
            notices,
            observer,
        }
    }

    /// Computes the probe, and keeps it for later checks.
    ///
    /// # Errors
    /// The model refuses its probe, or the device cannot be trusted.
    pub(super) fn try_probe(&mut self, processor: &P, probe: Probe<P>) -> Result<(), ProbeError> {
        let Probe { context, input } = probe;
        self.probe = Some(input);
        let output = self.compute_probe(Slot(0))?;
        Ok(processor.finish(context, vec![output]).map(drop)?)
    }

    /// Runs the probe to its end in a free slot.
    fn compute_probe(&mut self, slot: Slot) -> Result<P::Output, ProbeError> {
        let Some(probe) = &self.probe else { return Err(ProbeError::failed("there is none")) };
        let network = &mut self.network;
        let output = guarded(|| Ok(network.open(slot, &probe.input)))
            .map_err(ProbeError::failed)
            .and_then(|opened| Ok(opened?))
            .and_then(|()| run_to_end(network, slot, probe));
        network.close(slot);
        output
    }

    /// Computes the probe in this slot, which is free now, to check the device after a failure with this `error`.
    fn check_device(&mut self, slot: usize, error: &str) -> Result<(), String> {
        if self.probe.is_none() {
            return Ok(());
        }
        self.compute_probe(Slot(slot)).map(drop).map_err(|failure| format!("{failure} (after: {error})"))
    }

    /// Takes new sequences from the queue. Returns the group that runs alone, if one does.
    fn take_arrivals(&mut self) -> Option<Group> {
        let Taken { arrived, isolated, .. } = self.queue.take();
        let time = now();
        for Arrived { item, group } in arrived {
            let spec = SequenceSpec {
                has_window: item.encode_tokens > 0,
                prompt: prompt_tokens(item.encode_tokens, item.tokens),
                answer: item.answer_tokens,
                priority: item.task().priority,
                owner: item.task().owner,
                group,
            };
            self.last_key += 1;
            self.scheduler.enqueue(self.last_key, spec, time);
            self.sequences.insert(self.last_key, Sequence { item, slot: None, given: 0, delivered: 0 });
        }
        isolated
    }

    /// Ends the sequences that are cancelled, expired or withdrawn. Checks running ones each time, and waiting ones
    /// every [`CHECK_INTERVAL`] or if no sequence runs.
    fn end_unwanted(&mut self) {
        let time = now();
        let checks_all =
            time >= self.checked_at + CHECK_INTERVAL || self.scheduler.running().next().is_none();
        let is_unwanted = |key: &Key| self.sequences.get(key).is_some_and(|it| it.unwanted(time).is_some());
        let unwanted: Vec<Key> = if checks_all {
            self.checked_at = time;
            let unwanted = self.sequences.iter().filter(|(_, it)| it.unwanted(time).is_some());
            unwanted.map(|(key, _)| *key).collect()
        } else {
            self.scheduler.running().filter(is_unwanted).collect()
        };
        for key in unwanted {
            self.end_if_unwanted(key, time);
        }
    }

    /// Ends the sequence if it is cancelled, expired or withdrawn. Returns whether it was.
    fn end_if_unwanted(&mut self, key: Key, time: Instant) -> bool {
        let unwanted = self.sequences.get(&key).and_then(|sequence| sequence.unwanted(time));
        let Some(unwanted) = unwanted else { return false };
        if let Some(item) = self.remove(key)
            && let Unwanted::Failed(error) = unwanted
        {
            self.notices.deliver(&item, Err(error));
        }
        true
    }

    /// Removes a sequence, and frees its slot.
    fn remove(&mut self, key: Key) -> Option<Item<P>> {
        self.scheduler.remove(key, now());
        let Sequence { item, slot, .. } = self.sequences.remove(&key)?;
        if let Some(slot) = slot {
            self.network.close(slot);
        }
        Some(item)
    }

    /// Admits sequences and opens them in the network. Closes those that are preempted for them.
    ///
    /// # Errors
    /// The device has failed.
    fn admit(&mut self, isolated: Option<Group>) -> Result<(), String> {
        let time = now();
        for change in self.scheduler.admit(isolated, time) {
            match change {
                Change::Preempted { key, slot } => self.suspend(key, Slot(slot)),
                // It may have been cancelled since the waiting sequences were last checked.
                Change::Admitted { key, .. } if self.end_if_unwanted(key, time) => {}
                Change::Admitted { key, slot } => self.open(key, Slot(slot))?,
            }
        }
        Ok(())
    }

    /// Makes a preempted sequence wait again. Its job keeps the pieces that were delivered, which are not delivered
    /// twice.
    fn suspend(&mut self, key: Key, slot: Slot) {
        self.network.close(slot);
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        sequence.slot = None;
        sequence.delivered = sequence.delivered.max(mem::take(&mut sequence.given));
        tracing::debug!(
            task.id = sequence.item.task().name.id,
            "a sequence is preempted, and starts again later"
        );
    }

    /// Opens an admitted sequence in the network.
    ///
    /// # Errors
    /// The device has failed.
    fn open(&mut self, key: Key, slot: Slot) -> Result<(), String> {
        let Some(sequence) = self.sequences.get_mut(&key) else { return Ok(()) };
        let network = &mut self.network;
        let opened = guarded(|| Ok(network.open(slot, &sequence.item.input)));
        let error = match opened {
            Ok(Ok(())) => {
                sequence.slot = Some(slot);
                return Ok(());
            }
            Ok(Err(error)) => error,
            Err(error) => {
                // `open` may have failed halfway.
                network.close(slot);
                TaskError::new(TaskErrorKind::Fault, error.to_string())
            }
        };
        let Some(item) = self.remove(key) else { return Ok(()) };
        self.check_after_model_fault(slot.0, &error)?;
        self.notices.deliver(&item, Err(error));
        Ok(())
    }

    /// If the error of an input is the model's own fault, checks the device. `slot` is free.
    fn check_after_model_fault(&mut self, slot: usize, error: &TaskError) -> Result<(), String> {
        if error.kind.blames_the_model() { self.check_device(slot, &error.message) } else { Ok(()) }
    }

    /// Computes a step. Returns false if there is no row to compute.
    fn step(&mut self, isolated: Option<Group>) -> bool {
        let is_decoding = self.scheduler.is_decoding(isolated);
        let prompt_tokens = self.pace.prompt_tokens(is_decoding);
        let rows = self.scheduler.rows(isolated, prompt_tokens, now());
        if rows.is_empty() {
            return false;
        }
        // Reported to the launcher if the sequences differ from those of the last step, and every `ANNOUNCE_INTERVAL`.
        let keys: Vec<Key> = rows.iter().map(|row| row.key).collect();
        let began = now();
        if keys != self.announced || began >= self.announced_at + ANNOUNCE_INTERVAL {
            self.announce(&keys);
        }
        let outcome = self.compute(&rows);
        self.computed = Some(ComputedStep { rows, is_decoding, outcome, began });
        true
    }

    fn compute(&mut self, rows: &[Row<Key>]) -> Result<model::Advances<G>, ForwardError> {
        let model_rows: Vec<model::Row> =
            rows.iter().map(|row| model::Row { slot: Slot(row.slot), feed: row.feed }).collect();
        let results = guarded(|| self.network.step(&model_rows))?;
        if results.len() == rows.len() {
            return Ok(results);
        }
        let (found, wanted) = (results.len(), rows.len());
        Err(ForwardError::Failed(format!("the model returned {found} results for {wanted} rows")))
    }

    /// Reports to the launcher the tasks of the sequences that will be on the device.
    fn announce(&mut self, keys: &[Key]) {
        let names = keys.iter().filter_map(|key| Some(self.sequences.get(key)?.item.task().name.clone()));
        let mut tasks: Vec<TaskName> = Vec::with_capacity(keys.len());
        for name in names {
            if !tasks.contains(&name) {
                tasks.push(name);
            }
        }
        self.observer.on_device(tasks);
        (self.announced, self.announced_at) = (keys.to_vec(), now());
    }

    /// Delivers the results of a step.
    ///
    /// # Errors
    /// The device has failed.
    fn settle(&mut self, step: ComputedStep<G>) -> Result<(), String> {
        let ComputedStep { rows, is_decoding, outcome, began } = step;
        self.steps += 1;
        let is_encoding = is_encoding(&rows);
        let tokens = rows.iter().map(|row| self.tokens_of(row)).sum();
        let pass = Pass { number: self.steps, size: rows.len(), tokens };
        // A row of one token does not count as a prompt, because the rows of answers have one token.
        let prompt_tokens = rows.iter().map(|row| row.feed.tokens()).filter(|tokens| *tokens > 1).sum();
        let mut too_large = None;
        let settled = self.settle_rows(rows, outcome, began, pass, &mut too_large);
        let took = now() - began;
        let reserved = ReservedTokens { now: self.scheduler.reserved(), max: self.queue.capacity.tokens };
        let ended = EndedPass { took, pass, reserved: Some(reserved), has_failed: settled.is_err() };
        self.observer.pass_ended(&ended);
        if self.network.has_even_steps() {
            self.learn_step_time(took);
        }
        self.scheduler.set_steps_per_window(self.pace.steps_per_window());
        if is_encoding {
            self.pace.add_encode_time(pass.size, took);
            if let Some(max_windows) = self.encode_sizing.learn(too_large) {
                self.scheduler.limit_windows(max_windows);
            }
        } else {
            self.pace.learn(is_decoding, prompt_tokens, took);
            if let Some(max_tokens) = self.sizing.learn(too_large) {
                self.scheduler.limit_step(max_tokens);
            }
        }
        settled
    }

    /// The number of tokens that a row computes.
    fn tokens_of(&self, row: &Row<Key>) -> usize {
        match row.feed {
            Feed::Tokens(tokens) => tokens,
            Feed::Encode => self.sequences.get(&row.key).map_or(0, |it| it.item.encode_tokens),
        }
    }

    /// Updates the average duration of a step. The average starts at 0, so that the first steps, which often have long
    /// prompts, count little.
    fn learn_step_time(&mut self, took: Duration) {
        self.average_step_us += LATEST_STEP_WEIGHT * (took.as_micros() as f64 - self.average_step_us);
        self.queue.average_step_us.store(self.average_step_us as u64, Ordering::Relaxed);
    }

    /// Delivers the results of these rows, or repeats a failed step with halves of them until the failing row is alone.
    /// Sets `too_large` to the size (in tokens or windows, greater than 1) of the smallest step that ran out of memory.
    fn settle_rows(
        &mut self,
        rows: Vec<Row<Key>>,
        outcome: Result<model::Advances<G>, ForwardError>,
        began: Instant,
        pass: Pass,
        too_large: &mut Option<usize>,
    ) -> Result<(), String> {
        let (kind, error) = match outcome {
            Ok(results) => return self.advance(rows.into_iter().zip(results).collect(), began, pass),
            Err(ForwardError::Device(fault)) => return Err(fault),
            Err(ForwardError::OutOfMemory(error)) => (TaskErrorKind::OutOfMemory, error),
            Err(ForwardError::Failed(error)) => (TaskErrorKind::Fault, error),
        };
        let is_out_of_memory = kind == TaskErrorKind::OutOfMemory;
        let size = match is_encoding(&rows) {
            true => rows.len(),
            false => rows.iter().map(|row| row.feed.tokens()).sum(),
        };
        if is_out_of_memory && size > 1 {
            *too_large = Some(too_large.map_or(size, |smallest| smallest.min(size)));
        }
        if let [alone] = rows[..] {
            let tokens = alone.feed.tokens();
            if is_out_of_memory && tokens > 1 {
                // The next steps of the sequence feed the other half.
                let half = vec![Row { feed: Feed::Tokens(tokens / 2), ..alone }];
                let outcome = self.compute(&half);
                return self.settle_rows(half, outcome, began, pass, too_large);
            }
            let Some(item) = self.remove(alone.key) else { return Ok(()) };
            self.check_device(alone.slot, &error)?;
            let error = TaskError::new(kind, error);
            tracing::warn!(task.id = item.task().name.id, %error, "the model failed on a sequence");
            item.outputs.record_pass(began, now() - began, pass);
            self.notices.deliver(&item, Err(error));
            return Ok(());
        }
        tracing::warn!(rows = rows.len(), error, "a step failed; trying its halves");
        let (first, second) = rows.split_at(rows.len() / 2);
        for half in [first, second] {
            // Announced first, because computing this half may end the process.
            let keys: Vec<Key> = half.iter().map(|row| row.key).collect();
            self.announce(&keys);
            let outcome = self.compute(half);
            self.settle_rows(half.to_vec(), outcome, began, pass, too_large)?;
            self.notices.send_done();
        }
        Ok(())
    }

    /// Delivers the results of rows, and ends the sequences that are done. Fails if the device is broken.
    fn advance(&mut self, results: Results<G>, began: Instant, pass: Pass) -> Result<(), String> {
        let time = now();
        for (row, result) in results {
            if matches!(result, Ok(Advance::Waits)) {
                continue;
            }
            self.scheduler.advance(&row, time);
            let Some(sequence) = self.sequences.get_mut(&row.key) else { continue };
            let (outputs, index) = (&sequence.item.outputs, sequence.item.index);
            outputs.record_pass(began, time - began, pass);
            let (piece, output) = match result {
                Ok(Advance::Fed | Advance::Waits) => (None, None),
                Ok(Advance::More(piece)) => (Some(piece), None),
                Ok(Advance::Again) => {
                    self.scheduler.restart(row.slot);
                    (None, None)
                }
                Ok(Advance::Done(piece, output)) => (piece, Some(Ok(output))),
                Err(error) => (None, Some(Err(error))),
            };
            if let Some(piece) = piece {
                sequence.given += 1;
                if sequence.given > sequence.delivered {
                    outputs.record_piece(index, piece, time);
                }
            }
            let Some(output) = output else { continue };
            let Some(item) = self.remove(row.key) else { continue };
            if let Err(error) = &output {
                self.check_after_model_fault(row.slot, error)?;
            }
            self.notices.deliver(&item, output);
        }
        Ok(())
    }
}

impl<P, G> Loop for Continuous<P, G>
where
    P: Processor,
    G: Generate<Prompt = P::Input, Piece = P::Piece, Output = P::Output>,
{
    fn turn(&mut self) -> Next {
        if let Some(step) = self.computed.take() {
            if let Err(fault) = self.settle(step) {
                self.notices.send(Notice::Fault(fault));
                return Next::End;
            }
            self.notices.send_done();
        }
        let isolated = self.take_arrivals();
        self.end_unwanted();
        if let Err(fault) = self.admit(isolated) {
            self.notices.send(Notice::Fault(fault));
            return Next::End;
        }
        self.notices.send_done();
        if self.step(isolated) {
            return Next::Again;
        }
        let time = now();
        if !self.announced.is_empty() {
            self.announced.clear();
            self.observer.mark_idle();
            self.idle.begin(time);
        }
        if self.queue.state.lock().is_closed {
            return Next::End;
        }
        let report = self.idle.report_if_due(&*self.observer, time);
        let check = (!self.sequences.is_empty()).then(|| time + CHECK_INTERVAL);
        if self.queue.sleep() { Next::Sleep(report.into_iter().chain(check).min()) } else { Next::Again }
    }
}
