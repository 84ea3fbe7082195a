//! Exponentials: e^x on vector registers, for the other kernels, and of a whole row, for probabilities. Never
//! allocates.

use pulp::{Simd, WithSimd};

use super::dispatch;

/// The largest x, a little below that of the largest f32 (88.7).
const MAX: f32 = 87.0;
/// Below this x, the result is 0. e^-60 is 9e-27, which is negligible in every sum here. The product of a still smaller
/// number and a small value can be denormal, and an Intel CPU takes a hundred times longer for such a product.
const MIN: f32 = -60.0;

/// e^x for each lane, to about 2 units in the last place; 0 if x is less than -60. x is limited to 87.
///
/// With x = n·ln 2 + r and |r| ≤ ln 2 / 2, e^x = 2^n · e^r: a polynomial approximates e^r, and n is added to the
/// exponent bits.
#[inline(always)]
pub fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    /// Adding 1.5·2^23 leaves round(x) in the low bits of the sum's mantissa.
    const ROUNDER: f32 = 12_582_912.0;
    /// ln 2 in two parts, the first with few enough bits that n times it is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// Minimax coefficients of (e^r - 1 - r) / r², highest first.
    const POLYNOMIAL: [f32; 6] =
        [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    let is_number = simd.equal_f32s(x, x);
    let given = x;
    let is_small = simd.less_than_f32s(x, simd.splat_f32s(MIN));
    let x = simd.min_f32s(simd.splat_f32s(MAX), simd.max_f32s(simd.splat_f32s(MIN), x));
    let shifted = simd.mul_add_e_f32s(x, simd.splat_f32s(std::f32::consts::LOG2_E), simd.splat_f32s(ROUNDER));
    let n = simd.sub_f32s(shifted, simd.splat_f32s(ROUNDER));
    let r = simd.mul_add_e_f32s(n, simd.splat_f32s(-LN2_HIGH), x);
    let r = simd.mul_add_e_f32s(n, simd.splat_f32s(-LN2_LOW), r);
    let mut p = simd.splat_f32s(POLYNOMIAL[0]);
    for coefficient in &POLYNOMIAL[1..] {
        p = simd.mul_add_e_f32s(p, r, simd.splat_f32s(*coefficient));
    }
    let tail = simd.mul_add_e_f32s(p, simd.mul_f32s(r, r), r);
    let e_r = simd.transmute_u32s_f32s(simd.add_f32s(tail, simd.splat_f32s(1.0)));
    let n = simd.transmute_u32s_f32s(shifted);
    let n = simd.wrapping_dyn_shl_u32s(n, simd.splat_u32s(23));
    let result = simd.transmute_f32s_u32s(simd.add_u32s(e_r, n));
    let result = simd.select_f32s(is_small, simd.splat_f32s(0.0), result);
    // On some CPUs the min and max instructions drop NaN.
    simd.select_f32s(is_number, result, given)
}

/// `row` ← e^((row - largest)·scale). Returns the sum of the results. The largest number becomes 1, minus infinity 0.
pub fn exponentials(row: &mut [f32], scale: f32) -> f32 {
    dispatch(Exponentials { row, scale })
}

/// The largest number of a row; minus infinity if it is empty, unspecified if it contains NaN.
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
        let largest = Largest(self.row).with_simd(simd);
        let (largest, scale) = (simd.splat_f32s(largest), simd.splat_f32s(self.scale));
        let (head, tail) = S::as_mut_simd_f32s(self.row);
        let mut sum = simd.splat_f32s(0.0);
        for x in head {
            *x = power(simd, *x, largest, scale);
            sum = simd.add_f32s(sum, *x);
        }
        let mut total = simd.reduce_sum_f32s(sum);
        let powers = power(simd, simd.partial_load_f32s(tail), largest, scale);
        simd.partial_store_f32s(tail, powers);
        for x in tail {
            total += *x;
        }
        total
    }
}

/// e^((x - largest)·scale). A function and not a closure, for the reason given at [`Lanes`](super::activation::Lanes).
#[inline(always)]
fn power<S: Simd>(simd: S, x: S::f32s, largest: S::f32s, scale: S::f32s) -> S::f32s {
    exp(simd, simd.mul_f32s(simd.sub_f32s(x, largest), scale))
}

struct Largest<'a>(&'a [f32]);

impl WithSimd for Largest<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let (head, tail) = S::as_simd_f32s(self.0);
        let mut largest = simd.splat_f32s(f32::NEG_INFINITY);
        for x in head {
            largest = simd.max_f32s(largest, *x);
        }
        tail.iter().copied().fold(simd.reduce_max_f32s(largest), f32::max)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::on_every_cpu;
    use super::*;

    struct Exp<'a>(&'a mut [f32]);

    impl WithSimd for Exp<'_> {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            for x in self.0.chunks_mut(S::F32_LANES) {
                let y = exp(simd, simd.partial_load_f32s(x));
                simd.partial_store_f32s(x, y);
            }
        }
    }

    #[test]
    fn e_to_the_x_is_right_to_a_few_units_in_the_last_place() {
        let xs: Vec<f32> = (-5_900..8_600).map(|i| i as f32 * 0.010_1).collect();
        let mut ys = xs.clone();
        dispatch(Exp(&mut ys));
        for (x, y) in xs.iter().zip(&ys) {
            let expected = f64::from(*x).exp();
            assert!((f64::from(*y) / expected - 1.0).abs() < 4e-7, "e^{x} = {expected}, got {y}");
        }
    }

    #[test]
    fn nan_stays_nan_on_every_cpu() {
        on_every_cpu(|| {
            let mut ys = [f32::NAN, 0.0, f32::NEG_INFINITY];
            dispatch(Exp(&mut ys));
            assert!(ys[0].is_nan() && ys[1..] == [1.0, 0.0], "{ys:?}");
        });
    }

    #[test]
    fn e_to_the_x_is_0_far_below_zero_and_1_at_zero() {
        let mut ys = [f32::NEG_INFINITY, -1e9, -60.1, 0.0];
        dispatch(Exp(&mut ys));
        assert_eq!(ys, [0.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn exponentials_are_relative_to_the_largest_number() {
        on_every_cpu(|| {
            for count in [1, 15, 16, 100] {
                let given: Vec<f32> = (0..count).map(|index| (index * 37 % 101) as f32 / 7.0 - 3.0).collect();
                let max = given.iter().copied().fold(f32::MIN, f32::max);
                assert_eq!(largest(&given), max);
                let mut row = given.clone();
                row.push(f32::NEG_INFINITY);
                let sum = exponentials(&mut row, 0.5);
                assert_eq!(row.pop(), Some(0.0));
                let expected: Vec<f64> = given.iter().map(|x| (f64::from(x - max) * 0.5).exp()).collect();
                assert!((f64::from(sum) - expected.iter().sum::<f64>()).abs() < 1e-5 * f64::from(sum));
                for (ours, expected) in row.iter().zip(expected) {
                    assert!((f64::from(*ours) - expected).abs() < 1e-6);
                }
            }
        });
    }
}
