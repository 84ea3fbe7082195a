//! Pooling: makes one vector out of a text's token vectors, in f32 on the CPU. Owns no state.

/// One way to pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The first token's vector.
    Cls,
    /// The maximum of each component.
    Max,
    /// The mean of each component.
    Mean,
    /// The sum of each component, divided by the square root of the number of tokens.
    MeanSqrtLen,
    /// The last token's vector.
    LastToken,
}

/// How a text's vector is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pooling {
    /// The results of these modes are concatenated in this order. At least one.
    pub modes: Vec<Mode>,
    /// Whether the vector is scaled to length 1.
    pub normalize: bool,
}

impl Pooling {
    /// The width of a text's vector, given the width of a token's vector.
    pub fn width(&self, hidden: usize) -> usize {
        self.modes.len() * hidden
    }

    /// Pools the token vectors `rows` `[tokens, hidden]` of one text with at least one token.
    pub fn pool(&self, rows: &[f32], hidden: usize) -> Vec<f32> {
        let mut vector = Vec::with_capacity(self.width(hidden));
        for mode in &self.modes {
            vector.extend(pooled(*mode, rows, hidden));
        }
        if self.normalize {
            normalize(&mut vector);
        }
        vector
    }
}

/// The result of one mode, before normalization.
fn pooled(mode: Mode, rows: &[f32], hidden: usize) -> Vec<f32> {
    let (first, rest) = rows.split_at(hidden);
    let mut vector = first.to_vec();
    let fold_rows = |vector: &mut Vec<f32>, join: fn(f32, f32) -> f32| {
        for row in rest.chunks_exact(hidden) {
            vector.iter_mut().zip(row).for_each(|(x, y)| *x = join(*x, *y));
        }
    };
    let tokens = (rows.len() / hidden) as f32;
    let divisor = match mode {
        Mode::Cls => return vector,
        Mode::LastToken => return rows[rows.len() - hidden..].to_vec(),
        Mode::Max => {
            // `f32::max` would drop NaN, and a wrong result would look right.
            fold_rows(&mut vector, |x, y| if y > x || y.is_nan() { y } else { x });
            return vector;
        }
        Mode::Mean => tokens,
        Mode::MeanSqrtLen => tokens.sqrt(),
    };
    fold_rows(&mut vector, |x, y| x + y);
    vector.iter_mut().for_each(|x| *x /= divisor);
    vector
}

/// Scales a vector to length 1; a vector of length 0 is unchanged.
pub fn normalize(vector: &mut [f32]) {
    let squares: f64 = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    let scale = (1.0 / squares.sqrt().max(1e-12)) as f32;
    vector.iter_mut().for_each(|x| *x *= scale);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_concatenated_in_order() {
        let modes = vec![Mode::Cls, Mode::Max, Mode::Mean, Mode::MeanSqrtLen, Mode::LastToken];
        let pooling = Pooling { modes, normalize: false };
        let rows = [1.0, -1.0, 3.0, -3.0, 2.0, -5.0, 4.0, 1.0];
        let expected = [1.0, -1.0, 4.0, 1.0, 2.5, -2.0, 5.0, -4.0, 4.0, 1.0];
        assert_eq!(pooling.pool(&rows, 2), expected);
        assert_eq!(pooling.width(2), 10);
    }

    #[test]
    fn a_normalised_vector_has_length_1_and_zeros_stay_zeros() {
        let pooling = Pooling { modes: vec![Mode::Cls], normalize: true };
        assert_eq!(pooling.pool(&[3.0, 4.0], 2), [0.6, 0.8]);
        assert_eq!(pooling.pool(&[0.0, 0.0], 2), [0.0, 0.0]);
    }

    #[test]
    fn no_mode_loses_a_nan() {
        for mode in [Mode::Cls, Mode::Max, Mode::Mean, Mode::MeanSqrtLen] {
            assert!(pooled(mode, &[f32::NAN, 1.0], 1)[0].is_nan());
        }
        assert!(pooled(Mode::Max, &[1.0, f32::NAN], 1)[0].is_nan());
    }
}
