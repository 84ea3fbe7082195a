//! Writes a dead letter (the delivered message, and headers with the reason), reads one made by a worker or by RabbitMQ
//! (`x-death`), and restores the original message. Pure; owns no state.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::control::CrashRecord;
use super::message::{
    ORIGINAL_EXPIRATION, ORIGINAL_HEADERS, TYPE, is_broker_header, without_broker_directives,
};
use super::raw_text::{escape, is_raw, unescape, visible};
use super::task::{ATTEMPT, EXPIRES, PUT_OFF_SINCE, RETURNING_SINCE, is_control};
use super::{Headers, Message, Properties, Task, Value, shorten};

/// Longest `error` header, in bytes: all headers, including the producer's, must fit one AMQP frame.
const MAX_ERROR_BYTES: usize = 2_000;

/// Longest header that is kept in a dead letter that was too large, in bytes. A producer may also use the names of
/// [`WORKER_HEADERS`], with longer values.
const MAX_KEPT_HEADER_BYTES: usize = 8_192;

/// Header with the queue that the task came from. Without it, that is the pool's first queue.
const QUEUE: &str = "queue";
/// Header with the time of dead-lettering, ISO-8601.
const DEAD_LETTERED_AT: &str = "dead_lettered_at";
/// All headers that a worker writes, except `original_*`. The first four are in every dead letter of a worker.
const WORKER_HEADERS: [&str; 11] = [
    "reason",
    "error",
    "task_id",
    "worker",
    QUEUE,
    DEAD_LETTERED_AT,
    "deaths",
    "exit",
    "last_log",
    HEADERS_DROPPED,
    RAW_STRINGS,
];
/// Header with the number of the producer's headers that are not in the dead letter.
const HEADERS_DROPPED: &str = "headers_dropped";
/// Header with the original bytes of strings that are not UTF-8.
const RAW_STRINGS: &str = "raw_strings";
/// Bytes in base64 of names of headers that a dead letter keeps. All that [`RAW_STRINGS`] holds must be less than
/// [`MAX_KEPT_HEADER_BYTES`].
const MAX_RAW_NAME_BYTES: usize = 2_048;

/// The reasons that RabbitMQ gives in `x-death`.
const BROKER_REASONS: [&str; 4] = ["delivery_limit", "expired", "rejected", "maxlen"];
/// The reason of a dead letter that states none.
const UNKNOWN_REASON: &str = "unknown";

named_enum! {
    /// Why a message is in the dead-letter queue.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Reason as as_str {
        /// The body does not match its content type.
        Undecodable => "undecodable",
        /// The task killed each worker that computed it alone.
        Poison => "poison",
        /// All attempts that the settings allow have failed.
        Attempts => "attempts",
        /// The queue for its reply does not exist.
        Unroutable => "unroutable",
        /// The broker has not confirmed its reply in time.
        Unconfirmed => "unconfirmed",
        /// A `control.*` type that this version does not know.
        UnknownControl => "unknown_control",
        /// The task was refused, and the queue for the error reply does not exist.
        Refused => "refused",
    }
}

/// Why, by which worker and when a message becomes a dead letter.
#[derive(Clone, Copy, Debug)]
pub struct Cause<'a> {
    /// The reason.
    pub reason: Reason,
    /// A sentence for people.
    pub error: &'a str,
    /// launcher/pool/index.
    pub worker: &'a str,
    /// The queue that the task came from.
    pub queue: &'a str,
    /// When the message becomes a dead letter.
    pub at: SystemTime,
}

/// The dead letter of `task`. If it is requeued later, its attempts are counted from 1 again, and the time for which it
/// may be put off starts again.
pub fn dead_letter(task: &Task, cause: &Cause<'_>) -> Message {
    let mut message = without_broker_directives(task.message.clone());
    let headers = &mut message.properties.headers;
    headers.remove(ATTEMPT);
    headers.remove(PUT_OFF_SINCE);
    headers.remove(RETURNING_SINCE);
    headers.extend(Headers::from([
        ("reason".into(), cause.reason.as_str().into()),
        ("error".into(), shorten(cause.error, MAX_ERROR_BYTES).into()),
        ("task_id".into(), task.id.as_str().into()),
        ("worker".into(), cause.worker.into()),
        (QUEUE.into(), cause.queue.into()),
    ]));
    if let Ok(at) = Timestamp::try_from(cause.at) {
        headers.insert(DEAD_LETTERED_AT.into(), format!("{at:.3}").into());
    }
    keep_raw_strings(&mut message.properties);
    message
}

