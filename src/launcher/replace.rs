//! Replaces a running worker by a new one, for new settings or because the old one is due for recycling. The new worker
//! is ready before the old one drains; with `launcher.replace = "in_turn"`, the old one drains first. If the
//! new one never becomes ready, the old settings stay in force. Decides when a worker is replaced, and drains the old
//! one.

use std::time::{Duration, Instant};

use tokio::sync::OwnedSemaphorePermit;

use super::Launch;
use super::restart::RestartReason;
use super::slot_state::{NextAction, Probation, Replacement, Slot, Successor};
use super::worker_handle::{WorkerEvent, WorkerHandle};
use super::worker_monitor::WorkerExit;
use crate::config::{Assignment, Replace};
use crate::protocol::admin::State;
use crate::protocol::control::BatchChange;

/// The wait before a failed recycling of a worker is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(300);

/// The next event of the successor; never, if there is none. Safe to cancel.
pub(super) async fn next_of(successor: &mut Option<Successor>, launch: &Launch) -> WorkerEvent {
    match successor {
        Some(next) => next.running.next(launch).await,
        None => std::future::pending().await,
    }
}

impl Slot {
    /// The replacement to make now, if the current worker is due for recycling and no other slot is replacing its worker.
    pub(super) fn due_replacement(
        &mut self,
        current: &WorkerHandle,
        has_successor: bool,
    ) -> Option<Replacement> {
        let too_soon = self.next_replacement.is_some_and(|at| Instant::now() < at);
        if has_successor || current.is_ending() || self.overrides.paused || too_soon {
            return None;
        }
        let message = current.monitor.recycle_reason(&self.launch)?;
        let permit = self.launch.turn.clone().try_acquire_owned().ok()?;
        tracing::info!(slot = self.assignment.slot, reason = message, "the worker will be replaced");
        Some(Replacement { reason: RestartReason::Recycled, permit, answer: None })
    }

    /// Replaces the running worker by one with `assignment`, in the order that `launcher.replace` sets.
    pub(super) async fn replace(
        &mut self,
        assignment: Assignment,
        replacement: Replacement,
        current: &mut WorkerHandle,
        successor: &mut Option<Successor>,
        then: &mut NextAction,
    ) {
        let (order, grace) = {
            let policy = self.launch.policy.borrow();
            (policy.replace, policy.shutdown_grace)
        };
        if order == Replace::Overlap {
            return self.prepare_successor(assignment, replacement, successor).await;
        }
        self.start_probation(assignment, replacement);
        *then = NextAction::Start;
        current.finish(grace).await;
        self.show(State::Draining);
    }

    /// Gives `assignment` to the next worker, on probation. If that worker never becomes ready, the one after it gets the
    /// current assignment again.
    pub(super) fn start_probation(&mut self, assignment: Assignment, replacement: Replacement) {
        let before = self.assignment.clone();
        if assignment != before {
            self.set_assignment(assignment);
        }
        self.probation = Some(Probation { before, replacement });
    }

    /// Ends the probation once the current worker is ready: counts the restart, and reports success.
    pub(super) fn pass_probation(&mut self, current: &WorkerHandle) {
        if current.monitor.ready.is_none() || current.is_ending() {
            return;
        }
        if let Some(Probation { replacement, .. }) = self.probation.take() {
            self.count_restart(replacement.reason);
            replacement.report(Ok(()));
        }
    }

    /// If the ended worker was on probation and never became ready, restores the previous settings. Returns what
    /// follows the end; `then` is what would follow without probation.
    pub(super) fn judge_probation(&mut self, then: NextAction, worker_exit: &WorkerExit) -> NextAction {
        if matches!(then, NextAction::Start) {
            return then;
        }
        let Some(Probation { before, replacement }) = self.probation.take() else { return then };
        if !matches!(then, NextAction::Judge) {
            return then;
        }
        if before != self.assignment {
            self.set_assignment(before);
        }
        let message = format!("the new worker ended before it was ready: {}", worker_exit.message);
        self.give_up_successor(replacement, &message);
        NextAction::Start
    }

