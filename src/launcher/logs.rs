//! Forwards what a worker logs (JSON lines on its stderr) to the launcher's log, with the slot's name. If the launcher
//! logs for people, a line becomes an event of the launcher with the worker's level. If it logs JSON, the line stays
//! the same, with its fields. A line of another form (a panic message, a library's output) becomes a warning.

use std::collections::{HashMap, VecDeque};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Map, Value};

use crate::protocol::control::{CrashTail, QUEUE_MADE};
use crate::protocol::{printable, shorten};
use crate::shutdown::Exit;

/// Writes a JSON line unchanged.
pub type RawLines = fn(&str);

/// A text that several workers report is logged at most once in this time.
const WINDOW: Duration = Duration::from_secs(60);

/// Texts that several workers report, and when they were logged. Slots and the handles of their workers read and write
/// it. Bound: the texts of the last [`WINDOW`].
///
/// - A created queue: workers that start together declare the same queues at the same moment, and AMQP does not report
///   which of them created a queue.
/// - A reason for which a model cannot be loaded: a pool's slots fail together, and each fails several times.
#[derive(Default)]
pub(super) struct RecentlyLogged(Mutex<HashMap<String, Instant>>);

impl RecentlyLogged {
    /// Whether this text was logged within the window. Records it otherwise.
    pub(super) fn check_and_record(&self, text: &str, now: Instant) -> bool {
        let mut logged_at = self.0.lock();
        logged_at.retain(|_, at| now.saturating_duration_since(*at) < WINDOW);
        let is_known = logged_at.contains_key(text);
        if !is_known {
            logged_at.insert(text.to_owned(), now);
        }
        is_known
    }
}

/// Forwards one line, through `raw` if given. A line about a created queue is dropped if it was `logged` just before.
/// Returns the text of the line.
pub(super) fn forward_line(slot: &str, line: &str, raw: Option<RawLines>, logged: &RecentlyLogged) -> String {
    let parsed =
        serde_json::from_str::<Map<String, Value>>(line).ok().filter(|log| log.contains_key("fields"));
    let level = parsed.as_ref().and_then(|log| log.get("level")).and_then(Value::as_str).map(str::to_owned);
    let message = parsed.as_ref().map(message).unwrap_or_else(|| line.to_owned());
    if message.starts_with(QUEUE_MADE) && logged.check_and_record(&message, Instant::now()) {
        return message;
    }
    if let (Some(_), Some(raw)) = (parsed, raw) {
        raw(&with_slot(line, slot));
        return message;
    }
    match level.as_deref() {
        Some("ERROR") => tracing::error!(target: "sconce::slot", slot, "{message}"),
        Some("INFO") => tracing::info!(target: "sconce::slot", slot, "{message}"),
        Some("DEBUG") => tracing::debug!(target: "sconce::slot", slot, "{message}"),
        Some("TRACE") => tracing::trace!(target: "sconce::slot", slot, "{message}"),
        _ => tracing::warn!(target: "sconce::slot", slot, "{message}"),
    }
    message
}

/// The same line, with the slot as the first of its fields. Nothing else changes, not even the order of keys.
fn with_slot(line: &str, slot: &str) -> String {
    const FIELDS: &str = "\"fields\":{";
    let Some((head, fields)) = line.split_once(FIELDS) else { return line.to_owned() };
    let comma = if fields.starts_with('}') { "" } else { "," };
    format!("{head}{FIELDS}\"slot\":{}{comma}{fields}", Value::from(slot))
}

/// The message of a line, followed by the other fields as `name=value`.
fn message(log: &Map<String, Value>) -> String {
    let fields = log.get("fields").and_then(Value::as_object);
    let mut message =
        fields.and_then(|it| it.get("message")).and_then(Value::as_str).unwrap_or_default().to_owned();
    // A line of a library that logs with the crate `log` has fields with its target and place in the source.
    let is_shown = |name: &str| name != "message" && !name.starts_with("log.");
    for (name, value) in fields.into_iter().flatten().filter(|(name, _)| is_shown(name)) {
        message.push_str(&match value {
            Value::String(text) => format!(" {name}={text:?}"),
            other => format!(" {name}={other}"),
        });
    }
    message
}

