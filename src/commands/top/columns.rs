//! Decides which columns of a table fit on the screen, and formats the table's lines. A column that does not fit is
//! left out as a whole. Defines the columns of pools and slots.

use std::ops::RangeInclusive;

use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};

use super::figures::{self, age, bar, bytes, count, cut, cut_middle, percent, seconds, short};
use super::list::List;
use crate::client::fleet::{Depth, SlotHistory, Total};
use crate::protocol::admin::State;

/// The width that one part of a line may have, in columns of the terminal.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// The part with the lowest rank gets its columns first.
    pub(super) rank: u8,
    pub(super) min: usize,
    /// The part grows up to this width if columns are left.
    pub(super) max: usize,
}

/// The widths of parts with one column between them; none for those that do not fit into `width`.
pub(super) fn fit(bounds: &[Bounds], width: usize) -> Vec<Option<usize>> {
    let mut order: Vec<usize> = (0..bounds.len()).collect();
    order.sort_by_key(|index| bounds[*index].rank);
    let mut widths = vec![None; bounds.len()];
    // Each part takes one column more, to separate it from the next. The last part needs none, so one is added.
    let mut free = width + 1;
    for index in &order {
        if bounds[*index].min < free {
            free -= bounds[*index].min + 1;
            widths[*index] = Some(bounds[*index].min);
        }
    }
    for index in &order {
        if let Some(width) = &mut widths[*index] {
            let more = bounds[*index].max.saturating_sub(*width).min(free);
            (*width, free) = (*width + more, free - more);
        }
    }
    widths
}

/// Formats a row's cell in a column. The number is the width of the column.
type Cell<T> = fn(&T, usize) -> Span<'static>;

/// A column of a table whose rows are of `T`.
pub(super) struct Column<T> {
    title: String,
    /// Numbers are aligned to the right, texts to the left.
    is_number: bool,
    bounds: Bounds,
    cell: Cell<T>,
}

impl<T> Column<T> {
    fn text(title: &str, rank: u8, width: RangeInclusive<usize>, cell: Cell<T>) -> Self {
        let bounds = Bounds { rank, min: *width.start(), max: *width.end() };
        Self { title: title.to_owned(), is_number: false, bounds, cell }
    }

    fn number(title: &str, rank: u8, width: usize, cell: Cell<T>) -> Self {
        let bounds = Bounds { rank, min: width, max: width };
        Self { title: title.to_owned(), is_number: true, bounds, cell }
    }
}

/// The lines of a table: its header, and one line for each row.
pub(super) fn lines<T>(
    columns: &[Column<T>],
    rows: &[T],
    width: usize,
) -> (Line<'static>, Vec<Line<'static>>) {
    let bounds: Vec<Bounds> = columns.iter().map(|it| it.bounds).collect();
    let widths = fit(&bounds, width);
    let line = |content: &dyn Fn(&Column<T>, usize) -> Span<'static>| {
        let shown = columns.iter().zip(&widths).filter_map(|(column, width)| Some((column, (*width)?)));
        let cells = shown.map(|(column, width)| padded(content(column, width), column.is_number, width));
        let mut spans: Vec<Span<'static>> = cells.flat_map(|cell| [cell, " ".into()]).collect();
        spans.pop();
        Line::from(spans)
    };
    let header = line(&|column, _| column.title.clone().bold());
    (header, rows.iter().map(|row| line(&|column, width| (column.cell)(row, width))).collect())
}

/// The cell, cut or padded to `width`: a number on the left, a text on the right.
fn padded(cell: Span<'static>, is_number: bool, width: usize) -> Span<'static> {
    let text = cut(&cell.content, width);
    let blank = " ".repeat(width - figures::width(&text));
    let text = if is_number { format!("{blank}{text}") } else { format!("{text}{blank}") };
    Span::styled(text, cell.style)
}

/// The columns of slots. `longest` is the width of the longest worker's name, and `width` is the width of the screen.
pub(super) fn slot_columns<'a>(list: &List, longest: usize, width: usize) -> Vec<Column<&'a SlotHistory>> {
    let mut columns: Vec<Column<&'a SlotHistory>> = vec![
        Column::text("worker", 0, name_width(longest, width), |it, width| {
            cut_middle(&it.key.worker, width).into()
        }),
        Column::text("state", 1, 11..=11, |it, _| state(it)),
        Column::number("age", 6, 6, |it, _| or_dash(it.age_ms.map(age))),
        Column::number("tasks/s", 3, 8, |it, _| short(it.rates.tasks).into()),
        Column::number("tok/s", 5, 6, |it, _| short(it.rates.tokens).into()),
        Column::number("busy", 4, 5, |it, _| percent(it.rates.busy).into()),
        Column::text("", 9, 6..=12, |it, width| bar(it.rates.busy, width).green()),
        Column::number("fill", 11, 5, |it, _| or_dash(it.rates.fill.map(percent))),
        Column::number("held", 7, 5, |it, _| count(it.held()).into()),
        Column::number("queued", 12, 6, |it, _| or_dash(it.rates.queued.map(seconds))),
        Column::number("compute", 13, 11, |it, _| or_dash(it.rates.compute.map(median_and_p99))),
        Column::number("err/s", 2, 6, |it, _| errors(it.rates.errors)),
        Column::number("↻", 8, 3, |it, _| restarts(it.restarts())),
        Column::text("device", 14, 13..=40, |it, _| it.report.device.clone().into()),
        Column::number("memory", 15, 9, |it, _| or_dash(it.resident().map(bytes))),
        Column::text("model", 16, 20..=60, |it, _| it.report.model.clone().into()),
    ];
    for column in &mut columns {
        let mark = list.mark(&column.title);
        column.title.push_str(mark);
    }
    columns
}

