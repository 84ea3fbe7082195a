//! The counts of a worker, as its control lines carry them: sums since the previous line, distributions, and its
//! current state. [`Stats::add`] adds them up, so that the launcher has the counts of a slot over all its workers.
//! Pure.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::shorten;

/// Histogram buckets of durations: their upper bounds in seconds.
pub const SECONDS: [f64; 19] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    25.0, 50.0, 100.0,
];
/// Histogram buckets of the number of inputs of a batch: their upper bounds.
pub const INPUTS: [f64; 12] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1_024.0, 2_048.0];
/// Histogram buckets of the number of tokens of a batch: their upper bounds.
pub const TOKENS: [f64; 13] =
    [16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1_024.0, 2_048.0, 4_096.0, 8_192.0, 16_384.0, 32_768.0, 65_536.0];

/// Counts of observations per bucket: each observation counts for the first upper bound that it does not exceed, and
/// in the last bucket if it exceeds all. Empty while there are no observations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Histogram {
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    /// Counts one observation.
    pub fn observe(&mut self, bounds: &[f64], value: f64) {
        self.counts.resize(bounds.len() + 1, 0);
        let bucket = bounds.iter().position(|bound| value <= *bound).unwrap_or(bounds.len());
        self.counts[bucket] += 1;
        self.sum += value;
    }

    /// Adds the counts of another histogram with the same bounds.
    pub fn add(&mut self, other: &Self) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.sum += other.sum;
    }

    /// The observations since the state `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let earlier = before.counts.iter().copied().chain(std::iter::repeat(0));
        let counts =
            self.counts.iter().zip(earlier).map(|(now, before)| now.saturating_sub(before)).collect();
        Self { counts, sum: self.sum - before.sum }
    }

    /// The number of observations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of the observed values.
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// Returns the count of each bucket: one for each of `bounds`, and the last for values above all bounds.
    pub fn counts(&self, bounds: &[f64]) -> Vec<u64> {
        let mut counts = self.counts.clone();
        counts.resize(bounds.len() + 1, 0);
        counts
    }

    /// The quantile `rank`, from 0 to 1, of the observations, interpolated within its bucket. None if there are no
    /// observations; the last bound if the quantile is above all bounds.
    pub fn quantile(&self, bounds: &[f64], rank: f64) -> Option<f64> {
        let wanted = rank * self.count() as f64;
        let (mut below, mut lower_bound) = (0.0, 0.0);
        for (count, bound) in self.counts.iter().zip(bounds) {
            let count = *count as f64;
            if count > 0.0 && below + count >= wanted {
                return Some(lower_bound + (bound - lower_bound) * (wanted - below) / count);
            }
            (below, lower_bound) = (below + count, *bound);
        }
        (self.count() > 0).then_some(lower_bound)
    }
}

named_enum! {
    /// A stage of a task, between its publication and the confirmation of its reply.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Stage as name {
        /// From its publication to its preprocessing.
        Queue => "queue",
        /// Decoding and tokenising.
        Prepare => "prepare",
        /// From the end of its preprocessing to its first forward pass.
        Wait => "wait",
        /// Its forward passes.
        Compute => "compute",
        /// From sending its reply until the broker has confirmed it.
        Publish => "publish",
    }
}

/// The number of tasks with the same status and reason.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AnswerCount {
    /// The reply's `status`.
    pub status: String,
    /// The error's code; empty for a result.
    pub reason: String,
    /// The number of tasks.
    pub count: u64,
}

/// Tokens of generated replies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenCounts {
    /// Tokens of prompts.
    pub prompt: u64,
    /// Tokens of prompts that were reused from a cache instead of computed.
    pub cached: u64,
    /// Tokens of answers.
    pub answer: u64,
}

impl TokenCounts {
    fn add(&mut self, more: Self) {
        self.prompt += more.prompt;
        self.cached += more.cached;
        self.answer += more.answer;
    }
}

/// The user and the tokens of a generated reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Generated {
    /// The request's `user`; empty if it names none.
    pub user: String,
    /// The number of its answers.
    pub answers: u64,
    /// Its tokens.
    pub tokens: TokenCounts,
}

