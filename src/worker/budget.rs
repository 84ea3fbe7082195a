//! The time that a delivery may stay unacked before the broker takes it back (its consumer timeout),
//! against the time that deliveries stay unacked here. Decides when that is worth a warning, and with
//! which numbers. Owns the deliveries in hand with the times of their coming; time is passed in.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU16;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::broker::DeliveryTag;

/// Between two looks, at most; a short timeout is looked at more often.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Until a warning is given again although nothing has become worse.
const REPEAT: Duration = Duration::from_secs(3_600);
/// Settled tasks over which the time per task is measured, at most; older ones count for less.
const MEASURED: u32 = 1_024;

/// The deliveries in hand, with their times.
pub(super) struct Budget {
    prefetch: u32,
    limit: Duration,
    held: BTreeMap<DeliveryTag, Instant>,
    /// Since when tasks have been in hand without a break, moved on as [`MEASURED`] says.
    since: Instant,
    /// When the last of them was settled.
    last: Instant,
    settled: u32,
    /// Longest time without a settlement: a batch settles all its tasks together.
    longest_pass: Duration,
    /// The longest time that was warned of, and when.
    warned: Option<(Duration, Instant)>,
}

/// What is wrong, with the numbers: its `Display` is the warning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Warning {
    /// Tasks are settled so slowly that the last of a full prefetch will be held for `held`.
    Slow { prefetch: u32, per_task: Duration, pass: Duration, held: Duration, limit: Duration },
    /// A delivery has been held for `held`.
    Old { held: Duration, limit: Duration },
}

impl Budget {
    pub(super) fn new(prefetch: u16, limit: Duration, now: Instant) -> Self {
        Self {
            prefetch: prefetch.into(),
            limit,
            held: BTreeMap::new(),
            since: now,
            last: now,
            settled: 0,
            longest_pass: Duration::ZERO,
            warned: None,
        }
    }

    /// So many deliveries may be in hand from now on.
    pub(super) fn set_prefetch(&mut self, prefetch: NonZeroU16) {
        self.prefetch = prefetch.get().into();
    }

    /// A delivery came.
    pub(super) fn taken(&mut self, delivery_tag: DeliveryTag, now: Instant) {
        if self.held.is_empty() {
            // A new stretch of work: what was measured under another load says nothing of it.
            (self.since, self.last) = (now, now);
            (self.settled, self.longest_pass) = (0, Duration::ZERO);
        }
        self.held.insert(delivery_tag, now);
    }

    /// It is no longer in hand, for another reason than work.
    pub(super) fn release(&mut self, delivery_tag: DeliveryTag) -> bool {
        self.held.remove(&delivery_tag).is_some()
    }

    /// Its task was worked on to the end.
    pub(super) fn settled(&mut self, delivery_tag: DeliveryTag, now: Instant) {
        if !self.release(delivery_tag) {
            return;
        }
        self.longest_pass = self.longest_pass.max(now - self.last);
        self.last = now;
        self.settled += 1;
        if self.settled == MEASURED {
            self.since += (now - self.since) / 2;
            self.settled /= 2;
            self.longest_pass /= 2;
        }
    }

    /// The session is over, and with it the time of all that it delivered.
    pub(super) fn forget(&mut self, session: u64) {
        self.held.retain(|delivery_tag, _| delivery_tag.session > session);
    }

    /// What is to be said now: nothing below half of the limit, and nothing again before it has
    /// doubled or an hour has passed.
    pub(super) fn warning(&mut self, now: Instant) -> Option<Warning> {
        let worst = [self.old(now), self.slow()].into_iter().flatten().max_by_key(Warning::held)?;
        let held = worst.held();
        let said = |(before, at): (Duration, Instant)| held < 2 * before && now - at < REPEAT;
        if held < self.limit / 2 || self.warned.is_some_and(said) {
            return None;
        }
        self.warned = Some((held, now));
        Some(worst)
    }

