//! Decides how many of a bounded number of bytes each of a pool's queues may hold, so that none can take the part of
//! another. Owns the count of what each queue and each requester holds. Pure.
//!
//! Half of the limit is divided among the queues by their shares, and kept for them. The other half goes to whoever
//! comes first. A queue that is the only one of its pool may hold everything.

use std::collections::BTreeMap;

use super::shares::{Owner, QueueShare, divide_by_weight};

/// The bytes that the queues of a pool hold.
#[derive(Clone, Debug)]
pub struct QueueBytes {
    limit: u64,
    /// By the queue's index.
    queues: Vec<Held>,
    /// By requester; those that hold nothing are left out.
    requesters: BTreeMap<Owner, u64>,
    /// Bytes that everybody holds.
    total: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// The bytes that are kept for this queue.
    kept: u64,
    /// The bytes that it holds.
    bytes: u64,
}

impl QueueBytes {
    /// Nothing is held. `queues` are the queues of the pool.
    pub fn new(limit: u64, queues: &[QueueShare]) -> Self {
        let half = usize::try_from(limit / 2).unwrap_or(usize::MAX);
        let parts: Vec<(u32, usize)> = queues.iter().map(|queue| (queue.share, half)).collect();
        let mut held = vec![Held::default(); queues.iter().map(|it| it.queue + 1).max().unwrap_or(1)];
        // A lone queue needs nothing kept.
        if queues.len() > 1 {
            for (queue, kept) in queues.iter().zip(divide_by_weight(&parts, half)) {
                if let Some(held) = held.get_mut(queue.queue) {
                    held.kept = kept as u64;
                }
            }
        }
        Self { limit, queues: held, requesters: BTreeMap::new(), total: 0 }
    }

    /// The most bytes that everybody may hold together.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The bytes that everybody holds.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The bytes that the queue holds.
    pub fn held(&self, queue: QueueShare) -> u64 {
        self.queues.get(queue.queue).map_or(0, |it| it.bytes)
    }

    /// The bytes that the requester holds.
    pub fn held_by(&self, requester: Owner) -> u64 {
        self.requesters.get(&requester).copied().unwrap_or(0)
    }

    /// The most bytes that the queue may hold now: what is kept for it, or the limit without what others hold and what
    /// is kept for them, whichever is more.
    pub fn most(&self, queue: QueueShare) -> u64 {
        let others = self.queues.iter().enumerate().filter(|(index, _)| *index != queue.queue);
        let kept_for_others: u64 = others.map(|(_, it)| it.kept.saturating_sub(it.bytes)).sum();
        let held_by_others = self.total - self.held(queue);
        let kept = self.queues.get(queue.queue).map_or(0, |it| it.kept);
        self.limit.saturating_sub(held_by_others).saturating_sub(kept_for_others).max(kept)
    }

    /// The bytes that the queue may hold at any time, whatever the others hold.
    pub fn kept(&self, queue: QueueShare) -> u64 {
        let kept = self.queues.get(queue.queue).map_or(0, |it| it.kept);
        if self.queues.iter().all(|it| it.kept == 0) { self.limit } else { kept }
    }

    /// Counts these bytes as held; without a requester they count for everybody.
    pub fn add(&mut self, requester: Option<Owner>, bytes: u64) {
        self.total += bytes;
        let Some(requester) = requester.filter(|_| bytes > 0) else { return };
        *self.requesters.entry(requester).or_default() += bytes;
        if let Some(held) = self.queues.get_mut(requester.queue.queue) {
            held.bytes += bytes;
        }
    }

    /// Takes back what [`QueueBytes::add`] has counted.
    pub fn remove(&mut self, requester: Option<Owner>, bytes: u64) {
        self.total -= bytes;
        let Some(requester) = requester else { return };
        if let Some(held) = self.requesters.get_mut(&requester) {
            *held -= bytes;
            if *held == 0 {
                self.requesters.remove(&requester);
            }
        }
        if let Some(held) = self.queues.get_mut(requester.queue.queue) {
            held.bytes -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: QueueShare = QueueShare { queue: 0, share: 1_000 };
    const OTHER: QueueShare = QueueShare { queue: 1, share: 3_000 };

    fn requester_of(queue: QueueShare) -> Option<Owner> {
        Some(Owner { queue, ..Owner::default() })
    }

    #[test]
    fn a_lone_queue_may_hold_everything() {
        let mut bytes = QueueBytes::new(100, &[ONE]);
        bytes.add(requester_of(ONE), 30);
        bytes.add(None, 10);
        assert_eq!((bytes.most(ONE), bytes.held(ONE), bytes.total()), (90, 30, 40));
        assert_eq!(bytes.kept(ONE), 100);
        assert_eq!(bytes.held_by(Owner::default()), 30);
        bytes.remove(requester_of(ONE), 30);
        assert_eq!((bytes.held_by(Owner::default()), bytes.requesters.len()), (0, 0));
    }

    #[test]
    fn whatever_one_queue_holds_the_part_of_another_is_left() {
        let mut bytes = QueueBytes::new(80, &[ONE, OTHER]);
        assert_eq!((bytes.kept(ONE), bytes.kept(OTHER)), (10, 30));
        assert_eq!(
            (bytes.most(ONE), bytes.most(OTHER)),
            (50, 70),
            "30 are kept for the other, 10 for the one"
        );
        bytes.add(requester_of(ONE), 50);
        assert_eq!((bytes.most(ONE), bytes.most(OTHER)), (50, 30));
        bytes.add(requester_of(OTHER), 30);
        assert_eq!(bytes.most(ONE), 50);
        bytes.remove(requester_of(ONE), 45);
        assert_eq!(bytes.most(OTHER), 70);
        bytes.add(requester_of(ONE), 200);
        assert_eq!(bytes.most(OTHER), 30, "a single large one does not take it either");
    }
}
