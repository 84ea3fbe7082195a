//! A decoder on a CPU. A step computes tokens of any number of sequences, with one row for each token. Each row has its
//! own position. Owns the weights. Each row is computed separately; attention also reads the keys and values of the
//! row's own sequence. So a token's results do not depend on what else is in the step.
//!
//! [`Layers`] computes a vector for each token, [`Decoder`] the logits of the tokens that follow.

use std::collections::BTreeMap;

use super::DecoderWeights;
use super::config::{DecoderConfig, Experts, LayerConfig};
use super::{KNOWN_TOKENS, Part, known_ids, parts};
use crate::model::nets::fitness::{self, COMPARED_LAYERS};
use crate::model::ops::causal::{Scoring, Span, attend};
use crate::model::ops::kv::{BLOCK, KvBlocks, KvNumbers, KvShape};
use crate::model::ops::{Activation, Matrix, Rotary, gate, multiply_together, rms_norm};
use crate::model::{LoadError, LoadSpec};

/// The largest number of rows of a feed-forward sublayer's inner results, which are several times as wide as its input, that
/// are in memory together.
const MAX_INNER_ROWS: usize = 4_096;

/// A decoder in the host's memory: its weights, and the buffers of a step.
pub struct Decoder {
    layers: Layers,
    /// The output projection. None if the token embeddings serve as it.
    head: Option<Linear>,
    /// Reused by the next step.
    buffers: Buffers,
}

/// A decoder without its output projection.
pub(super) struct Layers {
    config: DecoderConfig,
    token_embeddings: Linear,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// One for each of the configuration's rotations.
    rotaries: Vec<Rotary>,
}

/// The rows of a step, one for each token.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// Their tokens, which must be in the vocabulary.
    pub ids: &'a [u32],
    /// Their positions in their sequences.
    pub positions: &'a [usize],
    /// The rows whose results are wanted.
    pub wanted: &'a [usize],
}

/// Queries, keys and values of some rows, each `[rows, heads·width]`. They are rotated already.
#[derive(Clone, Copy)]
pub(super) struct Qkv<'a> {
    pub queries: &'a [f32],
    pub keys: &'a [f32],
    pub values: &'a [f32],
}

/// The attention of a step's rows, and where their keys and values are kept.
pub(super) trait AttendRows {
    /// `out` ← the attention of the rows in the layer number `layer`.
    fn attend(&mut self, layer: usize, scoring: Scoring, qkv: Qkv<'_>, out: &mut [f32]);
}

/// Causal attention to the tokens of these spans and to those before them, which are in the cache.
struct Cached<'a> {
    kv: &'a mut KvBlocks,
    spans: &'a [Span<'a>],
}

impl AttendRows for Cached<'_> {
    fn attend(
        &mut self,
        layer: usize,
        scoring: Scoring,
        Qkv { queries, keys, values }: Qkv<'_>,
        out: &mut [f32],
    ) {
        put(self.kv, layer, self.spans, keys, values);
        attend(self.kv, layer, scoring, self.spans, queries, out);
    }
}

/// Writes the keys and values of the tokens of `spans`, one row for each token, to a layer of the cache.
pub(super) fn put(kv: &mut KvBlocks, layer: usize, spans: &[Span<'_>], keys: &[f32], values: &[f32]) {
    let KvShape { heads, width, .. } = kv.shape();
    let positions =
        spans.iter().flat_map(|span| (span.first..span.first + span.count).map(|at| span.cache_position(at)));
    let rows = keys.chunks_exact(heads * width).zip(values.chunks_exact(heads * width));
    for (position, (keys, values)) in positions.zip(rows) {
        for (head, (key, value)) in keys.chunks_exact(width).zip(values.chunks_exact(width)).enumerate() {
            kv.put(position, layer, head, key, value);
        }
    }
}

/// The first fault of each row that has one, by the rows of a step.
pub type RouterFaults = BTreeMap<usize, RouterFault>;

/// A router gave a row a score from which no expert can be chosen: NaN, or infinite.
#[derive(Clone, Copy, Debug)]
pub struct RouterFault {
    /// The layer.
    pub layer: usize,
    expert: usize,
    score: f32,
}

impl std::fmt::Display for RouterFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { layer, expert, score } = self;
        let Part { safetensors, gguf } = parts::ROUTER;
        write!(
            f,
            "the router of layer {layer} ({safetensors}, in GGUF files {gguf}) gave expert {expert} the score {score}"
        )
    }
}

