//! The loop of models in a process of their own that run tasks side by side: each task gives pieces and ends when it likes.
//! Decides when a task starts, by the order of `batching::sequences` without its preemption, since a task that was started
//! over might give other pieces. A cancelled task keeps its place until the model says that it has ended. Isolated tasks
//! start when all others have ended. Owns the waiting and the running tasks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::continuous::{Arrived, Probe, SequenceQueue, Taken};
use super::panics::guarded;
use super::probe::ProbeError;
use super::queue::Item;
use super::run_loop::{Idle, Loop, Next, Waker};
use super::{EndedPass, Notice, Notices, Observer, Pass, now};
use crate::batching::sequences::{Change, Limits, Scheduler, SequenceSpec};
use crate::batching::{Encoding, Group, Policy};
use crate::model::{Capacity, ForwardError, Processor, TaskError, TaskErrorKind};
use crate::protocol::control::TaskName;

/// How often running tasks are checked for cancellations, deadlines and time limits.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// How often the running tasks are reported to the launcher even if they have not changed. A worker that sends nothing for
/// long counts as stuck; whether a task is stuck is decided by [`Streams::take_events`].
const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(1);

/// Identifies a task that runs.
pub type StreamId = u64;

/// What a running task does.
pub enum StreamEvent<P, O> {
    /// It gives a piece.
    Piece(P),
    /// It has ended.
    Ended(Result<O, TaskError>),
}

/// What running tasks have done, in order.
pub type StreamEvents<P, O> = Vec<(StreamId, StreamEvent<P, O>)>;

/// A model that runs tasks side by side.
pub trait Streams: 'static {
    /// The processor's input. A task has one.
    type Input;
    /// The processor's piece.
    type Piece;
    /// The processor's output.
    type Output;

    /// The largest number of tasks that run at once.
    fn concurrency(&self) -> usize;

    /// Starts a task.
    ///
    /// # Errors
    /// [`ForwardError`] for the process.
    fn start(&mut self, id: StreamId, input: &Self::Input) -> Result<(), ForwardError>;

    /// Asks a task to end, because its deadline has passed or its answer is not wanted. It keeps its place until its event
    /// `Ended`.
    ///
    /// # Errors
    /// As [`Streams::start`].
    fn cancel(&mut self, id: StreamId, is_late: bool) -> Result<(), ForwardError>;

    /// What the running tasks have done since the last call. Does not wait.
    ///
    /// # Errors
    /// [`ForwardError`] for the process, also if a task does not end in time after it was told to.
    fn take_events(&mut self) -> Result<StreamEvents<Self::Piece, Self::Output>, ForwardError>;
}

/// The queue of a model that runs `concurrency` tasks at once, each of which counts as a sequence.
pub(super) fn queue<P: Processor>(concurrency: usize, policy: &Policy, waker: Waker) -> SequenceQueue<P> {
    let sequences = concurrency.min(policy.max_requests);
    SequenceQueue::new(Capacity { sequences, tokens: usize::MAX, context: usize::MAX }, waker)
}

/// A task in the loop.
struct Stream<P: Processor> {
    /// None once it was cancelled.
    item: Option<Item<P>>,
    name: TaskName,
    group: Option<Group>,
    tokens: usize,
    /// When it was started; none while it waits.
    since: Option<Instant>,
}

pub(super) struct StreamLoop<P: Processor, S> {
    streams: S,
    queue: Arc<SequenceQueue<P>>,
    scheduler: Scheduler<StreamId>,
    tasks: BTreeMap<StreamId, Stream<P>>,
    last_id: StreamId,
    /// The number of tasks that have ended.
    ended: u64,
    /// Since when the time in which tasks run is not reported yet.
    busy_since: Instant,
    /// The running tasks as last reported to the launcher, and when.
    announced: (Vec<StreamId>, Instant),
    idle: Idle,
    notices: Notices,
    observer: Box<dyn Observer>,
}

