//! What is known about one worker from its control lines, its log and its end: whether it is ready, which tasks are on
//! its device, whether it makes progress. Decides what its death means for its tasks. Owns the state of this one
//! process; the state of its slot is on the status board.

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use super::LauncherContext;
use super::fault::{Circumstances, Fault};
use super::gpus::device_fault::DeviceFault;
use super::logs::LogTail;
use super::restart::{Death, RestartReason};
use super::status_board::Entry;
use crate::config::Assignment;
use crate::protocol::admin::State;
use crate::protocol::control::{CrashTail, Event, TaskName};
use crate::protocol::shorten;
use crate::protocol::stats::Stats;
use crate::shutdown::Exit;

/// The maximum number of bytes that are kept of a worker's text about why it ends.
const CAUSE_BYTES: usize = 1_000;
/// The maximum number of task ids in a log line and on the board.
const MAX_SHOWN_TASKS: usize = 8;
/// The maximum time between two events of a healthy worker that is ready.
const MAX_SILENCE: Duration = Duration::from_secs(60);
/// How long a worker on probation may take to become ready.
const MAX_LOADING: Duration = Duration::from_secs(30 * 60);
/// The time from the detection of a stuck worker to its kill, in which probes and metrics show that it is stuck.
const KILL_DELAY: Duration = Duration::from_secs(10);

/// The tasks that a worker had when it died. If its device failed, they are blamed only if the next worker finds that
/// the device works.
#[derive(Debug)]
pub(super) struct SuspectTasks {
    tasks: Vec<TaskName>,
    /// Whether the worker had no other tasks.
    isolated: bool,
    /// How the worker ended, and the last lines of its log.
    tail: CrashTail,
}

impl SuspectTasks {
    /// Whether these are several isolated tasks, which are tried again in smaller groups.
    fn is_group(&self) -> bool {
        self.isolated && self.tasks.len() > 1
    }
}

/// What is known about one worker process.
pub(super) struct WorkerMonitor {
    /// When it reported `ready`.
    pub(super) ready_at: Option<Instant>,
    /// The number format of its weights, once it is ready.
    pub(super) dtype: String,
    /// What its model assumes.
    pub(super) assumptions: Vec<String>,
    death: Death,
    found_poison: bool,
    /// The tasks that may be to blame for a failure of the device: those of the previous worker until this one is
    /// ready, and at its own end perhaps this worker's tasks.
    suspects: Option<SuspectTasks>,
    /// The tasks of the current pass, by its last report.
    on_device: Vec<TaskName>,
    preprocessing: Vec<TaskName>,
    computing_since: Option<Instant>,
    /// The isolated tasks, which it works on apart from all others.
    isolated: Vec<TaskName>,
    /// When its last event arrived.
    last_event: Instant,
    /// What is known about its end apart from the exit status.
    pub(super) circumstances: Circumstances,
    announced: Option<AnnouncedEnd>,
    /// Work that has not been logged yet.
    unlogged: Stats,
    /// Whether it did some work in the period that was logged last.
    is_steady: bool,
    spawned_at: Instant,
    /// Whether it must prove new settings. If so, it has [`MAX_LOADING`] to become ready.
    pub(super) on_probation: bool,
    answered: u64,
    /// Its resident memory in bytes, in its first report.
    first_resident: Option<u64>,
    /// Its resident memory in bytes, in its latest report.
    resident: u64,
    pub(super) log_tail: LogTail,
    /// Whether the board shows this worker.
    pub(super) is_shown: bool,
}

/// What a worker has announced about its end.
struct AnnouncedEnd {
    exit: Exit,
    cause: String,
}

/// When a worker counts as stuck unless it makes progress before.
pub(super) struct Deadline {
    pub(super) at: Instant,
    /// The fault that it then has.
    pub(super) fault: Fault,
}

/// How a worker ended, and what that means.
pub(super) struct WorkerExit {
    pub(super) death: Death,
    /// Whether its death showed that a task is poison.
    pub(super) found_poison: bool,
    /// Whether it died with a group of suspects, which are tried again in smaller groups.
    pub(super) died_with_group: bool,
    pub(super) suspects: Option<SuspectTasks>,
    /// The reason for its end, for people.
    pub(super) message: String,
    /// The reason for its end, for counting.
    pub(super) reason: RestartReason,
}

impl WorkerMonitor {
    pub(super) fn new(suspects: Option<SuspectTasks>) -> Self {
        Self {
            ready_at: None,
            dtype: String::new(),
            assumptions: Vec::new(),
            death: Death::default(),
            found_poison: false,
            suspects,
            on_device: Vec::new(),
            preprocessing: Vec::new(),
            computing_since: None,
            isolated: Vec::new(),
            last_event: Instant::now(),
            circumstances: Circumstances::default(),
            announced: None,
            unlogged: Stats::default(),
            is_steady: false,
            spawned_at: Instant::now(),
            on_probation: false,
            answered: 0,
            first_resident: None,
            resident: 0,
            log_tail: LogTail::default(),
            is_shown: false,
        }
    }

