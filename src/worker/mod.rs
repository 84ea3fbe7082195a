//! One worker: intake → prepare → batch → forward → settle, and its drain. Knows models and brokers
//! by their traits only, and its launcher by control lines only.
//!
//! | file | decides |
//! |---|---|
//! | `intake` | what a delivery is; what is handed back; when the worker has ended |
//! | `station` | what stays while links to the broker come and go: a pause ends one |
//! | `life` | the steps of one task |
//! | `ticket` | whether a task is answered or handed back |
//! | `batches` | when the device gets its next batch (by the rules in `batching`) |
//! | `isolation` | which tasks are worked on apart from others, because they may have killed a worker |
//! | `dials` | what can be set from outside while it runs |
//! | `deaths` | which tasks workers died of, as the launcher knows it |
//! | `engine` | the model thread |
//! | `forward` | what a failed batch means: a bad input, or a bad device |
//! | `lane` | which work beside it has threads of its own |
//! | `outcome` | what happened → what becomes of the message |
//! | `settle` | publish → confirm → ack |
//! | `stalled` | how many tasks may wait for a reply queue that takes nothing |
//! | `report` | control lines, counters |
//! | `traced` | what spans say of tasks and batches |
//! | `prefetch` | how many messages to hold ahead |
//! | `budget` | whether deliveries are held for so long that the broker may take them back |

mod batches;
mod budget;
mod deaths;
mod dials;
mod engine;
mod forward;
mod intake;
mod isolation;
mod lane;
mod life;
mod outcome;
mod prefetch;
mod report;
mod settle;
mod stalled;
mod station;
mod ticket;
mod traced;

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use crate::batching::{Batcher, Policy};
use crate::broker::{BrokerError, Link};
use crate::config::Assignment;
use crate::model::{Codec, LoadError, LoadSpec, Model};
use crate::protocol::Signature;
use crate::protocol::control::Event;
use crate::shutdown::{Exit, Phase, Stop};
use crate::telemetry::traces::Traces;

use engine::{Engine, Loaded};
use intake::StintEnd;

pub use deaths::KnownDeaths;
pub use dials::Dials;
pub use intake::Ended;
pub use report::Reporter;

/// Prepared tasks that may wait for the batch former: it only moves them on.
const SUBMISSIONS: usize = 256;

/// Why this process cannot go on. What it holds goes back to the broker.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The model could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// No broker to work with.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The device failed; only a new process can use it.
    #[error("{0}")]
    Device(String),
    /// The broker was lost while the worker obeyed a sentinel, which is now somebody else's.
    #[error("the broker was lost before the sentinel could be acked")]
    SentinelLost,
    /// A bug, or a system without threads.
    #[error("internal error: {0}")]
    Internal(String),
}

impl From<io::Error> for WorkerError {
    fn from(error: io::Error) -> Self {
        Self::Internal(error.to_string())
    }
}

impl WorkerError {
    /// The exit code that says so.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Load(LoadError::Device { .. } | LoadError::Unfit { .. }) | Self::Device(_) => {
                Exit::DeviceFailed
            }
            Self::Load(_) => Exit::ModelFailed,
            Self::Broker(BrokerError::Refused { .. }) => Exit::Config,
            Self::Broker(BrokerError::Unreachable { .. }) | Self::SentinelLost => Exit::BrokerLost,
            Self::Internal(_) => Exit::Internal,
        }
    }
}

/// The launcher, as its worker knows it: by control lines; and where spans go.
#[derive(Clone)]
pub struct Control {
    /// What the worker tells it.
    pub reporter: Reporter,
    /// What it told the worker of tasks that kill.
    pub deaths: KnownDeaths,
    /// What it has set.
    pub dials: Dials,
    /// Spans of tasks and batches. Whoever made it sends the last ones once the worker has ended.
    pub traces: Traces,
}

/// Runs one worker to its end. `open` connects to the broker once the model is loaded, so that a
/// worker holds no task that it cannot compute.
///
/// # Errors
/// [`WorkerError::exit`] says what to exit with.
pub async fn run<M: Model>(
    assignment: &Assignment,
    open: for<'a> fn(&'a Assignment) -> BoxFuture<'a, Result<Link, BrokerError>>,
    stop: Stop,
    control: &Control,
) -> Result<Ended, WorkerError> {
    let reporter = &control.reporter;
    let Some((engine, loaded)) = load::<M>(assignment, &stop, control).await? else {
        // Nothing has been accepted: there is nothing to drain.
        return Ok(Ended::Drained);
    };
    let counters = Arc::new(report::Counters::default());
    let (station, former, mut fault) = assemble(assignment, engine, loaded, (counters.clone(), control))?;
    let helpers = [
        tokio::spawn(former.run()),
        tokio::spawn(report::every(counters.clone(), reporter.clone())),
        tokio::spawn(report::draining(stop.clone(), reporter.clone())),
    ];
    let ended = loop {
        if control.dials.is_paused() {
            reporter.send(&Event::Paused).await;
        }
        if !control.dials.may_consume(&stop).await {
            break Ok(Ended::Drained);
        }
        // Whoever has been taken once waits for as long as an outage may last.
        let known = assignment.broker_reached || counters.has_reached_the_broker();
        let assignment = Assignment { broker_reached: known, ..assignment.clone() };
        let link = match open(&assignment).await {
            Ok(link) => link,
            Err(error) => break Err(error.into()),
        };
        reporter.send(&Event::Serving).await;
        match station.consume(link, &stop, &mut fault).await {
            Ok(StintEnd::Paused) => {}
            Ok(StintEnd::Worker(ended)) => break Ok(ended),
            Err(error) => break Err(error),
        }
    };
    for helper in helpers {
        helper.abort();
    }
    if let Some(stats) = counters.take(|_| true) {
        reporter.mention(&Event::Stats(Box::new(stats)));
    }
    ended
}

