//! Tests of one queue, and a property test over random interleavings.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;

use proptest::prelude::*;

use super::{ConsumerId, Queue, QueueDelivery};
use crate::protocol::Message;

fn prefetch(n: u16) -> NonZeroU16 {
    NonZeroU16::new(n).unwrap()
}

fn numbered(n: u32) -> Message {
    Message { body: n.to_be_bytes().to_vec().into(), ..Message::default() }
}

fn number(message: &Message) -> u32 {
    u32::from_be_bytes(message.body.as_ref().try_into().unwrap())
}

fn filled(count: u32) -> Queue {
    let mut queue = Queue::default();
    for n in 0..count {
        queue.publish(numbered(n));
    }
    queue
}

fn deliver_all(queue: &mut Queue) -> Vec<QueueDelivery> {
    std::iter::from_fn(|| queue.deliver()).collect()
}

fn numbers(deliveries: &[QueueDelivery]) -> Vec<u32> {
    deliveries.iter().map(|queue_delivery| number(&queue_delivery.message)).collect()
}

#[test]
fn messages_are_delivered_in_the_order_published() {
    let mut queue = filled(5);
    queue.add_consumer(prefetch(10));
    assert_eq!(numbers(&deliver_all(&mut queue)), [0, 1, 2, 3, 4]);
}

#[test]
fn prefetch_bounds_what_a_consumer_holds_and_an_ack_makes_room() {
    let mut queue = filled(5);
    let consumer = queue.add_consumer(prefetch(2));
    let first = deliver_all(&mut queue);
    assert_eq!(numbers(&first), [0, 1]);
    assert!(queue.ack(consumer, first[1].tag));
    assert_eq!(numbers(&deliver_all(&mut queue)), [2]);
}

#[test]
fn consumers_take_turns_and_a_full_one_is_passed_over() {
    let mut queue = filled(6);
    let a = queue.add_consumer(prefetch(1));
    let b = queue.add_consumer(prefetch(4));
    let to: Vec<ConsumerId> = deliver_all(&mut queue).iter().map(|d| d.consumer).collect();
    assert_eq!(to, [a, b, b, b, b]);
}

#[test]
fn a_settled_tag_cannot_be_settled_again() {
    let mut queue = filled(1);
    let consumer = queue.add_consumer(prefetch(1));
    let tag = deliver_all(&mut queue)[0].tag;
    assert!(queue.ack(consumer, tag));
    assert!(!queue.ack(consumer, tag));
    assert!(!queue.requeue(consumer, tag));
}

#[test]
fn requeued_messages_keep_their_positions_in_any_order_of_nacks() {
    let mut queue = filled(6);
    let consumer = queue.add_consumer(prefetch(4));
    let held = deliver_all(&mut queue);
    queue.cancel(consumer);
    for index in [2, 0, 3, 1] {
        assert!(queue.requeue(consumer, held[index].tag));
    }
    queue.add_consumer(prefetch(10));
    let again = deliver_all(&mut queue);
    assert_eq!(numbers(&again), [0, 1, 2, 3, 4, 5]);
    let redelivered: Vec<bool> = again.iter().map(|d| d.redelivered).collect();
    assert_eq!(redelivered, [true, true, true, true, false, false]);
}

#[test]
fn a_lost_consumers_messages_return_to_their_positions_as_redelivered() {
    let mut queue = filled(4);
    let lost = queue.add_consumer(prefetch(3));
    let held = deliver_all(&mut queue);
    assert!(queue.ack(lost, held[1].tag));
    queue.remove_consumer(lost);
    queue.add_consumer(prefetch(10));
    let again = deliver_all(&mut queue);
    assert_eq!(numbers(&again), [0, 2, 3]);
    let counts: Vec<u64> = again.iter().map(|d| d.delivery_count).collect();
    assert_eq!(counts, [1, 1, 0]);
}

#[test]
fn a_cancelled_consumer_gets_no_more_but_keeps_its_unsettled_messages() {
    let mut queue = filled(3);
    let consumer = queue.add_consumer(prefetch(2));
    let held = deliver_all(&mut queue);
    queue.cancel(consumer);
    assert!(queue.ack(consumer, held[0].tag));
    assert!(deliver_all(&mut queue).is_empty());
    let stats = queue.stats();
    assert_eq!((stats.ready, stats.unacked), (1, 1));
}

