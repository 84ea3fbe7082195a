//! Writes the effective settings as TOML, each with its origin and with secrets masked: the output of `sconce
//! check-config`. Compares the settings of two loads. Decides nothing about the settings.

use std::collections::BTreeMap;
use std::fmt;

use ::config::{Map, Value, ValueKind};

use super::define::{Key, Outline, header};
use super::read::{origin, typed};
use super::redact::redact_url;
use super::text::{as_toml, quoted, without_controls};

/// The merged settings, section by section, in the order of their definitions.
#[derive(Clone, PartialEq)]
pub(super) struct Effective(Vec<SectionSettings>);

#[derive(Clone, PartialEq)]
struct SectionSettings {
    /// With a pool's index: `pool[0].batch`.
    path: String,
    settings: Vec<Setting>,
}

#[derive(Clone, PartialEq)]
struct Setting {
    name: String,
    /// The value, which may be a secret. Without quotes, because flags and variables give numbers as text.
    value: String,
    /// The value as TOML, with secrets masked.
    shown: String,
    origin: String,
}

/// Leaves out the values, since some are secrets.
impl fmt::Debug for Effective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Effective").finish_non_exhaustive()
    }
}

/// The longest line, in characters, that is considered when comments are aligned.
const MAX_ALIGNED_WIDTH: usize = 60;

impl Effective {
    /// Collects the values of the merged settings.
    pub(super) fn of(settings: &Value, outline: &[(&str, Outline)]) -> Self {
        let mut all = Self(Vec::new());
        let ValueKind::Table(root) = &settings.kind else { return all };
        for (key, outline) in outline {
            match root.get(*key).map(|value| &value.kind) {
                Some(ValueKind::Table(table)) => all.add((*key).to_owned(), table, outline),
                Some(ValueKind::Array(items)) => {
                    for (index, item) in items.iter().enumerate() {
                        if let ValueKind::Table(table) = &item.kind {
                            all.add(format!("{key}[{index}]"), table, outline);
                        }
                    }
                }
                _ => {}
            }
        }
        all
    }

    fn add(&mut self, path: String, table: &Map<String, Value>, outline: &Outline) {
        let setting = |(name, default, value): (String, &str, &Value)| {
            let toml = inline(&as_read(value, default));
            let (shown, origin) =
                (masked(&name, &toml, outline.has_secrets), without_controls(&origin(value)));
            Setting { name, value: toml.trim_matches('"').to_owned(), shown, origin }
        };
        let settings = settings_of(table, outline).into_iter().map(setting).collect();
        self.0.push(SectionSettings { path: path.clone(), settings });
        for (key, nested) in &outline.nested {
            if let Some(ValueKind::Table(table)) = table.get(*key).map(|value| &value.kind) {
                self.add(format!("{path}.{key}"), table, nested);
            }
        }
    }

    /// The settings as TOML. In a section the comments are aligned in one column, except after lines longer than
    /// [`MAX_ALIGNED_WIDTH`].
    pub(super) fn render(&self) -> String {
        let mut text = String::new();
        for SectionSettings { path, settings } in &self.0 {
            let (list, rest) = path.split_once('[').unwrap_or((path, ""));
            let below = rest.split_once(']').map_or("", |(_, below)| below);
            let blank = if text.is_empty() { "" } else { "\n" };
            text.push_str(&format!("{blank}{}\n", header(&format!("{list}{below}"))));
            let line = |Setting { name, shown, .. }: &Setting| format!("{name} = {shown}");
            let widths = settings.iter().map(|setting| line(setting).chars().count());
            let width = widths.filter(|width| *width <= MAX_ALIGNED_WIDTH).max().unwrap_or(0);
            for setting in settings {
                text.push_str(&format!("{:width$}  # {}\n", line(setting), setting.origin));
            }
        }
        text
    }

    /// The settings in which `later` differs, as `section.key = value`.
    pub(super) fn changes(&self, later: &Self) -> Vec<String> {
        let [before, after] = [self, later].map(Self::by_path);
        let differs = |path: &String, setting: &Setting| {
            before.get(path).is_none_or(|before| before.value != setting.value)
        };
        let changed = after.iter().filter(|(path, setting)| differs(path, setting));
        let changed = changed.map(|(path, setting)| format!("{path} = {}", setting.shown));
        let gone =
            before.keys().filter(|path| !after.contains_key(*path)).map(|path| format!("{path} is gone"));
        changed.chain(gone).collect()
    }

    fn by_path(&self) -> BTreeMap<String, &Setting> {
        let settings = self.0.iter().flat_map(|section| section.settings.iter().map(move |it| (section, it)));
        settings.map(|(section, setting)| (format!("{}.{}", section.path, setting.name), setting)).collect()
    }
}