/// Maximum number of users whose tokens are counted separately.
const MAX_USERS: usize = 100;
/// The user that stands for all who are not counted separately.
pub const OTHERS: &str = "(others)";
/// Maximum length of a user's name in bytes, as in a request. Longer names are cut.
const MAX_USER_BYTES: usize = 256;

/// Tokens by user. At most 100 users (`MAX_USERS`) are counted separately. To make room for a new one, the least
/// recently counted user is evicted and its tokens go to [`OTHERS`], so that the sum over all never falls. An evicted
/// user that comes back begins at 0.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Users {
    tokens: BTreeMap<String, TokenCounts>,
    /// The users that are counted separately, the least recently counted first. Control lines do not carry this order:
    /// a line covers only one second, within which it does not matter.
    #[serde(skip)]
    recent: VecDeque<String>,
}

impl PartialEq for Users {
    /// Compares the counts, and not the order in which the users were counted.
    fn eq(&self, other: &Self) -> bool {
        self.tokens == other.tokens
    }
}

impl Users {
    /// All users with their tokens.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &TokenCounts)> {
        self.tokens.iter().map(|(user, tokens)| (user.as_str(), tokens))
    }

    /// Counts the tokens of a user.
    fn count_tokens(&mut self, user: &str, tokens: TokenCounts) {
        if user != OTHERS {
            match self.recent.iter().position(|known| known == user) {
                Some(position) => _ = self.recent.remove(position),
                None if self.recent.len() >= MAX_USERS => self.evict_one(),
                None => {}
            }
            self.recent.push_back(user.to_owned());
        }
        self.tokens.entry(user.to_owned()).or_default().add(tokens);
    }

    fn evict_one(&mut self) {
        let evicted = self.recent.pop_front().and_then(|user| self.tokens.remove(&user));
        self.tokens.entry(OTHERS.to_owned()).or_default().add(evicted.unwrap_or_default());
    }

    /// Adds the counts of a later span.
    fn add(&mut self, more: &Self) {
        // Known users come first. Otherwise a new user could evict one that is counted in the same span.
        let is_known = |user: &&String| self.tokens.contains_key(*user);
        let (known, new): (Vec<&String>, Vec<&String>) = more.tokens.keys().partition(is_known);
        for user in known.into_iter().chain(new) {
            self.count_tokens(user, more.tokens[user]);
        }
    }
}

/// Work done in a time span, and the worker's state at its end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Tasks that were answered.
    pub answers: Vec<AnswerCount>,
    /// Tasks that were answered, by the queue that they came from.
    pub queues: BTreeMap<String, u64>,
    /// Messages dead-lettered, by reason.
    pub dead_lettered: BTreeMap<String, u64>,
    /// Deliveries that were not the first of their message.
    pub redelivered: u64,
    /// Deliveries requeued.
    pub requeued: u64,
    /// Tasks published again for another attempt.
    pub retried: u64,
    /// Tasks put off before they were computed: their reply queue takes no message, or the memory for files is full.
    pub put_off: u64,
    /// Sentinels obeyed.
    pub sentinels: u64,
    /// Sessions with the broker that were lost.
    pub lost_sessions: u64,
    /// Inputs computed.
    pub inputs: u64,
    /// Tokens computed.
    pub tokens: u64,
    /// Microseconds that the device computed.
    pub busy_us: u64,
    /// Length of the span in milliseconds.
    pub span_ms: u64,
    /// Durations of stages, in the order of [`Stage::ALL`]; bounds: [`SECONDS`].
    pub stages: [Histogram; Stage::ALL.len()],
    /// Tokens of generated replies, by user.
    pub users: Users,
    /// From a task's acceptance to its first token; bounds: [`SECONDS`].
    pub first_token: Histogram,
    /// The average time for each token of an answer after its first, observed once per reply; bounds: [`SECONDS`].
    pub output_token: Histogram,
    /// Durations of forward passes; bounds: [`SECONDS`].
    pub batch_seconds: Histogram,
    /// Inputs of forward passes; bounds: [`INPUTS`].
    pub batch_inputs: Histogram,
    /// Tokens of forward passes; bounds: [`TOKENS`].
    pub batch_tokens: Histogram,
    /// The worker's state at the end of the span.
    pub now: WorkerState,
}

