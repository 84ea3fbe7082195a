//! Writes a dead letter (the message as it came, and headers with the reason), reads one made by a worker or by
//! RabbitMQ (`x-death`), and restores the original message. Pure; owns no state.

use std::time::{Duration, SystemTime};

use jiff::Timestamp;

use super::control::CrashRecord;
use super::message::{ORIGINAL_EXPIRATION, ORIGINALS, is_the_brokers, without_acting_properties};
use super::task::{ATTEMPT, EXPIRES, PUT_OFF_SINCE, is_control};
use super::{Headers, Message, Task, Value, shorten};

/// Longest `error` header: all headers, the producer's too, must fit one AMQP frame.
const ERROR_BYTES: usize = 2_000;

/// Longest header kept in a dead letter that was too large: a producer may use our header names too.
const OUR_BYTES: usize = 8_192;

/// Header with the time of dead-lettering, ISO-8601.
const DEAD_LETTERED_AT: &str = "dead_lettered_at";
/// All headers that a worker writes besides `original_*`; the first four are in each of its dead letters.
const OURS: [&str; 9] = [
    "reason",
    "error",
    "task_id",
    "worker",
    DEAD_LETTERED_AT,
    "deaths",
    "exit",
    "last_log",
    "headers_dropped",
];

/// The reasons that RabbitMQ gives in `x-death`.
const BROKERS: [&str; 4] = ["delivery_limit", "expired", "rejected", "maxlen"];
/// The reason of a dead letter without one.
const UNKNOWN: &str = "unknown";
/// Why a message is in the dead-letter queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The body does not match its content type.
    Undecodable,
    /// The task killed the workers that computed it alone.
    Poison,
    /// All attempts that the settings allow have failed.
    Attempts,
    /// The queue for its reply does not exist.
    Unroutable,
    /// The queue for its reply has not confirmed it in time.
    Unconfirmed,
    /// A `control.*` type that this version does not know.
    UnknownControl,
    /// The task was refused, and the queue for the error reply does not exist.
    Refused,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 7] = [
        Self::Undecodable,
        Self::Poison,
        Self::Attempts,
        Self::Unroutable,
        Self::Unconfirmed,
        Self::UnknownControl,
        Self::Refused,
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
            Self::Refused => "refused",
        }
    }
}

/// Why, by which worker and when a message becomes a dead letter.
#[derive(Clone, Copy, Debug)]
pub struct Cause<'a> {
    /// The kind.
    pub reason: Reason,
    /// A sentence for people.
    pub error: &'a str,
    /// launcher/pool/index.
    pub worker: &'a str,
    /// Now.
    pub at: SystemTime,
}

/// The dead letter of `task`. If somebody puts it back into the task queue, its attempts are counted anew, and so is
/// the time for which it may be put off.
pub fn dead_letter(task: &Task, cause: &Cause<'_>) -> Message {
    let mut message = without_acting_properties(task.message.clone());
    let headers = &mut message.properties.headers;
    headers.remove(ATTEMPT);
    headers.remove(PUT_OFF_SINCE);
    headers.extend(Headers::from([
        ("reason".into(), cause.reason.as_str().into()),
        ("error".into(), shorten(cause.error, ERROR_BYTES).into()),
        ("task_id".into(), task.id.as_str().into()),
        ("worker".into(), cause.worker.into()),
    ]));
    if let Ok(at) = Timestamp::try_from(cause.at) {
        headers.insert(DEAD_LETTERED_AT.into(), format!("{at:.3}").into());
    }
    message
}

/// Adds to a dead letter how the workers died that had the task on their device.
pub fn with_deaths(mut message: Message, deaths: &CrashRecord) -> Message {
    let headers = &mut message.properties.headers;
    headers.insert("deaths".into(), i64::from(deaths.count).into());
    if let Some(last) = &deaths.poison {
        headers.insert("exit".into(), last.exit.as_str().into());
        headers.insert("last_log".into(), last.log.as_str().into());
    }
    message
}

/// Reduces a dead letter that the broker refuses for its size to our headers: the producer's may be as large as
/// a whole frame.
pub fn without_producer_headers(mut message: Message) -> Message {
    let headers = &mut message.properties.headers;
    let before = headers.len();
    headers.retain(|name, value| is_ours(name) && is_small(value));
    let dropped = (before - headers.len()) as i64;
    headers.insert("headers_dropped".into(), dropped.into());
    message
}

fn is_ours(header: &str) -> bool {
    OURS.contains(&header)
}

fn is_small(value: &Value) -> bool {
    match value {
        Value::Text(text) => text.len() <= OUR_BYTES,
        other => other.as_i64().is_some(),
    }
}

/// Every reason that [`DeadLetter::reason`] knows: the workers', the broker's, and `unknown`.
pub fn reasons() -> impl Iterator<Item = &'static str> {
    Reason::ALL.into_iter().map(Reason::as_str).chain(BROKERS).chain([UNKNOWN])
}

/// A message of a dead-letter queue.
#[derive(Clone, Copy, Debug)]
pub struct DeadLetter<'a> {
    message: &'a Message,
    /// The reason, where one of our workers wrote it.
    ours: Option<Reason>,
}