/// The settings of a section: the name, the default as TOML, and the value of each.
fn settings_of<'a>(
    table: &'a Map<String, Value>,
    outline: &'a Outline,
) -> Vec<(String, &'static str, &'a Value)> {
    if outline.keys.is_empty() {
        // Settings of a model, whose names are unknown here.
        let mut settings: Vec<_> = table.iter().map(|(name, value)| (quoted(name), "", value)).collect();
        settings.sort_by(|(one, ..), (other, ..)| one.cmp(other));
        return settings;
    }
    // With a list of queues, the defaults of its short forms are ignored, and writing them would be an error.
    let lists_queues = table
        .get("queue")
        .is_some_and(|queues| matches!(typed(queues).kind, ValueKind::Array(queues) if !queues.is_empty()));
    let is_shown = |key: &&Key| !(lists_queues && ["task_queue", "background_queue"].contains(&key.name));
    let of_key = |key: &Key| Some((key.name.to_owned(), key.default, table.get(key.name)?));
    outline.keys.iter().filter(is_shown).filter_map(of_key).collect()
}

/// The typed value of a setting: text from a flag or variable is parsed, unless the setting's default is text too.
fn as_read(value: &Value, default: &str) -> Value {
    if default.starts_with('"') { value.clone() } else { typed(value) }
}

/// The setting whose whole value is a secret.
const SECRET_KEY: &str = "secret_access_key";

/// A value as TOML, with secrets masked. `is_secret`: all values of its section are secrets.
fn masked(key: &str, toml: &str, is_secret: bool) -> String {
    if (is_secret || key == SECRET_KEY) && toml != "\"\"" {
        return "\"***\"".to_owned();
    }
    // An address that was given to another setting by mistake may hold a password too.
    let lower = toml.to_ascii_lowercase();
    let is_address = key == "url" || ["amqp://", "amqps://"].iter().any(|scheme| lower.contains(scheme));
    if is_address { redact_url(toml) } else { toml.to_owned() }
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
        _ => as_toml(value),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;

    use super::super::{LoadedSettings, default_file, load};

    fn load_text(text: &str) -> LoadedSettings {
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
    fn settings_with_several_queues_can_be_read_again() {
        let loaded =
            load_text("[[pool]]\n[[pool.queue]]\nname = \"a\"\nshare = 2\n[[pool.queue]]\nname = \"b\"");
        assert!(!loaded.effective.contains("task_queue"), "{}", loaded.effective);
        let again = load_text(&loaded.effective.replace("guest:***@", "guest:guest@"));
        assert_eq!(again.settings, loaded.settings);
    }

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
    fn what_differs_between_two_loads_is_named_with_its_pool() {
        let loaded = |pools: &str| load_text(&format!("{pools}\n[launcher]\nshutdown_grace = \"5s\""));
        let one = loaded("[[pool]]\nname = \"a\"\n[[pool]]\nname = \"b # c\"\ntask_queue = \"q\"");
        let two = loaded(
            "[[pool]]\nname = \"a\"\n[[pool]]\nname = \"b # c\"\ntask_queue = \"q\"\nbatch = { max_tokens = 7 }",
        );
        assert_eq!(one.changes(&two), ["pool[1].batch.max_tokens = 7"]);
        assert_eq!(one.changes(&one), [""; 0]);
        let fewer = two.changes(&loaded("[[pool]]\nname = \"a\""));
        assert!(fewer.contains(&"pool[1].name is gone".to_owned()), "{fewer:?}");
        assert!(one.changes(&load_text("")).contains(&"launcher.shutdown_grace = \"8s\"".to_owned()));
    }

    #[test]
    fn changes_are_found_by_value_not_by_display_or_origin() {
        let url = |password: &str| load_text(&format!("broker.url = \"amqp://me:{password}@h\""));
        let (one, two) = (url("hunter2"), url("hunter3"));
        assert_eq!(one.changes(&two), ["broker.url = \"amqp://me:***@h\""], "another password is a change");
        assert!(!format!("{one:?}").contains("hunter"), "{one:?}");
        let folder = tempfile::tempdir().expect("a folder");
        let named = |name: &str| {
            let file = folder.path().join(name);
            let text = "[[pool]]\nthreads = 3\noptions = { names = [\"a\", \"b\"], deep = { on = true } }";
            std::fs::write(&file, text).expect("written");
            load(&[file], Vec::new(), &[]).expect("valid settings")
        };
        assert_eq!(named("a  # b.toml").changes(&named("c.toml")), [""; 0]);
        let flags = [("pool[0].threads".to_owned(), "3".to_owned())];
        let file = folder.path().join("c.toml");
        let by_flag = load(&[file], Vec::new(), &flags).expect("valid settings");
        assert_eq!(named("c.toml").changes(&by_flag), [""; 0]);
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
    fn no_secret_key_is_rendered_or_quoted_in_a_problem() {
        let shown = load_text("[[pool]]\ns3 = { access_key_id = \"AKIA\", secret_access_key = \"hunter2\" }");
        assert!(shown.effective.contains(r#"secret_access_key = "***""#), "{}", shown.effective);
        assert!(!format!("{shown:?}").contains("hunter"), "{shown:?}");
        let secret_as_list = [("pool[0].s3.secret_access_key".to_owned(), "[\"hunter2\"]".to_owned())];
        let problem = load(&[], Vec::new(), &secret_as_list).map(|loaded| loaded.effective);
        assert!(!format!("{problem:?}").contains("hunter"), "{problem:?}");
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
