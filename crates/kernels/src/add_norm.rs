//! Row-wise norms: x ← LayerNorm(x + bias + residual) in place, LayerNorm alone, and RMSNorm.

use pulp::{Simd, WithSimd};

use super::dispatch;
use super::gemm::by_blocks;

/// The constants of a residual step: the bias of the linear layer before it, and the norm's parameters.
#[derive(Debug)]
pub struct Norm {
    /// `[3, width]`: bias, the norm's weight, the norm's bias.
    pub rows: Vec<f32>,
    /// Added to the variance.
    pub eps: f32,
    /// Whether the mean of a row is subtracted (LayerNorm). Otherwise it counts as 0 (RMSNorm).
    pub is_centred: bool,
}

impl Norm {
    /// The width of a row, in numbers.
    pub fn width(&self) -> usize {
        self.rows.len() / 3
    }

    /// `rows` ← LayerNorm(`rows` + bias + `residual`), both `[n, width]`. In parallel if there are several threads.
    pub fn add(&self, rows: &mut [f32], residual: &[f32]) {
        let width = self.width();
        by_blocks(rows, width, |first, rows| {
            self.add_single_threaded(rows, &residual[first * width..][..rows.len()])
        });
    }

    /// As [`add`](Self::add), but on this thread alone.
    fn add_single_threaded(&self, rows: &mut [f32], residual: &[f32]) {
        dispatch(AddNorm { rows, residual, norm: self });
    }
}

/// The last step of a sublayer of a transformer block (attention or feed-forward), after its last product.
#[derive(Clone, Copy)]
pub enum Epilogue<'a> {
    /// x ← LayerNorm(x + bias + product).
    Norm(&'a Norm),
    /// x ← product + bias `[width]`.
    Bias(&'a [f32]),
}

impl Epilogue<'_> {
    /// Computes this step. `rows` hold x on entry and the result on return. Runs on this thread alone.
    pub(crate) fn apply(self, rows: &mut [f32], product: &[f32]) {
        match self {
            Self::Norm(norm) => norm.add_single_threaded(rows, product),
            Self::Bias(bias) => {
                let pairs = rows.chunks_exact_mut(bias.len()).zip(product.chunks_exact(bias.len()));
                for (row, product) in pairs {
                    for ((x, product), bias) in row.iter_mut().zip(product).zip(bias) {
                        *x = product + bias;
                    }
                }
            }
        }
    }
}

struct AddNorm<'a> {
    rows: &'a mut [f32],
    residual: &'a [f32],
    norm: &'a Norm,
}

impl WithSimd for AddNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.norm.width();
        let (bias, norm) = self.norm.rows.split_at(width);
        let (weight, shift) = norm.split_at(width);
        let rows = self.rows.chunks_exact_mut(width);
        for (row, residual) in rows.zip(self.residual.chunks_exact(width)) {
            let sum = add(simd, row, residual, bias);
            let mean = if self.norm.is_centred { sum / width as f32 } else { 0.0 };
            let variance = squared_deviations(simd, row, mean) / width as f32;
            let scale = 1.0 / (variance + self.norm.eps).sqrt();
            affine(simd, row, mean, scale, weight, shift);
        }
    }
}

/// `row` += `residual` + `bias`. Returns the sum of the row.
#[inline(always)]
fn add<S: Simd>(simd: S, row: &mut [f32], residual: &[f32], bias: &[f32]) -> f32 {
    let (head, tail) = S::as_mut_simd_f32s(row);
    let ((residual, residual_tail), (bias, bias_tail)) = (S::as_simd_f32s(residual), S::as_simd_f32s(bias));
    let mut sum = simd.splat_f32s(0.0);
    for ((x, r), b) in head.iter_mut().zip(residual).zip(bias) {
        *x = simd.add_f32s(*x, simd.add_f32s(*r, *b));
        sum = simd.add_f32s(sum, *x);
    }
    let mut total = simd.reduce_sum_f32s(sum);
    for ((x, r), b) in tail.iter_mut().zip(residual_tail).zip(bias_tail) {
        *x += r + b;
        total += *x;
    }
    total
}

/// The sum of (x - mean)².
#[inline(always)]
fn squared_deviations<S: Simd>(simd: S, row: &[f32], mean: f32) -> f32 {
    let (head, tail) = S::as_simd_f32s(row);
    let means = simd.splat_f32s(mean);
    let mut sum = simd.splat_f32s(0.0);
    for x in head {
        let deviation = simd.sub_f32s(*x, means);
        sum = simd.mul_add_e_f32s(deviation, deviation, sum);
    }
    simd.reduce_sum_f32s(sum) + tail.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>()
}

/// `row` ← (`row` - mean)·scale·weight + shift.
#[inline(always)]
fn affine<S: Simd>(simd: S, row: &mut [f32], mean: f32, scale: f32, weight: &[f32], shift: &[f32]) {
    let (head, tail) = S::as_mut_simd_f32s(row);
    let ((weight, weight_tail), (shift, shift_tail)) = (S::as_simd_f32s(weight), S::as_simd_f32s(shift));
    let (means, scales) = (simd.splat_f32s(mean), simd.splat_f32s(scale));
    for ((x, w), s) in head.iter_mut().zip(weight).zip(shift) {
        let normal = simd.mul_f32s(simd.sub_f32s(*x, means), scales);
        *x = simd.mul_add_e_f32s(normal, *w, *s);
    }
    for ((x, w), s) in tail.iter_mut().zip(weight_tail).zip(shift_tail) {
        *x = (*x - mean) * scale * w + s;
    }
}

