//! Whole pages on terminals of 80×24, 120×30 and 200×50.

use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent};
use ratatui::style::Modifier;

use super::super::list::SORTS;
use super::super::view::draw;
use super::*;

const SIZES: [(u16, u16); 3] = [(80, 24), (120, 30), (200, 50)];

/// A screen after a minute of answers from two launchers, and the time of the last poll.
fn at_work() -> (Screen, Instant) {
    let (mut screen, start) = (screen(), Instant::now());
    (1..=60).for_each(|at| screen.update(two_hosts(start, at), start));
    (screen, start + Duration::from_secs(60))
}

fn press(screen: &mut Screen, keys: &str) {
    for key in keys.chars() {
        let code = if key == '\n' { KeyCode::Enter } else { KeyCode::Char(key) };
        screen.press(&Event::Key(KeyEvent::from(code)), Instant::now());
    }
}

/// The lines of a page, without trailing blanks, and its buffer.
fn page(screen: &Screen, (columns, rows): (u16, u16), now: Instant) -> (Vec<String>, Buffer) {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
    terminal.draw(|frame| draw(frame, screen, &mut 0, now)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let line = |row| (0..columns).map(|column| buffer[(column, row)].symbol()).collect::<String>();
    let lines: Vec<String> = (0..rows).map(|row| line(row).trim_end().to_owned()).collect();
    (lines, buffer)
}

/// The number of the first line that contains `text`.
fn row(lines: &[String], text: &str) -> usize {
    lines
        .iter()
        .position(|line| line.contains(text))
        .unwrap_or_else(|| panic!("{text:?} is missing: {lines:#?}"))
}

#[test]
fn all_sort_columns_and_the_error_rate_are_shown_aligned_at_every_size() {
    let (screen, now) = at_work();
    for (size, more) in SIZES.into_iter().zip([&[][..], &["fill", "queued"], &["compute", "device"]]) {
        let (lines, _) = page(&screen, size, now);
        let header = &lines[row(&lines, "worker▲")];
        for title in SORTS.iter().map(|(title, _)| title).chain(more) {
            assert!(header.contains(title), "{title:?} is missing: {header:?}");
        }
        let failing = &lines[row(&lines, "gpu1/embed/1")];
        let cells: Vec<&str> = failing.split_whitespace().collect();
        assert!(cells[1] == "busy" && cells[2] == "2m00s" && cells.contains(&"1.0"), "{failing}");
        // Numbers are right-aligned: they end where their titles do.
        let end = header[..header.find("tasks/s").unwrap()].chars().count() + 7;
        assert!(
            failing.chars().nth(end - 1) == Some('0') && failing.chars().nth(end) == Some(' '),
            "{failing}"
        );
        let pool = &lines[row(&lines, "embed  ")];
        assert!(pool.contains("3/3") && lines[0].contains("1.0 err/s") && lines[0].contains("tasks/s"));
        assert!(lines[usize::from(size.1) - 1].contains("? help") && lines[0].contains("3 of 4 slots work"));
    }
}

#[test]
fn a_name_that_is_too_long_is_cut_with_an_ellipsis() {
    let (mut screen, now) = at_work();
    let long = format!("{}/embed/0", "gpu1.a-long-name.".repeat(9));
    screen.update(snapshot(now, 1, vec![answer(&long, 9, vec![slot(&long, GPU, 9)])]), now);
    for size in SIZES {
        let (lines, _) = page(&screen, size, now);
        let row = &lines[row(&lines, "gpu1.a-lo")];
        assert!(row.contains("…") && row.contains("/embed/0 ") && row.contains(" busy "), "{row}");
    }
}

#[test]
fn stale_and_silent_rows_are_dim_and_say_so() {
    let (mut screen, now) = at_work();
    let is_dim = |screen: &Screen, size, now, worker: &str| {
        let (lines, buffer) = page(screen, size, now);
        let row = row(&lines, worker) as u16;
        (0..10).all(|column| buffer[(column, row)].modifier.contains(Modifier::DIM))
    };
    for size in SIZES {
        assert!(!is_dim(&screen, size, now, "gpu1/embed/0"));
    }
    screen.update(Update::Trouble("the broker refuses: ".repeat(20)), now);
    for size in SIZES {
        let later = now + Duration::from_secs(12);
        assert!(is_dim(&screen, size, later, "gpu1/embed/0") && is_dim(&screen, size, later, "3/3"));
        let (lines, _) = page(&screen, size, later);
        assert!(lines[0].contains("stale for 12s") && lines[0].contains("1.0 err/s"), "{}", lines[0]);
        assert!(lines[1].starts_with("the broker refuses") && lines[2].chars().count() <= size.0.into());
    }
    let one = answer("gpu1", 61, vec![slot("gpu1/embed/0", "cpu", 9)]);
    screen.update(snapshot(now, 1, vec![one]), now);
    for size in SIZES {
        assert!(is_dim(&screen, size, now, "silent") && !is_dim(&screen, size, now, "gpu1/embed/0"));
        let (lines, _) = page(&screen, size, now);
        assert!(!lines.join("").contains("stale") && !lines.join("").contains("refuses"), "{lines:#?}");
    }
    screen.update(snapshot(now, 2, Vec::new()), now);
    assert!(page(&screen, SIZES[0], now).0[0].contains("no launcher answers"));
}

#[test]
fn the_detail_shows_the_facts_about_the_selected_slot() {
    let (mut screen, now) = at_work();
    press(&mut screen, "j\n");
    for size in SIZES {
        let (lines, _) = page(&screen, size, now);
        let text = lines.join(" ");
        for part in
            ["gpu1/embed/1 ──", "busy for 4s", "all-MiniLM-L6-v2", "GPU-66660000", "1.5 GiB", "process 41"]
        {
            assert!(text.contains(part), "{part:?} is missing: {lines:#?}");
        }
        for part in
            ["crashed 2", "5 for 1.2s: 7f3e 91b0 and 3 more", "60 failed (invalid_request)", "1000 tokens"]
        {
            assert!(text.contains(part), "{part:?} is missing: {lines:#?}");
        }
        assert_eq!(text.matches("ILLEGAL_ADDRESS").count(), 4, "the failure is wrapped: {lines:#?}");
    }
}

#[test]
fn help_fits_the_smallest_page_and_questions_are_at_the_bottom() {
    let (mut screen, now) = at_work();
    press(&mut screen, "?");
    for size in SIZES {
        let (lines, _) = page(&screen, size, now);
        row(&lines, "Esc          closes");
        row(&lines, "? -          a queue that cannot be inspected; unknown, or none");
    }
    press(&mut screen, "?r");
    screen.update(Update::Trouble("lost".into()), now);
    assert_eq!(page(&screen, SIZES[0], now).0[23], "restart gpu1/embed/0? y/n");
    press(&mut screen, "n/embed/2");
    let (lines, _) = page(&screen, SIZES[0], now);
    assert!(lines[23].starts_with("/embed/2▏") && lines[row(&lines, "slots with")].contains("1 of 4"));
}

#[test]
fn tiny_terminals_are_drawn_and_hidden_rows_are_counted() {
    let (mut screen, now) = at_work();
    let slots = (0..40).map(|index| slot(&format!("gpu1/pool-{index}/{index}"), "cpu", 9)).collect();
    screen.update(snapshot(now, 1, vec![answer("gpu1", 99, slots)]), now);
    for open in ["", "\n", "?"] {
        press(&mut screen, open);
        for size in [(1, 1), (3, 2), (10, 5), (30, 9), (60, 16)] {
            page(&screen, size, now);
        }
    }
    press(&mut screen, "?");
    screen.press(&Event::Key(KeyEvent::from(KeyCode::Esc)), now);
    screen.press(&Event::Key(KeyEvent::from(KeyCode::End)), now);
    let (lines, _) = page(&screen, SIZES[0], now);
    assert!(lines[row(&lines, "── slots")].contains("of 41 ──"), "{lines:#?}");
    assert!(lines.join(" ").contains("… 3") && lines.join(" ").contains("gpu1/pool-39/39"), "{lines:#?}");
}
