//! Draws the screen, from top to bottom: totals, trouble, pools, slots, the detail of the selected slot, and a line
//! with the keys or a question. The help is drawn on top of it. No line is wider than the screen.

use std::time::Instant;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph};

use super::columns::{Bounds, errors, fit, lines, pool_columns, slot_columns};
use super::detail;
use super::figures::{cut, short, width, wrap_at_most};
use super::screen::Screen;
use crate::client::fleet::{SlotHistory, Total, totals};
use crate::commands::ctl::span;

/// A screen of at least this many lines has room for both pools and detail.
const TALL_LINES: u16 = 32;
/// Minimum number of lines that the detail pane leaves to the table of slots.
const MIN_SLOT_LINES: u16 = 6;

/// The style of stale data: dim, without colours.
const DIM: Style = Style::new().add_modifier(Modifier::DIM);

const HELP: [&str; 21] = [
    "↑↓ j k       select a slot; PgUp PgDn Home End",
    "Enter →      detail: model, memory, last failure, tasks on the device",
    "s S          sort by the next column, reverse the order",
    "/            filter by words of worker, pool, state and device",
    "p d r        pause or resume, drain, restart the slot; y confirms",
    "Esc          closes what is open, then the filter, then quits",
    "",
    "work         slots that take tasks, of all slots",
    "age          since the worker was ready",
    "tasks/s …    rates are means of the last three seconds",
    "busy         share of the time in which the device computed",
    "fill         mean tokens of a batch, as a share of the most allowed",
    "held         tasks delivered and not yet settled",
    "queued       median from a task's publication to its preprocessing",
    "compute      median and 99th percentile of the time on the device",
    "err/s ↻      tasks answered with an error; restarts of the worker",
    "silent       the launcher does not answer; removed after 30 s",
    "queue        ready messages; also background, retry and dead, if the",
    "             settings here have this pool with this task queue",
    "             (a dead-letter queue that pools share counts at each)",
    "? -          a queue that cannot be inspected; unknown, or none",
];

/// Draws the screen. `offset` is the first row of slots that is shown; it is changed so that the selected slot is
/// visible.
pub(super) fn draw(frame: &mut Frame<'_>, screen: &Screen, offset: &mut usize, now: Instant) {
    let area = frame.area();
    let columns = usize::from(area.width);
    let totals = totals(&screen.history, &screen.pools);
    let selected = screen.list.selected(&screen.history).filter(|_| screen.has_detail);
    let trouble = trouble(screen, columns);
    let detail = selected.map(|slot| detail::lines(slot, columns, now)).unwrap_or_default();
    let pools_height = match area.height {
        height if !detail.is_empty() && height < TALL_LINES => 0,
        height => (totals.len() as u16 + 2).min((height / 3).max(3)),
    };
    let rest = area.height.saturating_sub(2 + trouble.len() as u16 + pools_height);
    let detail_height = if detail.is_empty() {
        0
    } else {
        (detail.len() as u16 + 1).min(rest.saturating_sub(MIN_SLOT_LINES))
    };
    let heights = [1, trouble.len() as u16, pools_height].map(Constraint::Length).into_iter();
    let heights =
        heights.chain([Constraint::Fill(1), Constraint::Length(detail_height), Constraint::Length(1)]);
    let areas = Layout::vertical(heights).split(area);
    frame.render_widget(totals_line(screen, &totals, columns, now), areas[0]);
    frame.render_widget(Paragraph::new(trouble), areas[1]);
    let is_stale = screen.stale(now).is_some();
    pool_table(frame, areas[2], &totals, is_stale);
    slot_table(frame, areas[3], screen, is_stale, offset);
    if let Some(slot) = selected {
        let rule = rule(&slot.key.worker, "Esc closes", columns);
        block(frame, areas[4], rule, None, truncated(detail, usize::from(detail_height).saturating_sub(1)));
    }
    frame.render_widget(bottom_line(screen, columns, now), areas[5]);
    if screen.has_help {
        draw_help(frame);
    }
}

