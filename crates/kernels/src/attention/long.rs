//! Attention of long texts, such as the windows of a recording: the keys and values of each head are packed for the
//! products of `gemm`, once for all queries of the text. `text` reads them where the projections wrote them, for each tile
//! of queries anew, which is slow if they are more than the caches hold. Computes the same bits as `text`. Owns the packed
//! keys and values.

use std::cell::RefCell;
use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::text::{Text, softmax_row};
use crate::dispatch;
use crate::gemm::{Panels, Rows, columns_of_this_cpu};

/// From this many tokens on, a text is long. Measured with heads of 32 and 64 numbers on a Zen 4 with AVX2: at 512 tokens
/// both ways take the same time, at 1,024 this one is up to 1.1 times as fast, at 1,500 1.7 times.
pub const LONG: usize = 768;

/// The packed keys and values of one head.
#[derive(Default)]
pub struct PackedHead {
    /// `[d, tokens]`.
    keys: Panels,
    /// `[tokens rounded up to a block of columns, d_values]`.
    values: Panels,
}

impl PackedHead {
    /// Packs the keys and values of a head.
    pub fn pack(&mut self, text: &Text<'_>, head: usize) {
        let Text { qv, qv_width, keys, stride, ref rows, heads, .. } = *text;
        let n = rows.len();
        let key_rows = keys[head * heads.d * stride..].chunks_exact(stride).take(heads.d);
        self.keys.pack_slices(key_rows.map(|row| &row[rows.clone()]), [heads.d, n]);
        let first = heads.count * heads.d + head * heads.d_values;
        let value_rows = qv[rows.start * qv_width..rows.end * qv_width].chunks_exact(qv_width);
        self.values.pack_slices(
            value_rows.map(|row| &row[first..][..heads.d_values]),
            [n.next_multiple_of(columns_of_this_cpu()), heads.d_values],
        );
    }
}

/// The buffers of one call.
#[derive(Default)]
struct Scratch {
    /// `[queries, d]`.
    queries: Vec<f32>,
    rows: Rows,
    /// `[queries, keys]`, with the keys rounded up to a block of columns.
    scores: Vec<f32>,
    /// 1 / the sum of each query's weights.
    factors: Vec<f32>,
    /// `[queries, d_values]`.
    out: Vec<f32>,
}

thread_local! {
    /// Reused by the next call: new memory costs a page fault every 4 KiB.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Computes some queries of a text into `out` `[queries, heads·d_values]`. `packed` are the text's heads.
pub fn attend_queries(text: &Text<'_>, packed: &[PackedHead], queries: Range<usize>, out: &mut [f32]) {
    let Text { qv, qv_width, ref rows, heads, position_terms, .. } = *text;
    let (d, d_values) = (heads.d, heads.d_values);
    let n_keys = rows.len().next_multiple_of(columns_of_this_cpu());
    let mut scratch = SCRATCH.take();
    let Scratch { queries: q, rows: left, scores, factors, out: head_out } = &mut scratch;
    scores.resize(queries.len() * n_keys, 0.0);
    head_out.resize(queries.len() * d_values, 0.0);
    for (head, packed) in packed.iter().enumerate() {
        q.clear();
        for row in qv[queries.start * qv_width..queries.end * qv_width].chunks_exact(qv_width) {
            q.extend_from_slice(&row[head * d..][..d]);
        }
        left.pack(q, d);
        left.multiply(0, &packed.keys, scores, n_keys);
        for (row, query) in scores.chunks_exact_mut(n_keys).zip(queries.clone()) {
            position_terms.apply(head, query - rows.start, &mut row[..rows.len()]);
        }
        dispatch(Softmax { scores, n_keys, n: rows.len(), factors });
        left.pack(scores, n_keys);
        left.multiply(0, &packed.values, head_out, d_values);
        let to = out.chunks_exact_mut(heads.count * d_values).zip(head_out.chunks_exact(d_values));
        for ((to, sums), factor) in to.zip(&*factors) {
            let to = &mut to[head * d_values..][..d_values];
            to.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum * factor);
        }
    }
    SCRATCH.set(scratch);
}

/// The kernel that turns scores `[queries, n_keys]` into weights, and writes 1 / the sum of each query's weights.
struct Softmax<'a> {
    scores: &'a mut [f32],
    n_keys: usize,
    n: usize,
    factors: &'a mut Vec<f32>,
}

impl WithSimd for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { scores, n_keys, n, factors } = self;
        factors.resize(scores.len() / n_keys, 0.0);
        for (row, factor) in scores.chunks_exact_mut(n_keys).zip(factors) {
            *factor = softmax_row(simd, row, n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::Heads;
    use super::*;
    use crate::positions::PositionTerms;
    use crate::testing::{noise, on_every_cpu};

    #[test]
    fn a_query_gets_the_same_bits_as_without_packing() {
        on_every_cpu(|| {
            let (n, before, d) = (83, 5, 24_usize);
            let d_values = d.next_multiple_of(columns_of_this_cpu());
            let heads = Heads { count: 2, d, d_values };
            let qv_width = 2 * (d + d_values);
            let stride = before + n + columns_of_this_cpu();
            let (qv, keys) = (noise(&[before + n, qv_width], 1.0, 1), noise(&[2 * d, stride], 1.0, 2));
            let position_terms = &PositionTerms { window: Some(40), ..PositionTerms::default() };
            let rows = before..before + n;
            let text = || Text {
                qv: &qv,
                qv_width,
                keys: &keys,
                stride,
                rows: rows.clone(),
                heads,
                position_terms,
                relative: None,
            };
            let packed: Vec<PackedHead> = (0..2)
                .map(|head| {
                    let mut packed = PackedHead::default();
                    packed.pack(&text(), head);
                    packed
                })
                .collect();
            let queries = before + 7..before + 71;
            let mut out = vec![f32::NAN; queries.len() * 2 * d_values];
            attend_queries(&text(), &packed, queries.clone(), &mut out);
            let mut expected = vec![f32::NAN; out.len()];
            dispatch(text().attend_queries(queries, &mut expected));
            assert_eq!(out, expected);
        });
    }
}
