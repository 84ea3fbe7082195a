//! Writes the effective settings as TOML, each with its origin and with secrets masked: the output of `sconce
//! check-config`. Decides nothing about the settings.

use std::collections::BTreeMap;

use ::config::{Map, Value, ValueKind};

use super::define::{Key, Outline, header};
use super::read::{origin, typed};
use super::redact::redact_url;
use super::text::{of_value, quoted, without_controls};

/// The merged settings as TOML.
pub(super) fn render(settings: &Value, outline: &[(&str, Outline)]) -> String {
    let mut text = String::new();
    for (key, outline) in outline {
        match settings.clone().into_table().ok().and_then(|mut table| table.remove(*key)).map(|it| it.kind) {
            Some(ValueKind::Table(table)) => section(&mut text, key, &table, outline),
            Some(ValueKind::Array(items)) => {
                for table in items.into_iter().filter_map(|item| item.into_table().ok()) {
                    section(&mut text, key, &table, outline);
                }
            }
            _ => {}
        }
    }
    text
}

/// The settings that differ between two such pages, as `section.key = value`; a pool's section has its number.
pub(super) fn changes(before: &str, after: &str) -> Vec<String> {
    let (before, after) = (values(before), values(after));
    let now = |(key, value): (&String, &String)| format!("{key} = {value}");
    let changed = after.iter().filter(|(key, value)| before.get(*key) != Some(value)).map(now);
    let gone = before.keys().filter(|key| !after.contains_key(*key)).map(|key| format!("{key} is gone"));
    changed.chain(gone).collect()
}

/// The values of a page, without their origins.
fn values(page: &str) -> BTreeMap<String, String> {
    let (mut section, mut pools) = (String::new(), 0);
    let mut values = BTreeMap::new();
    for line in page.lines() {
        if let Some(name) = line.strip_prefix("[[").and_then(|line| line.strip_suffix("]]")) {
            (section, pools) = (format!("{name}[{pools}]"), pools + 1);
        } else if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            // `[pool.batch]` is of the pool above it.
            section = match name.strip_prefix("pool.") {
                Some(nested) => format!("pool[{}].{nested}", pools - 1),
                None => name.to_owned(),
            };
        } else if let Some((key, value)) = line.split_once(" = ") {
            let value = value.rsplit_once("  # ").map_or(value, |(value, _)| value).trim_end();
            values.insert(format!("{section}.{key}"), value.to_owned());
        }
    }
    values
}

/// Writes a section's settings with their comments in one column, which a very long line does not move.
fn section(text: &mut String, path: &str, table: &Map<String, Value>, outline: &Outline) {
    const WIDEST: usize = 60;
    let of_key = |key: &Key| {
        let value = table.get(key.name)?;
        Some((line(key.name, value, key.default), origin(value)))
    };
    let mut lines: Vec<(String, String)> = outline.keys.iter().filter_map(of_key).collect();
    if outline.keys.is_empty() {
        // Settings of a model, whose names are unknown here.
        let of_model = |(name, value): (&String, &Value)| (line(&quoted(name), value, ""), origin(value));
        lines.extend(table.iter().map(of_model));
        lines.sort();
    }
    let widths = lines.iter().map(|(line, _)| line.chars().count());
    let width = widths.filter(|width| *width <= WIDEST).max().unwrap_or(0);
    if !text.is_empty() {
        text.push('\n');
    }
    text.push_str(&format!("{}\n", header(path)));
    for (line, origin) in lines {
        text.push_str(&format!("{line:width$}  # {}\n", without_controls(&origin)));
    }
    for (key, nested) in &outline.nested {
        if let Some(ValueKind::Table(table)) = table.get(*key).map(|value| &value.kind) {
            section(text, &format!("{path}.{key}"), table, nested);
        }
    }
}

/// `key = value`. Flags and variables give text, which is shown as the value that it stands for, unless the
/// setting is a text.
fn line(key: &str, value: &Value, default: &str) -> String {
    let is_text = default.starts_with('"');
    let shown = inline(&if is_text { value.clone() } else { typed(value) });
    // An address that was given to another setting by mistake may hold a password too.
    let lower = shown.to_ascii_lowercase();
    let is_address = key == "url" || ["amqp://", "amqps://"].iter().any(|scheme| lower.contains(scheme));
    format!("{key} = {}", if is_address { redact_url(&shown) } else { shown })
}

