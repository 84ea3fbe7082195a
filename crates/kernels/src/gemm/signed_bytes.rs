//! The right matrix of a product in signed whole numbers of 8 bits. The rows are rounded to unsigned whole numbers of 8
//! bits. For CPUs with AVX512-VNNI, AVX-VNNI or AVX2. Decides the layout of both matrices. Owns the packed one.
//!
//! VNNI adds four products of bytes to 32 bits at once. AVX2 multiplies bytes and adds two products in 16 bits; a sum that
//! is too large is cut off. Two such sums are then added in 16 bits, too, which wraps. So for AVX2, of the four numbers whose
//! products meet in 16 bits the positive ones add up to 148 at most ([`MAX_SUM`]), and so do the magnitudes of the negative
//! ones. The bytes of a row are from 0 to 220. So each sum, a partial one too, is between -220·148 and 220·148 = 32,560,
//! which is below 2¹⁵. With 220 and 148 rows and matrix are rounded about as coarsely; with 255 and 128 the matrix would be
//! rounded more coarsely.
//!
//! So that few numbers of the matrix lose bits to this bound, each 16 numbers of a column have a scale of their own: a whole
//! multiple of their group's, the factor. The instruction that adds the halves of a word multiplies each by a number anyway,
//! which is the factor. So only the loads of the factors are added.
//!
//! The groups of the depth are added in order, so a result is the same for one row and for a thousand.

use std::arch::asm;
use std::arch::x86_64::{
    __m256, __m256i, __m512, _mm256_add_epi16, _mm256_add_epi32, _mm256_castsi256_ps, _mm256_cvtepi32_ps,
    _mm256_cvtps_epi32, _mm256_fmadd_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16,
    _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps, _mm256_packs_epi32, _mm256_packus_epi16,
    _mm256_permutevar8x32_epi32, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setr_epi32, _mm256_setzero_ps,
    _mm256_setzero_si256, _mm256_sub_ps, _mm512_castsi512_ps, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32,
    _mm512_fmadd_ps, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_setzero_si512,
};
use std::cell::RefCell;

use super::bytes;
use super::shorts::{in_register, load_f32, store_f32, store_words};
use crate::cpu::{has_avx_vnni, has_avx2, has_vnni};

/// Numbers of f32, or words, in a register of 256 bits.
const LANES: usize = 8;
/// The columns of a line: as many words as a cache line has.
const LINE: usize = 16;
/// The registers of 256 bits in a line.
const HALVES: usize = LINE / LANES;
/// Numbers in a word.
const PER_WORD: usize = 4;
/// Numbers of a column whose products are added before they are converted to f32, if the depth allows it.
const LONG_GROUP: usize = 64;
/// As [`LONG_GROUP`], for other depths.
const SHORT_GROUP: usize = 32;
/// The words of a group of a column before its numbers: the scale, and the sum of the scaled numbers.
const HEADER: usize = 2;
/// AVX2 adds the products of two words of a column in 16 bits, at these places of the numbers.
const ADDED: [[usize; 4]; 2] = [[0, 1, 4, 5], [2, 3, 6, 7]];
/// The largest sum of the positive numbers at [`ADDED`] places, and of the magnitudes of the negative ones, for AVX2.
const MAX_SUM: u8 = 148;
/// The largest byte of a row, for AVX2.
const MAX_ROW_AVX2: u8 = 220;
const _: () = assert!(MAX_ROW_AVX2 as i32 * MAX_SUM as i32 <= i16::MAX as i32);
/// The words of a column that have a factor of their own, for AVX2.
const FACTOR_WORDS: usize = 4;
/// The largest factor of a block whose sums fit before rounding. The next factor leaves room for rounding, which adds 2 to a
/// sum of four numbers at most: with 65 instead of 64 a sum is at most 148·64/65 + 2. The sums of a group are below
/// 4·4·32,560·65, which is below 2²⁶.
const MAX_LEAST_FACTOR: u8 = 64;
const _: () = assert!(MAX_SUM / (MAX_LEAST_FACTOR + 1) >= 2);
/// A smaller scale would lose bits of its own, or be 0. It stands for a group of zeros, too.
const MIN_SCALE: f32 = 1e-30;
/// The largest magnitude of a number of the matrix.
const MAX_MAGNITUDE: f32 = 127.0;

