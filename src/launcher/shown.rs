//! Writes the state of a slot to the status board: its assignment, its worker, its state, its restarts. The
//! only file that does so for a slot.

use super::slot_state::{Slot, SlotEnd};
use super::worker_handle::WorkerHandle;
use crate::config::Assignment;
use crate::protocol::admin::State;
use crate::protocol::control::BatchChange;

impl Slot {
    /// Changes the slot's assignment.
    pub(super) fn take_on(&mut self, assignment: Assignment) {
        self.launch.board.assign(&assignment);
        self.assignment = assignment;
        // Bounds set by an order end with the settings that they changed.
        self.overrides.batch = BatchChange::default();
    }

    pub(super) fn show(&self, state: State) {
        self.launch.board.change(&self.assignment.slot, |entry| entry.turn(state));
    }

    /// From now on the board shows this worker.
    pub(super) fn show_worker(&self, running: &mut WorkerHandle) {
        running.shown = true;
        let (pid, is_ready) = (running.pid(), running.monitor.is_ready());
        self.launch.board.change(&self.assignment.slot, |entry| {
            let before = entry.report.stats.as_ref().map(|stats| stats.now.clone());
            entry.vacate();
            entry.report.pid = pid;
            if is_ready {
                entry.is_ready();
                // Kept until the new worker reports its own: the old one works on while the new one connects.
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
