//! Sentences about one queue, and a property over every interleaving.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::{ConsumerId, Queue, QueueDelivery, Returned};
use crate::protocol::{Message, Properties, Value};

fn prefetch(n: u16) -> NonZeroU16 {
    NonZeroU16::new(n).unwrap()
}

fn numbered(n: u32) -> Message {
    Message { body: n.to_be_bytes().to_vec().into(), ..Message::default() }
}

fn number(message: &Message) -> u32 {
    u32::from_be_bytes(message.body.as_ref().try_into().unwrap())
}

fn expiring(n: u32, expiration: &str) -> Message {
    let properties = Properties { expiration: Some(expiration.to_owned()), ..Properties::default() };
    Message { properties, ..numbered(n) }
}

fn filled(count: u32, delivery_limit: Option<u64>) -> Queue {
    let mut queue = Queue::new(delivery_limit);
    for n in 0..count {
        queue.publish(numbered(n), Instant::now()).unwrap();
    }
    queue
}

fn deliver_all(queue: &mut Queue) -> Vec<QueueDelivery> {
    let now = Instant::now();
    std::iter::from_fn(|| queue.deliver(now)).collect()
}

fn numbers(dispatches: &[QueueDelivery]) -> Vec<u32> {
    dispatches.iter().map(|queue_delivery| number(&queue_delivery.message)).collect()
}

#[test]
fn messages_are_delivered_in_the_order_published() {
    let mut queue = filled(5, None);
    queue.add_consumer(prefetch(10));
    assert_eq!(numbers(&deliver_all(&mut queue)), [0, 1, 2, 3, 4]);
}

#[test]
fn prefetch_bounds_what_a_consumer_holds_and_an_ack_makes_room() {
    let mut queue = filled(5, None);
    let consumer = queue.add_consumer(prefetch(2));
    let first = deliver_all(&mut queue);
    assert_eq!(numbers(&first), [0, 1]);
    assert!(queue.ack(consumer, first[1].tag));
    assert_eq!(numbers(&deliver_all(&mut queue)), [2]);
}

#[test]
fn consumers_take_turns_and_a_full_one_is_passed_over() {
    let mut queue = filled(6, None);
    let a = queue.add_consumer(prefetch(1));
    let b = queue.add_consumer(prefetch(4));
    let to: Vec<ConsumerId> = deliver_all(&mut queue).iter().map(|d| d.consumer).collect();
    assert_eq!(to, [a, b, b, b, b]);
}

#[test]
fn a_second_ack_of_one_tag_is_not_known() {
    let mut queue = filled(1, None);
    let consumer = queue.add_consumer(prefetch(1));
    let tag = deliver_all(&mut queue)[0].tag;
    assert!(queue.ack(consumer, tag));
    assert!(!queue.ack(consumer, tag));
    assert_eq!(queue.requeue(consumer, tag), Returned::default());
}

#[test]
fn requeued_messages_return_to_their_old_places_whatever_the_order_of_the_nacks() {
    let mut queue = filled(6, None);
    let consumer = queue.add_consumer(prefetch(4));
    let held = deliver_all(&mut queue);
    queue.cancel(consumer);
    for index in [2, 0, 3, 1] {
        assert!(queue.requeue(consumer, held[index].tag).known);
    }
    queue.add_consumer(prefetch(10));
    let again = deliver_all(&mut queue);
    assert_eq!(numbers(&again), [0, 1, 2, 3, 4, 5]);
    let redelivered: Vec<bool> = again.iter().map(|d| d.redelivered).collect();
    assert_eq!(redelivered, [true, true, true, true, false, false]);
}

#[test]
fn a_lost_consumers_messages_return_in_place_marked_and_counted() {
    let mut queue = filled(4, None);
    let lost = queue.add_consumer(prefetch(3));
    let held = deliver_all(&mut queue);
    assert!(queue.ack(lost, held[1].tag));
    assert!(queue.remove_consumer(lost).dead.is_empty());
    queue.add_consumer(prefetch(10));
    let again = deliver_all(&mut queue);
    assert_eq!(numbers(&again), [0, 2, 3]);
    let counts: Vec<u64> = again.iter().map(|d| d.delivery_count).collect();
    assert_eq!(counts, [1, 1, 0]);
}

#[test]
fn a_cancelled_consumer_gets_no_more_but_keeps_what_it_holds() {
    let mut queue = filled(3, None);
    let consumer = queue.add_consumer(prefetch(2));
    let held = deliver_all(&mut queue);
    queue.cancel(consumer);
    assert!(queue.ack(consumer, held[0].tag));
    assert!(deliver_all(&mut queue).is_empty());
    let stats = queue.stats(Instant::now());
    assert_eq!((stats.ready, stats.unacked), (1, 1));
}

#[test]
fn a_message_over_the_delivery_limit_leaves_as_a_dead_letter_that_says_why() {
    let mut queue = Queue::new(Some(2));
    let mut message = numbered(7);
    message.properties.message_id = Some("seven".to_owned());
    queue.publish(message.clone(), Instant::now()).unwrap();
    let consumer = queue.add_consumer(prefetch(1));
    for _ in 0..2 {
        let tag = deliver_all(&mut queue)[0].tag;
        assert!(queue.requeue(consumer, tag).dead.is_empty());
    }
    deliver_all(&mut queue);
    let dead = queue.remove_consumer(consumer).dead;
    assert_eq!(dead.len(), 1);
    let headers = &dead[0].properties.headers;
    assert_eq!(headers["reason"], Value::from("attempts"));
    assert_eq!(headers["error"], Value::from("delivered 3 times without an ack"));
    assert_eq!(headers["task_id"], Value::from("seven"));
    assert_eq!(dead[0].body, message.body);
    assert_eq!(queue.ready(), 0);
}

