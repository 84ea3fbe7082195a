//! GPU kernels (`*.cu`) for operations that candle lacks, or for which it reads and writes memory too often, and how
//! each is launched over a batch. Decides grids, memory and arguments. Calls no driver: `cuda` runs a launch in a build
//! with CUDA, and tests run the same launch on an emulated device.
//!
//! | file | kernel |
//! |---|---|
//! | `add_norm` | LayerNorm(a + bias + b), and the same over the tables of token and position embeddings |
//! | `attention` | attention over texts without padding |
//! | `paged_attention` | attention over keys and values in blocks, and the tiles into which it is cut |
//! | `rotation` | norms and rotates queries and keys, and writes keys and values to their blocks |
//! | `rms_norm` | x + RMSNorm(result), and RMSNorm of this sum; token embeddings in f32 |
//! | `activation` | activation(x + bias), and activation(gate)·x |
//! | `choice` | the next token, from the logits |
//! | `pooling` | a text's vector, from the tokens' vectors |
//! | `plan` | the description of a batch for the kernels: ids, positions, first rows of texts, tiles |

mod activation;
mod add_norm;
mod attention;
mod choice;
#[cfg(feature = "cuda")]
pub mod cuda;
mod paged_attention;
mod plan;
mod pooling;
mod rms_norm;
mod rotation;

pub use activation::{activate, gate};
pub use add_norm::{MAX_WIDTH, Norm, add_norm, embed};
pub use attention::{Heads, attend};
pub use choice::{Draw, Drawn, Draws, choose};
pub use paged_attention::{Keys, PagedHeads, PagedKv, PagedTiles, Words, attend_blocks};
pub use plan::{Plan, Tiles};
pub use pooling::pool;
pub use rms_norm::{Addition, Normed, add_rms_norm, embed_rows};
pub use rotation::{HeadSteps, rotate};

use candle_core::DType;

/// Threads in a warp.
const WARP: u32 = 32;
/// CUDA's limit on the blocks in the second dimension of a grid, `gridDim.y`.
const MAX_GRID_Y: u32 = 65_535;

/// The lowest compute capability that this program's kernels are for, without the dot: 80 for 8.0.
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
    /// `choice.cu`
    Choice,
    /// `paged_attention.cu`
    PagedAttention,
    /// `pooling.cu`
    Pooling,
    /// `rms_norm.cu`
    RmsNorm,
    /// `rotation.cu`
    Rotation,
}

/// The type of the numbers of a matrix in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// IEEE 754's binary32.
    F32,
    /// IEEE 754's binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

impl ElementType {
    /// The element type for a dtype of weights, if there is one.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// The suffix in kernel names.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// The code of a type that a kernel gets as an argument.
    fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 2,
        }
    }
}

/// Whether the cards that this program is built for have matrix units for numbers of this type.
fn has_matrix_units(element_type: ElementType) -> bool {
    // Three digits mean 10.0 or later. Strings of two digits compare like their numbers.
    element_type != ElementType::F32 && (COMPUTE_CAP.len() > 2 || COMPUTE_CAP >= "80")
}

/// An address in the memory of the device that runs the kernel.
pub type Pointer = u64;

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// An address.
    Pointer(Pointer),
    /// A count, or a code that the kernel interprets.
    U32(u32),
    /// A factor, or the number that a norm adds to the variance.
    F32(f32),
}

/// One launch of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The file with the kernel.
    pub source: Source,
    /// The kernel's name in that file.
    pub kernel: String,
    /// Blocks in each dimension; the third is always 1.
    pub grid: [u32; 3],
    /// Threads in a block: whole warps.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// The arguments, in the order of the kernel's parameters.
    pub arguments: Vec<Argument>,
}

/// A matrix in the device's memory, row by row.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// The address of its first number.
    pub address: Pointer,
    /// The type of its numbers.
    pub element_type: ElementType,
    /// Rows.
    pub rows: u32,
    /// The width of a row, a multiple of 4: kernels read four numbers at once.
    pub width: u32,
}