/// The range of the width of a column of names. The maximum is the width of the longest name. The minimum is the same,
/// but at most a quarter of the line. Both are at least 6, the width of the title `worker`.
fn name_width(longest: usize, width: usize) -> RangeInclusive<usize> {
    let longest = longest.max(6);
    longest.min(width / 4).max(6)..=longest
}

fn median_and_p99((median, p99): (f64, f64)) -> String {
    format!("{}/{}", seconds(median), seconds(p99))
}

/// The columns of pools.
pub(super) fn pool_columns(totals: &[Total], width: usize) -> Vec<Column<Total>> {
    let longest = totals.iter().map(|it| figures::width(&it.pool)).max().unwrap_or_default();
    let has_background = totals.iter().any(|it| it.background != Depth::NoQueue);
    vec![
        Column::text("pool", 0, name_width(longest, width), |it, _| it.pool.clone().into()),
        Column::number("work", 1, 7, |it, _| work(it)),
        Column::number("tasks/s", 7, 7, |it, _| short(it.tasks).into()),
        Column::number("tok/s", 8, 5, |it, _| short(it.tokens).into()),
        Column::number("busy", 9, 4, |it, _| percent(it.busy).into()),
        Column::text("", 11, 6..=12, |it, width| bar(it.busy, width).green()),
        Column::number("held", 10, 5, |it, _| count(it.held).into()),
        Column::number("err/s", 2, 5, |it, _| errors(it.errors)),
        Column::number("queue", 3, 5, |it, _| depth(it.waiting)),
        Column::number("background", if has_background { 6 } else { 14 }, 10, |it, _| depth(it.background)),
        Column::number("retry", 5, 5, |it, _| depth(it.retry)),
        Column::number("dead", 4, 5, |it, _| dead(it.dead)),
        Column::number("consumers", 12, 9, |it, _| {
            or_dash(Some(it.consumers.map_or_else(|| "?".to_owned(), |it| count(it.into()))))
        }),
        Column::text("task queue", 13, 12..=60, |it, _| task_queues(it).into()),
    ]
}

/// The pool's queue, or each of several with its depth.
fn task_queues(total: &Total) -> String {
    if total.by_queue.is_empty() {
        return total.queue.clone();
    }
    let queues = total.by_queue.iter().map(|(name, waiting)| format!("{name} {}", depth(*waiting).content));
    queues.collect::<Vec<_>>().join(", ")
}

fn work(total: &Total) -> Span<'static> {
    let text = format!("{}/{}", total.working, total.slots);
    if total.working < total.slots { text.yellow() } else { text.into() }
}

fn dead(letters: Depth) -> Span<'static> {
    let text = depth(letters);
    if matches!(letters, Depth::Messages(1..)) { text.red() } else { text }
}

fn or_dash(text: Option<String>) -> Span<'static> {
    text.map_or_else(|| "-".into(), Span::from)
}

fn depth(depth: Depth) -> Span<'static> {
    match depth {
        Depth::NoQueue => "-".into(),
        Depth::Unknown => "?".into(),
        Depth::Messages(messages) => count(messages).into(),
    }
}

/// Errors per second, red if there are any.
pub(super) fn errors(rate: f64) -> Span<'static> {
    let text = short(rate);
    if rate > 0.0 { text.red().bold() } else { text.into() }
}

fn restarts(times: u64) -> Span<'static> {
    match times {
        0..1_000 => times.to_string().into(),
        _ => format!("{}k", (times / 1_000).min(99)).into(),
    }
}

fn state(slot: &SlotHistory) -> Span<'static> {
    let colour = match slot.report.state {
        _ if slot.missing_since.is_some() => Color::DarkGray,
        State::Ready | State::Busy if slot.works() => Color::Green,
        State::Ready | State::Busy | State::Failed | State::Quarantined => Color::Red,
        State::Starting | State::Loading | State::Paused | State::Draining => Color::Yellow,
        State::Stopped => Color::DarkGray,
    };
    Span::styled(slot.state(), Style::new().fg(colour))
}