/// Loads the model on its thread; none when the worker was told to stop meanwhile.
async fn load<M: Model>(
    assignment: &Assignment,
    stop: &Stop,
    Control { reporter, traces, .. }: &Control,
) -> Result<Option<(Engine<M::Codec>, Loaded<M::Codec>)>, WorkerError> {
    let born = Instant::now();
    reporter.send(&Event::Loading).await;
    let spec = (load_spec(assignment), assignment.min_speed());
    let mut engine = engine::start::<M>(spec, reporter.clone(), traces.clone())?;
    let loaded = tokio::select! {
        loaded = &mut engine.loaded => loaded,
        () = stop.reached(Phase::Finishing) => return Ok(None),
    };
    let loaded = loaded.map_err(|_| WorkerError::Internal("the model thread died while loading".into()))?;
    if let Err(LoadError::Unfit { why, reason, .. }) = &loaded {
        reporter.send(&Event::Unfit { why: *why, words: reason.clone() }).await;
    }
    let loaded = loaded?;
    if loaded.device != assignment.device {
        let (found, own) = (&loaded.device, &assignment.device);
        let words = format!("the model says it is on {found} (`Model::device`), and its device is {own}");
        return Err(WorkerError::Device(words));
    }
    let load_ms = born.elapsed().as_millis() as u64;
    tracing::debug!(device = loaded.device, model = assignment.pool.model, load_ms, "model loaded");
    reporter.send(&Event::Ready { device: loaded.device.clone(), load_ms }).await;
    Ok(Some((engine, loaded)))
}

/// What the model of an assignment is loaded from.
pub fn load_spec(assignment: &Assignment) -> LoadSpec {
    let pool = &assignment.pool;
    LoadSpec {
        source: pool.model.clone(),
        served_names: pool.served_names.clone(),
        device: assignment.device.clone(),
        max_inputs: pool.max_inputs,
        dtype: pool.dtype,
    }
}

/// The bounds of an assignment's batches.
pub fn policy(assignment: &Assignment) -> Policy {
    let pool = &assignment.pool;
    Policy {
        max_tokens: assignment.max_tokens(),
        // With fewer messages in hand, a batch of tasks with one input each could never fill.
        max_requests: pool.prefetch.map_or(usize::MAX, usize::from).min(pool.batch.max_requests),
        max_delay: pool.batch.max_delay,
    }
}

type Assembled<C> = (station::Station<C>, batches::BatchFormer<C>, mpsc::Receiver<WorkerError>);

/// Puts the worker's parts together: what its tasks share, the batch former, and the way by which that
/// tells of a device fault.
fn assemble<C: Codec>(
    assignment: &Assignment,
    engine: Engine<C>,
    loaded: Loaded<C>,
    (counters, control): (Arc<report::Counters>, &Control),
) -> Result<Assembled<C>, WorkerError> {
    let preparing = Arc::new(AtomicUsize::new(0));
    let (submit, submissions) = mpsc::channel(SUBMISSIONS);
    let (fault_in, fault) = mpsc::channel(1);
    let policy = policy(assignment);
    let isolation = isolation::Isolation::start(control.reporter.clone());
    let former = batches::BatchFormer {
        batcher: Batcher::new(policy),
        sizing: batches::Sizing::new(policy.max_tokens),
        isolation: isolation.clone(),
        isolated: Batcher::new(policy),
        policy,
        wishes: control.dials.batch(),
        submissions,
        batches: engine.batches,
        depth: loaded.depth,
        done: engine.done,
        preparing: preparing.clone(),
        counters: counters.clone(),
        fault: fault_in,
    };
    let station = station::Station {
        assignment: assignment.clone(),
        policy,
        depth: loaded.depth,
        signature: Signature {
            worker: assignment.worker.clone(),
            device: loaded.device,
            model: load_spec(assignment).model_name().to_owned(),
        },
        codec: Arc::new(loaded.codec),
        prepare: lane::Lane::start("prepare", assignment.feeders())?,
        respond: lane::Lane::start("respond", assignment.feeders())?,
        submit,
        preparing,
        isolation,
        counters,
        control: control.clone(),
    };
    Ok((station, former, fault))
}