/// A worker's state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerState {
    /// Tasks delivered and not yet settled.
    pub held: u64,
    /// Whether it has a session with the broker.
    pub connected: bool,
    /// Resident memory that only this process uses, in bytes.
    pub resident: u64,
    /// Tokens reserved for running sequences.
    pub kv_reserved: u64,
    /// Tokens that can be reserved; 0 for models that answer in one pass.
    pub kv_tokens: u64,
    /// A problem of the worker, as a text for people: it has no broker connection, or dead letters wait to be
    /// published.
    pub problem: Option<String>,
}

impl Stats {
    /// Whether no work was done.
    pub fn is_idle(&self) -> bool {
        Self { span_ms: 0, now: WorkerState::default(), ..self.clone() } == Self::default()
    }

    /// Counts `count` tasks that were answered with `status`, and with the error `reason`, which is empty for a result.
    pub fn count_answers(&mut self, status: &str, reason: &str, count: u64) {
        match self.answers.iter_mut().find(|it| it.status == status && it.reason == reason) {
            Some(answer) => answer.count += count,
            None => {
                self.answers.push(AnswerCount {
                    status: status.to_owned(),
                    reason: reason.to_owned(),
                    count,
                });
            }
        }
    }

    /// How many tasks were answered with `status`.
    pub fn of_status(&self, status: &str) -> u64 {
        self.answers.iter().filter(|it| it.status == status).map(|it| it.count).sum()
    }

    /// How many tasks were answered.
    pub fn tasks(&self) -> u64 {
        self.answers.iter().map(|it| it.count).sum()
    }

    /// Counts the tokens of a user.
    pub fn count_tokens(&mut self, user: &str, tokens: TokenCounts) {
        self.users.count_tokens(&shorten(user, MAX_USER_BYTES), tokens);
    }

    /// Counts how long a stage of a task took.
    pub fn observe_stage(&mut self, stage: Stage, seconds: f64) {
        self.stages[stage as usize].observe(&SECONDS, seconds);
    }

    /// Counts a forward pass.
    pub fn observe_batch(&mut self, inputs: usize, tokens: usize, seconds: f64) {
        self.inputs += inputs as u64;
        self.tokens += tokens as u64;
        self.busy_us += (seconds * 1e6) as u64;
        self.batch_seconds.observe(&SECONDS, seconds);
        self.batch_inputs.observe(&INPUTS, inputs as f64);
        self.batch_tokens.observe(&TOKENS, tokens as f64);
    }

    /// Adds the counts of a later span, and takes over its state.
    pub fn add(&mut self, more: &Self) {
        for answer in &more.answers {
            self.count_answers(&answer.status, &answer.reason, answer.count);
        }
        for (queue, count) in &more.queues {
            *self.queues.entry(queue.clone()).or_default() += count;
        }
        for (reason, count) in &more.dead_lettered {
            *self.dead_lettered.entry(reason.clone()).or_default() += count;
        }
        self.redelivered += more.redelivered;
        self.requeued += more.requeued;
        self.retried += more.retried;
        self.put_off += more.put_off;
        self.sentinels += more.sentinels;
        self.lost_sessions += more.lost_sessions;
        self.inputs += more.inputs;
        self.tokens += more.tokens;
        self.busy_us += more.busy_us;
        self.span_ms += more.span_ms;
        for (stage, more) in self.stages.iter_mut().zip(&more.stages) {
            stage.add(more);
        }
        self.users.add(&more.users);
        self.first_token.add(&more.first_token);
        self.output_token.add(&more.output_token);
        self.batch_seconds.add(&more.batch_seconds);
        self.batch_inputs.add(&more.batch_inputs);
        self.batch_tokens.add(&more.batch_tokens);
        self.now = more.now.clone();
    }

