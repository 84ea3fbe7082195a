//! Has a process import and load its class, and reads what the class is. If that fails, decides whether the operator must act or
//! another process may succeed. Also describes a class for people, in a process that sees no GPU and loads nothing. Owns no
//! state.

use std::fmt;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::batches::Batches;
use super::frames::write_frame;
use super::messages::{
    Answer, DescribedOption, Description, Failure, FailureKind, FromProcess, ProbeHeader, StartHeader,
    ToProcess, Url, VERSION, Work,
};
use super::process::{Lost, Process, ProcessSettings, Started};
use super::processor::PythonProcessor;
use super::streams::PythonStreams;
use crate::config::{Assignment, Dtype, Pool, PythonClass, PythonPlace};
use crate::engine::{Foreign, ForeignProcess, ForeignWork, Waker};
use crate::model::{LoadError, LoadSpec, Message, Properties, Route, model_name};

/// How long it may take to describe a class, which is the time to import its module.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(60);
/// After this time the log says that the process is still importing or loading. Whenever twice the time has passed, a warning
/// says so again.
const FIRST_REMARK: Duration = Duration::from_secs(4);
/// The most URLs that a class may answer.
const MAX_URLS: usize = 64;

/// What a class in Python is, for people.
pub struct Described(Description);

impl Described {
    /// Its options with the values in force, one line each.
    pub fn options(&self) -> impl Iterator<Item = String> {
        let line = |DescribedOption { name, kind, value }: &_| format!("option {name} ({kind}) = {value}");
        self.0.options.iter().map(line)
    }

    /// The URLs that it answers.
    pub fn routes(&self) -> &'static [Route] {
        routes(&self.0)
    }
}

impl fmt::Display for Described {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Description { package, python, urls, work, .. } = &self.0;
        let urls: Vec<String> =
            urls.iter().map(|url| format!("{} ({})", url.url, url.media_types.join(", "))).collect();
        let work = match work {
            Work::Batches => "batches",
            Work::Streams => "streams",
        };
        write!(
            f,
            "a class in Python {python} with sconce_model {package}, in {work}, for {}",
            urls.join(", ")
        )
    }
}

/// The worker for which a class is loaded.
#[derive(Clone, Copy)]
struct LoadingWorker<'a> {
    device: &'a str,
    slot: &'a str,
    /// A name that no other worker on any host has.
    name: &'a str,
    threads: usize,
}

/// The header of the first frame.
fn start_frame<'a>(
    mode: &'a str,
    pool: &'a Pool,
    spec: &'a LoadSpec,
    worker: LoadingWorker<'a>,
) -> Result<StartHeader<'a>, LoadError> {
    let Some(PythonClass { place, class }) = pool.python_class() else {
        let reason = "it names no class in Python".to_owned();
        return Err(LoadError::Unsupported { model: pool.model.clone(), reason });
    };
    let (module, file) = match place {
        PythonPlace::Module(module) => (Some(module), None),
        PythonPlace::File(file) => (None, Some(file)),
    };
    let LoadingWorker { device, slot, name, threads } = worker;
    let slot_index = slot.rsplit('/').next().and_then(|index| index.parse().ok()).unwrap_or_default();
    Ok(StartHeader {
        version: VERSION,
        mode,
        module,
        file,
        class,
        device: if device == "cpu" { "cpu" } else { "cuda" },
        device_name: device,
        dtype: pool.dtype.map_or("auto", Dtype::name),
        threads,
        slot,
        slot_index,
        // This hasher has fixed keys, so that a worker has the same seed after each start. NumPy takes 32 bits.
        seed: BuildHasherDefault::<DefaultHasher>::default().hash_one(name) as u32,
        model_name: model_name(&pool.model),
        served_names: &spec.served_names,
        max_inputs: spec.max_inputs,
        options: &spec.options,
    })
}

/// A process that loads its class.
struct Loading<'a> {
    started: Started,
    /// The pool's `model`, for errors.
    model: &'a str,
}

