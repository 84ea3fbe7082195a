//! What the board shows of a slot: by what it works, which worker fills it, in which state, what was
//! restarted and why. The one place where a slot writes on it.

use super::slot_state::{Slot, SlotEnd};
use super::worker_handle::WorkerHandle;
use crate::config::Assignment;
use crate::protocol::admin::State;
use crate::protocol::control::BatchChange;

impl Slot {
    /// Works by another assignment from now on.
    pub(super) fn take_on(&mut self, assignment: Assignment) {
        self.launch.board.assign(&assignment);
        self.assignment = assignment;
        // What was set by hand goes with the settings that it changed.
        self.overrides.batch = BatchChange::default();
    }

    pub(super) fn show(&self, state: State) {
        self.launch.board.change(&self.assignment.slot, |entry| entry.turn(state));
    }

    /// From now on, the board shows this worker.
    pub(super) fn show_worker(&self, running: &mut WorkerHandle) {
        running.shown = true;
        let (pid, is_ready) = (running.pid(), running.monitor.is_ready());
        self.launch.board.change(&self.assignment.slot, |entry| {
            let before = entry.report.stats.as_ref().map(|stats| stats.now.clone());
            entry.vacate();
            entry.report.pid = pid;
            if is_ready {
                entry.is_ready();
                // Until it says where it stands: the one before works on while it connects.
                if let (Some(stats), Some(before)) = (&mut entry.report.stats, before) {
                    stats.now = before;
                }
            }
            entry.turn(if is_ready { State::Ready } else { State::Starting });
        });
    }

    pub(super) fn show_failure(&self, state: State, words: &str) {
        self.launch.board.change(&self.assignment.slot, |entry| {
            entry.report.last_failure = Some(words.to_owned());
            entry.turn(state);
        });
    }

    pub(super) fn show_end(&self, end: SlotEnd) {
        match end {
            SlotEnd::GivenUp(_) => {}
            SlotEnd::StoppedOnRequest | SlotEnd::Drained | SlotEnd::Aborted => self.show(State::Stopped),
        }
    }

    pub(super) fn count_restart(&self, reason: &str) {
        self.launch.board.change(&self.assignment.slot, |entry| {
            *entry.report.restarts.entry(reason.to_owned()).or_default() += 1;
        });
    }
}
