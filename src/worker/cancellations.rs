//! Passes cancellations from the reader of the launcher's commands to the intake of the current session. None is lost
//! while there is a session: if too many wait, the reader waits, and with it the launcher and the broker. Owns the list
//! of those that wait. Also remembers recent ones, for tasks that no worker held when they were cancelled, because they
//! waited in their queue, or for their return after they were put off.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::mem;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use crate::protocol::Task;
use crate::protocol::control::{Cancellation, WITHDRAWN_FOR};
use crate::protocol::task::published;

/// The reader waits while at least this many wait. The intake takes all of them at once, so that this many are waiting only if its
/// thread was busy for seconds.
const MAX_WAITING: usize = 16_384;

/// How many cancellations are remembered; the oldest are forgotten first.
const MAX_RECENT: usize = 16_384;
/// A task that was put off up to this long after its cancellation came counts as put off before it: the clocks of two
/// workers differ, and the intake may not have seen the cancellation yet.
const TOLERANCE: Duration = Duration::from_secs(1);

/// The reader's end. Clones share the list.
#[derive(Clone, Debug, Default)]
pub struct Cancellations(Arc<CancellationState>);

#[derive(Debug, Default)]
struct CancellationState {
    list: Mutex<WaitingList>,
    /// Written by the reader, read by the intake for each task.
    recent: Mutex<Recent>,
    /// Notified when some are added; the intake waits for it.
    added: Notify,
    /// Notified when the list was taken or closed; the reader waits for it.
    taken: Condvar,
}

#[derive(Debug, Default)]
struct WaitingList {
    waiting: Vec<Cancellation>,
    /// Whether there is a session.
    is_open: bool,
}

/// The intake's end. Dropping it closes the list.
pub(super) struct IntakeEnd(Arc<CancellationState>);

/// What a cancellation names a task by.
#[derive(Hash)]
enum Name<'a> {
    /// Its id.
    Task(&'a str),
    /// Its `correlation_id` and its `reply_to`.
    Requester((&'a str, &'a str)),
}

/// The recent cancellations of tasks, by the hashes of the tasks' names.
#[derive(Debug, Default)]
struct Recent {
    hasher: RandomState,
    cancelled: HashMap<u64, Cancelled>,
    /// In the order in which they came.
    order: VecDeque<(u64, SystemTime)>,
}

/// The latest cancellation of a task.
#[derive(Clone, Copy, Debug)]
struct Cancelled {
    /// When the cancellation came.
    at: SystemTime,
    /// When the requester published the cancellation, if that is known.
    published: Option<SystemTime>,
}

impl Recent {
    fn remember(&mut self, cancellation: &Cancellation, at: SystemTime) {
        let name = match (&cancellation.task, cancellation.requester_ids()) {
            (Some(id), _) => Name::Task(id),
            (None, Some(ids)) => Name::Requester(ids),
            // The tasks of jobs are remembered in `withdrawn`.
            (None, None) => return,
        };
        let key = self.hasher.hash_one(name);
        let published = cancellation.published_ms.map(|ms| UNIX_EPOCH + Duration::from_millis(ms));
        self.cancelled.insert(key, Cancelled { at, published });
        self.order.push_back((key, at));
        while self.order.len() > MAX_RECENT || self.order.front().is_some_and(|(_, old)| is_over(*old, at)) {
            let Some((key, old)) = self.order.pop_front() else { return };
            // A later cancellation of the same task stays.
            if self.cancelled.get(&key).is_some_and(|cancelled| cancelled.at == old) {
                self.cancelled.remove(&key);
            }
        }
    }

    /// Whether this task, which has just been delivered, was cancelled before. A later task with the same name was not.
    fn has(&self, task: &Task, now: SystemTime) -> bool {
        if self.cancelled.is_empty() {
            return false;
        }
        let names = [Some(Name::Task(&task.id)), task.requester_ids().map(Name::Requester)];
        let mut found = names.into_iter().flatten().filter_map(|name| {
            self.cancelled.get(&self.hasher.hash_one(name)).filter(|found| !is_over(found.at, now))
        });
        let was_published_before =
            |published_at: SystemTime| published(&task.message).is_some_and(|at| at < published_at);
        let was_put_off_before =
            |came_at: SystemTime| task.returning_since().is_some_and(|since| since <= came_at + TOLERANCE);
        found.any(|Cancelled { at, published }| {
            published.is_some_and(was_published_before) || was_put_off_before(*at)
        })
    }
}

/// Whether a cancellation that came at this time is forgotten.
fn is_over(at: SystemTime, now: SystemTime) -> bool {
    now.duration_since(at).is_ok_and(|age| age > WITHDRAWN_FOR)
}

impl Cancellations {
    /// Adds cancellations, and remembers them. Blocks the thread while too many wait. Returns false if there is no
    /// session, and so no task to cancel.
    pub fn add(&self, cancellations: Vec<Cancellation>) -> bool {
        {
            let (mut recent, now) = (self.0.recent.lock(), SystemTime::now());
            cancellations.iter().for_each(|cancellation| recent.remember(cancellation, now));
        }
        let mut list = self.0.list.lock();
        while list.is_open && list.waiting.len() >= MAX_WAITING {
            self.0.taken.wait(&mut list);
        }
        let is_open = list.is_open;
        if is_open {
            list.waiting.extend(cancellations);
            self.0.added.notify_one();
        }
        is_open
    }

