//! Decides when a batch of one-pass inputs is full or due. Owns the waiting inputs, in order of arrival.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The bounds of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The most tokens; an input larger than this goes alone.
    pub max_tokens: usize,
    /// The most inputs.
    pub max_requests: usize,
    /// The longest time that the oldest input waits for others that are on their way.
    pub max_delay: Duration,
}

/// Whether the device can use a batch now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// It computes nothing: any batch is useful.
    Idle,
    /// It computes, and can queue one more batch. Only a full batch is submitted, since a partial one may still
    /// grow.
    Busy,
}

/// Inputs that go through one forward pass.
#[derive(Debug, PartialEq, Eq)]
pub struct Batch<T> {
    /// The inputs, in order of arrival.
    pub inputs: Vec<T>,
    /// Their tokens.
    pub tokens: usize,
}

struct Waiting<T> {
    input: T,
    tokens: usize,
    since: Instant,
}

/// The inputs that wait for a batch.
pub struct Batcher<T> {
    policy: Policy,
    waiting: VecDeque<Waiting<T>>,
    tokens: usize,
}

impl<T> Batcher<T> {
    /// A batcher without inputs.
    pub fn new(policy: Policy) -> Self {
        Self { policy, waiting: VecDeque::new(), tokens: 0 }
    }

    /// Limits further batches to `most` tokens.
    pub fn limit_tokens(&mut self, most: usize) {
        self.policy.max_tokens = most;
    }

    /// Changes the bounds of further batches.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// The number of waiting inputs.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether no input waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds an input after those that wait.
    pub fn push(&mut self, input: T, tokens: usize, now: Instant) {
        self.tokens += tokens;
        self.waiting.push_back(Waiting { input, tokens, since: now });
    }

    /// The next batch, if one is ready. `expecting`: further inputs are on their way, so an idle device may
    /// wait for them up to `max_delay`. Otherwise it does not wait.
    pub fn take(&mut self, now: Instant, device: Device, expecting: bool) -> Option<Batch<T>> {
        self.is_ready(now, device, expecting).then(|| self.cut())
    }

    /// Whether [`Batcher::take`] would give a batch.
    pub fn is_ready(&self, now: Instant, device: Device, expecting: bool) -> bool {
        let ready = match device {
            Device::Busy => self.is_full(),
            Device::Idle => self.is_full() || !expecting || self.due().is_some_and(|due| due <= now),
        };
        ready && !self.is_empty()
    }

    /// When the oldest input will have waited for `max_delay`.
    pub fn due(&self) -> Option<Instant> {
        self.waiting.front().map(|oldest| oldest.since + self.policy.max_delay)
    }

    fn is_full(&self) -> bool {
        self.tokens >= self.policy.max_tokens || self.len() >= self.policy.max_requests
    }

    fn cut(&mut self) -> Batch<T> {
        let mut batch = Batch { inputs: Vec::new(), tokens: 0 };
        while let Some(next) = self.waiting.front() {
            let fits = batch.inputs.is_empty()
                || batch.inputs.len() < self.policy.max_requests
                    && batch.tokens + next.tokens <= self.policy.max_tokens;
            if !fits {
                break;
            }
            if let Some(next) = self.waiting.pop_front() {
                batch.tokens += next.tokens;
                batch.inputs.push(next.input);
            }
        }
        self.tokens -= batch.tokens;
        batch
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DELAY: Duration = Duration::from_millis(2);

    fn batcher(max_tokens: usize, max_requests: usize) -> Batcher<usize> {
        Batcher::new(Policy { max_tokens, max_requests, max_delay: DELAY })
    }

    #[test]
    fn a_limit_holds_for_what_waits_already() {
        let (mut batcher, now) = (batcher(100, 8), Instant::now());
        (0..6).for_each(|input| batcher.push(input, 10, now));
        batcher.limit_tokens(20);
        let sizes: Vec<_> = std::iter::from_fn(|| batcher.take(now, Device::Idle, false)).collect();
        assert!(sizes.len() == 3 && sizes.iter().all(|batch| batch.tokens == 20), "{sizes:?}");
    }

    #[test]
    fn an_idle_device_takes_a_lone_input_at_once_when_nothing_is_on_its_way() {
        let (mut batcher, now) = (batcher(100, 8), Instant::now());
        batcher.push(1, 10, now);
        assert_eq!(batcher.take(now, Device::Idle, false), Some(Batch { inputs: vec![1], tokens: 10 }));
        assert!(batcher.is_empty());
    }

    #[test]
    fn an_idle_device_waits_for_inputs_on_their_way_but_not_beyond_max_delay() {
        let (mut batcher, now) = (batcher(100, 8), Instant::now());
        batcher.push(1, 10, now);
        assert_eq!(batcher.take(now, Device::Idle, true), None);
        batcher.push(2, 10, now + DELAY / 2);
        assert_eq!(batcher.due(), Some(now + DELAY), "the delay counts from the first input");
        assert_eq!(batcher.take(now + DELAY, Device::Idle, true).unwrap().inputs, [1, 2]);
    }

    #[test]
    fn a_busy_device_is_given_full_batches_only() {
        let (mut batcher, now) = (batcher(100, 2), Instant::now());
        batcher.push(1, 10, now);
        assert_eq!(batcher.take(now + DELAY * 9, Device::Busy, false), None);
        batcher.push(2, 10, now);
        assert_eq!(batcher.take(now, Device::Busy, false).unwrap().inputs, [1, 2]);
    }

    #[test]
    fn an_input_over_the_token_limit_goes_alone_and_the_next_proceeds() {
        let (mut batcher, now) = (batcher(100, 8), Instant::now());
        for (input, tokens) in [(1, 50), (2, 500), (3, 50)] {
            batcher.push(input, tokens, now);
        }
        let batches: Vec<_> = std::iter::from_fn(|| batcher.take(now, Device::Idle, false)).collect();
        assert_eq!(batches.iter().map(|batch| &batch.inputs[..]).collect::<Vec<_>>(), [[1], [2], [3]]);
    }

    #[test]
    fn a_batch_of_one_request_works() {
        let (mut batcher, now) = (batcher(100, 1), Instant::now());
        batcher.push(1, 1, now);
        batcher.push(2, 1, now);
        assert_eq!(batcher.take(now, Device::Idle, true).unwrap().inputs, [1]);
        assert_eq!(batcher.take(now, Device::Idle, true).unwrap().inputs, [2]);
    }

    proptest! {
        #[test]
        fn every_input_leaves_once_in_order_and_within_bounds(
            costs in prop::collection::vec(1usize..300, 0..200),
            max_tokens in 1usize..500,
            max_requests in 1usize..20,
        ) {
            let (mut batcher, now) = (batcher(max_tokens, max_requests), Instant::now());
            for (index, cost) in costs.iter().enumerate() {
                batcher.push(index, *cost, now);
            }
            let mut left = Vec::new();
            while let Some(batch) = batcher.take(now, Device::Idle, false) {
                prop_assert!(batch.inputs.len() <= max_requests);
                prop_assert!(batch.tokens <= max_tokens || batch.inputs.len() == 1);
                left.extend(batch.inputs);
            }
            prop_assert_eq!(left, (0..costs.len()).collect::<Vec<_>>());
        }
    }
}
