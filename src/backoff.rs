//! Capped, jittered delays between attempts. The caller passes the random number in, so the result depends only
//! on the arguments.

use std::time::Duration;

/// A delay that doubles from `first` up to `max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// Ceiling of the delay after the first failure.
    pub first: Duration,
    /// Upper bound of every ceiling.
    pub max: Duration,
}

impl Backoff {
    /// The delay after `failures` failures in a row (0 counts as 1). `jitter` in `0.0..1.0` selects a
    /// point in the upper half of the ceiling, so that the clients of a broker neither reconnect all
    /// together nor at once.
    pub fn delay(&self, failures: u32, jitter: f64) -> Duration {
        self.ceiling(failures).mul_f64(0.5 + 0.5 * jitter.clamp(0.0, 1.0))
    }

    /// The longest delay that [`Backoff::delay`] returns after this many failures.
    pub fn ceiling(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.first.saturating_mul(1 << doublings).min(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff { first: Duration::from_millis(100), max: Duration::from_secs(5) };

    #[test]
    fn delays_double_up_to_the_cap_and_stay_there() {
        let delays: Vec<_> = (0..8).map(|n| BACKOFF.delay(n, 1.0).as_millis()).collect();
        assert_eq!(delays, [100, 100, 200, 400, 800, 1600, 3200, 5000]);
        assert_eq!(BACKOFF.delay(u32::MAX, 1.0), BACKOFF.max);
    }

    #[test]
    fn jitter_moves_a_delay_within_its_upper_half() {
        assert_eq!(BACKOFF.delay(3, 0.0), Duration::from_millis(200));
        assert!(BACKOFF.delay(3, 0.5) < BACKOFF.delay(3, 1.0));
    }
}
