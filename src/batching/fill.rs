//! Decides when a batch of one-pass inputs is full or due, and whose inputs it takes: first one input of each waiting
//! task in turn, then inputs of background tasks. Owns the waiting inputs.

use std::collections::VecDeque;
use std::mem;
use std::time::{Duration, Instant};
use std::vec::IntoIter;

/// A background task that has waited this long takes turns with the others: the worker holds its delivery, which the
/// broker would eventually take back (`consumer_timeout`).
const BACKGROUND_WAIT: Duration = Duration::from_secs(60);
/// Background inputs fill a batch only up to 1/4 of `max_tokens`. A task waits for the batch ahead of its own and for
/// its own batch, and background inputs must lengthen neither by much. (When they filled batches up to `max_tokens`,
/// the median latency at a third of the pool's maximum rate rose from 12 to 318 ms; docs/performance.md has the figures
/// with 1/4.)
const BACKGROUND_DIVISOR: usize = 4;

/// The bounds of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The maximum number of tokens in a batch. A larger input gets a batch of its own.
    pub max_tokens: usize,
    /// The maximum number of inputs in a batch.
    pub max_requests: usize,
    /// The maximum time that the oldest input waits for others that are on their way.
    pub max_delay: Duration,
    /// For sequences with an encoder: [`Encoding::interval`](super::Encoding). None: the model's default.
    pub encode_interval: Option<usize>,
    /// For sequences with an encoder: [`Encoding::batch`](super::Encoding). None: the model's default.
    pub encode_batch: Option<usize>,
}

impl Policy {
    /// A policy with the model's defaults for windows.
    pub fn new(max_tokens: usize, max_requests: usize, max_delay: Duration) -> Self {
        Self { max_tokens, max_requests, max_delay, encode_interval: None, encode_batch: None }
    }
}

/// Whether the device is free to compute a batch now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// It computes nothing, so a partial batch is useful too.
    Idle,
    /// It is computing, and can queue one more batch. Only a full batch is submitted, since a partial one may still
    /// grow.
    Busy,
}

/// Inputs that go through one forward pass.
#[derive(Debug, PartialEq, Eq)]
pub struct Batch<T> {
    /// The inputs. Those of one task are adjacent and in their order.
    pub inputs: Vec<T>,
    /// The tokens of all inputs.
    pub tokens: usize,
}

/// The waiting inputs of one task, at least one.
struct Task<T> {
    inputs: IntoIter<T>,
    since: Instant,
}

/// The inputs that wait for a batch.
pub struct Batcher<T> {
    policy: Policy,
    /// The number of tokens of an input.
    size: fn(&T) -> usize,
    /// In the order of their turns: a batch takes one input of each task, then a second one of each.
    waiting: VecDeque<Task<T>>,
    /// The same for background tasks.
    background: VecDeque<Task<T>>,
    /// Inputs and tokens of all waiting tasks.
    inputs: usize,
    tokens: usize,
}

impl<T> Batcher<T> {
    /// A batcher without inputs. `size` gives the tokens of an input.
    pub fn new(policy: Policy, size: fn(&T) -> usize) -> Self {
        let (waiting, background) = (VecDeque::new(), VecDeque::new());
        Self { policy, size, waiting, background, inputs: 0, tokens: 0 }
    }

    /// Limits further batches to `max_tokens`.
    pub fn limit_tokens(&mut self, max_tokens: usize) {
        self.policy.max_tokens = max_tokens;
    }

