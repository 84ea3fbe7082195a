//! Attention of some tokens over keys and values in the paged cache. With causal attention, a token attends to the
//! tokens of its own sequence up to itself; with attention both ways, also to those after itself. With cross attention, it attends to all of another sequence, such as the
//! output of an encoder. Sums are computed in a fixed order, so a token's result depends neither on the other tokens
//! that are computed with it, nor on how its sequence was split into steps.

use std::cell::RefCell;

use pulp::{Simd, WithSimd};

use super::dispatch;
use super::exp::exp;
use super::gemm::{in_parallel, store};
use super::kv::{BLOCK, CachePosition, HeadBlock, KEY_LANES, KvBlocks, KvNumbers};

/// The largest number of queries whose scores are computed together.
const MAX_QUERIES: usize = 8;
/// The number of queries that are computed together if there are no more, such as the queries of a single token.
const FEW_QUERIES: usize = 4;

/// From this many multiplications on, several threads are faster than one: about 5 µs of work.
const WORTH_SHARING: usize = 1 << 18;

/// Consecutive tokens of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// The numbers of the sequence's blocks.
    pub blocks: &'a [u32],
    /// The position of the first of these tokens in its sequence.
    pub first: usize,
    /// The number of tokens.
    pub count: usize,
}

impl Span<'_> {
    /// Where the cache holds the keys and values of the token at `position` in its sequence.
    #[inline]
    pub fn cache_position(&self, position: usize) -> CachePosition {
        CachePosition { block: self.blocks[position / BLOCK], offset: position % BLOCK }
    }
}

/// How the products of queries and keys become weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scoring {
    /// The factor of each product.
    pub scale: f32,
    /// A token attends only to tokens whose distance from it is smaller than this. None if there is no limit.
    pub window: Option<usize>,
    /// The bound c of the scores, each of which becomes c·tanh(score / c). None if they are not bounded.
    pub soft_cap: Option<f32>,
}

impl Scoring {
    /// The usual one for heads of `width` numbers: products are divided by the square root of the width.
    pub fn usual(width: usize) -> Self {
        Self { scale: 1.0 / (width as f32).sqrt(), window: None, soft_cap: None }
    }
}

/// Tokens that all attend to the same keys.
#[derive(Clone, Copy, Debug)]
pub struct CrossSpan<'a> {
    /// The numbers of the blocks that hold the keys and values.
    pub blocks: &'a [u32],
    /// The number of keys; at least 1.
    pub keys: usize,
    /// The number of tokens.
    pub count: usize,
}