impl<'a> Loading<'a> {
    /// Starts the process of a pool's class.
    fn begin(pool: &'a Pool, device: &str, threads: usize, timeout: Duration) -> Result<Self, LoadError> {
        let missing: Vec<&str> =
            pool.python.path.iter().map(String::as_str).filter(|path| !Path::new(path).exists()).collect();
        if !missing.is_empty() {
            let reason = format!("pool.python.path names what does not exist: {}", missing.join(", "));
            return Err(LoadError::Unsupported { model: pool.model.clone(), reason });
        }
        let started = Process::start(&ProcessSettings { python: &pool.python, device, threads, timeout });
        let started = started.map_err(|error| LoadError::Process {
            model: pool.model.clone(),
            reason: format!("its process cannot be started: {error}"),
        })?;
        Ok(Self { started, model: &pool.model })
    }

    /// An error: `must_operator_act` before any process can load the class, or another process may succeed.
    fn failed(&self, must_operator_act: bool, reason: String) -> LoadError {
        let model = self.model.to_owned();
        match must_operator_act {
            true => LoadError::Unsupported { model, reason },
            false => LoadError::Process { model, reason },
        }
    }

    /// The error after `error` on the channel.
    fn lost(&self, error: &io::Error) -> LoadError {
        let Lost { reason, must_operator_act } = self.started.process.why_lost("loading the model", error);
        self.failed(must_operator_act, reason)
    }

    /// The next answer. `doing`: what the process does until then. `time`: how long it may take; none: as long as it needs.
    fn next(&self, doing: &str, time: Option<Duration>) -> Result<Answer, LoadError> {
        let (since, mut remark) = (Instant::now(), FIRST_REMARK);
        while time.is_none_or(|time| remark < time)
            && !is_readable(&self.started.model_channel, remark.saturating_sub(since.elapsed()))
        {
            let (model, seconds) = (self.model, remark.as_secs());
            // A long wait is a warning, since a person who waits for a command sees no other lines of the log.
            match remark > FIRST_REMARK {
                true => tracing::warn!(model, seconds, "the Python process is still {doing}"),
                false => tracing::info!(model, seconds, "the Python process is still {doing}"),
            }
            remark *= 2;
        }
        let left = time.map(|time| time.saturating_sub(since.elapsed()));
        let answer = Answer::read(&self.started.model_channel, left).map_err(|error| {
            match time.filter(|_| error.kind() == io::ErrorKind::TimedOut) {
                Some(time) => {
                    let seconds = time.as_secs();
                    let limit = format!("importing its module took longer than {seconds} s");
                    self.failed(true, format!("{limit}; a worker waits for longer"))
                }
                None => self.lost(&error),
            }
        })?;
        match answer.message {
            FromProcess::Failed(Failure { kind, message, .. }) => {
                Err(self.failed(kind == FailureKind::Operator, message))
            }
            _ => Ok(answer),
        }
    }

    /// Sends the first frame, and reads what the class is.
    fn describe(&self, start: &StartHeader<'_>, time: Option<Duration>) -> Result<Description, LoadError> {
        write_frame(&self.started.model_channel, &ToProcess::Start(start), &[])
            .map_err(|error| self.lost(&error))?;
        let FromProcess::Described(description) = self.next("importing its module", time)?.message else {
            return Err(self.failed(true, "its process has not described the class first".to_owned()));
        };
        let urls = &description.urls;
        let is_url = |url: &Url| !url.media_types.is_empty() && url.url.starts_with('/');
        if urls.is_empty() || urls.len() > MAX_URLS || !urls.iter().all(is_url) {
            let reason = format!("its `urls` must be 1 to {MAX_URLS} paths with media types, got {urls:?}");
            return Err(self.failed(true, reason));
        }
        Ok(*description)
    }
}