#[test]
fn an_expired_message_is_dropped_at_the_head_and_never_delivered() {
    let start = Instant::now();
    let mut queue = Queue::new(None);
    queue.publish(expiring(0, "10"), start).unwrap();
    queue.publish(numbered(1), start).unwrap();
    queue.publish(expiring(2, "1000"), start).unwrap();
    queue.add_consumer(prefetch(10));
    let later = start + Duration::from_millis(11);
    let got: Vec<QueueDelivery> = std::iter::from_fn(|| queue.deliver(later)).collect();
    assert_eq!(numbers(&got), [1, 2]);
}

#[test]
fn a_requeued_message_keeps_its_first_deadline() {
    let start = Instant::now();
    let mut queue = Queue::new(None);
    queue.publish(expiring(0, "10"), start).unwrap();
    let consumer = queue.add_consumer(prefetch(1));
    let tag = queue.deliver(start).unwrap().tag;
    queue.requeue(consumer, tag);
    assert_eq!(queue.deliver(start + Duration::from_millis(11)), None);
}

#[test]
fn an_expiration_that_is_not_decimal_digits_is_refused() {
    for bad in ["", "soon", "-1", "+5", "1.5", "99999999999999999999999"] {
        assert!(Queue::new(None).publish(expiring(0, bad), Instant::now()).is_err(), "{bad}");
    }
    let forever = u64::MAX.to_string();
    assert!(Queue::new(None).publish(expiring(0, &forever), Instant::now()).is_ok());
}

#[test]
fn a_dead_letter_does_not_expire_where_it_is_kept() {
    let mut queue = Queue::new(None);
    queue.publish_dead_letter(expiring(0, "1"));
    assert_eq!(queue.stats(Instant::now() + Duration::from_secs(60)).ready, 1);
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

/// What an onlooker knows: who holds what, and where each message must be.
#[derive(Default)]
struct Onlooker {
    published: u32,
    /// Live consumers, cancelled or not, and their prefetch.
    consumers: BTreeMap<ConsumerId, u16>,
    /// Number of the message by holder and tag.
    held: BTreeMap<(ConsumerId, u64), u32>,
    gone: BTreeSet<u32>,
    last_fresh: Option<u32>,
}

impl Onlooker {
    fn step(&mut self, queue: &mut Queue, step: Step) {
        match step {
            Step::Publish => {
                queue.publish(numbered(self.published), Instant::now()).unwrap();
                self.published += 1;
            }
            Step::Join(n) => {
                self.consumers.insert(queue.add_consumer(prefetch(n)), n);
            }
            Step::Deliver => {
                if let Some(queue_delivery) = queue.deliver(Instant::now()) {
                    self.saw(&queue_delivery);
                }
            }
            Step::Ack(pick) => {
                if let Some((id, tag)) = self.pick_held(pick) {
                    assert!(queue.ack(id, tag));
                    self.gone.extend(self.held.remove(&(id, tag)));
                }
            }
            Step::Requeue(pick) => {
                if let Some((id, tag)) = self.pick_held(pick) {
                    let returned = queue.requeue(id, tag);
                    assert!(returned.known);
                    self.held.remove(&(id, tag));
                    self.gone.extend(returned.dead.iter().map(number));
                }
            }
            Step::Cancel(pick) => {
                if let Some(id) = self.pick_consumer(pick) {
                    queue.cancel(id);
                }
            }
            Step::Crash(pick) => {
                if let Some(id) = self.pick_consumer(pick) {
                    let returned = queue.remove_consumer(id);
                    self.consumers.remove(&id);
                    self.held.retain(|(holder, _), _| *holder != id);
                    self.gone.extend(returned.dead.iter().map(number));
                }
            }
        }
    }

    fn saw(&mut self, queue_delivery: &QueueDelivery) {
        let n = number(&queue_delivery.message);
        assert!(!self.held.values().any(|held| *held == n), "{n} is held by two");
        assert!(!self.gone.contains(&n), "{n} was settled before");
        self.held.insert((queue_delivery.consumer, queue_delivery.tag), n);
        let holds = self.held.keys().filter(|(id, _)| *id == queue_delivery.consumer).count();
        assert!(holds <= usize::from(self.consumers[&queue_delivery.consumer]), "over the prefetch");
        if !queue_delivery.redelivered {
            assert!(self.last_fresh < Some(n), "{n} came late");
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
    fn whatever_happens_nothing_is_lost_doubled_or_overtaken(
        steps in prop::collection::vec(step(), 0..200),
        delivery_limit in prop::option::of(0u64..4),
    ) {
        let mut queue = Queue::new(delivery_limit);
        let mut onlooker = Onlooker::default();
        for step in steps {
            onlooker.step(&mut queue, step);
            let stats = queue.stats(Instant::now());
            prop_assert_eq!(stats.unacked, onlooker.held.len());
            let all = stats.ready + stats.unacked + onlooker.gone.len();
            prop_assert_eq!(all, onlooker.published as usize);
        }
        for id in onlooker.consumers.keys().copied().collect::<Vec<_>>() {
            let dead = queue.remove_consumer(id).dead;
            onlooker.gone.extend(dead.iter().map(number));
        }
        queue.add_consumer(prefetch(u16::MAX));
        let rest: Vec<u32> = numbers(&deliver_all(&mut queue));
        prop_assert!(rest.is_sorted(), "old places were kept");
        let all: BTreeSet<u32> = rest.into_iter().chain(onlooker.gone).collect();
        prop_assert_eq!(all, (0..onlooker.published).collect::<BTreeSet<u32>>());
    }
}
