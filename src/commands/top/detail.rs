//! Formats the detail pane: all facts about one slot, as lines of a given width. Does no I/O.

use std::time::Instant;

use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};

use super::figures::{age, bytes, percent, seconds, wrap_at_most};
use crate::client::fleet::SlotHistory;
use crate::commands::ctl::span;
use crate::protocol::stats::Stats;

/// The width of the names on the left, in columns of the terminal.
const NAME_WIDTH: usize = 14;
/// Maximum number of lines of one fact.
const MAX_FACT_LINES: usize = 6;

/// The detail lines of a slot.
pub(super) fn lines(slot: &SlotHistory, columns: usize, now: Instant) -> Vec<Line<'static>> {
    let text_width = columns.saturating_sub(NAME_WIDTH).max(1);
    let mut lines = Vec::new();
    for (name, text) in facts(slot, now) {
        let style = Style::new().fg(match name {
            "problem" | "last failure" => Color::Red,
            _ => Color::Reset,
        });
        for (index, text) in wrap_at_most(&text, text_width, MAX_FACT_LINES).into_iter().enumerate() {
            let name = format!("{:<NAME_WIDTH$}", if index == 0 { name } else { "" });
            lines.push(Line::from(vec![name.dim(), Span::styled(text, style)]));
        }
    }
    lines
}

/// The facts as pairs of name and text. After the state come first the facts that an operator has to act on.
fn facts(slot: &SlotHistory, now: Instant) -> Vec<(&'static str, String)> {
    let (report, no_stats) = (&slot.report, Stats::default());
    let stats = report.stats.as_deref().unwrap_or(&no_stats);
    let state = format!("{} for {}", report.state.name(), span(report.state_ms));
    let state = match slot.missing_since {
        Some(since) => {
            let silent = span(now.saturating_duration_since(since).as_millis() as u64);
            format!("silent for {silent}; at its last answer: {state}")
        }
        None => state,
    };
    let process = report.pid.map(|pid| format!(", process {pid}")).unwrap_or_default();
    let memory =
        slot.resident().map(|it| format!(", {} of memory of its own", bytes(it))).unwrap_or_default();
    let ready = slot.age_ms.map_or_else(|| "not ready".to_owned(), |ms| format!("ready for {}", age(ms)));
    let (reserved, capacity) = (stats.now.kv_reserved, stats.now.kv_tokens);
    let restarts: Vec<String> = report.restarts.iter().map(|(why, times)| format!("{why} {times}")).collect();
    let restarts = if restarts.is_empty() { "none".to_owned() } else { restarts.join(", ") };
    let facts = [
        ("state", Some(state)),
        ("problem", stats.now.problem.clone()),
        ("last failure", report.last_failure.clone()),
        ("active", Some(active_tasks(slot))),
        ("model", Some(report.loaded_model())),
        ("assumed", (!report.assumptions.is_empty()).then(|| report.assumptions.join("; "))),
        ("device", Some(report.device.clone())),
        ("worker", Some(format!("{ready}{process}{memory}"))),
        ("batches", Some(batches(slot))),
        ("restarts", Some(restarts)),
        ("times", Some(times(slot))),
        ("tasks", Some(task_counts(stats))),
        ("queues", (stats.queues.len() > 1).then(|| by_queue(stats))),
        ("kv cache", (capacity > 0).then(|| format!("{reserved} of {capacity} tokens reserved"))),
    ];
    facts.into_iter().filter_map(|(name, text)| Some((name, text?))).collect()
}

fn active_tasks(slot: &SlotHistory) -> String {
    let report = &slot.report;
    let Some(ms) = report.active_ms else { return "no task on the device".to_owned() };
    let more = report.in_flight.saturating_sub(report.active.len() as u64);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{} for {}: {}{more}", report.in_flight, seconds(ms as f64 / 1e3), report.active.join(" "))
}

fn batches(slot: &SlotHistory) -> String {
    let limits = &slot.report.batch;
    let tokens = limits.max_tokens.map(|count| format!("{count} tokens"));
    let inputs = limits.max_requests.map(|count| format!("{count} inputs"));
    let delay = limits.max_delay_ms.map(|ms| format!("{ms} ms of waiting"));
    let texts: Vec<String> = [tokens, inputs, delay].into_iter().flatten().collect();
    let fill = slot.rates.fill.map(|fill| format!("; {} of the tokens used", percent(fill)));
    format!("at most {}{}", texts.join(", "), fill.unwrap_or_default())
}

fn times(slot: &SlotHistory) -> String {
    let dash = || "-".to_owned();
    let queued = slot.rates.queued.map_or_else(dash, seconds);
    let (median, p99) =
        slot.rates.compute.map_or_else(|| (dash(), dash()), |(median, p99)| (seconds(median), seconds(p99)));
    format!("median in the queue {queued}, on the device {median}, 99% {p99}")
}

/// The tasks answered, by the queue that they came from.
fn by_queue(stats: &Stats) -> String {
    let queues = stats.queues.iter().map(|(queue, count)| format!("{count} from {queue}"));
    queues.collect::<Vec<_>>().join(", ")
}

/// Counts tasks by status and reason, then other events such as retries.
fn task_counts(stats: &Stats) -> String {
    let reason = |reason: &str| if reason.is_empty() { String::new() } else { format!(" ({reason})") };
    let answers = stats.answers.iter().map(|it| (it.count, format!("{}{}", it.status, reason(&it.reason))));
    let others = [
        (stats.retried, "retried"),
        (stats.put_off, "put off"),
        (stats.redelivered, "delivered again"),
        (stats.requeued, "handed back"),
        (stats.dead_lettered.values().sum(), "dead-lettered"),
        (stats.lost_sessions, "sessions with the broker lost"),
    ];
    let others = others.into_iter().map(|(count, what)| (count, what.to_owned()));
    let all = answers.chain(others).filter(|(count, _)| *count > 0);
    let all: Vec<String> = all.map(|(count, what)| format!("{count} {what}")).collect();
    if all.is_empty() { "nothing".to_owned() } else { all.join(", ") }
}
