//! Decides when the launcher is told that the device is idle. Owns the time since which it is idle.

use std::time::{Duration, Instant};

use super::Observer;

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
