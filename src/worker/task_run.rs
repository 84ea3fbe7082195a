//! Runs one task: validate, preprocess, compute, reply, settle. One future per task.

use std::future::{pending, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt as _;
use tokio::sync::watch;
use tokio::time::timeout;

use super::cpu_pool::{CpuPool, Pools};
use super::fair_turns::{Turn, Turns};
use super::isolation::{CrashRecords, Isolation, Membership, suspicion};
use super::prefetch::SharedPrefetch;
use super::settle::{Accepted, Outcome, Parts, Settled, Settlement, Trial, WaitsFor};
use super::{Reporter, Withdrawn, WorkerError, requester};
use crate::batching::{Group, QueueShare};
use crate::broker::{PerSource, Source};
use crate::config::redact_url;
use crate::engine::{Computed, Engine, Expect, InputSource, Job, JobEvent, TaskState, Unwritten, now};
use crate::fetch::{Claim, Failure, Fetcher};
use crate::model::{Effort, FileUrl, Files, Route};
use crate::protocol::files::DATAREF;
use crate::protocol::raw_text::visible;
use crate::protocol::reply::micros;
use crate::protocol::{Body, MAX_HEADER_BYTES, Sentinels, Task, TaskError, TaskErrorKind, Timings, shorten};
use crate::telemetry::traces::Traces;

/// How long a redelivered task waits for the launcher's crash records: the launcher may learn of a worker's death later
/// than the broker does.
const CRASH_RECORDS_WAIT: Duration = Duration::from_millis(200);
/// How often a waiting task checks whether it was cancelled or has expired.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The most files that are fetched for a task.
const MAX_URLS: usize = 16;
/// The most inputs whose reply counts as brief work: writing an embedding of 384 numbers takes 10 µs.
const MAX_BRIEF_INPUTS: usize = 4;

/// The state that all task runs of a session share.
pub(super) struct Shared {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) pools: Pools,
    /// The share of each queue.
    pub(super) shares: PerSource<QueueShare>,
    /// Turns on the thread for long preparation.
    pub(super) turns: Turns,
    /// Fetches files. None if the pool allows no source.
    pub(super) fetcher: Option<Arc<Fetcher>>,
    /// Turns at fetching files.
    pub(super) fetch_turns: Turns,
    pub(super) settlement: Settlement,
    pub(super) isolation: Arc<Isolation>,
    pub(super) reporter: Reporter,
    pub(super) crashes: CrashRecords,
    pub(super) withdrawn: Withdrawn,
    pub(super) prefetch: PerSource<SharedPrefetch>,
    pub(super) traces: Traces,
    pub(super) sentinels: Sentinels,
    pub(super) max_body: u64,
    /// The most deliveries of a task, if the broker counts them. The broker's own limit is one higher and only a
    /// backstop, because the producer learns nothing from it.
    pub(super) max_deliveries: i64,
}

/// While this exists, the engine expects one more task.
pub(super) struct Expected(Arc<dyn Engine>);

impl Expected {
    pub(super) fn new(engine: &Arc<dyn Engine>) -> Self {
        engine.expect(Expect::More);
        Self(engine.clone())
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.0.expect(Expect::Less);
    }
}

/// A task that is to be computed.
struct Admitted<'a> {
    expected: Expected,
    /// Set if the task is computed in order to try its reply queue, which accepted nothing before.
    probe: Option<Trial<'a>>,
}

