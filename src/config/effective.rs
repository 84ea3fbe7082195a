//! Writes validated settings as TOML that can be read back, each with who wrote it and secrets
//! masked: what `sconce check-config` prints. Decides nothing about the settings.

use std::collections::BTreeMap;
use std::path::Path;

use super::files::BUILT_IN;
use super::redact::redact_url;
use super::settings::{Admin, Broker, Devices, Launcher, Pool, Settings, Telemetry};
use super::text::{quoted, quoted_list, without_controls};
use super::units::{show_duration, show_size};

/// The settings as TOML. `origins`: dotted path → who wrote the value.
pub(super) fn render(settings: &Settings, origins: &BTreeMap<String, String>) -> String {
    let mut page = Page { origins, text: String::new(), prefix: String::new(), lines: Vec::new() };
    broker(&mut page, &settings.broker);
    for (index, settings) in settings.pools.iter().enumerate() {
        pool(&mut page, index, settings);
    }
    launcher(&mut page, &settings.launcher);
    admin(&mut page, &settings.admin);
    telemetry(&mut page, &settings.telemetry);
    page.end_section();
    page.text
}

/// The text so far, and the section that is being written.
struct Page<'a> {
    origins: &'a BTreeMap<String, String>,
    text: String,
    prefix: String,
    lines: Vec<(String, &'a str)>,
}

impl Page<'_> {
    fn section(&mut self, header: &str, prefix: String) {
        self.end_section();
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        self.text.push_str(header);
        self.text.push('\n');
        self.prefix = prefix;
    }

    fn line(&mut self, key: &str, value: impl AsRef<str>) {
        let path = format!("{}.{key}", self.prefix);
        let origin = self.origins.get(&path).map_or(BUILT_IN, String::as_str);
        let value = value.as_ref();
        // An address in the place of something else, by mistake, is one all the same.
        let lower = value.to_ascii_lowercase();
        let is_address = ["amqp://", "amqps://"].iter().any(|scheme| lower.contains(scheme));
        let value = if is_address { redact_url(value) } else { value.to_owned() };
        let line = format!("{key} = {value}");
        self.lines.push((line, origin));
    }

    /// Writes the section's lines with their comments below each other; a very long line does not
    /// push the others' away.
    fn end_section(&mut self) {
        const WIDEST: usize = 60;
        let widths = self.lines.iter().map(|(line, _)| line.chars().count());
        let width = widths.filter(|width| *width <= WIDEST).max().unwrap_or(0);
        for (line, origin) in self.lines.drain(..) {
            let origin = without_controls(origin);
            self.text.push_str(&format!("{line:width$}  # {origin}\n"));
        }
    }
}

fn broker(page: &mut Page<'_>, broker: &Broker) {
    page.section("[broker]", "broker".to_owned());
    let urls: Vec<String> = broker.urls.iter().map(|url| redact_url(url.expose())).collect();
    match urls.as_slice() {
        [url] => page.line("url", quoted(url)),
        several => page.line("url", quoted_list(several.iter().map(String::as_str))),
    }
    page.line("declare", broker.declare.to_string());
    page.line("delivery_limit", broker.delivery_limit.to_string());
    page.line("heartbeat", quoted(&show_duration(broker.heartbeat)));
    page.line("connect_timeout", quoted(&show_duration(broker.connect_timeout)));
    page.line("confirm_timeout", quoted(&show_duration(broker.confirm_timeout)));
    page.line("give_up_after", quoted(&show_duration(broker.give_up_after)));
    page.line("consumer_timeout", quoted(&show_duration(broker.consumer_timeout)));

    page.section("[broker.tls]", "broker.tls".to_owned());
    page.line("ca_file", file(broker.tls.ca_file.as_deref()));
    page.line("cert_file", file(broker.tls.cert_file.as_deref()));
    page.line("key_file", file(broker.tls.key_file.as_deref()));
}

