//! Decides which accepted tasks are put off because their requester holds too many places. A place is one message of
//! the prefetch that the broker grants to this worker. If one requester's slow tasks hold all places, the worker does
//! not learn of the tasks of others behind them. To put a task off is to publish it to a retry queue, from which it
//! returns to the end of the task queue. Owns the list of the accepted tasks of the main queue. Does no I/O.
//!
//! A requester is slow if its tasks take longer than [`SLOW_AFTER`] on average, or if its oldest task has already taken
//! longer. The following rules leave places to tasks that may be quick:
//!
//! 1. Begun tasks of slow requesters may hold three quarters of the places.
//! 2. Beyond that, a slow requester that has a begun task begins no further one. Its new task waits until others have
//!    ended, and is put off meanwhile if the bucket below has tokens for that.
//! 3. More than three quarters may have begun: their requesters became slow later, or have one task each. Then begun
//!    tasks are put off, the latest ones of the slow requesters that have the most. [`MAX_BEGUN_PUT_OFFS`] limits their
//!    number.
//!
//! Putting off a waiting task costs tokens of a bucket ([`cost`]). The bucket is refilled slowly, and faster for a
//! while after a newcomer. The reason: the worker does not know whether tasks of others wait behind a slow task.
//! Because of the bucket, a requester that is alone loses little by its put-offs.
//!
//! A task that has sent a part of its reply stays: it cannot be put off any more, because it would send that part
//! again. So a task sends its first part only while fewer than three quarters of the places are held by tasks that
//! stay.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::broker::DeliveryTag;

/// How long the tasks of a requester may take before the requester counts as slow.
const SLOW_AFTER: Duration = Duration::from_secs(1);
/// The weight of the latest task in [`Requester::average`].
const LATEST_WEIGHT: f64 = 0.25;
/// The most tokens of the bucket, which starts full: a worker that starts on a queue of slow tasks can put off about
/// this many small ones at once, to see what is behind them.
const BUCKET_SIZE: f64 = 1_024.0;
/// Tokens that are refilled per second.
const TOKENS_PER_SECOND: f64 = 5.0;
/// Tokens that are refilled per second during [`AFTER_NEWCOMER`] after a newcomer: a task whose requester had none here
/// while another had one. A newcomer shows that more tasks of others may be behind the slow ones.
const TOKENS_PER_SECOND_AFTER_NEWCOMER: f64 = 100.0;
const AFTER_NEWCOMER: Duration = Duration::from_secs(60);
/// The bytes of a body that cost one more token, because the broker writes them. With 100 tokens per second, it writes
/// at most 100 MiB per second, unless bodies are larger than 31 MiB ([`MAX_COST`]).
const BYTES_PER_TOKEN: f64 = 1024.0 * 1024.0;
const MAX_COST: f64 = 32.0;
/// How many begun tasks may be put off until the next newcomer. Each loses what was computed of it.
const MAX_BEGUN_PUT_OFFS: u32 = 32;
/// The shortest time between two renewals of that number by newcomers.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(5);

/// The accepted tasks. Clones share the list.
#[derive(Clone)]
pub(super) struct Places {
    list: Arc<Mutex<List>>,
    /// Notified when [`List::try_to_stay`] may have another answer.
    stay_may_change: Arc<Notify>,
}

struct List {
    /// The number of places: the unsettled messages of the main queue that the broker may send.
    granted: usize,
    /// In the order of delivery.
    tasks: BTreeMap<DeliveryTag, Task>,
    /// The requesters of these tasks, by the hashes of their names.
    requesters: HashMap<u64, Requester>,
    /// How many of these tasks stay.
    staying: usize,
    /// The tokens of the bucket.
    tokens: f64,
    /// When the tokens were last refilled.
    refilled_at: Instant,
    /// When a task last came from a requester that had none here, while another requester had one.
    last_newcomer_at: Option<Instant>,
    /// How many begun tasks may be put off now.
    begun_put_offs_left: u32,
    /// When that number was last renewed.
    renewed_at: Instant,
    /// The last time at which a task left because it was put off.
    last_put_off_at: Option<SystemTime>,
    /// Until this time no task is put off, and every task begins at once.
    suspended_until: Option<Instant>,
}

