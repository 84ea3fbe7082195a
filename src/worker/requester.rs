//! Decides when a requester has left: its reply queue has been missing for ten seconds, according to at least three
//! signs. A shorter absence does not count: the queue may be declared again, or its node may restart, and the requester
//! still waits for the answer. Owns the observations of one task's reply queue.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::broker::{Publisher, QueueState};

/// How often the broker is asked whether a requester's queue still exists while its sequences wait or run.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The same interval once the queue has been found missing.
const DOUBT_INTERVAL: Duration = Duration::from_millis(2_500);
/// How long a queue must be missing before its requester counts as gone.
const MIN_MISSING_TIME: Duration = Duration::from_secs(10);
/// The least number of signs in that time.
const MIN_SIGNS: u32 = 3;

/// The signs that a queue is missing since it was last seen.
#[derive(Clone, Copy, Debug, Default)]
struct Absence {
    signs: u32,
    since: Option<Instant>,
}

impl Absence {
    /// Records a sign that the queue is missing, or that it is not. Returns true if the queue counts as gone.
    fn add(&mut self, is_missing: bool, now: Instant) -> bool {
        if !is_missing {
            *self = Self::default();
            return false;
        }
        self.signs += 1;
        let since = *self.since.get_or_insert(now);
        self.signs >= MIN_SIGNS && now >= since + MIN_MISSING_TIME
    }
}

/// Returns once the requester that owns `queue` has left. `unroutable` says whether the broker returned the latest
/// part. That is a sign only if the broker does not reveal the queue's state, because it also returns parts to a queue
/// whose node is down.
pub(super) async fn wait_until_gone(
    publisher: &dyn Publisher,
    queue: &str,
    mut unroutable: watch::Receiver<bool>,
) {
    let mut absence = Absence::default();
    loop {
        let is_in_doubt = absence.since.is_some();
        tokio::select! {
            () = sleep(if is_in_doubt { DOUBT_INTERVAL } else { POLL_INTERVAL }) => {}
            Ok(()) = unroutable.changed(), if !is_in_doubt => {}
        }
        let is_missing = match publisher.queue_state(queue).await {
            Some(QueueState::Missing) => true,
            Some(QueueState::Exists { .. } | QueueState::Exclusive | QueueState::Unavailable) => false,
            None if *unroutable.borrow_and_update() => true,
            // There is no evidence either way.
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
    fn a_queue_counts_as_gone_after_three_signs_over_ten_seconds() {
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut absence = Absence::default();
        assert_eq!([0, 2_500, 9_900].map(|ms| absence.add(true, at(ms))), [false; 3]);
        assert!(absence.add(true, at(10_000)));
        let mut absence = Absence::default();
        assert_eq!([0, 20_000].map(|ms| absence.add(true, at(ms))), [false; 2], "two signs are too few");
        let mut absence = Absence::default();
        assert_eq!([0, 5_000].map(|ms| absence.add(true, at(ms))), [false; 2]);
        assert!(!absence.add(false, at(7_500)), "it is there again");
        assert_eq!([8_000, 11_000, 17_900].map(|ms| absence.add(true, at(ms))), [false; 3]);
        assert!(absence.add(true, at(18_000)));
    }
}
