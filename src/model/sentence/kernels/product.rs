//! The product of two matrices. Decides how they lie in memory for it, so that the inner loop reads
//! both front to back: weights are laid so once, when the model is loaded. Owns what it laid.
//!
//! The inner loop keeps a tile of results in registers, two registers wide and as many rows high as
//! there are registers for.

use std::cell::RefCell;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::dispatch;

/// Registers of a row of a tile.
pub const COLUMNS: usize = 2;
/// Rows of a tile where there are 16 registers: with two for the columns and one for a row's number,
/// they take them all.
const ROWS_OF_16: usize = 6;
/// Rows of a tile where there are 32.
const ROWS_OF_32: usize = 12;
/// Most rows that go through one step together, whole tiles: so many that reading the weights anew
/// for each block costs little, few enough that the caches still hold them for the next step.
const BLOCK: usize = 192;

/// The left matrix of a product, `[count, depth]`, tile by tile.
#[derive(Default)]
pub struct Rows {
    /// `[count rounded up / rows of a tile, depth, rows of a tile]`; zeros beyond the count.
    tiles: Vec<f32>,
    depth: usize,
}

/// The right matrix of a product, `[depth, width]`, panel by panel.
#[derive(Default)]
pub struct Panels {
    /// `[width rounded up / columns of a tile, depth, columns of a tile]`; zeros beyond the width.
    panels: Vec<f32>,
    depth: usize,
    width: usize,
}

impl Rows {
    /// Lays out `rows` `[count, depth]`.
    pub fn new(rows: &[f32], depth: usize) -> Self {
        let mut laid = Self::default();
        laid.lay(rows, depth);
        laid
    }

    /// Lays out `rows` `[count, depth]` in the place of what was here.
    pub fn lay(&mut self, rows: &[f32], depth: usize) {
        self.depth = depth;
        match Tile::of_this_cpu().rows {
            ROWS_OF_16 => interleave::<ROWS_OF_16>(rows, depth, &mut self.tiles),
            ROWS_OF_32 => interleave::<ROWS_OF_32>(rows, depth, &mut self.tiles),
            other => unreachable!("tiles of {other} rows"),
        }
    }

    /// `out` `[count, stride]`, of which the first `width` columns ← these rows, from the row `first`
    /// on, times `right`. `first` is the first row of a tile.
    pub fn multiply(&self, first: usize, right: &Panels, out: &mut [f32], stride: usize) {
        let tiles = &self.tiles[first * self.depth..];
        dispatch(Multiply { tiles, right, out, stride });
    }
}

impl Panels {
    /// Lays out a matrix given by its columns, `[width, depth]`: how a linear layer's weights are
    /// published.
    pub fn new(columns: &[f32], depth: usize) -> Self {
        let mut laid = Self::default();
        laid.lay(columns, depth);
        laid
    }

    /// Lays out a matrix given by its columns, `[width, depth]`, in the place of what was here.
    pub fn lay(&mut self, columns: &[f32], depth: usize) {
        (self.depth, self.width) = (depth, columns.len() / depth);
        match Tile::of_this_cpu().columns {
            8 => interleave::<8>(columns, depth, &mut self.panels),
            16 => interleave::<16>(columns, depth, &mut self.panels),
            32 => interleave::<32>(columns, depth, &mut self.panels),
            COLUMNS => interleave::<COLUMNS>(columns, depth, &mut self.panels),
            other => unreachable!("registers of {} numbers", other / COLUMNS),
        }
    }

    /// Numbers in a column.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Columns.
    pub fn width(&self) -> usize {
        self.width
    }
}

/// Columns of a tile on this CPU.
pub fn columns_of_this_cpu() -> usize {
    Tile::of_this_cpu().columns
}

thread_local! {
    /// Kept from one product to the next: fresh memory costs a page fault every 4 KiB.
    static LEFT: RefCell<Rows> = RefCell::default();
}