/// The rows of a tile. Its sums, a word of each of its columns and a word of a row take 27 of 32 registers.
const HEIGHT_512: usize = 12;
/// As `HEIGHT_512`: these take 15 of 16 registers.
const HEIGHT_VNNI: usize = 6;
/// As `HEIGHT_512`: with the second words of columns and row and a product, these take 15 of 16 registers. Factors come
/// from memory.
const HEIGHT_AVX2: usize = 4;

/// The instructions that multiply bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteProducts {
    /// In registers of 512 bits.
    Avx512Vnni,
    /// In registers of 256 bits.
    AvxVnni,
    /// As `AvxVnni`, with sums in 16 bits.
    Avx2,
}

impl ByteProducts {
    /// Whether this CPU has the instructions.
    fn are_available(self) -> bool {
        match self {
            Self::Avx512Vnni => has_vnni() && has_avx2(),
            Self::AvxVnni => has_avx_vnni() && has_avx2(),
            Self::Avx2 => has_avx2(),
        }
    }

    /// The largest byte of a row.
    fn max_row(self) -> f32 {
        if self == Self::Avx2 { MAX_ROW_AVX2.into() } else { 255.0 }
    }

    /// The rows of a tile.
    fn height(self) -> usize {
        match self {
            Self::Avx512Vnni => HEIGHT_512,
            Self::AvxVnni => HEIGHT_VNNI,
            Self::Avx2 => HEIGHT_AVX2,
        }
    }

    /// The words of a group of a column, without the header.
    fn group_words(self, group: usize) -> usize {
        let words = group / PER_WORD;
        if self == Self::Avx2 { words + words / FACTOR_WORDS } else { words }
    }

    /// The lines across a tile and a panel.
    fn lines(self) -> usize {
        if self == Self::Avx512Vnni { 2 } else { 1 }
    }
}

/// Words of 16 columns.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([i32; LINE]);

/// A matrix `[depth, width]` in signed bytes, with a scale for each group of a column.
pub struct SignedBytes {
    depth: usize,
    width: usize,
    group: usize,
    products: ByteProducts,
    /// `[panels, groups, HEADER + words of a group, lines of a panel]`. There are zeros after the width. For AVX2, each
    /// [`FACTOR_WORDS`] words follow their factor, which is in both halves of a word.
    lines: Vec<Line>,
}

/// Rows in unsigned bytes, in tiles of some rows. A number is `offset + scale·byte`.
#[derive(Default)]
struct UnsignedRows {
    /// `[tiles, words of a row, rows of a tile]`.
    words: Vec<i32>,
    /// `[tiles, groups, rows of a tile]`.
    scales: Vec<f32>,
    /// As the scales.
    offsets: Vec<f32>,
}

thread_local! {
    /// Reused by the next product: new memory costs a page fault every 4 KiB.
    static ROWS: RefCell<UnsignedRows> = RefCell::default();
}

impl SignedBytes {
    /// Packs a matrix that is given by its columns, `[width, depth]`. The depth must be a multiple of 32. Panics if the
    /// CPU does not have the instructions.
    pub fn new(columns: &[f32], depth: usize, products: ByteProducts) -> Self {
        assert!(depth.is_multiple_of(SHORT_GROUP) && products.are_available());
        let (width, panel_lines) = (columns.len() / depth, products.lines());
        let group = if depth.is_multiple_of(LONG_GROUP) { LONG_GROUP } else { SHORT_GROUP };
        let column_words = depth / group * (HEADER + products.group_words(group));
        let panels = width.div_ceil(panel_lines * LINE);
        let mut lines = vec![Line([0; LINE]); panels * column_words * panel_lines];
        for (column, numbers) in columns.chunks_exact(depth).enumerate() {
            let (line, lane) = (column / LINE, column % LINE);
            let first = line / panel_lines * panel_lines * column_words + line % panel_lines;
            let to = lines[first..].iter_mut().step_by(panel_lines).map(|Line(words)| &mut words[lane]);
            let words = numbers.chunks_exact(group).flat_map(|numbers| packed_group(numbers, products));
            to.zip(words).for_each(|(to, word)| *to = word);
        }
        Self { depth, width, group, products, lines }
    }

    /// The number of rows.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// The number of columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// `out` `[count, width]` ← `rows` `[count, depth]` times this matrix, on this thread.
    #[expect(unsafe_code, reason = "functions that are compiled for some CPUs are unsafe to call on others")]
    pub fn multiply(&self, rows: &[f32], out: &mut [f32]) {
        let mut packed = ROWS.take();
        // SAFETY: `new` has asserted that the CPU has the instructions. They include AVX2 and FMA.
        unsafe {
            packed.pack(rows, self);
            match self.products {
                ByteProducts::Avx512Vnni => multiply_512(self, &packed, out),
                ByteProducts::AvxVnni => multiply_256::<HEIGHT_VNNI, true>(self, &packed, out),
                ByteProducts::Avx2 => multiply_256::<HEIGHT_AVX2, false>(self, &packed, out),
            }
        }
        ROWS.set(packed);
    }