struct Task {
    /// The hash of its requester's name.
    requester: u64,
    /// The tokens that a put-off of it costs.
    cost: f64,
    since: Instant,
    state: State,
    /// Whether it stays: it cannot be put off any more.
    stays: bool,
    signal: Arc<Signal>,
}

/// The tokens that a put-off of a task costs whose body has `bytes` bytes.
fn cost(bytes: usize) -> f64 {
    (1.0 + bytes as f64 / BYTES_PER_TOKEN).min(MAX_COST)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It waits to begin.
    Waits,
    Begun,
    /// It was notified that it is to be put off, and has not left yet.
    Leaving,
}

#[derive(Default)]
struct Requester {
    /// Its tasks in the order of delivery.
    tasks: BTreeSet<DeliveryTag>,
    /// How many of them have begun, and how many wait.
    begun: usize,
    waiting: usize,
    /// How long its tasks have held their places: a moving average, which begins at 0.
    average: Duration,
}

/// Tells a task that it may begin, or that it is to be put off.
#[derive(Default)]
struct Signal {
    /// Written once, by the list.
    may_begin: AtomicBool,
    begin: Notify,
    put_off: Notify,
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
            // The task may have decided to stay after the notification.
            if self.places.list.lock().is_leaving(self.delivery) {
                return;
            }
        }
    }

    /// Lets the task stay: from now on it cannot be put off, because its reply begins to be sent. The task begins if it
    /// has not begun. A put-off that is not carried out yet is cancelled.
    pub(super) fn stay(&self) {
        self.places.list.lock().stay(self.delivery);
    }

    /// Does the same as [`Place::stay`] if the task may stay now. Returns whether it stays.
    pub(super) fn try_to_stay(&self) -> bool {
        self.places.list.lock().try_to_stay(self.delivery, Instant::now())
    }

    /// Waits until the task may stay, and lets it stay. Safe to cancel.
    pub(super) async fn wait_to_stay(&self) {
        loop {
            // Created first, so that no notification is missed.
            let changed = self.places.stay_may_change.notified();
            if self.try_to_stay() {
                return;
            }
            changed.await;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.list.lock().leave(self.delivery, Instant::now());
        self.places.stay_may_change.notify_waiters();
    }
}

impl Places {
    /// Creates an empty list. [`Places::set_granted`] explains `granted`.
    pub(super) fn new(granted: u16) -> Self {
        let now = Instant::now();
        let list = List {
            granted: granted.into(),
            tasks: BTreeMap::new(),
            requesters: HashMap::new(),
            staying: 0,
            tokens: BUCKET_SIZE,
            refilled_at: now,
            last_newcomer_at: None,
            begun_put_offs_left: MAX_BEGUN_PUT_OFFS,
            renewed_at: now,
            last_put_off_at: None,
            suspended_until: None,
        };
        Self { list: Arc::new(Mutex::new(list)), stay_may_change: Arc::default() }
    }

    /// Sets how many unsettled messages of the main queue the broker may send now.
    pub(super) fn set_granted(&self, granted: u16) {
        let before = std::mem::replace(&mut self.list.lock().granted, granted.into());
        if before != usize::from(granted) {
            self.stay_may_change.notify_waiters();
        }
    }

    /// Adds a task of `requester` whose body has `bytes` bytes. It is in the list until the place is dropped.
    pub(super) fn enter(&self, delivery: DeliveryTag, requester: u64, bytes: usize) -> Place {
        let signal = Arc::new(Signal::default());
        let now = Instant::now();
        let (cost, state) = (cost(bytes), State::Waits);
        let task = Task { requester, cost, since: now, state, stays: false, signal: signal.clone() };
        self.list.lock().enter(delivery, task, now);
        Place { places: self.clone(), delivery, signal }
    }

    /// Lets waiting tasks begin, or puts them off; then puts tasks off while too many slow ones have begun. Must be
    /// called from time to time, because requesters become slow without any event.
    pub(super) fn review(&self) {
        self.list.lock().review(Instant::now());
    }

