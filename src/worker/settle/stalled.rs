//! Decides which tasks may keep waiting for a reply queue that does not accept their replies. If too many wait, the one
//! that has waited longest gives up. Owns the list of those that wait: at most half of the messages that the
//! broker grants, and at most `prefetch_bytes` of replies.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Decides which tasks may keep waiting. Shared by all tasks of a worker; locked for a few instructions.
pub(in crate::worker) struct Stalled(Mutex<StalledTasks>);

/// The tasks whose replies wait, and the bounds of the list.
struct StalledTasks {
    /// The task that has waited longest is first.
    tasks: VecDeque<StalledTask>,
    /// The most tasks that may wait.
    max_tasks: usize,
    /// The most bytes of their replies. A single larger reply may wait, if `max_tasks` allows a task at all.
    max_bytes: usize,
}

struct StalledTask {
    /// The bytes of its reply.
    bytes: usize,
    /// Tells the task to stop waiting. A task that no longer waits has dropped the receiver.
    evict: oneshot::Sender<()>,
}

impl Stalled {
    /// Creates an empty list. [`Stalled::set_granted`] explains `granted`; `max_bytes` bounds the replies that wait.
    pub(in crate::worker) fn new(granted: u16, max_bytes: u64) -> Self {
        let max_bytes = usize::try_from(max_bytes).unwrap_or(usize::MAX);
        let stalled = Self(Mutex::new(StalledTasks { tasks: VecDeque::new(), max_tasks: 0, max_bytes }));
        stalled.set_granted(granted);
        stalled
    }

    /// Sets how many unsettled messages the broker may send now. That may be less than the worker wants: a consumer
    /// that holds old messages does not get a larger prefetch.
    pub(in crate::worker) fn set_granted(&self, granted: u16) {
        self.change(|stalled| stalled.max_tasks = usize::from(granted) / 2);
    }

    /// Adds a task whose reply of `bytes` bytes waits, until the receiver is dropped. The receiver resolves when the
    /// task must stop waiting.
    pub(in crate::worker) fn enter(&self, bytes: usize) -> oneshot::Receiver<()> {
        let (evict, evicted) = oneshot::channel();
        self.change(|stalled| stalled.tasks.push_back(StalledTask { bytes, evict }));
        evicted
    }

    fn change(&self, change: impl FnOnce(&mut StalledTasks)) {
        let mut stalled = self.0.lock();
        stalled.tasks.retain(|task| !task.evict.is_closed());
        change(&mut stalled);
        let mut bytes: usize = stalled.tasks.iter().map(|task| task.bytes).sum();
        while stalled.tasks.len() > stalled.max_tasks
            || (bytes > stalled.max_bytes && stalled.tasks.len() > 1)
        {
            let Some(oldest) = stalled.tasks.pop_front() else { return };
            bytes -= oldest.bytes;
            let _ = oldest.evict.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn are_evicted(places: &mut [oneshot::Receiver<()>]) -> Vec<bool> {
        places.iter_mut().map(|place| place.now_or_never().is_some()).collect()
    }

    #[test]
    fn at_most_half_the_granted_tasks_wait_and_the_longest_waiting_gives_up() {
        let stalled = Stalled::new(6, 1_000);
        let mut places: Vec<_> = (0..4).map(|_| stalled.enter(1)).collect();
        assert_eq!(are_evicted(&mut places), [true, false, false, false]);
        drop(places.remove(1));
        places.push(stalled.enter(1));
        assert_eq!(are_evicted(&mut places[1..]), [false; 3], "one has stopped waiting");
        stalled.set_granted(2);
        assert_eq!(are_evicted(&mut places[1..]), [true, true, false]);
    }

    #[test]
    fn waiting_replies_are_bounded_in_bytes_but_one_may_always_wait() {
        let stalled = Stalled::new(100, 1_000);
        let mut places = vec![stalled.enter(5_000)];
        assert_eq!(are_evicted(&mut places), [false]);
        places.push(stalled.enter(600));
        assert_eq!(are_evicted(&mut places), [true, false]);
        places.push(stalled.enter(400));
        assert_eq!(are_evicted(&mut places[1..]), [false, false]);
    }

    #[test]
    fn with_a_prefetch_of_one_no_task_may_wait() {
        let stalled = Stalled::new(1, 1_000);
        assert_eq!(are_evicted(&mut [stalled.enter(1)]), [true]);
    }
}
