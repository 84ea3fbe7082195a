//! activation(x + bias). Decides how the error function is approximated.

use candle_core::{Result, Tensor};
use pulp::{Simd, WithSimd};

use super::dispatch;
use super::exp::exp;

/// The function between the two halves of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x·Φ(x), by the error function (`gelu`).
    Gelu,
    /// The same, approximated by tanh (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
    /// max(x, 0).
    Relu,
    /// x / (1 + e^-x).
    Silu,
    /// x.
    Identity,
}

/// activation(x + bias) of `x` `[rows, width]` and `bias` `[width]`, in `x`'s memory: on a GPU by its kernel,
/// elsewhere by candle's own operations.
///
/// # Errors
/// Shapes or types do not match: a bug of the caller.
pub fn bias_activation(x: Tensor, bias: &Tensor, activation: Activation) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && activation.has_kernel() && super::gpu::cuda::activate(&x, bias, activation)? {
        return Ok(x);
    }
    let x = x.broadcast_add(bias)?;
    match activation {
        Activation::Gelu => x.gelu_erf(),
        Activation::GeluTanh => x.gelu(),
        Activation::Relu => x.relu(),
        Activation::Silu => x.silu(),
        Activation::Identity => Ok(x),
    }
}

impl Activation {
    /// Whether the GPU's kernel has it.
    #[cfg(feature = "cuda")]
    fn has_kernel(self) -> bool {
        !matches!(self, Self::Silu | Self::Identity)
    }
}

/// A function of each lane of a register. Not a closure: a closure that is not inlined is compiled without
/// vector instructions, and is forty times slower.
pub trait Lanes {
    /// The function's value; within 1e-6 of the exact one.
    fn apply<S: Simd>(simd: S, x: S::f32s) -> S::f32s;
}

/// x·Φ(x), by the error function.
pub struct Gelu;
/// The same, approximated by a hyperbolic tangent.
pub struct GeluTanh;
/// The larger of x and 0.
pub struct Relu;
/// x / (1 + e^-x).
pub struct Silu;
/// x.
pub struct Identity;

/// max(x, 0) - ½|x|·erfc(|x|/√2): the form without cancellation on either side of zero.
///
/// erfc(z) = poly(t)·e^(-z²) with t = 1/(1 + 0.3275911·z), Abramowitz and Stegun 7.1.26, whose error
/// of 1.5e-7 is multiplied by at most ½|x| where e^(-x²/2) has not yet made it nothing.
impl Lanes for Gelu {
    #[inline(always)]
    fn apply<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
        const POLYNOMIAL: [f32; 5] = [1.061_405_4, -1.453_152, 1.421_413_8, -0.284_496_72, 0.254_829_6];
        let size = simd.abs_f32s(x);
        let scale = simd.splat_f32s(0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2);
        let t = simd.div_f32s(simd.splat_f32s(1.0), simd.mul_add_e_f32s(size, scale, simd.splat_f32s(1.0)));
        let mut p = simd.splat_f32s(POLYNOMIAL[0]);
        for coefficient in &POLYNOMIAL[1..] {
            p = simd.mul_add_e_f32s(p, t, simd.splat_f32s(*coefficient));
        }
        let half = simd.mul_f32s(size, simd.splat_f32s(-0.5));
        let e = exp(simd, simd.mul_f32s(half, size));
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

/// max(x, 0) plus x - x, which is 0 for a number and keeps NaN.
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

/// `gates` ← silu(gates) * `x`.
pub fn gate(gates: &mut [f32], x: &[f32]) {
    dispatch(Gate { gates, x });
}

struct Gate<'a> {
    gates: &'a mut [f32],
    x: &'a [f32],
}

impl WithSimd for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let ((gates, tail), (x, x_tail)) = (S::as_mut_simd_f32s(self.gates), S::as_simd_f32s(self.x));
        for (gate, x) in gates.iter_mut().zip(x) {
            *gate = simd.mul_f32s(Silu::apply(simd, *gate), *x);
        }
        if !tail.is_empty() {
            let gate = Silu::apply(simd, simd.partial_load_f32s(tail));
            simd.partial_store_f32s(tail, simd.mul_f32s(gate, simd.partial_load_f32s(x_tail)));
        }
    }
}

/// `rows` `[count, width]` ← activation(rows + `bias` `[width]`).
pub fn activate(rows: &mut [f32], bias: &[f32], activation: Activation) {
    dispatch(Rows { rows, bias, activation });
}

struct Rows<'a> {
    rows: &'a mut [f32],
    bias: &'a [f32],
    activation: Activation,
}

impl WithSimd for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { rows, bias, activation } = self;
        match activation {
            Activation::Gelu => each::<S, Gelu>(simd, rows, bias),
            Activation::GeluTanh => each::<S, GeluTanh>(simd, rows, bias),
            Activation::Relu => each::<S, Relu>(simd, rows, bias),
            Activation::Silu => each::<S, Silu>(simd, rows, bias),
            Activation::Identity => each::<S, Identity>(simd, rows, bias),
        }
    }
}

#[inline(always)]
fn each<S: Simd, F: Lanes>(simd: S, rows: &mut [f32], bias: &[f32]) {
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
    use candle_core::Device;

    use super::super::testing::{difference, noise, on_every_cpu};
    use super::*;

    const ALL: [Activation; 5] =
        [Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::Silu, Activation::Identity];

    #[test]
    fn each_activation_is_within_1e_6_of_candles_own() {
        for activation in ALL {
            for (range, seed) in [(0.5, 1), (4.0, 2), (12.0, 3), (90.0, 4)] {
                let x = noise(&[70, 37], range, seed).unwrap();
                let bias = noise(&[37], 0.7, seed + 9).unwrap();
                let mut ours: Vec<f32> = x.flatten_all().unwrap().to_vec1().unwrap();
                let right = bias_activation(x, &bias, activation).unwrap();
                activate(&mut ours, &bias.to_vec1::<f32>().unwrap(), activation);
                let ours = Tensor::from_vec(ours, right.shape(), &Device::Cpu).unwrap();
                let off = difference(&ours, &right).unwrap();
                // candle's own f32 differs in the last place of large values.
                assert!(off <= 1e-6_f32.max(range * 1.2e-7), "{activation:?} ±{range}: {off}");
            }
        }
    }

    #[test]
    fn gelu_is_within_1e_6_of_the_exact_value_between_minus_8_and_8() {
        let xs: Vec<f32> = (-8_000..=8_000).map(|i| i as f32 / 1_000.0).collect();
        let mut ys = xs.clone();
        activate(&mut ys, &[0.0], Activation::Gelu);
        for (x, y) in xs.iter().zip(&ys) {
            let x = f64::from(*x);
            let right = 0.5 * x * (1.0 + candle_core::cpu::erf::erf_f64(x / 2f64.sqrt()));
            assert!((f64::from(*y) - right).abs() < 1e-6, "gelu({x}) = {right}, got {y}");
        }
    }

    #[test]
    fn not_a_number_stays_so_on_every_cpu() {
        on_every_cpu(|| {
            for activation in ALL {
                let mut row = [f32::NAN];
                activate(&mut row, &[0.0], activation);
                assert!(row[0].is_nan(), "{activation:?}");
            }
        });
    }
}
