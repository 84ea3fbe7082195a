//! Keeps one slot filled: spawns its worker, restarts it by the policy, replaces it, carries out orders, and stops
//! it with the launcher. Owns the current worker, its successor, the replaced workers that still drain, and the count
//! of quick failures.

use std::time::{Duration, Instant, SystemTime};

use futures_util::StreamExt;

use super::fault::Fault;
use super::order::{Done, SlotCommand};
use super::replace::next_of;
use super::restart::{RestartReason, Verdict, judge};
use super::slot_state::{NextAction, Replacement, Slot, SlotEnd, Successor};
use super::status_board::Entry;
use super::worker_handle::{Refusal, WorkerHandle};
use super::worker_monitor::{SuspectTasks, WorkerExit, WorkerMonitor};
use crate::protocol::admin::{Request, State};
use crate::protocol::control::Command;
use crate::shutdown::{Exit, Phase};

impl Slot {
    /// Runs the slot until it ends.
    pub(super) async fn run(mut self) -> SlotEnd {
        let mut suspects = None;
        let end = loop {
            if self.launch.stop.phase() >= Phase::Returning {
                break SlotEnd::Drained;
            }
            let (worker_exit, then) = self.run_workers(suspects.take()).await;
            let then = self.judge_probation(then, &worker_exit);
            let then = match then {
                NextAction::Judge => self.judge(worker_exit, &mut suspects).await,
                then => then,
            };
            let then = match then {
                NextAction::Hold => {
                    self.show(State::Stopped);
                    self.wait_without_worker(None).await
                }
                then => then,
            };
            if let NextAction::End(end) = then {
                self.show_end(end);
                break end;
            }
        };
        while self.draining.next().await.is_some() {}
        end
    }

