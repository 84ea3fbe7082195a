//! Rows that are rounded to whole numbers before they are multiplied with a quantised matrix: with a scale for each
//! [`GROUP`] numbers, and in tiles of some rows. Owns their memory. The kernels in `shorts` and `bytes` decide how a group
//! is rounded, and how high tiles are.

use super::number_format::NumberFormat;

/// Numbers of a row that share a scale.
pub const GROUP: usize = 32;
/// The largest number of words of a group: pairs of numbers of 16 bits, or fours of bytes in two parts.
pub const MAX_WORDS: usize = GROUP / 2;

/// Rounded rows, tile by tile. If there are fewer rows than a tile is high, the missing ones are 0.
#[derive(Default)]
pub struct QuantisedRows {
    tiles: Vec<TileSize>,
    /// `[groups, words of a group, height]` for each tile.
    words: Vec<i32>,
    /// `[groups, height]` for each tile.
    scales: Vec<f32>,
    /// `[groups of the matrix, height]` for each tile.
    sums: Vec<f32>,
    /// The number of groups in a row.
    groups: usize,
    /// The number of words in a group.
    group_words: usize,
    /// The matrix's groups in a column.
    matrix_groups: usize,
}

struct TileSize {
    /// The rows of the tile, including missing ones.
    height: usize,
    /// The rows that exist.
    rows: usize,
}

/// A rounded group of a row.
pub struct QuantisedGroup {
    /// In the order in which the kernel multiplies them. A kernel may use fewer words: the first ones.
    pub words: [i32; MAX_WORDS],
    /// The factor of the whole numbers. NaN if a number of the group is not finite.
    pub scale: f32,
    /// The sum of the whole numbers in each half of the group. A matrix may have a group for each half.
    pub totals: [i32; 2],
}

/// A view of one tile.
#[derive(Clone, Copy)]
pub struct Tile<'a> {
    /// The number of rows, including missing ones.
    pub height: usize,
    /// The index of the first row.
    pub first: usize,
    /// The number of rows that exist.
    pub rows: usize,
    /// `[groups, words of a group, height]`.
    pub words: &'a [i32],
    /// The factor of each group's whole numbers, `[groups, height]`.
    pub scales: &'a [f32],
    /// The sum of the numbers that are multiplied with a group of the matrix, `[groups of the matrix, height]`.
    pub sums: &'a [f32],
}

impl QuantisedRows {
    /// Rounds `rows` `[count, depth]` to groups of this many words, for matrices of this format. `height` returns the
    /// height of the next tile if this many rows are left. Inlined, so that `quantise` is compiled with the CPU features of the caller.
    #[inline(always)]
    pub fn fill(
        &mut self,
        rows: &[f32],
        (depth, format, group_words): (usize, NumberFormat, usize),
        height: impl Fn(usize) -> usize,
        quantise: impl Fn(&[f32; GROUP]) -> QuantisedGroup,
    ) {
        assert!(format.is_scaled() && depth.is_multiple_of(GROUP));
        (self.groups, self.matrix_groups, self.group_words) =
            (depth / GROUP, depth / format.group(), group_words);
        self.tiles.clear();
        self.words.clear();
        self.scales.clear();
        self.sums.clear();
        let mut rows = rows.chunks_exact(depth);
        while rows.len() > 0 {
            let height = height(rows.len());
            let taken = rows.len().min(height);
            self.tiles.push(TileSize { height, rows: taken });
            let (first_word, first_scale, first_sum) = (self.words.len(), self.scales.len(), self.sums.len());
            self.words.resize(first_word + self.groups * group_words * height, 0);
            self.scales.resize(first_scale + self.groups * height, 0.0);
            self.sums.resize(first_sum + self.matrix_groups * height, 0.0);
            for (index, row) in rows.by_ref().take(taken).enumerate() {
                let words = self.words[first_word..].chunks_exact_mut(group_words * height);
                let scales = self.scales[first_scale..].chunks_exact_mut(height);
                let sums = self.sums[first_sum..].chunks_exact_mut(GROUP / format.group() * height);
                for (((group, words), scale), sums) in
                    row.as_chunks::<GROUP>().0.iter().zip(words).zip(scales).zip(sums)
                {
                    let quantised = quantise(group);
                    for (to, word) in words.chunks_exact_mut(height).zip(quantised.words) {
                        to[index] = word;
                    }
                    scale[index] = quantised.scale;
                    let [a, b] = quantised.totals;
                    if format.group() == GROUP {
                        sums[index] = (a + b) as f32 * quantised.scale;
                    } else {
                        sums[index] = a as f32 * quantised.scale;
                        sums[height + index] = b as f32 * quantised.scale;
                    }
                }
            }
        }
    }

    /// The tiles, in the order of their rows.
    #[inline]
    pub fn tiles(&self) -> impl Iterator<Item = Tile<'_>> {
        let (mut words, mut scales, mut sums, mut first) =
            (&self.words[..], &self.scales[..], &self.sums[..], 0);
        self.tiles.iter().map(move |TileSize { height, rows }| {
            let tile = Tile {
                height: *height,
                first,
                rows: *rows,
                words: take(&mut words, self.groups * self.group_words * height),
                scales: take(&mut scales, self.groups * height),
                sums: take(&mut sums, self.matrix_groups * height),
            };
            first += rows;
            tile
        })
    }
}

/// Removes the first `count` numbers of a slice, and returns them.
fn take<'a, T>(numbers: &mut &'a [T], count: usize) -> &'a [T] {
    let (taken, rest) = numbers.split_at(count);
    *numbers = rest;
    taken
}
