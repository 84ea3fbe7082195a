//! Logs again what a worker logs (JSON lines on its stderr), with the slot's name: for a person as an event of
//! the launcher with the worker's level; for a log collector as the same JSON line with its fields. A line of
//! another form (a panic message, a library's print) is a warning.

use serde_json::{Map, Value};

/// Writes a JSON line unchanged.
pub type RawLines = fn(&str);

/// Logs one line again, by `raw` if given; returns its text.
pub(super) fn re_emit(slot: &str, line: &str, raw: Option<RawLines>) -> String {
    let parsed =
        serde_json::from_str::<Map<String, Value>>(line).ok().filter(|log| log.contains_key("fields"));
    let level = parsed.as_ref().and_then(|log| log.get("level")).and_then(Value::as_str).map(str::to_owned);
    let words = parsed.as_ref().map_or_else(|| line.to_owned(), words);
    if let (Some(log), Some(raw)) = (parsed, raw) {
        raw(&with_slot(log, slot).to_string());
        return words;
    }
    match level.as_deref() {
        Some("ERROR") => tracing::error!(target: "sconce::slot", slot, "{words}"),
        Some("INFO") => tracing::info!(target: "sconce::slot", slot, "{words}"),
        Some("DEBUG") => tracing::debug!(target: "sconce::slot", slot, "{words}"),
        Some("TRACE") => tracing::trace!(target: "sconce::slot", slot, "{words}"),
        _ => tracing::warn!(target: "sconce::slot", slot, "{words}"),
    }
    words
}

/// The same line, with the slot added to its fields.
fn with_slot(mut log: Map<String, Value>, slot: &str) -> Value {
    if let Some(fields) = log.get_mut("fields").and_then(Value::as_object_mut) {
        fields.insert("slot".to_owned(), slot.into());
    }
    Value::Object(log)
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
        let line = with_slot(log, "embed/0");
        assert_eq!(line["fields"]["slot"], "embed/0");
        assert_eq!((&line["level"], &line["fields"]["load_ms"]), (&"INFO".into(), &3.into()));
    }
}
