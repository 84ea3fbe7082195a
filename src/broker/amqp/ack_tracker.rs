//! Which deliveries of a session are unsettled, and how acks become few commands: one `multiple` for
//! all up to the first unsettled delivery, one each behind it. Pure.
//!
//! Few matters beyond speed: RabbitMQ holds back what a channel settles on a quorum queue while more
//! than 32 such commands are under way, and forgets what it holds when the channel closes. Acks in a
//! burst before a close would so be lost, and their tasks answered twice. And it writes each command to
//! disk, while a task that comes right behind a reply waits for that.

use std::collections::BTreeSet;

/// An ack to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ack {
    /// The delivery tag.
    pub(super) tag: u64,
    /// Acks all unsettled deliveries before it too.
    pub(super) multiple: bool,
}

/// What becomes of an ack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flush {
    /// The caller sends, see [`AckTracker::take`].
    Send,
    /// The caller waits a little for more to send with it, then asks [`AckTracker::begin`].
    Gather,
    /// Somebody else sends it.
    Leave,
}

/// Who cares for the acks that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sender {
    #[default]
    Nobody,
    /// Somebody waits for more of them. Others may send meanwhile.
    Gathering,
    /// Somebody is sending what [`AckTracker::take`] gives, and will take again.
    Sending,
}

/// The unsettled deliveries of one channel, and what is known of each.
#[derive(Debug, Default)]
pub(super) struct AckTracker {
    unsettled: BTreeSet<u64>,
    acked: BTreeSet<u64>,
    sender: Sender,
    /// So many acks wait for no more.
    enough: usize,
    /// The last delivery that was not its message's first.
    redelivered: u64,
}

impl AckTracker {
    /// Acks may wait for more, until they are so many. Without this call none waits.
    pub(super) fn gather(&mut self, enough: usize) {
        self.enough = enough;
    }

    /// A delivery came. Called in the order of tags, before anybody can settle it.
    pub(super) fn delivered(&mut self, tag: u64, redelivered: bool) {
        self.unsettled.insert(tag);
        if redelivered {
            self.redelivered = tag;
        }
    }

    /// Whether `full` deliveries are unsettled, none of them from before the tag `first`, and nobody is
    /// about to settle one: then the caller is the sender, and no ack passes until it has called
    /// [`AckTracker::take`].
    pub(super) fn hold(&mut self, first: u64, full: usize) -> bool {
        let own = self.unsettled.first().is_some_and(|oldest| *oldest >= first);
        own && self.unsettled.len() >= full && self.begin()
    }

    /// Whether nobody is sending: then the caller is, see [`AckTracker::take`].
    pub(super) fn begin(&mut self) -> bool {
        std::mem::replace(&mut self.sender, Sender::Sending) != Sender::Sending
    }

    /// A delivery went back. Called once the broker has been told: while this is under way, no
    /// `multiple` may pass over it, or it would be acked.
    pub(super) fn returned(&mut self, tag: u64) {
        self.unsettled.remove(&tag);
    }

    /// A delivery is to be acked. At once where it, or one behind it, was delivered before: such a one may end
    /// the process that works on it, and what was done just before would have to be done again.
    pub(super) fn ack(&mut self, tag: u64) -> Flush {
        self.acked.insert(tag);
        let at_once = tag <= self.redelivered || self.acked.len() >= self.enough;
        let (sender, flush) = match self.sender {
            Sender::Sending => (Sender::Sending, Flush::Leave),
            _ if at_once => (Sender::Sending, Flush::Send),
            Sender::Gathering => (Sender::Gathering, Flush::Leave),
            Sender::Nobody => (Sender::Gathering, Flush::Gather),
        };
        self.sender = sender;
        flush
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
        self.sender = if acks.is_empty() { Sender::Nobody } else { Sender::Sending };
        acks
    }

    /// The sender gave up in the middle; the next ack makes a new one.
    pub(super) fn abandon(&mut self) {
        self.sender = Sender::Nobody;
    }