/// A matrix with its bias.
pub(super) struct Linear {
    /// Its name in the cache of packed matrices.
    pub key: String,
    pub matrix: Matrix,
    pub bias: Option<Vec<f32>>,
}

impl Linear {
    /// `out` `[rows, width]` ← `rows` `[rows, depth]` times the matrix, plus the bias.
    fn apply(&self, rows: &[f32], out: &mut Vec<f32>) {
        out.resize(rows.len() / self.matrix.depth() * self.matrix.width(), 0.0);
        self.matrix.multiply(rows, out);
        self.add_bias(out);
    }

    fn add_bias(&self, rows: &mut [f32]) {
        if let Some(bias) = &self.bias {
            for row in rows.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
            }
        }
    }
}

/// `outs` ← `rows` times each of the layers' matrices, plus their biases.
fn apply_together<const N: usize>(layers: [&Linear; N], rows: &[f32], mut outs: [&mut Vec<f32>; N]) {
    for (layer, out) in layers.iter().zip(&mut outs) {
        out.resize(rows.len() / layer.matrix.depth() * layer.matrix.width(), 0.0);
    }
    multiply_together(layers.map(|layer| &layer.matrix), rows, outs.each_mut().map(|out| out.as_mut_slice()));
    layers.iter().zip(outs).for_each(|(layer, out)| layer.add_bias(out));
}

/// The weights of a layer.
pub(super) struct Layer {
    /// The norms before and after attention.
    pub norms: [Option<Vec<f32>>; 2],
    /// The projections to queries, keys and values.
    pub qkv: [Linear; 3],
    /// The norms of queries and of keys: of each head, or of all heads together.
    pub head_norms: Option<[Vec<f32>; 2]>,
    pub out: Linear,
    /// The norms before and after the feed-forward sublayer.
    pub inner_norms: [Option<Vec<f32>>; 2],
    pub feed_forward: FeedForward,
}

/// A feed-forward sublayer.
pub(super) enum FeedForward {
    /// It has one gated network.
    Dense(Box<Gated>),
    /// It has several gated networks (experts). Each token is computed by some of them.
    Experts {
        /// Gives each expert's score.
        router: Matrix,
        experts: Vec<Gated>,
    },
}

/// (activation(x·G) * x·U)·D.
pub(super) struct Gated {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

impl Gated {
    fn new([gate, up, down]: [Linear; 3]) -> Self {
        Self { gate, up, down }
    }

    fn apply(&self, activation: Activation, rows: &[f32], buffers: &mut GatedBuffers, out: &mut Vec<f32>) {
        let GatedBuffers { gates, up } = buffers;
        apply_together([&self.gate, &self.up], rows, [gates, up]);
        gate(activation, gates, up);
        self.down.apply(gates, out);
    }
}

impl Layer {
    /// Reads the layer number `index`.
    ///
    /// # Errors
    /// As [`Decoder::load`].
    pub fn load(weights: &DecoderWeights, config: &DecoderConfig, index: usize) -> Result<Self, LoadError> {
        let hidden = config.hidden;
        let [norm, out_norm, inner_norm, inner_out_norm] = weights.layer_norms(index, hidden)?;
        let feed_forward = match config.experts.filter(|_| config.layers[index].has_experts) {
            None => FeedForward::Dense(Box::new(Gated::new(weights.feed_forward(index, config)?))),
            Some(experts) => {
                let expert = |expert| weights.expert(index, expert, experts, hidden).map(Gated::new);
                FeedForward::Experts {
                    router: weights.router(index, [hidden, experts.count])?,
                    experts: (0..experts.count).map(expert).collect::<Result<_, _>>()?,
                }
            }
        };
        Ok(Self {
            norms: [norm, out_norm],
            qkv: weights.qkv(index, config)?,
            head_norms: weights.head_norms(index, config)?,
            out: weights.out(index, config)?,
            inner_norms: [inner_norm, inner_out_norm],
            feed_forward,
        })
    }

