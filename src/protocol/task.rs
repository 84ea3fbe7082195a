//! Decides what a delivered message is (a task, a sentinel, an unknown control message) and reads a task's
//! properties: its id, where its reply goes, its deadline. Never searches a body for control words, because the body
//! is the model's input. The only exception is a body that is JSON `null` as a whole.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use jiff::{Timestamp, civil::DateTime, tz::TimeZone};
use serde::{Deserialize, Serialize};

use super::message::{is_broker_header, without_broker_directives};
use super::raw_text::{is_raw, visible};
use super::{Headers, Message, Properties, TaskError, TaskErrorKind, Value, shorten};

/// Value of the `type` property that makes a message a sentinel.
pub const SHUTDOWN: &str = "control.shutdown";
/// Prefix of `type` that is reserved for control messages.
const CONTROL_PREFIX: &str = "control.";
/// Header of a sentinel that `sconce stop` published: the id of that run of the command.
pub const STOP: &str = "sconce_stop";
/// Header with an absolute deadline, in ISO-8601.
pub const EXPIRES: &str = "expires";
/// Header of a retried task: the number of its next attempt.
pub const ATTEMPT: &str = "sconce_attempt";
/// Header with an ISO-8601 time: when the task was first put off because its reply queue accepted no messages.
pub const PUT_OFF_SINCE: &str = "sconce_put_off_since";

/// Header with an ISO-8601 time: when the task was first put off or tried again, so that no worker held it for a while.
pub const RETURNING_SINCE: &str = "sconce_returning_since";

/// Number of bytes at the beginning of a body that its fingerprint includes.
const FINGERPRINT_BYTES: usize = 64 << 10;

named_enum! {
    /// Which messages are sentinels: the setting `pool.sentinels`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Sentinels as name {
        /// Those of the type [`SHUTDOWN`], and those whose body is JSON `null`.
        #[default]
        NullAndType => "null_and_type",
        /// Only those of the type [`SHUTDOWN`]. A body `null` is that of a task.
        Type => "type",
        /// None. Those of the type [`SHUTDOWN`] are unknown control messages.
        None => "none",
    }
}

/// What a delivered message is.
#[derive(Debug)]
pub enum Incoming {
    /// A task to compute.
    Task(Task),
    /// A sentinel, which stops one worker unless its deadline has passed.
    Sentinel(Message),
    /// A message of a `control.*` type that this version does not know, and that type.
    UnknownControl(Task, String),
}

/// Classifies a message by its `type` property and, for a sentinel's second form, by a body that is
/// JSON `null`. `make_id` returns the id of a task that has neither `message_id` nor `correlation_id`.
pub fn classify(
    message: Message,
    received: SystemTime,
    sentinels: Sentinels,
    make_id: impl FnOnce() -> String,
) -> Incoming {
    let kind = message.properties.kind.as_deref().unwrap_or_default();
    if kind == SHUTDOWN && sentinels != Sentinels::None {
        return Incoming::Sentinel(message);
    }
    if kind.starts_with(CONTROL_PREFIX) {
        let kind = kind.to_owned();
        return Incoming::UnknownControl(Task::new(message, received, make_id), kind);
    }
    if sentinels == Sentinels::NullAndType && is_null(&message) {
        return Incoming::Sentinel(message);
    }
    Incoming::Task(Task::new(message, received, make_id))
}

/// Returns whether a worker with [`Sentinels::NullAndType`] treats the message as something other than a task.
pub fn is_control(message: &Message) -> bool {
    let kind = message.properties.kind.as_deref().unwrap_or_default();
    kind.starts_with(CONTROL_PREFIX) || is_null(message)
}

/// Whether a body is JSON `null`, and not a file or text that happens to consist of these letters. White space in JSON does
/// not include the form feed, unlike in ASCII.
fn is_null(message: &Message) -> bool {
    let body = &message.body;
    if message.media_type().is_some_and(|it| !message.is_json() && !it.starts_with("text/")) {
        return false;
    }
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
    let start = body.iter().position(|byte| !blank(byte)).unwrap_or(body.len());
    body[start..].strip_prefix(b"null").is_some_and(|rest| rest.iter().all(blank))
}