/// The line of totals. Parts that do not fit are left out; errors and the age of stale data have precedence.
fn totals_line(screen: &Screen, totals: &[Total], columns: usize, now: Instant) -> Line<'static> {
    // Not `Iterator::sum`: without totals it is -0.0, and the minus sign would be shown.
    let sum = |field: fn(&Total) -> f64| totals.iter().map(field).fold(0.0, |sum, value| sum + value);
    let count = |field: fn(&Total) -> usize| totals.iter().map(field).sum::<usize>();
    let error_rate = sum(|it| it.errors);
    let stale = screen.stale(now).map(|age| format!(" stale for {} ", span(age.as_millis() as u64)));
    let slots = format!(" {} of {} slots work", count(|it| it.working), count(|it| it.slots));
    let (was_polled, is_stale) = (screen.history.polled_at.is_some(), stale.is_some());
    // The numbers are ranks, as in `fitted`.
    let (rank, launchers) = match screen.history.launchers {
        0 if was_polled => (2, " no launcher answers".yellow().bold()),
        0 => (2, " waiting for answers".into()),
        1 => (6, " 1 launcher".into()),
        launchers => (6, format!(" {launchers} launchers").into()),
    };
    let parts = [
        (0, "sconce top".bold()),
        (0, stale.unwrap_or_default().white().on_red().bold()),
        (7, format!(" {}", screen.broker).into()),
        (rank, launchers),
        (4, slots.into()),
        (3, format!(" {} tasks/s", short(sum(|it| it.tasks))).into()),
        (5, format!(" {} tok/s", short(sum(|it| it.tokens))).into()),
        (1, Span::styled(format!(" {} err/s", errors(error_rate).content), errors(error_rate).style)),
    ];
    // Stale parts are dim, so that they do not look current.
    let parts = parts.map(|(rank, part)| (rank, if is_stale && rank > 0 { part.style(DIM) } else { part }));
    let shown = parts.into_iter().filter(|(_, part)| !part.content.is_empty());
    fitted(shown.collect(), columns)
}

