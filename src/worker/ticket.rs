//! The shared state of one accepted task while it is being worked on: which stage it is in, and its
//! outputs as forward passes bring them. Written by the intake (withdraw), by the batch former
//! (start), by the model thread (outputs) and by the task's own future (commit); whoever moves the
//! stage out of `Waiting` first decides whether the task is answered or handed back.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::oneshot;

use crate::protocol::TaskError;
use crate::protocol::control::TaskName;
use crate::telemetry::traces::TaskLink;

const WAITING: u8 = 0;
const COMMITTED: u8 = 1;
const WITHDRAWN: u8 = 2;

/// What the forward passes gave a task.
#[derive(Debug)]
pub(super) struct Computed<O> {
    /// The outputs in the order of the inputs, or the first error among them.
    pub(super) outputs: Result<Vec<O>, TaskError>,
    /// When its first forward pass began.
    pub(super) started: Option<Instant>,
    /// Its last forward pass.
    pub(super) last: Pass,
    /// The time of all its forward passes.
    pub(super) compute: Duration,
}

/// A task whose outputs are complete, and who waits for them: its own future, which is told once the whole
/// batch is done. Told one after the other, the first would take the model thread's core and answer alone.
#[derive(Debug)]
pub(super) struct Complete<O> {
    computed: Computed<O>,
    waits: oneshot::Sender<Computed<O>>,
}

impl<O> Complete<O> {
    /// Gives the outputs to who waits for them.
    pub(super) fn tell(self) {
        let _ = self.waits.send(self.computed);
    }
}

/// One forward pass, as each of its inputs sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pass {
    /// Its number, counting from 1.
    pub(super) number: u64,
    /// Inputs in it.
    pub(super) size: usize,
    /// Tokens in it.
    pub(super) tokens: usize,
}

/// One accepted task.
pub(super) struct Ticket<O> {
    /// What the task is called.
    pub(super) name: TaskName,
    /// Until when the task is wanted.
    pub(super) deadline: Option<SystemTime>,
    /// Its span, where it is recorded, for the spans of its batches.
    pub(super) link: Option<Box<TaskLink>>,
    stage: AtomicU8,
    /// Held for the few instructions of storing an output; never across an await.
    gathered: Mutex<Gathered<O>>,
}

struct Gathered<O> {
    outputs: Vec<Option<O>>,
    left: usize,
    error: Option<TaskError>,
    started: Option<Instant>,
    last: Pass,
    compute: Duration,
    done: Option<oneshot::Sender<Computed<O>>>,
}

impl<O> Ticket<O> {
    pub(super) fn new(name: TaskName, deadline: Option<SystemTime>) -> Self {
        let gathered = Gathered {
            outputs: Vec::new(),
            left: 0,
            error: None,
            started: None,
            last: Pass::default(),
            compute: Duration::ZERO,
            done: None,
        };
        Self { name, deadline, link: None, stage: AtomicU8::new(WAITING), gathered: Mutex::new(gathered) }
    }

    /// The same, with its span.
    pub(super) fn linked(self, link: Option<Box<TaskLink>>) -> Self {
        Self { link, ..self }
    }

    /// Expects `count` outputs; they come through the receiver together.
    pub(super) fn expect(&self, count: usize) -> oneshot::Receiver<Computed<O>> {
        let (done, computed) = oneshot::channel();
        let mut gathered = self.lock();
        gathered.outputs = (0..count).map(|_| None).collect();
        gathered.left = count;
        gathered.done = Some(done);
        computed
    }

    /// The task will be settled by its own future. False: it has been withdrawn.
    pub(super) fn commit(&self) -> bool {
        let moved = self.stage.compare_exchange(WAITING, COMMITTED, Ordering::AcqRel, Ordering::Acquire);
        moved.is_ok() || moved == Err(COMMITTED)
    }

    /// The task goes back to the broker. False: it is committed, or withdrawn already.
    pub(super) fn withdraw(&self) -> bool {
        self.stage.compare_exchange(WAITING, WITHDRAWN, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Nobody waits for this task's outputs.
    pub(super) fn is_over(&self) -> bool {
        self.stage.load(Ordering::Acquire) == WITHDRAWN
            || self.lock().done.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    /// One input went through a forward pass. It was the last, or an error: the task's end.
    #[must_use]
    pub(super) fn deliver(
        &self,
        index: usize,
        output: Result<O, TaskError>,
        began: Instant,
        pass: Pass,
    ) -> Option<Complete<O>> {
        let mut gathered = self.lock();
        if gathered.last.number != pass.number {
            gathered.compute += began.elapsed();
            gathered.last = pass;
        }
        gathered.started.get_or_insert(began);
        match output {
            Ok(output) => {
                if let Some(place) = gathered.outputs.get_mut(index) {
                    *place = Some(output);
                    gathered.left -= 1;
                }
            }
            Err(error) => gathered.error = Some(error),
        }
        gathered.complete()
    }

    /// The task ends with an error, whatever its inputs still do.
    pub(super) fn fail(&self, error: TaskError) {
        let mut gathered = self.lock();
        gathered.error = Some(error);
        if let Some(complete) = gathered.complete() {
            complete.tell();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Gathered<O>> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<O> Gathered<O> {
    fn complete(&mut self) -> Option<Complete<O>> {
        let outputs = match self.error.take() {
            Some(error) => Err(error),
            None if self.left > 0 => return None,
            None => Ok(std::mem::take(&mut self.outputs).into_iter().flatten().collect()),
        };
        let waits = self.done.take()?;
        let (started, last, compute) = (self.started, self.last, self.compute);
        Some(Complete { computed: Computed { outputs, started, last, compute }, waits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::TaskErrorKind;

    fn ticket<O>() -> Ticket<O> {
        Ticket::new(TaskName { id: "t".into(), fingerprint: "f".into() }, None)
    }

    #[test]
    fn outputs_come_together_and_in_the_order_of_the_inputs() {
        let ticket = ticket();
        let mut computed = ticket.expect(3);
        for index in [2, 0] {
            let pass = Pass { number: 1, size: 2, tokens: 2 };
            assert!(ticket.deliver(index, Ok(index), Instant::now(), pass).is_none());
        }
        let complete = ticket.deliver(1, Ok(1), Instant::now(), Pass { number: 2, size: 1, tokens: 9 });
        assert!(computed.try_recv().is_err(), "not before it is told");
        complete.unwrap().tell();
        let computed = computed.try_recv().unwrap();
        assert_eq!(computed.outputs.unwrap(), [0, 1, 2]);
        assert_eq!(computed.last.tokens, 9);
    }

    #[test]
    fn the_first_error_ends_a_task_once() {
        let ticket = ticket::<u8>();
        let mut computed = ticket.expect(2);
        ticket.fail(TaskError::new(TaskErrorKind::Internal, "first"));
        ticket.fail(TaskError::new(TaskErrorKind::Internal, "second"));
        assert_eq!(computed.try_recv().unwrap().outputs.unwrap_err().message, "first");
        assert!(ticket.is_over());
    }

    #[test]
    fn a_task_is_either_committed_or_withdrawn() {
        let committed = ticket::<u8>();
        assert!(committed.commit() && committed.commit() && !committed.withdraw());
        let withdrawn = ticket::<u8>();
        assert!(withdrawn.withdraw() && !withdrawn.withdraw() && !withdrawn.commit());
    }
}
