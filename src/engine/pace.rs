//! Decides how many tokens of prompts a step may have so that it does not take long, by how long recent steps took:
//! a task that comes, and each sequence that waits for its next token, waits for the whole step. A sequence that waits for
//! its next token waits also for the windows that were encoded before the step. A window cannot be cut, so the prompts have
//! what it leaves of the time. Pure.

use std::time::Duration;

/// How long a step with prompts should take at most. Much shorter ones would compute prompts more slowly, because each
/// step reads all weights.
const STEP: Duration = Duration::from_millis(500);
/// The same while sequences are fed tokens of their answers. An answer takes a step for each of its tokens, so that each
/// of them is delayed by the prompts of others. Where a step of answers alone takes more than half of this, prompts may
/// double it.
const STEP_OF_ANSWERS: Duration = Duration::from_millis(100);
/// The weight of the latest step in the average time of steps of answers alone.
const LATEST: f64 = 0.1;
/// Tokens of prompts in the first step of each kind, whose pace is not known: as many as 512 tokens/s allow.
const FIRST: f64 = 512.0;
/// The fewest tokens, however slow the device is: so many take hardly longer than one.
const FEWEST: usize = 16;
/// How much a bound may grow with a step. A prompt whose beginning is reused takes hardly any time, and says nothing
/// about the next one.
const GROWTH: f64 = 1.1;

/// The bounds of steps beside which sequences decode, and of others.
pub(super) struct PromptPace {
    beside_answers: Bound,
    alone: Bound,
    /// How long steps of answers alone take, on average.
    answers: Duration,
    /// The time of the windows that were encoded since the last step of tokens.
    encoding: Duration,
}

/// The most tokens of prompts in a step that should take a certain time.
struct Bound {
    time: Duration,
    tokens: usize,
}

impl PromptPace {
    pub(super) fn new() -> Self {
        let (answers, encoding) = (Duration::ZERO, Duration::ZERO);
        Self { beside_answers: Bound::new(STEP_OF_ANSWERS), alone: Bound::new(STEP), answers, encoding }
    }

    /// The most tokens of prompts in the next step. `is_decoding`: sequences are fed tokens of their answers in it.
    pub(super) fn prompt_tokens(&self, is_decoding: bool) -> usize {
        if !is_decoding {
            return self.alone.tokens;
        }
        let time = self.beside_answers.time;
        let left = time.saturating_sub(self.encoding).as_secs_f64() / time.as_secs_f64();
        ((self.beside_answers.tokens as f64 * left) as usize).max(FEWEST)
    }

    /// Called after each step of windows, which took so long.
    pub(super) fn encoded(&mut self, took: Duration) {
        self.encoding += took;
    }

    /// Called after each step of tokens: it had so many tokens of prompts, and took so long. `is_decoding` as for the step.
    pub(super) fn learn(&mut self, is_decoding: bool, prompt_tokens: usize, took: Duration) {
        self.encoding = Duration::ZERO;
        if prompt_tokens > 0 {
            let bound = if is_decoding { &mut self.beside_answers } else { &mut self.alone };
            bound.learn(prompt_tokens, took);
        } else {
            self.answers = self.answers.mul_f64(1.0 - LATEST) + took.mul_f64(LATEST);
            self.beside_answers.time = STEP_OF_ANSWERS.max(2 * self.answers);
        }
    }
}

impl Bound {
    fn new(time: Duration) -> Self {
        Self { time, tokens: (FIRST * time.as_secs_f64()) as usize }
    }

    fn learn(&mut self, prompt_tokens: usize, took: Duration) {
        // A shorter step with few tokens says nothing about many.
        let is_known = took > self.time || 2 * prompt_tokens >= self.tokens;
        if !is_known {
            return;
        }
        let fitting = prompt_tokens as f64 * self.time.as_secs_f64() / took.as_secs_f64().max(1e-6);
        let grown = (self.tokens as f64 * GROWTH).ceil();
        self.tokens = (fitting.min(grown) as usize).max(FEWEST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bound after each of so many steps that use it, on a device of this speed.
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
    fn a_step_takes_half_a_second_at_most_whatever_the_device() {
        let slow = bounds(20, false, Duration::from_millis(20), Duration::from_millis(6));
        assert!(slow.iter().all(|bound| (75..=83).contains(bound)), "{slow:?}");
        let fast = bounds(60, false, Duration::from_millis(20), Duration::from_micros(20));
        assert!((20_000..=25_000).contains(&fast[59]), "{fast:?}");
        let slowest = bounds(3, false, Duration::from_millis(200), Duration::from_millis(100));
        assert_eq!(slowest, [FEWEST; 3]);
    }

    #[test]
    fn while_sequences_decode_a_step_takes_a_tenth_of_a_second() {
        let usual = bounds(20, true, Duration::from_millis(20), Duration::from_millis(2));
        assert!(usual[19] <= 41 && usual[19] >= 36, "{usual:?}");
    }

    #[test]
    fn where_steps_of_answers_take_long_prompts_double_them() {
        let mut pace = PromptPace::new();
        (0..100).for_each(|_| pace.learn(true, 0, Duration::from_millis(400)));
        for _ in 0..20 {
            let tokens = pace.prompt_tokens(true);
            pace.learn(true, tokens, Duration::from_millis(400 + 10 * tokens as u64));
        }
        assert!((35..=40).contains(&pace.prompt_tokens(true)), "{}", pace.prompt_tokens(true));
    }

    #[test]
    fn behind_a_window_prompts_have_the_rest_of_the_time_if_others_decode() {
        let mut pace = PromptPace::new();
        for (window, left) in [(50, 25), (400, FEWEST)] {
            pace.encoded(Duration::from_millis(window));
            assert_eq!((pace.prompt_tokens(true), pace.prompt_tokens(false)), (left, 256));
            pace.learn(true, 1, Duration::from_millis(20));
            assert_eq!(pace.prompt_tokens(true), 51, "the step after that is as usual");
        }
    }

    #[test]
    fn few_tokens_and_reused_ones_change_little() {
        let mut pace = PromptPace::new();
        pace.learn(false, 3, Duration::from_millis(20));
        pace.learn(true, 50, Duration::from_millis(900));
        assert_eq!(pace.prompt_tokens(false), 256);
        pace.learn(false, 256, Duration::from_micros(1));
        assert_eq!(pace.prompt_tokens(false), 282);
    }
}
