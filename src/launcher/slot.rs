//! Keeps one slot filled: spawns its worker, watches it, restarts it by the policy, stops it with
//! the launcher. Owns the worker process and the count of quick failures.

use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use tokio::time::sleep_until;

use super::child::{Sign, Worker};
use super::deaths::Register;
use super::last_words::LogTail;
use super::logs::re_emit;
use super::restart::{Death, Verdict, judge};
use crate::config::{Assignment, Launcher};
use crate::protocol::control::{Command, Event, LastWords, TaskName, decode};
use crate::shutdown::{Exit, Phase, Stop};

/// Ids that a log line shows.
const SHOWN: usize = 8;
/// From the abort command to the kill.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How a slot ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotEnd {
    /// Its worker was stopped by a sentinel.
    StoppedOnRequest,
    /// It drained with the launcher.
    Drained,
    /// It was aborted or killed at the launcher's stop.
    Aborted,
    /// It failed too often.
    GivenUp(Exit),
}

/// A slot, with all that it needs of the launcher.
pub(super) struct Slot<'a> {
    pub(super) program: &'a Path,
    pub(super) assignment: &'a Assignment,
    pub(super) policy: &'a Launcher,
    pub(super) stop: &'a Stop,
    pub(super) deaths: &'a Register,
}

/// One worker's life.
struct Life {
    death: Death,
    /// The slot's end, when the launcher's stop ended this life.
    end: Option<SlotEnd>,
    /// A task was found to be poison by it.
    found_poison: bool,
    accused: Option<Accused>,
}

/// The tasks that a worker had when it died. After a fault of its device they are blamed once the
/// next worker has found the device well; otherwise the device was to blame.
struct Accused {
    tasks: Vec<TaskName>,
    /// There was but one, and no other on any way.
    alone: bool,
    last: LastWords,
}

impl Slot<'_> {
    /// Keeps the slot filled until its end.
    pub(super) async fn keep(self) -> SlotEnd {
        let (slot, policy) = (self.assignment.slot.as_str(), self.policy);
        let (mut quick_failures, mut found_in_a_row) = (0, 0);
        let mut accused = None;
        while self.stop.phase() < Phase::Returning {
            let life = self.live(accused.take()).await;
            if let Some(end) = life.end {
                return end;
            }
            accused = life.accused;
            if !life.death.is_quick_failure(policy) {
                (quick_failures, found_in_a_row) = (0, 0);
            } else if life.found_poison && found_in_a_row < policy.max_quick_failures {
                // The failures had a cause, which is out of the way. Not without end: where every
                // task seems to be poison, it is the slot that is broken, and it must not drain the
                // queue.
                (quick_failures, found_in_a_row) = (0, found_in_a_row + 1);
            } else {
                quick_failures += 1;
            }
            match judge(&life.death, quick_failures, policy, rand::random()) {
                Verdict::StoppedOnRequest => {
                    tracing::info!(slot, "stopped on request");
                    return SlotEnd::StoppedOnRequest;
                }
                Verdict::GiveUp(exit) => {
                    tracing::error!(slot, exit = exit.code(), quick_failures, "slot given up");
                    return SlotEnd::GivenUp(exit);
                }
                Verdict::Restart(delay) => {
                    tracing::warn!(slot, delay_ms = delay.as_millis() as u64, "starting the worker again");
                    tokio::select! {
                        () = tokio::time::sleep(delay) => {}
                        () = self.stop.reached(Phase::Returning) => {}
                    }
                }
            }
        }
        SlotEnd::Drained
    }

    /// Starts a worker and watches it to its end.
    async fn live(&self, accused: Option<Accused>) -> Life {
        let slot = self.assignment.slot.as_str();
        let mut known = self.deaths.known();
        let told_of = known.borrow_and_update().clone();
        let mut life = Sight::new(accused);
        let mut worker = match Worker::spawn(self.program, self.assignment, told_of).await {
            Ok(worker) => worker,
            Err(error) => {
                tracing::error!(slot, program = %self.program.display(), %error, "cannot spawn a worker");
                return Life { death: life.death, end: None, found_poison: false, accused: life.accused };
            }
        };
        tracing::info!(slot, pid = worker.pid(), device = self.assignment.device, "worker spawned");
        let mut next = Step::Drain;
        let status = loop {
            tokio::select! {
                sign = worker.next() => match sign {
                    Ok(Sign::Event(line)) => {
                        if life.hear(self, note(slot, &line)).is_err() {
                            worker.kill();
                        }
                    }
                    Ok(Sign::Log(line)) => life.log.push(&re_emit(slot, &line)),
                    Ok(Sign::Ended(status)) => break Some(status),
                    Err(error) => {
                        tracing::error!(slot, %error, "lost sight of the worker");
                        break None;
                    }
                },
                Ok(()) = known.changed() => {
                    let tasks = known.borrow_and_update().clone();
                    worker.tell(&Command::Deaths { tasks }).await;
                }
                () = next.is_due(self.stop) => next = next.take(&mut worker, self.policy.shutdown_grace).await,
            }
        };
        life.end(self, status, next != Step::Drain)
    }

    /// A worker died of one of these tasks. True: one of them is known as poison now.
    fn blame(&self, Accused { tasks, alone, last }: &Accused) -> bool {
        let ids: Vec<&str> = tasks.iter().take(SHOWN).map(|task| task.id.as_str()).collect();
        let slot = &self.assignment.slot;
        tracing::warn!(
            slot,
            tasks = tasks.len(),
            alone,
            ?ids,
            exit = last.exit,
            "at its end it had these tasks"
        );
        self.deaths.died(tasks, *alone, last)
    }
}

