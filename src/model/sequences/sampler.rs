//! Chooses the next token of a sequence. Random numbers are a function of the seed, the sequence and the token's
//! position, so that a task that is computed again gets the same text. Owns the counts of the tokens so far, for the
//! penalties.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use crate::model::ops::gpu::Draw;
use crate::model::ops::{exponentials, largest};
use crate::model::random::Seed;

/// Below this temperature the likeliest token is chosen.
const MIN_TEMPERATURE: f32 = 1e-4;
/// The number of likeliest tokens that are sorted at first, for `top_p` without `top_k`.
const FIRST_CUT: usize = 256;

/// How the next token is drawn. All numbers are finite and within the bounds stated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits, from 0 to 2. At 0 the most probable token is taken.
    pub temperature: f32,
    /// Draws only from this many of the most probable tokens; 0 means all.
    pub top_k: usize,
    /// Draws only from the most probable tokens that together have this probability. Above 0, at most 1.
    pub top_p: f32,
    /// Draws only from tokens with at least this share of the most probable token's probability. From 0 to 1.
    pub min_p: f32,
    /// Subtracted from a token's logit for each time it was generated. -2 to 2.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of a token that was generated. -2 to 2.
    pub presence_penalty: f32,
    /// Divides positive logits of tokens that occurred, and multiplies negative ones. 0.1 to 10.
    pub repetition_penalty: f32,
}

impl Sampling {
    /// Sampling at this temperature, without filters and penalties.
    pub const fn at(temperature: f32) -> Self {
        Self {
            temperature,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
        }
    }
}

/// The sampler of one sequence.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    seed: Seed,
    /// How often each token has occurred in the answer. Tokens of the prompt are present with 0. Empty without
    /// penalties.
    counts: BTreeMap<u32, u32>,
    /// The position of the last chosen token, and its id. The token is counted when the next one is chosen: if the step
    /// fails elsewhere, the step is computed again, and this sampler chooses for the same position once more. None
    /// without penalties.
    last: Option<(usize, u32)>,
}

impl Sampler {
    /// A sampler for the answer to this prompt.
    pub fn new(sampling: Sampling, seed: Seed, prompt: &[u32]) -> Self {
        let mut sampler = Self { sampling, seed, counts: BTreeMap::new(), last: None };
        if sampler.has_penalties() {
            sampler.counts = prompt.iter().map(|id| (*id, 0)).collect();
        }
        sampler
    }

    fn has_penalties(&self) -> bool {
        let Sampling { frequency_penalty, presence_penalty, repetition_penalty, .. } = self.sampling;
        frequency_penalty != 0.0 || presence_penalty != 0.0 || repetition_penalty != 1.0
    }

    /// The token at `position` of the answer, by the network's `logits`, which are modified. None if one of them is NaN
    /// or +∞, or if all are -∞, which is the logit of tokens that may not come next. May be called again for the same
    /// position.
    pub fn choose(&mut self, logits: &mut [f32], position: usize) -> Option<u32> {
        self.count_last(position);
        self.apply_penalties(logits);
        let max = largest(logits);
        // `fold` and not `any`: without an early end, the compiler uses vector instructions.
        if !max.is_finite() || logits.iter().fold(false, |any, x| any | x.is_nan()) {
            return None;
        }
        let Sampling { temperature, .. } = self.sampling;
        let chosen = if temperature < MIN_TEMPERATURE {
            logits.iter().position(|x| *x == max)?
        } else {
            let sum = exponentials(logits, 1.0 / temperature);
            self.draw_from(logits, sum, self.seed.uniform(position as u64))
        };
        let chosen = u32::try_from(chosen).ok()?;
        self.take(chosen, position);
        Some(chosen)
    }

    /// How a device chooses the token at `position` of the answer, which [`take`](Self::take) is given then. May be called
    /// again for the same position.
    pub fn draw(&mut self, position: usize) -> Draw {
        self.count_last(position);
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        Draw {
            inverse_temperature: if temperature < MIN_TEMPERATURE { 0.0 } else { 1.0 / temperature },
            top_k,
            top_p,
            min_p,
            uniform: self.seed.uniform(position as u64),
            counts: self.counts.iter().map(|(id, count)| [*id, *count]).collect(),
            frequency_penalty: self.sampling.frequency_penalty,
            presence_penalty: self.sampling.presence_penalty,
            repetition_penalty: self.sampling.repetition_penalty,
            logprobs: None,
            is_masked: false,
        }
    }

    /// Records that this token was chosen at `position`.
    pub fn take(&mut self, id: u32, position: usize) {
        self.last = self.has_penalties().then_some((position, id));
    }

    /// Counts the last token if the next one is chosen.
    fn count_last(&mut self, position: usize) {
        if let Some((_, id)) = self.last.take_if(|(last, _)| *last < position) {
            *self.counts.entry(id).or_default() += 1;
        }
    }