    /// Takes over the suspects of the previous worker.
    pub(super) fn inherit(&mut self, suspects: Option<SuspectTasks>) {
        self.suspects = self.suspects.take().or(suspects);
    }

    /// Handles one of its events.
    ///
    /// # Errors
    /// The fault for which it must be killed.
    pub(super) fn handle_event(
        &mut self,
        event: Event,
        context: &LauncherContext,
        assignment: &Assignment,
    ) -> Result<(), Fault> {
        self.last_event = Instant::now();
        let slot = &assignment.slot;
        match &event {
            Event::Ready { device, dtype, assumptions, .. } => {
                let own = &assignment.device;
                if device != own {
                    tracing::error!(slot, device, own, "the worker reports another device; killing it");
                    self.circumstances.fault = Some(Fault::WrongDevice);
                    return Err(Fault::WrongDevice);
                }
                self.death.was_ready = true;
                self.ready_at = Some(Instant::now());
                self.dtype.clone_from(dtype);
                self.assumptions.clone_from(assumptions);
                // The device works, so a task that was on it when it failed is to blame.
                self.found_poison |= self.suspects.take().is_some_and(|it| blame(&it, context, slot));
            }
            Event::Isolated { tasks, through } => {
                through.iter().for_each(|survivor| context.crash_records.record_survival(survivor));
                self.isolated.clone_from(tasks);
            }
            Event::Forward { tasks } => {
                self.computing_since = (!tasks.is_empty()).then(Instant::now);
                self.on_device.clone_from(tasks);
            }
            Event::Preprocessing { tasks } => self.preprocessing.clone_from(tasks),
            Event::Stats(stats) => {
                self.add_stats(stats, slot);
                if stats.now.connected {
                    context.note_broker(&assignment.broker);
                }
            }
            Event::Stopped { exit, cause, is_lasting } => {
                self.death.is_lasting = *is_lasting;
                let announced = |exit| AnnouncedEnd { exit, cause: shorten(cause, CAUSE_BYTES) };
                self.announced = exit.and_then(Exit::from_code).map(announced);
            }
            Event::Unfit { why, message } => self.circumstances.unfit = Some((*why, message.clone())),
            _ => {}
        }
        context.board.change(slot, |entry| update_entry(entry, event, self.is_shown));
        Ok(())
    }

    /// Adds a report about work to the sums, and logs the work if that is due.
    fn add_stats(&mut self, stats: &Stats, slot: &str) {
        self.death.worked |= stats.inputs > 0;
        self.answered += stats.tasks();
        self.first_resident.get_or_insert(stats.now.resident);
        self.resident = stats.now.resident;
        self.unlogged.add(stats);
        log_work(&mut self.unlogged, &mut self.is_steady, slot);
    }

    /// The earliest of the worker's deadlines.
    pub(super) fn deadline(&self, assignment: &Assignment) -> Option<Deadline> {
        let computing = self.computing_since.map(|since| {
            let at = since + assignment.pool.batch.timeout;
            Deadline { at, fault: Fault::Stuck }
        });
        let silent =
            self.ready_at.map(|_| Deadline { at: self.last_event + MAX_SILENCE, fault: Fault::Silent });
        let loading = (self.on_probation && self.ready_at.is_none())
            .then(|| Deadline { at: self.spawned_at + MAX_LOADING, fault: Fault::Silent });
        computing.into_iter().chain(silent).chain(loading).min_by_key(|deadline| deadline.at)
    }

    /// Records that it has exceeded a time limit. Returns when to kill it unless it recovers.
    pub(super) fn mark_stuck(&mut self, fault: Fault, context: &LauncherContext, slot: &str) -> Instant {
        tracing::error!(slot, reason = fault.reason().as_str(), "the worker is stuck; it will be killed");
        self.circumstances.fault = Some(fault);
        if self.is_shown {
            context.board.change(slot, |entry| entry.stuck_since = Some(Instant::now()));
        }
        Instant::now() + KILL_DELAY
    }

    /// Records that the worker's device has failed, for which the worker is killed. The failure is recorded before the
    /// worker has ended, since a process that hangs in the driver may end much later.
    pub(super) fn device_failed(&mut self, device_fault: DeviceFault, context: &LauncherContext, slot: &str) {
        tracing::error!(
            slot,
            reason = device_fault.kind.reason().as_str(),
            fault = device_fault.message,
            "its device is out of order; killing the worker"
        );
        if self.is_shown {
            context
                .board
                .change(slot, |entry| entry.report.last_failure = Some(device_fault.message.clone()));
        }
        self.circumstances.fault = Some(Fault::Device(device_fault));
    }