impl Shared {
    /// Runs one task to its end.
    ///
    /// # Errors
    /// As [`Settlement::settle`].
    pub(super) async fn run(
        &self,
        mut accepted: Accepted,
        state: Arc<TaskState>,
        mut expected: Expected,
    ) -> Result<(), WorkerError> {
        let mut timings = Timings {
            queue_us: micros(accepted.task.time_in_queue(SystemTime::now())),
            ..Timings::default()
        };
        let membership;
        (membership, expected) = self.isolate(&mut accepted, &state, expected).await;
        let mut probe = None;
        let outcome = if let Some(refusal) = self.refusal(&accepted) {
            drop(expected);
            refusal
        } else {
            let Some(admitted) = self.admit(&accepted, &state, expected).await? else { return Ok(()) };
            probe = admitted.probe;
            let mut expected = admitted.expected;
            loop {
                let mut parts = None;
                let task = accepted.task.clone();
                let run = Run {
                    shared: self,
                    source: accepted.delivery.source,
                    task: &task,
                    state: &state,
                    membership: membership.as_ref(),
                };
                let computed = tokio::select! {
                    biased;
                    computed = run.compute(expected, &mut timings, &mut parts) => computed,
                    error = self.wait_for_expiry(&state) => Err(error.into()),
                };
                // Kept whatever the result is, so that no reply overtakes a part that is under way.
                accepted.parts = parts.map(Parts::finish);
                let computed = match state.cancellation() {
                    Some(error) if matches!(computed, Err(Outcome::PutOff(_))) => Err(error.into()),
                    _ => computed,
                };
                match computed {
                    Err(Outcome::PutOff(waits_for)) => {
                        // From here the task cannot be handed back, because it may soon be in a retry queue.
                        if !state.commit() {
                            return Ok(());
                        }
                        let outcome = Outcome::PutOff(waits_for);
                        if self.settlement.settle(&accepted, outcome, &timings).await? == Settled::Yes {
                            return Ok(());
                        }
                        expected = Expected::new(&self.engine);
                    }
                    Err(outcome) => break outcome,
                    Ok(body) => break Outcome::Answered(body),
                }
            }
        };
        if let Some(membership) = membership {
            membership.record_survival();
        }
        if !state.commit() {
            return Ok(());
        }
        accepted.traced.record_timings(&timings, accepted.attempt());
        let settled = self.settlement.settle(&accepted, outcome, &timings).await;
        // Dropped only now, when it is known whether the queue has accepted the reply.
        drop(probe);
        settled.map(|_| ())
    }

    /// Decides whether a redelivered task must run apart from others, and if so waits until its group runs.
    async fn isolate(
        &self,
        accepted: &mut Accepted,
        state: &TaskState,
        expected: Expected,
    ) -> (Option<Membership>, Expected) {
        if accepted.redeliveries == 0 {
            return (None, expected);
        }
        // The engine should not wait for this task meanwhile.
        drop(expected);
        tokio::time::sleep(CRASH_RECORDS_WAIT).await;
        let record = self.crashes.get(&state.name.fingerprint);
        let membership = match suspicion(accepted.redeliveries, accepted.is_counted, record.as_ref()) {
            Some(suspicion) => self.isolation.enter(state.name.clone(), suspicion).await,
            None => None,
        };
        // Read after the wait for a group: another worker may have died of the task meanwhile.
        accepted.deaths = self.crashes.get(&state.name.fingerprint);
        (membership, Expected::new(&self.engine))
    }

    /// Returns the outcome of a task that must not be computed, whatever its body contains. None: it may be computed.
    fn refusal(&self, accepted: &Accepted) -> Option<Outcome> {
        let is_poison = accepted.deaths.as_ref().is_some_and(|deaths| deaths.poison.is_some());
        if let Some(queue) = self.misaddressed(&accepted.task) {
            Some(Outcome::Misaddressed(queue))
        } else if is_poison {
            Some(Outcome::Poison)
        } else if accepted.redeliveries >= self.max_deliveries {
            Some(Outcome::OutOfDeliveries(accepted.redeliveries))
        } else {
            oversize_error(&accepted.task).map(Outcome::Failed)
        }
    }

