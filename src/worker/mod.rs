//! One worker: a task's way through session, intake, preprocessing, engine and settlement, and the drain. A worker
//! reaches its model only through the engine, the broker through its traits, and the launcher through control lines.
//!
//! | file | decides |
//! |---|---|
//! | `session` | what outlives a broker session, and when a session ends |
//! | `intake` | what is done with a delivery; which tasks are handed back; when the worker has ended |
//! | `prefetch` | how many messages to hold ahead |
//! | `task_run/` | the stages of one task |
//! | `requester` | when a requester has left |
//! | `isolation` | which tasks run apart from others, because they may have killed a worker |
//! | `cpu_pool` | which CPU work runs on threads of a pool |
//! | `fair_turns` | whose task is next on the thread for long preparation, and whose files are fetched next |
//! | `settle/` | what becomes of a task's message: publish, confirm, ack |
//! | `cancellations` | how cancellations reach the intake |
//! | `withdrawn` | which jobs' tasks are no longer wanted |
//! | `pause` | whether the worker consumes |
//! | `report/` | what is reported in control lines, counters and spans |

mod cancellations;
mod cpu_pool;
mod fair_turns;
mod intake;
mod isolation;
mod pause;
mod prefetch;
mod report;
mod requester;
mod session;
mod settle;
mod task_run;
#[cfg(test)]
mod tests;
mod withdrawn;

use std::io;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};

use crate::batching::{Policy, QueueBytes};
use crate::broker::{BrokerError, BrokerSession};
use crate::config::{Assignment, Pool};
use crate::engine::{Engine, Loaded, Notice, Setup, Starter};
use crate::fetch::Fetcher;
use crate::model::{Dtype, LoadError, LoadSpec};
use crate::protocol::WorkerInfo;
use crate::protocol::control::Event;
use crate::shutdown::{Exit, Phase, Stop};
use crate::telemetry::traces::Traces;

use cpu_pool::Pools;
use intake::SessionEnd;
use report::{Counters, DeviceReport};

pub use cancellations::Cancellations;
pub use intake::Ended;
pub use isolation::CrashRecords;
pub use pause::Pause;
pub use report::Reporter;
pub use withdrawn::Withdrawn;

/// Tasks of sequences that are prefetched beyond those that run, so that one starts as soon as another ends.
const SPARE_SEQUENCES: usize = 4;
/// The largest prefetch that quorum queues accept.
const MAX_PREFETCH: usize = 2_000;

/// Why this process cannot go on. Its unsettled tasks go back to the broker.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The model could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The broker cannot be used.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The device failed; only a new process can use it.
    #[error("{0}")]
    Device(String),
    /// The process that holds the model has ended or is given up.
    #[error("{0}")]
    Process(String),
    /// The connection was lost after a sentinel was received and before it was acked. Another worker will receive that
    /// sentinel.
    #[error("the broker was lost before the sentinel could be acked")]
    SentinelLost,
    /// A bug, or a system that cannot start threads.
    #[error("internal error: {0}")]
    Internal(String),
}

impl From<io::Error> for WorkerError {
    fn from(error: io::Error) -> Self {
        Self::Internal(error.to_string())
    }
}

impl WorkerError {
    /// The exit code of this error.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Load(LoadError::Device { .. } | LoadError::Unfit { .. }) | Self::Device(_) => {
                Exit::DeviceFailed
            }
            Self::Load(LoadError::Process { .. }) | Self::Process(_) => Exit::ModelProcessFailed,
            Self::Load(LoadError::Hub { is_lasting: false, .. }) => Exit::ModelUnavailable,
            Self::Load(
                LoadError::File { .. }
                | LoadError::Unsupported { .. }
                | LoadError::Option { .. }
                | LoadError::Probe { .. }
                | LoadError::Hub { is_lasting: true, .. },
            ) => Exit::ModelFailed,
            Self::Broker(
                BrokerError::Refused { .. } | BrokerError::Missing { .. } | BrokerError::Stream { .. },
            ) => Exit::Config,
            Self::Broker(BrokerError::Unreachable { .. }) | Self::SentinelLost => Exit::BrokerLost,
            Self::Internal(_) => Exit::Internal,
        }
    }

    /// Whether another worker would end in the same way, although the broker accepts it.
    pub fn is_lasting(&self) -> bool {
        matches!(self, Self::Broker(BrokerError::Stream { .. }))
    }
}

