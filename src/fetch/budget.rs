//! Bounds the bytes of fetched files that a worker holds. Owns the count. Of the bytes that a queue may hold
//! (`QueueBytes`), a requester may hold half, so that others can fetch meanwhile. The last eighth is only for small files
//! of requesters that hold none.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::batching::{Owner, QueueBytes};

/// The budget of bytes that may be held. Clones share the count.
#[derive(Clone)]
pub(super) struct Budget(Arc<Shared>);

struct Shared {
    /// Written by [`Budget::take`] and [`Budget::exceed`], and when a share gives bytes back.
    held: Mutex<QueueBytes>,
    /// Notified when bytes are given back; the takers wait for it.
    freed: Notify,
}

/// Bytes that a file holds, until this is dropped.
pub(super) struct Share {
    budget: Budget,
    owner: Owner,
    bytes: u64,
}

impl Budget {
    /// Creates a budget of which nothing is held.
    pub(super) fn new(held: QueueBytes) -> Self {
        Self(Arc::new(Shared { held: Mutex::new(held), freed: Notify::new() }))
    }

    /// Waits until the requester may hold `bytes` more bytes. A requester that holds none may exceed its half, and if
    /// nobody of its queue holds any, even the whole budget. Safe to cancel.
    pub(super) async fn take(&self, owner: Owner, bytes: u64) -> Share {
        loop {
            let freed = self.0.freed.notified();
            tokio::pin!(freed);
            // From here on, no notification is missed.
            freed.as_mut().enable();
            if let Some(share) = self.try_take(owner, bytes) {
                return share;
            }
            freed.await;
        }
    }

    /// Counts `bytes` bytes as held at once, even if they exceed the budget.
    pub(super) fn exceed(&self, owner: Owner, bytes: u64) -> Share {
        self.add(&mut self.0.held.lock(), owner, bytes)
    }

    /// The most bytes that the files of one task may have together: it may hold them, whatever other queues hold.
    pub(super) fn most_of_task(&self, owner: Owner) -> u64 {
        self.0.held.lock().kept(owner.queue) / 2
    }

    /// The bytes, if the requester may hold them now.
    fn try_take(&self, owner: Owner, bytes: u64) -> Option<Share> {
        let mut counts = self.0.held.lock();
        let requester_bytes = counts.held_by(owner);
        let (held, most) = (counts.held(owner.queue), counts.most(owner.queue));
        let fits_half = requester_bytes == 0 || requester_bytes + bytes <= most / 2;
        let reserve = most / 8;
        let is_reserved = requester_bytes > 0 || bytes > reserve;
        let all = if is_reserved { most - reserve } else { most };
        let fits = held == 0 || held + bytes <= all && fits_half;
        fits.then(|| self.add(&mut counts, owner, bytes))
    }

    fn add(&self, counts: &mut QueueBytes, owner: Owner, bytes: u64) -> Share {
        counts.add(Some(owner), bytes);
        Share { budget: self.clone(), owner, bytes }
    }
}

impl Share {
    /// Gives back all bytes except `bytes`.
    pub(super) fn shrink(&mut self, bytes: u64) {
        let surplus = self.bytes.saturating_sub(bytes);
        self.bytes -= surplus;
        self.give_back(surplus);
    }

    fn give_back(&self, bytes: u64) {
        self.budget.0.held.lock().remove(Some(self.owner), bytes);
        self.budget.0.freed.notify_waiters();
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn of(requester: u64) -> Owner {
        Owner { requester, ..Owner::default() }
    }

    #[tokio::test]
    async fn a_requester_holds_at_most_half_and_all_together_the_whole() {
        let budget = Budget::new(QueueBytes::new(100, &[]));
        let one = budget.take(of(1), 28).await;
        assert!(budget.take(of(1), 28).now_or_never().is_none(), "56 is more than half");
        let two = budget.take(of(2), 60).now_or_never().expect("its first may be larger than half");
        assert!(budget.take(of(3), 13).now_or_never().is_none(), "12 are left");
        assert!(budget.take(of(2), 1).now_or_never().is_none(), "they are for others");
        let small = budget.take(of(3), 12).now_or_never().expect("a small file of another requester");
        assert!(budget.take(of(4), 1).now_or_never().is_none(), "nothing is left");
        drop((one, small));
        let mut three = budget.take(of(3), 20).now_or_never().expect("28 are left");
        three.shrink(10);
        assert_eq!(budget.0.held.lock().total(), 70);
        drop((two, three));
        assert_eq!(budget.0.held.lock().total(), 0);
        let huge = budget.take(of(1), 500).now_or_never().expect("a file alone may be larger than the whole");
        let more = budget.exceed(of(2), 10);
        assert_eq!(budget.0.held.lock().total(), 510);
        drop((huge, more));
    }

    #[tokio::test]
    async fn whoever_waits_is_woken_when_bytes_are_given_back() {
        let budget = Budget::new(QueueBytes::new(10, &[]));
        let held = budget.take(of(1), 10).await;
        let waiting = tokio::spawn({
            let budget = budget.clone();
            async move { budget.take(of(2), 5).await }
        });
        tokio::task::yield_now().await;
        drop(held);
        waiting.await.unwrap();
    }
}
