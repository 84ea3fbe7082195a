//! The product of one row (GEMV) or a few rows with a [`Matrix`](super::matrix::Matrix), whose numbers are unpacked to
//! f32 in registers. Reading the weights takes most of the time, and packed weights have fewer bytes than f32.

use std::cell::RefCell;
use std::slice::ChunksExact;

use pulp::{Simd, WithSimd};

use super::super::dispatch;
use super::number_format::{NumberFormat, PANEL};
use super::size::{ROWS_WITH_32_REGISTERS, Tile as TileSize};
use super::tile::store;

/// The rows of the highest tile; it needs 32 registers.
pub const MAX_TILE_ROWS: usize = 16;
/// The rows of the middle tile. The others have 1 and [`MAX_TILE_ROWS`] rows.
const MID_TILE_ROWS: usize = 4;
/// Words in a cache line.
const LINE_WORDS: usize = 16;

/// A product of a few rows with some panels of a matrix.
pub struct FewRows<'a> {
    pub format: NumberFormat,
    pub depth: usize,
    /// `[count, depth]`.
    pub rows: &'a [f32],
    pub panels: &'a [u32],
    /// `[count, stride]`. Columns of the panels beyond the stride are dropped.
    pub out: &'a mut [f32],
    pub stride: usize,
}

/// The kernel that unpacks the numbers of a panel to f32: `[depth, PANEL]`.
pub struct Unpack<'a> {
    pub format: NumberFormat,
    pub panel: &'a [u32],
    pub to: &'a mut Vec<f32>,
}

thread_local! {
    /// The rows, tile by tile. Reused by the next product.
    static TILES: RefCell<Vec<f32>> = RefCell::default();
}

/// Computes the product in tiles of 16, 4 and 1 rows. All tiles are multiplied by a panel before the next panel, so that
/// the matrix is read from memory once.
pub fn multiply_few_rows(few: FewRows<'_>) {
    let FewRows { format, depth, rows, panels, out, stride } = few;
    let count = rows.len() / depth;
    if count == 0 {
        return;
    }
    let mut tiles = TILES.take();
    tiles.clear();
    let mut heights = Vec::new();
    let mut first = 0;
    while first < count {
        let left = count - first;
        // A tile of 16 rows takes as long as three tiles of 4 rows, so it pays from 9 rows on.
        let height = match left {
            1 => 1,
            9.. if TileSize::of_this_cpu().rows == ROWS_WITH_32_REGISTERS => MAX_TILE_ROWS,
            _ => MID_TILE_ROWS,
        };
        let taken = left.min(height);
        transpose(&rows[first * depth..][..taken * depth], depth, height, &mut tiles);
        heights.push(height);
        first += taken;
    }
    dispatch(Tiles { format, depth, heights: &heights, tiles: &tiles, panels, out, stride });
    TILES.set(tiles);
}

/// Appends the transpose `[depth, height]` of `rows` `[count, depth]`, with zeros for missing rows.
fn transpose(rows: &[f32], depth: usize, height: usize, to: &mut Vec<f32>) {
    let start = to.len();
    to.resize(start + depth * height, 0.0);
    for (row, numbers) in rows.chunks_exact(depth).enumerate() {
        for (to, x) in to[start..].chunks_exact_mut(height).zip(numbers) {
            to[row] = *x;
        }
    }
}

struct Tiles<'a> {
    format: NumberFormat,
    depth: usize,
    /// The rows of each tile, including missing ones.
    heights: &'a [usize],
    /// `[depth, height]` for each tile.
    tiles: &'a [f32],
    panels: &'a [u32],
    out: &'a mut [f32],
    stride: usize,
}

impl WithSimd for Tiles<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.format {
            NumberFormat::F32 => self.multiply::<S, F32>(simd),
            NumberFormat::Bf16 => self.multiply::<S, Bf16>(simd),
            NumberFormat::Bits4 => self.multiply::<S, Bits4>(simd),
            NumberFormat::Bits8 => self.multiply::<S, Bits8<8>>(simd),
            NumberFormat::Bits8By16 => self.multiply::<S, Bits8<4>>(simd),
        }
    }
}

