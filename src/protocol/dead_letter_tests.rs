//! Tests of writing, reading and restoring dead letters.

use super::super::{Incoming, Properties, Sentinels, classify};
use super::*;

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

/// The dead letter of a task, written 100 s after the epoch.
fn dead(properties: Properties, reason: Reason) -> Message {
    let cause = Cause { reason, error: "it broke", worker: "host/embed/0", at: at(100) };
    dead_letter(&task(properties), &cause)
}

fn task(properties: Properties) -> Task {
    let message = Message { properties, body: r#"{"input":"a"}"#.into() };
    match classify(message, at(0), Sentinels::ALL, || "made".into()) {
        Incoming::Task(task) | Incoming::UnknownControl(task, _) => task,
        Incoming::Sentinel(_) => panic!("no sentinel"),
    }
}

fn with_headers(headers: Headers) -> Properties {
    Properties { headers, ..Properties::default() }
}

/// `x-death` as RabbitMQ writes it.
fn death(reason: &str, queue: &str, seconds: u64) -> Value {
    let first = Headers::from([
        ("reason".into(), reason.into()),
        ("queue".into(), queue.into()),
        ("time".into(), Value::Timestamp(seconds)),
        ("count".into(), Value::I64(1)),
    ]);
    Value::Array(vec![Value::Table(first)])
}

#[test]
fn a_dead_letter_keeps_everything_and_acts_on_nothing() {
    let deep = Value::Table(Headers::from([("a".into(), Value::U8(1))]));
    let headers =
        Headers::from([("CC".into(), Value::Array(vec!["q".into()])), ("deep".into(), deep.clone())]);
    let sent = Properties {
        correlation_id: Some("c".into()),
        expiration: Some("100".into()),
        user_id: Some("someone".into()),
        content_type: Some("text/x".into()),
        ..with_headers(headers)
    };
    let error = "é".repeat(5_000);
    let cause = Cause { reason: Reason::Undecodable, error: &error, worker: "w", at: at(0) };
    let Message { properties, body } = dead_letter(&task(sent.clone()), &cause);
    assert_eq!(body, r#"{"input":"a"}"#);
    assert_eq!(
        (properties.correlation_id, properties.content_type),
        (sent.correlation_id, sent.content_type)
    );
    assert_eq!((properties.expiration, properties.user_id), (None, None));
    let headers = properties.headers;
    assert_eq!(headers["deep"], deep);
    assert!(headers.contains_key("original_cc") && !headers.contains_key("CC"));
    for (name, text) in [
        ("original_expiration", "100"),
        ("original_user_id", "someone"),
        ("reason", "undecodable"),
        ("dead_lettered_at", "1970-01-01T00:00:00.000Z"),
    ] {
        assert_eq!(headers[name].as_str(), Some(text), "{name}");
    }
    assert!(headers["error"].as_str().unwrap().ends_with("… (10000 bytes)"));
}

#[test]
fn a_dead_letter_that_was_too_large_keeps_our_headers_and_no_large_one_of_their_name() {
    let large = || Value::from("x".repeat(100_000));
    let headers = [("mine", large()), ("last_log", large()), ("exit", Value::Array(vec![large()]))];
    let headers = headers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let kept = without_producer_headers(dead(with_headers(headers), Reason::Poison)).properties.headers;
    let names: Vec<&str> = kept.keys().map(String::as_str).collect();
    assert_eq!(names, ["dead_lettered_at", "error", "headers_dropped", "reason", "task_id", "worker"]);
    assert_eq!(kept["headers_dropped"].as_i64(), Some(3));
}

#[test]
fn a_task_is_put_back_as_its_producer_sent_it_but_for_what_would_act_at_once() {
    let headers = Headers::from([("mine".into(), "kept".into())]);
    let sent = Properties {
        correlation_id: Some("c".into()),
        reply_to: Some("r".into()),
        priority: Some(3),
        timestamp: Some(7),
        ..with_headers(headers)
    };
    let mut acting =
        Properties { expiration: Some("100".into()), user_id: Some("someone".into()), ..sent.clone() };
    acting.headers.insert("CC".to_owned(), Value::Array(vec!["q".into()]));
    let crashes = CrashRecord { task: "f".into(), count: 3, alone: 0, among: 1, poison: None };
    let message = with_deaths(dead(acting, Reason::Poison), &crashes);
    let read = DeadLetter::of(&message);
    assert_eq!(
        (read.reason(), read.dead_lettered_at(), read.task_id()),
        ("poison", Some(at(100)), Some("c"))
    );
    assert_eq!((read.error(), read.pool()), (Some("it broke"), Some("embed")));
    assert_eq!((read.age(at(130)), read.age(at(1))), (Some(Duration::from_secs(30)), Some(Duration::ZERO)));
    assert_eq!(read.stays(false), None);
    let back = restored(message);
    assert_eq!((back.properties, &back.body[..]), (sent, &br#"{"input":"a"}"#[..]));
}

#[test]
fn a_deadline_stays_unless_it_may_come_of_an_expiration() {
    let plain = with_headers(Headers::from([("expires".into(), "2026-01-31T12:00:00Z".into())]));
    assert_eq!(restored(dead(plain.clone(), Reason::Attempts)).properties, plain);
    let expiring = Properties { expiration: Some("5".into()), ..Properties::default() };
    let again = task(expiring).next_attempt(Some(at(5)));
    assert!(again.properties.headers.contains_key("expires"));
    assert_eq!(restored(dead(again.properties, Reason::Attempts)).properties, Properties::default());
}

#[test]
fn a_control_message_is_put_back_only_by_its_id() {
    let kind = |kind: &str| Properties { kind: Some(kind.to_owned()), ..Properties::default() };
    for (message, reason) in [
        (dead(kind("control.reboot"), Reason::UnknownControl), "control.reboot"),
        (Message { properties: kind("control.shutdown"), body: "".into() }, "control.shutdown"),
        (Message { properties: Properties::default(), body: " null".into() }, "null"),
    ] {
        let read = DeadLetter::of(&message);
        assert!(read.stays(false).is_some_and(|error| error.contains(reason)), "{reason}");
        assert_eq!(read.stays(true), None);
    }
}

#[test]
fn what_the_broker_dead_lettered_says_why_when_and_from_where() {
    let headers = Headers::from([
        ("x-death".into(), death("delivery_limit", "tasks", 50)),
        ("x-first-death-reason".into(), "expired".into()),
        ("x-last-death-queue".into(), "tasks".into()),
        ("x-acquired-count".into(), Value::I64(3)),
        ("sconce_attempt".into(), Value::I64(2)),
        ("reason".into(), "the producer's own".into()),
        ("CC".into(), Value::Array(vec!["q".into()])),
    ]);
    let properties = Properties {
        user_id: Some("someone".into()),
        message_id: Some("m".into()),
        timestamp: Some(9),
        ..with_headers(headers)
    };
    let message = Message { properties, body: "{}".into() };
    let read = DeadLetter::of(&message);
    assert_eq!((read.reason(), read.dead_lettered_at()), ("delivery_limit", Some(at(50))));
    assert_eq!((read.source_queue(), read.task_id()), (Some("tasks"), Some("m")));
    assert_eq!((read.worker(), read.error()), (None, None));
    let back = restored(message).properties;
    assert_eq!(back.headers, Headers::from([("reason".into(), "the producer's own".into())]));
    assert_eq!(back.user_id, None, "the broker would refuse it from another");
}

#[test]
fn a_dead_letter_that_had_waited_for_another_attempt_has_our_reason_and_time() {
    let headers = Headers::from([("x-death".into(), death("expired", "tasks.retry.1000ms", 50))]);
    let message = dead(with_headers(headers), Reason::Attempts);
    let read = DeadLetter::of(&message);
    assert_eq!((read.reason(), read.dead_lettered_at()), ("attempts", Some(at(100))));
    assert_eq!(read.source_queue(), None);
    assert_eq!(restored(message).properties, Properties::default());
}

#[test]
fn what_gives_no_reason_or_time_is_unknown_and_a_timestamp_is_better_than_nothing() {
    let bare = Message::default();
    let read = DeadLetter::of(&bare);
    assert_eq!((read.reason(), read.dead_lettered_at(), read.task_id()), ("unknown", None, None));
    let mut old = dead(Properties { timestamp: Some(9), ..Properties::default() }, Reason::Poison);
    old.properties.headers.remove(DEAD_LETTERED_AT);
    assert_eq!(DeadLetter::of(&old).dead_lettered_at(), Some(at(9)));
    assert!(["unknown", "delivery_limit"].iter().all(|reason| reasons().any(|it| it == *reason)));
}