/// `out` `[rows, heads·width]` ← attention of `queries` `[rows, heads·width]`, one row for each token of `spans`. The
/// keys and values of these tokens are in `kv` already. Each head of keys and values serves the same number of heads of
/// queries. With a window, the blocks before it are not read.
pub fn attend(
    kv: &KvBlocks,
    layer: usize,
    scoring: Scoring,
    spans: &[Span<'_>],
    queries: &[f32],
    out: &mut [f32],
) {
    let parts: Vec<Part<'_>> = spans.iter().map(|span| Part::causal(span, scoring)).collect();
    attend_parts(kv, layer, &parts, queries, out);
}

/// As [`attend`], but each token also attends to the tokens after itself. `spans` are whole sequences.
pub fn attend_both_ways(
    kv: &KvBlocks,
    layer: usize,
    scoring: Scoring,
    spans: &[Span<'_>],
    queries: &[f32],
    out: &mut [f32],
) {
    let parts: Vec<Part<'_>> = spans.iter().map(|span| Part::both_ways(span, scoring)).collect();
    attend_parts(kv, layer, &parts, queries, out);
}

/// As [`attend`], but each token attends to all keys of its span.
pub fn attend_across(kv: &KvBlocks, layer: usize, spans: &[CrossSpan<'_>], queries: &[f32], out: &mut [f32]) {
    let scoring = Scoring::usual(kv.shape().width);
    let parts: Vec<Part<'_>> = spans.iter().map(|span| Part::across(span, scoring)).collect();
    attend_parts(kv, layer, &parts, queries, out);
}

/// The softmax weights `[tokens, keys]` with which tokens attend to the keys of `span` in one head. `queries` are
/// `[tokens, width]`.
pub fn weights_across(
    kv: &KvBlocks,
    layer: usize,
    head: usize,
    span: CrossSpan<'_>,
    queries: &[f32],
) -> Vec<f32> {
    let (width, stride) = (kv.shape().width, kv.shape().stride());
    let blocks = &span.blocks[..span.keys.div_ceil(BLOCK)];
    let head_blocks: Vec<HeadBlock<'_>> =
        blocks.iter().map(|block| kv.head_block(*block, layer, head)).collect();
    let keys = span.keys.next_multiple_of(KEY_LANES);
    let mut scores = vec![0.0; MAX_QUERIES * keys];
    let mut weights = Vec::with_capacity(span.count * span.keys);
    for queries in queries.chunks(MAX_QUERIES * width) {
        dispatch(WeightsOnly(Chunk {
            head_blocks: &head_blocks,
            numbers: kv.shape().numbers,
            stride,
            width,
            queries,
            scoring: Scoring::usual(width),
            first_keys: &[0; MAX_QUERIES],
            positions: &[span.keys - 1; MAX_QUERIES],
            scores: &mut scores,
            out: &mut [],
        }));
        let rows = scores.chunks_exact(keys).take(queries.len() / width);
        rows.for_each(|row| weights.extend_from_slice(&row[..span.keys]));
    }
    weights
}

/// Some tokens that attend to the keys in the same blocks.
#[derive(Clone, Copy)]
struct Part<'a> {
    blocks: &'a [u32],
    /// The number of tokens.
    count: usize,
    visible: VisibleKeys,
    scoring: Scoring,
}

/// The keys that each token attends to.
#[derive(Clone, Copy)]
enum VisibleKeys {
    /// The first token attends to the keys up to this position, and each further one to one more.
    UpTo(usize),
    /// Each token attends to this many keys.
    All(usize),
    /// The first token is at position `first` of a sequence of `keys` tokens, of which each token attends to those within
    /// its window on either side.
    Around { first: usize, keys: usize },
}

impl<'a> Part<'a> {
    fn causal(span: &Span<'a>, scoring: Scoring) -> Self {
        Self { blocks: span.blocks, count: span.count, visible: VisibleKeys::UpTo(span.first), scoring }
    }

    fn both_ways(span: &Span<'a>, scoring: Scoring) -> Self {
        let visible = VisibleKeys::Around { first: span.first, keys: span.first + span.count };
        Self { blocks: span.blocks, count: span.count, visible, scoring }
    }

    fn across(span: &CrossSpan<'a>, scoring: Scoring) -> Self {
        Self { blocks: span.blocks, count: span.count, visible: VisibleKeys::All(span.keys), scoring }
    }

    /// The first key that a token attends to, by the token's index in this part.
    fn first_key(&self, token: usize) -> usize {
        let position = match self.visible {
            VisibleKeys::UpTo(first) | VisibleKeys::Around { first, .. } => first + token,
            VisibleKeys::All(keys) => keys - 1,
        };
        self.scoring.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// The last key that a token attends to, by the token's index in this part.
    fn last_key(&self, token: usize) -> usize {
        match self.visible {
            VisibleKeys::UpTo(first) => first + token,
            VisibleKeys::All(keys) => keys - 1,
            VisibleKeys::Around { first, keys } => {
                let last = |window: usize| (first + token).saturating_add(window - 1);
                self.scoring.window.map_or(keys - 1, |window| last(window).min(keys - 1))
            }
        }
    }

    /// `count` of the tokens, beginning with the token at index `first`.
    fn slice(&self, first: usize, count: usize) -> Self {
        let visible = match self.visible {
            VisibleKeys::UpTo(position) => VisibleKeys::UpTo(position + first),
            VisibleKeys::Around { first: position, keys } => {
                VisibleKeys::Around { first: position + first, keys }
            }
            all @ VisibleKeys::All(_) => all,
        };
        Self { count, visible, ..*self }
    }

    /// The number of keys that are read.
    fn keys(&self) -> usize {
        if self.count == 0 { 0 } else { self.last_key(self.count - 1) + 1 }
    }
}

fn attend_parts(kv: &KvBlocks, layer: usize, parts: &[Part<'_>], queries: &[f32], out: &mut [f32]) {
    let shape = kv.shape();
    let rows: usize = parts.iter().map(|part| part.count).sum();
    let row_width = queries.len() / rows.max(1);
    // The heads of queries for each head of keys and values.
    let group = row_width / (shape.heads * shape.width);
    // The queries of this many tokens fill at least two chunks.
    let max_tokens = (2 * MAX_QUERIES).div_ceil(group);
    let mut works = Vec::new();
    let mut first_row = 0;
    for part in parts {
        for first in (0..part.count).step_by(max_tokens) {
            let slice = part.slice(first, max_tokens.min(part.count - first));
            works.extend((0..shape.heads).map(|head| Work { part: slice, row: first_row + first, head }));
        }
        first_row += part.count;
    }
    // The first row, the first column and the number of columns of a work's queries and results.
    let columns = |work: &Work<'_>| (work.row, work.head * group * shape.width, group * shape.width);
    let mut results: Vec<(Work<'_>, Vec<f32>)> = works.into_iter().map(|work| (work, Vec::new())).collect();
    let compute = |(work, out): &mut (Work<'_>, Vec<f32>)| {
        let (first, column, width) = columns(work);
        let rows = queries[first * row_width..].chunks_exact(row_width).take(work.part.count);
        let work_queries: Vec<f32> = rows.flat_map(|row| &row[column..][..width]).copied().collect();
        out.resize(work_queries.len(), 0.0);
        one_head(kv, layer, work.head, work.part, &work_queries, out);
    };
    let products: usize = parts.iter().map(|part| part.count * part.keys()).sum::<usize>() * row_width;
    if products < WORTH_SHARING {
        results.iter_mut().for_each(compute);
    } else {
        in_parallel(results.iter_mut(), compute);
    }
    for (work, result) in &results {
        let (first, column, width) = columns(work);
        for (out, result) in
            out[first * row_width..].chunks_exact_mut(row_width).zip(result.chunks_exact(width))
        {
            out[column..][..width].copy_from_slice(result);
        }
    }
}

/// The attention of some tokens in one head of keys and values.
struct Work<'a> {
    part: Part<'a>,
    /// The index of the first token among all rows.
    row: usize,
    head: usize,
}

thread_local! {
    /// `[queries, keys]`. Reused by the next call.
    static SCORES: RefCell<Vec<f32>> = RefCell::default();
}

/// `out` ← the attention of the queries `[tokens, group, width]` that share one head of keys and values.
fn one_head(kv: &KvBlocks, layer: usize, head: usize, part: Part<'_>, queries: &[f32], out: &mut [f32]) {
    let (width, stride) = (kv.shape().width, kv.shape().stride());
    // The blocks before the first token's window are not read: another sequence may have them.
    let first_block = part.first_key(0) / BLOCK;
    let blocks = &part.blocks[first_block..part.keys().div_ceil(BLOCK)];
    let head_blocks: Vec<HeadBlock<'_>> =
        blocks.iter().map(|block| kv.head_block(*block, layer, head)).collect();
    let group = queries.len() / width / part.count;
    let count = queries.len() / width;
    let mut scores = SCORES.take();
    let chunks = queries.chunks(MAX_QUERIES * width).zip(out.chunks_mut(MAX_QUERIES * width));
    for (index, (queries, out)) in chunks.enumerate() {
        let first = index * MAX_QUERIES;
        let token = |query: usize| (first + query).min(count - 1) / group;
        // The keys of a chunk are counted from the first block that one of its queries attends to. The weights of keys
        // before a query's window are exactly 0, so that its sums do not depend on where its chunk begins.
        let chunk_block = part.first_key(token(0)) / BLOCK;
        let first_keys = std::array::from_fn(|query| part.first_key(token(query)) - chunk_block * BLOCK);
        let positions: [usize; MAX_QUERIES] =
            std::array::from_fn(|query| part.last_key(token(query)) - chunk_block * BLOCK);
        scores.resize(MAX_QUERIES * (positions[MAX_QUERIES - 1] + 1).next_multiple_of(KEY_LANES), 0.0);
        dispatch(Chunk {
            head_blocks: &head_blocks[chunk_block - first_block..],
            numbers: kv.shape().numbers,
            stride,
            width,
            queries,
            scoring: part.scoring,
            first_keys: &first_keys,
            positions: &positions,
            scores: &mut scores,
            out,
        });
    }
    SCORES.set(scores);
}

/// Attention of at most [`MAX_QUERIES`] queries over the keys of one head.
struct Chunk<'a> {
    /// The blocks with the head's keys and values.
    head_blocks: &'a [HeadBlock<'a>],
    numbers: KvNumbers,
    /// The distance between two values in memory: [`KvShape::stride`](super::kv::KvShape::stride).
    stride: usize,
    width: usize,
    /// `[count, width]`.
    queries: &'a [f32],
    scoring: Scoring,
    /// The first key that each query attends to, in ascending order.
    first_keys: &'a [usize; MAX_QUERIES],
    /// The last key that each query attends to, in ascending order.
    positions: &'a [usize; MAX_QUERIES],
    /// `[count, keys]`.
    scores: &'a mut [f32],
    out: &'a mut [f32],
}

impl WithSimd for Chunk<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.numbers {
            KvNumbers::F32 => self.in_format::<S, F32>(simd),
            KvNumbers::Bf16 => self.in_format::<S, Bf16>(simd),
        }
    }
}