fn pool(page: &mut Page<'_>, index: usize, pool: &Pool) {
    page.section("[[pool]]", format!("pool[{index}]"));
    page.line("name", quoted(&pool.name));
    page.line("task_queue", quoted(&pool.task_queue));
    page.line("reply_queue", quoted(pool.reply_queue.as_deref().unwrap_or("")));
    page.line("dead_letter_queue", quoted(&pool.dead_letter_queue));
    page.line("reply_timeout", quoted(&show_duration(pool.reply_timeout)));
    page.line("large_reply", quoted(&show_size(pool.large_reply)));
    page.line("model", quoted(&pool.model));
    page.line("task", quoted(pool.task.as_deref().unwrap_or("auto")));
    page.line("served_names", quoted_list(pool.served_names.iter().map(String::as_str)));
    page.line(
        "devices",
        match &pool.devices {
            Devices::Auto => quoted("auto"),
            Devices::List(devices) => quoted_list(devices.iter().map(String::as_str)),
        },
    );
    page.line("workers_per_device", pool.workers_per_device.to_string());
    page.line("threads", number_or_auto(pool.threads));
    page.line("dtype", quoted(pool.dtype.name()));
    page.line("min_speed", format!("{:?}", pool.min_speed));
    page.line("prefetch", number_or_auto(pool.prefetch));
    page.line("prefetch_bytes", quoted(&show_size(pool.prefetch_bytes)));
    page.line("max_body", quoted(&show_size(pool.max_body)));
    page.line("max_inputs", pool.max_inputs.to_string());

    page.section("[pool.batch]", format!("pool[{index}].batch"));
    page.line("max_tokens", number_or_auto(pool.batch.max_tokens));
    page.line("max_requests", pool.batch.max_requests.to_string());
    page.line("max_delay", quoted(&show_duration(pool.batch.max_delay)));
    page.line("timeout", quoted(&show_duration(pool.batch.timeout)));

    page.section("[pool.retry]", format!("pool[{index}].retry"));
    page.line("max_attempts", pool.retry.max_attempts.to_string());
    page.line("delay", quoted(&show_duration(pool.retry.delay)));
    page.line("delay_max", quoted(&show_duration(pool.retry.delay_max)));

    page.section("[pool.options]", format!("pool[{index}].options"));
    for (name, value) in &pool.options {
        page.line(&quoted(name), inline(value));
    }
}

/// A value as TOML writes it in one line.
fn inline(value: &serde_json::Value) -> String {
    use serde_json::Value;
    match value {
        Value::String(text) => quoted(text),
        Value::Array(items) => format!("[{}]", items.iter().map(inline).collect::<Vec<_>>().join(", ")),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| format!("{} = {}", quoted(name), inline(value)));
            format!("{{ {} }}", fields.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

fn launcher(page: &mut Page<'_>, launcher: &Launcher) {
    page.section("[launcher]", "launcher".to_owned());
    page.line("shutdown_grace", quoted(&show_duration(launcher.shutdown_grace)));
    page.line("restart_delay", quoted(&show_duration(launcher.restart_delay)));
    page.line("restart_delay_max", quoted(&show_duration(launcher.restart_delay_max)));
    page.line("quick_failure", quoted(&show_duration(launcher.quick_failure)));
    page.line("max_quick_failures", launcher.max_quick_failures.to_string());
    page.line("poison_deaths", launcher.poison_deaths.to_string());
    let never = || quoted("never");
    let tasks = launcher.recycle_tasks.map_or_else(never, |tasks| tasks.to_string());
    let age = launcher.recycle_age.map_or_else(never, |age| quoted(&show_duration(age)));
    let memory = launcher.recycle_memory.map_or_else(never, |bytes| quoted(&show_size(bytes)));
    page.line("recycle_tasks", tasks);
    page.line("recycle_age", age);
    page.line("recycle_memory", memory);
    page.line("replace", quoted(launcher.replace.name()));
}

fn admin(page: &mut Page<'_>, admin: &Admin) {
    page.section("[admin]", "admin".to_owned());
    page.line("listen", quoted(&admin.listen.map(|it| it.to_string()).unwrap_or_default()));
    page.line("control_exchange", quoted(admin.control_exchange.as_deref().unwrap_or("")));
}

fn telemetry(page: &mut Page<'_>, telemetry: &Telemetry) {
    page.section("[telemetry]", "telemetry".to_owned());
    page.line("otlp_endpoint", quoted(telemetry.otlp_endpoint.as_deref().unwrap_or("")));
    // With a point: a whole number would read back as well, but is not what the default file has.
    page.line("trace_sample", format!("{:?}", telemetry.trace_sample));
}

fn number_or_auto(number: Option<impl ToString>) -> String {
    number.map_or_else(|| quoted("auto"), |number| number.to_string())
}

fn file(path: Option<&Path>) -> String {
    quoted(&path.map(Path::to_string_lossy).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;

    use super::super::{Loaded, load};

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
    fn no_password_is_rendered() {
        let text = r#"broker.url = "amqp://me:hunter2@h1,amqp://me:hunter3@h2""#;
        let shown = load_text(text).effective;
        assert!(shown.contains(r#"["amqp://me:***@h1", "amqp://me:***@h2"]"#), "{shown}");
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
        let defaults = include_str!("../../config/default.toml");
        assert_eq!(keys(&load_text("").effective), keys(defaults));
    }
}