/// LayerNorm: `out` ← (row - mean) / √(variance + `eps`) · `weight` + `shift` for each row of `rows` `[n, width]`.
/// `weight` and `shift` are `[width]`.
pub fn layer_norm(rows: &[f32], weight: &[f32], shift: &[f32], eps: f32, out: &mut [f32]) {
    dispatch(LayerNorm { rows, weight, shift, eps, out });
}

struct LayerNorm<'a> {
    rows: &'a [f32],
    weight: &'a [f32],
    shift: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl WithSimd for LayerNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { rows, weight, shift, eps, out } = self;
        let width = weight.len();
        out.copy_from_slice(rows);
        for row in out.chunks_exact_mut(width) {
            let mean = sum(simd, row) / width as f32;
            let variance = squared_deviations(simd, row, mean) / width as f32;
            affine(simd, row, mean, 1.0 / (variance + eps).sqrt(), weight, shift);
        }
    }
}

/// The sum of the row.
#[inline(always)]
fn sum<S: Simd>(simd: S, row: &[f32]) -> f32 {
    let (head, tail) = S::as_simd_f32s(row);
    let sum = head.iter().fold(simd.splat_f32s(0.0), |sum, x| simd.add_f32s(sum, *x));
    simd.reduce_sum_f32s(sum) + tail.iter().sum::<f32>()
}

/// RMSNorm: `out` ← `rows` `[n, width]`, each row divided by its root mean square and multiplied by `weight`.
pub fn rms_norm(rows: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    dispatch(RmsNorm { rows, weight, eps, out });
}

struct RmsNorm<'a> {
    rows: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl WithSimd for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { rows, weight, eps, out } = self;
        let (weights, weights_tail) = S::as_simd_f32s(weight);
        for (row, out) in rows.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
            let scale = 1.0 / (squared_deviations(simd, row, 0.0) / weight.len() as f32 + eps).sqrt();
            let ((head, tail), (out, out_tail)) = (S::as_simd_f32s(row), S::as_mut_simd_f32s(out));
            let scales = simd.splat_f32s(scale);
            for ((out, x), weight) in out.iter_mut().zip(head).zip(weights) {
                *out = simd.mul_f32s(simd.mul_f32s(*x, scales), *weight);
            }
            for ((out, x), weight) in out_tail.iter_mut().zip(tail).zip(weights_tail) {
                *out = x * scale * weight;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, noise, on_every_cpu};
    use super::*;

    #[test]
    fn add_norm_equals_its_formula_on_every_cpu() {
        on_every_cpu(|| {
            for width in [1, 7, 32, 384, 401] {
                let (mut x, residual) = (noise(&[67, width], 3.0, 1), noise(&[67, width], 2.0, 2));
                let norm = Norm { rows: noise(&[3, width], 1.0, 3), eps: 1e-5, is_centred: true };
                let expected = added_and_normed(&x, &residual, &norm);
                norm.add(&mut x, &residual);
                assert!(difference(&x, &expected) < 2e-6, "width {width}");
            }
        });
    }

    /// LayerNorm(`x` + bias + `residual`) by the formula, in f64.
    fn added_and_normed(x: &[f32], residual: &[f32], norm: &Norm) -> Vec<f64> {
        let width = norm.width();
        let sum = |index: usize| {
            f64::from(x[index]) + f64::from(norm.rows[index % width]) + f64::from(residual[index])
        };
        let sums: Vec<f64> = (0..x.len()).map(sum).collect();
        let normed_row = |row: &[f64]| {
            let mean = row.iter().sum::<f64>() / width as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
            let scale = 1.0 / (variance + f64::from(norm.eps)).sqrt();
            let number = |(index, x): (usize, &f64)| {
                (x - mean) * scale * f64::from(norm.rows[width + index])
                    + f64::from(norm.rows[2 * width + index])
            };
            row.iter().enumerate().map(number).collect::<Vec<f64>>()
        };
        sums.chunks_exact(width).flat_map(normed_row).collect()
    }

    #[test]
    fn the_layer_norm_equals_its_formula_for_any_width_on_every_cpu() {
        on_every_cpu(|| {
            for width in [1, 7, 32, 384, 401] {
                let rows = noise(&[5, width], 3.0, 1);
                let norm = Norm { rows: noise(&[3, width], 1.0, 3), eps: 1e-5, is_centred: true };
                let (bias, affine) = norm.rows.split_at(width);
                let minus_bias: Vec<f32> =
                    rows.iter().enumerate().map(|(index, _)| -bias[index % width]).collect();
                let expected = added_and_normed(&rows, &minus_bias, &norm);
                let mut out = vec![f32::NAN; rows.len()];
                layer_norm(&rows, &affine[..width], &affine[width..], norm.eps, &mut out);
                assert!(difference(&out, &expected) < 2e-6, "width {width}");
            }
        });
    }

    #[test]
    fn the_rms_norm_equals_its_formula_for_any_width() {
        for width in [1, 7, 64, 401] {
            let (rows, weight) = (noise(&[5, width], 2.0, 1), noise(&[width], 2.0, 2));
            let mut out = vec![f32::NAN; rows.len()];
            rms_norm(&rows, &weight, 1e-5, &mut out);
            for (row, out) in rows.chunks_exact(width).zip(out.chunks_exact(width)) {
                let mean = row.iter().map(|x| f64::from(x * x)).sum::<f64>() / width as f64;
                for ((ours, x), weight) in out.iter().zip(row).zip(&weight) {
                    let expected = f64::from(x * weight) / (mean + 1e-5).sqrt();
                    assert!((f64::from(*ours) - expected).abs() < 1e-5, "{width}: {ours} {expected}");
                }
            }
        }
    }
}