impl Chunk<'_> {
    #[inline(always)]
    fn in_format<S: Simd, N: Format>(self, simd: S) {
        match self.queries.len() / self.width {
            // The sums of one query leave registers free. With narrow registers, they take twice as many of a value.
            1 if S::F32_LANES < 16 => self.compute::<S, N, 1, { 2 * VALUE_REGISTERS }>(simd),
            1 => self.compute::<S, N, 1, VALUE_REGISTERS>(simd),
            2..=FEW_QUERIES => self.compute::<S, N, FEW_QUERIES, VALUE_REGISTERS>(simd),
            _ => self.compute::<S, N, MAX_QUERIES, VALUE_REGISTERS>(simd),
        }
    }

    /// Writes the weights to `scores` `[count, keys]`, where the number of keys is rounded up to a multiple of
    /// [`KEY_LANES`]. The weights are not divided by their sums yet. Returns the sums.
    #[inline(always)]
    fn compute_weights<S: Simd, N: Format, const COUNT: usize>(&mut self, simd: S) -> [f32; COUNT] {
        let Self { head_blocks, width, queries, scoring, first_keys, positions, scores, .. } = self;
        let (width, count) = (*width, queries.len() / *width);
        let keys = (positions[count - 1] + 1).next_multiple_of(KEY_LANES);
        let queries_by_number = transposed::<COUNT>(queries, width, scoring.scale);
        if COUNT == 1 {
            let query = queries_by_number.as_flattened();
            for (block, scores) in head_blocks.iter().zip(scores[..keys].chunks_mut(BLOCK)) {
                if S::F32_LANES == 8 {
                    scores_of_block::<S, N, 2>(simd, query, block.keys, scores);
                } else {
                    scores_of_block::<S, N, 1>(simd, query, block.keys, scores);
                }
            }
        } else {
            let scores = &mut scores[..count * keys];
            scores_of_several::<S, N, COUNT>(simd, &queries_by_number, head_blocks, scores, keys);
        }
        if let Some(cap) = scoring.soft_cap {
            soft_cap(simd, &mut scores[..count * keys], cap);
        }
        let mut sums = [1.0; COUNT];
        let visible = first_keys.iter().zip(*positions);
        for ((scores, (first, last)), sum) in
            scores.chunks_exact_mut(keys).zip(visible).zip(&mut sums).take(count)
        {
            *sum = unnormalised_softmax(simd, scores, *first, *last);
        }
        sums
    }

    #[inline(always)]
    fn compute<S: Simd, N: Format, const COUNT: usize, const VALUES: usize>(mut self, simd: S) {
        let sums = self.compute_weights::<S, N, COUNT>(simd);
        let Self { head_blocks, stride, width, queries, positions, scores, out, .. } = self;
        let count = queries.len() / width;
        let keys = (positions[count - 1] + 1).next_multiple_of(KEY_LANES);
        for first in (0..width).step_by(VALUES * S::F32_LANES) {
            let seen = positions[count - 1] + 1;
            let sums_of_values = weighted_values::<S, N, COUNT, VALUES>(
                simd,
                head_blocks,
                &scores[..count * keys],
                stride,
                first,
                seen,
            );
            for ((out, values), sum) in out.chunks_exact_mut(width).zip(sums_of_values).zip(sums) {
                let last = width.min(first + VALUES * S::F32_LANES);
                let scale = simd.splat_f32s(1.0 / sum);
                store(simd, &values.map(|value| simd.mul_f32s(value, scale)), &mut out[first..last]);
            }
        }
    }
}

