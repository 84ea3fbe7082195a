//! Converts lapin's properties and field values to ours and back. Every AMQP field type survives the round
//! trip, except that a short string becomes a long string.

use lapin::BasicProperties;
use lapin::types::{AMQPValue, ByteArray, DecimalValue, FieldArray, FieldTable, LongString, ShortString};

use crate::protocol::{Headers, Properties, Value};

pub(super) fn properties_from(lapin: &BasicProperties) -> Properties {
    let text = |value: &Option<ShortString>| value.as_ref().map(|text| text.as_str().to_owned());
    Properties {
        content_type: text(lapin.content_type()),
        content_encoding: text(lapin.content_encoding()),
        headers: lapin.headers().as_ref().map(headers_from).unwrap_or_default(),
        delivery_mode: *lapin.delivery_mode(),
        priority: *lapin.priority(),
        correlation_id: text(lapin.correlation_id()),
        reply_to: text(lapin.reply_to()),
        expiration: text(lapin.expiration()),
        message_id: text(lapin.message_id()),
        timestamp: *lapin.timestamp(),
        kind: text(lapin.kind()),
        user_id: text(lapin.user_id()),
        app_id: text(lapin.app_id()),
        cluster_id: text(lapin.cluster_id()),
    }
}

/// Converts the properties of a message to publish. Texts over AMQP's 255 bytes are cut; only producers on the embedded
/// queue can send such texts.
pub(super) fn properties_to(ours: &Properties) -> BasicProperties {
    let mut lapin = BasicProperties::default();
    let mut text = |value: &Option<String>, set: fn(BasicProperties, ShortString) -> BasicProperties| {
        if let Some(value) = value {
            lapin = set(std::mem::take(&mut lapin), short(value));
        }
    };
    text(&ours.content_type, BasicProperties::with_content_type);
    text(&ours.content_encoding, BasicProperties::with_content_encoding);
    text(&ours.correlation_id, BasicProperties::with_correlation_id);
    text(&ours.reply_to, BasicProperties::with_reply_to);
    text(&ours.expiration, BasicProperties::with_expiration);
    text(&ours.message_id, BasicProperties::with_message_id);
    text(&ours.kind, BasicProperties::with_type);
    text(&ours.user_id, BasicProperties::with_user_id);
    text(&ours.app_id, BasicProperties::with_app_id);
    text(&ours.cluster_id, BasicProperties::with_cluster_id);
    if let Some(mode) = ours.delivery_mode {
        lapin = lapin.with_delivery_mode(mode);
    }
    if let Some(priority) = ours.priority {
        lapin = lapin.with_priority(priority);
    }
    if let Some(timestamp) = ours.timestamp {
        lapin = lapin.with_timestamp(timestamp);
    }
    if ours.headers.is_empty() { lapin } else { lapin.with_headers(table_to(&ours.headers)) }
}

/// Converts to an AMQP short string, cut to 255 bytes at a character boundary.
pub(super) fn short(text: &str) -> ShortString {
    let end = (0..=text.len().min(255)).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    ShortString::try_new(&text[..end]).unwrap_or_default()
}

fn headers_from(table: &FieldTable) -> Headers {
    table.inner().iter().map(|(name, value)| (name.as_str().to_owned(), value_from(value))).collect()
}

fn table_to(headers: &Headers) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in headers {
        table.insert(short(name), value_to(value));
    }
    table
}

fn value_from(value: &AMQPValue) -> Value {
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
        AMQPValue::FieldArray(it) => Value::Array(it.as_slice().iter().map(value_from).collect()),
        AMQPValue::FieldTable(it) => Value::Table(headers_from(it)),
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
    fn a_text_longer_than_amqp_allows_is_cut_at_a_character_boundary() {
        assert_eq!(short(&"é".repeat(200)).as_str(), "é".repeat(127));
        assert_eq!(short("queue").as_str(), "queue");
    }
}
