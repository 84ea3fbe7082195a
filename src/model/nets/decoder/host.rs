//! A decoder on a CPU. A step computes tokens of any number of sequences, with one row for each token. Each row has its
//! own position. Owns the weights. Each row is computed separately; attention also reads the keys and values of the
//! row's own sequence. So a token's results do not depend on what else is in the step.

use super::DecoderWeights;
use super::config::DecoderConfig;
use super::{KNOWN_TOKENS, known_ids};
use crate::model::nets::fitness::{self, COMPARED_LAYERS};
use crate::model::ops::causal::{Span, attend};
use crate::model::ops::kv::{BLOCK, KvBlocks, KvNumbers, KvShape};
use crate::model::ops::{Matrix, Rotary, multiply_together, rms_norm, silu_multiply};
use crate::model::{LoadError, LoadSpec};

/// A decoder in the host's memory: its weights, and the buffers of a step.
pub struct Decoder {
    config: DecoderConfig,
    token_embeddings: Matrix,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// The output projection. None if the token embeddings serve as it.
    head: Option<Matrix>,
    rotary: Rotary,
    /// Reused by the next step.
    buffers: Buffers,
}

/// The weights of a layer.
pub(super) struct Layer {
    pub norm: Vec<f32>,
    /// The projections to queries, keys and values.
    pub qkv: [Matrix; 3],
    /// The biases of these projections.
    pub biases: Option<[Vec<f32>; 3]>,
    /// The norms of each head of queries and of keys.
    pub head_norms: Option<[Vec<f32>; 2]>,
    pub out: Matrix,
    pub inner_norm: Vec<f32>,
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
}

impl Layer {
    /// Reads the layer number `index`.
    ///
    /// # Errors
    /// As [`Decoder::load`].
    pub fn load(weights: &DecoderWeights, config: &DecoderConfig, index: usize) -> Result<Self, LoadError> {
        let DecoderConfig { hidden, inner, heads, kv_heads, head_width, .. } = *config;
        let (query_width, key_width) = (heads * head_width, kv_heads * head_width);
        let linear = |part, shape| weights.matrix(index, part, shape);
        let vector = |part, length| weights.vector(index, part, length);
        let names = weights.tensor_names();
        let biases = match names.biases {
            Some([q, k, v]) => Some([vector(q, query_width)?, vector(k, key_width)?, vector(v, key_width)?]),
            None => None,
        };
        let head_norms = match names.head_norms {
            Some([q, k]) => Some([vector(q, head_width)?, vector(k, head_width)?]),
            None => None,
        };
        let [q, k, v] = names.qkv;
        Ok(Self {
            norm: vector(names.norm, hidden)?,
            qkv: [
                weights.rotary_matrix(index, q, [hidden, query_width], heads)?,
                weights.rotary_matrix(index, k, [hidden, key_width], kv_heads)?,
                linear(v, [hidden, key_width])?,
            ],
            biases,
            head_norms,
            out: linear(names.out, [query_width, hidden])?,
            inner_norm: vector(names.inner_norm, hidden)?,
            gate: linear(names.gate, [hidden, inner])?,
            up: linear(names.up, [hidden, inner])?,
            down: linear(names.down, [inner, hidden])?,
        })
    }
}

#[derive(Default)]
struct Buffers {
    x: Vec<f32>,
    normed: Vec<f32>,
    qkv: [Vec<f32>; 3],
    attended: Vec<f32>,
    product: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
}