/// The original bytes of strings that are not UTF-8, in base64.
#[derive(Default, Serialize, Deserialize)]
struct RawStrings {
    /// By the names of the properties.
    #[serde(flatten)]
    properties: BTreeMap<String, String>,
    #[serde(default)]
    header_names: Vec<String>,
}

/// Writes strings that are not UTF-8 with `\xNN` for each byte, because not every version and client can read them. The
/// header [`RAW_STRINGS`] keeps their bytes. Headers with such names, from [`MAX_RAW_NAME_BYTES`] on, are dropped.
fn keep_raw_strings(properties: &mut Properties) {
    let mut raw = RawStrings::default();
    for (name, value) in properties.texts_mut() {
        if let Some(text) = value.as_mut().filter(|text| is_raw(text)) {
            raw.properties.insert(name.to_owned(), BASE64.encode(unescape(text)));
            *text = visible(text);
        }
    }
    let (mut bytes, mut dropped) = (0, 0_i64);
    properties.headers.retain(|name, _| {
        if !is_raw(name) {
            return true;
        }
        let name = BASE64.encode(unescape(name));
        bytes += name.len();
        let is_kept = bytes <= MAX_RAW_NAME_BYTES;
        if is_kept {
            raw.header_names.push(name)
        } else {
            dropped += 1
        }
        is_kept
    });
    if dropped > 0 {
        properties.headers.insert(HEADERS_DROPPED.into(), dropped.into());
    }
    if !raw.properties.is_empty() || !raw.header_names.is_empty() {
        let text = serde_json::to_string(&raw).unwrap_or_default();
        properties.headers.insert(RAW_STRINGS.into(), text.into());
    }
}

/// Restores the ids and other properties that [`keep_raw_strings`] wrote otherwise. The `type` and the names of headers
/// stay as they are, because the task would be refused again. Anybody may write the header, so properties on which the
/// broker acts are not restored.
fn restore_raw_strings(properties: &mut Properties) {
    let raw = properties.headers.get(RAW_STRINGS).and_then(Value::as_str);
    let Some(raw) = raw.and_then(|raw| serde_json::from_str::<RawStrings>(raw).ok()) else { return };
    for (name, value) in properties.texts_mut() {
        let bytes = raw.properties.get(name).and_then(|bytes| BASE64.decode(bytes).ok());
        if let Some(bytes) = bytes.filter(|_| ![TYPE, "expiration", "user_id"].contains(&name)) {
            *value = Some(escape(&bytes));
        }
    }
}

/// Adds to a dead letter how many workers died with the task on their device, and how the last one died.
pub fn with_deaths(mut message: Message, crashes: &CrashRecord) -> Message {
    let headers = &mut message.properties.headers;
    headers.insert("deaths".into(), i64::from(crashes.count).into());
    if let Some(last) = &crashes.poison {
        headers.insert("exit".into(), last.exit.as_str().into());
        headers.insert("last_log".into(), last.log.as_str().into());
    }
    message
}

/// Removes all headers except small ones of a worker from a dead letter that the broker refuses for its size: the
/// producer's headers may fill a whole frame. The header `headers_dropped` says how many were removed.
pub fn without_producer_headers(mut message: Message) -> Message {
    let headers = &mut message.properties.headers;
    let before = headers.len();
    headers.retain(|name, value| is_worker_header(name) && is_small(value));
    let dropped = (before - headers.len()) as i64;
    headers.insert(HEADERS_DROPPED.into(), dropped.into());
    message
}

fn is_worker_header(header: &str) -> bool {
    WORKER_HEADERS.contains(&header)
}

fn is_small(value: &Value) -> bool {
    match value {
        Value::Text(text) => text.len() <= MAX_KEPT_HEADER_BYTES,
        other => other.as_i64().is_some(),
    }
}

/// Every reason that [`DeadLetter::reason`] knows: the workers', the broker's, and `unknown`.
pub fn reasons() -> impl Iterator<Item = &'static str> {
    Reason::ALL.into_iter().map(|(_, name)| name).chain(BROKER_REASONS).chain([UNKNOWN_REASON])
}

