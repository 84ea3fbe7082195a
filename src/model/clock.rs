//! The sleep of models without a network. In tests with paused time, a thread only adds up how long it would have
//! slept.

#[cfg(test)]
use std::cell::Cell;
use std::thread;
use std::time::Duration;

#[cfg(test)]
thread_local! {
    /// The sum of the sleeps so far. None if this thread really sleeps.
    static SLEPT: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Sleeps for `time`, or adds it up.
pub(crate) fn pass(time: Duration) {
    #[cfg(test)]
    if let Some(slept) = SLEPT.get() {
        SLEPT.set(Some(slept + time));
        return;
    }
    thread::sleep(time);
}

/// From now on this thread only adds up how long it would have slept.
#[cfg(test)]
pub(crate) fn pause() {
    SLEPT.set(Some(Duration::ZERO));
}

/// Returns how long this thread would have slept since [`pause`]. From now on it really sleeps again.
#[cfg(test)]
pub(crate) fn resume() -> Duration {
    SLEPT.take().unwrap_or_default()
}
