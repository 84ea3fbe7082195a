//! Decides how many messages a worker holds ahead, unless the user has set that: enough for the batches that
//! may be submitted, by the average message. Few enough to leave messages for other workers, and to keep the
//! bodies within a number of bytes. Pure, but for the lock around it; time is passed in.
//!
//! Nothing simpler bounds both: RabbitMQ has no limit in bytes, lapin buffers whatever the broker sends, and a
//! fixed prefetch that the largest bodies allow (8) makes small messages slow: measured with two workers on two
//! cores, `echo` at 4,309 tasks/s in the place of 8,356, MiniLM at 192 texts/s in the place of 209.

use std::num::NonZeroU16;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The largest prefetch that quorum queues accept.
const MOST: f64 = 2_000.0;
/// The number of messages that the averages of tokens and inputs cover.
const REMEMBERED: f64 = 256.0;
/// The same for the average of bytes: bodies that are too large must be noticed soon.
const REMEMBERED_BYTES: f64 = 32.0;
/// Messages that must arrive between two changes.
const MEASURED: u32 = 32;
/// The largest factor of one change until the first sizes are known.
const GROWTH: f64 = 4.0;
/// The least time between two changes: each makes a new consumer.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Batches that may be submitted or in preparation.
    pub(super) batches: usize,
    pub(super) tokens: usize,
    pub(super) requests: usize,
    /// The most bytes of bodies in hand, if these have the average size.
    pub(super) bytes: u64,
}

/// The current prefetch.
pub(super) struct Prefetch {
    limits: Limits,
    current: u16,
    /// The prefetch that suits short texts; used until the messages' tokens are known.
    usual: u16,
    /// Messages received in all.
    seen: u32,
    changed: Instant,
    /// Messages received since then.
    came: u32,
    tokens: Average,
    inputs: Average,
    bytes: Average,
}

/// A mean over about the last messages.
#[derive(Default)]
struct Average {
    value: f64,
    count: f64,
}

impl Average {
    fn add(&mut self, value: f64, remembered: f64) {
        self.count = (self.count + 1.0).min(remembered);
        self.value += (value - self.value) / self.count;
    }
}

impl Prefetch {
    /// Starts with `first` messages, few if their sizes are not known yet, and grows to `usual`.
    pub(super) fn new(limits: Limits, first: u16, usual: u16, now: Instant) -> Self {
        let empty = Average::default;
        let (tokens, inputs, bytes) = (empty(), empty(), empty());
        Self { limits, current: first, usual, seen: 0, changed: now, came: 0, tokens, inputs, bytes }
    }

    pub(super) fn limit(&mut self, limits: Limits) {
        self.limits = limits;
    }

    pub(super) fn came(&mut self, bytes: usize) {
        self.bytes.add(bytes as f64, REMEMBERED_BYTES);
        self.came += 1;
        self.seen = self.seen.saturating_add(1);
    }

    pub(super) fn prepared(&mut self, inputs: usize, tokens: usize) {
        self.inputs.add(inputs as f64, REMEMBERED);
        self.tokens.add(tokens as f64, REMEMBERED);
    }

    /// The new prefetch, if it differs enough from the current one.
    pub(super) fn change(&mut self, now: Instant) -> Option<NonZeroU16> {
        // At the start, the prefetch may change as soon as all messages in hand have arrived.
        let starts = self.seen < self.usual.into() && self.current < self.usual;
        let measured = if starts { self.current.into() } else { MEASURED };
        if self.came < measured || !starts && now < self.changed + PAUSE {
            return None;
        }
        let (wanted, before) = (self.wanted(), f64::from(self.current));
        let wanted = if starts { wanted.min(GROWTH * before) } else { wanted };
        if wanted < 1.5 * before && before < 1.5 * wanted {
            return None;
        }
        (self.current, self.changed, self.came) = (wanted as u16, now, 0);
        NonZeroU16::new(self.current)
    }

    fn wanted(&self) -> f64 {
        let batch = (self.limits.tokens as f64 / self.tokens.value.max(1.0))
            .min(self.limits.requests as f64 / self.inputs.value.max(1.0))
            .max(1.0);
        // Until enough messages were preprocessed, only the sizes of their bodies are known.
        let known = self.tokens.count >= f64::from(MEASURED);
        let in_batches = if known { self.limits.batches as f64 * batch } else { f64::from(self.usual) };
        let in_bytes = self.limits.bytes as f64 / self.bytes.value.max(1.0);
        in_batches.min(in_bytes).clamp(2.0, MOST).ceil()
    }
}

