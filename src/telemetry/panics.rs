//! Prints panics: of each place in the code one in a minute, and how many there were meanwhile, so that whoever can cause
//! panics cannot fill the disk with logs. Owns the counts by place. Catches no panic.

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::panic;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Throttle;

/// The shortest time between two printed panics of one place.
const INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of places that are told apart.
const MAX_PLACES: usize = 1_000;

/// How often each place panicked.
#[derive(Default)]
struct Places(HashMap<String, Throttle>);

impl Places {
    /// The number of panics of this place that were not printed, if this one is to be printed.
    fn pass(&mut self, place: String, now: Instant) -> Option<u64> {
        let is_known = self.0.len() < MAX_PLACES || self.0.contains_key(&place);
        let place = if is_known { place } else { "other places".to_owned() };
        self.0.entry(place).or_default().pass(INTERVAL, now)
    }
}

/// Prints the panics of this process from now on, with a backtrace if `RUST_BACKTRACE` asks for one.
pub(super) fn throttle() {
    let (print, places) = (panic::take_hook(), Mutex::new(Places::default()));
    panic::set_hook(Box::new(move |panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let Some(unprinted) = places.lock().pass(place.clone(), Instant::now()) else { return };
        if unprinted > 0 {
            // A closed stderr changes nothing.
            let _ = writeln!(
                io::stderr(),
                "{unprinted} more panics at {place} since the last one that was printed"
            );
        }
        print(panic);
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_has_its_own_minute_and_their_number_is_bounded() {
        let (mut places, begun) = (Places::default(), Instant::now());
        let mut pass =
            |place: &str, seconds| places.pass(place.to_owned(), begun + Duration::from_secs(seconds));
        assert_eq!(["a", "a", "b", "a"].map(|place| pass(place, 0)), [Some(0), None, Some(0), None]);
        assert_eq!(pass("a", 60), Some(2));
        (0..3_000).for_each(|place| _ = pass(&place.to_string(), 60));
        assert!(places.0.len() <= MAX_PLACES + 1);
    }
}