/// What is seen of one worker.
struct Sight {
    ready: Option<Instant>,
    death: Death,
    found_poison: bool,
    accused: Option<Accused>,
    /// In the forward pass, by its last word.
    on_device: Vec<TaskName>,
    /// In quarantine.
    alone: Option<TaskName>,
    /// It was killed for the device that it holds.
    wrong_device: bool,
    log: LogTail,
}

/// A worker reported another device than its own.
struct WrongDevice;

impl Sight {
    fn new(accused: Option<Accused>) -> Self {
        let death = Death { exit: None, was_ready: false, lived: Duration::ZERO, worked: false };
        let (on_device, alone, log) = (Vec::new(), None, LogTail::default());
        Self { ready: None, death, found_poison: false, accused, on_device, alone, wrong_device: false, log }
    }

    /// Fails when the worker holds a device that is not its own.
    fn hear(&mut self, slot: &Slot<'_>, event: Option<Event>) -> Result<(), WrongDevice> {
        match event {
            Some(Event::Ready { device, .. }) => {
                let own = &slot.assignment.device;
                if device != *own {
                    tracing::error!(slot = slot.assignment.slot, device, own, "not its device; killing it");
                    self.wrong_device = true;
                    return Err(WrongDevice);
                }
                self.death.was_ready = true;
                self.ready = Some(Instant::now());
                // The device is well: whatever was on it when it failed is to blame.
                self.found_poison |= self.accused.take().is_some_and(|it| slot.blame(&it));
            }
            Some(Event::Alone { task }) => {
                if let Some(survivor) = std::mem::replace(&mut self.alone, task) {
                    slot.deaths.survived(&survivor);
                }
            }
            Some(Event::Forward { tasks }) => self.on_device = tasks,
            Some(Event::Stats(stats)) => self.death.worked |= stats.batches > 0,
            _ => {}
        }
        Ok(())
    }