/// The prefetch, which the intake and the tasks inform of messages; none if the user has set one. Locked for
/// arithmetic only.
#[derive(Clone)]
pub(super) struct Live(Option<Arc<Mutex<Prefetch>>>);

impl Live {
    pub(super) fn new(prefetch: Option<Prefetch>) -> Self {
        Self(prefetch.map(|prefetch| Arc::new(Mutex::new(prefetch))))
    }

    pub(super) fn limit(&self, limits: Limits) {
        if let Some(mut prefetch) = self.lock() {
            prefetch.limit(limits);
        }
    }

    /// Records a message of `bytes` bytes. Returns the new prefetch, if it differs enough.
    pub(super) fn came(&self, bytes: usize) -> Option<NonZeroU16> {
        let mut prefetch = self.lock()?;
        prefetch.came(bytes);
        prefetch.change(Instant::now())
    }

    pub(super) fn prepared(&self, inputs: usize, tokens: usize) {
        if let Some(mut prefetch) = self.lock() {
            prefetch.prepared(inputs, tokens);
        }
    }

    fn lock(&self) -> Option<MutexGuard<'_, Prefetch>> {
        self.0.as_ref().map(|prefetch| prefetch.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { batches: 2, tokens: 1_024, requests: 512, bytes: 1 << 20 };

    /// A prefetch of 128, a second after its last change.
    struct Hand {
        prefetch: Prefetch,
        now: Instant,
    }

    impl Hand {
        fn new() -> Self {
            let now = Instant::now();
            Self { prefetch: Prefetch::new(LIMITS, 128, 128, now), now: now + PAUSE }
        }

        fn take(&mut self, count: usize, (bytes, inputs, tokens): (usize, usize, usize)) {
            for _ in 0..count {
                self.prefetch.came(bytes);
                self.prefetch.prepared(inputs, tokens);
            }
        }

        fn change(&mut self) -> Option<u16> {
            self.prefetch.change(self.now).map(NonZeroU16::get)
        }
    }

    #[test]
    fn two_batches_of_what_messages_carry() {
        for (carried, wanted) in [
            ((200, 1, 32), Some(64)),
            ((200, 1, 4), Some(512)),
            ((20_000, 40, 1_600), Some(2)),
            ((500, 128, 128), Some(8)),
            ((200, 1, 14), None),
        ] {
            let mut hand = Hand::new();
            hand.take(64, carried);
            assert_eq!(hand.change(), wanted, "{carried:?}");
            assert_eq!(hand.change(), None, "and then it is so");
        }
    }

    #[test]
    fn large_bodies_are_bounded_in_bytes_also_when_nothing_comes_of_them() {
        let mut hand = Hand::new();
        hand.take(64, (100_000, 1, 4));
        assert_eq!(hand.change(), Some(11));
        let mut hand = Hand::new();
        (0..64).for_each(|_| hand.prefetch.came(100_000));
        assert_eq!(hand.change(), Some(11));
    }

    #[test]
    fn a_few_messages_change_nothing_and_neither_does_a_mix_within_half() {
        let mut hand = Hand::new();
        hand.take(31, (200, 1, 500));
        assert_eq!(hand.change(), None);
        let mut hand = Hand::new();
        for _ in 0..500 {
            hand.take(1, (200, 1, 8));
            hand.take(1, (200, 1, 26));
        }
        assert_eq!(hand.change(), None);
    }

    #[test]
    fn few_are_held_until_their_sizes_are_known_and_then_soon_as_many_as_usual() {
        let mut hand = Hand::new();
        hand.prefetch = Prefetch::new(LIMITS, 8, 256, hand.now);
        let mut held = vec![8];
        for _ in 0..3 {
            let before = *held.last().unwrap();
            hand.take(usize::from(before) - 1, (200, 1, 16));
            assert_eq!(hand.change(), None, "not all of them have come");
            hand.take(1, (200, 1, 16));
            held.extend(hand.change());
        }
        assert_eq!(held, [8, 32, 128], "two batches of these are 128");
        let mut hand = Hand::new();
        hand.prefetch = Prefetch::new(LIMITS, 8, 256, hand.now);
        (0..8).for_each(|_| hand.prefetch.came(100_000));
        assert_eq!(hand.change(), None, "eleven are as many as the bytes allow");
    }

    #[test]
    fn changes_keep_their_distance() {
        let mut hand = Hand::new();
        hand.take(256, (200, 1, 32));
        assert_eq!(hand.change(), Some(64));
        hand.take(2_000, (200, 1, 4));
        assert_eq!(hand.change(), None);
        hand.now += PAUSE;
        assert!(hand.change().is_some_and(|wanted| (500..=512).contains(&wanted)));
    }
}
