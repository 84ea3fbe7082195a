//! Decides which accepted tasks are put off because their requester holds too many places. A place is one of the
//! messages that the broker grants to this worker. If one requester's slow tasks hold all places, the worker does not
//! learn of the tasks of others behind them. To put a task off is to publish it to a retry queue, from which it returns
//! to the end of the task queue. Owns the list of the accepted tasks of the main queue. Does no I/O.
//!
//! A requester is slow if its tasks take longer than [`SLOW`] on average, or if its oldest task has already taken
//! longer. At most three quarters of the places are for tasks of slow requesters that have **begun**. Once there are as
//! many, a new task does not begin if its requester is slow and has more than a quarter of the places, counting tasks
//! that have begun and tasks that wait. It waits until it is put off, or until other tasks have ended.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::broker::DeliveryTag;

/// How long the tasks of a requester may take before the requester counts as slow.
const SLOW: Duration = Duration::from_secs(1);
/// The weight of the latest task in that average.
const LATEST_WEIGHT: f64 = 0.25;
/// The most tasks that are put off at once. The number is bounded because it is not known whether tasks of others wait
/// behind them.
const BURST: f64 = 64.0;
/// How many permits to put a task off are renewed in a second, up to [`KEPT_FOR_WAITING`]. A new requester renews all.
const RATE: f64 = 2.0;
/// The shortest time between two bursts. It bounds what a client gains by tasks under ever new names of requesters.
const BURST_INTERVAL: Duration = Duration::from_secs(5);
/// A task that has begun is put off only while more permits than this remain, because what was computed of it is lost.
const KEPT_FOR_WAITING: f64 = BURST / 2.0;

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
    last_renewal: Instant,
    /// When `permits` was last set to [`BURST`].
    last_burst: Instant,
    /// The last time at which a task left because it was put off.
    last_put_off: Option<SystemTime>,
    /// Until then no task is put off, and all begin.
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
    /// It was told that it is to be put off, and has not left.
    Leaving,
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

/// Tells a task that it may begin, or that it is to be put off.
#[derive(Default)]
struct Signal {
    /// Written once, by the list.
    may_begin: AtomicBool,
    begin: Notify,
    put_off: Notify,
    /// Written by the task: it must not be put off any more.
    stays: AtomicBool,
}

