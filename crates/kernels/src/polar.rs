//! Sines, tanh, exponentials, the radii of the Box–Muller transform, and the conversion of polar to complex numbers, each
//! in place and on vector registers. Never allocates.

use std::f32::consts::FRAC_2_PI;
use std::marker::PhantomData;

use pulp::{Simd, WithSimd};

use super::activation::Lanes;
use super::dispatch;
use super::exp::exp;

/// Adding 1.5·2^23 to a small number rounds it to an integer, because the spacing of f32 is 1 there. The low bits of the
/// sum are that integer.
const ROUND_TO_INTEGER: f32 = 12_582_912.0;

/// `row` ← sin(`row`). The absolute error is below 4e-7 for angles up to 10,000 radians.
pub fn sines(row: &mut [f32]) {
    dispatch(Elementwise::<Sine>(row, PhantomData));
}

/// `row` ← tanh(`row`). The absolute error is below 3e-7.
pub fn tanh(row: &mut [f32]) {
    dispatch(Elementwise::<Tanh>(row, PhantomData));
}

/// `row` ← √(-2·ln(`row`)), for normal numbers above 0 and at most 1: the radius of the Box–Muller transform, which
/// turns uniform random numbers into normally distributed ones.
pub fn gaussian_radii(row: &mut [f32]) {
    dispatch(Elementwise::<GaussianRadius>(row, PhantomData));
}

/// Turns polar coordinates into complex numbers. An angle times `radians` is in radians. The real parts replace
/// `magnitudes`, the imaginary parts replace `angles`.
pub fn polar_to_complex(magnitudes: &mut [f32], angles: &mut [f32], radians: f32) {
    assert_eq!(magnitudes.len(), angles.len());
    dispatch(PolarToComplex { magnitudes, angles, radians });
}

/// `row` ← e^min(`row`, `max`). NaN stays NaN.
pub fn bounded_exp(row: &mut [f32], max: f32) {
    dispatch(BoundedExp { row, max });
}

/// Applies the function `F` to each number of a row.
struct Elementwise<'a, F>(&'a mut [f32], PhantomData<F>);

impl<F: Lanes> WithSimd for Elementwise<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (head, tail) = S::as_mut_simd_f32s(self.0);
        for x in head {
            *x = F::apply(simd, *x);
        }
        if !tail.is_empty() {
            let y = F::apply(simd, simd.partial_load_f32s(tail));
            simd.partial_store_f32s(tail, y);
        }
    }
}

struct Sine;
struct Tanh;
struct GaussianRadius;

impl Lanes for Sine {
    #[inline(always)]
    fn apply<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        sin_cos(simd, x).0
    }
}

/// 1 - 2 / (e^(2x) + 1).
impl Lanes for Tanh {
    #[inline(always)]
    fn apply<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        let one = simd.splat_f32s(1.0);
        let e = exp(simd, simd.add_f32s(x, x));
        simd.sub_f32s(one, simd.div_f32s(simd.splat_f32s(2.0), simd.add_f32s(e, one)))
    }
}

impl Lanes for GaussianRadius {
    #[inline(always)]
    fn apply<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        let square = simd.mul_f32s(ln(simd, x), simd.splat_f32s(-2.0));
        // -2·ln(1) is -0, and its root would be -0, too.
        simd.sqrt_f32s(simd.max_f32s(square, simd.splat_f32s(0.0)))
    }
}

struct PolarToComplex<'a> {
    magnitudes: &'a mut [f32],
    angles: &'a mut [f32],
    radians: f32,
}

impl WithSimd for PolarToComplex<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let radians = simd.splat_f32s(self.radians);
        let (magnitudes, magnitudes_tail) = S::as_mut_simd_f32s(self.magnitudes);
        let (angles, angles_tail) = S::as_mut_simd_f32s(self.angles);
        for (magnitude, angle) in magnitudes.iter_mut().zip(angles) {
            let (sine, cosine) = sin_cos(simd, simd.mul_f32s(*angle, radians));
            *angle = simd.mul_f32s(*magnitude, sine);
            *magnitude = simd.mul_f32s(*magnitude, cosine);
        }
        if !angles_tail.is_empty() {
            let magnitude = simd.partial_load_f32s(magnitudes_tail);
            let (sine, cosine) = sin_cos(simd, simd.mul_f32s(simd.partial_load_f32s(angles_tail), radians));
            simd.partial_store_f32s(angles_tail, simd.mul_f32s(magnitude, sine));
            simd.partial_store_f32s(magnitudes_tail, simd.mul_f32s(magnitude, cosine));
        }
    }
}

struct BoundedExp<'a> {
    row: &'a mut [f32],
    max: f32,
}

