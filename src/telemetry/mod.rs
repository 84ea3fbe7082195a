//! The subscriber: where log lines go and how they look. Lines go to stderr; stdout is for results
//! and control lines. Knows nothing of the business.
//!
//! Constant field names: `slot`, `device`, `task.id`, `batch.size`, `duration_ms`.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

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
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_span_events(FmtSpan::NONE)
        .with_ansi(io::stderr().is_terminal());
    // A second call, as in tests, changes nothing.
    let _ = match format {
        Format::Human => builder.with_target(false).try_init(),
        Format::Json => builder.json().try_init(),
    };
    problem
}