    /// Whether a stuck worker makes progress again. If so, clears its fault.
    pub(super) fn clear_stuck_if_recovered(
        &mut self,
        assignment: &Assignment,
        context: &LauncherContext,
    ) -> bool {
        if self.circumstances.fault.as_ref().is_some_and(Fault::is_device_fault) {
            return false;
        }
        let makes_progress = self.deadline(assignment).is_none_or(|deadline| deadline.at > Instant::now());
        if makes_progress {
            tracing::warn!(slot = assignment.slot, "the worker makes progress again");
            self.circumstances.fault = None;
            if self.is_shown {
                context.board.change(&assignment.slot, |entry| entry.stuck_since = None);
            }
        }
        makes_progress
    }

    /// Why it is due for recycling (`launcher.recycle_…`), if it is.
    pub(super) fn recycle_reason(&self, context: &LauncherContext) -> Option<String> {
        let policy = context.policy.borrow();
        let ready_at = self.ready_at?;
        let growth = self.first_resident.map_or(0, |first| self.resident.saturating_sub(first));
        if policy.recycle_tasks.is_some_and(|limit| self.answered >= limit) {
            return Some(format!("it has answered {} tasks", self.answered));
        }
        if policy.recycle_age.is_some_and(|limit| ready_at.elapsed() >= limit) {
            return Some(format!("it has worked for {} s", ready_at.elapsed().as_secs()));
        }
        let is_too_large = policy.recycle_memory.is_some_and(|limit| growth >= limit);
        is_too_large.then(|| format!("its memory has grown by {} MiB", growth >> 20))
    }

    /// Judges the worker's end.
    pub(super) fn end(
        mut self,
        status: Option<ExitStatus>,
        context: &LauncherContext,
        assignment: &Assignment,
    ) -> WorkerExit {
        let slot = &assignment.slot;
        self.death.broker_reached = context.has_reached(&assignment.broker);
        self.death.has_loaded = context.board.read(|it| it.slots.get(slot).is_some_and(|it| it.was_ready));
        self.death.lived = self.ready_at.map_or(Duration::ZERO, |at| at.elapsed());
        self.death.exit = status.and_then(|status| status.code()).and_then(Exit::from_code);
        // A worker that announced a regular end has settled its work. If a library then crashes while the process
        // exits, that does not matter.
        let announced = self.announced.take();
        let settled = announced.as_ref().map(|announced| announced.exit);
        let settled = settled.filter(|exit| matches!(exit, Exit::Done | Exit::StoppedOnRequest));
        if let Some(exit) = settled.filter(|_| status.is_some_and(|status| status.code().is_none())) {
            let status = status.map(|status| status.to_string());
            tracing::warn!(slot, status, "the worker died after it had ended its work");
            self.death.exit = Some(exit);
        }
        let is_device_fault = self.circumstances.fault.as_ref().is_some_and(Fault::is_device_fault);
        if is_device_fault && !matches!(self.death.exit, Some(Exit::Done | Exit::StoppedOnRequest)) {
            self.death.exit = Some(Exit::DeviceFailed);
        }
        // Nothing is logged if no process was spawned because the device has failed. If the worker announced its exit,
        // the death is logged at the debug level, because the restart line reports the cause.
        let gives_reason =
            announced.as_ref().is_some_and(|announced| Some(announced.exit) == self.death.exit);
        if status.is_some() || !is_device_fault {
            log_death(slot, status, &self.death, gives_reason);
        }
        let (reason, message) = self.circumstances.reason(&self.death, status);
        let mut tasks = std::mem::take(&mut self.on_device);
        for task in std::mem::take(&mut self.preprocessing) {
            if !tasks.contains(&task) {
                tasks.push(task);
            }
        }
        let isolated = tasks.iter().all(|task| self.isolated.contains(task));
        for task in std::mem::take(&mut self.isolated) {
            if !tasks.contains(&task) {
                tasks.push(task);
            }
        }
        let tail = self.log_tail.into_crash_tail(status);
        let cause =
            announced.map(|announced| announced.cause).filter(|cause| gives_reason && !cause.is_empty());
        let message = message.or(cause).unwrap_or_else(|| tail.exit.clone());
        let mut died_with_group = false;
        if !self.circumstances.is_forced && !is_device_fault && !tasks.is_empty() {
            let suspects = SuspectTasks { tasks, isolated, tail };
            died_with_group = suspects.is_group();
            match self.death.exit {
                None | Some(Exit::Internal | Exit::ModelProcessFailed) => {
                    self.found_poison |= blame(&suspects, context, slot);
                }
                Some(Exit::DeviceFailed) => self.suspects = Some(suspects),
                // The exit code gives another reason, so no task is to blame.
                Some(_) => {}
            }
        }
        let Self { death, found_poison, suspects, .. } = self;
        WorkerExit { death, found_poison, died_with_group, suspects, message, reason }
    }
}

