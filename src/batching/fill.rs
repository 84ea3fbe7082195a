//! Decides when a batch of one-pass inputs is full or due, and whose inputs it takes. Owns the waiting inputs.
//!
//! - **Queues are served by their shares**, counted in tokens (`shares`). So a flood in one queue of a pool leaves the
//!   order of the others as it is.
//! - **Requesters of a queue take turns**, one input each. So before an input of one requester, at most one of each other is computed,
//!   whatever number of tasks they have.
//! - **Tasks of a requester take turns**, one input each, so that a small task does not wait for all inputs of a large one.
//!   By turns alone, a task of several inputs would pass through the whole queue once for each. So the requester's oldest
//!   task goes first with up to a quarter of the requester's tokens.
//! - **Background tasks** fill what is left, in the same way.

use std::mem;
use std::time::{Duration, Instant};
use std::vec::IntoIter;

use super::shares::{Owner, QueueShare, Shares};

/// A background task that has waited this long takes turns with the others: the worker holds its delivery, which the
/// broker would eventually take back (`consumer_timeout`).
const BACKGROUND_WAIT: Duration = Duration::from_secs(60);
/// Background inputs fill a batch only up to 1/4 of `max_tokens`. A task waits for the batch ahead of its own and for
/// its own batch, and background inputs must lengthen neither by much. (When they filled batches up to `max_tokens`,
/// the median latency at a third of the pool's maximum rate rose from 12 to 318 ms; benches/RESULTS.md has the figures
/// with 1/4.)
const BACKGROUND_DIVISOR: usize = 4;

/// For each 3 tokens that a requester's tasks take in turn, its oldest task may take one token ahead of its turn: a
/// quarter of all.
const TURN_TOKENS_PER_AHEAD_TOKEN: usize = 3;

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
    /// A policy that leaves `encode_interval` and `encode_batch` to the model.
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
struct TaskInputs<T> {
    inputs: IntoIter<T>,
    since: Instant,
}

/// The waiting tasks of one requester, at least one.
struct Requester<T> {
    id: u64,
    /// In the order of their arrival.
    tasks: Vec<TaskInputs<T>>,
    /// The index of the task whose turn is next.
    turn: usize,
    /// The tokens that the oldest task may take ahead of its turn; at most those of a batch.
    credit: usize,
}

/// The requesters of one queue, which take turns.
struct QueueLine<T> {
    queue: QueueShare,
    /// In the order of their arrival.
    requesters: Vec<Requester<T>>,
    /// The index of the requester whose turn is next.
    turn: usize,
}

/// Queues that are served by their shares.
struct Line<T> {
    /// Each queue that ever had a task here.
    queues: Vec<QueueLine<T>>,
    shares: Shares,
}

/// The inputs that wait for a batch.
pub struct Batcher<T> {
    policy: Policy,
    /// The number of tokens of an input.
    size: fn(&T) -> usize,
    ordinary: Line<T>,
    background: Line<T>,
    /// Inputs and tokens of all waiting tasks.
    inputs: usize,
    tokens: usize,
}

impl<T> Batcher<T> {
    /// A batcher without inputs. `size` gives the tokens of an input.
    pub fn new(policy: Policy, size: fn(&T) -> usize) -> Self {
        Self { policy, size, ordinary: Line::new(), background: Line::new(), inputs: 0, tokens: 0 }
    }

    /// Limits further batches to `max_tokens`.
    pub fn limit_tokens(&mut self, max_tokens: usize) {
        self.policy.max_tokens = max_tokens;
    }

    /// The bounds of batches.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Whether no input waits.
    pub fn is_empty(&self) -> bool {
        self.ordinary.is_empty() && self.background.is_empty()
    }

    /// Adds the inputs of a task. Its turn comes after those of its requester's waiting tasks of the same kind, ordinary
    /// or background.
    pub fn push(&mut self, inputs: Vec<T>, owner: Owner, now: Instant) {
        if inputs.is_empty() {
            return;
        }
        self.inputs += inputs.len();
        self.tokens += inputs.iter().map(self.size).sum::<usize>();
        let line = if owner.background { &mut self.background } else { &mut self.ordinary };
        line.push(owner.queue, owner.requester, TaskInputs { inputs: inputs.into_iter(), since: now });
    }