/// A decoded request: the message and the meaning of its properties.
#[derive(Clone, Debug)]
pub struct Task {
    /// The id in logs, dead letters and traces.
    pub id: String,
    /// The message as it was delivered.
    pub message: Message,
    /// When this worker received it.
    pub received: SystemTime,
}

/// Who requested a task. A user and a queue of the same name are different requesters, so that nobody can use another
/// user's share by naming that user in `reply_to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Requester<'a> {
    /// The user of the connection that published it: RabbitMQ refuses a message with another `user_id`.
    User(&'a str),
    /// The reader of this reply queue.
    Queue(&'a str),
    /// The message names neither; all such tasks count as those of one requester.
    Unknown,
}

impl Task {
    fn new(message: Message, received: SystemTime, make_id: impl FnOnce() -> String) -> Self {
        let given = |id: &Option<String>| id.as_deref().filter(|id| !id.is_empty()).map(visible);
        let id = given(&message.properties.message_id)
            .or_else(|| given(&message.properties.correlation_id))
            .unwrap_or_else(make_id);
        Self { id, message, received }
    }

    /// Refuses a task whose `type` or whose headers' names are not UTF-8: nobody can have meant them.
    ///
    /// # Errors
    /// `Undecodable` with the name.
    pub fn check_names(&self) -> Result<(), TaskError> {
        let properties = &self.message.properties;
        let kind = properties.kind.as_deref().filter(|kind| is_raw(kind));
        let (param, text) = match (kind, escaped_name(&properties.headers)) {
            (Some(kind), _) => ("type", kind),
            (None, Some(name)) => ("headers", name),
            (None, None) => return Ok(()),
        };
        let what = if param == "type" { "the type" } else { "the header name" };
        let message = format!("{what} \"{}\" is not UTF-8", shorten(&visible(text), 200));
        Err(TaskError::new(TaskErrorKind::Undecodable, message).with_param(param))
    }

    /// A fingerprint of the task's content: the same for each of its deliveries, on every worker, even without
    /// an id from the producer. Of a body over 64 KiB it includes only the first 64 KiB and the length.
    pub fn fingerprint(&self) -> String {
        let Message { properties, body } = &self.message;
        let mut hasher = DefaultHasher::new();
        (&properties.message_id, &properties.correlation_id, &properties.reply_to).hash(&mut hasher);
        (body.len(), &body[..body.len().min(FINGERPRINT_BYTES)]).hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }

    /// The number of the attempt that a worker makes when it takes this message, counting from 1. Deliveries
    /// are not counted: each broker counts them differently, and a drain adds some.
    pub fn attempt(&self) -> u32 {
        let written = self.message.properties.headers.get(ATTEMPT).and_then(Value::as_i64);
        written.and_then(|attempt| u32::try_from(attempt).ok()).unwrap_or(1).max(1)
    }

    /// The message for the next attempt, which is published `now`. It has `deadline` instead of the `expiration`,
    /// because an expiration would start again.
    pub fn next_attempt(&self, deadline: Option<SystemTime>, now: SystemTime) -> Message {
        let mut message = self.to_republish(deadline, now);
        let next = i64::from(self.attempt().saturating_add(1));
        message.properties.headers.insert(ATTEMPT.into(), next.into());
        message
    }

    /// The message of a task that is put off; this attempt does not count. `since` is when the task was first put off
    /// because of its reply queue; none if it is put off for another reason. `deadline` and `now` are as in
    /// [`Task::next_attempt`].
    pub fn put_off(
        &self,
        since: Option<SystemTime>,
        deadline: Option<SystemTime>,
        now: SystemTime,
    ) -> Message {
        let mut message = self.to_republish(deadline, now);
        let headers = &mut message.properties.headers;
        // The broker adds these headers again. With them the headers would not be plain (`Properties::is_plain`).
        headers.retain(|name, _| !is_broker_header(name));
        if let Some(since) = since.and_then(|since| Timestamp::try_from(since).ok()) {
            headers.insert(PUT_OFF_SINCE.into(), format!("{since:.3}").into());
        }
        message
    }

    /// Returns when the task was first put off because of its reply queue; `now` if it was not, or if the header is
    /// malformed or in the future. A producer that writes this header can only shorten the time of its own task.
    pub fn put_off_since(&self, now: SystemTime) -> SystemTime {
        self.time_in(PUT_OFF_SINCE).map_or(now, |since| since.min(now))
    }

    /// When the task was first put off or tried again; none if it was not.
    pub fn returning_since(&self) -> Option<SystemTime> {
        self.time_in(RETURNING_SINCE)
    }

    /// The ISO-8601 time in a header.
    fn time_in(&self, header: &str) -> Option<SystemTime> {
        let written = self.message.properties.headers.get(header).and_then(Value::as_str);
        written.and_then(|text| text.parse::<Timestamp>().ok()).map(SystemTime::from)
    }

    /// Returns the message to publish again `now`, with `deadline` in the header `expires`.
    fn to_republish(&self, deadline: Option<SystemTime>, now: SystemTime) -> Message {
        let mut message = without_broker_directives(self.message.clone());
        let headers = &mut message.properties.headers;
        if let Ok(now) = Timestamp::try_from(now) {
            headers.entry(RETURNING_SINCE.into()).or_insert_with(|| format!("{now:.3}").into());
        }
        if let Some(deadline) = deadline.and_then(|at| Timestamp::try_from(at).ok()) {
            headers.insert(EXPIRES.into(), deadline.to_string().into());
        }
        message
    }

    /// The same task with another body.
    pub fn with_body(&self, body: Bytes) -> Self {
        let message = Message { body, ..self.message.clone() };
        Self { message, ..self.clone() }
    }

    /// The queue for the reply, if the producer named one.
    pub fn reply_to(&self) -> Option<&str> {
        self.message.properties.reply_to.as_deref().filter(|queue| !queue.is_empty())
    }

    /// The `correlation_id` and the `reply_to`, if the task has both. Without one of them it may belong to any requester.
    pub fn requester_ids(&self) -> Option<(&str, &str)> {
        self.message.properties.correlation_id.as_deref().zip(self.reply_to())
    }

    /// Who requested the task. A retried task has lost its `user_id`, because RabbitMQ would refuse it from a worker's
    /// connection. The header `original_user_id` keeps it for people to read, but anybody can write that header, so the
    /// requester of a retried task is its `reply_to`.
    pub fn requester(&self) -> Requester<'_> {
        let user = self.message.properties.user_id.as_deref().filter(|user| !user.is_empty());
        match (user, self.reply_to()) {
            (Some(user), _) => Requester::User(user),
            (None, Some(queue)) => Requester::Queue(queue),
            (None, None) => Requester::Unknown,
        }
    }

    /// Returns the task's deadline: the earlier of `expires` and `expiration`. The `expiration` counts from the task's
    /// reception, because the broker applies it to the time in the queue.
    ///
    /// # Errors
    /// `expires` is not an ISO-8601 time, or `expiration` is not a number. The task is answered with the error.
    pub fn deadline(&self) -> Result<Option<SystemTime>, TaskError> {
        deadline(&self.message, self.received)
    }

    /// How long the task has waited at `now`: since its publication if the message has a time (the header
    /// `timestamp_in_ms`, or the property `timestamp` in whole seconds), else since its reception.
    pub fn time_in_queue(&self, now: SystemTime) -> Duration {
        now.duration_since(published(&self.message).unwrap_or(self.received)).unwrap_or_default()
    }
}

