//! The engine: runs a model on a thread of its own. Tasks come in as [`Job`]s, and what became of them goes
//! out as [`Notice`]s; what tells launcher and metrics of it is an [`Observer`]. Nothing outside this room
//! knows a model's types or the steps of a computation. Knows neither broker nor acks.
//!
//! | file | decides |
//! |---|---|
//! | `oneshot` | the loop of models that answer in one pass |
//! | `continuous` | the loop of models whose sequences join and leave |
//! | `batch` | what a failed batch of one pass means: a bad input, or a bad device |
//! | `sizing` | how large a batch the device's memory takes |
//! | `job` | one task's inputs, pieces and outputs, between the worker and the loop |
//! | `task_state` | whether a task is answered or handed back |
//! | `start` | the model thread: opening the device, loading, the probe; what runs a loop |
//! | `turns` | what runs a loop, and what it sleeps on |
//! | `idle` | when the launcher is told that the device is idle |
//! | `panics` | the one boundary where a panic of a model is caught |

mod batch;
mod continuous;
mod idle;
mod job;
mod oneshot;
mod panics;
mod sizing;
mod start;
mod task_state;
#[cfg(test)]
mod tests;
mod turns;

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::mpsc;

use crate::batching::Policy;
use crate::model::{Body, LoadError, LoadSpec, Message, Processor, Route, TaskError};
use crate::protocol::control::TaskName;

use job::Item;

pub use panics::caught;
pub use start::{Starter, continuous, oneshot};
pub use task_state::TaskState;

/// A loaded model at work. Shared by all tasks of a worker.
pub trait Engine: Send + Sync {
    /// What the model answers.
    fn routes(&self) -> &[Route];

    /// Decodes a message and makes its inputs. Blocks for as long as that takes.
    ///
    /// # Errors
    /// What is wrong with the task.
    fn preprocess(&self, message: &Message) -> Result<Box<dyn Job>, TaskError>;

    /// One more task is on its way (or one less): an idle device waits for it, for `max_delay` at most.
    fn expect(&self, one: Expect);

    /// Forms batches by other bounds from now on, also of what waits.
    fn set_policy(&self, policy: Policy);

    /// While isolated, only jobs that are isolated themselves are computed.
    fn isolate(&self, isolated: bool);

    /// Batches that may be under way or about to be: what a worker should have tasks for.
    fn depth(&self) -> usize;

    /// Sequences that run at once; none for models of one pass.
    fn sequences(&self) -> Option<usize>;
}

/// Whether a task that is on its way has been begun, or has arrived or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// It is on its way.
    More,
    /// It is not, any more.
    Less,
}

/// One task in the engine: preprocessed, then enqueued, then done. Dropping it takes it out.
pub trait Job: Send {
    /// Its inputs.
    fn inputs(&self) -> usize;

    /// Tokens of its inputs.
    fn tokens(&self) -> usize;

    /// It asked for its reply in parts.
    fn is_streamed(&self) -> bool;

    /// Hands its inputs to the model thread. `isolated`: it is computed with other isolated jobs alone.
    fn enqueue(&mut self, task: Arc<TaskState>, isolated: bool);

    /// What happens to it next, after it was enqueued. Parts are given out only while `parts` are asked for.
    fn poll_event(&mut self, context: &mut Context<'_>, parts: bool) -> Poll<JobEvent>;

    /// Writes the reply, once it is done. Blocks for as long as that takes.
    ///
    /// # Errors
    /// Why there is no reply with a result.
    fn finish(self: Box<Self>) -> Result<Body, TaskError>;
}

/// What happens to a job.
#[derive(Debug)]
pub enum JobEvent {
    /// Parts of its reply, one for each of its sequences at most.
    Parts(Vec<Body>),
    /// It is done, with a result or an error: [`Job::finish`] tells which.
    Done(Computed),
}

/// Where a job's time on the device went.
#[derive(Clone, Copy, Debug, Default)]
pub struct Computed {
    /// When its first pass began; none: it never was on the device.
    pub started: Option<Instant>,
    /// When it gave its first piece.
    pub first_piece: Option<Instant>,
    /// The time of all its passes.
    pub compute: Duration,
    /// Its last pass.
    pub last: Pass,
    /// It has no result.
    pub failed: bool,
}

/// One forward pass, or one step of sequences, as each of its inputs sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Its number, counting from 1.
    pub number: u64,
    /// Inputs in it.
    pub size: usize,
    /// Tokens in it.
    pub tokens: usize,
}

