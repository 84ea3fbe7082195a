//! A circuit breaker for each requester's reply queue that takes no message now: decides which of its tasks are computed.
//! Owns what is known of such queues, for this worker alone. Does no I/O.
//!
//! - Open, nothing is computed: a waiting reply was refused; or replies wait unanswered, and the queue has taken nothing for
//!   [`STALLED`]; or none waits, and less than [`PROBE_INTERVAL`] has passed since the last one did.
//! - Slow, all are computed: replies wait unanswered, but the queue took a message within [`STALLED`].
//! - Half open, otherwise: one task at a time is computed, as a probe. The first message that the queue takes while no
//!   reply waits closes the breaker.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::STALLED;

/// The most queues that are remembered: requesters choose their names. Tasks of one that is forgotten are computed.
const MOST: usize = 1_024;
/// How long after the last reply ceased to wait the next task is computed as a probe.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// How long a queue that no task asks for is remembered after its last refusal.
const REMEMBERED: Duration = Duration::from_secs(60);

/// The queues that take no message now. Locked for a few instructions.
#[derive(Default)]
pub(in crate::worker) struct Breakers(Mutex<HashMap<String, Breaker>>);

struct Breaker {
    /// Computed replies that wait and that the queue has refused.
    refused: usize,
    /// Computed replies that wait without any answer of the broker.
    unanswered: usize,
    /// A task is being computed in order to try the queue.
    is_probed: bool,
    /// When the queue last took a message. None: not since this was made.
    took_at: Option<Instant>,
    /// When a reply last began or ceased to wait for it.
    waited_at: Instant,
}

impl Breaker {
    /// Whether the queue is known to take nothing now. Without a refusal it may only be slow: then it is known as long as
    /// it takes nothing at all.
    fn is_open(&self, now: Instant) -> bool {
        let is_silent = || self.took_at.is_none_or(|at| now >= at + STALLED);
        self.refused > 0
            || self.unanswered > 0 && is_silent()
            || self.refused + self.unanswered == 0 && now < self.waited_at + PROBE_INTERVAL
    }

    fn is_idle(&self) -> bool {
        self.refused + self.unanswered == 0 && !self.is_probed
    }
}

/// What a task does whose reply goes to a queue.
pub(in crate::worker) enum Admission<'a> {
    /// It is computed.
    Compute,
    /// It is computed, and no other task of the queue meanwhile, until the probe is dropped.
    Probe(Probe<'a>),
    /// It waits: another task tries the queue.
    Probed,
    /// It waits: the queue is known to take nothing now.
    Refused,
}

/// While this exists, its task tries the queue.
pub(in crate::worker) struct Probe<'a> {
    breakers: &'a Breakers,
    queue: String,
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        if let Some(breaker) = self.breakers.lock().get_mut(&self.queue) {
            breaker.is_probed = false;
        }
    }
}

/// While this exists, a computed reply waits for the queue.
pub(super) struct Waiting<'a> {
    breakers: &'a Breakers,
    queue: &'a str,
    was_refused: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(breaker) = self.breakers.lock().get_mut(self.queue) {
            let count = if self.was_refused { &mut breaker.refused } else { &mut breaker.unanswered };
            *count = count.saturating_sub(1);
            breaker.waited_at = Instant::now();
        }
    }
}

