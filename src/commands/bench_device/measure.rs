//! Runs tasks through a worker's engine repeatedly, without a queue, and measures how long that takes.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use parking_lot::Mutex;

use crate::batching::QueueBytes;
use crate::commands::bench::Work;
use crate::commands::exits::ExitsWith as _;
use crate::config::{Assignment, Dtype};
use crate::engine::{
    EndedPass, Expect, InputSource, Job, JobEvent, Loaded, Notice, Observer, Prepared, PreparedJob, Setup,
    Starter, TaskState,
};
use crate::protocol::control::TaskName;
use crate::protocol::message::URL;
use crate::protocol::{Files, Message, Properties, TaskError};
use crate::shutdown::Exit;
use crate::worker::{WorkerError, load_spec, policy};

/// The warm-up lasts for the measured time divided by this number.
const WARMUP_DIVISOR: u32 = 4;

/// The measurement ends after this many times the asked time, however little of it the device has computed.
const MAX_TIMES: u32 = 3;

pub(in crate::commands) struct Measured {
    pub(super) loading: Duration,
    /// The number format of the weights.
    pub(super) dtype: Dtype,
    /// Inputs and tokens of all tasks, counted after they were preprocessed once.
    pub(super) inputs: usize,
    pub(super) tokens: usize,
    /// Time to preprocess all tasks once, on one thread.
    pub(super) preprocessing: Duration,
    pub(super) passes: Vec<Pass>,
    /// Time from the arrival of the first task at the engine to the end of the last one, summed over the measured
    /// rounds. A round computes all tasks once.
    pub(super) computing: Duration,
}

/// One batch through the model.
pub(super) struct Pass {
    pub(super) inputs: usize,
    pub(super) tokens: usize,
    pub(super) took: Duration,
}

/// An observer that records all passes.
#[derive(Clone, Default)]
struct Passes(Arc<Mutex<Vec<Pass>>>);

impl Passes {
    fn take(&self) -> Vec<Pass> {
        std::mem::take(&mut self.0.lock())
    }
}

impl Observer for Passes {
    fn on_device(&self, _: Vec<TaskName>) {}

    fn mark_idle(&self) {}

    fn report_idle(&self) {}

    fn pass_ended(&self, passed: &EndedPass) {
        let pass = Pass { inputs: passed.pass.size, tokens: passed.pass.tokens, took: passed.took };
        self.0.lock().push(pass);
    }
}

/// Loads the model of a slot, and computes `tasks` repeatedly for the given time.
///
/// # Errors
/// The model, its device or a task fails. The error names the number of the task.
pub(super) fn measure(
    slot: &Assignment,
    starter: &Starter,
    tasks: &[Work],
    time: Duration,
) -> anyhow::Result<Measured> {
    let passes = Passes::default();
    let setup = Setup {
        spec: load_spec(slot),
        min_speed: slot.min_speed(),
        policy: policy(slot),
        prepared_bytes: QueueBytes::new(slot.pool.prepared_bytes, &[]),
        observer: Box::new(passes.clone()),
    };
    let start = Instant::now();
    let loaded = starter.start(setup)?.blocking_recv().context("the model thread died while loading")?;
    let mut loaded = loaded.map_err(WorkerError::from)?;
    let loading = start.elapsed();

    let start = Instant::now();
    let mut jobs = preprocess_all(&loaded, tasks)?;
    let preprocessing = start.elapsed();
    let inputs = jobs.iter().map(|job| job.inputs).sum();
    let tokens = jobs.iter().map(|job| job.tokens).sum();

    let mut computing = compute(&mut loaded, jobs)?;
    let start = Instant::now();
    while computing < time / WARMUP_DIVISOR && start.elapsed() < time {
        jobs = preprocess_all(&loaded, tasks)?;
        computing += compute(&mut loaded, jobs)?;
    }
    passes.take();
    computing = Duration::ZERO;
    let start = Instant::now();
    // A small model of large images computes for a small part of the time.
    while computing < time && start.elapsed() < MAX_TIMES * time {
        jobs = preprocess_all(&loaded, tasks)?;
        computing += compute(&mut loaded, jobs)?;
    }
    let dtype = loaded.dtype;
    Ok(Measured { loading, dtype, inputs, tokens, preprocessing, passes: passes.take(), computing })
}

/// Preprocesses all tasks, one after the other.
fn preprocess_all(loaded: &Loaded, tasks: &[Work]) -> anyhow::Result<Vec<PreparedJob>> {
    let job = |(task, number): (&Work, usize)| {
        let content_type = task.body.media_type.clone();
        let mut properties = Properties { content_type, ..Properties::default() };
        properties.headers.extend(task.url.clone().map(|url| (URL.to_owned(), url.into())));
        let message = Message { properties, body: task.body.bytes.clone() };
        // `make`: the inputs that take long, such as those with a grammar.
        let job = loaded.engine.preprocess(&message, &Files::default()).and_then(Prepared::make);
        job.map_err(|error| anyhow!("task {number}: {error}").exits_with(Exit::Usage))
    };
    tasks.iter().zip(1..).map(job).collect()
}

/// Computes all jobs, and returns how long that took.
fn compute(loaded: &mut Loaded, jobs: Vec<PreparedJob>) -> anyhow::Result<Duration> {
    // Announces a further job until all are enqueued, so that the first batch is full.
    loaded.engine.queue().expect(Expect::More);
    let start = Instant::now();
    let enqueue = |(number, job): (usize, PreparedJob)| {
        let name = TaskName { id: number.to_string(), fingerprint: String::new() };
        job.enqueue(Arc::new(TaskState::new(name, None)), None)
    };
    let mut jobs: Vec<_> = jobs.into_iter().enumerate().map(enqueue).collect();
    let mut unfinished = 0;
    for (job, number) in jobs.iter_mut().zip(1..) {
        if let Some(source) = job.source() {
            make_inputs(&*source).map_err(|error| anyhow!("task {number}: {error}"))?;
        }
        // A job may be done already: its inputs were computed before `make_inputs` found that there are no more. No
        // notice comes for it.
        let is_done = matches!(poll(&mut **job), Poll::Ready(JobEvent::Done(_)));
        unfinished += usize::from(!is_done);
    }
    loaded.engine.queue().expect(Expect::Less);
    while unfinished > 0 {
        match loaded.notices.blocking_recv() {
            Some(Notice::Done(tasks)) => {
                unfinished -= tasks.len();
                tasks.iter().for_each(|task| task.notify());
            }
            Some(Notice::Fault(error)) => return Err(WorkerError::Device(error).into()),
            None => return Err(WorkerError::Device("the model thread ended".into()).into()),
        }
    }
    let took = start.elapsed();
    for (number, job) in jobs.into_iter().enumerate() {
        job.finish().map_err(|error| WorkerError::Device(format!("task {}: {error}", number + 1)))?;
    }
    Ok(took)
}

/// Makes all inputs of a job without a pause, even if many of them still wait for the model.
fn make_inputs(source: &dyn InputSource) -> Result<(), TaskError> {
    let mut context = Context::from_waker(Waker::noop());
    while source.poll_wanted(&mut context) != Poll::Ready(false) {
        source.pull()?;
    }
    Ok(())
}

/// Polls the state of a job. Requests no parts of its reply.
fn poll(job: &mut dyn Job) -> Poll<JobEvent> {
    job.poll_event(&mut Context::from_waker(Waker::noop()), false)
}
