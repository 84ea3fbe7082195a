//! What is known about every slot: its state, the statistics of its workers, the tasks on its device. Slots write it
//! when control lines arrive and when processes start or end; metrics, health and remote control read it. A slot's
//! entry outlives its workers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;

use crate::config::Assignment;
use crate::protocol::admin::{BatchBounds, SlotReport, State};
use crate::protocol::stats::WorkerState;

/// The status of all slots, and the time since the launcher's start.
#[derive(Debug)]
pub struct StatusBoard {
    /// Locked for reading or writing a few values; never across an await.
    status: Mutex<SlotStatus>,
    started: Instant,
    /// Whether the metrics were read. Set by the HTTP server; read and cleared by the code that counts messages in
    /// queues, because they are counted only if somebody reads the result.
    is_read: AtomicBool,
}

/// The content of the board.
#[derive(Debug, Default)]
pub struct SlotStatus {
    /// The slots, by name.
    pub slots: BTreeMap<String, Entry>,
    /// Reloads of settings that were applied.
    pub reloads_applied: u64,
    /// Reloads of settings that were refused.
    pub reloads_refused: u64,
    /// Messages that wait in the pools' queues, by the queue's name and kind. Queues that this user may not inspect are
    /// missing.
    pub queues: BTreeMap<(String, &'static str), u32>,
    /// Whether every pool has had a worker that was ready. Once set, it stays set.
    pub has_started: bool,
}

/// One slot.
#[derive(Debug)]
pub struct Entry {
    /// The report about the slot, without values that change with the clock.
    pub report: SlotReport,
    /// When it entered its state.
    pub since: Instant,
    /// When the forward pass on its device began; none if none is running.
    pub computing_since: Option<Instant>,
    /// When its worker was found to exceed a time limit; none if the worker is not stuck.
    pub stuck_since: Option<Instant>,
    /// Whether it has had a worker that was ready.
    pub was_ready: bool,
    /// The assignment of its current or next worker.
    pub(crate) assignment: Assignment,
}

impl SlotStatus {
    /// Whether every pool has had a worker that was ready.
    fn has_every_pool_started(&self) -> bool {
        let ready_pools: BTreeSet<_> =
            self.slots.values().filter(|it| it.was_ready).map(|it| &it.report.pool).collect();
        !self.slots.is_empty() && self.slots.values().all(|entry| ready_pools.contains(&entry.report.pool))
    }
}

impl Default for StatusBoard {
    fn default() -> Self {
        Self { status: Mutex::default(), started: Instant::now(), is_read: AtomicBool::new(false) }
    }
}

impl StatusBoard {
    /// Reads the status.
    pub fn read<T>(&self, read: impl FnOnce(&SlotStatus) -> T) -> T {
        read(&self.status.lock())
    }

    /// The time since the launcher started.
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Records that the metrics are being read.
    #[cfg_attr(not(feature = "http"), allow(dead_code, reason = "only the HTTP server reads them"))]
    pub(crate) fn mark_read(&self) {
        self.is_read.store(true, Ordering::Relaxed);
    }

    /// Whether the metrics were read since the last call.
    pub(crate) fn was_read(&self) -> bool {
        self.is_read.swap(false, Ordering::Relaxed)
    }

    /// Sets how many messages wait in queues.
    pub(crate) fn set_queues(&self, queues: BTreeMap<(String, &'static str), u32>) {
        self.write(|status| status.queues = queues);
    }

    pub(super) fn write(&self, write: impl FnOnce(&mut SlotStatus)) {
        write(&mut self.status.lock());
    }

    /// Adds a slot, or changes its assignment.
    pub(crate) fn assign(&self, assignment: &Assignment) {
        let mut status = self.status.lock();
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
        report.batch = batch_bounds(assignment);
    }

    pub(crate) fn change(&self, slot: &str, change: impl FnOnce(&mut Entry)) {
        let mut status = self.status.lock();
        if let Some(entry) = status.slots.get_mut(slot) {
            change(entry);
        }
        status.has_started = status.has_started || status.has_every_pool_started();
    }

    pub(super) fn assignment(&self, slot: &str) -> Option<Assignment> {
        self.read(|status| status.slots.get(slot).map(|entry| entry.assignment.clone()))
    }

    /// The number of slots on a device.
    pub(super) fn slots_on(&self, device: &str) -> usize {
        self.read(|status| status.slots.values().filter(|entry| entry.assignment.device == device).count())
    }

    pub(super) fn remove(&self, slot: &str) {
        self.write(|status| drop(status.slots.remove(slot)));
    }
}

impl Entry {
    pub(crate) fn set_state(&mut self, state: State) {
        if self.report.state != state {
            (self.report.state, self.since) = (state, Instant::now());
        }
    }

    /// Clears what belongs to one worker process, because the process has ended or is replaced.
    pub(super) fn clear_worker(&mut self) {
        (self.computing_since, self.stuck_since) = (None, None);
        let report = &mut self.report;
        (report.pid, report.dtype, report.ready_at_ms, report.in_flight) = (None, None, None, 0);
        report.active.clear();
        report.assumptions.clear();
        if let Some(stats) = &mut report.stats {
            stats.now = WorkerState::default();
        }
    }

    /// Records that its worker is ready, with the model in this number format, and with these assumptions.
    pub(super) fn mark_ready(&mut self, dtype: &str, assumptions: &[String]) {
        self.was_ready = true;
        self.report.assumptions = assumptions.to_vec();
        self.report.dtype = Some(dtype.to_owned());
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.report.ready_at_ms = Some(since_epoch.as_millis() as u64);
    }

    /// The report, with the values that change with the clock.
    pub fn report(&self) -> SlotReport {
        SlotReport {
            state_ms: self.since.elapsed().as_millis() as u64,
            active_ms: self.computing_since.map(|since| since.elapsed().as_millis() as u64),
            ..self.report.clone()
        }
    }
}

/// The bounds of batches in an assignment.
fn batch_bounds(assignment: &Assignment) -> BatchBounds {
    let batch = &assignment.pool.batch;
    BatchBounds {
        max_tokens: Some(assignment.max_tokens()),
        max_requests: Some(batch.max_requests),
        max_delay_ms: Some(batch.max_delay.as_secs_f64() * 1e3),
    }
}
