//! Decides which columns of a table fit, and writes its lines. A column is left out whole where it does not fit.
//! Columns of pools and of slots, with what is in their cells.

use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};

use super::figures::{self, age, bar, bytes, count, cut, cut_middle, percent, seconds, short, spark};
use super::list::List;
use crate::client::fleet::Slot;
use crate::client::fleet::{Depth, Total};
use crate::protocol::admin::State;

/// What one part of a line needs.
#[derive(Clone, Copy)]
pub(super) struct Room {
    /// The part with the lowest rank gets its room first.
    pub(super) rank: u8,
    pub(super) least: usize,
    /// It grows up to this many columns where there is room left.
    pub(super) most: usize,
}

/// The widths of parts with one column between them; none for those that do not fit.
pub(super) fn fit(rooms: &[Room], width: usize) -> Vec<Option<usize>> {
    let mut order: Vec<usize> = (0..rooms.len()).collect();
    order.sort_by_key(|at| rooms[*at].rank);
    let mut widths = vec![None; rooms.len()];
    // As if there was a column after the last part too.
    let mut left = width + 1;
    for at in &order {
        if rooms[*at].least < left {
            left -= rooms[*at].least + 1;
            widths[*at] = Some(rooms[*at].least);
        }
    }
    for at in &order {
        if let Some(width) = &mut widths[*at] {
            let more = rooms[*at].most.saturating_sub(*width).min(left);
            (*width, left) = (*width + more, left - more);
        }
    }
    widths
}

/// What a column shows of a row, in at most so many columns of the terminal.
type Cell<T> = fn(&T, usize) -> Span<'static>;

/// A column of a table whose rows are of `T`.
pub(super) struct Column<T> {
    title: String,
    is_number: bool,
    room: Room,
    cell: Cell<T>,
}

impl<T> Column<T> {
    fn text(title: &str, rank: u8, (least, most): (usize, usize), cell: Cell<T>) -> Self {
        Self { title: title.to_owned(), is_number: false, room: Room { rank, least, most }, cell }
    }

    fn number(title: &str, rank: u8, width: usize, cell: Cell<T>) -> Self {
        let room = Room { rank, least: width, most: width };
        Self { title: title.to_owned(), is_number: true, room, cell }
    }
}

/// The lines of a table: its header, and a line for each row.
pub(super) fn lines<T>(
    columns: &[Column<T>],
    rows: &[T],
    width: usize,
) -> (Line<'static>, Vec<Line<'static>>) {
    let rooms: Vec<Room> = columns.iter().map(|it| it.room).collect();
    let widths = fit(&rooms, width);
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

fn padded(cell: Span<'static>, is_number: bool, most: usize) -> Span<'static> {
    let text = cut(&cell.content, most);
    let blank = " ".repeat(most - figures::width(&text));
    let text = if is_number { format!("{blank}{text}") } else { format!("{text}{blank}") };
    Span::styled(text, cell.style)
}

/// A slot as it is drawn.
pub(super) struct SlotRow<'a> {
    pub(super) slot: &'a Slot,
    /// The most tasks a second of a slot of its pool within the last minute.
    pub(super) peak: f64,
}

/// The columns of slots whose longest name of a worker has so many columns.
pub(super) fn of_slots<'a>(list: &List, longest: usize, width: usize) -> Vec<Column<SlotRow<'a>>> {
    let mut columns: Vec<Column<SlotRow<'a>>> = vec![
        Column::text("worker", 0, name_room(longest, width), |it, most| {
            cut_middle(&it.slot.key.worker, most).into()
        }),
        Column::text("state", 1, (11, 11), |it, _| state(it.slot)),
        Column::number("age", 6, 6, |it, _| known(it.slot.age_ms.map(age))),
        Column::number("tasks/s", 3, 8, |it, _| short(it.slot.rates.tasks).into()),
        Column::text("last minute", 10, (12, 30), |it, most| spark(&it.slot.minute, most, it.peak).cyan()),
        Column::number("tok/s", 5, 6, |it, _| short(it.slot.rates.tokens).into()),
        Column::number("busy", 4, 5, |it, _| percent(it.slot.rates.busy).into()),
        Column::text("", 9, (6, 12), |it, most| bar(it.slot.rates.busy, most).green()),
        Column::number("fill", 11, 5, |it, _| known(it.slot.rates.fill.map(percent))),
        Column::number("held", 7, 5, |it, _| count(it.slot.held()).into()),
        Column::number("queued", 12, 6, |it, _| known(it.slot.rates.queued.map(seconds))),
        Column::number("compute", 13, 11, |it, _| known(it.slot.rates.compute.map(both))),
        Column::number("err/s", 2, 6, |it, _| errors(it.slot.rates.errors)),
        Column::number("↻", 8, 3, |it, _| restarts(it.slot.restarts())),
        Column::text("device", 14, (13, 40), |it, _| it.slot.report.device.clone().into()),
        Column::number("memory", 15, 9, |it, _| known(it.slot.resident().map(bytes))),
        Column::text("model", 16, (20, 60), |it, _| it.slot.report.model.clone().into()),
    ];
    for column in &mut columns {
        let mark = list.mark(&column.title);
        column.title.push_str(mark);
    }
    columns
}

