//! The settings, each defined once: key, type, default, reader with its range, help. `config/default.toml`
//! is generated from these definitions (`make default-settings`). They implement serde's traits because the `start`
//! control line carries them to the worker.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use ::config::{Value, ValueKind};
pub use sconce_kernels::CpuFeatures;
use serde::{Deserialize, Serialize};
use url::Url;

use super::define::{Outline, Section, section};
use super::options::Options;
use super::python::{self, Environment, PythonClass};
use super::read::{
    self, AllowedSource, BUILT_IN, Devices, Problem, Reader, Report, Secret, TaskQueue, origin,
};
use super::text::show_duration;
use crate::backoff::Backoff;
use crate::batching::QueueShare;
use crate::protocol::Sentinels;

/// Range of a wait: longer than zero, and at most 30 days, so that adding it to an `Instant` cannot overflow.
const WAIT: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(720 * 3600);
/// AMQP carries the heartbeat as a 16-bit number of seconds, in which 0 means no heartbeat.
const HEARTBEAT: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(u16::MAX as u64);
/// RabbitMQ caps the prefetch of a quorum queue's consumer at 2,000.
const PREFETCH: RangeInclusive<u64> = 1..=2000;
/// RabbitMQ's largest message is 512 MiB, whatever its configuration.
const BODY_SIZE: RangeInclusive<u64> = 1..=512 << 20;
/// Range of the sizes of fetched files, which a worker holds in its memory: at most 1 TiB.
const FETCHED_SIZE: RangeInclusive<u64> = 1..=1 << 40;
const FETCH_RATE: RangeInclusive<u64> = 0..=1 << 30;
const COUNT: RangeInclusive<u64> = 1..=1_000_000;
const TOKENS: RangeInclusive<u64> = 1..=1_000_000_000;
const WORKERS_OR_THREADS: RangeInclusive<u64> = 1..=1024;
/// Range of a number of deliveries, failures or deaths.
const REPEATS: RangeInclusive<u64> = 1..=u32::MAX as u64;
/// Range of `max_delay`. With zero no task waits.
const BATCH_DELAY: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(60);
/// Range of `max_attempts`. It is small because each distinct delay between attempts needs a retry queue.
const ATTEMPTS: RangeInclusive<u64> = 1..=100;

section! {
    /// How to reach RabbitMQ.
    Broker {
        /// Addresses. amqps:// for TLS. For a cluster: several, with commas or as a list, tried in turn.
        /// Special characters of a password are percent-encoded; %2f is the virtual host "/".
        url: Vec<Secret> = "amqp://guest:guest@127.0.0.1:5672/%2f", read::urls;
        /// Create missing queues. With false nothing is declared, so a user needs only read and write
        /// permissions.
        declare: bool = true, read::switch;
        /// Number of deliveries after which a task is dead-lettered, if the queue counts them (quorum queues do).
        /// On queues that sconce creates, the broker applies the same limit.
        delivery_limit: u32 = 100, read::whole(REPEATS);
        /// AMQP heartbeat, in whole seconds; the broker may ask for less.
        heartbeat: Duration = "20s", read::whole_seconds(HEARTBEAT);
        /// Longest wait for a connection to open.
        connect_timeout: Duration = "10s", read::duration(WAIT);
        /// Longest wait for the broker to answer a test of the connection, plus a second for each 64 KiB under way.
        /// Then the worker replaces the connection. It sends a test when replies are under way and the broker has
        /// confirmed nothing for half a second. The clock stops while the broker reports a resource alarm.
        confirm_timeout: Duration = "30s", read::duration(WAIT);
        /// How long a worker tries to connect before it exits with code 81.
        give_up_after: Duration = "10m", read::duration(WAIT);
        /// How long the broker lets a message stay unacknowledged before it takes back all messages that the
        /// worker holds. 30 minutes is RabbitMQ's default. AMQP cannot read the broker's value: write it here
        /// (consumer_timeout of rabbitmq.conf, a policy, or the queue's x-consumer-timeout). Any value other
        /// than "30m" is also requested for sconce's consumer. RabbitMQ 4.3 grants it on quorum queues; earlier
        /// versions ignore it.
        consumer_timeout: Duration = "30m", read::duration(WAIT);
        nested tls: Tls;
    }
}

section! {
    /// TLS for amqps:// addresses. Files are in PEM format; "" stands for none.
    Tls {
        /// Certificate of the authority that signed the broker's certificate. Without it, the system's
        /// certificate store is used.
        ca_file: Option<PathBuf> = "", read::optional_file;
        /// Client certificate, for brokers that require one.
        cert_file: Option<PathBuf> = "", read::optional_file;
        /// Private key of the client certificate. Set both or neither.
        key_file: Option<PathBuf> = "", read::optional_file;
    }
    check refuse_certificate_without_key
}

