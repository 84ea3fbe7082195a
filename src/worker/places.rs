//! Decides which accepted tasks are put off because their requester holds too many places. A place is one of the
//! messages that the broker grants to this worker. If one requester's slow tasks hold all places, the worker does not
//! learn of the tasks of others behind them. Owns the list of the accepted tasks of the main queue. Does no I/O.
//!
//! Slow tasks **begin** while they hold at most three quarters of the places. Beyond that, further tasks of a requester
//! with more than a quarter of the places wait without having begun, until they are put off or others have ended.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

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
/// The shortest time between two bursts: a further requester may be an invented one.
const BURST_INTERVAL: Duration = Duration::from_secs(5);
/// Tasks that have begun are put off only while more than this of [`BURST`] is left, because what was computed of them
/// is lost.
const LEFT_FOR_BEGUN: f64 = BURST / 2.0;

/// The accepted tasks. Clones share the list.
#[derive(Clone)]
pub(super) struct Places(Arc<Mutex<List>>);

struct List {
    /// The places: the messages that the broker may send.
    granted: usize,
    /// In the order of delivery.
    tasks: BTreeMap<DeliveryTag, Task>,
    /// The requesters of these tasks.
    requesters: HashMap<u64, Requester>,
    /// How many tasks may be put off now.
    permits: f64,
    /// When `permits` was last renewed.
    renewed: Instant,
    /// When `permits` was last set to [`BURST`].
    burst: Instant,
    /// When a task that was called last left.
    put_off: Option<SystemTime>,
    /// Until then no task is called, and all begin.
    suspended: Option<Instant>,
}

struct Task {
    requester: u64,
    since: Instant,
    state: State,
    signal: Arc<Signal>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It has not begun, and waits for that.
    Waits,
    Begun,
    /// It was told that it is to be put off.
    Called,
}

#[derive(Default)]
struct Requester {
    /// Its tasks in the order of delivery.
    tasks: BTreeSet<DeliveryTag>,
    /// How many of them have begun, and how many wait.
    begun: usize,
    waiting: usize,
    /// How long its tasks have held their places, on average.
    average: Duration,
}

/// Tells a task that it may begin, or that it is to be put off. The flags are written once, by whoever changes the
/// list, except for `stays`.
#[derive(Default)]
struct Signal {
    may_begin: AtomicBool,
    begin: Notify,
    call: Notify,
    /// Written by the task: it must not be put off any more.
    stays: AtomicBool,
}

/// The place of one task, until it is dropped.
pub(super) struct Place {
    places: Places,
    delivery: DeliveryTag,
    signal: Arc<Signal>,
}

impl Place {
    /// Whether the task may begin.
    pub(super) fn may_begin(&self) -> bool {
        self.signal.may_begin.load(Ordering::Relaxed)
    }

    /// Returns when the task may begin. Safe to cancel.
    pub(super) async fn begins(&self) {
        while !self.may_begin() {
            self.signal.begin.notified().await;
        }
    }