    /// The parts of the product with some rows: a panel, a tile of rows, and where their results go. A panel comes with all
    /// tiles before the next one, so that it stays in the nearest cache.
    #[inline]
    fn parts<'a>(&'a self, rows: &'a UnsignedRows) -> impl Iterator<Item = (&'a [Line], Tile<'a>, To)> {
        let (height, panel_lines) = (self.products.height(), self.products.lines());
        let groups = self.depth / self.group;
        let (row_words, row_scales) = (self.depth / PER_WORD * height, groups * height);
        let panel_size = groups * (HEADER + self.products.group_words(self.group)) * panel_lines;
        self.lines.chunks_exact(panel_size).enumerate().flat_map(move |(panel, lines)| {
            let words = rows.words.chunks_exact(row_words);
            let scales = rows.scales.chunks_exact(row_scales).zip(rows.offsets.chunks_exact(row_scales));
            words.zip(scales).enumerate().map(move |(tile, (words, (scales, offsets)))| {
                let to = To { row: tile * height, column: panel * panel_lines * LINE };
                (lines, Tile { words, scales, offsets }, to)
            })
        })
    }
}

/// The words of a group of a column: its scale, the sum of its scaled numbers, and its numbers, for AVX2 with their factors.
fn packed_group(numbers: &[f32], products: ByteProducts) -> Vec<i32> {
    let needed_for_bytes = largest_magnitude(numbers) / MAX_MAGNITUDE;
    if products != ByteProducts::Avx2 {
        let scale = needed_for_bytes.max(MIN_SCALE);
        let bytes = rounded(numbers, scale);
        return [header(numbers, scale, total(&bytes)).to_vec(), to_words(&bytes)].concat();
    }
    let blocks = numbers.chunks_exact(FACTOR_WORDS * PER_WORD);
    let needed = |block: &[f32]| {
        let for_sums = sums_of_added(block).fold(0.0, f32::max) / f32::from(MAX_SUM);
        for_sums.max(largest_magnitude(block) / MAX_MAGNITUDE)
    };
    let largest = blocks.clone().map(needed).fold(0.0, f32::max);
    let scale = (largest / f32::from(MAX_LEAST_FACTOR)).max(MIN_SCALE);
    let (mut sum, mut words) = (0, Vec::new());
    for block in blocks {
        let least = ((needed(block) / scale).ceil() as u8).clamp(1, MAX_LEAST_FACTOR);
        let both = [least, least + 1].map(|factor| (factor, rounded(block, scale * f32::from(factor))));
        let fitting = both.into_iter().find(|(_, bytes)| fits(bytes));
        let (factor, bytes) = fitting.expect("the next factor leaves room for rounding");
        let factor = i32::from(factor);
        sum += factor * total(&bytes);
        words.push(factor << 16 | factor);
        words.extend(to_words(&bytes));
    }
    [header(numbers, scale, sum).to_vec(), words].concat()
}

/// Whether all sums of products with these numbers fit in 16 bits.
fn fits(bytes: &[i8]) -> bool {
    let bytes: Vec<f32> = bytes.iter().copied().map(f32::from).collect();
    sums_of_added(&bytes).all(|sum| sum <= f32::from(MAX_SUM))
}

/// The first words of a group: its scale, which is NaN if a number is not finite, and `sum` in this scale. `sum` is that of
/// the rounded numbers, each times its factor.
fn header(numbers: &[f32], scale: f32, sum: i32) -> [i32; HEADER] {
    let is_finite = numbers.iter().all(|number| number.is_finite());
    let scale = if is_finite { scale } else { f32::NAN };
    [scale, scale * sum as f32].map(|number| number.to_bits().cast_signed())
}

fn to_words(bytes: &[i8]) -> Vec<i32> {
    let words = bytes.as_chunks::<PER_WORD>().0.iter();
    words.map(|word| i32::from_le_bytes(word.map(i8::cast_unsigned))).collect()
}

fn total(bytes: &[i8]) -> i32 {
    bytes.iter().copied().map(i32::from).sum()
}

fn largest_magnitude(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |largest, number| number.abs().max(largest))
}