section! {
    /// A pool is a task queue, a model and the devices that serve it. Repeat `[[pool]]` for more pools. Your
    /// own list of pools replaces this one; missing keys of your pools are filled in from here. Names and task
    /// queues must differ between pools.
    Pool {
        /// The pool's name in logs, metrics, replies and slots, and for `sconce ctl`. No queue follows from it.
        name: String = "embed", read::name;
        /// Queue that tasks come from.
        task_queue: String = "sconce.tasks", read::task_queue;
        /// A second task queue, for large jobs (`sconce submit --background`); "" for none. Its tasks are added to
        /// a batch only up to a quarter of batch.max_tokens. After a minute in a worker they count like any other
        /// task.
        background_queue: Option<String> = "", read::optional_queue;
        /// Several queues that tasks come from, so that a flood in one of them delays no other (docs/scaling.md). Write
        /// each as `[[pool.queue]]`, at most 32, with these keys: name; share, how much of the devices it gets while
        /// tasks of others wait (a number from 0.001 to 1000; 1 if it is left out); background, whether its tasks only
        /// fill up batches, as those of background_queue do (false if it is left out). They take the place of
        /// task_queue and background_queue, and it is an error if one of these is set too. The first queue is the
        /// pool's in `sconce ctl`, and the one that commands use unless they name another.
        queue: Vec<TaskQueue> = [], read::task_queues;
        /// Queue for replies to tasks without `reply_to`; with "" these get no reply. sconce creates a quorum queue:
        /// a classic queue of a cluster is lost with its node, and replies would then be dead-lettered.
        reply_queue: Option<String> = "sconce.replies", read::optional_queue;
        /// Queue for messages that cannot be answered.
        dead_letter_queue: String = "sconce.dead", read::queue;
        /// How long a task waits for the queue in its `reply_to` if that queue takes nothing, because it is full
        /// or has lost its majority. A deadline may end the wait earlier. Then the task is dead-lettered with the
        /// reason `unconfirmed`. Meanwhile, other tasks for that queue are put off instead of computed
        /// (docs/protocol.md). Replies that are already computed may wait up to half of the worker's prefetch and
        /// up to prefetch_bytes. Beyond that the oldest is dropped and its task is put off; if the broker already
        /// has that reply and has not confirmed it, the task is dead-lettered instead. If the pool's own
        /// reply_queue takes nothing, the whole pool waits, for three quarters of broker.consumer_timeout.
        reply_timeout: Duration = "90s", read::duration(WAIT);
        /// A larger reply is sent on its own channel, so that its refusal affects no other reply.
        large_reply: u64 = "1MiB", read::size(BODY_SIZE);
        /// A folder, a Hugging Face id ("org/name", "org/name@revision"), a class in Python
        /// ("python:shop.models:Embedder", "python:./embedder.py:Embedder"; docs/python-models.md), a model of your own
        /// in Rust (docs/own-models.md), or, to try a deployment, "echo" (answers with the task) or "script" (streams;
        /// docs/protocol.md). A value that begins with ".", "/" or "~", or ends with ".gguf", is a folder or a GGUF
        /// file. Any other value is a folder if there is one, else a Hugging Face id. A folder is relative to the
        /// settings file that names it; from a flag or a variable, to the current folder. For this default,
        /// models/all-MiniLM-L6-v2 in the current folder is taken first (scripts/fetch-model puts it there).
        model: String = "sentence-transformers/all-MiniLM-L6-v2", read::name;
        /// The kind of requests that the model answers, if its weights serve several, such as "embed" or "rerank"
        /// (docs/models.md). "auto": what the weights were published for.
        task: Option<String> = "auto", read::unless("auto", read::name);
        /// Whether a model is refused (exit 82) if its files do not tell something that would be assumed, such as how a
        /// text's vector is made. Otherwise the assumptions are logged, and `sconce check-config` and `sconce ctl stats`
        /// show them. Recommended for embeddings that are stored.
        strict_model: bool = false, read::switch;
        /// Further names that requests may call the model by.
        served_names: Vec<String> = [], read::served_names;
        /// "auto": every GPU in a build with CUDA, else one CPU worker for each core, 16 at most. Or a list:
        /// `["cpu", "cpu"]`, `["GPU-5a…", "cuda:1"]`. A device that cannot be opened is an error.
        devices: Devices = "auto", read::devices;
        /// Worker processes on each device, each with its own copy of the model.
        workers_per_device: usize = 1, read::whole(WORKERS_OR_THREADS);
        /// Compute threads of a CPU worker. For a GPU worker: the number of preprocess threads, and also of threads
        /// that write replies, at most 8 of each. "auto": the cores divided among the workers.
        threads: Option<usize> = "auto", read::unless("auto", read::whole(WORKERS_OR_THREADS));
        /// The number format of weights and products: "f32", "bf16", "f16", "int8", or "auto", which is the fastest
        /// whose results stay close to those in f32 on the worker's device. In f32 results equal the published
        /// model's to 1e-5. bf16 and f16 take half the memory, int8 a third. On CPUs, bf16 and int8 apply only to the
        /// matrices of linear layers, and f16 is slow. int8 is for CPUs only, where it is faster with AVX2, VNNI or
        /// AMX (docs/settings.md).
        dtype: Option<Dtype> = "f32", read::unless("auto", read::choice(&Dtype::ALL));
        /// The vector units that CPU workers compute with: "auto" (the best that the CPU has), "avx512",
        /// "avx2-vnni", "avx2" or "none". With the same value on all hosts, other than "auto", results in f32 are bitwise equal on all of
        /// them. It is an error if the CPU lacks the chosen units.
        cpu_features: CpuFeatures = "auto", read::choice(&CpuFeatures::ALL);
        /// A GPU gets no work if its f32 products reach less than this share of the speed that its
        /// multiprocessors and clock allow, for example because its clock stays low. The share is divided by the
        /// number of this launcher's workers on the device. If other programs use the device too, set a lower
        /// share, or 0 for no check.
        min_speed: f64 = 0.2, read::share;
        /// Unacknowledged messages that a worker holds of each queue, 1 to 2000. "auto": enough for two batches,
        /// judged by the tokens and inputs of recent messages: one computes, one waits. On a GPU, enough for four:
        /// another one is queued on the device, and another one is being preprocessed or answered.
        prefetch: Option<u16> = "auto", read::unless("auto", read::whole(PREFETCH));
        /// With prefetch = "auto": most bytes of task bodies that a worker holds, estimated from the size of
        /// recent messages, and divided among the pool's queues. A worker begins with as many messages as fit if
        /// all have the largest size (max_body). The limit can be exceeded when messages become larger than before.
        prefetch_bytes: u64 = "64MiB", read::size(BODY_SIZE);
        /// Most bytes of inputs that are decoded but not computed yet, such as the pixels of images. Decoding pauses
        /// while there are more. A single input is always decoded, whatever its size. A requester with an eighth of
        /// this or more gets nothing of the second half. With several queues, half is divided among them by their
        /// shares, so that none can take the part of another.
        prepared_bytes: u64 = "512MiB", read::size(1..=u64::MAX);
        /// Largest body of a task.
        max_body: u64 = "8MiB", read::size(BODY_SIZE);
        /// Most inputs of one task.
        max_inputs: usize = 2048, read::whole(COUNT);
        /// Prefixes of the URLs that tasks may give instead of a file (docs/protocol.md#files-by-url). Each prefix has
        /// a scheme (file, https, http, s3), a host with its port, and a path that ends with "/". A host with a
        /// private address, such as 10.0.0.5, needs `{ url = "…", private = true }`. With [], tasks may give no URLs.
        allowed_sources: Vec<AllowedSource> = [], read::sources;
        /// Which messages in the task queue stop a worker. "null_and_type": messages of the type control.shutdown
        /// (`sconce stop`) and messages whose body is null. "type": only messages of that type. "none": no message.
        sentinels: Sentinels = "null_and_type", read::choice(&Sentinels::ALL);
        /// What a stop signal does with accepted tasks. "hand_back": batches on the device are finished. All other
        /// tasks, running sequences included, are requeued at once, and another worker starts them over (sampled
        /// text comes out the same). "finish": accepted tasks are finished for up to three quarters of
        /// launcher.shutdown_grace; then the rest is requeued.
        drain: Drain = "hand_back", read::choice(&Drain::ALL);
        nested fetch: Fetch;
        nested s3: S3;
        nested batch: Batch;
        nested retry: Retry;
        nested python: Python;
        nested options: Options;
        derived missing_folder: Option<PathBuf>,
            "The folder that `model` would name, if it does not exist. `model` is then the id of a model of the hub.";
    }
    check check_pool
}