    /// All its matrices but the router's.
    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let networks = match &self.feed_forward {
            FeedForward::Dense(gated) => std::slice::from_ref(&**gated),
            FeedForward::Experts { experts, .. } => experts,
        };
        let networks = networks.iter().flat_map(|Gated { gate, up, down }| [gate, up, down]);
        self.qkv.iter().chain([&self.out]).chain(networks)
    }
}

/// The buffers of a step.
#[derive(Default)]
pub(super) struct Buffers {
    x: Vec<f32>,
    normed: Vec<f32>,
    qkv: [Vec<f32>; 3],
    attended: Vec<f32>,
    product: Vec<f32>,
    gated: GatedBuffers,
    experts: ExpertBuffers,
    /// The faults of the step.
    faults: RouterFaults,
}

#[derive(Default)]
struct GatedBuffers {
    gates: Vec<f32>,
    up: Vec<f32>,
}

#[derive(Default)]
struct ExpertBuffers {
    /// The scores of each row's experts.
    scores: Vec<f32>,
    /// The rows that an expert computes, and its results.
    rows: Vec<f32>,
    results: Vec<f32>,
}

/// Compares the logits after a known prompt, computed by all layers or by the first, in the format of `weights`, with those of `reference`, the same
/// weights in f32.
///
/// # Errors
/// [`LoadError::Unfit`] if they differ, [`LoadError::File`] as for [`Decoder::load`], [`LoadError::Device`] if there is no
/// memory for keys and values.
pub fn compare_with_f32(
    spec: &LoadSpec,
    weights: &DecoderWeights,
    reference: &DecoderWeights,
    config: &DecoderConfig,
) -> Result<(), LoadError> {
    // With "auto" all layers are computed, since errors grow from layer to layer. With a type that the operator set the
    // first are enough to show a device that computes wrongly.
    let mut config = config.clone();
    if !spec.is_dtype_auto {
        config.layers.truncate(COMPARED_LAYERS);
    }
    let logits = |weights| {
        let mut decoder = Decoder::load(weights, &config, KNOWN_TOKENS)?;
        let blocks: Vec<u32> = (0..KNOWN_TOKENS.div_ceil(BLOCK) as u32).collect();
        let kv = KvBlocks::new(config.kv_shape(KvNumbers::F32), blocks.len());
        let mut kv = kv.map_err(|error| spec.failed(format!("keys and values: {error}")))?;
        let mut logits = Vec::new();
        let span = Span { blocks: &blocks, first: 0, count: KNOWN_TOKENS };
        decoder.forward(&mut kv, &known_ids(config.vocabulary), &[span], &[KNOWN_TOKENS - 1], &mut logits);
        Ok::<_, LoadError>(logits)
    };
    let (found, expected) = (logits(weights)?, logits(reference)?);
    fitness::compare_logits(spec, &format!("prompt of {KNOWN_TOKENS} tokens"), found, expected)
}

impl Decoder {
    /// Reads the weights. `context` is the largest number of tokens of a sequence.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape.
    pub fn load(weights: &DecoderWeights, config: &DecoderConfig, context: usize) -> Result<Self, LoadError> {
        let layers = Layers::load(weights, config, context)?;
        let shape = [config.hidden, config.vocabulary];
        let head = if config.is_tied { None } else { Some(weights.head(shape)?) };
        Ok(Self { layers, head, buffers: Buffers::default() })
    }

    /// The faults of the last step. The logits after such a row are not finite.
    pub fn faults(&self) -> &RouterFaults {
        &self.buffers.faults
    }

    /// All matrices, with their names in the cache.
    pub fn matrices(&self) -> impl Iterator<Item = (String, &Matrix)> {
        let beside = std::iter::once(&self.layers.token_embeddings).chain(&self.head);
        let all = beside.chain(self.layers.layers.iter().flat_map(Layer::linears));
        all.map(|linear| (linear.key.clone(), &linear.matrix))
    }

