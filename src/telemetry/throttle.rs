//! Bounds how often a line is logged that strangers can cause. Decides which lines are logged, and counts the others.

use std::time::{Duration, Instant};

/// Lets one line through in an interval.
#[derive(Debug, Default)]
pub struct Throttle {
    /// The time of the last line.
    last: Option<Instant>,
    /// The number of lines that were held back since then.
    unlogged: u64,
}

impl Throttle {
    /// Returns the number of lines that were held back since the last line, if a line is due. Otherwise counts this line
    /// as held back.
    pub fn pass(&mut self, interval: Duration, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now < last + interval) {
            self.unlogged += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_in_an_interval_is_logged_and_the_rest_counted() {
        let (mut throttle, begun) = (Throttle::default(), Instant::now());
        let mut at = |ms| throttle.pass(Duration::from_secs(5), begun + Duration::from_millis(ms));
        let unlogged = [0, 1, 4_999, 5_000, 5_001, 60_000].map(&mut at);
        assert_eq!(unlogged, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