section! {
    /// How the process of a model is started that is a class in Python (`model = "python:…"`).
    Python {
        /// The interpreter: a name in the PATH, or a path. That of a virtual environment is ".venv/bin/python", with
        /// sconce_model in it. Relative paths are relative to the settings file that names them; from a flag or a
        /// variable, to the current folder.
        executable: String = "python3", read::name;
        /// Folders in which modules are looked for first. The current folder is searched only if it is one of them.
        path: Vec<String> = [], read::paths;
        nested env: Environment;
    }
}

section! {
    /// Bounds of the files that a worker fetches from allowed_sources.
    Fetch {
        /// Largest file.
        max_size: u64 = "256MiB", read::size(FETCHED_SIZE);
        /// Longest time for one file, from the start of its fetch to its last byte. A task whose file has not arrived
        /// by then is tried again later.
        timeout: Duration = "60s", read::duration(WAIT);
        /// Least rate of a file from a server, in bytes a second over 10 seconds, from its first byte on. A slower
        /// fetch ends, and its task is tried again later. 0B: none.
        min_rate: u64 = "16KiB", read::size(FETCH_RATE);
        /// Most files that a worker fetches at once. At most half of them are for one requester, and from one host
        /// where allowed_sources names several.
        at_once: usize = 4, read::whole(1..=64);
        /// Most bytes of fetched files that a worker holds. At most half of them are for one requester. With several
        /// queues, half is divided among them by their shares, so that none can take the part of another.
        memory: u64 = "1GiB", read::size(FETCHED_SIZE);
    }
}