/// The scheduler's bounds: each task counts as one token, so that only their number matters.
fn limits(sequences: usize) -> Limits {
    let encoding = Encoding { interval: 1, batch: 1 };
    Limits { sequences, reserved_tokens: sequences, step_tokens: sequences, encoding }
}

/// Runs the probe of `processor` to its end, before any task.
///
/// # Errors
/// The model refuses its probe, or fails on it.
pub(super) fn try_probe<P, S>(processor: &P, streams: &mut S) -> Result<(), ProbeError>
where
    P: Processor,
    S: Streams<Input = P::Input, Piece = P::Piece, Output = P::Output>,
{
    let Some(Probe { context, input }) = Probe::of(processor)? else { return Ok(()) };
    streams.start(0, &input.input).map_err(ProbeError::failed)?;
    loop {
        for (_, event) in streams.take_events().map_err(ProbeError::failed)? {
            if let StreamEvent::Ended(output) = event {
                return Ok(processor.finish(context, vec![output?]).map(drop)?);
            }
        }
        thread::park_timeout(CHECK_INTERVAL);
    }
}

impl<P: Processor, S: Streams<Input = P::Input, Piece = P::Piece, Output = P::Output>> StreamLoop<P, S> {
    pub(super) fn new(
        streams: S,
        queue: Arc<SequenceQueue<P>>,
        observer: Box<dyn Observer>,
        notices: Notices,
    ) -> Self {
        let scheduler = Scheduler::without_preemption(limits(queue.max_sequences()));
        Self {
            streams,
            queue,
            scheduler,
            tasks: BTreeMap::new(),
            last_id: 0,
            ended: 0,
            busy_since: now(),
            announced: (Vec::new(), now()),
            idle: Idle::default(),
            notices,
            observer,
        }
    }

    /// Takes new tasks from the queue. Returns the group that runs alone, if one does, and whether no more will come.
    fn take_arrivals(&mut self) -> (Option<Group>, bool) {
        let Taken { arrived, isolated, is_closed } = self.queue.take();
        for Arrived { item, group } in arrived {
            let task = item.task();
            let spec = SequenceSpec {
                has_window: false,
                prompt: 1,
                answer: 0,
                priority: task.priority,
                owner: task.owner,
                group,
            };
            let (name, tokens) = (task.name.clone(), item.tokens);
            self.last_id += 1;
            self.scheduler.enqueue(self.last_id, spec, now());
            let stream = Stream { item: Some(item), name, group, tokens, since: None };
            self.tasks.insert(self.last_id, stream);
        }
        (isolated, is_closed)
    }

    /// Ends the tasks that are cancelled, expired or withdrawn.
    fn end_unwanted(&mut self) -> Result<(), ForwardError> {
        let (time, mut result) = (now(), Ok(()));
        let Self { tasks, notices, streams, scheduler, .. } = self;
        tasks.retain(|id, stream| {
            let is_unwanted =
                |item: &mut Item<P>| item.outputs.is_over() || item.task().unwanted(time).is_some();
            let Some(item) = stream.item.take_if(is_unwanted) else { return true };
            let error = item.task().unwanted(time).filter(|_| !item.outputs.is_over());
            let is_late = error.as_ref().is_some_and(|error| error.kind == TaskErrorKind::Expired);
            if let Some(error) = error {
                notices.deliver(&item, Err(error));
            }
            if stream.since.is_none() {
                scheduler.remove(*id, time);
                return false;
            }
            if result.is_ok() {
                result = streams.cancel(*id, is_late);
            }
            true
        });
        result
    }

