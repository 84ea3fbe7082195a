//! The relative positions of disentangled attention, as in DeBERTa. The score of a query and a key is
//! q·k + q·(position key of their distance) + k·(position query of their distance). Owns the vectors of one layer.

use std::sync::Arc;

use crate::gemm::{by_blocks, columns_of_this_cpu};

/// The vectors of relative positions of one layer.
#[derive(Debug)]
pub struct Disentangled {
    /// Position keys, then position queries, which are scaled as the queries are. Both are transposed:
    /// `[2·hidden, count]`.
    rows: Vec<f32>,
    /// The number of position keys, and of position queries.
    count: usize,
    /// The bias of the keys: `[hidden]`. Its product with a query is the same for all keys, so it changes attention
    /// weights only by its product with position queries.
    k_bias: Vec<f32>,
    /// The vector of each distance, which is the key's position minus the query's: `[2·longest - 1]`, from
    /// -(longest - 1) on.
    by_distance: Arc<[u32]>,
}

/// The vectors of relative positions in the order of distances, for the texts of a batch.
#[derive(Clone, Copy)]
pub struct RelativeVectors<'a> {
    /// Position keys, then position queries: `[2·hidden, stride]`. There are as many columns before the smallest distance
    /// and after the largest one as the kernel reads beyond them.
    pub rows: &'a [f32],
    pub stride: usize,
    /// The column of the distance 0.
    pub center: usize,
}

impl Disentangled {
    /// `position_keys` and `position_queries` are transposed, `[hidden, vectors]`; `position_queries` are multiplied by the
    /// factor of the scores, such as 1/√d. `k_bias` is the bias of the keys. `by_distance` has the index of each
    /// distance's vector, from -(longest - 1) to longest - 1, where `longest` is the length of the longest text.
    pub fn new(
        mut position_keys: Vec<f32>,
        position_queries: &[f32],
        k_bias: Vec<f32>,
        by_distance: Arc<[u32]>,
    ) -> Self {
        assert_eq!(position_keys.len(), position_queries.len(), "both have a vector for each distance");
        let count = position_keys.len() / k_bias.len();
        position_keys.extend_from_slice(position_queries);
        Self { rows: position_keys, count, k_bias, by_distance }
    }

    /// The position keys and the position queries, each `[hidden, vectors]`.
    pub fn vectors(&self) -> [&[f32]; 2] {
        self.rows.split_at(self.rows.len() / 2).into()
    }

    /// The indices of the vectors for the distances in a text of `tokens` tokens, from -(`tokens` - 1) to `tokens` - 1.
    pub fn indices(&self, tokens: usize) -> &[u32] {
        &self.by_distance[self.by_distance.len() / 2 + 1 - tokens..][..2 * tokens - 1]
    }

    /// The width of a token's vector.
    pub fn hidden(&self) -> usize {
        self.k_bias.len()
    }

    /// The bias of the keys.
    pub(crate) fn k_bias(&self) -> &[f32] {
        &self.k_bias
    }

    /// Writes the vectors for all distances in texts of up to `longest` tokens to `to`, in the order of the distances.
    /// The kernel reads up to `margin` columns before the smallest distance.
    pub(crate) fn in_order<'a>(
        &self,
        longest: usize,
        margin: usize,
        to: &'a mut Vec<f32>,
    ) -> RelativeVectors<'a> {
        let center = margin + longest - 1;
        let stride = center + longest + columns_of_this_cpu();
        let indices = self.indices(longest);
        to.resize(self.rows.len() / self.count * stride, 0.0);
        by_blocks(to, stride, |first, block| {
            let rows = self.rows.chunks_exact(self.count).skip(first);
            for (to, row) in block.chunks_exact_mut(stride).zip(rows) {
                to[margin..].iter_mut().zip(indices).for_each(|(to, index)| *to = row[*index as usize]);
            }
        });
        RelativeVectors { rows: to, stride, center }
    }
}
