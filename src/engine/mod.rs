//! The engine runs a model on a thread of its own. Tasks come in as [`Job`]s and finished ones go out as
//! [`Notice`]s; an [`Observer`] reports to the launcher and the metrics. No other module knows a model's types or the
//! steps of a computation. This module knows neither the broker nor acks.
//!
//! | file | decides |
//! |---|---|
//! | `one_pass` | the loop of models that answer in one pass |
//! | `continuous` | the loop of models whose sequences join and leave |
//! | `streams` | the loop of models in a process of their own that run tasks side by side |
//! | `batch` | what a failed batch of one pass means: a bad input, or a bad device |
//! | `probe` | what a failed probe means: its author's mistake, or a bad device |
//! | `sizing` | how large a batch the device's memory takes |
//! | `pace` | how many prompt tokens a step may have, so that it does not take long |
//! | `memory` | when there is memory for further inputs |
//! | `job` | one task from its preprocessing to its reply, between the worker and the loop |
//! | `outputs` | what the loop delivers to a task, and when its job is woken |
//! | `queue` | what the loops' queues take from jobs |
//! | `reply` | how much of a reply's parts is written at a time, and on which thread |
//! | `task_state` | whether a task is answered or handed back |
//! | `start` | the model thread: opens the device, loads, computes the probe, runs the loop |
//! | `run_loop` | how the model thread runs a loop, when the loop sleeps, and how it is woken |
//! | `panics` | what a panic of a model becomes: the one boundary where it is caught |

mod batch;
mod continuous;
mod job;
mod memory;
mod one_pass;
mod outputs;
mod pace;
mod panics;
mod probe;
mod queue;
mod reply;
mod run_loop;
mod sizing;
mod start;
mod streams;
mod task_state;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::batching::{Group, Policy, QueueBytes};
use crate::model::{
    Body, Dtype, Effort, FileUrl, Files, LoadError, LoadSpec, Message, Processor, Route, TaskError,
};
use crate::protocol::control::TaskName;

use queue::Item;

pub use memory::Memory;
pub use panics::caught;
pub use run_loop::Waker;
pub use start::{
    Foreign, ForeignWork, Starter, assuming, chosen, continuous, foreign, one_pass, strict_refusal,
};
pub use streams::{StreamEvent, StreamId, Streams};
pub use task_state::TaskState;

/// A loaded model and its thread. Shared by all tasks of a worker.
pub trait Engine: Send + Sync {
    /// The URLs that the model answers.
    fn routes(&self) -> &[Route];

    /// Decodes a message and prepares its inputs, or the first slice of them, unless that takes long. Blocks until that is
    /// done.
    ///
    /// # Errors
    /// What is wrong with the task.
    fn preprocess(&self, message: &Message, files: &Files) -> Result<Prepared, TaskError>;

    /// As [`Processor::file_urls`].
    fn file_urls(&self, message: &Message) -> Vec<FileUrl>;

    /// As [`Processor::effort`].
    fn effort(&self, message: &Message) -> Effort;

    /// The memory of inputs that are prepared and not computed yet.
    fn memory(&self) -> &Arc<Memory>;

    /// The queue to the model thread.
    fn queue(&self) -> &Arc<dyn Queue>;
}

/// The queue to the model thread, as the worker sees it. Jobs enqueue themselves.
pub trait Queue: Send + Sync {
    /// Counts one more task that is on its way to the engine, or one less. While tasks are on their way, an idle device
    /// waits for them before it computes an incomplete batch, for at most `max_delay`.
    fn expect(&self, one: Expect);

    /// Isolates a group: from now on, only jobs that were enqueued with this group are computed. None: all jobs are
    /// computed again.
    fn isolate(&self, isolated: Option<Group>);

    /// The number of batches that may be submitted or in preparation. A worker should hold enough tasks for all of
    /// them.
    fn depth(&self) -> usize;

    /// The maximum number of sequences that run at once; none for one-pass models.
    fn sequences(&self) -> Option<usize>;
}

/// A change in the number of tasks that are on their way to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// One more task is on its way.
    More,
    /// One task is no longer on its way: it has arrived or failed.
    Less,
}

/// A task that is preprocessed.
pub enum Prepared {
    /// Its inputs, or the first slice of them, are made.
    Made(PreparedJob),
    /// Its inputs are not made yet, because that takes long.
    Later(MakeInputs),
}

/// Makes the inputs of [`Prepared::Later`]. Blocks until that is done. The error is what is wrong with the task.
pub type MakeInputs = Box<dyn FnOnce() -> Result<PreparedJob, TaskError> + Send>;

