//! The operations of networks on a CPU in f32, on slices, written for the CPU's vector units (detected at run time) and
//! caches. The types own packed weights, tables of positions and, in `kv`, the keys and values. Apart from these, the
//! kernels leave nothing behind but buffers that the next call reuses. A bug of the caller, such as slices of sizes
//! that do not match, panics.
//!
//! | file | decides |
//! |---|---|
//! | `cpu` | which vector units kernels are compiled for and run on |
//! | `gemm` | layouts of matrices, matrix products, products of a few rows (`gemv`) |
//! | `attention`, `positions` | attention of texts over all their tokens, and its positional terms |
//! | `causal`, `kv` | attention over earlier tokens or an encoder's output; the layout of keys and values |
//! | `feed_forward` | the two products of a block, with the activation between them |
//! | `convolution`, `time_convolution` | convolution of images; convolution of sequences over time |
//! | `add_norm`, `activation`, `exp` | element-wise and row-wise operations |
//! | `pooling` | how a text's token vectors become one vector |

mod activation;
mod add_norm;
pub mod attention;
pub mod causal;
pub mod convolution;
mod cpu;
mod exp;
pub mod feed_forward;
mod gemm;
pub mod kv;
pub mod pooling;
mod positions;
pub mod time_convolution;

pub use activation::{Activation, activate, gate};
pub use add_norm::{End, Norm, layer_norm, rms_norm};
pub use cpu::{CpuFeatures, may_use_vnni, use_features};
pub use exp::{exponentials, largest};
pub use gemm::{
    Group, Matrix, NotWholeGroups, NumberFormat, PackedWords, Panels, RowNumbers, multiply_rows,
    multiply_together,
};
pub use positions::{Bias, PositionTerms, Rotary, places};

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
        let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        for lanes in [None, Some(1), Some(16)] {
            alone.install(|| {
                LANES.set(lanes);
                test();
            });
        }
    }

    /// Reproducible values between -`range` and `range`, as many as a tensor of this shape has.
    pub fn noise(shape: &[usize], range: f32, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_769).wrapping_add(12_345);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * range
        };
        (0..shape.iter().product()).map(|_| next()).collect()
    }

    /// The largest absolute difference from the expected values; NaN if one is NaN.
    pub fn difference(ours: &[f32], right: &[f64]) -> f64 {
        assert_eq!(ours.len(), right.len());
        let off = |(ours, right): (&f32, &f64)| (f64::from(*ours) - right).abs();
        // `f64::max` would drop NaN.
        ours.iter()
            .zip(right)
            .map(off)
            .fold(0.0, |most, off| if off > most || off.is_nan() { off } else { most })
    }

    /// A linear layer in f64: `rows` `[count, depth]` times the transpose of `columns` `[width, depth]`, plus `bias`
    /// `[width]`.
    pub fn linear(rows: &[f64], columns: &[f32], bias: &[f32]) -> Vec<f64> {
        let depth = columns.len() / bias.len();
        let of_row = |row: &[f64]| {
            let number = |(column, bias): (&[f32], &f32)| {
                row.iter().zip(column).map(|(a, b)| a * f64::from(*b)).sum::<f64>() + f64::from(*bias)
            };
            columns.chunks_exact(depth).zip(bias).map(number).collect::<Vec<f64>>()
        };
        rows.chunks_exact(depth).flat_map(of_row).collect()
    }

    /// The numbers as f64.
    pub fn to_f64(numbers: &[f32]) -> Vec<f64> {
        numbers.iter().copied().map(f64::from).collect()
    }
}