    /// Percentage of the span in which the device computed. A forward pass is counted as a whole in the span in which
    /// it ends, so the percentage is limited to 100.
    pub fn busy_percent(&self) -> u64 {
        (self.busy_us / (10 * self.span_ms.max(1))).min(100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counts_of_two_spans_add_up_to_those_of_one_long_span() {
        let record = |stats: &mut Stats, times: u64| {
            for n in 0..times {
                stats.count_answers(if n % 3 == 0 { "failed" } else { "succeeded" }, "", 1);
                stats.observe_stage(Stage::Compute, n as f64 / 7.0);
                stats.observe_batch(n as usize, 9 * n as usize, 0.25);
            }
        };
        let (mut first, mut second, mut sum) = (Stats::default(), Stats::default(), Stats::default());
        record(&mut first, 5);
        record(&mut second, 6);
        second.dead_lettered.insert("poison".into(), 1);
        second.now = WorkerState { held: 3, connected: true, resident: 1, ..WorkerState::default() };
        sum.add(&first);
        sum.add(&second);
        assert_eq!((sum.tasks(), sum.of_status("failed")), (11, 4));
        assert_eq!((sum.inputs, sum.busy_us, sum.dead_lettered["poison"]), (25, 2_750_000, 1));
        assert_eq!(sum.now, second.now);
        let (compute, sizes) = (&sum.stages[Stage::Compute as usize], &sum.batch_inputs);
        assert_eq!((compute.count(), sizes.count(), sizes.sum()), (11, 11, 25.0));
        assert_eq!(sizes.counts(&INPUTS)[..4], [4, 2, 4, 1]);
        assert!(!sum.is_idle() && Stats { span_ms: 9, now: sum.now.clone(), ..Stats::default() }.is_idle());
    }

    #[test]
    fn the_users_are_bounded_and_no_token_is_lost() {
        let tokens = TokenCounts { prompt: 3, cached: 1, answer: 2 };
        let mut sum = Stats::default();
        for span in 0..3 {
            let mut stats = Stats::default();
            (0..120).for_each(|user| stats.count_tokens(&format!("user {}", span * 60 + user), tokens));
            sum.add(&stats);
        }
        assert_eq!(sum.users.iter().count(), MAX_USERS + 1);
        assert_eq!(sum.users.iter().map(|(_, tokens)| tokens.prompt).sum::<u64>(), 3 * 360);
        assert!(answered(&sum, OTHERS).is_some_and(|tokens| tokens > 0));
        sum.count_tokens(&"long".repeat(1_000), tokens);
        assert!(sum.users.iter().all(|(user, _)| user.len() < 300));
    }

    fn answered(stats: &Stats, user: &str) -> Option<u64> {
        stats.users.iter().find(|(name, _)| *name == user).map(|(_, tokens)| tokens.answer)
    }

    #[test]
    fn invented_users_are_evicted_and_the_sum_never_falls() {
        let one = TokenCounts { prompt: 3, cached: 1, answer: 2 };
        // The launcher's sums, of what a worker counts in each second.
        let (mut sums, mut total) = (Stats::default(), 0);
        let mut span = |users: &[String]| {
            let mut stats = Stats::default();
            users.iter().for_each(|user| stats.count_tokens(user, one));
            // As the control line carries it, without the order of users.
            let stats: Stats = serde_json::from_slice(&serde_json::to_vec(&stats).unwrap()).unwrap();
            sums.add(&stats);
            let now: u64 = sums.users.iter().map(|(_, tokens)| tokens.answer).sum();
            assert_eq!(now, total + 2 * users.len() as u64);
            total = now;
            sums.clone()
        };
        let invented = |second: usize, count: usize| -> Vec<String> {
            (0..count).map(|user| format!("invented {second} {user}")).collect()
        };
        let real = "real".to_owned();
        span(std::slice::from_ref(&real));
        span(&invented(0, 150));
        let now = span(std::slice::from_ref(&real));
        assert_eq!(answered(&now, "real"), Some(2), "it was evicted, and begins at 0 again");
        // A user that is counted in every second is not evicted, however many others come.
        for second in 1..5 {
            let users: Vec<String> = invented(second, 99).into_iter().chain([real.clone()]).collect();
            assert_eq!(answered(&span(&users), "real"), Some(2 + 2 * second as u64));
        }
        let now = span(&["(others)".to_owned()]);
        assert_eq!(now.users.iter().count(), MAX_USERS + 1, "that name is not a separate user");
    }

    #[test]
    fn quantiles_lie_in_the_buckets_of_the_observations() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(&SECONDS, 0.5), None);
        (0..100).for_each(|_| histogram.observe(&SECONDS, 0.03));
        (0..10).for_each(|_| histogram.observe(&SECONDS, 1e9));
        let median = histogram.quantile(&SECONDS, 0.5).unwrap();
        assert!((0.025..=0.05).contains(&median), "{median}");
        assert_eq!(histogram.quantile(&SECONDS, 0.99), Some(100.0));
    }
}
