//! The product of rows with a bf16 [`Matrix`](super::matrix::Matrix), where the rows are rounded to bf16 too. For CPUs with
//! AVX512-BF16, which multiply two pairs of bf16 numbers in each lane and add both to a sum in f32.
//!
//! The pairs of the depth are added in order, so a result is the same for one row and for a thousand.

use std::arch::x86_64::{
    __m256bh, __m512bh, _mm512_cvtneps_pbh, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_set1_epi32, _mm512_setzero_ps,
};
use std::mem::transmute;

use super::bytes::store;
use super::number_format::PANEL;
use crate::cpu::has_bf16;
use crate::kv::bf16_bits;

/// Numbers in a register of f32, and pairs in a register of bf16.
const LANES: usize = 16;
/// Registers across a panel.
const PANEL_REGISTERS: usize = PANEL / LANES;
/// The rows of the highest tile. All tiles are two registers wide. Its sums and the matrix's numbers take 26 of 32 registers.
const MAX_HEIGHT: usize = 12;
/// The rows of the middle tile. The others have 1 and [`MAX_HEIGHT`] rows.
const MID_HEIGHT: usize = 4;

/// Rows in bf16, tile by tile. If there are fewer rows than a tile is high, the missing ones are 0.
#[derive(Default)]
pub struct HalfRows {
    /// The numbers of a row.
    depth: usize,
    tiles: Vec<TileSize>,
    /// `[pairs of the depth, height]` for each tile: words of two numbers, the first in the low half.
    words: Vec<u32>,
}

struct TileSize {
    /// The rows of the tile, including missing ones.
    height: usize,
    /// The rows that exist.
    rows: usize,
}

impl HalfRows {
    /// Rounds `rows` `[count, depth]`. `depth` must be even.
    #[expect(unsafe_code, reason = "functions that are compiled for some CPUs are unsafe to call on others")]
    pub fn pack(&mut self, rows: &[f32], depth: usize) {
        assert!(has_bf16() && depth.is_multiple_of(2));
        self.depth = depth;
        // SAFETY: the CPU has the instructions, as asserted above.
        unsafe { pack(rows, depth, self) }
    }

    /// `out` `[count, stride]` ← these rows times some panels. Columns of the panels beyond the stride are dropped.
    #[expect(unsafe_code, reason = "functions that are compiled for some CPUs are unsafe to call on others")]
    pub fn multiply(&self, panels: &[u32], out: &mut [f32], stride: usize) {
        if self.tiles.is_empty() {
            return;
        }
        // SAFETY: the CPU has the instructions, because `pack` has asserted it.
        unsafe { multiply(self, panels, out, stride) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn pack(rows: &[f32], depth: usize, packed: &mut HalfRows) {
    let pairs = depth / 2;
    let mut rows = rows.chunks_exact(depth);
    packed.tiles.clear();
    packed.words.clear();
    while rows.len() > 0 {
        let height = match rows.len() {
            1 => 1,
            2..=MID_HEIGHT => MID_HEIGHT,
            _ => MAX_HEIGHT,
        };
        let taken = rows.len().min(height);
        packed.tiles.push(TileSize { height, rows: taken });
        let first = packed.words.len();
        packed.words.resize(first + pairs * height, 0);
        for (index, row) in rows.by_ref().take(taken).enumerate() {
            let (registers, tail) = row.as_chunks::<LANES>();
            let mut steps = packed.words[first..].chunks_exact_mut(height);
            let rounded = registers.iter().flat_map(|numbers| round(numbers));
            let tail = tail.as_chunks::<2>().0.iter().map(|[a, b]| bf16_bits(*a) >> 16 | bf16_bits(*b));
            for (step, word) in steps.by_ref().zip(rounded.chain(tail)) {
                step[index] = word;
            }
        }
    }
}

/// Eight pairs of numbers, rounded to the nearest bf16, ties to even.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
#[expect(unsafe_code, reason = "no safe interface has the instructions")]
fn round(numbers: &[f32; LANES]) -> [u32; LANES / 2] {
    // SAFETY: the array has 64 bytes, and the instruction takes any alignment; both types of the second have 256 bits.
    unsafe {
        let numbers = _mm512_loadu_ps(numbers.as_ptr());
        transmute::<__m256bh, [u32; LANES / 2]>(_mm512_cvtneps_pbh(numbers))
    }
}

/// Multiplies all tiles by some panels. A tile is multiplied by a part of a panel that stays in the nearest cache.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn multiply(packed: &HalfRows, panels: &[u32], out: &mut [f32], stride: usize) {
    let pairs = packed.depth / 2;
    for (index, panel) in panels.chunks_exact(pairs * PANEL).enumerate() {
        let lines = panel.as_chunks::<LANES>().0;
        for half in [0, PANEL_REGISTERS / 2] {
            let (mut word, mut row) = (0, 0);
            for TileSize { height, rows } in &packed.tiles {
                let words = &packed.words[word..][..pairs * height];
                let to = Destination {
                    out: &mut out[row * stride..][..rows * stride],
                    stride,
                    column: index * PANEL,
                };
                match *height {
                    1 => multiply_tile::<1, 2>(lines, words, to, half),
                    MID_HEIGHT => multiply_tile::<MID_HEIGHT, 2>(lines, words, to, half),
                    _ => multiply_tile::<MAX_HEIGHT, 2>(lines, words, to, half),
                }
                word += words.len();
                row += rows;
            }
        }
    }
}

/// Where the results of a tile go: `[rows, stride]`, from a panel's first column on.
struct Destination<'a> {
    out: &'a mut [f32],
    stride: usize,
    column: usize,
}

/// Multiplies a tile of rows by `WIDTH` registers of a panel, from this register on.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
fn multiply_tile<const HEIGHT: usize, const WIDTH: usize>(
    panel: &[[u32; LANES]],
    words: &[u32],
    Destination { out, stride, column }: Destination<'_>,
    register: usize,
) {
    let first = column + register * LANES;
    if first >= stride {
        return;
    }
    let mut sums = [[_mm512_setzero_ps(); WIDTH]; HEIGHT];
    for (lines, words) in panel.chunks_exact(PANEL_REGISTERS).zip(words.as_chunks::<HEIGHT>().0) {
        let columns: [__m512bh; WIDTH] = std::array::from_fn(|index| pairs(&lines[register + index]));
        for (sums, word) in sums.iter_mut().zip(words) {
            let row = broadcast(*word);
            for (sum, column) in sums.iter_mut().zip(columns) {
                *sum = _mm512_dpbf16_ps(*sum, row, column);
            }
        }
    }
    for (row, sums) in out.chunks_exact_mut(stride).zip(sums) {
        for (index, sum) in sums.into_iter().enumerate() {
            let start = first + index * LANES;
            let count = stride.saturating_sub(start).min(LANES);
            row[stride.min(start)..][..count].copy_from_slice(&store(sum)[..count]);
        }
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
#[expect(unsafe_code, reason = "no safe interface has the instruction")]
fn pairs(words: &[u32; LANES]) -> __m512bh {
    // SAFETY: the array has 64 bytes, and the instruction takes any alignment; both types have 512 bits.
    unsafe { transmute(_mm512_loadu_si512(words.as_ptr().cast())) }
}

#[target_feature(enable = "avx512f")]
#[inline]
#[expect(unsafe_code, reason = "a register of integers and one of bf16 have no safe conversion")]
fn broadcast(word: u32) -> __m512bh {
    // SAFETY: both types have 512 bits, and any bits are valid.
    unsafe { transmute(_mm512_set1_epi32(word.cast_signed())) }
}
