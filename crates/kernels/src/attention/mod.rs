//! The attention sublayer of a transformer block: LayerNorm(attention(x)·O + bias + x), or attention(x)·O + bias. Each
//! text attends to its own tokens. The texts of a batch follow each other without padding. Decides the layout of the
//! weights: attention reads queries, values and transposed keys as the projections wrote them, and copies nothing.
//!
//! The keys have no bias: it would add the same number to all scores of a query, which the softmax removes. Only
//! disentangled attention adds it, since there keys are multiplied by vectors of positions too. The bias of the values
//! becomes a constant after O, because the softmax weights sum to one. The caller computes this constant with
//! [`multiply_vector`], and adds it to the bias.

use std::cell::RefCell;
use std::mem;
use std::ops::Range;

mod long;
mod text;

use crate::add_norm::Epilogue;
use crate::dispatch;
use crate::gemm::{
    Linear, NotWholeGroups, NumberFormat, Panels, Rows, by_blocks, columns_of_this_cpu, in_parallel,
};
use crate::positions::{PositionTerms, positions_in_texts};
use long::{LONG, PackedHead};
use text::{Heads, ROWS, Text};

/// The largest number of queries of one text that one part of the parallel work computes.
const MAX_PART_QUERIES: usize = 64;

/// One layer's attention weights, packed for a CPU.
pub struct Attention {
    /// The projections to queries, scaled by 1/√d, and to values: `[hidden, hidden + heads·d_values]`.
    qv: Linear,
    /// The bias of the queries, scaled by 1/√d.
    q_bias: Vec<f32>,
    /// The projection to keys: `[hidden, hidden]`.
    k: Keys,
    /// The output projection O: `[heads·d_values, hidden]`.
    out: Linear,
    heads: Heads,
    hidden: usize,
}

/// The projection to keys.
enum Keys {
    /// In f32, as the left matrix of the product, so that the product gives transposed keys.
    Left(Rows),
    /// With fewer bits, as the right matrix. The keys are transposed after the product.
    Right(Linear),
}

impl Attention {
    /// Packs the projections to queries, keys and values, and O, as in the checkpoint: `[hidden, hidden]` each, one row
    /// for each output. `q_bias` is the bias of the queries, `format` the format in which the weights are kept.
    /// `heads` must divide `hidden`.
    ///
    /// # Errors
    /// `hidden` is not a multiple of the group size of `format`.
    pub fn new(
        [q, k, v]: [Vec<f32>; 3],
        q_bias: Vec<f32>,
        out: &[f32],
        heads: usize,
        format: NumberFormat,
    ) -> Result<Self, NotWholeGroups> {
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
        let mut padded_out = Vec::with_capacity(hidden * heads * d_values);
        for head in out.chunks_exact(d) {
            padded_out.extend_from_slice(head);
            padded_out.resize(padded_out.len() + d_values - d, 0.0);
        }
        Ok(Self {
            qv: Linear::new(&qv, hidden, format)?,
            q_bias: scaled(q_bias).collect(),
            k: match format {
                NumberFormat::F32 => Keys::Left(Rows::new(&k, hidden)),
                _ => Keys::Right(Linear::new(&k, hidden, format)?),
            },
            out: Linear::new(&padded_out, heads * d_values, format)?,
            heads: Heads { count: heads, d, d_values },
            hidden,
        })
    }

    /// The width of a token's vector.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Computes the sublayer in place on `x` `[tokens, hidden]`, and ends with `epilogue`. `lengths` are the lengths of
    /// the texts; their sum is `tokens`.
    pub fn attend(
        &self,
        x: &mut [f32],
        lengths: &[usize],
        position_terms: &PositionTerms,
        epilogue: Epilogue<'_>,
    ) {
        Batch { weights: self, lengths, position_terms }.attend(x, epilogue);
    }
}

/// The product of a linear layer's weights `[width, vector's length]` with `vector`. For O and the bias of the values,
/// this is the constant that the bias adds after O.
pub fn multiply_vector(weights: &[f32], vector: &[f32]) -> Vec<f32> {
    let rows = weights.chunks_exact(vector.len());
    let sum = |row: &[f32]| row.iter().zip(vector).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>();
    rows.map(|row| sum(row) as f32).collect()
}

/// The attention of one batch.
struct Batch<'a> {
    weights: &'a Attention,
    lengths: &'a [usize],
    position_terms: &'a PositionTerms,
}

