//! x ← LayerNorm(x + bias + residual), row by row, in place.

use candle_core::{CpuStorage, D, DType, InplaceOp2, Layout, Result, Tensor};
use pulp::{Simd, WithSimd};

use super::product::by_blocks;
use super::{dispatch, rows_of, values};

/// The constants of a residual step: the bias of the linear layer before it, and the norm's parameters.
#[derive(Debug)]
pub struct NormParams {
    /// `[3, width]`: bias, the norm's weight, the norm's bias.
    rows: Tensor,
    /// The same on the host.
    host: Vec<f32>,
    /// Added to the variance.
    eps: f32,
}

impl NormParams {
    /// Joins the three vectors `[width]`; `eps` is added to the variance.
    ///
    /// # Errors
    /// When their shapes differ.
    pub fn new(bias: &Tensor, weight: &Tensor, shift: &Tensor, eps: f32) -> Result<Self> {
        // Half precision has too few digits for a variance.
        let rows = Tensor::stack(&[bias, weight, shift], 0)?.to_dtype(DType::F32)?;
        let host = rows.flatten_all()?.to_vec1()?;
        Ok(Self { rows, host, eps })
    }

    /// The constants as the GPU's kernels take them.
    #[cfg(feature = "cuda")]
    pub fn constants(&self) -> super::gpu::cuda::Constants<'_> {
        (&self.rows, self.eps)
    }

    /// The same parameters with `by` `[width]` added to the bias.
    ///
    /// # Errors
    /// The device fails.
    pub(super) fn with_bias_raised(mut self, by: &[f32]) -> Result<Self> {
        self.host.iter_mut().zip(by).for_each(|(bias, by)| *bias += by);
        self.rows = Tensor::from_slice(&self.host, self.rows.shape(), self.rows.device())?;
        Ok(self)
    }
}

/// What follows a half of a block.
pub enum After {
    /// LayerNorm(x + bias + half).
    Norm(NormParams),
    /// half + bias: the norm comes before the half, and x is added by the caller.
    Bias(Bias),
}

/// A bias `[width]`, also on the host.
pub struct Bias {
    row: Tensor,
    host: Vec<f32>,
}

impl After {
    /// The half with this bias `[width]` added.
    ///
    /// # Errors
    /// The device fails.
    pub fn bias(row: &Tensor) -> Result<Self> {
        let host = row.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        Ok(Self::Bias(Bias { row: row.clone(), host }))
    }

    /// The same with `by` `[width]` added to the bias.
    ///
    /// # Errors
    /// The device fails.
    pub(super) fn with_bias_raised(self, by: &[f32]) -> Result<Self> {
        match self {
            Self::Norm(norm) => norm.with_bias_raised(by).map(Self::Norm),
            Self::Bias(Bias { row, mut host }) => {
                host.iter_mut().zip(by).for_each(|(bias, by)| *bias += by);
                let row = Tensor::from_slice(&host, row.shape(), row.device())?.to_dtype(row.dtype())?;
                Ok(Self::Bias(Bias { row, host }))
            }
        }
    }

    /// Ends a half on any device.
    pub(super) fn end(&self, x: Tensor, half: &Tensor) -> Result<Tensor> {
        match self {
            Self::Norm(norm) => add_norm(x, half, norm),
            Self::Bias(bias) => half.broadcast_add(&bias.row),
        }
    }

    /// Ends a half on a CPU: `rows` hold x, and then the result.
    pub(super) fn end_rows(&self, rows: &mut [f32], half: &[f32]) {
        match self {
            Self::Norm(norm) => norm_rows(rows, half, norm),
            Self::Bias(Bias { host, .. }) => {
                let pairs = rows.chunks_exact_mut(host.len()).zip(half.chunks_exact(host.len()));
                for (row, half) in pairs {
                    for ((x, half), bias) in row.iter_mut().zip(half).zip(host) {
                        *x = half + bias;
                    }
                }
            }
        }
    }
}

/// LayerNorm(x + bias + residual) of `x` and `residual` `[rows, width]`, in `x`'s memory.
///
/// # Errors
/// Shapes or types do not match: a bug of the caller.
pub fn add_norm(x: Tensor, residual: &Tensor, params: &NormParams) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && super::gpu::cuda::add_norm(&x, residual, params.constants())? {
        return Ok(x);
    }
    if !x.device().is_cpu() || x.dtype() != DType::F32 {
        return composed(&x, residual, params);
    }
    x.inplace_op2(residual, &AddNorm(params))?;
    Ok(x)
}

fn composed(x: &Tensor, residual: &Tensor, params: &NormParams) -> Result<Tensor> {
    let (dtype, rows) = (x.dtype(), &params.rows);
    let x = (x.to_dtype(DType::F32)? + residual.to_dtype(DType::F32)?)?.broadcast_add(&rows.get(0)?)?;
    let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = x.sqr()?.mean_keepdim(D::Minus1)?;
    let x = x.broadcast_div(&(variance + f64::from(params.eps))?.sqrt()?)?;
    x.broadcast_mul(&rows.get(1)?)?.broadcast_add(&rows.get(2)?)?.to_dtype(dtype)
}