    /// Whether so many tasks are accepted that a review may change something.
    pub(super) fn may_be_crowded(&self) -> bool {
        let list = self.list.lock();
        list.tasks.len() > list.max_slow()
    }

    /// Whether a task is being put off, or was put off at `time` or later. Without `time`: whether one ever was.
    pub(super) fn has_put_off_since(&self, time: Option<SystemTime>) -> bool {
        let list = self.list.lock();
        let is_later = |put_off: SystemTime| time.is_none_or(|time| put_off >= time);
        list.last_put_off_at.is_some_and(is_later)
            || list.tasks.values().any(|task| task.state == State::Leaving)
    }

    /// Ends [`Places::suspend`].
    pub(super) fn resume(&self) {
        self.list.lock().suspended_until = None;
    }

    /// Lets all tasks begin, and puts off none during `time`.
    pub(super) fn suspend(&self, time: Duration) {
        let now = Instant::now();
        let mut list = self.list.lock();
        list.suspended_until = now.checked_add(time);
        list.review(now);
        drop(list);
        self.stay_may_change.notify_waiters();
    }
}

impl List {
    /// The most tasks of slow requesters that may have begun.
    fn max_slow(&self) -> usize {
        (self.granted * 3 / 4).max(1)
    }

    /// Adds a task. It begins at once, unless its requester crowds out others. In that case it is put off if there are
    /// tokens for that, and waits otherwise.
    fn enter(&mut self, delivery: DeliveryTag, task: Task, now: Instant) {
        self.refill(now);
        let key = task.requester;
        if !self.requesters.is_empty() && !self.requesters.contains_key(&key) {
            self.last_newcomer_at = Some(now);
            if now >= self.renewed_at + RENEWAL_INTERVAL {
                (self.begun_put_offs_left, self.renewed_at) = (MAX_BEGUN_PUT_OFFS, now);
            }
        }
        let requester = self.requesters.entry(key).or_default();
        requester.tasks.insert(delivery);
        requester.waiting += 1;
        self.tasks.insert(delivery, task);
        if !self.is_crowding(key, now, || self.slow_begun(now)) {
            self.begin(delivery);
        } else {
            self.put_off_if_permitted(delivery);
        }
    }

    /// Puts off a task that waits, if there are tokens for that.
    fn put_off_if_permitted(&mut self, delivery: DeliveryTag) {
        let cost = self.tasks.get(&delivery).map_or(f64::MAX, |task| task.cost);
        if self.tokens >= cost {
            self.tokens -= cost;
            self.put_off(delivery);
        }
    }

    fn leave(&mut self, delivery: DeliveryTag, now: Instant) {
        let Some(task) = self.tasks.remove(&delivery) else { return };
        self.staying -= usize::from(task.stays);
        let Some(requester) = self.requesters.get_mut(&task.requester) else { return };
        requester.tasks.remove(&delivery);
        match task.state {
            State::Waits => requester.waiting -= 1,
            State::Leaving => self.last_put_off_at = Some(SystemTime::now()),
            State::Begun => {
                requester.begun -= 1;
                let took = now.saturating_duration_since(task.since);
                requester.average =
                    requester.average.mul_f64(1.0 - LATEST_WEIGHT) + took.mul_f64(LATEST_WEIGHT);
            }
        }
        if requester.tasks.is_empty() {
            self.requesters.remove(&task.requester);
        }
        self.begin_waiting(now);
    }

    fn refill(&mut self, now: Instant) {
        let is_after_newcomer =
            self.last_newcomer_at.is_some_and(|newcomer_at| now < newcomer_at + AFTER_NEWCOMER);
        let rate = if is_after_newcomer { TOKENS_PER_SECOND_AFTER_NEWCOMER } else { TOKENS_PER_SECOND };
        let elapsed = now.saturating_duration_since(self.refilled_at).as_secs_f64();
        (self.tokens, self.refilled_at) = ((self.tokens + rate * elapsed).min(BUCKET_SIZE), now);
    }

