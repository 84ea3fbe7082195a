//! The last step of a sublayer of a block (attention or feed-forward), on any device: x ← LayerNorm(x + bias +
//! residual), row by row and in place, or only the addition of the bias.

use candle_core::{CpuStorage, D, DType, InplaceOp2, Layout, Result, Tensor, bail};
use sconce_kernels::{self as kernels, Norm, by_blocks};

use super::{rows_of, values};

/// The constants of a residual step: the bias of the linear layer before it, and the norm's parameters.
#[derive(Debug)]
pub struct NormParams {
    /// `[3, width]`: bias, the norm's weight, the norm's bias.
    rows: Tensor,
    /// The same constants on the host.
    host: Norm,
}

impl NormParams {
    /// Joins the three vectors `[width]`; `eps` is added to the variance.
    ///
    /// # Errors
    /// Their shapes differ.
    pub fn new(bias: &Tensor, weight: &Tensor, shift: &Tensor, eps: f32) -> Result<Self> {
        // 16 bits have too few digits for a variance.
        let rows = Tensor::stack(&[bias, weight, shift], 0)?.to_dtype(DType::F32)?;
        let host = Norm { rows: rows.flatten_all()?.to_vec1()?, eps, is_centred: true };
        Ok(Self { rows, host })
    }

    /// The parameters of an RMSNorm, which divides by the root mean square and subtracts no mean: a weight `[width]`, and
    /// no bias before or after it.
    ///
    /// # Errors
    /// The device fails.
    pub fn rms(weight: &Tensor, eps: f32) -> Result<Self> {
        let zeros = weight.zeros_like()?;
        let mut params = Self::new(&zeros, weight, &zeros, eps)?;
        params.host.is_centred = false;
        Ok(params)
    }

    /// The constants on the host.
    pub(super) fn host(&self) -> &Norm {
        &self.host
    }

    /// The constants in the form for the GPU's kernels.
    #[cfg(feature = "cuda")]
    pub fn constants(&self) -> super::gpu::cuda::Constants<'_> {
        (&self.rows, self.host.eps)
    }

    /// Adds `bias` `[width]` to the bias.
    ///
    /// # Errors
    /// The device fails.
    pub(super) fn with_added_bias(mut self, bias: &[f32]) -> Result<Self> {
        self.host.rows.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
        self.rows = Tensor::from_slice(&self.host.rows, self.rows.shape(), self.rows.device())?;
        Ok(self)
    }
}

/// The last step of a sublayer with the input x, after its last product.
pub enum Epilogue {
    /// LayerNorm(product + bias + x).
    Norm(NormParams),
    /// product + bias. In such a block the norm comes before the sublayer, and the caller adds x.
    Bias(Bias),
}

/// A bias `[width]`, also on the host.
pub struct Bias {
    row: Tensor,
    host: Vec<f32>,
}

impl Epilogue {
    /// Makes an epilogue that only adds this bias `[width]`.
    ///
    /// # Errors
    /// The device fails.
    pub fn bias(row: &Tensor) -> Result<Self> {
        let host = row.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        Ok(Self::Bias(Bias { row: row.clone(), host }))
    }

    /// Adds `bias` `[width]` to the bias.
    ///
    /// # Errors
    /// The device fails.
    pub(super) fn with_added_bias(self, bias: &[f32]) -> Result<Self> {
        match self {
            Self::Norm(norm) => norm.with_added_bias(bias).map(Self::Norm),
            Self::Bias(Bias { row, mut host }) => {
                host.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
                let row = Tensor::from_slice(&host, row.shape(), row.device())?.to_dtype(row.dtype())?;
                Ok(Self::Bias(Bias { row, host }))
            }
        }
    }

    /// Applies the epilogue to the last `product` of a sublayer whose input was `x`, on any device.
    pub(super) fn apply(&self, x: Tensor, product: &Tensor) -> Result<Tensor> {
        match self {
            Self::Norm(norm) => add_norm(x, product, norm),
            Self::Bias(bias) => product.broadcast_add(&bias.row),
        }
    }

