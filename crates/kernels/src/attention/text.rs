//! Attention for some queries of one text: softmax(Q·Kᵀ)·V for each head, on vector registers. For the scores, a
//! register holds the same component of several keys. For the values, it holds several components of one value. Four
//! queries are computed at a time, over two registers of columns, so that eight sums stay in registers during each
//! inner loop.

use std::cell::RefCell;
use std::ops::Range;

use pulp::{Simd, WithSimd};

use crate::disentangled::RelativeVectors;
use crate::exp::exp;
use crate::gemm::COLUMNS;
use crate::positions::PositionTerms;

/// Queries that are computed together, in one tile.
pub const ROWS: usize = 4;

/// The sizes of the heads.
#[derive(Clone, Copy)]
pub struct Heads {
    pub count: usize,
    /// The width of a query or key.
    pub d: usize,
    /// The padded width of a value: `d`, rounded up to a block of columns.
    pub d_values: usize,
}

/// One text in a batch.
pub struct Text<'a> {
    /// `[tokens of the batch, qv_width]`: scaled queries, then values.
    pub qv: &'a [f32],
    pub qv_width: usize,
    /// Transposed keys: `[heads·d, stride]`, with room for at least one block of columns after the tokens.
    pub keys: &'a [f32],
    pub stride: usize,
    /// The rows of the text's tokens in the batch.
    pub rows: Range<usize>,
    pub heads: Heads,
    /// The positional terms. Queries and keys are rotated already.
    pub position_terms: &'a PositionTerms,
    /// The vectors of relative positions, if attention is disentangled.
    pub relative: Option<RelativeVectors<'a>>,
}

impl<'a> Text<'a> {
    /// The kernel that computes these queries into `out` `[queries, heads·d_values]`.
    pub fn attend_queries(
        self,
        queries: Range<usize>,
        out: &'a mut [f32],
    ) -> impl WithSimd<Output = ()> + 'a {
        Attend { text: self, queries, out }
    }
}

struct Attend<'a> {
    text: Text<'a>,
    queries: Range<usize>,
    out: &'a mut [f32],
}

thread_local! {
    /// `[ROWS, keys]`, with the keys rounded up to a block of columns. Reused by the next call.
    static SCORES: RefCell<Vec<f32>> = RefCell::default();
}

impl<'a> WithSimd for Attend<'a> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { text, queries, out } = self;
        let Text { qv, qv_width, keys, stride, rows, heads, position_terms, relative } = text;
        let Heads { count, d, d_values } = heads;
        let (n, width) = (rows.len(), count * d_values);
        let n_keys = n.next_multiple_of(COLUMNS * S::F32_LANES);
        let mut scores = SCORES.take();
        scores.resize(ROWS * n_keys, 0.0);
        let values = &qv[rows.start * qv_width..rows.end * qv_width];
        for head in 0..count {
            let keys = Columns { rows: &keys[head * d * stride..][..d * stride], stride, first: rows.start };
            let first = count * d + head * d_values;
            let values = Columns { rows: values, stride: qv_width, first };
            for (query, out) in queries.clone().step_by(ROWS).zip(out.chunks_mut(ROWS * width)) {
                // If the last group has fewer than ROWS queries, its last one is computed again.
                let q = |row: usize| &qv[(query + row).min(queries.end - 1) * qv_width + head * d..][..d];
                let tile = [q(0), q(1), q(2), q(3)];
                let store = |column: usize, sums: [[S::f32s; COLUMNS]; ROWS]| {
                    for (row, sums) in scores.chunks_exact_mut(n_keys).zip(sums) {
                        let to = &mut row[column..][..COLUMNS * S::F32_LANES];
                        S::as_mut_simd_f32s(to).0.copy_from_slice(&sums);
                    }
                };
                match relative {
                    None => keys.multiply(simd, tile, n_keys, store),
                    Some(RelativeVectors { rows: vectors, stride, center }) => {
                        // The distance of the first key from the last query of the tile.
                        let first = center - (query - rows.start) - (ROWS - 1);
                        let vectors = vectors.split_at(vectors.len() / 2);
                        let of_head = |vectors: &'a [f32]| Columns {
                            rows: &vectors[head * d * stride..][..d * stride],
                            stride,
                            first,
                        };
                        let positions = [of_head(vectors.0), of_head(vectors.1)];
                        keys.multiply_disentangled(simd, tile, &positions, n_keys, store);
                    }
                }
                for (index, row) in scores.chunks_exact_mut(n_keys).enumerate() {
                    let position = (query + index).min(queries.end - 1) - rows.start;
                    position_terms.apply(head, position, &mut row[..n]);
                }
                let factors = softmax(simd, &mut scores, n);
                let weights = |row: usize| &scores[row * n_keys..][..n];
                values.multiply(
                    simd,
                    [weights(0), weights(1), weights(2), weights(3)],
                    d_values,
                    |column, sums| {
                        let rows = out.chunks_exact_mut(width).zip(sums).zip(factors);
                        for ((row, sums), factor) in rows {
                            let factor = simd.splat_f32s(factor);
                            let to = &mut row[head * d_values + column..][..COLUMNS * S::F32_LANES];
                            for (to, sum) in S::as_mut_simd_f32s(to).0.iter_mut().zip(sums) {
                                *to = simd.mul_f32s(sum, factor);
                            }
                        }
                    },
                );
            }
        }
        SCORES.set(scores);
    }
}

