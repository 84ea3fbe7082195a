//! The right matrix of a product in the number format of its file: f32, bf16, or quantised numbers of 4 or 8 bits with
//! a scale and an offset for each group. Owns the packed numbers, which can be a part of a mapped file.
//!
//! A result is summed in the order of the depth. The terms of the sum are products in f32 or, if the rows are quantised
//! too (see `bytes`), the sums of groups. So a result is the same for one row and for a thousand, and for any number of
//! threads that share the work.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use memmap2::Mmap;
use pulp::bytemuck;
use rayon::prelude::*;

use super::super::dispatch;
use super::super::kv::bf16_bits;
use super::converted_rows::ConvertedRows;
use super::gemv::{FewRows, MAX_TILE_ROWS, Unpack, multiply_few_rows};
use super::in_parallel;
use super::layout::{Panels, Rows};
use super::number_format::{NumberFormat, PANEL, RowFormat};
use crate::cpu::may_use_amx;

/// A group of quantised numbers: each is `q·scale + offset`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// The step between two numbers.
    pub scale: f32,
    /// The number that q = 0 stands for.
    pub offset: f32,
    /// The values of q. A group of 16 numbers uses the first 16.
    pub q: [u8; 32],
}

/// The right matrix of a product, `[depth, width]`.
pub struct Matrix {
    format: NumberFormat,
    depth: usize,
    width: usize,
    words: PackedWords,
    rows: RowFormat,
}

/// The packed numbers: `[panels, groups of the depth, words of a group, PANEL]`, with ⌈width / PANEL⌉ panels. In a
/// group the scales come first, then the offsets, then the numbers.
#[derive(Clone)]
pub enum PackedWords {
    /// In memory of this process.
    Owned(Arc<[u32]>),
    /// A range of bytes of a mapped file, aligned to a word.
    Mapped(Arc<Mmap>, Range<usize>),
}

impl PackedWords {
    /// The words.
    pub fn get(&self) -> &[u32] {
        match self {
            Self::Owned(words) => words,
            Self::Mapped(file, range) => bytemuck::cast_slice(&file[range.clone()]),
        }
    }
}

