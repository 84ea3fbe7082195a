//! When the launcher is told that the device is idle. Owns since when it is.

use std::time::{Duration, Instant};

use super::Observer;

/// How long the device is idle before the launcher hears of it, if it hears of nothing else. That takes a core
/// for a moment: on a small machine the one that the replies to the last batch are sent from.
const PAUSE: Duration = Duration::from_millis(5);

/// Since when the device is idle, while that is still to be told.
#[derive(Default)]
pub(super) struct Idle(Option<Instant>);

impl Idle {
    /// The device was busy until now.
    pub(super) fn since(&mut self, now: Instant) {
        self.0 = Some(now);
    }

    /// Tells it, if it is time; else returns when it is, if ever.
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
