//! The product of rows with a quantised [`Matrix`](super::matrix::Matrix), where the rows are quantised too, with a
//! scale for each 32 numbers: to 8 bits, or to 15 bits in two parts of 8. For CPUs with AVX512-VNNI, which multiply and
//! add four pairs of bytes in each lane at once. Products of a group are added exactly, in 32-bit integers; the sums of
//! groups are added in f32.
//!
//! The groups of the depth are added in order, so a result is the same for one row and for a thousand.

use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T0, _mm_extract_epi32, _mm_prefetch, _mm_set_epi64x, _mm_shuffle_epi8,
    _mm512_abs_ps, _mm512_add_epi32, _mm512_and_si512, _mm512_castsi512_ps, _mm512_cvtepi32_ps,
    _mm512_cvtps_epi32, _mm512_cvtsepi32_epi8, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_fpclass_ps_mask,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_max_ps, _mm512_mul_ps, _mm512_reduce_add_epi32,
    _mm512_reduce_max_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_slli_epi32, _mm512_srai_epi32, _mm512_srli_epi32, _mm512_storeu_ps, _mm512_sub_epi32,
};

use pulp::bytemuck;

use super::number_format::{NumberFormat, PANEL};
use super::quantised_rows::{GROUP, MAX_WORDS, QuantisedGroup, QuantisedRows, Tile};
use crate::cpu::has_vnni;

/// Numbers in a register.
const LANES: usize = 16;
/// Registers across a panel.
const PANEL_REGISTERS: usize = PANEL / LANES;
/// Words of four numbers in a group.
const STEPS: usize = GROUP / 4;
/// The largest number in a part.
const MAX_PART: i32 = 127;
/// Bits by which the first of two parts is shifted left.
const SHIFT: u32 = 7;
/// The rows of the highest tile. A higher one would need more than 32 registers.
const MAX_HEIGHT: usize = 8;
/// The rows of the middle tile. The others have 1 and [`MAX_HEIGHT`] rows.
const MID_HEIGHT: usize = 4;

/// Rows in one or two parts of 8 bits.
#[derive(Default)]
pub struct ByteRows {
    rows: QuantisedRows,
    /// The numbers of a row, the format of the matrices that these rows can be multiplied with, and the parts of each
    /// number of the rows.
    packed_for: Option<(usize, NumberFormat, usize)>,
}

impl ByteRows {
    /// Quantises `rows` `[count, depth]` to one or two parts, for matrices of this format. `depth` must be a multiple
    /// of 32.
    #[expect(unsafe_code, reason = "functions that are compiled for some CPUs are unsafe to call on others")]
    pub fn pack(&mut self, rows: &[f32], depth: usize, format: NumberFormat, parts: usize) {
        assert!(has_vnni());
        self.packed_for = Some((depth, format, parts));
        // SAFETY: the CPU has the instructions, as asserted above.
        unsafe {
            match parts {
                1 => pack::<1>(&mut self.rows, rows, (depth, format)),
                _ => pack::<2>(&mut self.rows, rows, (depth, format)),
            }
        }
    }

    /// `out` `[count, stride]` ← these rows times some panels. Columns of the panels beyond the stride are dropped.
    #[expect(unsafe_code, reason = "functions that are compiled for some CPUs are unsafe to call on others")]
    pub fn multiply(&self, panels: &[u32], out: &mut [f32], stride: usize) {
        let Some((depth, format, parts)) = self.packed_for else { return };
        let panel_words = depth / format.group() * format.words() * PANEL;
        let panels = panels.chunks_exact(panel_words).zip((0..stride).step_by(PANEL));
        let rows = &self.rows;
        // SAFETY: the CPU has the instructions, because `pack` has asserted it.
        unsafe {
            match (format, parts) {
                (NumberFormat::Bits4, 1) => multiply::<true, 4, 1>(rows, panels, out, stride),
                (NumberFormat::Bits4, _) => multiply::<true, 4, 2>(rows, panels, out, stride),
                (NumberFormat::Bits8By16, 1) => multiply::<false, 4, 1>(rows, panels, out, stride),
                (NumberFormat::Bits8By16, _) => multiply::<false, 4, 2>(rows, panels, out, stride),
                (_, 1) => multiply::<false, 8, 1>(rows, panels, out, stride),
                _ => multiply::<false, 8, 2>(rows, panels, out, stride),
            }
        }
    }
}