    /// Decides what follows when a worker ends without an order.
    async fn judge(&mut self, worker_exit: WorkerExit, suspects: &mut Option<SuspectTasks>) -> NextAction {
        let policy = self.launch.policy.borrow().clone();
        let (slot, death) = (self.assignment.slot.clone(), worker_exit.death);
        *suspects = worker_exit.suspects;
        if worker_exit.of_group {
            // The suspects are still being narrowed down. Only the last of these deaths, of one task alone, counts.
        } else if !death.is_quick_failure(&policy) {
            (self.quick_failures, self.poison_found_in_a_row) = (0, 0);
        } else if worker_exit.found_poison && self.poison_found_in_a_row < policy.max_quick_failures {
            // The task that caused the death was found, and will not run again. The number in a row is limited: if
            // every task seems to be poison, the slot is broken, and must not dead-letter the whole queue.
            (self.quick_failures, self.poison_found_in_a_row) = (0, self.poison_found_in_a_row + 1);
        } else {
            self.quick_failures += 1;
        }
        // If a model cannot be loaded, all slots of its pool fail for the same reason, and most of them several times.
        let is_load_failure = death.exit.is_some_and(Exit::is_load_failure);
        let is_known = is_load_failure
            && self.launch.logged_reasons.check_and_record(&worker_exit.message, Instant::now());
        match judge(&death, self.quick_failures, &policy, rand::random()) {
            Verdict::StoppedOnRequest => {
                tracing::info!(slot, cause = worker_exit.message, "stopped on request");
                NextAction::End(SlotEnd::StoppedOnRequest)
            }
            Verdict::GiveUp(exit) => {
                let quick_failures = self.quick_failures;
                let (exit_code, error) = (exit.code(), &worker_exit.message);
                if is_known {
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
                if is_known {
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

    /// Waits without a worker until `delay` is over, or until an order starts a worker or ends the slot. None: waits
    /// only for such an order.
    async fn wait_without_worker(&mut self, delay: Option<Duration>) -> NextAction {
        let mut until = delay.map(|delay| tokio::time::Instant::now() + delay);
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(until.unwrap_or_else(tokio::time::Instant::now)), if until.is_some() => {
                    return NextAction::Start;
                }
                () = self.launch.stop.reached(Phase::Returning) => return NextAction::End(SlotEnd::Drained),
                Some(exit) = self.draining.next() => if exit == Some(Exit::StoppedOnRequest) {
                    return NextAction::End(SlotEnd::StoppedOnRequest);
                },
                Some(ordered) = self.orders.recv() => match self.carry_out_without_worker(ordered, until.is_some()) {
                    Some(NextAction::Hold) => {
                        self.show(State::Stopped);
                        until = None;
                    }
                    Some(then) => return then,
                    None => {}
                },
            }
        }
    }

    /// Carries out an order while there is no worker. `failing`: the last worker failed, and a restart is scheduled.
    /// None: the slot continues to wait.
    fn carry_out_without_worker(&mut self, ordered: SlotCommand, failing: bool) -> Option<NextAction> {
        let (order, answer) = match ordered {
            SlotCommand::Order(order, answer) => (order, answer),
            SlotCommand::Replace(assignment, permit, answer) if failing => {
                self.start_probation(
                    *assignment,
                    Replacement { reason: RestartReason::Reloaded, permit, answer: Some(answer) },
                );
                return Some(NextAction::Start);
            }
            SlotCommand::Replace(assignment, _permit, answer) => {
                self.set_assignment(*assignment);
                let _ = answer.send(Ok(()));
                return None;
            }
        };
        let (then, done) = match order {
            Request::Resume => {
                self.overrides.paused = false;
                (Some(NextAction::Start), "starting a worker")
            }
            Request::Restart => {
                self.quick_failures = 0;
                (Some(NextAction::Start), "starting a worker")
            }
            Request::Drain => (Some(NextAction::Hold), "there is no worker, and none will be started"),
            Request::Cancel(cancellation) => {
                self.record_override(&Request::Cancel(cancellation.clone()));
                let cancelled = cancellation.task.is_some().then_some(0);
                let _ = answer.send(Ok(Done { what: "there is no worker, so no task", cancelled }));
                return None;
            }
            Request::Shutdown => (Some(NextAction::End(SlotEnd::StoppedOnRequest)), "the slot is done"),
            order => (None, self.record_override(&order)),
        };
        let _ = answer.send(Ok(done.into()));
        then
    }

    /// Records an order in the overrides if it applies to later workers too. Returns the outcome for people.
    fn record_override(&mut self, order: &Request) -> &'static str {
        match order {
            Request::Pause => {
                self.overrides.paused = true;
                "pausing"
            }
            Request::Resume => {
                self.overrides.paused = false;
                "resuming"
            }
            Request::SetBatch(change) => {
                self.overrides.batch = change.over(self.overrides.batch);
                let (batch, board) = (self.overrides.batch, &self.launch.board);
                board.change(&self.assignment.slot, |entry| {
                    entry.report.batch = batch.over(entry.report.batch)
                });
                "batches have other bounds"
            }
            Request::LogLevel { filter } => {
                self.overrides.log = Some(filter.clone());
                "logging by another filter"
            }
            Request::Cancel(cancellation) => {
                self.launch.withdrawals.remember(cancellation, SystemTime::now());
                "its worker is notified"
            }
            Request::Drain | Request::Shutdown | Request::Restart => "finishing",
            Request::Ping | Request::Stats | Request::Active => "nothing to do",
        }
    }

    /// Starts a worker and runs it, and those that replace it, until the last one ends. Returns how it ended, and what
    /// follows.
    async fn run_workers(&mut self, suspects: Option<SuspectTasks>) -> (WorkerExit, NextAction) {
        let launch = self.launch.clone();
        let mut known = launch.deaths.known();
        let mut withdrawals = launch.withdrawals.changes();
        let records = known.borrow_and_update().clone();
        self.show(State::Starting);
        let assignment = self.assignment.clone();
        let mut current =
            match WorkerHandle::spawn(&launch, assignment, records, &self.overrides, false).await {
                Ok(current) => current,
                Err(refusal) => return (self.not_spawned(refusal, suspects), NextAction::Judge),
            };
        current.monitor.inherit(suspects);
        if self.probation.is_some() {
            current.monitor.on_probation = true;
        }
        self.show_worker(&mut current);
        let (mut successor, mut then) = (None::<Successor>, NextAction::Judge);
        loop {
            tokio::select! {
                event = current.next(&launch) => {
                    let Some(status) = current.act(event, &launch).await else {
                        self.pass_probation(&current);
                        if let Some(replacement) = self.due_replacement(&current, successor.is_some()) {
                            let same = self.assignment.clone();
                            self.replace(same, replacement, &mut current, &mut successor, &mut then).await;
                        }
                        continue;
                    };
                    let was_ordered = current.is_ending();
                    let worker_exit = current.worker_exit(status, &launch);
                    launch.board.change(&self.assignment.slot, Entry::vacate);
                    // A sentinel ends the slot, even if a successor was ready.
                    let stopped = worker_exit.death.exit == Some(Exit::StoppedOnRequest);
                    match successor.take() {
                        Some(next) if !was_ordered && !stopped => current = self.promote_successor(next, worker_exit),
                        _ => {
                            let then = if was_ordered { self.after_order(then, worker_exit.death.exit) } else { NextAction::Judge };
                            return (worker_exit, then);
                        }
                    }
                }
                event = next_of(&mut successor, &launch) => {
                    if let Some((next, permit)) = self.watch_successor(&mut successor, event).await {
                        let old = std::mem::replace(&mut current, next);
                        self.drain_old(old, permit).await;
                    }
                }
                Ok(()) = known.changed() => {
                    let tasks = known.borrow_and_update().clone();
                    send_both(&mut current, &mut successor, &Command::CrashRecords { tasks }).await;
                }
                Ok(()) = withdrawals.changed() => {
                    if let Some(withdrawn) = launch.withdrawals.current(SystemTime::now()) {
                        send_both(&mut current, &mut successor, &Command::Withdrawals { withdrawn }).await;
                    }
                }
                Some(exit) = self.draining.next() => if exit == Some(Exit::StoppedOnRequest) {
                    // A sentinel stopped the old worker while it was being replaced.
                    then = NextAction::End(SlotEnd::StoppedOnRequest);
                    self.finish(&mut current, &mut successor).await;
                },
                Some(ordered) = self.orders.recv() => {
                    self.carry_out(ordered, &mut current, &mut successor, &mut then).await;
                }
            }
        }
    }

    /// Carries out an order while there is a worker. `then`: what follows the worker's end, which an order may change.
    async fn carry_out(
        &mut self,
        ordered: SlotCommand,
        current: &mut WorkerHandle,
        successor: &mut Option<Successor>,
        then: &mut NextAction,
    ) {
        let (order, answer) = match ordered {
            SlotCommand::Order(order, answer) => (order, answer),
            SlotCommand::Replace(assignment, permit, answer) if current.is_ending() => {
                let replacement =
                    Replacement { reason: RestartReason::Reloaded, permit, answer: Some(answer) };
                match then {
                    NextAction::Start => self.start_probation(*assignment, replacement),
                    // The next worker of this slot, if any, gets these settings.
                    _ => {
                        self.set_assignment(*assignment);
                        replacement.report(Ok(()));
                    }
                }
                return;
            }
            SlotCommand::Replace(assignment, permit, answer) => {
                let replacement =
                    Replacement { reason: RestartReason::Reloaded, permit, answer: Some(answer) };
                return self.replace(*assignment, replacement, current, successor, then).await;
            }
        };
        let outcome = self.record_override(&order);
        let command = match order {
            Request::Pause => Command::Pause,
            Request::Resume => {
                if current.is_ending() && matches!(then, NextAction::Hold) {
                    *then = NextAction::Start;
                }
                Command::Resume
            }
            Request::SetBatch(change) => Command::SetBatch(change),
            Request::LogLevel { filter } => Command::LogLevel { filter },
            // Only an operator's cancellation names a task by its id, and is answered when the worker has reported the
            // result. Requesters, who may be many, are not answered, and their cancellations wait for no worker.
            Request::Cancel(cancellation) if cancellation.task.is_some() => {
                if let Some(next) = successor {
                    next.running.send(&Command::Cancel(cancellation.clone())).await;
                }
                return current.cancel(cancellation, answer).await;
            }
            Request::Cancel(cancellation) => Command::Cancel(cancellation),
            Request::Ping | Request::Stats | Request::Active => return drop(answer.send(Ok(outcome.into()))),
            Request::Drain | Request::Shutdown | Request::Restart => {
                *then = match order {
                    Request::Drain => NextAction::Hold,
                    Request::Shutdown => NextAction::End(SlotEnd::StoppedOnRequest),
                    _ => NextAction::Start,
                };
                self.finish(current, successor).await;
                drop(answer.send(Ok(outcome.into())));
                return;
            }
        };
        current.send(&command).await;
        if let Some(next) = successor.as_mut().filter(|next| next.accepts(&command, &self.assignment)) {
            next.running.send(&command).await;
        }
        drop(answer.send(Ok(outcome.into())));
    }

    /// Tells the worker to finish its tasks, and drops its successor.
    async fn finish(&mut self, current: &mut WorkerHandle, successor: &mut Option<Successor>) {
        if let Some(next) = successor.take() {
            next.replacement.report(Err("an order to end the worker came first".to_owned()));
        }
        let grace = self.launch.policy.borrow().shutdown_grace;
        current.finish(grace).await;
        self.show(State::Draining);
    }

    /// Decides what follows when a worker ends after an order.
    fn after_order(&mut self, then: NextAction, exit: Option<Exit>) -> NextAction {
        let stopping = self.launch.stop.phase() >= Phase::Returning;
        match (then, exit) {
            (_, Some(Exit::StoppedOnRequest)) => NextAction::End(SlotEnd::StoppedOnRequest),
            (NextAction::Start, _) if !stopping => {
                if self.probation.is_none() {
                    self.count_restart(RestartReason::Requested);
                }
                NextAction::Start
            }
            (then @ (NextAction::Hold | NextAction::End(_)), _) if !stopping => then,
            (_, Some(Exit::Done)) => NextAction::End(SlotEnd::Drained),
            _ => NextAction::End(SlotEnd::Aborted),
        }
    }

    fn not_spawned(&self, refusal: Refusal, suspects: Option<SuspectTasks>) -> WorkerExit {
        tracing::error!(slot = self.assignment.slot, reason = %refusal, "no worker was started");
        let mut monitor = WorkerMonitor::new(suspects);
        if let Refusal::Device(device_fault) = refusal {
            monitor.circumstances.fault = Some(Fault::Device(device_fault));
        }
        monitor.end(None, false, &self.launch, &self.assignment)
    }
}

async fn send_both(current: &mut WorkerHandle, successor: &mut Option<Successor>, command: &Command) {
    current.send(command).await;
    if let Some(next) = successor {
        next.running.send(command).await;
    }
}
