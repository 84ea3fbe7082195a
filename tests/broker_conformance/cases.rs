//! The promises of `sconce::broker`, as sentences over any rig.

use std::num::NonZeroU16;
use std::time::Instant;

use futures_util::future::join_all;
use sconce::broker::{ConsumerEvent, Delay, Delivery, Published};
use sconce::protocol::{Headers, Message, Properties, Value};

use crate::rig::{CEILING, Link, Rig};
use crate::wait::bounded;

fn text(body: impl Into<String>) -> Message {
    Message { body: body.into().into(), ..Message::default() }
}

fn bodies(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|d| String::from_utf8_lossy(&d.message.body).into_owned()).collect()
}

/// A fresh queue that holds the messages `0`, `1`, … `count - 1`.
async fn filled(rig: &impl Rig, count: usize) -> String {
    let queue = rig.fresh_queue().await;
    for n in 0..count {
        rig.publish(&queue, text(n.to_string())).await;
    }
    queue
}

async fn ack_all(link: &Link, deliveries: &[Delivery]) {
    for delivery in deliveries {
        assert!(link.acker.ack(delivery.delivery_tag).await);
    }
}

pub async fn prefetch_bounds_what_is_unsettled(rig: &impl Rig) {
    let queue = filled(rig, 10).await;
    let mut link = rig.open(&queue, 3).await;
    let held = link.take_many(3).await;
    assert_eq!(bodies(&held), ["0", "1", "2"]);
    link.takes_nothing().await;
    rig.ready_becomes(&queue, 7).await;
    ack_all(&link, &held[1..2]).await;
    assert_eq!(bodies(&link.take_many(1).await), ["3"]);
    link.takes_nothing().await;
}

pub async fn an_ack_removes_a_message(rig: &impl Rig) {
    let queue = filled(rig, 3).await;
    let mut link = rig.open(&queue, 10).await;
    let held = link.take_many(3).await;
    ack_all(&link, &held).await;
    link.consumer.close().await;
    let mut next = rig.open(&queue, 10).await;
    next.takes_nothing().await;
}

pub async fn acks_in_any_order_leave_only_what_is_unfinished(rig: &impl Rig) {
    let queue = filled(rig, 6).await;
    let mut link = rig.open(&queue, 6).await;
    let held = link.take_many(6).await;
    for index in [4, 1, 5] {
        assert!(link.acker.ack(held[index].delivery_tag).await);
    }
    // Orders the acks before the crash: one still on its way may be lost with the link.
    link.consumer.close().await;
    rig.crash(link).await;
    let mut next = rig.open(&queue, 10).await;
    assert_eq!(bodies(&next.take_many(3).await), ["0", "2", "3"]);
    next.takes_nothing().await;
}

pub async fn a_requeued_message_is_back_at_its_old_place(rig: &impl Rig) {
    let queue = filled(rig, 6).await;
    let mut link = rig.open(&queue, 4).await;
    let held = link.take_many(4).await;
    link.consumer.cancel().await;
    for delivery in &held {
        assert!(link.acker.requeue(delivery.delivery_tag).await);
    }
    rig.ready_becomes(&queue, 6).await;
    let mut next = rig.open(&queue, 10).await;
    let again = next.take_many(6).await;
    assert_eq!(bodies(&again), ["0", "1", "2", "3", "4", "5"]);
    let redelivered: Vec<bool> = again.iter().map(|delivery| delivery.redelivered).collect();
    assert_eq!(redelivered, [true, true, true, true, false, false]);
}

pub async fn a_lost_links_messages_come_back_redelivered_and_counted(rig: &impl Rig) {
    let queue = filled(rig, 4).await;
    let mut lost = rig.open(&queue, 3).await;
    assert_eq!(lost.take_many(3).await.len(), 3);
    rig.crash(lost).await;
    rig.ready_becomes(&queue, 4).await;
    let mut next = rig.open(&queue, 10).await;
    let again = next.take_many(4).await;
    assert_eq!(bodies(&again), ["0", "1", "2", "3"]);
    for delivery in &again[..3] {
        assert!(delivery.redelivered);
        assert!(delivery.delivery_count.is_none_or(|count| count >= 1));
    }
    assert!(!again[3].redelivered);
    assert_eq!(again[3].delivery_count, Some(0));
}

pub async fn after_a_cancel_the_prefetched_come_and_then_the_end(rig: &impl Rig) {
    let queue = filled(rig, 5).await;
    let mut link = rig.open(&queue, 3).await;
    rig.ready_becomes(&queue, 2).await;
    link.consumer.cancel().await;
    let held = link.take_many(3).await;
    assert_eq!(bodies(&held), ["0", "1", "2"]);
    let end = bounded("the end", link.consumer.next()).await;
    assert!(matches!(end, Ok(ConsumerEvent::End)), "{end:?}");
    ack_all(&link, &held).await;
    link.consumer.close().await;
    rig.ready_becomes(&queue, 2).await;
}

