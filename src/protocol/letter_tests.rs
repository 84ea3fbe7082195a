//! What a letter says, and what it was.

use super::super::dead_letter::{Cause, dead_letter, with_deaths};
use super::super::{Incoming, Properties, Task, classify};
use super::*;
use crate::protocol::control::CrashRecord;

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn cause(reason: Reason) -> Cause<'static> {
    Cause { reason, error: "it broke", worker: "host/embed/0", at: at(100) }
}

fn task(properties: Properties) -> Task {
    let message = Message { properties, body: r#"{"input":"a"}"#.into() };
    match classify(message, at(0), || "made".into()) {
        Incoming::Task(task) | Incoming::UnknownControl(task, _) => task,
        Incoming::Sentinel(_) => panic!("no sentinel"),
    }
}

/// As RabbitMQ writes it.
fn died(reason: &str, queue: &str, seconds: u64) -> Value {
    let first = Headers::from([
        ("reason".into(), reason.into()),
        ("queue".into(), queue.into()),
        ("time".into(), Value::Timestamp(seconds)),
        ("count".into(), Value::I64(1)),
    ]);
    Value::Array(vec![Value::Table(first)])
}

#[test]
fn a_task_is_put_back_as_its_producer_sent_it_but_for_what_would_act_at_once() {
    let sent = Properties {
        correlation_id: Some("c".into()),
        reply_to: Some("r".into()),
        priority: Some(3),
        timestamp: Some(7),
        headers: Headers::from([("mine".into(), "kept".into()), ("reply_queue".into(), "mine too".into())]),
        ..Properties::default()
    };
    let acting = Properties {
        expiration: Some("100".into()),
        user_id: Some("someone".into()),
        headers: [("CC".to_owned(), Value::Array(vec!["q".into()]))]
            .into_iter()
            .chain(sent.headers.clone())
            .collect(),
        ..sent.clone()
    };
    let letter = with_deaths(
        dead_letter(&task(acting), &cause(Reason::Poison)),
        &CrashRecord { task: "f".into(), count: 3, alone: 0, among: 1, poison: None },
    );
    let read = Letter::of(&letter);
    assert_eq!((read.reason(), read.died_at(), read.task_id()), ("poison", Some(at(100)), Some("c")));
    assert_eq!((read.error(), read.pool()), (Some("it broke"), Some("embed")));
    assert_eq!(read.destination("tasks", false), Ok("tasks"));
    let back = restored(letter);
    assert_eq!(back.properties, sent);
    assert_eq!(&back.body[..], br#"{"input":"a"}"#);
}

#[test]
fn a_deadline_stays_unless_it_may_come_of_an_expiration() {
    let expires = || Headers::from([("expires".into(), "2026-01-31T12:00:00Z".into())]);
    let plain = Properties { headers: expires(), ..Properties::default() };
    let back = restored(dead_letter(&task(plain), &cause(Reason::Attempts)));
    assert_eq!(back.properties.headers, expires());
    let expiring = Properties { expiration: Some("5".into()), ..Properties::default() };
    let again = task(expiring).next_attempt(Some(at(5)));
    assert!(again.properties.headers.contains_key("expires"));
    let back = restored(dead_letter(&task(again.properties), &cause(Reason::Attempts)));
    assert_eq!(back.properties, Properties::default());
}

/// As earlier versions wrote it.
fn parked_reply(mut reply: Message, queue: &str) -> Message {
    let headers = [
        ("reason", "unroutable"),
        ("error", "it broke"),
        ("task_id", "t"),
        ("worker", "host/embed/0"),
        (REPLY_QUEUE, queue),
    ];
    reply.properties.headers.extend(headers.map(|(name, value)| (name.to_owned(), value.into())));
    reply
}

#[test]
fn a_task_whose_reply_found_no_queue_is_a_task_again() {
    for reason in [Reason::Unroutable, Reason::Unconfirmed] {
        // Anybody may write the headers of a parked reply into a task.
        let headers = Headers::from([(REPLY_QUEUE.to_owned(), "elsewhere".into())]);
        let sent = Properties { correlation_id: Some("c".into()), headers, ..Properties::default() };
        let letter = dead_letter(&task(sent.clone()), &cause(reason));
        assert_eq!(Letter::of(&letter).destination("tasks", false), Ok("tasks"));
        assert_eq!(restored(letter).properties, sent);
    }
}

#[test]
fn a_parked_reply_goes_to_the_queue_it_was_for_and_is_a_reply_again() {
    let headers = Headers::from([
        ("status".into(), "succeeded".into()),
        ("task_id".into(), "t".into()),
        ("worker".into(), "host/embed/0".into()),
    ]);
    let kind = Some("reply".into());
    let reply =
        Message { properties: Properties { kind, headers, ..Properties::default() }, body: "{}".into() };
    let letter = parked_reply(reply.clone(), "wanted");
    assert_eq!(Letter::of(&letter).destination("tasks", false), Ok("wanted"));
    assert_eq!(restored(letter.clone()), reply);
    let direct = parked_reply(reply, "amq.rabbitmq.reply-to.g1");
    assert!(Letter::of(&direct).destination("tasks", true).is_err(), "nobody would hear it");
}

#[test]
fn a_control_message_with_the_headers_of_a_parked_reply_is_one_all_the_same() {
    let kind = Some("control.shutdown".to_owned());
    let sentinel = Message { properties: Properties { kind, ..Properties::default() }, body: "".into() };
    let letter = parked_reply(sentinel, "tasks");
    let refused = Letter::of(&letter).destination("tasks", false);
    assert!(refused.is_err_and(|why| why.contains("control.shutdown")));
    assert_eq!(Letter::of(&letter).destination("tasks", true), Ok("tasks"));
}

#[test]
fn what_the_broker_gave_up_says_why_when_and_where() {
    let headers = Headers::from([
        ("x-death".into(), died("delivery_limit", "tasks", 50)),
        ("x-first-death-reason".into(), "expired".into()),
        ("x-last-death-queue".into(), "tasks".into()),
        ("x-acquired-count".into(), Value::I64(3)),
        ("sconce_attempt".into(), Value::I64(2)),
        ("reason".into(), "the producer's own".into()),
        ("CC".into(), Value::Array(vec!["q".into()])),
    ]);
    let user_id = Some("someone".into());
    let properties = Properties {
        user_id,
        message_id: Some("m".into()),
        timestamp: Some(9),
        headers,
        ..Properties::default()
    };
    let letter = Message { properties, body: "{}".into() };
    let read = Letter::of(&letter);
    assert_eq!(
        (read.reason(), read.died_at(), read.died_in()),
        ("delivery_limit", Some(at(50)), Some("tasks"))
    );
    assert_eq!((read.task_id(), read.worker(), read.error()), (Some("m"), None, None));
    let back = restored(letter);
    assert_eq!(back.properties.headers, Headers::from([("reason".into(), "the producer's own".into())]));
    assert_eq!(back.properties.user_id, None, "the broker would refuse it from another");
}

#[test]
fn a_letter_of_ours_that_had_waited_for_another_attempt_died_of_our_reason_at_our_time() {
    let waited = Headers::from([("x-death".into(), died("expired", "tasks.retry.1000ms", 50))]);
    let waited = Properties { headers: waited, ..Properties::default() };
    let letter = dead_letter(&task(waited), &cause(Reason::Attempts));
    let read = Letter::of(&letter);
    assert_eq!((read.reason(), read.died_at(), read.died_in()), ("attempts", Some(at(100)), None));
    assert_eq!(restored(letter).properties, Properties::default());
}

#[test]
fn what_gives_no_reason_or_time_is_unknown_and_a_timestamp_is_better_than_nothing() {
    let bare = Message::default();
    let read = Letter::of(&bare);
    assert_eq!((read.reason(), read.died_at(), read.task_id()), ("unknown", None, None));
    let mut old = dead_letter(
        &task(Properties { timestamp: Some(9), ..Properties::default() }),
        &cause(Reason::Poison),
    );
    old.properties.headers.remove(DEAD_LETTERED_AT);
    assert_eq!(Letter::of(&old).died_at(), Some(at(9)));
    assert!(
        reasons().any(|reason| reason == "unknown") && reasons().any(|reason| reason == "delivery_limit")
    );
}

#[test]
fn a_control_message_is_put_back_only_by_its_id() {
    let reboot = Properties { kind: Some("control.reboot".into()), ..Properties::default() };
    let letter = dead_letter(&task(reboot), &cause(Reason::UnknownControl));
    let error = Letter::of(&letter).destination("tasks", false).unwrap_err();
    assert!(error.contains("control.reboot"), "{error}");
    assert_eq!(Letter::of(&letter).destination("tasks", true), Ok("tasks"));
    let sentinel = Message { properties: Properties::default(), body: " null".into() };
    assert!(Letter::of(&sentinel).destination("tasks", false).is_err());
}