/// A line of the parts that fit, in their order, with one column between them. Each part comes with its rank; the part
/// with the lowest rank has precedence.
fn fitted(parts: Vec<(u8, Span<'static>)>, columns: usize) -> Line<'static> {
    let bounds = |(rank, part): &(u8, Span<'_>)| Bounds { rank: *rank, min: part.width(), max: part.width() };
    let widths = fit(&parts.iter().map(bounds).collect::<Vec<_>>(), columns);
    let shown = parts.into_iter().zip(widths).filter(|(_, width)| width.is_some());
    let mut spans: Vec<Span<'static>> = shown.flat_map(|((_, part), _)| [part, " ".into()]).collect();
    spans.pop();
    Line::from(spans)
}

/// Why data cannot be read, in at most two lines.
fn trouble(screen: &Screen, columns: usize) -> Vec<Line<'static>> {
    let Some(text) = screen.trouble.as_ref().or(screen.history.error.as_ref()) else { return Vec::new() };
    wrap_at_most(text, columns, 2).into_iter().map(|text| Line::from(text).red().bold()).collect()
}

fn pool_table(frame: &mut Frame<'_>, area: Rect, totals: &[Total], is_stale: bool) {
    let columns = usize::from(area.width);
    let (header, rows) = lines(&pool_columns(totals, columns), totals, columns);
    let rows = rows.into_iter().map(|row| if is_stale { dim(row) } else { row }).collect();
    let rows = truncated(rows, usize::from(area.height).saturating_sub(2));
    block(frame, area, rule("pools", "", columns), Some(header), rows);
}

/// At most `max_lines` lines. If there are more, the last line says how many are left out.
fn truncated(mut lines: Vec<Line<'static>>, max_lines: usize) -> Vec<Line<'static>> {
    if lines.len() > max_lines && max_lines > 0 {
        let more = lines.len() + 1 - max_lines;
        lines.truncate(max_lines - 1);
        lines.push(Line::from(format!("… {more} more")).dim());
    }
    lines
}

fn slot_table(frame: &mut Frame<'_>, area: Rect, screen: &Screen, is_stale: bool, offset: &mut usize) {
    let columns = usize::from(area.width);
    let slots = screen.list.slots(&screen.history);
    let selected = screen.list.selected_row();
    let room = usize::from(area.height).saturating_sub(2).max(1);
    // Scrolls no further than the selected row requires, and leaves no room empty below the last row.
    let lowest_offset = (selected + 1).saturating_sub(room);
    *offset = (*offset).clamp(lowest_offset, selected).min(slots.len().saturating_sub(room));
    let longest = slots.iter().map(|slot| width(&slot.key.worker)).max().unwrap_or_default();
    let shown: Vec<&SlotHistory> = slots.iter().copied().skip(*offset).take(room).collect();
    let (header, rows) = lines(&slot_columns(&screen.list, longest, columns), &shown, columns);
    let styled = |(slot, (index, line)): (&&SlotHistory, (usize, Line<'static>))| {
        let line = if is_stale || slot.missing_since.is_some() { dim(line) } else { line };
        if *offset + index == selected { line.reversed() } else { line }
    };
    let rows: Vec<Line<'static>> = shown.iter().zip(rows.into_iter().enumerate()).map(styled).collect();
    let total = screen.history.slots.len();
    let title = match screen.list.filter() {
        "" => "slots".to_owned(),
        filter => format!("slots with /{filter}: {} of {total}", slots.len()),
    };
    let position = if shown.len() < slots.len() {
        format!("{}–{} of {}", *offset + 1, *offset + shown.len(), slots.len())
    } else {
        String::new()
    };
    block(frame, area, rule(&title, &position, columns), Some(header), rows);
}

fn dim(line: Line<'static>) -> Line<'static> {
    Line::from(line.spans.into_iter().map(|span| span.style(DIM)).collect::<Vec<_>>())
}

/// A horizontal rule across the screen, with a title and a text at its right end.
fn rule(title: &str, right: &str, columns: usize) -> Line<'static> {
    let title = cut(&format!("── {title} "), columns);
    let right = if right.is_empty() { String::new() } else { format!(" {right} ──") };
    let fill = columns.saturating_sub(width(&title) + width(&right));
    let right = if width(&title) + width(&right) <= columns { right } else { String::new() };
    Line::from(format!("{title}{}{right}", "─".repeat(fill))).dark_gray()
}

/// Draws a rule, a header if there is one, and rows.
fn block(
    frame: &mut Frame<'_>,
    area: Rect,
    rule: Line<'static>,
    header: Option<Line<'static>>,
    rows: Vec<Line<'static>>,
) {
    let lines: Vec<Line<'static>> = [rule].into_iter().chain(header).chain(rows).collect();
    frame.render_widget(Paragraph::new(lines), area);
}

/// A question or a notice, else the filter that is being typed, else the keys.
fn bottom_line(screen: &Screen, columns: usize, now: Instant) -> Line<'static> {
    if let Some(text) = screen.foot(now) {
        return Line::from(cut(&text, columns)).yellow().bold();
    }
    if screen.is_typing {
        let text = format!("/{}▏  Enter keeps the filter, Esc clears it", screen.list.filter());
        return Line::from(cut(&text, columns)).yellow();
    }
    let keys = [
        (2, "↑↓ select"),
        (3, "Enter detail"),
        (4, "s S sort"),
        (5, "/ filter"),
        (6, "p pause/resume"),
        (7, "d drain"),
        (8, "r restart"),
        (0, "? help"),
        (1, "q quit"),
    ];
    fitted(keys.map(|(rank, key)| (rank, format!("{key} ").dark_gray())).to_vec(), columns)
}

fn draw_help(frame: &mut Frame<'_>) {
    let area = frame.area();
    let longest = HELP.iter().map(|line| width(line)).max().unwrap_or_default() as u16;
    let (columns, rows) = ((longest + 4).min(area.width), (HELP.len() as u16 + 2).min(area.height));
    let popup = Rect::new((area.width - columns) / 2, (area.height - rows) / 2, columns, rows);
    let text_width = usize::from(columns.saturating_sub(4));
    let lines = HELP.iter().map(|line| Line::from(format!(" {}", cut(line, text_width)))).collect();
    let lines = truncated(lines, usize::from(rows.saturating_sub(2)));
    frame.render_widget(Clear, popup);
    frame.render_widget(
        Paragraph::new(lines).block(Block::bordered().title(" help: ? or Esc closes ")),
        popup,
    );
}
