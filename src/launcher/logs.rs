//! Re-emits what a worker logs (JSON lines on its stderr) as the launcher's own events, under the
//! slot's name and with the worker's level. What is no such line (a panic's words, a library's
//! print) is a warning.

use serde_json::{Map, Value};

/// Re-emits one line; returns its words.
pub(super) fn re_emit(slot: &str, line: &str) -> String {
    let parsed = serde_json::from_str::<Map<String, Value>>(line).ok();
    let level = parsed.as_ref().and_then(|log| log.get("level")).and_then(Value::as_str);
    let words = parsed.as_ref().map_or_else(|| line.to_owned(), words);
    match level {
        Some("ERROR") => tracing::error!(target: "sconce::slot", slot, "{words}"),
        Some("INFO") => tracing::info!(target: "sconce::slot", slot, "{words}"),
        Some("DEBUG") => tracing::debug!(target: "sconce::slot", slot, "{words}"),
        Some("TRACE") => tracing::trace!(target: "sconce::slot", slot, "{words}"),
        _ => tracing::warn!(target: "sconce::slot", slot, "{words}"),
    }
    words
}

/// The message, then its fields as `name=value`.
fn words(log: &Map<String, Value>) -> String {
    let fields = log.get("fields").and_then(Value::as_object);
    let mut words =
        fields.and_then(|it| it.get("message")).and_then(Value::as_str).unwrap_or_default().to_owned();
    for (name, value) in fields.into_iter().flatten().filter(|(name, _)| *name != "message") {
        words.push_str(&match value {
            Value::String(text) => format!(" {name}={text:?}"),
            other => format!(" {name}={other}"),
        });
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_line_reads_as_its_message_and_fields() {
        let line = r#"{"level":"INFO","fields":{"message":"ready","device":"cpu","load_ms":3}}"#;
        let log = serde_json::from_str(line).unwrap();
        assert_eq!(words(&log), r#"ready device="cpu" load_ms=3"#);
    }
}