/// The buffers of one batch.
#[derive(Default)]
struct Scratch {
    /// `[tokens, hidden + heads·d_values]`.
    qv: Vec<f32>,
    /// The tokens' vectors, packed as the right matrix of a product.
    x: Panels,
    /// Keys, transposed: `[hidden, stride]`.
    keys: Vec<f32>,
    /// The vectors of relative positions, if attention is disentangled.
    relative: Vec<f32>,
    /// The heads of each long text.
    packed_heads: Vec<PackedHead>,
    /// The output of the heads: `[tokens, heads·d_values]`.
    context: Vec<f32>,
    /// `[tokens, hidden]`.
    out: Vec<f32>,
}

thread_local! {
    /// Reused by the next batch: new memory costs a page fault every 4 KiB.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Batch<'_> {
    fn attend(&self, x: &mut [f32], epilogue: Epilogue<'_>) {
        let hidden = self.weights.hidden;
        let mut scratch = SCRATCH.take();
        let stride = self.project(x, &mut scratch);
        self.rotate(&mut scratch, stride);
        self.attend_heads(&mut scratch, stride);
        let Scratch { context, out, .. } = &mut scratch;
        out.resize(x.len(), 0.0);
        self.weights.out.multiply(context, out, |_, _| {});
        let out = &*out;
        by_blocks(x, hidden, |first, x| epilogue.apply(x, &out[first * hidden..][..x.len()]));
        SCRATCH.set(scratch);
    }

    /// Computes queries, keys and values of all tokens; returns the stride of the keys.
    fn project(&self, x: &[f32], scratch: &mut Scratch) -> usize {
        let Attention { qv, q_bias, k, hidden, .. } = self.weights;
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
                scratch.x.pack(x, *hidden);
                let right = &scratch.x;
                by_blocks(&mut scratch.keys, stride, |first, keys| k.multiply(first, right, keys, stride));
            }
            Keys::Right(k) => {
                scratch.out.resize(x.len(), 0.0);
                k.multiply(x, &mut scratch.out, |_, _| {});
                let keys = &scratch.out;
                by_blocks(&mut scratch.keys, stride, |first, to| {
                    transpose(&keys[first..], *hidden, to, stride)
                });
            }
        }
        if let Some(disentangled) = &self.position_terms.disentangled {
            let keys = scratch.keys.chunks_exact_mut(stride).zip(disentangled.k_bias());
            in_parallel(keys, |(keys, bias)| keys.iter_mut().for_each(|x| *x += bias));
        }
        stride
    }

    /// Rotates queries and keys, if the layer has a rotary embedding.
    fn rotate(&self, scratch: &mut Scratch, stride: usize) {
        let Some(rotary) = &self.position_terms.rotary else { return };
        let Attention { qv, heads, hidden, .. } = self.weights;
        let positions = positions_in_texts(self.lengths);
        by_blocks(&mut scratch.qv, qv.width(), |first, rows| {
            for (row, position) in rows.chunks_exact_mut(qv.width()).zip(&positions[first..]) {
                rotary.rotate(*position, &mut row[..*hidden]);
            }
        });
        let heads = scratch.keys.chunks_exact_mut(heads.d * stride);
        in_parallel(heads, |head| rotary.rotate_transposed(&positions, head, stride));
    }

    /// Computes softmax(Q·Kᵀ)·V for the tokens of each text.
    fn attend_heads(&self, scratch: &mut Scratch, stride: usize) {
        let Attention { qv, heads, .. } = self.weights;
        let width = heads.count * heads.d_values;
        scratch.context.resize(scratch.qv.len() / qv.width() * width, 0.0);
        let mut starts = 0;
        let texts = self.lengths.iter().map(|n| {
            starts += n;
            starts - n..starts
        });
        let disentangled = self.position_terms.disentangled.as_deref();
        // Only `text` computes disentangled attention.
        let is_long = |rows: &Range<usize>| rows.len() >= LONG && disentangled.is_none();
        let long_texts: Vec<Range<usize>> = texts.filter(is_long).collect();
        let longest = self.lengths.iter().copied().max().unwrap_or(0);
        let relative = disentangled
            .filter(|_| longest > 0)
            .map(|it| it.in_order(longest, ROWS - 1, &mut scratch.relative));
        scratch.packed_heads.resize_with(long_texts.len() * heads.count, PackedHead::default);
        let text = |rows: Range<usize>| Text {
            qv: &scratch.qv,
            qv_width: qv.width(),
            keys: &scratch.keys,
            stride,
            rows,
            heads: *heads,
            position_terms: self.position_terms,
            relative,
        };
        let heads_of_texts =
            long_texts.iter().flat_map(|rows| (0..heads.count).map(move |head| (rows, head)));
        in_parallel(scratch.packed_heads.iter_mut().zip(heads_of_texts), |(packed, (rows, head))| {
            packed.pack(&text(rows.clone()), head);
        });
        let packed_heads = |rows: &Range<usize>| {
            let index = long_texts.binary_search_by_key(&rows.start, |rows| rows.start).ok()?;
            Some(&scratch.packed_heads[index * heads.count..][..heads.count])
        };
        let mut unassigned = &mut scratch.context[..];
        let parts = parts(self.lengths).map(|(rows, queries)| {
            let (out, rest) = mem::take(&mut unassigned).split_at_mut(queries.len() * width);
            unassigned = rest;
            (rows, queries, out)
        });
        in_parallel(parts, |(rows, queries, out)| match packed_heads(&rows) {
            Some(packed) => long::attend_queries(&text(rows), packed, queries, out),
            None => dispatch(text(rows).attend_queries(queries, out)),
        });
    }
}