/// Registers across a tile of this height.
const fn tile_width(height: usize, lanes: usize) -> usize {
    match height {
        1 if lanes == 16 => 4,
        1 => 8,
        MID_TILE_ROWS if lanes == 16 => 4,
        MID_TILE_ROWS => 2,
        _ => 1,
    }
}

impl Tiles<'_> {
    /// Multiplies the tiles by all panels, whose numbers are packed as in `C`.
    #[inline(always)]
    fn multiply<S: Simd, C: Packing>(self, simd: S) {
        let Self { depth, heights, tiles, panels, out, stride, .. } = self;
        let panel_words = depth / (C::NUMBER_WORDS * C::PER_WORD) * C::GROUP_WORDS * PANEL;
        let passes = |height: &usize| PANEL / (tile_width(*height, S::F32_LANES) * S::F32_LANES);
        let all_passes: usize = heights.iter().map(passes).sum();
        // All passes over a panel together fetch the next one.
        let lines_per_group = (C::GROUP_WORDS * PANEL / LINE_WORDS).div_ceil(all_passes);
        for (index, panel) in panels.chunks_exact(panel_words).enumerate() {
            let next = panels.get((index + 1) * panel_words..).unwrap_or_default();
            let mut next = NextPanel {
                lines: next[..next.len().min(panel_words)].chunks_exact(LINE_WORDS),
                count: lines_per_group,
            };
            let mut row = 0;
            for height in heights {
                let rows = &tiles[row * depth..][..height * depth];
                let to = To { out: &mut out[row * stride..], stride, column: index * PANEL };
                let next = &mut next;
                match *height {
                    1 if S::F32_LANES == 16 => {
                        multiply_panel::<S, C, 1, { tile_width(1, 16) }>(simd, rows, panel, next, to);
                    }
                    1 => multiply_panel::<S, C, 1, { tile_width(1, 8) }>(simd, rows, panel, next, to),
                    MID_TILE_ROWS if S::F32_LANES == 16 => {
                        multiply_panel::<S, C, MID_TILE_ROWS, { tile_width(MID_TILE_ROWS, 16) }>(
                            simd, rows, panel, next, to,
                        );
                    }
                    MID_TILE_ROWS => {
                        multiply_panel::<S, C, MID_TILE_ROWS, { tile_width(MID_TILE_ROWS, 8) }>(
                            simd, rows, panel, next, to,
                        );
                    }
                    _ => {
                        multiply_panel::<S, C, MAX_TILE_ROWS, { tile_width(MAX_TILE_ROWS, 16) }>(
                            simd, rows, panel, next, to,
                        );
                    }
                }
                row += height;
            }
        }
    }
}

/// Where the results of a tile go: to rows of `stride` numbers, from the column `column` on. Rows that are missing in a
/// tile are missing here, too.
struct To<'a> {
    out: &'a mut [f32],
    stride: usize,
    column: usize,
}

/// The part of the next panel that is not fetched yet.
struct NextPanel<'a> {
    /// Its cache lines.
    lines: ChunksExact<'a, u32>,
    /// How many of them are fetched for each group of a pass over this panel.
    count: usize,
}

impl NextPanel<'_> {
    /// Fetches some lines into the second-level cache. The CPU's own prefetcher stops at the end of a page of 4 KiB, and
    /// waiting for memory at the beginning of each panel would take as long as multiplying it.
    #[inline(always)]
    #[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "no safe interface has the instruction"))]
    fn fetch(&mut self) {
        #[cfg(target_arch = "x86_64")]
        for line in self.lines.by_ref().take(self.count) {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            // SAFETY: prefetching has no effect but on time, at any address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (&self.lines, self.count);
    }
}