    /// Adds further inputs of a task behind its waiting ones; `is_same` says whether an input belongs to this task. If
    /// no input of the task waits, this is the same as [`Batcher::push`].
    pub fn extend(&mut self, inputs: Vec<T>, owner: Owner, now: Instant, is_same: impl Fn(&T) -> bool) {
        let is_same = |task: &TaskInputs<T>| task.inputs.as_slice().first().is_some_and(&is_same);
        // A background task may have aged into the other line.
        let lines = [&mut self.ordinary, &mut self.background];
        let Some(line) = lines.into_iter().find(|line| line.tasks().any(is_same)) else {
            return self.push(inputs, owner, now);
        };
        let Some(task) = line.tasks_mut().find(|task| is_same(task)) else { return };
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
        self.ordinary
            .tasks()
            .chain(self.background.tasks())
            .map(|task| task.since)
            .min()
            .map(|oldest| oldest + self.policy.max_delay)
    }

    fn is_full(&self) -> bool {
        let Policy { max_tokens, max_requests, .. } = self.policy;
        // Waiting for more than background inputs may fill would delay the ordinary ones for them.
        let max_tokens = if self.background.is_empty() { max_tokens } else { background_tokens(max_tokens) };
        self.tokens >= max_tokens || self.inputs >= max_requests
    }

    fn form_batch(&mut self, now: Instant) -> Batch<T> {
        for (queue, requester, task) in self.background.remove_old(now) {
            self.ordinary.push(queue, requester, task);
        }
        let max_tokens = self.policy.max_tokens;
        let mut batch = Batch { inputs: Vec::new(), tokens: 0 };
        self.ordinary.add_to(&mut batch, self.size, self.policy);
        let limits = Policy { max_tokens: background_tokens(max_tokens), ..self.policy };
        self.background.add_to(&mut batch, self.size, limits);
        self.inputs -= batch.inputs.len();
        self.tokens -= batch.tokens;
        batch
    }
}

/// The number of tokens up to which background inputs fill a batch.
fn background_tokens(max_tokens: usize) -> usize {
    max_tokens.div_ceil(BACKGROUND_DIVISOR)
}

impl<T> Line<T> {
    fn new() -> Self {
        Self { queues: Vec::new(), shares: Shares::default() }
    }

    fn is_empty(&self) -> bool {
        self.queues.iter().all(|line| line.requesters.is_empty())
    }

    fn tasks(&self) -> impl Iterator<Item = &TaskInputs<T>> {
        self.queues.iter().flat_map(|line| &line.requesters).flat_map(|requester| &requester.tasks)
    }

    fn tasks_mut(&mut self) -> impl Iterator<Item = &mut TaskInputs<T>> {
        let requesters = self.queues.iter_mut().flat_map(|line| &mut line.requesters);
        requesters.flat_map(|requester| &mut requester.tasks)
    }

    fn push(&mut self, queue: QueueShare, requester: u64, task: TaskInputs<T>) {
        match self.queues.iter_mut().find(|known| known.queue == queue) {
            Some(known) => known.push(requester, task),
            None => {
                let mut line = QueueLine { queue, requesters: Vec::new(), turn: 0 };
                line.push(requester, task);
                self.queues.push(line);
            }
        }
    }

    /// Removes the tasks that have waited for [`BACKGROUND_WAIT`], and returns them with their queues and requesters.
    fn remove_old(&mut self, now: Instant) -> Vec<(QueueShare, u64, TaskInputs<T>)> {
        let is_old = |task: &TaskInputs<T>| task.since + BACKGROUND_WAIT <= now;
        if !self.tasks().any(is_old) {
            return Vec::new();
        }
        let mut old = Vec::new();
        for line in &mut self.queues {
            for requester in &mut line.requesters {
                let (removed, young): (Vec<_>, _) =
                    mem::take(&mut requester.tasks).into_iter().partition(is_old);
                old.extend(removed.into_iter().map(|task| (line.queue, requester.id, task)));
                (requester.tasks, requester.turn) = (young, 0);
            }
            line.remove_empty();
        }
        old
    }

