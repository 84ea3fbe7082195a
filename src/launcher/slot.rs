//! Keeps one slot filled: spawns its worker, watches it, restarts it by the policy, stops it with
//! the launcher. Owns the worker process and the count of quick failures.

use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use tokio::time::sleep_until;

use super::child::{Sign, Worker};
use super::logs::re_emit;
use super::poison::Poison;
use super::restart::{Death, Verdict, judge};
use crate::config::{Assignment, Launcher};
use crate::protocol::control::{Command, Event, decode};
use crate::shutdown::{Exit, Phase, Stop};

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

/// One worker's life.
struct Life {
    death: Death,
    /// The slot's end, when the launcher's stop ended this life.
    end: Option<SlotEnd>,
    /// It died of a task that is now known as poison.
    found_poison: bool,
}

/// Keeps the slot filled until its end.
pub(super) async fn keep(
    program: &Path,
    assignment: &Assignment,
    policy: &Launcher,
    stop: &Stop,
    poison: &Poison,
) -> SlotEnd {
    let slot = assignment.slot.as_str();
    let (mut quick_failures, mut found_in_a_row) = (0, 0);
    while stop.phase() < Phase::Returning {
        let Life { death, end, found_poison } = live(program, assignment, policy, stop, poison).await;
        if let Some(end) = end {
            return end;
        }
        if !death.is_quick_failure(policy) {
            (quick_failures, found_in_a_row) = (0, 0);
        } else if found_poison && found_in_a_row < policy.max_quick_failures {
            // The failures had a cause, which is out of the way. Not without end: where every task
            // seems to be poison, it is the slot that is broken, and it must not drain the queue.
            (quick_failures, found_in_a_row) = (0, found_in_a_row + 1);
        } else {
            quick_failures += 1;
        }
        match judge(&death, quick_failures, policy, rand::random()) {
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
                    () = stop.reached(Phase::Returning) => {}
                }
            }
        }
    }
    SlotEnd::Drained
}

/// Starts a worker and watches it to its end.
async fn live(
    program: &Path,
    assignment: &Assignment,
    policy: &Launcher,
    stop: &Stop,
    poison: &Poison,
) -> Life {
    let slot = assignment.slot.as_str();
    let born = Instant::now();
    let mut death = Death { exit: None, was_ready: false, lived: Duration::ZERO };
    let mut known = poison.known();
    let told_of = known.borrow_and_update().clone();
    let mut worker = match Worker::spawn(program, assignment, told_of).await {
        Ok(worker) => worker,
        Err(error) => {
            tracing::error!(slot, program = %program.display(), %error, "cannot spawn a worker");
            return Life { death, end: None, found_poison: false };
        }
    };
    tracing::info!(slot, pid = worker.pid(), device = assignment.device, "worker spawned");
    let mut next = Step::Drain;
    // The task alone on the device, by its worker's last word.
    let mut alone = None;
    let status = loop {
        tokio::select! {
            sign = worker.next() => match sign {
                Ok(Sign::Event(line)) => match note(slot, &line) {
                    Some(Event::Ready { .. }) => death.was_ready = true,
                    Some(Event::Alone { task }) => alone = task,
                    _ => {}
                },
                Ok(Sign::Log(line)) => re_emit(slot, &line),
                Ok(Sign::Ended(status)) => break Some(status),
                Err(error) => {
                    tracing::error!(slot, %error, "lost sight of the worker");
                    break None;
                }
            },
            Ok(()) = known.changed() => {
                let tasks = known.borrow_and_update().clone();
                worker.tell(&Command::Poison { tasks }).await;
            }
            () = next.is_due(stop) => next = next.take(&mut worker, policy.shutdown_grace).await,
        }
    };
    death.lived = born.elapsed();
    death.exit = status.and_then(|status| status.code()).and_then(Exit::from_code);
    let end = (next != Step::Drain).then_some(match death.exit {
        Some(Exit::StoppedOnRequest) => SlotEnd::StoppedOnRequest,
        Some(Exit::Done) => SlotEnd::Drained,
        _ => SlotEnd::Aborted,
    });
    log_death(slot, status, &death);
    // A code of ours is a worker's own account of its end, and no task is to blame.
    let suspect = alone.filter(|_| end.is_none() && matches!(death.exit, None | Some(Exit::Internal)));
    let found_poison = suspect.is_some_and(|task| {
        tracing::warn!(slot, task, "the worker died computing one task alone");
        poison.blame(&task)
    });
    Life { death, end, found_poison }
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
        Ok(Event::Alone { task }) => tracing::debug!(slot, task, "computing alone"),
        Ok(Event::Loading) => tracing::debug!(slot, "worker loading"),
        Ok(Event::Draining { cause }) => tracing::info!(slot, cause, "worker draining"),
        Ok(Event::Stopped { cause }) => tracing::info!(slot, cause, "worker stopped"),
        Ok(Event::Stats(stats)) => tracing::info!(
            slot,
            succeeded = stats.succeeded,
            failed = stats.failed,
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