impl Prepared {
    /// Makes the inputs, if that is still to be done. Blocks until then.
    ///
    /// # Errors
    /// What is wrong with the task.
    pub fn make(self) -> Result<PreparedJob, TaskError> {
        match self {
            Self::Made(job) => Ok(job),
            Self::Later(make) => make(),
        }
    }
}

/// A task whose inputs, or the first slice of them, are made.
pub struct PreparedJob {
    /// The number of these inputs.
    pub inputs: usize,
    /// Their tokens.
    pub tokens: usize,
    /// How long the device will probably need for the task, at the pace of recent steps; none for one-pass models.
    pub estimate: Option<Duration>,
    enqueue: Box<EnqueueJob>,
}

/// Hands a job's inputs to the model thread.
type EnqueueJob = dyn FnOnce(Arc<TaskState>, Option<Group>) -> Box<dyn Job> + Send;

impl PreparedJob {
    /// Hands the inputs to the model thread. `group`: the isolated group to which the task belongs, if it belongs to one.
    pub fn enqueue(self, task: Arc<TaskState>, group: Option<Group>) -> Box<dyn Job> {
        (self.enqueue)(task, group)
    }
}

/// A task that is enqueued. Once the job is dropped, the task is not computed any further.
pub trait Job: Send {
    /// The number of inputs that are prepared so far.
    fn inputs(&self) -> usize;

    /// Tokens of these inputs.
    fn tokens(&self) -> usize;

    /// Whether the task requested its reply in parts.
    fn is_streamed(&self) -> bool;

    /// The source of the job's further inputs; none if all inputs are prepared.
    fn source(&self) -> Option<Arc<dyn InputSource>>;

    /// Waits for the next event. Parts are given out only while `parts` is true, and not after the job is done.
    fn poll_event(&mut self, context: &mut Context<'_>, parts: bool) -> Poll<JobEvent>;

    /// The parts of the reply that can be written now, or the first of them; none if there is no such part. The caller
    /// writes them before it asks for the next, and before `finish`. After an error, no more parts are made of outputs.
    fn unwritten(&self) -> Option<Unwritten>;

    /// Whether [`Job::finish`] takes long.
    fn is_finish_slow(&self) -> bool;

    /// Writes the reply, once the job is done. Blocks until that is done.
    ///
    /// # Errors
    /// Why there is no reply with a result.
    fn finish(self: Box<Self>) -> Result<Body, TaskError>;
}

/// Makes the further inputs of a job, slice by slice.
pub trait InputSource: Send + Sync {
    /// Ready once few of the job's inputs wait for the model. True: the next slice is wanted. False: no slice is wanted
    /// any more.
    fn poll_wanted(&self, context: &mut Context<'_>) -> Poll<bool>;

    /// Makes the next slice, and hands it to the model thread. Blocks until that is done.
    ///
    /// # Errors
    /// What is wrong with the task, or why its answer is no longer wanted. The task then has no result.
    fn pull(&self) -> Result<(), TaskError>;
}

/// What happens to a job.
pub enum JobEvent {
    /// Parts of the reply can be written.
    Parts(Unwritten),
    /// The job is done, with a result or an error: [`Job::finish`] returns it.
    Done(Computed),
}

/// Parts of a reply that are not written yet.
pub struct Unwritten {
    write: Box<dyn FnOnce() -> Vec<Body> + Send>,
    is_brief: bool,
}

impl Unwritten {
    /// Whether writing them takes less time than waking another thread would.
    pub fn is_brief(&self) -> bool {
        self.is_brief
    }

    /// Writes them. This is about 10 ms of work at most, unless a single part takes longer. The result may be empty.
    pub fn write(self) -> Vec<Body> {
        (self.write)()
    }
}

/// The time that a job spent on the device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Computed {
    /// When the first pass of the job began; none if it was never on the device.
    pub started: Option<Instant>,
    /// When the model gave the job's first piece; none if it gave no piece.
    pub first_piece: Option<Instant>,
    /// The total duration of its passes.
    pub compute: Duration,
    /// Its last pass.
    pub last: Pass,
    /// Whether the job has no result.
    pub failed: bool,
}

/// One forward pass, or one step of sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// The number of the pass, counting from 1.
    pub number: u64,
    /// Inputs in it.
    pub size: usize,
    /// Tokens in it.
    pub tokens: usize,
}