    /// Decides whether the task is computed now. If its reply queue accepts nothing, the task is put off or
    /// dead-lettered instead; it is then settled, and the result is None. If it cannot be put off, it is computed
    /// although the queue accepts nothing.
    async fn admit(
        &self,
        accepted: &Accepted,
        state: &TaskState,
        expected: Expected,
    ) -> Result<Option<Admitted<'_>>, WorkerError> {
        let blocked = match self.settlement.admit(accepted) {
            Ok(probe) => return Ok(Some(Admitted { expected, probe })),
            Err(blocked) => blocked,
        };
        drop(expected);
        // From here the task cannot be handed back, because it may soon be in a retry queue.
        if !state.commit() {
            return Ok(None);
        }
        let outcome = Outcome::ReplyQueueBlocked(blocked);
        Ok(match self.settlement.settle(accepted, outcome, &Timings::default()).await? {
            Settled::Yes => None,
            Settled::MustCompute => Some(Admitted { expected: Expected::new(&self.engine), probe: None }),
        })
    }

    /// Returns the task's error if its deadline passes before it is on the device; the task is then not computed.
    /// Otherwise never returns. A task of sequences may have been answered in part, so the engine checks its deadline
    /// between two steps instead.
    async fn wait_for_expiry(&self, state: &TaskState) -> TaskError {
        let Some(deadline) = state.deadline.filter(|_| self.engine.sequences().is_none()) else {
            return pending().await;
        };
        tokio::time::sleep_until(deadline.into()).await;
        match state.unwanted(now()) {
            Some(error) if state.claim() => error,
            _ => pending().await,
        }
    }

    /// The task's `reply_to`, if no reply may go to that queue.
    fn misaddressed(&self, task: &Task) -> Option<String> {
        task.reply_to().filter(|queue| self.settlement.queues.is_reserved(queue)).map(str::to_owned)
    }

    /// Settles a control message of an unknown type.
    ///
    /// # Errors
    /// As [`Settlement::settle`].
    pub(super) async fn refuse_control(&self, accepted: Accepted, kind: String) -> Result<(), WorkerError> {
        let outcome = Outcome::UnknownControl(kind);
        self.settlement.settle(&accepted, outcome, &Timings::default()).await.map(|_| ())
    }

    /// Checks what can be checked without reading the body.
    fn check(&self, task: &Task, state: &TaskState) -> Result<(), TaskError> {
        if let Some(error) = state.unwanted(now()) {
            return Err(error);
        }
        let properties = &task.message.properties;
        let size = task.message.body.len() as u64;
        if size > self.max_body {
            let most = self.max_body;
            let message =
                format!("the body is {size} bytes; this pool takes at most {most} (its setting max_body)");
            return Err(TaskError::new(TaskErrorKind::TooLarge, message));
        }
        if task.message.is_celery_task() {
            let message = "this is a task message of Celery, and sconce is no Celery worker. Call sconce from a Celery \
                           task: docs/celery.md shows how";
            return Err(TaskError::new(TaskErrorKind::BadInput, message));
        }
        let route = self.route(task)?;
        if let Some(given) = task.message.media_type().filter(|given| !route.takes(given)) {
            let types = route.media_types;
            let message =
                format!("content_type is \"{}\"; this model reads {types:?}", shorten(&visible(&given), 80));
            return Err(TaskError::new(TaskErrorKind::Undecodable, message).with_param("content_type"));
        }
        match properties.content_encoding.as_deref().map(str::to_ascii_lowercase).as_deref() {
            None | Some("" | "utf-8" | "utf8" | "identity" | "binary") => Ok(()),
            Some(other) => {
                let message = format!(
                    "content_encoding \"{}\" is not supported; send utf-8",
                    shorten(&visible(other), 80)
                );
                Err(TaskError::new(TaskErrorKind::Undecodable, message).with_param("content_encoding"))
            }
        }
    }

    /// The model's route for the URL that the task requests.
    fn route(&self, task: &Task) -> Result<&Route, TaskError> {
        let routes = self.engine.routes();
        let requested = task.message.url();
        let route = match requested {
            None => routes.first(),
            Some(requested) => routes.iter().find(|route| route.url == requested || route.url == Route::ANY),
        };
        route.ok_or_else(|| {
            let served: Vec<&str> = routes.iter().map(|route| route.url).collect();
            let (requested, served) = (shorten(requested.unwrap_or_default(), 80), served.join(", "));
            let mut message = format!("url {requested:?} is not served here; this pool answers {served}");
            if let Some(meant) = routes.iter().find(|route| is_spelt_like(route.url, &requested)) {
                message += &format!("; did you mean {}?", meant.url);
            }
            TaskError::new(TaskErrorKind::UnknownUrl, message).with_param("url")
        })
    }
}

