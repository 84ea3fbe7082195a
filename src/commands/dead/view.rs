//! Formats dead letters: a row of a table, a JSON line, or everything. Pure. Removes control characters, so
//! that text in a dead letter cannot control the terminal.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Map, Value as Json, json};

use crate::broker::Delivery;
use crate::protocol::dead_letter::DeadLetter;
use crate::protocol::{Headers, Properties, Value, shorten};

/// Longest text of a row: texts of a dead letter may be of any length.
const TEXT_BYTES: usize = 2_100;
/// Longest text in the last column of a table.
const LAST_BYTES: usize = 100;

/// The row of a dead letter in a list, and its line of JSON.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    task_id: Option<String>,
    message_id: Option<String>,
    correlation_id: Option<String>,
    pub(super) reason: String,
    /// ISO-8601, so sorting texts sorts times.
    pub(super) dead_lettered_at: Option<String>,
    age_s: Option<u64>,
    worker: Option<String>,
    error: Option<String>,
    size: usize,
    /// Its destination, shown instead of the error.
    #[serde(skip)]
    to: Option<String>,
}

impl Row {
    pub(super) fn of(delivery: &Delivery, now: SystemTime) -> Self {
        let (message, dead_letter) = (&delivery.message, DeadLetter::of(&delivery.message));
        let text = |text: Option<&str>| text.map(|text| shorten(text, TEXT_BYTES));
        Self {
            task_id: text(dead_letter.task_id()),
            message_id: message.properties.message_id.clone(),
            correlation_id: message.properties.correlation_id.clone(),
            reason: shorten(dead_letter.reason(), TEXT_BYTES),
            dead_lettered_at: dead_letter.dead_lettered_at().and_then(iso),
            age_s: dead_letter.age(now).map(|age| age.as_secs()),
            worker: text(dead_letter.worker()),
            error: text(dead_letter.error()),
            size: message.body.len(),
            to: None,
        }
    }

    pub(super) fn to(self, to: String) -> Self {
        Self { to: Some(to), ..self }
    }

    /// The cells of a table row: id, reason, age, worker, size, and the destination or the error.
    pub(super) fn cells(&self) -> [String; 6] {
        let dash = || "-".to_owned();
        [
            self.task_id.clone().unwrap_or_else(dash),
            self.reason.clone(),
            self.age_s.map_or_else(dash, in_words),
            self.worker.clone().unwrap_or_else(dash),
            self.size.to_string(),
            shorten(self.to.as_ref().or(self.error.as_ref()).map_or("", String::as_str), LAST_BYTES),
        ]
        .map(|cell| printable(&cell))
    }
}

/// `1 dead letter`, `2 dead letters`.
pub(super) fn dead_letters(count: usize) -> String {
    format!("{count} dead {}", if count == 1 { "letter" } else { "letters" })
}

/// Everything in a dead letter, for a person.
pub(super) fn whole(delivery: &Delivery, now: SystemTime) -> String {
    let (message, row) = (&delivery.message, Row::of(delivery, now));
    let [id, reason, age, worker, size, _] = row.cells();
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
    let mut whole = json!(Row::of(delivery, now));
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

fn iso(at: SystemTime) -> Option<String> {
    Timestamp::try_from(at).ok().map(|at| format!("{at:.3}"))
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
