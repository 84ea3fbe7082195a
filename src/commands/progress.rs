//! The progress bar on stderr, with rate and time left. It is hidden where stderr is not a terminal.

use std::fmt::Write;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// A bar up to `total`, or a counter if the total is unknown. It starts at `done`, the work of an earlier run.
pub(super) fn bar(total: Option<u64>, done: u64, label: &str) -> ProgressBar {
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
        .with_prefix(label.to_owned())
        .with_position(done);
    // Otherwise this run's rate would include the work of an earlier run.
    bar.reset_eta();
    bar
}
