//! Launches of `rotation.cu`.

use super::{Argument, Launch, Matrix, PagedHeads, PagedKv, Pointer, Source, WARP};

/// Heads in a block, one warp each.
const HEADS_AT_ONCE: u32 = 4;

/// What is done to the product of a layer's input with the projections to queries, keys and values. An address is 0 if
/// there is no such thing.
#[derive(Clone, Copy, Debug)]
pub struct HeadSteps {
    /// The biases `[(heads + 2·kv_heads)·width]` in f32.
    pub bias: Pointer,
    /// The weights of the norms of queries and keys, in f32.
    pub norms: [Pointer; 2],
    /// Whether a norm is of all heads together.
    pub norms_all: bool,
    /// Added to the mean square of a norm.
    pub eps: f32,
    /// For each row the cosines, and then the sines, of the pairs of a head that are rotated.
    pub angles: Pointer,
    /// The number of pairs.
    pub pairs: u32,
    /// A factor of the queries for each row.
    pub growth: Pointer,
}

/// `queries` `[rows, heads, width]` in f32, and the slots of `kv`, ← `qkv` `[rows, (heads + 2·kv_heads)·width]`. `slots` has
/// a number for each row: its block times 32, plus its place in the block.
pub fn rotate(
    queries: Pointer,
    kv: PagedKv,
    qkv: Matrix,
    slots: Pointer,
    heads: PagedHeads,
    steps: HeadSteps,
) -> Launch {
    let PagedHeads { count, kv_count, width, kv_type } = heads;
    let [q_norm, k_norm] = steps.norms;
    Launch {
        source: Source::Rotation,
        kernel: format!("rotate_{}_{}", qkv.element_type.name(), kv_type.name()),
        grid: [qkv.rows, (count + 2 * kv_count).div_ceil(HEADS_AT_ONCE), 1],
        threads: HEADS_AT_ONCE * WARP,
        shared_bytes: 0,
        arguments: vec![
            Argument::Pointer(queries),
            Argument::Pointer(kv.keys),
            Argument::Pointer(kv.values),
            Argument::Pointer(qkv.address),
            Argument::Pointer(steps.bias),
            Argument::Pointer(q_norm),
            Argument::Pointer(k_norm),
            Argument::Pointer(slots),
            Argument::Pointer(steps.angles),
            Argument::Pointer(steps.growth),
            Argument::F32(steps.eps),
            Argument::U32(u32::from(steps.norms_all)),
            Argument::U32(count),
            Argument::U32(kv_count),
            Argument::U32(width),
            Argument::U32(steps.pairs),
        ],
    }
}