thread_local! {
    /// Reused by the next product: new memory costs a page fault every 4 KiB.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default)]
struct Scratch {
    rows: Rows,
    panels: Panels,
    columns: Vec<f32>,
}

impl Matrix {
    /// Packs a matrix that is given by its columns, `[width, depth]`, in f32.
    pub fn of_f32(columns: &[f32], depth: usize) -> Self {
        Self::pack(NumberFormat::F32, [depth, columns.len() / depth], |column, k, _| {
            columns[column * depth + k].to_bits()
        })
    }

    /// Packs a matrix that is given by its columns, `[width, depth]`, in bf16, rounded to the nearest. `depth` must be
    /// even.
    pub fn of_bf16(columns: &[f32], depth: usize) -> Self {
        Self::pack(NumberFormat::Bf16, [depth, columns.len() / depth], |column, group, _| {
            let at = column * depth + 2 * group;
            bf16_bits(columns[at]) >> 16 | bf16_bits(columns[at + 1])
        })
    }

    /// Packs quantised numbers. `group` returns a group of a column; its arguments are the column and the group's
    /// index. It is called once for each group.
    pub fn of_groups(
        format: NumberFormat,
        [depth, width]: [usize; 2],
        group: &dyn Fn(usize, usize) -> Group,
    ) -> Self {
        let bits = if format == NumberFormat::Bits4 { 4 } else { 8 };
        let (groups, words) = (depth / format.group(), format.words());
        let count = width.div_ceil(PANEL) * groups * words * PANEL;
        let mut packed: Arc<[u32]> = (0..count).map(|_| 0).collect();
        let rows_of_groups = Arc::get_mut(&mut packed).expect("nobody else has it yet");
        for (at, rows) in rows_of_groups.chunks_exact_mut(words * PANEL).enumerate() {
            let (first, index) = (at / groups * PANEL, at % groups);
            for lane in 0..PANEL.min(width - first) {
                let Group { scale, offset, q } = group(first + lane, index);
                let packed_q = q.chunks_exact(32 / bits);
                let packed_q =
                    packed_q.map(|q| q.iter().rev().fold(0, |word, q| word << bits | u32::from(*q)));
                let of_group = [scale.to_bits(), offset.to_bits()].into_iter().chain(packed_q);
                rows.iter_mut().skip(lane).step_by(PANEL).zip(of_group).for_each(|(row, word)| *row = word);
            }
        }
        Self { format, depth, width, words: PackedWords::Owned(packed), rows: RowFormat::F32 }
    }

    /// Packs the words that `word` returns. Its arguments are the column, the group's index, and the word's index in
    /// the group.
    fn pack(
        format: NumberFormat,
        [depth, width]: [usize; 2],
        word: impl Fn(usize, usize, usize) -> u32,
    ) -> Self {
        let (groups, words) = (depth / format.group(), format.words());
        let count = width.div_ceil(PANEL) * groups * words * PANEL;
        let packed = (0..count).map(|at| {
            let (row, lane) = (at / PANEL, at % PANEL);
            let column = row / (groups * words) * PANEL + lane;
            if column < width { word(column, row / words % groups, row % words) } else { 0 }
        });
        Self { format, depth, width, words: PackedWords::Owned(packed.collect()), rows: RowFormat::F32 }
    }

    /// A matrix whose words were packed before. None if the number of words does not fit.
    pub fn of_words(format: NumberFormat, [depth, width]: [usize; 2], words: PackedWords) -> Option<Self> {
        let count = width.div_ceil(PANEL) * (depth / format.group()) * format.words() * PANEL;
        let fits = words.get().len() == count;
        fits.then_some(Self { format, depth, width, words, rows: RowFormat::F32 })
    }

    /// Sets the format to which rows are converted before they are multiplied. Whole numbers are for quantised matrices
    /// whose depth is a multiple of 32. Those of 8 bits require that the CPU [`may_use_vnni`](crate::may_use_vnni), those
    /// of 16 bits that it [`may_use_int16`](crate::may_use_int16). bf16 is for matrices in bf16, and requires that the CPU
    /// [`may_use_bf16`](crate::may_use_bf16); with AMX it is for quantised matrices too. A format that is not for this matrix has no effect.
    #[must_use]
    pub fn with_rows_as(mut self, rows: RowFormat) -> Self {
        let fits = match rows {
            RowFormat::F32 => true,
            RowFormat::Bf16 => match self.format {
                NumberFormat::Bf16 => true,
                format => format.is_scaled() && may_use_amx() && self.depth.is_multiple_of(2),
            },
            RowFormat::Int16 | RowFormat::Int8 => self.format.is_scaled() && self.depth.is_multiple_of(32),
        };
        if fits {
            self.rows = rows;
        }
        self
    }

    /// The packed words.
    pub fn words(&self) -> &[u32] {
        self.words.get()
    }

    /// The number format of the matrix.
    pub fn format(&self) -> NumberFormat {
        self.format
    }

    /// The length of a column.
    #[inline]
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// The number of columns.
    #[inline]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Writes a column's numbers to `out`, which is `depth` long. The columns of an embedding matrix are its tokens'
    /// vectors.
    pub fn column(&self, column: usize, out: &mut [f32]) {
        let (panel, lane) = (self.panels(column / PANEL..column / PANEL + 1), column % PANEL);
        let words = self.format.words();
        let (group, per_word) = (self.format.group(), self.format.per_word());
        for (index, out) in out.chunks_exact_mut(group).enumerate() {
            let word = |word: usize| panel[(index * words + word) * PANEL + lane];
            let first_number = if self.format.is_scaled() { 2 } else { 0 };
            let (scale, offset) = (f32::from_bits(word(0)), f32::from_bits(word(1.min(words - 1))));
            for (index, out) in out.iter_mut().enumerate() {
                let bits = word(first_number + index / per_word);
                *out = unpacked_number(self.format, bits, index % per_word, scale, offset);
            }
        }
    }

    /// `out` `[rows, width]` ← `rows` `[rows, depth]` times this matrix.
    pub fn multiply(&self, rows: &[f32], out: &mut [f32]) {
        multiply_together([self], rows, [out]);
    }

    /// Multiplies many rows. Each thread takes a share of them.
    fn multiply_many(&self, rows: &[f32], out: &mut [f32]) {
        let share = (rows.len() / self.depth).div_ceil(rayon::current_num_threads()).max(MANY_ROWS / 2);
        let blocks = rows.chunks(share * self.depth).zip(out.chunks_mut(share * self.width));
        in_parallel(blocks, |(rows, out)| self.multiply_single_threaded(rows, out));
    }

    /// As [`multiply`](Self::multiply), but on this thread alone.
    pub fn multiply_single_threaded(&self, rows: &[f32], out: &mut [f32]) {
        if self.rows == RowFormat::F32 && rows.len() > MANY_ROWS * self.depth {
            return self.multiply_unpacked(rows, out);
        }
        let left = LeftRows::new(self, rows);
        left.multiply(self, 0..self.width.div_ceil(PANEL), out, self.width);
    }

    /// The words of some panels.
    fn panels(&self, panels: Range<usize>) -> &[u32] {
        let words = self.words.get();
        let panel_words = self.depth / self.format.group() * self.format.words() * PANEL;
        &words[panels.start * panel_words..panels.end * panel_words]
    }

    /// Unpacks each panel to f32 once, and multiplies it with tiles of rows.
    fn multiply_unpacked(&self, rows: &[f32], out: &mut [f32]) {
        let mut scratch = SCRATCH.take();
        let Scratch { rows: packed, panels, columns, .. } = &mut scratch;
        packed.pack(rows, self.depth);
        for panel in 0..self.width.div_ceil(PANEL) {
            let first = panel * PANEL;
            let width = PANEL.min(self.width - first);
            dispatch(Unpack { format: self.format, panel: self.panels(panel..panel + 1), to: columns });
            panels.pack_rows(columns, PANEL);
            packed.multiply_columns(panels, out, self.width, first..first + width);
        }
        SCRATCH.set(scratch);
    }
}

/// `outs` `[rows, width]` ← `rows` `[rows, depth]` times each of the matrices, which all have the same depth. If there
/// are few rows, and the matrices have the same formats, the threads share the columns of all products.
pub fn multiply_together<const N: usize>(matrices: [&Matrix; N], rows: &[f32], mut outs: [&mut [f32]; N]) {
    // Only this generic function is compiled in the calling crate; the computation is compiled once, in this crate.
    multiply_each(&matrices, rows, &mut outs);
}

fn multiply_each(matrices: &[&Matrix], rows: &[f32], outs: &mut [&mut [f32]]) {
    let [first, ..] = matrices else { return };
    let count = rows.len() / first.depth;
    if count > MANY_ROWS {
        matrices.iter().zip(outs).for_each(|(matrix, out)| matrix.multiply_many(rows, out));
    } else if count > 0 {
        let has_same_formats = |matrix: &&Matrix| (matrix.rows, matrix.format) == (first.rows, first.format);
        if matrices.iter().all(has_same_formats) {
            multiply_few_together(matrices, rows, outs);
        } else {
            matrices
                .iter()
                .zip(outs)
                .for_each(|(matrix, out)| multiply_few_together(&[*matrix], rows, &mut [&mut **out]));
        }
    }
}

/// Multiplies few rows: each thread computes some of the columns, of one matrix or of several.
fn multiply_few_together(matrices: &[&Matrix], rows: &[f32], outs: &mut [&mut [f32]]) {
    let count = rows.len() / matrices[0].depth;
    let left = LeftRows::new(matrices[0], rows);
    let threads = rayon::current_num_threads();
    let words: usize = matrices.iter().map(|matrix| matrix.words.get().len()).sum();
    if threads == 1 || words * count < WORTH_SHARING {
        for (matrix, out) in matrices.iter().zip(outs) {
            left.multiply(matrix, 0..matrix.width.div_ceil(PANEL), out, matrix.width);
        }
        return;
    }
    // The index of a matrix, and of one of its panels.
    let all_panels: Vec<(usize, usize)> = matrices
        .iter()
        .enumerate()
        .flat_map(|(index, matrix)| (0..matrix.width.div_ceil(PANEL)).map(move |panel| (index, panel)))
        .collect();
    // The columns of one matrix's product that a thread has computed.
    struct Part {
        matrix: usize,
        columns: Range<usize>,
        numbers: Vec<f32>,
    }
    let parts: Vec<Vec<Part>> = all_panels
        .par_chunks(all_panels.len().div_ceil(threads))
        .map(|share| {
            let by_matrix = share.chunk_by(|(one, _), (other, _)| one == other);
            let compute = |panels: &[(usize, usize)]| {
                let ((index, first), last) = (panels[0], panels[panels.len() - 1].1);
                let matrix = matrices[index];
                let columns = first * PANEL..((last + 1) * PANEL).min(matrix.width);
                let mut numbers = vec![0.0; count * columns.len()];
                left.multiply(matrix, first..last + 1, &mut numbers, columns.len());
                Part { matrix: index, columns, numbers }
            };
            by_matrix.map(compute).collect()
        })
        .collect();
    for Part { matrix, columns, numbers } in parts.iter().flatten() {
        let out = outs[*matrix].chunks_exact_mut(matrices[*matrix].width);
        for (out, numbers) in out.zip(numbers.chunks_exact(columns.len())) {
            out[columns.clone()].copy_from_slice(numbers);
        }
    }
}

/// The left matrix of a product: rows in the format in which they are multiplied.
enum LeftRows<'a> {
    Plain(&'a [f32]),
    Converted(ConvertedRows),
}

impl<'a> LeftRows<'a> {
    fn new(matrix: &Matrix, rows: &'a [f32]) -> Self {
        let converted = ConvertedRows::new(rows, matrix.depth, matrix.rows, matrix.format);
        converted.map_or(Self::Plain(rows), Self::Converted)
    }

    /// Writes the product with some panels to `out` `[rows, stride]`.
    fn multiply(&self, matrix: &Matrix, panels: Range<usize>, out: &mut [f32], stride: usize) {
        let (format, depth, panels) = (matrix.format, matrix.depth, matrix.panels(panels));
        match self {
            Self::Plain(rows) => multiply_few_rows(FewRows { format, depth, rows, panels, out, stride }),
            Self::Converted(rows) => rows.multiply(format, panels, out, stride),
        }
    }
}

/// From this many words times rows on, several threads are faster than one: about 5 µs of work.
const WORTH_SHARING: usize = 1 << 15;
/// Above this number of rows, unpacking a panel costs less than reading its numbers once for each tile of rows.
const MANY_ROWS: usize = 2 * MAX_TILE_ROWS;

/// Unpacks the number at an index in a word.
fn unpacked_number(format: NumberFormat, word: u32, index: usize, scale: f32, offset: f32) -> f32 {
    let quantised = |bits: u32| {
        let q = word >> (bits * index as u32) & ((1 << bits) - 1);
        (q as f32).mul_add(scale, offset)
    };
    match format {
        NumberFormat::F32 => f32::from_bits(word),
        NumberFormat::Bf16 => f32::from_bits(word >> (16 * index) << 16),
        NumberFormat::Bits4 => quantised(4),
        NumberFormat::Bits8 | NumberFormat::Bits8By16 => quantised(8),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{noise, on_every_cpu};
    #[cfg(target_arch = "x86_64")]
    use super::super::{half_rows::HalfRows, shorts::ShortRows};
    use super::*;

    const ALL: [NumberFormat; 5] = [
        NumberFormat::F32,
        NumberFormat::Bf16,
        NumberFormat::Bits4,
        NumberFormat::Bits8,
        NumberFormat::Bits8By16,
    ];

    fn flat(shape: &[usize], seed: u32) -> Vec<f32> {
        noise(shape, 1.0, seed)
    }

    /// Computes rows together and in smaller batches.
    fn assert_same_bits_in_any_batch(made: &Matrix, [depth, width]: [usize; 2]) {
        let x = flat(&[70, depth], 9);
        let of = |rows: Range<usize>| {
            let mut out = vec![f32::NAN; rows.len() * width];
            made.multiply(&x[rows.start * depth..rows.end * depth], &mut out);
            out
        };
        let together = of(0..70);
        for rows in [0..1, 3..5, 7..20, 30..63, 69..70] {
            assert_eq!(
                of(rows.clone()),
                together[rows.start * width..rows.end * width],
                "{:?}",
                made.format()
            );
        }
    }

    /// A matrix, and its columns as f32.
    fn matrix(format: NumberFormat, [depth, width]: [usize; 2]) -> (Matrix, Vec<f32>) {
        let columns = flat(&[width, depth], 5);
        let max = if format == NumberFormat::Bits4 { 15.0 } else { 255.0 };
        let group = |column: usize, index: usize| {
            let first = column * depth + index * format.group();
            let mut q = [0; 32];
            for (q, x) in q.iter_mut().zip(&columns[first..][..format.group()]) {
                *q = ((x + 1.0) / 2.0 * max).round() as u8;
            }
            Group { scale: 0.125 + column as f32 / 1024.0, offset: -0.75 - index as f32 / 8.0, q }
        };
        let made = match format {
            NumberFormat::F32 => Matrix::of_f32(&columns, depth),
            NumberFormat::Bf16 => Matrix::of_bf16(&columns, depth),
            _ => Matrix::of_groups(format, [depth, width], &group),
        };
        let expected = match format {
            NumberFormat::F32 => columns.clone(),
            NumberFormat::Bf16 => columns.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect(),
            _ => (0..width * depth)
                .map(|at| {
                    let (column, k) = (at / depth, at % depth);
                    let Group { scale, offset, q } = group(column, k / format.group());
                    f32::from(q[k % format.group()]) * scale + offset
                })
                .collect(),
        };
        (made, expected)
    }

    #[test]
    fn a_column_has_the_numbers_it_was_packed_from() {
        for format in ALL {
            let (made, expected) = matrix(format, [96, 70]);
            for column in [0, 1, 63, 64, 69] {
                let mut out = vec![f32::NAN; 96];
                made.column(column, &mut out);
                for (ours, expected) in out.iter().zip(&expected[column * 96..]) {
                    assert!((ours - expected).abs() < 4e-6, "{format:?} {column}: {ours} {expected}");
                }
            }
        }
    }

    #[test]
    fn a_product_equals_the_plain_sum_on_every_cpu() {
        on_every_cpu(|| {
            for format in ALL {
                for (rows, width) in [(1, 70), (3, 64), (5, 1), (16, 130), (21, 70), (50, 70)] {
                    let (made, expected) = matrix(format, [96, width]);
                    let x = flat(&[rows, 96], 7);
                    let mut out = vec![f32::NAN; rows * width];
                    made.multiply(&x, &mut out);
                    for (at, ours) in out.iter().enumerate() {
                        let (row, column) = (&x[at / width * 96..][..96], &expected[at % width * 96..][..96]);
                        let expected: f64 = row.iter().zip(column).map(|(a, b)| f64::from(a * b)).sum();
                        let error = (f64::from(*ours) - expected).abs();
                        assert!(error < 1e-3, "{format:?}, {rows} rows, {at}: {ours} {expected}");
                    }
                }
            }
        });
    }

    const QUANTISED: [NumberFormat; 3] = [NumberFormat::Bits4, NumberFormat::Bits8, NumberFormat::Bits8By16];

    /// Each format of quantised matrices with each format of quantised rows that this CPU has, and the largest number in
    /// such a row.
    fn quantised_formats() -> impl Iterator<Item = (NumberFormat, (RowFormat, f32))> {
        let rows = match (crate::may_use_vnni(), crate::may_use_int16()) {
            (true, _) => vec![(RowFormat::Int8, 127.0), (RowFormat::Int16, 127.0 * 128.0)],
            (false, true) => vec![(RowFormat::Int16, 32_767.0)],
            (false, false) => Vec::new(),
        };
        QUANTISED.into_iter().flat_map(move |format| rows.clone().into_iter().map(move |kind| (format, kind)))
    }

    /// A row after it has been quantised: whole numbers, times their scales.
    fn rounded(row: &[f32], largest: f32) -> Vec<f64> {
        let groups = row.chunks(32).flat_map(|group| {
            let max = group.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            let by = if max > 0.0 { largest / max } else { 0.0 };
            group.iter().map(move |x| f64::from((x * by).round_ties_even()) * f64::from(max / largest))
        });
        groups.collect()
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn quantised_rows_give_the_exact_products_of_their_rounded_numbers() {
        for (format, (kind, largest)) in quantised_formats() {
            for (rows, width) in [(1, 70), (3, 64), (5, 1), (16, 130), (21, 70), (50, 70)] {
                let (made, expected) = matrix(format, [96, width]);
                let made = made.with_rows_as(kind);
                let mut x = flat(&[rows, 96], 7);
                // A group of zeros, and one of a few large numbers.
                x[..32].fill(0.0);
                x[33] = 1e4;
                let mut out = vec![f32::NAN; rows * width];
                made.multiply(&x, &mut out);
                for (at, ours) in out.iter().enumerate() {
                    let row = rounded(&x[at / width * 96..][..96], largest);
                    let column = &expected[at % width * 96..][..96];
                    let products = row.iter().zip(column).map(|(a, b)| a * f64::from(*b));
                    let size: f64 = products.clone().map(f64::abs).sum();
                    let error = (f64::from(*ours) - products.sum::<f64>()).abs();
                    assert!(error < 1e-5 * size.max(1.0), "{format:?}, {rows} rows, {at}: {ours}, {error}");
                }
            }
        }
    }

    /// Calls the kernel itself, because a CPU with AVX512-VNNI multiplies rows of 16 bits with another one.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn rows_of_16_bits_give_the_exact_products_of_their_rounded_numbers_also_at_their_largest() {
        if !crate::cpu::has_avx2() {
            return;
        }
        let product = |made: &Matrix, x: &[f32]| {
            let mut packed = ShortRows::default();
            packed.pack(x, made.depth, made.format);
            let mut out = vec![f32::NAN; x.len() / made.depth * made.width];
            packed.multiply(made.words(), &mut out, made.width);
            out
        };
        for format in QUANTISED {
            for (depth, rows, width) in
                [(32, 1, 1), (96, 1, 70), (96, 3, 64), (64, 5, 65), (96, 8, 130), (160, 23, 71)]
            {
                let (made, expected) = matrix(format, [depth, width]);
                let x = flat(&[rows, depth], 7);
                for (at, ours) in product(&made, &x).iter().enumerate() {
                    let row = rounded(&x[at / width * depth..][..depth], 32_767.0);
                    let column = &expected[at % width * depth..][..depth];
                    let products = row.iter().zip(column).map(|(a, b)| a * f64::from(*b));
                    let size: f64 = products.clone().map(f64::abs).sum();
                    let error = (f64::from(*ours) - products.sum::<f64>()).abs();
                    assert!(
                        error < 1e-6 * size.max(1.0),
                        "{format:?}, {rows}×{depth}×{width}, {at}: {error} of {size}"
                    );
                }
            }
            // Every product of a group has the largest magnitude.
            let q = if format == NumberFormat::Bits4 { 15 } else { 255 };
            let made =
                Matrix::of_groups(format, [96, 70], &|_, _| Group { scale: 1.0, offset: 0.0, q: [q; 32] });
            for x in [2.0, -2.0] {
                let expected = 96.0 * x * f32::from(q);
                let out = product(&made, &[x; 7 * 96]);
                assert!(out.iter().all(|y| (y - expected).abs() < 1e-5 * expected.abs()), "{format:?} {x}");
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_quantised_row_gives_the_same_bits_in_any_batch_and_keeps_nan() {
        for (format, (kind, _)) in quantised_formats() {
            let (made, other) = (matrix(format, [96, 2_000]).0, matrix(format, [96, 70]).0);
            let (made, other) = (made.with_rows_as(kind), other.with_rows_as(kind));
            let x = flat(&[70, 96], 9);
            let with = |threads: usize, rows: Range<usize>| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let (mut out, mut other_out) =
                    (vec![f32::NAN; rows.len() * 2_000], vec![f32::NAN; rows.len() * 70]);
                let x = &x[rows.start * 96..rows.end * 96];
                pool.install(|| multiply_together([&made, &other], x, [&mut out, &mut other_out]));
                (out, other_out)
            };
            let (together, other_out) = with(1, 0..70);
            for (threads, rows) in [(1, 0..1), (2, 0..1), (3, 3..8), (2, 7..20), (2, 30..63), (2, 0..70)] {
                let (ours, others) = with(threads, rows.clone());
                assert_eq!(ours, together[rows.start * 2_000..rows.end * 2_000], "{format:?} {rows:?}");
                assert_eq!(others, other_out[rows.start * 70..rows.end * 70], "{format:?} {rows:?}");
            }
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = x[..96].to_vec();
                x[40] = bad;
                let mut out = vec![0.0; 70];
                other.multiply(&x, &mut out);
                assert!(out.iter().all(|y| y.is_nan()), "{bad}");
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn rows_in_bf16_give_the_exact_products_of_their_rounded_numbers() {
        if !crate::cpu::has_bf16() {
            return;
        }
        let rounded = |x: f32| f64::from(half::bf16::from_f32(x).to_f32());
        for (depth, rows, width) in
            [(2, 1, 1), (30, 3, 70), (96, 1, 64), (96, 4, 130), (384, 13, 95), (98, 50, 200)]
        {
            let (made, expected) = matrix(NumberFormat::Bf16, [depth, width]);
            let made = made.with_rows_as(RowFormat::Bf16);
            let x = flat(&[rows, depth], 7);
            let mut out = vec![f32::NAN; rows * width];
            made.multiply(&x, &mut out);
            // A CPU with AMX has both kernels, of which the product above uses one.
            let mut packed = HalfRows::default();
            packed.pack(&x, depth);
            let mut by_vectors = vec![f32::NAN; rows * width];
            packed.multiply(made.words(), &mut by_vectors, width);
            for (at, ours) in out.iter().enumerate().chain(by_vectors.iter().enumerate()) {
                let row = &x[at / width * depth..][..depth];
                let column = &expected[at % width * depth..][..depth];
                let products = row.iter().zip(column).map(|(a, b)| rounded(*a) * f64::from(*b));
                let size: f64 = products.clone().map(f64::abs).sum();
                let error = (f64::from(*ours) - products.sum::<f64>()).abs();
                assert!(error < 1e-6 * size.max(1.0), "{rows}×{depth}×{width}, {at}: {ours}, {error}");
            }
        }
        let (made, _) = matrix(NumberFormat::Bf16, [96, 200]);
        let made = made.with_rows_as(RowFormat::Bf16);
        assert_same_bits_in_any_batch(&made, [96, 200]);
        let mut bad = flat(&[96], 9);
        bad[40] = f32::NAN;
        let mut out = vec![0.0; 200];
        made.multiply(&bad, &mut out);
        assert!(out.iter().all(|y| y.is_nan()));
    }

    #[test]
    fn a_quantised_matrix_with_rows_in_bf16_gives_the_exact_products_of_rounded_numbers() {
        if !crate::cpu::may_use_amx() {
            return;
        }
        let rounded = |x: f32| f64::from(half::bf16::from_f32(x).to_f32());
        for format in QUANTISED {
            for (depth, rows, width) in [(32, 1, 1), (96, 3, 70), (160, 17, 130), (64, 40, 64), (96, 65, 95)]
            {
                let (made, expected) = matrix(format, [depth, width]);
                let made = made.with_rows_as(RowFormat::Bf16);
                let x = flat(&[rows, depth], 7);
                let mut out = vec![f32::NAN; rows * width];
                made.multiply(&x, &mut out);
                for (at, ours) in out.iter().enumerate() {
                    let (row, column) = (&x[at / width * depth..], &expected[at % width * depth..][..depth]);
                    let products = row.iter().zip(column).map(|(a, b)| rounded(*a) * rounded(*b));
                    let size: f64 = products.clone().map(f64::abs).sum();
                    let error = (f64::from(*ours) - products.sum::<f64>()).abs();
                    // A number that is nearly halfway between two of bf16 may be rounded to the other one.
                    assert!(
                        error < 3e-4 * size.max(1.0),
                        "{format:?}, {rows}×{depth}×{width}, {at}: {error} of {size}"
                    );
                }
            }
            let made = matrix(format, [96, 200]).0.with_rows_as(RowFormat::Bf16);
            assert_same_bits_in_any_batch(&made, [96, 200]);
        }
    }

    #[test]
    fn a_row_gives_the_same_bits_in_any_batch_and_with_any_threads() {
        on_every_cpu(|| {
            for format in ALL {
                let (made, _) = matrix(format, [96, 200]);
                assert_same_bits_in_any_batch(&made, [96, 200]);
            }
        });
        const WIDTH: usize = 6_000;
        let (made, _) = matrix(NumberFormat::Bits4, [96, WIDTH]);
        let x = flat(&[70, 96], 9);
        let with = |threads: usize, rows: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut out = vec![f32::NAN; rows * WIDTH];
            pool.install(|| made.multiply(&x[..rows * 96], &mut out));
            out
        };
        for rows in [1, 9, 17, 70] {
            assert_eq!(with(1, rows), with(3, rows));
        }
    }

    #[test]
    fn packed_words_are_reused_if_their_number_fits() {
        let (made, _) = matrix(NumberFormat::Bits4, [64, 10]);
        let words = PackedWords::Owned(made.words().into());
        let again = Matrix::of_words(NumberFormat::Bits4, [64, 10], words.clone()).unwrap();
        let (x, mut a, mut b) = (flat(&[2, 64], 1), [0.0; 20], [1.0; 20]);
        made.multiply(&x, &mut a);
        again.multiply(&x, &mut b);
        assert_eq!(a, b);
        assert!(Matrix::of_words(NumberFormat::Bits8, [64, 10], words).is_none());
    }
}
