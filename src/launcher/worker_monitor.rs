//! What is seen of one worker by its control lines, its log and its end: whether it is ready, what is
//! on its device, whether it moves. Decides what its death means for the tasks it had. Owns what is
//! known of this one process; what is known of its slot stands on the board.

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use super::Launch;
use super::crash_tail::LogTail;
use super::fault::{Circumstances, Fault};
use super::gpus::device_fault::{DeviceFault, Kind};
use super::restart::Death;
use super::status_board::Entry;
use crate::config::Assignment;
use crate::protocol::admin::State;
use crate::protocol::control::{CrashTail, Event, TaskName};
use crate::protocol::stats::Stats;
use crate::shutdown::Exit;

/// Ids that a log line shows, and that the board holds.
const SHOWN: usize = 8;
/// A worker that is well says something more often than this, once it is ready.
const SILENCE: Duration = Duration::from_secs(60);
/// How long a worker on probation may load.
const LOADING: Duration = Duration::from_secs(30 * 60);
/// From the time that a worker is seen to be stuck to its end: those who watch are to see it too.
const STUCK: Duration = Duration::from_secs(10);

/// The tasks that a worker had when it died. After a fault of its device they are blamed once the
/// next worker has found the device well; otherwise the device was to blame.
#[derive(Debug)]
pub(super) struct SuspectTasks {
    tasks: Vec<TaskName>,
    /// They were all that the worker was working on.
    isolated: bool,
    last: CrashTail,
}

impl SuspectTasks {
    /// They were suspect before, and are fewer now: a step on the way to the one to blame.
    fn is_group(&self) -> bool {
        self.isolated && self.tasks.len() > 1
    }
}

/// What is known of one worker process.
pub(super) struct WorkerMonitor {
    ready: Option<Instant>,
    death: Death,
    found_poison: bool,
    suspects: Option<SuspectTasks>,
    /// In the forward pass, by its last word.
    on_device: Vec<TaskName>,
    computing_since: Option<Instant>,
    /// Worked on apart from all others.
    isolated: Vec<TaskName>,
    heard: Instant,
    /// Why it was killed, or said that it ends.
    why: Circumstances,
    /// The exit that it said it would give.
    announced: Option<Exit>,
    /// Work that the log has not told of yet.
    untold: Stats,
    born: Instant,
    /// It is to show that settings are good, and gets so long to be ready.
    on_probation: bool,
    /// Tasks it has answered.
    answered: u64,
    /// Bytes of memory when it was ready, and now.
    resident: Option<(u64, u64)>,
    pub(super) log: LogTail,
}

/// What remains of a worker.
pub(super) struct WorkerExit {
    pub(super) death: Death,
    /// A task was found to be poison by it.
    pub(super) found_poison: bool,
    /// It died of a group of suspects, which will come again in smaller ones.
    pub(super) of_group: bool,
    pub(super) suspects: Option<SuspectTasks>,
    /// Its end in words.
    pub(super) words: String,
    /// The same as a name, for counting.
    pub(super) reason: &'static str,
}

impl WorkerMonitor {
    pub(super) fn new(suspects: Option<SuspectTasks>) -> Self {
        let (exit, lived) = (None, Duration::ZERO);
        let death = Death { exit, was_ready: false, lived, worked: false, broker_reached: false };
        Self {
            ready: None,
            death,
            found_poison: false,
            suspects,
            on_device: Vec::new(),
            computing_since: None,
            isolated: Vec::new(),
            heard: Instant::now(),
            why: Circumstances::default(),
            announced: None,
            untold: Stats::default(),
            born: Instant::now(),
            on_probation: false,
            answered: 0,
            resident: None,
            log: LogTail::default(),
        }
    }

    /// It is one of a kind that may never get ready: it gets [`LOADING`] for that.
    pub(super) fn be_on_probation(&mut self) {
        self.on_probation = true;
    }

    /// It follows one that had these tasks.
    pub(super) fn inherit(&mut self, suspects: Option<SuspectTasks>) {
        self.suspects = self.suspects.take().or(suspects);
    }

    /// It has said `ready`.
    pub(super) fn is_ready(&self) -> bool {
        self.ready.is_some()
    }

    /// Takes in what it says. `shown`: the board shows this worker of the slot.
    ///
    /// # Errors
    /// It has to be ended for that.
    pub(super) fn hear(
        &mut self,
        event: Event,
        (launch, assignment): (&Launch, &Assignment),
        shown: bool,
    ) -> Result<(), Fault> {
        self.heard = Instant::now();
        let slot = &assignment.slot;
        match &event {
            Event::Ready { device, .. } => {
                let own = &assignment.device;
                if device != own {
                    tracing::error!(slot, device, own, "not its device; killing it");
                    self.why.fault = Some(Fault::WrongDevice);
                    return Err(Fault::WrongDevice);
                }
                self.death.was_ready = true;
                self.ready = Some(Instant::now());
                // The device is well: whatever was on it when it failed is to blame.
                self.found_poison |= self.suspects.take().is_some_and(|it| blame(&it, launch, slot));
            }
            Event::Isolated { tasks, through } => {
                through.iter().for_each(|survivor| launch.deaths.survived(survivor));
                self.isolated.clone_from(tasks);
            }
            Event::Forward { tasks } => {
                self.computing_since = (!tasks.is_empty()).then(Instant::now);
                self.on_device.clone_from(tasks);
            }
            Event::Stats(stats) => {
                self.account(stats, slot);
                if stats.now.connected {
                    launch.note_broker(&assignment.broker);
                }
            }
            Event::Stopped { exit, .. } => self.announced = exit.and_then(Exit::from_code),
            Event::Unfit { why, words } => self.why.unfit = Some((*why, words.clone())),
            _ => {}
        }
        launch.board.change(slot, |entry| post(entry, event, shown));
        Ok(())
    }