pub async fn a_changed_prefetch_takes_effect_in_order(rig: &impl Rig) {
    const COUNT: usize = 60;
    let queue = filled(rig, COUNT).await;
    let mut link = rig.open(&queue, 2).await;
    let mut came = link.take_many(2).await;
    link.takes_nothing().await;
    link.consumer.set_prefetch(prefetch(8)).await;
    came.extend(link.take_many(6).await);
    assert_eq!(link.consumer.granted(), 8);
    ack_all(&link, &came).await;
    link.consumer.set_prefetch(prefetch(3)).await;
    // At most a full prefetch of the former consumer and one of the new.
    let former = link.take_all().await;
    assert!((3..=11).contains(&former.len()), "{} in hand", former.len());
    ack_all(&link, &former).await;
    came.extend(former);
    while came.len() < COUNT {
        let held = link.take_many(3.min(COUNT - came.len())).await;
        link.takes_nothing().await;
        ack_all(&link, &held).await;
        came.extend(held);
    }
    assert_eq!(link.consumer.granted(), 3);
    assert_eq!(bodies(&came), (0..COUNT).map(|n| n.to_string()).collect::<Vec<_>>());
    assert!(came.iter().all(|delivery| !delivery.redelivered));
}

pub async fn after_many_changes_each_message_has_come_once_in_order(rig: &impl Rig) {
    const COUNT: usize = 60;
    let queue = filled(rig, COUNT).await;
    let mut link = rig.open(&queue, 1).await;
    let mut came = Vec::new();
    for n in 0..COUNT {
        let delivery = link.take().await;
        link.consumer.set_prefetch(prefetch(1 + n as u16 % 7)).await;
        assert!(link.acker.ack(delivery.delivery_tag).await);
        assert!(!delivery.redelivered);
        came.push(delivery);
    }
    let right: Vec<String> = (0..COUNT).map(|n| n.to_string()).collect();
    assert_eq!(bodies(&came), right);
    link.takes_nothing().await;
}

pub async fn a_cancel_behind_a_changed_prefetch_is_the_end(rig: &impl Rig) {
    let queue = filled(rig, 20).await;
    for _ in 0..5 {
        let mut link = rig.open(&queue, 2).await;
        let mut held = link.take_many(2).await;
        link.consumer.set_prefetch(prefetch(6)).await;
        link.consumer.cancel().await;
        loop {
            match bounded("a delivery or the end", link.consumer.next()).await {
                Ok(ConsumerEvent::Delivery(delivery)) => held.push(*delivery),
                Ok(ConsumerEvent::End) => break,
                other => panic!("neither a delivery nor the end but {other:?}"),
            }
        }
        for delivery in &held {
            assert!(link.acker.requeue(delivery.delivery_tag).await);
        }
        rig.ready_becomes(&queue, 20).await;
        link.consumer.close().await;
    }
}

fn prefetch(count: u16) -> NonZeroU16 {
    NonZeroU16::new(count).expect("not 0")
}

pub async fn acks_written_before_a_close_count_and_later_ones_do_not(rig: &impl Rig) {
    let queue = filled(rig, 2).await;
    let mut link = rig.open(&queue, 2).await;
    let held = link.take_many(2).await;
    ack_all(&link, &held[..1]).await;
    link.consumer.close().await;
    assert!(!link.acker.ack(held[1].delivery_tag).await);
    let mut next = rig.open(&queue, 10).await;
    assert_eq!(bodies(&next.take_many(1).await), ["1"]);
    next.takes_nothing().await;
}

pub async fn a_publisher_outlives_its_closed_consumer(rig: &impl Rig) {
    let queue = rig.fresh_queue().await;
    let replies = rig.fresh_queue().await;
    let mut link = rig.open(&queue, 2).await;
    link.consumer.close().await;
    let published = link.publisher.publish(&replies, text("late").into()).await;
    assert_eq!(published.ok(), Some(Published::Confirmed));
    link.publisher.close().await;
    rig.ready_becomes(&replies, 1).await;
}

pub async fn exactly_the_publishes_to_missing_queues_are_unroutable(rig: &impl Rig) {
    let queue = rig.fresh_queue().await;
    let replies = rig.fresh_queue().await;
    let missing = format!("{replies}.missing");
    let link = rig.open(&queue, 1).await;
    let publishes = (0..200).map(|n| {
        let to = if n % 7 == 0 { &missing } else { &replies };
        link.publisher.publish(to, text(n.to_string()).into())
    });
    let mut routed = 0;
    for (n, published) in join_all(publishes).await.into_iter().enumerate() {
        let expected = if n % 7 == 0 { Published::Unroutable } else { Published::Confirmed };
        routed += usize::from(expected == Published::Confirmed);
        assert_eq!(published.ok(), Some(expected), "publish {n}");
    }
    rig.ready_becomes(&replies, routed).await;
}

