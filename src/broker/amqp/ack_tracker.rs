//! Tracks the unsettled deliveries of a session, and combines many acks into few commands: one `multiple` ack up to
//! the first delivery that is not acked yet, and one ack for each acked delivery after it. Does no I/O.
//!
//! Few commands matter for safety too: while more than 32 commands are under way on a quorum queue, RabbitMQ
//! holds back further settlements of the channel, and forgets them when the channel closes. A burst of
//! acks before a close would be lost, and their tasks answered twice. RabbitMQ also writes each command to
//! disk, and a task sent right after a reply waits for that write.

use std::collections::BTreeSet;

/// An ack command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ack {
    pub(super) tag: u64,
    /// Also acks all unsettled deliveries before `tag`.
    pub(super) multiple: bool,
}

/// What the caller of [`AckTracker::ack`] does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flush {
    /// The caller sends what [`AckTracker::take`] returns, until that is empty.
    Send,
    /// The caller waits a little for more acks, and then sends if [`AckTracker::become_sender`] returns true.
    Gather,
    /// The caller does nothing: another caller sends this ack.
    Delegated,
}

/// Which caller, if any, is responsible for the waiting acks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sender {
    #[default]
    Nobody,
    /// A caller waits for more acks. Others may send meanwhile.
    Gathering,
    /// A caller is sending what [`AckTracker::take`] returned, and will call it again.
    Sending,
}

/// The unsettled deliveries of one channel, and what is known of each.
#[derive(Debug, Default)]
pub(super) struct AckTracker {
    /// Tags of deliveries that are neither requeued nor covered by an ack from [`AckTracker::take`].
    unsettled: BTreeSet<u64>,
    /// Tags of acked deliveries whose acks still wait for [`AckTracker::take`].
    acked: BTreeSet<u64>,
    sender: Sender,
    /// When this many acks wait, they are sent at once.
    batch_size: usize,
    /// Tag of the last delivery with `redelivered` set.
    last_redelivered: u64,
}

impl AckTracker {
    /// Makes each ack wait until `batch_size` of them wait, or the gathering caller sends. Before this call, acks do
    /// not wait.
    pub(super) fn set_batch_size(&mut self, batch_size: usize) {
        self.batch_size = batch_size;
    }

    /// Records a delivery. Must be called in the order of tags, and before anybody can settle the delivery.
    pub(super) fn delivered(&mut self, tag: u64, redelivered: bool) {
        self.unsettled.insert(tag);
        if redelivered {
            self.last_redelivered = tag;
        }
    }

    /// Makes the caller the sender, so that no ack is sent until it calls [`AckTracker::take`]. Returns true if at
    /// least `prefetch` deliveries are unsettled, all of them have tags from `first` on, and nobody else is sending.
    /// Otherwise it returns false and changes nothing.
    pub(super) fn hold(&mut self, first: u64, prefetch: usize) -> bool {
        let all_from_first = self.unsettled.first().is_some_and(|oldest| *oldest >= first);
        all_from_first && self.unsettled.len() >= prefetch && self.become_sender()
    }

    /// Makes the caller the sender, which has to call [`AckTracker::take`]. False if another caller is sending.
    pub(super) fn become_sender(&mut self) -> bool {
        std::mem::replace(&mut self.sender, Sender::Sending) != Sender::Sending
    }

    /// Records that a delivery was returned to its queue. Must be called after the command is written: until then no
    /// `multiple` ack may cover its tag, or the broker would ack it.
    pub(super) fn returned(&mut self, tag: u64) {
        self.unsettled.remove(&tag);
    }

    /// Records an ack. It is sent at once if this delivery or a later one is a redelivery: a redelivered task may
    /// crash the process, and tasks finished just before would have to be done again.
    pub(super) fn ack(&mut self, tag: u64) -> Flush {
        self.acked.insert(tag);
        let is_due = tag <= self.last_redelivered || self.acked.len() >= self.batch_size;
        let (sender, flush) = match self.sender {
            Sender::Sending => (Sender::Sending, Flush::Delegated),
            _ if is_due => (Sender::Sending, Flush::Send),
            Sender::Gathering => (Sender::Gathering, Flush::Delegated),
            Sender::Nobody => (Sender::Gathering, Flush::Gather),
        };
        self.sender = sender;
        flush
    }

