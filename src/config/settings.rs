//! The validated settings: every value in its unit and within its limits. What the rest of the
//! program works with. They cross to the worker in the `start` control line, hence serde.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backoff::Backoff;

/// A value that must not be shown: `Debug` and `Display` mask it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The secret itself, for the one place that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// All settings, validated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// How to reach the broker.
    pub broker: Broker,
    /// The pools, at least one; names and task queues are unique.
    pub pools: Vec<Pool>,
    /// How the launcher treats its workers.
    pub launcher: Launcher,
    /// How the launcher is watched and controlled.
    pub admin: Admin,
    /// Where spans go.
    pub telemetry: Telemetry,
}

impl Settings {
    /// Task and dead-letter queues of all pools: no reply goes there.
    pub fn reserved_queues(&self) -> Vec<String> {
        let of_pool = |pool: &Pool| [pool.task_queue.clone(), pool.dead_letter_queue.clone()];
        let mut queues: Vec<String> = self.pools.iter().flat_map(of_pool).collect();
        queues.sort_unstable();
        queues.dedup();
        queues
    }
}

/// `[broker]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Broker {
    /// Addresses, tried in turn: `amqp://`, `amqps://`, or `embedded:PATH` (a Unix socket; made by
    /// `run-batch`, never written by a user). They hold passwords.
    pub urls: Vec<Secret>,
    /// Make queues that are missing.
    pub declare: bool,
    /// Deliveries after which a task is dead-lettered: by its worker, and for queues that we declare
    /// by the broker, should no worker come to it.
    pub delivery_limit: u32,
    /// AMQP heartbeat; the broker may ask for less.
    pub heartbeat: Duration,
    /// Longest wait for a connection to open.
    pub connect_timeout: Duration,
    /// Longest wait for a confirm before the connection is taken for dead.
    pub confirm_timeout: Duration,
    /// How long to go on trying without any connection before the worker exits.
    pub give_up_after: Duration,
    /// How long the broker lets a delivery stay unacked before it takes it back, as far as the
    /// operator has told us: AMQP does not say it.
    pub consumer_timeout: Duration,
    /// Certificates for `amqps://`.
    pub tls: Tls,
}

impl Broker {
    /// [`Broker::consumer_timeout`], where there is one: the embedded queue waits for ever.
    pub fn delivery_timeout(&self) -> Option<Duration> {
        let embedded = self.urls.iter().any(|url| url.expose().starts_with("embedded:"));
        (!embedded).then_some(self.consumer_timeout)
    }
}

/// `[broker.tls]`. Without `ca_file`, the system's certificate store decides.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tls {
    /// PEM file of the authority that signed the broker's certificate.
    pub ca_file: Option<PathBuf>,
    /// PEM file with our certificate, for brokers that ask for one.
    pub cert_file: Option<PathBuf>,
    /// PEM file with its key.
    pub key_file: Option<PathBuf>,
}

/// One `[[pool]]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    /// Unique; in logs, replies and slots.
    pub name: String,
    /// Queue that tasks come from.
    pub task_queue: String,
    /// Where replies go for a task without `reply_to`; none: no reply.
    pub reply_queue: Option<String>,
    /// Where messages go that cannot be worked on.
    pub dead_letter_queue: String,
    /// How long a requester's queue is waited for that does not take a reply.
    pub reply_timeout: Duration,
    /// Replies of more bytes go on channels of their own.
    pub large_reply: u64,
    /// A folder, a Hugging Face id (`org/name`, `org/name@revision`), or `echo`.
    pub model: String,
    /// Further names that requests may call the model by.
    pub served_names: Vec<String>,
    /// Where to run.
    pub devices: Devices,
    /// Worker processes on each device, at least 1.
    pub workers_per_device: usize,
    /// Compute threads of a CPU worker, or those that feed a GPU's; none: the cores divided among the
    /// workers.
    pub threads: Option<usize>,
    /// In which numbers the model computes.
    pub dtype: Dtype,
    /// Share of what a GPU's multiprocessors and clock make possible that it has to reach, 0 to 1.
    pub min_speed: f64,
    /// Unacked messages a worker holds; none: two batches of them, as they come.
    pub prefetch: Option<u16>,
    /// Bytes of task bodies that a worker aims to hold at most where `prefetch` is none.
    pub prefetch_bytes: u64,
    /// Largest task body, in bytes.
    pub max_body: u64,
    /// Most inputs one task may carry.
    pub max_inputs: usize,
    /// When a batch is ready.
    pub batch: Batch,
    /// How often a task is tried.
    pub retry: Retry,
    /// What the model is used for; none: what its architecture serves first.
    #[serde(default)]
    pub task: Option<String>,
    /// `[pool.options]`: settings of the model's own.
    #[serde(default)]
    pub options: BTreeMap<String, serde_json::Value>,
}

