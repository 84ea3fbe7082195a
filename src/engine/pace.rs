//! Decides how many tokens of prompts a step may have so that it does not take long, by how long recent steps took:
//! a task that comes, and each sequence that waits for its next token, waits for the whole step. Pure.

use std::time::Duration;

/// How long a step with prompts should take at most. Much shorter ones would compute prompts more slowly, because each
/// step reads all weights.
const STEP: Duration = Duration::from_millis(500);
/// Tokens of prompts in the first step, whose pace is not known.
const FIRST: usize = 256;
/// The fewest tokens, however slow the device is: so many take hardly longer than one.
const FEWEST: usize = 32;
/// How much the bound may grow with a step. A prompt whose beginning is reused takes hardly any time, and says nothing
/// about the next one.
const GROWTH: f64 = 1.1;

pub(super) struct PromptPace {
    bound: usize,
}

impl PromptPace {
    pub(super) fn new() -> Self {
        Self { bound: FIRST }
    }

    /// The most tokens of prompts in the next step.
    pub(super) fn prompt_tokens(&self) -> usize {
        self.bound
    }

    /// Called after each step: it had so many tokens of prompts, and took so long.
    pub(super) fn learn(&mut self, prompt_tokens: usize, took: Duration) {
        // A shorter step with few tokens says nothing about many.
        let is_known = took > STEP || 2 * prompt_tokens >= self.bound;
        if prompt_tokens == 0 || !is_known {
            return;
        }
        let fitting = prompt_tokens as f64 * STEP.as_secs_f64() / took.as_secs_f64().max(1e-6);
        let grown = (self.bound as f64 * GROWTH).ceil();
        self.bound = (fitting.min(grown) as usize).max(FEWEST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bound after each of so many steps that use it, on a device of this speed.
    fn bounds(steps: usize, fixed: Duration, per_token: Duration) -> Vec<usize> {
        let mut pace = PromptPace::new();
        let step = |_| {
            pace.learn(pace.prompt_tokens(), fixed + per_token * pace.prompt_tokens() as u32);
            pace.prompt_tokens()
        };
        (0..steps).map(step).collect()
    }

    #[test]
    fn a_step_takes_half_a_second_at_most_whatever_the_device() {
        let slow = bounds(20, Duration::from_millis(20), Duration::from_millis(6));
        assert!(
            (75..=83).contains(&slow[0]) && slow[1..].iter().all(|bound| (75..=83).contains(bound)),
            "{slow:?}"
        );
        let fast = bounds(60, Duration::from_millis(20), Duration::from_micros(20));
        assert!((20_000..=25_000).contains(&fast[59]), "{fast:?}");
        let slowest = bounds(3, Duration::from_millis(200), Duration::from_millis(100));
        assert_eq!(slowest, [FEWEST; 3]);
    }

    #[test]
    fn few_tokens_and_reused_ones_change_little() {
        let mut pace = PromptPace::new();
        pace.learn(3, Duration::from_millis(20));
        pace.learn(0, Duration::from_millis(900));
        assert_eq!(pace.prompt_tokens(), FIRST);
        pace.learn(FIRST, Duration::from_micros(1));
        assert_eq!(pace.prompt_tokens(), 282);
    }
}