section! {
    /// Access to the buckets of s3:// in allowed_sources. "" stands for none.
    S3 {
        /// Address of a service other than AWS: http:// or https://, a host, and perhaps a port.
        endpoint: Option<Url> = "", read::service;
        /// Region of the buckets.
        region: String = "us-east-1", read::name;
        /// Access key. Without it, requests are not signed. The environment and the metadata of an instance are not
        /// searched.
        access_key_id: Option<String> = "", read::optional_name;
        /// Secret of the access key. Set both or neither.
        secret_access_key: Option<Secret> = "", read::optional_secret;
    }
    check |s3, reader| {
        if s3.access_key_id.is_some() != s3.secret_access_key.is_some() {
            let expected = "both access_key_id and secret_access_key, or neither";
            reader.refuse("access_key_id", s3.access_key_id.as_deref().unwrap_or(""), expected.to_owned());
        }
    }
}

section! {
    /// How large batches are, and how long they may wait and compute.
    Batch {
        /// Most tokens, without padding, in a forward pass or one step of running sequences. "auto": 1,024 for
        /// each CPU thread, 32,768 on a GPU.
        max_tokens: Option<usize> = "auto", read::unless("auto", read::whole(TOKENS));
        /// Most inputs in a forward pass, or most sequences that run at once.
        max_requests: usize = 512, read::whole(COUNT);
        /// Longest wait of an idle device, from the batch's first input, for tasks that are just being
        /// preprocessed. A task that arrives alone never waits. "0ms": no task waits.
        max_delay: Duration = "2ms", read::duration(BATCH_DELAY);
        /// For models that encode a window (30 s of sound, an image) before its first token: while sequences
        /// decode, at most one window is encoded in this many steps, because all of these sequences wait for it.
        /// "auto": the model's own interval, usually 8.
        encode_interval: Option<usize> = "auto", read::unless("auto", read::whole(COUNT));
        /// Most windows that are encoded together while no sequence decodes. They do not count towards max_tokens.
        /// "auto": the model's own number, usually 4.
        encode_batch: Option<usize> = "auto", read::unless("auto", read::whole(COUNT));
        /// Longest forward pass. A worker that computes for longer is stuck: /livez reports it, and ten seconds
        /// later it is killed and started again; its tasks are tried again, in halves, separately from all
        /// others.
        timeout: Duration = "5m", read::duration(WAIT);
    }
}

section! {
    /// A task is tried again later if its forward pass fails on a healthy device, or needs more memory than
    /// the device has even when it is computed alone. Errors that would recur, such as bad input, are answered
    /// at once.
    Retry {
        /// Attempts in all, the first included; after the last the task is answered with the error and
        /// dead-lettered.
        max_attempts: u32 = 3, read::whole(ATTEMPTS);
        /// Longest delay before the second attempt; it doubles before each further one, up to delay_max. The
        /// task waits in a separate queue, `<task_queue>.retry-<milliseconds>ms`.
        delay: Duration = "1s", read::duration(WAIT);
        /// Upper bound of the delay.
        delay_max: Duration = "1m", read::duration(WAIT);
    }
    check |retry, reader| {
        refuse_low_ceiling(reader, "delay", retry.delay, "delay_max", retry.delay_max);
    }
}