/// A name, in headers or in tables within them, that is not UTF-8.
fn escaped_name(headers: &Headers) -> Option<&str> {
    headers.iter().find_map(
        |(name, value)| {
            if is_raw(name) { Some(name.as_str()) } else { escaped_name_within(value) }
        },
    )
}

fn escaped_name_within(value: &Value) -> Option<&str> {
    match value {
        Value::Array(items) => items.iter().find_map(escaped_name_within),
        Value::Table(table) => escaped_name(table),
        _ => None,
    }
}

/// When a message was published, if it says so. A time before the year 2000 is none: clients that set no time send 0.
pub fn published(message: &Message) -> Option<SystemTime> {
    published_in(&message.properties)
}

/// As [`published`], of a message with these properties.
pub fn published_in(properties: &Properties) -> Option<SystemTime> {
    const YEAR_2000: Duration = Duration::from_secs(946_684_800);
    let since = match (properties.headers.get("timestamp_in_ms"), properties.timestamp) {
        (Some(ms), _) if ms.as_i64().is_some() => {
            ms.as_i64().map(|ms| Duration::from_millis(ms.max(0) as u64))
        }
        (_, Some(seconds)) => Some(Duration::from_secs(seconds)),
        _ => None,
    };
    SystemTime::UNIX_EPOCH.checked_add(since.filter(|since| *since >= YEAR_2000)?)
}