/// Waits until a channel can be read or is closed. Returns false if that takes longer than `time`.
fn is_readable(channel: &UnixStream, time: Duration) -> bool {
    let timeout = PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
    poll(&mut [PollFd::new(channel.as_fd(), PollFlags::POLLIN)], timeout) != Ok(0)
}

/// The routes of a class. Their memory is leaked, since the worker has one class and needs its routes as long as it lives.
fn routes(description: &Description) -> &'static [Route] {
    fn kept(text: &str) -> &'static str {
        Box::leak(text.to_owned().into_boxed_str())
    }
    let route = |url: &Url| Route {
        url: kept(&url.url),
        media_types: Box::leak(
            url.media_types.iter().map(|it| kept(it)).collect::<Vec<_>>().into_boxed_slice(),
        ),
    };
    Box::leak(description.urls.iter().map(route).collect::<Vec<_>>().into_boxed_slice())
}

/// Starts the process of an assignment, and waits until it has loaded its class. `wake` wakes the loop of streams.
///
/// # Errors
/// [`LoadError::Unsupported`] if the operator must act, [`LoadError::Process`] if the process has ended or failed.
pub fn load(
    assignment: &Assignment,
    spec: &LoadSpec,
    wake: Waker,
) -> Result<Foreign<PythonProcessor, Batches, PythonStreams>, LoadError> {
    let Assignment { device, slot, worker, threads, pool, .. } = assignment;
    let loading = Loading::begin(pool, device, *threads, pool.batch.timeout)?;
    let worker = LoadingWorker { device, slot, name: worker, threads: *threads };
    let description = loading.describe(&start_frame("serve", pool, spec, worker)?, None)?;
    let mut answer = loading.next("loading the model", None)?;
    let body = answer.body();
    let FromProcess::Ready { probe } = answer.message else {
        return Err(loading.failed(true, "its process has sent something else than `ready`".to_owned()));
    };
    let probe = probe.map(|ProbeHeader { url, content_type }| {
        let mut properties = Properties { content_type: Some(content_type), ..Properties::default() };
        properties.headers.insert("url".to_owned(), url.into());
        Message { properties, body }
    });
    let Started { process, model_channel: channel, lost } = loading.started;
    let not_started =
        |error: io::Error| LoadError::Process { model: pool.model.clone(), reason: error.to_string() };
    let work = match description.work {
        Work::Batches => ForeignWork::Batches(Batches {
            process: process.clone(),
            channel,
            gives_numbers: description.gives_numbers,
        }),
        Work::Streams => ForeignWork::Streams(
            PythonStreams::start(process.clone(), channel, description.concurrency, wake)
                .map_err(not_started)?,
        ),
    };
    let processor = PythonProcessor {
        process: process.clone(),
        routes: routes(&description),
        description,
        probe,
        max_inputs: spec.max_inputs,
        last_task: AtomicU64::new(0),
    };
    let process = ForeignProcess { lost, memory: process.memory().clone() };
    Ok(Foreign { processor, work, dtype: spec.dtype, process })
}

/// Imports the class of a pool in a process that sees no GPU, and says what it is.
///
/// # Errors
/// [`LoadError::Unsupported`] if the operator must act, [`LoadError::Process`] if the process has ended or failed.
pub fn describe(pool: &Pool, spec: &LoadSpec) -> Result<Described, LoadError> {
    describe_within(pool, spec, DESCRIBE_TIMEOUT)
}

/// As [`describe`], within this time.
pub(super) fn describe_within(pool: &Pool, spec: &LoadSpec, time: Duration) -> Result<Described, LoadError> {
    let worker = LoadingWorker { device: "cpu", slot: "check-config/0", name: "check-config", threads: 1 };
    let start = start_frame("describe", pool, spec, worker)?;
    let loading = Loading::begin(pool, "cpu", 1, time)?;
    let described = loading.describe(&start, Some(time));
    loading.started.process.give_up("it is described");
    described.map(Described)
}