section! {
    /// How the launcher stops, restarts and replaces its workers.
    Launcher {
        /// The launcher's name: in slots, replies and metrics, and for `sconce ctl`. "auto": the host's name. Further
        /// launchers on the host append -2, -3, …, whichever is the first that is free. It is an error if another
        /// launcher on the host has the same name.
        name: Option<String> = "auto", read::unless("auto", read::name);
        /// Time from the first stop signal to the abort. One second after the abort all remaining workers are
        /// killed. The default is less than the 10 s that `docker compose stop` allows.
        shutdown_grace: Duration = "8s", read::duration(WAIT);
        /// Delay before a worker that died is started again. It doubles with each quick failure.
        restart_delay: Duration = "500ms", read::duration(WAIT);
        /// Upper bound of the delay.
        restart_delay_max: Duration = "30s", read::duration(WAIT);
        /// A failure counts as quick if it happens before the worker is ready, or less than this time after.
        quick_failure: Duration = "10s", read::duration(WAIT);
        /// Quick failures in a row after which a slot is given up.
        max_quick_failures: u32 = 5, read::whole(REPEATS);
        /// A task is dead-lettered as poison after this many deaths of workers that computed it alone.
        poison_deaths: u32 = 3, read::whole(REPEATS);
        /// Replace a worker after this many tasks, or "never". One slot at a time.
        recycle_tasks: Option<u64> = "never", read::unless("never", read::whole(1..=i64::MAX as u64));
        /// Replace a worker at this age ("24h"), or "never".
        recycle_age: Option<Duration> = "never", read::unless("never", read::duration(WAIT));
        /// Replace a worker when its own memory has grown by this much since it was ready ("2GiB"), or "never".
        recycle_memory: Option<u64> = "never", read::unless("never", read::size(1..=u64::MAX));
        /// How a worker is replaced, for these reasons or for new settings (SIGHUP). "overlap": the new one is
        /// ready before the old one drains, so the device needs memory for both. "in_turn": the old one drains
        /// first, for devices with memory for one copy of the model. If the new one then does not become ready,
        /// one with the previous settings is started.
        replace: Replace = "overlap", read::choice(&Replace::ALL);
    }
    check |launcher, reader| {
        let (first, ceiling) = (launcher.restart_delay, launcher.restart_delay_max);
        refuse_low_ceiling(reader, "restart_delay", first, "restart_delay_max", ceiling);
    }
}

section! {
    /// How the launcher is watched and controlled.
    Admin {
        /// Address of the launcher's HTTP server with /metrics, /livez, /readyz and /startupz; "" for none. It
        /// has no password: keep it off public networks. If another process listens there, the launcher retries
        /// until the address is free.
        listen: Option<SocketAddr> = "127.0.0.1:9464", read::listen;
        /// The exchange by which launchers are controlled (`sconce ctl`, `sconce top`); "" for none. Every user
        /// who may publish to it can control them. With broker.declare = false it is neither created nor used.
        control_exchange: Option<String> = "sconce.control", read::exchange;
    }
}

section! {
    /// Traces.
    Telemetry {
        /// Base address of an OTLP-over-HTTP collector of spans, such as "http://127.0.0.1:4318"; /v1/traces is
        /// appended. "": tracing is off, and a task's traceparent and tracestate are echoed.
        otlp_endpoint: Option<String> = "", read::endpoint;
        /// The share of traces to record, 0 to 1. A task whose traceparent carries a sampling decision follows
        /// that decision instead.
        trace_sample: f64 = 1.0, read::share;
    }
}

/// All settings, validated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// `[broker]`.
    pub broker: Broker,
    /// Every `[[pool]]`, at least one; names and task queues are unique.
    pub pools: Vec<Pool>,
    /// `[launcher]`.
    pub launcher: Launcher,
    /// `[admin]`.
    pub admin: Admin,
    /// `[telemetry]`.
    pub telemetry: Telemetry,
}

