//! The steps of networks. On a CPU in f32 they are written for its vector units (detected at run time) and
//! caches; on other devices, in half precision, and as a reference for tests, they are composed of candle's own
//! operations. Own the packed weights, and no state between calls.

#[path = "../../../crates/kernels/src/activation.rs"]
mod activation;
#[path = "../../../crates/kernels/src/add_norm.rs"]
mod add_norm;
mod attention;
#[path = "../../../crates/kernels/src/causal.rs"]
pub mod causal;
#[path = "../../../crates/kernels/src/convolution.rs"]
mod convolution;
#[path = "../../../crates/kernels/src/distances.rs"]
mod distances;
#[path = "../../../crates/kernels/src/exp.rs"]
mod exp;
#[path = "../../../crates/kernels/src/exponentials.rs"]
mod exponentials;
mod feed_forward;
pub mod gpu;
#[path = "../../../crates/kernels/src/kv.rs"]
pub mod kv;
#[path = "../../../crates/kernels/src/pooling.rs"]
pub mod pooling;
#[path = "../../../crates/kernels/src/product/mod.rs"]
mod product;

pub use activation::{Activation, gate};
pub use add_norm::{After, NormParams, add_norm, norm_by_squares};
pub use attention::{Published, SelfAttention};
pub use convolution::{Clamp, Convolution, Filters, Padding, max_pool, mean_pool};
pub use distances::{Bias, Distances, Rotary};
pub use exponentials::{exponentials, largest};
pub use feed_forward::{FeedForward, Up};
pub use product::{Group, Matrix, Numbers, Panels, RowNumbers, Words, multiply_rows, multiply_together};

use std::sync::OnceLock;

use candle_core::{CpuStorage, DType, Layout, Result, Tensor, bail};
use pulp::{Arch, WithSimd};

use crate::config::CpuFeatures;

/// The vector units that kernels use. Set once, before the first kernel runs; then only read.
static ARCH: OnceLock<Arch> = OnceLock::new();

/// Has all kernels of this process use these vector units. Call it before any kernel.
///
/// # Errors
/// What this CPU lacks.
pub fn use_features(features: CpuFeatures) -> std::result::Result<(), String> {
    let arch = match features {
        CpuFeatures::Auto => return Ok(()),
        CpuFeatures::None => Some(Arch::Scalar),
        #[cfg(target_arch = "x86_64")]
        CpuFeatures::Avx2 => pulp::x86::V3::try_new().map(Arch::V3),
        #[cfg(target_arch = "x86_64")]
        CpuFeatures::Avx512 => pulp::x86::V4::try_new().map(Arch::V4),
        #[cfg(not(target_arch = "x86_64"))]
        CpuFeatures::Avx2 | CpuFeatures::Avx512 => None,
    };
    let name = CpuFeatures::ALL.iter().find(|(known, _)| *known == features).map_or("", |(_, name)| *name);
    let arch = arch.ok_or_else(|| format!("cpu_features = {name:?}: this CPU lacks them"))?;
    // Where it is set already, it is to the same: a process has one worker.
    let _ = ARCH.set(arch);
    Ok(())
}

/// Whether rows may become whole numbers before they are multiplied ([`Matrix::with_rows_as`]): the CPU has
/// AVX512-VNNI, and may use it.
pub fn multiplies_bytes() -> bool {
    #[cfg(target_arch = "x86_64")]
    let can = matches!(ARCH.get_or_init(Arch::new), Arch::V4(_)) && product::multiplies_bytes();
    #[cfg(not(target_arch = "x86_64"))]
    let can = false;
    can
}

/// Runs a kernel compiled for this CPU's vector units (AVX-512, AVX2, NEON, or none), or for those that were set.
fn dispatch<K: WithSimd>(kernel: K) -> K::Output {
    #[cfg(test)]
    match testing::LANES.get() {
        Some(1) => return kernel.with_simd(pulp::Scalar::new()),
        Some(16) => return kernel.with_simd(pulp::Scalar512b),
        _ => {}
    }
    ARCH.get_or_init(Arch::new).dispatch(kernel)
}

/// The values of a tensor, if it is f32 on a CPU: the kernels here are written for that.
fn host_values(tensor: &Tensor) -> Result<Option<Vec<f32>>> {
    let ours = tensor.device().is_cpu() && tensor.dtype() == DType::F32;
    ours.then(|| tensor.flatten_all()?.to_vec1()).transpose()
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
        (_, _, dims) => bail!("a kernel for contiguous f32 rows of {width} numbers got {dims:?}"),
    }
}

#[cfg(test)]
mod testing {
    use candle_core::{Device, Result, Tensor};

    use super::NormParams;

    thread_local! {
        /// The numbers in a register, computed one by one, instead of this CPU's registers.
        pub static LANES: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
    }

    /// Runs `test` with this CPU's registers, and with those of other CPUs.
    pub fn on_every_cpu(test: impl Fn() + Send + Sync) {
        let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        for lanes in [None, Some(1), Some(16)] {
            alone.install(|| {
                LANES.set(lanes);
                test();
            });
        }
    }

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
