//! The product of rows with a [`Matrix`](super::matrix::Matrix) in bf16 on CPUs with AMX. The rows are rounded to bf16
//! too. So are the numbers of a quantised matrix, panel by panel.
//!
//! A tile register has 16 lines of 64 bytes. One instruction multiplies 16 rows by 16 columns over 32 numbers of the
//! depth, and adds the products to 16 × 16 sums in f32.
//!
//! The depth is summed in the same order for each size of block, so a result is the same for one row and for a thousand.

use std::arch::asm;
use std::arch::x86_64::{__m256bh, __m512bh, _mm512_cvtne2ps_pbh, _mm512_cvtneps_pbh, _mm512_loadu_ps};
use std::mem::transmute;

use super::number_format::PANEL;
use crate::cpu::has_amx;
use crate::kv::bf16_bits;

/// Rows, and columns, of a tile of sums; pairs of numbers in a line.
const SIDE: usize = 16;
/// Numbers of the depth that one instruction multiplies.
const STEP: usize = 2 * SIDE;
/// Columns of a block that is two tiles high and two wide.
const BLOCK: usize = 2 * SIDE;
/// Words of a panel for one step.
const STEP_WORDS: usize = SIDE * PANEL;

/// A line of a tile register: pairs of bf16 numbers, the first in the low half of a word.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u32; SIDE]);

/// Rows in bf16, in tiles of [`SIDE`] rows. The missing rows of the last tile, and the numbers after the depth, are 0.
#[derive(Default)]
pub struct AmxRows {
    /// The numbers of a row.
    depth: usize,
    /// The number of rows.
    count: usize,
    /// `[tiles, steps, SIDE]`.
    lines: Vec<Line>,
}

/// The shapes of the tile registers, as the CPU reads them.
#[repr(C, align(64))]
struct TileShapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_of_a_line: [u16; 16],
    lines: [u8; 16],
}

/// Eight registers of their full size.
static SHAPES: TileShapes = TileShapes {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    bytes_of_a_line: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    lines: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

impl AmxRows {
    /// Rounds `rows` `[count, depth]`. `depth` must be even.
    #[expect(unsafe_code, reason = "functions that are compiled for some CPUs are unsafe to call on others")]
    pub fn pack(&mut self, rows: &[f32], depth: usize) {
        assert!(has_amx() && depth.is_multiple_of(2));
        (self.depth, self.count) = (depth, rows.len() / depth);
        // SAFETY: the CPU has the instructions, as asserted above.
        unsafe { pack(rows, depth, &mut self.lines) }
    }

    /// `out` `[count, stride]`, from a column on, ← these rows times some panels. What is beyond the stride is dropped.
    #[expect(unsafe_code, reason = "there is no safe interface to tile registers")]
    pub fn multiply(&self, panels: &[u32], column: usize, out: &mut [f32], stride: usize) {
        if self.count == 0 {
            return;
        }
        assert!(out.len() >= self.count * stride);
        // SAFETY: the CPU has the instructions, because `pack` has asserted it. The shapes are valid. No other code uses
        // tile registers, and they are released below, before anything can depend on them.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &SHAPES, options(nostack, readonly)) };
        self.multiply_panels(panels, column, out, stride);
        // SAFETY: as above.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }

    /// Must be called between `ldtilecfg` and `tilerelease`.
    fn multiply_panels(&self, panels: &[u32], first_column: usize, out: &mut [f32], stride: usize) {
        let steps = self.depth.div_ceil(STEP);
        let mut padded = Vec::new();
        for (index, panel) in panels.chunks_exact(self.depth / 2 * PANEL).enumerate() {
            let panel = if panel.len() == steps * STEP_WORDS {
                panel
            } else {
                // Few networks have such a depth. Zeros follow it, because a step is read whole.
                padded.clear();
                padded.extend_from_slice(panel);
                padded.resize(steps * STEP_WORDS, 0);
                &padded
            };
            let column = first_column + index * PANEL;
            // The half of a panel stays in the nearest cache for all rows.
            for half in 0..PANEL / BLOCK {
                for (pair, rows) in self.lines.chunks_exact(2 * steps * SIDE).enumerate() {
                    if column + half * BLOCK < stride {
                        let to = Destination {
                            out: &mut *out,
                            stride,
                            row: pair * BLOCK,
                            column: column + half * BLOCK,
                        };
                        two_by_two(rows, panel, half, to);
                    }
                }
            }
            let odd = self.lines.chunks_exact(2 * steps * SIDE).remainder();
            if !odd.is_empty() {
                let row = (self.count - 1) / SIDE * SIDE;
                one_by_four(odd, panel, Destination { out: &mut *out, stride, row, column });
            }
        }
    }
}

/// Where a block of sums goes: `[count, stride]`, from a row and a column on. What is beyond the last of either is
/// dropped.
struct Destination<'a> {
    out: &'a mut [f32],
    stride: usize,
    row: usize,
    column: usize,
}

impl Destination<'_> {
    /// Calls `write` with the address of a block of `height` rows and `width` columns, and the bytes between two of its
    /// rows.
    fn write(self, [height, width]: [usize; 2], write: impl FnOnce(*mut f32, usize)) {
        let Self { out, stride, row, column } = self;
        let out = &mut out[row * stride..];
        let (rows, columns) = (height.min(out.len() / stride), width.min(stride - column));
        if (rows, columns) == (height, width) {
            return write(out[column..].as_mut_ptr(), stride * size_of::<f32>());
        }
        let mut block = [0.0_f32; BLOCK * BLOCK];
        write(block.as_mut_ptr(), width * size_of::<f32>());
        for (out, sums) in out.chunks_exact_mut(stride).zip(block.chunks_exact(width)).take(rows) {
            out[column..][..columns].copy_from_slice(&sums[..columns]);
        }
    }
}

