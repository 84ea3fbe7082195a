//! Runs a loop turn by turn on its thread; between turns the loop may sleep, and tells the launcher that the device
//! is idle.

use std::thread;
use std::time::{Duration, Instant};

use super::{Observer, now};

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
pub(super) type Waker = Box<dyn Fn() + Send + Sync>;

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

/// How long the device is idle before a line is sent only to say so. Sending it takes a CPU core for a moment;
/// on a small machine that core is needed to send the replies of the last batch.
const PAUSE: Duration = Duration::from_millis(5);

/// The time since which the device is idle; none if the launcher knows already.
#[derive(Default)]
pub(super) struct Idle(Option<Instant>);

impl Idle {
    /// The device was busy until `now`.
    pub(super) fn since(&mut self, now: Instant) {
        self.0 = Some(now);
    }

    /// Tells the launcher if it is time. Otherwise returns the time to do so, if there is one.
    pub(super) fn tell(&mut self, observer: &dyn Observer, now: Instant) -> Option<Instant> {
        let due = self.0? + PAUSE;
        if due > now {
            return Some(due);
        }
        observer.tell_idle();
        self.0 = None;
        None
    }
}
