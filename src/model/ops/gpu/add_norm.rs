//! Launches of `add_norm.cu`.

use super::{Argument, Launch, Matrix, Pointer, Source, WARP};

/// Rows in a block, one warp each. There are fewer if the shared memory cannot hold them in f32.
const ROWS: u32 = 4;
/// Bytes of shared memory that a block gets by default.
const SHARED: u32 = 48 << 10;
/// The width of the longest row that fits into a block's shared memory.
pub const MAX_WIDTH: u32 = SHARED / size_of::<f32>() as u32;

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
    let row = x.width * size_of::<f32>() as u32;
    let rows = ROWS.min(SHARED / row).max(1);
    let mut arguments = vec![Argument::Pointer(x.at)];
    arguments.extend(others.iter().map(|at| Argument::Pointer(*at)));
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
        shared_bytes: rows * row,
        arguments,
    }
}