    /// Who gathered no longer does.
    pub(super) fn gathered(&mut self) {
        if self.sender == Sender::Gathering {
            self.sender = Sender::Nobody;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ack_tracker(tags: std::ops::RangeInclusive<u64>) -> AckTracker {
        let mut ack_tracker = AckTracker::default();
        tags.for_each(|tag| ack_tracker.delivered(tag, false));
        ack_tracker
    }

    #[test]
    fn acks_up_to_the_first_gap_are_one_command() {
        let mut ack_tracker = ack_tracker(1..=6);
        let turns = [2, 1, 3, 5].map(|tag| ack_tracker.ack(tag));
        assert_eq!(turns, [Flush::Send, Flush::Leave, Flush::Leave, Flush::Leave], "one sender");
        assert_eq!(ack_tracker.take(), [Ack { tag: 3, multiple: true }, Ack { tag: 5, multiple: false }]);
        assert_eq!(ack_tracker.take(), []);
        assert_eq!(ack_tracker.ack(4), Flush::Send);
        assert_eq!(ack_tracker.take(), [Ack { tag: 4, multiple: true }]);
    }

    #[test]
    fn while_acks_are_held_they_wait_for_who_holds_them() {
        let mut ack_tracker = ack_tracker(1..=5);
        assert!(!ack_tracker.hold(1, 6), "fewer than a full prefetch");
        assert!(!ack_tracker.hold(2, 4), "one is of an older consumer");
        assert!(ack_tracker.hold(1, 5));
        assert_eq!(ack_tracker.ack(1), Flush::Leave, "somebody sends");
        assert!(!ack_tracker.hold(1, 5));
        assert_eq!(ack_tracker.take(), [Ack { tag: 1, multiple: true }]);
        assert_eq!(ack_tracker.take(), []);
        assert!(ack_tracker.hold(2, 4));
    }

    #[test]
    fn acks_wait_for_more_until_they_are_enough_and_then_whoever_comes_sends() {
        let mut ack_tracker = ack_tracker(1..=9);
        ack_tracker.gather(3);
        assert_eq!(
            [1, 2, 3, 4].map(|tag| ack_tracker.ack(tag)),
            [Flush::Gather, Flush::Leave, Flush::Send, Flush::Leave]
        );
        assert!(!ack_tracker.begin(), "who gathered finds that somebody sends");
        assert_eq!(ack_tracker.take(), [Ack { tag: 4, multiple: true }]);
        assert_eq!((ack_tracker.take(), ack_tracker.ack(5)), (vec![], Flush::Gather));
        assert!(ack_tracker.hold(5, 5), "nobody is sending yet");
        ack_tracker.gathered();
        assert!(!ack_tracker.begin());
        assert_eq!((ack_tracker.take(), ack_tracker.take()), (vec![Ack { tag: 5, multiple: true }], vec![]));
        assert_eq!(ack_tracker.ack(6), Flush::Gather);
        ack_tracker.gathered();
        assert_eq!(ack_tracker.ack(7), Flush::Gather, "the one before was given up");
        ack_tracker.gathered();
        assert!(ack_tracker.begin());
        assert_eq!(ack_tracker.take(), [Ack { tag: 7, multiple: true }]);
    }

    #[test]
    fn acks_up_to_what_was_delivered_before_wait_for_none() {
        let mut ack_tracker = AckTracker::default();
        ack_tracker.gather(10);
        for tag in 1..=4 {
            ack_tracker.delivered(tag, tag == 2);
        }
        assert_eq!(
            [1, 2].map(|tag| (ack_tracker.ack(tag), ack_tracker.take().len(), ack_tracker.take().len())),
            [(Flush::Send, 1, 0); 2]
        );
        assert_eq!(ack_tracker.ack(3), Flush::Gather);
    }

    #[test]
    fn no_ack_passes_over_a_delivery_that_is_on_its_way_back() {
        let mut ack_tracker = ack_tracker(1..=3);
        ack_tracker.ack(1);
        ack_tracker.ack(3);
        assert_eq!(ack_tracker.take(), [Ack { tag: 1, multiple: true }, Ack { tag: 3, multiple: false }]);
        ack_tracker.returned(2);
        assert_eq!(ack_tracker.take(), []);
    }

    proptest! {
        /// Plays the broker: whatever the order, just the acked deliveries leave it.
        #[test]
        fn the_broker_drops_what_was_acked_and_nothing_else(
            steps in prop::collection::vec((0u8..4, 0usize..20), 1..200),
        ) {
            let mut ack_tracker = AckTracker::default();
            let (mut at_broker, mut acked) = (BTreeSet::new(), BTreeSet::new());
            let mut open: Vec<u64> = Vec::new();
            let mut next = 1;
            for (what, which) in steps {
                match what {
                    0 => {
                        ack_tracker.delivered(next, false);
                        at_broker.insert(next);
                        open.push(next);
                        next += 1;
                    }
                    1 if !open.is_empty() => {
                        let tag = open.remove(which % open.len());
                        acked.insert(tag);
                        ack_tracker.ack(tag);
                    }
                    2 if !open.is_empty() => {
                        let tag = open.remove(which % open.len());
                        at_broker.remove(&tag);
                        ack_tracker.returned(tag);
                    }
                    _ => {
                        for Ack { tag, multiple } in ack_tracker.take() {
                            let gone: Vec<u64> = at_broker
                                .iter().copied().filter(|it| *it == tag || multiple && *it < tag).collect();
                            prop_assert!(gone.iter().all(|it| acked.contains(it)), "{gone:?}");
                            at_broker.retain(|it| !gone.contains(it));
                        }
                    }
                }
            }
            ack_tracker.take();
            prop_assert!(ack_tracker.acked.is_empty());
        }
    }
}
