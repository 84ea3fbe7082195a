//! One worker process of a slot, from its spawn to its end: reads its events, checks its time limits, ends it step by
//! step. Owns the process, its monitor, and the current step in ending it.

use std::io;
use std::ops::ControlFlow;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::{Duration, Instant, SystemTime};

use nix::sys::signal::Signal;
use tokio::sync::oneshot;
use tokio::time::sleep_until;

use super::LauncherContext;
use super::child::{ChildEvent, WorkerProcess};
use super::device_health::DeviceWatch;
use super::gpus::device_fault::DeviceFault;
use super::logs::forward_line;
use super::oom;
use super::order::{Done, Outcome};
use super::termination::Step;
use super::worker_monitor::{WorkerExit, WorkerMonitor};
use crate::config::Assignment;
use crate::protocol::control::{Cancellation, Command, CrashRecord, Event, decode};
use crate::shutdown::{Exit, Phase};

/// A killed worker that has not ended after this time is killed again.
const KILL_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// Settings that orders have changed, and that a new worker gets in addition to its assignment.
#[derive(Clone, Debug, Default)]
pub(super) struct Overrides {
    pub(super) paused: bool,
    pub(super) log_filter: Option<String>,
}

/// Why a worker was not started.
#[derive(Debug, thiserror::Error)]
pub(super) enum SpawnError {
    /// The program cannot be started.
    #[error("cannot spawn {program}: {error}")]
    Program { program: String, error: io::Error },
    /// Its device has failed.
    #[error("the device is out of order: {}", .0.message)]
    Device(DeviceFault),
}

/// One worker process and the current step in ending it.
pub(super) struct WorkerHandle {
    process: WorkerProcess,
    pub(super) monitor: WorkerMonitor,
    step: Step,
    /// When a stuck worker is killed, or killed again if it has not ended by then.
    kill_at: Option<Instant>,
    device_watch: DeviceWatch,
    pub(super) assignment: Assignment,
    /// Cancellations that were sent to the worker and not answered yet, with the channels for their outcomes. Bound:
    /// only operators' cancellations are kept, and each new one removes those for which nobody waits any more.
    cancelling: Vec<(Cancellation, oneshot::Sender<Outcome>)>,
    /// [`oom::kills`] at its start.
    oom_kills: Option<u64>,
}

pub(super) enum WorkerEvent {
    Child(ChildEvent),
    /// The next step in ending it is due.
    Step,
    /// It has exceeded a time limit, or the kill that follows is due.
    Overdue,
    /// Its device has failed.
    DeviceFailed(DeviceFault),
    /// It is not possible to wait for the process any more.
    Lost(io::Error),
}

impl WorkerHandle {
    /// Spawns a worker, and sends it its assignment and the overrides. `is_successor`: the slot has another worker,
    /// which continues to run.
    ///
    /// # Errors
    /// The program cannot be started, or its device has failed.
    pub(super) async fn spawn(
        context: &LauncherContext,
        assignment: Assignment,
        crash_records: Vec<CrashRecord>,
        overrides: &Overrides,
        is_successor: bool,
    ) -> Result<Self, SpawnError> {
        context.device_health.start_watching(&assignment.device);
        // Subscribes before the driver's state is read, so that no later fault is missed.
        let device_watch = context.device_health.device_watch(&assignment.device);
        if let Some(device_fault) = context.device_health.blocking_fault(&assignment.device) {
            return Err(SpawnError::Device(device_fault));
        }
        let sharers = context.board.slots_on(&assignment.device) + usize::from(is_successor);
        let broker_reached = context.has_reached(&assignment.broker);
        let sent = Assignment { sharers, broker_reached, ..assignment.clone() };
        let withdrawn = context.withdrawals.current(SystemTime::now());
        let spawned = WorkerProcess::spawn(
            &context.program,
            &context.guard,
            &sent,
            crash_records,
            withdrawn,
            overrides.paused,
        )
        .await;
        let mut process = spawned.map_err(|error| {
            let program = context.program.display().to_string();
            SpawnError::Program { program, error }
        })?;
        if let Some(filter) = &overrides.log_filter {
            process.send(&Command::LogLevel { filter: filter.clone() }).await;
        }
        tracing::info!(
            slot = assignment.slot,
            pid = process.pid(),
            device = assignment.device,
            "worker spawned"
        );
        let (monitor, step) = (WorkerMonitor::new(None), Step::Drain);
        Ok(Self {
            process,
            monitor,
            step,
            kill_at: None,
            device_watch,
            assignment,
            cancelling: Vec::new(),
            oom_kills: oom::kills(),
        })
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.process.pid()
    }

    /// Whether its end has been requested.
    pub(super) fn is_ending(&self) -> bool {
        self.step.has_begun()
    }

    pub(super) async fn send(&mut self, command: &Command) {
        self.process.send(command).await;
    }

    /// Tells it to cancel a task. The answer is sent when the worker has reported the result.
    pub(super) async fn cancel(&mut self, cancellation: Cancellation, answer: oneshot::Sender<Outcome>) {
        self.cancelling.retain(|(_, answer)| !answer.is_closed());
        self.cancelling.push((cancellation.clone(), answer));
        self.send(&Command::Cancel(cancellation)).await;
    }

    /// Tells it to finish its tasks and to end, within the grace.
    pub(super) async fn finish(&mut self, grace: Duration) {
        self.step.finish(&mut self.process, grace).await;
    }

