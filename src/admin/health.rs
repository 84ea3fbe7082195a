//! Decides from the status board whether a launcher is live, ready, and started. Live means progress: a worker that is
//! stuck in a forward pass or sends nothing is not live, though its process runs. Does no I/O.

use std::collections::BTreeMap;

use crate::launcher::status_board::{Entry, SlotStatus};

/// The header of a response that names the launcher.
pub const LAUNCHER_HEADER: &str = "x-sconce-launcher";

/// A health check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// No worker is stuck.
    Live,
    /// Every pool has a worker that takes tasks.
    Ready,
    /// Every pool has had a worker that was ready.
    Startup,
}

impl Check {
    /// The URL path of the check.
    pub fn path(self) -> &'static str {
        match self {
            Self::Live => "/livez",
            Self::Ready => "/readyz",
            Self::Startup => "/startupz",
        }
    }
}

/// Returns whether the check passes, and lines that explain the result. `stopping` says that the stop of the launcher
/// has begun.
pub(super) fn evaluate(check: Check, status: &SlotStatus, stopping: bool) -> (bool, Vec<String>) {
    let problems = match check {
        Check::Live => stuck(status),
        Check::Ready if stopping => vec!["the launcher is stopping".to_owned()],
        Check::Ready => pools_without(status, takes_tasks, "takes tasks"),
        Check::Startup if status.has_started => Vec::new(),
        Check::Startup => pools_without(status, |entry| entry.was_ready, "has been ready yet"),
    };
    let slots = status.slots.values().map(slot_line);
    (problems.is_empty(), problems.iter().cloned().chain(slots).collect())
}

/// Describes one slot: its state, and its worker's problem if there is one.
fn slot_line(entry: &Entry) -> String {
    let (slot, state) = (&entry.report.slot, entry.report.state.name());
    let now = entry.report.stats.as_ref().map(|stats| &stats.now);
    let seconds = entry.since.elapsed().as_secs();
    match now.and_then(|now| now.problem.as_ref()) {
        Some(problem) if now.is_some_and(|now| !now.connected) => format!("{slot} waits: {problem}"),
        Some(problem) => format!("{slot} {state} for {seconds} s; {problem}"),
        None if entry.report.state.is_serving() && !takes_tasks(entry) => {
            format!("{slot} waits: it has no session with the broker yet")
        }
        None => format!("{slot} {state} for {seconds} s"),
    }
}

/// Whether the slot waits for tasks or computes, and has a session with the broker.
fn takes_tasks(entry: &Entry) -> bool {
    entry.report.state.is_serving() && entry.report.stats.as_ref().is_some_and(|stats| stats.now.connected)
}

/// One line for each slot whose worker is stuck.
fn stuck(status: &SlotStatus) -> Vec<String> {
    let stuck = status.slots.values().filter_map(|entry| Some((entry, entry.stuck_since?)));
    let lines = stuck.map(|(entry, stuck_since)| {
        let (slot, seconds) = (&entry.report.slot, stuck_since.elapsed().as_secs());
        match entry.computing_since {
            Some(since) => format!("{slot}: a forward pass has lasted {} s", since.elapsed().as_secs()),
            None => format!(
                "{slot}: the worker has made no progress, and exceeded its time limit {seconds} s ago"
            ),
        }
    });
    lines.collect()
}

