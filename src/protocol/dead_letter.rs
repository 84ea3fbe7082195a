//! Writes a dead letter: the message as it came, and headers that say why nobody works on it.
//! Owns no state.

use super::{Headers, Message, Task, Value, shorten};

/// Longest `error` header: all headers must fit one AMQP frame beside the producer's own.
const ERROR_BYTES: usize = 2_000;

/// Why a message is in the dead-letter queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The body is not what its content type says.
    Undecodable,
    /// It killed the workers that computed it alone.
    Poison,
    /// It was delivered as often as the settings allow, and never answered.
    Attempts,
    /// The reply has nowhere to go.
    Unroutable,
    /// A `control.*` type that this version does not know.
    UnknownControl,
}

impl Reason {
    /// The `reason` header.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Undecodable => "undecodable",
            Self::Poison => "poison",
            Self::Attempts => "attempts",
            Self::Unroutable => "unroutable",
            Self::UnknownControl => "unknown_control",
        }
    }
}

/// The dead letter of `task`.
pub fn dead_letter(task: &Task, reason: Reason, error: &str, worker: &str) -> Message {
    parked(task.message.clone(), &task.id, reason, error, worker)
}

/// `message` with the reason in its headers.
///
/// Three properties would act again at the broker and are kept as `original_*` headers instead:
/// `expiration` would delete the dead letter, `user_id` makes the broker refuse it from another
/// user, `CC` would copy it to further queues.
pub fn parked(mut message: Message, task_id: &str, reason: Reason, error: &str, worker: &str) -> Message {
    let properties = &mut message.properties;
    let acting = [
        ("original_expiration", properties.expiration.take().map(Value::from)),
        ("original_user_id", properties.user_id.take().map(Value::from)),
        ("original_cc", properties.headers.remove("CC")),
    ];
    let kept = acting.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    properties.headers.extend(kept);
    properties.headers.extend(Headers::from([
        ("reason".into(), reason.as_str().into()),
        ("error".into(), shorten(error, ERROR_BYTES).into()),
        ("task_id".into(), task_id.into()),
        ("worker".into(), worker.into()),
    ]));
    message
}

/// A dead letter that the broker refuses for its size, with our headers alone: the producer's may be
/// as large as a whole frame.
pub fn without_foreign_headers(mut letter: Message) -> Message {
    let headers = &mut letter.properties.headers;
    let before = headers.len();
    headers.retain(|name, _| ["reason", "error", "task_id", "worker"].contains(&name.as_str()));
    let dropped = (before - headers.len()) as i64;
    headers.insert("headers_dropped".into(), dropped.into());
    letter
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Properties;

    #[test]
    fn a_dead_letter_keeps_everything_and_acts_on_nothing() {
        let properties = Properties {
            correlation_id: Some("c".into()),
            expiration: Some("100".into()),
            user_id: Some("someone".into()),
            content_type: Some("text/x".into()),
            headers: Headers::from([
                ("CC".into(), Value::Array(vec!["q".into()])),
                ("deep".into(), Value::Table(Headers::from([("a".into(), Value::U8(1))]))),
            ]),
            ..Properties::default()
        };
        let message = Message { properties, body: "\u{0}body".into() };
        let letter = parked(message.clone(), "t", Reason::Undecodable, &"é".repeat(5_000), "w");
        assert_eq!(letter.body, message.body);
        assert_eq!(letter.properties.correlation_id, message.properties.correlation_id);
        assert_eq!(letter.properties.content_type, message.properties.content_type);
        let headers = &letter.properties.headers;
        assert_eq!(headers["deep"], message.properties.headers["deep"]);
        assert_eq!((&letter.properties.expiration, &letter.properties.user_id), (&None, &None));
        assert_eq!(headers["original_expiration"].as_str(), Some("100"));
        assert_eq!(headers["original_user_id"].as_str(), Some("someone"));
        assert!(headers.contains_key("original_cc") && !headers.contains_key("CC"));
        assert_eq!(headers["reason"].as_str(), Some("undecodable"));
        assert!(headers["error"].as_str().unwrap().ends_with("… (10000 bytes)"));
    }
}