/// `out` `[count, width]` ← `rows` `[count, depth]` times `right`, block by block of rows; `then` is
/// given each block while it is in the cache, and the index of its first row.
pub fn multiply_rows(
    rows: &[f32],
    right: &Panels,
    out: &mut [f32],
    then: impl Fn(usize, &mut [f32]) + Send + Sync,
) {
    let (depth, width) = (right.depth(), right.width());
    by_blocks(out, width, |first, out| {
        let count = out.len() / width;
        let mut left = LEFT.take();
        left.lay(&rows[first * depth..][..count * depth], depth);
        left.multiply(0, right, out, width);
        LEFT.set(left);
        then(first, out);
    });
}

/// Runs `work` on blocks of rows of `out`, `width` wide, each told the index of its first row; in
/// parallel where there is more than one thread.
pub fn by_blocks(out: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Send + Sync) {
    let threads = rayon::current_num_threads();
    let share = (out.len() / width.max(1)).div_ceil(threads);
    let block = share.next_multiple_of(ROWS_OF_32).clamp(1, BLOCK);
    let blocks = out.chunks_mut(block * width).enumerate().map(|(index, rows)| (index * block, rows));
    in_parallel(blocks, |(first, rows)| work(first, rows));
}

/// Does `work` on each item, in parallel where there is more than one thread.
pub fn in_parallel<T: Send>(items: impl Iterator<Item = T>, work: impl Fn(T) + Send + Sync) {
    if rayon::current_num_threads() == 1 {
        items.for_each(work);
    } else {
        items.collect::<Vec<_>>().into_par_iter().for_each(work);
    }
}

/// The size of a tile.
#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    columns: usize,
}

impl Tile {
    fn of_this_cpu() -> Self {
        dispatch(TileOf)
    }

    fn of<S: Simd>() -> Self {
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

struct Multiply<'a> {
    tiles: &'a [f32],
    right: &'a Panels,
    out: &'a mut [f32],
    stride: usize,
}

impl WithSimd for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match Tile::of::<S>().rows {
            ROWS_OF_16 => self.in_tiles::<S, ROWS_OF_16>(simd),
            _ => self.in_tiles::<S, ROWS_OF_32>(simd),
        }
    }
}

impl Multiply<'_> {
    #[inline(always)]
    fn in_tiles<S: Simd, const ROWS: usize>(self, simd: S) {
        let Panels { ref panels, depth, width } = *self.right;
        let columns = COLUMNS * S::F32_LANES;
        for (index, panel) in panels.chunks_exact(columns * depth).enumerate() {
            let panel = S::as_simd_f32s(panel).0.as_chunks::<COLUMNS>().0;
            let columns = index * columns..width.min((index + 1) * columns);
            let tiles = self.tiles.chunks_exact(ROWS * depth);
            for (rows, out) in tiles.zip(self.out.chunks_mut(ROWS * self.stride)) {
                let sums = tile(simd, rows.as_chunks::<ROWS>().0, panel);
                for (out, sums) in out.chunks_exact_mut(self.stride).zip(sums) {
                    store(simd, sums, &mut out[columns.clone()]);
                }
            }
        }
    }
}

/// Puts `SIDE` rows side by side, number by number; zeros in the place of those that a last group
/// lacks.
fn interleave<const SIDE: usize>(rows: &[f32], depth: usize, to: &mut Vec<f32>) {
    let groups = (rows.len() / depth).div_ceil(SIDE);
    to.resize(groups * SIDE * depth, 0.0);
    for (rows, to) in rows.chunks(SIDE * depth).zip(to.chunks_exact_mut(SIDE * depth)) {
        let to = to.as_chunks_mut::<SIDE>().0;
        if rows.len() < SIDE * depth {
            to.as_flattened_mut().fill(0.0);
        }
        for (place, row) in rows.chunks_exact(depth).enumerate() {
            for (to, x) in to.iter_mut().zip(row) {
                to[place] = *x;
            }
        }
    }
}

/// The products of `ROWS` rows with `COLUMNS` registers of columns.
#[inline(always)]
fn tile<S: Simd, const ROWS: usize>(
    simd: S,
    rows: &[[f32; ROWS]],
    panel: &[[S::f32s; COLUMNS]],
) -> [[S::f32s; COLUMNS]; ROWS] {
    let mut sums = [[simd.splat_f32s(0.0); COLUMNS]; ROWS];
    for (row, columns) in rows.iter().zip(panel) {
        for (sums, x) in sums.iter_mut().zip(row) {
            let x = simd.splat_f32s(*x);
            for (sum, column) in sums.iter_mut().zip(columns) {
                *sum = simd.mul_add_e_f32s(x, *column, *sum);
            }
        }
    }
    sums
}