/// All sections, in the order in which files show them.
pub(super) fn outline() -> [(&'static str, Outline); 5] {
    [
        ("broker", Broker::outline()),
        ("pool", Pool::outline()),
        ("launcher", Launcher::outline()),
        ("admin", Admin::outline()),
        ("telemetry", Telemetry::outline()),
    ]
}

impl Settings {
    /// Reads the settings from the merged layers, in which every setting is present. None if the report has problems
    /// afterwards.
    pub(super) fn read(merged: Value, report: &mut Report) -> Option<Self> {
        let mut root = Reader::open(String::new(), merged, report)?;
        let broker = root.section("broker").and_then(Broker::read);
        let pools = pools(&mut root);
        let launcher = root.section("launcher").and_then(Launcher::read);
        let admin = root.section("admin").and_then(Admin::read);
        let telemetry = root.section("telemetry").and_then(Telemetry::read);
        root.finish();
        let settings = Self {
            broker: broker?,
            pools: pools?,
            launcher: launcher?,
            admin: admin?,
            telemetry: telemetry?,
        };
        report.problems.is_empty().then_some(settings)
    }

    /// The task, background and dead-letter queues of all pools. No reply may go there.
    pub fn reserved_queues(&self) -> Vec<String> {
        let queues_of = |pool: &Pool| {
            let tasks = pool.queues().into_iter().map(|queue| queue.name);
            tasks.chain([pool.dead_letter_queue.clone()])
        };
        let mut queues: Vec<String> = self.pools.iter().flat_map(queues_of).collect();
        queues.sort_unstable();
        queues.dedup();
        queues
    }
}

impl Pool {
    /// The queues that tasks come from, at least one. The first is the pool's identity: its dead-letter exchange has that
    /// queue's name.
    pub fn queues(&self) -> Vec<TaskQueue> {
        if !self.queue.is_empty() {
            return self.queue.clone();
        }
        let background = self.background_queue.iter().map(|name| TaskQueue {
            background: true,
            returns_to_first: true,
            ..TaskQueue::new(name)
        });
        [TaskQueue::new(&self.task_queue)].into_iter().chain(background).collect()
    }

    /// [`Pool::queues`], each with the key of the setting that names it.
    fn queues_by_key(&self) -> Vec<(&'static str, TaskQueue)> {
        let keys = if self.queue.is_empty() { ["task_queue", "background_queue"] } else { ["queue"; 2] };
        let [first, further] = keys;
        let queues = self.queues().into_iter().enumerate();
        queues.map(|(position, queue)| (if position == 0 { first } else { further }, queue)).collect()
    }

    /// The share of each queue, in their order. The queue of `background_queue` belongs to the task queue, through which
    /// its tasks return.
    pub fn queue_shares(&self) -> Vec<QueueShare> {
        let share = |(index, queue): (usize, &TaskQueue)| QueueShare {
            queue: if queue.returns_to_first { 0 } else { index },
            share: queue.share,
        };
        self.queues().iter().enumerate().map(share).collect()
    }

    /// [`Pool::queue_shares`], each once.
    pub fn independent_queue_shares(&self) -> Vec<QueueShare> {
        let mut shares = self.queue_shares();
        shares.dedup();
        shares
    }

    /// The part of `prefetch_bytes` of each queue.
    pub fn queue_prefetch_bytes(&self) -> u64 {
        self.prefetch_bytes / self.queues().len() as u64
    }

    /// The queue with this name; without a name, the first one.
    pub fn queue_named(&self, name: Option<&str>) -> Option<TaskQueue> {
        self.queues().into_iter().find(|queue| name.is_none_or(|name| name == queue.name))
    }

    /// With `[[pool.queue]]`, the short forms follow from it: other code uses `task_queue` as the pool's identity.
    fn derive_short_forms(&mut self) {
        if let Some(first) = self.queue.first() {
            (self.task_queue, self.background_queue) = (first.name.clone(), None);
        }
    }

    /// The class in Python that is the pool's model; none for any other model.
    pub fn python_class(&self) -> Option<PythonClass<'_>> {
        python::python_class(&self.model)?.ok()
    }
}

impl Broker {
    /// [`Broker::consumer_timeout`]. None for the embedded queue, which does not take messages back.
    pub fn delivery_timeout(&self) -> Option<Duration> {
        (!self.is_embedded()).then_some(self.consumer_timeout)
    }

    /// Whether it is the queue of `run-batch` inside the launcher.
    pub fn is_embedded(&self) -> bool {
        self.url.iter().any(|url| url.expose().starts_with("embedded:"))
    }
}

impl Retry {
    /// The backoff between attempts.
    pub fn backoff(&self) -> Backoff {
        Backoff { first: self.delay, max: self.delay_max }
    }

    /// Longest wait of a task whose reply queue takes nothing, before it is delivered again. Each pool has a retry
    /// queue with this delay. It is long because many thousand tasks of one requester may circulate at once.
    pub const PUT_OFF: Duration = Duration::from_secs(15);

    /// The shortest of [`Retry::ceilings`].
    pub fn shortest(&self) -> Duration {
        self.ceilings().first().copied().unwrap_or(Self::PUT_OFF)
    }

    /// The longest delay before each attempt, and [`Retry::PUT_OFF`]: ascending, without duplicates. Each has a retry
    /// queue.
    pub fn ceilings(&self) -> Vec<Duration> {
        let attempts = (1..self.max_attempts).map(|attempts_made| self.backoff().ceiling(attempts_made));
        let mut ceilings: Vec<_> = attempts.chain([Self::PUT_OFF]).collect();
        ceilings.sort_unstable();
        ceilings.dedup();
        ceilings
    }
}