/// The `dtype` setting: the numbers that weights are kept and multiplied in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 32 bits: results equal to the published model's to 1e-5.
    #[default]
    F32,
    /// 16 bits with the range of f32 and 8 bits of precision.
    Bf16,
    /// 16 bits with 11 bits of precision.
    F16,
}

impl Dtype {
    /// All, with their names in settings.
    pub const ALL: [(Self, &str); 3] = [(Self::F32, "f32"), (Self::Bf16, "bf16"), (Self::F16, "f16")];

    /// Its name in settings.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(dtype, _)| *dtype == self).map_or("", |(_, name)| *name)
    }
}

/// The `devices` setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Devices {
    /// Every GPU, else CPU workers with the cores divided among them.
    Auto,
    /// These, in this order; not empty.
    List(Vec<String>),
}

/// `[pool.batch]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    /// Real tokens a forward pass; none: by device.
    pub max_tokens: Option<usize>,
    /// Inputs a forward pass.
    pub max_requests: usize,
    /// Longest wait of a batch's first input for others to join, while any are on their way.
    pub max_delay: Duration,
    /// Longest forward pass: a worker that computes longer is stuck.
    pub timeout: Duration,
}

/// `[pool.retry]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Retry {
    /// Attempts at a task whose forward pass fails, the first included.
    pub max_attempts: u32,
    /// Ceiling of the delay before the second attempt; it doubles with each further one.
    pub delay: Duration,
    /// Ceiling of all.
    pub delay_max: Duration,
}

impl Retry {
    /// The delays between attempts.
    pub fn backoff(&self) -> Backoff {
        Backoff { first: self.delay, most: self.delay_max }
    }

    /// The ceilings of these delays, each once, ascending.
    pub fn ceilings(&self) -> Vec<Duration> {
        let mut ceilings: Vec<_> = (1..self.max_attempts).map(|made| self.backoff().ceiling(made)).collect();
        ceilings.dedup();
        ceilings
    }
}

/// `[launcher]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Launcher {
    /// From the first stop signal to the kill.
    pub shutdown_grace: Duration,
    /// First delay before a worker that died is started again.
    pub restart_delay: Duration,
    /// Ceiling of that delay, which doubles with each quick failure.
    pub restart_delay_max: Duration,
    /// A worker that fails sooner than this after it was ready, or before, failed quickly.
    pub quick_failure: Duration,
    /// Quick failures in a row after which a slot is given up.
    pub max_quick_failures: u32,
    /// Deaths of workers that computed one task alone after which that task is not tried again.
    pub poison_deaths: u32,
    /// Tasks after which a worker is replaced by a new one; none: never for that.
    pub recycle_tasks: Option<u64>,
    /// Age at which it is.
    pub recycle_age: Option<Duration>,
    /// Growth of its memory, in bytes since it was ready, at which it is.
    pub recycle_memory: Option<u64>,
    /// Which goes first when a worker is replaced.
    pub replace: Replace,
}

/// The `replace` setting: the order in which a worker is replaced by a new one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replace {
    /// The new one is ready before the old one drains; the device holds both.
    #[default]
    Overlap,
    /// The old one drains before the new one starts: for devices that hold one copy of the model.
    InTurn,
}

impl Replace {
    /// All, with their names in settings.
    pub const ALL: [(Self, &str); 2] = [(Self::Overlap, "overlap"), (Self::InTurn, "in_turn")];

    /// Its name in settings.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(replace, _)| *replace == self).map_or("", |(_, name)| *name)
    }
}

/// `[admin]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admin {
    /// Where metrics and health are served over HTTP; none: nowhere.
    pub listen: Option<SocketAddr>,
    /// The exchange by which launchers are controlled; none: they are not.
    pub control_exchange: Option<String>,
}

/// `[telemetry]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Telemetry {
    /// The collector that takes spans, OTLP over HTTP; none: tracing is off.
    pub otlp_endpoint: Option<String>,
    /// The recorded share of the traces that begin here, 0 to 1.
    pub trace_sample: f64,
}
