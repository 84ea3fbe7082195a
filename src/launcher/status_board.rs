//! What is known of every slot: which state it is in, what its workers counted, what is on its
//! device. Written by the slots, as control lines tell and as their processes come and go; read by
//! those who show it (metrics, health, remote control). Owns it through all the lives of a slot's
//! workers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::config::Assignment;
use crate::protocol::admin::{SlotReport, State};
use crate::protocol::control::BatchChange;
use crate::protocol::stats::Standing;

/// What is known of every slot, for those who show it.
#[derive(Debug)]
pub struct StatusBoard {
    /// Held for reading or writing a few values; never across an await.
    status: Mutex<SlotStatus>,
    started: Instant,
}

/// What stands on the board.
#[derive(Debug, Default)]
pub struct SlotStatus {
    /// The slots, by name.
    pub slots: BTreeMap<String, Entry>,
    /// Settings that were loaded again and are in force.
    pub reloads_applied: u64,
    /// Settings that were loaded again, and refused.
    pub reloads_refused: u64,
    /// Every pool that there was at the start has had a worker that was ready.
    pub has_started: bool,
}

/// One slot.
#[derive(Debug)]
pub struct Entry {
    /// What can be told of it; without what changes with the clock.
    pub report: SlotReport,
    /// Since when it has been in its state.
    pub since: Instant,
    /// Since when its device has been computing what it computes.
    pub computing_since: Option<Instant>,
    /// Since when it has said nothing, or computed, for longer than it may.
    pub stuck_since: Option<Instant>,
    /// It has had a worker that was ready.
    pub was_ready: bool,
    /// By what its worker works, or the next one will.
    pub(crate) assignment: Assignment,
}

impl SlotStatus {
    fn started(&self) -> bool {
        let ready: BTreeSet<_> =
            self.slots.values().filter(|it| it.was_ready).map(|it| &it.report.pool).collect();
        !self.slots.is_empty() && self.slots.values().all(|entry| ready.contains(&entry.report.pool))
    }
}

impl Default for StatusBoard {
    fn default() -> Self {
        Self { status: Mutex::default(), started: Instant::now() }
    }
}

impl StatusBoard {
    /// Reads it.
    pub fn read<T>(&self, read: impl FnOnce(&SlotStatus) -> T) -> T {
        read(&self.lock())
    }

    /// How long the launcher has been there.
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Changes it as a whole.
    pub(super) fn write(&self, write: impl FnOnce(&mut SlotStatus)) {
        write(&mut self.lock());
    }

    /// Puts a slot on it, or what is new of one.
    pub(crate) fn assign(&self, assignment: &Assignment) {
        let mut status = self.lock();
        let entry = status.slots.entry(assignment.slot.clone()).or_insert_with(|| Entry {
            report: SlotReport { stats: Some(Box::default()), ..SlotReport::default() },
            since: Instant::now(),
            computing_since: None,
            stuck_since: None,
            was_ready: false,
            assignment: assignment.clone(),
        });
        entry.assignment.clone_from(assignment);
        let (report, pool) = (&mut entry.report, &assignment.pool);
        report.slot.clone_from(&assignment.slot);
        report.worker.clone_from(&assignment.worker);
        report.pool.clone_from(&pool.name);
        report.queue.clone_from(&pool.task_queue);
        report.device.clone_from(&assignment.device);
        report.model.clone_from(&pool.model);
        report.batch = bounds(assignment);
    }

    /// Changes what is known of a slot.
    pub(crate) fn change(&self, slot: &str, change: impl FnOnce(&mut Entry)) {
        let mut status = self.lock();
        if let Some(entry) = status.slots.get_mut(slot) {
            change(entry);
        }
        status.has_started = status.has_started || status.started();
    }

    /// By what a slot works.
    pub(super) fn assignment(&self, slot: &str) -> Option<Assignment> {
        self.read(|status| status.slots.get(slot).map(|entry| entry.assignment.clone()))
    }

    /// How many slots work on a device.
    pub(super) fn slots_on(&self, device: &str) -> usize {
        self.read(|status| status.slots.values().filter(|entry| entry.assignment.device == device).count())
    }

    /// Takes a slot off it.
    pub(super) fn remove(&self, slot: &str) {
        self.write(|status| drop(status.slots.remove(slot)));
    }

    fn lock(&self) -> MutexGuard<'_, SlotStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// It is in this state now.
    pub(crate) fn turn(&mut self, state: State) {
        if self.report.state != state {
            (self.report.state, self.since) = (state, Instant::now());
        }
    }

    /// Its worker's process is gone, or is another one from now on.
    pub(super) fn vacate(&mut self) {
        (self.computing_since, self.stuck_since) = (None, None);
        let report = &mut self.report;
        (report.pid, report.ready_at_ms, report.in_flight) = (None, None, 0);
        report.active.clear();
        if let Some(stats) = &mut report.stats {
            stats.now = Standing::default();
        }
    }

    /// Its worker is ready.
    pub(super) fn is_ready(&mut self) {
        self.was_ready = true;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.report.ready_at_ms = Some(since.as_millis() as u64);
    }

    /// What can be told of it now.
    pub fn report(&self) -> SlotReport {
        SlotReport {
            state_ms: self.since.elapsed().as_millis() as u64,
            active_ms: self.computing_since.map(|since| since.elapsed().as_millis() as u64),
            ..self.report.clone()
        }
    }
}

/// The bounds of batches that an assignment means.
fn bounds(assignment: &Assignment) -> BatchChange {
    let batch = &assignment.pool.batch;
    BatchChange {
        max_tokens: Some(assignment.max_tokens()),
        max_requests: Some(batch.max_requests),
        max_delay_ms: Some(batch.max_delay.as_secs_f64() * 1e3),
    }
}