/// `to` `[columns, stride]` ← the transpose of the first `columns` columns of `rows`. Rows are `width` numbers apart.
/// Transposes some rows at a time, so that their cache lines stay in the first-level cache while the columns are read
/// one after the other.
fn transpose(rows: &[f32], width: usize, to: &mut [f32], stride: usize) {
    const ROWS: usize = 16;
    for (index, rows) in rows.chunks(ROWS * width).enumerate() {
        for (column, to) in to.chunks_exact_mut(stride).enumerate() {
            let from = rows.get(column..).unwrap_or_default().iter().step_by(width);
            to[index * ROWS..].iter_mut().zip(from).for_each(|(to, x)| *to = *x);
        }
    }
}

/// Returns, for each block of queries, the rows of its text and the rows of the queries.
fn parts(lengths: &[usize]) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let mut start = 0;
    lengths.iter().flat_map(move |n| {
        let rows = start..start + n;
        start += n;
        let blocks = rows.clone().step_by(MAX_PART_QUERIES);
        blocks.map(move |first| (rows.clone(), first..rows.end.min(first + MAX_PART_QUERIES)))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::add_norm::Norm;
    use crate::disentangled::Disentangled;
    use crate::positions::{RelativeBias, Rotary};
    use crate::testing::{difference, linear, noise, on_every_cpu, to_f64};

    #[test]
    fn every_query_is_in_one_block_of_its_text() {
        let parts: Vec<_> = parts(&[3, 130, 64]).collect();
        assert_eq!(
            parts,
            [(0..3, 0..3), (3..133, 3..67), (3..133, 67..131), (3..133, 131..133), (133..197, 133..197)]
        );
    }

    /// The projections `[hidden, hidden]` to queries, keys and values, O, and the bias of the queries.
    struct TestWeights {
        matrices: [Vec<f32>; 4],
        q_bias: Vec<f32>,
        heads: usize,
    }

    /// The number of the test's vectors of relative positions.
    const VECTORS: usize = 9;

    /// The vector of a distance: far distances share one, and near ones are not in order.
    fn vector_of(distance: isize) -> usize {
        (distance.clamp(-4, 4) + 4) as usize * 5 % VECTORS
    }

    /// What relative positions add to the score of a head's query and key, whose first number is `first` of all heads'.
    fn of_positions(
        q: &[f64],
        k: &[f64],
        first: usize,
        disentangled: &Disentangled,
        key: usize,
        position: usize,
    ) -> f64 {
        let vector = vector_of(key as isize - position as isize);
        let [keys, queries] = disentangled.vectors();
        let number = |rows: &[f32], index: usize| f64::from(rows[(first + index) * VECTORS + vector]);
        let scale = 1.0 / (q.len() as f64).sqrt();
        let terms = q.iter().zip(k).enumerate().map(|(index, (q, k))| {
            let k = k + f64::from(disentangled.k_bias()[first + index]);
            q * number(keys, index) * scale + k * number(queries, index)
        });
        terms.sum()
    }

    fn disentangled(hidden: usize, longest: usize) -> PositionTerms {
        let vectors = |seed| noise(&[hidden, VECTORS], 0.7, seed);
        let last = longest as isize - 1;
        let by_distance = (-last..=last).map(|distance| vector_of(distance) as u32).collect();
        let relative = Disentangled::new(vectors(31), &vectors(32), noise(&[hidden], 0.5, 33), by_distance);
        PositionTerms { disentangled: Some(Arc::new(relative)), ..PositionTerms::default() }
    }

    impl TestWeights {
        fn new(heads: usize, d: usize, range: f32) -> Self {
            let hidden = heads * d;
            let matrices = [(range, 1), (range, 2), (range, 3), (0.2, 4)];
            let matrices = matrices.map(|(range, seed)| noise(&[hidden, hidden], range, seed));
            Self { matrices, q_bias: noise(&[hidden], 0.5, 11), heads }
        }

        fn packed(&self) -> Attention {
            let [q, k, v, out] = self.matrices.clone();
            Attention::new([q, k, v], self.q_bias.clone(), &out, self.heads, NumberFormat::F32).unwrap()
        }

        /// attention(x)·O, computed by the formula in f64.
        fn expected(&self, x: &[f32], lengths: &[usize], position_terms: &PositionTerms) -> Vec<f64> {
            let hidden = self.q_bias.len();
            let [q, k, v, out] = &self.matrices;
            let none = vec![0.0; hidden];
            let x = to_f64(x);
            let (mut q, mut k, v) = (linear(&x, q, &self.q_bias), linear(&x, k, &none), linear(&x, v, &none));
            if let Some(rotary) = &position_terms.rotary {
                for (row, position) in positions_in_texts(lengths).into_iter().enumerate() {
                    for rows in [&mut q, &mut k] {
                        let row = &mut rows[row * hidden..][..hidden];
                        let mut rotated: Vec<f32> = row.iter().map(|x| *x as f32).collect();
                        rotary.rotate(position, &mut rotated);
                        row.copy_from_slice(&to_f64(&rotated));
                    }
                }
            }
            let mut context = Vec::new();
            let mut start = 0;
            for length in lengths {
                let text = start * hidden..(start + length) * hidden;
                let rows = [&q[text.clone()], &k[text.clone()], &v[text]];
                context.extend(self.text(rows, position_terms));
                start += length;
            }
            linear(&context, out, &none)
        }

        /// softmax(Q·Kᵀ/√d)·V of one text.
        fn text(&self, [q, k, v]: [&[f64]; 3], position_terms: &PositionTerms) -> Vec<f64> {
            let hidden = self.q_bias.len();
            let d = hidden / self.heads;
            let mut context = vec![0.0; q.len()];
            for (position, head) in
                (0..q.len() / hidden).flat_map(|row| (0..self.heads).map(move |head| (row, head)))
            {
                let numbers_of = |row: usize| row * hidden + head * d..row * hidden + (head + 1) * d;
                let relative = position_terms.disentangled.as_deref();
                let product = |key: usize| {
                    let (q, k) = (&q[numbers_of(position)], &k[numbers_of(key)]);
                    let content: f64 = q.iter().zip(k).map(|(a, b)| a * b).sum();
                    let score = content / (d as f64).sqrt();
                    let with_positions = |it| score + of_positions(q, k, head * d, it, key, position);
                    relative.map_or(score, with_positions) as f32
                };
                let mut scores: Vec<f32> = (0..k.len() / hidden).map(product).collect();
                position_terms.apply(head, position, &mut scores);
                let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<f64> = scores.iter().map(|score| f64::from(score - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for (key, weight) in weights.iter().enumerate() {
                    for (context, v) in context[numbers_of(position)].iter_mut().zip(&v[numbers_of(key)]) {
                        *context += weight / sum * v;
                    }
                }
            }
            context
        }

        /// The largest difference between the kernel and the formula.
        fn largest_error(&self, lengths: &[usize], position_terms: &PositionTerms) -> f64 {
            let hidden = self.q_bias.len();
            let mut x = noise(&[lengths.iter().sum(), hidden], 1.0, 7);
            let bias = noise(&[hidden], 0.5, 9);
            let mut expected = self.expected(&x, lengths, position_terms);
            expected.iter_mut().zip(bias.iter().cycle()).for_each(|(x, bias)| *x += f64::from(*bias));
            self.packed().attend(&mut x, lengths, position_terms, Epilogue::Bias(&bias));
            difference(&x, &expected)
        }
    }

    #[test]
    fn it_equals_its_formula_for_any_length_and_head_size_on_every_cpu() {
        on_every_cpu(|| {
            for (heads, d) in [(12, 32), (2, 64), (4, 8), (3, 5), (1, 1)] {
                let lengths = [1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 64, 65];
                let error =
                    TestWeights::new(heads, d, 0.2).largest_error(&lengths, &PositionTerms::default());
                assert!(error < 2e-5, "{heads} heads of {d}: {error}");
            }
            for long in [512, LONG, LONG + 33] {
                let error = TestWeights::new(2, 32, 0.2).largest_error(&[3, long], &PositionTerms::default());
                assert!(error < 1e-5, "{long}: {error}");
            }
        });
    }

    #[test]
    fn with_positional_terms_it_equals_its_formula_on_every_cpu() {
        on_every_cpu(|| {
            let bias = RelativeBias::new(4, 70, |head, distance| (head as f32 + 0.3 * distance as f32).sin());
            let cases = [
                PositionTerms { bias: Some(Arc::new(bias)), ..PositionTerms::default() },
                PositionTerms {
                    rotary: Some(Arc::new(Rotary::new(100.0, 8, 70))),
                    ..PositionTerms::default()
                },
                PositionTerms { window: Some(5), ..PositionTerms::default() },
            ];
            for position_terms in cases {
                let error = TestWeights::new(4, 8, 0.3).largest_error(&[1, 2, 17, 33, 70], &position_terms);
                assert!(error < 2e-5, "{position_terms:?}: {error}");
            }
            let window = PositionTerms { window: Some(40), ..PositionTerms::default() };
            let error = TestWeights::new(4, 8, 0.3).largest_error(&[5, LONG + 1], &window);
            assert!(error < 2e-5, "{error}");
        });
    }

    #[test]
    fn disentangled_attention_equals_its_formula_for_any_length_and_head_size_on_every_cpu() {
        on_every_cpu(|| {
            for (heads, d) in [(3, 32), (4, 8), (3, 5), (1, 1)] {
                let lengths = [1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 64, 65];
                let position_terms = disentangled(heads * d, 70);
                let error = TestWeights::new(heads, d, 0.2).largest_error(&lengths, &position_terms);
                assert!(error < 2e-5, "{heads} heads of {d}: {error}");
            }
            let error =
                TestWeights::new(2, 8, 0.2).largest_error(&[3, LONG + 1], &disentangled(16, LONG + 1));
            assert!(error < 2e-5, "a long text: {error}");
        });
    }

    #[test]
    fn disentangled_attention_gives_the_same_bits_by_any_number_of_threads() {
        let (attention, terms) = (TestWeights::new(4, 8, 0.5).packed(), disentangled(32, 150));
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut x = noise(&[200, 32], 1.0, 1);
            pool.install(|| attention.attend(&mut x, &[150, 50], &terms, Epilogue::Bias(&[0.5; 32])));
            x
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn large_scores_do_not_overflow() {
        on_every_cpu(|| {
            assert!(TestWeights::new(2, 32, 4.0).largest_error(&[9, 40], &PositionTerms::default()) < 1e-3)
        });
    }

    #[test]
    fn a_text_gets_the_same_bits_alone_and_in_a_batch_on_every_cpu() {
        on_every_cpu(|| {
            let attention = TestWeights::new(4, 8, 0.5).packed();
            let norm = Norm { rows: noise(&[3, 32], 1.0, 5), eps: 1e-5, is_centred: true };
            let texts = [(11, 19), (LONG, LONG + 5)].map(|lengths| (lengths, PositionTerms::default()));
            let with_positions = [(11, 19), (40, 19)].map(|lengths| (lengths, disentangled(32, 64)));
            for ((before, length), terms) in texts.into_iter().chain(with_positions) {
                let x = noise(&[before + length, 32], 1.0, 1);
                let (mut together, mut alone) = (x.clone(), x[before * 32..].to_vec());
                let lengths = [before, length];
                attention.attend(&mut together, &lengths, &terms, Epilogue::Norm(&norm));
                attention.attend(&mut alone, &[length], &terms, Epilogue::Norm(&norm));
                assert_eq!(together[before * 32..], alone, "{length}");
            }
        });
    }
}
