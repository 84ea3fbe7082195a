//! Activation functions: activation(x + bias), and gating. Decides how the error function is approximated.

use pulp::{Simd, WithSimd};

use super::dispatch;
use super::exp::exp;

/// The function between the two products of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x·Φ(x), with the error function (`gelu`).
    Gelu,
    /// x·Φ(x), approximated with tanh (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
    /// max(x, 0).
    Relu,
    /// x / (1 + e^-x).
    Silu,
    /// x.
    Identity,
}

/// A function of each lane of a register. It is a trait and not a closure, because a closure that is not inlined is
/// compiled without vector instructions, and is forty times slower.
pub trait Lanes {
    /// The function's value. It differs from the exact one by at most 1e-6, or by about one unit in the last place if
    /// that is more.
    fn apply<S: Simd>(simd: S, x: S::f32s) -> S::f32s;
}

/// x·Φ(x), with the error function.
pub struct Gelu;
/// x·Φ(x), approximated with tanh.
pub struct GeluTanh;
/// max(x, 0).
pub struct Relu;
/// x / (1 + e^-x).
pub struct Silu;
/// x.
pub struct Identity;

/// max(x, 0) - ½|x|·erfc(|x|/√2). This form has no cancellation on either side of zero.
///
/// erfc(z) = poly(t)·e^(-z²) with t = 1/(1 + 0.3275911·z): Abramowitz and Stegun 7.1.26. Its error of 1.5e-7 is
/// multiplied by ½|x|, which is small for a small |x|. For a large |x|, e^(-x²/2) makes the product and its error
/// negligible.
impl Lanes for Gelu {
    #[inline(always)]
    fn apply<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        const POLYNOMIAL: [f32; 5] = [1.061_405_4, -1.453_152, 1.421_413_8, -0.284_496_72, 0.254_829_6];
        let magnitude = simd.abs_f32s(x);
        let scale = simd.splat_f32s(0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2);
        let t =
            simd.div_f32s(simd.splat_f32s(1.0), simd.mul_add_e_f32s(magnitude, scale, simd.splat_f32s(1.0)));
        let mut p = simd.splat_f32s(POLYNOMIAL[0]);
        for coefficient in &POLYNOMIAL[1..] {
            p = simd.mul_add_e_f32s(p, t, simd.splat_f32s(*coefficient));
        }
        let half = simd.mul_f32s(magnitude, simd.splat_f32s(-0.5));
        let e = exp(simd, simd.mul_f32s(half, magnitude));
        let erfc = simd.mul_f32s(simd.mul_f32s(p, t), e);
        simd.mul_add_e_f32s(half, erfc, simd.max_f32s(x, simd.splat_f32s(0.0)))
    }
}

/// ½x·(1 + tanh u) = x / (1 + e^(-2u)) with u = √(2/π)·(x + 0.044715·x³).
impl Lanes for GeluTanh {
    #[inline(always)]
    fn apply<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        const MINUS_TWO_ROOT_TWO_OVER_PI: f32 = -1.595_769_2;
        let cube = simd.mul_f32s(simd.mul_f32s(x, x), x);
        let inner = simd.mul_add_e_f32s(cube, simd.splat_f32s(0.044_715), x);
        let e = exp(simd, simd.mul_f32s(inner, simd.splat_f32s(MINUS_TWO_ROOT_TWO_OVER_PI)));
        simd.div_f32s(x, simd.add_f32s(e, simd.splat_f32s(1.0)))
    }
}

/// max(x, 0) + (x - x). The second term is 0 for a finite number, and keeps NaN.
impl Lanes for Relu {
    #[inline(always)]
    fn apply<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        simd.add_f32s(simd.max_f32s(simd.splat_f32s(0.0), x), simd.sub_f32s(x, x))
    }
}

impl Lanes for Silu {
    #[inline(always)]
    fn apply<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        let e = exp(simd, simd.neg_f32s(x));
        simd.div_f32s(x, simd.add_f32s(e, simd.splat_f32s(1.0)))
    }
}

impl Lanes for Identity {
    #[inline(always)]
    fn apply<S: Simd>(_: S, x: S::f32s) -> S::f32s {
        x
    }
}

/// `gates` ← activation(gates) * `x`.
pub fn gate(activation: Activation, gates: &mut [f32], x: &[f32]) {
    dispatch(Gate { activation, gates, x });
}

struct Gate<'a> {
    activation: Activation,
    gates: &'a mut [f32],
    x: &'a [f32],
}

impl WithSimd for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { activation, gates, x } = self;
        match activation {
            Activation::Gelu => gate_rows::<S, Gelu>(simd, gates, x),
            Activation::GeluTanh => gate_rows::<S, GeluTanh>(simd, gates, x),
            Activation::Relu => gate_rows::<S, Relu>(simd, gates, x),
            Activation::Silu => gate_rows::<S, Silu>(simd, gates, x),
            Activation::Identity => gate_rows::<S, Identity>(simd, gates, x),
        }
    }
}

