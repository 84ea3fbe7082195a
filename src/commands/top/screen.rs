//! Decides what a key and what news change on the screen: what is open, which question is asked, whether the data
//! are stale. Pure: time is passed in.

use std::time::{Duration, Instant};

use ratatui::crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers};

use super::list::List;
use crate::client::fleet::{History, News, Order, PoolQueues};
use crate::protocol::admin::{Request, State, Target};

/// How long the result of an order is shown, unless a key is pressed.
const NOTICE: Duration = Duration::from_secs(20);

/// An action of a key beyond the screen.
#[derive(Debug, PartialEq)]
pub(super) enum Press {
    Leave,
    Order(Order),
}

/// The state of the screen.
#[derive(Default)]
pub(super) struct Screen {
    /// The broker's address.
    pub(super) broker: String,
    pub(super) pools: Vec<PoolQueues>,
    pub(super) history: History,
    pub(super) list: List,
    pub(super) has_detail: bool,
    pub(super) has_help: bool,
    /// Keys are typed into the filter.
    pub(super) is_typing: bool,
    /// Why no data can be read, since the last that could.
    pub(super) trouble: Option<String>,
    /// Data older than this are stale, also without a known trouble.
    pub(super) patience: Duration,
    /// The worker that an order is meant for, until it is confirmed.
    asked: Option<(String, Request)>,
    notice: Option<(Instant, String)>,
}

impl Screen {
    pub(super) fn new(broker: String, pools: Vec<PoolQueues>, patience: Duration) -> Self {
        Self { broker, pools, patience, ..Self::default() }
    }

    pub(super) fn learn(&mut self, news: News, now: Instant) {
        match news {
            News::Look(look) => {
                self.history.learn(*look);
                self.trouble = None;
                self.list.follow(&self.history);
            }
            News::Done(words) => self.tell(words, now),
            News::Trouble(words) => self.trouble = Some(words),
        }
    }

    pub(super) fn tell(&mut self, words: String, now: Instant) {
        self.notice = Some((now, words));
    }

    /// The age of the data, if they are no longer those of now.
    pub(super) fn stale(&self, now: Instant) -> Option<Duration> {
        let age = now.saturating_duration_since(self.history.looked?);
        (self.trouble.is_some() || age > self.patience).then_some(age)
    }

    /// A question, or the result of an order.
    pub(super) fn foot(&self, now: Instant) -> Option<String> {
        if let Some((worker, request)) = &self.asked {
            return Some(format!("{} {worker}? y/n", verb(request)));
        }
        let (told, words) = self.notice.as_ref()?;
        (now.saturating_duration_since(*told) < NOTICE).then(|| words.clone())
    }

    pub(super) fn press(&mut self, event: &Event, now: Instant) -> Option<Press> {
        let Event::Key(key) = event else { return None };
        if key.kind == KeyEventKind::Release {
            return None;
        }
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Some(Press::Leave);
        }
        self.notice = None;
        if let Some((worker, request)) = self.asked.take() {
            if key.code != KeyCode::Char('y') {
                return None;
            }
            self.tell(format!("{} {worker}: asked", verb(&request)), now);
            return Some(Press::Order(Order { target: Target::Slot(worker), request }));
        }
        if self.is_typing {
            self.type_filter(key.code);
            self.list.follow(&self.history);
            return None;
        }
        let press = self.command(key.code);
        self.list.follow(&self.history);
        press
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char(character) => self.list.type_filter(Some(character)),
            KeyCode::Backspace => self.list.type_filter(None),
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.is_typing = false;
                self.list.clear_filter();
            }
            KeyCode::Up => self.list.step(-1, &self.history),
            KeyCode::Down => self.list.step(1, &self.history),
            _ => {}
        }
    }

    fn command(&mut self, code: KeyCode) -> Option<Press> {
        match code {
            KeyCode::Char('q') => return Some(Press::Leave),
            KeyCode::Char('?') => self.has_help = !self.has_help,
            KeyCode::Esc => return self.close(),
            // The help hides the rows: no key changes them unseen.
            _ if self.has_help => {}
            KeyCode::Up | KeyCode::Char('k') => self.list.step(-1, &self.history),
            KeyCode::Down | KeyCode::Char('j') => self.list.step(1, &self.history),
            KeyCode::PageUp => self.list.step(-10, &self.history),
            KeyCode::PageDown => self.list.step(10, &self.history),
            KeyCode::Home => self.list.step(isize::MIN, &self.history),
            KeyCode::End => self.list.step(isize::MAX, &self.history),
            KeyCode::Enter | KeyCode::Right => self.has_detail = true,
            KeyCode::Left => self.has_detail = false,
            KeyCode::Char('s') => self.list.sort_by_next(),
            KeyCode::Char('S') => self.list.reverse(),
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char('p') => self.ask(None),
            KeyCode::Char('d') => self.ask(Some(Request::Drain)),
            KeyCode::Char('r') => self.ask(Some(Request::Restart)),
            _ => {}
        }
        None
    }

    /// Closes what is open; then the filter; then leaves.
    fn close(&mut self) -> Option<Press> {
        if self.has_help {
            self.has_help = false;
        } else if self.has_detail {
            self.has_detail = false;
        } else if self.list.filter().is_empty() {
            return Some(Press::Leave);
        } else {
            self.list.clear_filter();
        }
        None
    }

    /// Asks whether the chosen slot is to carry out this order; none: pause, or resume if it is paused.
    fn ask(&mut self, order: Option<Request>) {
        let Some(slot) = self.list.chosen(&self.history) else { return };
        let resumes = matches!(slot.report.state, State::Paused | State::Stopped);
        let toggle = if resumes { Request::Resume } else { Request::Pause };
        self.asked = Some((slot.key.worker.clone(), order.unwrap_or(toggle)));
    }
}

fn verb(request: &Request) -> &'static str {
    match request {
        Request::Pause => "pause",
        Request::Resume => "resume",
        Request::Drain => "drain",
        _ => "restart",
    }
}
