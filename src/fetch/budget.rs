//! Bounds the bytes of fetched files that a worker holds. Owns the count. A requester may hold half of the bytes, so
//! that others can fetch meanwhile. The last eighth is only for small files of requesters that hold none.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The budget of bytes that may be held. Clones share the count.
#[derive(Clone)]
pub(super) struct Budget(Arc<Shared>);

struct Shared {
    limit: u64,
    /// Written by [`Budget::take`] and [`Budget::exceed`], and when a share gives bytes back.
    held: Mutex<Counts>,
    /// Notified when bytes are given back; the takers wait for it.
    freed: Notify,
}

#[derive(Default)]
struct Counts {
    total: u64,
    /// The bytes of each requester that holds some.
    by_requester: HashMap<u64, u64>,
}

/// Bytes that a file holds, until this is dropped.
pub(super) struct Share {
    budget: Budget,
    requester: u64,
    bytes: u64,
}

impl Budget {
    /// Creates a budget of `limit` bytes, of which none are held.
    pub(super) fn new(limit: u64) -> Self {
        Self(Arc::new(Shared { limit, held: Mutex::default(), freed: Notify::new() }))
    }

    /// Waits until the requester may hold `bytes` more bytes. A requester that holds none may exceed its half, and if
    /// nobody holds any, even the whole budget. Safe to cancel.
    pub(super) async fn take(&self, requester: u64, bytes: u64) -> Share {
        loop {
            let freed = self.0.freed.notified();
            tokio::pin!(freed);
            // From here on, no notification is missed.
            freed.as_mut().enable();
            let fits = self.lock().try_take(self.0.limit, requester, bytes);
            if fits {
                return self.share(requester, bytes);
            }
            freed.await;
        }
    }

    /// Counts `bytes` bytes as held at once, even if they exceed the budget.
    pub(super) fn exceed(&self, requester: u64, bytes: u64) -> Share {
        self.lock().add(requester, bytes);
        self.share(requester, bytes)
    }

    fn share(&self, requester: u64, bytes: u64) -> Share {
        Share { budget: self.clone(), requester, bytes }
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counts {
    /// Adds the bytes if the requester may hold them. Returns whether it may.
    fn try_take(&mut self, limit: u64, requester: u64, bytes: u64) -> bool {
        let requester_bytes = self.by_requester.get(&requester).copied().unwrap_or(0);
        let fits_half = requester_bytes == 0 || requester_bytes + bytes <= limit / 2;
        let reserve = limit / 8;
        let is_reserved = requester_bytes > 0 || bytes > reserve;
        let all = if is_reserved { limit - reserve } else { limit };
        let fits = self.total == 0 || self.total + bytes <= all && fits_half;
        if fits {
            self.add(requester, bytes);
        }
        fits
    }

    fn add(&mut self, requester: u64, bytes: u64) {
        self.total += bytes;
        *self.by_requester.entry(requester).or_default() += bytes;
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
        let mut held = self.budget.lock();
        held.total -= bytes;
        if let Some(requester_bytes) = held.by_requester.get_mut(&self.requester) {
            *requester_bytes -= bytes;
            if *requester_bytes == 0 {
                held.by_requester.remove(&self.requester);
            }
        }
        drop(held);
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

    #[tokio::test]
    async fn a_requester_holds_at_most_half_and_all_together_the_whole() {
        let budget = Budget::new(100);
        let one = budget.take(1, 28).await;
        assert!(budget.take(1, 28).now_or_never().is_none(), "56 is more than half");
        let two = budget.take(2, 60).now_or_never().expect("its first may be larger than half");
        assert!(budget.take(3, 13).now_or_never().is_none(), "12 are left");
        assert!(budget.take(2, 1).now_or_never().is_none(), "they are for others");
        let small = budget.take(3, 12).now_or_never().expect("a small file of another requester");
        assert!(budget.take(4, 1).now_or_never().is_none(), "nothing is left");
        drop((one, small));
        let mut three = budget.take(3, 20).now_or_never().expect("28 are left");
        three.shrink(10);
        assert_eq!(budget.lock().total, 70);
        drop((two, three));
        assert!(budget.lock().by_requester.is_empty() && budget.lock().total == 0);
        let huge = budget.take(1, 500).now_or_never().expect("a file alone may be larger than the whole");
        let more = budget.exceed(2, 10);
        assert_eq!(budget.lock().total, 510);
        drop((huge, more));
    }

    #[tokio::test]
    async fn whoever_waits_is_woken_when_bytes_are_given_back() {
        let budget = Budget::new(10);
        let held = budget.take(1, 10).await;
        let waiting = tokio::spawn({
            let budget = budget.clone();
            async move { budget.take(2, 5).await }
        });
        tokio::task::yield_now().await;
        drop(held);
        waiting.await.unwrap();
    }
}