    /// Changes the bounds of further batches.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// The bounds of batches.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Whether no input waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.background.is_empty()
    }

    /// Adds the inputs of a task. Its turn comes after those of the waiting tasks of its kind, ordinary or background.
    pub fn push(&mut self, inputs: Vec<T>, background: bool, now: Instant) {
        if inputs.is_empty() {
            return;
        }
        self.inputs += inputs.len();
        self.tokens += inputs.iter().map(self.size).sum::<usize>();
        let queue = if background { &mut self.background } else { &mut self.waiting };
        queue.push_back(Task { inputs: inputs.into_iter(), since: now });
    }

    /// Adds further inputs of a task behind its waiting ones; `is_same` says whether an input belongs to this task. If
    /// no input of the task waits, this is the same as [`Batcher::push`].
    pub fn extend(&mut self, inputs: Vec<T>, background: bool, now: Instant, is_same: impl Fn(&T) -> bool) {
        // A background task may have aged into the other queue.
        let mut waiting = self.waiting.iter_mut().chain(&mut self.background);
        let Some(task) = waiting.find(|task| task.inputs.as_slice().first().is_some_and(&is_same)) else {
            return self.push(inputs, background, now);
        };
        self.inputs += inputs.len();
        self.tokens += inputs.iter().map(self.size).sum::<usize>();
        task.inputs = mem::take(&mut task.inputs).chain(inputs).collect::<Vec<_>>().into_iter();
    }

    /// The next batch, if one is ready. If `expecting`, further inputs are on their way, and an idle device waits
    /// for them for up to `max_delay`. Otherwise it does not wait.
    pub fn take(&mut self, now: Instant, device: DeviceState, expecting: bool) -> Option<Batch<T>> {
        self.is_ready(now, device, expecting).then(|| self.form_batch(now))
    }

    /// Whether [`Batcher::take`] would return a batch.
    pub fn is_ready(&self, now: Instant, device: DeviceState, expecting: bool) -> bool {
        let ready = match device {
            DeviceState::Busy => self.is_full(),
            DeviceState::Idle => self.is_full() || !expecting || self.due().is_some_and(|due| due <= now),
        };
        ready && !self.is_empty()
    }

    /// When the task that has waited longest will have waited for `max_delay`.
    pub fn due(&self) -> Option<Instant> {
        self.waiting
            .iter()
            .chain(&self.background)
            .map(|task| task.since)
            .min()
            .map(|oldest| oldest + self.policy.max_delay)
    }

    fn is_full(&self) -> bool {
        let Policy { max_tokens, max_requests, .. } = self.policy;
        let max_tokens = if self.background.is_empty() { max_tokens } else { background_tokens(max_tokens) };
        self.tokens >= max_tokens || self.inputs >= max_requests
    }

    fn form_batch(&mut self, now: Instant) -> Batch<T> {
        let is_old = |task: &Task<T>| task.since + BACKGROUND_WAIT <= now;
        // The queue is in the order of turns, not of age: an old task may be anywhere in it.
        if self.background.iter().any(is_old) {
            let (old, young): (VecDeque<_>, _) =
                mem::take(&mut self.background).into_iter().partition(is_old);
            self.waiting.extend(old);
            self.background = young;
        }
        let max_tokens = self.policy.max_tokens;
        let mut batch = Batch { inputs: Vec::new(), tokens: 0 };
        for (queue, max_tokens) in
            [(&mut self.waiting, max_tokens), (&mut self.background, background_tokens(max_tokens))]
        {
            let limits = Policy { max_tokens, ..self.policy };
            let Shares { inputs_per_task, batch_tokens, next_turn } =
                shares(queue, self.size, &batch, limits);
            for (task, share) in queue.iter_mut().zip(inputs_per_task) {
                batch.inputs.extend(task.inputs.by_ref().take(share));
            }
            batch.tokens = batch_tokens;
            queue.rotate_left(next_turn);
            queue.retain(|task| !task.inputs.as_slice().is_empty());
        }
        self.inputs -= batch.inputs.len();
        self.tokens -= batch.tokens;
        batch
    }
}

/// The number of tokens up to which background inputs fill a batch.
fn background_tokens(max_tokens: usize) -> usize {
    max_tokens.div_ceil(BACKGROUND_DIVISOR)
}

/// How many inputs of each task are added to `batch`: one input of each task in turn, until one does not fit
/// (`nobody-waits-for-a-giant`). The first input of a batch is taken whatever its size.
fn shares<T>(tasks: &VecDeque<Task<T>>, size: fn(&T) -> usize, batch: &Batch<T>, policy: Policy) -> Shares {
    let Policy { max_tokens, max_requests, .. } = policy;
    let mut shares = Shares { inputs_per_task: Vec::new(), batch_tokens: batch.tokens, next_turn: 0 };
    let mut inputs = batch.inputs.len();
    for round in 0.. {
        let before = inputs;
        for (index, task) in tasks.iter().enumerate() {
            let Some(input) = task.inputs.as_slice().get(round) else { continue };
            let size = size(input);
            if inputs > 0 && (inputs >= max_requests || shares.batch_tokens + size > max_tokens) {
                shares.next_turn = index;
                return shares;
            }
            inputs += 1;
            shares.batch_tokens += size;
            match shares.inputs_per_task.get_mut(index) {
                Some(share) => *share += 1,
                None => shares.inputs_per_task.push(1),
            }
        }
        if inputs == before {
            break;
        }
    }
    shares
}

/// What a batch takes from a queue of tasks.
struct Shares {
    /// Inputs of each task, for the first tasks in the order of their turns.
    inputs_per_task: Vec<usize>,
    /// Tokens of the batch with these inputs.
    batch_tokens: usize,
    /// The index of the task whose turn is next.
    next_turn: usize,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DELAY: Duration = Duration::from_millis(2);

