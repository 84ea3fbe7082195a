//! Decides from the durations of recent steps how many prompt tokens a step may have, so that it does not take long.
//! New tasks and decoding sequences wait for the whole step. A decoding sequence also waits for the windows that are
//! encoded before the step. A window cannot be divided, so the prompts get the time that it leaves. Pure.

use std::time::Duration;

/// How long a step should take at most while no sequence decodes. A new task waits for up to two such steps. With much
/// shorter steps, prompts would be computed more slowly, because each step reads all weights.
const PREFILL_STEP: Duration = Duration::from_millis(250);
/// How long a step should take at most while sequences decode. An answer takes a step for each of its tokens, so the
/// prompts of others delay each token. If a step without prompts already takes more than half of this time, prompts may
/// double its duration.
const DECODE_STEP: Duration = Duration::from_millis(60);
/// The weight of the latest step in the average time of steps without prompts.
const LATEST_WEIGHT: f64 = 0.1;
/// The assumed pace of prompts in tokens/s. Each bound starts from it, and follows the measured steps.
const INITIAL_PACE: f64 = 512.0;
/// The maximum number of token steps that a window waits because it takes as long as they do.
const MAX_STEPS_PER_WINDOW: usize = 1_000;
/// The minimum bound on prompt tokens, however slow the device is: 16 tokens take hardly longer than one.
const MIN_TOKENS: usize = 16;
/// The largest factor by which a bound may grow after one step. A prompt whose prefix is in the cache takes hardly any
/// time, which says nothing about the next prompt.
const MAX_GROWTH: f64 = 1.1;

/// The bounds on prompt tokens of steps in which sequences decode, and of steps with prompts alone.
pub(super) struct PromptPace {
    while_decoding: Bound,
    prefill: Bound,
    /// How long steps without prompts take, on average.
    decode_time: Duration,
    /// The time spent on encoding windows since the last step of tokens.
    encode_time: Duration,
    /// How long a window takes, on average. None before the first one.
    window_time: Option<Duration>,
    /// How long a step takes in which sequences decode, on average. None before the first one.
    step_time: Option<Duration>,
}

/// The maximum number of prompt tokens of a step that should take at most `target`.
struct Bound {
    target: Duration,
    tokens: usize,
}

impl PromptPace {
    pub(super) fn new() -> Self {
        Self {
            while_decoding: Bound::new(DECODE_STEP),
            prefill: Bound::new(PREFILL_STEP),
            decode_time: Duration::ZERO,
            encode_time: Duration::ZERO,
            window_time: None,
            step_time: None,
        }
    }

    /// The number of steps in which sequences decode that take as long as one window; 0 if it is not known yet.
    pub(super) fn steps_per_window(&self) -> usize {
        let (Some(window), Some(step)) = (self.window_time, self.step_time) else { return 0 };
        let steps = window.as_secs_f64() / step.as_secs_f64().max(1e-6);
        (steps.ceil() as usize).min(MAX_STEPS_PER_WINDOW)
    }

    /// The maximum number of prompt tokens in the next step. `is_decoding`: sequences decode in it.
    pub(super) fn prompt_tokens(&self, is_decoding: bool) -> usize {
        if !is_decoding {
            return self.prefill.tokens;
        }
        let target = self.while_decoding.target;
        let share = target.saturating_sub(self.encode_time).as_secs_f64() / target.as_secs_f64();
        ((self.while_decoding.tokens as f64 * share) as usize).max(MIN_TOKENS)
    }

    /// Called after each step of windows, with their number and the time that it took.
    pub(super) fn add_encode_time(&mut self, windows: usize, took: Duration) {
        self.encode_time += took;
        average(&mut self.window_time, took / u32::try_from(windows.max(1)).unwrap_or(u32::MAX));
    }

    /// Called after each step of tokens, with its number of prompt tokens and the time that it took. `is_decoding`:
    /// sequences decoded in it.
    pub(super) fn learn(&mut self, is_decoding: bool, prompt_tokens: usize, took: Duration) {
        self.encode_time = Duration::ZERO;
        if is_decoding {
            average(&mut self.step_time, took);
        }
        if prompt_tokens > 0 {
            let bound = if is_decoding { &mut self.while_decoding } else { &mut self.prefill };
            bound.learn(prompt_tokens, took);
        } else {
            self.decode_time = self.decode_time.mul_f64(1.0 - LATEST_WEIGHT) + took.mul_f64(LATEST_WEIGHT);
            self.while_decoding.target = DECODE_STEP.max(2 * self.decode_time);
        }
    }
}

