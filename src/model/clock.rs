//! How models without a network spend time: they sleep. In tests with paused time they only add up how long they
//! would have slept.

#[cfg(test)]
use std::cell::Cell;
use std::thread;
use std::time::Duration;

#[cfg(test)]
thread_local! {
    /// The sum of the sleeps so far. None if this thread really sleeps.
    static OWED: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Lets `time` pass.
pub(crate) fn pass(time: Duration) {
    #[cfg(test)]
    if let Some(owed) = OWED.get() {
        OWED.set(Some(owed + time));
        return;
    }
    thread::sleep(time);
}

/// From now on this thread only adds up how long it would have slept.
#[cfg(test)]
pub(crate) fn pretend() {
    OWED.set(Some(Duration::ZERO));
}

/// Returns how long this thread would have slept since [`pretend`]. From now on it really sleeps again.
#[cfg(test)]
pub(crate) fn owed() -> Duration {
    OWED.take().unwrap_or_default()
}