#[derive(Clone, Debug)]
enum Step {
    Publish,
    Join(u16),
    Deliver,
    Ack(prop::sample::Index),
    Requeue(prop::sample::Index),
    Cancel(prop::sample::Index),
    Crash(prop::sample::Index),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Publish),
        1 => (1u16..5).prop_map(Step::Join),
        6 => Just(Step::Deliver),
        3 => any::<prop::sample::Index>().prop_map(Step::Ack),
        2 => any::<prop::sample::Index>().prop_map(Step::Requeue),
        1 => any::<prop::sample::Index>().prop_map(Step::Cancel),
        1 => any::<prop::sample::Index>().prop_map(Step::Crash),
    ]
}

/// A reference model of the queue: which consumer holds which message, and which messages are settled.
#[derive(Default)]
struct Model {
    published: u32,
    /// The prefetch of each consumer that was not removed.
    consumers: BTreeMap<ConsumerId, u16>,
    /// The number of the message, by the consumer that holds it and the tag.
    held: BTreeMap<(ConsumerId, u64), u32>,
    acked: BTreeSet<u32>,
    /// The number of the last message that was delivered for the first time.
    last_fresh: Option<u32>,
}

impl Model {
    fn step(&mut self, queue: &mut Queue, step: Step) {
        match step {
            Step::Publish => {
                queue.publish(numbered(self.published));
                self.published += 1;
            }
            Step::Join(n) => {
                self.consumers.insert(queue.add_consumer(prefetch(n)), n);
            }
            Step::Deliver => {
                if let Some(queue_delivery) = queue.deliver() {
                    self.check_delivery(&queue_delivery);
                }
            }
            Step::Ack(pick) => {
                if let Some((id, tag)) = self.pick_held(pick) {
                    assert!(queue.ack(id, tag));
                    self.acked.extend(self.held.remove(&(id, tag)));
                }
            }
            Step::Requeue(pick) => {
                if let Some((id, tag)) = self.pick_held(pick) {
                    assert!(queue.requeue(id, tag));
                    self.held.remove(&(id, tag));
                }
            }
            Step::Cancel(pick) => {
                if let Some(id) = self.pick_consumer(pick) {
                    queue.cancel(id);
                }
            }
            Step::Crash(pick) => {
                if let Some(id) = self.pick_consumer(pick) {
                    queue.remove_consumer(id);
                    self.consumers.remove(&id);
                    self.held.retain(|(holder, _), _| *holder != id);
                }
            }
        }
    }

    fn check_delivery(&mut self, queue_delivery: &QueueDelivery) {
        let n = number(&queue_delivery.message);
        assert!(!self.held.values().any(|held| *held == n), "{n} is held by two consumers");
        assert!(!self.acked.contains(&n), "{n} was settled before");
        self.held.insert((queue_delivery.consumer, queue_delivery.tag), n);
        let holds = self.held.keys().filter(|(id, _)| *id == queue_delivery.consumer).count();
        assert!(holds <= usize::from(self.consumers[&queue_delivery.consumer]), "over the prefetch");
        if !queue_delivery.redelivered {
            assert!(self.last_fresh < Some(n), "{n} was overtaken");
            self.last_fresh = Some(n);
        }
    }

    fn pick_held(&self, pick: prop::sample::Index) -> Option<(ConsumerId, u64)> {
        let keys: Vec<_> = self.held.keys().copied().collect();
        (!keys.is_empty()).then(|| *pick.get(&keys))
    }

    fn pick_consumer(&self, pick: prop::sample::Index) -> Option<ConsumerId> {
        let ids: Vec<_> = self.consumers.keys().copied().collect();
        (!ids.is_empty()).then(|| *pick.get(&ids))
    }
}

proptest! {
    #[test]
    fn in_any_interleaving_no_message_is_lost_duplicated_or_reordered(
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let mut queue = Queue::default();
        let mut model = Model::default();
        for step in steps {
            model.step(&mut queue, step);
            let stats = queue.stats();
            prop_assert_eq!(stats.unacked, model.held.len());
            let all = stats.ready + stats.unacked + model.acked.len();
            prop_assert_eq!(all, model.published as usize);
        }
        for id in model.consumers.keys().copied().collect::<Vec<_>>() {
            queue.remove_consumer(id);
        }
        queue.add_consumer(prefetch(u16::MAX));
        let rest: Vec<u32> = numbers(&deliver_all(&mut queue));
        prop_assert!(rest.is_sorted(), "old places were kept");
        let all: BTreeSet<u32> = rest.into_iter().chain(model.acked).collect();
        prop_assert_eq!(all, (0..model.published).collect::<BTreeSet<u32>>());
    }
}
