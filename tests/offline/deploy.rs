//! What `deploy/` and the compose file say against what sconce is: names of metrics, probes, ports, times. Cheap, and
//! needs nothing installed; `make check-deploy` holds the same files against the programs that read them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sconce::config::{Settings, load};

/// Labels that Prometheus adds by itself.
const PROMETHEUS_LABELS: [&str; 3] = ["job", "instance", "le"];
/// The launcher kills what is left a second after its grace; another for its own end.
const AFTER_THE_GRACE: Duration = Duration::from_secs(2);

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn text(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// What stands behind `key` in its first line, without quotes.
fn value(text: &str, key: &str) -> String {
    let behind =
        |line: &str| line.trim().strip_prefix(key).map(|rest| rest.trim().trim_matches('"').to_owned());
    text.lines().find_map(behind).unwrap_or_else(|| panic!("no {key}"))
}

/// The words in backquotes.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// A metric of `docs/monitoring.md`.
#[derive(Default)]
struct Metric {
    histogram: bool,
    labels: Vec<String>,
    /// By label, where the page lists them.
    values: BTreeMap<String, Vec<String>>,
}

/// The page's two lists: "- `sconce_name` (kind; `label`): meaning" and "- `label` of `sconce_name`: `value`, …".
fn metrics() -> BTreeMap<String, Metric> {
    let page = text("docs/monitoring.md");
    let mut metrics: BTreeMap<String, Metric> = BTreeMap::new();
    let items = page.lines().filter_map(|line| line.strip_prefix("- ")?.split_once(": "));
    for (head, meaning) in items {
        let described = head.split_once(" (").and_then(|(names, rest)| Some((names, rest.split_once("; ")?)));
        if let Some((names, (kind, labels))) = described.filter(|(names, _)| names.starts_with("`sconce_")) {
            for name in quoted(names) {
                let metric = metrics.entry(name).or_default();
                (metric.histogram, metric.labels) = (kind == "histogram", quoted(labels));
            }
        } else if let Some((label, name)) = head.split_once(" of `sconce_") {
            let name = format!("sconce_{}", name.trim_end_matches('`'));
            metrics.entry(name).or_default().values.insert(quoted(label).remove(0), quoted(meaning));
        }
    }
    assert!(
        metrics.len() > 20 && metrics.values().any(|metric| !metric.values.is_empty()),
        "the page has its lists"
    );
    metrics
}

/// The metric that a name in a query means: a histogram's parts have names of their own.
fn find<'a>(metrics: &'a BTreeMap<String, Metric>, name: &str) -> Option<&'a Metric> {
    let part = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
    let whole = part.and_then(|whole| metrics.get(whole)).filter(|metric| metric.histogram);
    whole.or_else(|| metrics.get(name).filter(|metric| !metric.histogram))
}

/// Every name in `text` that begins as a metric's does, with what stands in the braces behind it.
fn named(text: &str) -> Vec<(&str, &str)> {
    let word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let mut found = Vec::new();
    for (at, _) in text.match_indices("sconce_") {
        if text[..at].chars().next_back().is_some_and(word) {
            continue;
        }
        let end = text[at..].find(|letter| !word(letter)).map_or(text.len(), |length| at + length);
        let behind = text[end..].strip_prefix('{').and_then(|rest| rest.split_once('}'));
        found.push((&text[at..end], behind.map_or("", |(inside, _)| inside)));
    }
    found
}

/// Each matcher of a selector: its label, and the values it asks for.
fn matchers(inside: &str) -> Vec<(&str, Vec<&str>)> {
    let mut found = Vec::new();
    let mut rest = inside;
    while let Some((label, behind)) = rest.split_once(['=', '!']) {
        let mut pieces = behind.splitn(3, '"');
        let (asked, after) = (pieces.nth(1).unwrap_or_default(), pieces.next().unwrap_or_default());
        found.push((label.trim_matches([',', ' ']), asked.split('|').collect()));
        rest = after;
    }
    found
}

/// All strings of the dashboard: queries, variables, annotations, texts.
fn strings(value: &serde_json::Value, found: &mut Vec<String>) {
    match value {
        serde_json::Value::String(text) => found.push(text.clone()),
        serde_json::Value::Array(values) => values.iter().for_each(|value| strings(value, found)),
        serde_json::Value::Object(values) => values.values().for_each(|value| strings(value, found)),
        _ => {}
    }
}

