//! Formats dead letters: a row of a table, or all contents as text or as JSON. Removes control characters from text, so
//! that a dead letter cannot control the terminal. Does no I/O.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value as Json, json};

use crate::broker::Delivery;
use crate::client::dead::{DeadLetterSummary, iso};
use crate::commands::ctl::span;
use crate::protocol::raw_text::visible;
use crate::protocol::{Headers, Properties, Value, printable, shorten};

/// Maximum bytes of a text in the last column of a table.
const MAX_LAST_COLUMN_BYTES: usize = 100;

/// The cells of a table row: id, reason, age, worker, size, and the destination or the error.
pub(super) fn cells(row: &DeadLetterSummary) -> [String; 6] {
    let dash = || "-".to_owned();
    [
        row.task_id.clone().unwrap_or_else(dash),
        row.reason.clone(),
        row.age_s.map_or_else(dash, |seconds| span(seconds * 1_000)),
        row.worker.clone().unwrap_or_else(dash),
        row.size.to_string(),
        shorten(
            row.destination.as_ref().or(row.error.as_ref()).map_or("", String::as_str),
            MAX_LAST_COLUMN_BYTES,
        ),
    ]
    .map(|cell| printable(&cell))
}

/// `1 dead letter`, `2 dead letters`.
pub(super) fn dead_letters(count: usize) -> String {
    format!("{count} dead {}", if count == 1 { "letter" } else { "letters" })
}

/// All contents of a dead letter as text, for a person.
pub(super) fn full_text(delivery: &Delivery, now: SystemTime) -> String {
    let (message, row) = (&delivery.message, DeadLetterSummary::of(delivery, now));
    let [id, reason, age, worker, size, _] = cells(&row);
    let error = printable(row.error.as_deref().unwrap_or_default());
    let since =
        row.dead_lettered_at.map_or_else(|| "an unknown time".into(), |at| format!("{at}, {age} ago"));
    let mut text = format!("task    {id}\nreason  {reason}\nerror   {error}\nworker  {worker}\n");
    let delivered = match delivery.delivery_count {
        // The queue does not count deliveries.
        None => String::new(),
        Some(1) => "; delivered once before".to_owned(),
        Some(count) => format!("; delivered {count} times before"),
    };
    let _ = writeln!(text, "since   {since}{delivered}");
    text.push_str("\nproperties\n");
    write_fields(&mut text, properties(&message.properties));
    text.push_str("\nheaders\n");
    write_fields(&mut text, headers(&message.properties.headers));
    let _ = writeln!(text, "\nbody, {size} bytes");
    match std::str::from_utf8(&message.body) {
        Ok(body) => {
            let is_hidden = |it: char| it.is_control() && !matches!(it, '\n' | '\t');
            text.extend(body.chars().map(|it| if is_hidden(it) { ' ' } else { it }));
        }
        Err(_) => {
            let _ = write!(text, "not UTF-8; in base64: {}", BASE64.encode(&message.body));
        }
    }
    text.push('\n');
    text
}

fn write_fields(text: &mut String, fields: Map<String, Json>) {
    for (name, value) in fields {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let _ = writeln!(text, "  {}  {}", printable(&name), printable(&value));
    }
}

/// All contents of a dead letter as JSON, for a program. Bodies and texts that are not UTF-8 are in base64.
pub(super) fn full_json(delivery: &Delivery, now: SystemTime) -> Json {
    let mut full = json!(DeadLetterSummary::of(delivery, now));
    let message = &delivery.message;
    full["delivery_count"] = json!(delivery.delivery_count);
    full["properties"] = properties(&message.properties).into();
    full["headers"] = headers(&message.properties.headers).into();
    match std::str::from_utf8(&message.body) {
        Ok(text) => full["body"] = text.into(),
        Err(_) => full["body_base64"] = BASE64.encode(&message.body).into(),
    }
    full
}

/// The properties that are set, by their AMQP names.
fn properties(properties: &Properties) -> Map<String, Json> {
    let Json::Object(mut all) = json!(Properties { headers: Headers::new(), ..properties.clone() }) else {
        return Map::new();
    };
    all.retain(|name, value| name != "headers" && !value.is_null());
    if let Some(kind) = all.remove("kind") {
        all.insert("type".into(), kind);
    }
    for value in all.values_mut() {
        if let Json::String(text) = value {
            *text = visible(text);
        }
    }
    all
}

fn headers(headers: &Headers) -> Map<String, Json> {
    headers.iter().map(|(name, it)| (visible(name), value_json(it))).collect()
}

fn value_json(value: &Value) -> Json {
    let base64 = |bytes: &[u8]| json!({"base64": BASE64.encode(bytes)});
    match value {
        Value::Void => Json::Null,
        Value::Bool(it) => json!(it),
        Value::F32(it) => json!(it),
        Value::F64(it) => json!(it),
        Value::Decimal { scale, value } => json!(format!("{value}e-{scale}")),
        Value::Text(text) => match std::str::from_utf8(text) {
            Ok(text) => text.into(),
            Err(_) => base64(text),
        },
        Value::Bytes(bytes) => base64(bytes),
        Value::Timestamp(seconds) => {
            let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(*seconds));
            at.and_then(iso).map_or(json!(seconds), Json::from)
        }
        Value::Array(it) => it.iter().map(value_json).collect(),
        Value::Table(it) => headers(it).into(),
        number => json!(number.as_i64()),
    }
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
