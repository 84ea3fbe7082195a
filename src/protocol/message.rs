//! A message as every broker carries it: AMQP 0-9-1 basic properties, typed headers, a body. The types can hold
//! everything that a producer can send, so that a dead letter keeps it unchanged.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{JSON, TaskError};

/// Header with the OpenAI path of the request, for pools that answer several paths. `run-batch` takes it from the
/// field `url` of each line.
pub const URL: &str = "url";

/// Application headers, by name.
pub type Headers = BTreeMap<String, Value>;

/// One header value, with its exact AMQP field type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Value {
    /// No value (`V`). Clients send it for an absent optional header.
    Void,
    /// A boolean (`t`).
    Bool(bool),
    /// A signed octet (`b`).
    I8(i8),
    /// An unsigned octet (`B`).
    U8(u8),
    /// A signed 16-bit integer (`s`).
    I16(i16),
    /// An unsigned 16-bit integer (`u`).
    U16(u16),
    /// A signed 32-bit integer (`I`).
    I32(i32),
    /// An unsigned 32-bit integer (`i`).
    U32(u32),
    /// A signed 64-bit integer (`l`).
    I64(i64),
    /// A 32-bit float (`f`).
    F32(#[serde(with = "f32_bits")] f32),
    /// A 64-bit float (`d`).
    F64(#[serde(with = "f64_bits")] f64),
    /// A decimal (`D`): `value / 10^scale`.
    Decimal {
        /// Digits after the decimal point.
        scale: u8,
        /// The digits as one integer.
        value: u32,
    },
    /// A string, which may hold any bytes (`S`).
    Text(Vec<u8>),
    /// A byte array (`x`, RabbitMQ's extension).
    Bytes(Vec<u8>),
    /// Seconds since the epoch (`T`).
    Timestamp(u64),
    /// An array (`A`).
    Array(Vec<Value>),
    /// A nested table (`F`).
    Table(Headers),
}

/// Floats are serialised as their bits: JSON has no NaN and no infinity, and its decimals may lose a bit.
macro_rules! bits {
    ($module:ident, $float:ty) => {
        mod $module {
            pub fn serialize<S: serde::Serializer>(number: &$float, to: S) -> Result<S::Ok, S::Error> {
                serde::Serialize::serialize(&number.to_bits(), to)
            }

            pub fn deserialize<'de, D: serde::Deserializer<'de>>(from: D) -> Result<$float, D::Error> {
                serde::Deserialize::deserialize(from).map(<$float>::from_bits)
            }
        }
    };
}
bits!(f32_bits, f32);
bits!(f64_bits, f64);

impl Value {
    /// The text, if the value is a text in valid UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Text(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// Upper bound of its encoded size in bytes: 1 for the type, then 4 for the length of a string, an array or a table
    /// and its content, or up to 8 for any other value.
    fn encoded_bytes(&self) -> usize {
        match self {
            Value::Text(bytes) | Value::Bytes(bytes) => 5 + bytes.len(),
            Value::Array(values) => 5 + values.iter().map(Self::encoded_bytes).sum::<usize>(),
            Value::Table(headers) => 5 + header_bytes(headers),
            _ => 9,
        }
    }

    /// The number, if the value is an integer that fits.
    pub fn as_i64(&self) -> Option<i64> {
        match *self {
            Value::I8(n) => Some(n.into()),
            Value::U8(n) => Some(n.into()),
            Value::I16(n) => Some(n.into()),
            Value::U16(n) => Some(n.into()),
            Value::I32(n) => Some(n.into()),
            Value::U32(n) => Some(n.into()),
            Value::I64(n) => Some(n),
            _ => None,
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Value::Text(text.as_bytes().to_vec())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Value::Text(text.into_bytes())
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        // Some clients cannot read 64-bit integers, such as Perl's AnyEvent::RabbitMQ.
        i32::try_from(number).map_or(Value::I64(number), Value::I32)
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Value::F64(number)
    }
}

/// A text in a header; none if the header is absent.
///
/// # Errors
/// `BadInput` for another value.
pub fn text_header(headers: &Headers, name: &str) -> Result<Option<String>, TaskError> {
    match headers.get(name) {
        None | Some(Value::Void) => Ok(None),
        Some(value) => match value.as_str() {
            Some(text) => Ok(Some(text.to_owned())),
            None => Err(TaskError::bad_input(name, format!("{name} must be a text, got another value"))),
        },
    }
}

/// The basic properties of a message. A property is `None` if the producer did not set it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Properties {
    /// MIME type of the body.
    pub content_type: Option<String>,
    /// Encoding of the body, such as `gzip`.
    pub content_encoding: Option<String>,
    /// Application headers.
    pub headers: Headers,
    /// 1: transient; 2: persistent.
    pub delivery_mode: Option<u8>,
    /// The broker's priority, 0 to 255.
    pub priority: Option<u8>,
    /// An id that is echoed on the reply.
    pub correlation_id: Option<String>,
    /// Queue that the reply goes to.
    pub reply_to: Option<String>,
    /// Time to live in milliseconds, as AMQP writes it: decimal digits.
    pub expiration: Option<String>,
    /// The message's own id.
    pub message_id: Option<String>,
    /// Seconds since the epoch, by the producer's clock.
    pub timestamp: Option<u64>,
    /// AMQP's `type` property.
    pub kind: Option<String>,
    /// The authenticated user, checked by the broker.
    pub user_id: Option<String>,
    /// The producer's name for itself.
    pub app_id: Option<String>,
    /// AMQP's deprecated `cluster_id`.
    pub cluster_id: Option<String>,
}

/// AMQP's name of the property `kind`.
pub(super) const TYPE: &str = "type";

/// Maximum encoded size of a task's headers, in bytes. All properties of a message travel in one frame of at most 128
/// KiB, and the broker adds headers when a message is delivered again. If that makes the frame too large, the client
/// closes the connection, and all its unacked messages are delivered again.
pub const MAX_HEADER_BYTES: usize = 64 << 10;
/// Maximum size of the headers that [`Properties::is_plain`] accepts, in bytes. They then fit into one AMQP frame
/// together with the headers that we add.
const MAX_PLAIN_BYTES: usize = 32 << 10;

/// Upper bound of the encoded size of headers, in bytes.
fn header_bytes(headers: &Headers) -> usize {
    headers.iter().map(|(name, value)| 1 + name.len() + value.encoded_bytes()).sum()
}

impl Properties {
    /// The texts, by AMQP's names.
    pub(super) fn texts_mut(&mut self) -> [(&'static str, &mut Option<String>); 10] {
        [
            ("content_type", &mut self.content_type),
            ("content_encoding", &mut self.content_encoding),
            ("correlation_id", &mut self.correlation_id),
            ("reply_to", &mut self.reply_to),
            ("expiration", &mut self.expiration),
            ("message_id", &mut self.message_id),
            (TYPE, &mut self.kind),
            ("user_id", &mut self.user_id),
            ("app_id", &mut self.app_id),
            ("cluster_id", &mut self.cluster_id),
        ]
    }

    /// Upper bound of the encoded size of the headers, in bytes.
    pub fn header_bytes(&self) -> usize {
        header_bytes(&self.headers)
    }

    /// Whether every broker accepts the headers: no arrays, tables or decimals, all numbers finite, and well below a
    /// frame in size.
    pub fn is_plain(&self) -> bool {
        let is_plain = |value: &Value| match value {
            Value::F32(number) => number.is_finite(),
            Value::F64(number) => number.is_finite(),
            Value::Decimal { .. } | Value::Array(_) | Value::Table(_) => false,
            _ => true,
        };
        self.header_bytes() <= MAX_PLAIN_BYTES && self.headers.values().all(is_plain)
    }
}

/// Properties and body of a message.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// The basic properties.
    pub properties: Properties,
    /// The body, as sent.
    pub body: Bytes,
}

impl Message {
    /// The media type of the body, in lower case and without parameters; none if the message has no content type.
    pub fn media_type(&self) -> Option<String> {
        let written = self.properties.content_type.as_deref()?;
        let essence = written.split(';').next().unwrap_or_default().trim();
        (!essence.is_empty()).then(|| essence.to_ascii_lowercase())
    }

    /// Whether the body is JSON by its media type. A message without one counts as JSON.
    pub fn is_json(&self) -> bool {
        self.media_type().is_none_or(|it| it == JSON || it.ends_with("+json"))
    }

    /// The body as text, if its media type is `text/*` and it is UTF-8.
    pub fn text(&self) -> Option<&str> {
        if !self.media_type()?.starts_with("text/") {
            return None;
        }
        // Bytes of another character set may happen to be valid UTF-8, and would be decoded to a wrong text.
        let parameters = self.properties.content_type.as_deref()?.split(';').skip(1);
        let pairs = parameters.filter_map(|parameter| parameter.split_once('='));
        let mut charsets = pairs.filter(|(name, _)| name.trim().eq_ignore_ascii_case("charset"));
        let is_utf8 = charsets.all(|(_, charset)| {
            let charset = charset.trim().trim_matches('"');
            ["utf-8", "us-ascii"].iter().any(|it| it.eq_ignore_ascii_case(charset))
        });
        std::str::from_utf8(&self.body).ok().filter(|_| is_utf8)
    }

    /// Whether this is a task of Celery: it has the headers `task` and `id`, and its body is a list of arguments, in
    /// JSON or in another format. A recording may have a header `task` too.
    pub fn is_celery_task(&self) -> bool {
        let has_text = |name| self.properties.headers.get(name).is_some_and(|value| value.as_str().is_some());
        let has_headers = has_text("task") && has_text("id");
        let is_json = self.media_type().is_some_and(|it| it == JSON);
        has_headers && (!is_json || self.body.trim_ascii_start().starts_with(b"["))
    }

    /// The OpenAI path of the request, from the header `url`.
    pub fn url(&self) -> Option<&str> {
        self.properties.headers.get(URL).and_then(Value::as_str).filter(|url| !url.is_empty())
    }
}

/// The header in which [`without_broker_directives`] keeps `expiration`.
pub(super) const ORIGINAL_EXPIRATION: &str = "original_expiration";
pub(super) const ORIGINAL_HEADERS: [&str; 3] = [ORIGINAL_EXPIRATION, "original_user_id", "original_cc"];

/// Prepares another producer's message to be published by us. Three properties would make the broker act again, so
/// they become `original_*` headers: `expiration` would delete the message, `user_id` makes the broker
/// refuse it from another user, `CC` would copy it to more queues.
pub fn without_broker_directives(mut message: Message) -> Message {
    let properties = &mut message.properties;
    let directives = [
        (ORIGINAL_EXPIRATION, properties.expiration.take().map(Value::from)),
        ("original_user_id", properties.user_id.take().map(Value::from)),
        ("original_cc", properties.headers.remove("CC")),
    ];
    let kept = directives.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    properties.headers.extend(kept);
    message
}

/// Whether RabbitMQ writes this header into a message that it dead-letters or redelivers.
pub(super) fn is_broker_header(header: &str) -> bool {
    matches!(header, "x-death" | "x-delivery-count" | "x-acquired-count")
        || header.starts_with("x-first-death-")
        || header.starts_with("x-last-death-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_json_or_text_by_its_content_type_and_text_only_in_utf8() {
        let read = |content_type: &str, body: &'static [u8]| {
            let properties = Properties { content_type: Some(content_type.into()), ..Properties::default() };
            let message = Message { properties, body: body.into() };
            (message.is_json(), message.text().map(str::to_owned))
        };
        assert!(Message::default().is_json());
        for json in ["", "application/json", "Application/JSON; charset=utf-8", "application/problem+json"] {
            assert_eq!(read(json, b"\"a\""), (true, None), "{json}");
        }
        for text in ["text/plain", "TEXT/VTT;charset=\"UTF-8\"", "text/plain; x=1; Charset=us-ascii"] {
            assert_eq!(read(text, b"\xc3\xbc"), (false, Some("ü".into())), "{text}");
        }
        assert_eq!(read("text/plain; charset=iso-8859-1", b"\xc3\xbc"), (false, None));
        assert_eq!(read("text/plain", b"\xfc"), (false, None));
        assert_eq!(read("application/x-ndjson", b"{}"), (false, None));
    }

    #[test]
    fn headers_are_plain_if_they_are_scalar_small_and_finite() {
        let with = |value: Value| {
            let headers = Headers::from([("a".to_owned(), value)]);
            Properties { headers, ..Properties::default() }.is_plain()
        };
        assert!(Properties::default().is_plain());
        for value in [Value::Void, Value::I64(1), Value::F64(0.5), "text".into(), Value::Timestamp(1)] {
            assert!(with(value.clone()), "{value:?}");
        }
        let nested = Value::Array(vec![Value::Void]);
        for value in [nested, Value::F64(f64::INFINITY), Value::F32(f32::NAN), "x".repeat(40_000).into()] {
            assert!(!with(value.clone()), "{value:?}");
        }
    }
}
