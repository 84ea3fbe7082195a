//! Runs one task through its stages, in this order: isolation, refusal, a try of its reply queue, computation, settlement.
//! One future per task.
//!
//! | file | decides |
//! |---|---|
//! | `checks` | which tasks are refused before anything is computed |
//! | `files` | which files are fetched for a task |
//! | `preparation` | what a task waits for before its inputs are prepared, and on which thread they are |
//! | `computation` | what happens while the task's job is in the engine |
//! | `writing` | on which thread the reply and its parts are written |
//! | `expected` | whether the engine expects the task |

mod checks;
mod computation;
mod expected;
mod files;
mod preparation;
mod writing;

use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::cpu_pool::Pools;
use super::fair_turns::Turns;
use super::isolation::{CrashRecords, Isolation, Membership, suspicion};
use super::prefetch::SharedPrefetch;
use super::settle::{Accepted, Outcome, Parts, Settled, Settlement, Trial};
use super::{Reporter, Withdrawn, WorkerError};
use crate::batching::{Group, QueueShare};
use crate::engine::{Computed, Engine, TaskState, now};
use crate::fetch::Fetcher;
use crate::protocol::reply::micros;
use crate::protocol::{Body, Sentinels, TaskError, TaskErrorKind, Timings};
use crate::telemetry::traces::Traces;

pub(super) use expected::Expected;

/// How long a redelivered task waits for the launcher's crash records: the launcher may learn of a worker's death later
/// than the broker does.
const CRASH_RECORDS_WAIT: Duration = Duration::from_millis(200);

/// The state that all task runs of a session share.
pub(super) struct Shared {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) pools: Pools,
    /// The share of each queue, by source.
    pub(super) shares: Vec<QueueShare>,
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
    /// By source.
    pub(super) prefetch: Vec<SharedPrefetch>,
    pub(super) traces: Traces,
    pub(super) sentinels: Sentinels,
    pub(super) max_body: u64,
    /// The most deliveries of a task, if the broker counts them. The broker's own limit is one higher and only a
    /// backstop, because the producer learns nothing from it.
    pub(super) max_deliveries: i64,
}

/// One task on its way from its acceptance to its ack.
struct Run<'a> {
    shared: &'a Shared,
    accepted: Accepted,
    state: Arc<TaskState>,
    expected: Expected,
    /// Its membership in a group of isolated tasks, until it has survived its computation.
    membership: Option<Membership>,
    /// Set if the task is computed in order to try its reply queue, which accepted nothing before. Kept until the task is
    /// settled, when it is known whether the queue has accepted the reply.
    trial: Option<Trial<'a>>,
    timings: Timings,
}

impl Shared {
    /// Runs one task to its end.
    ///
    /// # Errors
    /// As [`Settlement::settle`].
    pub(super) async fn run(
        &self,
        accepted: Accepted,
        state: Arc<TaskState>,
        expected: Expected,
    ) -> Result<(), WorkerError> {
        let queue_us = micros(accepted.task.time_in_queue(SystemTime::now()));
        let timings = Timings { queue_us, ..Timings::default() };
        let (membership, trial) = (None, None);
        let mut run = Run { shared: self, accepted, state, expected, membership, trial, timings };
        run.isolate().await;
        let mut outcome = match run.refusal().or_else(|| run.try_reply_queue()) {
            Some(outcome) => outcome,
            None => run.compute().await,
        };
        while run.settle(outcome).await? == Settled::MustCompute {
            outcome = run.compute().await;
        }
        Ok(())
    }

    /// Settles a control message of an unknown type.
    ///
    /// # Errors
    /// As [`Settlement::settle`].
    pub(super) async fn refuse_control(&self, accepted: Accepted, kind: String) -> Result<(), WorkerError> {
        let outcome = Outcome::UnknownControl(kind);
        self.settlement.settle(&accepted, outcome, &Timings::default()).await.map(|_| ())
    }
}