/// The products of two tiles of rows with a half of a panel `[steps, SIDE, PANEL]`.
#[expect(unsafe_code, reason = "there is no safe interface to tile registers")]
fn two_by_two(rows: &[Line], panel: &[u32], half: usize, to: Destination<'_>) {
    let (upper, lower) = rows.split_at(rows.len() / 2);
    let steps = panel.len() / STEP_WORDS;
    assert!(steps > 0 && lower.len() == SIDE * steps && half < PANEL / BLOCK);
    to.write([BLOCK, BLOCK], |to, line| {
        // SAFETY: the registers have their shapes. There are as many tiles of rows as steps, as asserted above. Of each
        // step of the panel, the columns of one half are read. `write` gives a block of this size. The registers that
        // change are listed.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{upper} + {row_line}*1]",
                "tileloadd tmm5, [{lower} + {row_line}*1]",
                "tileloadd tmm6, [{panel} + {panel_line}*1]",
                "tileloadd tmm7, [{panel} + {panel_line}*1 + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {upper}, {tile}",
                "add {lower}, {tile}",
                "add {panel}, {step}",
                "dec {count}",
                "jnz 2b",
                "tilestored [{to} + {line}*1], tmm0",
                "tilestored [{to} + {line}*1 + 64], tmm1",
                "tilestored [{below} + {line}*1], tmm2",
                "tilestored [{below} + {line}*1 + 64], tmm3",
                count = inout(reg) steps => _,
                upper = inout(reg) upper.as_ptr() => _,
                lower = inout(reg) lower.as_ptr() => _,
                panel = inout(reg) panel[half * BLOCK..].as_ptr() => _,
                to = in(reg) to,
                below = in(reg) to.wrapping_byte_add(SIDE * line),
                line = in(reg) line,
                row_line = in(reg) size_of::<Line>(),
                panel_line = in(reg) PANEL * size_of::<u32>(),
                tile = const SIDE * size_of::<Line>(),
                step = const STEP_WORDS * size_of::<u32>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    });
}