    /// Opens the list for a session.
    pub(super) fn open(&self) -> IntakeEnd {
        self.0.list.lock().is_open = true;
        IntakeEnd(self.0.clone())
    }
}

impl IntakeEnd {
    /// Whether a task was cancelled while no worker held it.
    pub(super) fn had(&self, task: &Task) -> bool {
        self.0.recent.lock().has(task, SystemTime::now())
    }

    /// Takes all cancellations, once there is one. Safe to cancel.
    pub(super) async fn take(&self) -> Vec<Cancellation> {
        loop {
            let added = self.0.added.notified();
            let all = mem::take(&mut self.0.list.lock().waiting);
            if !all.is_empty() {
                self.0.taken.notify_all();
                return all;
            }
            added.await;
        }
    }
}

impl Drop for IntakeEnd {
    fn drop(&mut self) {
        *self.0.list.lock() = WaitingList::default();
        self.0.taken.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::protocol::Message;

    fn some(count: usize) -> Vec<Cancellation> {
        vec![Cancellation::default(); count]
    }

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_700_000_000 + seconds)
    }

    /// A task of the requester `mine`, published at 10 s.
    fn task(id: &str, reply_to: &str) -> Task {
        let mut message = Message::default();
        message.properties.correlation_id = Some(id.to_owned());
        message.properties.reply_to = Some(reply_to.to_owned());
        message.properties.timestamp = Some(1_700_000_010);
        Task { id: id.to_owned(), message, received: at(10) }
    }

    /// The cancellation of the task `a` of `mine`.
    fn of_requester(published: Option<u64>) -> Cancellation {
        let published_ms = published.map(|seconds| (1_700_000_000 + seconds) * 1_000);
        let (correlation_id, reply_to) = (Some("a".to_owned()), Some("mine".to_owned()));
        Cancellation { correlation_id, reply_to, published_ms, ..Cancellation::default() }
    }

    #[test]
    fn a_task_that_was_put_off_before_its_cancellation_is_cancelled_when_it_returns() {
        let returned = |id, reply_to, since| {
            let message = task(id, reply_to).put_off(None, None, at(since));
            Task { id: id.to_owned(), message, received: at(30) }
        };
        let by_id = Cancellation { task: Some("a".to_owned()), ..Cancellation::default() };
        for cancellation in [of_requester(None), by_id] {
            let mut recent = Recent::default();
            assert!(!recent.has(&returned("a", "mine", 15), at(30)));
            recent.remember(&cancellation, at(20));
            assert!(recent.has(&returned("a", "mine", 15), at(30)));
            assert!(!recent.has(&task("a", "mine"), at(30)), "it may be a later task of the same name");
            assert!(!recent.has(&returned("a", "mine", 25), at(30)), "it was put off later");
            assert!(!recent.has(&returned("b", "mine", 15), at(30)));
            assert_eq!(recent.has(&returned("a", "other", 15), at(30)), cancellation.task.is_some());
            assert!(!recent.has(&returned("a", "mine", 15), at(21) + WITHDRAWN_FOR));
        }
    }

    #[test]
    fn a_task_that_waits_in_its_queue_is_cancelled_if_it_was_published_before_the_cancellation() {
        for (published, expected) in [(Some(11), true), (Some(10), false), (None, false)] {
            let mut recent = Recent::default();
            recent.remember(&of_requester(published), at(20));
            assert_eq!(recent.has(&task("a", "mine"), at(30)), expected, "{published:?}");
            assert!(!recent.has(&task("a", "other"), at(30)));
        }
    }

    #[test]
    fn the_cancellations_that_are_remembered_are_bounded() {
        let mut recent = Recent::default();
        recent.remember(&of_requester(Some(11)), at(20));
        let other =
            |number: usize| Cancellation { task: Some(number.to_string()), ..Cancellation::default() };
        (0..MAX_RECENT - 1).for_each(|number| recent.remember(&other(number), at(20)));
        assert!(recent.has(&task("a", "mine"), at(20)));
        recent.remember(&of_requester(Some(11)), at(21));
        assert!(recent.has(&task("a", "mine"), at(21)), "the later one stays");
        assert_eq!((recent.order.len(), recent.cancelled.len()), (MAX_RECENT, MAX_RECENT));
        recent.remember(&other(0), at(22) + WITHDRAWN_FOR);
        assert_eq!((recent.order.len(), recent.cancelled.len()), (1, 1));
    }

    #[tokio::test]
    async fn none_is_lost_while_the_intake_is_busy() {
        let cancellations = Cancellations::default();
        assert!(!cancellations.add(some(1)), "there is no session");
        let waiting = cancellations.open();
        let reader = cancellations.clone();
        let reader = thread::spawn(move || (0..3).all(|_| reader.add(some(MAX_WAITING))));
        let mut taken = 0;
        while taken < 3 * MAX_WAITING {
            let all = waiting.take().await.len();
            assert!(all <= MAX_WAITING, "the reader waits for the intake");
            taken += all;
        }
        assert!(reader.join().unwrap());
        cancellations.add(some(MAX_WAITING));
        let reader = thread::spawn(move || cancellations.add(some(1)));
        // Once it waits, it can be woken; it finds the list full, and waits again.
        while !waiting.0.taken.notify_one() {
            thread::yield_now();
        }
        drop(waiting);
        assert!(!reader.join().unwrap(), "the session has ended");
    }
}
