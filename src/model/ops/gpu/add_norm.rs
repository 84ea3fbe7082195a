//! Launches of `add_norm.cu`.

use super::{Argument, Launch, Matrix, Pointer, Source, WARP};

/// Rows in a block, one warp each. A block has fewer rows if the shared memory cannot hold these in f32.
const MAX_ROWS: u32 = 4;
/// Bytes of shared memory that a block gets by default.
const SHARED_BYTES: u32 = 48 << 10;
/// The width of the longest row that fits into a block's shared memory.
pub const MAX_WIDTH: u32 = SHARED_BYTES / size_of::<f32>() as u32;

/// A norm's constants.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// `[3, width]` in f32: the bias before the norm, its weight, its shift.
    pub params: Pointer,
    /// Added to the variance.
    pub eps: f32,
}

/// x ← LayerNorm(x + bias + residual).
pub fn add_norm(x: Matrix, residual: Pointer, norm: Norm) -> Launch {
    launch("add_norm", x, &[residual], norm)
}

/// x ← LayerNorm(token embeddings of the ids + position embeddings + bias). `plan` begins with the ids and then the
/// positions, one number for each row of `x`.
pub fn embed(x: Matrix, [tokens, positions]: [Pointer; 2], plan: Pointer, norm: Norm) -> Launch {
    launch("embed", x, &[tokens, positions, plan], norm)
}

fn launch(name: &str, x: Matrix, others: &[Pointer], norm: Norm) -> Launch {
    let row_bytes = x.width * size_of::<f32>() as u32;
    let rows = MAX_ROWS.min(SHARED_BYTES / row_bytes).max(1);
    let mut arguments = vec![Argument::Pointer(x.address)];
    arguments.extend(others.iter().map(|pointer| Argument::Pointer(*pointer)));
    arguments.extend([
        Argument::Pointer(norm.params),
        Argument::F32(norm.eps),
        Argument::U32(x.rows),
        Argument::U32(x.width),
    ]);
    Launch {
        source: Source::AddNorm,
        kernel: format!("{name}_{}", x.element_type.name()),
        grid: [x.rows.div_ceil(rows), 1, 1],
        threads: rows * WARP,
        shared_bytes: rows * row_bytes,
        arguments,
    }
}