/// The columns of a matrix from the column `first` on.
struct Columns<'a> {
    rows: &'a [f32],
    stride: usize,
    first: usize,
}

impl Columns<'_> {
    /// Multiplies four rows by these columns, one block of columns at a time; `then` gets each block with its
    /// first column.
    #[inline(always)]
    fn multiply<S: Simd>(
        &self,
        simd: S,
        [a, b, c, d]: [&[f32]; ROWS],
        width: usize,
        mut then: impl FnMut(usize, [[S::f32s; COLUMNS]; ROWS]),
    ) {
        let block = COLUMNS * S::F32_LANES;
        for column in (0..width).step_by(block) {
            let mut sums = [[simd.splat_f32s(0.0); COLUMNS]; ROWS];
            // Zipped iterators, because the bounds of indices would be checked in each step.
            for ((((row, a), b), c), d) in self.rows.chunks_exact(self.stride).zip(a).zip(b).zip(c).zip(d) {
                let row = S::as_simd_f32s(&row[self.first + column..][..block]).0;
                for (sums, x) in sums.iter_mut().zip([a, b, c, d]) {
                    let x = simd.splat_f32s(*x);
                    for (sum, y) in sums.iter_mut().zip(row) {
                        *sum = simd.mul_add_e_f32s(x, *y, *sum);
                    }
                }
            }
            then(column, sums);
        }
    }

    /// The scores of disentangled attention. Multiplies four queries by the sums of these keys and of the position keys, and
    /// adds the products of the keys and the position queries. The position keys and position queries are the columns
    /// for the last query. A query's columns are one further than those of the query after it.
    #[inline(always)]
    fn multiply_disentangled<S: Simd>(
        &self,
        simd: S,
        [a, b, c, d]: [&[f32]; ROWS],
        [position_keys, position_queries]: &[Columns<'_>; 2],
        width: usize,
        mut then: impl FnMut(usize, [[S::f32s; COLUMNS]; ROWS]),
    ) {
        let block = COLUMNS * S::F32_LANES;
        for column in (0..width).step_by(block) {
            let mut sums = [[simd.splat_f32s(0.0); COLUMNS]; ROWS];
            let positions = position_keys
                .rows
                .chunks_exact(position_keys.stride)
                .zip(position_queries.rows.chunks_exact(position_queries.stride));
            let rows = self.rows.chunks_exact(self.stride).zip(positions);
            for ((((row, (of_keys, of_queries)), (a, b)), c), d) in rows.zip(a.iter().zip(b)).zip(c).zip(d) {
                let row = S::as_simd_f32s(&row[self.first + column..][..block]).0;
                // One check of the bounds for the four queries.
                let of_keys = &of_keys[position_keys.first + column..][..block + ROWS - 1];
                let of_queries = &of_queries[position_queries.first + column..][..block + ROWS - 1];
                for (index, (sums, x)) in sums.iter_mut().zip([a, b, c, d]).enumerate() {
                    let x = simd.splat_f32s(*x);
                    let of_keys = S::as_simd_f32s(&of_keys[ROWS - 1 - index..][..block]).0;
                    let of_queries = S::as_simd_f32s(&of_queries[ROWS - 1 - index..][..block]).0;
                    for (((sum, key), of_key), of_query) in
                        sums.iter_mut().zip(row).zip(of_keys).zip(of_queries)
                    {
                        *sum = simd.mul_add_e_f32s(x, simd.add_f32s(*key, *of_key), *sum);
                        *sum = simd.mul_add_e_f32s(*key, *of_query, *sum);
                    }
                }
            }
            then(column, sums);
        }
    }
}

/// Turns each of the [`ROWS`] rows into weights, as [`softmax_row`]. Returns 1 / sum of each.
#[inline(always)]
fn softmax<S: Simd>(simd: S, scores: &mut [f32], n: usize) -> [f32; ROWS] {
    let n_keys = scores.len() / ROWS;
    let mut factors = [0.0; ROWS];
    for (row, factor) in scores.chunks_exact_mut(n_keys).zip(&mut factors) {
        *factor = softmax_row(simd, row, n);
    }
    factors
}

/// Turns the scores of a query into e^(score - largest), and returns 1 / their sum. Scores from `n` on do not belong to a
/// key of this text, and become 0.
#[inline(always)]
pub fn softmax_row<S: Simd>(simd: S, row: &mut [f32], n: usize) -> f32 {
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
    1.0 / simd.reduce_sum_f32s(sum)
}