/// The worker's end of the connection to its launcher (control lines), and where spans go.
#[derive(Clone)]
pub struct Control {
    /// Sends control lines.
    pub reporter: Reporter,
    /// The launcher's records of tasks that killed workers.
    pub crashes: CrashRecords,
    /// Whether the launcher has paused the worker.
    pub pause: Pause,
    /// Cancellations of tasks. Written by the reader of the launcher's commands, read by the intake.
    pub cancellations: Cancellations,
    /// Jobs that were withdrawn.
    pub withdrawn: Withdrawn,
    /// Spans of tasks. The caller sends the last spans once the worker has ended.
    pub traces: Traces,
}

/// A function that connects to the broker of an assignment and opens a session.
pub type Open = dyn for<'a> Fn(&'a Assignment) -> BoxFuture<'a, Result<BrokerSession, BrokerError>>;

/// Runs one worker to its end. `open` connects to the broker once the model is loaded, so that a worker never
/// holds a task that it cannot compute.
///
/// # Errors
/// [`WorkerError`]: the worker cannot go on. The process ends with [`WorkerError::exit`].
pub async fn run(
    assignment: &Assignment,
    starter: &Starter,
    open: &Open,
    stop: Stop,
    control: &Control,
) -> Result<Ended, WorkerError> {
    let counters = Arc::new(Counters::default());
    let setup = Setup {
        spec: load_spec(assignment),
        min_speed: assignment.min_speed(),
        policy: policy(assignment),
        prepared_bytes: prepared_bytes(assignment),
        observer: Box::new(DeviceReport::new(control, counters.clone())),
    };
    let loading_since = Instant::now();
    control.reporter.send(&Event::Loading).await;
    let loading = starter.start(setup)?;
    let loaded = tokio::select! {
        loaded = loading => loaded,
        // Nothing has been accepted: there is nothing to drain.
        () = stop.reached(Phase::Finishing) => return Ok(Ended::Drained),
    };
    let loaded = loaded.map_err(|_| WorkerError::Internal("the model thread died while loading".into()))?;
    if let Err(LoadError::Unfit { why, reason, .. }) = &loaded {
        control.reporter.send(&Event::Unfit { why: *why, message: reason.clone() }).await;
    }
    let loaded = loaded.map_err(|error| error.without_folder(assignment.pool.missing_folder.as_deref()))?;
    let load_ms = loading_since.elapsed().as_millis() as u64;
    let (device, dtype) = (loaded.device.clone(), loaded.dtype.name().to_owned());
    tracing::debug!(device, dtype, model = assignment.pool.model, load_ms, "model loaded");
    let serves = loaded.engine.routes().iter().map(|route| route.url.to_owned()).collect();
    let assumptions = loaded.assumptions.clone();
    control.reporter.send(&Event::Ready { device, dtype, load_ms, serves, assumptions }).await;
    let pools = Pools::start(assignment.preprocess_threads())?;
    serve(assignment, loaded, open, stop, WorkerContext { control, counters, pools }).await
}

/// The parts of a worker that do not depend on its model.
struct WorkerContext<'a> {
    control: &'a Control,
    counters: Arc<Counters>,
    pools: Pools,
}

/// Serves tasks with a loaded model. Opens a broker session, and a new one after each pause.
async fn serve(
    assignment: &Assignment,
    loaded: Loaded,
    open: &Open,
    stop: Stop,
    context: WorkerContext<'_>,
) -> Result<Ended, WorkerError> {
    let (control, counters) = (context.control, context.counters.clone());
    let reporter = &control.reporter;
    let Loaded { engine, notices, device, dtype, process, .. } = loaded;
    let lost = process.map(|process| {
        counters.count_memory_of(process.memory);
        process.lost
    });
    let worker = assemble(assignment, engine, (device, dtype), context);
    let (fault_sender, mut faults) = mpsc::channel(1);
    let helpers = [
        tokio::spawn(dispatch(notices, lost, worker.isolation.clone(), fault_sender)),
        tokio::spawn(report::send_stats(counters.clone(), reporter.clone())),
        tokio::spawn(report::announce_drain(stop.clone(), reporter.clone())),
    ];
    let ended = loop {
        if control.pause.is_set() {
            reporter.send(&Event::Paused).await;
        }
        if !control.pause.wait_until_may_consume(&stop).await {
            break Ok(Ended::Drained);
        }
        // Once the broker has accepted this worker or an earlier one, a refusal may be an outage, so it is retried.
        let broker_reached = worker.assignment.broker_reached || counters.has_reached_the_broker();
        let assignment = Assignment { broker_reached, ..worker.assignment.clone() };
        let session = match open(&assignment).await {
            Ok(session) => session,
            Err(error) => break Err(error.into()),
        };
        reporter.send(&Event::Serving).await;
        match worker.consume(session, &stop, &mut faults).await {
            Ok(SessionEnd::Paused) => {}
            Ok(SessionEnd::Worker(ended)) => break Ok(ended),
            Err(error) => break Err(error),
        }
    };
    for helper in helpers {
        helper.abort();
    }
    if let Some(stats) = counters.take(|_| true) {
        reporter.try_send(&Event::Stats(Box::new(stats)));
    }
    ended
}

