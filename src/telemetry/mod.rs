//! The subscriber: where log lines go and how they look. Lines go to stderr; stdout is for results
//! and control lines. Spans of tasks and batches are in [`traces`]. Knows nothing of the business.
//!
//! Constant field names: `slot`, `device`, `task.id`, `batch.size`, `duration_ms`.

pub mod traces;

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

use tracing::{Level, Metadata};
use tracing_subscriber::filter::{FilterExt, LevelFilter, filter_fn};
use tracing_subscriber::layer::Filter;
use tracing_subscriber::prelude::*;
use tracing_subscriber::{EnvFilter, Registry, reload};

/// What a service logs without `SCONCE_LOG`: our own events and the libraries' warnings. Not lapin's:
/// what it calls an error (a closed channel, a lost connection) `broker::amqp` handles and logs once,
/// and it would show the bodies of returned messages.
const DEFAULT_FILTER: &str = "warn,sconce=info,lapin=off";
/// The same for a command whose output a person reads.
pub const QUIET: &str = "warn,lapin=off";

/// How lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One line for a person.
    Human,
    /// One JSON object a line.
    Json,
}

/// Installs the subscriber. `filter` as in `SCONCE_LOG` (`debug`, `sconce::worker=trace`); returns
/// what is wrong with it, to be said once logging works.
pub fn start(filter: Option<&str>, format: Format) -> Option<String> {
    let (filter, problem) = match EnvFilter::try_new(filter.unwrap_or(DEFAULT_FILTER)) {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new(DEFAULT_FILTER), Some(error.to_string())),
    };
    let (filter, handle) = reload::Layer::new(shown(filter));
    let lines =
        tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    let lines = match format {
        Format::Human => lines.with_target(false).with_filter(filter).boxed(),
        Format::Json => lines.json().with_filter(filter).boxed(),
    };
    // A second call, as in tests, changes nothing.
    if tracing_subscriber::registry().with(lines).try_init().is_ok() {
        let _ = FILTER.set(Box::new(move |filter| handle.reload(shown(filter)).is_ok()));
    }
    problem
}

/// Writes a line that is a log line already, of another process of ours.
pub fn write_line(line: &str) {
    // With its line feed in one write: others write there too. A stderr that is gone is nobody's loss.
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// Takes another filter in the place of the one before. Written once, by [`start`].
static FILTER: OnceLock<Box<dyn Fn(EnvFilter) -> bool + Send + Sync>> = OnceLock::new();

/// Logs by another filter from now on, spelled as in `SCONCE_LOG`.
///
/// # Errors
/// It is none: what is wrong with it. The one before goes on.
pub fn set_filter(filter: &str) -> Result<(), String> {
    let parsed = EnvFilter::try_new(filter).map_err(|error| error.to_string())?;
    match FILTER.get() {
        Some(replace) if replace(parsed) => Ok(()),
        _ => Err("logging has not been started".to_owned()),
    }
}

/// What `filter` lets through, less what is never shown. Says of itself which levels it has no use for,
/// or nobody could know: the tokenizer writes a line for each character at the lowest, and asking about
/// each of them took longer than its work.
fn shown(filter: EnvFilter) -> impl Filter<Registry> + Send + Sync + 'static {
    let least = filter.max_level_hint().unwrap_or(LevelFilter::TRACE);
    let not_frames = filter_fn(|metadata| !writes_out_frames(metadata)).with_max_level_hint(least);
    filter.and(not_frames)
}

/// At this level lapin writes out every frame, the one with our password included. Whatever the filter
/// says, it is not shown.
fn writes_out_frames(metadata: &Metadata<'_>) -> bool {
    *metadata.level() == Level::TRACE && metadata.target().starts_with("lapin")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_nobody_asked_for_are_not_even_looked_at() {
        for (written, least) in
            [(DEFAULT_FILTER, LevelFilter::INFO), ("warn,sconce=trace", LevelFilter::TRACE)]
        {
            assert_eq!(shown(EnvFilter::new(written)).max_level_hint(), Some(least), "{written}");
        }
    }
}
