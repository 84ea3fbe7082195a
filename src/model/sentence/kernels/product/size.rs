//! The size of a tile of results, by the registers of this CPU. Owns no state.

use pulp::{Simd, WithSimd};

use super::super::dispatch;

/// Numbers of a row that lie together in a tile: a line of the cache, copied as it is.
pub const RUN: usize = 16;

/// Registers of a row of a tile.
pub const COLUMNS: usize = 2;
/// Rows of a tile where there are 16 registers: with two for the columns and one for a row's number,
/// they take them all.
pub const ROWS_OF_16: usize = 6;
/// Rows of a tile where there are 32.
pub const ROWS_OF_32: usize = 12;

/// The size of a tile.
#[derive(Clone, Copy)]
pub struct Tile {
    pub rows: usize,
    pub columns: usize,
}

impl Tile {
    pub fn of_this_cpu() -> Self {
        dispatch(TileOf)
    }

    /// The same, where the registers are known already.
    pub fn of<S: Simd>() -> Self {
        // Registers of 16 numbers come in no smaller set.
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