    /// Computes a step. For each row in `wanted`, writes the logits of the token that follows it to `logits`, which
    /// becomes `[wanted.len(), vocabulary]`. `ids` are the tokens of all `spans`, in their order; they must be in the
    /// vocabulary. The keys and values of these tokens are written to `kv`.
    pub fn forward(
        &mut self,
        kv: &mut KvBlocks,
        ids: &[u32],
        spans: &[Span<'_>],
        wanted: &[usize],
        logits: &mut Vec<f32>,
    ) {
        logits.resize(wanted.len() * self.layers.config.vocabulary, 0.0);
        if ids.is_empty() {
            return;
        }
        let positions = spans.iter().flat_map(|span| span.first..span.first + span.count).collect::<Vec<_>>();
        let rows = Rows { ids, positions: &positions, wanted };
        on_one_of_rayons_threads(|| {
            let normed = self.layers.vectors(rows, &mut Cached { kv, spans }, &mut self.buffers);
            self.head.as_ref().unwrap_or(&self.layers.token_embeddings).matrix.multiply(&normed, logits);
            self.layers.config.finish_logits(logits);
        });
    }
}

/// Runs `step` on one of rayon's threads, which share the matrix products. From a thread outside the pool, each product
/// would need a hand-over and a wake-up, which take longer than most products.
pub(in crate::model::nets) fn on_one_of_rayons_threads(step: impl FnOnce() + Send) {
    if rayon::current_num_threads() == 1 {
        return step();
    }
    rayon::scope(|_| step());
}

impl Layers {
    /// Reads the weights. `context` is the largest number of tokens of a sequence.
    ///
    /// # Errors
    /// As [`Decoder::load`].
    pub fn load(weights: &DecoderWeights, config: &DecoderConfig, context: usize) -> Result<Self, LoadError> {
        let layer = |index| Layer::load(weights, config, index);
        Ok(Self {
            token_embeddings: weights.token_embeddings([config.hidden, config.vocabulary])?,
            layers: (0..config.layers.len()).map(layer).collect::<Result<_, _>>()?,
            norm: weights.last_norm(config.hidden)?,
            rotaries: config.rotaries(context),
            config: config.clone(),
        })
    }

    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The vectors `[wanted, hidden]` of the wanted rows: the last layer's results, normalised.
    pub fn vectors(
        &self,
        Rows { ids, positions, wanted }: Rows<'_>,
        attention: &mut impl AttendRows,
        buffers: &mut Buffers,
    ) -> Vec<f32> {
        let DecoderConfig { hidden, embedding_scale, .. } = self.config;
        buffers.faults.clear();
        buffers.x.resize(ids.len() * hidden, 0.0);
        for (id, row) in ids.iter().zip(buffers.x.chunks_exact_mut(hidden)) {
            self.token_embeddings.matrix.column(*id as usize, row);
        }
        if embedding_scale != 1.0 {
            buffers.x.iter_mut().for_each(|x| *x *= embedding_scale);
        }
        for (index, layer) in self.layers.iter().enumerate() {
            self.attention(layer, index, positions, attention, buffers);
            self.feed_forward(layer, index, buffers);
        }
        let mut last = Vec::with_capacity(wanted.len() * hidden);
        wanted.iter().for_each(|row| last.extend_from_slice(&buffers.x[row * hidden..][..hidden]));
        let mut normed = vec![0.0; last.len()];
        rms_norm(&last, &self.norm, self.config.eps, &mut normed);
        normed
    }

