//! Launches of `pooling.cu`.

use super::super::pooling::Mode;
use super::{Argument, Launch, Matrix, Pointer, Source};

/// Threads in a block; each computes one number of the vector.
const THREADS: u32 = 128;

/// `out` `[texts, modes·width]` in f32 ← the texts' vectors by each mode, from the tokens' vectors `x`. `starts` are
/// the texts' first rows, then the number of all rows. Each mode takes four bits of one 32-bit argument, which has room
/// for eight modes; there are only five.
pub fn pool(out: Pointer, x: Matrix, starts: Pointer, texts: u32, modes: &[Mode]) -> Launch {
    let code = |mode: &Mode| match mode {
        Mode::Cls => 0,
        Mode::Max => 1,
        Mode::Mean => 2,
        Mode::MeanSqrtLen => 3,
        Mode::LastToken => 4,
    };
    let codes = modes.iter().rev().fold(0, |codes, mode| codes << 4 | code(mode));
    Launch {
        source: Source::Pooling,
        kernel: format!("pool_{}", x.element_type.name()),
        grid: [texts, x.width.div_ceil(THREADS), 1],
        threads: THREADS,
        shared_bytes: 0,
        arguments: vec![
            Argument::Pointer(out),
            Argument::Pointer(x.address),
            Argument::Pointer(starts),
            Argument::U32(codes),
            Argument::U32(modes.len() as u32),
            Argument::U32(x.width),
        ],
    }
}
