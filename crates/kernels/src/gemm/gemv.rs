//! The product of one row (GEMV) or a few rows with a [`Matrix`](super::matrix::Matrix), whose numbers are unpacked to
//! f32 in registers. Reading the weights takes most of the time, and packed weights have fewer bytes than f32.

use std::cell::RefCell;

use pulp::{Simd, WithSimd};

use super::super::dispatch;
use super::number_format::{NumberFormat, PANEL};
use super::size::{ROWS_WITH_32_REGISTERS, Tile as TileSize};
use super::tile::store;

/// The rows of the highest tile; it needs 32 registers.
pub const MAX_TILE_ROWS: usize = 16;
/// The rows of the middle tile. The others have 1 and [`MAX_TILE_ROWS`] rows.
const MID_TILE_ROWS: usize = 4;

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
    /// A tile of rows, transposed. Reused by the next product.
    static TILE: RefCell<Vec<f32>> = RefCell::default();
}

/// Computes the product in tiles of 16, 4 and 1 rows.
pub fn multiply_few_rows(few: FewRows<'_>) {
    let FewRows { format, depth, rows, panels, out, stride } = few;
    let mut tile = TILE.take();
    let mut first = 0;
    let count = rows.len() / depth;
    while first < count {
        let left = count - first;
        // A tile of 16 rows takes as long as three tiles of 4 rows, so it pays from 9 rows on.
        let height = match left {
            1 => 1,
            9.. if TileSize::of_this_cpu().rows == ROWS_WITH_32_REGISTERS => MAX_TILE_ROWS,
            _ => MID_TILE_ROWS,
        };
        let taken = left.min(height);
        transpose(&rows[first * depth..][..taken * depth], depth, height, &mut tile);
        let out = &mut out[first * stride..][..taken * stride];
        dispatch(Tile { format, height, rows: &tile, panels, out, stride });
        first += taken;
    }
    TILE.set(tile);
}

/// `to` `[depth, height]` ← the transpose of `rows` `[count, depth]`, with zeros for missing rows.
fn transpose(rows: &[f32], depth: usize, height: usize, to: &mut Vec<f32>) {
    to.clear();
    to.resize(depth * height, 0.0);
    for (row, numbers) in rows.chunks_exact(depth).enumerate() {
        for (to, x) in to.chunks_exact_mut(height).zip(numbers) {
            to[row] = *x;
        }
    }
}

struct Tile<'a> {
    format: NumberFormat,
    height: usize,
    /// `[depth, height]`.
    rows: &'a [f32],
    panels: &'a [u32],
    out: &'a mut [f32],
    stride: usize,
}

impl WithSimd for Tile<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.format {
            NumberFormat::F32 => self.multiply_packed::<S, F32>(simd),
            NumberFormat::Bf16 => self.multiply_packed::<S, Bf16>(simd),
            NumberFormat::Bits4 => self.multiply_packed::<S, Bits4>(simd),
            NumberFormat::Bits8 => self.multiply_packed::<S, Bits8<8>>(simd),
            NumberFormat::Bits8By16 => self.multiply_packed::<S, Bits8<4>>(simd),
        }
    }
}

impl Tile<'_> {
    /// Multiplies the tile by all panels, whose numbers are packed as in `C`.
    #[inline(always)]
    fn multiply_packed<S: Simd, C: Packing>(self, simd: S) {
        match self.height {
            1 => self.multiply::<S, C, 1, 4>(simd),
            MID_TILE_ROWS if S::F32_LANES == 16 => self.multiply::<S, C, MID_TILE_ROWS, 4>(simd),
            MID_TILE_ROWS => self.multiply::<S, C, MID_TILE_ROWS, 2>(simd),
            _ => self.multiply::<S, C, MAX_TILE_ROWS, 1>(simd),
        }
    }

    /// Multiplies the tile by all panels, `WIDTH` registers of columns at a time.
    #[inline(always)]
    fn multiply<S: Simd, C: Packing, const HEIGHT: usize, const WIDTH: usize>(self, simd: S) {
        let rows = self.rows.as_chunks::<HEIGHT>().0;
        let panel_words = rows.len() / (C::NUMBER_WORDS * C::PER_WORD) * C::GROUP_WORDS * PANEL;
        for (index, panel) in self.panels.chunks_exact(panel_words).enumerate() {
            for part in 0..PANEL / (WIDTH * S::F32_LANES) {
                let first = index * PANEL + part * WIDTH * S::F32_LANES;
                if first >= self.stride {
                    break;
                }
                let sums = sums::<S, C, HEIGHT, WIDTH>(simd, rows, S::as_simd_u32s(panel).0, part);
                let last = (first + WIDTH * S::F32_LANES).min(self.stride);
                for (out, sums) in self.out.chunks_exact_mut(self.stride).zip(sums) {
                    store(simd, &sums, &mut out[first..last]);
                }
            }
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
        if part == 0 {
            fetch_ahead::<S>(group);
        }
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

/// Prefetches the words one page after these. The CPU's own prefetcher stops at the end of a page of 4 KiB, and waiting
/// there would take twice as long as computing.
#[inline(always)]
#[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "no safe interface has the instruction"))]
fn fetch_ahead<S: Simd>(words: &[S::u32s]) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of_val(words)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let ahead = words.as_ptr().cast::<i8>().wrapping_add(4096 + line);
        // SAFETY: prefetching has no effect but on time, at any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = words;
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