/// A message of a dead-letter queue.
#[derive(Clone, Copy, Debug)]
pub struct DeadLetter<'a> {
    message: &'a Message,
    /// The reason, if a worker wrote the dead letter; none if the broker did.
    worker_reason: Option<Reason>,
}

impl<'a> DeadLetter<'a> {
    /// Reads `message`.
    pub fn new(message: &'a Message) -> Self {
        Self { message, worker_reason: worker_reason(&message.properties.headers) }
    }

    /// The reason: one of [`reasons`], or another text that a broker wrote.
    pub fn reason(&self) -> &'a str {
        match (self.worker_reason, self.x_death_field("reason").and_then(Value::as_str)) {
            (Some(reason), _) => reason.as_str(),
            (None, Some(reason)) => reason,
            (None, None) => UNKNOWN_REASON,
        }
    }

    /// When it became a dead letter; if that is not recorded, when it was published; none if neither is recorded.
    pub fn dead_lettered_at(&self) -> Option<SystemTime> {
        let written = self.worker_text(DEAD_LETTERED_AT).and_then(|text| text.parse::<Timestamp>().ok());
        if let Some(time) = written {
            return Some(time.into());
        }
        let seconds = match (self.worker_reason, self.x_death_field("time")) {
            (None, Some(Value::Timestamp(seconds))) => *seconds,
            _ => self.message.properties.timestamp?,
        };
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
    }

    /// How long it has been a dead letter; zero if the recorded time is in the future.
    pub fn age(&self, now: SystemTime) -> Option<Duration> {
        Some(now.duration_since(self.dead_lettered_at()?).unwrap_or_default())
    }

    /// Returns the task's id: as the worker wrote it, else the `message_id`, else the `correlation_id`.
    pub fn task_id(&self) -> Option<&'a str> {
        let properties = &self.message.properties;
        let given = [&properties.message_id, &properties.correlation_id];
        let given = || given.into_iter().filter_map(|id| id.as_deref()).find(|id| !id.is_empty());
        self.worker_text("task_id").or_else(given)
    }

    /// Whether `id` is the task's id or the message's `message_id`.
    pub fn has_id(&self, id: &str) -> bool {
        let ids = [self.task_id(), self.message.properties.message_id.as_deref()];
        ids.into_iter().flatten().any(|known| visible(known) == id)
    }

    /// The message of the error, as the worker wrote it.
    pub fn error(&self) -> Option<&'a str> {
        self.worker_text("error")
    }

    /// The worker that wrote it: launcher/pool/index.
    pub fn worker(&self) -> Option<&'a str> {
        self.worker_text("worker")
    }

    /// The pool of the worker that wrote it.
    pub fn pool(&self) -> Option<&'a str> {
        let (_launcher, slot) = self.worker()?.split_once('/')?;
        slot.rsplit_once('/').map(|(pool, _index)| pool)
    }

    /// The queue that the task came from, as a worker wrote it. None: an earlier version wrote none, or the broker made
    /// the dead letter.
    pub fn queue(&self) -> Option<&'a str> {
        self.worker_text(QUEUE)
    }

    /// The queue from which the broker dead-lettered it.
    pub fn source_queue(&self) -> Option<&'a str> {
        match self.worker_reason {
            Some(_) => None,
            None => self.x_death_field("queue").and_then(Value::as_str),
        }
    }

    /// Why it may not be requeued; none if it may. A control message may be requeued only if it was selected `by_id`.
    pub fn refusal(&self, by_id: bool) -> Option<String> {
        if by_id || !is_control(self.message) {
            return None;
        }
        let kind = self.message.properties.kind.as_deref().unwrap_or("null");
        Some(format!("it is a control message ({kind}): to requeue it, give its id"))
    }

    /// A field of the latest entry of `x-death`.
    fn x_death_field(&self, key: &str) -> Option<&'a Value> {
        match self.message.properties.headers.get("x-death")? {
            Value::Array(deaths) => match deaths.first()? {
                Value::Table(death) => death.get(key),
                _ => None,
            },
            _ => None,
        }
    }

    /// A header that a worker wrote.
    fn worker_text(&self, header: &str) -> Option<&'a str> {
        self.worker_reason.and_then(|_| self.message.properties.headers.get(header)?.as_str())
    }
}

