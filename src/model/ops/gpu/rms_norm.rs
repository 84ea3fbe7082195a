//! Launches of `rms_norm.cu`.

use super::{Argument, ElementType, Launch, Matrix, Pointer, Source, WARP};

/// The largest number of threads of a block, which computes a row; each handles four elements at a time.
const MAX_THREADS: u32 = 256;

/// What is added to x. An address is 0 if there is no such thing.
#[derive(Clone, Copy, Debug)]
pub struct Addition {
    /// `[rows, width]`.
    pub result: Pointer,
    /// The type of its numbers.
    pub element_type: ElementType,
    /// Added to each row of the result, `[width]` in f32.
    pub bias: Pointer,
    /// The weights of the norm of the result with its bias, in f32.
    pub norm: Pointer,
    /// The factor of the result after its norm.
    pub factor: f32,
}

/// The rows that are normed. An address is 0 if there is no such thing.
#[derive(Clone, Copy, Debug)]
pub struct Normed {
    /// `[rows, width]`.
    pub y: Pointer,
    /// The type of its numbers.
    pub element_type: ElementType,
    /// The weights of the norm, in f32. Without weights y is x.
    pub norm: Pointer,
    /// The number of the row of x for each row of y; without it all rows of x are normed.
    pub rows: Pointer,
}

/// x ← x + factor·RMSNorm(result + bias) if there is an addition, and then y ← RMSNorm(x). `x` is `[_, width]` in f32, the
/// width a multiple of 4. `rows` is the number of rows of y; with an addition, y has all rows of x.
pub fn add_rms_norm(
    x: Pointer,
    addition: Option<Addition>,
    normed: Option<Normed>,
    eps: f32,
    [rows, width]: [u32; 2],
) -> Launch {
    let none = ElementType::F32.name();
    let (added, y) = (addition.as_ref(), normed.as_ref());
    let address = |pointer: Option<Pointer>| Argument::Pointer(pointer.unwrap_or(0));
    Launch {
        source: Source::RmsNorm,
        kernel: format!(
            "add_rms_norm_{}_{}",
            added.map_or(none, |added| added.element_type.name()),
            y.map_or(none, |y| y.element_type.name())
        ),
        grid: [rows, 1, 1],
        threads: threads(width),
        shared_bytes: 0,
        arguments: vec![
            Argument::Pointer(x),
            address(added.map(|added| added.result)),
            address(added.map(|added| added.bias)),
            address(added.map(|added| added.norm)),
            address(y.map(|y| y.norm)),
            address(y.map(|y| y.y)),
            address(y.map(|y| y.rows)),
            Argument::F32(added.map_or(1.0, |added| added.factor)),
            Argument::F32(eps),
            Argument::U32(width),
        ],
    }
}

/// x `[ids, width]` in f32 ← factor·the rows `ids` of `table`, whose width is a multiple of 4.
pub fn embed_rows(x: Pointer, table: Matrix, ids: Pointer, factor: f32, rows: u32) -> Launch {
    Launch {
        source: Source::RmsNorm,
        kernel: format!("embed_rows_{}", table.element_type.name()),
        grid: [rows, 1, 1],
        threads: threads(table.width),
        shared_bytes: 0,
        arguments: vec![
            Argument::Pointer(x),
            Argument::Pointer(table.address),
            Argument::Pointer(ids),
            Argument::F32(factor),
            Argument::U32(table.width),
        ],
    }
}

fn threads(width: u32) -> u32 {
    (width / 4).next_multiple_of(WARP).min(MAX_THREADS)
}