/// Multiplies a tile by a panel, `WIDTH` registers of columns at a time.
#[inline(always)]
fn multiply_panel<S: Simd, C: Packing, const HEIGHT: usize, const WIDTH: usize>(
    simd: S,
    rows: &[f32],
    panel: &[u32],
    next: &mut NextPanel<'_>,
    To { out, stride, column }: To<'_>,
) {
    let rows = rows.as_chunks::<HEIGHT>().0;
    for part in 0..PANEL / (WIDTH * S::F32_LANES) {
        let first = column + part * WIDTH * S::F32_LANES;
        if first >= stride {
            break;
        }
        let sums = sums::<S, C, HEIGHT, WIDTH>(simd, rows, S::as_simd_u32s(panel).0, part, next);
        let last = (first + WIDTH * S::F32_LANES).min(stride);
        for (out, sums) in out.chunks_exact_mut(stride).zip(sums) {
            store(simd, &sums, &mut out[first..last]);
        }
    }
}

/// The products of `HEIGHT` rows with part number `part` of a panel, which is `WIDTH` registers wide, over the whole
/// depth.
#[inline(always)]
fn sums<S: Simd, C: Packing, const HEIGHT: usize, const WIDTH: usize>(
    simd: S,
    rows: &[[f32; HEIGHT]],
    panel: &[S::u32s],
    part: usize,
    next: &mut NextPanel<'_>,
) -> [[S::f32s; WIDTH]; HEIGHT] {
    let mut sums = [[simd.splat_f32s(0.0); WIDTH]; HEIGHT];
    let line = PANEL / S::F32_LANES;
    let take = |line: &[S::u32s]| {
        let mut taken = [simd.splat_u32s(0); WIDTH];
        taken.copy_from_slice(&line[part * WIDTH..][..WIDTH]);
        taken
    };
    let groups =
        panel.chunks_exact(C::GROUP_WORDS * line).zip(rows.chunks_exact(C::NUMBER_WORDS * C::PER_WORD));
    for (group, rows) in groups {
        next.fetch();
        let scales = if C::GROUP_WORDS > C::NUMBER_WORDS { take(group) } else { [simd.splat_u32s(0); WIDTH] };
        let offsets = if C::GROUP_WORDS > C::NUMBER_WORDS { take(&group[line..]) } else { scales };
        let words = group[(C::GROUP_WORDS - C::NUMBER_WORDS) * line..].chunks_exact(line);
        for (words, rows) in words.zip(rows.chunks_exact(C::PER_WORD)) {
            let mut words = take(words);
            for row in rows {
                let mut numbers = [simd.splat_f32s(0.0); WIDTH];
                for index in 0..WIDTH {
                    let (scale, offset) = (scales[index], offsets[index]);
                    numbers[index] = C::number(simd, words[index], scale, offset);
                    words[index] = C::next(simd, words[index]);
                }
                for (sums, x) in sums.iter_mut().zip(row) {
                    let x = simd.splat_f32s(*x);
                    for (sum, number) in sums.iter_mut().zip(numbers) {
                        *sum = simd.mul_add_e_f32s(x, number, *sum);
                    }
                }
            }
        }
    }
    sums
}

impl WithSimd for Unpack<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.format {
            NumberFormat::F32 => unpack::<S, F32>(simd, self.panel, self.to),
            NumberFormat::Bf16 => unpack::<S, Bf16>(simd, self.panel, self.to),
            NumberFormat::Bits4 => unpack::<S, Bits4>(simd, self.panel, self.to),
            NumberFormat::Bits8 => unpack::<S, Bits8<8>>(simd, self.panel, self.to),
            NumberFormat::Bits8By16 => unpack::<S, Bits8<4>>(simd, self.panel, self.to),
        }
    }
}

