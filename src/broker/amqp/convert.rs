//! Converts lapin's properties and field values to ours and back. Every AMQP field type survives the round
//! trip, except that a short string becomes a long string.

use std::collections::HashMap;
use std::time::Duration;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, ByteArray, DecimalValue, FieldArray, FieldTable, LongString, ShortString};
use sconce_broker_stream::{Property, RawStrings, Strings, replaced};

use crate::protocol::raw_text::{escape, is_escaped, is_raw, unescape, visible};
use crate::protocol::{Headers, Properties, Value};

/// `raw` holds the message's short strings that are not UTF-8. Here they are escaped (see `protocol::raw_text`).
pub(super) fn properties_from(properties: &BasicProperties, raw: Option<&RawStrings>) -> Properties {
    let text = |value: &Option<ShortString>, property| {
        let text = value.as_ref()?.as_str().as_bytes();
        Some(escape(raw.and_then(|raw| raw.property(property)).unwrap_or(text)))
    };
    let names = raw.map(RawStrings::header_names).unwrap_or_default();
    Properties {
        content_type: text(properties.content_type(), Property::ContentType),
        content_encoding: text(properties.content_encoding(), Property::ContentEncoding),
        headers: properties.headers().as_ref().map(|table| headers_from(table, &names)).unwrap_or_default(),
        delivery_mode: *properties.delivery_mode(),
        priority: *properties.priority(),
        correlation_id: text(properties.correlation_id(), Property::CorrelationId),
        reply_to: text(properties.reply_to(), Property::ReplyTo),
        expiration: text(properties.expiration(), Property::Expiration),
        message_id: text(properties.message_id(), Property::MessageId),
        timestamp: *properties.timestamp(),
        kind: text(properties.kind(), Property::Type),
        user_id: text(properties.user_id(), Property::UserId),
        app_id: text(properties.app_id(), Property::AppId),
        cluster_id: text(properties.cluster_id(), Property::ClusterId),
    }
}

/// Converts the properties of a message to publish. Texts over AMQP's 255 bytes are cut; only producers on the embedded
/// queue can send such texts. Escaped texts become their bytes on the connection of `strings`, except in the names of
/// headers, where each byte becomes `\xNN`.
pub(super) fn properties_to(properties: &Properties, strings: &Strings) -> BasicProperties {
    let mut converted = BasicProperties::default();
    let mut text = |value: &Option<String>, set: fn(BasicProperties, ShortString) -> BasicProperties| {
        if let Some(value) = value {
            converted = set(std::mem::take(&mut converted), short_or_raw(value, strings));
        }
    };
    text(&properties.content_type, BasicProperties::with_content_type);
    text(&properties.content_encoding, BasicProperties::with_content_encoding);
    text(&properties.correlation_id, BasicProperties::with_correlation_id);
    text(&properties.reply_to, BasicProperties::with_reply_to);
    text(&properties.expiration, BasicProperties::with_expiration);
    text(&properties.message_id, BasicProperties::with_message_id);
    text(&properties.kind, BasicProperties::with_type);
    text(&properties.user_id, BasicProperties::with_user_id);
    text(&properties.app_id, BasicProperties::with_app_id);
    text(&properties.cluster_id, BasicProperties::with_cluster_id);
    if let Some(mode) = properties.delivery_mode {
        converted = converted.with_delivery_mode(mode);
    }
    if let Some(priority) = properties.priority {
        converted = converted.with_priority(priority);
    }
    if let Some(timestamp) = properties.timestamp {
        converted = converted.with_timestamp(timestamp);
    }
    if properties.headers.is_empty() {
        converted
    } else {
        converted.with_headers(table_to(&properties.headers))
    }
}

/// As [`short`], for a text that may be escaped and is sent as a property or a routing key on the connection of
/// `strings`.
pub(super) fn short_or_raw(text: &str, strings: &Strings) -> ShortString {
    if !is_escaped(text) {
        return short(text);
    }
    let bytes = unescape(text);
    match str::from_utf8(&bytes) {
        Ok(text) => short(text),
        Err(_) => short(&strings.token(&bytes)),
    }
}

/// The text that lapin has of a message that was sent with this text and has come back.
pub(super) fn as_received(text: &str) -> ShortString {
    if is_escaped(text) { short(&replaced(&unescape(text))) } else { short(text) }
}

/// Converts to an AMQP short string, cut to 255 bytes at a character boundary.
pub(super) fn short(text: &str) -> ShortString {
    let end = (0..=text.len().min(255)).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    ShortString::try_new(&text[..end]).unwrap_or_default()
}

