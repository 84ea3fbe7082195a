//! The memory layout of the f32 matrices of a product. Owns the packed matrices.

use super::aligned::AlignedVec;
use super::size::{COLUMNS, ROWS_WITH_16_REGISTERS, ROWS_WITH_32_REGISTERS, RUN, Tile};

/// The left matrix of a product, `[count, depth]`, tile by tile.
#[derive(Default)]
pub struct Rows {
    /// `[tiles, runs, rows of a tile, RUN]`, with ⌈count / rows of a tile⌉ tiles and ⌈depth / RUN⌉ runs. There are
    /// zeros after the depth, and unspecified numbers after the count.
    pub(super) tiles: AlignedVec,
    pub(super) depth: usize,
}

/// The right matrix of a product, `[depth, width]`, panel by panel.
#[derive(Default)]
pub struct Panels {
    /// `[panels, depth rounded up to RUN, columns of a tile]`, with ⌈width / columns of a tile⌉ panels. There are zeros
    /// after the width and the depth.
    panels: AlignedVec,
    pub(super) depth: usize,
    pub(super) width: usize,
}

impl Rows {
    /// Packs `rows` `[count, depth]`.
    pub fn new(rows: &[f32], depth: usize) -> Self {
        let mut packed = Self::default();
        packed.pack(rows, depth);
        packed
    }

    /// Packs `rows` `[count, depth]` into this buffer.
    pub fn pack(&mut self, rows: &[f32], depth: usize) {
        self.depth = depth;
        match Tile::of_this_cpu().rows {
            ROWS_WITH_16_REGISTERS => pack_tiles::<ROWS_WITH_16_REGISTERS>(rows, depth, &mut self.tiles),
            ROWS_WITH_32_REGISTERS => pack_tiles::<ROWS_WITH_32_REGISTERS>(rows, depth, &mut self.tiles),
            other => unreachable!("tiles of {other} rows"),
        }
    }
}

impl Panels {
    /// Packs a matrix that is given by its columns, `[width, depth]`, as checkpoints store linear layers.
    pub fn new(columns: &[f32], depth: usize) -> Self {
        let mut packed = Self::default();
        packed.pack(columns, depth);
        packed
    }

    /// Packs a matrix that is given by its columns, `[width, depth]`, into this buffer.
    pub fn pack(&mut self, columns: &[f32], depth: usize) {
        (self.depth, self.width) = (depth, columns.len() / depth);
        match Tile::of_this_cpu().columns {
            8 => pack_panels::<8>(columns, depth, &mut self.panels),
            16 => pack_panels::<16>(columns, depth, &mut self.panels),
            32 => pack_panels::<32>(columns, depth, &mut self.panels),
            COLUMNS => pack_panels::<COLUMNS>(columns, depth, &mut self.panels),
            other => unreachable!("registers of {} numbers", other / COLUMNS),
        }
    }

    /// Packs a matrix that is given by its rows, `[depth, width]`, into this buffer.
    pub fn pack_rows(&mut self, rows: &[f32], width: usize) {
        self.pack_slices(rows.chunks_exact(width), [rows.len() / width, width]);
    }

    /// Packs a matrix that is given by its rows, each `width` long, into this buffer. Rows that are missing at the end are
    /// zeros.
    pub fn pack_slices<'a>(
        &mut self,
        rows: impl ExactSizeIterator<Item = &'a [f32]> + Clone,
        [depth, width]: [usize; 2],
    ) {
        (self.depth, self.width) = (depth, width);
        let side = Tile::of_this_cpu().columns;
        let panel = side * depth.next_multiple_of(RUN);
        self.panels.set_len(width.div_ceil(side) * panel);
        for (index, to) in self.panels.chunks_exact_mut(panel).enumerate() {
            let columns = index * side..width.min((index + 1) * side);
            if columns.len() < side || rows.len() < panel / side {
                to.fill(0.0);
            }
            for (to, row) in to.chunks_exact_mut(side).zip(rows.clone()) {
                to[..columns.len()].copy_from_slice(&row[columns.clone()]);
            }
        }
    }

    /// The length of a column.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// The number of columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The numbers, panel by panel.
    pub(super) fn panels(&self) -> &[f32] {
        &self.panels
    }

    /// The number of runs in a column.
    pub(super) fn runs(&self) -> usize {
        self.depth.div_ceil(RUN)
    }
}

/// Interleaves `ROWS` rows, run by run. Missing rows of the last tile become zeros.
fn pack_tiles<const ROWS: usize>(rows: &[f32], depth: usize, to: &mut AlignedVec) {
    let tile = ROWS * depth.next_multiple_of(RUN);
    to.set_len((rows.len() / depth).div_ceil(ROWS) * tile);
    for (rows, to) in rows.chunks(ROWS * depth).zip(to.chunks_exact_mut(tile)) {
        if rows.len() < tile {
            to.fill(0.0);
        }
        let to = to.as_chunks_mut::<RUN>().0;
        for (index, row) in rows.chunks_exact(depth).enumerate() {
            let (runs, rest) = row.as_chunks::<RUN>();
            let mut to = to[index..].iter_mut().step_by(ROWS);
            for (run, to) in runs.iter().zip(&mut to) {
                *to = *run;
            }
            if let Some(to) = to.next() {
                to[..rest.len()].copy_from_slice(rest);
            }
        }
    }
}

/// Interleaves `SIDE` columns, number by number. Missing columns of the last panel become zeros.
fn pack_panels<const SIDE: usize>(columns: &[f32], depth: usize, to: &mut AlignedVec) {
    let panel = SIDE * depth.next_multiple_of(RUN);
    to.set_len((columns.len() / depth).div_ceil(SIDE) * panel);
    for (columns, to) in columns.chunks(SIDE * depth).zip(to.chunks_exact_mut(panel)) {
        if columns.len() < panel {
            to.fill(0.0);
        }
        // Completes a few cache lines before it writes the next ones.
        for (index, to) in to.as_chunks_mut::<SIDE>().0.chunks_exact_mut(RUN).enumerate() {
            for (lane, column) in columns.chunks_exact(depth).enumerate() {
                for (to, x) in to.iter_mut().zip(&column[index * RUN..]) {
                    to[lane] = *x;
                }
            }
        }
    }
}