/// What the model thread says to the worker.
pub enum Notice {
    /// The jobs of these are done. They are told together: told one by one, the first would take the model
    /// thread's core and answer alone.
    Done(Vec<Arc<dyn Told>>),
    /// The device is gone, in words. Unanswered jobs stay so. The thread's last notice.
    Fault(String),
}

/// A job that is to be told that it is done.
pub trait Told: Send + Sync {
    /// Tells it.
    fn tell(&self);
}

/// Hears, on the model thread, what that does. Each call holds up the device.
pub trait Observer: Send {
    /// These tasks are on the device from now on: written down when this returns, since the process may not
    /// live to do it later.
    fn on_device(&self, tasks: Vec<TaskName>);
    /// Nothing is on the device any more. May be told later, with whatever is told next.
    fn mark_idle(&self);
    /// Nothing has been on the device for a while.
    fn tell_idle(&self);
    /// A pass has ended.
    fn passed(&self, pass: &Passed<'_>);
}

/// A pass that has ended.
pub struct Passed<'a> {
    /// When it began.
    pub began: SystemTime,
    /// For how long the device was busy with it.
    pub took: Duration,
    /// Its number, inputs and tokens.
    pub pass: Pass,
    /// The tasks of its inputs, each once.
    pub tasks: &'a [Arc<TaskState>],
    /// The device failed with it.
    pub fault: Option<&'a str>,
}

/// What an engine is started with.
pub struct Setup {
    /// What to load.
    pub spec: LoadSpec,
    /// The share of its possible speed that the device has to reach.
    pub min_speed: f64,
    /// The bounds of batches.
    pub policy: Policy,
    /// Hears what the model thread does.
    pub observer: Box<dyn Observer>,
}

/// An engine whose model is loaded.
pub struct Loaded {
    /// The engine.
    pub engine: Arc<dyn Engine>,
    /// Written by the model thread, which waits where it is full; read by the worker, which passes on at once.
    pub notices: mpsc::Receiver<Notice>,
    /// The device that was really opened: `cpu`, or the GPU's UUID.
    pub device: String,
}

/// The end of loading a model.
pub type Loading = tokio::sync::oneshot::Receiver<Result<Loaded, LoadError>>;

/// Notices that may wait for the worker.
const NOTICES: usize = 64;

/// The model thread's end of the notices, with the jobs that are done and not told yet.
struct Notices {
    sender: mpsc::Sender<Notice>,
    done: Vec<Arc<dyn Told>>,
}

impl Notices {
    fn new() -> (Self, mpsc::Receiver<Notice>) {
        let (sender, receiver) = mpsc::channel(NOTICES);
        (Self { sender, done: Vec::new() }, receiver)
    }

    /// An input has come to its end.
    fn deliver<R: Processor>(&mut self, item: &Item<R>, output: Result<R::Output, TaskError>) {
        if item.outputs.deliver(item.index, output) {
            self.done.push(item.outputs.clone());
        }
    }

    /// Has the jobs told that are done.
    fn tell(&mut self) {
        if !self.done.is_empty() {
            let done = std::mem::take(&mut self.done);
            self.send(Notice::Done(done));
        }
    }

    fn send(&self, notice: Notice) {
        if let Err(mpsc::error::TrySendError::Full(notice)) = self.sender.try_send(notice) {
            drop(self.sender.blocking_send(notice));
        }
    }
}

/// The time, which tests may have stopped.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