/// Compares the logits of some layers after a known prompt, in the format of `weights`, with those of `reference`, the same
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
    // Errors grow from layer to layer, so all are compared where the operator has not chosen the precision.
    let layers = if spec.is_dtype_chosen { config.layers } else { config.layers.min(COMPARED_LAYERS) };
    let config = DecoderConfig { layers, ..config.clone() };
    let logits = |weights| {
        let mut decoder = Decoder::load(weights, &config, KNOWN_TOKENS)?;
        let DecoderConfig { layers, kv_heads: heads, head_width: width, .. } = config;
        let blocks: Vec<u32> = (0..KNOWN_TOKENS.div_ceil(BLOCK) as u32).collect();
        let kv = KvBlocks::new(KvShape { layers, heads, width, numbers: KvNumbers::F32 }, blocks.len());
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
        let DecoderConfig { hidden, vocabulary, .. } = *config;
        let layer = |index| Layer::load(weights, config, index);
        Ok(Self {
            token_embeddings: weights.token_embeddings([hidden, vocabulary])?,
            layers: (0..config.layers).map(layer).collect::<Result<_, _>>()?,
            norm: weights.last_norm(hidden)?,
            head: if config.is_tied { None } else { Some(weights.head([hidden, vocabulary])?) },
            rotary: Rotary::from_frequencies(&config.frequencies, context),
            config: config.clone(),
            buffers: Buffers::default(),
        })
    }

    /// All matrices, with their names in `weights`.
    pub fn matrices(&self, weights: &DecoderWeights) -> Vec<(String, &Matrix)> {
        let names = weights.tensor_names();
        let [q, k, v] = names.qkv;
        let mut all = vec![(weights.token_embeddings_name().to_owned(), &self.token_embeddings)];
        all.extend(self.head.as_ref().map(|head| (weights.head_name().to_owned(), head)));
        for (index, Layer { qkv: [queries, keys, values], out, gate, up, down, .. }) in
            self.layers.iter().enumerate()
        {
            let layer_names = [q, k, v, names.out, names.gate, names.up, names.down];
            let layer_names = layer_names.map(|part| weights.layer_name(index, part));
            all.extend(layer_names.into_iter().zip([queries, keys, values, out, gate, up, down]));
        }
        all
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
        if rayon::current_num_threads() == 1 {
            return self.step(kv, ids, spans, wanted, logits);
        }
        // The whole step runs on one of rayon's threads, which share the matrix products. From a thread outside the
        // pool, each product would need a hand-over and a wake-up, which take longer than most products.
        rayon::scope(|_| self.step(kv, ids, spans, wanted, logits));
    }

    fn step(
        &mut self,
        kv: &mut KvBlocks,
        ids: &[u32],
        spans: &[Span<'_>],
        wanted: &[usize],
        logits: &mut Vec<f32>,
    ) {
        logits.resize(wanted.len() * self.config.vocabulary, 0.0);
        if ids.is_empty() {
            return;
        }
        let DecoderConfig { hidden, .. } = self.config;
        let mut buffers = std::mem::take(&mut self.buffers);
        buffers.x.resize(ids.len() * hidden, 0.0);
        for (id, row) in ids.iter().zip(buffers.x.chunks_exact_mut(hidden)) {
            self.token_embeddings.column(*id as usize, row);
        }
        for (index, layer) in self.layers.iter().enumerate() {
            self.attention(layer, kv, index, spans, &mut buffers);
            self.feed_forward(layer, &mut buffers);
        }
        let mut last = Vec::with_capacity(wanted.len() * hidden);
        wanted.iter().for_each(|row| last.extend_from_slice(&buffers.x[row * hidden..][..hidden]));
        let mut normed = vec![0.0; last.len()];
        rms_norm(&last, &self.norm, self.config.eps, &mut normed);
        self.head.as_ref().unwrap_or(&self.token_embeddings).multiply(&normed, logits);
        self.buffers = buffers;
    }

    /// x += attention(norm(x))·O.
    fn attention(
        &self,
        layer: &Layer,
        kv: &mut KvBlocks,
        index: usize,
        spans: &[Span<'_>],
        buffers: &mut Buffers,
    ) {
        let DecoderConfig { hidden, head_width, eps, .. } = self.config;
        let Buffers { x, normed, qkv, attended, product, .. } = buffers;
        let rows = x.len() / hidden;
        normed.resize(x.len(), 0.0);
        rms_norm(x, &layer.norm, eps, normed);
        for (part, matrix) in qkv.iter_mut().zip(&layer.qkv) {
            part.resize(rows * matrix.width(), 0.0);
        }
        multiply_together(layer.qkv.each_ref(), normed, qkv.each_mut().map(Vec::as_mut_slice));
        for (part, biases) in qkv.iter_mut().zip(layer.biases.iter().flatten()) {
            for row in part.chunks_exact_mut(biases.len()) {
                row.iter_mut().zip(biases).for_each(|(x, bias)| *x += bias);
            }
        }
        if let Some(norms) = &layer.head_norms {
            for (part, norm) in qkv.iter_mut().zip(norms) {
                let rows = part.clone();
                rms_norm(&rows, norm, eps, part);
            }
        }
        let [queries, keys, values] = qkv;
        let (query_width, key_width) = (layer.qkv[0].width(), layer.qkv[1].width());
        let positions = spans
            .iter()
            .flat_map(|span| (span.first..span.first + span.count).map(|position| (*span, position)));
        let tokens = queries
            .chunks_exact_mut(query_width)
            .zip(keys.chunks_exact_mut(key_width))
            .zip(values.chunks_exact(key_width));
        for ((span, position), ((query, key), value)) in positions.zip(tokens) {
            self.rotary.rotate(position, query);
            self.rotary.rotate(position, key);
            let heads = key.chunks_exact(head_width).zip(value.chunks_exact(head_width));
            for (head, (key, value)) in heads.enumerate() {
                kv.put(span.cache_position(position), index, head, key, value);
            }
        }
        attended.resize(queries.len(), 0.0);
        attend(kv, index, spans, queries, attended);
        product.resize(x.len(), 0.0);
        layer.out.multiply(attended, product);
        x.iter_mut().zip(product).for_each(|(x, product)| *x += *product);
    }

    /// x += (silu(norm(x)·G) * norm(x)·U)·D.
    fn feed_forward(&self, layer: &Layer, buffers: &mut Buffers) {
        let DecoderConfig { hidden, inner, eps, .. } = self.config;
        let Buffers { x, normed, product, gate: gates, up, .. } = buffers;
        let rows = x.len() / hidden;
        rms_norm(x, &layer.inner_norm, eps, normed);
        gates.resize(rows * inner, 0.0);
        up.resize(rows * inner, 0.0);
        multiply_together([&layer.gate, &layer.up], normed, [gates, up]);
        silu_multiply(gates, up);
        layer.down.multiply(gates, product);
        x.iter_mut().zip(product).for_each(|(x, product)| *x += *product);
    }
}
