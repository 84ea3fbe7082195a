//! e^x on vector registers, for the other kernels. Never allocates.

use pulp::Simd;

/// Beyond this the result would not be a normal f32.
const LIMIT: f32 = 87.0;

/// e^x for each lane, to about 2 units in the last place; x is limited to ±87.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2, so that e^x = 2^n · e^r: a polynomial for e^r, and n added to
/// the exponent bits.
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
    let x = simd.min_f32s(simd.splat_f32s(LIMIT), simd.max_f32s(simd.splat_f32s(-LIMIT), x));
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
    // On some CPUs the min and max instructions drop NaN.
    simd.select_f32s(is_number, result, given)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::WithSimd;

    use super::super::dispatch;
    use super::super::testing::on_every_cpu;

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
        let xs: Vec<f32> = (-8_600..8_600).map(|i| i as f32 * 0.010_1).collect();
        let mut ys = xs.clone();
        dispatch(Exp(&mut ys));
        for (x, y) in xs.iter().zip(&ys) {
            let right = f64::from(*x).exp();
            assert!((f64::from(*y) / right - 1.0).abs() < 4e-7, "e^{x} = {right}, got {y}");
        }
    }

    #[test]
    fn not_a_number_stays_so_on_every_cpu() {
        on_every_cpu(|| {
            let mut ys = [f32::NAN, 0.0, f32::NEG_INFINITY];
            dispatch(Exp(&mut ys));
            assert!(ys[0].is_nan() && ys[1] == 1.0 && ys[2] < 2e-38, "{ys:?}");
        });
    }

    #[test]
    fn far_below_zero_it_is_nothing_and_at_zero_one() {
        let mut ys = [f32::NEG_INFINITY, -1e9, 0.0];
        dispatch(Exp(&mut ys));
        assert!(ys[0] < 2e-38 && ys[1] < 2e-38);
        assert_eq!(ys[2], 1.0);
    }
}