#[inline(always)]
fn store<S: Simd>(simd: S, sums: [S::f32s; COLUMNS], out: &mut [f32]) {
    if out.len() == COLUMNS * S::F32_LANES {
        S::as_mut_simd_f32s(out).0.copy_from_slice(&sums);
        return;
    }
    // Slow on some CPUs, and of the last columns only.
    for (out, sum) in out.chunks_mut(S::F32_LANES).zip(sums) {
        simd.partial_store_f32s(out, sum);
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::testing::{difference, noise, on_every_cpu};
    use super::*;

    fn flat(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn it_equals_candles_own_product_for_any_shape_on_every_cpu() {
        on_every_cpu(equals_candles_own);
    }

    fn equals_candles_own() {
        for (rows, depth, width) in
            [(1, 1, 1), (5, 3, 7), (6, 16, 16), (7, 33, 15), (12, 8, 32), (13, 40, 95), (150, 384, 401)]
        {
            let a = noise(&[rows, depth], 1.0, 1).unwrap();
            let published = noise(&[width, depth], 1.0, 2).unwrap();
            let right = a.matmul(&published.t().unwrap()).unwrap();
            let panels = Panels::new(&flat(&published), depth);
            let mut out = vec![f32::NAN; rows * width];
            multiply_rows(&flat(&a), &panels, &mut out, |_, _| {});
            let ours = Tensor::from_vec(out, (rows, width), &Device::Cpu).unwrap();
            let off = difference(&ours, &right).unwrap();
            assert!(off < 1e-6 * depth as f32, "{rows}×{depth} · {depth}×{width}: {off}");
        }
    }

    #[test]
    fn what_was_laid_out_before_leaves_no_trace() {
        let (mut rows, mut panels) = (Rows::new(&[f32::NAN; 40], 2), Panels::new(&[f32::NAN; 90], 3));
        rows.lay(&[1.0, 2.0], 2);
        panels.lay(&[3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 2);
        let mut out = [f32::NAN; 3];
        rows.multiply(0, &panels, &mut out, 3);
        assert_eq!(out, [11.0, 17.0, 23.0]);
    }

    #[test]
    fn a_product_leaves_what_lies_beyond_its_columns() {
        let (rows, panels) = (Rows::new(&[1.0, 2.0], 1), Panels::new(&[3.0, 4.0], 1));
        let mut out = [-1.0; 6];
        rows.multiply(0, &panels, &mut out, 3);
        assert_eq!(out, [3.0, 4.0, -1.0, 6.0, 8.0, -1.0]);
    }

    #[test]
    fn a_row_gives_the_same_numbers_among_any_others() {
        let (depth, width) = (64, 48);
        let panels = Panels::new(&flat(&noise(&[width, depth], 1.0, 2).unwrap()), depth);
        let rows = flat(&noise(&[29, depth], 1.0, 3).unwrap());
        let mut together = vec![0.0; 29 * width];
        multiply_rows(&rows, &panels, &mut together, |_, _| {});
        for (row, expected) in rows.chunks(depth).zip(together.chunks(width)) {
            let mut alone = vec![0.0; width];
            multiply_rows(row, &panels, &mut alone, |_, _| {});
            assert_eq!(alone, expected);
        }
    }

    #[test]
    fn blocks_cover_every_row_once() {
        for rows in [0, 1, 11, 48, 49, 500] {
            let mut out = vec![0.0; rows * 3];
            by_blocks(&mut out, 3, |first, block| {
                for (row, out) in block.chunks_mut(3).enumerate() {
                    out.iter_mut().for_each(|x| *x += (first + row) as f32);
                }
            });
            let right: Vec<f32> = (0..rows).flat_map(|row| [row as f32; 3]).collect();
            assert_eq!(out, right);
        }
    }
}
