//! The subscriber of log events: decides where log lines go, their format and their filter. They go to stderr; stdout
//! is for results and control lines. Spans of tasks are in [`traces`].
//!
//! Constant field names: `slot`, `device`, `task.id`, `batch.size`, `duration_ms`.

mod panics;
mod throttle;
pub mod traces;

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

use tracing::Level;
use tracing_subscriber::filter::{FilterExt, LevelFilter, filter_fn};
use tracing_subscriber::layer::Filter;
use tracing_subscriber::prelude::*;
use tracing_subscriber::{EnvFilter, Registry, reload};

pub use self::throttle::Throttle;

/// The filter of a service without `SCONCE_LOG`: our own events and the libraries' warnings.
const DEFAULT_FILTER: &str = "warn,sconce=info";
/// The filter of a command whose output a person reads.
pub const QUIET: &str = "warn";

/// Libraries whose events are never shown, whatever the filter says. At WARN lapin prints every returned message as a
/// list of bytes, and at TRACE every frame, including the one with our password. What it logs as an error (a closed
/// channel, a lost connection) is handled and logged once by `broker::amqp`. symphonia warns of each broken packet of a
/// recording, and a requester may send any number of these; the task's error has what matters.
const NOT_SHOWN: [&str; 3] = ["amq_protocol", "lapin", "symphonia"];

/// Libraries whose warnings and errors are shown, but no other events, whatever the filter says. The other events
/// contain the data that the library handles: tokenizers prints each character of a text, ureq prints addresses and
/// headers (a collector's key, a signed address of a model), OpenTelemetry the collector's answers, rustls its
/// handshakes. All libraries that log are listed, so that new releases need no review of each log line.
const WARNINGS_ONLY: [&str; 16] = [
    "axum",
    "candle_transformers",
    "hf_hub",
    "hickory",
    "hyper",
    "iana_time_zone",
    "jiff",
    "jni",
    "mio",
    "opentelemetry",
    "quinn",
    "reqwest",
    "rustls",
    "tokenizers",
    "tower",
    "ureq",
];

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One line of text for a person.
    Human,
    /// One JSON object a line.
    Json,
}

/// Installs the subscriber, and the hook that prints panics. `filter` is spelled as in `SCONCE_LOG` (`debug`, `sconce::worker=trace`).
///
/// # Errors
/// What is wrong with the filter; then nothing is installed.
pub fn start(filter: Option<&str>, format: Format) -> Result<(), String> {
    let written = filter.unwrap_or(DEFAULT_FILTER);
    let filter = parse_filter(written)?;
    let (filter, handle) = reload::Layer::new(without_secrets(filter));
    let lines =
        tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    let lines = match format {
        Format::Human => lines.with_target(false).with_filter(filter).boxed(),
        Format::Json => lines.json().with_filter(filter).boxed(),
    };
    // A second call, as in tests, changes nothing.
    if tracing_subscriber::registry().with(lines).try_init().is_ok() {
        let _ = REPLACE_FILTER.set(Box::new(move |filter| handle.reload(without_secrets(filter)).is_ok()));
        let _ = INITIAL_FILTER.set(written.to_owned());
        panics::throttle();
    }
    Ok(())
}

/// Parses a filter, and checks that its levels and targets exist. The library takes any word for a target, so a
/// mistyped level would otherwise silence everything.
fn parse_filter(written: &str) -> Result<EnvFilter, String> {
    const LEVELS: &str = "off, error, warn, info, debug or trace";
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    for directive in written.split(',').map(str::trim).filter(|directive| !directive.is_empty()) {
        let (target, level) = match directive.split_once('=') {
            Some((target, level)) => (target, Some(level)),
            None if is_level(directive) => continue,
            None => (directive, None),
        };
        // Directives with spans and fields may contain any characters, and are left to the library.
        if directive.contains('[') {
            continue;
        }
        if let Some(level) = level.filter(|level| !is_level(level)) {
            return Err(format!("{directive:?}: {level:?} is not a level; the levels are {LEVELS}"));
        }
        if !is_known(target) {
            return Err(format!(
                "{directive:?}: {target:?} is neither a level ({LEVELS}) nor a target that logs in this \
                 program, such as sconce or sconce::worker"
            ));
        }
    }
    EnvFilter::try_new(written).map_err(|error| format!("{written:?}: {error}"))
}

