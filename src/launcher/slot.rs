//! Keeps one slot filled: spawns its worker, restarts it by the policy, replaces it, carries out orders, and stops it
//! with the launcher. Owns the current worker, its successor, the replaced workers that still drain, and the count of
//! quick failures.

use std::ops::ControlFlow;
use std::time::{Duration, Instant, SystemTime};

use futures_util::StreamExt;

use super::fault::Fault;
use super::order::{Done, SlotCommand};
use super::replace::successor_event;
use super::restart::{RestartReason, Verdict, judge};
use super::slot_state::{NextAction, Slot, SlotEnd, Successor};
use super::status_board::Entry;
use super::worker_handle::{SpawnError, WorkerHandle};
use super::worker_monitor::{SuspectTasks, WorkerExit, WorkerMonitor};
use crate::protocol::admin::{ControlRequest, State};
use crate::protocol::control::Command;
use crate::shutdown::{Exit, Phase};

impl Slot {
    /// Runs the slot until it ends.
    pub(super) async fn run(mut self) -> SlotEnd {
        let mut suspects = None;
        let end = loop {
            if self.context.stop.phase() >= Phase::Returning {
                break SlotEnd::Drained;
            }
            let (worker_exit, next_action) = self.run_workers(suspects.take()).await;
            let mut next_action = self.judge_probation(next_action, &worker_exit);
            if let NextAction::Judge = next_action {
                next_action = self.judge(worker_exit, &mut suspects).await;
            }
            if let NextAction::Hold = next_action {
                self.show(State::Stopped);
                next_action = self.wait_without_worker(None).await;
            }
            if let NextAction::End(end) = next_action {
                self.show_end(end);
                break end;
            }
        };
        while self.draining.next().await.is_some() {}
        end
    }

    /// Decides what follows when a worker ends without an order.
    async fn judge(&mut self, worker_exit: WorkerExit, suspects: &mut Option<SuspectTasks>) -> NextAction {
        let policy = self.context.policy.borrow().clone();
        let (slot, death) = (self.assignment.slot.clone(), worker_exit.death);
        *suspects = worker_exit.suspects;
        if worker_exit.died_with_group {
            // The suspects are still being narrowed down. Only the last of these deaths, with one task alone, counts.
        } else if !death.is_quick_failure(&policy) {
            (self.quick_failures, self.poison_found_in_a_row) = (0, 0);
        } else if worker_exit.found_poison && self.poison_found_in_a_row < policy.max_quick_failures {
            // The task that caused the death was found, and will not run again. The number of such deaths in a row is
            // limited: if every task seems to be poison, the slot is broken, and must not dead-letter the whole queue.
            (self.quick_failures, self.poison_found_in_a_row) = (0, self.poison_found_in_a_row + 1);
        } else {
            self.quick_failures += 1;
        }
        // If a model cannot be loaded, all slots of its pool fail for the same reason, and most of them several times.
        let is_load_failure = death.exit.is_some_and(Exit::is_load_failure);
        let was_logged =
            is_load_failure && self.context.logged.check_and_record(&worker_exit.message, Instant::now());
        match judge(&death, self.quick_failures, &policy, rand::random()) {
            Verdict::StoppedOnRequest => {
                tracing::info!(slot, cause = worker_exit.message, "stopped on request");
                NextAction::End(SlotEnd::StoppedOnRequest)
            }
            Verdict::GiveUp(exit) => {
                let quick_failures = self.quick_failures;
                let (exit_code, error) = (exit.code(), &worker_exit.message);
                if was_logged {
                    tracing::error!(
                        slot,
                        exit = exit_code,
                        quick_failures,
                        "slot given up, for a reason that was logged before"
                    );
                } else {
                    tracing::error!(slot, exit = exit_code, quick_failures, error, "slot given up");
                }
                self.show_failure(State::Quarantined, &worker_exit.message);
                NextAction::End(SlotEnd::GivenUp(exit))
            }
            Verdict::Restart(delay) => {
                let (delay_ms, error) = (delay.as_millis() as u64, &worker_exit.message);
                let exit = death.exit.map(Exit::code);
                if was_logged {
                    tracing::debug!(slot, delay_ms, exit, error, "starting the worker again");
                } else {
                    tracing::warn!(slot, delay_ms, exit, error, "starting the worker again");
                }
                self.show_failure(State::Failed, &worker_exit.message);
                self.count_restart(worker_exit.reason);
                self.wait_without_worker(Some(delay)).await
            }
        }
    }