/// A duration as the broker's arguments state it.
pub(super) fn milliseconds(duration: Duration) -> AMQPValue {
    AMQPValue::LongLongInt(i64::try_from(duration.as_millis()).unwrap_or(i64::MAX))
}

/// The original names of headers, by the names that lapin has.
type Names<'a> = HashMap<String, &'a [u8]>;

fn headers_from(table: &FieldTable, names: &Names<'_>) -> Headers {
    let name =
        |name: &ShortString| escape(names.get(name.as_str()).copied().unwrap_or(name.as_str().as_bytes()));
    table.inner().iter().map(|(key, value)| (name(key), value_from(value, names))).collect()
}

fn table_to(headers: &Headers) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in headers {
        let name =
            if is_raw(name) { visible(name) } else { String::from_utf8_lossy(&unescape(name)).into_owned() };
        table.insert(short(&name), value_to(value));
    }
    table
}

fn value_from(value: &AMQPValue, names: &Names<'_>) -> Value {
    match value {
        AMQPValue::Void => Value::Void,
        AMQPValue::Boolean(it) => Value::Bool(*it),
        AMQPValue::ShortShortInt(it) => Value::I8(*it),
        AMQPValue::ShortShortUInt(it) => Value::U8(*it),
        AMQPValue::ShortInt(it) => Value::I16(*it),
        AMQPValue::ShortUInt(it) => Value::U16(*it),
        AMQPValue::LongInt(it) => Value::I32(*it),
        AMQPValue::LongUInt(it) => Value::U32(*it),
        AMQPValue::LongLongInt(it) => Value::I64(*it),
        AMQPValue::Float(it) => Value::F32(*it),
        AMQPValue::Double(it) => Value::F64(*it),
        AMQPValue::DecimalValue(it) => Value::Decimal { scale: it.scale, value: it.value },
        AMQPValue::ShortString(it) => Value::Text(it.as_str().as_bytes().to_vec()),
        AMQPValue::LongString(it) => Value::Text(it.as_bytes().to_vec()),
        AMQPValue::ByteArray(it) => Value::Bytes(it.as_slice().to_vec()),
        AMQPValue::Timestamp(it) => Value::Timestamp(*it),
        AMQPValue::FieldArray(it) => {
            Value::Array(it.as_slice().iter().map(|item| value_from(item, names)).collect())
        }
        AMQPValue::FieldTable(it) => Value::Table(headers_from(it, names)),
    }
}

fn value_to(value: &Value) -> AMQPValue {
    match value {
        Value::Void => AMQPValue::Void,
        Value::Bool(it) => AMQPValue::Boolean(*it),
        Value::I8(it) => AMQPValue::ShortShortInt(*it),
        Value::U8(it) => AMQPValue::ShortShortUInt(*it),
        Value::I16(it) => AMQPValue::ShortInt(*it),
        Value::U16(it) => AMQPValue::ShortUInt(*it),
        Value::I32(it) => AMQPValue::LongInt(*it),
        Value::U32(it) => AMQPValue::LongUInt(*it),
        Value::I64(it) => AMQPValue::LongLongInt(*it),
        Value::F32(it) => AMQPValue::Float(*it),
        Value::F64(it) => AMQPValue::Double(*it),
        Value::Decimal { scale, value } => {
            AMQPValue::DecimalValue(DecimalValue { scale: *scale, value: *value })
        }
        Value::Text(it) => AMQPValue::LongString(LongString::from(it.as_slice())),
        Value::Bytes(it) => AMQPValue::ByteArray(ByteArray::from(it.as_slice())),
        Value::Timestamp(it) => AMQPValue::Timestamp(*it),
        Value::Array(it) => {
            AMQPValue::FieldArray(FieldArray::from(it.iter().map(value_to).collect::<Vec<_>>()))
        }
        Value::Table(it) => AMQPValue::FieldTable(table_to(it)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_only_looks_escaped_is_sent_as_it_came() {
        let mut table = FieldTable::default();
        for name in ["\u{f7ff}", "é", "plain"] {
            table.insert(name.into(), AMQPValue::Boolean(true));
        }
        assert_eq!(table_to(&headers_from(&table, &Names::new())), table);
    }

    #[test]
    fn numbers_in_headers_are_integers_of_32_bits_where_they_fit() {
        let sent = |number: i64| value_to(&number.into());
        assert_eq!(sent(200), AMQPValue::LongInt(200));
        assert_eq!(sent(i64::MAX), AMQPValue::LongLongInt(i64::MAX));
    }

    #[test]
    fn a_text_longer_than_amqp_allows_is_cut_at_a_character_boundary() {
        assert_eq!(short(&"é".repeat(200)).as_str(), "é".repeat(127));
        assert_eq!(short("queue").as_str(), "queue");
    }
}