/// The numbers in units of `scale`, rounded. What is not finite becomes any byte.
fn rounded(numbers: &[f32], scale: f32) -> Vec<i8> {
    numbers.iter().map(|number| (number / scale).round_ties_even() as i8).collect()
}

/// The sums of the positive numbers whose products are added in 16 bits, and of the magnitudes of the negative ones.
fn sums_of_added(numbers: &[f32]) -> impl Iterator<Item = f32> {
    let sum = |numbers: &[f32; 2 * PER_WORD], places: [usize; 4], sign: f32| {
        places.into_iter().map(|place| (sign * numbers[place]).max(0.0)).sum::<f32>()
    };
    let sums =
        move |numbers| ADDED.into_iter().flat_map(move |at| [1.0, -1.0].map(|sign| sum(numbers, at, sign)));
    numbers.as_chunks().0.iter().flat_map(sums)
}

impl UnsignedRows {
    /// Rounds `rows`, for products with this matrix. Missing rows of the last tile are those of an earlier product: their
    /// results are dropped.
    #[target_feature(enable = "avx2,fma")]
    fn pack(&mut self, rows: &[f32], SignedBytes { depth, group, products, .. }: &SignedBytes) {
        let height = products.height();
        let (words, groups) = (depth / PER_WORD, depth / group);
        let tiles = (rows.len() / depth).div_ceil(height);
        self.words.resize(tiles * words * height, 0);
        self.scales.resize(tiles * groups * height, 0.0);
        self.offsets.resize(tiles * groups * height, 0.0);
        for (tile, rows) in rows.chunks(height * depth).enumerate() {
            for (index, row) in rows.chunks_exact(*depth).enumerate() {
                let words = self.words[tile * words * height..].chunks_exact_mut(group / PER_WORD * height);
                let first = tile * groups * height + index;
                let scales = self.scales[first..].iter_mut().step_by(height);
                let offsets = self.offsets[first..].iter_mut().step_by(height);
                for (((numbers, words), scale), offset) in
                    row.chunks_exact(*group).zip(words).zip(scales).zip(offsets)
                {
                    let range = Range::of(numbers, products.max_row());
                    (*scale, *offset) = (range.scale, range.low);
                    let packed =
                        numbers.as_chunks::<SHORT_GROUP>().0.iter().flat_map(|numbers| range.words(numbers));
                    for (to, word) in words.chunks_exact_mut(height).zip(packed) {
                        to[index] = word;
                    }
                }
            }
        }
    }
}

/// The range of a group of a row: bytes from 0 to the largest reach from its least to its largest number.
#[derive(Clone, Copy)]
struct Range {
    low: f32,
    /// NaN if a number is not finite.
    scale: f32,
}

impl Range {
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    fn of(numbers: &[f32], max_row: f32) -> Self {
        let infinity = _mm256_set1_ps(f32::INFINITY);
        let (mut low, mut high) = (infinity, _mm256_set1_ps(f32::NEG_INFINITY));
        // 0 times a number that is not finite is NaN.
        let mut zero = _mm256_setzero_ps();
        for numbers in numbers.as_chunks::<LANES>().0 {
            let numbers = load_f32(numbers);
            (low, high) = (_mm256_min_ps(low, numbers), _mm256_max_ps(high, numbers));
            zero = _mm256_fmadd_ps(numbers, _mm256_setzero_ps(), zero);
        }
        let low = store_f32(low).into_iter().fold(f32::INFINITY, f32::min);
        let high = store_f32(high).into_iter().fold(f32::NEG_INFINITY, f32::max);
        Self { low, scale: (high - low) / max_row + store_f32(zero).into_iter().sum::<f32>() }
    }

    /// The numbers in bytes, rounded to the nearest, ties to even.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    fn words(self, numbers: &[f32; SHORT_GROUP]) -> [i32; LANES] {
        let factor = _mm256_set1_ps(if self.scale > 0.0 { 1.0 / self.scale } else { 0.0 });
        let low = _mm256_set1_ps(self.low);
        let whole = |index: usize| {
            let numbers = load_f32(&numbers.as_chunks::<LANES>().0[index]);
            _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_sub_ps(numbers, low), factor))
        };
        // Both instructions cut off what is too large, and work on each half of a register by itself.
        let [first, second] = [0, 2].map(|index| _mm256_packs_epi32(whole(index), whole(index + 1)));
        let bytes = _mm256_packus_epi16(first, second);
        let in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        store_words(_mm256_permutevar8x32_epi32(bytes, in_order))
    }
}