/// One line for each pool without a slot that satisfies `condition`; it ends with `description`.
fn pools_without(status: &SlotStatus, condition: impl Fn(&Entry) -> bool, description: &str) -> Vec<String> {
    let mut pools: BTreeMap<&str, bool> = BTreeMap::new();
    for entry in status.slots.values() {
        *pools.entry(&entry.report.pool).or_default() |= condition(entry);
    }
    if pools.is_empty() {
        return vec!["there are no slots".to_owned()];
    }
    let unsatisfied = pools.into_iter().filter(|(_, is_satisfied)| !is_satisfied);
    unsatisfied.map(|(pool, _)| format!("pool {pool}: no worker {description}")).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::config;
    use crate::launcher::gpus::Gpus;
    use crate::launcher::{Host, plan};
    use crate::protocol::admin::{SlotReport, State};
    use crate::protocol::stats::Stats;

    fn status(slots: &[(&str, State, bool)]) -> SlotStatus {
        let settings = config::load(&[], [], &[("pool[0].devices".into(), "cpu".into())]).unwrap().settings;
        let host = Host {
            name: "h".into(),
            launcher: "h".into(),
            cores: 1,
            gpus: Gpus::default(),
            visible: None,
            cuda: None,
        };
        let assignment = plan(&settings, &host).unwrap().remove(0);
        let entry = |(number, (pool, state, was_ready)): (usize, &(&str, State, bool))| {
            let slot = format!("{pool}/{number}");
            let mut stats = Stats::default();
            stats.now.connected = true;
            let report = SlotReport {
                slot: slot.clone(),
                pool: (*pool).to_owned(),
                state: *state,
                stats: Some(Box::new(stats)),
                ..SlotReport::default()
            };
            let (since, was_ready, assignment) = (Instant::now(), *was_ready, assignment.clone());
            (slot, Entry { report, since, computing_since: None, stuck_since: None, was_ready, assignment })
        };
        SlotStatus { slots: slots.iter().enumerate().map(entry).collect(), ..SlotStatus::default() }
    }

    #[test]
    fn a_launcher_is_ready_while_every_pool_has_a_worker_that_takes_tasks() {
        let ready = |slots: &[(&str, State, bool)]| evaluate(Check::Ready, &status(slots), false).0;
        let (busy, loading) = (("a", State::Busy, true), ("a", State::Loading, false));
        assert!(ready(&[busy, loading]) && !ready(&[loading]) && !ready(&[]));
        assert!(!ready(&[busy, ("b", State::Paused, true)]));
        let (ready, lines) = evaluate(Check::Ready, &status(&[busy]), true);
        assert!(!ready && lines[0].contains("stopping") && lines[1].starts_with("a/0 busy"), "{lines:?}");
        let mut lost = status(&[busy]);
        lost.slots.get_mut("a/0").unwrap().report.stats = None;
        assert!(!evaluate(Check::Ready, &lost, false).0, "without a broker");
    }

    #[test]
    fn the_line_of_a_slot_names_the_problem_of_its_worker() {
        let mut with_problem = status(&[("a", State::Ready, true)]);
        let mut evaluate_with = |connected, problem: &str| {
            let entry = with_problem.slots.get_mut("a/0").unwrap();
            let now = &mut entry.report.stats.as_mut().unwrap().now;
            (now.connected, now.problem) = (connected, Some(problem.to_owned()));
            evaluate(Check::Ready, &with_problem, false)
        };
        assert_eq!(
            evaluate_with(true, "a dead letter waits"),
            (true, vec!["a/0 ready for 0 s; a dead letter waits".into()])
        );
        let (ready, lines) = evaluate_with(false, "no broker: 403");
        assert!(!ready && lines[1] == "a/0 waits: no broker: 403", "{lines:?}");
    }

    #[test]
    fn a_launcher_that_has_started_stays_started() {
        let started = |slots: &[(&str, State, bool)]| evaluate(Check::Startup, &status(slots), false).0;
        assert!(!started(&[("a", State::Loading, false)]));
        assert!(started(&[("a", State::Failed, true), ("a", State::Quarantined, false)]));
        let started_before = SlotStatus { has_started: true, ..status(&[("new", State::Loading, false)]) };
        assert!(evaluate(Check::Startup, &started_before, false).0);
    }

    #[test]
    fn a_launcher_with_a_stuck_worker_is_not_live_and_names_it() {
        let mut status = status(&[("a", State::Busy, true), ("a", State::Ready, true)]);
        assert!(evaluate(Check::Live, &status, true).0, "a stopping launcher is live");
        let entry = status.slots.get_mut("a/0").unwrap();
        (entry.stuck_since, entry.computing_since) = (Some(Instant::now()), Some(Instant::now()));
        let (live, lines) = evaluate(Check::Live, &status, false);
        assert!(!live && lines[0].starts_with("a/0: a forward pass has lasted"), "{lines:?}");
    }
}