    /// Starts the tasks that may run now.
    fn start_admitted(&mut self, isolated: Option<Group>) -> Result<(), ForwardError> {
        let waits_for_others = isolated.is_some()
            && self.tasks.values().any(|stream| stream.since.is_some() && stream.group != isolated);
        if waits_for_others {
            return Ok(());
        }
        let time = now();
        let mut admitted = Vec::new();
        for change in self.scheduler.admit(isolated, time) {
            // This scheduler never preempts.
            if let Change::Admitted { key, .. } = change {
                admitted.push(key);
                self.tasks.entry(key).and_modify(|stream| stream.since = Some(time));
            }
        }
        if self.announced.0.is_empty() && !admitted.is_empty() {
            self.busy_since = time;
        }
        // Before they start, because the process may die of them.
        self.announce();
        for id in admitted {
            let Some(Stream { item: Some(item), .. }) = self.tasks.get(&id) else { continue };
            self.streams.start(id, &item.input)?;
        }
        Ok(())
    }

    /// Reports the running tasks to the launcher, if they have changed or have not been reported for long.
    fn announce(&mut self) {
        let running = self.tasks.iter().filter(|(_, stream)| stream.since.is_some());
        let ids: Vec<StreamId> = running.clone().map(|(id, _)| *id).collect();
        let time = now();
        if ids.is_empty() || (ids == self.announced.0 && time < self.announced.1 + ANNOUNCE_INTERVAL) {
            return;
        }
        self.observer.on_device(running.map(|(_, stream)| stream.name.clone()).collect());
        self.announced = (ids, time);
    }

    /// Delivers what the running tasks have done.
    fn deliver_events(&mut self) -> Result<(), ForwardError> {
        for (id, event) in guarded(|| self.streams.take_events())? {
            match event {
                StreamEvent::Piece(piece) => {
                    let item = self.tasks.get(&id).and_then(|stream| stream.item.as_ref());
                    if let Some(item) = item {
                        item.outputs.record_piece(item.index, piece, now());
                    }
                }
                StreamEvent::Ended(output) => self.end(id, output),
            }
        }
        Ok(())
    }

    fn end(&mut self, id: StreamId, output: Result<P::Output, TaskError>) {
        let Some(stream) = self.tasks.remove(&id) else { return };
        let time = now();
        self.scheduler.remove(id, time);
        self.ended += 1;
        let pass = Pass { number: self.ended, size: 1, tokens: stream.tokens };
        let began = stream.since.unwrap_or(time);
        if let Some(item) = &stream.item {
            if let Err(error) = &output
                && error.kind.blames_the_model()
            {
                tracing::warn!(task.id = stream.name.id, %error, "the model failed on a task");
            }
            item.outputs.record_pass(began, time - began, pass);
            self.notices.deliver(item, output);
        }
        // Tasks that run side by side count once.
        let took = time - self.busy_since.min(time);
        self.busy_since = time;
        self.observer.pass_ended(&EndedPass { took, pass, reserved: None, has_failed: false });
    }

    /// One turn. Returns when the next is due.
    fn work(&mut self) -> Result<Next, ForwardError> {
        self.deliver_events()?;
        let (isolated, is_closed) = self.take_arrivals();
        self.end_unwanted()?;
        self.start_admitted(isolated)?;
        self.notices.send_done();
        let time = now();
        let is_running = self.tasks.values().any(|stream| stream.since.is_some());
        if !is_running && !self.announced.0.is_empty() {
            self.announced.0.clear();
            self.observer.mark_idle();
            self.idle.begin(time);
        }
        if is_closed && self.tasks.is_empty() {
            return Ok(Next::End);
        }
        let report = self.idle.report_if_due(&*self.observer, time);
        let check = (!self.tasks.is_empty()).then(|| time + CHECK_INTERVAL);
        // Whoever sends an event wakes this thread afterwards, and so does whoever changes the queue. Nothing follows its end.
        let may_sleep = is_closed || self.queue.sleep();
        Ok(if may_sleep { Next::Sleep(report.into_iter().chain(check).min()) } else { Next::Again })
    }
}

impl<P: Processor, S: Streams<Input = P::Input, Piece = P::Piece, Output = P::Output>> Loop
    for StreamLoop<P, S>
{
    fn turn(&mut self) -> Next {
        match self.work() {
            Ok(next) => next,
            Err(error) => {
                self.notices.send(Notice::Fault(error.to_string()));
                Next::End
            }
        }
    }
}
