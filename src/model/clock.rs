//! How models that compute nothing let time pass: they sleep, or in tests with paused time only say for how
//! long they would have.

#[cfg(test)]
use std::cell::Cell;
use std::thread;
use std::time::Duration;

#[cfg(test)]
thread_local! {
    /// What is owed; none: time is real on this thread.
    static OWED: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Lets so much time pass.
pub(super) fn pass(time: Duration) {
    #[cfg(test)]
    if let Some(owed) = OWED.get() {
        OWED.set(Some(owed + time));
        return;
    }
    thread::sleep(time);
}

/// From now on, this thread only says how long it would have slept.
#[cfg(test)]
pub(crate) fn pretend() {
    OWED.set(Some(Duration::ZERO));
}

/// For how long it would have slept since [`pretend`].
#[cfg(test)]
pub(crate) fn owed() -> Duration {
    OWED.take().unwrap_or_default()
}
