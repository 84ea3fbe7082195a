//! Converts lapin's properties and field values to ours and back. Every AMQP field type survives the round
//! trip, except that a short string becomes a long string.

use lapin::BasicProperties;
use lapin::types::{AMQPValue, ByteArray, DecimalValue, FieldArray, FieldTable, LongString, ShortString};

use crate::protocol::{Headers, Properties, Value};

pub(super) fn properties_from(properties: &BasicProperties) -> Properties {
    let text = |value: &Option<ShortString>| value.as_ref().map(|text| text.as_str().to_owned());
    Properties {
        content_type: text(properties.content_type()),
        content_encoding: text(properties.content_encoding()),
        headers: properties.headers().as_ref().map(headers_from).unwrap_or_default(),
        delivery_mode: *properties.delivery_mode(),
        priority: *properties.priority(),
        correlation_id: text(properties.correlation_id()),
        reply_to: text(properties.reply_to()),
        expiration: text(properties.expiration()),
        message_id: text(properties.message_id()),
        timestamp: *properties.timestamp(),
        kind: text(properties.kind()),
        user_id: text(properties.user_id()),
        app_id: text(properties.app_id()),
        cluster_id: text(properties.cluster_id()),
    }
}

/// Converts the properties of a message to publish. Texts over AMQP's 255 bytes are cut; only producers on the embedded
/// queue can send such texts.
pub(super) fn properties_to(properties: &Properties) -> BasicProperties {
    let mut converted = BasicProperties::default();
    let mut text = |value: &Option<String>, set: fn(BasicProperties, ShortString) -> BasicProperties| {
        if let Some(value) = value {
            converted = set(std::mem::take(&mut converted), short(value));
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
