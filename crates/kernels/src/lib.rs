//! The operations of networks on a CPU in f32, on slices, written for the CPU's vector units (detected at run time) and
//! caches. The types own packed weights, tables of positions and, in `kv`, the keys and values. Otherwise the kernels
//! keep only scratch buffers, which the next call reuses. They panic on a bug of the caller, such as slices whose
//! sizes do not match.
//!
//! | file | decides |
//! |---|---|
//! | `cpu` | which vector units kernels are compiled for and run on |
//! | `gemm` | layouts of matrices, matrix products, products with few rows (`gemv`), which number formats are fast |
//! | `attention`, `positions`, `disentangled` | attention of texts over all their tokens, and its positional terms |
//! | `causal`, `kv` | attention over earlier tokens or an encoder's output; the layout of keys and values |
//! | `feed_forward` | the two products of a block, with the activation between them |
//! | `convolution`, `time_convolution` | convolution of images; convolution of sequences over time |
//! | `convolution_block` | a convolution of sequences with the norm and the two products after it |
//! | `add_norm`, `activation`, `exp`, `polar` | element-wise and row-wise operations |
//! | `pooling` | how a text's token vectors become one vector |

mod activation;
mod add_norm;
pub mod attention;
pub mod causal;
pub mod convolution;
mod convolution_block;
mod cpu;
mod disentangled;
mod exp;
pub mod feed_forward;
mod gemm;
pub mod kv;
mod polar;
pub mod pooling;
mod positions;
pub mod time_convolution;

pub use activation::{Activation, activate, gate};
pub use add_norm::{Epilogue, Norm, layer_norm, rms_norm};
pub use convolution_block::ConvolutionBlock;
pub use cpu::{CpuFeatures, may_use_int16, may_use_vnni, use_features};
pub use disentangled::Disentangled;
pub use exp::{exponentials, largest};
pub use gemm::{
    Bf16Products, Group, Linear, Matrix, NotWholeGroups, NumberFormat, PackedWords, Panels, RowFormat,
    bf16_products, by_blocks, fast_formats, in_parallel, may_use_bf16, multiply_rows, multiply_together,
};
pub use polar::{bounded_exp, gaussian_radii, polar_to_complex, sines, tanh};
pub use positions::{PositionTerms, RelativeBias, Rotary, positions_in_texts};

use cpu::dispatch;

#[cfg(test)]
mod testing {
    thread_local! {
        /// Lanes of an emulated register that replaces this CPU's registers; none for this CPU's own.
        pub static LANES: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
    }

    /// Runs `test` with this CPU's registers, and with emulated ones of 1 and of 16 lanes.
    pub fn on_every_cpu(test: impl Fn() + Send + Sync) {
        // One thread, so that the kernels run on the thread whose `LANES` is set.
        let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        for lanes in [None, Some(1), Some(16)] {
            one_thread.install(|| {
                LANES.set(lanes);
                test();
            });
        }
    }

    /// Reproducible values between -`range` and `range` for a tensor of this shape.
    pub fn noise(shape: &[usize], range: f32, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_769).wrapping_add(12_345);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * range
        };
        (0..shape.iter().product()).map(|_| next()).collect()
    }

    /// The largest absolute difference from the expected values; NaN if one is NaN.
    pub fn difference(ours: &[f32], expected: &[f64]) -> f64 {
        assert_eq!(ours.len(), expected.len());
        let error = |(ours, expected): (&f32, &f64)| (f64::from(*ours) - expected).abs();
        // `f64::max` would drop NaN.
        ours.iter()
            .zip(expected)
            .map(error)
            .fold(0.0, |max, error| if error > max || error.is_nan() { error } else { max })
    }

    /// A linear layer in f64: `rows` `[count, depth]` times the transpose of `columns` `[width, depth]`, plus `bias`
    /// `[width]`.
    pub fn linear(rows: &[f64], columns: &[f32], bias: &[f32]) -> Vec<f64> {
        let depth = columns.len() / bias.len();
        let row_times_columns = |row: &[f64]| {
            let dot = |(column, bias): (&[f32], &f32)| {
                row.iter().zip(column).map(|(a, b)| a * f64::from(*b)).sum::<f64>() + f64::from(*bias)
            };
            columns.chunks_exact(depth).zip(bias).map(dot).collect::<Vec<f64>>()
        };
        rows.chunks_exact(depth).flat_map(row_times_columns).collect()
    }

    /// The numbers as f64.
    pub fn to_f64(numbers: &[f32]) -> Vec<f64> {
        numbers.iter().copied().map(f64::from).collect()
    }
}