    /// x += attention(norm(x))·O.
    fn attention(
        &self,
        layer: &Layer,
        index: usize,
        positions: &[usize],
        attention: &mut impl AttendRows,
        buffers: &mut Buffers,
    ) {
        let DecoderConfig { eps, query_growth, .. } = self.config;
        let LayerConfig { rotation, .. } = self.config.layers[index];
        let Buffers { x, normed, qkv, attended, product, .. } = buffers;
        norm_or_copy(layer.norms[0].as_ref(), x, eps, normed);
        apply_together(layer.qkv.each_ref(), normed, qkv.each_mut());
        if let Some(norms) = &layer.head_norms {
            for (part, norm) in qkv.iter_mut().zip(norms) {
                normed.resize(part.len(), 0.0);
                rms_norm(part, norm, eps, normed);
                std::mem::swap(part, normed);
            }
        }
        let [queries, keys, values] = qkv;
        let rotary = rotation.map(|rotation| &self.rotaries[rotation]);
        let tokens = queries
            .chunks_exact_mut(self.config.query_width())
            .zip(keys.chunks_exact_mut(self.config.key_width()));
        for (position, (query, key)) in positions.iter().zip(tokens) {
            if let Some(rotary) = rotary {
                rotary.rotate(*position, query);
                rotary.rotate(*position, key);
            }
            if let Some(growth) = query_growth {
                let factor = growth.at(*position);
                query.iter_mut().for_each(|x| *x *= factor);
            }
        }
        attended.resize(queries.len(), 0.0);
        let scoring = self.config.scoring(&self.config.layers[index]);
        attention.attend(index, scoring, Qkv { queries, keys, values }, attended);
        layer.out.apply(attended, product);
        self.add(x, product, layer.norms[1].as_ref(), normed);
    }

    /// x += the feed-forward sublayer of norm(x).
    fn feed_forward(&self, layer: &Layer, index: usize, buffers: &mut Buffers) {
        let DecoderConfig { eps, activation, .. } = self.config;
        let Buffers { x, normed, product, gated, experts: expert_buffers, faults, .. } = buffers;
        norm_or_copy(layer.inner_norms[0].as_ref(), x, eps, normed);
        match (&layer.feed_forward, self.config.experts) {
            (FeedForward::Dense(network), _) => {
                let most = MAX_INNER_ROWS * self.config.hidden;
                if normed.len() <= most {
                    network.apply(activation, normed, gated, product);
                } else {
                    product.clear();
                    let mut part = Vec::new();
                    for rows in normed.chunks(most) {
                        network.apply(activation, rows, gated, &mut part);
                        product.extend_from_slice(&part);
                    }
                }
            }
            (FeedForward::Experts { router, experts }, Some(sizes)) => {
                let ExpertBuffers { scores, rows, results } = expert_buffers;
                scores.resize(normed.len() / router.depth() * router.width(), 0.0);
                router.multiply(normed, scores);
                let chosen = choose_experts(scores, sizes, index, faults);
                let hidden = self.config.hidden;
                product.clear();
                product.resize(x.len(), 0.0);
                // A row's sum is in the order of the experts, whatever the other rows are.
                for (index, expert) in experts.iter().enumerate() {
                    let weight_of = |(row, chosen): (usize, &Vec<(usize, f32)>)| {
                        let (_, weight) = chosen.iter().find(|(expert, _)| *expert == index)?;
                        Some((row, *weight))
                    };
                    let own: Vec<(usize, f32)> = chosen.iter().enumerate().filter_map(weight_of).collect();
                    if own.is_empty() {
                        continue;
                    }
                    rows.clear();
                    own.iter().for_each(|(row, _)| rows.extend_from_slice(&normed[row * hidden..][..hidden]));
                    expert.apply(activation, rows, gated, results);
                    for ((row, weight), result) in own.iter().zip(results.chunks_exact(hidden)) {
                        let sum = &mut product[row * hidden..][..hidden];
                        sum.iter_mut().zip(result).for_each(|(sum, result)| *sum += weight * result);
                    }
                }
            }
            (FeedForward::Experts { .. }, None) => unreachable!("experts are loaded if there are some"),
        }
        self.add(x, product, layer.inner_norms[1].as_ref(), normed);
    }