    /// Waits without a worker until `delay` is over, or until an order starts a worker or ends the slot. Without a
    /// delay, it waits only for such an order.
    async fn wait_without_worker(&mut self, delay: Option<Duration>) -> NextAction {
        let mut until = delay.map(|delay| tokio::time::Instant::now() + delay);
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(until.unwrap_or_else(tokio::time::Instant::now)), if until.is_some() => {
                    return NextAction::Start;
                }
                () = self.context.stop.reached(Phase::Returning) => return NextAction::End(SlotEnd::Drained),
                Some(exit) = self.draining.next() => if exit == Some(Exit::StoppedOnRequest) {
                    return NextAction::End(SlotEnd::StoppedOnRequest);
                },
                Some(slot_command) = self.orders.recv() => match self.carry_out_without_worker(slot_command, until.is_some()) {
                    Some(NextAction::Hold) => {
                        self.show(State::Stopped);
                        until = None;
                    }
                    Some(next_action) => return next_action,
                    None => {}
                },
            }
        }
    }

    /// Carries out a command while there is no worker. `is_failing`: the last worker failed, and a restart is
    /// scheduled. None: the slot continues to wait.
    fn carry_out_without_worker(
        &mut self,
        slot_command: SlotCommand,
        is_failing: bool,
    ) -> Option<NextAction> {
        let (order, answer) = match slot_command {
            SlotCommand::Order(order, answer) => (order, answer),
            SlotCommand::Replace(assignment, replacement) if is_failing => {
                self.start_probation(*assignment, replacement);
                return Some(NextAction::Start);
            }
            SlotCommand::Replace(assignment, replacement) => {
                self.set_assignment(*assignment);
                replacement.report(Ok(()));
                return None;
            }
        };
        let (next_action, done) = match order {
            ControlRequest::Resume => {
                self.overrides.paused = false;
                (Some(NextAction::Start), "starting a worker")
            }
            ControlRequest::Restart => {
                self.quick_failures = 0;
                (Some(NextAction::Start), "starting a worker")
            }
            ControlRequest::Drain => (Some(NextAction::Hold), "there is no worker, and none will be started"),
            ControlRequest::Cancel(cancellation) => {
                self.record_override(&ControlRequest::Cancel(cancellation.clone()));
                let cancelled = cancellation.task.is_some().then_some(0);
                let _ = answer.send(Ok(Done { what: "there is no worker, so no task", cancelled }));
                return None;
            }
            ControlRequest::CancelAll(_) => (None, "there is no worker, so no task"),
            ControlRequest::Shutdown => {
                (Some(NextAction::End(SlotEnd::StoppedOnRequest)), "the slot is done")
            }
            order => (None, self.record_override(&order)),
        };
        let _ = answer.send(Ok(done.into()));
        next_action
    }

    /// Records an order in the overrides if it also applies to later workers. Returns the outcome for people.
    fn record_override(&mut self, order: &ControlRequest) -> &'static str {
        match order {
            ControlRequest::Pause => {
                self.overrides.paused = true;
                "pausing"
            }
            ControlRequest::Resume => {
                self.overrides.paused = false;
                "resuming"
            }
            ControlRequest::LogLevel { filter } => {
                self.overrides.log_filter = Some(filter.clone());
                "logging by another filter"
            }
            ControlRequest::Cancel(cancellation) => {
                self.context.withdrawals.remember(cancellation, SystemTime::now());
                "its worker is notified"
            }
            ControlRequest::CancelAll(_) => "its worker is notified",
            ControlRequest::Drain | ControlRequest::Shutdown | ControlRequest::Restart => "finishing",
            ControlRequest::Ping | ControlRequest::Stats | ControlRequest::Active => "nothing to do",
        }
    }

    /// Starts a worker, and runs it and those that replace it until the last one ends. Returns how that one ended, and
    /// what follows.
    async fn run_workers(&mut self, suspects: Option<SuspectTasks>) -> (WorkerExit, NextAction) {
        let context = self.context.clone();
        let mut crash_records = context.crash_records.subscribe();
        let mut withdrawals = context.withdrawals.subscribe();
        let records = crash_records.borrow_and_update().clone();
        self.show(State::Starting);
        let assignment = self.assignment.clone();
        let mut current =
            match WorkerHandle::spawn(&context, assignment, records, &self.overrides, false).await {
                Ok(current) => current,
                Err(error) => return (self.refused_exit(error, suspects), NextAction::Judge),
            };
        current.monitor.inherit(suspects);
        if self.probation.is_some() {
            current.monitor.on_probation = true;
        }
        self.show_worker(&mut current);
        let (mut successor, mut next_action) = (None::<Successor>, NextAction::Judge);
        loop {
            tokio::select! {
                event = current.next(&context) => {
                    let ControlFlow::Break(status) = current.handle(event, &context).await else {
                        self.pass_probation(&current);
                        if let Some(replacement) = self.due_replacement(&current, successor.is_some()) {
                            let assignment = self.assignment.clone();
                            self.replace(assignment, replacement, &mut current, &mut successor, &mut next_action).await;
                        }
                        continue;
                    };
                    let was_requested = current.is_ending();
                    let worker_exit = current.worker_exit(status, &context);
                    context.board.change(&self.assignment.slot, Entry::clear_worker);
                    // A sentinel ends the slot, even if a successor was ready.
                    let stopped = worker_exit.death.exit == Some(Exit::StoppedOnRequest);
                    match successor.take() {
                        Some(next) if !was_requested && !stopped => current = self.promote_successor(next, worker_exit),
                        _ => {
                            let next_action = if was_requested { self.after_order(next_action, worker_exit.death.exit) } else { NextAction::Judge };
                            return (worker_exit, next_action);
                        }
                    }
                }
                event = successor_event(&mut successor, &context) => {
                    if let Some((next, permit)) = self.watch_successor(&mut successor, event).await {
                        let old = std::mem::replace(&mut current, next);
                        self.drain_old(old, permit).await;
                    }
                }
                Ok(()) = crash_records.changed() => {
                    let tasks = crash_records.borrow_and_update().clone();
                    send_both(&mut current, &mut successor, &Command::CrashRecords { tasks }).await;
                }
                Ok(()) = withdrawals.changed() => {
                    if let Some(withdrawn) = context.withdrawals.current(SystemTime::now()) {
                        send_both(&mut current, &mut successor, &Command::Withdrawals { withdrawn }).await;
                    }
                }
                Some(exit) = self.draining.next() => if exit == Some(Exit::StoppedOnRequest) {
                    // A sentinel stopped the old worker while it was being replaced.
                    next_action = NextAction::End(SlotEnd::StoppedOnRequest);
                    self.finish(&mut current, &mut successor).await;
                },
                Some(slot_command) = self.orders.recv() => {
                    self.carry_out(slot_command, &mut current, &mut successor, &mut next_action).await;
                }
            }
        }
    }

    /// Carries out a command while there is a worker. `next_action`, which follows the worker's end, may change.
    async fn carry_out(
        &mut self,
        slot_command: SlotCommand,
        current: &mut WorkerHandle,
        successor: &mut Option<Successor>,
        next_action: &mut NextAction,
    ) {
        let (order, answer) = match slot_command {
            SlotCommand::Order(order, answer) => (order, answer),
            SlotCommand::Replace(assignment, replacement) if !current.is_ending() => {
                return self.replace(*assignment, replacement, current, successor, next_action).await;
            }
            SlotCommand::Replace(assignment, replacement) => {
                if let NextAction::Start = next_action {
                    return self.start_probation(*assignment, replacement);
                }
                // The next worker of this slot, if any, gets these settings.
                self.set_assignment(*assignment);
                return replacement.report(Ok(()));
            }
        };
        let outcome = self.record_override(&order);
        let command = match order {
            ControlRequest::Pause => Command::Pause,
            ControlRequest::Resume => {
                if current.is_ending() && matches!(next_action, NextAction::Hold) {
                    *next_action = NextAction::Start;
                }
                Command::Resume
            }
            ControlRequest::LogLevel { filter } => Command::LogLevel { filter },
            // An operator's cancellation of a task by its id is answered when the worker has reported the result. All
            // others wait for no worker.
            ControlRequest::Cancel(cancellation) if cancellation.task.is_some() => {
                if let Some(next) = successor {
                    next.worker.send(&Command::Cancel(cancellation.clone())).await;
                }
                return current.cancel(cancellation, answer).await;
            }
            ControlRequest::Cancel(cancellation) => Command::Cancel(cancellation),
            ControlRequest::CancelAll(cancellations) => {
                Command::CancelAll { cancellations: cancellations.to_vec() }
            }
            ControlRequest::Ping | ControlRequest::Stats | ControlRequest::Active => {
                return drop(answer.send(Ok(outcome.into())));
            }
            ControlRequest::Drain | ControlRequest::Shutdown | ControlRequest::Restart => {
                *next_action = match order {
                    ControlRequest::Drain => NextAction::Hold,
                    ControlRequest::Shutdown => NextAction::End(SlotEnd::StoppedOnRequest),
                    _ => NextAction::Start,
                };
                self.finish(current, successor).await;
                drop(answer.send(Ok(outcome.into())));
                return;
            }
        };
        send_both(current, successor, &command).await;
        drop(answer.send(Ok(outcome.into())));
    }

    /// Tells the worker to finish its tasks, and drops its successor.
    async fn finish(&mut self, current: &mut WorkerHandle, successor: &mut Option<Successor>) {
        if let Some(next) = successor.take() {
            next.replacement.report(Err("an order to end the worker came first".to_owned()));
        }
        let grace = self.context.policy.borrow().shutdown_grace;
        current.finish(grace).await;
        self.show(State::Draining);
    }

    /// Decides what follows when a worker ends after an order.
    fn after_order(&mut self, next_action: NextAction, exit: Option<Exit>) -> NextAction {
        let is_stopping = self.context.stop.phase() >= Phase::Returning;
        match (next_action, exit) {
            (_, Some(Exit::StoppedOnRequest)) => NextAction::End(SlotEnd::StoppedOnRequest),
            (NextAction::Start, _) if !is_stopping => {
                if self.probation.is_none() {
                    self.count_restart(RestartReason::Requested);
                }
                NextAction::Start
            }
            (next_action @ (NextAction::Hold | NextAction::End(_)), _) if !is_stopping => next_action,
            (_, Some(Exit::Done)) => NextAction::End(SlotEnd::Drained),
            _ => NextAction::End(SlotEnd::Aborted),
        }
    }

    /// The exit that stands for a worker that could not be started.
    fn refused_exit(&self, error: SpawnError, suspects: Option<SuspectTasks>) -> WorkerExit {
        tracing::error!(slot = self.assignment.slot, reason = %error, "no worker was started");
        let mut monitor = WorkerMonitor::new(suspects);
        if let SpawnError::Device(device_fault) = error {
            monitor.circumstances.fault = Some(Fault::Device(device_fault));
        }
        monitor.end(None, &self.context, &self.assignment)
    }
}

async fn send_both(current: &mut WorkerHandle, successor: &mut Option<Successor>, command: &Command) {
    current.send(command).await;
    if let Some(next) = successor {
        next.worker.send(command).await;
    }
}