    fn account(&mut self, stats: &Stats, slot: &str) {
        self.death.worked |= stats.inputs > 0;
        self.answered += stats.tasks();
        let first = self.resident.map_or(stats.now.resident, |(first, _)| first);
        self.resident = Some((first, stats.now.resident));
        self.untold.add(stats);
        tell_of_work(&mut self.untold, slot);
    }

    /// When it counts as stuck unless it moves, with what it is then.
    pub(super) fn bound(&self, assignment: &Assignment) -> Option<(Instant, Fault)> {
        let computing =
            self.computing_since.map(|since| (since + assignment.pool.batch.timeout, Fault::Stuck));
        let silent = self.ready.map(|_| (self.heard + SILENCE, Fault::Silent));
        let loading =
            (self.on_probation && self.ready.is_none()).then(|| (self.born + LOADING, Fault::Silent));
        computing.into_iter().chain(silent).chain(loading).min_by_key(|(at, _)| *at)
    }

    /// It is past its bound. When to kill it for that, if nothing moves.
    pub(super) fn give_up(&mut self, fault: Fault, (launch, slot): (&Launch, &str), shown: bool) -> Instant {
        tracing::error!(slot, reason = fault.name(), "the worker is stuck; it will be killed");
        self.why.fault = Some(fault);
        if shown {
            launch.board.change(slot, |entry| entry.stuck_since = Some(Instant::now()));
        }
        Instant::now() + STUCK
    }

    /// It was not even started, since its device is out of order.
    pub(super) fn be_refused(&mut self, device_fault: DeviceFault) {
        self.why.fault = Some(Fault::Device(device_fault));
    }

    /// Its device is out of order: it is killed for that. One that the driver does not let go of may take
    /// its time to end, and those who watch are to see why.
    pub(super) fn device_failed(
        &mut self,
        device_fault: DeviceFault,
        (launch, slot): (&Launch, &str),
        shown: bool,
    ) {
        tracing::error!(
            slot,
            reason = device_fault.kind.name(),
            fault = device_fault.words,
            "its device is out of order; killing the worker"
        );
        if shown {
            launch.board.change(slot, |entry| entry.report.last_failure = Some(device_fault.words.clone()));
        }
        self.why.fault = Some(Fault::Device(device_fault));
    }

    /// Whether it moves again after all.
    pub(super) fn recovers(&mut self, assignment: &Assignment, launch: &Launch, shown: bool) -> bool {
        if self.why.fault.as_ref().is_some_and(Fault::is_the_devices) {
            return false;
        }
        let moves = self.bound(assignment).is_none_or(|(at, _)| at > Instant::now());
        if moves {
            tracing::warn!(slot = assignment.slot, "the worker moves again");
            self.why.fault = None;
            if shown {
                launch.board.change(&assignment.slot, |entry| entry.stuck_since = None);
            }
        }
        moves
    }

    /// Why it is time for a new worker in its place, if it is.
    pub(super) fn is_spent(&self, launch: &Launch) -> Option<String> {
        let policy = launch.policy.borrow();
        let since = self.ready?;
        let grown = self.resident.map_or(0, |(first, now)| now.saturating_sub(first));
        if policy.recycle_tasks.is_some_and(|most| self.answered >= most) {
            return Some(format!("it has answered {} tasks", self.answered));
        }
        if policy.recycle_age.is_some_and(|most| since.elapsed() >= most) {
            return Some(format!("it has worked for {} s", since.elapsed().as_secs()));
        }
        let memory = policy.recycle_memory.is_some_and(|most| grown >= most);
        memory.then(|| format!("its memory has grown by {} MiB", grown >> 20))
    }