#[allow(dead_code, reason = "no case of the embedded queue")]
pub async fn an_expired_message_is_never_delivered(rig: &impl Rig) {
    let queue = rig.fresh_queue().await;
    let mut short = text("expired");
    short.properties.expiration = Some("50".to_owned());
    rig.publish(&queue, short).await;
    let mut long = text("alive");
    long.properties.expiration = Some("60000".to_owned());
    rig.publish(&queue, long).await;
    rig.ready_becomes(&queue, 1).await;
    let mut link = rig.open(&queue, 10).await;
    assert_eq!(bodies(&link.take_many(1).await), ["alive"]);
    link.takes_nothing().await;
}

/// One header of each type, with the values that careless encodings lose.
fn every_header() -> Headers {
    let inner = Headers::from([("deep".to_owned(), Value::from("nested"))]);
    let values = [
        ("void", Value::Void),
        ("bool", Value::Bool(true)),
        ("i8", Value::I8(i8::MIN)),
        ("u8", Value::U8(u8::MAX)),
        ("i16", Value::I16(i16::MIN)),
        ("u16", Value::U16(u16::MAX)),
        ("i32", Value::I32(i32::MIN)),
        ("u32", Value::U32(u32::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f32", Value::F32(1.1)),
        ("f64", Value::F64(0.1 + 0.2)),
        ("infinity", Value::F64(f64::NEG_INFINITY)),
        ("decimal", Value::Decimal { scale: 2, value: 12345 }),
        ("text", Value::from("grüße")),
        ("text that is not UTF-8", Value::Text(vec![0xff, 0x00, 0xfe])),
        ("bytes", Value::Bytes(vec![0, 1, 255])),
        ("timestamp", Value::Timestamp(1_700_000_000)),
        ("array", Value::Array(vec![Value::I32(1), Value::Void, Value::from("two")])),
        ("table", Value::Table(inner)),
    ];
    values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

pub async fn properties_of_every_type_survive_unchanged<R: Rig>(rig: &R) {
    let queue = rig.fresh_queue().await;
    let mut headers = every_header();
    if !R::INFINITE_HEADERS {
        headers.remove("infinity");
    }
    // `user_id` is left out: a broker may check it against the connection's user.
    let properties = Properties {
        content_type: Some("application/json".to_owned()),
        content_encoding: Some("identity".to_owned()),
        headers,
        delivery_mode: Some(2),
        priority: Some(3),
        correlation_id: Some("c-1".to_owned()),
        reply_to: Some("replies".to_owned()),
        expiration: Some("60000".to_owned()),
        message_id: Some("m-1".to_owned()),
        timestamp: Some(1_700_000_000),
        kind: Some("task".to_owned()),
        user_id: None,
        app_id: Some("conformance".to_owned()),
        cluster_id: Some("c".to_owned()),
    };
    let sent = Message { properties, body: "{}".into() };
    let mut link = rig.open(&queue, 10).await;
    // Once by the rig, once by the link: both ways into the broker.
    rig.publish(&queue, sent.clone()).await;
    let published = link.publisher.publish(&queue, sent.clone().into()).await;
    assert_eq!(published.ok(), Some(Published::Confirmed));
    for delivery in link.take_many(2).await {
        assert_eq!(delivery.message, sent);
    }
}

pub async fn empty_and_large_bodies_survive(rig: &impl Rig) {
    let queue = rig.fresh_queue().await;
    let mut link = rig.open(&queue, 1).await;
    let large: Vec<u8> = (0..5usize << 20).map(|n| (n * 31 % 251) as u8).collect();
    for body in [Vec::new(), large] {
        let sent = Message { body: body.into(), ..Message::default() };
        let published = link.publisher.publish(&queue, sent.clone().into()).await;
        assert_eq!(published.ok(), Some(Published::Confirmed));
        let delivery = link.take().await;
        assert!(delivery.message == sent, "{} bytes came back changed", sent.body.len());
        assert!(link.acker.ack(delivery.delivery_tag).await);
    }
}

pub async fn a_message_put_off_comes_after_its_delay_and_holds_up_nobody(rig: &impl Rig) {
    let queue = rig.fresh_queue().await;
    let mut link = rig.open(&queue, 10).await;
    let after = CEILING.mul_f64(0.7);
    let begun = Instant::now();
    for (queue, outcome) in [(queue.as_str(), Published::Confirmed), ("nowhere", Published::Unroutable)] {
        let delay = Delay { after, ceiling: CEILING };
        let published = link.publisher.publish_later(queue, delay, text("later").into()).await;
        assert_eq!(published.expect("an answer"), outcome);
    }
    rig.publish(&queue, text("now")).await;
    assert_eq!(bodies(&link.take_many(1).await), ["now"]);
    let late = link.take().await;
    assert_eq!(bodies(std::slice::from_ref(&late)), ["later"]);
    assert!(begun.elapsed() >= after, "{:?}", begun.elapsed());
    assert!(!late.redelivered && late.message.properties.expiration.is_none());
    assert!(link.acker.ack(late.delivery_tag).await);
    link.takes_nothing().await;
}