/// Whether a part of this program logs under this target: sconce, a library, or the program itself, which may contain
/// models of its own.
fn is_known(target: &str) -> bool {
    let program = std::env::current_exe().ok();
    let program = program.as_ref().and_then(|path| path.file_stem()?.to_str()).unwrap_or_default();
    let own_crates = ["sconce", &program.replace('-', "_")];
    [&own_crates[..], &NOT_SHOWN, &WARNINGS_ONLY].iter().any(|crates| belongs_to(crates, target))
}

/// Writes a log line that another process of this service has formatted.
pub fn write_line(line: &str) {
    // The line and its line feed are one write, since other processes write to stderr too. Errors are ignored.
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// A function that replaces the filter. Set once, by [`start`].
static REPLACE_FILTER: OnceLock<Box<dyn Fn(EnvFilter) -> bool + Send + Sync>> = OnceLock::new();

/// The filter that logging was started with.
static INITIAL_FILTER: OnceLock<String> = OnceLock::new();

/// Changes the log filter, spelled as in `SCONCE_LOG`; `default` restores the one that logging was started with.
///
/// # Errors
/// What is wrong with the filter; the previous one stays in force.
pub fn set_filter(filter: &str) -> Result<(), String> {
    let filter = if filter == "default" {
        INITIAL_FILTER.get().map_or(DEFAULT_FILTER, String::as_str)
    } else {
        filter
    };
    let filter = parse_filter(filter)?;
    match REPLACE_FILTER.get() {
        Some(replace) if replace(filter) => Ok(()),
        _ => Err("logging has not been started".to_owned()),
    }
}

/// Narrows `filter` to the events that cannot contain a message or a password. Reports the filter's lowest level to
/// `tracing`, so that events below it cost nothing: the tokenizer logs each character at TRACE, and checking
/// each of these events took longer than tokenizing.
fn without_secrets(filter: EnvFilter) -> impl Filter<Registry> + Send + Sync + 'static {
    let lowest_level = filter.max_level_hint().unwrap_or(LevelFilter::TRACE);
    let is_harmless = filter_fn(|metadata| !may_hold_secrets(metadata.target(), *metadata.level()));
    filter.and(is_harmless.with_max_level_hint(lowest_level))
}

/// Whether an event of this target and level may contain a message's body or headers, or a password.
fn may_hold_secrets(target: &str, level: Level) -> bool {
    belongs_to(&NOT_SHOWN, target) || (level > Level::WARN && belongs_to(&WARNINGS_ONLY, target))
}

