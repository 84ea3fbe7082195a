//! Decides when a requester has left: its reply queue has been missing for ten seconds, by several signs. A queue may be
//! away for a moment, because somebody makes it again or its node restarts; a task that was ended for that would be lost
//! to a requester who still waits. Owns what was seen of the queue of one task.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::broker::{Publisher, Seen};

/// How often the broker is asked whether a requester's queue still exists, while its sequences wait or run.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The same once the queue was missing.
const DOUBT_INTERVAL: Duration = Duration::from_millis(2_500);
/// How long a queue must be missing.
const MISSING: Duration = Duration::from_secs(10);
/// The least number of signs in that time.
const SIGNS: u32 = 3;

/// What was seen of a queue since it was there.
#[derive(Clone, Copy, Debug, Default)]
struct Absence {
    signs: u32,
    since: Option<Instant>,
}

impl Absence {
    /// Takes in a sign that the queue is missing, or is not. True: it is gone.
    fn add(&mut self, is_missing: bool, now: Instant) -> bool {
        if !is_missing {
            *self = Self::default();
            return false;
        }
        self.signs += 1;
        let since = *self.since.get_or_insert(now);
        self.signs >= SIGNS && now >= since + MISSING
    }
}

/// Returns once the requester has left whose queue this is. `unroutable`: whether the latest part came back. That alone is
/// no sign where the broker lets us look, because parts to a queue whose node is down come back too.
pub(super) async fn leaves(publisher: &dyn Publisher, queue: &str, mut unroutable: watch::Receiver<bool>) {
    let mut absence = Absence::default();
    loop {
        let is_in_doubt = absence.since.is_some();
        tokio::select! {
            () = sleep(if is_in_doubt { DOUBT_INTERVAL } else { POLL_INTERVAL }) => {}
            Ok(()) = unroutable.changed(), if !is_in_doubt => {}
        }
        let is_missing = match publisher.look(queue).await {
            Some(Seen::Gone) => true,
            Some(Seen::There { .. } | Seen::Private | Seen::Away) => false,
            None if *unroutable.borrow_and_update() => true,
            // Nothing is known.
            None => continue,
        };
        if absence.add(is_missing, Instant::now()) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_gone_that_was_missing_several_times_over_ten_seconds() {
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut absence = Absence::default();
        assert_eq!([0, 2_500, 9_900].map(|ms| absence.add(true, at(ms))), [false; 3]);
        assert!(absence.add(true, at(10_000)));
        let mut absence = Absence::default();
        assert_eq!([0, 20_000].map(|ms| absence.add(true, at(ms))), [false; 2], "two are not several");
        let mut absence = Absence::default();
        assert_eq!([0, 5_000].map(|ms| absence.add(true, at(ms))), [false; 2]);
        assert!(!absence.add(false, at(7_500)), "it is there again");
        assert_eq!([8_000, 11_000, 17_900].map(|ms| absence.add(true, at(ms))), [false; 3]);
        assert!(absence.add(true, at(18_000)));
    }
}
