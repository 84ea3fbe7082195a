//! The state of the screen, and how keys and updates change it: which panes are open, which order waits for
//! confirmation, whether the data are stale. Does no I/O; the time is passed in.

use std::time::{Duration, Instant};

use ratatui::crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers};

use super::list::List;
use crate::client::fleet::{History, Order, PoolQueues, Update};
use crate::protocol::admin::{ControlRequest, State, Target};

/// How long a notice, such as the result of an order, is shown. A key press removes it earlier.
const NOTICE_DURATION: Duration = Duration::from_secs(20);

/// What the caller has to do after a key press, beside redrawing the screen.
#[derive(Debug, PartialEq)]
pub(super) enum Action {
    Quit,
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
    /// Whether keys are typed into the filter.
    pub(super) is_typing: bool,
    /// The failure to read data since the last snapshot; none if there was no failure.
    pub(super) trouble: Option<String>,
    /// Data older than this are stale, even if no trouble is known.
    pub(super) stale_after: Duration,
    /// An order that waits for the user's confirmation, and the worker that it is for.
    unconfirmed: Option<(String, ControlRequest)>,
    /// A notice, and since when it is shown.
    notice: Option<(Instant, String)>,
}

impl Screen {
    pub(super) fn new(broker: String, pools: Vec<PoolQueues>, stale_after: Duration) -> Self {
        Self { broker, pools, stale_after, ..Self::default() }
    }

    pub(super) fn update(&mut self, update: Update, now: Instant) {
        match update {
            Update::Snapshot(snapshot) => {
                self.history.add(*snapshot);
                self.trouble = None;
                self.list.follow(&self.history);
            }
            Update::Done(text) => self.show_notice(text, now),
            Update::Trouble(text) => self.trouble = Some(text),
        }
    }

    /// Shows a text at the bottom of the screen for a while.
    pub(super) fn show_notice(&mut self, text: String, now: Instant) {
        self.notice = Some((now, text));
    }

    /// The age of the data, if they are stale.
    pub(super) fn stale(&self, now: Instant) -> Option<Duration> {
        let age = now.saturating_duration_since(self.history.polled_at?);
        (self.trouble.is_some() || age > self.stale_after).then_some(age)
    }

    /// The text of the bottom line: the question whether to send an order, or a notice; none if there is neither.
    pub(super) fn foot(&self, now: Instant) -> Option<String> {
        if let Some((worker, request)) = &self.unconfirmed {
            return Some(format!("{} {worker}? y/n", verb(request)));
        }
        let (since, text) = self.notice.as_ref()?;
        (now.saturating_duration_since(*since) < NOTICE_DURATION).then(|| text.clone())
    }

    /// Handles an event of the terminal. Returns an action if the caller has to carry one out.
    pub(super) fn press(&mut self, event: &Event, now: Instant) -> Option<Action> {
        let Event::Key(key) = event else { return None };
        if key.kind == KeyEventKind::Release {
            return None;
        }
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Some(Action::Quit);
        }
        self.notice = None;
        if let Some((worker, request)) = self.unconfirmed.take() {
            if key.code != KeyCode::Char('y') {
                return None;
            }
            self.show_notice(format!("{} {worker}: sent", verb(&request)), now);
            return Some(Action::Order(Order { target: Target::Slot(worker), request }));
        }
        if self.is_typing {
            self.edit_filter(key.code);
            self.list.follow(&self.history);
            return None;
        }
        let action = self.command(key.code);
        self.list.follow(&self.history);
        action
    }

    fn edit_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char(character) => self.list.edit_filter(Some(character)),
            KeyCode::Backspace => self.list.edit_filter(None),
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

    fn command(&mut self, code: KeyCode) -> Option<Action> {
        match code {
            KeyCode::Char('q') => return Some(Action::Quit),
            KeyCode::Char('?') => self.has_help = !self.has_help,
            KeyCode::Esc => return self.close(),
            // The help hides the rows, so no key changes them.
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
            KeyCode::Char('p') => self.request_order(None),
            KeyCode::Char('d') => self.request_order(Some(ControlRequest::Drain)),
            KeyCode::Char('r') => self.request_order(Some(ControlRequest::Restart)),
            _ => {}
        }
        None
    }

    /// Does the first of these that applies: closes the help, closes the detail pane, clears the filter, quits.
    fn close(&mut self) -> Option<Action> {
        if self.has_help {
            self.has_help = false;
        } else if self.has_detail {
            self.has_detail = false;
        } else if self.list.filter().is_empty() {
            return Some(Action::Quit);
        } else {
            self.list.clear_filter();
        }
        None
    }

    /// Asks the user to confirm an order for the selected slot. Without `order`, the order is to resume a slot that is
    /// paused or stopped, and to pause any other slot.
    fn request_order(&mut self, order: Option<ControlRequest>) {
        let Some(slot) = self.list.selected(&self.history) else { return };
        let resumes = matches!(slot.report.state, State::Paused | State::Stopped);
        let toggle = if resumes { ControlRequest::Resume } else { ControlRequest::Pause };
        self.unconfirmed = Some((slot.key.worker.clone(), order.unwrap_or(toggle)));
    }
}

fn verb(request: &ControlRequest) -> &'static str {
    match request {
        ControlRequest::Pause => "pause",
        ControlRequest::Resume => "resume",
        ControlRequest::Drain => "drain",
        _ => "restart",
    }
}