/// Whether two URLs differ in nothing but `-` and `_`, capitals, slashes at the end and `/v1` at the beginning: the
/// URLs of some requests are those of other servers, which spell them differently.
fn is_spelt_like(url: &str, other: &str) -> bool {
    let plain = |url: &str| {
        let url = url.to_ascii_lowercase().replace('-', "_");
        url.trim_end_matches('/').trim_start_matches("/v1").to_owned()
    };
    plain(url) == plain(other)
}

/// The error of a task whose headers are so large that it must not be delivered again.
fn oversize_error(task: &Task) -> Option<TaskError> {
    let bytes = task.message.properties.header_bytes();
    (bytes > MAX_HEADER_BYTES).then(|| {
        let message = format!("the headers have {bytes} bytes; a task may have {MAX_HEADER_BYTES}");
        TaskError::new(TaskErrorKind::TooLarge, message)
    })
}

/// How a task's job ended.
struct JobEnd {
    computed: Computed,
    /// Whether its requester has left, and nobody had cancelled the task before.
    has_left: bool,
}

/// A task with its files.
struct Fetched {
    /// The task, with the file of its header `dataref` as its body.
    task: Arc<Task>,
    /// The files of the URLs in its body.
    files: Files,
}

/// One task on its way through the engine.
struct Run<'a> {
    shared: &'a Shared,
    source: Source,
    task: &'a Arc<Task>,
    state: &'a Arc<TaskState>,
    /// Its membership in a group of isolated tasks.
    membership: Option<&'a Membership>,
}

