//! Draws the screen: queues above, slots below, keys or a question at the foot.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row as TableRow, Table, TableState};

use super::rates::{Look, Row};
use crate::commands::ctl::span;
use crate::protocol::admin::State;

/// The texts beside the slots.
pub(super) struct Words<'a> {
    /// The broker's address.
    pub(super) broker: &'a str,
    /// Shown at the foot: a question, or the result of the last order.
    pub(super) foot: Option<&'a str>,
    /// Why nothing new is shown.
    pub(super) trouble: Option<&'a str>,
}

pub(super) fn draw(
    frame: &mut Frame<'_>,
    look: &Look,
    rows: &[Row],
    selected: &mut TableState,
    words: &Words<'_>,
) {
    let queues = look.queues.len() as u16 + 3;
    let [head, above, below, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(queues),
        Constraint::Min(4),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(summary(look, rows, words), head);
    frame.render_widget(queue_table(look, rows), above);
    slot_table(frame, below, rows, selected);
    let keys = "↑↓ choose  p pause/resume  d drain  r restart  q quit";
    let line = match (words.trouble, words.foot) {
        (Some(trouble), _) => Line::from(trouble.to_owned()).red().bold(),
        (None, Some(foot)) => Line::from(foot.to_owned()).yellow().bold(),
        (None, None) => Line::from(keys).dark_gray(),
    };
    frame.render_widget(Paragraph::new(line), foot);
}

fn summary<'a>(look: &Look, rows: &[Row], words: &Words<'_>) -> Paragraph<'a> {
    let sum = |of: fn(&Row) -> f64| rows.iter().map(of).fold(0.0, |sum, one| sum + one);
    let errors = sum(|row| row.errors_per_second);
    let text = format!(
        "sconce top  {}  launchers {}  slots {}  {:.0} tasks/s  {:.0} tokens/s  ",
        words.broker,
        look.answers.len(),
        rows.len(),
        sum(|row| row.tasks_per_second),
        sum(|row| row.tokens_per_second),
    );
    let errors = Span::from(format!("{errors:.1} errors/s"));
    let errors = if errors.content.starts_with("0.0") { errors } else { errors.red().bold() };
    Paragraph::new(Line::from(vec![Span::from(text).bold(), errors]))
}

fn queue_table<'a>(look: &Look, rows: &[Row]) -> Table<'a> {
    let lines = look.queues.iter().map(|(queue, depth)| {
        let held: u64 = rows.iter().filter(|row| row.report.queue == *queue).map(held).sum();
        let (waiting, consumers) = depth.map_or_else(
            || ("?".to_owned(), "?".to_owned()),
            |(messages, consumers)| (messages.to_string(), consumers.to_string()),
        );
        TableRow::new([queue.clone(), waiting, held.to_string(), consumers])
    });
    let widths =
        [Constraint::Min(20), Constraint::Length(10), Constraint::Length(10), Constraint::Length(10)];
    let header = TableRow::new(["queue", "waiting", "in hand", "consumers"]).style(header_style());
    Table::new(lines, widths).header(header).block(Block::bordered())
}

fn held(row: &Row) -> u64 {
    row.report.stats.as_ref().map_or(0, |stats| stats.now.held)
}

fn slot_table(frame: &mut Frame<'_>, area: Rect, rows: &[Row], selected: &mut TableState) {
    const HEADS: [&str; 11] = [
        "worker",
        "state",
        "for",
        "tasks/s",
        "tokens/s",
        "busy",
        "fill",
        "hand",
        "queue",
        "compute 50/99",
        "err/s ↻",
    ];
    let widths = [
        Constraint::Min(18),
        Constraint::Length(11),
        Constraint::Length(6),
        Constraint::Length(8),
        Constraint::Length(9),
        Constraint::Length(5),
        Constraint::Length(5),
        Constraint::Length(5),
        Constraint::Length(7),
        Constraint::Length(15),
        Constraint::Length(9),
    ];
    let table = Table::new(rows.iter().map(slot_row), widths)
        .header(TableRow::new(HEADS).style(header_style()))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(Block::bordered());
    frame.render_stateful_widget(table, area, selected);
}

fn slot_row<'a>(row: &Row) -> TableRow<'a> {
    let report = &row.report;
    let percent = |share: f64| format!("{:.0}%", 100.0 * share);
    let dash = || "-".to_owned();
    let restarts: u64 = report.restarts.values().sum();
    let connected = report.stats.as_ref().is_none_or(|stats| stats.now.connected);
    let state = match report.state {
        state if state.works() && !connected => "no broker",
        state => state.name(),
    };
    let cells: [Cell<'a>; 11] = [
        report.worker.clone().into(),
        Span::styled(state.to_owned(), Style::new().fg(colour(report.state, connected))).into(),
        span(report.state_ms).into(),
        format!("{:.1}", row.tasks_per_second).into(),
        format!("{:.0}", row.tokens_per_second).into(),
        percent(row.busy).into(),
        row.fill.map_or_else(dash, percent).into(),
        held(row).to_string().into(),
        row.queued.map_or_else(dash, seconds).into(),
        row.compute.map_or_else(dash, |(half, most)| format!("{}/{}", seconds(half), seconds(most))).into(),
        format!("{:.1} {restarts}", row.errors_per_second).into(),
    ];
    TableRow::new(cells)
}

fn seconds(seconds: f64) -> String {
    match seconds {
        it if it < 1.0 => format!("{:.1}ms", 1e3 * it),
        it => format!("{it:.1}s"),
    }
}

fn colour(state: State, connected: bool) -> Color {
    match state {
        State::Ready | State::Busy if connected => Color::Green,
        State::Ready | State::Busy | State::Failed | State::Quarantined => Color::Red,
        State::Starting | State::Loading | State::Paused | State::Draining => Color::Yellow,
        State::Stopped => Color::DarkGray,
    }
}

fn header_style() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::rates::rows;
    use super::super::rates::tests::look;
    use super::*;

    fn page(words: &Words<'_>) -> String {
        let (before, now) = (look(1.0, 5), look(3.0, 45));
        let mut terminal = Terminal::new(TestBackend::new(120, 14)).unwrap();
        let rows = rows(&before, &now);
        terminal.draw(|frame| draw(frame, &now, &rows, &mut TableState::default(), words)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_page_shows_queues_slots_and_what_can_be_done() {
        let page = page(&Words { broker: "amqp://b", foot: None, trouble: None });
        for words in ["20 tasks/s", "10000 tokens/s", "tasks", "h/embed/0", "busy", "40%", "50%", "q quit"] {
            assert!(page.contains(words), "{words:?} is missing:\n{page}");
        }
    }

    #[test]
    fn a_question_takes_the_place_of_the_keys_and_trouble_that_of_both() {
        let question = page(&Words { broker: "b", foot: Some("drain h/embed/0? y/n"), trouble: None });
        assert!(question.contains("drain h/embed/0?") && !question.contains("q quit"), "{question}");
        let trouble = page(&Words { broker: "b", foot: Some("drain?"), trouble: Some("lost the broker") });
        assert!(trouble.contains("lost the broker") && !trouble.contains("drain?"), "{trouble}");
    }
}