    fn old(&self, now: Instant) -> Option<Warning> {
        let oldest = self.held.values().min()?;
        Some(Warning::Old { held: now - *oldest, limit: self.limit })
    }

    /// Only where the prefetch is in use: a few tasks in hand make batches of a few, and their time
    /// per task is not that of full ones.
    fn slow(&self) -> Option<Warning> {
        if self.settled == 0 || (self.held.len() as u32) < self.prefetch.div_ceil(2) {
            return None;
        }
        let per_task = (self.last - self.since) / self.settled;
        let (prefetch, pass, limit) = (self.prefetch, self.longest_pass, self.limit);
        let held = per_task.saturating_mul(prefetch).saturating_add(pass);
        Some(Warning::Slow { prefetch, per_task, pass, held, limit })
    }

    fn look_every(&self) -> Duration {
        (self.limit / 20).clamp(Duration::from_millis(20), LOOK_EVERY)
    }
}

impl Warning {
    fn held(&self) -> Duration {
        match self {
            Self::Slow { held, .. } | Self::Old { held, .. } => *held,
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slow { prefetch, per_task, pass, held, limit } => write!(
                f,
                "prefetch {prefetch} × {} a task + {} a pass = {} of the broker's {} consumer timeout: \
                 lower pool.prefetch",
                seconds(*per_task),
                seconds(*pass),
                seconds(*held),
                seconds(*limit)
            )?,
            Self::Old { held, limit } => write!(
                f,
                "a task has been in hand for {} of the broker's {} consumer timeout: send smaller tasks",
                seconds(*held),
                seconds(*limit)
            )?,
        }
        f.write_str(" or lower pool.batch.max_tokens, or raise the timeout on the broker and in ")?;
        f.write_str("broker.consumer_timeout; over it, the broker takes back all unacked tasks")
    }
}

fn seconds(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    if seconds < 100.0 { format!("{seconds:.1} s") } else { format!("{seconds:.0} s") }
}

/// A budget that the intake keeps and a helper looks at; none where the broker has no timeout. Clones
/// share it. Held for map operations only.
#[derive(Clone, Default)]
pub(super) struct Watched(Option<Arc<Mutex<Budget>>>);

impl Watched {
    pub(super) fn new(prefetch: u16, limit: Option<Duration>) -> Self {
        let budget = |limit| Arc::new(Mutex::new(Budget::new(prefetch, limit, Instant::now())));
        Self(limit.map(budget))
    }

    /// Tells the budget of a change.
    pub(super) fn note<R>(&self, change: impl FnOnce(&mut Budget, Instant) -> R) {
        if let Some(mut budget) = self.lock() {
            change(&mut budget, Instant::now());
        }
    }

    /// Logs what is to be said, for ever.
    pub(super) async fn watch(self) {
        while let Some(pause) = self.lock().map(|budget| budget.look_every()) {
            tokio::time::sleep(pause).await;
            let warning = self.lock().and_then(|mut budget| budget.warning(Instant::now()));
            if let Some(warning) = warning {
                tracing::warn!("{warning}");
            }
        }
    }