/// `to` `[depth, PANEL]` ← the numbers of a panel.
#[inline(always)]
fn unpack<S: Simd, C: Packing>(simd: S, panel: &[u32], to: &mut Vec<f32>) {
    to.resize(panel.len() / C::GROUP_WORDS * C::NUMBER_WORDS * C::PER_WORD, 0.0);
    let line = PANEL / S::F32_LANES;
    let groups = S::as_simd_u32s(panel).0.chunks_exact(C::GROUP_WORDS * line);
    let to = S::as_mut_simd_f32s(to).0.chunks_exact_mut(C::NUMBER_WORDS * C::PER_WORD * line);
    for (group, to) in groups.zip(to) {
        let words = group[(C::GROUP_WORDS - C::NUMBER_WORDS) * line..].chunks_exact(line);
        for (words, to) in words.zip(to.chunks_exact_mut(C::PER_WORD * line)) {
            for (lane, word) in words.iter().enumerate() {
                let (scale, offset) = (group[lane], group[(line + lane).min(group.len() - 1)]);
                let mut word = *word;
                for to in to.chunks_exact_mut(line) {
                    to[lane] = C::number(simd, word, scale, offset);
                    word = C::next(simd, word);
                }
            }
        }
    }
}

/// How numbers are packed in words. A trait and not closures, for the reason given at
/// [`Lanes`](super::super::activation::Lanes).
trait Packing {
    /// Bits of a number.
    const BITS: u32;
    /// Words in a group that hold numbers.
    const NUMBER_WORDS: usize;
    /// Numbers in a word of 32 bits.
    const PER_WORD: usize = 32 / Self::BITS as usize;
    /// Words in a group, including the scale and the offset of quantised numbers.
    const GROUP_WORDS: usize = Self::NUMBER_WORDS + if Self::BITS <= 8 { 2 } else { 0 };

    /// Unpacks the number in the low bits of a word. A quantised one is q·scale + offset, where q are these bits.
    #[inline(always)]
    fn number<S: Simd>(simd: S, word: S::u32s, scale: S::u32s, offset: S::u32s) -> S::f32s {
        /// 2^23. Writing a whole number into the low bits of its mantissa adds the number to it.
        const POWER: f32 = 8_388_608.0;
        let (power, mask) = (simd.splat_f32s(POWER), simd.splat_u32s((1 << Self::BITS) - 1));
        let q = simd.or_u32s(simd.and_u32s(word, mask), simd.transmute_u32s_f32s(power));
        let q = simd.sub_f32s(simd.transmute_f32s_u32s(q), power);
        let (scale, offset) = (simd.transmute_f32s_u32s(scale), simd.transmute_f32s_u32s(offset));
        simd.mul_add_e_f32s(q, scale, offset)
    }

    /// Shifts a word, so that the next number is in its low bits.
    #[inline(always)]
    fn next<S: Simd>(simd: S, word: S::u32s) -> S::u32s {
        if Self::PER_WORD == 1 { word } else { simd.wrapping_dyn_shr_u32s(word, simd.splat_u32s(Self::BITS)) }
    }
}

struct F32;
struct Bf16;
struct Bits4;
/// 8 bits, with `WORDS` words of numbers in a group.
struct Bits8<const WORDS: usize>;

impl Packing for F32 {
    const BITS: u32 = 32;
    const NUMBER_WORDS: usize = 1;

    #[inline(always)]
    fn number<S: Simd>(simd: S, word: S::u32s, _: S::u32s, _: S::u32s) -> S::f32s {
        simd.transmute_f32s_u32s(word)
    }
}

impl Packing for Bf16 {
    const BITS: u32 = 16;
    const NUMBER_WORDS: usize = 1;

    #[inline(always)]
    fn number<S: Simd>(simd: S, word: S::u32s, _: S::u32s, _: S::u32s) -> S::f32s {
        simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(word, simd.splat_u32s(16)))
    }
}

impl Packing for Bits4 {
    const BITS: u32 = 4;
    const NUMBER_WORDS: usize = 4;
}

impl<const COUNT: usize> Packing for Bits8<COUNT> {
    const BITS: u32 = 8;
    const NUMBER_WORDS: usize = COUNT;
}