    /// Lets waiting tasks begin where that is possible. Puts off those that still wait, the latest first. Then, while
    /// too many tasks of slow requesters have begun, puts off some of these as [`List::latest_of_largest`] chooses.
    fn review(&mut self, now: Instant) {
        self.refill(now);
        self.begin_waiting(now);
        if self.is_suspended(now) {
            return;
        }
        let waiting: Vec<DeliveryTag> = self.waiting().map(|(delivery, _)| delivery).collect();
        waiting.into_iter().rev().for_each(|delivery| self.put_off_if_permitted(delivery));
        while self.begun_put_offs_left > 0
            && self.slow_begun(now) > self.max_slow()
            && let Some(delivery) = self.latest_of_largest(now)
        {
            self.begun_put_offs_left -= 1;
            self.put_off(delivery);
        }
    }

    /// The tasks that wait to begin, with their requesters, in the order of delivery.
    fn waiting(&self) -> impl Iterator<Item = (DeliveryTag, u64)> {
        let waiting = self.tasks.iter().filter(|(_, task)| task.state == State::Waits);
        waiting.map(|(delivery, task)| (*delivery, task.requester))
    }

    /// Returns the latest task that may be put off of the slow requester with the most begun tasks. Requesters without
    /// a task that may be put off are ignored, and ties are broken at random.
    fn latest_of_largest(&self, now: Instant) -> Option<DeliveryTag> {
        let may_leave = |delivery: &&DeliveryTag| {
            self.tasks.get(delivery).is_some_and(|it| it.state == State::Begun && !it.stays)
        };
        let slow = self.requesters.values().filter(|it| self.is_slow(it, now));
        let latest = slow.filter_map(|it| Some((it.begun, *it.tasks.iter().rev().find(may_leave)?)));
        let largest = latest.max_by_key(|(begun, _)| (*begun, rand::random::<u32>()));
        largest.map(|(_, delivery)| delivery)
    }

