//! Tests of how dead letters are shown.

use super::*;
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
    Delivery::made(Message { properties, body: body.into() }, 1, 2)
}

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(100 + 3_600 + 120)
}

#[test]
fn control_characters_of_a_dead_letter_never_reach_the_terminal() {
    let hostile = delivery("\u{1b}[2Jgone\nnext\u{9b}", b"\x1b]0;title\x07\tbody\n");
    let row = DeadLetterSummary::of(&hostile, now());
    for shown in [
        cells(&row).join(" "),
        cells(&row.with_destination("\u{1b}gone next".into())).join(" "),
        full_text(&hostile, now()),
    ] {
        assert!(!shown.chars().any(|it| it.is_control() && it != '\n' && it != '\t'), "{shown:?}");
        assert!(shown.contains("gone next"), "{shown}");
    }
}

#[test]
fn a_dead_letter_is_shown_with_properties_headers_and_body() {
    let shown = full_text(&delivery("it broke", b"{\"input\": 1}"), now());
    for part in [
        "1970-01-01T00:01:40.000Z, 1h02m ago; delivered 2 times before",
        "priority  3",
        "deep  [1,null,\"1970-01-01T00:01:40.000Z\"]",
        "odd  {\"base64\":\"/w==\"}",
        "body, 12 bytes\n{\"input\": 1}",
    ] {
        assert!(shown.contains(part), "no {part} in {shown}");
    }
    let json = full_json(&delivery("it broke", &[0xff, 0]), now());
    assert_eq!((&json["body_base64"], &json["body"]), (&json!("/wA="), &Json::Null));
    assert_eq!(
        (&json["task_id"], &json["age_s"], &json["headers"]["deep"][0]),
        (&json!("t-1"), &json!(3_720), &json!(1))
    );
}
