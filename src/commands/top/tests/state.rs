//! Tests of staleness, sort order, selection, keys and the widths of columns, without a terminal.

use std::time::{Duration, Instant};

use ratatui::crossterm::event::{Event, KeyCode, KeyEvent};

use super::super::columns::{Bounds, fit};
use super::super::figures::{age, bar, count, cut, cut_middle, short, wrap};
use super::super::list::SORTS;
use super::super::screen::{Action, Screen};
use super::*;
use crate::client::fleet::Order;
use crate::protocol::admin::{ControlRequest, Target};

fn press(screen: &mut Screen, code: KeyCode) -> Option<Action> {
    screen.press(&Event::Key(KeyEvent::from(code)), Instant::now())
}

fn type_text(screen: &mut Screen, text: &str) {
    text.chars().for_each(|character| drop(press(screen, KeyCode::Char(character))));
}

/// The workers in their order, with their states.
fn shown(screen: &Screen) -> Vec<(String, &'static str)> {
    let slots = screen.list.slots(&screen.history);
    slots.into_iter().map(|slot| (slot.report.worker.clone(), slot.state())).collect()
}

fn selected(screen: &Screen) -> &str {
    screen.list.selected(&screen.history).map_or("", |slot| &slot.key.worker)
}

#[test]
fn the_first_answer_after_an_outage_clears_every_sign_of_it() {
    let (mut screen, start) = (screen(), Instant::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    screen.update(two_hosts(start, 1), at(1));
    assert_eq!(screen.stale(at(2)), None);
    assert_eq!(
        screen.stale(at(9)),
        Some(Duration::from_secs(8)),
        "data are stale even if no trouble is known"
    );
    screen.update(Update::Trouble("lost the broker".into()), at(3));
    assert_eq!(screen.stale(at(3)), Some(Duration::from_secs(2)));
    screen.update(snapshot(start, 4, Vec::new()), at(4));
    screen.update(two_hosts(start, 5), at(5));
    assert_eq!((screen.stale(at(5)), &screen.trouble, screen.foot(at(5))), (None, &None, None));
    assert!(screen.history.launchers == 2 && shown(&screen).iter().all(|(_, state)| *state != "silent"));
}

#[test]
fn the_selection_follows_its_slot_when_the_order_changes() {
    let (mut screen, start) = (screen(), Instant::now());
    screen.update(two_hosts(start, 1), start);
    screen.update(two_hosts(start, 2), start);
    press(&mut screen, KeyCode::Down);
    assert_eq!(selected(&screen), "gpu1/embed/1");
    type_text(&mut screen, "s");
    assert_eq!(shown(&screen)[0].1, "quarantined");
    type_text(&mut screen, "ss");
    let rates = |screen: &Screen| -> Vec<f64> {
        screen.list.slots(&screen.history).iter().map(|slot| slot.rates.tasks.round()).collect()
    };
    assert_eq!(rates(&screen), [20.0, 9.0, 3.0, 0.0]);
    assert_eq!((selected(&screen), screen.list.selected_row()), ("gpu1/embed/1", 2));
    type_text(&mut screen, "S");
    assert_eq!((rates(&screen)[0], selected(&screen), screen.list.selected_row()), (0.0, "gpu1/embed/1", 1));
    (3..SORTS.len()).for_each(|_| type_text(&mut screen, "s"));
    assert_eq!(screen.list.mark("worker"), "▲", "after the last column comes the first");
    // If the selected slot is gone, the slot in its place is selected.
    let only = answer("gpu1", 3, vec![slot("gpu1/embed/0", "cpu", 3), slot("gpu1/embed/10", "cpu", 3)]);
    screen.update(snapshot(start, 3, vec![only]), start);
    assert_eq!(selected(&screen), "gpu1/embed/10");
}

#[test]
fn escape_closes_help_detail_and_filter_before_it_quits() {
    let (mut screen, start) = (screen(), Instant::now());
    screen.update(two_hosts(start, 1), start);
    type_text(&mut screen, "/quarAnt gpu-5q");
    assert!(shown(&screen).is_empty() && screen.is_typing);
    press(&mut screen, KeyCode::Backspace);
    press(&mut screen, KeyCode::Enter);
    assert_eq!(shown(&screen), [("gpu2.example.com/generate/0".to_owned(), "quarantined")]);
    assert_eq!(selected(&screen), "gpu2.example.com/generate/0");
    press(&mut screen, KeyCode::Enter);
    type_text(&mut screen, "?d");
    assert!(screen.has_help && screen.has_detail && screen.foot(start).is_none());
    for open in [(false, true, 1), (false, false, 1), (false, false, 4)] {
        assert_eq!(press(&mut screen, KeyCode::Esc), None);
        assert_eq!((screen.has_help, screen.has_detail, shown(&screen).len()), open);
    }
    assert_eq!(press(&mut screen, KeyCode::Esc), Some(Action::Quit));
    assert_eq!(press(&mut screen, KeyCode::Char('q')), Some(Action::Quit));
}

#[test]
fn an_order_is_sent_only_after_y() {
    let (mut screen, start) = (screen(), Instant::now());
    type_text(&mut screen, "d");
    assert_eq!(screen.foot(start), None, "there is no slot");
    screen.update(two_hosts(start, 1), start);
    type_text(&mut screen, "d");
    assert_eq!(screen.foot(start).unwrap(), "drain gpu1/embed/0? y/n");
    assert_eq!((press(&mut screen, KeyCode::Char('n')), screen.foot(start)), (None, None));
    type_text(&mut screen, "p");
    let order = Order { target: Target::Slot("gpu1/embed/0".into()), request: ControlRequest::Pause };
    assert_eq!(press(&mut screen, KeyCode::Char('y')), Some(Action::Order(order)));
    screen.update(Update::Done("paused".into()), start);
    assert_eq!(screen.foot(start).as_deref(), Some("paused"));
    assert_eq!(screen.foot(start + Duration::from_secs(60)), None);
}

#[test]
fn a_column_that_does_not_fit_is_omitted_and_the_others_grow() {
    let bounds =
        [(1, 4, 4), (0, 10, 20), (2, 9, 9), (3, 5, 5)].map(|(rank, min, max)| Bounds { rank, min, max });
    assert_eq!(fit(&bounds, 23), [Some(4), Some(12), None, Some(5)]);
    assert_eq!(fit(&bounds, 45), [Some(4), Some(20), Some(9), Some(5)]);
    assert_eq!(fit(&bounds, 9), [Some(4), None, None, None]);
}

#[test]
fn numbers_and_texts_fit_their_column_widths() {
    let all = [0.0, 9.96, 99.94, 99.96, 9_999.4, 9_999.6, 99_960.0, 1e6, 9_999_600.0, 1e9].map(short);
    let written = ["0.0", "10.0", "99.9", "100", "9999", "10.0k", "100k", "1000k", "10.0M", "1000M"];
    assert_eq!(all, written);
    assert_eq!([99_999, 100_000].map(count), ["99999", "100k"]);
    assert_eq!(age(100 * 86_400_000), "100d");
    assert_eq!([cut("embedding", 5), cut("embed", 5), cut("embed", 0)], ["embe…", "embed", ""]);
    assert_eq!(cut_middle("gpu1.example.com/embed/0", 13), "gpu1.e…mbed/0");
    assert_eq!(wrap("one two\nthree 日本語", 5), ["one", "two", "three", "日本", "語"]);
    assert_eq!((bar(0.5, 3), bar(2.0, 2)), ("█▌ ".to_owned(), "██".to_owned()));
}