    fn begin_waiting(&mut self, now: Instant) {
        if self.requesters.values().all(|requester| requester.waiting == 0) {
            return;
        }
        let waiting: Vec<(DeliveryTag, u64)> = self.waiting().collect();
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

    /// Returns whether the waiting tasks of this requester must go on waiting. They must if the requester is slow and
    /// has a begun task, and no further task of slow requesters may begin. `slow_begun` returns the number of their
    /// begun tasks; it is called last, because it is slow if there are many requesters.
    fn is_crowding(&self, requester: u64, now: Instant, slow_begun: impl Fn() -> usize) -> bool {
        let Some(requester) = self.requesters.get(&requester) else { return false };
        !self.is_suspended(now)
            && requester.begun > 0
            && self.is_slow(requester, now)
            && slow_begun() >= self.max_slow()
    }

    fn is_suspended(&self, now: Instant) -> bool {
        self.suspended_until.is_some_and(|until| now < until)
    }

    fn is_slow(&self, requester: &Requester, now: Instant) -> bool {
        let oldest = requester.tasks.first().and_then(|delivery| self.tasks.get(delivery));
        let age = oldest.map_or(Duration::ZERO, |task| now.saturating_duration_since(task.since));
        requester.average.max(age) > SLOW_AFTER
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

    fn is_leaving(&self, delivery: DeliveryTag) -> bool {
        self.tasks.get(&delivery).is_some_and(|task| task.state == State::Leaving)
    }

    /// Lets the task stay. It counts as begun again if it was leaving and could not be put off.
    fn stay(&mut self, delivery: DeliveryTag) {
        self.begin(delivery);
        if let Some(task) = self.tasks.get_mut(&delivery) {
            self.staying += usize::from(!std::mem::replace(&mut task.stays, true));
        }
    }

    /// Lets the task stay, unless it is leaving, or too many tasks stay already.
    fn try_to_stay(&mut self, delivery: DeliveryTag, now: Instant) -> bool {
        // A task that is not in the list has ended. It has nothing more to wait for.
        let Some(task) = self.tasks.get(&delivery) else { return true };
        let is_leaving = task.state == State::Leaving;
        let has_room = self.staying < self.max_slow() || self.is_suspended(now);
        let may_stay = task.stays || !is_leaving && has_room;
        if may_stay {
            self.stay(delivery);
        }
        may_stay
    }

    fn put_off(&mut self, delivery: DeliveryTag) {
        let Some(task) = self.tasks.get_mut(&delivery) else { return };
        let before = std::mem::replace(&mut task.state, State::Leaving);
        task.signal.put_off.notify_one();
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
    use std::pin::pin;

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
            self.places.enter(delivery, requester, 0)
        }
    }

    fn are_put_off(places: &[Place]) -> Vec<bool> {
        places.iter().map(|place| place.wait_to_be_put_off().now_or_never().is_some()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn slow_tasks_of_one_requester_leave_a_quarter_of_the_places() {
        let mut rig = Rig::new();
        let mut places: Vec<Place> = (0..8).map(|_| rig.enter(1)).collect();
        advance(SLOW_AFTER).await;
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
            advance(SLOW_AFTER / 2).await;
            rig.places.review();
            assert_eq!(are_put_off(&places), [false; 8]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn many_slow_requesters_leave_a_quarter_of_the_places_too() {
        let mut rig = Rig::new();
        let mut places: Vec<Place> = [1, 1, 2, 2, 3, 3, 4, 5].map(|requester| rig.enter(requester)).into();
        advance(2 * SLOW_AFTER).await;
        rig.places.review();
        let put_off = are_put_off(&places);
        assert_eq!(put_off.iter().filter(|it| **it).count(), 2);
        assert!(!put_off[0] && !put_off[2] && !put_off[4], "the latest of a requester: {put_off:?}");
        assert!(!put_off[6] && !put_off[7], "those with the most: {put_off:?}");
        let left = put_off.iter().position(|it| *it).unwrap();
        places.remove(left);
        let late = [4, 6].map(|requester| rig.enter(requester).may_begin());
        assert_eq!(late, [false, true], "requester 4 has begun a task");
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_must_stay_is_not_put_off_and_an_earlier_one_is() {
        let mut rig = Rig::new();
        let places: Vec<Place> = (0..7).map(|_| rig.enter(1)).collect();
        places[6].stay();
        advance(2 * SLOW_AFTER).await;
        rig.places.review();
        assert_eq!(are_put_off(&places), [false, false, false, false, false, true, false]);
        places[5].stay();
        rig.places.review();
        assert_eq!(are_put_off(&places), [false, false, false, false, true, false, false]);
    }

    /// For `time`, fills all places but `held` with tasks of requester 1 again and again. Returns how many of them are
    /// put off.
    async fn fill_places(rig: &mut Rig, held: usize, time: Duration) -> usize {
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
                let place = rig.enter(1);
                assert!(!place.may_begin(), "six are slow");
                let is_put_off = place.wait_to_be_put_off().now_or_never().is_some();
                if is_put_off { count += 1 } else { waiting.push(place) }
            }
        }
        count
    }

    #[tokio::test(start_paused = true)]
    async fn tasks_are_put_off_more_often_once_another_requester_is_found() {
        let mut rig = Rig::new();
        let _held: Vec<Place> = (0..6).map(|_| rig.enter(1)).collect();
        advance(2 * SLOW_AFTER).await;
        let first = fill_places(&mut rig, 6, Duration::from_secs(1)).await;
        assert!((1_024..=1_030).contains(&first), "{first}");
        let alone = fill_places(&mut rig, 6, Duration::from_secs(10)).await;
        assert!((49..=51).contains(&alone), "{alone}");
        drop(rig.enter(2));
        let found = fill_places(&mut rig, 6, Duration::from_secs(10)).await;
        assert!((999..=1_001).contains(&found), "{found}");
        advance(AFTER_NEWCOMER).await;
        rig.places.review();
        rig.places.list.lock().tokens = 0.0;
        let alone = fill_places(&mut rig, 6, Duration::from_secs(10)).await;
        assert!((49..=51).contains(&alone), "{alone}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_begun_tasks_to_put_off_is_limited_until_a_newcomer_comes() {
        let mut rig = Rig::new();
        rig.places.list.lock().begun_put_offs_left = 1;
        let places: Vec<Place> = (0..8).map(|_| rig.enter(1)).collect();
        advance(RENEWAL_INTERVAL).await;
        rig.places.review();
        let count = || are_put_off(&places).iter().filter(|it| **it).count();
        assert_eq!(count(), 1);
        rig.places.review();
        assert_eq!(count(), 0);
        drop(rig.enter(2));
        rig.places.review();
        assert_eq!(count(), 1);
    }

    #[test]
    fn a_large_body_costs_more_tokens() {
        assert_eq!([0, 1024 * 1024, usize::MAX].map(cost), [1.0, 2.0, MAX_COST]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_could_not_be_put_off_counts_as_begun() {
        let mut rig = Rig::new();
        let places: Vec<Place> = (0..8).map(|_| rig.enter(1)).collect();
        advance(2 * SLOW_AFTER).await;
        rig.places.review();
        assert!(rig.places.has_put_off_since(None));
        for place in &places {
            place.stay();
        }
        let list = rig.places.list.lock();
        assert_eq!(list.slow_begun(Instant::now()), 8);
        drop(list);
        drop(places);
        assert!(!rig.places.has_put_off_since(None), "none has left the worker");
    }

    #[tokio::test(start_paused = true)]
    async fn streams_of_one_requester_leave_a_quarter_of_the_places() {
        let mut rig = Rig::new();
        let mut streams: Vec<Place> = (0..8).map(|_| rig.enter(1)).collect();
        let stay: Vec<bool> = streams.iter().map(Place::try_to_stay).collect();
        assert_eq!(stay, [true, true, true, true, true, true, false, false]);
        let last = streams.pop().unwrap();
        let mut waits = pin!(last.wait_to_stay());
        assert!(waits.as_mut().now_or_never().is_none());
        streams.remove(0);
        assert!(waits.now_or_never().is_some(), "another stream has ended");
        // The one that is held back leaves once its requester is known to be slow, and the others stay.
        let other = rig.enter(2);
        assert!(!other.try_to_stay(), "six stay");
        drop(other);
        advance(2 * SLOW_AFTER).await;
        rig.places.review();
        assert_eq!(are_put_off(&streams), [false, false, false, false, false, true]);
        streams.remove(0);
        assert!(!streams[4].try_to_stay(), "it is leaving");
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiting_task_begins_when_another_ends_or_when_put_offs_are_suspended() {
        let mut rig = Rig::new();
        let mut held: Vec<Place> = (0..6).map(|_| rig.enter(1)).collect();
        advance(2 * SLOW_AFTER).await;
        rig.places.review();
        rig.places.list.lock().tokens = 0.0;
        let waiting = [0, 1].map(|_| rig.enter(1));
        let may_begin = || [0, 1].map(|number: usize| waiting[number].may_begin());
        assert_eq!((are_put_off(&waiting), may_begin()), (vec![false, false], [false, false]));
        assert!(!rig.places.has_put_off_since(None));
        held.pop();
        assert_eq!(may_begin(), [true, false]);
        rig.places.suspend(SLOW_AFTER);
        assert_eq!(may_begin(), [true, true]);
        assert!(waiting[1].wait_to_begin().now_or_never().is_some());
        rig.places.list.lock().tokens = BUCKET_SIZE;
        rig.places.review();
        assert!(are_put_off(&held).iter().chain(&are_put_off(&waiting)).all(|is_put_off| !is_put_off));
        advance(SLOW_AFTER).await;
        rig.places.review();
        assert_eq!(are_put_off(&waiting), [false, true], "seven have begun, one more than may");
        assert!(rig.places.has_put_off_since(Some(SystemTime::now())), "it is being put off");
        drop(waiting);
        let later = SystemTime::now() + SLOW_AFTER;
        assert_eq!([None, Some(later)].map(|time| rig.places.has_put_off_since(time)), [true, false]);
    }
}
