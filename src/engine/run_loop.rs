//! Runs a model's loop on the model thread, turn by turn. Between turns the loop may sleep. Decides when the
//! launcher is informed that the device is idle.

use std::thread;
use std::time::{Duration, Instant};

use super::{Observer, now};

/// A loop that runs on the model thread, turn by turn.
pub(super) trait Loop {
    fn turn(&mut self) -> Next;
}

/// What follows a turn of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// There may be more to do now.
    Again,
    /// There is nothing to do before this time, or before the loop is woken.
    Sleep(Option<Instant>),
    End,
}

impl Next {
    /// `Again` if the device works, or `End` if it has failed.
    pub(super) fn again_if(device_works: bool) -> Self {
        if device_works { Self::Again } else { Self::End }
    }
}

/// Wakes a sleeping loop. Called by those who write to its queue.
pub type Waker = Box<dyn Fn() + Send + Sync>;

pub(super) fn run(model_loop: &mut dyn Loop) {
    loop {
        match model_loop.turn() {
            Next::Again => {}
            Next::Sleep(None) => thread::park(),
            Next::Sleep(Some(until)) => thread::park_timeout(until.saturating_duration_since(now())),
            Next::End => return,
        }
    }
}

/// How long the device is idle before a control line is sent only to report that. Sending a line occupies a CPU core
/// for a moment, and on a small machine that core is needed to send the replies of the last batch.
const IDLE_REPORT_DELAY: Duration = Duration::from_millis(5);

/// The time since which the device is idle; none if that has been reported.
#[derive(Default)]
pub(super) struct Idle(Option<Instant>);

impl Idle {
    /// Records that the device was busy until `now`.
    pub(super) fn begin(&mut self, now: Instant) {
        self.0 = Some(now);
    }

    /// Reports the idle device to the launcher if that is due. Otherwise returns when it will be due, if ever.
    pub(super) fn report_if_due(&mut self, observer: &dyn Observer, now: Instant) -> Option<Instant> {
        let due = self.0? + IDLE_REPORT_DELAY;
        if due > now {
            return Some(due);
        }
        observer.report_idle();
        self.0 = None;
        None
    }
}