/// The products of one tile of rows with a panel `[steps, SIDE, PANEL]`.
#[expect(unsafe_code, reason = "there is no safe interface to tile registers")]
fn one_by_four(rows: &[Line], panel: &[u32], to: Destination<'_>) {
    let steps = panel.len() / STEP_WORDS;
    assert!(steps > 0 && rows.len() == SIDE * steps);
    to.write([SIDE, PANEL], |to, line| {
        // SAFETY: as in `two_by_two`; a step of the panel is read whole.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{rows} + {row_line}*1]",
                "tileloadd tmm5, [{panel} + {panel_line}*1]",
                "tileloadd tmm6, [{panel} + {panel_line}*1 + 64]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tileloadd tmm7, [{panel} + {panel_line}*1 + 128]",
                "tdpbf16ps tmm1, tmm4, tmm6",
                "tileloadd tmm5, [{panel} + {panel_line}*1 + 192]",
                "tdpbf16ps tmm2, tmm4, tmm7",
                "tdpbf16ps tmm3, tmm4, tmm5",
                "add {rows}, {tile}",
                "add {panel}, {step}",
                "dec {count}",
                "jnz 2b",
                "tilestored [{to} + {line}*1], tmm0",
                "tilestored [{to} + {line}*1 + 64], tmm1",
                "tilestored [{to} + {line}*1 + 128], tmm2",
                "tilestored [{to} + {line}*1 + 192], tmm3",
                count = inout(reg) steps => _,
                rows = inout(reg) rows.as_ptr() => _,
                panel = inout(reg) panel.as_ptr() => _,
                to = in(reg) to,
                line = in(reg) line,
                row_line = in(reg) size_of::<Line>(),
                panel_line = in(reg) PANEL * size_of::<u32>(),
                tile = const SIDE * size_of::<Line>(),
                step = const STEP_WORDS * size_of::<u32>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    });
}

/// `words` ← a panel in bf16, from its numbers `[depth, PANEL]`. The depth must be even. Panics if the CPU has no AMX.
#[expect(unsafe_code, reason = "functions that are compiled for some CPUs are unsafe to call on others")]
pub fn round_panel(numbers: &[f32], words: &mut Vec<u32>) {
    assert!(has_amx());
    words.resize(numbers.len() / 2, 0);
    // SAFETY: the CPU has the instructions, as asserted above.
    unsafe { round_pairs(numbers, words) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn round_pairs(numbers: &[f32], words: &mut [u32]) {
    for (rows, words) in numbers.as_chunks::<{ 2 * PANEL }>().0.iter().zip(words.as_chunks_mut::<PANEL>().0) {
        let (first, second) = rows.split_at(PANEL);
        let pairs = first.as_chunks::<SIDE>().0.iter().zip(second.as_chunks::<SIDE>().0);
        for ((first, second), words) in pairs.zip(words.as_chunks_mut::<SIDE>().0) {
            let [first, second] = [first, second].map(|numbers| halves(numbers));
            for (word, (low, high)) in words.iter_mut().zip(first.into_iter().zip(second)) {
                *word = u32::from(high) << 16 | u32::from(low);
            }
        }
    }
}

/// Numbers in bf16: rounded to the nearest, ties to even.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
#[expect(unsafe_code, reason = "no safe interface has the instructions")]
fn halves(numbers: &[f32; SIDE]) -> [u16; SIDE] {
    // SAFETY: the array has 64 bytes, and the instruction takes any alignment; both types have 256 bits.
    unsafe { transmute::<__m256bh, [u16; SIDE]>(_mm512_cvtneps_pbh(_mm512_loadu_ps(numbers.as_ptr()))) }
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn pack(rows: &[f32], depth: usize, lines: &mut Vec<Line>) {
    let steps = depth.div_ceil(STEP);
    lines.clear();
    lines.resize((rows.len() / depth).div_ceil(SIDE) * steps * SIDE, Line([0; SIDE]));
    for (rows, tiles) in rows.chunks(SIDE * depth).zip(lines.chunks_exact_mut(steps * SIDE)) {
        for (index, row) in rows.chunks_exact(depth).enumerate() {
            let (whole, rest) = row.as_chunks::<STEP>();
            let mut to = tiles[index..].iter_mut().step_by(SIDE);
            for (numbers, to) in whole.iter().zip(&mut to) {
                *to = round(numbers);
            }
            if let Some(Line(to)) = to.next() {
                for (to, [a, b]) in to.iter_mut().zip(rest.as_chunks::<2>().0) {
                    *to = bf16_bits(*a) >> 16 | bf16_bits(*b);
                }
            }
        }
    }
}

/// Numbers in bf16: rounded to the nearest, ties to even.
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
#[expect(unsafe_code, reason = "no safe interface has the instructions")]
fn round(numbers: &[f32; STEP]) -> Line {
    // SAFETY: both halves of the array have 64 bytes, and the instruction takes any alignment; a line has as many bytes
    // as the register.
    unsafe {
        let [low, high] = [0, SIDE].map(|at| _mm512_loadu_ps(numbers[at..].as_ptr()));
        transmute::<__m512bh, Line>(_mm512_cvtne2ps_pbh(high, low))
    }
}
