//! Runs a loop turn by turn on its thread; between turns the loop may sleep. Owns no state.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::now;

/// A loop that runs on its thread, turn by turn.
pub(super) trait Loop {
    fn turn(&mut self) -> Next;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// There may be more to do now.
    Again,
    /// Nothing to do before this time, or before the loop is woken.
    Sleep(Option<Instant>),
    End,
}

impl Next {
    /// `Again`, or `End` if the device has failed.
    pub(super) fn go_on(goes_on: bool) -> Self {
        if goes_on { Self::Again } else { Self::End }
    }
}

/// Wakes a sleeping loop. Called by those who write to its queue.
#[derive(Clone)]
pub(super) struct Waker(Arc<dyn Fn() + Send + Sync>);

impl Waker {
    pub(super) fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(wake))
    }

    pub(super) fn wake(&self) {
        (self.0)();
    }
}

pub(super) fn run(work: &mut dyn Loop) {
    loop {
        match work.turn() {
            Next::Again => {}
            Next::Sleep(None) => thread::park(),
            Next::Sleep(Some(until)) => thread::park_timeout(until.saturating_duration_since(now())),
            Next::End => return,
        }
    }
}