    /// x += norm(`result`), times the factor of results. `scratch` is overwritten.
    fn add(&self, x: &mut [f32], result: &mut Vec<f32>, norm: Option<&Vec<f32>>, scratch: &mut Vec<f32>) {
        if norm.is_some() {
            norm_or_copy(norm, result, self.config.eps, scratch);
            std::mem::swap(result, scratch);
        }
        let scale = self.config.residual_scale;
        if scale == 1.0 {
            x.iter_mut().zip(result).for_each(|(x, result)| *x += *result);
        } else {
            x.iter_mut().zip(result).for_each(|(x, result)| *x += scale * *result);
        }
    }
}

/// `out` ← the normalised rows, or a copy of them if there is no norm.
fn norm_or_copy(norm: Option<&Vec<f32>>, rows: &[f32], eps: f32, out: &mut Vec<f32>) {
    out.resize(rows.len(), 0.0);
    match norm {
        Some(norm) => rms_norm(rows, norm, eps, out),
        None => out.copy_from_slice(rows),
    }
}

/// The experts of each row with their weights, the likeliest first. `scores` are `[rows, experts]`. Adds a fault for
/// each row for which none can be chosen, unless the row has one.
pub(super) fn choose_experts(
    scores: &[f32],
    experts: Experts,
    layer: usize,
    faults: &mut RouterFaults,
) -> Vec<Vec<(usize, f32)>> {
    let rows = scores.chunks_exact(experts.count).enumerate();
    let chosen = rows.map(|(row, scores)| {
        choose_for_row(scores, experts).unwrap_or_else(|(expert, score)| {
            faults.entry(row).or_insert(RouterFault { layer, expert, score });
            // This makes the row's logits not finite, so that the fault is found.
            vec![(0, f32::NAN)]
        })
    });
    chosen.collect()
}

/// The experts of one row: the largest of the softmax of `scores`. Among equally likely experts, those with lower
/// numbers are chosen. The error is an expert whose score is NaN or infinite, with the score.
fn choose_for_row(
    scores: &[f32],
    Experts { used, is_normalised, .. }: Experts,
) -> Result<Vec<(usize, f32)>, (usize, f32)> {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut all: Vec<(usize, f32)> = scores.iter().map(|score| (score - most).exp()).enumerate().collect();
    let sum: f32 = all.iter().map(|(_, weight)| weight).sum();
    // NaN or an infinite largest score makes the sum NaN. So the check takes one comparison for each row.
    if sum.is_nan() {
        let expert = scores.iter().position(|score| !score.is_finite()).unwrap_or_default();
        return Err((expert, scores[expert]));
    }
    all.iter_mut().for_each(|(_, weight)| *weight /= sum);
    all.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    all.truncate(used);
    if is_normalised {
        let sum: f32 = all.iter().map(|(_, weight)| weight).sum();
        all.iter_mut().for_each(|(_, weight)| *weight /= sum);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_for_which_no_expert_can_be_chosen_is_named_with_the_score() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        #[rustfmt::skip]
        let scores = [
            0.0, 1.0, 3.0,
            2.0, nan, 1.0,
            -inf, 1.0, 1.0,
            1.0, 2.0, inf,
            -inf, -inf, -inf,
        ];
        let experts = Experts { count: 3, used: 2, inner: 1, is_normalised: true };
        let mut faults = RouterFaults::new();
        let chosen = choose_experts(&scores, experts, 7, &mut faults);
        let numbers = |row: usize| chosen[row].iter().map(|(expert, _)| *expert).collect::<Vec<_>>();
        assert_eq!((numbers(0), numbers(2)), (vec![2, 1], vec![1, 2]));
        let said: Vec<(usize, String)> =
            faults.iter().map(|(row, fault)| (*row, fault.to_string())).collect();
        let expected = [(1, "1 the score NaN"), (3, "2 the score inf"), (4, "0 the score -inf")];
        let start = "the router of layer 7 (mlp.gate, in GGUF files ffn_gate_inp) gave expert";
        assert_eq!(said, expected.map(|(row, end)| (row, format!("{start} {end}"))));
        // A row keeps its first fault.
        choose_experts(&[nan; 15], experts, 8, &mut faults);
        assert_eq!((faults[&1].layer, faults[&0].layer), (7, 8));
    }
}