/// The height of the next tile if this many rows are left.
fn tile_height(left: usize) -> usize {
    match left {
        1 => 1,
        2..=MID_HEIGHT => MID_HEIGHT,
        _ => MAX_HEIGHT,
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn pack<const PARTS: usize>(
    packed: &mut QuantisedRows,
    rows: &[f32],
    (depth, format): (usize, NumberFormat),
) {
    let is_bits4 = format == NumberFormat::Bits4;
    packed.fill(rows, (depth, format, STEPS * PARTS), tile_height, |group| {
        quantise_group::<PARTS>(group, is_bits4)
    });
}

/// Rounds a group. Each word has four numbers, in the order of the matrix's numbers that they are multiplied with; the
/// parts of four numbers follow each other. For a matrix of 4 bits, which has eight numbers in a word, the even ones of
/// each eight come first.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
fn quantise_group<const PARTS: usize>(numbers: &[f32; GROUP], is_bits4: bool) -> QuantisedGroup {
    /// A shuffle: of each 8 bytes the even ones, then the odd ones.
    const EVEN_FIRST: [i64; 2] = [0x0705_0301_0604_0200, 0x0f0d_0b09_0e0c_0a08];
    /// The classes of numbers that are not finite: both infinities, quiet and signalling NaN.
    const NOT_FINITE: i32 = 0x99;
    /// Groups whose largest magnitude is not above this become 0, because dividing by a smaller one could overflow.
    const MIN_LARGEST: f32 = 1e-30;
    let ([a, b], _) = numbers.as_chunks::<LANES>() else { unreachable!() };
    let (a, b) = (load_f32(a), load_f32(b));
    let is_finite = _mm512_fpclass_ps_mask::<NOT_FINITE>(a) | _mm512_fpclass_ps_mask::<NOT_FINITE>(b) == 0;
    let max = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    let largest = if PARTS == 2 { MAX_PART << SHIFT } else { MAX_PART } as f32;
    let factor = _mm512_set1_ps(if max > MIN_LARGEST { largest / max } else { 0.0 });
    // Rounded to the nearest, ties to even.
    let whole = [_mm512_cvtps_epi32(_mm512_mul_ps(a, factor)), _mm512_cvtps_epi32(_mm512_mul_ps(b, factor))];
    let totals = whole.map(|half| _mm512_reduce_add_epi32(half));
    let even_first = _mm_set_epi64x(EVEN_FIRST[1], EVEN_FIRST[0]);
    let mut words = [0; MAX_WORDS];
    for (words, half) in words.chunks_exact_mut(4 * PARTS).zip(whole) {
        let mut pieces = [half; PARTS];
        if let [first, second] = &mut pieces[..] {
            // The first part is rounded, so that the remainder fits into 7 bits with its sign.
            let raised = _mm512_add_epi32(half, _mm512_set1_epi32(1 << (SHIFT - 1)));
            *first = _mm512_srai_epi32::<SHIFT>(raised);
            *second = _mm512_sub_epi32(half, _mm512_slli_epi32::<SHIFT>(*first));
        }
        for (part, q) in pieces.into_iter().enumerate() {
            let bytes = _mm512_cvtsepi32_epi8(q);
            let bytes = if is_bits4 { _mm_shuffle_epi8(bytes, even_first) } else { bytes };
            words[part] = _mm_extract_epi32::<0>(bytes);
            words[PARTS + part] = _mm_extract_epi32::<1>(bytes);
            words[2 * PARTS + part] = _mm_extract_epi32::<2>(bytes);
            words[3 * PARTS + part] = _mm_extract_epi32::<3>(bytes);
        }
    }
    QuantisedGroup { words, scale: if is_finite { max / largest } else { f32::NAN }, totals }
}

/// Multiplies all tiles by panels, each with its first column. A group of the matrix has `WORDS` words of numbers. A
/// number has 4 bits if `BITS4`, and 8 bits otherwise.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn multiply<'a, const BITS4: bool, const WORDS: usize, const PARTS: usize>(
    rows: &QuantisedRows,
    panels: impl Iterator<Item = (&'a [u32], usize)>,
    out: &mut [f32],
    stride: usize,
) {
    for (panel, column) in panels {
        let lines = panel.as_chunks::<LANES>().0;
        for tile in rows.tiles() {
            let out = &mut out[tile.first * stride..][..tile.rows * stride];
            match tile.height {
                1 => multiply_tile::<1, 4, BITS4, WORDS, PARTS>(lines, tile, out, stride, column),
                MID_HEIGHT => {
                    multiply_tile::<MID_HEIGHT, 2, BITS4, WORDS, PARTS>(lines, tile, out, stride, column);
                }
                _ => multiply_tile::<MAX_HEIGHT, 1, BITS4, WORDS, PARTS>(lines, tile, out, stride, column),
            }
        }
    }
}

/// Multiplies a tile of rows by a panel, `WIDTH` registers at a time. Writes the results to `out` `[rows, stride]` from
/// `column` on, and drops columns beyond the stride.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn multiply_tile<
    const HEIGHT: usize,
    const WIDTH: usize,
    const BITS4: bool,
    const WORDS: usize,
    const PARTS: usize,
>(
    panel: &[[u32; LANES]],
    tile: Tile<'_>,
    out: &mut [f32],
    stride: usize,
    column: usize,
) {
    for register in (0..PANEL_REGISTERS).step_by(WIDTH) {
        let first = column + register * LANES;
        if first >= stride {
            break;
        }
        let sums = sums::<HEIGHT, WIDTH, BITS4, WORDS, PARTS>(panel, tile, register);
        for (row, sums) in out.chunks_exact_mut(stride).zip(sums) {
            for (index, sum) in sums.into_iter().enumerate() {
                let start = first + index * LANES;
                let numbers = store(sum);
                let count = stride.saturating_sub(start).min(LANES);
                row[stride.min(start)..][..count].copy_from_slice(&numbers[..count]);
            }
        }
    }
}

/// The products of `HEIGHT` rows with `WIDTH` registers of columns, from this register of the panel on, over the
/// whole depth.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn sums<
    const HEIGHT: usize,
    const WIDTH: usize,
    const BITS4: bool,
    const WORDS: usize,
    const PARTS: usize,
>(
    panel: &[[u32; LANES]],
    tile: Tile<'_>,
    register: usize,
) -> [[__m512; WIDTH]; HEIGHT] {
    let low = _mm512_set1_epi32(0x0f0f_0f0f);
    let mut results = [[_mm512_setzero_ps(); WIDTH]; HEIGHT];
    let steps = if BITS4 { 2 * WORDS } else { WORDS };
    // Two groups of 16 numbers of the matrix share one scale of the rows.
    let groups_per_scale = STEPS / steps;
    let row_groups = tile.words.chunks_exact(steps * PARTS * HEIGHT);
    let groups = panel.chunks_exact((WORDS + 2) * PANEL_REGISTERS).zip(row_groups);
    let groups = groups.zip(tile.sums.as_chunks::<HEIGHT>().0).enumerate();
    for (index, ((group, numbers), row_sums)) in groups {
        if register == 0 {
            fetch_ahead(group);
        }
        let numbers = numbers.as_chunks::<HEIGHT>().0;
        let mut whole = [[[_mm512_setzero_si512(); WIDTH]; HEIGHT]; PARTS];
        for (word, lines) in group[2 * PANEL_REGISTERS..].chunks_exact(PANEL_REGISTERS).enumerate() {
            for column in 0..WIDTH {
                let words = load_words(&lines[register + column]);
                if BITS4 {
                    let even = _mm512_and_si512(words, low);
                    let odd = _mm512_and_si512(_mm512_srli_epi32::<4>(words), low);
                    for row in 0..HEIGHT {
                        for (piece, sums) in whole.iter_mut().enumerate() {
                            let step = 2 * word * PARTS + piece;
                            let (a, b) = (numbers[step][row], numbers[step + PARTS][row]);
                            let sum = &mut sums[row][column];
                            *sum = _mm512_dpbusd_epi32(*sum, even, _mm512_set1_epi32(a));
                            *sum = _mm512_dpbusd_epi32(*sum, odd, _mm512_set1_epi32(b));
                        }
                    }
                } else {
                    for row in 0..HEIGHT {
                        for (piece, sums) in whole.iter_mut().enumerate() {
                            let number = numbers[word * PARTS + piece][row];
                            let sum = &mut sums[row][column];
                            *sum = _mm512_dpbusd_epi32(*sum, words, _mm512_set1_epi32(number));
                        }
                    }
                }
            }
        }
        let row_scales = &tile.scales.as_chunks::<HEIGHT>().0[index / groups_per_scale];
        for column in 0..WIDTH {
            let scale = _mm512_castsi512_ps(load_words(&group[register + column]));
            let offset = _mm512_castsi512_ps(load_words(&group[PANEL_REGISTERS + register + column]));
            for row in 0..HEIGHT {
                let result = &mut results[row][column];
                let mut whole_sum = whole[0][row][column];
                if PARTS == 2 {
                    let second = whole[PARTS - 1][row][column];
                    whole_sum = _mm512_add_epi32(_mm512_slli_epi32::<SHIFT>(whole_sum), second);
                }
                let factor = _mm512_mul_ps(scale, _mm512_set1_ps(row_scales[row]));
                *result = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole_sum), factor, *result);
                *result = _mm512_fmadd_ps(offset, _mm512_set1_ps(row_sums[row]), *result);
            }
        }
    }
    results
}

