//! What a reader of letters sees.

use super::*;
use crate::broker::DeliveryTag;
use crate::protocol::Message;

fn delivery(error: &str, body: &'static [u8]) -> Delivery {
    let headers = Headers::from([
        ("reason".into(), "poison".into()),
        ("error".into(), error.into()),
        ("task_id".into(), "t-1".into()),
        ("worker".into(), "host/embed/0".into()),
        ("dead_lettered_at".into(), "1970-01-01T00:01:40Z".into()),
        ("deep".into(), Value::Array(vec![Value::U8(1), Value::Void, Value::Timestamp(100)])),
        ("odd".into(), Value::Text(vec![0xff])),
    ]);
    let properties = Properties { priority: Some(3), headers, ..Properties::default() };
    Delivery {
        message: Message { properties, body: body.into() },
        delivery_tag: DeliveryTag { session: 1, tag: 1 },
        routing_key: None,
        redelivered: false,
        delivery_count: Some(2),
    }
}

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(100 + 3_600 + 120)
}

#[test]
fn the_last_column_ends_where_the_terminal_does() {
    let row = Row::of(&delivery(&"long ".repeat(100), b"{}"), now());
    let cells = || vec![row.cells(row.error())];
    let shown = table("ERROR", cells(), Some(80));
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(lines[0], "TASK  REASON    AGE  WORKER        BYTES  ERROR");
    assert!(lines[1].starts_with("t-1   poison  1h 2m  host/embed/0      2  long long"), "{shown}");
    assert!(lines[1].chars().count() == 80 && lines[1].ends_with('…'), "{shown}");
    assert!(table("ERROR", cells(), None).contains(row.error().trim()));
    assert!(table("ERROR", cells(), Some(10)).contains("long"), "something is shown on any terminal");
}

#[test]
fn what_a_letter_holds_cannot_command_the_terminal() {
    let hostile = delivery("\u{1b}[2Jgone\nnext\u{9b}", b"\x1b]0;title\x07\tbody\n");
    let row = Row::of(&hostile, now());
    for shown in [table("ERROR", vec![row.cells(row.error())], None), whole(&hostile, now())] {
        assert!(!shown.chars().any(|it| it.is_control() && it != '\n' && it != '\t'), "{shown:?}");
        assert!(shown.contains("gone next"), "{shown}");
    }
}

#[test]
fn a_letter_is_shown_with_all_that_it_has() {
    let shown = whole(&delivery("it broke", b"{\"input\": 1}"), now());
    for part in [
        "1970-01-01T00:01:40.000Z, 1h 2m ago; delivered 2 times",
        "priority  3",
        "deep  [1,null,\"1970-01-01T00:01:40.000Z\"]",
        "odd  {\"base64\":\"/w==\"}",
        "body, 12 bytes\n{\"input\": 1}",
    ] {
        assert!(shown.contains(part), "no {part} in {shown}");
    }
    let json = whole_json(&delivery("it broke", &[0xff, 0]), now());
    assert_eq!((&json["body_base64"], &json["body"]), (&json!("/wA="), &Json::Null));
    assert_eq!(
        (&json["task_id"], &json["age_s"], &json["headers"]["deep"][0]),
        (&json!("t-1"), &json!(3_720), &json!(1))
    );
}

#[test]
fn an_age_is_told_in_two_units_at_most() {
    let words = |seconds| in_words(Duration::from_secs(seconds));
    assert_eq!([words(59), words(61), words(3_600), words(90_061)], ["59s", "1m 1s", "1h 0m", "1d 1h"]);
}