    /// An input: its number, and its tokens.
    type Input = (usize, usize);

    fn batcher(max_tokens: usize, max_requests: usize) -> Batcher<Input> {
        Batcher::new(Policy::new(max_tokens, max_requests, DELAY), |input| input.1)
    }

    fn take_all(batcher: &mut Batcher<Input>, now: Instant) -> Vec<Batch<Input>> {
        std::iter::from_fn(|| batcher.take(now, DeviceState::Idle, false)).collect()
    }

    fn numbers(batch: &Batch<Input>) -> Vec<usize> {
        batch.inputs.iter().map(|input| input.0).collect()
    }

    #[test]
    fn a_new_token_limit_applies_to_waiting_inputs() {
        let (mut batcher, now) = (batcher(100, 8), Instant::now());
        (0..6).for_each(|input| batcher.push(vec![(input, 10)], false, now));
        batcher.limit_tokens(20);
        let batches = take_all(&mut batcher, now);
        assert!(batches.len() == 3 && batches.iter().all(|batch| batch.tokens == 20), "{batches:?}");
    }

    #[test]
    fn an_idle_device_takes_a_lone_input_at_once_when_nothing_is_on_its_way() {
        let (mut batcher, now) = (batcher(100, 8), Instant::now());
        batcher.push(vec![(1, 10)], false, now);
        assert_eq!(
            batcher.take(now, DeviceState::Idle, false),
            Some(Batch { inputs: vec![(1, 10)], tokens: 10 })
        );
        assert!(batcher.is_empty());
    }

    #[test]
    fn an_idle_device_waits_for_inputs_on_their_way_but_not_beyond_max_delay() {
        let (mut batcher, now) = (batcher(100, 8), Instant::now());
        batcher.push(vec![(1, 10)], false, now);
        assert_eq!(batcher.take(now, DeviceState::Idle, true), None);
        batcher.push(vec![(2, 10)], false, now + DELAY / 2);
        assert_eq!(batcher.due(), Some(now + DELAY), "the delay counts from the first input");
        assert_eq!(numbers(&batcher.take(now + DELAY, DeviceState::Idle, true).unwrap()), [1, 2]);
    }

    #[test]
    fn a_busy_device_is_given_full_batches_only() {
        let (mut batcher, now) = (batcher(100, 2), Instant::now());
        batcher.push(vec![(1, 10)], false, now);
        assert_eq!(batcher.take(now + DELAY * 9, DeviceState::Busy, false), None);
        batcher.push(vec![(2, 10)], false, now);
        assert_eq!(numbers(&batcher.take(now, DeviceState::Busy, false).unwrap()), [1, 2]);
    }

    #[test]
    fn an_input_over_the_token_limit_goes_alone_and_the_next_proceeds() {
        let (mut batcher, now) = (batcher(100, 8), Instant::now());
        for (input, tokens) in [(1, 50), (2, 500), (3, 50)] {
            batcher.push(vec![(input, tokens)], false, now);
        }
        assert_eq!(take_all(&mut batcher, now).iter().map(numbers).collect::<Vec<_>>(), [[1], [2], [3]]);
    }

    #[test]
    fn with_max_requests_of_one_each_input_has_a_batch_of_its_own() {
        let (mut batcher, now) = (batcher(100, 1), Instant::now());
        batcher.push(vec![(1, 1)], false, now);
        batcher.push(vec![(2, 1)], false, now);
        assert_eq!(numbers(&batcher.take(now, DeviceState::Idle, true).unwrap()), [1]);
        assert_eq!(numbers(&batcher.take(now, DeviceState::Idle, true).unwrap()), [2]);
    }

    #[test]
    fn a_task_of_many_inputs_shares_each_batch_with_the_others() {
        let (mut batcher, now) = (batcher(1_000, 4), Instant::now());
        batcher.push((0..10).map(|input| (input, 1)).collect(), false, now);
        for small in [100, 200] {
            batcher.push(vec![(small, 1)], false, now);
        }
        assert_eq!(numbers(&batcher.take(now, DeviceState::Idle, false).unwrap()), [0, 1, 100, 200]);
        batcher.push((300..303).map(|input| (input, 1)).collect(), false, now);
        let rest: Vec<_> = take_all(&mut batcher, now).iter().map(numbers).collect();
        assert_eq!(rest, [vec![2, 3, 300, 301], vec![4, 5, 6, 302], vec![7, 8, 9]]);
    }

