//! The size of a tile of results, which depends on this CPU's registers. Owns no state.

use pulp::{Simd, WithSimd};

use super::super::dispatch;

/// Numbers in a run: the adjacent numbers of a row in a tile. A run is one cache line, and is copied as a whole.
pub const RUN: usize = 16;

/// Registers for one row of a tile.
pub const COLUMNS: usize = 2;
/// Rows of a tile on a CPU with 16 registers: 12 registers hold results, two hold columns, one holds a row's number.
pub const ROWS_OF_16: usize = 6;
/// Rows of a tile on a CPU with 32 registers.
pub const ROWS_OF_32: usize = 12;

/// The size of a tile.
#[derive(Clone, Copy)]
pub struct Tile {
    pub rows: usize,
    pub columns: usize,
}

impl Tile {
    /// The tile of this CPU.
    pub fn of_this_cpu() -> Self {
        dispatch(TileOf)
    }

    /// The tile of CPUs with the registers of `S`.
    pub fn of<S: Simd>() -> Self {
        // CPUs with registers of 16 numbers have 32 of them.
        let many = S::REGISTER_COUNT >= 32 || S::F32_LANES >= 16;
        let rows = if many { ROWS_OF_32 } else { ROWS_OF_16 };
        Self { rows, columns: COLUMNS * S::F32_LANES }
    }
}

struct TileOf;

impl WithSimd for TileOf {
    type Output = Tile;

    fn with_simd<S: Simd>(self, _: S) -> Tile {
        Tile::of::<S>()
    }
}
