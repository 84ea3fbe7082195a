//! What a loop is: something that does the next thing, turn by turn, and sleeps between. Owns no state.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::now;

/// Runs on its thread, turn by turn.
pub(super) trait Loop {
    /// Does the next thing.
    fn turn(&mut self) -> Next;
}

/// What a loop does after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// There may be more to do.
    Again,
    /// Nothing before this time, or before it is woken.
    Sleep(Option<Instant>),
    /// Nothing, for good.
    End,
}

impl Next {
    /// Again, unless the device is gone.
    pub(super) fn go_on(goes_on: bool) -> Self {
        if goes_on { Self::Again } else { Self::End }
    }
}

/// Wakes a loop that sleeps. Called by those who write to its queue.
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

/// Runs a loop on this thread, to its end.
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