/// The model of an assignment, and how to load it.
pub fn load_spec(assignment: &Assignment) -> LoadSpec {
    pool_spec(&assignment.pool, &assignment.device)
}

/// The model of a pool, and how to load it onto a device.
pub fn pool_spec(pool: &Pool, device: &str) -> LoadSpec {
    LoadSpec {
        source: pool.model.clone(),
        served_names: pool.served_names.clone(),
        device: device.to_owned(),
        max_inputs: pool.max_inputs,
        dtype: pool.dtype.unwrap_or(Dtype::F32),
        is_dtype_auto: pool.dtype.is_none(),
        cpu_features: pool.cpu_features,
        options: pool.options.clone(),
        is_strict: pool.strict_model,
    }
}

/// The bytes of prepared inputs that the pool's queues may hold.
fn prepared_bytes(assignment: &Assignment) -> QueueBytes {
    let pool = &assignment.pool;
    QueueBytes::new(pool.prepared_bytes, &pool.independent_queue_shares())
}

/// The bounds of an assignment's batches.
pub fn policy(assignment: &Assignment) -> Policy {
    let pool = &assignment.pool;
    Policy {
        max_tokens: assignment.max_tokens(),
        // A batch cannot have more tasks than the prefetch has messages. With a larger bound, a batch of tasks with one
        // input each could never be full.
        max_requests: pool.prefetch.map_or(usize::MAX, usize::from).min(pool.batch.max_requests),
        max_delay: pool.batch.max_delay,
        encode_interval: pool.batch.encode_interval,
        encode_batch: pool.batch.encode_batch,
    }
}

/// Builds the parts that outlive a broker session.
fn assemble(
    assignment: &Assignment,
    engine: Arc<dyn Engine>,
    (device, dtype): (String, Dtype),
    WorkerContext { control, counters, pools }: WorkerContext<'_>,
) -> session::Worker {
    let mut assignment = assignment.clone();
    let adapts_prefetch = assignment.pool.prefetch.is_none();
    if let Some(sequences) = engine.queue().sequences() {
        let prefetch = (sequences + SPARE_SEQUENCES).min(MAX_PREFETCH);
        assignment.pool.prefetch.get_or_insert(prefetch as u16);
    }
    session::Worker {
        adapts_prefetch,
        policy: policy(&assignment),
        worker_info: WorkerInfo {
            worker: assignment.worker.clone(),
            device,
            dtype: dtype.name(),
            model: load_spec(&assignment).model_name().to_owned(),
        },
        pools,
        isolation: isolation::Isolation::start(engine.queue().clone(), control.reporter.clone()),
        engine,
        counters,
        control: control.clone(),
        fetcher: Fetcher::new(&assignment.pool).map(Arc::new),
        assignment,
    }
}

/// Handles the notices of the model thread: wakes the task runs whose jobs in the engine are done, and sends a fault to
/// the intake. `lost`: resolves when the process that holds the model is lost, which also makes the model thread fail.
async fn dispatch(
    mut notices: mpsc::Receiver<Notice>,
    lost: Option<oneshot::Receiver<String>>,
    isolation: Arc<isolation::Isolation>,
    fault_sender: mpsc::Sender<WorkerError>,
) {
    let mut lost = std::pin::pin!(async {
        match lost {
            // The sender is dropped only when the process that runs the tests ends.
            Some(lost) => lost.await.unwrap_or_else(|_| "the model's process is lost".to_owned()),
            None => std::future::pending().await,
        }
    });
    let error = loop {
        tokio::select! {
            biased;
            why = &mut lost => break WorkerError::Process(why),
            notice = notices.recv() => match notice {
                Some(Notice::Done(tasks)) => tasks.iter().for_each(|task| task.notify()),
                Some(Notice::Fault(error)) => break WorkerError::Device(error),
                None => break WorkerError::Device("the model thread ended".to_owned()),
            },
        }
    };
    isolation.record_device_failure();
    let _ = fault_sender.send(error).await;
}