named_enum! {
    /// The number format in which weights are stored and multiplied.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Dtype as name {
        /// 32 bits: results equal to the published model's to 1e-5.
        F32 => "f32",
        /// 16 bits with the range of f32 and 8 bits of precision.
        Bf16 => "bf16",
        /// 16 bits with 11 bits of precision.
        F16 => "f16",
        /// 8 bits, with a scale and an offset for each 32 numbers.
        Int8 => "int8",
    }

    /// The `replace` setting: the order in which a worker is replaced by a new one.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Replace as name {
        /// The new one is ready before the old one drains; the device holds both.
        #[default]
        Overlap => "overlap",
        /// The old one drains before the new one starts: for devices that hold one copy of the model.
        InTurn => "in_turn",
    }

    /// The `drain` setting: what a stop signal does with accepted tasks.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Drain as name {
        /// Batches on the device are finished. All other tasks, including running sequences, are requeued at once.
        #[default]
        HandBack => "hand_back",
        /// Accepted tasks are finished, as far as `launcher.shutdown_grace` allows.
        Finish => "finish",
    }
}

fn pools(root: &mut Reader<'_>) -> Option<Vec<Pool>> {
    let list = root.take("pool")?;
    let no_pool =
        Problem::new("pool", "expected at least one [[pool]]").with_value(&list).with_origin(origin(&list));
    let report = root.report();
    let list = match list.kind {
        ValueKind::Array(list) if !list.is_empty() => list,
        _ => {
            report.problems.push(no_pool);
            return None;
        }
    };
    let mut pools = Vec::new();
    for (index, value) in list.into_iter().enumerate() {
        let reader = Reader::open(format!("pool[{index}]"), value, report);
        pools.push(reader.and_then(Pool::read));
    }
    let mut pools: Vec<Pool> = pools.into_iter().collect::<Option<_>>()?;
    pools.iter_mut().for_each(Pool::derive_short_forms);
    refuse_shared(report, &pools);
    Some(pools)
}

/// A setting of one pool.
#[derive(Clone, Copy)]
struct Setting {
    /// The pool's index.
    pool: usize,
    key: &'static str,
}

/// Refuses a name or a queue of tasks that two pools have. The problem names both pools and the origin of each setting.
fn refuse_shared(report: &mut Report, pools: &[Pool]) {
    let names = pools.iter().enumerate().map(|(index, pool)| ("name", pool.name.clone(), index, 0));
    let queues = pools.iter().enumerate().flat_map(|(index, pool)| {
        let queues = pool.queues_by_key().into_iter().enumerate();
        queues.map(move |(position, (key, queue))| (key, queue.name, index, position))
    });
    let mut all: Vec<_> = names.chain(queues).collect();
    // The first queues come first: if one is shared, the other use of it is refused.
    all.sort_by_key(|(_, _, _, position)| *position > 0);
    let mut first_uses: BTreeMap<(bool, String), Setting> = BTreeMap::new();
    for (key, value, pool, _) in all {
        let refused = Setting { pool, key };
        match first_uses.get(&(key == "name", value.clone())) {
            Some(other) if other.pool != pool => {
                let described = |Setting { pool, key }: Setting| {
                    let path = format!("pool[{pool}].{key}");
                    let name = pools.get(pool).map_or("", |pool| &pool.name);
                    format!("{path} of the pool {name:?} ({})", report.origin_of(&path))
                };
                let expected = format!(
                    "expected a {key} of its own for each pool: {} and {} are the same",
                    described(*other),
                    described(refused)
                );
                let problem = Problem::new(format!("pool[{pool}].{key}"), expected);
                report.problems.push(problem.with_value(&value.into()));
            }
            // A repetition within a pool is that pool's problem.
            Some(_) => {}
            None => drop(first_uses.insert((key == "name", value), refused)),
        }
    }
}

