//! The product of rows with a quantised [`Matrix`](super::matrix::Matrix), where the rows are rounded to whole numbers of
//! 16 bits, with a scale for each 32 numbers. For CPUs with AVX2, which multiply two pairs of 16-bit numbers in each lane
//! and add both products in 32 bits. An instruction computes twice as many products as one in f32, and the matrix's
//! numbers need no conversion to f32. No sum overflows: 32 products of numbers up to 255 and 32,767 are less than 2²⁸.
//! The sums of groups are added in f32.
//!
//! The groups of the depth are added in order, so a result is the same for one row and for a thousand.

use std::arch::asm;
use std::arch::x86_64::{
    __m256, __m256i, _CMP_NLT_UQ, _MM_HINT_T0, _mm_prefetch, _mm256_add_epi32, _mm256_and_ps,
    _mm256_and_si256, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtepi32_ps, _mm256_cvtps_epi32,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_max_ps,
    _mm256_movemask_ps, _mm256_mul_ps, _mm256_or_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_setzero_si256, _mm256_srli_epi16, _mm256_storeu_ps, _mm256_storeu_si256,
};

use super::number_format::{NumberFormat, PANEL};
use super::quantised_rows::{GROUP, MAX_WORDS, QuantisedGroup, QuantisedRows, Tile};
use crate::cpu::has_avx2;

/// Numbers in a register.
const LANES: usize = 8;
/// Registers across a panel.
const PANEL_REGISTERS: usize = PANEL / LANES;
/// Words of a group: pairs of numbers.
const PAIRS: usize = GROUP / 2;
/// The largest whole number.
const LARGEST: f32 = 32_767.0;
/// The rows of the highest tile, which is two registers wide. Its sums, the matrix's numbers, a row's pair and a product
/// take 14 of 16 registers.
const MAX_HEIGHT: usize = 4;
/// The registers across a tile of several rows.
const TILE_WIDTH: usize = 2;

/// Rows of whole numbers of 16 bits.
#[derive(Default)]
pub struct ShortRows {
    rows: QuantisedRows,
    /// The numbers of a row, and the format of the matrices that the rows can be multiplied with.
    packed_for: Option<(usize, NumberFormat)>,
}

impl ShortRows {
    /// Rounds `rows` `[count, depth]`, for matrices of this format. `depth` must be a multiple of 32.
    #[expect(unsafe_code, reason = "functions that are compiled for some CPUs are unsafe to call on others")]
    pub fn pack(&mut self, rows: &[f32], depth: usize, format: NumberFormat) {
        assert!(has_avx2());
        self.packed_for = Some((depth, format));
        // SAFETY: the CPU has the instructions, as asserted above.
        unsafe {
            match format {
                NumberFormat::Bits4 => pack::<8>(&mut self.rows, rows, (depth, format)),
                _ => pack::<4>(&mut self.rows, rows, (depth, format)),
            }
        }
    }

    /// `out` `[count, stride]` ← these rows times some panels. Columns of the panels beyond the stride are dropped.
    #[expect(unsafe_code, reason = "functions that are compiled for some CPUs are unsafe to call on others")]
    pub fn multiply(&self, panels: &[u32], out: &mut [f32], stride: usize) {
        let Some((depth, format)) = self.packed_for else { return };
        let panel_words = depth / format.group() * format.words() * PANEL;
        let panels = panels.chunks_exact(panel_words).zip((0..stride).step_by(PANEL));
        // SAFETY: the CPU has the instructions, because `pack` has asserted it.
        unsafe {
            match format {
                NumberFormat::Bits4 => multiply::<8, 4>(&self.rows, panels, out, stride),
                NumberFormat::Bits8By16 => multiply::<4, 4>(&self.rows, panels, out, stride),
                _ => multiply::<4, 8>(&self.rows, panels, out, stride),
            }
        }
    }
}

/// `PER_WORD` is the number of the matrix's numbers in a word.
#[target_feature(enable = "avx2,fma")]
fn pack<const PER_WORD: usize>(
    packed: &mut QuantisedRows,
    rows: &[f32],
    (depth, format): (usize, NumberFormat),
) {
    let height = |left| if left == 1 { 1 } else { MAX_HEIGHT };
    packed.fill(rows, (depth, format, PAIRS), height, |group| quantise_group::<PER_WORD>(group));
}