/// Computes only the weights, which are left in the chunk's `scores`.
struct WeightsOnly<'a>(Chunk<'a>);

impl WithSimd for WeightsOnly<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let sums = match self.0.numbers {
            KvNumbers::F32 => self.0.compute_weights::<S, F32, MAX_QUERIES>(simd),
            KvNumbers::Bf16 => self.0.compute_weights::<S, Bf16, MAX_QUERIES>(simd),
        };
        let keys = self.0.scores.len() / MAX_QUERIES;
        for (row, sum) in self.0.scores.chunks_exact_mut(keys).zip(sums) {
            row.iter_mut().for_each(|weight| *weight /= sum);
        }
    }
}

/// Registers of a value that are summed at a time, if there are several queries.
const VALUE_REGISTERS: usize = 4;

/// The transpose `[width, COUNT]` of `queries` `[count, width]`, each number multiplied by `scale`. Missing queries are
/// zeros.
fn transposed<const COUNT: usize>(queries: &[f32], width: usize, scale: f32) -> Vec<[f32; COUNT]> {
    let mut transposed = vec![[0.0; COUNT]; width];
    for (index, query) in queries.chunks_exact(width).enumerate() {
        transposed.iter_mut().zip(query).for_each(|(to, x)| to[index] = x * scale);
    }
    transposed
}

/// The dot products of `queries` with some of the [`KEY_LANES`] keys in `keys`: those in this register.
#[inline(always)]
fn products<S: Simd, N: Format, const COUNT: usize>(
    simd: S,
    queries: &[[f32; COUNT]],
    keys: &[S::u32s],
    register: usize,
) -> [S::f32s; COUNT] {
    let mut sums = [simd.splat_f32s(0.0); COUNT];
    let line = KEY_LANES / S::F32_LANES;
    let pairs = keys.chunks_exact(N::words(2) * line).zip(queries.as_chunks::<2>().0);
    for (words, queries) in pairs {
        for (number, query) in N::unpack_two(simd, words, line, register).into_iter().zip(queries) {
            for (sum, x) in sums.iter_mut().zip(query) {
                *sum = simd.mul_add_e_f32s(simd.splat_f32s(*x), number, *sum);
            }
        }
    }
    sums
}