/// Whether the deadline of a sentinel has passed. A sentinel with an unreadable deadline stays valid.
pub fn sentinel_is_expired(message: &Message, now: SystemTime) -> bool {
    matches!(deadline(message, now), Ok(Some(deadline)) if deadline <= now)
}

fn deadline(message: &Message, received: SystemTime) -> Result<Option<SystemTime>, TaskError> {
    let header = match message.properties.headers.get(EXPIRES) {
        None | Some(Value::Void) => None,
        Some(value) => Some(absolute_time(value)?),
    };
    let time_to_live = match message.properties.expiration.as_deref() {
        None | Some("") => None,
        Some(text) => Some(
            text.trim()
                .parse()
                .map(Duration::from_millis)
                .map_err(|_| bad_header("expiration", text, "must be a whole number of milliseconds"))?,
        ),
    };
    let expires_at = time_to_live.and_then(|ttl| received.checked_add(ttl));
    Ok(match (header, expires_at) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    })
}

/// Reads an absolute time: ISO-8601 with an offset or `Z` (UTC without either), or AMQP's timestamp type.
fn absolute_time(value: &Value) -> Result<SystemTime, TaskError> {
    let wanted = "must be an ISO-8601 time such as 2026-01-31T12:00:00Z";
    if let Value::Timestamp(seconds) = value {
        return SystemTime::UNIX_EPOCH
            .checked_add(Duration::from_secs(*seconds))
            .ok_or_else(|| bad_header(EXPIRES, &seconds.to_string(), wanted));
    }
    let text = value.as_str().ok_or_else(|| {
        let number = value.as_i64().map(|number| number.to_string());
        bad_header(EXPIRES, &number.unwrap_or_else(|| "a value of another type".to_owned()), wanted)
    })?;
    let trimmed = text.trim();
    // Some producers write the last day that ISO-8601 can write for "never", and jiff reads no later hour of it.
    if trimmed.starts_with("9999-12-31") {
        return Ok(Timestamp::MAX.into());
    }
    trimmed
        .parse::<Timestamp>()
        .or_else(|error| match trimmed.parse::<DateTime>() {
            Ok(naive) => naive.to_zoned(TimeZone::UTC).map(|zoned| zoned.timestamp()),
            Err(_) => Err(error),
        })
        .map(SystemTime::from)
        .map_err(|_| bad_header(EXPIRES, text, wanted))
}