    /// The worker has ended; `forced`: the launcher had stopped waiting for what it had, or told it to hand
    /// that back.
    pub(super) fn end(
        mut self,
        status: Option<ExitStatus>,
        forced: bool,
        (launch, assignment): (&Launch, &Assignment),
    ) -> WorkerExit {
        let slot = &assignment.slot;
        self.death.broker_reached = launch.has_reached(&assignment.broker);
        self.death.lived = self.ready.map_or(Duration::ZERO, |at| at.elapsed());
        self.death.exit = status.and_then(|status| status.code()).and_then(Exit::from_code);
        // Its work was done and settled: what a library did to it at its very end changes nothing of that.
        let settled = self.announced.filter(|exit| matches!(exit, Exit::Done | Exit::StoppedOnRequest));
        if let Some(exit) = settled.filter(|_| status.is_some_and(|status| status.code().is_none())) {
            tracing::warn!(slot, ?status, "the worker died after it had ended its work");
            self.death.exit = Some(exit);
        }
        let mut devices = self.why.fault.as_ref().is_some_and(Fault::is_the_devices);
        if devices && !matches!(self.death.exit, Some(Exit::Done | Exit::StoppedOnRequest)) {
            self.death.exit = Some(Exit::DeviceFailed);
        }
        // One that was not even started has not died.
        if status.is_some() || !devices {
            log_death(slot, status, &self.death);
        }
        let lately = launch.health.lately(&assignment.device);
        let (reason, words) = self.why.name(&self.death, status, lately.as_ref());
        // Memory that cannot be corrected is nobody's doing; other events may be a task's.
        devices |= reason == Kind::Ecc.name();
        let mut tasks = std::mem::take(&mut self.on_device);
        let isolated = tasks.iter().all(|task| self.isolated.contains(task));
        for task in std::mem::take(&mut self.isolated) {
            if !tasks.contains(&task) {
                tasks.push(task);
            }
        }
        let last = self.log.at_the_end(status);
        let words = words.unwrap_or_else(|| last.exit.clone());
        let mut of_group = false;
        if !forced && !devices && !tasks.is_empty() {
            let suspects = SuspectTasks { tasks, isolated, last };
            of_group = suspects.is_group();
            match self.death.exit {
                None | Some(Exit::Internal) => self.found_poison |= blame(&suspects, launch, slot),
                Some(Exit::DeviceFailed) => self.suspects = Some(suspects),
                // A worker's own account of its end, and no task is to blame.
                Some(_) => {}
            }
        }
        let Self { death, found_poison, suspects, .. } = self;
        WorkerExit { death, found_poison, of_group, suspects, words, reason }
    }
}

/// A worker died of one of these tasks. True: one of them is known as poison now.
fn blame(suspects: &SuspectTasks, launch: &Launch, slot: &str) -> bool {
    let SuspectTasks { tasks, isolated, last } = suspects;
    let ids: Vec<&str> = tasks.iter().take(SHOWN).map(|task| task.id.as_str()).collect();
    tracing::warn!(
        slot,
        tasks = tasks.len(),
        isolated,
        ?ids,
        exit = last.exit,
        "at its end it had these tasks"
    );
    launch.deaths.died(tasks, *isolated, last)
}

/// Writes what a worker says on the board.
fn post(entry: &mut Entry, event: Event, shown: bool) {
    if let Event::Stats(stats) = &event {
        let mut stats = stats.clone();
        if let Some(sums) = &mut entry.report.stats {
            if !shown {
                stats.now = sums.now.clone();
            }
            sums.add(&stats);
        }
    }
    if !shown {
        return;
    }
    match event {
        Event::Loading => entry.turn(State::Loading),
        Event::Ready { .. } => {
            entry.is_ready();
            entry.turn(State::Ready);
        }
        Event::Serving => entry.turn(State::Ready),
        Event::Paused => entry.turn(State::Paused),
        Event::Draining { .. } => entry.turn(State::Draining),
        Event::Forward { tasks } => {
            let busy = !tasks.is_empty();
            entry.computing_since = busy.then(Instant::now);
            entry.report.in_flight = tasks.len() as u64;
            entry.report.active = tasks.into_iter().take(SHOWN).map(|task| task.id).collect();
            if entry.report.state.works() {
                entry.turn(if busy { State::Busy } else { State::Ready });
            }
        }
        Event::Isolated { .. } | Event::Stats(_) | Event::Unfit { .. } | Event::Stopped { .. } => {}
    }
}

/// Milliseconds of work that one log line tells of, at least.
const WORTH_TELLING_MS: u64 = 5_000;

fn tell_of_work(untold: &mut Stats, slot: &str) {
    if untold.span_ms < WORTH_TELLING_MS {
        return;
    }
    let stats = std::mem::take(untold);
    if stats.is_idle() {
        return;
    }
    tracing::info!(
        slot,
        succeeded = stats.of_status("succeeded"),
        failed = stats.tasks() - stats.of_status("succeeded"),
        retried = stats.retried,
        requeued = stats.requeued,
        batches = stats.batch_seconds.count(),
        tokens = stats.tokens,
        busy_percent = stats.busy_percent(),
        "work"
    );
}

fn log_death(slot: &str, status: Option<ExitStatus>, death: &Death) {
    let lived_ms = death.lived.as_millis() as u64;
    let status = status.map_or_else(|| "unknown".into(), |status| status.to_string());
    match death.exit {
        Some(Exit::Done | Exit::StoppedOnRequest) => tracing::info!(slot, status, lived_ms, "worker ended"),
        _ => tracing::error!(slot, status, lived_ms, "worker died"),
    }
}