    /// Adds inputs to `batch`, each of the queue that is next by its share, until one does not fit. Smaller inputs behind
    /// it do not overtake it. The first input of a batch is taken whatever its size.
    fn add_to(&mut self, batch: &mut Batch<T>, size: fn(&T) -> usize, policy: Policy) {
        let Policy { max_tokens, max_requests, .. } = policy;
        let mut inputs = batch.inputs.len();
        let mut choices: Vec<Vec<Choice>> =
            self.queues.iter().map(|line| line.requesters.iter().map(Choice::new).collect()).collect();
        // The queues that may have further inputs.
        let mut open: Vec<usize> = (0..self.queues.len()).collect();
        while let Some((position, index)) = open
            .iter()
            .copied()
            .enumerate()
            .min_by_key(|(_, index)| self.shares.start(self.queues[*index].queue))
        {
            let (line, choices) = (&mut self.queues[index], &mut choices[index]);
            let Some(next) = line.next(choices, size) else {
                open.remove(position);
                continue;
            };
            if inputs > 0 && (inputs >= max_requests || batch.tokens + next.tokens > max_tokens) {
                break;
            }
            inputs += 1;
            batch.tokens += next.tokens;
            line.take(choices, next, max_tokens);
            self.shares.serve(line.queue, next.tokens as u64);
        }
        for (line, choices) in self.queues.iter_mut().zip(choices) {
            for (requester, choice) in line.requesters.iter_mut().zip(choices) {
                for (task, count) in requester.tasks.iter_mut().zip(&choice.taken) {
                    batch.inputs.extend(task.inputs.by_ref().take(*count));
                }
                requester.remove_finished();
            }
            line.remove_empty();
        }
    }
}

impl<T> QueueLine<T> {
    fn push(&mut self, requester: u64, task: TaskInputs<T>) {
        match self.requesters.iter_mut().find(|known| known.id == requester) {
            Some(known) => known.tasks.push(task),
            None => {
                self.requesters.push(Requester { id: requester, tasks: vec![task], turn: 0, credit: 0 });
            }
        }
    }

    /// The next input: that of the requester whose turn it is, or of the first one after it that has further inputs.
    /// None if all inputs are chosen. `choices` has one of each requester.
    fn next(&mut self, choices: &mut [Choice], size: fn(&T) -> usize) -> Option<NextInput> {
        for _ in 0..self.requesters.len() {
            if let Some(next) = choices[self.turn].next(&self.requesters[self.turn], size) {
                return Some(next);
            }
            self.turn = (self.turn + 1) % self.requesters.len();
        }
        None
    }

    /// Takes the input that [`QueueLine::next`] has returned.
    fn take(&mut self, choices: &mut [Choice], next: NextInput, max_tokens: usize) {
        choices[self.turn].take(&mut self.requesters[self.turn], next, max_tokens);
        self.turn = (self.turn + 1) % self.requesters.len();
    }

    fn remove_empty(&mut self) {
        self.turn = remove(&mut self.requesters, self.turn, |requester| requester.tasks.is_empty());
    }
}

impl<T> Requester<T> {
    fn remove_finished(&mut self) {
        self.turn = remove(&mut self.tasks, self.turn, |task| task.inputs.as_slice().is_empty());
    }
}

/// Removes items. Returns the index of the item whose turn is next, if it was that at `turn` before.
fn remove<T>(items: &mut Vec<T>, turn: usize, is_removed: impl Fn(&T) -> bool) -> usize {
    let before = items.iter().take(turn).filter(|item| is_removed(item)).count();
    items.retain(|item| !is_removed(item));
    if turn - before < items.len() { turn - before } else { 0 }
}

/// Which inputs of a requester a batch takes.
struct Choice {
    /// How many of each task.
    taken: Vec<usize>,
    /// No task before this index has further inputs.
    oldest: usize,
}

/// The input that a requester's turn is for.
#[derive(Clone, Copy)]
struct NextInput {
    /// The index of its task.
    task: usize,
    tokens: usize,
    /// Whether it is that of the oldest task, ahead of its turn.
    is_ahead: bool,
}

