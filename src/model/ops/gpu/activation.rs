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
        Activation::Silu | Activation::Identity => unreachable!("{activation:?} has no kernel"),
        _ => code(activation),
    };
    Launch {
        source: Source::Activation,
        kernel: format!("activate_{}", x.element_type.name()),
        grid: [blocks(x.rows, x.width), 1, 1],
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

/// `out` `[rows, inner]` ← activation(gates)·others. `x` is `[rows, 2·inner]`, the gates first, and `out` has its element
/// type. `bias` `[2·inner]` in f32 is added to x before; it may be 0. `inner` is a multiple of 4.
pub fn gate(out: Pointer, x: Matrix, bias: Pointer, activation: Activation) -> Launch {
    let inner = x.width / 2;
    Launch {
        source: Source::Activation,
        kernel: format!("gate_{}", x.element_type.name()),
        grid: [blocks(x.rows, inner), 1, 1],
        threads: THREADS,
        shared_bytes: 0,
        arguments: vec![
            Argument::Pointer(out),
            Argument::Pointer(x.address),
            Argument::Pointer(bias),
            Argument::U32(x.rows),
            Argument::U32(inner),
            Argument::U32(code(activation)),
        ],
    }
}

/// The number of blocks for the elements of a matrix.
fn blocks(rows: u32, width: u32) -> u32 {
    let vectors = u64::from(rows) * u64::from(width / 4);
    vectors.div_ceil(THREADS.into()).min(MAX_BLOCKS.into()) as u32
}

fn code(activation: Activation) -> u32 {
    match activation {
        Activation::Gelu => 0,
        Activation::GeluTanh => 1,
        Activation::Relu => 2,
        Activation::Silu => 3,
        Activation::Identity => 4,
    }
}