/// What the dashboard and the alerts say, each with the file's name.
fn queries() -> Vec<(&'static str, String)> {
    let file = "deploy/grafana/sconce.json";
    let dashboard = serde_json::from_str(&text(file)).expect("the dashboard is JSON");
    let mut found = Vec::new();
    strings(&dashboard, &mut found);
    let mut found: Vec<_> = found.into_iter().map(|text| (file, text)).collect();
    for file in ["deploy/prometheus/alerts.yml", "deploy/prometheus/alerts_test.yml"] {
        found.push((file, text(file)));
    }
    found
}

/// A settings file of `deploy/`, over the defaults.
fn settings(name: &str) -> Settings {
    let written = text(name);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("settings.toml");
    fs::write(&file, &written).expect("written");
    load(&[file], Vec::new(), &[]).unwrap_or_else(|error| panic!("{name}: {error}")).settings
}

/// The port of `[admin] listen` by default.
fn admin_port() -> String {
    let listen = load(&[], Vec::new(), &[]).expect("the defaults").settings.admin.listen;
    listen.expect("an address").port().to_string()
}

/// A time in whole seconds, with or without its `s`.
fn seconds(text: &str) -> Duration {
    Duration::from_secs(text.trim_end_matches('s').parse().unwrap_or_else(|_| panic!("seconds: {text}")))
}

#[test]
fn dashboard_and_alerts_name_no_metric_missing_from_the_page_of_metrics() {
    let metrics = metrics();
    for (file, text) in queries() {
        for (name, _) in named(&text) {
            assert!(find(&metrics, name).is_some(), "{file}: {name} is not in docs/monitoring.md");
        }
    }
}

#[test]
fn dashboard_and_alerts_ask_for_no_label_or_value_that_a_metric_lacks() {
    let metrics = metrics();
    let mut seen = 0;
    for (file, text) in queries() {
        for (name, inside) in named(&text) {
            let metric = find(&metrics, name).unwrap_or_else(|| panic!("{file}: {name}"));
            for (label, asked) in matchers(inside) {
                let known =
                    metric.labels.iter().any(|known| known == label) || PROMETHEUS_LABELS.contains(&label);
                assert!(known, "{file}: {name} has no label {label}");
                let Some(values) = metric.values.get(label) else { continue };
                for asked in asked.into_iter().filter(|asked| !asked.is_empty()) {
                    assert!(
                        values.iter().any(|value| value == asked),
                        "{file}: {name}: no {label} is {asked}"
                    );
                    seen += 1;
                }
            }
        }
    }
    assert!(seen > 30, "values are looked at: {seen}");
}

#[test]
fn every_probe_scrape_and_listener_uses_the_default_port() {
    let port = admin_port();
    let deployment = text("deploy/kubernetes/base/deployment.yaml");
    for (probe, page) in [("startup", "/startupz"), ("readiness", "/readyz"), ("liveness", "/livez")] {
        let (_, probe) = deployment.split_once(&format!("{probe}Probe:")).expect("a probe");
        assert_eq!(value(probe, "path:"), page);
        assert_eq!(value(probe, "port:"), port, "{page}");
    }
    assert_eq!(value(&deployment, "containerPort:"), port);
    assert_eq!(value(&deployment, "prometheus.io/port:"), port);
    assert_eq!(value(&text("deploy/prometheus/prometheus.yml"), "port:"), port);
    let everywhere = format!("0.0.0.0:{port}");
    assert_eq!(value(&text("config/compose/sconce.toml"), "listen ="), everywhere);
    assert!(text("docker-compose.yml").contains(&format!("- \"127.0.0.1:${{ADMIN_PORT:-}}:{port}\"")));
    assert_eq!(value(&text("deploy/kubernetes/base/sconce.toml"), "listen ="), everywhere);
    assert!(text("deploy/systemd/sconce.example.toml").contains(&format!("listen = \"127.0.0.1:{port}\"")));
}