/// What the model thread reports to the worker.
pub enum Notice {
    /// These jobs are done. One notice wakes all of them: if each were woken alone, the worker would take over the
    /// model thread's core to answer the first one, before the others are reported.
    Done(Vec<Arc<dyn Completion>>),
    /// The device has failed, for this reason. Unanswered jobs stay unanswered. This is the thread's last notice.
    Fault(String),
}

/// A finished job that somebody waits for.
pub trait Completion: Send + Sync {
    /// Marks the job as done, and wakes whoever waits for it.
    fn notify(&self);
}

/// Called by the model thread about its work. Each call delays the device.
pub trait Observer: Send {
    /// These tasks will be on the device. The implementation must report them before it returns, since the process may
    /// die during the pass.
    fn on_device(&self, tasks: Vec<TaskName>);
    /// Nothing is on the device any more. The launcher may learn of this later, with the next control line.
    fn mark_idle(&self);
    /// Nothing has been on the device for a while: reports this to the launcher now.
    fn report_idle(&self);
    /// A pass has ended.
    fn pass_ended(&self, pass: &EndedPass);
}

/// A pass that has ended.
pub struct EndedPass {
    /// How long the device was busy with it.
    pub took: Duration,
    /// Its number, inputs and tokens.
    pub pass: Pass,
    /// Only for sequences.
    pub reserved: Option<ReservedTokens>,
    /// Whether the device failed in it.
    pub has_failed: bool,
}

/// The tokens of keys and values that are reserved for running sequences.
#[derive(Clone, Copy, Debug)]
pub struct ReservedTokens {
    /// Tokens that are reserved now.
    pub now: usize,
    /// The most tokens that can be reserved.
    pub max: usize,
}

/// What an engine is started with.
pub struct Setup {
    /// What to load.
    pub spec: LoadSpec,
    /// The speed that the device must reach, as a share of its possible speed.
    pub min_speed: f64,
    /// The bounds of batches.
    pub policy: Policy,
    /// The maximum number of bytes of inputs that are prepared and not computed yet, and its division among queues.
    pub prepared_bytes: QueueBytes,
    /// Called by the model thread about its work.
    pub observer: Box<dyn Observer>,
}

/// An engine whose model is loaded.
pub struct Loaded {
    /// The engine.
    pub engine: Arc<dyn Engine>,
    /// Written by the model thread, which waits while it is full; read by the worker, which never blocks on it.
    pub notices: mpsc::Receiver<Notice>,
    /// The device that was opened: `cpu`, or the GPU's UUID.
    pub device: String,
    /// The number format of its weights.
    pub dtype: Dtype,
    /// What the model assumes because its files do not tell it, one sentence each.
    pub assumptions: Vec<String>,
    /// The process that holds the model, if it is not this one.
    pub process: Option<ForeignProcess>,
}

impl Loaded {
    /// A model that this process has loaded, and that assumes nothing.
    fn new(engine: Arc<dyn Engine>, notices: mpsc::Receiver<Notice>, device: String, dtype: Dtype) -> Self {
        Self { engine, notices, device, dtype, assumptions: Vec::new(), process: None }
    }
}

/// The process that holds a model, as the worker sees it.
pub struct ForeignProcess {
    /// Resolves with the reason once the process has ended or is given up.
    pub lost: tokio::sync::oneshot::Receiver<String>,
    /// Bytes of memory that it and its descendants use, as last measured.
    pub memory: Arc<AtomicU64>,
}

/// Resolves once the model is loaded, or could not be.
pub type Loading = tokio::sync::oneshot::Receiver<Result<Loaded, LoadError>>;

/// The maximum number of notices that may wait for the worker.
const MAX_NOTICES: usize = 64;

/// The model thread's end of the channel of notices.
struct Notices {
    sender: mpsc::Sender<Notice>,
    /// Completions that were not sent yet.
    done: Vec<Arc<dyn Completion>>,
}

impl Notices {
    fn new() -> (Self, mpsc::Receiver<Notice>) {
        let (sender, receiver) = mpsc::channel(MAX_NOTICES);
        (Self { sender, done: Vec::new() }, receiver)
    }

    /// Delivers the output of one input.
    fn deliver<P: Processor>(&mut self, item: &Item<P>, output: Result<P::Output, TaskError>) {
        if item.outputs.deliver(item.index, output) {
            self.done.push(item.outputs.clone());
        }
    }

    /// Sends the done jobs to the worker, which wakes them.
    fn send_done(&mut self) {
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

/// The current time, which tests may pause.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