/// Whether `target` is a path in one of these crates or in a related crate: `hyper::proto`, `hyper_util::rt`;
/// OpenTelemetry's targets look like `opentelemetry-otlp`.
fn belongs_to(crates: &[&str], target: &str) -> bool {
    let continues_name = |rest: &str| rest.starts_with(char::is_alphanumeric);
    crates.iter().any(|name| target.strip_prefix(*name).is_some_and(|rest| !continues_name(rest)))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use super::*;

    #[test]
    fn a_mistyped_level_or_target_is_refused_by_name() {
        for (written, named) in [
            ("debgu", "\"debgu\" is neither a level"),
            ("sconce=inof", "\"inof\" is not a level"),
            ("warn,scnoce=info", "\"scnoce\""),
            ("sconcerto=info", "\"sconcerto\""),
        ] {
            let error = parse_filter(written).err().unwrap_or_default();
            assert!(error.contains(named), "{written}: {error}");
        }
        for good in [
            "",
            "debug",
            "warn,sconce=info",
            "sconce::worker=trace",
            "sconce",
            "lapin=off",
            "hyper_util=warn",
        ] {
            assert!(parse_filter(good).is_ok(), "{good}");
        }
    }

    #[test]
    fn events_below_the_lowest_level_are_not_checked() {
        for (written, lowest) in
            [(DEFAULT_FILTER, LevelFilter::INFO), ("warn,sconce=trace", LevelFilter::TRACE)]
        {
            assert_eq!(without_secrets(EnvFilter::new(written)).max_level_hint(), Some(lowest), "{written}");
        }
    }

    /// An event of each target at each level.
    macro_rules! say {
        ($($target:literal)*) => {$(
            tracing::error!(target: $target, "said");
            tracing::warn!(target: $target, "said");
            tracing::info!(target: $target, "said");
            tracing::debug!(target: $target, "said");
            tracing::trace!(target: $target, "said");
        )*};
    }

    #[test]
    fn no_filter_makes_a_library_log_messages_or_passwords() {
        for filter in ["trace", "off,lapin=trace,amq_protocol_tcp=trace,ureq=trace,sconce=trace,own=trace"] {
            let mut file = tempfile::tempfile().unwrap();
            let lines = tracing_subscriber::fmt::layer()
                .with_writer(file.try_clone().unwrap())
                .with_ansi(false)
                .without_time()
                .with_filter(without_secrets(EnvFilter::new(filter)));
            tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
                say!("lapin::returned_messages" "amq_protocol_tcp" "ureq::unit" "sconce::worker" "own");
            });
            file.rewind().unwrap();
            let mut written = String::new();
            file.read_to_string(&mut written).unwrap();
            let mut seen: Vec<_> = written.lines().map(str::trim).collect();
            assert_eq!(
                seen.drain(..2).collect::<Vec<_>>(),
                ["ERROR ureq::unit: said", "WARN ureq::unit: said"]
            );
            let all = ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"];
            let ours = ["sconce::worker", "own"].map(|it| all.map(|level| format!("{level} {it}: said")));
            assert_eq!(seen, ours.concat(), "{filter}");
        }
    }

    /// `launcher::logs` reads these lines, and inserts a slot before the message.
    #[test]
    fn a_line_of_json_has_its_keys_in_order() {
        let mut file = tempfile::tempfile().unwrap();
        let lines = tracing_subscriber::fmt::layer().with_writer(file.try_clone().unwrap()).json();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
            let error = "it \"broke\"";
            tracing::warn!(target: "t", slot = "e/0", task.id = 7, share = 0.5, error, "a [1] \n");
        });
        file.rewind().unwrap();
        let mut line = String::new();
        file.read_to_string(&mut line).unwrap();
        let (begin, rest) = line.split_once(",\"level\"").unwrap();
        assert!(begin.starts_with("{\"timestamp\":\"2") && begin.ends_with("Z\""), "{begin}");
        let expected = r#":"WARN","fields":{"message":"a [1] \n","slot":"e/0","task.id":7,"share":0.5,"error":"it \"broke\""},"target":"t"}"#;
        assert_eq!(rest, format!("{expected}\n"));
    }

    #[test]
    fn every_library_that_can_log_is_listed() {
        let packages = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.lock")).split("[[package]]");
        let mut listed = 0;
        for package in packages.skip(1) {
            let dependency =
                |line: &str| line.strip_prefix(" \"")?.split([' ', '"']).next().map(str::to_owned);
            if !package.lines().filter_map(dependency).any(|it| it == "log" || it == "tracing") {
                continue;
            }
            let name = package.lines().find_map(|line| line.strip_prefix("name = ")).unwrap();
            let name = name.trim_matches('"').replace('-', "_");
            if !["sconce", "tracing_log", "tracing_subscriber"].contains(&name.as_str()) {
                assert!(may_hold_secrets(&name, Level::INFO), "{name} logs: add it to WARNINGS_ONLY");
                listed += 1;
            }
        }
        assert!(listed >= 10, "{listed} packages that log");
    }
}