#[test]
fn whoever_stops_sconce_waits_for_longer_than_its_grace() {
    let container = settings("config/compose/sconce.toml");
    let unit = settings("deploy/systemd/sconce.example.toml");
    let pod = settings("deploy/kubernetes/base/sconce.toml");
    let deployment = text("deploy/kubernetes/base/deployment.yaml");
    let compose = text("docker-compose.yml");
    let (_, compose) = compose.split_once("\n  sconce: &sconce\n").expect("the service");
    for (who, grace, waits) in [
        (
            "systemd",
            unit.launcher.shutdown_grace,
            value(&text("deploy/systemd/sconce.service"), "TimeoutStopSec="),
        ),
        (
            "systemd, GPUs",
            unit.launcher.shutdown_grace,
            value(&text("deploy/systemd/gpu.conf"), "TimeoutStopSec="),
        ),
        ("kubernetes", pod.launcher.shutdown_grace, value(&deployment, "terminationGracePeriodSeconds:")),
        ("compose", container.launcher.shutdown_grace, value(compose, "stop_grace_period:")),
    ] {
        let waits = seconds(&waits);
        assert!(grace + AFTER_THE_GRACE <= waits, "{who} waits for {waits:?}, the grace is {grace:?}");
    }
}

#[test]
fn the_settings_files_are_ones_that_sconce_takes() {
    for file in [
        "config/compose/sconce.toml",
        "deploy/systemd/broker.example.toml",
        "deploy/systemd/sconce.example.toml",
    ] {
        settings(file);
    }
    let pod = settings("deploy/kubernetes/base/sconce.toml");
    let scaled = text("deploy/kubernetes/keda/scaledobject.yaml");
    assert_eq!(
        value(&scaled, "queueName:"),
        pod.pools[0].task_queue,
        "what KEDA measures is what is worked on"
    );
}

#[test]
fn compose_overrides_nothing_of_its_settings_file_that_nobody_set() {
    let compose = text("docker-compose.yml");
    let (_, service) = compose.split_once("\n  sconce: &sconce\n").expect("the service");
    assert_eq!(value(service, "SCONCE_CONFIG:"), "/etc/sconce/sconce.toml");
    assert!(service.contains("- ./config/compose:/etc/sconce:ro"), "the folder is mounted, not the file");
    let given = service.lines().filter_map(|line| line.trim().split_once(": "));
    let given: Vec<&str> = given.map(|(key, _)| key).filter(|key| key.starts_with("SCONCE_")).collect();
    assert_eq!(given, ["SCONCE_BROKER__URL", "SCONCE_CONFIG"]);
}

#[test]
fn a_restart_by_systemd_leaves_out_what_does_not_get_better() {
    use sconce::shutdown::Exit;
    let codes = value(&text("deploy/systemd/sconce.service"), "RestartPreventExitStatus=");
    let expected = [Exit::Usage, Exit::Config].map(|exit| exit.code().to_string()).join(" ");
    assert_eq!(codes, expected);
}

#[test]
fn compose_and_make_build_one_image_that_no_registry_is_asked_for() {
    let compose = text("docker-compose.yml");
    let (services, gpu) = compose.split_once("\n  sconce-gpu:\n").expect("the service for GPUs");
    let (_, sconce) = services.split_once("\n  sconce: &sconce\n").expect("the service");
    let built = value(&text("Makefile"), "docker build -t ");
    assert_eq!(built.split(' ').next(), Some(value(sconce, "image:").as_str()));
    // The service for GPUs takes over the policy, but must not take over the name.
    assert_eq!(value(sconce, "pull_policy:"), "never");
    assert_eq!(value(gpu, "<<:"), "*sconce");
    let built = value(&text("Dockerfile.cuda"), "#   docker build -f Dockerfile.cuda -t ");
    assert_eq!(built.split(' ').next(), Some(value(gpu, "image:").as_str()));
}

#[test]
fn what_is_stopped_for_good_stays_down_until_the_unit_of_compose_starts_it() {
    let compose = text("docker-compose.yml");
    let (_, sconce) = compose.split_once("\n  sconce: &sconce\n").expect("the service");
    assert_eq!(value(sconce, "restart:"), "on-failure", "`unless-stopped` would undo `sconce stop`");
    let unit = text("deploy/systemd/sconce-compose.service");
    // Docker starts no container of that policy, neither with the host nor when it is restarted alone.
    assert_eq!(value(&unit, "WantedBy="), "multi-user.target docker.service");
    assert_eq!(value(&unit, "After="), "docker.service", "at a stop, Docker outlives the drain");
    assert_eq!(value(&unit, "RemainAfterExit="), "yes", "else `ExecStop` follows at once");
    assert!(value(&unit, "ExecStop=").contains("docker compose stop"));
    let start = value(&unit, "ExecStart=/usr/bin/docker compose up ");
    for flag in ["--detach", "--no-build", "--no-recreate"] {
        assert!(start.split(' ').any(|given| given == flag), "{flag}: {start}");
    }
}
