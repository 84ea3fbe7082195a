//! Launches of `attention.cu`. Decides which of its two kernels computes: the one for matrix units if the numbers are
//! f16 or bf16, and the cards that this program is built for have such units.

use super::{Argument, ElementType, Launch, MAX_GRID_Y, Plan, Pointer, Source, WARP, has_matrix_units};

/// The sizes of the heads of queries, keys and values. In memory the heads of a token are side by side.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// The type of their numbers in memory.
    pub element_type: ElementType,
    /// The number of heads.
    pub count: u32,
    /// The width of a query.
    pub size: u32,
}

impl Heads {
    /// Whether a kernel fits these heads.
    pub fn have_kernel(self) -> bool {
        matches!(self.size, 32 | 64) && self.count <= MAX_GRID_Y
    }

    /// The queries that a warp computes.
    pub fn queries_per_warp(self) -> u32 {
        if self.use_matrix_units() { 16 } else { WARP }
    }

    fn use_matrix_units(self) -> bool {
        has_matrix_units(self.element_type)
    }
}

/// `out` `[tokens, heads·size]` ← softmax((Q + `q_bias`)·Kᵀ/√size)·V, where each text of `plan` attends to its own
/// tokens. `planned` is the address of [`Plan::words`]. `qkv` is `[tokens, 3·heads·size]`; `q_bias` is f32.
pub fn attend([out, qkv, q_bias]: [Pointer; 3], heads: Heads, plan: &Plan, planned: Pointer) -> Vec<Launch> {
    let suffix = if heads.use_matrix_units() { "_by_matrices" } else { "" };
    let kernel = format!("attend{suffix}_{}_{}", heads.element_type.name(), heads.size);
    // The kernels compute powers of 2, so the scale includes log2(e).
    let scale = std::f32::consts::LOG2_E / (heads.size as f32).sqrt();
    let launch = |tiles: &super::Tiles| Launch {
        source: Source::Attention,
        kernel: kernel.clone(),
        grid: [tiles.count, heads.count, 1],
        threads: tiles.threads(heads.queries_per_warp()),
        shared_bytes: 0,
        arguments: vec![
            Argument::Pointer(out),
            Argument::Pointer(qkv),
            Argument::Pointer(q_bias),
            Argument::Pointer(planned + (tiles.first_word * size_of::<u32>()) as u64),
            Argument::F32(scale),
            Argument::U32(heads.count),
        ],
    };
    plan.tiles.iter().map(launch).collect()
}
