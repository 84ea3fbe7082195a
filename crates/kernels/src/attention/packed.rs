//! The attention half on a CPU. Decides the layout of its weights: attention reads queries, values and
//! transposed keys as their products left them, and copies nothing.
//!
//! The keys' bias adds the same number to all scores of a query, which the softmax removes. The values' bias is
//! weighted by weights with the sum one, so it is a constant after O.

use std::cell::RefCell;
use std::mem;
use std::ops::Range;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, bail};

use super::super::add_norm::After;
use super::super::distances::{Distances, places};
use super::super::product::{
    Linear, Matrix, Numbers, Panels, Rows, by_blocks, columns_of_this_cpu, in_parallel, narrow,
};
use super::super::{dispatch, rows_of};
use super::text::{Heads, Text};

/// The queries of one text that are computed together.
const QUERIES: usize = 64;

/// One layer's attention weights, laid out for a CPU.
pub struct Packed {
    /// Queries, scaled by 1/√d, then values: `[hidden, hidden + heads·d_values]`.
    qv: Linear,
    /// The queries' bias, scaled.
    q_bias: Vec<f32>,
    /// `[hidden, hidden]`.
    k: Keys,
    /// `[heads·d_values, hidden]`.
    out: Linear,
    heads: Heads,
    hidden: usize,
}

/// The matrix of the keys.
enum Keys {
    /// f32, as the left matrix: the product gives transposed keys.
    Left(Rows),
    /// Fewer bits: keys are transposed after the product.
    Right(Matrix),
}

impl Packed {
    /// Takes the matrices as published, `[hidden, hidden]` each, to be kept as `numbers`.
    ///
    /// # Errors
    /// `hidden` is no multiple of the numbers in a group.
    pub fn new(
        [q, k, v]: [Vec<f32>; 3],
        q_bias: Vec<f32>,
        out: &[f32],
        (heads, numbers): (usize, Numbers),
    ) -> Result<Self> {
        let hidden = q_bias.len();
        let d = hidden / heads;
        let d_values = d.next_multiple_of(columns_of_this_cpu());
        let scale = 1.0 / (d as f32).sqrt();
        let scaled = |values: Vec<f32>| values.into_iter().map(move |x| x * scale);
        let mut qv: Vec<f32> = scaled(q).collect();
        for head in v.chunks_exact(d * hidden) {
            qv.extend_from_slice(head);
            qv.resize(qv.len() + (d_values - d) * hidden, 0.0);
        }
        let mut wide = Vec::with_capacity(hidden * heads * d_values);
        for head in out.chunks_exact(d) {
            wide.extend_from_slice(head);
            wide.resize(wide.len() + d_values - d, 0.0);
        }
        Ok(Self {
            qv: Linear::new(&qv, hidden, numbers)?,
            q_bias: scaled(q_bias).collect(),
            k: match numbers {
                Numbers::F32 => Keys::Left(Rows::new(&k, hidden)),
                _ => Keys::Right(narrow(&k, hidden, numbers)?),
            },
            out: Linear::new(&wide, heads * d_values, numbers)?,
            heads: Heads { count: heads, d, d_values },
            hidden,
        })
    }

    /// The operation on a batch with texts of these lengths.
    pub fn over<'a>(
        &'a self,
        lengths: &'a [usize],
        distances: &'a Distances,
        after: &'a After,
    ) -> impl InplaceOp1 + 'a {
        Over { weights: self, lengths, distances, after }
    }
}

/// `vector` multiplied by a linear layer's weights `[width, vector's length]`.
pub fn through(weights: &[f32], vector: &[f32]) -> Vec<f32> {
    let rows = weights.chunks_exact(vector.len());
    let sum = |row: &[f32]| row.iter().zip(vector).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>();
    rows.map(|row| sum(row) as f32).collect()
}

struct Over<'a> {
    weights: &'a Packed,
    lengths: &'a [usize],
    distances: &'a Distances,
    after: &'a After,
}

/// The buffers of one batch.
#[derive(Default)]
struct Scratch {
    /// `[tokens, hidden + heads·d_values]`.
    qv: Vec<f32>,
    /// The tokens' vectors as the right matrix of a product.
    x: Panels,
    /// Keys, transposed: `[hidden, stride]`.
    keys: Vec<f32>,
    /// `[tokens, heads·d_values]`.
    seen: Vec<f32>,
    /// `[tokens, hidden]`.
    out: Vec<f32>,
}