#[target_feature(enable = "avx512f")]
#[inline]
#[expect(unsafe_code, reason = "no safe interface has the instruction")]
pub(super) fn load_words<T: bytemuck::Pod>(words: &[T; LANES]) -> __m512i {
    const { assert!(size_of::<T>() == size_of::<u32>()) };
    // SAFETY: the array has 64 bytes; the instruction takes any alignment.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
#[expect(unsafe_code, reason = "no safe interface has the instruction")]
fn load_f32(numbers: &[f32; LANES]) -> __m512 {
    // SAFETY: the array has 64 bytes; the instruction takes any alignment.
    unsafe { _mm512_loadu_ps(numbers.as_ptr()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
#[expect(unsafe_code, reason = "no safe interface has the instruction")]
pub(super) fn store(numbers: __m512) -> [f32; LANES] {
    let mut to = [0.0; LANES];
    // SAFETY: the array has 64 bytes; the instruction takes any alignment.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), numbers) }
    to
}

/// Prefetches the words one page after these. The CPU's own prefetcher stops at the end of a page of 4 KiB, and waiting
/// there would take twice as long as computing.
#[inline(always)]
#[expect(unsafe_code, reason = "no safe interface has the instruction")]
fn fetch_ahead(lines: &[[u32; LANES]]) {
    for line in lines {
        let ahead = line.as_ptr().cast::<i8>().wrapping_add(4096);
        // SAFETY: prefetching has no effect but on time, at any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead) };
    }
}