/// Rounds a group to the nearest whole numbers, ties to even. Of each `PER_WORD` numbers, a pair has one of the first
/// half and the number at the same place of the second half, because these are the pairs that masking and shifting the
/// matrix's words gives.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn quantise_group<const PER_WORD: usize>(numbers: &[f32; GROUP]) -> QuantisedGroup {
    /// Groups whose largest magnitude is not above this become 0, because dividing by a smaller one could overflow.
    const MIN_LARGEST: f32 = 1e-30;
    let numbers: [__m256; GROUP / LANES] =
        std::array::from_fn(|index| load_f32(&numbers.as_chunks::<LANES>().0[index]));
    let sign_cleared = _mm256_castsi256_ps(_mm256_set1_epi32(i32::MAX));
    let infinity = _mm256_set1_ps(f32::INFINITY);
    let (mut max, mut is_not_finite) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    for x in numbers {
        let magnitude = _mm256_and_ps(x, sign_cleared);
        is_not_finite = _mm256_or_ps(is_not_finite, _mm256_cmp_ps::<_CMP_NLT_UQ>(magnitude, infinity));
        max = _mm256_max_ps(max, magnitude);
    }
    if _mm256_movemask_ps(is_not_finite) != 0 {
        return QuantisedGroup { words: [0; MAX_WORDS], scale: f32::NAN, totals: [0; 2] };
    }
    let max = store_f32(max).into_iter().fold(0.0, f32::max);
    let factor = _mm256_set1_ps(if max > MIN_LARGEST { LARGEST / max } else { 0.0 });
    let whole = numbers.map(|x| store_words(_mm256_cvtps_epi32(_mm256_mul_ps(x, factor))));
    let whole: &[i32] = whole.as_flattened();
    let mut words = [0; MAX_WORDS];
    for (words, numbers) in words.chunks_exact_mut(PER_WORD / 2).zip(whole.chunks_exact(PER_WORD)) {
        let (first, second) = numbers.split_at(PER_WORD / 2);
        for (word, (a, b)) in words.iter_mut().zip(first.iter().zip(second)) {
            *word = a & 0xffff | b << 16;
        }
    }
    let (first, second) = whole.split_at(GROUP / 2);
    QuantisedGroup { words, scale: max / LARGEST, totals: [first.iter().sum(), second.iter().sum()] }
}

/// Multiplies all tiles by panels, each with its first column. A group of the matrix has `WORDS` words of `PER_WORD`
/// numbers. Some registers of a panel are multiplied by all tiles before the next ones, so that they stay in the nearest
/// cache.
#[target_feature(enable = "avx2,fma")]
fn multiply<'a, const PER_WORD: usize, const WORDS: usize>(
    rows: &QuantisedRows,
    panels: impl Iterator<Item = (&'a [u32], usize)>,
    out: &mut [f32],
    stride: usize,
) {
    for (panel, column) in panels {
        let lines = panel.as_chunks::<LANES>().0;
        for register in (0..PANEL_REGISTERS).step_by(TILE_WIDTH) {
            for tile in rows.tiles() {
                let to = To { out: &mut out[tile.first * stride..][..tile.rows * stride], stride, column };
                match tile.height {
                    // A row reads the panel once, from memory: all registers together.
                    1 if register == 0 => {
                        multiply_tile::<1, PANEL_REGISTERS, PER_WORD, WORDS>(lines, tile, to, 0);
                    }
                    1 => {}
                    _ => multiply_tile::<MAX_HEIGHT, TILE_WIDTH, PER_WORD, WORDS>(lines, tile, to, register),
                }
            }
        }
    }
}

/// Where the results of a tile go: `[rows, stride]`, from a panel's first column on.
struct To<'a> {
    out: &'a mut [f32],
    stride: usize,
    column: usize,
}

/// Multiplies a tile of rows by `WIDTH` registers of a panel, from this register on.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn multiply_tile<const HEIGHT: usize, const WIDTH: usize, const PER_WORD: usize, const WORDS: usize>(
    panel: &[[u32; LANES]],
    tile: Tile<'_>,
    To { out, stride, column }: To<'_>,
    register: usize,
) {
    let first = column + register * LANES;
    if first >= stride {
        return;
    }
    let sums = sums::<HEIGHT, WIDTH, PER_WORD, WORDS>(panel, tile, register);
    for (row, sums) in out.chunks_exact_mut(stride).zip(sums) {
        for (index, sum) in sums.into_iter().enumerate() {
            let start = first + index * LANES;
            let count = stride.saturating_sub(start).min(LANES);
            row[stride.min(start)..][..count].copy_from_slice(&store_f32(sum)[..count]);
        }
    }
}

