//! The steps between the matrix products, each in one pass over memory. On a CPU they are written
//! for its vector units (found at run time); on other devices, and as the reference of their tests,
//! they are compositions of candle's own operations. Own no state beyond a call.

mod activation;
mod add_norm;
mod attention;
mod exp;

pub use activation::{Activation, bias_activation};
pub use add_norm::{NormParams, add_norm};
pub use attention::attention;

use candle_core::{CpuStorage, Layout, Result, bail};

/// The values of a contiguous f32 tensor.
fn values<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((start, end))) => Ok(&values[start..end]),
        _ => bail!("a kernel needs contiguous f32 values"),
    }
}

/// The values of a contiguous f32 tensor, to be overwritten.
fn values_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((start, end))) => Ok(&mut values[start..end]),
        _ => bail!("a kernel needs contiguous f32 values"),
    }
}

/// Runs `work` on blocks of whole rows of `rows`, in parallel where there is more than one thread.
fn by_rows(rows: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    use rayon::prelude::*;
    /// Rows that make a task worth handing to another thread.
    const BLOCK: usize = 32;
    if rayon::current_num_threads() == 1 {
        work(0, rows);
        return;
    }
    rows.par_chunks_mut(BLOCK * width).enumerate().for_each(|(block, rows)| work(block * BLOCK, rows));
}

#[cfg(test)]
mod testing {
    use candle_core::{Device, Result, Tensor};

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