impl<'a> DeadLetter<'a> {
    /// Reads `message`.
    pub fn of(message: &'a Message) -> Self {
        Self { message, ours: our_reason(&message.properties.headers) }
    }

    /// The reason: one of [`reasons`], or the text of an unknown broker.
    pub fn reason(&self) -> &'a str {
        match (self.ours, self.death("reason").and_then(Value::as_str)) {
            (Some(reason), _) => reason.as_str(),
            (None, Some(reason)) => reason,
            (None, None) => UNKNOWN,
        }
    }

    /// When it became a dead letter; where that is not recorded, when it was published; none where neither is.
    pub fn dead_lettered_at(&self) -> Option<SystemTime> {
        let written = match self.ours {
            Some(_) => self.text(DEAD_LETTERED_AT).and_then(|text| text.parse::<Timestamp>().ok()),
            None => None,
        };
        let seconds = match (self.ours, self.death("time")) {
            (None, Some(Value::Timestamp(seconds))) => Some(*seconds),
            _ => self.message.properties.timestamp,
        };
        let counted = || SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds?));
        written.map(SystemTime::from).or_else(counted)
    }

    /// How long it has been a dead letter; zero where the recorded time is in the future.
    pub fn age(&self, now: SystemTime) -> Option<Duration> {
        Some(now.duration_since(self.dead_lettered_at()?).unwrap_or_default())
    }

    /// The task's id, as the worker wrote it.
    pub fn task_id(&self) -> Option<&'a str> {
        let properties = &self.message.properties;
        let given = [&properties.message_id, &properties.correlation_id];
        let given = || given.into_iter().filter_map(|id| id.as_deref()).find(|id| !id.is_empty());
        self.our_text("task_id").or_else(given)
    }

    /// Whether `id` is the task's id or the message's `message_id`.
    pub fn has_id(&self, id: &str) -> bool {
        self.task_id() == Some(id) || self.message.properties.message_id.as_deref() == Some(id)
    }

    /// The error, in the worker's words.
    pub fn error(&self) -> Option<&'a str> {
        self.our_text("error")
    }

    /// The worker that wrote it: launcher/pool/index.
    pub fn worker(&self) -> Option<&'a str> {
        self.our_text("worker")
    }

    /// The pool of the worker that wrote it.
    pub fn pool(&self) -> Option<&'a str> {
        let (_host, pool_and_slot) = self.worker()?.split_once('/')?;
        pool_and_slot.rsplit_once('/').map(|(pool, _slot)| pool)
    }

    /// The queue from which the broker dead-lettered it.
    pub fn source_queue(&self) -> Option<&'a str> {
        match self.ours {
            Some(_) => None,
            None => self.death("queue").and_then(Value::as_str),
        }
    }

    /// Why it may not be requeued: it is a control message, and was not selected by its id.
    pub fn stays(&self, by_id: bool) -> Option<String> {
        let kind = self.message.properties.kind.as_deref().unwrap_or("null");
        (is_control(self.message) && !by_id)
            .then(|| format!("it is a control message ({kind}): to put it back, give its id"))
    }

    /// A field of the latest entry of `x-death`.
    fn death(&self, key: &str) -> Option<&'a Value> {
        match self.message.properties.headers.get("x-death")? {
            Value::Array(deaths) => match deaths.first()? {
                Value::Table(death) => death.get(key),
                _ => None,
            },
            _ => None,
        }
    }

    fn text(&self, header: &str) -> Option<&'a str> {
        self.message.properties.headers.get(header)?.as_str()
    }

    fn our_text(&self, header: &str) -> Option<&'a str> {
        self.ours.and_then(|_| self.text(header))
    }
}

/// The reason, where all headers of a worker are present: a producer may use a `reason` header itself.
fn our_reason(headers: &Headers) -> Option<Reason> {
    let written = headers.get("reason")?.as_str()?;
    let complete = OURS[..4].iter().all(|name| headers.contains_key(*name));
    Reason::ALL.into_iter().find(|reason| reason.as_str() == written).filter(|_| complete)
}

/// Restores the original message, to be published again. Properties that would act at the broker stay off (see
/// [`super::message::without_acting_properties`]), and so does a deadline that may have been computed from an
/// expiration. Attempts are counted anew.
pub fn restored(mut message: Message) -> Message {
    let ours = our_reason(&message.properties.headers);
    (message.properties.expiration, message.properties.user_id) = (None, None);
    let headers = &mut message.properties.headers;
    headers.retain(|name, _| name != "CC" && !is_the_brokers(name));
    let tried = headers.remove(ATTEMPT).is_some();
    if ours.is_some() {
        headers.retain(|name, _| !is_ours(name));
    }
    if ours.is_some() || tried {
        if headers.contains_key(ORIGINAL_EXPIRATION) {
            headers.remove(EXPIRES);
        }
        headers.retain(|name, _| !ORIGINALS.contains(&name.as_str()));
    }
    message
}

#[cfg(test)]
#[path = "dead_letter_tests.rs"]
mod tests;