    /// The acks to send now, in this order. Empty: no ack waits, and the caller is no longer the sender.
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
        let acks = [2, 1, 3, 5].map(|tag| ack_tracker.ack(tag));
        assert_eq!(acks, [Flush::Send, Flush::Delegated, Flush::Delegated, Flush::Delegated], "one sender");
        assert_eq!(ack_tracker.take(), [Ack { tag: 3, multiple: true }, Ack { tag: 5, multiple: false }]);
        assert_eq!(ack_tracker.take(), []);
        assert_eq!(ack_tracker.ack(4), Flush::Send);
        assert_eq!(ack_tracker.take(), [Ack { tag: 4, multiple: true }]);
    }

    #[test]
    fn held_acks_are_sent_by_the_caller_that_holds_them() {
        let mut ack_tracker = ack_tracker(1..=5);
        assert!(!ack_tracker.hold(1, 6), "fewer than a full prefetch");
        assert!(!ack_tracker.hold(2, 4), "one delivery belongs to an older consumer");
        assert!(ack_tracker.hold(1, 5));
        assert_eq!(ack_tracker.ack(1), Flush::Delegated, "the holder sends");
        assert!(!ack_tracker.hold(1, 5));
        assert_eq!(ack_tracker.take(), [Ack { tag: 1, multiple: true }]);
        assert_eq!(ack_tracker.take(), []);
        assert!(ack_tracker.hold(2, 4));
    }

    #[test]
    fn acks_gather_until_enough_wait_and_the_caller_of_the_last_one_sends() {
        let mut ack_tracker = ack_tracker(1..=9);
        ack_tracker.set_batch_size(3);
        assert_eq!(
            [1, 2, 3, 4].map(|tag| ack_tracker.ack(tag)),
            [Flush::Gather, Flush::Delegated, Flush::Send, Flush::Delegated]
        );
        assert!(!ack_tracker.become_sender(), "the gathering caller finds that another one sends");
        assert_eq!(ack_tracker.take(), [Ack { tag: 4, multiple: true }]);
        assert_eq!((ack_tracker.take(), ack_tracker.ack(5)), (vec![], Flush::Gather));
        assert!(ack_tracker.hold(5, 5), "nobody is sending yet");
        assert!(!ack_tracker.become_sender());
        assert_eq!((ack_tracker.take(), ack_tracker.take()), (vec![Ack { tag: 5, multiple: true }], vec![]));
        assert_eq!(ack_tracker.ack(6), Flush::Gather);
        assert!(ack_tracker.become_sender());
        assert_eq!(ack_tracker.take(), [Ack { tag: 6, multiple: true }]);
    }

    #[test]
    fn acks_up_to_a_redelivery_are_sent_at_once() {
        let mut ack_tracker = AckTracker::default();
        ack_tracker.set_batch_size(10);
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
    fn no_multiple_ack_covers_a_delivery_that_is_being_returned() {
        let mut ack_tracker = ack_tracker(1..=3);
        ack_tracker.ack(1);
        ack_tracker.ack(3);
        assert_eq!(ack_tracker.take(), [Ack { tag: 1, multiple: true }, Ack { tag: 3, multiple: false }]);
        ack_tracker.returned(2);
        assert_eq!(ack_tracker.take(), []);
    }

    proptest! {
        /// Simulates the broker: in any order of events, exactly the acked deliveries are removed.
        #[test]
        fn the_broker_drops_what_was_acked_and_nothing_else(
            steps in prop::collection::vec((0u8..4, 0usize..20), 1..200),
        ) {
            let mut ack_tracker = AckTracker::default();
            let (mut at_broker, mut acked) = (BTreeSet::new(), BTreeSet::new());
            let mut unsettled: Vec<u64> = Vec::new();
            let mut next = 1;
            for (event, index) in steps {
                match event {
                    0 => {
                        ack_tracker.delivered(next, false);
                        at_broker.insert(next);
                        unsettled.push(next);
                        next += 1;
                    }
                    1 if !unsettled.is_empty() => {
                        let tag = unsettled.remove(index % unsettled.len());
                        acked.insert(tag);
                        ack_tracker.ack(tag);
                    }
                    2 if !unsettled.is_empty() => {
                        let tag = unsettled.remove(index % unsettled.len());
                        at_broker.remove(&tag);
                        ack_tracker.returned(tag);
                    }
                    _ => {
                        for Ack { tag, multiple } in ack_tracker.take() {
                            let removed: Vec<u64> = at_broker
                                .iter().copied().filter(|it| *it == tag || multiple && *it < tag).collect();
                            prop_assert!(removed.iter().all(|it| acked.contains(it)), "{removed:?}");
                            at_broker.retain(|it| !removed.contains(it));
                        }
                    }
                }
            }
            ack_tracker.take();
            prop_assert!(ack_tracker.acked.is_empty());
        }
    }
}
