//! Positional terms of attention: relative bias, rotary embedding, sliding window, and the vectors of disentangled
//! attention. Owns their tables.

use std::sync::Arc;

use crate::disentangled::Disentangled;

/// The positional terms of one layer; by default none.
#[derive(Clone, Debug, Default)]
pub struct PositionTerms {
    /// Relative bias, which is added to the scores.
    pub bias: Option<Arc<RelativeBias>>,
    /// Rotary embedding of queries and keys.
    pub rotary: Option<Arc<Rotary>>,
    /// Sliding window: a token attends to tokens up to this distance.
    pub window: Option<usize>,
    /// The vectors of relative positions, if attention is disentangled.
    pub disentangled: Option<Arc<Disentangled>>,
}

impl PositionTerms {
    /// Whether there are no positional terms: scores depend on the tokens' vectors alone.
    pub fn is_empty(&self) -> bool {
        self.bias.is_none() && self.rotary.is_none() && self.window.is_none() && self.disentangled.is_none()
    }

    /// Applies bias and window to the scores of one head, before the softmax. The scores are those of the query at
    /// `position` in its text, for all keys of the text.
    pub fn apply(&self, head: usize, position: usize, scores: &mut [f32]) {
        if let Some(bias) = &self.bias {
            let row = bias.row(head, position, scores.len());
            scores.iter_mut().zip(row).for_each(|(score, bias)| *score += bias);
        }
        if let Some(window) = self.window {
            let (first, last) = (position.saturating_sub(window), position + window + 1);
            scores[..first].fill(f32::NEG_INFINITY);
            if let Some(far) = scores.get_mut(last..) {
                far.fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// Relative bias: a number for each head and distance.
#[derive(Debug)]
pub struct RelativeBias {
    /// The length of the longest text, in tokens.
    longest: usize,
    /// `[heads, 2·longest - 1]`, by the key's position minus the query's, which begins at -(longest - 1).
    numbers: Vec<f32>,
}

impl RelativeBias {
    /// Fills the table. `bias` returns the number for a head and a distance: the key's position minus the query's.
    pub fn new(heads: usize, longest: usize, bias: impl Fn(usize, isize) -> f32) -> Self {
        let width = 2 * longest - 1;
        let number = |index: usize| bias(index / width, (index % width) as isize - (longest as isize - 1));
        Self { longest, numbers: (0..heads * width).map(number).collect() }
    }

    /// The biases of a query at `position`, for the first `keys` keys.
    fn row(&self, head: usize, position: usize, keys: usize) -> &[f32] {
        let first = head * (2 * self.longest - 1) + self.longest - 1 - position;
        &self.numbers[first..][..keys]
    }
}

/// Rotary embedding: the angles of each position. Number `i` of the first half of a head and number `i` of the second
/// half are a pair. The pair is rotated by `position` times its frequency, in radians.
#[derive(Debug)]
pub struct Rotary {
    /// The number of pairs of a head that are rotated.
    half: usize,
    /// A head's numbers. Those after the pairs are not rotated.
    width: usize,
    /// `[positions, half]`: cosine and sine.
    rotations: Vec<(f32, f32)>,
}

impl Rotary {
    /// Fills the table for heads of `d` numbers (even) and texts of up to `longest` tokens. The frequency of
    /// pair `i` is `1 / base^(2i/d)`.
    pub fn new(base: f64, d: usize, longest: usize) -> Self {
        let frequency = |pair: usize| (1.0 / base.powf(2.0 * pair as f64 / d as f64)) as f32;
        Self::from_frequencies(&(0..d / 2).map(frequency).collect::<Vec<_>>(), longest)
    }

    /// Fills the table for texts of up to `longest` tokens. `frequencies` are the angles, in radians, by which each
    /// pair is rotated from one position to the next.
    pub fn from_frequencies(frequencies: &[f32], longest: usize) -> Self {
        Self::partial(frequencies, 1.0, 2 * frequencies.len(), longest)
    }

    /// As [`from_frequencies`](Self::from_frequencies), for heads of `width` numbers of which only the first are rotated,
    /// two for each frequency. The rotated numbers are multiplied by `magnitude`.
    pub fn partial(frequencies: &[f32], magnitude: f32, width: usize, longest: usize) -> Self {
        let half = frequencies.len();
        let rotation = |index: usize| {
            // The frequency and the angle are f32, as in the reference libraries.
            let angle = f64::from((index / half) as f32 * frequencies[index % half]);
            (angle.cos() as f32 * magnitude, angle.sin() as f32 * magnitude)
        };
        Self { half, width, rotations: (0..longest * half).map(rotation).collect() }
    }

    /// The number of pairs that are rotated.
    pub fn half(&self) -> usize {
        self.half
    }

    /// The cosine and sine of each pair at `position`.
    pub fn rotations_at(&self, position: usize) -> &[(f32, f32)] {
        &self.rotations[position * self.half..][..self.half]
    }

    /// Rotates the heads of one token at `position`.
    pub fn rotate(&self, position: usize, heads: &mut [f32]) {
        for head in heads.chunks_exact_mut(self.width) {
            let (first, second) = head.split_at_mut(self.half);
            for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(self.rotations_at(position)) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }

    /// Rotates one head of all tokens, which is given transposed: `[d, stride]`. The tokens are in the first columns,
    /// at `positions` in their texts.
    pub fn rotate_transposed(&self, positions: &[usize], head: &mut [f32], stride: usize) {
        let (first, second) = head.split_at_mut(self.half * stride);
        for (number, (first, second)) in
            first.chunks_exact_mut(stride).zip(second.chunks_exact_mut(stride)).enumerate()
        {
            for ((a, b), position) in first.iter_mut().zip(second).zip(positions) {
                let (cos, sin) = self.rotations[position * self.half + number];
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

/// The position of each token in its text, for texts with `lengths` tokens.
pub fn positions_in_texts(lengths: &[usize]) -> Vec<usize> {
    lengths.iter().flat_map(|length| 0..*length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bias_depends_on_distance_and_the_window_masks_far_tokens() {
        let bias = RelativeBias::new(2, 4, |head, distance| head as f32 * 100.0 + distance as f32);
        let position_terms =
            PositionTerms { bias: Some(Arc::new(bias)), window: Some(1), ..PositionTerms::default() };
        let mut scores = [0.5; 4];
        position_terms.apply(1, 2, &mut scores);
        assert_eq!(scores, [f32::NEG_INFINITY, 99.5, 100.5, 101.5]);
        let mut short = [0.0; 2];
        position_terms.apply(0, 0, &mut short);
        assert_eq!(short, [0.0, 1.0]);
    }

    #[test]
    fn rotation_rotates_pairs_and_is_the_same_transposed() {
        let rotary = Rotary::new(100.0, 4, 8);
        let mut token = [1.0, 2.0, 3.0, 4.0];
        rotary.rotate(3, &mut token);
        let (a, b) = (3.0_f64, 0.3_f64);
        let expected = [
            a.cos() - 3.0 * a.sin(),
            2.0 * b.cos() - 4.0 * b.sin(),
            3.0 * a.cos() + a.sin(),
            4.0 * b.cos() + 2.0 * b.sin(),
        ];
        for (ours, expected) in token.iter().zip(expected) {
            assert!((f64::from(*ours) - expected).abs() < 1e-6, "{ours} {expected}");
        }
        // One token at position 3 in the second column of three.
        let mut head = [9.0, 1.0, 9.0, 9.0, 2.0, 9.0, 9.0, 3.0, 9.0, 9.0, 4.0, 9.0];
        rotary.rotate_transposed(&[0, 3], &mut head, 3);
        let column: Vec<f32> = head.iter().skip(1).step_by(3).copied().collect();
        assert_eq!(column, token);
        assert_eq!(
            (head[0], head[2]),
            (9.0, 9.0),
            "position 0 is not rotated, and a column without a token is unchanged"
        );
    }
}
