//! Exponentials of a row of numbers, for probabilities.

use pulp::{Simd, WithSimd};

use super::dispatch;
use super::exp::exp;

/// `row` ← e^((row - largest)·scale); returns their sum. The largest becomes 1, and minus infinity 0.
pub fn exponentials(row: &mut [f32], scale: f32) -> f32 {
    dispatch(Exponentials { row, scale })
}

/// The largest number; minus infinity of an empty row, any number if one is NaN.
pub fn largest(row: &[f32]) -> f32 {
    dispatch(Largest(row))
}

struct Exponentials<'a> {
    row: &'a mut [f32],
    scale: f32,
}

impl WithSimd for Exponentials<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let most = Largest(self.row).with_simd(simd);
        let (most, scale) = (simd.splat_f32s(most), simd.splat_f32s(self.scale));
        let (head, tail) = S::as_mut_simd_f32s(self.row);
        let mut sum = simd.splat_f32s(0.0);
        for x in head {
            *x = power(simd, *x, [most, scale]);
            sum = simd.add_f32s(sum, *x);
        }
        let mut total = simd.reduce_sum_f32s(sum);
        let made = power(simd, simd.partial_load_f32s(tail), [most, scale]);
        simd.partial_store_f32s(tail, made);
        for x in tail {
            total += *x;
        }
        total
    }
}

/// e^((x - most)·scale). Not a closure: see [`Lanes`](super::activation::Lanes).
#[inline(always)]
fn power<S: Simd>(simd: S, x: S::f32s, [most, scale]: [S::f32s; 2]) -> S::f32s {
    // The smallest number that `exp` gives is not 0, but 1e-38.
    let is_possible = simd.greater_than_f32s(x, simd.splat_f32s(f32::NEG_INFINITY));
    let power = exp(simd, simd.mul_f32s(simd.sub_f32s(x, most), scale));
    simd.select_f32s(is_possible, power, simd.splat_f32s(0.0))
}

struct Largest<'a>(&'a [f32]);

impl WithSimd for Largest<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let (head, tail) = S::as_simd_f32s(self.0);
        let mut most = simd.splat_f32s(f32::NEG_INFINITY);
        for x in head {
            most = simd.max_f32s(most, *x);
        }
        tail.iter().copied().fold(simd.reduce_max_f32s(most), f32::max)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::on_every_cpu;
    use super::*;

    #[test]
    fn they_are_those_of_the_distances_from_the_largest() {
        on_every_cpu(|| {
            for count in [1, 15, 16, 100] {
                let given: Vec<f32> = (0..count).map(|at| (at * 37 % 101) as f32 / 7.0 - 3.0).collect();
                let most = given.iter().copied().fold(f32::MIN, f32::max);
                assert_eq!(largest(&given), most);
                let mut row = given.clone();
                row.push(f32::NEG_INFINITY);
                let sum = exponentials(&mut row, 0.5);
                assert_eq!(row.pop(), Some(0.0));
                let right: Vec<f64> = given.iter().map(|x| (f64::from(x - most) * 0.5).exp()).collect();
                assert!((f64::from(sum) - right.iter().sum::<f64>()).abs() < 1e-5 * f64::from(sum));
                for (ours, right) in row.iter().zip(right) {
                    assert!((f64::from(*ours) - right).abs() < 1e-6);
                }
            }
        });
    }
}
