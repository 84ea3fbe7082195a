//! A circuit breaker for each requester's reply queue that accepts no message now. Decides which tasks with that reply
//! queue are computed. Owns the breakers of this worker. Does no I/O.
//!
//! - Open: no task is computed. A waiting reply was refused; or replies wait unanswered, and the queue has accepted
//!   nothing for [`STALLED_AFTER`]; or none waits, and the last one stopped waiting less than [`TRIAL_INTERVAL`] ago.
//! - Slow: all tasks are computed. Replies wait unanswered, but the queue accepted a message within [`STALLED_AFTER`].
//! - Half open, in all other cases: one task at a time is computed, as a trial. The first message that the queue
//!   accepts while no reply waits closes the breaker.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::STALLED_AFTER;

/// The most queues that are remembered while no reply waits for them: requesters choose their names, so the number must
/// be bounded. Tasks of a forgotten queue are computed. A queue for which a reply waits is never forgotten: the worker's
/// prefetch bounds the number of these.
const MAX_QUEUES: usize = 1_024;
/// How long after the last reply stopped waiting the next task is computed, as a trial.
const TRIAL_INTERVAL: Duration = Duration::from_secs(5);
/// How long a queue is remembered after the last reply has stopped waiting for it.
const REMEMBERED_FOR: Duration = Duration::from_secs(60);

/// The queues that accept no message now. Locked for a few instructions.
#[derive(Default)]
pub(in crate::worker) struct Breakers(Mutex<HashMap<String, Breaker>>);

struct Breaker {
    /// The number of computed replies that wait after the queue has refused them.
    refused: usize,
    /// The number of computed replies that wait without any answer from the broker.
    unanswered: usize,
    /// A task is being computed in order to try the queue.
    is_on_trial: bool,
    /// When the queue last accepted a message. None: not since this breaker was created.
    accepted_at: Option<Instant>,
    /// When a reply last stopped waiting for the queue; at first, when the first one began to.
    wait_ended: Instant,
}

impl Breaker {
    /// Whether the queue is known to accept nothing now. Without a refusal it may only be slow; then it counts as open
    /// while it accepts nothing at all.
    fn is_open(&self, now: Instant) -> bool {
        let accepts_nothing = || self.accepted_at.is_none_or(|at| now >= at + STALLED_AFTER);
        self.refused > 0
            || self.unanswered > 0 && accepts_nothing()
            || self.refused + self.unanswered == 0 && now < self.wait_ended + TRIAL_INTERVAL
    }

    fn is_idle(&self) -> bool {
        self.refused + self.unanswered == 0 && !self.is_on_trial
    }
}

/// Whether a task is computed now, given its reply queue.
pub(in crate::worker) enum Admission<'a> {
    /// It is computed.
    Compute,
    /// It is computed as a trial. Until the trial is dropped, no other task with this reply queue is computed.
    Trial(Trial<'a>),
    /// It is put off: another task is being computed as a trial.
    OnTrial,
    /// It is put off: the queue accepts nothing now.
    Refused,
}

/// While this exists, its task tries the queue.
pub(in crate::worker) struct Trial<'a> {
    breakers: &'a Breakers,
    queue: String,
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        if let Some(breaker) = self.breakers.0.lock().get_mut(&self.queue) {
            breaker.is_on_trial = false;
        }
    }
}

/// While this exists, a computed reply waits for the queue.
pub(super) struct WaitingReply<'a> {
    breakers: &'a Breakers,
    queue: &'a str,
    was_refused: bool,
}

impl Drop for WaitingReply<'_> {
    fn drop(&mut self) {
        if let Some(breaker) = self.breakers.0.lock().get_mut(self.queue) {
            let count = if self.was_refused { &mut breaker.refused } else { &mut breaker.unanswered };
            *count = count.saturating_sub(1);
            breaker.wait_ended = Instant::now();
        }
    }
}

