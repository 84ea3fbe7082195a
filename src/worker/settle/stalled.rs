//! Decides which tasks may keep waiting for a reply queue that does not accept their replies. If there are too
//! many, the one that has waited longest gives up. Owns their number and bytes, so that requesters who do not
//! listen take at most half of what the worker may hold.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// The tasks whose replies wait. Shared by all tasks of a worker; locked for a few instructions.
pub(in crate::worker) struct Stalled(Mutex<Waiting>);

struct Waiting {
    /// The one that has waited longest is first.
    tasks: VecDeque<Task>,
    bytes: usize,
    next: u64,
    /// The most tasks that may wait.
    most: usize,
    /// The most bytes of their replies; one task may always wait.
    most_bytes: usize,
}

struct Task {
    id: u64,
    bytes: usize,
    /// Written when the task must stop waiting.
    evict: oneshot::Sender<()>,
}

/// One task's place among those that wait, until this is dropped.
pub(in crate::worker) struct Place<'a> {
    stalled: &'a Stalled,
    id: u64,
    evicted: oneshot::Receiver<()>,
}

impl Stalled {
    pub(in crate::worker) fn new(prefetch: u16, most_bytes: u64) -> Self {
        let most_bytes = usize::try_from(most_bytes).unwrap_or(usize::MAX);
        let tasks = VecDeque::new();
        let stalled = Self(Mutex::new(Waiting { tasks, bytes: 0, next: 0, most: 0, most_bytes }));
        stalled.set_prefetch(prefetch);
        stalled
    }

    pub(in crate::worker) fn set_prefetch(&self, prefetch: u16) {
        let mut waiting = self.lock();
        waiting.most = usize::from(prefetch) / 2;
        waiting.evict();
    }

    /// Adds a task whose reply of `bytes` bytes waits.
    pub(in crate::worker) fn enter(&self, bytes: usize) -> Place<'_> {
        let (evict, evicted) = oneshot::channel();
        let mut waiting = self.lock();
        let id = waiting.next;
        waiting.next += 1;
        waiting.bytes += bytes;
        waiting.tasks.push_back(Task { id, bytes, evict });
        waiting.evict();
        Place { stalled: self, id, evicted }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn evict(&mut self) {
        while self.tasks.len() > self.most || (self.bytes > self.most_bytes && self.tasks.len() > 1) {
            let Some(longest) = self.tasks.pop_front() else { return };
            self.bytes -= longest.bytes;
            let _ = longest.evict.send(());
        }
    }
}

impl Place<'_> {
    /// Returns when the task must stop waiting.
    pub(in crate::worker) async fn evicted(&mut self) {
        let _ = (&mut self.evicted).await;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut waiting = self.stalled.lock();
        if let Some(at) = waiting.tasks.iter().position(|task| task.id == self.id)
            && let Some(task) = waiting.tasks.remove(at)
        {
            waiting.bytes -= task.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn are_evicted(places: &mut [Place<'_>]) -> Vec<bool> {
        places.iter_mut().map(|place| place.evicted().now_or_never().is_some()).collect()
    }

    #[test]
    fn half_of_the_prefetch_may_wait_and_then_the_longest_waits_no_more() {
        let stalled = Stalled::new(6, 1_000);
        let mut places: Vec<_> = (0..4).map(|_| stalled.enter(1)).collect();
        assert_eq!(are_evicted(&mut places), [true, false, false, false]);
        drop(places.remove(1));
        places.push(stalled.enter(1));
        assert_eq!(are_evicted(&mut places[1..]), [false; 3], "one has left");
        stalled.set_prefetch(2);
        assert_eq!(are_evicted(&mut places[1..]), [true, true, false]);
    }

    #[test]
    fn their_replies_are_bounded_in_bytes_and_one_may_always_wait() {
        let stalled = Stalled::new(100, 1_000);
        let mut places = vec![stalled.enter(5_000)];
        assert_eq!(are_evicted(&mut places), [false]);
        places.push(stalled.enter(600));
        assert_eq!(are_evicted(&mut places), [true, false]);
        places.push(stalled.enter(400));
        assert_eq!(are_evicted(&mut places[1..]), [false, false]);
    }

    #[test]
    fn a_worker_with_one_task_in_hand_has_no_room_for_one_that_waits() {
        let stalled = Stalled::new(1, 1_000);
        assert_eq!(are_evicted(&mut [stalled.enter(1)]), [true]);
    }
}