    /// The worker has ended; `asked`: the launcher told it to.
    fn end(mut self, slot: &Slot<'_>, status: Option<ExitStatus>, asked: bool) -> Life {
        self.death.lived = self.ready.map_or(Duration::ZERO, |at| at.elapsed());
        self.death.exit = status.and_then(|status| status.code()).and_then(Exit::from_code);
        if self.wrong_device {
            self.death.exit = Some(Exit::DeviceFailed);
        }
        log_death(&slot.assignment.slot, status, &self.death);
        let end = asked.then_some(match self.death.exit {
            Some(Exit::StoppedOnRequest) => SlotEnd::StoppedOnRequest,
            Some(Exit::Done) => SlotEnd::Drained,
            _ => SlotEnd::Aborted,
        });
        let mut tasks = self.on_device;
        let others = tasks.iter().any(|task| self.alone.as_ref() != Some(task));
        tasks.extend(self.alone.take().filter(|task| !tasks.contains(task)));
        if !asked && !self.wrong_device && !tasks.is_empty() {
            let accused = Accused { tasks, alone: !others, last: self.log.at_the_end(status) };
            match self.death.exit {
                None | Some(Exit::Internal) => self.found_poison |= slot.blame(&accused),
                Some(Exit::DeviceFailed) => self.accused = Some(accused),
                // A worker's own account of its end, and no task is to blame.
                Some(_) => {}
            }
        }
        Life { death: self.death, end, found_poison: self.found_poison, accused: self.accused }
    }
}

/// What is done next to end a worker with its launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Tell it to drain, when the launcher's stop says so.
    Drain,
    /// Tell it to abort: when the grace is over, or the stop is pressed.
    Abort(Instant),
    /// Kill it, if it has not ended by then.
    Kill(Instant),
    /// Wait for its end.
    Wait,
}

impl Step {
    async fn is_due(self, stop: &Stop) {
        match self {
            Step::Drain => stop.reached(Phase::Returning).await,
            Step::Abort(deadline) => tokio::select! {
                () = sleep_until(deadline.into()) => {}
                () = stop.reached(Phase::Aborting) => {}
            },
            Step::Kill(deadline) => sleep_until(deadline.into()).await,
            Step::Wait => std::future::pending().await,
        }
    }

    /// Does it; returns the next.
    async fn take(self, worker: &mut Worker, grace: Duration) -> Step {
        match self {
            Step::Drain => {
                worker.tell(&Command::Drain).await;
                Step::Abort(Instant::now() + grace)
            }
            Step::Abort(_) => {
                worker.tell(&Command::Abort).await;
                Step::Kill(Instant::now() + LAST_WORDS)
            }
            Step::Kill(_) | Step::Wait => {
                worker.kill();
                Step::Wait
            }
        }
    }
}

/// Reads an event, and logs it.
fn note(slot: &str, line: &str) -> Option<Event> {
    let event = decode::<Event>(line);
    match &event {
        Ok(Event::Ready { device, load_ms }) => tracing::info!(slot, device, load_ms, "worker ready"),
        Ok(Event::Alone { task }) => {
            tracing::debug!(slot, task = task.as_ref().map(|task| &task.id), "working on one task alone");
        }
        Ok(Event::Forward { tasks }) => tracing::trace!(slot, tasks = tasks.len(), "forward pass"),
        Ok(Event::Loading) => tracing::debug!(slot, "worker loading"),
        Ok(Event::Draining { cause }) => tracing::info!(slot, cause, "worker draining"),
        Ok(Event::Stopped { cause }) => tracing::info!(slot, cause, "worker stopped"),
        Ok(Event::Stats(stats)) => tracing::info!(
            slot,
            succeeded = stats.succeeded,
            failed = stats.failed,
            retried = stats.retried,
            requeued = stats.requeued,
            batches = stats.batches,
            tokens = stats.tokens,
            busy_percent = 100 * stats.busy_ms / stats.span_ms.max(1),
            "work"
        ),
        Err(error) => tracing::warn!(slot, %error, "unreadable event"),
    }
    event.ok()
}

fn log_death(slot: &str, status: Option<ExitStatus>, death: &Death) {
    let lived_ms = death.lived.as_millis() as u64;
    let status = status.map_or_else(|| "unknown".into(), |status| status.to_string());
    match death.exit {
        Some(Exit::Done | Exit::StoppedOnRequest) => tracing::info!(slot, status, lived_ms, "worker ended"),
        _ => tracing::error!(slot, status, lived_ms, "worker died"),
    }
}