impl Breakers {
    pub(super) fn admit(&self, queue: &str, now: Instant) -> Admission<'_> {
        let mut all = self.0.lock();
        let Some(breaker) = all.get_mut(queue) else { return Admission::Compute };
        if breaker.is_open(now) {
            return Admission::Refused;
        }
        if breaker.refused + breaker.unanswered > 0 {
            return Admission::Compute;
        }
        if breaker.is_on_trial {
            return Admission::OnTrial;
        }
        breaker.is_on_trial = true;
        Admission::Trial(Trial { breakers: self, queue: queue.to_owned() })
    }

    /// Records that a computed reply waits until the returned value is dropped. The broker has refused the reply
    /// (`was_refused`), or has not confirmed it yet.
    pub(super) fn wait<'a>(&'a self, queue: &'a str, was_refused: bool, now: Instant) -> WaitingReply<'a> {
        let mut all = self.0.lock();
        if !all.contains_key(queue) {
            all.retain(|_, breaker| !breaker.is_idle() || now < breaker.wait_ended + REMEMBERED_FOR);
            if all.len() >= MAX_QUEUES {
                let idle = all.iter().filter(|(_, breaker)| breaker.is_idle());
                let oldest = idle.min_by_key(|(_, breaker)| breaker.wait_ended).map(|(name, _)| name.clone());
                oldest.and_then(|name| all.remove(&name));
            }
        }
        let new =
            || Breaker { refused: 0, unanswered: 0, is_on_trial: false, accepted_at: None, wait_ended: now };
        let breaker = all.entry(queue.to_owned()).or_insert_with(new);
        let count = if was_refused { &mut breaker.refused } else { &mut breaker.unanswered };
        *count += 1;
        if *count == 1 {
            tracing::warn!(
                queue,
                "a reply waits for its queue; while the queue takes nothing, its tasks are put off"
            );
        }
        WaitingReply { breakers: self, queue, was_refused }
    }

    /// Records that the queue has accepted a message, or no longer exists. Once no reply waits for it, its tasks are
    /// computed again.
    pub(super) fn record_accepted(&self, queue: &str, now: Instant) {
        let mut all = self.0.lock();
        let Some(breaker) = all.get_mut(queue) else { return };
        breaker.accepted_at = Some(now);
        if breaker.refused + breaker.unanswered == 0 {
            all.remove(queue);
            tracing::info!(queue, "the reply queue takes messages again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(admission: &Admission<'_>) -> &'static str {
        match admission {
            Admission::Compute => "compute",
            Admission::Trial(_) => "trial",
            Admission::OnTrial => "on trial",
            Admission::Refused => "refused",
        }
    }

    #[tokio::test(start_paused = true)]
    async fn every_queue_for_which_a_reply_waits_is_remembered() {
        let breakers = Breakers::default();
        let names: Vec<String> = (0..2 * MAX_QUEUES).map(|index| index.to_string()).collect();
        let waiting: Vec<_> = names.iter().map(|name| breakers.wait(name, true, Instant::now())).collect();
        for name in &names {
            assert!(matches!(breakers.admit(name, Instant::now()), Admission::Refused), "{name}");
        }
        drop(waiting);
        tokio::time::advance(REMEMBERED_FOR).await;
        drop(breakers.wait("late", true, Instant::now()));
        assert_eq!(breakers.0.lock().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn while_replies_wait_no_task_is_computed_and_then_one_at_a_time() {
        let breakers = Breakers::default();
        let admitted = |queue| name(&breakers.admit(queue, Instant::now()));
        assert_eq!(admitted("full"), "compute", "the queue is unknown so far");
        let waiting = [(); 2].map(|()| breakers.wait("full", true, Instant::now()));
        assert_eq!((admitted("full"), admitted("other")), ("refused", "compute"));
        tokio::time::advance(TRIAL_INTERVAL).await;
        assert_eq!(admitted("full"), "refused");
        drop(waiting);
        assert_eq!(admitted("full"), "refused", "it was refused a moment ago");
        tokio::time::advance(TRIAL_INTERVAL).await;
        let trial = breakers.admit("full", Instant::now());
        assert_eq!((name(&trial), admitted("full")), ("trial", "on trial"));
        drop(trial);
        assert_eq!(admitted("full"), "trial", "the first trial was dropped without a result");
        breakers.record_accepted("full", Instant::now());
        assert_eq!(admitted("full"), "compute");
    }

    #[tokio::test(start_paused = true)]
    async fn computed_replies_go_first_when_a_full_queue_accepts_again() {
        let breakers = Breakers::default();
        let mut waiting: Vec<_> = (0..2).map(|_| breakers.wait("full", true, Instant::now())).collect();
        waiting.pop();
        breakers.record_accepted("full", Instant::now());
        assert_eq!(name(&breakers.admit("full", Instant::now())), "refused", "one still waits");
        waiting.pop();
        breakers.record_accepted("full", Instant::now());
        assert_eq!(name(&breakers.admit("full", Instant::now())), "compute");
    }

    #[tokio::test(start_paused = true)]
    async fn a_queue_that_is_only_slow_is_not_taken_for_a_full_one() {
        let breakers = Breakers::default();
        let admitted = || name(&breakers.admit("slow", Instant::now()));
        let waiting = [(); 2].map(|()| breakers.wait("slow", false, Instant::now()));
        assert_eq!(admitted(), "refused");
        breakers.record_accepted("slow", Instant::now());
        assert_eq!(admitted(), "compute");
        tokio::time::advance(STALLED_AFTER).await;
        assert_eq!(admitted(), "refused", "it no longer accepts anything");
        drop(waiting);
    }

    #[tokio::test(start_paused = true)]
    async fn remembered_queue_names_are_bounded_in_number_and_age() {
        let breakers = Breakers::default();
        let held = breakers.wait("held", true, Instant::now());
        for number in 0..2 * MAX_QUEUES {
            drop(breakers.wait(&number.to_string(), true, Instant::now()));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(breakers.0.lock().len(), MAX_QUEUES);
        assert!(breakers.0.lock().contains_key("held"));
        tokio::time::advance(REMEMBERED_FOR).await;
        drop(breakers.wait("last", true, Instant::now()));
        assert_eq!(breakers.0.lock().len(), 2);
        drop(held);
    }
}