impl Run<'_> {
    /// Returns the task's isolated group, until the time of the group is over.
    fn group(&self) -> Option<Group> {
        self.membership.and_then(Membership::group)
    }

    /// Computes the task's answer. The parts of its reply that are under way are left in `parts`.
    async fn compute(
        &self,
        expected: Expected,
        timings: &mut Timings,
        parts: &mut Option<Parts>,
    ) -> Result<Body, Outcome> {
        let Self { shared, task, state, .. } = *self;
        let accepted_at = now();
        task.check_names()?;
        task.deadline()?;
        shared.check(task, state)?;
        let began = Instant::now();
        let (Fetched { task: with_body, files }, expected) = self.fetch_files(expected).await?;
        let engine = shared.engine.clone();
        let effort = engine.effort(&with_body.message);
        let preprocess = move || engine.preprocess(&with_body.message, &files);
        // The engine should not wait for a task that waits for its turn.
        let (mut job, mut expected) = if effort == Effort::Long {
            drop(expected);
            (self.in_turn(preprocess).await?, Expected::new(&shared.engine))
        } else {
            let turn = self.wait_for_preparation(effort).await?;
            let preprocess = move || {
                let _turn = turn;
                preprocess()
            };
            (self.prepare(effort, preprocess).await?, expected)
        };
        if job.takes_long() {
            drop(expected);
            let make = move || {
                job.make()?;
                Ok(job)
            };
            job = self.in_turn(make).await?;
            expected = Expected::new(&shared.engine);
        }
        timings.prepare_us = micros(began.elapsed());
        self.check_time(job.estimate())?;
        let enqueued = now();
        job.enqueue(state.clone(), self.group());
        // Dropped only now, because an engine that waits for this task must find it in its queue.
        drop(expected);
        *parts = Parts::start(&shared.settlement, task, &*job);
        let JobEnd { computed, has_left } = self.run_job(&mut *job, parts.as_mut()).await?;
        // From here the task is answered even if the worker ends, so that the result is not lost.
        if !state.commit() {
            return pending().await;
        }
        timings.wait_us =
            computed.started.map_or(0, |started| micros(started.saturating_duration_since(enqueued)));
        timings.compute_us = micros(computed.compute);
        timings.batch_size = computed.last.size as i64;
        timings.batch_tokens = computed.last.tokens as i64;
        if let Some(first) = computed.first_piece {
            timings.first_token_us = Some(micros(first.saturating_duration_since(accepted_at)));
            timings.answer_us = micros(now().saturating_duration_since(first));
        }
        if has_left {
            return Err(self.requester_left());
        }
        if let Some(parts) = parts {
            self.write_last_parts(&mut *job, parts).await;
        }
        // The error reply of a failed task is short.
        let brief = computed.failed || effort == Effort::Brief && job.inputs() <= MAX_BRIEF_INPUTS;
        let is_slow = !computed.failed && job.is_finish_slow();
        let reply = async {
            // The turn comes before the exclusion of groups, as in preparation: otherwise the tasks that hold the one could
            // wait for those that hold the other, while a group waits between them. An isolated task waits for no turn,
            // as in `wait_for_turn`.
            let turn = match is_slow && self.group().is_none() {
                true => Some(shared.turns.take(self.state.owner).await),
                false => None,
            };
            let (pool, brief) =
                if turn.is_some() { (&shared.pools.long, false) } else { (&shared.pools.reply, brief) };
            let write = move || {
                let _turn = turn;
                job.finish()
            };
            self.without_groups(pool.run(brief, write)).await
        };
        // The last parts are sent while the reply is written.
        let reply = match parts {
            Some(parts) => run_alongside(reply, async { _ = parts.send_last().await }).await,
            None => reply.await,
        };
        match state.cancellation() {
            Some(error) => Err(error.into()),
            None => Ok(reply.map_err(internal_error)??),
        }
    }

    /// Fetches the files that the task names by their URLs.
    async fn fetch_files(&self, expected: Expected) -> Result<(Fetched, Expected), Outcome> {
        let Self { shared, task, .. } = *self;
        let message = &task.message;
        let dataref = message.properties.headers.get(DATAREF);
        if dataref.is_some() && shared.fetcher.is_some() && !message.body.is_empty() {
            let message = format!(
                "{DATAREF} names a file in the place of the body, but the body has {} bytes; send an empty one",
                message.body.len()
            );
            return Err(TaskError::bad_input(DATAREF, message).into());
        }
        let dataref = dataref.filter(|_| message.body.is_empty());
        let mut fetched = Fetched { task: task.clone(), files: Files::default() };
        let urls = match (dataref.and_then(|url| url.as_str()), &shared.fetcher) {
            (Some(_), None) => {
                let message =
                    format!("{DATAREF}: this pool fetches nothing, because its allowed_sources is empty");
                return Err(TaskError::bad_input(DATAREF, message).into());
            }
            (Some(url), Some(_)) => vec![FileUrl { url: url.to_owned(), path: DATAREF.to_owned() }],
            (None, Some(_)) if message.is_json() => {
                let (engine, task) = (shared.engine.clone(), task.clone());
                self.prepare(Effort::Usual, move || Ok(engine.file_urls(&task.message))).await?
            }
            _ => Vec::new(),
        };
        let Some(fetcher) = shared.fetcher.as_ref().filter(|_| !urls.is_empty()) else {
            return Ok((fetched, expected));
        };
        if urls.len() > MAX_URLS {
            let message =
                format!("the task has {} URLs of files; at most {MAX_URLS} are fetched", urls.len());
            return Err(TaskError::new(TaskErrorKind::TooLarge, message).into());
        }
        // The engine should not wait for a task that waits for its files.
        drop(expected);
        let mut fetched_bytes = 0;
        for FileUrl { url, path } in urls {
            if fetched.files.has(&url) {
                continue;
            }
            let to_outcome = |failure: Failure| {
                let (kind, why) = match failure {
                    Failure::OverBudget => return Outcome::PutOff(WaitsFor::Memory),
                    Failure::Refused(why) => (TaskErrorKind::BadInput, why),
                    Failure::TooLarge(why) => (TaskErrorKind::TooLarge, why),
                    Failure::Unavailable(why) => (TaskErrorKind::Unavailable, why),
                };
                // A query may be a signature, a URL may hold a password, and errors are logged.
                let shown = redact_url(&url);
                let shown =
                    shown.split_once('?').map_or_else(|| shown.clone(), |(start, _)| format!("{start}?…"));
                TaskError::new(kind, format!("{path}: {:?} {why}", shorten(&shown, 200)))
                    .with_param(&*path)
                    .into()
            };
            let location = fetcher.locate(&url).map_err(to_outcome)?;
            let server = fetcher.limited_server(&location);
            let turn = Arc::new(self.wait_for_turn(&shared.fetch_turns, server).await?);
            // A JSON body is decoded as a whole, on a thread that other tasks need, so its size is limited.
            let is_json_body = path == DATAREF && message.is_json();
            let claim = Claim {
                owner: self.state.owner,
                waits_for_memory: self.group().is_none(),
                max_size: if is_json_body { shared.max_body } else { u64::MAX },
                task_bytes: fetched_bytes,
            };
            let bytes = tokio::select! {
                biased;
                bytes = fetcher.fetch(location, claim, turn) => bytes.map_err(to_outcome)?,
                error = self.wait_until_unwanted() => return Err(error.into()),
            };
            fetched_bytes += bytes.len() as u64;
            if path == DATAREF {
                fetched.task = Arc::new(task.with_body(bytes));
            } else {
                fetched.files.add(url, bytes);
            }
        }
        Ok((fetched, Expected::new(&shared.engine)))
    }

    /// Waits until a job that was enqueued is done, prepares more of its inputs meanwhile, and sends its parts.
    async fn run_job(&self, job: &mut dyn Job, parts: Option<&mut Parts>) -> Result<JobEnd, Outcome> {
        let (source, time_limit) = (job.source(), self.shared.settlement.queue_timeouts.pool);
        let prefetch = &self.shared.prefetch[self.source];
        let is_on_demand = source.is_some();
        if !is_on_demand {
            prefetch.prepared(job.inputs(), job.tokens());
        }
        let has_left = AtomicBool::new(false);
        let computing = async {
            tokio::select! {
                biased;
                end = self.handle_events(job, parts, &has_left) => Ok(end),
                // Once the requester has left, the error is that the task is not wanted any more.
                error = self.prepare_further_inputs(source) => {
                    Err(if has_left.load(Relaxed) { self.requester_left() } else { error.into() })
                }
            }
        };
        let Ok(end) = timeout(time_limit, computing).await else {
            let message =
                format!("not finished within {time_limit:?}, after which the broker takes the task back");
            // A task that is prepared piece by piece is a long one: it would take as long again.
            return Err(if is_on_demand {
                TaskError::new(TaskErrorKind::TooLarge, format!("{message}: send less in a task")).into()
            } else {
                TaskError::new(TaskErrorKind::Fault, message).into()
            });
        };
        if is_on_demand {
            // Only now is it known how large the task was.
            prefetch.prepared(job.inputs(), job.tokens());
        }
        end
    }

    /// Does `work` that may take long on the thread for long preparation, when the task's requester has its turn.
    async fn in_turn<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, TaskError> + Send + 'static,
    ) -> Result<T, TaskError> {
        let Self { shared, .. } = *self;
        let turn = self.wait_for_turn(&shared.turns, None).await?;
        let work = move || {
            // The turn ends with the work, even if the task no longer waits for it.
            let _turn = turn;
            work()
        };
        self.prepare_on(&shared.pools.long, false, work).await
    }

    /// Waits until a task of this effort may be prepared. The threads do their work in the order of its arrival, so with
    /// several queues the tasks of one that arrive at once would hold up those of another.
    async fn wait_for_preparation(&self, effort: Effort) -> Result<Option<Turn>, TaskError> {
        if effort == Effort::Brief || self.shared.shares.count() == 1 {
            return Ok(None);
        }
        self.wait_for_turn(&self.shared.pools.slice_turns, None).await
    }

    /// Waits for a turn of the task's requester, at a server if one is named. None: an isolated task needs no turn.
    async fn wait_for_turn(&self, turns: &Turns, server: Option<u64>) -> Result<Option<Turn>, TaskError> {
        let turn = async {
            // An isolated task waits for no turn: the tasks that have turns may be waiting for this one to end.
            if self.group().is_some() {
                return None;
            }
            Some(turns.take_at(server, self.state.owner).await)
        };
        tokio::select! {
            biased;
            turn = turn => Ok(turn),
            error = self.wait_until_unwanted() => Err(error),
        }
    }

    /// Returns the task's error once its answer is no longer wanted: the task was cancelled or has expired.
    async fn wait_until_unwanted(&self) -> TaskError {
        loop {
            if let Some(error) = self.state.unwanted(now()) {
                return error;
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }

    /// Does `work` that prepares inputs of this task on the threads for ordinary preparation.
    async fn prepare<T: Send + 'static>(
        &self,
        effort: Effort,
        work: impl FnOnce() -> Result<T, TaskError> + Send + 'static,
    ) -> Result<T, TaskError> {
        self.prepare_on(&self.shared.pools.preprocess, effort == Effort::Brief, work).await
    }

    /// Does `work` that prepares inputs of this task in `pool`, once there is memory for more of them. All work on the
    /// preprocess threads goes through here.
    async fn prepare_on<T: Send + 'static>(
        &self,
        pool: &CpuPool,
        brief: bool,
        work: impl FnOnce() -> Result<T, TaskError> + Send + 'static,
    ) -> Result<T, TaskError> {
        let Shared { engine, .. } = self.shared;
        let (reporter, name) = (self.shared.reporter.clone(), self.state.name.clone());
        let work = move || {
            // Brief work runs nothing that a requester could make crash, and a control line would cost more than the
            // work.
            let _reported = (!brief).then(|| reporter.preprocessing(&name));
            work()
        };
        // An isolated task does not wait for memory. Tasks that are computed only after it hold that memory, so
        // waiting would deadlock.
        let _memory =
            if self.group().is_some() { None } else { Some(engine.memory().room(self.state.owner).await) };
        self.without_groups(pool.run(brief, work)).await.map_err(internal_error)?
    }

    /// Prepares the further inputs of a task: one slice each time that few of them wait for the model. Other requesters
    /// have their turn between two slices. Returns only if a slice fails, with its error.
    async fn prepare_further_inputs(&self, source: Option<Arc<dyn InputSource>>) -> TaskError {
        if let Some(source) = source {
            while poll_fn(|context| source.poll_wanted(context)).await {
                let source = source.clone();
                // An isolated task waits for no turn.
                let turns = &self.shared.pools.slice_turns;
                let _turn = match self.group() {
                    Some(_) => None,
                    None => Some(turns.take(self.state.owner).await),
                };
                if let Err(error) = self.prepare(Effort::Usual, move || source.pull()).await {
                    return error;
                }
            }
        }
        pending().await
    }

    /// What becomes of the task if its requester has left.
    fn requester_left(&self) -> Outcome {
        Outcome::RequesterLeft(self.task.reply_to().unwrap_or_default().to_owned())
    }

    /// Waits until the job is done, and sends its parts. If the requester leaves meanwhile, `has_left` is set, and the
    /// sequences end. Never
    /// returns if the device has failed: that is not the task's fault, so the task goes back with the session.
    async fn handle_events(
        &self,
        job: &mut dyn Job,
        mut parts: Option<&mut Parts>,
        has_left: &AtomicBool,
    ) -> JobEnd {
        // Whether the latest part was returned as unroutable. Written here, read by `requester_leaves`.
        let (unroutable, is_unroutable) = watch::channel(false);
        let mut requester_leaves = pin!(self.requester_leaves(is_unroutable));
        loop {
            let ready = parts.as_ref().is_some_and(|parts| parts.is_ready());
            let progress = async {
                match parts.as_deref_mut() {
                    Some(parts) if !ready => parts.progress().await,
                    _ => pending().await,
                }
            };
            let event = tokio::select! {
                biased;
                event = poll_fn(|context| job.poll_event(context, ready)) => event,
                () = progress => {
                    if let Some(parts) = &parts {
                        let latest = parts.is_unroutable();
                        unroutable.send_if_modified(|before| std::mem::replace(before, latest) != latest);
                    }
                    continue;
                }
                () = &mut requester_leaves, if !has_left.load(Relaxed) && self.state.cancellation().is_none() => {
                    tracing::info!(task.id = self.task.id, "the task's reply queue does not exist any more; the task ends");
                    has_left.store(true, Relaxed);
                    self.state.cancel();
                    continue;
                }
            };
            match (event, parts.as_deref_mut()) {
                (JobEvent::Done(computed), _) => {
                    return JobEnd { computed, has_left: has_left.load(Relaxed) };
                }
                (JobEvent::Parts(unwritten), Some(parts)) => parts.send(self.write_parts(unwritten).await),
                (JobEvent::Parts(_), None) => {}
            }
        }
    }

    /// Writes parts: here if that is brief, and otherwise on the reply threads.
    async fn write_parts(&self, unwritten: Unwritten) -> Vec<Body> {
        if unwritten.is_brief() {
            return unwritten.write();
        }
        let bodies = self.shared.pools.reply.run(false, move || unwritten.write());
        self.without_groups(bodies).await.unwrap_or_else(|error| {
            tracing::error!(task.id = self.task.id, error, "parts of a reply are left out");
            Vec::new()
        })
    }

    /// Writes and sends the parts that are left of a job that is done. While some are being sent, no further ones are
    /// written, so that a queue that accepts them slowly causes no wasted work.
    async fn write_last_parts(&self, job: &mut dyn Job, parts: &mut Parts) {
        let mut next = job.unwritten();
        while let Some(unwritten) = next
            && parts.send_last().await
        {
            parts.send(self.write_parts(unwritten).await);
            next = job.unwritten();
        }
    }

    /// Refuses a task that would be on the device for longer than half of `QueueTimeouts::pool`, the time for which the
    /// worker may keep it: for the other half it may have to wait for other tasks of the same length.
    fn check_time(&self, estimate: Option<Duration>) -> Result<(), TaskError> {
        let max = self.shared.settlement.queue_timeouts.pool / 2;
        match estimate.filter(|estimate| *estimate > max) {
            None => Ok(()),
            Some(estimate) => {
                let (estimate, max) = (estimate.as_secs(), max.as_secs());
                let message = format!(
                    "the answer may take {estimate} s at this worker's pace; with broker.consumer_timeout as it \
                     is, a task may take {max} s: ask for fewer tokens or steps, or send less"
                );
                Err(TaskError::new(TaskErrorKind::TooLarge, message))
            }
        }
    }

    /// Returns once the requester has left.
    async fn requester_leaves(&self, unroutable: watch::Receiver<bool>) {
        let Some(queue) = self.task.reply_to() else { return pending().await };
        requester::wait_until_gone(&*self.shared.settlement.publisher, queue, unroutable).await;
    }

    /// Does `work` of this task while no group of isolated tasks runs, unless the task is in a group itself.
    async fn without_groups<T>(&self, work: impl Future<Output = T>) -> T {
        let _guard =
            if self.group().is_some() { None } else { Some(self.shared.isolation.exclude_groups().await) };
        work.await
    }
}

/// Returns the result of `work`. Runs `aside` meanwhile, and drops it when `work` is done.
async fn run_alongside<T>(work: impl Future<Output = T>, aside: impl Future<Output = ()>) -> T {
    let mut aside = pin!(aside.fuse());
    let mut work = pin!(work);
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = &mut aside => {}
        }
    }
}

fn internal_error(error: String) -> TaskError {
    tracing::error!(error, "a task failed inside sconce");
    TaskError::new(TaskErrorKind::Internal, error)
}