struct AddNorm<'a>(&'a NormParams);

impl InplaceOp2 for AddNorm<'_> {
    fn name(&self) -> &'static str {
        "add-norm"
    }

    fn cpu_fwd(
        &self,
        x: &mut CpuStorage,
        x_layout: &Layout,
        residual: &CpuStorage,
        residual_layout: &Layout,
    ) -> Result<()> {
        let width = self.0.host.len() / 3;
        let residual = values(residual, residual_layout)?;
        by_blocks(rows_of(x, x_layout, width)?, width, |first, rows| {
            norm_rows(rows, &residual[first * width..][..rows.len()], self.0);
        });
        Ok(())
    }
}

/// rows ← LayerNorm(rows + bias + residual), both `[n, width]`.
fn norm_rows(rows: &mut [f32], residual: &[f32], params: &NormParams) {
    dispatch(Rows { rows, residual, params: &params.host, eps: params.eps });
}

struct Rows<'a> {
    rows: &'a mut [f32],
    residual: &'a [f32],
    params: &'a [f32],
    eps: f32,
}

impl WithSimd for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.params.len() / 3;
        let (bias, norm) = self.params.split_at(width);
        let (weight, shift) = norm.split_at(width);
        let rows = self.rows.chunks_exact_mut(width);
        for (row, residual) in rows.zip(self.residual.chunks_exact(width)) {
            let sum = add(simd, row, residual, bias);
            let mean = sum / width as f32;
            let variance = squares(simd, row, mean) / width as f32;
            let scale = 1.0 / (variance + self.eps).sqrt();
            affine(simd, row, (mean, scale), (weight, shift));
        }
    }
}

/// row += residual + bias; returns the row's sum.
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
fn squares<S: Simd>(simd: S, row: &[f32], mean: f32) -> f32 {
    let (head, tail) = S::as_simd_f32s(row);
    let means = simd.splat_f32s(mean);
    let mut sum = simd.splat_f32s(0.0);
    for x in head {
        let off = simd.sub_f32s(*x, means);
        sum = simd.mul_add_e_f32s(off, off, sum);
    }
    simd.reduce_sum_f32s(sum) + tail.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>()
}

/// row ← (row - mean)·scale·weight + shift.
#[inline(always)]
fn affine<S: Simd>(simd: S, row: &mut [f32], (mean, scale): (f32, f32), (weight, shift): (&[f32], &[f32])) {
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

/// `out` ← `rows` `[n, width]`, each divided by the root of its mean square and multiplied by `weight`.
pub fn norm_by_squares(rows: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    dispatch(Squares { rows, weight, eps, out });
}

struct Squares<'a> {
    rows: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl WithSimd for Squares<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { rows, weight, eps, out } = self;
        let (weights, weights_tail) = S::as_simd_f32s(weight);
        for (row, out) in rows.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
            let scale = 1.0 / (squares(simd, row, 0.0) / weight.len() as f32 + eps).sqrt();
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
    use super::super::testing::{difference, noise, norm_params};
    use super::*;

    #[test]
    fn it_equals_adding_and_norming_step_by_step() {
        for width in [1, 7, 32, 384, 401] {
            let x = noise(&[67, width], 3.0, 1).unwrap();
            let residual = noise(&[67, width], 2.0, 2).unwrap();
            let params = norm_params(width, 3).unwrap();
            let right = composed(&x, &residual, &params).unwrap();
            let ours = add_norm(x.copy().unwrap(), &residual, &params).unwrap();
            assert!(difference(&ours, &right).unwrap() < 2e-6, "width {width}");
        }
    }

    #[test]
    fn a_norm_by_squares_is_the_formula_for_any_width() {
        for width in [1, 7, 64, 401] {
            let flat = |shape: &[usize], seed| -> Vec<f32> {
                noise(shape, 2.0, seed).unwrap().flatten_all().unwrap().to_vec1().unwrap()
            };
            let (rows, weight) = (flat(&[5, width], 1), flat(&[width], 2));
            let mut out = vec![f32::NAN; rows.len()];
            norm_by_squares(&rows, &weight, 1e-5, &mut out);
            for (row, out) in rows.chunks_exact(width).zip(out.chunks_exact(width)) {
                let mean = row.iter().map(|x| f64::from(x * x)).sum::<f64>() / width as f64;
                for ((ours, x), weight) in out.iter().zip(row).zip(&weight) {
                    let right = f64::from(x * weight) / (mean + 1e-5).sqrt();
                    assert!((f64::from(*ours) - right).abs() < 1e-5, "{width}: {ours} {right}");
                }
            }
        }
    }
}
