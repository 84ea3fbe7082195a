//! Matrix products. Decides the layout of both matrices in memory, so that the inner loop reads each front to back.
//! Weights are packed once, when the model is loaded.
//!
//! The inner loop keeps a tile of results in registers. The tile is two registers wide, and has as many rows as there
//! are registers for.

mod aligned;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod bytes;
#[cfg_attr(not(target_arch = "x86_64"), path = "no_converted_rows.rs")]
mod converted_rows;
mod fast_formats;
mod gemv;
#[cfg(target_arch = "x86_64")]
mod half_rows;
mod layout;
mod linear;
mod matrix;
mod number_format;
#[cfg(target_arch = "x86_64")]
mod quantised_rows;
#[cfg(target_arch = "x86_64")]
mod shorts;
#[cfg(target_arch = "x86_64")]
mod signed_bytes;
mod size;
mod tile;

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::activation::Activation;
use super::dispatch;
pub use fast_formats::{Bf16Products, bf16_products, fast_formats, may_use_bf16};
pub use layout::{Panels, Rows};
pub use linear::{Linear, NotWholeGroups};
pub use matrix::{Group, Matrix, PackedWords, multiply_together};
pub use number_format::{NumberFormat, RowFormat};
use size::Tile;
pub use size::{COLUMNS, RUN};
pub use tile::store;
use tile::{Multiply, RowByRow, activated};

/// The largest number of tiles of rows in a block. A block is so large that reading the weights again for each block
/// costs little, and so small that the caches hold it for the next step. CPUs with more registers have higher tiles,
/// but also larger caches.
const MAX_BLOCK_TILES: usize = 32;

/// The columns of a tile on this CPU.
pub fn columns_of_this_cpu() -> usize {
    Tile::of_this_cpu().columns
}

thread_local! {
    /// Reused by the next product: new memory costs a page fault every 4 KiB.
    static LEFT: RefCell<Rows> = RefCell::default();
}

/// `out` `[count, width]` ← `rows` `[count, depth]` times `right`, in blocks of rows. `then` gets each block
/// while it is in the cache, with the index of its first row.
pub fn multiply_rows(
    rows: &[f32],
    right: &Panels,
    out: &mut [f32],
    then: impl Fn(usize, &mut [f32]) + Send + Sync,
) {
    // Only this generic function is compiled in the calling crate; the computation is compiled once, in this crate.
    multiply_in_blocks(rows, right, out, &then);
}

fn multiply_in_blocks(
    rows: &[f32],
    right: &Panels,
    out: &mut [f32],
    then: &(dyn Fn(usize, &mut [f32]) + Send + Sync),
) {
    let (depth, width) = (right.depth(), right.width());
    by_blocks(out, width, |first, out| {
        let count = out.len() / width;
        let mut left = LEFT.take();
        left.pack(&rows[first * depth..][..count * depth], depth);
        left.multiply(0, right, out, width);
        LEFT.set(left);
        then(first, out);
    });
}

/// Runs `work` on blocks of rows of `out`, which are `width` wide, with the index of each block's first row. In
/// parallel if there are several threads.
pub fn by_blocks(out: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Send + Sync) {
    let threads = rayon::current_num_threads();
    let share = (out.len() / width.max(1)).div_ceil(threads);
    let tile = Tile::of_this_cpu().rows;
    let block = share.next_multiple_of(tile).clamp(1, MAX_BLOCK_TILES * tile);
    let blocks = out.chunks_mut(block * width).enumerate().map(|(index, rows)| (index * block, rows));
    in_parallel(blocks, |(first, rows)| work(first, rows));
}

/// Runs `work` on each item, in parallel if there are several threads.
pub fn in_parallel<T: Send>(items: impl Iterator<Item = T>, work: impl Fn(T) + Send + Sync) {
    if rayon::current_num_threads() == 1 {
        items.for_each(work);
    } else {
        items.collect::<Vec<_>>().into_par_iter().for_each(work);
    }
}

impl Rows {
    /// The first `right.width()` columns of `out` `[count, stride]` ← these rows, from row `first` on, times `right`.
    /// `first` must be the first row of a tile.
    pub fn multiply(&self, first: usize, right: &Panels, out: &mut [f32], stride: usize) {
        let row_len = self.depth.next_multiple_of(RUN);
        let tiles = &self.tiles[first * row_len..];
        let wanted = (out.len() / stride).next_multiple_of(Tile::of_this_cpu().rows) * row_len;
        let tiles = &tiles[..wanted.min(tiles.len())];
        dispatch(Multiply { tiles, right, to: RowByRow { out, stride, first: 0, width: right.width } });
    }

    /// These `columns` of `out` `[count, stride]` ← all these rows times the first columns of `right`.
    fn multiply_columns(&self, right: &Panels, out: &mut [f32], stride: usize, columns: Range<usize>) {
        let to = RowByRow { out, stride, first: columns.start, width: columns.len() };
        dispatch(Multiply { tiles: &self.tiles, right, to });
    }

