//! The network's steps on a GPU that Candle lacks or takes too many passes over memory for: kernels of our
//! own (`*.cu`), and for each how it is launched over a batch. Decides grids, memory and arguments; pure:
//! `cuda` runs a launch in a build that has CUDA, and tests run the same on a device made of the CPU.
//!
//! | file | kernel |
//! |---|---|
//! | `add_norm` | LayerNorm(a + bias + b), and the same over the tables of words and positions |
//! | `attention` | attention over texts without padding |
//! | `activation` | activation(x + bias) |
//! | `pooling` | from tokens' vectors to a text's |
//! | `plan` | what the kernels are told of a batch: ids, places, where texts begin, tiles |

mod activation;
mod add_norm;
mod attention;
#[cfg(feature = "cuda")]
pub mod cuda;
mod plan;
mod pooling;

pub use activation::activate;
pub use add_norm::{MOST_WIDTH, Norm, add_norm, embed};
pub use attention::{Heads, attend};
pub use plan::{Plan, Tiles};
pub use pooling::pool;

use candle_core::DType;

/// Threads that a device runs in step.
const WARP: u32 = 32;
/// Blocks at most in a grid's second direction.
const MOST_BLOCKS: u32 = 65_535;

/// The oldest architecture of cards that this program's kernels are for, without its dot: 80 for 8.0.
pub const COMPUTE_CAP: &str = match option_env!("CUDA_COMPUTE_CAP") {
    Some(capability) => capability,
    None => "80",
};

/// A file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `activation.cu`
    Activation,
    /// `add_norm.cu`
    AddNorm,
    /// `attention.cu`
    Attention,
    /// `pooling.cu`
    Pooling,
}

/// What numbers are kept as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// IEEE 754's binary32.
    F32,
    /// IEEE 754's binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

impl Number {
    /// That of a type which weights can have.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// As kernels are called.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// A place in the memory of the device that runs the kernel.
pub type Pointer = u64;

/// What a kernel is given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// Where numbers lie.
    Pointer(Pointer),
    /// A count.
    U32(u32),
    /// A factor.
    F32(f32),
}

/// One launch of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The file that it is in.
    pub source: Source,
    /// Its name there.
    pub kernel: String,
    /// Blocks in each direction; the third is 1 throughout.
    pub grid: [u32; 3],
    /// Threads a block: whole warps.
    pub threads: u32,
    /// Bytes of shared memory beside what the kernel has of its own.
    pub shared_bytes: u32,
    /// In its order.
    pub arguments: Vec<Argument>,
}

/// A matrix in the device's memory, row by row.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Its first number.
    pub at: Pointer,
    /// What it holds.
    pub number: Number,
    /// Rows.
    pub rows: u32,
    /// Numbers a row, a multiple of 4: kernels read four at once.
    pub width: u32,
}
