//! The inner loop of an f32 product: computes a tile of results, and stores it.

use std::marker::PhantomData;

use pulp::{Simd, WithSimd};

use super::super::activation::{Activation, Gelu, GeluTanh, Identity, Lanes, Relu, Silu};
use super::super::dispatch;
use super::layout::Panels;
use super::size::{COLUMNS, ROWS_WITH_16_REGISTERS, ROWS_WITH_32_REGISTERS, RUN, Tile};

/// The kernel that multiplies `tiles` by `right`, tile by tile. A [`Target`] stores the results.
pub struct Multiply<'a, T> {
    pub tiles: &'a [f32],
    pub right: &'a Panels,
    pub to: T,
}

/// Where the results of a product are stored.
pub trait Target {
    /// Stores the sums of a tile.
    fn store_tile<S: Simd, const ROWS: usize>(
        &mut self,
        simd: S,
        position: TilePosition,
        sums: [[S::f32s; COLUMNS]; ROWS],
    );
}

/// The position of a tile's results.
#[derive(Clone, Copy)]
pub struct TilePosition {
    /// The index of the tile of rows.
    tile: usize,
    /// The first column of the results.
    column: usize,
}

impl<T: Target> WithSimd for Multiply<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match Tile::of::<S>().rows {
            ROWS_WITH_16_REGISTERS => self.in_tiles::<S, ROWS_WITH_16_REGISTERS>(simd),
            _ => self.in_tiles::<S, ROWS_WITH_32_REGISTERS>(simd),
        }
    }
}

impl<T: Target> Multiply<'_, T> {
    #[inline(always)]
    fn in_tiles<S: Simd, const ROWS: usize>(mut self, simd: S) {
        let (columns, runs) = (COLUMNS * S::F32_LANES, self.right.runs());
        let tiles = self.tiles.as_chunks::<RUN>().0.as_chunks::<ROWS>().0;
        for (index, panel) in self.right.panels().chunks_exact(columns * RUN * runs).enumerate() {
            let panel = S::as_simd_f32s(panel).0.as_chunks::<COLUMNS>().0.as_chunks::<RUN>().0;
            for (tile, rows) in tiles.chunks_exact(runs).enumerate() {
                self.to.store_tile(
                    simd,
                    TilePosition { tile, column: index * columns },
                    sums(simd, rows, panel),
                );
            }
        }
    }
}

/// The products of `ROWS` rows with `COLUMNS` registers of columns, over the whole depth.
#[inline(always)]
fn sums<S: Simd, const ROWS: usize>(
    simd: S,
    rows: &[[[f32; RUN]; ROWS]],
    panel: &[[[S::f32s; COLUMNS]; RUN]],
) -> [[S::f32s; COLUMNS]; ROWS] {
    let mut sums = [[simd.splat_f32s(0.0); COLUMNS]; ROWS];
    for (rows, columns) in rows.iter().zip(panel) {
        for (k, columns) in columns.iter().enumerate() {
            for (sums, row) in sums.iter_mut().zip(rows) {
                let x = simd.splat_f32s(row[k]);
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = simd.mul_add_e_f32s(x, *column, *sum);
                }
            }
        }
    }
    sums
}

/// Stores the results in `width` columns of `out` `[count, stride]`, from the column `first` on.
pub struct RowByRow<'a> {
    pub out: &'a mut [f32],
    pub stride: usize,
    pub first: usize,
    pub width: usize,
}

impl Target for RowByRow<'_> {
    #[inline(always)]
    fn store_tile<S: Simd, const ROWS: usize>(
        &mut self,
        simd: S,
        position: TilePosition,
        sums: [[S::f32s; COLUMNS]; ROWS],
    ) {
        let columns = position.column..self.width.min(position.column + COLUMNS * S::F32_LANES);
        if columns.is_empty() {
            return;
        }
        let start = self.out.len().min(position.tile * ROWS * self.stride);
        for (row, sums) in self.out[start..].chunks_exact_mut(self.stride).zip(sums) {
            store(simd, &sums, &mut row[self.first..][columns.clone()]);
        }
    }
}

/// Stores registers in `out`, which may be shorter than they are.
#[inline(always)]
pub fn store<S: Simd>(simd: S, sums: &[S::f32s], out: &mut [f32]) {
    let (whole, rest) = S::as_mut_simd_f32s(out);
    whole.copy_from_slice(&sums[..whole.len()]);
    // A partial store is slow; it is needed for the last columns only.
    if !rest.is_empty() {
        simd.partial_store_f32s(rest, sums[whole.len()]);
    }
}

/// Stores `F(sum + bias)` in the layout of the left matrix of the next product.
struct TileByTile<'a, F> {
    tiles: &'a mut [f32],
    /// Padded with zeros to a whole run.
    bias: &'a [f32],
    function: PhantomData<F>,
}

impl<F: Lanes> Target for TileByTile<'_, F> {
    #[inline(always)]
    fn store_tile<S: Simd, const ROWS: usize>(
        &mut self,
        simd: S,
        position: TilePosition,
        sums: [[S::f32s; COLUMNS]; ROWS],
    ) {
        let tile_len = ROWS * self.bias.len();
        let tile = &mut self.tiles[position.tile * tile_len..][..tile_len];
        for index in 0..COLUMNS {
            let column = position.column + index * S::F32_LANES;
            let Some(bias) = self.bias.get(column..column + S::F32_LANES) else { break };
            let bias = S::as_simd_f32s(bias).0[0];
            let (run, number) = (column / RUN, column % RUN);
            for (row, sums) in tile.as_chunks_mut::<RUN>().0[run * ROWS..].iter_mut().zip(&sums) {
                S::as_mut_simd_f32s(&mut row[number..][..S::F32_LANES]).0[0] = sums[index];
            }
            // All sums are stored before the function is applied, because it needs their registers.
            for row in &mut tile.as_chunks_mut::<RUN>().0[run * ROWS..][..ROWS] {
                let x = &mut S::as_mut_simd_f32s(&mut row[number..][..S::F32_LANES]).0[0];
                *x = F::apply(simd, simd.add_f32s(*x, bias));
            }
        }
    }
}

/// `to` ← activation(`tiles` times `right` + `bias`), in the layout of `tiles`.
pub fn activated(tiles: &[f32], right: &Panels, bias: &[f32], activation: Activation, to: &mut [f32]) {
    match activation {
        Activation::Gelu => activated_by::<Gelu>(tiles, right, bias, to),
        Activation::GeluTanh => activated_by::<GeluTanh>(tiles, right, bias, to),
        Activation::Relu => activated_by::<Relu>(tiles, right, bias, to),
        Activation::Silu => activated_by::<Silu>(tiles, right, bias, to),
        Activation::Identity => activated_by::<Identity>(tiles, right, bias, to),
    }
}

fn activated_by<F: Lanes>(tiles: &[f32], right: &Panels, bias: &[f32], to: &mut [f32]) {
    dispatch(Multiply { tiles, right, to: TileByTile::<F> { tiles: to, bias, function: PhantomData } });
}