/// Some rows.
#[derive(Clone, Copy)]
struct Tile<'a> {
    /// `[words of a row, rows of the tile]`.
    words: &'a [i32],
    /// `[groups, rows of the tile]`.
    scales: &'a [f32],
    /// As the scales.
    offsets: &'a [f32],
}

/// Where the results of a tile go.
#[derive(Clone, Copy)]
struct To {
    row: usize,
    column: usize,
}

impl To {
    /// Writes a tile's sums to `out` `[count, width]`. What is beyond the last row or column is dropped.
    #[inline]
    fn write<const LANES: usize, const N: usize>(
        self,
        sums: &[[[f32; LANES]; 2]; N],
        out: &mut [f32],
        width: usize,
    ) {
        let count = (2 * LANES).min(width - self.column);
        for (out, sums) in out[self.row * width..].chunks_exact_mut(width).zip(sums) {
            out[self.column..][..count].copy_from_slice(&sums.as_flattened()[..count]);
        }
    }
}

/// The product in registers of 512 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn multiply_512(matrix: &SignedBytes, rows: &UnsignedRows, out: &mut [f32]) {
    for (panel, tile, to) in matrix.parts(rows) {
        let sums = if matrix.group == LONG_GROUP {
            sums_512::<{ LONG_GROUP / PER_WORD }>(panel, tile)
        } else {
            sums_512::<{ SHORT_GROUP / PER_WORD }>(panel, tile)
        };
        to.write(&sums.map(|[first, second]| [bytes::store(first), bytes::store(second)]), out, matrix.width);
    }
}

/// The products of a tile of rows with a panel of two lines. A group of the panel has `WORDS` words of numbers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
fn sums_512<const WORDS: usize>(panel: &[Line], tile: Tile<'_>) -> [[__m512; 2]; HEIGHT_512] {
    let mut results = [[_mm512_setzero_ps(); 2]; HEIGHT_512];
    let groups = panel.as_chunks::<2>().0.chunks_exact(HEADER + WORDS);
    let groups = groups.zip(tile.words.as_chunks::<HEIGHT_512>().0.chunks_exact(WORDS));
    let scales = tile.scales.as_chunks::<HEIGHT_512>().0.iter().zip(tile.offsets.as_chunks::<HEIGHT_512>().0);
    for ((lines, words), (scales, offsets)) in groups.zip(scales) {
        let (header, columns) = lines.split_at(HEADER);
        let mut whole = [[_mm512_setzero_si512(); 2]; HEIGHT_512];
        for (columns, words) in columns.iter().zip(words) {
            let columns = [bytes::load_words(&columns[0].0), bytes::load_words(&columns[1].0)];
            for (whole, word) in whole.iter_mut().zip(words) {
                let row = _mm512_set1_epi32(*word);
                for (whole, column) in whole.iter_mut().zip(columns) {
                    *whole = _mm512_dpbusd_epi32(*whole, row, column);
                }
            }
        }
        for line in 0..2 {
            let [scale, sum] =
                [0, 1].map(|index| _mm512_castsi512_ps(bytes::load_words(&header[index][line].0)));
            for row in 0..HEIGHT_512 {
                let result = &mut results[row][line];
                let factor = _mm512_mul_ps(scale, _mm512_set1_ps(scales[row]));
                *result = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[row][line]), factor, *result);
                *result = _mm512_fmadd_ps(sum, _mm512_set1_ps(offsets[row]), *result);
            }
        }
    }
    results
}

/// The product in registers of 256 bits, for tiles of `HEIGHT` rows.
#[target_feature(enable = "avx2,fma")]
fn multiply_256<const HEIGHT: usize, const VNNI: bool>(
    matrix: &SignedBytes,
    rows: &UnsignedRows,
    out: &mut [f32],
) {
    for (panel, tile, to) in matrix.parts(rows) {
        let sums = if matrix.group == LONG_GROUP {
            sums_256::<HEIGHT, VNNI, { LONG_GROUP / PER_WORD }>(panel, tile)
        } else {
            sums_256::<HEIGHT, VNNI, { SHORT_GROUP / PER_WORD }>(panel, tile)
        };
        to.write(&sums.map(|[first, second]| [store_f32(first), store_f32(second)]), out, matrix.width);
    }
}

