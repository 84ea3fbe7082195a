//! Decides the prefetch, the number of messages that a worker holds ahead, unless the user has set it. It is large
//! enough for the batches that may be submitted, given the average message. It is small enough to leave messages for
//! other workers and to bound the bytes of the bodies. `Prefetch` does the arithmetic; `SharedPrefetch` adds a lock and
//! the clock.
//!
//! A fixed prefetch does not suffice: RabbitMQ has no limit in bytes, lapin buffers whatever the broker sends, and the
//! prefetch that the largest bodies allow (8) makes small messages slow. With a prefetch of 8, two workers on two cores
//! reached 4,309 tasks/s with `echo` and 192 texts/s with MiniLM; with this one, 8,356 tasks/s and 209 texts/s.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// The largest prefetch that quorum queues accept.
const MAX_PREFETCH: f64 = 2_000.0;
/// The number of the latest messages over which tokens and inputs are averaged.
const WINDOW: f64 = 256.0;
/// The number of the latest messages over which bytes are averaged. It is smaller, because bodies that are too large must
/// be noticed soon.
const SMALL_WINDOW: f64 = 32.0;
/// The number of messages whose tokens must be known before they decide anything.
const MIN_SAMPLES: u32 = 32;
/// The number of messages that must arrive between two changes.
const MESSAGES_BETWEEN_CHANGES: u32 = 8;
/// The largest factor by which one change may increase the prefetch at the start.
const GROWTH: f64 = 4.0;
/// The shortest time between two changes: each creates a new consumer.
const CHANGE_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Batches that may be submitted or in preparation.
    pub(super) batches: usize,
    /// The most tokens of a batch.
    pub(super) tokens: usize,
    /// The most inputs of a batch.
    pub(super) requests: usize,
    /// The most bytes of the bodies that are held, if they have the average size.
    pub(super) bytes: u64,
}

/// The current prefetch.
pub(super) struct Prefetch {
    limits: Limits,
    /// The messages that the sequences need; none for tasks in batches.
    of_sequences: Option<u16>,
    current: u16,
    /// The prefetch that suits short texts; used until the messages' tokens are known.
    usual: u16,
    /// The number of messages received in all.
    total: u32,
    changed_at: Instant,
    /// The number of messages received since the last change.
    received: u32,
    tokens: Average,
    inputs: Average,
    bytes: Average,
}

/// A moving average.
#[derive(Default)]
struct Average {
    value: f64,
    count: f64,
}

impl Average {
    fn add(&mut self, value: f64, window: f64) {
        self.count = (self.count + 1.0).min(window);
        self.value += (value - self.value) / self.count;
    }
}

impl Prefetch {
    /// Starts with a prefetch of `first`, which is small if the sizes of messages are not known yet. It grows to
    /// `usual`.
    pub(super) fn new(limits: Limits, first: u16, usual: u16, now: Instant) -> Self {
        let empty = Average::default;
        Self {
            limits,
            of_sequences: None,
            current: first,
            usual,
            total: 0,
            changed_at: now,
            received: 0,
            tokens: empty(),
            inputs: empty(),
            bytes: empty(),
        }
    }

    /// Starts with this prefetch, which suits the sequences, whatever their tokens.
    pub(super) fn of_sequences(limits: Limits, prefetch: u16, now: Instant) -> Self {
        Self { of_sequences: Some(prefetch), ..Self::new(limits, prefetch, prefetch, now) }
    }

    pub(super) fn received(&mut self, bytes: usize) {
        self.bytes.add(bytes as f64, SMALL_WINDOW);
        self.received += 1;
        self.total = self.total.saturating_add(1);
    }

    pub(super) fn prepared(&mut self, inputs: usize, tokens: usize) {
        self.inputs.add(inputs as f64, WINDOW);
        self.tokens.add(tokens as f64, WINDOW);
    }

    /// Returns the new prefetch, if it differs enough from the current one.
    pub(super) fn change(&mut self, now: Instant) -> Option<NonZeroU16> {
        // At the start, the prefetch may change once as many messages have arrived as it allows, without the interval.
        let is_starting = self.total < self.usual.into() && self.current < self.usual;
        let samples_needed = if is_starting { self.current.into() } else { MESSAGES_BETWEEN_CHANGES };
        if self.received < samples_needed || !is_starting && now < self.changed_at + CHANGE_INTERVAL {
            return None;
        }
        let (wanted, before) = (self.wanted(), f64::from(self.current));
        let wanted = if is_starting { wanted.min(GROWTH * before) } else { wanted };
        if wanted < 1.5 * before && before < 1.5 * wanted {
            return None;
        }
        (self.current, self.changed_at, self.received) = (wanted as u16, now, 0);
        NonZeroU16::new(self.current)
    }

    fn wanted(&self) -> f64 {
        let batch = (self.limits.tokens as f64 / self.tokens.value.max(1.0))
            .min(self.limits.requests as f64 / self.inputs.value.max(1.0))
            .max(1.0);
        // Until enough messages are preprocessed, only the sizes of their bodies are known.
        let is_measured = self.tokens.count >= f64::from(MIN_SAMPLES);
        let (least, in_batches) = match self.of_sequences {
            Some(prefetch) => (f64::from(prefetch), f64::from(prefetch)),
            None if is_measured => (2.0, self.limits.batches as f64 * batch),
            None => (2.0, f64::from(self.usual)),
        };
        let in_bytes = self.limits.bytes as f64 / self.bytes.value.max(1.0);
        in_batches.min(in_bytes).clamp(least, MAX_PREFETCH).ceil()
    }
}