/// A value as TOML in one line, tables too.
fn inline(value: &Value) -> String {
    match &value.kind {
        ValueKind::Array(items) => format!("[{}]", items.iter().map(inline).collect::<Vec<_>>().join(", ")),
        ValueKind::Table(table) => {
            let mut fields: Vec<String> =
                table.iter().map(|(name, value)| format!("{} = {}", quoted(name), inline(value))).collect();
            fields.sort();
            format!("{{ {} }}", fields.join(", "))
        }
        _ => of_value(value),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;

    use super::super::{Loaded, default_file, load};

    fn load_text(text: &str) -> Loaded {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(text.as_bytes()).expect("written");
        let files: Vec<PathBuf> = vec![file.path().to_owned()];
        load(&files, Vec::new(), &[]).expect("valid settings")
    }

    const RICH: &str = r#"
        [broker]
        url = ["amqp://a@h1", "amqps://h2:5671/v"]
        give_up_after = "1h30m"
        tls = { ca_file = "/etc/a \"quoted\" \\ file", cert_file = "c", key_file = "k" }
        [[pool]]
        name = "one # two"
        served_names = ["x", "y, z"]
        devices = ["cpu", "cpu"]
        reply_queue = ""
        prefetch = 600
        prefetch_bytes = "1MiB"
        dtype = "bf16"
        threads = 3
        task = "embed"
        options = { depth = 3, names = ["a", "b"], deep = { on = true } }
        [[pool]]
        name = "two"
        task_queue = "other"
        batch = { max_tokens = 7, max_delay = "0ms" }
        [telemetry]
        otlp_endpoint = "http://collector:4318/otlp"
        trace_sample = 1e-9
    "#;

    #[test]
    fn what_is_rendered_reads_back_as_the_same_settings() {
        for text in ["", RICH] {
            let first = load_text(text);
            let shown = first.effective.replace("guest:***@", "guest:guest@");
            let second = load_text(&shown);
            assert_eq!(second.settings, first.settings, "{shown}");
        }
    }

    #[test]
    fn what_differs_between_two_pages_is_named_with_its_pool() {
        let page =
            |pools: &str| load_text(&format!("{pools}\n[launcher]\nshutdown_grace = \"5s\"")).effective;
        let one = page("[[pool]]\nname = \"a\"\n[[pool]]\nname = \"b # c\"\ntask_queue = \"q\"");
        let two = page(
            "[[pool]]\nname = \"a\"\n[[pool]]\nname = \"b # c\"\ntask_queue = \"q\"\nbatch = { max_tokens = 7 }",
        );
        assert_eq!(super::changes(&one, &two), ["pool[1].batch.max_tokens = 7"]);
        assert_eq!(super::changes(&one, &one), [""; 0]);
        let fewer = super::changes(&two, &page("[[pool]]\nname = \"a\""));
        assert!(fewer.contains(&"pool[1].name is gone".to_owned()), "{fewer:?}");
        let other = load_text("").effective;
        assert!(super::changes(&one, &other).contains(&"launcher.shutdown_grace = \"8s\"".to_owned()));
    }

    #[test]
    fn no_password_is_rendered() {
        let text = r#"broker.url = "amqp://me:hunter2@h1,amqp://me:hunter3@h2""#;
        let shown = load_text(text).effective;
        assert!(shown.contains(r#"url = "amqp://me:***@h1,amqp://me:***@h2""#), "{shown}");
        assert!(!shown.contains("hunter"), "{shown}");
    }

    #[test]
    fn no_password_is_rendered_however_the_addresses_are_written() {
        let list = r#"["amqp://me:hunter2@h1", "amqp://me:hunter3@h2"]"#;
        for written in [list, "amqp://me:hunter2@h1 , amqps://me:hunt,er3@h2", "AMQP://me:hunter2@h"] {
            let flags = [("broker.url".to_owned(), written.to_owned())];
            let shown = load(&[], Vec::new(), &flags).expect("valid settings").effective;
            assert!(!shown.contains("hunt") && !shown.contains("er3"), "{shown}");
        }
        let shown = load_text(&format!("broker.url = {list}")).effective;
        assert!(!shown.contains("hunter"), "{shown}");
    }

    #[test]
    fn an_address_in_the_place_of_another_setting_is_masked_too() {
        let shown = load_text("[[pool]]\nmodel = \"amqp://me:hunter2@host\"").effective;
        assert!(shown.contains("model = \"amqp://me:***@host\""), "{shown}");
    }

    #[test]
    fn every_setting_of_the_default_file_is_rendered() {
        let keys = |text: &str| -> Vec<String> {
            let line_key = |line: &str| Some(line.split_once(" = ")?.0.to_owned());
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            lines.filter_map(line_key).collect()
        };
        assert_eq!(keys(&load_text("").effective), keys(&default_file()));
    }
}