fn bad_header(name: &str, value: &str, wanted: &str) -> TaskError {
    let message = format!("{name} {wanted}, got {:?}", shorten(value, 80));
    TaskError::new(TaskErrorKind::BadInput, message).with_param(name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::protocol::Properties;

    fn message(kind: Option<&str>, body: &'static str) -> Message {
        let properties = Properties { kind: kind.map(Into::into), ..Properties::default() };
        Message { properties, body: body.into() }
    }

    fn classified(kind: Option<&str>, body: &'static str) -> Incoming {
        classify(message(kind, body), SystemTime::now(), Sentinels::default(), || "made".into())
    }

    #[test]
    fn only_the_type_or_a_null_body_makes_a_sentinel() {
        assert!(matches!(classified(Some("control.shutdown"), "{}"), Incoming::Sentinel(_)));
        assert!(matches!(classified(Some("control.shutdown"), ""), Incoming::Sentinel(_)));
        assert!(matches!(classified(None, "null"), Incoming::Sentinel(_)));
        assert!(matches!(classified(Some("task"), " null\n"), Incoming::Sentinel(_)));
        for (content_type, is_sentinel) in [
            ("application/json; charset=utf-8", true),
            ("text/plain", true),
            ("application/octet-stream", false),
            ("image/png", false),
        ] {
            let properties = Properties { content_type: Some(content_type.into()), ..Properties::default() };
            let message = Message { properties, body: "null".into() };
            let incoming = classify(message, SystemTime::now(), Sentinels::default(), || "made".into());
            assert_eq!(matches!(incoming, Incoming::Sentinel(_)), is_sentinel, "{content_type}");
        }
        for body in [
            r#"{"input":"STOP"}"#,
            "STOP",
            "control.shutdown",
            "nullx",
            "\"null\"",
            "[null]",
            "\u{c}null",
            "",
        ] {
            assert!(matches!(classified(None, body), Incoming::Task(_)), "{body}");
        }
    }

    #[test]
    fn the_settings_say_which_messages_are_sentinels() {
        let classified = |kind, body, sentinels| {
            let incoming = classify(message(kind, body), SystemTime::now(), sentinels, || "made".into());
            match incoming {
                Incoming::Sentinel(_) => "sentinel",
                Incoming::Task(_) => "task",
                Incoming::UnknownControl(..) => "unknown",
            }
        };
        let all = Sentinels::ALL
            .map(|(it, _)| (classified(Some(SHUTDOWN), "{}", it), classified(None, "null", it)));
        assert_eq!(all, [("sentinel", "sentinel"), ("sentinel", "task"), ("unknown", "task")]);
    }

    #[test]
    fn an_unknown_control_type_is_no_task_whatever_its_body() {
        for body in ["null", r#"{"input":"a"}"#] {
            let Incoming::UnknownControl(_, kind) = classified(Some("control.reboot"), body) else {
                panic!("{body} was taken for something else");
            };
            assert_eq!(kind, "control.reboot");
        }
    }

    fn expiring(header: Option<Value>, expiration: Option<&str>) -> Result<Option<SystemTime>, TaskError> {
        let mut message = message(None, "{}");
        if let Some(value) = header {
            message.properties.headers.insert(EXPIRES.into(), value);
        }
        message.properties.expiration = expiration.map(Into::into);
        deadline(&message, SystemTime::UNIX_EPOCH)
    }

    #[test]
    fn a_time_of_publishing_before_2000_is_none() {
        let published_at = |seconds: Option<u64>, ms: Option<i64>| {
            let mut message = message(None, "{}");
            message.properties.timestamp = seconds;
            if let Some(ms) = ms {
                message.properties.headers.insert("timestamp_in_ms".into(), ms.into());
            }
            published(&message)
        };
        let at = |seconds| Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!([published_at(Some(0), None), published_at(None, Some(0))], [None, None]);
        assert_eq!(published_at(Some(946_684_799), None), None);
        assert_eq!(published_at(Some(946_684_800), None), at(946_684_800));
        assert_eq!(published_at(Some(0), Some(1_700_000_000_000)), at(1_700_000_000));
    }

    #[test]
    fn the_earlier_of_both_deadlines_counts() {
        let at = |seconds| Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(expiring(None, None), Ok(None));
        assert_eq!(expiring(Some(Value::Void), None), Ok(None), "Celery sends a void `expires`");
        assert_eq!(expiring(None, Some("5000")), Ok(at(5)));
        assert_eq!(expiring(Some("1970-01-01T00:00:03Z".into()), Some("5000")), Ok(at(3)));
        assert_eq!(expiring(Some("1970-01-01T01:00:03+01:00".into()), None), Ok(at(3)));
        assert_eq!(expiring(Some("1970-01-01T00:00:03.000".into()), None), Ok(at(3)));
        assert_eq!(expiring(Some(Value::Timestamp(3)), None), Ok(at(3)));
        let never = "9999-12-31T23:59:59.999Z";
        assert_eq!(expiring(Some(never.into()), Some("5000")), Ok(at(5)));
        assert!(expiring(Some(never.into()), None).unwrap() > at(1 << 36));
    }

    #[test]
    fn a_deadline_that_cannot_be_read_is_an_error_that_names_it() {
        let error = expiring(Some("tomorrow".into()), None).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("expires"));
        assert!(error.message.contains("\"tomorrow\""), "{error}");
        let number = expiring(Some(Value::I64(1_700_000_000)), None).unwrap_err();
        assert!(number.message.ends_with("got \"1700000000\""), "{number}");
        assert!(expiring(None, Some("soon")).unwrap_err().message.contains("\"soon\""));
    }

    #[test]
    fn the_id_is_the_message_id_else_the_correlation_id_else_made() {
        let id = |message_id: Option<&str>, correlation_id: Option<&str>| {
            let mut message = message(None, "{}");
            message.properties.message_id = message_id.map(Into::into);
            message.properties.correlation_id = correlation_id.map(Into::into);
            Task::new(message, SystemTime::now(), || "made".into()).id
        };
        assert_eq!(id(Some("m"), Some("c")), "m");
        assert_eq!(id(Some(""), Some("c")), "c");
        assert_eq!(id(None, None), "made");
    }

    #[test]
    fn a_put_off_task_keeps_its_attempt_priority_and_first_time() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let mut message = message(None, "{}");
        message.properties.priority = Some(7);
        message.properties.expiration = Some("5000".into());
        message.properties.headers.insert(ATTEMPT.into(), 2.into());
        message.properties.headers.insert("x-death".into(), Value::Array(Vec::new()));
        let task = Task::new(message, at(100), || "made".into());
        assert_eq!(task.put_off_since(at(100)), at(100), "it was not put off yet");
        assert_eq!(task.returning_since(), None);
        let again = task.put_off(Some(at(100)), task.deadline().unwrap(), at(101));
        assert_eq!((again.properties.priority, again.properties.expiration.as_deref()), (Some(7), None));
        assert_eq!(again.properties.headers.get("x-death"), None);
        let task = Task::new(again, at(110), || "made".into());
        assert_eq!((task.attempt(), task.put_off_since(at(110))), (2, at(100)));
        assert_eq!(task.deadline(), Ok(Some(at(105))));
        let task = Task::new(task.next_attempt(None, at(111)), at(112), || "made".into());
        assert_eq!((task.attempt(), task.returning_since()), (3, Some(at(101))), "the first time");
    }

    #[test]
    fn a_put_off_time_in_the_future_or_malformed_counts_as_now() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        for written in
            [Value::from("2999-01-01T00:00:00Z"), Value::from("yesterday"), Value::I64(0), Value::Void]
        {
            let mut message = message(None, "{}");
            message.properties.headers.insert(PUT_OFF_SINCE.into(), written);
            assert_eq!(Task::new(message, now, || "made".into()).put_off_since(now), now);
        }
    }

    #[test]
    fn the_requester_is_the_verified_user_else_the_reply_queue() {
        let task = |user: Option<&str>, queue: Option<&str>| {
            let mut message = message(None, "{}");
            message.properties.user_id = user.map(Into::into);
            message.properties.reply_to = queue.map(Into::into);
            message.properties.headers.insert("original_user_id".into(), "somebody".into());
            Task::new(message, SystemTime::now(), || "made".into())
        };
        assert_eq!(task(Some("u"), Some("q")).requester(), Requester::User("u"));
        assert_eq!(task(None, Some("q")).requester(), Requester::Queue("q"));
        assert_eq!(task(Some(""), Some("")).requester(), Requester::Unknown);
        let sent = task(Some("u"), Some("q"));
        let again =
            Task::new(sent.next_attempt(None, SystemTime::now()), SystemTime::now(), || "made".into());
        assert_eq!(again.requester(), Requester::Queue("q"), "a header may be written by anybody");
    }

    proptest! {
        #[test]
        fn a_body_is_a_sentinel_exactly_when_it_is_json_null(
            body in "[ \t\r\n\u{c}\u{a0}]{0,2}(null|nul|Null|\"null\"|\\[null\\])[ \t\r\n\u{b}]{0,2}|\\PC*",
        ) {
            let is_null = matches!(serde_json::from_str(&body), Ok(serde_json::Value::Null));
            let message = Message { body: body.into(), ..Message::default() };
            let incoming = classify(message, SystemTime::now(), Sentinels::default(), || "made".into());
            prop_assert_eq!(matches!(incoming, Incoming::Sentinel(_)), is_null);
        }
    }
}
