//! What attention knows of the distance between two tokens of a text: a number that is added to their score,
//! angles by which queries and keys are rotated, the farthest token that is seen. Owns the tables.

use std::sync::Arc;

/// What one layer knows; by default nothing.
#[derive(Clone, Debug, Default)]
pub struct Distances {
    /// Added to the scores.
    pub bias: Option<Arc<Bias>>,
    /// Rotates queries and keys.
    pub rotary: Option<Arc<Rotary>>,
    /// A token sees tokens up to this distance.
    pub window: Option<usize>,
}

impl Distances {
    /// Whether scores depend on the tokens' vectors alone.
    pub fn are_unknown(&self) -> bool {
        self.bias.is_none() && self.rotary.is_none() && self.window.is_none()
    }

    /// Prepares the scores of one head for the softmax: of the query at `place` in its text, for all its keys.
    pub fn apply(&self, head: usize, place: usize, scores: &mut [f32]) {
        if let Some(bias) = &self.bias {
            let row = bias.row(head, place, scores.len());
            scores.iter_mut().zip(row).for_each(|(score, bias)| *score += bias);
        }
        if let Some(window) = self.window {
            let (first, last) = (place.saturating_sub(window), place + window + 1);
            scores[..first].fill(f32::NEG_INFINITY);
            if let Some(far) = scores.get_mut(last..) {
                far.fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// A number for each head and distance.
#[derive(Debug)]
pub struct Bias {
    /// Tokens of the longest text.
    longest: usize,
    /// `[heads, 2·longest - 1]`, by the key's place minus the query's, from -(longest - 1) on.
    numbers: Vec<f32>,
}

impl Bias {
    /// `of` gives the number of a head for the key's place minus the query's.
    pub fn new(heads: usize, longest: usize, of: impl Fn(usize, isize) -> f32) -> Self {
        let width = 2 * longest - 1;
        let number = |index: usize| of(index / width, (index % width) as isize - (longest as isize - 1));
        Self { longest, numbers: (0..heads * width).map(number).collect() }
    }

    /// The numbers of a query at `place` for the keys from 0 to `keys`.
    fn row(&self, head: usize, place: usize, keys: usize) -> &[f32] {
        let first = head * (2 * self.longest - 1) + self.longest - 1 - place;
        &self.numbers[first..][..keys]
    }
}

/// The angles of each place: number `i` of the first half of a head and of the second half turn together by
/// `place / base^(2i/d)`.
#[derive(Debug)]
pub struct Rotary {
    /// Half of a head's numbers.
    half: usize,
    /// `[places, half]`: cosine and sine.
    turns: Vec<(f32, f32)>,
}

impl Rotary {
    /// For heads of `d` numbers (even) and texts of up to `longest` tokens.
    pub fn new(base: f64, d: usize, longest: usize) -> Self {
        let frequency = |pair: usize| (1.0 / base.powf(2.0 * pair as f64 / d as f64)) as f32;
        Self::of(&(0..d / 2).map(frequency).collect::<Vec<_>>(), longest)
    }

    /// For texts of up to `longest` tokens, where pairs turn by these angles from one place to the next.
    pub fn of(frequencies: &[f32], longest: usize) -> Self {
        let half = frequencies.len();
        let turn = |index: usize| {
            // As the reference libraries: the frequency and the angle are f32.
            let angle = f64::from((index / half) as f32 * frequencies[index % half]);
            (angle.cos() as f32, angle.sin() as f32)
        };
        Self { half, turns: (0..longest * half).map(turn).collect() }
    }

    /// Half of a head's numbers: as many pairs turn.
    pub fn half(&self) -> usize {
        self.half
    }

    /// The cosine and sine of each pair at `place`.
    pub fn at(&self, place: usize) -> &[(f32, f32)] {
        &self.turns[place * self.half..][..self.half]
    }

    /// Rotates the heads of one token at `place`.
    pub fn rotate(&self, place: usize, heads: &mut [f32]) {
        for head in heads.chunks_exact_mut(2 * self.half) {
            let (first, second) = head.split_at_mut(self.half);
            for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(self.at(place)) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }

    /// Rotates one head of all tokens, given transposed: `[d, stride]`, the tokens in the first columns at
    /// `places`.
    pub fn rotate_transposed(&self, places: &[usize], head: &mut [f32], stride: usize) {
        let (first, second) = head.split_at_mut(self.half * stride);
        for (number, (first, second)) in
            first.chunks_exact_mut(stride).zip(second.chunks_exact_mut(stride)).enumerate()
        {
            for ((a, b), place) in first.iter_mut().zip(second).zip(places) {
                let (cos, sin) = self.turns[place * self.half + number];
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

/// The place of each token in its text, for texts with `lengths` tokens.
pub fn places(lengths: &[usize]) -> Vec<usize> {
    lengths.iter().flat_map(|length| 0..*length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bias_goes_by_distance_and_the_window_hides_what_is_far() {
        let bias = Bias::new(2, 4, |head, distance| head as f32 * 100.0 + distance as f32);
        let distances = Distances { bias: Some(Arc::new(bias)), rotary: None, window: Some(1) };
        let mut scores = [0.5; 4];
        distances.apply(1, 2, &mut scores);
        assert_eq!(scores, [f32::NEG_INFINITY, 99.5, 100.5, 101.5]);
        let mut short = [0.0; 2];
        distances.apply(0, 0, &mut short);
        assert_eq!(short, [0.0, 1.0]);
    }

    #[test]
    fn rotation_turns_pairs_and_is_the_same_transposed() {
        let rotary = Rotary::new(100.0, 4, 8);
        let mut token = [1.0, 2.0, 3.0, 4.0];
        rotary.rotate(3, &mut token);
        let (a, b) = (3.0_f64, 0.3_f64);
        let right = [
            a.cos() - 3.0 * a.sin(),
            2.0 * b.cos() - 4.0 * b.sin(),
            3.0 * a.cos() + a.sin(),
            4.0 * b.cos() + 2.0 * b.sin(),
        ];
        for (ours, right) in token.iter().zip(right) {
            assert!((f64::from(*ours) - right).abs() < 1e-6, "{ours} {right}");
        }
        // One token at place 3 in the second column of three.
        let mut head = [9.0, 1.0, 9.0, 9.0, 2.0, 9.0, 9.0, 3.0, 9.0, 9.0, 4.0, 9.0];
        rotary.rotate_transposed(&[0, 3], &mut head, 3);
        let column: Vec<f32> = head.iter().skip(1).step_by(3).copied().collect();
        assert_eq!(column, token);
        assert_eq!((head[0], head[2]), (9.0, 9.0), "place 0 does not turn, and no token is no token");
    }
}
