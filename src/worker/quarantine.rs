//! Keeps a task that was delivered before apart from all others, from its preparation to its answer:
//! it may be what killed the worker that held it, and if it kills this one too, nobody else is to be
//! with it. Tells the launcher so. Decides who may prepare, compute and respond meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{Notify, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::report::Reporter;
use crate::protocol::control::{Event, TaskName};

/// See the module.
pub(super) struct Quarantine {
    /// Written by a task in quarantine for as long as it is, read by each other task while something
    /// of it is on a lane. First come, first served, so that neither side starves.
    door: RwLock<()>,
    /// Read by the batch former, which then gives the device no batch of others.
    occupied: AtomicBool,
    /// The worker ends. Written by the batch former at a device fault, read by who leaves.
    closed: AtomicBool,
    /// Told when it is empty again, heard by the batch former.
    left: Notify,
    reporter: Reporter,
}

/// One task's stay.
pub(super) struct Alone<'a> {
    quarantine: &'a Quarantine,
    _door: RwLockWriteGuard<'a, ()>,
}

impl Quarantine {
    pub(super) fn new(reporter: Reporter) -> Self {
        let (occupied, closed) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { door: RwLock::new(()), occupied, closed, left: Notify::new(), reporter }
    }

    /// Until it is dropped, no task is in quarantine.
    pub(super) async fn keep_out(&self) -> RwLockReadGuard<'_, ()> {
        self.door.read().await
    }

    /// Puts a task in quarantine, until what is returned is dropped. What is on the device already
    /// stays there; the launcher knows of it.
    pub(super) async fn enter(&self, task: TaskName) -> Alone<'_> {
        let stay = Alone { _door: self.door.write().await, quarantine: self };
        self.occupied.store(true, Ordering::Release);
        self.reporter.send(&Event::Alone { task: Some(task) }).await;
        // The process may not live to write it later.
        self.reporter.flush().await;
        stay
    }

    /// A task is in quarantine.
    pub(super) fn is_occupied(&self) -> bool {
        self.occupied.load(Ordering::Acquire)
    }

    /// The device is gone: who is in quarantine now is not through, though its future is dropped.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Returns when one has left.
    pub(super) async fn left(&self) {
        self.left.notified().await;
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        if !self.quarantine.closed.load(Ordering::Acquire) {
            self.quarantine.reporter.mention(&Event::Alone { task: None });
        }
        self.quarantine.occupied.store(false, Ordering::Release);
        self.quarantine.left.notify_one();
    }
}
