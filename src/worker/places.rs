//! Decides which accepted tasks are put off because their requester holds too many places. A place is one of the
//! messages that the broker grants to this worker. If one requester's slow tasks hold all places, the worker does not
//! learn of the tasks of others behind them. Owns the list of the accepted tasks of the main queue. Does no I/O.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::broker::DeliveryTag;

/// Tasks are slow if those of their requester hold their places for longer than this, on average.
const SLOW: Duration = Duration::from_secs(1);
/// The weight of the latest task in that average.
const LATEST_WEIGHT: f64 = 0.25;
/// The most tasks that are put off at once. The number is bounded because it is not known whether tasks of others wait
/// behind them.
const BURST: f64 = 64.0;
/// The most tasks a second that are put off once as many as [`BURST`] were put off in vain, which means that no task of
/// a further requester has arrived meanwhile.
const RATE: f64 = 2.0;
/// Tasks that may have begun are put off only while more than this of [`BURST`] is left. With less, only tasks that
/// arrive are, because what has begun would be computed again.
const LEFT_FOR_BEGUN: f64 = BURST / 2.0;

/// The accepted tasks. Clones share the list.
#[derive(Clone)]
pub(super) struct Places(Arc<Mutex<List>>);

struct List {
    /// The most places that slow tasks may hold.
    most: usize,
    /// In the order of delivery.
    tasks: BTreeMap<DeliveryTag, Task>,
    /// The requesters of these tasks.
    requesters: HashMap<u64, Requester>,
    /// How many tasks may be put off now.
    permits: f64,
    /// When `permits` was last renewed.
    renewed: Instant,
}

struct Task {
    requester: u64,
    since: Instant,
    call: Arc<Call>,
}

#[derive(Default)]
struct Requester {
    /// The number of its tasks that hold a place and have not been called.
    held: usize,
    /// How long its tasks have held their places, on average.
    average: Duration,
}

/// Tells a task that it is to be put off.
#[derive(Default)]
struct Call {
    /// Written once, by whoever reviews the list.
    made: AtomicBool,
    notify: Notify,
    /// Written by the task: it must not be put off any more.
    stays: AtomicBool,
}

/// The place of one task, until it is dropped.
pub(super) struct Place {
    places: Places,
    delivery: DeliveryTag,
    call: Arc<Call>,
}

impl Place {
    /// Whether the task is to be put off.
    pub(super) fn is_called(&self) -> bool {
        self.call.made.load(Ordering::Relaxed)
    }