/// `scores` `[count, keys]` ← the dot products of several queries with the first keys of a head.
#[inline(always)]
fn scores_of_several<S: Simd, N: Format, const COUNT: usize>(
    simd: S,
    queries: &[[f32; COUNT]],
    head_blocks: &[HeadBlock<'_>],
    scores: &mut [f32],
    keys: usize,
) {
    let words = N::words(queries.len() * KEY_LANES);
    for (index, first_key) in (0..keys).step_by(KEY_LANES).enumerate() {
        let keys_in_block = head_blocks[index / (BLOCK / KEY_LANES)].keys;
        let group = &keys_in_block[index % (BLOCK / KEY_LANES) * words..][..words];
        for register in 0..KEY_LANES / S::F32_LANES {
            let sums = products::<S, N, COUNT>(simd, queries, S::as_simd_u32s(group).0, register);
            let first = first_key + register * S::F32_LANES;
            for (scores, sum) in scores.chunks_exact_mut(keys).zip(sums) {
                store(simd, &[sum], &mut scores[first..first + S::F32_LANES]);
            }
        }
    }
}

/// `scores` ← the dot products of one query with the first keys of a block. The sums of `REGISTERS` registers of each
/// group of keys are computed at the same time, because each addition waits for the one before it in the same sum.
#[inline(always)]
fn scores_of_block<S: Simd, N: Format, const REGISTERS: usize>(
    simd: S,
    query: &[f32],
    keys: &[u32],
    scores: &mut [f32],
) {
    let keys = S::as_simd_u32s(keys).0;
    let (first, second) = keys.split_at(keys.len() / 2);
    let line = KEY_LANES / S::F32_LANES;
    let step = N::words(2) * line;
    for register in (0..line).step_by(REGISTERS) {
        let mut sums = [[simd.splat_f32s(0.0); REGISTERS]; BLOCK / KEY_LANES];
        let groups = first.chunks_exact(step).zip(second.chunks_exact(step));
        for ((first, second), query) in groups.zip(query.as_chunks::<2>().0) {
            for (sums, words) in sums.iter_mut().zip([first, second]) {
                for (index, sum) in sums.iter_mut().enumerate() {
                    let numbers = N::unpack_two(simd, words, line, register + index);
                    for (number, x) in numbers.into_iter().zip(query) {
                        *sum = simd.mul_add_e_f32s(simd.splat_f32s(*x), number, *sum);
                    }
                }
            }
        }
        for (scores, sums) in scores.chunks_exact_mut(KEY_LANES).zip(&sums) {
            store(simd, sums, &mut scores[register * S::F32_LANES..][..REGISTERS * S::F32_LANES]);
        }
    }
}

/// Each score x becomes cap·tanh(x / cap) = cap - 2·cap / (1 + e^(2x / cap)).
#[inline(always)]
fn soft_cap<S: Simd>(simd: S, scores: &mut [f32], cap: f32) {
    let (factor, twice) = (simd.splat_f32s(2.0 / cap), simd.splat_f32s(2.0 * cap));
    for score in S::as_mut_simd_f32s(scores).0 {
        let e = exp(simd, simd.mul_f32s(*score, factor));
        let share = simd.div_f32s(twice, simd.add_f32s(e, simd.splat_f32s(1.0)));
        *score = simd.sub_f32s(simd.splat_f32s(cap), share);
    }
}

/// Turns the scores of the keys from `first` to `last` into softmax weights that are not divided by their sum yet. The
/// weights of other keys are 0. Returns the sum.
#[inline(always)]
fn unnormalised_softmax<S: Simd>(simd: S, scores: &mut [f32], first: usize, last: usize) -> f32 {
    scores[..first].fill(f32::NEG_INFINITY);
    scores[last + 1..].fill(f32::NEG_INFINITY);
    let (seen, unseen) = scores.split_at_mut((last + 1).next_multiple_of(KEY_LANES));
    let seen = S::as_mut_simd_f32s(seen).0;
    let mut max = simd.splat_f32s(f32::NEG_INFINITY);
    for score in seen.iter() {
        max = simd.max_f32s(max, *score);
    }
    let max = simd.splat_f32s(simd.reduce_max_f32s(max));
    let mut sum = simd.splat_f32s(0.0);
    for score in seen {
        *score = exp(simd, simd.sub_f32s(*score, max));
        sum = simd.add_f32s(sum, *score);
    }
    unseen.fill(0.0);
    simd.reduce_sum_f32s(sum)
}

/// The sums of the values of the first `seen` keys, weighted by `scores` `[count, keys]`, for `VALUES` registers
/// of each value, from its number `first` on.
#[inline(always)]
fn weighted_values<S: Simd, N: Format, const COUNT: usize, const VALUES: usize>(
    simd: S,
    head_blocks: &[HeadBlock<'_>],
    scores: &[f32],
    stride: usize,
    first: usize,
    seen: usize,
) -> [[S::f32s; VALUES]; COUNT] {
    let mut sums = [[simd.splat_f32s(0.0); VALUES]; COUNT];
    let keys = seen.next_multiple_of(KEY_LANES);
    let count = scores.len() / keys;
    let (line, from) = (stride / S::F32_LANES, first / S::F32_LANES);
    let width = VALUES.min(line - from);
    for (head_block, first) in head_blocks.iter().zip((0..seen).step_by(BLOCK)) {
        let values = S::as_simd_u32s(head_block.values).0.chunks_exact(N::words(2) * line);
        for (key, words) in (first..seen.min(first + BLOCK)).step_by(2).zip(values) {
            let mut weights = [[0.0; 2]; COUNT];
            for (weights, scores) in weights.iter_mut().zip(scores.chunks_exact(keys)).take(count) {
                *weights = [scores[key], scores[key + 1]];
            }
            for lane in 0..width {
                let values = N::unpack_two(simd, words, line, from + lane);
                for (sums, weights) in sums.iter_mut().zip(weights) {
                    for (value, weight) in values.into_iter().zip(weights) {
                        sums[lane] = simd.mul_add_e_f32s(simd.splat_f32s(weight), value, sums[lane]);
                    }
                }
            }
        }
    }
    sums
}

/// A number format of keys and values. A trait and not closures, for the reason given at
/// [`Lanes`](super::activation::Lanes).
trait Format {
    /// The words of 32 bits for this many numbers.
    fn words(numbers: usize) -> usize;
    /// Unpacks two registers: the first and the second number of each pair. The first number is in this register of
    /// `words`. The second is `line` registers after it (f32), or in the same words (bf16).
    fn unpack_two<S: Simd>(simd: S, words: &[S::u32s], line: usize, register: usize) -> [S::f32s; 2];
}

struct F32;
struct Bf16;

impl Format for F32 {
    #[inline(always)]
    fn words(numbers: usize) -> usize {
        numbers
    }

    #[inline(always)]
    fn unpack_two<S: Simd>(simd: S, words: &[S::u32s], line: usize, register: usize) -> [S::f32s; 2] {
        [simd.transmute_f32s_u32s(words[register]), simd.transmute_f32s_u32s(words[line + register])]
    }
}

impl Format for Bf16 {
    #[inline(always)]
    fn words(numbers: usize) -> usize {
        numbers / 2
    }

    #[inline(always)]
    fn unpack_two<S: Simd>(simd: S, words: &[S::u32s], _: usize, register: usize) -> [S::f32s; 2] {
        let first = simd.and_u32s(words[register], simd.splat_u32s(0xffff_0000));
        let second = simd.wrapping_dyn_shl_u32s(words[register], simd.splat_u32s(16));
        [simd.transmute_f32s_u32s(first), simd.transmute_f32s_u32s(second)]
    }
}

#[cfg(test)]
mod tests {
    use super::super::kv::KvShape;
    use super::super::testing::{noise, on_every_cpu};
    use super::*;

    fn flat(shape: &[usize], seed: u32) -> Vec<f32> {
        noise(shape, 1.0, seed)
    }

    struct Case {
        kv: KvBlocks,
        tables: Vec<Vec<u32>>,
        keys: Vec<Vec<f32>>,
        values: Vec<Vec<f32>>,
    }

    /// Sequences of these lengths, whose blocks are not in order. All numbers are exact in bf16.
    fn case(shape: KvShape, lengths: &[usize]) -> Case {
        let round = |x: f32| f32::from_bits(super::super::kv::bf16_bits(x));
        let needed: Vec<usize> = lengths.iter().map(|length| length.div_ceil(BLOCK)).collect();
        let mut free: Vec<u32> = (0..needed.iter().sum::<usize>() as u32).collect();
        free.reverse();
        let mut kv = KvBlocks::new(shape, free.len()).unwrap();
        let vectors = |seed: u32, length: usize| -> Vec<f32> {
            flat(&[length, shape.heads * shape.width], seed).into_iter().map(round).collect()
        };
        let (mut tables, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (length, needed)) in lengths.iter().zip(needed).enumerate() {
            let table = free.split_off(free.len() - needed);
            let (k, v) = (vectors(index as u32 + 1, *length), vectors(index as u32 + 50, *length));
            for position in 0..*length {
                for head in 0..shape.heads {
                    let at = (position * shape.heads + head) * shape.width;
                    let cache_position =
                        CachePosition { block: table[position / BLOCK], offset: position % BLOCK };
                    kv.put(cache_position, 1, head, &k[at..][..shape.width], &v[at..][..shape.width]);
                }
            }
            tables.push(table);
            keys.push(k);
            values.push(v);
        }
        Case { kv, tables, keys, values }
    }

    /// The plain formula in f64, for a query of a head at `position`.
    fn expected(
        case: &Case,
        scoring: Scoring,
        of_head: (usize, usize),
        position: usize,
        query: &[f32],
    ) -> Vec<f64> {
        expected_of(case, scoring, of_head, 0..=position, position, query)
    }

    /// As [`expected`], of `keys`.
    fn expected_of(
        case: &Case,
        scoring: Scoring,
        (sequence, head): (usize, usize),
        keys: std::ops::RangeInclusive<usize>,
        position: usize,
        query: &[f32],
    ) -> Vec<f64> {
        let KvShape { heads, width, .. } = case.kv.shape();
        let at = |position: usize| (position * heads + head) * width;
        let score = |position: usize| {
            let key = &case.keys[sequence][at(position)..][..width];
            let sum: f64 = query.iter().zip(key).map(|(a, b)| f64::from(a * b)).sum();
            let score = sum * f64::from(scoring.scale);
            let cap = scoring.soft_cap.map(f64::from);
            cap.map_or(score, |cap| cap * (score / cap).tanh()).exp()
        };
        let is_seen = |key: usize| scoring.window.is_none_or(|window| position.abs_diff(key) < window);
        let weights: Vec<f64> = keys.map(|key| if is_seen(key) { score(key) } else { 0.0 }).collect();
        let total: f64 = weights.iter().sum();
        let value = |number: usize| {
            let sum = |(position, weight): (usize, &f64)| {
                weight * f64::from(case.values[sequence][at(position) + number])
            };
            weights.iter().enumerate().map(sum).sum::<f64>() / total
        };
        (0..width).map(value).collect()
    }

    #[test]
    fn it_equals_the_plain_formula_for_any_shape_on_every_cpu() {
        for numbers in [KvNumbers::F32, KvNumbers::Bf16] {
            for (heads, group, width) in [(1, 1, 64), (3, 3, 64), (2, 7, 24), (1, 8, 128)] {
                let shape = KvShape { layers: 2, heads, width, numbers };
                let lengths = [1, 40, 100];
                let case = case(shape, &lengths);
                // A single token, a whole prompt, the end of a prompt.
                let firsts = [0, 0, 63];
                let rows: usize = lengths.iter().zip(firsts).map(|(length, first)| length - first).sum();
                let row = heads * group * width;
                let queries = flat(&[rows, row], 9);
                let spans: Vec<Span<'_>> = (0..3)
                    .map(|i| Span {
                        blocks: &case.tables[i],
                        first: firsts[i],
                        count: lengths[i] - firsts[i],
                    })
                    .collect();
                let usual = Scoring::usual(width);
                for scoring in [
                    usual,
                    Scoring { window: Some(1), ..usual },
                    Scoring { scale: 0.7, window: Some(37), soft_cap: Some(1.5) },
                    Scoring { window: Some(1_000), ..usual },
                ] {
                    on_every_cpu(|| {
                        let mut out = vec![f32::NAN; rows * row];
                        attend(&case.kv, 1, scoring, &spans, &queries, &mut out);
                        let mut at = 0;
                        for (sequence, span) in spans.iter().enumerate() {
                            for position in span.first..span.first + span.count {
                                for head in 0..heads * group {
                                    let query = &queries[at..at + width];
                                    let of_head = (sequence, head / group);
                                    let expected = expected(&case, scoring, of_head, position, query);
                                    for (ours, expected) in out[at..].iter().zip(expected) {
                                        let error = (f64::from(*ours) - expected).abs();
                                        assert!(
                                            error < 2e-6,
                                            "{shape:?} {sequence} {position} {head}: {error}"
                                        );
                                    }
                                    at += width;
                                }
                            }
                        }
                    });
                }
            }
        }
    }

    #[test]
    fn attention_both_ways_equals_the_plain_formula_and_is_the_same_in_any_batch() {
        for (heads, group, width) in [(1, 1, 64), (2, 3, 24)] {
            let shape = KvShape { layers: 2, heads, width, numbers: KvNumbers::F32 };
            let lengths = [1, 40, 100];
            let (case, row) = (case(shape, &lengths), heads * group * width);
            let queries = flat(&[141, row], 9);
            let usual = Scoring::usual(width);
            for scoring in [
                usual,
                Scoring { window: Some(1), ..usual },
                Scoring { scale: 0.7, window: Some(20), soft_cap: Some(1.5) },
                Scoring { window: Some(usize::MAX), ..usual },
            ] {
                let span = |i: usize| Span { blocks: &case.tables[i], first: 0, count: lengths[i] };
                let of = |spans: &[Span<'_>], queries: &[f32]| {
                    let mut out = vec![f32::NAN; queries.len()];
                    attend_both_ways(&case.kv, 1, scoring, spans, queries, &mut out);
                    out
                };
                on_every_cpu(|| {
                    let together = of(&[span(0), span(1), span(2)], &queries);
                    let mut first = 0;
                    for (sequence, length) in lengths.into_iter().enumerate() {
                        let rows = first * row..(first + length) * row;
                        assert_eq!(of(&[span(sequence)], &queries[rows.clone()]), together[rows]);
                        for position in 0..length {
                            for head in 0..heads * group {
                                let at = (first + position) * row + head * width;
                                let expected = expected_of(
                                    &case,
                                    scoring,
                                    (sequence, head / group),
                                    0..=length - 1,
                                    position,
                                    &queries[at..at + width],
                                );
                                for (ours, expected) in together[at..].iter().zip(expected) {
                                    let error = (f64::from(*ours) - expected).abs();
                                    assert!(error < 2e-6, "{shape:?} {sequence} {position} {head}: {error}");
                                }
                            }
                        }
                        first += length;
                    }
                });
            }
        }
    }

    #[test]
    fn cross_attention_equals_the_plain_formula_and_is_the_same_in_any_batch() {
        for (heads, width, lengths) in [(2, 64, [1, 40, 100]), (3, 24, [33, 7, 64])] {
            let shape = KvShape { layers: 2, heads, width, numbers: KvNumbers::F32 };
            let case = case(shape, &lengths);
            let (counts, row) = ([1, 5, 20], heads * width);
            let queries = flat(&[26, row], 9);
            let span = |i: usize| CrossSpan { blocks: &case.tables[i], keys: lengths[i], count: counts[i] };
            let of = |spans: &[CrossSpan<'_>], queries: &[f32]| {
                let mut out = vec![f32::NAN; queries.len()];
                attend_across(&case.kv, 1, spans, queries, &mut out);
                out
            };
            on_every_cpu(|| {
                let together = of(&[span(0), span(1), span(2)], &queries);
                let tokens = counts.iter().enumerate().flat_map(|(index, count)| vec![index; *count]);
                for (token, sequence) in tokens.enumerate() {
                    let own = &queries[token * row..][..row];
                    for head in 0..heads {
                        let expected = expected(
                            &case,
                            Scoring::usual(width),
                            (sequence, head),
                            lengths[sequence] - 1,
                            &own[head * width..][..width],
                        );
                        for (ours, expected) in together[token * row + head * width..].iter().zip(expected) {
                            let error = (f64::from(*ours) - expected).abs();
                            assert!(error < 2e-6, "{shape:?} {token} {head}: {error}");
                        }
                    }
                    // The values, weighted by `weights_across`, give the same sums.
                    for head in 0..heads {
                        let own = &own[head * width..][..width];
                        let one = CrossSpan { count: 1, ..span(sequence) };
                        let weights = weights_across(&case.kv, 1, head, one, own);
                        assert_eq!(weights.len(), lengths[sequence]);
                        for number in 0..width {
                            let value = |position: usize| {
                                case.values[sequence][(position * heads + head) * width + number]
                            };
                            let sum: f32 =
                                weights.iter().enumerate().map(|(position, it)| it * value(position)).sum();
                            let error = (sum - together[token * row + head * width + number]).abs();
                            assert!(error < 2e-6, "{shape:?} {token} {head}: {error}");
                        }
                    }
                    let alone = of(&[CrossSpan { count: 1, ..span(sequence) }], own);
                    assert_eq!(alone, together[token * row..][..row], "{token}");
                }
            });
        }
    }

    #[test]
    fn a_token_gives_the_same_bits_in_any_batch_and_in_any_step() {
        let usual = Scoring::usual(64);
        for scoring in [usual, Scoring { window: Some(35), soft_cap: Some(2.0), ..usual }] {
            on_every_cpu(|| same_bits(scoring));
        }
    }

    fn same_bits(scoring: Scoring) {
        for numbers in [KvNumbers::F32, KvNumbers::Bf16] {
            let shape = KvShape { layers: 2, heads: 2, width: 64, numbers };
            let case = case(shape, &[70, 33]);
            let row = 6 * 64;
            let queries = flat(&[103, row], 3);
            let all = [(0, 0..70), (1, 0..33)];
            let of = |parts: &[(usize, std::ops::Range<usize>)]| {
                let spans: Vec<Span<'_>> = parts
                    .iter()
                    .map(|(i, at)| Span { blocks: &case.tables[*i], first: at.start, count: at.len() })
                    .collect();
                let own = parts
                    .iter()
                    .flat_map(|(i, at)| &queries[(i * 70 + at.start) * row..(i * 70 + at.end) * row]);
                let own: Vec<f32> = own.copied().collect();
                let mut out = vec![f32::NAN; own.len()];
                attend(&case.kv, 1, scoring, &spans, &own, &mut out);
                out
            };
            let together = of(&all);
            for position in [0, 1, 15, 16, 40, 69] {
                let expected = &together[position * row..(position + 1) * row];
                assert_eq!(of(&[(0, position..position + 1)]), expected, "alone, {position}");
                let from = position.saturating_sub(7);
                let cut = of(&[(1, 3..9), (0, from..position + 1)]);
                assert_eq!(&cut[cut.len() - row..], expected, "cut otherwise, {position}");
            }
        }
    }

    #[test]
    fn blocks_before_the_window_are_not_read() {
        let shape = KvShape { layers: 2, heads: 1, width: 64, numbers: KvNumbers::F32 };
        let mut case = case(shape, &[100]);
        let scoring = Scoring { window: Some(33), ..Scoring::usual(64) };
        let queries = flat(&[1, 64], 3);
        let of = |table: &[u32]| {
            let mut out = vec![f32::NAN; 64];
            let span = Span { blocks: table, first: 99, count: 1 };
            attend(&case.kv, 1, scoring, &[span], &queries, &mut out);
            out
        };
        let table = std::mem::take(&mut case.tables[0]);
        // The token at 99 attends to those from 67 on, so to blocks 2 and 3.
        let freed = [u32::MAX, u32::MAX, table[2], table[3]];
        assert_eq!(of(&freed), of(&table));
    }
}