    #[test]
    fn further_inputs_of_a_task_wait_behind_its_own_without_a_new_turn() {
        let (mut batcher, now) = (batcher(1_000, 4), Instant::now());
        let is_same = |input: &Input| input.0 < 100;
        for first in [0, 2, 4] {
            batcher.extend(vec![(first, 1), (first + 1, 1)], false, now, is_same);
            batcher.push(vec![(100 + first, 1)], false, now);
        }
        let order: Vec<_> = take_all(&mut batcher, now).iter().map(numbers).collect();
        assert_eq!(order, [vec![0, 100, 102, 104], vec![1, 2, 3, 4], vec![5]]);
    }

    #[test]
    fn background_inputs_fill_a_batch_to_a_quarter_behind_the_others() {
        let (mut batcher, now) = (batcher(40, 9), Instant::now());
        (20..24).for_each(|input| batcher.push(vec![(input, 4)], true, now));
        batcher.push(vec![(0, 4)], false, now);
        assert_eq!(numbers(&batcher.take(now, DeviceState::Idle, true).unwrap()), [0, 20]);
        (1..13).for_each(|input| batcher.push(vec![(input, 4)], false, now));
        assert_eq!(
            numbers(&batcher.take(now, DeviceState::Idle, true).unwrap()),
            [1, 2, 3, 4, 5, 6, 7, 8, 9]
        );
        assert_eq!(numbers(&batcher.take(now, DeviceState::Idle, false).unwrap()), [10, 11, 12]);
        assert_eq!(numbers(&batcher.take(now, DeviceState::Idle, false).unwrap()), [21, 22]);
        assert_eq!(numbers(&batcher.take(now, DeviceState::Idle, false).unwrap()), [23]);
        assert!(batcher.is_empty());
    }

    #[test]
    fn background_inputs_alone_form_smaller_batches() {
        let (mut batcher, now) = (batcher(40, 9), Instant::now());
        (0..3).for_each(|input| batcher.push(vec![(input, 5)], true, now));
        assert_eq!(numbers(&batcher.take(now, DeviceState::Busy, true).unwrap()), [0, 1]);
        assert_eq!(
            batcher.take(now, DeviceState::Busy, true),
            None,
            "the last input fills only half of a smaller batch"
        );
        assert_eq!(numbers(&batcher.take(now, DeviceState::Idle, false).unwrap()), [2]);
    }

    #[test]
    fn after_a_minute_background_inputs_take_turns_with_the_others() {
        let (mut batcher, now) = (batcher(20, 9), Instant::now());
        batcher.push(vec![(10, 10), (11, 10)], true, now);
        let later = now + BACKGROUND_WAIT;
        (0..4).for_each(|input| batcher.push(vec![(input, 10)], false, later));
        let order: Vec<_> = take_all(&mut batcher, later).iter().map(numbers).collect();
        assert_eq!(
            order,
            [[0, 1], [2, 3], [10, 11]],
            "its turn is behind those that arrived before its minute was over"
        );
    }

    proptest! {
        #[test]
        fn every_input_is_batched_once_within_bounds_and_tasks_take_turns(
            tasks in prop::collection::vec(prop::collection::vec(1usize..300, 1..20), 0..20),
            max_tokens in 1usize..500,
            max_requests in 1usize..20,
        ) {
            let (mut batcher, now) = (batcher(max_tokens, max_requests), Instant::now());
            for (task, sizes) in tasks.iter().enumerate() {
                batcher.push(sizes.iter().enumerate().map(|(n, size)| (task * 100 + n, *size)).collect(), false, now);
            }
            let mut taken = vec![0; tasks.len()];
            while let Some(batch) = batcher.take(now, DeviceState::Idle, false) {
                prop_assert!(batch.inputs.len() <= max_requests);
                prop_assert!(batch.tokens <= max_tokens || batch.inputs.len() == 1);
                prop_assert_eq!(batch.tokens, batch.inputs.iter().map(|input| input.1).sum::<usize>());
                for (number, size) in batch.inputs {
                    let (task, index) = (number / 100, number % 100);
                    prop_assert_eq!((index, size), (taken[task], tasks[task][index]), "each task's inputs in order");
                    taken[task] += 1;
                }
                // No task is more than one input ahead of one that still waits.
                let waiting = (0..tasks.len()).filter(|task| taken[*task] < tasks[*task].len());
                let least = waiting.map(|task| taken[task]).min().unwrap_or(usize::MAX);
                prop_assert!(taken.iter().all(|taken| *taken <= least.saturating_add(1)));
            }
            prop_assert!(taken.iter().zip(&tasks).all(|(taken, task)| *taken == task.len()));
        }
    }
}
