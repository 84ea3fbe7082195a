//! The size of a tile of results, which depends on this CPU's registers. Owns no state.

use pulp::{Simd, WithSimd};

use super::super::dispatch;

/// Numbers in a run: a row of a tile is stored in runs of adjacent numbers. A run fills a cache line.
pub const RUN: usize = 16;

/// Registers for one row of a tile.
pub const COLUMNS: usize = 2;
/// Rows of a tile on a CPU with 16 registers: 12 registers hold results, two hold columns, one holds a row's number.
pub const ROWS_WITH_16_REGISTERS: usize = 6;
/// Rows of a tile on a CPU with 32 registers: 24 of them hold results.
pub const ROWS_WITH_32_REGISTERS: usize = 12;

/// The size of a tile.
#[derive(Clone, Copy)]
pub struct Tile {
    pub rows: usize,
    pub columns: usize,
}

impl Tile {
    /// The tile of this CPU.
    pub fn of_this_cpu() -> Self {
        dispatch(TileOfThisCpu)
    }

    /// The tile of CPUs with the registers of `S`.
    pub fn of<S: Simd>() -> Self {
        // CPUs with registers of 16 numbers have 32 of them.
        let has_32 = S::REGISTER_COUNT >= 32 || S::F32_LANES >= 16;
        let rows = if has_32 { ROWS_WITH_32_REGISTERS } else { ROWS_WITH_16_REGISTERS };
        Self { rows, columns: COLUMNS * S::F32_LANES }
    }
}

struct TileOfThisCpu;

impl WithSimd for TileOfThisCpu {
    type Output = Tile;

    fn with_simd<S: Simd>(self, _: S) -> Tile {
        Tile::of::<S>()
    }
}