/// How many lines of a worker's log are kept in case a task kills it. They go into the headers of a dead letter.
const TAIL_LINES: usize = 5;
/// The maximum number of bytes of such a line.
const MAX_LINE_BYTES: usize = 200;

/// The last lines of one worker's log.
#[derive(Default)]
pub(super) struct LogTail(VecDeque<String>);

impl LogTail {
    pub(super) fn push(&mut self, line: &str) {
        if self.0.len() >= TAIL_LINES {
            self.0.pop_front();
        }
        // The tail is sent as JSON, in which a control character takes six bytes, such as `\u0000`.
        self.0.push_back(shorten(&printable(line), MAX_LINE_BYTES));
    }

    /// These lines, and how the process ended.
    pub(super) fn into_crash_tail(self, status: Option<ExitStatus>) -> CrashTail {
        let meaning = status.and_then(|status| status.code()).and_then(Exit::from_code);
        let exit = match (status, meaning) {
            (Some(status), Some(meaning)) => format!("{status} ({meaning})"),
            (Some(status), None) => status.to_string(),
            (None, _) => "unknown".to_owned(),
        };
        CrashTail { exit, log: Vec::from(self.0).join("\n") }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_log_line_reads_as_its_message_and_fields() {
        let line = r#"{"level":"INFO","fields":{"message":"ready","device":"cpu","load_ms":3}}"#;
        let log = serde_json::from_str(line).unwrap();
        assert_eq!(message(&log), r#"ready device="cpu" load_ms=3"#);
    }

    #[test]
    fn a_text_that_several_workers_report_is_logged_once_in_a_window() {
        let (logged, now) = (RecentlyLogged::default(), Instant::now());
        let known = ["no folder a", "no folder a", "no folder b"].map(|it| logged.check_and_record(it, now));
        assert_eq!(known, [false, true, false]);
        assert!(!logged.check_and_record("no folder a", now + WINDOW));
    }

    #[test]
    fn of_repeated_lines_only_those_about_created_queues_are_dropped() {
        static FORWARDED: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let logged = RecentlyLogged::default();
        for text in [&format!("{QUEUE_MADE} a"), "ready", &format!("{QUEUE_MADE} a"), "ready"] {
            let line = format!(r#"{{"level":"INFO","fields":{{"message":"{text}"}}}}"#);
            let raw: RawLines = |line| FORWARDED.lock().push(line.to_owned());
            assert_eq!(forward_line("e/0", &line, Some(raw), &logged), text);
        }
        let forwarded = FORWARDED.lock().join("\n");
        assert_eq!((forwarded.matches(QUEUE_MADE).count(), forwarded.matches("ready").count()), (1, 2));
    }

    #[test]
    fn the_slot_is_inserted_before_the_message_and_nothing_else_changes() {
        for (line, expected) in [
            (
                r#"{"level":"INFO","fields":{"message":"a \"b\\","x":1},"target":"t"}"#,
                r#"{"level":"INFO","fields":{"slot":"e/0","message":"a \"b\\","x":1},"target":"t"}"#,
            ),
            (r#"{"fields":{"x":1}}"#, r#"{"fields":{"slot":"e/0","x":1}}"#),
            (r#"{"fields":{}}"#, r#"{"fields":{"slot":"e/0"}}"#),
        ] {
            assert_eq!(with_slot(line, "e/0"), expected);
            serde_json::from_str::<Value>(expected).unwrap();
        }
    }

    #[test]
    fn the_crash_tail_has_the_last_lines_and_the_exit() {
        let mut tail = LogTail::default();
        (0..9).for_each(|n| tail.push(&format!("line {n}")));
        tail.push(&"x".repeat(100_000));
        let crash_tail = tail.into_crash_tail(Some(ExitStatus::from_raw(9)));
        assert_eq!(crash_tail.exit, "signal: 9 (SIGKILL)");
        assert!(
            crash_tail.log.starts_with("line 5\nline 6\n")
                && crash_tail.log.len() < TAIL_LINES * (MAX_LINE_BYTES + 40)
        );
        let crash_tail = LogTail::default().into_crash_tail(Some(ExitStatus::from_raw(83 << 8)));
        assert_eq!(crash_tail.exit, "exit status: 83 (the device failed)");
    }
}
