//! Matches each reply with its task, once, and decides when it is passed on. Owns the tasks under way and the replies
//! that wait for earlier ones. Does no I/O and has no clock: times are passed in.

use std::collections::BTreeMap;

use tokio::time::Instant;

use crate::protocol::Message;

/// The tasks of one run, numbered in the order of publishing.
pub(super) struct Gather<M> {
    /// The number of the first task.
    first: u64,
    /// Number of tasks that were begun.
    begun: u64,
    in_order: bool,
    /// Tasks not answered yet, by number. Bound: the caller's.
    waiting: BTreeMap<u64, Unanswered<M>>,
    /// The bytes of their bodies together.
    bytes: usize,
    /// Tasks answered and not passed on yet, by number. Bound: the caller's.
    answered: BTreeMap<u64, Answered<M>>,
}

/// A task that is not answered yet.
struct Unanswered<M> {
    meta: M,
    /// The bytes of its body.
    bytes: usize,
    begun_at: Instant,
}

/// A task that is answered.
pub(super) struct Answered<M> {
    pub(super) number: u64,
    pub(super) meta: M,
    /// None: nothing was published, no replies are expected, or the task was given up.
    pub(super) reply: Option<Message>,
    pub(super) at: Instant,
}

impl<M> Gather<M> {
    pub(super) fn new(first: u64, in_order: bool) -> Self {
        Self { first, begun: 0, in_order, waiting: BTreeMap::new(), bytes: 0, answered: BTreeMap::new() }
    }

    /// Begins a task whose body has this many bytes.
    pub(super) fn begin(&mut self, meta: M, bytes: usize, now: Instant) {
        self.waiting.insert(self.first + self.begun, Unanswered { meta, bytes, begun_at: now });
        self.bytes += bytes;
        self.begun += 1;
    }

    /// Records the reply to the task with this number. False: the task is unknown, or it was answered before.
    /// The latter happens because the service is at-least-once and may repeat replies.
    pub(super) fn answer(&mut self, number: u64, reply: Option<Message>, at: Instant) -> bool {
        let Some(Unanswered { meta, bytes, .. }) = self.waiting.remove(&number) else { return false };
        self.bytes -= bytes;
        self.answered.insert(number, Answered { number, meta, reply, at });
        true
    }

    /// The next answer to pass on; none if no task is answered yet. With `in_order`, also none while an earlier task is
    /// not answered.
    pub(super) fn next(&mut self) -> Option<Answered<M>> {
        let oldest = self.waiting.first_key_value().map(|(number, _)| *number);
        let first = self.answered.first_entry()?;
        if self.in_order && oldest.is_some_and(|oldest| oldest < *first.key()) {
            return None;
        }
        Some(first.remove())
    }

    pub(super) fn begun(&self) -> u64 {
        self.begun
    }

    /// Number of tasks that were begun and not passed on.
    pub(super) fn under_way(&self) -> usize {
        self.waiting.len() + self.answered.len()
    }

    /// The bytes of the bodies of the tasks not answered yet.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of tasks not answered yet.
    pub(super) fn missing(&self) -> usize {
        self.waiting.len()
    }

    /// When the oldest unanswered task was begun.
    pub(super) fn oldest_begun_at(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(_, task)| task.begun_at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn passed_on(gather: &mut Gather<u64>) -> Vec<u64> {
        std::iter::from_fn(|| gather.next().map(|answered| answered.number)).collect()
    }

    fn begun(count: u64, in_order: bool) -> Gather<u64> {
        let mut gather = Gather::new(3, in_order);
        (0..count).for_each(|meta| gather.begin(meta, 5, Instant::now()));
        gather
    }

    #[test]
    fn a_reply_waits_for_those_before_it_only_where_order_is_asked_for() {
        for (in_order, expected) in [(true, vec![]), (false, vec![5])] {
            let mut gather = begun(3, in_order);
            assert!(gather.answer(5, None, Instant::now()));
            assert_eq!(passed_on(&mut gather), expected);
        }
    }

    #[test]
    fn duplicate_replies_and_replies_of_other_runs_are_ignored() {
        let mut gather = begun(2, true);
        assert!(gather.answer(3, None, Instant::now()));
        assert!(!gather.answer(3, None, Instant::now()), "before it is passed on");
        assert_eq!(passed_on(&mut gather), [3]);
        assert!(!gather.answer(3, None, Instant::now()), "after it");
        assert!(!gather.answer(9, None, Instant::now()));
        assert_eq!((gather.under_way(), gather.missing(), gather.bytes()), (1, 1, 5));
    }

    proptest! {
        #[test]
        fn replies_in_any_order_are_passed_on_in_order_each_once(
            count in 0u64..60, bound in 1usize..9, picks in prop::collection::vec(any::<prop::sample::Index>(), 200),
        ) {
            let mut gather = Gather::new(0, true);
            let (mut out, mut open) = (Vec::new(), Vec::new());
            for pick in picks {
                while gather.begun() < count && gather.under_way() < bound {
                    open.push(gather.begun());
                    gather.begin(gather.begun(), 5, Instant::now());
                }
                prop_assert!(gather.under_way() <= bound);
                if open.is_empty() {
                    break;
                }
                let number = open.swap_remove(pick.index(open.len()));
                prop_assert!(gather.answer(number, None, Instant::now()));
                while let Some(Answered { number, meta, .. }) = gather.next() {
                    prop_assert_eq!(number, meta);
                    out.push(number);
                }
            }
            prop_assert_eq!(out, (0..count).collect::<Vec<_>>());
        }
    }
}