    /// The epilogue in the form for the CPU's kernels.
    pub(super) fn on_host(&self) -> kernels::Epilogue<'_> {
        match self {
            Self::Norm(norm) => kernels::Epilogue::Norm(&norm.host),
            Self::Bias(bias) => kernels::Epilogue::Bias(&bias.host),
        }
    }
}

/// LayerNorm(x + bias + residual) of `x` and `residual` `[rows, width]`, in `x`'s memory.
///
/// # Errors
/// Shapes or types do not match: a bug of the caller.
pub fn add_norm(x: Tensor, residual: &Tensor, params: &NormParams) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda()
        && params.host.is_centred
        && super::gpu::cuda::add_norm(&x, residual, params.constants())?
    {
        return Ok(x);
    }
    if !x.device().is_cpu() || x.dtype() != DType::F32 {
        return composed(&x, residual, params);
    }
    x.inplace_op2(residual, &AddNorm(params))?;
    Ok(x)
}

/// `x` + `other`, both `[rows, width]`. On a CPU in f32 in `x`'s memory, by all threads.
///
/// # Errors
/// Shapes or types do not match: a bug of the caller.
pub fn add(x: Tensor, other: &Tensor) -> Result<Tensor> {
    if !x.device().is_cpu() || x.dtype() != DType::F32 {
        return x + other;
    }
    x.inplace_op2(other, &Add)?;
    Ok(x)
}

/// As [`add_norm`], composed of candle's operations.
fn composed(x: &Tensor, residual: &Tensor, params: &NormParams) -> Result<Tensor> {
    let (dtype, rows) = (x.dtype(), &params.rows);
    let x = (x.to_dtype(DType::F32)? + residual.to_dtype(DType::F32)?)?.broadcast_add(&rows.get(0)?)?;
    let x = if params.host.is_centred { x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)? } else { x };
    let variance = x.sqr()?.mean_keepdim(D::Minus1)?;
    let x = x.broadcast_div(&(variance + f64::from(params.host.eps))?.sqrt()?)?;
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
        let rows = rows_of(x, x_layout, self.0.host.width())?;
        self.0.host.add(rows, values(residual, residual_layout)?);
        Ok(())
    }
}

struct Add;

impl InplaceOp2 for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn cpu_fwd(
        &self,
        x: &mut CpuStorage,
        x_layout: &Layout,
        other: &CpuStorage,
        other_layout: &Layout,
    ) -> Result<()> {
        let (_, width) = x_layout.shape().dims2()?;
        let (x, other) = (rows_of(x, x_layout, width)?, values(other, other_layout)?);
        if x.len() != other.len() {
            bail!("{} numbers are added to {}", other.len(), x.len());
        }
        by_blocks(x, width, |first, x| {
            x.iter_mut().zip(&other[first * width..]).for_each(|(x, other)| *x += other);
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, noise, norm_params};
    use super::*;

    #[test]
    fn the_kernel_equals_adding_and_norming_step_by_step() {
        for width in [1, 7, 32, 384, 401] {
            let x = noise(&[67, width], 3.0, 1).unwrap();
            let residual = noise(&[67, width], 2.0, 2).unwrap();
            let rms = NormParams::rms(&noise(&[width], 1.0, 4).unwrap(), 1e-6).unwrap();
            for params in [norm_params(width, 3).unwrap(), rms] {
                let expected = composed(&x, &residual, &params).unwrap();
                let ours = add_norm(x.copy().unwrap(), &residual, &params).unwrap();
                assert!(difference(&ours, &expected).unwrap() < 2e-6, "width {width}");
            }
        }
    }
    #[test]
    fn tensors_of_one_shape_are_added_and_others_are_refused() {
        let (x, other) = (noise(&[67, 5], 3.0, 1).unwrap(), noise(&[67, 5], 2.0, 2).unwrap());
        let expected = (&x + &other).unwrap();
        assert_eq!(difference(&add(x.copy().unwrap(), &other).unwrap(), &expected).unwrap(), 0.0);
        assert!(add(x, &noise(&[66, 5], 2.0, 2).unwrap()).is_err());
    }
}
