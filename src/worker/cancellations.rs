//! Passes cancellations from the reader of the launcher's commands to the intake of the current session. None is lost
//! while there is a session: if too many wait, the reader waits, and with it the launcher and the broker. Owns the list
//! of those that wait.

use std::mem;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use crate::protocol::control::Cancellation;

/// How many cancellations may wait. The intake takes all of them at once, so that this many are waiting only if its
/// thread was busy for seconds.
const MAX_WAITING: usize = 16_384;

/// The reader's end. Clones share the list.
#[derive(Clone, Debug, Default)]
pub struct Cancellations(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    list: Mutex<List>,
    /// Notified when some are added; the intake waits for it.
    added: Notify,
    /// Notified when the list was taken or closed; the reader waits for it.
    taken: Condvar,
}

#[derive(Debug, Default)]
struct List {
    waiting: Vec<Cancellation>,
    /// Whether there is a session.
    is_open: bool,
}

/// The intake's end. Dropping it closes the list.
pub(super) struct Waiting(Arc<Shared>);

impl Cancellations {
    /// Adds cancellations. Blocks the thread while too many wait. Returns false if there is no session, and so no task
    /// to cancel.
    pub fn add(&self, cancellations: Vec<Cancellation>) -> bool {
        let mut list = self.0.list.lock();
        while list.is_open && list.waiting.len() >= MAX_WAITING {
            self.0.taken.wait(&mut list);
        }
        let is_open = list.is_open;
        if is_open {
            list.waiting.extend(cancellations);
            self.0.added.notify_one();
        }
        is_open
    }

    /// Opens the list for a session.
    pub(super) fn open(&self) -> Waiting {
        self.0.list.lock().is_open = true;
        Waiting(self.0.clone())
    }
}

impl Waiting {
    /// Takes all cancellations, once there is one. Safe to cancel.
    pub(super) async fn take(&self) -> Vec<Cancellation> {
        loop {
            let added = self.0.added.notified();
            let all = mem::take(&mut self.0.list.lock().waiting);
            if !all.is_empty() {
                self.0.taken.notify_all();
                return all;
            }
            added.await;
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        *self.0.list.lock() = List::default();
        self.0.taken.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn some(count: usize) -> Vec<Cancellation> {
        vec![Cancellation::default(); count]
    }

    #[tokio::test]
    async fn none_is_lost_while_the_intake_is_busy() {
        let cancellations = Cancellations::default();
        assert!(!cancellations.add(some(1)), "there is no session");
        let waiting = cancellations.open();
        let reader = cancellations.clone();
        let reader = thread::spawn(move || (0..3).all(|_| reader.add(some(MAX_WAITING))));
        let mut taken = 0;
        while taken < 3 * MAX_WAITING {
            let all = waiting.take().await.len();
            assert!(all <= MAX_WAITING, "the reader waits for the intake");
            taken += all;
        }
        assert!(reader.join().unwrap());
        cancellations.add(some(MAX_WAITING));
        let reader = thread::spawn(move || cancellations.add(some(1)));
        // Once it waits, it can be woken; it finds the list full, and waits again.
        while !waiting.0.taken.notify_one() {
            thread::yield_now();
        }
        drop(waiting);
        assert!(!reader.join().unwrap(), "the session has ended");
    }
}
