//! Attention of some tokens of any sequences over cached keys and values, by candle's operations, for any device.
//! Decides which rows share a product. Owns nothing: the caches belong to the networks.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::ops::softmax_last_dim;

use crate::model::ops::causal::Span;
use crate::model::ops::kv::{BLOCK, CachePosition};

/// The largest number of elements in the keys of a group, and in its scores: 256 MiB in f32. The keys of a single
/// sequence may exceed this, and so may the scores of a single token.
pub(super) const MAX_ELEMENTS: usize = 1 << 26;

/// Rows whose attention is computed together: one token of each of some sequences, or some tokens of one sequence.
pub(super) struct Group {
    rows: Range<usize>,
    sequences: usize,
    /// The number of keys of each sequence, padded to the largest one.
    keys: usize,
    /// The slots of the keys: `[sequences·keys]`.
    slots: Tensor,
    /// 0 for a key that a row attends to, −∞ for others: `[1, sequences, rows of each, keys]`.
    mask: Tensor,
}

/// The tokens of its sequence that a row attends to.
#[derive(Clone, Copy)]
pub(super) struct Reach {
    /// Those whose distance from it is smaller than this. None if there is no limit.
    pub(super) window: Option<usize>,
    /// Whether none of them comes after it. Otherwise spans are whole sequences.
    pub(super) is_causal: bool,
}

impl Reach {
    /// All up to the row's own.
    pub(super) const CAUSAL: Self = Self { window: None, is_causal: true };

    fn first_key(self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// The end of the keys that the row at `position` of `span` attends to.
    fn end(self, span: &Span<'_>, position: usize) -> usize {
        match (self.is_causal, self.window) {
            (true, _) => position + 1,
            (false, None) => span.first + span.count,
            (false, Some(window)) => position.saturating_add(window).min(span.first + span.count),
        }
    }
}

impl Group {
    /// Copies the plan of a group to the device. Shorter sequences are padded with `padding_slot`, whose keys and
    /// values are zeros.
    ///
    /// # Errors
    /// The device fails.
    pub(super) fn new(
        packed: &Packed<'_>,
        group: &PackedGroup,
        reach: Reach,
        padding_slot: u32,
        device: &Device,
    ) -> Result<Self> {
        let PackedGroup { rows, sequences } = group;
        let group_rows = &packed.rows[rows.clone()];
        // The rows of a sequence are in the order of their positions. Each attends to some of these keys.
        let rows_of_each = group_rows.len() / sequences;
        let keys_of = |row: usize| {
            let first_row = if *sequences == 1 { 0 } else { row };
            let (span, position) = group_rows[row];
            reach.first_key(group_rows[first_row].1)..reach.end(span, position)
        };
        let last_rows = group_rows.len() - sequences..group_rows.len();
        let keys = last_rows.clone().map(|row| keys_of(row).len()).max().unwrap_or_default();
        let mut slots = Vec::with_capacity(sequences * keys);
        for row in last_rows {
            slots.extend(keys_of(row).map(|key| token_slot(group_rows[row].0, key)));
            slots.resize(slots.len().next_multiple_of(keys), padding_slot);
        }
        let mask = |row: usize| {
            let ((span, position), begin) = (group_rows[row], keys_of(row).start);
            let seen = reach.first_key(position)..reach.end(span, position);
            (begin..begin + keys).map(move |key| if seen.contains(&key) { 0.0 } else { f32::NEG_INFINITY })
        };
        let mask: Vec<f32> = (0..group_rows.len()).flat_map(mask).collect();
        let shape = (1, *sequences, rows_of_each, keys);
        let mask = Tensor::from_vec(mask, shape, device)?;
        Ok(Self { rows: rows.clone(), sequences: *sequences, keys, slots: indices(slots, device)?, mask })
    }