    fn apply_penalties(&self, logits: &mut [f32]) {
        let Sampling { frequency_penalty, presence_penalty, repetition_penalty, .. } = self.sampling;
        for (id, count) in &self.counts {
            let Some(x) = logits.get_mut(*id as usize) else { continue };
            *x = if *x > 0.0 { *x / repetition_penalty } else { *x * repetition_penalty };
            if *count > 0 {
                *x -= frequency_penalty * *count as f32 + presence_penalty;
            }
        }
    }

    /// Draws a token with the random number `uniform`. The largest of `weights` is 1, and their sum is `sum`.
    fn draw_from(&self, weights: &[f32], sum: f32, uniform: f64) -> usize {
        let Sampling { top_k, top_p, min_p, .. } = self.sampling;
        if top_k == 0 && top_p >= 1.0 && min_p <= 0.0 {
            let weights = weights.iter().map(|weight| f64::from(*weight));
            return weighted_index(weights.clone(), uniform * weights.sum::<f64>());
        }
        let candidates = candidates(weights, sum, &self.sampling);
        let weights = candidates.iter().map(|id| f64::from(weights[*id]));
        let index = weighted_index(weights.clone(), uniform * weights.sum::<f64>());
        candidates.get(index).copied().unwrap_or_default()
    }
}

/// The first index at which the sum of the weights so far exceeds `target`. If there is none, the last index with a
/// positive weight.
fn weighted_index(weights: impl Iterator<Item = f64>, target: f64) -> usize {
    let (mut sum, mut last) = (0.0, 0);
    for (index, weight) in weights.enumerate() {
        sum += weight;
        if weight > 0.0 {
            last = index;
            if sum > target {
                break;
            }
        }
    }
    last
}

/// The tokens that may be drawn, the likeliest first. `min_p` is applied first, then `top_k`, then `top_p`.
fn candidates(weights: &[f32], sum: f32, sampling: &Sampling) -> Vec<usize> {
    let Sampling { top_k, top_p, min_p, .. } = *sampling;
    let by_weight = |a: &usize, b: &usize| -> Ordering { weights[*b].total_cmp(&weights[*a]).then(a.cmp(b)) };
    let mut ids: Vec<usize> = (0..weights.len()).filter(|id| weights[*id] >= min_p).collect();
    let max_candidates = if top_k == 0 { ids.len() } else { top_k.min(ids.len()) };
    let mut cut = if top_k == 0 { FIRST_CUT.min(max_candidates) } else { max_candidates };
    loop {
        if cut < ids.len() {
            ids.select_nth_unstable_by(cut, by_weight);
        }
        let mut likeliest = ids[..cut].to_vec();
        likeliest.sort_unstable_by(by_weight);
        // `top_p` is a share of the weights that `min_p` and `top_k` leave.
        let total = if top_k == 0 && min_p <= 0.0 {
            f64::from(sum)
        } else {
            let kept = if top_k == 0 { &ids[..] } else { &likeliest };
            kept.iter().map(|id| f64::from(weights[*id])).sum()
        };
        let mut cumulative = 0.0;
        let last = likeliest.iter().position(|id| {
            cumulative += f64::from(weights[*id]);
            cumulative >= f64::from(top_p) * total
        });
        match last {
            Some(last) => likeliest.truncate(last + 1),
            None if cut < max_candidates => {
                cut = (cut * 16).min(max_candidates);
                continue;
            }
            None => {}
        }
        return likeliest;
    }
}