/// Updates an average with the latest duration.
fn average(average: &mut Option<Duration>, latest: Duration) {
    let mean = |before: Duration| before.mul_f64(1.0 - LATEST_WEIGHT) + latest.mul_f64(LATEST_WEIGHT);
    *average = Some(average.map_or(latest, mean));
}

impl Bound {
    fn new(target: Duration) -> Self {
        Self { target, tokens: (INITIAL_PACE * target.as_secs_f64()) as usize }
    }

    fn learn(&mut self, prompt_tokens: usize, took: Duration) {
        // A short step with few tokens says nothing about a step with many.
        let is_informative = took > self.target || 2 * prompt_tokens >= self.tokens;
        if !is_informative {
            return;
        }
        let fitting = prompt_tokens as f64 * self.target.as_secs_f64() / took.as_secs_f64().max(1e-6);
        let grown = (self.tokens as f64 * MAX_GROWTH).ceil();
        self.tokens = (fitting.min(grown) as usize).max(MIN_TOKENS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bound after each of `steps` steps that use all of it, on a device that takes `fixed` for each step and
    /// `per_token` for each token.
    fn bounds(steps: usize, is_decoding: bool, fixed: Duration, per_token: Duration) -> Vec<usize> {
        let mut pace = PromptPace::new();
        let step = |_| {
            let tokens = pace.prompt_tokens(is_decoding);
            pace.learn(is_decoding, tokens, fixed + per_token * tokens as u32);
            pace.prompt_tokens(is_decoding)
        };
        (0..steps).map(step).collect()
    }

    #[test]
    fn a_step_takes_a_quarter_of_a_second_at_most_or_has_the_fewest_tokens() {
        let slow = bounds(20, false, Duration::from_millis(20), Duration::from_millis(6));
        assert!(slow.iter().all(|bound| (33..=42).contains(bound)), "{slow:?}");
        let fast = bounds(60, false, Duration::from_millis(20), Duration::from_micros(20));
        assert!((9_500..=12_500).contains(&fast[59]), "{fast:?}");
        let slowest = bounds(3, false, Duration::from_millis(200), Duration::from_millis(100));
        assert_eq!(slowest, [MIN_TOKENS; 3]);
    }

    #[test]
    fn a_window_counts_as_the_steps_that_take_as_long() {
        let mut pace = PromptPace::new();
        pace.add_encode_time(4, Duration::from_millis(1_600));
        assert_eq!(pace.steps_per_window(), 0, "no sequence has decoded yet");
        pace.learn(true, 0, Duration::from_millis(10));
        assert_eq!(pace.steps_per_window(), 40);
        (0..100).for_each(|_| pace.learn(true, 0, Duration::from_nanos(1)));
        assert_eq!(pace.steps_per_window(), MAX_STEPS_PER_WINDOW);
    }

    #[test]
    fn while_sequences_decode_a_step_takes_60_ms() {
        let usual = bounds(20, true, Duration::from_millis(20), Duration::from_millis(2));
        assert!((17..=21).contains(&usual[19]), "{usual:?}");
    }

    #[test]
    fn prompts_may_double_a_slow_decode_step() {
        let mut pace = PromptPace::new();
        (0..100).for_each(|_| pace.learn(true, 0, Duration::from_millis(400)));
        for _ in 0..20 {
            let tokens = pace.prompt_tokens(true);
            pace.learn(true, tokens, Duration::from_millis(400 + 10 * tokens as u64));
        }
        assert!((35..=40).contains(&pace.prompt_tokens(true)), "{}", pace.prompt_tokens(true));
    }

    #[test]
    fn a_window_takes_its_time_from_the_prompts_of_the_next_decode_step() {
        let mut pace = PromptPace::new();
        for (window, left) in [(20, 20), (400, MIN_TOKENS)] {
            pace.add_encode_time(1, Duration::from_millis(window));
            assert_eq!((pace.prompt_tokens(true), pace.prompt_tokens(false)), (left, 128));
            pace.learn(true, 1, Duration::from_millis(20));
            assert_eq!(pace.prompt_tokens(true), 30, "the step after that is as usual");
        }
    }

    #[test]
    fn small_or_cached_prompts_barely_change_the_bound() {
        let mut pace = PromptPace::new();
        pace.learn(false, 3, Duration::from_millis(20));
        pace.learn(true, 50, Duration::from_millis(900));
        assert_eq!(pace.prompt_tokens(false), 128);
        pace.learn(false, 128, Duration::from_micros(1));
        assert_eq!(pace.prompt_tokens(false), 141);
    }
}