/// The place of one task. The place is free once this is dropped.
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
    pub(super) async fn wait_to_begin(&self) {
        while !self.may_begin() {
            self.signal.begin.notified().await;
        }
    }

    /// Returns when the task is to be put off. Safe to cancel.
    pub(super) async fn wait_to_be_put_off(&self) {
        loop {
            self.signal.put_off.notified().await;
            if !self.signal.stays.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// The task could not be put off, so it is computed. It cannot be put off from now on.
    pub(super) fn begin_after_all(&self) {
        self.stay();
        self.places.lock().begin(self.delivery);
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
            last_renewal: now,
            last_burst: now,
            last_put_off: None,
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

    /// Puts tasks off while too many slow ones have begun. Must be called from time to time, because requesters become
    /// slow without any event.
    pub(super) fn review(&self) {
        self.lock().review(Instant::now());
    }

    /// Whether so many tasks are accepted that a review may change something.
    pub(super) fn may_be_crowded(&self) -> bool {
        let list = self.lock();
        list.tasks.len() > list.max_slow()
    }

    /// Whether a task is being put off, or was put off at `time` or later. Without `time`: whether one ever was.
    pub(super) fn has_put_off_since(&self, time: Option<SystemTime>) -> bool {
        let list = self.lock();
        let is_later = |put_off: SystemTime| time.is_none_or(|time| put_off >= time);
        list.last_put_off.is_some_and(is_later)
            || list.tasks.values().any(|task| task.state == State::Leaving)
    }

    /// Lets all tasks begin, and puts none off for this time.
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
    /// The most tasks of slow requesters that may have begun.
    fn max_slow(&self) -> usize {
        (self.granted * 3 / 4).max(1)
    }

    /// Adds a task. It begins at once, unless its requester holds too many places. Then it is put off if that is
    /// permitted, or else waits.
    fn enter(&mut self, delivery: DeliveryTag, task: Task, now: Instant) {
        self.renew(now);
        let key = task.requester;
        if !self.requesters.contains_key(&key) && now >= self.last_burst + BURST_INTERVAL {
            // A new requester was found behind slow tasks, so that behind further ones there may be more.
            (self.permits, self.last_burst) = (BURST, now);
        }
        let requester = self.requesters.entry(key).or_default();
        requester.tasks.insert(delivery);
        requester.waiting += 1;
        self.tasks.insert(delivery, task);
        if !self.is_crowding(key, now, || self.slow_begun(now)) {
            self.begin(delivery);
        } else if self.permits >= 1.0 {
            self.put_off(delivery);
        }
    }

    fn leave(&mut self, delivery: DeliveryTag, now: Instant) {
        let Some(task) = self.tasks.remove(&delivery) else { return };
        let Some(requester) = self.requesters.get_mut(&task.requester) else { return };
        requester.tasks.remove(&delivery);
        match task.state {
            State::Waits => requester.waiting -= 1,
            State::Leaving => self.last_put_off = Some(SystemTime::now()),
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
        let elapsed = now.saturating_duration_since(self.last_renewal).as_secs_f64();
        // So many permits are too few to put off a task that has begun.
        let renewed = (self.permits + RATE * elapsed).min(KEPT_FOR_WAITING);
        (self.permits, self.last_renewal) = (self.permits.max(renewed), now);
    }

    /// Lets waiting tasks begin where that is possible. Puts off those that still wait, the latest first. Then, while
    /// too many tasks of slow requesters have begun, puts off some of these as [`List::latest_of_largest`] chooses.
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
            self.put_off(*delivery);
        }
        while self.permits > KEPT_FOR_WAITING
            && self.slow_begun(now) > self.max_slow()
            && let Some(delivery) = self.latest_of_largest(now)
        {
            self.put_off(delivery);
        }
    }

    /// Takes the slow requester with the most tasks that have begun, among those with more than a quarter of the places.
    /// Chance decides between equal ones. Returns the latest of its tasks that has begun and may be put off.
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
        let mut slow_begun = self.slow_begun(now);
        for (delivery, requester) in waiting {
            if self.is_crowding(requester, now, || slow_begun) {
                continue;
            }
            let is_slow = self.requesters.get(&requester).is_some_and(|it| self.is_slow(it, now));
            slow_begun += usize::from(is_slow);
            self.begin(delivery);
        }
    }

    /// Whether the waiting tasks of this requester, which are counted already, must go on waiting. That is so if it is
    /// slow and has more than a quarter of the places, and if as many slow tasks have begun as may. `slow_begun` counts
    /// these, which takes long if there are many requesters.
    fn is_crowding(&self, requester: u64, now: Instant, slow_begun: impl Fn() -> usize) -> bool {
        let Some(requester) = self.requesters.get(&requester) else { return false };
        !self.is_suspended(now)
            && self.is_large(requester)
            && self.is_slow(requester, now)
            && slow_begun() >= self.max_slow()
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

    /// The number of tasks of slow requesters that have begun.
    fn slow_begun(&self, now: Instant) -> usize {
        self.requesters.values().filter(|it| self.is_slow(it, now)).map(|it| it.begun).sum()
    }

    fn begin(&mut self, delivery: DeliveryTag) {
        let Some(task) = self.tasks.get_mut(&delivery) else { return };
        let before = std::mem::replace(&mut task.state, State::Begun);
        task.signal.may_begin.store(true, Ordering::Relaxed);
        task.signal.begin.notify_one();
        if let Some(requester) = self.requesters.get_mut(&task.requester) {
            match before {
                State::Waits => requester.waiting -= 1,
                State::Begun => return,
                State::Leaving => {}
            }
            requester.begun += 1;
        }
    }

    fn put_off(&mut self, delivery: DeliveryTag) {
        let Some(task) = self.tasks.get_mut(&delivery) else { return };
        let before = std::mem::replace(&mut task.state, State::Leaving);
        task.signal.put_off.notify_one();
        self.permits -= 1.0;
        if let Some(requester) = self.requesters.get_mut(&task.requester) {
            match before {
                State::Waits => requester.waiting -= 1,
                State::Begun => requester.begun -= 1,
                State::Leaving => {}
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

    fn are_put_off(places: &[Place]) -> Vec<bool> {
        places.iter().map(|place| place.wait_to_be_put_off().now_or_never().is_some()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn slow_tasks_of_one_requester_leave_a_quarter_of_the_places() {
        let mut rig = Rig::new();
        let mut places: Vec<Place> = (0..8).map(|_| rig.enter(1)).collect();
        advance(SLOW).await;
        rig.places.review();
        assert_eq!(are_put_off(&places), [false; 8]);
        advance(Duration::from_millis(1)).await;
        rig.places.review();
        assert_eq!(
            are_put_off(&places),
            [false, false, false, false, false, false, true, true],
            "the latest"
        );
        places.truncate(6);
        // One task ends. The next one may take its place, although its requester is known to be slow.
        places.remove(0);
        places.push(rig.enter(1));
        assert_eq!(are_put_off(&places), [false; 6]);
        let late = [rig.enter(1), rig.enter(2)];
        assert_eq!(are_put_off(&late), [true, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn quick_tasks_may_hold_all_places() {
        let mut rig = Rig::new();
        for _ in 0..100 {
            let places: Vec<Place> = (0..8).map(|_| rig.enter(1)).collect();
            advance(SLOW / 2).await;
            rig.places.review();
            assert_eq!(are_put_off(&places), [false; 8]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requesters_with_a_quarter_of_the_places_keep_them() {
        let mut rig = Rig::new();
        let mut places: Vec<Place> = (0..4).map(|requester| rig.enter(requester)).collect();
        places.extend([10, 10, 10, 11].map(|requester| rig.enter(requester)));
        advance(2 * SLOW).await;
        rig.places.review();
        assert_eq!(are_put_off(&places), [false, false, false, false, false, false, true, false]);
        rig.places.review();
        assert_eq!(are_put_off(&places), [false; 8], "requester 10 has only two now");
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_must_stay_is_not_put_off_and_an_earlier_one_is() {
        let mut rig = Rig::new();
        let places: Vec<Place> = (0..7).map(|_| rig.enter(1)).collect();
        places[6].stay();
        advance(2 * SLOW).await;
        rig.places.review();
        assert_eq!(are_put_off(&places), [false, false, false, false, false, true, false]);
        places[5].stay();
        rig.places.review();
        assert_eq!(are_put_off(&places), [false; 7]);
    }

    /// For `time`, fills all places but `held` with tasks of `requester` again and again. Returns how many of its tasks
    /// are put off.
    async fn fill_places(rig: &mut Rig, requester: u64, held: usize, time: Duration) -> usize {
        let (mut count, mut waiting) = (0, Vec::new());
        for _ in 0..100 {
            advance(time / 100).await;
            rig.places.review();
            waiting.retain(|place: &Place| {
                let is_put_off = place.wait_to_be_put_off().now_or_never().is_some();
                count += usize::from(is_put_off);
                !is_put_off
            });
            while held + waiting.len() < usize::from(GRANTED) {
                let place = rig.enter(requester);
                assert!(!place.may_begin(), "six are slow");
                let is_put_off = place.wait_to_be_put_off().now_or_never().is_some();
                if is_put_off { count += 1 } else { waiting.push(place) }
            }
        }
        count
    }

    #[tokio::test(start_paused = true)]
    async fn few_tasks_are_put_off_in_vain_and_more_once_another_requester_is_found() {
        let mut rig = Rig::new();
        let _held: Vec<Place> = (0..6).map(|_| rig.enter(1)).collect();
        advance(BURST_INTERVAL).await;
        let burst = BURST as usize;
        let first = fill_places(&mut rig, 1, 6, Duration::from_secs(1)).await;
        assert!((burst..=burst + RATE as usize).contains(&first), "{first}");
        let renewed = 10 * RATE as usize;
        let next = fill_places(&mut rig, 1, 6, Duration::from_secs(10)).await;
        assert!((renewed - 1..=renewed + 1).contains(&next), "{next}");
        drop(rig.enter(2));
        let found = fill_places(&mut rig, 1, 6, Duration::from_millis(1)).await;
        assert!((burst..=burst + 1).contains(&found), "{found}");
        drop(rig.enter(2));
        let found = fill_places(&mut rig, 1, 6, Duration::from_millis(1)).await;
        assert!(found <= 1, "{found}: there is no second burst within BURST_INTERVAL");
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_could_not_be_put_off_counts_as_begun() {
        let mut rig = Rig::new();
        let places: Vec<Place> = (0..8).map(|_| rig.enter(1)).collect();
        advance(2 * SLOW).await;
        rig.places.review();
        assert!(rig.places.has_put_off_since(None));
        for place in &places {
            place.begin_after_all();
        }
        let list = rig.places.lock();
        assert_eq!(list.slow_begun(Instant::now()), 8);
        drop(list);
        drop(places);
        assert!(!rig.places.has_put_off_since(None), "none has left the worker");
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiting_task_begins_when_another_ends_or_when_put_offs_are_suspended() {
        let mut rig = Rig::new();
        let mut held: Vec<Place> = (0..6).map(|_| rig.enter(1)).collect();
        advance(2 * SLOW).await;
        rig.places.review();
        rig.places.lock().permits = 0.0;
        let waiting = [rig.enter(1), rig.enter(1)];
        let may_begin = || [0, 1].map(|number: usize| waiting[number].may_begin());
        assert_eq!((are_put_off(&waiting), may_begin()), (vec![false, false], [false, false]));
        assert!(!rig.places.has_put_off_since(None));
        held.pop();
        assert_eq!(may_begin(), [true, false]);
        rig.places.suspend(SLOW);
        assert_eq!(may_begin(), [true, true]);
        assert!(waiting[1].wait_to_begin().now_or_never().is_some());
        rig.places.lock().permits = BURST;
        rig.places.review();
        assert!(are_put_off(&held).iter().chain(&are_put_off(&waiting)).all(|is_put_off| !is_put_off));
        advance(SLOW).await;
        rig.places.review();
        assert_eq!(are_put_off(&waiting), [false, true], "seven have begun, one more than may");
        assert!(rig.places.has_put_off_since(Some(SystemTime::now())), "it is being put off");
        drop(waiting);
        let later = SystemTime::now() + SLOW;
        assert_eq!([None, Some(later)].map(|time| rig.places.has_put_off_since(time)), [true, false]);
    }
}
