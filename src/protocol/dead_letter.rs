//! Writes a dead letter: the message as it came, and headers that say why nobody works on it.
//! Owns no state.

use super::control::Deaths;
use super::task::ATTEMPT;
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
    /// It was tried as often as the settings allow, each time in vain.
    Attempts,
    /// The reply has nowhere to go.
    Unroutable,
    /// A `control.*` type that this version does not know.
    UnknownControl,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Undecodable, Self::Poison, Self::Attempts, Self::Unroutable, Self::UnknownControl];

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

/// The dead letter of `task`. It begins anew when somebody puts it back into the task queue.
pub fn dead_letter(task: &Task, reason: Reason, error: &str, worker: &str) -> Message {
    let mut message = task.message.clone();
    message.properties.headers.remove(ATTEMPT);
    parked(message, &task.id, reason, error, worker)
}

/// `letter` with how the workers died that had the task on their device.
pub fn with_deaths(mut letter: Message, deaths: &Deaths) -> Message {
    let headers = &mut letter.properties.headers;
    headers.insert("deaths".into(), i64::from(deaths.count).into());
    if let Some(last) = &deaths.poison {
        headers.insert("exit".into(), last.exit.as_str().into());
        headers.insert("last_log".into(), last.log.as_str().into());
    }
    letter
}

/// `message` with the reason in its headers.
pub fn parked(message: Message, task_id: &str, reason: Reason, error: &str, worker: &str) -> Message {
    let mut message = without_acting_properties(message);
    message.properties.headers.extend(Headers::from([
        ("reason".into(), reason.as_str().into()),
        ("error".into(), shorten(error, ERROR_BYTES).into()),
        ("task_id".into(), task_id.into()),
        ("worker".into(), worker.into()),
    ]));
    message
}

/// A message to be published in another's name. Three properties would act again at the broker and
/// are kept as `original_*` headers instead: `expiration` would delete it, `user_id` makes the broker
/// refuse it from another user, `CC` would copy it to further queues.
pub fn without_acting_properties(mut message: Message) -> Message {
    let properties = &mut message.properties;
    let acting = [
        ("original_expiration", properties.expiration.take().map(Value::from)),
        ("original_user_id", properties.user_id.take().map(Value::from)),
        ("original_cc", properties.headers.remove("CC")),
    ];
    let kept = acting.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    properties.headers.extend(kept);
    message
}

/// A dead letter that the broker refuses for its size, with our headers alone: the producer's may be
/// as large as a whole frame.
pub fn without_foreign_headers(mut letter: Message) -> Message {
    let headers = &mut letter.properties.headers;
    let before = headers.len();
    let ours = ["reason", "error", "task_id", "worker", "deaths", "exit", "last_log"];
    headers.retain(|name, _| ours.contains(&name.as_str()));
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