impl Run<'_> {
    /// Decides whether a redelivered task must run apart from others, and if so waits until its group runs.
    async fn isolate(&mut self) {
        let Self { shared, accepted, state, .. } = self;
        if accepted.redeliveries == 0 {
            return;
        }
        self.expected.pause();
        tokio::time::sleep(CRASH_RECORDS_WAIT).await;
        let record = shared.crashes.get(&state.name.fingerprint);
        if let Some(suspicion) = suspicion(accepted.redeliveries, accepted.is_counted, record.as_ref()) {
            self.membership = shared.isolation.enter(state.name.clone(), suspicion).await;
        }
        // Read after the wait for a group: another worker may have died of the task meanwhile.
        accepted.deaths = shared.crashes.get(&state.name.fingerprint);
    }

    /// Returns the outcome of a task that is not computed now, because its reply queue accepts nothing.
    fn try_reply_queue(&mut self) -> Option<Outcome> {
        let shared = self.shared;
        match shared.settlement.admit(&self.accepted) {
            Ok(trial) => {
                self.trial = trial;
                None
            }
            Err(blocked) => Some(Outcome::ReplyQueueBlocked(blocked)),
        }
    }

    /// Computes the task. The parts of its reply that are under way are left with the accepted task.
    async fn compute(&mut self) -> Outcome {
        self.expected.resume();
        let (mut timings, mut parts) = (self.timings, None);
        let computed = tokio::select! {
            biased;
            computed = self.answer(&mut timings, &mut parts) => computed,
            error = self.wait_for_expiry() => Err(error.into()),
        };
        self.timings = timings;
        // Kept whatever the result is, so that no reply overtakes a part that is under way.
        self.accepted.parts = parts.map(Parts::finish);
        match computed {
            Ok(body) => Outcome::Answered(body),
            // A cancelled task is not put off.
            Err(Outcome::PutOff(waits_for)) => {
                self.state.cancellation().map_or(Outcome::PutOff(waits_for), Outcome::Failed)
            }
            Err(outcome) => outcome,
        }
    }

    /// Makes the task's answer. The parts of its reply that are under way are left in `parts`.
    async fn answer(&self, timings: &mut Timings, parts: &mut Option<Parts>) -> Result<Body, Outcome> {
        let accepted_at = now();
        self.check()?;
        let began = Instant::now();
        let fetched = self.fetch_files().await?;
        let effort = self.shared.engine.effort(&fetched.task.message);
        let job = self.preprocess(fetched, effort).await?;
        timings.prepare_us = micros(began.elapsed());
        self.check_time(job.estimate)?;
        let enqueued = now();
        let mut job = job.enqueue(self.state.clone(), self.group());
        // Only now, because an engine that waits for this task must find it in its queue.
        self.expected.pause();
        *parts = Parts::start(&self.shared.settlement, &self.accepted.task, &*job);
        let end = self.run_job(&mut *job, parts.as_mut()).await?;
        // Before the reply is written, so that the result is not lost if the worker ends.
        self.commit().await;
        record_computed(timings, end.computed, accepted_at, enqueued);
        if end.has_left {
            return Err(self.requester_left());
        }
        Ok(self.write_reply(job, effort, end.computed.failed, parts.as_mut()).await?)
    }

    /// Settles the task. The engine does not expect it meanwhile.
    ///
    /// # Errors
    /// As [`Settlement::settle`].
    async fn settle(&mut self, outcome: Outcome) -> Result<Settled, WorkerError> {
        self.expected.pause();
        let is_last = !matches!(outcome, Outcome::PutOff(_) | Outcome::ReplyQueueBlocked(_));
        if is_last && let Some(membership) = self.membership.take() {
            membership.record_survival();
        }
        self.commit().await;
        if is_last {
            self.accepted.traced.record_timings(&self.timings, self.accepted.attempt());
        }
        self.shared.settlement.settle(&self.accepted, outcome, &self.timings).await
    }

    /// Commits this worker to settle the task: it will not be handed back from here on. It may soon be in a retry queue,
    /// or answered. Never returns if it is being handed back already; the intake then ends the run.
    async fn commit(&self) {
        if !self.state.commit() {
            pending().await
        }
    }

    /// Returns the task's error if its deadline passes before it is on the device; the task is then not computed.
    /// Otherwise never returns. A task of sequences may have been answered in part, so the engine checks its deadline
    /// between two steps instead.
    async fn wait_for_expiry(&self) -> TaskError {
        let Some(deadline) = self.state.deadline.filter(|_| self.shared.engine.queue().sequences().is_none())
        else {
            return pending().await;
        };
        tokio::time::sleep_until(deadline.into()).await;
        match self.state.unwanted(now()) {
            Some(error) if self.state.claim() => error,
            _ => pending().await,
        }
    }

    /// Returns the task's isolated group, until the time of the group is over.
    fn group(&self) -> Option<Group> {
        self.membership.as_ref().and_then(Membership::group)
    }

    /// Whether the task waits for nothing that other tasks hold: turns, memory, the end of a group. They may hold it
    /// until this task has ended, so waiting would deadlock.
    fn is_isolated(&self) -> bool {
        self.group().is_some()
    }

    /// Waits for something that other tasks may hold. None: an isolated task does not wait for it, and does without.
    async fn unless_isolated<T>(&self, wait: impl Future<Output = T>) -> Option<T> {
        if self.is_isolated() { None } else { Some(wait.await) }
    }

    /// Does `work` of this task while no group of isolated tasks runs, unless the task is in a group itself.
    async fn without_groups<T>(&self, work: impl Future<Output = T>) -> T {
        let _guard = self.unless_isolated(self.shared.isolation.exclude_groups()).await;
        work.await
    }
}

/// Records how long a job has waited since it was enqueued, and how it was computed.
fn record_computed(timings: &mut Timings, computed: Computed, accepted_at: Instant, enqueued: Instant) {
    timings.wait_us =
        computed.started.map_or(0, |started| micros(started.saturating_duration_since(enqueued)));
    timings.compute_us = micros(computed.compute);
    timings.batch_size = computed.last.size as i64;
    timings.batch_tokens = computed.last.tokens as i64;
    if let Some(first) = computed.first_piece {
        timings.first_token_us = Some(micros(first.saturating_duration_since(accepted_at)));
        timings.answer_us = micros(now().saturating_duration_since(first));
    }
}

fn internal_error(error: String) -> TaskError {
    tracing::error!(error, "a task failed inside sconce");
    TaskError::new(TaskErrorKind::Internal, error)
}
