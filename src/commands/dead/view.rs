//! Formats dead letters: a row of a table, a JSON line, or everything. Pure. Removes control characters, so
//! that text in a dead letter cannot control the terminal.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value as Json, json};

use crate::broker::Delivery;
use crate::client::dead::{DeadLetterSummary, iso};
use crate::protocol::{Headers, Properties, Value, shorten};

/// Longest text in the last column of a table.
const LAST_BYTES: usize = 100;

/// The cells of a table row: id, reason, age, worker, size, and the destination or the error.
pub(super) fn cells(row: &DeadLetterSummary) -> [String; 6] {
    let dash = || "-".to_owned();
    [
        row.task_id.clone().unwrap_or_else(dash),
        row.reason.clone(),
        row.age_s.map_or_else(dash, in_words),
        row.worker.clone().unwrap_or_else(dash),
        row.size.to_string(),
        shorten(row.to.as_ref().or(row.error.as_ref()).map_or("", String::as_str), LAST_BYTES),
    ]
    .map(|cell| printable(&cell))
}

/// `1 dead letter`, `2 dead letters`.
pub(super) fn dead_letters(count: usize) -> String {
    format!("{count} dead {}", if count == 1 { "letter" } else { "letters" })
}

/// Everything in a dead letter, for a person.
pub(super) fn whole(delivery: &Delivery, now: SystemTime) -> String {
    let (message, row) = (&delivery.message, DeadLetterSummary::of(delivery, now));
    let [id, reason, age, worker, size, _] = cells(&row);
    let error = printable(row.error.as_deref().unwrap_or_default());
    let since =
        row.dead_lettered_at.map_or_else(|| "nobody knows when".into(), |at| format!("{at}, {age} ago"));
    let mut text = format!("task    {id}\nreason  {reason}\nerror   {error}\nworker  {worker}\n");
    let _ =
        writeln!(text, "since   {since}; delivered {} times before", delivery.delivery_count.unwrap_or(1));
    text.push_str("\nproperties\n");
    fields(&mut text, properties(&message.properties));
    text.push_str("\nheaders\n");
    fields(&mut text, headers(&message.properties.headers));
    let _ = writeln!(text, "\nbody, {size} bytes");
    match std::str::from_utf8(&message.body) {
        Ok(body) => text.extend(body.chars().map(|it| if it == '\n' || it == '\t' { it } else { tame(it) })),
        Err(_) => {
            let _ = write!(text, "no text; in base64: {}", BASE64.encode(&message.body));
        }
    }
    text.push('\n');
    text
}

fn fields(text: &mut String, fields: Map<String, Json>) {
    for (name, value) in fields {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let _ = writeln!(text, "  {}  {}", printable(&name), printable(&value));
    }
}

/// Everything in a dead letter, for a program: bodies and texts that are not UTF-8 are in base64.
pub(super) fn whole_json(delivery: &Delivery, now: SystemTime) -> Json {
    let mut whole = json!(DeadLetterSummary::of(delivery, now));
    let message = &delivery.message;
    whole["delivery_count"] = json!(delivery.delivery_count.unwrap_or(1));
    whole["properties"] = properties(&message.properties).into();
    whole["headers"] = headers(&message.properties.headers).into();
    match std::str::from_utf8(&message.body) {
        Ok(text) => whole["body"] = text.into(),
        Err(_) => whole["body_base64"] = BASE64.encode(&message.body).into(),
    }
    whole
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
    all
}

fn headers(headers: &Headers) -> Map<String, Json> {
    headers.iter().map(|(name, it)| (name.clone(), value(it))).collect()
}

fn value(of: &Value) -> Json {
    let bytes = |bytes: &[u8]| json!({"base64": BASE64.encode(bytes)});
    match of {
        Value::Void => Json::Null,
        Value::Bool(it) => json!(it),
        Value::F32(it) => json!(it),
        Value::F64(it) => json!(it),
        Value::Decimal { scale, value } => json!(format!("{value}e-{scale}")),
        Value::Text(text) => std::str::from_utf8(text).map_or_else(|_| bytes(text), Json::from),
        Value::Bytes(it) => bytes(it),
        Value::Timestamp(seconds) => {
            let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(*seconds));
            at.and_then(iso).map_or(json!(seconds), Json::from)
        }
        Value::Array(it) => it.iter().map(value).collect(),
        Value::Table(it) => headers(it).into(),
        number => json!(number.as_i64()),
    }
}

/// A duration in its two largest units: `3d 4h`.
fn in_words(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m {}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h {minutes}m"),
        (days, hours, _) => format!("{days}d {hours}h"),
    }
}

/// One line without control characters.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(tame).collect()
}

fn tame(character: char) -> char {
    if character.is_control() { ' ' } else { character }
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