thread_local! {
    /// Reused by the next batch: new memory costs a page fault every 4 KiB.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl InplaceOp1 for Over<'_> {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(&self, x: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let hidden = self.weights.hidden;
        let x = rows_of(x, layout, hidden)?;
        let (rows, tokens) = (x.len() / hidden, self.lengths.iter().sum::<usize>());
        if rows != tokens {
            bail!("attention over texts of {tokens} tokens in all got {rows} rows");
        }
        let mut scratch = SCRATCH.take();
        let stride = self.project(x, &mut scratch);
        self.rotate(&mut scratch, stride);
        self.attend(&mut scratch, stride);
        let Scratch { seen, out, .. } = &mut scratch;
        out.resize(x.len(), 0.0);
        self.weights.out.multiply(seen, out, |_, _| {});
        let out = &*out;
        by_blocks(x, hidden, |first, x| self.after.end_rows(x, &out[first * hidden..][..x.len()]));
        SCRATCH.set(scratch);
        Ok(())
    }
}

impl Over<'_> {
    /// Computes queries, keys and values of all tokens; returns the stride of the keys.
    fn project(&self, x: &[f32], scratch: &mut Scratch) -> usize {
        let Packed { qv, q_bias, k, hidden, .. } = self.weights;
        let tokens = x.len() / hidden;
        scratch.qv.resize(tokens * qv.width(), 0.0);
        qv.multiply(x, &mut scratch.qv, |_, rows| {
            for row in rows.chunks_exact_mut(qv.width()) {
                row.iter_mut().zip(q_bias).for_each(|(x, b)| *x += b);
            }
        });
        // The last block of a text's keys may extend past the text, and for the last text past the batch.
        let stride = tokens + columns_of_this_cpu();
        scratch.keys.resize(hidden * stride, 0.0);
        match k {
            Keys::Left(k) => {
                scratch.x.lay(x, *hidden);
                let right = &scratch.x;
                by_blocks(&mut scratch.keys, stride, |first, keys| k.multiply(first, right, keys, stride));
            }
            Keys::Right(k) => {
                scratch.out.resize(x.len(), 0.0);
                k.multiply(x, &mut scratch.out);
                let keys = &scratch.out;
                by_blocks(&mut scratch.keys, stride, |first, to| {
                    transpose(&keys[first..], *hidden, to, stride)
                });
            }
        }
        stride
    }

    /// Rotates queries and keys, if the layer does so.
    fn rotate(&self, scratch: &mut Scratch, stride: usize) {
        let Some(rotary) = &self.distances.rotary else { return };
        let Packed { qv, heads, hidden, .. } = self.weights;
        let places = places(self.lengths);
        by_blocks(&mut scratch.qv, qv.width(), |first, rows| {
            for (row, place) in rows.chunks_exact_mut(qv.width()).zip(&places[first..]) {
                rotary.rotate(*place, &mut row[..*hidden]);
            }
        });
        let heads = scratch.keys.chunks_exact_mut(heads.d * stride);
        in_parallel(heads, |head| rotary.rotate_transposed(&places, head, stride));
    }

    fn attend(&self, scratch: &mut Scratch, stride: usize) {
        let Packed { qv, heads, .. } = self.weights;
        let width = heads.count * heads.d_values;
        scratch.seen.resize(scratch.qv.len() / qv.width() * width, 0.0);
        let text = |rows: Range<usize>| Text {
            qv: &scratch.qv,
            qv_width: qv.width(),
            keys: &scratch.keys,
            stride,
            rows,
            heads: *heads,
            distances: self.distances,
        };
        let mut rest = &mut scratch.seen[..];
        let parts = parts(self.lengths).map(|(rows, queries)| {
            let (out, others) = mem::take(&mut rest).split_at_mut(queries.len() * width);
            rest = others;
            (rows, queries, out)
        });
        in_parallel(parts, |(rows, queries, out)| dispatch(text(rows).queries(queries, out)));
    }
}

/// `to` `[columns, stride]` ← the first columns of `rows`, which are `width` apart. Some rows at a time, so that their
/// lines stay in the near cache while column after column is read.
fn transpose(rows: &[f32], width: usize, to: &mut [f32], stride: usize) {
    const ROWS: usize = 16;
    for (index, rows) in rows.chunks(ROWS * width).enumerate() {
        for (column, to) in to.chunks_exact_mut(stride).enumerate() {
            let from = rows.get(column..).unwrap_or_default().iter().step_by(width);
            to[index * ROWS..].iter_mut().zip(from).for_each(|(to, x)| *to = *x);
        }
    }
}

/// The rows of each text, with each block of its queries.
fn parts(lengths: &[usize]) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let mut start = 0;
    lengths.iter().flat_map(move |n| {
        let rows = start..start + n;
        start += n;
        let blocks = rows.clone().step_by(QUERIES);
        blocks.map(move |first| (rows.clone(), first..rows.end.min(first + QUERIES)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_query_is_in_one_block_of_its_text() {
        let parts: Vec<_> = parts(&[3, 130, 64]).collect();
        assert_eq!(
            parts,
            [(0..3, 0..3), (3..133, 3..67), (3..133, 67..131), (3..133, 131..133), (133..197, 133..197)]
        );
    }
}