impl WithSimd for BoundedExp<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let max = simd.splat_f32s(self.max);
        let (head, tail) = S::as_mut_simd_f32s(self.row);
        for x in head {
            *x = bounded(simd, *x, max);
        }
        if !tail.is_empty() {
            let y = bounded(simd, simd.partial_load_f32s(tail), max);
            simd.partial_store_f32s(tail, y);
        }
    }
}

/// e^min(x, max). The minimum instruction of some CPUs drops NaN, so a comparison selects.
#[inline(always)]
fn bounded<S: Simd>(simd: S, x: S::f32s, max: S::f32s) -> S::f32s {
    let is_above = simd.greater_than_f32s(x, max);
    exp(simd, simd.select_f32s(is_above, max, x))
}

/// The sine and the cosine of each lane, in this order.
///
/// With x = n·π/2 + r and |r| ≤ π/4, polynomials approximate sin r and cos r; n modulo 4 is the quadrant. It
/// determines which polynomial gives sin x, and the signs of both.
#[inline(always)]
fn sin_cos<S: Simd>(simd: S, x: S::f32s) -> (S::f32s, S::f32s) {
    /// π/2 as a sum of three parts. The first has 8 bits, so that n times it is exact for n below 2^16.
    const HALF_PI: [f32; 3] = [1.570_312_5, 4.837_513e-4, 7.549_79e-8];
    /// Minimax coefficients of (sin r - r) / r³ as a polynomial in r², highest first.
    const SINE: [f32; 3] = [-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1];
    /// Minimax coefficients of (cos r - 1 + r²/2) / r⁴ as a polynomial in r², highest first.
    const COSINE: [f32; 3] = [2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2];
    let shifted = simd.mul_add_e_f32s(x, simd.splat_f32s(FRAC_2_PI), simd.splat_f32s(ROUND_TO_INTEGER));
    let n = simd.sub_f32s(shifted, simd.splat_f32s(ROUND_TO_INTEGER));
    let mut r = x;
    for part in HALF_PI {
        r = simd.mul_add_e_f32s(n, simd.splat_f32s(-part), r);
    }
    let square = simd.mul_f32s(r, r);
    let (mut sine, mut cosine) = (simd.splat_f32s(SINE[0]), simd.splat_f32s(COSINE[0]));
    for (sine_coefficient, cosine_coefficient) in SINE[1..].iter().zip(&COSINE[1..]) {
        sine = simd.mul_add_e_f32s(sine, square, simd.splat_f32s(*sine_coefficient));
        cosine = simd.mul_add_e_f32s(cosine, square, simd.splat_f32s(*cosine_coefficient));
    }
    let sine = simd.mul_add_e_f32s(simd.mul_f32s(sine, square), r, r);
    let one_minus_half = simd.mul_add_e_f32s(square, simd.splat_f32s(-0.5), simd.splat_f32s(1.0));
    let cosine = simd.mul_add_e_f32s(cosine, simd.mul_f32s(square, square), one_minus_half);
    let quadrant = simd.transmute_u32s_f32s(shifted);
    let one = simd.splat_u32s(1);
    let is_odd = simd.greater_than_u32s(simd.and_u32s(quadrant, one), simd.splat_u32s(0));
    (
        negate_in_second_half(simd, simd.select_f32s(is_odd, cosine, sine), quadrant),
        negate_in_second_half(simd, simd.select_f32s(is_odd, sine, cosine), simd.add_u32s(quadrant, one)),
    )
}

/// -x if bit 1 of `quadrant` is set (quadrants 2 and 3), else x. The shift moves this bit to the place of the sign.
#[inline(always)]
fn negate_in_second_half<S: Simd>(simd: S, x: S::f32s, quadrant: S::u32s) -> S::f32s {
    let bits = simd.wrapping_dyn_shl_u32s(quadrant, simd.splat_u32s(30));
    let sign = simd.and_u32s(bits, simd.splat_u32s(1 << 31));
    simd.transmute_f32s_u32s(simd.xor_u32s(simd.transmute_u32s_f32s(x), sign))
}

