//! Writes a dead letter: the message as it came, and headers that say why nobody works on it. How it
//! is read back is in `letter`. Owns no state.

use std::time::SystemTime;

use jiff::Timestamp;

use super::control::CrashRecord;
use super::message::without_acting_properties;
use super::task::ATTEMPT;
use super::{Headers, Message, Task, Value, shorten};

/// Longest `error` header: all headers must fit one AMQP frame beside the producer's own.
const ERROR_BYTES: usize = 2_000;

/// Longest of our headers in a letter that was too large: a producer may use their names too.
const OUR_BYTES: usize = 8_192;

/// Header with when it became a dead letter, ISO-8601.
pub const DEAD_LETTERED_AT: &str = "dead_lettered_at";
/// Header of a parked reply, which earlier versions wrote, with the queue that it was for.
pub const REPLY_QUEUE: &str = "reply_queue";
/// All headers that this file writes beside `original_*`.
pub(super) const OURS: [&str; 10] = [
    "reason",
    "error",
    "task_id",
    "worker",
    DEAD_LETTERED_AT,
    REPLY_QUEUE,
    "deaths",
    "exit",
    "last_log",
    "headers_dropped",
];

/// Why a message is in the dead-letter queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The body is not what its content type says.
    Undecodable,
    /// It killed the workers that computed it alone.
    Poison,
    /// It was tried as often as the settings allow, each time in vain.
    Attempts,
    /// Its reply has nowhere to go.
    Unroutable,
    /// The queue that its reply is for has not taken it in time.
    Unconfirmed,
    /// A `control.*` type that this version does not know.
    UnknownControl,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 6] = [
        Self::Undecodable,
        Self::Poison,
        Self::Attempts,
        Self::Unroutable,
        Self::Unconfirmed,
        Self::UnknownControl,
    ];

    /// The `reason` header.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Undecodable => "undecodable",
            Self::Poison => "poison",
            Self::Attempts => "attempts",
            Self::Unroutable => "unroutable",
            Self::Unconfirmed => "unconfirmed",
            Self::UnknownControl => "unknown_control",
        }
    }
}

/// Why a message becomes a dead letter, by whom and when.
#[derive(Clone, Copy, Debug)]
pub struct Cause<'a> {
    /// The kind.
    pub reason: Reason,
    /// In words.
    pub error: &'a str,
    /// host/pool/slot.
    pub worker: &'a str,
    /// Now.
    pub at: SystemTime,
}

/// The dead letter of `task`. It begins anew when somebody puts it back into the task queue.
pub fn dead_letter(task: &Task, cause: &Cause<'_>) -> Message {
    let mut message = task.message.clone();
    message.properties.headers.remove(ATTEMPT);
    parked(message, &task.id, cause)
}

/// `letter` with how the workers died that had the task on their device.
pub fn with_deaths(mut letter: Message, deaths: &CrashRecord) -> Message {
    let headers = &mut letter.properties.headers;
    headers.insert("deaths".into(), i64::from(deaths.count).into());
    if let Some(last) = &deaths.poison {
        headers.insert("exit".into(), last.exit.as_str().into());
        headers.insert("last_log".into(), last.log.as_str().into());
    }
    letter
}

/// `message` with the cause in its headers.
fn parked(message: Message, task_id: &str, cause: &Cause<'_>) -> Message {
    let mut message = without_acting_properties(message);
    let headers = &mut message.properties.headers;
    headers.extend(Headers::from([
        ("reason".into(), cause.reason.as_str().into()),
        ("error".into(), shorten(cause.error, ERROR_BYTES).into()),
        ("task_id".into(), task_id.into()),
        ("worker".into(), cause.worker.into()),
    ]));
    if let Ok(at) = Timestamp::try_from(cause.at) {
        headers.insert(DEAD_LETTERED_AT.into(), format!("{at:.3}").into());
    }
    message
}

/// A dead letter that the broker refuses for its size, with our headers alone: the producer's may be
/// as large as a whole frame.
pub fn without_foreign_headers(mut letter: Message) -> Message {
    let headers = &mut letter.properties.headers;
    let before = headers.len();
    headers.retain(|name, value| OURS.contains(&name.as_str()) && is_small(value));
    let dropped = (before - headers.len()) as i64;
    headers.insert("headers_dropped".into(), dropped.into());
    letter
}

fn is_small(value: &Value) -> bool {
    match value {
        Value::Text(text) => text.len() <= OUR_BYTES,
        other => other.as_i64().is_some(),
    }
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
        let (error, at) = ("é".repeat(5_000), SystemTime::UNIX_EPOCH);
        let cause = Cause { reason: Reason::Undecodable, error: &error, worker: "w", at };
        let letter = parked(message.clone(), "t", &cause);
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
        assert_eq!(headers["dead_lettered_at"].as_str(), Some("1970-01-01T00:00:00.000Z"));
        assert!(headers["error"].as_str().unwrap().ends_with("… (10000 bytes)"));
    }

    #[test]
    fn a_letter_that_was_too_large_keeps_our_headers_and_no_large_one_of_their_name() {
        let large = || Value::from("x".repeat(100_000));
        let headers = [("mine", large()), ("last_log", large()), ("exit", Value::Array(vec![large()]))];
        let headers = headers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let message =
            Message { properties: Properties { headers, ..Properties::default() }, body: "{}".into() };
        let error = "é".repeat(5_000);
        let cause = Cause { reason: Reason::Poison, error: &error, worker: "w", at: SystemTime::UNIX_EPOCH };
        let letter = without_foreign_headers(parked(message, "t", &cause));
        let kept: Vec<&str> = letter.properties.headers.keys().map(String::as_str).collect();
        assert_eq!(kept, ["dead_lettered_at", "error", "headers_dropped", "reason", "task_id", "worker"]);
        assert_eq!(letter.properties.headers["headers_dropped"].as_i64(), Some(3));
    }
}
