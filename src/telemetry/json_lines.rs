//! Log lines for collectors: one JSON object for each event. The order of keys is fixed: the message first, then the
//! fields in the order of the source. Lists are JSON lists.

use std::fmt::{self, Debug, Write as _};

use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::registry::LookupSpan;

/// The fields that are lists of texts. They arrive in their `Debug` form, which for these texts is also valid JSON.
const LISTS: [&str; 2] = ["ids", "devices"];

/// The format of the lines.
pub(super) struct JsonLines;

impl<S: Subscriber + for<'a> LookupSpan<'a>, N: for<'a> FormatFields<'a> + 'static> FormatEvent<S, N>
    for JsonLines
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let metadata = event.metadata();
        let target = Value::from(fields.target.as_deref().unwrap_or(metadata.target()));
        writer.write_str("{\"timestamp\":\"")?;
        SystemTime.format_time(&mut writer)?;
        let (level, fields) = (metadata.level(), fields.json);
        writeln!(writer, "\",\"level\":\"{level}\",\"fields\":{{{fields}}},\"target\":{target}}}")
    }
}

/// The fields of one event.
#[derive(Default)]
struct Fields {
    /// The members of a JSON object, without the braces.
    json: String,
    /// The target of an event that comes from the crate `log`, which carries the target as a field.
    target: Option<String>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        match field.name() {
            "log.target" => self.target = value.as_str().map(str::to_owned),
            name if name.starts_with("log.") => {}
            name => {
                let comma = if self.json.is_empty() { "" } else { "," };
                let _ = write!(self.json, "{comma}{}:{value}", Value::from(name));
            }
        }
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        let list = LISTS.contains(&field.name()).then(|| serde_json::from_str(&text).ok()).flatten();
        self.add(field, list.unwrap_or_else(|| text.into()));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use tracing_subscriber::prelude::*;

    use super::*;

    #[test]
    fn a_line_has_its_keys_in_order_and_lists_as_lists() {
        let mut file = tempfile::tempfile().unwrap();
        let writer = file.try_clone().unwrap();
        let lines = tracing_subscriber::fmt::layer().with_writer(writer).event_format(JsonLines);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
            let (ids, error) = (["a", "b\"c"], "it \"broke\"");
            tracing::warn!(target: "t", slot = "e/0", ?ids, task.id = 7, share = 0.5, error, "a [1] \n");
        });
        file.rewind().unwrap();
        let mut line = String::new();
        file.read_to_string(&mut line).unwrap();
        let (begin, rest) = line.split_once(",\"level\"").unwrap();
        assert!(begin.starts_with("{\"timestamp\":\"2") && begin.ends_with("Z\""), "{begin}");
        let expected = r#":"WARN","fields":{"message":"a [1] \n","slot":"e/0","ids":["a","b\"c"],"task.id":7,"share":0.5,"error":"it \"broke\""},"target":"t"}"#;
        assert_eq!(rest, format!("{expected}\n"));
    }
}