/// The natural logarithm of each lane, for normal numbers above 0.
///
/// With x = 2^e·m and m between √½ and √2, a polynomial approximates ln m.
#[inline(always)]
fn ln<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    /// The bits of √½.
    const ROOT_HALF: u32 = 0x3f35_04f3;
    /// Added to the exponent e, so that the sum is not negative.
    const BIAS: u32 = 128;
    /// The bits of 2^23. Adding an integer below 2^23 to them gives the bits of 2^23 plus that integer.
    const TO_FLOAT: u32 = 0x4b00_0000;
    /// ln 2 in two parts. The first has few bits, so that e times it is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// Minimax coefficients of (ln(1 + y) - y + y²/2) / y³, highest first.
    const POLYNOMIAL: [f32; 9] = [
        7.037_683_6e-2,
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ];
    let bits = simd.transmute_u32s_f32s(x);
    // The exponent changes at √½ instead of 1.
    let offset_bits = simd.add_u32s(bits, simd.splat_u32s((BIAS << 23).wrapping_sub(ROOT_HALF)));
    let biased = simd.wrapping_dyn_shr_u32s(offset_bits, simd.splat_u32s(23));
    let e = simd.transmute_f32s_u32s(simd.add_u32s(biased, simd.splat_u32s(TO_FLOAT)));
    let e = simd.sub_f32s(e, simd.splat_f32s((1 << 23) as f32 + BIAS as f32));
    let exponent =
        simd.sub_u32s(simd.wrapping_dyn_shl_u32s(biased, simd.splat_u32s(23)), simd.splat_u32s(BIAS << 23));
    let m = simd.transmute_f32s_u32s(simd.sub_u32s(bits, exponent));
    let y = simd.sub_f32s(m, simd.splat_f32s(1.0));
    let square = simd.mul_f32s(y, y);
    let mut p = simd.splat_f32s(POLYNOMIAL[0]);
    for coefficient in &POLYNOMIAL[1..] {
        p = simd.mul_add_e_f32s(p, y, simd.splat_f32s(*coefficient));
    }
    let tail = simd.mul_add_e_f32s(e, simd.splat_f32s(LN2_LOW), simd.mul_f32s(simd.mul_f32s(p, square), y));
    let tail = simd.mul_add_e_f32s(square, simd.splat_f32s(-0.5), tail);
    simd.mul_add_e_f32s(e, simd.splat_f32s(LN2_HIGH), simd.add_f32s(y, tail))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, on_every_cpu};
    use super::*;

    /// Applies a kernel to these numbers, and checks the results against the exact function.
    fn check(numbers: &[f32], kernel: fn(&mut [f32]), exact: fn(f64) -> f64, tolerance: f64) {
        on_every_cpu(|| {
            let mut ours = numbers.to_vec();
            kernel(&mut ours);
            let expected: Vec<f64> = numbers.iter().map(|x| exact(f64::from(*x))).collect();
            let error = difference(&ours, &expected);
            assert!(error < tolerance, "{error}");
        });
    }

    #[test]
    fn sines_are_right_in_every_quadrant_and_far_from_zero() {
        let near: Vec<f32> = (-4_000..4_000).map(|index| index as f32 * 0.003_1).collect();
        check(&near, sines, f64::sin, 2e-7);
        let far: Vec<f32> = (-4_001..4_001).map(|index| index as f32 * 2.47).collect();
        check(&far, sines, f64::sin, 4e-7);
    }

    #[test]
    fn tanh_and_radii_are_right_for_small_and_large_numbers() {
        let numbers: Vec<f32> = (-3_001..3_000).map(|index| index as f32 * 0.004).collect();
        check(&numbers, tanh, f64::tanh, 3e-7);
        check(&[-1e9, 1e9, f32::INFINITY], tanh, f64::tanh, 1e-7);
        let uniform: Vec<f32> =
            (1..4_003).map(|index| index as f32 / 4_002.0).chain([1.2e-38, 6e-8]).collect();
        // Near 1 the radius is the root of a small difference, which enlarges its error.
        check(&uniform, gaussian_radii, |x| (-2.0 * x.ln()).sqrt(), 4e-4);
        check(&uniform[..4_000], gaussian_radii, |x| (-2.0 * x.ln()).sqrt(), 2e-5);
    }

    #[test]
    fn polar_coordinates_become_complex_numbers_and_nan_stays() {
        on_every_cpu(|| {
            let count = 37;
            let mut magnitudes: Vec<f32> = (0..count).map(|index| index as f32 * 0.1 - 1.0).collect();
            let mut angles: Vec<f32> = (0..count).map(|index| index as f32 * 0.37 - 5.0).collect();
            let expected: Vec<[f64; 2]> = magnitudes
                .iter()
                .zip(&angles)
                .map(|(magnitude, angle)| {
                    let (sine, cosine) = (2.0 * f64::from(*angle)).sin_cos();
                    [cosine, sine].map(|part| f64::from(*magnitude) * part)
                })
                .collect();
            polar_to_complex(&mut magnitudes, &mut angles, 2.0);
            for (ours, part) in [(magnitudes, 0), (angles, 1)] {
                let expected: Vec<f64> = expected.iter().map(|parts| parts[part]).collect();
                assert!(difference(&ours, &expected) < 1e-6);
            }
            let mut row = [f32::NAN, 100.0, 0.0, f32::NEG_INFINITY];
            bounded_exp(&mut row, 7.0);
            assert!(
                row[0].is_nan() && (row[1] - 7_f32.exp()).abs() < 1e-3 && row[2] == 1.0 && row[3] < 2e-38
            );
            for kernel in [sines, tanh] {
                let mut row = [f32::NAN];
                kernel(&mut row);
                assert!(row[0].is_nan());
            }
        });
    }
}