#[inline(always)]
fn gate_rows<S: Simd, F: Lanes>(simd: S, gates: &mut [f32], x: &[f32]) {
    let ((gates, tail), (x, x_tail)) = (S::as_mut_simd_f32s(gates), S::as_simd_f32s(x));
    for (gate, x) in gates.iter_mut().zip(x) {
        *gate = simd.mul_f32s(F::apply(simd, *gate), *x);
    }
    if !tail.is_empty() {
        let gate = F::apply(simd, simd.partial_load_f32s(tail));
        simd.partial_store_f32s(tail, simd.mul_f32s(gate, simd.partial_load_f32s(x_tail)));
    }
}

/// `rows` `[count, width]` ← activation(rows + `bias` `[width]`).
pub fn activate(rows: &mut [f32], bias: &[f32], activation: Activation) {
    dispatch(Activate { rows, bias, activation });
}

struct Activate<'a> {
    rows: &'a mut [f32],
    bias: &'a [f32],
    activation: Activation,
}

impl WithSimd for Activate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { rows, bias, activation } = self;
        match activation {
            Activation::Gelu => apply_to_rows::<S, Gelu>(simd, rows, bias),
            Activation::GeluTanh => apply_to_rows::<S, GeluTanh>(simd, rows, bias),
            Activation::Relu => apply_to_rows::<S, Relu>(simd, rows, bias),
            Activation::Silu => apply_to_rows::<S, Silu>(simd, rows, bias),
            Activation::Identity => apply_to_rows::<S, Identity>(simd, rows, bias),
        }
    }
}

#[inline(always)]
fn apply_to_rows<S: Simd, F: Lanes>(simd: S, rows: &mut [f32], bias: &[f32]) {
    let (bias_head, bias_tail) = S::as_simd_f32s(bias);
    for row in rows.chunks_exact_mut(bias.len()) {
        let (head, tail) = S::as_mut_simd_f32s(row);
        for (x, b) in head.iter_mut().zip(bias_head) {
            *x = F::apply(simd, simd.add_f32s(*x, *b));
        }
        if !tail.is_empty() {
            let x = simd.add_f32s(simd.partial_load_f32s(tail), simd.partial_load_f32s(bias_tail));
            simd.partial_store_f32s(tail, F::apply(simd, x));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, noise, on_every_cpu};
    use super::*;

    const ALL: [Activation; 5] =
        [Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::Silu, Activation::Identity];

    /// The activation by its formula, in f64.
    fn expected(activation: Activation, x: f64) -> f64 {
        let inner = || (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
        match activation {
            Activation::Gelu => 0.5 * x * (1.0 + libm::erf(x / 2f64.sqrt())),
            Activation::GeluTanh => 0.5 * x * (1.0 + inner().tanh()),
            Activation::Relu => x.max(0.0),
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Identity => x,
        }
    }

    #[test]
    fn each_activation_is_within_1e_6_of_its_formula_on_every_cpu() {
        on_every_cpu(|| {
            for activation in ALL {
                for (range, seed) in [(0.5, 1), (4.0, 2), (12.0, 3), (90.0, 4)] {
                    let (mut x, bias) = (noise(&[70, 37], range, seed), noise(&[37], 0.7, seed + 9));
                    let sums = x.iter().zip(bias.iter().cycle()).map(|(x, bias)| f64::from(x + bias));
                    let expected: Vec<f64> = sums.map(|x| expected(activation, x)).collect();
                    activate(&mut x, &bias, activation);
                    let error = difference(&x, &expected);
                    // The last place of large values is larger.
                    assert!(
                        error <= 1e-6_f64.max(f64::from(range) * 1.2e-7),
                        "{activation:?} ±{range}: {error}"
                    );
                }
            }
        });
    }

    #[test]
    fn gelu_is_within_1e_6_of_the_exact_value_between_minus_8_and_8() {
        let xs: Vec<f32> = (-8_000..=8_000).map(|i| i as f32 / 1_000.0).collect();
        let mut ys = xs.clone();
        activate(&mut ys, &[0.0], Activation::Gelu);
        for (x, y) in xs.iter().zip(&ys) {
            let expected = expected(Activation::Gelu, f64::from(*x));
            assert!((f64::from(*y) - expected).abs() < 1e-6, "gelu({x}) = {expected}, got {y}");
        }
    }

    #[test]
    fn nan_stays_nan_on_every_cpu() {
        on_every_cpu(|| {
            for activation in ALL {
                let mut row = [f32::NAN];
                activate(&mut row, &[0.0], activation);
                assert!(row[0].is_nan(), "{activation:?}");
            }
        });
    }
}