/// The logarithm of the probability of `chosen`, and the `count` likeliest tokens with theirs.
pub fn log_probabilities(logits: &[f32], chosen: u32, count: usize) -> (f32, Vec<(u32, f32)>) {
    let max = largest(logits);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    let log_probability = |id: usize| (f64::from(logits[id] - max) - sum.ln()) as f32;
    let by_logit = |a: &usize, b: &usize| -> Ordering { logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)) };
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    if count < ids.len() {
        ids.select_nth_unstable_by(count, by_logit);
        ids.truncate(count);
    }
    ids.sort_unstable_by(by_logit);
    (log_probability(chosen as usize), ids.into_iter().map(|id| (id as u32, log_probability(id))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampling = Sampling::at(1.0);
    const SEED: Seed = Seed { task: 7, sequence: 0 };

    /// How often each of the tokens is drawn at 4,000 positions.
    fn drawn(sampling: Sampling, logits: &[f32]) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        for position in 0..4_000 {
            let chosen = Sampler::new(sampling, SEED, &[]).choose(&mut logits.to_vec(), position).unwrap();
            counts[chosen as usize] += 1;
        }
        counts
    }

    #[test]
    fn tokens_are_drawn_as_often_as_they_are_likely() {
        let logits = [0.5_f32, 0.25, 0.125, 0.125].map(f32::ln);
        for (count, expected) in drawn(PLAIN, &logits).iter().zip([2_000, 1_000, 500, 500]) {
            assert!(count.abs_diff(expected) < 110, "{count} {expected}");
        }
        let cold = drawn(Sampling { temperature: 0.5, ..PLAIN }, &logits);
        // At temperature 0.5 the weights are the squares 0.25, 0.0625 and twice 0.015625: 0.34375 in all.
        assert!(cold[0].abs_diff(2_909) < 110 && cold[1].abs_diff(727) < 110, "{cold:?}");
    }

    #[test]
    fn unlikely_tokens_are_cut_off() {
        let logits: Vec<f32> = (0..100).map(|id| -(f32::abs(id as f32 - 50.0))).collect();
        let kept = |sampling| {
            let counts = drawn(sampling, &logits);
            (0..counts.len()).filter(|id| counts[*id] > 0).collect::<Vec<_>>()
        };
        assert_eq!(kept(Sampling { top_k: 1, ..PLAIN }), [50]);
        assert_eq!(kept(Sampling { top_k: 2, ..PLAIN }), [49, 50], "the first of equally likely ones");
        assert_eq!(kept(Sampling { top_p: 0.4, ..PLAIN }), [50]);
        assert_eq!(kept(Sampling { top_p: 0.5, ..PLAIN }), [49, 50]);
        assert_eq!(kept(Sampling { min_p: 0.3, ..PLAIN }), [49, 50, 51]);
        let even = [0.0; 100];
        assert!(drawn(Sampling { top_p: 0.9, ..PLAIN }, &even)[91..].iter().all(|count| *count == 0));
        assert!(drawn(Sampling { top_p: 0.9, ..PLAIN }, &even)[60..89].iter().sum::<usize>() > 500);
    }

    #[test]
    fn the_same_seed_draws_the_same_and_another_one_does_not() {
        let logits = [0.0; 64];
        let text = |seed| -> Vec<u32> {
            let mut sampler = Sampler::new(PLAIN, seed, &[]);
            (0..32).map(|position| sampler.choose(&mut logits.to_vec(), position).unwrap()).collect()
        };
        assert_eq!(text(SEED), text(SEED));
        assert_ne!(text(SEED), text(Seed { task: 8, ..SEED }));
        assert_ne!(text(SEED), text(Seed { sequence: 1, ..SEED }));
    }

    #[test]
    fn tokens_that_have_occurred_are_penalized() {
        let greedy = Sampling { temperature: 0.0, ..PLAIN };
        let choose = |sampling, prompt: &[u32]| -> Vec<u32> {
            let mut sampler = Sampler::new(sampling, SEED, prompt);
            (0..4).map(|position| sampler.choose(&mut [1.0, 0.9, 0.8, -1.0], position).unwrap()).collect()
        };
        assert_eq!(choose(greedy, &[0]), [0, 0, 0, 0]);
        assert_eq!(choose(Sampling { presence_penalty: 0.15, ..greedy }, &[0]), [0, 1, 0, 0]);
        assert_eq!(choose(Sampling { frequency_penalty: 0.06, ..greedy }, &[0]), [0, 0, 1, 0]);
        assert_eq!(choose(Sampling { repetition_penalty: 2.0, ..greedy }, &[0]), [1, 2, 0, 0]);
    }

    #[test]
    fn a_token_that_is_chosen_again_for_its_position_counts_once() {
        let sampling = Sampling { temperature: 0.0, frequency_penalty: 0.06, ..PLAIN };
        let mut sampler = Sampler::new(sampling, SEED, &[0]);
        let mut choose = |position| sampler.choose(&mut [1.0, 0.9, 0.8, -1.0], position).unwrap();
        assert_eq!([0, 0, 0, 1, 1, 2, 2, 3].map(&mut choose), [0, 0, 0, 0, 0, 1, 1, 0]);
    }

    #[test]
    fn no_token_is_chosen_from_logits_with_nan_or_infinity() {
        assert_eq!(Sampler::new(PLAIN, SEED, &[]).choose(&mut [0.0, f32::NAN], 0), None);
        assert_eq!(Sampler::new(PLAIN, SEED, &[]).choose(&mut [f32::INFINITY, 0.0], 0), None);
        let tiny = Sampling { temperature: 1e-3, ..PLAIN };
        assert_eq!(Sampler::new(tiny, SEED, &[]).choose(&mut [-3e38, 3e38], 0), Some(1));
    }

    #[test]
    fn log_probabilities_are_relative_to_all_tokens() {
        let logits = [0.25_f32, 0.5, 0.125, 0.125].map(f32::ln);
        let (chosen, top) = log_probabilities(&logits, 2, 2);
        assert!((chosen - 0.125_f32.ln()).abs() < 1e-6);
        assert_eq!(top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 0]);
        assert!((top[0].1 - 0.5_f32.ln()).abs() < 1e-6);
    }
}