/// The products of a tile of rows with a panel of one line. A group of a row has `WORDS` words. With `VNNI`, the CPU must have
/// AVX-VNNI.
#[target_feature(enable = "avx2,fma")]
#[inline]
#[expect(unsafe_code, reason = "an instruction that not all CPUs with AVX2 have")]
fn sums_256<const HEIGHT: usize, const VNNI: bool, const WORDS: usize>(
    panel: &[Line],
    tile: Tile<'_>,
) -> [[__m256; HALVES]; HEIGHT] {
    let mut results = [[_mm256_setzero_ps(); HALVES]; HEIGHT];
    let factors = if VNNI { 0 } else { 1 };
    let groups = panel.chunks_exact(HEADER + WORDS + WORDS / FACTOR_WORDS * factors);
    let groups = groups.zip(tile.words.as_chunks::<HEIGHT>().0.chunks_exact(WORDS));
    let scales = tile.scales.as_chunks::<HEIGHT>().0.iter().zip(tile.offsets.as_chunks::<HEIGHT>().0);
    for ((lines, words), (scales, offsets)) in groups.zip(scales) {
        let (header, blocks) = lines.split_at(HEADER);
        let mut whole = [[_mm256_setzero_si256(); HALVES]; HEIGHT];
        for (block, words) in
            blocks.chunks_exact(factors + FACTOR_WORDS).zip(words.as_chunks::<FACTOR_WORDS>().0)
        {
            // Not used with VNNI.
            let factor = halves(&block[0]);
            for ([first_column, second_column], [first, second]) in
                block[factors..].as_chunks::<2>().0.iter().zip(words.as_chunks::<2>().0)
            {
                let (first_column, second_column) = (halves(first_column), halves(second_column));
                for (row, whole) in whole.iter_mut().enumerate() {
                    let rows = [first[row], second[row]].map(|word| _mm256_set1_epi32(word));
                    for (half, whole) in whole.iter_mut().enumerate() {
                        let columns = [first_column[half], second_column[half]];
                        *whole = if VNNI {
                            // SAFETY: the CPU has AVX-VNNI: only matrices of `ByteProducts::AvxVnni` get here, and
                            // `SignedBytes::new` has asserted it.
                            unsafe { with_dot(with_dot(*whole, rows[0], columns[0]), rows[1], columns[1]) }
                        } else {
                            with_products(*whole, rows, columns, factor[half])
                        };
                    }
                }
            }
        }
        let [scale, sum] = [0, 1].map(|index| halves(&header[index]).map(|half| _mm256_castsi256_ps(half)));
        for half in 0..HALVES {
            for row in 0..HEIGHT {
                let result = &mut results[row][half];
                let factor = _mm256_mul_ps(scale[half], _mm256_set1_ps(scales[row]));
                *result = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[row][half]), factor, *result);
                *result = _mm256_fmadd_ps(sum[half], _mm256_set1_ps(offsets[row]), *result);
            }
        }
    }
    results
}

/// `sum` plus `factor` times the products of two words of a row and of columns.
#[target_feature(enable = "avx2")]
#[inline]
fn with_products(sum: __m256i, rows: [__m256i; 2], columns: [__m256i; 2], factor: __m256i) -> __m256i {
    let [first, second] = [0, 1].map(|index| _mm256_maddubs_epi16(rows[index], columns[index]));
    let in_halves = _mm256_add_epi16(first, second);
    in_register(_mm256_add_epi32(sum, _mm256_madd_epi16(in_halves, factor)))
}