    fn lock(&self) -> Option<MutexGuard<'_, Budget>> {
        self.0.as_ref().map(|budget| budget.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(1_800);

    struct Hand {
        budget: Budget,
        begun: Instant,
        next: u64,
    }

    impl Hand {
        fn new(prefetch: u16) -> Self {
            let begun = Instant::now();
            Self { budget: Budget::new(prefetch, LIMIT, begun), begun, next: 0 }
        }

        fn at(&self, seconds: f64) -> Instant {
            self.begun + Duration::from_secs_f64(seconds)
        }

        fn delivery_tag(tag: u64) -> DeliveryTag {
            DeliveryTag { session: 1, tag }
        }

        fn take(&mut self, count: u64, seconds: f64) {
            for _ in 0..count {
                self.budget.taken(Self::delivery_tag(self.next), self.at(seconds));
                self.next += 1;
            }
        }

        fn settle(&mut self, tag: u64, seconds: f64) {
            self.budget.settled(Self::delivery_tag(tag), self.at(seconds));
        }

        fn said(&mut self, seconds: f64) -> Option<String> {
            let now = self.at(seconds);
            self.budget.warning(now).map(|warning| warning.to_string())
        }
    }

    #[test]
    fn a_full_prefetch_of_slow_tasks_is_warned_of_with_the_numbers_before_anything_is_old() {
        let mut hand = Hand::new(256);
        hand.take(256, 0.0);
        assert_eq!(hand.said(0.5), None, "there are no figures yet");
        hand.settle(0, 9.1);
        hand.take(1, 9.1);
        let said = hand.said(9.2).expect("a warning");
        let start = "prefetch 256 × 9.1 s a task + 9.1 s a pass = 2339 s of the broker's 1800 s consumer \
                     timeout: lower pool.prefetch or";
        assert!(said.starts_with(start), "{said}");
        assert!(said.contains("broker.consumer_timeout"), "{said}");
    }

    #[test]
    fn tasks_that_a_batch_settles_together_share_its_time() {
        let mut hand = Hand::new(256);
        hand.take(256, 0.0);
        for tag in 0..128 {
            hand.settle(tag, 9.0);
        }
        hand.take(128, 9.0);
        assert_eq!(hand.said(9.0), None, "256 × 9 / 128 s and one batch are 27 s");
    }

    #[test]
    fn a_few_tasks_in_hand_say_nothing_of_a_full_prefetch() {
        let mut hand = Hand::new(256);
        for task in 0..20 {
            hand.take(1, f64::from(task) * 10.0);
            hand.settle(task as u64, f64::from(task) * 10.0 + 9.0);
            assert_eq!(hand.said(f64::from(task) * 10.0 + 9.5), None);
        }
    }

    #[test]
    fn one_task_that_takes_half_of_the_timeout_is_warned_of() {
        let mut hand = Hand::new(8);
        hand.take(1, 0.0);
        assert_eq!(hand.said(899.0), None);
        let said = hand.said(900.0).expect("a warning");
        assert!(said.starts_with("a task has been in hand for 900 s of the broker's 1800 s"), "{said}");
    }

    #[test]
    fn a_warning_is_given_again_only_when_it_has_doubled_or_after_an_hour() {
        let mut hand = Hand::new(8);
        hand.take(1, 0.0);
        assert!(hand.said(1_000.0).is_some());
        assert_eq!(hand.said(1_999.0), None);
        assert!(hand.said(2_000.0).is_some());
        assert_eq!(hand.said(3_999.0), None);
        hand.settle(0, 4_000.0);
        hand.take(1, 4_100.0);
        assert_eq!(hand.said(5_500.0), None, "1400 s are not twice 2000 s");
        assert!(hand.said(5_600.0).is_some(), "an hour after the last");
    }

    #[test]
    fn what_a_lost_session_delivered_is_no_longer_held() {
        let mut hand = Hand::new(8);
        hand.take(3, 0.0);
        hand.budget.forget(1);
        assert_eq!(hand.said(1_700.0), None);
        hand.settle(0, 1_701.0);
        assert_eq!(hand.budget.settled, 0, "a late settlement is no figure");
    }

    #[test]
    fn a_load_that_became_fast_is_not_warned_of_for_ever() {
        let mut hand = Hand::new(4);
        hand.take(4, 0.0);
        hand.settle(0, 400.0);
        hand.take(1, 400.0);
        assert!(hand.said(400.0).is_some());
        for tag in 1..20_000 {
            let now = 400.0 + tag as f64 * 0.01;
            hand.settle(tag, now);
            hand.take(1, now);
        }
        let now = hand.at(401.0 + 200.0);
        assert!(hand.budget.slow().is_some_and(|it| it.held() < Duration::from_secs(2)), "{now:?}");
    }
}