    pub(super) async fn prepare_successor(
        &mut self,
        assignment: Assignment,
        replacement: Replacement,
        successor: &mut Option<Successor>,
    ) {
        let known = self.launch.deaths.known().borrow().clone();
        let mut overrides = self.overrides.clone();
        if assignment != self.assignment {
            overrides.batch = BatchChange::default();
        }
        match WorkerHandle::spawn(&self.launch, assignment, known, &overrides, true).await {
            Ok(mut running) => {
                running.monitor.on_probation = true;
                *successor = Some(Successor { running, replacement });
            }
            Err(refusal) => self.give_up_successor(replacement, &refusal.to_string()),
        }
    }

    /// Handles an event of the successor. Some: it is ready, and takes over.
    pub(super) async fn watch_successor(
        &mut self,
        successor: &mut Option<Successor>,
        event: WorkerEvent,
    ) -> Option<(WorkerHandle, OwnedSemaphorePermit)> {
        let mut next = successor.take()?;
        let launch = self.launch.clone();
        if let Some(status) = next.running.act(event, &launch).await {
            let worker_exit = next.running.worker_exit(status, &launch);
            self.give_up_successor(
                next.replacement,
                &format!("the new worker ended before it was ready: {}", worker_exit.message),
            );
            return None;
        }
        if next.running.monitor.ready.is_none() {
            *successor = Some(next);
            return None;
        }
        Some(self.install(next))
    }

    /// Lets the successor take over before it is ready, on probation, because the current worker has died.
    pub(super) fn promote_successor(&mut self, next: Successor, worker_exit: WorkerExit) -> WorkerHandle {
        let Successor { mut running, mut replacement } = next;
        tracing::warn!(slot = self.assignment.slot, "the worker died while its successor was starting");
        // The death and the replacement count as one restart, whose reason is the death.
        replacement.reason = worker_exit.reason;
        self.show_failure(State::Failed, &worker_exit.message);
        running.monitor.inherit(worker_exit.suspects);
        self.start_probation(running.assignment.clone(), replacement);
        self.show_worker(&mut running);
        running
    }

    fn install(&mut self, next: Successor) -> (WorkerHandle, OwnedSemaphorePermit) {
        let Successor { mut running, replacement } = next;
        tracing::info!(
            slot = self.assignment.slot,
            reason = replacement.reason.as_str(),
            "a new worker takes over"
        );
        self.count_restart(replacement.reason);
        if running.assignment != self.assignment {
            self.set_assignment(running.assignment.clone());
        }
        self.show_worker(&mut running);
        if let Some(answer) = replacement.answer {
            let _ = answer.send(Ok(()));
        }
        (running, replacement.permit)
    }

    fn give_up_successor(&mut self, replacement: Replacement, message: &str) {
        tracing::error!(
            slot = self.assignment.slot,
            reason = replacement.reason.as_str(),
            error = message,
            "the worker cannot be replaced; the old settings stay"
        );
        self.next_replacement = Some(Instant::now() + RETRY_AFTER);
        replacement.report(Err(message.to_owned()));
    }

    /// Lets a replaced worker finish its tasks while its successor runs.
    pub(super) async fn drain_old(&mut self, mut old: WorkerHandle, permit: OwnedSemaphorePermit) {
        let grace = self.launch.policy.borrow().shutdown_grace;
        old.shown = false;
        old.finish(grace).await;
        let launch = self.launch.clone();
        self.draining.push(Box::pin(async move {
            let status = loop {
                let event = old.next(&launch).await;
                if let Some(status) = old.act(event, &launch).await {
                    break status;
                }
            };
            let exit = old.worker_exit(status, &launch).death.exit;
            drop(permit);
            exit
        }));
        if self.overrides.paused {
            self.show(State::Paused);
        }
    }
}