/// `sum` plus the products of the four bytes of `row` and of `columns` in each lane.
///
/// # Safety
/// The CPU has AVX-VNNI.
#[target_feature(enable = "avx2")]
#[inline]
#[expect(unsafe_code, reason = "the function for the instruction is not inlined where only AVX2 is enabled")]
unsafe fn with_dot(mut sum: __m256i, row: __m256i, columns: __m256i) -> __m256i {
    // SAFETY: the caller has made sure of the instruction.
    unsafe {
        asm!(
            "{{vex}} vpdpbusd {sum}, {row}, {columns}",
            sum = inout(ymm_reg) sum,
            row = in(ymm_reg) row,
            columns = in(ymm_reg) columns,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

#[target_feature(enable = "avx2")]
#[inline]
#[expect(unsafe_code, reason = "no safe interface has the instruction")]
fn halves(Line(words): &Line) -> [__m256i; HALVES] {
    // SAFETY: each half of the array has 32 bytes; the instruction takes any alignment.
    [0, LANES].map(|first| unsafe { _mm256_loadu_si256(words[first..].as_ptr().cast()) })
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::noise;
    use super::*;

    /// The instructions that this CPU has.
    fn available() -> impl Iterator<Item = ByteProducts> {
        let all = [ByteProducts::Avx512Vnni, ByteProducts::AvxVnni, ByteProducts::Avx2];
        all.into_iter().filter(|products| products.are_available())
    }

    /// The matrix's numbers after rounding, `[width, depth]`.
    fn kept(matrix: &SignedBytes) -> Vec<f64> {
        let SignedBytes { depth, width, group, products, lines } = matrix;
        let (group_words, panel_lines) = (HEADER + products.group_words(*group), products.lines());
        let word = |column: usize, word: usize| {
            let (line, column_words) = (column / LINE, depth / group * group_words);
            let first = line / panel_lines * panel_lines * column_words + line % panel_lines;
            lines[first + word * panel_lines].0[column % LINE]
        };
        let number = |column: usize, k: usize| {
            let first = k / group * group_words;
            let scale = f32::from_bits(word(column, first).cast_unsigned());
            let at = k % group / PER_WORD;
            let (at, factor) = if *products == ByteProducts::Avx2 {
                let block = first + HEADER + at / FACTOR_WORDS * (1 + FACTOR_WORDS);
                (block + 1 + at % FACTOR_WORDS, word(column, block) >> 16)
            } else {
                (first + HEADER + at, 1)
            };
            let bytes = word(column, at).to_le_bytes();
            f64::from(scale) * f64::from(factor) * f64::from(bytes[k % PER_WORD].cast_signed())
        };
        (0..width * depth).map(|at| number(at / depth, at % depth)).collect()
    }

    /// A row's numbers after rounding.
    fn rounded_row(row: &[f32], SignedBytes { group, products, .. }: &SignedBytes) -> Vec<f64> {
        let rounded_group = |numbers: &[f32]| {
            let low = numbers.iter().copied().fold(f32::INFINITY, f32::min);
            let high = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let scale = f64::from(high - low) / f64::from(products.max_row());
            let byte = |number: &f32| ((f64::from(*number) - f64::from(low)) / scale).round();
            numbers.iter().map(|number| f64::from(low) + scale * byte(number)).collect::<Vec<_>>()
        };
        row.chunks(*group).flat_map(rounded_group).collect()
    }

    #[test]
    fn it_is_the_product_of_the_rounded_numbers_for_any_shape() {
        for products in available() {
            for (rows, depth, width) in [(1, 32, 1), (3, 64, 15), (4, 96, 16), (5, 128, 17), (31, 384, 70)] {
                let (x, columns) = (noise(&[rows, depth], 1.0, 1), noise(&[width, depth], 1.0, 2));
                let matrix = SignedBytes::new(&columns, depth, products);
                assert_eq!((matrix.depth(), matrix.width()), (depth, width));
                let kept = kept(&matrix);
                let mut out = vec![f32::NAN; rows * width];
                matrix.multiply(&x, &mut out);
                for (row, out) in x.chunks(depth).zip(out.chunks(width)) {
                    let row = rounded_row(row, &matrix);
                    for (column, ours) in kept.chunks(depth).zip(out) {
                        let expected: f64 = row.iter().zip(column).map(|(a, b)| a * b).sum();
                        // A number that is half-way between two bytes may be rounded to either.
                        let error = (f64::from(*ours) - expected).abs();
                        assert!(error < 2e-2, "{rows}×{depth}×{width}, {products:?}: {ours} for {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn rounding_changes_the_matrix_little() {
        for products in available() {
            let bound = if products == ByteProducts::Avx2 { 0.010 } else { 0.006 };
            let (depth, width) = (384, 64);
            let columns = noise(&[width, depth], 1.0, 2);
            let kept = kept(&SignedBytes::new(&columns, depth, products));
            let squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>().sqrt();
            let error = squares(&mut kept.iter().zip(&columns).map(|(a, b)| a - f64::from(*b)));
            let ratio = error / squares(&mut columns.iter().map(|x| f64::from(*x)));
            assert!(ratio < bound, "{products:?}: {ratio}");
        }
    }

    /// Matrices whose sums are the largest for their scales: numbers that are alike, one large one, powers of noise.
    #[test]
    fn no_sum_is_cut_off_whatever_the_numbers() {
        let alike =
            |sign: fn(usize) -> bool| (0..128).map(move |k| if sign(k) { 1.0 } else { -1.0 }).collect();
        let added_places_alone = |places: [usize; 4]| {
            (0..128).map(move |k| if places.contains(&(k % 8)) { 0.7 } else { 0.001 }).collect()
        };
        let one_large = (0..128).map(|k| if k % 8 == 0 { 1.0 } else { 0.004 }).collect();
        let mut matrices: Vec<Vec<f32>> =
            vec![alike(|_| true), alike(|_| false), alike(|k| k % 2 == 0), alike(|k| k % 4 < 2), one_large];
        matrices.extend(ADDED.map(added_places_alone));
        matrices.extend((0..200).map(|seed| {
            // Powers make a few magnitudes large, and most of them small.
            noise(&[128], 1.0, seed).iter().map(|x| x.powi(1 + seed as i32 % 7)).collect()
        }));
        // The bytes of a row are the largest where the column is positive, or where it is negative, and 0 elsewhere.
        for columns in matrices {
            for group in columns.chunks(LONG_GROUP) {
                let packed = packed_group(group, ByteProducts::Avx2);
                for block in packed[HEADER..].chunks(1 + FACTOR_WORDS) {
                    assert!(
                        block[0] >> 16 <= i32::from(MAX_LEAST_FACTOR) + 1
                            && block[0] & 0xffff == block[0] >> 16
                    );
                    let bytes = block[1..].iter().flat_map(|word| word.to_le_bytes());
                    let bytes: Vec<i32> = bytes.map(|byte| byte.cast_signed().into()).collect();
                    // The halves of two words meet: the bytes 0, 1, 4 and 5, and the bytes 2, 3, 6 and 7.
                    for words in bytes.chunks(8) {
                        for half in [[0, 1, 4, 5], [2, 3, 6, 7]] {
                            let sum =
                                |sign: i32| half.map(|at| (sign * words[at]).max(0)).iter().sum::<i32>();
                            let largest = sum(1).max(sum(-1)) * i32::from(MAX_ROW_AVX2);
                            assert!(largest <= i16::MAX.into(), "{group:?}");
                        }
                    }
                }
            }
            for products in available() {
                let matrix = SignedBytes::new(&columns, 128, products);
                let kept = kept(&matrix);
                for negative in [false, true] {
                    let mut row: Vec<f32> =
                        columns.iter().map(|x| if (*x < 0.0) == negative { 1.0 } else { 0.0 }).collect();
                    for numbers in row.chunks_mut(matrix.group) {
                        // Both ends of the range exist, so that the bytes are 0 and the largest.
                        (numbers[0], numbers[1]) = (0.0, 1.0);
                    }
                    let expected: f64 = row.iter().zip(&kept).map(|(a, b)| f64::from(*a) * b).sum();
                    let mut out = [f32::NAN];
                    matrix.multiply(&row, &mut out);
                    let size: f64 = kept.iter().map(|x| x.abs()).sum();
                    assert!((f64::from(out[0]) - expected).abs() < 1e-5 * size, "{out:?} for {expected}");
                }
            }
        }
    }

    #[test]
    fn a_row_gives_the_same_numbers_in_any_batch() {
        let (depth, width) = (192, 40);
        for products in available() {
            let matrix = SignedBytes::new(&noise(&[width, depth], 1.0, 2), depth, products);
            let rows = noise(&[23, depth], 1.0, 3);
            let mut together = vec![0.0; 23 * width];
            matrix.multiply(&rows, &mut together);
            for (row, expected) in rows.chunks(depth).zip(together.chunks(width)) {
                let mut alone = vec![0.0; width];
                matrix.multiply(row, &mut alone);
                assert_eq!(alone, expected);
            }
        }
    }

    #[test]
    fn a_number_that_is_not_finite_makes_its_results_nan_and_zeros_are_exact() {
        let depth = 64;
        for products in available() {
            let mut out = [0.5; 2];
            SignedBytes::new(&vec![0.0; 2 * depth], depth, products).multiply(&vec![3.0; depth], &mut out);
            assert_eq!(out, [0.0; 2]);
            let mut constant = [0.0];
            SignedBytes::new(&vec![1.0; depth], depth, products).multiply(&vec![-3.0; depth], &mut constant);
            assert!((constant[0] + 192.0).abs() < 1e-4, "{constant:?}");
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut row = vec![1.0; 2 * depth];
                row[3] = bad;
                SignedBytes::new(&vec![1.0; depth], depth, products).multiply(&row, &mut out);
                assert!(out[0].is_nan() && out[1] == 64.0, "{bad} in a row: {out:?}");
                SignedBytes::new(&row, depth, products).multiply(&vec![1.0; depth], &mut out);
                assert!(out[0].is_nan() && out[1] == 64.0, "{bad} in the matrix: {out:?}");
            }
        }
    }
}
