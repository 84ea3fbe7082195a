//! Launches of `activation.cu`.

use super::super::Activation;
use super::{Argument, Launch, Matrix, Pointer, Source};

/// Threads in a block; each handles four elements at a time.
const THREADS: u32 = 256;
/// The largest number of blocks. In a larger matrix, each block computes several parts in a loop.
const MAX_BLOCKS: u32 = 1 << 14;

/// x ← activation(x + bias). `bias` has one element for each column, of x's element type. The width of x is a multiple
/// of 4.
///
/// # Panics
/// For SiLU and the identity, which have no kernel.
pub fn activate(x: Matrix, bias: Pointer, activation: Activation) -> Launch {
    let code = match activation {
        Activation::Gelu => 0,
        Activation::GeluTanh => 1,
        Activation::Relu => 2,
        Activation::Silu | Activation::Identity => unreachable!("{activation:?} has no kernel"),
    };
    let vectors = u64::from(x.rows) * u64::from(x.width / 4);
    let blocks = vectors.div_ceil(THREADS.into()).min(MAX_BLOCKS.into()) as u32;
    Launch {
        source: Source::Activation,
        kernel: format!("activate_{}", x.element_type.name()),
        grid: [blocks, 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        arguments: vec![
            Argument::Pointer(x.address),
            Argument::Pointer(bias),
            Argument::U32(x.rows),
            Argument::U32(x.width),
            Argument::U32(code),
        ],
    }
}