impl Breakers {
    pub(super) fn admit(&self, queue: &str, now: Instant) -> Admission<'_> {
        let mut all = self.lock();
        let Some(breaker) = all.get_mut(queue) else { return Admission::Compute };
        if breaker.is_open(now) {
            return Admission::Refused;
        }
        if breaker.refused + breaker.unanswered > 0 {
            return Admission::Compute;
        }
        if breaker.is_probed {
            return Admission::Probed;
        }
        breaker.is_probed = true;
        Admission::Probe(Probe { breakers: self, queue: queue.to_owned() })
    }

    /// A computed reply has waited for a moment: the queue takes nothing now. `was_refused`: the broker has said so.
    pub(super) fn wait<'a>(&'a self, queue: &'a str, was_refused: bool, now: Instant) -> Waiting<'a> {
        let mut all = self.lock();
        if !all.contains_key(queue) {
            all.retain(|_, breaker| !breaker.is_idle() || now < breaker.waited_at + REMEMBERED);
            if all.len() >= MOST {
                let idle = all.iter().filter(|(_, breaker)| breaker.is_idle());
                let oldest = idle.min_by_key(|(_, breaker)| breaker.waited_at).map(|(name, _)| name.clone());
                oldest.and_then(|name| all.remove(&name));
            }
        }
        if all.len() < MOST || all.contains_key(queue) {
            let new =
                || Breaker { refused: 0, unanswered: 0, is_probed: false, took_at: None, waited_at: now };
            let breaker = all.entry(queue.to_owned()).or_insert_with(new);
            let count = if was_refused { &mut breaker.refused } else { &mut breaker.unanswered };
            *count += 1;
            if *count == 1 {
                tracing::warn!(queue, "a reply queue takes no message now; its tasks are put off");
            }
        }
        Waiting { breakers: self, queue, was_refused }
    }

    /// The queue has taken a message, or it does not exist any more. Its tasks are computed, once none of its replies
    /// waits.
    pub(super) fn took(&self, queue: &str, now: Instant) {
        let mut all = self.lock();
        let Some(breaker) = all.get_mut(queue) else { return };
        breaker.took_at = Some(now);
        if breaker.refused + breaker.unanswered == 0 {
            all.remove(queue);
            tracing::info!(queue, "the reply queue takes messages again");
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Breaker>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(admission: &Admission<'_>) -> &'static str {
        match admission {
            Admission::Compute => "compute",
            Admission::Probe(_) => "probe",
            Admission::Probed => "probed",
            Admission::Refused => "refused",
        }
    }

    #[tokio::test(start_paused = true)]
    async fn while_replies_wait_no_task_is_computed_and_then_one_at_a_time() {
        let breakers = Breakers::default();
        let admitted = |queue| name(&breakers.admit(queue, Instant::now()));
        assert_eq!(admitted("full"), "compute", "nothing is known of it");
        let waiting = [(); 2].map(|()| breakers.wait("full", true, Instant::now()));
        assert_eq!((admitted("full"), admitted("other")), ("refused", "compute"));
        tokio::time::advance(PROBE_INTERVAL).await;
        assert_eq!(admitted("full"), "refused");
        drop(waiting);
        assert_eq!(admitted("full"), "refused", "it was refused a moment ago");
        tokio::time::advance(PROBE_INTERVAL).await;
        let probe = breakers.admit("full", Instant::now());
        assert_eq!((name(&probe), admitted("full")), ("probe", "probed"));
        drop(probe);
        assert_eq!(admitted("full"), "probe", "that one has not come to try it");
        breakers.took("full", Instant::now());
        assert_eq!(admitted("full"), "compute");
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_computed_goes_first_when_a_full_queue_takes_a_message() {
        let breakers = Breakers::default();
        let mut waiting: Vec<_> = (0..2).map(|_| breakers.wait("full", true, Instant::now())).collect();
        waiting.pop();
        breakers.took("full", Instant::now());
        assert_eq!(name(&breakers.admit("full", Instant::now())), "refused", "one still waits");
        waiting.pop();
        breakers.took("full", Instant::now());
        assert_eq!(name(&breakers.admit("full", Instant::now())), "compute");
    }

    #[tokio::test(start_paused = true)]
    async fn a_queue_that_is_only_slow_is_not_taken_for_a_full_one() {
        let breakers = Breakers::default();
        let admitted = || name(&breakers.admit("slow", Instant::now()));
        let waiting = [(); 2].map(|()| breakers.wait("slow", false, Instant::now()));
        assert_eq!(admitted(), "refused");
        breakers.took("slow", Instant::now());
        assert_eq!(admitted(), "compute");
        tokio::time::advance(STALLED).await;
        assert_eq!(admitted(), "refused", "it takes nothing any more");
        drop(waiting);
    }

    #[tokio::test(start_paused = true)]
    async fn names_that_strangers_choose_are_bounded_in_number_and_time() {
        let breakers = Breakers::default();
        let held = breakers.wait("held", true, Instant::now());
        for number in 0..2 * MOST {
            drop(breakers.wait(&number.to_string(), true, Instant::now()));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(breakers.lock().len(), MOST);
        assert!(breakers.lock().contains_key("held"));
        tokio::time::advance(REMEMBERED).await;
        drop(breakers.wait("last", true, Instant::now()));
        assert_eq!(breakers.lock().len(), 2);
        drop(held);
    }
}