    /// Returns when the task is to be put off. Safe to cancel.
    pub(super) async fn called(&self) {
        loop {
            self.signal.call.notified().await;
            if !self.signal.stays.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// The task cannot be put off from now on.
    pub(super) fn stay(&self) {
        self.signal.stays.store(true, Ordering::Relaxed);
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
        let now = Instant::now();
        Self(Arc::new(Mutex::new(List {
            granted: granted.into(),
            tasks: BTreeMap::new(),
            requesters: HashMap::new(),
            permits: BURST,
            renewed: now,
            burst: now,
            put_off: None,
            suspended: None,
        })))
    }

    /// Sets how many unsettled messages of the main queue the broker may send now.
    pub(super) fn set_granted(&self, granted: u16) {
        self.lock().granted = granted.into();
    }

    /// Adds a task of `requester`, until the place is dropped.
    pub(super) fn enter(&self, delivery: DeliveryTag, requester: u64) -> Place {
        let signal = Arc::new(Signal::default());
        let now = Instant::now();
        let task = Task { requester, since: now, state: State::Waits, signal: signal.clone() };
        self.lock().enter(delivery, task, now);
        Place { places: self.clone(), delivery, signal }
    }

    /// Calls tasks while slow ones hold too many places. Must be called from time to time, because tasks become slow
    /// without any event.
    pub(super) fn review(&self) {
        self.lock().review(Instant::now());
    }

    /// Whether so many tasks are accepted that a review may change something.
    pub(super) fn may_be_crowded(&self) -> bool {
        let list = self.lock();
        list.tasks.len() > list.most()
    }

    /// Whether a task was put off since this time, or at all if that is unknown, or is being put off now.
    pub(super) fn has_put_off_since(&self, time: Option<SystemTime>) -> bool {
        let list = self.lock();
        let is_later = |put_off: SystemTime| time.is_none_or(|time| put_off >= time);
        list.put_off.is_some_and(is_later) || list.tasks.values().any(|task| task.state == State::Called)
    }

    /// Lets all tasks begin, and calls none for this time.
    pub(super) fn suspend(&self, time: Duration) {
        let now = Instant::now();
        let mut list = self.lock();
        list.suspended = now.checked_add(time);
        list.review(now);
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl List {
    /// The most places that slow tasks may hold.
    fn most(&self) -> usize {
        (self.granted * 3 / 4).max(1)
    }

    /// Adds a task, which begins at once unless its requester holds too many places.
    fn enter(&mut self, delivery: DeliveryTag, task: Task, now: Instant) {
        self.renew(now);
        let key = task.requester;
        if !self.requesters.contains_key(&key) && now >= self.burst + BURST_INTERVAL {
            // A further requester was found, so it is useful to look on.
            (self.permits, self.burst) = (BURST, now);
        }
        let requester = self.requesters.entry(key).or_default();
        requester.tasks.insert(delivery);
        requester.waiting += 1;
        self.tasks.insert(delivery, task);
        if !self.is_crowding(key, now) {
            self.begin(delivery);
        } else if self.permits >= 1.0 {
            self.call(delivery);
        }
    }

    fn leave(&mut self, delivery: DeliveryTag, now: Instant) {
        let Some(task) = self.tasks.remove(&delivery) else { return };
        let Some(requester) = self.requesters.get_mut(&task.requester) else { return };
        requester.tasks.remove(&delivery);
        match task.state {
            State::Waits => requester.waiting -= 1,
            State::Called => self.put_off = Some(SystemTime::now()),
            State::Begun => {
                requester.begun -= 1;
                let held = now.saturating_duration_since(task.since);
                requester.average =
                    requester.average.mul_f64(1.0 - LATEST_WEIGHT) + held.mul_f64(LATEST_WEIGHT);
            }
        }
        if requester.tasks.is_empty() {
            self.requesters.remove(&task.requester);
        }
        self.begin_waiting(now);
    }

    fn renew(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.renewed).as_secs_f64();
        // These never suffice for a task that has begun.
        let renewed = (self.permits + RATE * elapsed).min(LEFT_FOR_BEGUN);
        (self.permits, self.renewed) = (self.permits.max(renewed), now);
    }

    /// Lets waiting tasks begin where that is possible. Then calls those that wait, and while slow tasks hold too many
    /// places, those that have begun: the latest first, and of the requester that holds the most places.
    fn review(&mut self, now: Instant) {
        self.renew(now);
        self.begin_waiting(now);
        if self.is_suspended(now) {
            return;
        }
        let waits = |(_, task): &(&DeliveryTag, &Task)| task.state == State::Waits;
        while self.permits >= 1.0
            && let Some((delivery, _)) = self.tasks.iter().rev().find(waits)
        {
            self.call(*delivery);
        }
        while self.permits > LEFT_FOR_BEGUN
            && self.slow_begun(now) > self.most()
            && let Some(delivery) = self.latest_of_largest(now)
        {
            self.call(delivery);
        }
    }

    /// The latest task that may be put off, of the requester that holds the most places and more than a quarter. Chance
    /// decides between requesters that hold as many.
    fn latest_of_largest(&self, now: Instant) -> Option<DeliveryTag> {
        let large = self.requesters.iter().filter(|(_, it)| self.is_large(it) && self.is_slow(it, now));
        let (_, largest) = large.max_by_key(|(_, it)| (it.begun, rand::random::<u32>()))?;
        let may_leave = |delivery: &&DeliveryTag| {
            let task = self.tasks.get(delivery);
            task.is_some_and(|it| it.state == State::Begun && !it.signal.stays.load(Ordering::Relaxed))
        };
        largest.tasks.iter().rev().find(may_leave).copied()
    }

    fn begin_waiting(&mut self, now: Instant) {
        if self.requesters.values().all(|requester| requester.waiting == 0) {
            return;
        }
        let waiting = self.tasks.iter().filter(|(_, task)| task.state == State::Waits);
        let waiting: Vec<(DeliveryTag, u64)> = waiting.map(|(tag, task)| (*tag, task.requester)).collect();
        for (delivery, requester) in waiting {
            if !self.is_crowding(requester, now) {
                self.begin(delivery);
            }
        }
    }

    /// Whether a further task of this requester must wait: it has more than a quarter of the places, its tasks are
    /// slow, and slow tasks hold as many places as they may.
    fn is_crowding(&self, requester: u64, now: Instant) -> bool {
        let Some(requester) = self.requesters.get(&requester) else { return false };
        !self.is_suspended(now)
            && self.is_large(requester)
            && self.is_slow(requester, now)
            && self.slow_begun(now) >= self.most()
    }

    fn is_suspended(&self, now: Instant) -> bool {
        self.suspended.is_some_and(|until| now < until)
    }

    fn is_large(&self, requester: &Requester) -> bool {
        requester.begun + requester.waiting > (self.granted / 4).max(1)
    }

    fn is_slow(&self, requester: &Requester, now: Instant) -> bool {
        let oldest = requester.tasks.first().and_then(|delivery| self.tasks.get(delivery));
        let age = oldest.map_or(Duration::ZERO, |task| now.saturating_duration_since(task.since));
        requester.average.max(age) > SLOW
    }

    /// The number of tasks that have begun and are slow.
    fn slow_begun(&self, now: Instant) -> usize {
        self.requesters.values().filter(|it| self.is_slow(it, now)).map(|it| it.begun).sum()
    }

    fn begin(&mut self, delivery: DeliveryTag) {
        let Some(task) = self.tasks.get_mut(&delivery) else { return };
        task.state = State::Begun;
        task.signal.may_begin.store(true, Ordering::Relaxed);
        task.signal.begin.notify_one();
        if let Some(requester) = self.requesters.get_mut(&task.requester) {
            (requester.waiting, requester.begun) = (requester.waiting - 1, requester.begun + 1);
        }
    }

    fn call(&mut self, delivery: DeliveryTag) {
        let Some(task) = self.tasks.get_mut(&delivery) else { return };
        let before = std::mem::replace(&mut task.state, State::Called);
        task.signal.call.notify_one();
        self.permits -= 1.0;
        if let Some(requester) = self.requesters.get_mut(&task.requester) {
            match before {
                State::Waits => requester.waiting -= 1,
                State::Begun => requester.begun -= 1,
                State::Called => {}
            }
        }
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
    async fn requesters_with_a_quarter_of_the_places_keep_them() {
        let mut rig = Rig::new();
        let mut places: Vec<Place> = (0..4).map(|requester| rig.enter(requester)).collect();
        places.extend((0..4).map(|number| rig.enter(10 + number / 3)));
        advance(2 * SLOW).await;
        rig.places.review();
        assert_eq!(called(&places), [false, false, false, false, false, false, true, false]);
        rig.places.review();
        assert_eq!(called(&places), [false; 8], "no one has three");
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

    /// Returns how many tasks are put off of a requester that fills its places again and again for `time`.
    async fn put_off(rig: &mut Rig, requester: u64, held: usize, time: Duration) -> usize {
        let (mut count, mut waiting) = (0, Vec::new());
        for _ in 0..100 {
            advance(time / 100).await;
            rig.places.review();
            waiting.retain(|place: &Place| {
                let is_called = place.called().now_or_never().is_some();
                count += usize::from(is_called);
                !is_called
            });
            while held + waiting.len() < usize::from(GRANTED) {
                let place = rig.enter(requester);
                assert!(!place.may_begin(), "six are slow");
                if place.called().now_or_never().is_some() { count += 1 } else { waiting.push(place) }
            }
        }
        count
    }

    #[tokio::test(start_paused = true)]
    async fn few_tasks_are_put_off_in_vain_and_more_once_another_requester_is_found() {
        let mut rig = Rig::new();
        let _held: Vec<Place> = (0..6).map(|_| rig.enter(1)).collect();
        advance(BURST_INTERVAL).await;
        let first = put_off(&mut rig, 1, 6, Duration::from_secs(1)).await;
        assert!((64..=66).contains(&first), "{first}");
        let next = put_off(&mut rig, 1, 6, Duration::from_secs(10)).await;
        assert!((19..=21).contains(&next), "{next}");
        for found in [64..=65, 0..=1] {
            drop(rig.enter(2));
            let next = put_off(&mut rig, 1, 6, Duration::from_millis(1)).await;
            assert!(found.contains(&next), "{next}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiting_task_begins_when_another_ends_or_while_calls_are_suspended() {
        let mut rig = Rig::new();
        let mut held: Vec<Place> = (0..6).map(|_| rig.enter(1)).collect();
        advance(2 * SLOW).await;
        rig.places.review();
        rig.places.lock().permits = 0.0;
        let waiting = [rig.enter(1), rig.enter(1)];
        let may_begin = || [0, 1].map(|number: usize| waiting[number].may_begin());
        assert_eq!((called(&waiting), may_begin()), (vec![false, false], [false, false]));
        assert!(!rig.places.has_put_off_since(None));
        held.pop();
        assert_eq!(may_begin(), [true, false]);
        rig.places.suspend(SLOW);
        assert_eq!(may_begin(), [true, true]);
        assert!(waiting[1].begins().now_or_never().is_some());
        rig.places.lock().permits = BURST;
        rig.places.review();
        assert!(called(&held).iter().chain(&called(&waiting)).all(|called| !called));
        advance(SLOW).await;
        rig.places.review();
        assert_eq!(called(&waiting), [false, true]);
        assert!(rig.places.has_put_off_since(Some(SystemTime::now())), "it is being put off");
        drop(waiting);
        let later = SystemTime::now() + SLOW;
        assert_eq!([None, Some(later)].map(|time| rig.places.has_put_off_since(time)), [true, false]);
    }
}