/// The prefetch, shared by the intake and the task runs, which report the sizes of messages to it; none if the user has
/// set one. Locked for arithmetic only.
#[derive(Clone)]
pub(super) struct SharedPrefetch(Option<Arc<Mutex<Prefetch>>>);

impl SharedPrefetch {
    pub(super) fn new(prefetch: Option<Prefetch>) -> Self {
        Self(prefetch.map(|prefetch| Arc::new(Mutex::new(prefetch))))
    }

    /// Records a message of `bytes` bytes. Returns the new prefetch if it differs enough from the current one.
    pub(super) fn received(&self, bytes: usize) -> Option<NonZeroU16> {
        let mut prefetch = self.lock()?;
        prefetch.received(bytes);
        prefetch.change(Instant::now())
    }

    pub(super) fn prepared(&self, inputs: usize, tokens: usize) {
        if let Some(mut prefetch) = self.lock() {
            prefetch.prepared(inputs, tokens);
        }
    }

    fn lock(&self) -> Option<MutexGuard<'_, Prefetch>> {
        self.0.as_ref().map(|prefetch| prefetch.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { batches: 2, tokens: 1_024, requests: 512, bytes: 1 << 20 };

    /// A prefetch of 128, a second after its last change.
    struct Rig {
        prefetch: Prefetch,
        now: Instant,
    }

    impl Rig {
        fn new() -> Self {
            let now = Instant::now();
            Self { prefetch: Prefetch::new(LIMITS, 128, 128, now), now: now + CHANGE_INTERVAL }
        }

        fn take(&mut self, count: usize, (bytes, inputs, tokens): (usize, usize, usize)) {
            for _ in 0..count {
                self.prefetch.received(bytes);
                self.prefetch.prepared(inputs, tokens);
            }
        }

        fn change(&mut self) -> Option<u16> {
            self.prefetch.change(self.now).map(NonZeroU16::get)
        }
    }

    #[test]
    fn the_prefetch_covers_two_batches_of_average_messages() {
        for (message, wanted) in [
            ((200, 1, 32), Some(64)),
            ((200, 1, 4), Some(512)),
            ((20_000, 40, 1_600), Some(2)),
            ((500, 128, 128), Some(8)),
            ((200, 1, 14), None),
        ] {
            let mut rig = Rig::new();
            rig.take(64, message);
            assert_eq!(rig.change(), wanted, "{message:?}");
            assert_eq!(rig.change(), None, "the prefetch has been changed");
        }
    }

    #[test]
    fn sequences_keep_their_prefetch_whatever_their_tokens() {
        let mut rig = Rig::new();
        rig.prefetch = Prefetch::of_sequences(LIMITS, 5, rig.now);
        rig.take(64, (250, 1, 20));
        rig.now += CHANGE_INTERVAL;
        assert_eq!(rig.change(), None);
    }

    #[test]
    fn bytes_bound_the_prefetch_even_if_no_message_is_prepared() {
        let mut rig = Rig::new();
        rig.take(64, (100_000, 1, 4));
        assert_eq!(rig.change(), Some(11));
        let mut rig = Rig::new();
        (0..64).for_each(|_| rig.prefetch.received(100_000));
        assert_eq!(rig.change(), Some(11));
    }

    #[test]
    fn few_messages_or_small_deviations_change_nothing() {
        let mut rig = Rig::new();
        rig.take(31, (200, 1, 500));
        assert_eq!(rig.change(), None);
        let mut rig = Rig::new();
        for _ in 0..500 {
            rig.take(1, (200, 1, 8));
            rig.take(1, (200, 1, 26));
        }
        assert_eq!(rig.change(), None);
    }

    #[test]
    fn prefetch_starts_small_and_grows_once_sizes_are_known() {
        let mut rig = Rig::new();
        rig.prefetch = Prefetch::new(LIMITS, 8, 256, rig.now);
        let mut held = vec![8];
        for _ in 0..3 {
            let before = *held.last().unwrap();
            rig.take(usize::from(before) - 1, (200, 1, 16));
            assert_eq!(rig.change(), None, "not all of them have arrived");
            rig.take(1, (200, 1, 16));
            held.extend(rig.change());
        }
        assert_eq!(held, [8, 32, 128], "two batches of these are 128");
        let mut rig = Rig::new();
        rig.prefetch = Prefetch::new(LIMITS, 8, 256, rig.now);
        (0..8).for_each(|_| rig.prefetch.received(100_000));
        assert_eq!(rig.change(), None, "eleven are as many as the bytes allow");
    }

    #[test]
    fn changes_are_at_least_one_interval_apart() {
        let mut rig = Rig::new();
        rig.take(256, (200, 1, 32));
        assert_eq!(rig.change(), Some(64));
        rig.take(2_000, (200, 1, 4));
        assert_eq!(rig.change(), None);
        rig.now += CHANGE_INTERVAL;
        assert!(rig.change().is_some_and(|wanted| (500..=512).contains(&wanted)));
    }
}
