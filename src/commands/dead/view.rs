//! How letters are shown: a row of a table, a JSON line, or all of one. Pure, but for the terminal's
//! width. What others wrote into a letter never reaches the terminal as a command to it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use jiff::Timestamp;
use serde_json::{Map, Value as Json, json};

use super::age;
use crate::broker::Delivery;
use crate::protocol::dead_letter::DeadLetter;
use crate::protocol::{Headers, Properties, Value, shorten};

/// Longest text of a row: what others wrote has no bound.
const TEXT_BYTES: usize = 2_100;
/// The narrowest that the last column of a table gets.
const NARROW: usize = 16;

/// What a list says of a letter.
#[derive(Debug)]
pub(super) struct Row {
    task_id: Option<String>,
    message_id: Option<String>,
    correlation_id: Option<String>,
    reason: String,
    died_at: Option<SystemTime>,
    age: Option<Duration>,
    worker: Option<String>,
    error: Option<String>,
    size: usize,
}

impl Row {
    pub(super) fn of(delivery: &Delivery, now: SystemTime) -> Self {
        let (message, letter) = (&delivery.message, DeadLetter::of(&delivery.message));
        let text = |text: Option<&str>| text.map(|text| shorten(text, TEXT_BYTES));
        Self {
            task_id: text(letter.task_id()),
            message_id: message.properties.message_id.clone(),
            correlation_id: message.properties.correlation_id.clone(),
            reason: shorten(letter.reason(), TEXT_BYTES),
            died_at: letter.dead_lettered_at(),
            age: letter.dead_lettered_at().map(|at| age(at, now)),
            worker: text(letter.worker()),
            error: text(letter.error()),
            size: message.body.len(),
        }
    }

    pub(super) fn reason(&self) -> &str {
        &self.reason
    }

    pub(super) fn error(&self) -> &str {
        self.error.as_deref().unwrap_or_default()
    }

    /// The row of a table whose last column is `last`.
    pub(super) fn cells(&self, last: &str) -> [String; 6] {
        let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
        let age = self.age.map_or_else(|| "-".into(), in_words);
        let cells = [or_dash(&self.task_id), self.reason.clone(), age, or_dash(&self.worker)];
        let [id, reason, age, worker] = cells.map(|cell| printable(&cell));
        [id, reason, age, worker, self.size.to_string(), printable(last)]
    }

    pub(super) fn json(&self) -> Json {
        json!({
            "task_id": self.task_id,
            "message_id": self.message_id,
            "correlation_id": self.correlation_id,
            "reason": self.reason,
            "dead_lettered_at": self.died_at.and_then(iso),
            "age_s": self.age.map(|age| age.as_secs()),
            "worker": self.worker,
            "error": self.error,
            "size": self.size,
        })
    }
}

/// Rows under a head, in columns as wide as they need; the last is cut where the terminal ends.
pub(super) fn table(last: &str, rows: Vec<[String; 6]>, width: Option<usize>) -> String {
    let head = ["TASK", "REASON", "AGE", "WORKER", "BYTES", last].map(str::to_owned);
    let rows: Vec<_> = std::iter::once(head).chain(rows).collect();
    let widest = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 5] = std::array::from_fn(widest);
    let before = widths.iter().map(|width| width + 2).sum();
    let room = width.map_or(usize::MAX, |width| width.saturating_sub(before).max(NARROW));
    let lines = rows.iter().map(|[id, reason, age, worker, size, last]| {
        let [a, b, c, d, e] = widths;
        let last = cut(last, room);
        let line = format!("{id:a$}  {reason:b$}  {age:>c$}  {worker:d$}  {size:>e$}  {last}");
        line.trim_end().to_owned()
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Columns of the terminal, where stdout is one.
pub(super) fn terminal_width() -> Option<usize> {
    let size = || ratatui::crossterm::terminal::size().ok();
    io::stdout().is_terminal().then(size).flatten().map(|(columns, _)| columns.into())
}

/// `1 letter`, `2 letters`.
pub(super) fn letters(count: usize) -> String {
    format!("{count} {}", if count == 1 { "letter" } else { "letters" })
}

/// `: 2 attempts, 1 poison`; nothing of nothing.
pub(super) fn by_reason(counts: &BTreeMap<String, usize>) -> String {
    let counts = counts.iter().map(|(reason, count)| format!("{count} {}", printable(reason)));
    let counts = counts.collect::<Vec<_>>().join(", ");
    if counts.is_empty() { counts } else { format!(": {counts}") }
}

/// All of a letter, for a person.
pub(super) fn whole(delivery: &Delivery, now: SystemTime) -> String {
    let (message, row) = (&delivery.message, Row::of(delivery, now));
    let [id, reason, age, worker, size, error] = row.cells(row.error());
    let died =
        row.died_at.and_then(iso).map_or_else(|| "nobody knows when".into(), |at| format!("{at}, {age} ago"));
    let mut text = format!("task    {id}\nreason  {reason}\nerror   {error}\nworker  {worker}\n");
    let _ = writeln!(text, "died    {died}; delivered {} times before", times_delivered(delivery));
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

/// All of a letter, for a program: bodies and texts that are no UTF-8 in base64.
pub(super) fn whole_json(delivery: &Delivery, now: SystemTime) -> Json {
    let mut whole = Row::of(delivery, now).json();
    let message = &delivery.message;
    whole["delivery_count"] = json!(times_delivered(delivery));
    whole["properties"] = properties(&message.properties).into();
    whole["headers"] = headers(&message.properties.headers).into();
    match std::str::from_utf8(&message.body) {
        Ok(text) => whole["body"] = text.into(),
        Err(_) => whole["body_base64"] = BASE64.encode(&message.body).into(),
    }
    whole
}

fn properties(properties: &Properties) -> Map<String, Json> {
    let text = |text: &Option<String>| text.clone().map(Json::from);
    let timestamp = properties.timestamp.map(|at| json!(at));
    let all = [
        ("app_id", text(&properties.app_id)),
        ("cluster_id", text(&properties.cluster_id)),
        ("content_encoding", text(&properties.content_encoding)),
        ("content_type", text(&properties.content_type)),
        ("correlation_id", text(&properties.correlation_id)),
        ("delivery_mode", properties.delivery_mode.map(Json::from)),
        ("expiration", text(&properties.expiration)),
        ("message_id", text(&properties.message_id)),
        ("priority", properties.priority.map(Json::from)),
        ("reply_to", text(&properties.reply_to)),
        ("timestamp", timestamp),
        ("type", text(&properties.kind)),
        ("user_id", text(&properties.user_id)),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
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

/// The two largest units: `3d 4h`.
fn in_words(age: Duration) -> String {
    let seconds = age.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m {}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h {minutes}m"),
        (days, hours, _) => format!("{days}d {hours}h"),
    }
}

/// On one line, without anything that a terminal obeys.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(tame).collect()
}

fn tame(character: char) -> char {
    if character.is_control() { ' ' } else { character }
}

fn cut(text: &str, room: usize) -> String {
    if text.chars().count() <= room {
        return text.to_owned();
    }
    text.chars().take(room.saturating_sub(1)).chain(['…']).collect()
}

/// Earlier deliveries, as far as they are known.
fn times_delivered(delivery: &Delivery) -> u64 {
    delivery.delivery_count.unwrap_or(1)
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