    /// `to` ← activation(these rows times `right` + `bias`), packed for the next product. `bias` is padded with zeros
    /// to a whole run.
    pub fn multiply_activated(&self, right: &Panels, bias: &[f32], activation: Activation, to: &mut Rows) {
        let rows = self.tiles.len() / self.depth.next_multiple_of(RUN);
        to.depth = right.width;
        to.tiles.set_len(rows * to.depth.next_multiple_of(RUN));
        if !to.depth.is_multiple_of(RUN) {
            // The numbers after the depth are read too, and could be NaN otherwise.
            to.tiles.fill(0.0);
        }
        activated(&self.tiles, right, bias, activation, &mut to.tiles);
    }

    /// Multiplies each number by the corresponding one of `gates`, which has the same shape.
    pub fn gate(&mut self, gates: &Self) {
        self.tiles.iter_mut().zip(gates.tiles.iter()).for_each(|(x, gate)| *x *= gate);
    }
}

#[cfg(test)]
mod tests {
    use super::super::activation::Activation;
    use super::super::testing::{difference, linear, noise, on_every_cpu, to_f64};
    use super::*;

    #[test]
    fn it_equals_the_plain_product_for_any_shape_on_every_cpu() {
        on_every_cpu(equals_the_plain_product);
    }

    fn equals_the_plain_product() {
        for (rows, depth, width) in
            [(1, 1, 1), (5, 3, 7), (6, 16, 16), (7, 33, 15), (12, 8, 32), (13, 40, 95), (150, 384, 401)]
        {
            let (a, weights) = (noise(&[rows, depth], 1.0, 1), noise(&[width, depth], 1.0, 2));
            let expected = linear(&to_f64(&a), &weights, &vec![0.0; width]);
            let mut out = vec![f32::NAN; rows * width];
            multiply_rows(&a, &Panels::new(&weights, depth), &mut out, |_, _| {});
            let error = difference(&out, &expected);
            assert!(error < 1e-6 * depth as f64, "{rows}×{depth} · {depth}×{width}: {error}");
        }
    }

    #[test]
    fn a_reused_buffer_keeps_nothing_of_its_former_contents() {
        let (mut rows, mut panels) = (Rows::new(&[f32::NAN; 40], 2), Panels::new(&[f32::NAN; 90], 3));
        rows.pack(&[1.0, 2.0], 2);
        panels.pack(&[3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 2);
        let mut out = [f32::NAN; 3];
        rows.multiply(0, &panels, &mut out, 3);
        assert_eq!(out, [11.0, 17.0, 23.0]);
    }

    #[test]
    fn activated_rows_are_packed_for_the_next_product_in_a_reused_buffer() {
        on_every_cpu(|| {
            for width in [5, 16, 40, 100] {
                let (rows, bias) = (Rows::new(&[1.0, 2.0, 3.0, 4.0], 2), vec![-0.5; 112]);
                let bias = &bias[..usize::next_multiple_of(width, RUN)];
                let panels = Panels::new(&vec![1.0; width * 2], 2);
                let mut inner = Rows::new(&vec![f32::NAN; 40 * 128], 128);
                rows.multiply_activated(&panels, bias, Activation::Relu, &mut inner);
                let mut out = [f32::NAN; 2];
                inner.multiply(0, &Panels::new(&vec![1.0; width], width), &mut out, 1);
                assert_eq!(out, [2.5 * width as f32, 6.5 * width as f32], "{width} columns");
            }
        });
    }

    #[test]
    fn a_block_is_multiplied_without_the_rows_after_it() {
        let rows = Rows::new(&[2.0; 100], 1);
        let mut out = [0.0; 7];
        rows.multiply(24, &Panels::new(&[3.0], 1), &mut out, 1);
        assert_eq!(out, [6.0; 7]);
    }

    #[test]
    fn a_product_leaves_the_columns_beyond_its_own_unchanged() {
        let (rows, panels) = (Rows::new(&[1.0, 2.0], 1), Panels::new(&[3.0, 4.0], 1));
        let mut out = [-1.0; 6];
        rows.multiply(0, &panels, &mut out, 3);
        assert_eq!(out, [3.0, 4.0, -1.0, 6.0, 8.0, -1.0]);
    }

    #[test]
    fn a_row_gives_the_same_numbers_in_any_batch() {
        let (depth, width) = (64, 48);
        let panels = Panels::new(&noise(&[width, depth], 1.0, 2), depth);
        let rows = noise(&[29, depth], 1.0, 3);
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
            let expected: Vec<f32> = (0..rows).flat_map(|row| [row as f32; 3]).collect();
            assert_eq!(out, expected);
        }
    }
}