    /// The next event of this worker. Safe to cancel.
    pub(super) async fn next(&mut self, context: &LauncherContext) -> WorkerEvent {
        let deadline = self.kill_at.or_else(|| self.monitor.deadline(&self.assignment).map(|it| it.at));
        tokio::select! {
            event = self.process.next() => match event {
                Ok(event) => WorkerEvent::Child(event),
                Err(error) => WorkerEvent::Lost(error),
            },
            () = self.step.due(&context.stop) => WorkerEvent::Step,
            device_fault = self.device_watch.failure() => WorkerEvent::DeviceFailed(device_fault),
            () = sleep_until(deadline.unwrap_or_else(Instant::now).into()), if deadline.is_some() => WorkerEvent::Overdue,
        }
    }

    /// Handles an event. Breaks if the worker has ended, with its exit status if that is known.
    pub(super) async fn handle(
        &mut self,
        event: WorkerEvent,
        context: &LauncherContext,
    ) -> ControlFlow<Option<ExitStatus>> {
        let grace = context.policy.borrow().shutdown_grace;
        match event {
            WorkerEvent::Child(ChildEvent::EventLine(line)) => self.handle_event(&line, context),
            WorkerEvent::Child(ChildEvent::LogLine(line)) => self.monitor.log_tail.push(&forward_line(
                &self.assignment.slot,
                &line,
                context.raw_lines,
                &context.logged,
            )),
            WorkerEvent::Child(ChildEvent::Ended(status)) => return ControlFlow::Break(Some(status)),
            WorkerEvent::Step => {
                let drain = self.assignment.pool.drain;
                self.step = self.step.carry_out(&mut self.process, grace, drain).await;
            }
            WorkerEvent::Overdue => self.handle_overdue(context),
            WorkerEvent::DeviceFailed(device_fault) => {
                self.monitor.device_failed(device_fault, context, &self.assignment.slot);
                self.kill();
            }
            WorkerEvent::Lost(error) => {
                tracing::error!(slot = self.assignment.slot, %error, "cannot watch the worker any more");
                return ControlFlow::Break(None);
            }
        }
        ControlFlow::Continue(())
    }

    fn handle_event(&mut self, line: &str, context: &LauncherContext) {
        let Some(event) = decode_and_log(&self.assignment.slot, line) else { return };
        if let Event::Cancelled { cancellation, tasks } = &event
            && let Some(index) = self.cancelling.iter().position(|(requested, _)| requested == cancellation)
        {
            let (_, answer) = self.cancelling.remove(index);
            let _ = answer.send(Ok(Done::cancelled(*tasks)));
        }
        if self.monitor.handle_event(event, context, &self.assignment).is_err() {
            self.process.kill();
        }
        if self.kill_at.is_some() && self.monitor.clear_stuck_if_recovered(&self.assignment, context) {
            self.kill_at = None;
        }
    }

    /// Handles an exceeded time limit. The first call logs it, and the second kills the worker. Between the two calls
    /// the worker may recover.
    fn handle_overdue(&mut self, context: &LauncherContext) {
        if self.kill_at.is_none() {
            let Some(deadline) = self.monitor.deadline(&self.assignment) else { return };
            self.kill_at = Some(self.monitor.mark_stuck(deadline.fault, context, &self.assignment.slot));
        } else {
            self.kill();
        }
    }

    fn kill(&mut self) {
        self.process.kill();
        self.kill_at = Some(Instant::now() + KILL_AGAIN_AFTER);
    }

    /// Judges the end of the worker. `status`: none if it is unknown.
    pub(super) fn worker_exit(mut self, status: Option<ExitStatus>, context: &LauncherContext) -> WorkerExit {
        self.monitor.circumstances.is_forced =
            self.step.is_forced() || context.stop.phase() >= Phase::Returning;
        let is_killed = status.and_then(|it| it.signal()) == Some(Signal::SIGKILL as i32);
        if is_killed && !self.process.was_killed_here() {
            self.monitor.circumstances.kill_hint = Some(oom::hint(self.oom_kills, oom::kills()));
        }
        self.monitor.end(status, context, &self.assignment)
    }
}

/// Decodes an event, and logs it.
fn decode_and_log(slot: &str, line: &str) -> Option<Event> {
    let event = decode::<Event>(line);
    match &event {
        Ok(Event::Ready { device, dtype, load_ms, serves, assumptions }) => {
            let serves = serves.join(" ");
            tracing::info!(slot, device, dtype, serves, load_ms, "worker ready");
            for assumed in assumptions {
                tracing::warn!(slot, assumed, "the model's files do not tell this");
            }
        }
        Ok(Event::Isolated { tasks, .. } | Event::Forward { tasks } | Event::Preprocessing { tasks }) => {
            tracing::trace!(
                slot,
                tasks = tasks.len(),
                "the worker reports its preprocessing, computing or isolated tasks"
            );
        }
        Ok(Event::Paused) => tracing::info!(slot, "worker paused"),
        Ok(Event::Draining { cause }) => tracing::info!(slot, cause, "worker draining"),
        // The slot's log line about what it does next also has the cause.
        Ok(Event::Stopped { cause, exit: Some(exit), .. })
            if Exit::from_code(*exit).is_some_and(Exit::is_load_failure) =>
        {
            tracing::debug!(slot, cause, "worker stopped");
        }
        Ok(Event::Stopped { cause, .. }) => tracing::info!(slot, cause, "worker stopped"),
        // The fault that `Unfit` reports is in the worker's own log, and in the reason for its end.
        Ok(
            Event::Loading | Event::Serving | Event::Stats(_) | Event::Cancelled { .. } | Event::Unfit { .. },
        ) => {}
        Err(error) => tracing::warn!(slot, %error, "unreadable event"),
    }
    event.ok()
}