/// Records that a worker died with these tasks. Returns whether one of them has become poison.
fn blame(suspects: &SuspectTasks, context: &LauncherContext, slot: &str) -> bool {
    let SuspectTasks { tasks, isolated, tail } = suspects;
    let ids: Vec<&str> = tasks.iter().take(MAX_SHOWN_TASKS).map(|task| task.id.as_str()).collect();
    tracing::warn!(
        slot,
        tasks = tasks.len(),
        isolated,
        ?ids,
        exit = tail.exit,
        "the worker died with these tasks"
    );
    context.crash_records.record_death(tasks, *isolated, tail)
}

/// Writes an event to the board.
fn update_entry(entry: &mut Entry, event: Event, is_shown: bool) {
    if let Event::Stats(stats) = &event {
        let mut stats = stats.clone();
        if let Some(sums) = &mut entry.report.stats {
            // Current values are those of the worker that the board shows.
            if !is_shown {
                stats.now = sums.now.clone();
            }
            sums.add(&stats);
        }
    }
    if !is_shown {
        return;
    }
    match event {
        Event::Loading => entry.set_state(State::Loading),
        Event::Ready { dtype, assumptions, .. } => {
            entry.mark_ready(&dtype, &assumptions);
            entry.set_state(State::Ready);
        }
        Event::Serving => entry.set_state(State::Ready),
        Event::Paused => entry.set_state(State::Paused),
        Event::Draining { .. } => entry.set_state(State::Draining),
        Event::Forward { tasks } => {
            let is_busy = !tasks.is_empty();
            entry.computing_since = is_busy.then(Instant::now);
            entry.report.in_flight = tasks.len() as u64;
            entry.report.active = tasks.into_iter().take(MAX_SHOWN_TASKS).map(|task| task.id).collect();
            if entry.report.state.is_serving() {
                entry.set_state(if is_busy { State::Busy } else { State::Ready });
            }
        }
        Event::Isolated { .. }
        | Event::Preprocessing { .. }
        | Event::Cancelled { .. }
        | Event::Stats(_)
        | Event::Unfit { .. }
        | Event::Stopped { .. } => {}
    }
}

/// The minimum period, in milliseconds, of log lines about work. It applies to the first work after a pause and to work
/// with failures.
const MIN_LOG_PERIOD_MS: u64 = 5_000;
/// The period, in milliseconds, of log lines about steady work without failures.
const STEADY_LOG_PERIOD_MS: u64 = 60_000;

/// Logs what a worker did, if a log line is due. `is_steady`: it also worked in the period that was logged last.
fn log_work(unlogged: &mut Stats, is_steady: &mut bool, slot: &str) {
    if unlogged.span_ms < MIN_LOG_PERIOD_MS {
        return;
    }
    let has_failures = unlogged.retried > 0 || unlogged.tasks() > unlogged.of_status("succeeded");
    if *is_steady && !has_failures && !unlogged.is_idle() && unlogged.span_ms < STEADY_LOG_PERIOD_MS {
        return;
    }
    let stats = std::mem::take(unlogged);
    *is_steady = !stats.is_idle();
    if stats.is_idle() {
        return;
    }
    tracing::info!(
        slot,
        succeeded = stats.of_status("succeeded"),
        rejected = stats.of_status("rejected"),
        failed = stats.of_status("failed"),
        expired = stats.of_status("expired"),
        cancelled = stats.of_status("cancelled"),
        retried = stats.retried,
        put_off = stats.put_off,
        requeued = stats.requeued,
        batches = stats.batch_seconds.count(),
        tokens = stats.tokens,
        busy_percent = stats.busy_percent(),
        "work"
    );
}

fn log_death(slot: &str, status: Option<ExitStatus>, death: &Death, gives_reason: bool) {
    let lived_ms = death.lived.as_millis() as u64;
    let status = status.map_or_else(|| "unknown".into(), |status| status.to_string());
    match death.exit {
        Some(Exit::Done | Exit::StoppedOnRequest) => tracing::info!(slot, status, lived_ms, "worker ended"),
        _ if gives_reason => tracing::debug!(slot, status, lived_ms, "worker died"),
        _ => tracing::error!(slot, status, lived_ms, "worker died"),
    }
}
