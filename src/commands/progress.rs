//! The progress bar on stderr: rate and time left; hidden where stderr is not a terminal.

use std::fmt::Write;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// A bar to `total`, or a counter where that is unknown. An earlier run did `done` of it.
pub(super) fn bar(total: Option<u64>, done: u64, what: &str) -> ProgressBar {
    let template = match total {
        Some(_) => "{prefix} [{bar:32}] {human_pos}/{human_len}  {rate}  {eta} left  {msg}",
        None => "{prefix} {spinner} {human_pos}  {rate}  {msg}",
    };
    let rate = |state: &ProgressState, out: &mut dyn Write| {
        let _ = write!(out, "{:.1}/s", state.per_sec());
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(8))
        .with_style(style.with_key("rate", rate).progress_chars("=> "))
        .with_prefix(what.to_owned())
        .with_position(done);
    // Otherwise the work of an earlier run would count in this one's rate.
    bar.reset_eta();
    bar
}
