//! Which deliveries of a session are unsettled, and how acks become few commands: one `multiple` for
//! all up to the first unsettled delivery, one each behind it. Pure.
//!
//! Few matters beyond speed: RabbitMQ holds back what a channel settles on a quorum queue while more
//! than 32 such commands are under way, and forgets what it holds when the channel closes. Acks in a
//! burst before a close would so be lost, and their tasks answered twice.

use std::collections::BTreeSet;

/// An ack to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ack {
    /// The delivery tag.
    pub(super) tag: u64,
    /// Acks all unsettled deliveries before it too.
    pub(super) multiple: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    unsettled: BTreeSet<u64>,
    acked: BTreeSet<u64>,
    /// Somebody is sending what [`Ledger::take`] gives, and will take again.
    sending: bool,
}

impl Ledger {
    /// A delivery came. Called in the order of tags, before anybody can settle it.
    pub(super) fn delivered(&mut self, tag: u64) {
        self.unsettled.insert(tag);
    }

    /// Whether `full` deliveries are unsettled, none of them from before the tag `first`, and nobody is
    /// about to settle one: then the caller is the sender, and no ack passes until it has called
    /// [`Ledger::take`].
    pub(super) fn hold(&mut self, first: u64, full: usize) -> bool {
        let own = self.unsettled.first().is_some_and(|oldest| *oldest >= first);
        let free = own && self.unsettled.len() >= full && !self.sending;
        self.sending |= free;
        free
    }

    /// A delivery went back. Called once the broker has been told: while this is under way, no
    /// `multiple` may pass over it, or it would be acked.
    pub(super) fn returned(&mut self, tag: u64) {
        self.unsettled.remove(&tag);
    }

    /// A delivery is to be acked. True: the caller must send, see [`Ledger::take`].
    pub(super) fn ack(&mut self, tag: u64) -> bool {
        self.acked.insert(tag);
        !std::mem::replace(&mut self.sending, true)
    }

    /// What to send now, in this order. Empty: nothing more, and the caller no longer sends.
    pub(super) fn take(&mut self) -> Vec<Ack> {
        let mut acks = Vec::new();
        while let Some(&first) = self.unsettled.first() {
            if !self.acked.remove(&first) {
                break;
            }
            self.unsettled.remove(&first);
            acks = vec![Ack { tag: first, multiple: true }];
        }
        for tag in std::mem::take(&mut self.acked) {
            self.unsettled.remove(&tag);
            acks.push(Ack { tag, multiple: false });
        }
        self.sending = !acks.is_empty();
        acks
    }

    /// Whether nobody has settled it, nor is about to.
    pub(super) fn is_unsettled(&self, tag: u64) -> bool {
        self.unsettled.contains(&tag) && !self.acked.contains(&tag)
    }

    /// All that is not settled, in the order of tags; also what is about to be acked.
    pub(super) fn unsettled(&self) -> impl Iterator<Item = u64> {
        self.unsettled.iter().copied()
    }

    /// The sender gave up in the middle; the next ack makes a new one.
    pub(super) fn abandon(&mut self) {
        self.sending = false;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ledger(tags: std::ops::RangeInclusive<u64>) -> Ledger {
        let mut ledger = Ledger::default();
        tags.for_each(|tag| ledger.delivered(tag));
        ledger
    }

    #[test]
    fn acks_up_to_the_first_gap_are_one_command() {
        let mut ledger = ledger(1..=6);
        let sends: Vec<_> = [2, 1, 3, 5].map(|tag| ledger.ack(tag)).into();
        assert_eq!(sends, [true, false, false, false], "one sender");
        assert_eq!(ledger.take(), [Ack { tag: 3, multiple: true }, Ack { tag: 5, multiple: false }]);
        assert_eq!(ledger.take(), []);
        assert!(ledger.ack(4));
        assert_eq!(ledger.take(), [Ack { tag: 4, multiple: true }]);
    }

    #[test]
    fn while_acks_are_held_they_wait_for_who_holds_them() {
        let mut ledger = ledger(1..=5);
        assert!(!ledger.hold(1, 6), "fewer than a full prefetch");
        assert!(!ledger.hold(2, 4), "one is of an older consumer");
        assert!(ledger.hold(1, 5));
        assert!(!ledger.ack(1), "somebody sends");
        assert!(!ledger.hold(1, 5));
        assert_eq!(ledger.take(), [Ack { tag: 1, multiple: true }]);
        assert_eq!(ledger.take(), []);
        assert!(ledger.hold(2, 4));
    }

    #[test]
    fn no_ack_passes_over_a_delivery_that_is_on_its_way_back() {
        let mut ledger = ledger(1..=3);
        ledger.ack(1);
        ledger.ack(3);
        assert_eq!(ledger.take(), [Ack { tag: 1, multiple: true }, Ack { tag: 3, multiple: false }]);
        ledger.returned(2);
        assert_eq!(ledger.take(), []);
    }

    proptest! {
        /// Plays the broker: whatever the order, just the acked deliveries leave it.
        #[test]
        fn the_broker_drops_what_was_acked_and_nothing_else(
            steps in prop::collection::vec((0u8..4, 0usize..20), 1..200),
        ) {
            let mut ledger = Ledger::default();
            let (mut at_broker, mut acked) = (BTreeSet::new(), BTreeSet::new());
            let mut open: Vec<u64> = Vec::new();
            let mut next = 1;
            for (what, which) in steps {
                match what {
                    0 => {
                        ledger.delivered(next);
                        at_broker.insert(next);
                        open.push(next);
                        next += 1;
                    }
                    1 if !open.is_empty() => {
                        let tag = open.remove(which % open.len());
                        acked.insert(tag);
                        ledger.ack(tag);
                    }
                    2 if !open.is_empty() => {
                        let tag = open.remove(which % open.len());
                        at_broker.remove(&tag);
                        ledger.returned(tag);
                    }
                    _ => {
                        for Ack { tag, multiple } in ledger.take() {
                            let gone: Vec<u64> = at_broker
                                .iter().copied().filter(|it| *it == tag || multiple && *it < tag).collect();
                            prop_assert!(gone.iter().all(|it| acked.contains(it)), "{gone:?}");
                            at_broker.retain(|it| !gone.contains(it));
                        }
                    }
                }
            }
            ledger.take();
            prop_assert!(ledger.acked.is_empty());
        }
    }
}