    /// Returns when the task is to be put off. Safe to cancel.
    pub(super) async fn called(&self) {
        loop {
            self.call.notify.notified().await;
            if !self.call.stays.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// The task cannot be put off from now on.
    pub(super) fn stay(&self) {
        self.call.stays.store(true, Ordering::Relaxed);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().leave(self.delivery, Instant::now());
    }
}

impl Places {
    /// `granted` as in [`Places::set_granted`].
    pub(super) fn new(granted: u16) -> Self {
        let (tasks, requesters) = (BTreeMap::new(), HashMap::new());
        let list = List { most: 1, tasks, requesters, permits: BURST, renewed: Instant::now() };
        let places = Self(Arc::new(Mutex::new(list)));
        places.set_granted(granted);
        places
    }

    /// Sets how many unsettled messages of the main queue the broker may send now. Slow tasks may hold three quarters
    /// of these places.
    pub(super) fn set_granted(&self, granted: u16) {
        self.lock().most = (usize::from(granted) * 3 / 4).max(1);
    }

    /// Adds a task of `requester`, until the place is dropped.
    pub(super) fn enter(&self, delivery: DeliveryTag, requester: u64) -> Place {
        let call = Arc::new(Call::default());
        let now = Instant::now();
        self.lock().enter(delivery, Task { requester, since: now, call: call.clone() }, now);
        Place { places: self.clone(), delivery, call }
    }

    /// Calls tasks while slow ones hold too many places. Must be called from time to time, because tasks become slow
    /// without any event.
    pub(super) fn review(&self) {
        self.lock().review(Instant::now());
    }

    /// Whether so many tasks are accepted that a review may call one.
    pub(super) fn may_be_crowded(&self) -> bool {
        let list = self.lock();
        list.tasks.len() > list.most
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl List {
    /// Adds a task. Calls it at once if its requester holds too many places.
    fn enter(&mut self, delivery: DeliveryTag, task: Task, now: Instant) {
        self.renew(now);
        let requester = task.requester;
        if !self.requesters.contains_key(&requester) {
            // A further requester was found, so it is useful to look on.
            self.permits = BURST;
        }
        self.requesters.entry(requester).or_default().held += 1;
        self.tasks.insert(delivery, task);
        if self.permits >= 1.0 && self.crowding(now) == Some(requester) {
            self.call_latest(requester);
        }
    }

    fn renew(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.renewed).as_secs_f64();
        // These never suffice for a task that may have begun.
        let renewed = (self.permits + RATE * elapsed).min(LEFT_FOR_BEGUN);
        (self.permits, self.renewed) = (self.permits.max(renewed), now);
    }

    fn leave(&mut self, delivery: DeliveryTag, now: Instant) {
        let Some(task) = self.tasks.remove(&delivery) else { return };
        let is_last = !self.tasks.values().any(|other| other.requester == task.requester);
        if is_last {
            self.requesters.remove(&task.requester);
        } else if !task.call.made.load(Ordering::Relaxed)
            && let Some(requester) = self.requesters.get_mut(&task.requester)
        {
            requester.held -= 1;
            let held = now.saturating_duration_since(task.since);
            requester.average = requester.average.mul_f64(1.0 - LATEST_WEIGHT) + held.mul_f64(LATEST_WEIGHT);
        }
    }

    /// While slow tasks hold too many places, calls the latest task of the requester that holds the most.
    fn review(&mut self, now: Instant) {
        self.renew(now);
        while self.permits > LEFT_FOR_BEGUN
            && let Some(requester) = self.crowding(now)
            && self.call_latest(requester)
        {}
    }

    /// The requester that holds the most places, if slow tasks hold too many. A requester with one task keeps it.
    /// Chance decides between requesters that hold as many.
    fn crowding(&self, now: Instant) -> Option<u64> {
        if self.tasks.len() <= self.most {
            return None;
        }
        let mut oldest: HashMap<u64, Duration> = HashMap::new();
        for task in self.tasks.values() {
            oldest.entry(task.requester).or_insert(now.saturating_duration_since(task.since));
        }
        let is_slow = |(key, requester): &(&u64, &Requester)| {
            oldest.get(key).is_some_and(|oldest| requester.average.max(*oldest) > SLOW)
        };
        let slow = self.requesters.iter().filter(is_slow);
        if slow.clone().map(|(_, it)| it.held).sum::<usize>() <= self.most {
            return None;
        }
        let several = slow.filter(|(_, it)| it.held > 1);
        several.max_by_key(|(_, it)| (it.held, rand::random::<u32>())).map(|(key, _)| *key)
    }

    /// Calls the latest task of this requester that may be put off. Returns false if there is none.
    fn call_latest(&mut self, requester: u64) -> bool {
        let may_leave = |task: &&Task| {
            task.requester == requester
                && !task.call.stays.load(Ordering::Relaxed)
                && !task.call.made.load(Ordering::Relaxed)
        };
        let Some(task) = self.tasks.values().rev().find(may_leave) else { return false };
        task.call.made.store(true, Ordering::Relaxed);
        task.call.notify.notify_one();
        self.permits -= 1.0;
        if let Some(requester) = self.requesters.get_mut(&requester) {
            requester.held -= 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::time::advance;

    use super::*;
    use crate::broker::Source;

    const GRANTED: u16 = 8;

    struct Rig {
        places: Places,
        delivered: u64,
    }

    impl Rig {
        fn new() -> Self {
            Self { places: Places::new(GRANTED), delivered: 0 }
        }

        fn enter(&mut self, requester: u64) -> Place {
            self.delivered += 1;
            let delivery = DeliveryTag { source: Source::Main, session: 1, tag: self.delivered };
            self.places.enter(delivery, requester)
        }
    }

    fn called(places: &[Place]) -> Vec<bool> {
        places.iter().map(|place| place.called().now_or_never().is_some()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn slow_tasks_of_one_requester_leave_a_quarter_of_the_places() {
        let mut rig = Rig::new();
        let mut places: Vec<Place> = (0..8).map(|_| rig.enter(1)).collect();
        advance(SLOW).await;
        rig.places.review();
        assert_eq!(called(&places), [false; 8]);
        advance(Duration::from_millis(1)).await;
        rig.places.review();
        assert_eq!(called(&places), [false, false, false, false, false, false, true, true], "the latest");
        places.truncate(6);
        // The place of the one that ended is for the next, which is known to be slow before it begins.
        places.remove(0);
        places.push(rig.enter(1));
        assert_eq!(called(&places), [false; 6]);
        let late = [rig.enter(1), rig.enter(2)];
        assert_eq!(called(&late), [true, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn quick_tasks_may_hold_all_places() {
        let mut rig = Rig::new();
        for _ in 0..100 {
            let places: Vec<Place> = (0..8).map(|_| rig.enter(1)).collect();
            advance(SLOW / 2).await;
            rig.places.review();
            assert_eq!(called(&places), [false; 8]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requesters_with_one_task_each_keep_their_places() {
        let mut rig = Rig::new();
        let mut places: Vec<Place> = (0..6).map(|requester| rig.enter(requester)).collect();
        places.extend([rig.enter(7), rig.enter(7)]);
        advance(2 * SLOW).await;
        rig.places.review();
        assert_eq!(called(&places), [false, false, false, false, false, false, false, true]);
        rig.places.review();
        assert_eq!(called(&places), [false; 8], "there are seven, one of each");
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_must_stay_is_not_called_and_an_earlier_one_is() {
        let mut rig = Rig::new();
        let places: Vec<Place> = (0..7).map(|_| rig.enter(1)).collect();
        places[6].stay();
        advance(2 * SLOW).await;
        rig.places.review();
        assert_eq!(called(&places), [false, false, false, false, false, true, false]);
        places[5].stay();
        rig.places.review();
        assert_eq!(called(&places), [false; 7]);
    }

    /// Returns how many of 200 slow tasks that arrive one after another within `time` are put off.
    async fn put_off(rig: &mut Rig, requester: u64, time: Duration) -> usize {
        let mut count = 0;
        let mut kept = Vec::new();
        for _ in 0..200 {
            advance(time / 200).await;
            let place = rig.enter(requester);
            if called(std::slice::from_ref(&place)) == [true] { count += 1 } else { kept.push(place) }
        }
        count
    }

    #[tokio::test(start_paused = true)]
    async fn few_tasks_are_put_off_in_vain_and_more_once_another_requester_is_found() {
        let mut rig = Rig::new();
        let _held: Vec<Place> = (0..6).map(|_| rig.enter(1)).collect();
        advance(2 * SLOW).await;
        let first = put_off(&mut rig, 1, Duration::from_secs(1)).await;
        assert!((64..=66).contains(&first), "{first}");
        let next = put_off(&mut rig, 1, Duration::from_secs(10)).await;
        assert!((19..=21).contains(&next), "{next}");
        drop(rig.enter(2));
        assert_eq!(put_off(&mut rig, 1, Duration::from_millis(1)).await, BURST as usize);
    }
}