/// Room for names of which the longest has so many columns: at least all of it, or a quarter of the line.
fn name_room(longest: usize, width: usize) -> (usize, usize) {
    let longest = longest.max(6);
    (longest.min(width / 4).max(6), longest)
}

fn both((median, most): (f64, f64)) -> String {
    format!("{}/{}", seconds(median), seconds(most))
}

/// The columns of these pools.
pub(super) fn of_pools(totals: &[Total], width: usize) -> Vec<Column<Total>> {
    let longest = totals.iter().map(|it| figures::width(&it.pool)).max().unwrap_or_default();
    let has_background = totals.iter().any(|it| it.background != Depth::NoQueue);
    vec![
        Column::text("pool", 0, name_room(longest, width), |it, _| it.pool.clone().into()),
        Column::number("work", 1, 7, |it, _| work(it)),
        Column::number("tasks/s", 7, 7, |it, _| short(it.tasks).into()),
        Column::number("tok/s", 8, 5, |it, _| short(it.tokens).into()),
        Column::number("busy", 9, 4, |it, _| percent(it.busy).into()),
        Column::text("", 11, (6, 12), |it, most| bar(it.busy, most).green()),
        Column::number("held", 10, 5, |it, _| count(it.held).into()),
        Column::number("err/s", 2, 5, |it, _| errors(it.errors)),
        Column::number("queue", 3, 5, |it, _| depth(it.waiting)),
        Column::number("background", if has_background { 6 } else { 14 }, 10, |it, _| depth(it.background)),
        Column::number("retry", 5, 5, |it, _| depth(it.retry)),
        Column::number("dead", 4, 5, |it, _| dead(it.dead)),
        Column::number("consumers", 12, 9, |it, _| {
            known(Some(it.consumers.map_or_else(|| "?".to_owned(), |it| count(it.into()))))
        }),
        Column::text("task queue", 13, (12, 60), |it, _| it.queue.clone().into()),
    ]
}

fn work(total: &Total) -> Span<'static> {
    let text = format!("{}/{}", total.work, total.slots);
    if total.work < total.slots { text.yellow() } else { text.into() }
}

fn dead(letters: Depth) -> Span<'static> {
    let text = depth(letters);
    if matches!(letters, Depth::Messages(1..)) { text.red() } else { text }
}

fn known(text: Option<String>) -> Span<'static> {
    text.map_or_else(|| "-".into(), Span::from)
}

fn depth(depth: Depth) -> Span<'static> {
    match depth {
        Depth::NoQueue => "-".into(),
        Depth::Unknown => "?".into(),
        Depth::Messages(messages) => count(messages).into(),
    }
}

/// Errors a second, red where there are any.
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

fn state(slot: &Slot) -> Span<'static> {
    let colour = match slot.report.state {
        _ if slot.missing_since.is_some() => Color::DarkGray,
        State::Ready | State::Busy if slot.works() => Color::Green,
        State::Ready | State::Busy | State::Failed | State::Quarantined => Color::Red,
        State::Starting | State::Loading | State::Paused | State::Draining => Color::Yellow,
        State::Stopped => Color::DarkGray,
    };
    Span::styled(slot.state(), Style::new().fg(colour))
}
