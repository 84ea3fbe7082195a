//! Replaces a running worker by a new one (its successor), for new settings or because the old one is due for
//! recycling. The new worker is ready before the old one drains; with `launcher.replace = "in_turn"`, the old one
//! drains first. If the new one never becomes ready, the old settings stay in force. Decides when a worker is replaced,
//! and drains the old one.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use tokio::sync::OwnedSemaphorePermit;

use super::LauncherContext;
use super::order::Replacement;
use super::restart::RestartReason;
use super::slot_state::{NextAction, Probation, Slot, Successor};
use super::worker_handle::{WorkerEvent, WorkerHandle};
use super::worker_monitor::WorkerExit;
use crate::config::{Assignment, Replace};
use crate::protocol::admin::State;

/// For this time after a failed replacement, the slot's worker is not recycled.
const RETRY_AFTER: Duration = Duration::from_secs(300);

/// The next event of the successor; never, if there is none. Safe to cancel.
pub(super) async fn successor_event(
    successor: &mut Option<Successor>,
    context: &LauncherContext,
) -> WorkerEvent {
    match successor {
        Some(successor) => successor.worker.next(context).await,
        None => std::future::pending().await,
    }
}

impl Slot {
    /// The replacement to make now, if the worker is due for recycling and no other slot is replacing its worker.
    pub(super) fn due_replacement(
        &mut self,
        current: &WorkerHandle,
        has_successor: bool,
    ) -> Option<Replacement> {
        let is_too_soon = self.next_replacement.is_some_and(|at| Instant::now() < at);
        if has_successor || current.is_ending() || self.overrides.paused || is_too_soon {
            return None;
        }
        let message = current.monitor.recycle_reason(&self.context)?;
        let permit = self.context.replacement_turn.clone().try_acquire_owned().ok()?;
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
        next_action: &mut NextAction,
    ) {
        let (order, grace) = {
            let policy = self.context.policy.borrow();
            (policy.replace, policy.shutdown_grace)
        };
        if order == Replace::Overlap {
            return self.prepare_successor(assignment, replacement, successor).await;
        }
        self.start_probation(assignment, replacement);
        *next_action = NextAction::Start;
        current.finish(grace).await;
        self.show(State::Draining);
    }

    /// Gives `assignment` to the next worker, on probation. If that worker never becomes ready, the one after it gets
    /// the current assignment again.
    pub(super) fn start_probation(&mut self, assignment: Assignment, replacement: Replacement) {
        let previous = self.assignment.clone();
        if assignment != previous {
            self.set_assignment(assignment);
        }
        self.probation = Some(Probation { previous, replacement });
    }

    /// Ends the probation once the current worker is ready: counts the restart, and reports success.
    pub(super) fn pass_probation(&mut self, current: &WorkerHandle) {
        if current.monitor.ready_at.is_none() || current.is_ending() {
            return;
        }
        if let Some(Probation { replacement, .. }) = self.probation.take() {
            self.count_restart(replacement.reason);
            replacement.report(Ok(()));
        }
    }

    /// If the ended worker was on probation and never became ready, restores the previous settings. Returns what the
    /// slot does next. `next_action` is what it would do without probation.
    pub(super) fn judge_probation(
        &mut self,
        next_action: NextAction,
        worker_exit: &WorkerExit,
    ) -> NextAction {
        if matches!(next_action, NextAction::Start) {
            return next_action;
        }
        let Some(Probation { previous, replacement }) = self.probation.take() else { return next_action };
        if !matches!(next_action, NextAction::Judge) {
            return next_action;
        }
        if previous != self.assignment {
            self.set_assignment(previous);
        }
        let message = format!("the new worker ended before it was ready: {}", worker_exit.message);
        self.give_up_successor(replacement, &message);
        NextAction::Start
    }

    /// Spawns a successor. The current worker continues until the successor is ready.
    pub(super) async fn prepare_successor(
        &mut self,
        assignment: Assignment,
        replacement: Replacement,
        successor: &mut Option<Successor>,
    ) {
        let crash_records = self.context.crash_records.subscribe().borrow().clone();
        match WorkerHandle::spawn(&self.context, assignment, crash_records, &self.overrides, true).await {
            Ok(mut worker) => {
                worker.monitor.on_probation = true;
                *successor = Some(Successor { worker, replacement });
            }
            Err(error) => self.give_up_successor(replacement, &error.to_string()),
        }
    }

    /// Handles an event of the successor. Some: it is ready and has taken over. The permit is for draining the old one.
    pub(super) async fn watch_successor(
        &mut self,
        successor: &mut Option<Successor>,
        event: WorkerEvent,
    ) -> Option<(WorkerHandle, OwnedSemaphorePermit)> {
        let mut next = successor.take()?;
        let context = self.context.clone();
        if let ControlFlow::Break(status) = next.worker.handle(event, &context).await {
            let worker_exit = next.worker.worker_exit(status, &context);
            self.give_up_successor(
                next.replacement,
                &format!("the new worker ended before it was ready: {}", worker_exit.message),
            );
            return None;
        }
        if next.worker.monitor.ready_at.is_none() {
            *successor = Some(next);
            return None;
        }
        Some(self.install(next))
    }

    /// Lets the successor take over before it is ready, on probation, because the current worker has died.
    pub(super) fn promote_successor(&mut self, next: Successor, worker_exit: WorkerExit) -> WorkerHandle {
        let Successor { mut worker, mut replacement } = next;
        tracing::warn!(slot = self.assignment.slot, "the worker died while its successor was starting");
        // The death and the replacement count as one restart, whose reason is the death.
        replacement.reason = worker_exit.reason;
        self.show_failure(State::Failed, &worker_exit.message);
        worker.monitor.inherit(worker_exit.suspects);
        self.start_probation(worker.assignment.clone(), replacement);
        self.show_worker(&mut worker);
        worker
    }

    /// Makes a successor that is ready the slot's worker.
    fn install(&mut self, next: Successor) -> (WorkerHandle, OwnedSemaphorePermit) {
        let Successor { mut worker, replacement } = next;
        tracing::info!(
            slot = self.assignment.slot,
            reason = replacement.reason.as_str(),
            "a new worker takes over"
        );
        self.count_restart(replacement.reason);
        if worker.assignment != self.assignment {
            self.set_assignment(worker.assignment.clone());
        }
        self.show_worker(&mut worker);
        if let Some(answer) = replacement.answer {
            let _ = answer.send(Ok(()));
        }
        (worker, replacement.permit)
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
        let grace = self.context.policy.borrow().shutdown_grace;
        old.monitor.is_shown = false;
        old.finish(grace).await;
        let context = self.context.clone();
        self.draining.push(Box::pin(async move {
            let status = loop {
                let event = old.next(&context).await;
                if let ControlFlow::Break(status) = old.handle(event, &context).await {
                    break status;
                }
            };
            let exit = old.worker_exit(status, &context).death.exit;
            drop(permit);
            exit
        }));
        if self.overrides.paused {
            self.show(State::Paused);
        }
    }
}
