//! Decides which tokens may follow a text, by openai/whisper's rules for texts with timestamps, and chooses one. Two
//! timestamps separate segments: the end of one and the beginning of the next. Timestamps never decrease.

use crate::model::ops::{exponentials, largest};
use crate::model::sequences::sampler::Sampler;

/// Seconds from one timestamp token to the next.
pub const TIMESTAMP_STEP: f64 = 0.02;

/// The rules of a model.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Tokens that are never written.
    pub suppressed: Vec<u32>,
    /// Tokens that are not written first.
    pub suppressed_first: Vec<u32>,
    /// The token that ends a text. Tokens with smaller ids are text, those with larger ids are special or timestamps.
    pub end: u32,
    /// The token of the time 0. All tokens from here on are times.
    pub first_time: u32,
    /// The token of the latest time with which a text may begin.
    pub last_initial: u32,
}

/// A chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chosen {
    /// The token.
    pub id: u32,
    /// The logarithm of its probability among the tokens that may follow.
    pub logprob: f32,
}

impl Rules {
    /// Whether the token is text: no time, no special token, and not the end.
    pub fn is_text(&self, id: u32) -> bool {
        id < self.end
    }

    /// Whether the token is a time.
    pub fn is_time(&self, id: u32) -> bool {
        id >= self.first_time
    }

    /// Chooses the token after `output` by the network's `logits`, and overwrites these. A `sampler` draws the token;
    /// without one it is the likeliest. None if the logits are not all finite, or if the sampler finds no token.
    pub fn choose(
        &self,
        output: &[u32],
        logits: &mut [f32],
        sampler: Option<&mut Sampler>,
    ) -> Option<Chosen> {
        // `fold` and not `all`: without an early end, the compiler uses vector instructions.
        if !logits.iter().fold(true, |all, x| all & x.is_finite()) {
            return None;
        }
        self.forbid(output, logits);
        let max_logit = largest(logits);
        let mut weights = logits.to_vec();
        let mut total = exponentials(&mut weights, 1.0);
        // If all times together are likelier than the likeliest other token, a time is chosen.
        let (others, times) = weights.split_at(self.first_time as usize);
        let times: f32 = times.iter().sum();
        if times > largest(others) {
            logits[..self.first_time as usize].fill(f32::NEG_INFINITY);
            total = times;
        }
        let id = match sampler {
            Some(sampler) => sampler.choose(&mut logits.to_vec(), output.len())?,
            None => {
                let best = largest(logits);
                u32::try_from(logits.iter().position(|x| *x == best)?).ok()?
            }
        };
        Some(Chosen { id, logprob: logits[id as usize] - max_logit - total.ln() })
    }

    /// Sets the logits of all tokens that cannot follow `output` to minus infinity.
    fn forbid(&self, output: &[u32], logits: &mut [f32]) {
        let first_time = self.first_time as usize;
        let mut forbid = |ids: std::ops::Range<usize>| {
            let end = ids.end.min(logits.len());
            logits[ids.start.min(end)..end].fill(f32::NEG_INFINITY);
        };
        self.suppressed.iter().for_each(|id| forbid(*id as usize..*id as usize + 1));
        let [.., last] = output else {
            // A text begins with a time near 0.
            self.suppressed_first.iter().for_each(|id| forbid(*id as usize..*id as usize + 1));
            forbid(0..first_time);
            forbid(self.last_initial as usize + 1..usize::MAX);
            return;
        };
        let before_last = output.len().checked_sub(2).map(|index| output[index]);
        // A time after text ends a segment. A time at the beginning or after another time begins a segment.
        let is_end = self.is_time(*last) && before_last.is_some_and(|id| !self.is_time(id));
        if is_end {
            forbid(0..self.end as usize);
        } else if self.is_time(*last) {
            forbid(first_time..usize::MAX);
        }
        if let Some(time) = output.iter().rev().find(|id| self.is_time(**id)) {
            // A segment may begin when the last one ends, but must end later than it begins.
            let earliest = *time as usize + usize::from(!is_end);
            forbid(first_time..earliest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::random::Seed;
    use crate::model::sequences::sampler::Sampling;

    /// Text is 0 to 4, of which 3 is suppressed and 4 not first; 5 is the end, 6 special, and 7 to 12 are times.
    fn rules() -> Rules {
        Rules { suppressed: vec![3, 6], suppressed_first: vec![4, 5], end: 5, first_time: 7, last_initial: 8 }
    }

    /// The tokens that may follow.
    fn allowed(output: &[u32]) -> Vec<usize> {
        let mut logits = vec![0.0; 13];
        rules().forbid(output, &mut logits);
        (0..13).filter(|id| logits[*id] == 0.0).collect()
    }

    #[test]
    fn a_text_begins_with_a_time_near_zero() {
        assert_eq!(allowed(&[]), [7, 8]);
    }

    #[test]
    fn after_a_time_comes_text_and_after_text_a_later_time_or_the_end() {
        assert_eq!(allowed(&[8]), [0, 1, 2, 4, 5]);
        assert_eq!(allowed(&[8, 0]), [0, 1, 2, 4, 5, 9, 10, 11, 12]);
    }

    #[test]
    fn a_segments_end_is_followed_by_the_next_beginning_or_by_the_end() {
        assert_eq!(allowed(&[7, 0, 9]), [5, 9, 10, 11, 12]);
        assert_eq!(allowed(&[7, 0, 9, 9]), [0, 1, 2, 4, 5]);
        assert_eq!(allowed(&[7, 0, 9, 9, 1]), [0, 1, 2, 4, 5, 10, 11, 12]);
        assert_eq!(allowed(&[7, 0, 12]), [5, 12], "there is always something that may follow");
    }

    #[test]
    fn a_time_is_chosen_if_all_times_together_are_likelier_than_any_text() {
        let choose = |times: f32| {
            let mut logits = vec![-10.0; 13];
            (logits[1], logits[9], logits[10]) = (0.5_f32.ln(), times.ln(), times.ln());
            rules().choose(&[7, 0], &mut logits, None).unwrap()
        };
        let text = choose(0.24);
        assert_eq!(text.id, 1);
        assert!((text.logprob - (0.5_f32 / 0.98).ln()).abs() < 1e-3, "{text:?}");
        let time = choose(0.26);
        assert_eq!(time.id, 9);
        assert!((time.logprob - 0.5_f32.ln()).abs() < 1e-3, "among the times: {time:?}");
    }

    #[test]
    fn with_a_temperature_tokens_are_drawn_among_the_allowed_ones() {
        let mut drawn = [0; 13];
        for sequence in 0..200 {
            let mut sampler = Sampler::new(Sampling::at(1.0), Seed { task: 1, sequence }, &[]);
            let mut logits = vec![0.0; 13];
            logits[7..].fill(-9.0);
            let chosen = rules().choose(&[7, 0], &mut logits, Some(&mut sampler)).unwrap();
            assert!((chosen.logprob - 0.2_f32.ln()).abs() < 1e-2);
            drawn[chosen.id as usize] += 1;
        }
        assert!([0, 1, 2, 4, 5].iter().all(|id| drawn[*id] > 20), "{drawn:?}");
        assert_eq!(drawn.iter().sum::<usize>() - drawn[3] - drawn[6], 200);
    }

    #[test]
    fn nothing_is_chosen_from_logits_that_are_not_finite() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut logits = vec![0.0; 13];
            logits[2] = bad;
            assert_eq!(rules().choose(&[7], &mut logits, None), None);
        }
    }
}
