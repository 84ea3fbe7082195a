//! Launches of `attention.cu`. Decides which of its two kernels computes: the one by matrix units where the
//! numbers are halves and the cards that this program is built for have them.

use super::{Argument, COMPUTE_CAP, Launch, MOST_BLOCKS, Number, Plan, Pointer, Source, WARP};

/// Queries and keys of all heads, side by side with the values.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// What they are kept as.
    pub number: Number,
    /// So many.
    pub count: u32,
    /// Numbers of a query.
    pub size: u32,
}

impl Heads {
    /// Whether there are kernels for them.
    pub fn fit(self) -> bool {
        matches!(self.size, 32 | 64) && self.count <= MOST_BLOCKS
    }

    /// Queries that a warp takes.
    pub fn queries(self) -> u32 {
        if self.go_by_matrices() { 16 } else { WARP }
    }

    fn go_by_matrices(self) -> bool {
        // Numbers of one length each, but for cards from 10.0 on.
        let has_units = COMPUTE_CAP.len() > 2 || COMPUTE_CAP >= "80";
        self.number != Number::F32 && has_units
    }
}

/// `out` `[tokens, heads·size]` ← softmax((Q + `q_bias`)·Kᵀ/√size)·V of the products `qkv` `[tokens,
/// 3·heads·size]`, each text of `plan`, which lies at `planned`, over its own tokens. `q_bias` is in f32.
pub fn attend([out, qkv, q_bias]: [Pointer; 3], heads: Heads, plan: &Plan, planned: Pointer) -> Vec<Launch> {
    let by = if heads.go_by_matrices() { "_by_matrices" } else { "" };
    let kernel = format!("attend{by}_{}_{}", heads.number.name(), heads.size);
    let scale = std::f32::consts::LOG2_E / (heads.size as f32).sqrt();
    let launch = |tiles: &super::Tiles| Launch {
        source: Source::Attention,
        kernel: kernel.clone(),
        grid: [tiles.count, heads.count, 1],
        threads: tiles.threads(heads.queries()),
        shared_bytes: 0,
        arguments: vec![
            Argument::Pointer(out),
            Argument::Pointer(qkv),
            Argument::Pointer(q_bias),
            Argument::Pointer(planned + (tiles.at * size_of::<u32>()) as u64),
            Argument::F32(scale),
            Argument::U32(heads.count),
        ],
    };
    plan.tiles.iter().map(launch).collect()
}