    /// Computes softmax(Q·Kᵀ)·V for the rows of this group. `queries` are `[kv_heads, shared, all rows, head_width]`,
    /// and scaled already; `shared` is the number of heads of queries for each head of keys. `keys` and `values` are
    /// `[kv_heads, slots, head_width]`. A cap c makes each score c·tanh(score / c). Returns
    /// `[rows, kv_heads, shared, head_width]`.
    pub(super) fn attend(
        &self,
        queries: &Tensor,
        [keys, values]: &[Tensor; 2],
        cap: Option<f32>,
    ) -> Result<Tensor> {
        let (heads, shared, _, width) = queries.dims4()?;
        let rows = self.rows.len();
        let queries = queries.narrow(2, self.rows.start, rows)?;
        // Queries that attend to the same keys are made adjacent: the heads of a token, or the tokens of a sequence.
        let is_mixed = self.sequences > 1;
        let (queries, [a, b]) = match is_mixed {
            true => (queries.transpose(1, 2)?, [rows, shared]),
            false => (queries, [shared, rows]),
        };
        let queries_per_sequence = shared * rows / self.sequences;
        let gather = |cache: &Tensor| {
            let selected = cache.index_select(&self.slots, 1)?;
            selected.reshape((heads, self.sequences, self.keys, width))?.to_dtype(DType::F32)
        };
        let queries = queries.contiguous()?.reshape((heads, self.sequences, queries_per_sequence, width))?;
        let mut scores = queries.matmul(&gather(keys)?.t()?)?.reshape((heads, a, b, self.keys))?;
        if let Some(cap) = cap.map(f64::from) {
            scores = ((scores / cap)?.tanh()? * cap)?;
        }
        // The weights and the values of padding are exactly 0, whatever the blocks hold.
        let weights = softmax_last_dim(&scores.broadcast_add(&self.mask)?)?;
        let weights = weights.reshape((heads, self.sequences, queries_per_sequence, self.keys))?;
        let attended = weights.matmul(&gather(values)?)?.reshape((heads, a, b, width))?;
        if is_mixed { attended.permute((1, 0, 2, 3)) } else { attended.permute((2, 0, 1, 3)) }
    }
}

/// A list of indices on the device.
pub(super) fn indices(indices: Vec<u32>, device: &Device) -> Result<Tensor> {
    let count = indices.len();
    Tensor::from_vec(indices, count, device)
}

/// `x` `[rows, depth]` in f32 times the transposed `matrix` `[width, depth]`, multiplied in the matrix's number format.
pub(super) fn linear(x: &Tensor, matrix: &Tensor) -> Result<Tensor> {
    x.to_dtype(matrix.dtype())?.matmul(&matrix.t()?)?.to_dtype(DType::F32)
}

/// The slot of the token at `position` of a sequence, among the slots of all blocks.
pub(super) fn token_slot(span: &Span<'_>, position: usize) -> u32 {
    let CachePosition { block, offset } = span.cache_position(position);
    block * BLOCK as u32 + offset as u32
}

/// The rows of a step in the order of their groups.
pub(super) struct Packed<'a> {
    /// For each packed row, its row in the order of `spans`.
    pub(super) order: Vec<usize>,
    /// The span of each packed row, and its position in its sequence.
    pub(super) rows: Vec<(&'a Span<'a>, usize)>,
    pub(super) groups: Vec<PackedGroup>,
}

/// Packed rows whose keys are read together.
pub(super) struct PackedGroup {
    pub(super) rows: Range<usize>,
    /// The number of their sequences.
    pub(super) sequences: usize,
}

impl<'a> Packed<'a> {
    /// Groups the rows. Spans of one token come first, the shortest sequences first; sequences of similar lengths are
    /// padded to the longest of them. The longer spans follow, in parts. `heads` is the number of heads of queries, and
    /// `key_width` the width of a token's key over all heads.
    pub(super) fn new(spans: &'a [Span<'a>], heads: usize, key_width: usize) -> Self {
        let starts = spans.iter().scan(0, |start, span| Some(std::mem::replace(start, *start + span.count)));
        let (mut singles, longer): (Vec<_>, Vec<_>) =
            spans.iter().zip(starts).partition(|(span, _)| span.count == 1);
        singles.sort_by_key(|(span, _)| span.first);
        let mut packed = Self { order: Vec::new(), rows: Vec::new(), groups: Vec::new() };
        for (span, start) in singles {
            let rows = packed.append(span, start, 0..1);
            let fits = |group: &&mut PackedGroup| {
                (group.rows.len() + 1) * (span.first + 1) * key_width.max(heads) <= MAX_ELEMENTS
            };
            match packed.groups.last_mut().filter(fits) {
                Some(group) => (group.rows.end, group.sequences) = (rows.end, group.sequences + 1),
                None => packed.groups.push(PackedGroup { rows, sequences: 1 }),
            }
        }
        for (span, start) in longer {
            let max_tokens = (MAX_ELEMENTS / ((span.first + span.count) * heads)).max(1);
            for first in (0..span.count).step_by(max_tokens) {
                let rows = packed.append(span, start, first..span.count.min(first + max_tokens));
                packed.groups.push(PackedGroup { rows, sequences: 1 });
            }
        }
        packed
    }

    /// Appends some tokens of a span whose first row is `start`. Returns their packed rows.
    fn append(&mut self, span: &'a Span<'a>, start: usize, tokens: Range<usize>) -> Range<usize> {
        let begin = self.rows.len();
        self.order.extend(tokens.clone().map(|token| start + token));
        self.rows.extend(tokens.map(|token| (span, span.first + token)));
        begin..self.rows.len()
    }
}