/// The products of `HEIGHT` rows with `WIDTH` registers of columns, over the whole depth.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn sums<const HEIGHT: usize, const WIDTH: usize, const PER_WORD: usize, const WORDS: usize>(
    panel: &[[u32; LANES]],
    tile: Tile<'_>,
    register: usize,
) -> [[__m256; WIDTH]; HEIGHT] {
    let mut results = [[_mm256_setzero_ps(); WIDTH]; HEIGHT];
    // Two groups of 16 numbers of the matrix share one scale of the rows.
    let pairs = WORDS * PER_WORD / 2;
    let groups_per_scale = PAIRS / pairs;
    let groups =
        panel.chunks_exact((WORDS + 2) * PANEL_REGISTERS).zip(tile.words.chunks_exact(pairs * HEIGHT));
    let groups = groups.zip(tile.sums.as_chunks::<HEIGHT>().0).enumerate();
    for (index, ((group, row_pairs), row_sums)) in groups {
        if register == 0 {
            fetch_ahead(group);
        }
        let mut whole = [[_mm256_setzero_si256(); WIDTH]; HEIGHT];
        let lines = group[2 * PANEL_REGISTERS..].chunks_exact(PANEL_REGISTERS);
        let row_pairs = row_pairs.as_chunks::<HEIGHT>().0.chunks_exact(PER_WORD / 2);
        for (line, row_pairs) in lines.zip(row_pairs) {
            let mut words: [__m256i; WIDTH] = [_mm256_setzero_si256(); WIDTH];
            for (words, line) in words.iter_mut().zip(&line[register..]) {
                *words = load_words(line);
            }
            for row_pairs in row_pairs {
                let numbers = words.map(|words| _mm256_and_si256(words, low_bits::<PER_WORD>()));
                words = words.map(|words| next::<PER_WORD>(words));
                for (whole, pair) in whole.iter_mut().zip(row_pairs) {
                    let pair = _mm256_set1_epi32(*pair);
                    for (whole, numbers) in whole.iter_mut().zip(numbers) {
                        *whole = in_register(_mm256_add_epi32(*whole, _mm256_madd_epi16(numbers, pair)));
                    }
                }
            }
        }
        let row_scales = &tile.scales.as_chunks::<HEIGHT>().0[index / groups_per_scale];
        for column in 0..WIDTH {
            let scale = _mm256_castsi256_ps(load_words(&group[register + column]));
            let offset = _mm256_castsi256_ps(load_words(&group[PANEL_REGISTERS + register + column]));
            for row in 0..HEIGHT {
                let result = &mut results[row][column];
                let factor = _mm256_mul_ps(scale, _mm256_set1_ps(row_scales[row]));
                *result = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[row][column]), factor, *result);
                *result = _mm256_fmadd_ps(offset, _mm256_set1_ps(row_sums[row]), *result);
            }
        }
    }
    results
}

/// Returns a sum as it is. Otherwise the compiler would add the products of a group in another order, which needs more
/// registers than there are: it would write most numbers to the stack and read them again.
#[target_feature(enable = "avx2")]
#[inline]
#[expect(unsafe_code, reason = "only assembly, here an empty one, fixes the order of operations")]
pub(super) fn in_register(mut sum: __m256i) -> __m256i {
    // SAFETY: no instruction is executed.
    unsafe { asm!("/* {0} */", inout(ymm_reg) sum, options(nomem, nostack, preserves_flags)) }
    sum
}

/// A mask of the lowest number in each half of a word.
#[target_feature(enable = "avx2")]
#[inline]
fn low_bits<const PER_WORD: usize>() -> __m256i {
    _mm256_set1_epi32(if PER_WORD == 8 { 0x000f_000f } else { 0x00ff_00ff })
}

/// Shifts the halves of words, so that the next number of each is the lowest.
#[target_feature(enable = "avx2")]
#[inline]
fn next<const PER_WORD: usize>(words: __m256i) -> __m256i {
    if PER_WORD == 8 { _mm256_srli_epi16::<4>(words) } else { _mm256_srli_epi16::<8>(words) }
}

#[target_feature(enable = "avx2")]
#[inline]
#[expect(unsafe_code, reason = "no safe interface has the instruction")]
fn load_words(words: &[u32; LANES]) -> __m256i {
    // SAFETY: the array has 32 bytes; the instruction takes any alignment.
    unsafe { _mm256_loadu_si256(words.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
#[inline]
#[expect(unsafe_code, reason = "no safe interface has the instruction")]
pub(super) fn load_f32(numbers: &[f32; LANES]) -> __m256 {
    // SAFETY: the array has 32 bytes; the instruction takes any alignment.
    unsafe { _mm256_loadu_ps(numbers.as_ptr()) }
}

#[target_feature(enable = "avx2")]
#[inline]
#[expect(unsafe_code, reason = "no safe interface has the instruction")]
pub(super) fn store_f32(numbers: __m256) -> [f32; LANES] {
    let mut to = [0.0; LANES];
    // SAFETY: the array has 32 bytes; the instruction takes any alignment.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), numbers) }
    to
}

#[target_feature(enable = "avx2")]
#[inline]
#[expect(unsafe_code, reason = "no safe interface has the instruction")]
pub(super) fn store_words(words: __m256i) -> [i32; LANES] {
    let mut to = [0; LANES];
    // SAFETY: the array has 32 bytes; the instruction takes any alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), words) }
    to
}

/// Prefetches the words one page after these, for the reason given at `bytes::fetch_ahead`.
#[inline(always)]
#[expect(unsafe_code, reason = "no safe interface has the instruction")]
fn fetch_ahead(lines: &[[u32; LANES]]) {
    for line in lines.iter().step_by(2) {
        let ahead = line.as_ptr().cast::<i8>().wrapping_add(4096);
        // SAFETY: prefetching has no effect but on time, at any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead) };
    }
}
