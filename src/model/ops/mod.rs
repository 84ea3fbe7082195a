//! The operations of networks on candle's tensors. On a CPU in f32 they use the kernels of `crates/kernels`, and on a
//! GPU the kernels of `gpu`. In 16 bits on a CPU, for sizes without a kernel, and as a reference for tests, they
//! are composed of candle's operations.

mod activation;
mod add_norm;
mod attention;
mod convolution;
mod convolution_block;
mod feed_forward;
pub mod gpu;
mod position_terms;
pub mod probabilities;
mod time_convolution;

pub use add_norm::{Epilogue, NormParams, add, add_norm};
pub use attention::{AttentionWeights, SelfAttention};
pub use convolution::{Convolution, Filters, max_pool, mean_pool};
pub use convolution_block::ConvolutionBlock;
pub use feed_forward::{FeedForward, InputWeights};
pub use position_terms::cos_sin;
pub use sconce_kernels::convolution::{Clamp, Padding};
pub use sconce_kernels::{
    Activation, Bf16Products, Disentangled, Group, Linear, Matrix, NumberFormat, PackedWords, Panels,
    PositionTerms, RelativeBias, Rotary, RowFormat, activate, bf16_products, causal, exponentials,
    fast_formats, gate, in_parallel, kv, largest, layer_norm, may_use_int16, may_use_vnni, multiply_rows,
    multiply_together, pooling, rms_norm, tanh, use_features,
};
pub use time_convolution::TimeConvolution;

use candle_core::{CpuStorage, DType, Layout, Result, Tensor, bail};

/// The values of a tensor if the CPU's kernels can take it: if it is f32 and on a CPU. Otherwise none.
fn host_values(tensor: &Tensor) -> Result<Option<Vec<f32>>> {
    let has_kernels = tensor.device().is_cpu() && tensor.dtype() == DType::F32;
    has_kernels.then(|| tensor.flatten_all()?.to_vec1()).transpose()
}

/// The values of a contiguous f32 tensor.
fn values<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((start, end))) => Ok(&values[start..end]),
        _ => bail!("a kernel needs contiguous f32 values"),
    }
}

/// The values of a contiguous f32 tensor `[rows, width]`, to be overwritten.
fn rows_of<'a>(storage: &'a mut CpuStorage, layout: &Layout, width: usize) -> Result<&'a mut [f32]> {
    match (storage, layout.contiguous_offsets(), layout.dims()) {
        (CpuStorage::F32(values), Some((start, end)), [_, found]) if *found == width => {
            Ok(&mut values[start..end])
        }
        (_, _, dims) => bail!("a kernel for contiguous f32 rows of {width} numbers got the shape {dims:?}"),
    }
}

#[cfg(test)]
mod testing {
    use candle_core::{Device, Result, Tensor};

    use super::NormParams;

    /// Reproducible parameters of a residual step.
    pub fn norm_params(width: usize, seed: u32) -> Result<NormParams> {
        let vector = |seed| noise(&[width], 1.0, seed);
        NormParams::new(&vector(seed)?, &vector(seed + 1)?, &vector(seed + 2)?, 1e-5)
    }

    /// Reproducible values between -`range` and `range`.
    pub fn noise(shape: &[usize], range: f32, seed: u32) -> Result<Tensor> {
        let mut state = seed.wrapping_mul(2_654_435_769).wrapping_add(12_345);
        let count = shape.iter().product();
        let values = (0..count).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * range
        });
        Tensor::from_vec(values.collect(), shape, &Device::Cpu)
    }

    /// The largest absolute difference between two tensors of one shape.
    pub fn difference(a: &Tensor, b: &Tensor) -> Result<f32> {
        assert_eq!(a.dims(), b.dims());
        (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar()
    }
}
