//! One head of one text: packs its queries, keys and values, and multiplies them on vector
//! registers. Keys lie transposed, so that a register holds one number of several keys. Queries go
//! four at a time and keys two registers at a time: eight sums stay in registers through each inner
//! loop.

use pulp::{Arch, Simd, WithSimd};

use super::super::exp::exp;

/// Queries computed together.
const ROWS: usize = 4;
/// Registers of keys, or of a value's numbers, computed together.
const COLUMNS: usize = 2;

/// The sizes of a head.
#[derive(Clone, Copy)]
pub struct HeadShape {
    /// Numbers in a query, key or value.
    pub d: usize,
    /// Numbers in all heads' queries.
    pub width: usize,
}

/// The scratch of one head, and its result.
pub struct Head {
    shape: HeadShape,
    arch: Arch,
    /// Tokens of the text.
    n: usize,
    /// `[n rounded up to ROWS, d]`, scaled by 1/√d.
    q: Vec<f32>,
    /// `[d, n rounded up to a block]`.
    k: Vec<f32>,
    /// `[n, d rounded up to a block]`.
    v: Vec<f32>,
    /// `[ROWS, n rounded up to a block]`.
    scores: Vec<f32>,
    /// `[n rounded up to ROWS, d rounded up to a block]`.
    out: Vec<f32>,
}

impl Head {
    pub fn new(shape: HeadShape) -> Self {
        let empty = Vec::new;
        let (q, k, v, scores, out) = (empty(), empty(), empty(), empty(), empty());
        Self { shape, arch: Arch::new(), n: 0, q, k, v, scores, out }
    }

    /// Computes head `head` of the text whose rows are `qkv` `[n, 3·width]`, to which `bias`
    /// `[3·width]` is added.
    pub fn attend(&mut self, qkv: &[f32], bias: &[f32], head: usize) {
        let arch = self.arch;
        arch.dispatch(Attend { head: self, qkv, bias, index: head });
    }

    /// Puts the result into columns `head·d..` of `out` `[n, width]`.
    pub fn scatter(&self, out: &mut [f32], head: usize) {
        let HeadShape { d, width } = self.shape;
        let stride = self.v.len() / self.n.max(1);
        for (row, result) in out.chunks_exact_mut(width).zip(self.out.chunks_exact(stride)) {
            row[head * d..][..d].copy_from_slice(&result[..d]);
        }
    }

    /// Copies the head out of `qkv`; what lies beyond n and d is zero.
    #[inline(always)]
    fn pack(&mut self, qkv: &[f32], bias: &[f32], index: usize, block: usize) {
        let HeadShape { d, width } = self.shape;
        self.n = qkv.len() / (3 * width);
        let (n_keys, d_values) = (self.n.next_multiple_of(block), d.next_multiple_of(block));
        let n_rows = self.n.next_multiple_of(ROWS);
        let scale = 1.0 / (d as f32).sqrt();
        resize(&mut self.q, n_rows * d);
        resize(&mut self.k, d * n_keys);
        resize(&mut self.v, self.n * d_values);
        resize(&mut self.scores, ROWS * n_keys);
        resize(&mut self.out, n_rows * d_values);
        let parts = [0, width, 2 * width].map(|start| start + index * d);
        let [bias_q, bias_k, bias_v] = parts.map(|start| &bias[start..start + d]);
        for (i, row) in qkv.chunks_exact(3 * width).enumerate() {
            let [q, k, v] = parts.map(|start| &row[start..start + d]);
            for ((to, x), b) in self.q[i * d..][..d].iter_mut().zip(q).zip(bias_q) {
                *to = (x + b) * scale;
            }
            for ((to, x), b) in self.k[i..].iter_mut().step_by(n_keys).zip(k).zip(bias_k) {
                *to = x + b;
            }
            for ((to, x), b) in self.v[i * d_values..][..d].iter_mut().zip(v).zip(bias_v) {
                *to = x + b;
            }
        }
    }
}

fn resize(buffer: &mut Vec<f32>, len: usize) {
    buffer.clear();
    buffer.resize(len, 0.0);
}

struct Attend<'a> {
    head: &'a mut Head,
    qkv: &'a [f32],
    bias: &'a [f32],
    index: usize,
}

impl WithSimd for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Head { shape, n, q, k, v, scores, out, .. } = {
            self.head.pack(self.qkv, self.bias, self.index, COLUMNS * S::F32_LANES);
            self.head
        };
        let (n, d) = (*n, shape.d);
        let n_keys = scores.len() / ROWS;
        let d_values = v.len() / n.max(1);
        for (q, out) in q.chunks_exact(ROWS * d).zip(out.chunks_exact_mut(ROWS * d_values)) {
            multiply(simd, (q, d), k, (scores, n_keys));
            let sums = softmax(simd, scores, n);
            // Only the first n weights of a row have a value to go with.
            multiply(simd, (scores, n_keys), v, (out, d_values));
            for (row, sum) in out.chunks_exact_mut(d_values).zip(sums) {
                let factor = simd.splat_f32s(1.0 / sum);
                for x in S::as_mut_simd_f32s(row).0 {
                    *x = simd.mul_f32s(*x, factor);
                }
            }
        }
    }
}

/// out ← a·b for ROWS rows of `a`, of stride `depth`, and of `out`, of stride `columns`, a multiple
/// of COLUMNS registers; `b` is `[≤ depth, columns]`.
#[inline(always)]
fn multiply<S: Simd>(simd: S, (a, depth): (&[f32], usize), b: &[f32], (out, columns): (&mut [f32], usize)) {
    let b = S::as_simd_f32s(b).0;
    let out = S::as_mut_simd_f32s(out).0;
    let columns = columns / S::F32_LANES;
    let mut rows = a.chunks_exact(depth);
    let rows: [&[f32]; ROWS] = std::array::from_fn(|_| rows.next().unwrap_or_default());
    for column in (0..columns).step_by(COLUMNS) {
        let mut sums = [[simd.splat_f32s(0.0); COLUMNS]; ROWS];
        for (i, b) in b.chunks_exact(columns).enumerate() {
            let b = &b[column..column + COLUMNS];
            for (sums, row) in sums.iter_mut().zip(rows) {
                let x = simd.splat_f32s(row[i]);
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum = simd.mul_add_e_f32s(x, *b, *sum);
                }
            }
        }
        for (row, sums) in out.chunks_exact_mut(columns).zip(sums) {
            row[column..column + COLUMNS].copy_from_slice(&sums);
        }
    }
}

/// Turns each of the ROWS rows into e^(score - largest), and gives their sums. Scores from `n` on
/// belong to no key and become nothing.
#[inline(always)]
fn softmax<S: Simd>(simd: S, scores: &mut [f32], n: usize) -> [f32; ROWS] {
    let n_keys = scores.len() / ROWS;
    let mut totals = [0.0; ROWS];
    for (row, total) in scores.chunks_exact_mut(n_keys).zip(&mut totals) {
        row[n..].fill(f32::NEG_INFINITY);
        let row = S::as_mut_simd_f32s(row).0;
        let mut largest = simd.splat_f32s(f32::NEG_INFINITY);
        for x in row.iter() {
            largest = simd.max_f32s(largest, *x);
        }
        let largest = simd.splat_f32s(simd.reduce_max_f32s(largest));
        let mut sum = simd.splat_f32s(0.0);
        for x in row {
            *x = exp(simd, simd.sub_f32s(*x, largest));
            sum = simd.add_f32s(sum, *x);
        }
        *total = simd.reduce_sum_f32s(sum);
    }
    totals
}