/// Returns the reason that a worker wrote. The headers that every dead letter of a worker has must all be present,
/// because a producer may also use a header `reason`.
fn worker_reason(headers: &Headers) -> Option<Reason> {
    let written = headers.get("reason")?.as_str()?;
    let is_complete = WORKER_HEADERS[..4].iter().all(|name| headers.contains_key(*name));
    Reason::ALL.into_iter().find(|(_, name)| *name == written && is_complete).map(|(reason, _)| reason)
}

/// Restores the original message, to be published again. Properties that would make the broker act are not restored
/// (see [`super::message::without_broker_directives`]), and neither is a deadline that may have been computed from an
/// expiration. Attempts are counted from 1 again.
pub fn restored(mut message: Message) -> Message {
    let is_from_worker = worker_reason(&message.properties.headers).is_some();
    (message.properties.expiration, message.properties.user_id) = (None, None);
    let headers = &mut message.properties.headers;
    headers.retain(|name, _| name != "CC" && !is_broker_header(name));
    let was_retried = headers.remove(ATTEMPT).is_some();
    if is_from_worker {
        restore_raw_strings(&mut message.properties);
        let headers = &mut message.properties.headers;
        headers.retain(|name, _| !is_worker_header(name));
    }
    let headers = &mut message.properties.headers;
    if is_from_worker || was_retried {
        if headers.contains_key(ORIGINAL_EXPIRATION) {
            headers.remove(EXPIRES);
        }
        headers.retain(|name, _| !ORIGINAL_HEADERS.contains(&name.as_str()));
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Incoming, Properties, Sentinels, classify};

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// The dead letter of a task, written 100 s after the epoch.
    fn dead(properties: Properties, reason: Reason) -> Message {
        let cause = Cause { reason, error: "it broke", worker: "host/embed/0", queue: "tasks", at: at(100) };
        dead_letter(&task(properties), &cause)
    }

    fn task(properties: Properties) -> Task {
        let message = Message { properties, body: r#"{"input":"a"}"#.into() };
        match classify(message, at(0), Sentinels::default(), || "made".into()) {
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
    fn strings_that_are_not_utf_8_are_readable_in_a_dead_letter_and_restored() {
        let id = escape(b"\x9b\xdcid");
        let named = |n: u16| (escape(&[0xff, (n >> 8) as u8, n as u8]), Value::I32(n.into()));
        let mut sent = with_headers((0..5_000).map(named).chain([("plain".into(), "a".into())]).collect());
        (sent.correlation_id, sent.reply_to) = (Some(id.clone()), Some(escape(&[0x80; 255])));
        sent.kind = Some(escape(b"\xffkind"));
        let letter = dead(sent, Reason::Undecodable);
        let properties = &letter.properties;
        assert_eq!(properties.correlation_id.as_deref(), Some("\\x9b\\xdcid"));
        let headers = &properties.headers;
        assert_eq!(headers["task_id"], "\\x9b\\xdcid".into());
        assert!(is_small(&headers[RAW_STRINGS]), "{:?}", headers[RAW_STRINGS]);
        // A name of three bytes has four in base64.
        assert_eq!(headers[HEADERS_DROPPED].as_i64(), Some(5_000 - MAX_RAW_NAME_BYTES as i64 / 4));
        let restored = super::restored(letter).properties;
        assert_eq!(restored.correlation_id, Some(id));
        assert_eq!(restored.reply_to, Some(escape(&[0x80; 255])));
        assert_eq!(restored.kind.as_deref(), Some("\\xffkind"));
        assert!(!restored.headers.contains_key(RAW_STRINGS) && restored.headers.contains_key("plain"));
        let mut forged = dead(Properties::default(), Reason::Poison);
        let claims = r#"{"expiration":"MTAw","user_id":"cm9vdA=="}"#;
        forged.properties.headers.insert(RAW_STRINGS.into(), claims.into());
        let restored = super::restored(forged).properties;
        assert_eq!((restored.expiration, restored.user_id), (None, None));
    }

    #[test]
    fn a_dead_letter_keeps_everything_but_properties_that_act() {
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
        let cause = Cause { reason: Reason::Undecodable, error: &error, worker: "w", queue: "q", at: at(0) };
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
    fn a_dead_letter_that_was_too_large_keeps_only_our_small_headers() {
        let large = || Value::from("x".repeat(100_000));
        let headers = [("mine", large()), ("last_log", large()), ("exit", Value::Array(vec![large()]))];
        let headers = headers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let kept = without_producer_headers(dead(with_headers(headers), Reason::Poison)).properties.headers;
        let names: Vec<&str> = kept.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            ["dead_lettered_at", "error", "headers_dropped", "queue", "reason", "task_id", "worker"]
        );
        assert_eq!(kept["headers_dropped"].as_i64(), Some(3));
    }

    #[test]
    fn a_restored_task_is_as_sent_but_for_properties_that_act() {
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
        let read = DeadLetter::new(&message);
        assert_eq!(
            (read.reason(), read.dead_lettered_at(), read.task_id()),
            ("poison", Some(at(100)), Some("c"))
        );
        assert_eq!((read.error(), read.pool()), (Some("it broke"), Some("embed")));
        assert_eq!(
            (read.age(at(130)), read.age(at(1))),
            (Some(Duration::from_secs(30)), Some(Duration::ZERO))
        );
        assert_eq!(read.refusal(false), None);
        let back = restored(message);
        assert_eq!((back.properties, &back.body[..]), (sent, &br#"{"input":"a"}"#[..]));
    }

    #[test]
    fn a_deadline_is_kept_unless_it_may_come_from_an_expiration() {
        let plain = with_headers(Headers::from([("expires".into(), "2026-01-31T12:00:00Z".into())]));
        assert_eq!(restored(dead(plain.clone(), Reason::Attempts)).properties, plain);
        let expiring = Properties { expiration: Some("5".into()), ..Properties::default() };
        let again = task(expiring).next_attempt(Some(at(5)), at(1));
        assert!(again.properties.headers.contains_key("expires"));
        assert_eq!(restored(dead(again.properties, Reason::Attempts)).properties, Properties::default());
    }

    #[test]
    fn a_control_message_is_requeued_only_by_its_id() {
        let kind = |kind: &str| Properties { kind: Some(kind.to_owned()), ..Properties::default() };
        for (message, reason) in [
            (dead(kind("control.reboot"), Reason::UnknownControl), "control.reboot"),
            (Message { properties: kind("control.shutdown"), body: "".into() }, "control.shutdown"),
            (Message { properties: Properties::default(), body: " null".into() }, "null"),
        ] {
            let read = DeadLetter::new(&message);
            assert!(read.refusal(false).is_some_and(|error| error.contains(reason)), "{reason}");
            assert_eq!(read.refusal(true), None);
        }
    }

    #[test]
    fn a_dead_letter_of_the_broker_has_its_reason_time_and_queue() {
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
        let read = DeadLetter::new(&message);
        assert_eq!((read.reason(), read.dead_lettered_at()), ("delivery_limit", Some(at(50))));
        assert_eq!((read.source_queue(), read.task_id()), (Some("tasks"), Some("m")));
        assert_eq!((read.worker(), read.error()), (None, None));
        let back = restored(message).properties;
        assert_eq!(back.headers, Headers::from([("reason".into(), "the producer's own".into())]));
        assert_eq!(back.user_id, None, "the broker would refuse it from another user");
    }

    #[test]
    fn our_reason_and_time_precede_those_of_a_retry_queue() {
        let headers = Headers::from([("x-death".into(), death("expired", "tasks.retry.1000ms", 50))]);
        let message = dead(with_headers(headers), Reason::Attempts);
        let read = DeadLetter::new(&message);
        assert_eq!((read.reason(), read.dead_lettered_at()), ("attempts", Some(at(100))));
        assert_eq!(read.source_queue(), None);
        assert_eq!(restored(message).properties, Properties::default());
    }

    #[test]
    fn a_missing_reason_is_unknown_and_a_missing_time_is_the_timestamp() {
        let bare = Message::default();
        let read = DeadLetter::new(&bare);
        assert_eq!((read.reason(), read.dead_lettered_at(), read.task_id()), ("unknown", None, None));
        let mut old = dead(Properties { timestamp: Some(9), ..Properties::default() }, Reason::Poison);
        old.properties.headers.remove(DEAD_LETTERED_AT);
        assert_eq!(DeadLetter::new(&old).dead_lettered_at(), Some(at(9)));
        assert!(["unknown", "delivery_limit"].iter().all(|reason| reasons().any(|it| it == *reason)));
    }
}