fn check_pool(pool: &Pool, reader: &mut Reader<'_>) {
    if let Some(Err(expected)) = python::python_class(&pool.model) {
        reader.refuse("model", pool.model.as_str(), expected);
    }
    if pool.python_class().is_some() {
        refuse_of_other_models(pool, reader);
    }
    let is_listed = !pool.queue.is_empty();
    for key in ["task_queue", "background_queue"] {
        let origin = reader.origin_of(key);
        if is_listed && origin != BUILT_IN {
            let (list, list_origin) = (reader.path_of("queue"), reader.origin_of("queue"));
            let value = if key == "task_queue" {
                pool.task_queue.as_str()
            } else {
                pool.background_queue.as_deref().unwrap_or("")
            };
            let expected = format!(
                "to be left out, because {list} ([[pool.queue]], {list_origin}) says which queues tasks come from: \
                 write this queue there"
            );
            reader.refuse(key, value, expected);
        }
    }
    let task_queues = pool.queues_by_key();
    for (key, other) in
        [("reply_queue", pool.reply_queue.as_ref()), ("dead_letter_queue", Some(&pool.dead_letter_queue))]
    {
        for (task_key, queue) in task_queues.iter().filter(|(_, queue)| Some(&queue.name) == other) {
            let (path, origin) = (reader.path_of(task_key), reader.origin_of(task_key));
            let expected =
                format!("a queue other than {path} ({origin}): its messages would come back as tasks");
            reader.refuse(key, queue.name.as_str(), expected);
        }
    }
    if !is_listed && pool.background_queue.as_ref() == Some(&pool.task_queue) {
        let (path, origin) = (reader.path_of("task_queue"), reader.origin_of("task_queue"));
        reader.refuse(
            "background_queue",
            pool.task_queue.as_str(),
            format!("a queue other than {path} ({origin})"),
        );
    }
    let (max_requests, origin) = (pool.batch.max_requests, reader.origin_of("batch.max_requests"));
    // Only a `max_requests` that the user has set is a contradiction. With the default, a smaller prefetch just limits
    // the worker's batches.
    if let Some(prefetch) = pool.prefetch.filter(|it| usize::from(*it) < max_requests && origin != BUILT_IN) {
        let path = reader.path_of("batch.max_requests");
        let expected = format!(
            "\"auto\" or at least {path} = {max_requests} ({origin}): with fewer messages in hand, a batch of tasks \
             with one input each could never fill"
        );
        reader.refuse("prefetch", i64::from(prefetch), expected);
    }
}

/// Refuses settings that mean nothing for a class in Python. One that is written with its default is left alone.
fn refuse_of_other_models(pool: &Pool, reader: &mut Reader<'_>) {
    let model = reader.path_of("model");
    let is_default_speed = pool.min_speed.to_bits() == 0.2_f64.to_bits();
    for (key, is_set) in [
        ("task", pool.task.is_some()),
        ("strict_model", pool.strict_model),
        ("cpu_features", pool.cpu_features != CpuFeatures::Auto),
        ("min_speed", !is_default_speed),
        ("allowed_sources", !pool.allowed_sources.is_empty()),
        ("batch.encode_interval", pool.batch.encode_interval.is_some()),
        ("batch.encode_batch", pool.batch.encode_batch.is_some()),
    ] {
        if is_set {
            let (path, origin) = (reader.path_of(key), reader.origin_of(key));
            let expected =
                format!("expected to be left out: it means nothing for a class in Python ({model})");
            reader.report().problems.push(Problem::new(path, expected).with_origin(origin));
        }
    }
}

fn refuse_certificate_without_key(tls: &Tls, reader: &mut Reader<'_>) {
    let (missing, written) = match (&tls.cert_file, &tls.key_file) {
        (Some(_), None) => ("key_file", "cert_file"),
        (None, Some(_)) => ("cert_file", "key_file"),
        _ => return,
    };
    let (written_path, origin) = (reader.path_of(written), reader.origin_of(written));
    reader.refuse(missing, "", format!("a file, as {written_path} names one ({origin}): both or neither"));
}

/// Refuses a backoff whose first delay exceeds its ceiling.
fn refuse_low_ceiling(
    reader: &mut Reader<'_>,
    first_key: &str,
    first: Duration,
    ceiling_key: &str,
    ceiling: Duration,
) {
    if first > ceiling {
        let (path, origin) = (reader.path_of(first_key), reader.origin_of(first_key));
        let expected = format!("at least {path} = \"{}\" ({origin})", show_duration(first));
        reader.refuse(ceiling_key, show_duration(ceiling), expected);
    }
}

/// Whether all numbers in this value are finite.
fn is_finite(value: &Value) -> bool {
    match &value.kind {
        ValueKind::Float(number) => number.is_finite(),
        ValueKind::Array(items) => items.iter().all(is_finite),
        ValueKind::Table(table) => table.values().all(is_finite),
        _ => true,
    }
}

impl Section for Options {
    fn outline() -> Outline {
        let about: &[&str] =
            &[" Settings of the model's own. docs/models.md lists those of the built-in models."];
        Outline { about, keys: &[], nested: Vec::new(), has_secrets: false }
    }

    fn read(mut reader: Reader<'_>) -> Option<Self> {
        let mut options = Self::new();
        for (name, value) in reader.read_rest() {
            let value = read::typed(&value);
            // JSON, in which models get their options, has no others.
            if is_finite(&value) {
                options.insert(name, value.try_deserialize().unwrap_or_default());
            } else {
                reader.refuse(&name, value, "numbers that are finite".to_owned());
            }
        }
        Some(options)
    }
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