impl Choice {
    fn new<T>(requester: &Requester<T>) -> Self {
        Self { taken: vec![0; requester.tasks.len()], oldest: 0 }
    }

    /// The next input; None if all inputs are taken.
    fn next<T>(&mut self, requester: &Requester<T>, size: fn(&T) -> usize) -> Option<NextInput> {
        let tokens_of = |task: usize| requester.tasks[task].inputs.as_slice().get(self.taken[task]).map(size);
        let count = requester.tasks.len();
        self.oldest = (self.oldest..count).find(|task| tokens_of(*task).is_some())?;
        let oldest = tokens_of(self.oldest)?;
        if oldest <= requester.credit {
            return Some(NextInput { task: self.oldest, tokens: oldest, is_ahead: true });
        }
        let in_turn = (requester.turn..count).chain(0..requester.turn);
        let mut in_turn = in_turn.filter_map(|task| Some((task, tokens_of(task)?)));
        in_turn.next().map(|(task, tokens)| NextInput { task, tokens, is_ahead: false })
    }

    fn take<T>(&mut self, requester: &mut Requester<T>, next: NextInput, max_tokens: usize) {
        let NextInput { task, tokens, is_ahead } = next;
        self.taken[task] += 1;
        if is_ahead {
            requester.credit -= tokens;
        } else {
            requester.turn = (task + 1) % requester.tasks.len();
            requester.credit = max_tokens.min(requester.credit + tokens / TURN_TOKENS_PER_AHEAD_TOKEN);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DELAY: Duration = Duration::from_millis(2);
    const OWNER: Owner = Owner { queue: QueueShare::LONE, requester: 1, background: false };
    const BACKGROUND: Owner = Owner { background: true, ..OWNER };

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
        (0..6).for_each(|input| batcher.push(vec![(input, 10)], OWNER, now));
        batcher.limit_tokens(20);
        let batches = take_all(&mut batcher, now);
        assert!(batches.len() == 3 && batches.iter().all(|batch| batch.tokens == 20), "{batches:?}");
    }

    #[test]
    fn an_idle_device_takes_a_lone_input_at_once_when_nothing_is_on_its_way() {
        let (mut batcher, now) = (batcher(100, 8), Instant::now());
        batcher.push(vec![(1, 10)], OWNER, now);
        assert_eq!(
            batcher.take(now, DeviceState::Idle, false),
            Some(Batch { inputs: vec![(1, 10)], tokens: 10 })
        );
        assert!(batcher.is_empty());
    }

    #[test]
    fn an_idle_device_waits_for_inputs_on_their_way_but_not_beyond_max_delay() {
        let (mut batcher, now) = (batcher(100, 8), Instant::now());
        batcher.push(vec![(1, 10)], OWNER, now);
        assert_eq!(batcher.take(now, DeviceState::Idle, true), None);
        batcher.push(vec![(2, 10)], OWNER, now + DELAY / 2);
        assert_eq!(batcher.due(), Some(now + DELAY), "the delay counts from the first input");
        assert_eq!(numbers(&batcher.take(now + DELAY, DeviceState::Idle, true).unwrap()), [1, 2]);
    }

    #[test]
    fn a_busy_device_is_given_full_batches_only() {
        let (mut batcher, now) = (batcher(100, 2), Instant::now());
        batcher.push(vec![(1, 10)], OWNER, now);
        assert_eq!(batcher.take(now + DELAY * 9, DeviceState::Busy, false), None);
        batcher.push(vec![(2, 10)], OWNER, now);
        assert_eq!(numbers(&batcher.take(now, DeviceState::Busy, false).unwrap()), [1, 2]);
    }

    #[test]
    fn an_input_over_the_token_limit_goes_alone_and_the_next_proceeds() {
        let (mut batcher, now) = (batcher(100, 8), Instant::now());
        for (input, tokens) in [(1, 50), (2, 500), (3, 50)] {
            batcher.push(vec![(input, tokens)], OWNER, now);
        }
        assert_eq!(take_all(&mut batcher, now).iter().map(numbers).collect::<Vec<_>>(), [[1], [2], [3]]);
    }

    #[test]
    fn with_max_requests_of_one_each_input_has_a_batch_of_its_own() {
        let (mut batcher, now) = (batcher(100, 1), Instant::now());
        batcher.push(vec![(1, 1)], OWNER, now);
        batcher.push(vec![(2, 1)], OWNER, now);
        assert_eq!(numbers(&batcher.take(now, DeviceState::Idle, true).unwrap()), [1]);
        assert_eq!(numbers(&batcher.take(now, DeviceState::Idle, true).unwrap()), [2]);
    }

    #[test]
    fn a_task_of_many_inputs_shares_each_batch_with_the_others() {
        let (mut batcher, now) = (batcher(1_000, 4), Instant::now());
        batcher.push((0..10).map(|input| (input, 1)).collect(), OWNER, now);
        for small in [100, 200] {
            batcher.push(vec![(small, 1)], OWNER, now);
        }
        assert_eq!(numbers(&batcher.take(now, DeviceState::Idle, false).unwrap()), [0, 1, 100, 200]);
        batcher.push((300..303).map(|input| (input, 1)).collect(), OWNER, now);
        let rest: Vec<_> = take_all(&mut batcher, now).iter().map(numbers).collect();
        assert_eq!(rest, [vec![2, 3, 300, 301], vec![4, 5, 6, 302], vec![7, 8, 9]]);
    }

    #[test]
    fn further_inputs_of_a_task_wait_behind_its_own_without_a_new_turn() {
        let (mut batcher, now) = (batcher(1_000, 4), Instant::now());
        let is_same = |input: &Input| input.0 < 100;
        for first in [0, 2, 4] {
            batcher.extend(vec![(first, 1), (first + 1, 1)], OWNER, now, is_same);
            batcher.push(vec![(100 + first, 1)], OWNER, now);
        }
        let order: Vec<_> = take_all(&mut batcher, now).iter().map(numbers).collect();
        assert_eq!(order, [vec![0, 100, 102, 104], vec![1, 2, 3, 4], vec![5]]);
    }

    #[test]
    fn background_inputs_fill_a_batch_to_a_quarter_behind_the_others() {
        let (mut batcher, now) = (batcher(40, 9), Instant::now());
        (20..24).for_each(|input| batcher.push(vec![(input, 4)], BACKGROUND, now));
        batcher.push(vec![(0, 4)], OWNER, now);
        assert_eq!(numbers(&batcher.take(now, DeviceState::Idle, true).unwrap()), [0, 20]);
        (1..13).for_each(|input| batcher.push(vec![(input, 4)], OWNER, now));
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
        (0..3).for_each(|input| batcher.push(vec![(input, 5)], BACKGROUND, now));
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
        batcher.push(vec![(10, 10), (11, 10)], BACKGROUND, now);
        let later = now + BACKGROUND_WAIT;
        (0..4).for_each(|input| batcher.push(vec![(input, 10)], OWNER, later));
        let order: Vec<_> = take_all(&mut batcher, later).iter().map(numbers).collect();
        assert_eq!(
            order,
            [[0, 1], [2, 3], [10, 11]],
            "its turn is behind those that arrived before its minute was over"
        );
    }

    /// For each batch of 80 tokens, the tokens of a first task with these inputs. Behind it, 80 tasks of the same requester
    /// wait, each with one input of 10 tokens.
    fn tokens_of_first(inputs: Vec<Input>) -> Vec<usize> {
        let (mut batcher, now) = (batcher(80, 99), Instant::now());
        batcher.push(inputs, OWNER, now);
        (0..80).for_each(|input| batcher.push(vec![(100 + input, 10)], OWNER, now + DELAY));
        let of_first = |batch: &Batch<Input>| {
            batch.inputs.iter().filter(|(number, _)| *number < 100).map(|(_, tokens)| tokens).sum()
        };
        let is_contended = |batch: &Batch<Input>| batch.inputs.iter().any(|(number, _)| *number >= 100);
        take_all(&mut batcher, now).iter().filter(|batch| is_contended(batch)).map(of_first).collect()
    }

    #[test]
    fn the_oldest_task_ends_before_tasks_that_came_after_it() {
        // Of each batch, a quarter is for the first task. In turn, its second input would come after all other tasks.
        let tokens = tokens_of_first((0..8).map(|input| (input, 10)).collect());
        assert_eq!(tokens[..5].iter().sum::<usize>(), 80, "{tokens:?}");
    }

    #[test]
    fn the_oldest_task_takes_at_most_a_quarter_ahead_of_its_turn() {
        let tokens = tokens_of_first((0..50).map(|input| (input, 40)).collect());
        let (of_first, all) = (tokens.iter().sum::<usize>(), tokens.len() * 80);
        // It takes its turn once, and may have had a turn more by the end.
        assert!(of_first * 4 <= all + 2 * 4 * 40, "{of_first} of {all}");
    }

    #[test]
    fn requesters_take_turns_however_many_tasks_they_have() {
        let (mut batcher, now) = (batcher(100, 1), Instant::now());
        for task in 0..30 {
            batcher.push((0..7).map(|input| (100 * task + input, 100)).collect(), OWNER, now);
        }
        let innocent = Owner { requester: 2, ..OWNER };
        batcher.push((0..5).map(|input| (10_000 + input, 100)).collect(), innocent, now + DELAY);
        let batches = take_all(&mut batcher, now + DELAY);
        let of_innocent: Vec<usize> =
            (0..batches.len()).filter(|batch| numbers(&batches[*batch])[0] >= 10_000).collect();
        assert_eq!(of_innocent, [1, 3, 5, 7, 9]);
    }

    #[test]
    fn queues_get_their_shares_of_the_tokens_whatever_the_number_of_their_requesters() {
        let (mut batcher, now) = (batcher(80, 99), Instant::now());
        let queue = |queue, share, requester| Owner {
            queue: QueueShare { queue, share },
            requester,
            background: false,
        };
        // Each of the flood's tasks has a requester of its own.
        (0..400).for_each(|number| batcher.push(vec![(number, 10)], queue(0, 1_000, number as u64), now));
        (400..500).for_each(|number| batcher.push(vec![(number, 20)], queue(1, 3_000, 7), now));
        let batches: Vec<_> = (0..20).map(|_| batcher.take(now, DeviceState::Idle, false).unwrap()).collect();
        let of_second = |batch: &Batch<Input>| {
            batch.inputs.iter().filter(|(number, _)| *number >= 400).map(|(_, tokens)| tokens).sum::<usize>()
        };
        let tokens: usize = batches.iter().map(of_second).sum();
        let all: usize = batches.iter().map(|batch| batch.tokens).sum();
        assert!(tokens.abs_diff(all * 3 / 4) <= 40, "{tokens} of {all} tokens");
    }

    #[test]
    fn a_lone_input_of_another_queue_is_in_the_next_batch_and_a_lone_queue_fills_all() {
        let (mut batcher, now) = (batcher(100, 4), Instant::now());
        (0..100).for_each(|number| {
            let owner = Owner { requester: number as u64, ..OWNER };
            batcher.push(vec![(number, 10)], owner, now);
        });
        assert_eq!(batcher.take(now, DeviceState::Idle, false).unwrap().inputs.len(), 4);
        let other = Owner { queue: QueueShare { queue: 5, share: 1 }, requester: 1, background: false };
        batcher.push(vec![(1_000, 10)], other, now);
        let next = numbers(&batcher.take(now, DeviceState::Idle, false).unwrap());
        assert!(next.contains(&1_000), "{next:?}");
        batcher.push(vec![(2_000, 10)], Owner { background: true, ..other }, now);
        assert_eq!(batcher.take(now, DeviceState::Idle, false).unwrap().inputs.len(), 4);
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
                let now = now + Duration::from_micros(task as u64);
                batcher.push(sizes.iter().enumerate().map(|(n, size)| (task * 100 + n, *size)).collect(), OWNER, now);
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
                // No task is more than one input ahead of an older one that still waits.
                let mut least = usize::MAX;
                for task in 0..tasks.len() {
                    prop_assert!(taken[task] <= least.saturating_add(1));
                    if taken[task] < tasks[task].len() {
                        least = least.min(taken[task]);
                    }
                }
            }
            prop_assert!(taken.iter().zip(&tasks).all(|(taken, task)| *taken == task.len()));
        }
    }
}
