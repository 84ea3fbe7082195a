//! Whisper's decoder. A slot is the place of one window and its text, and has the keys and values of both. One pass
//! computes some tokens of any slots. Owns the weights and both caches. Every operation treats each row separately, and
//! attention reads only the row's own slot, so that a token's results do not depend on what else is in the step.

use std::io;

use super::config::{Head, POSITIONS, WhisperConfig};
use super::{LayerNorm, Linear, values};
use crate::model::LoadError;
use crate::model::load::weights::Weights;
use crate::model::nets::decoder::on_one_of_rayons_threads;
use crate::model::ops::causal::{self, CrossSpan, attend, attend_across, weights_across};
use crate::model::ops::kv::{BLOCK, CachePosition, KvBlocks, KvNumbers, KvShape};
use crate::model::ops::{self, Activation, Matrix, activate, multiply_together};

/// Consecutive tokens of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The slot.
    pub slot: usize,
    /// The position of the first of these tokens.
    pub first: usize,
    /// The number of tokens.
    pub count: usize,
}

/// The decoder with the keys and values of its slots.
pub struct Decoder {
    config: WhisperConfig,
    /// `[width, vocabulary]`; also the last layer.
    token_embeddings: Matrix,
    /// `[context, width]`.
    positions: Vec<f32>,
    layers: Vec<Layer>,
    norm: LayerNorm,
    /// The keys and values of the texts' tokens.
    text_kv: Cache,
    /// The keys and values of the encoded windows.
    window_kv: Cache,
    /// The queries of the alignment heads, for each slot that keeps them: for each head `[context, head width]`.
    kept_queries: Vec<Option<Vec<f32>>>,
    /// The slots that have a window.
    has_window: Vec<bool>,
    /// Reused by the next step.
    buffers: Buffers,
}

/// The weights of a layer.
struct Layer {
    norm: LayerNorm,
    /// The projections to queries, keys and values.
    qkv: [Matrix; 3],
    q_bias: Vec<f32>,
    v_bias: Vec<f32>,
    out: Linear,
    cross_norm: LayerNorm,
    cross_q: Linear,
    /// The projections of encoded positions to keys and values. Keys have no bias.
    cross_k: ops::Linear,
    cross_v: ops::Linear,
    cross_v_bias: Vec<f32>,
    cross_out: Linear,
    inner_norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn load(weights: &Weights, config: &WhisperConfig, index: usize) -> Result<Self, LoadError> {
        let (width, inner) = (config.width, config.decoder.inner);
        let named = |name: &str| format!("decoder.layers.{index}.{name}");
        let norm = |name: &str| LayerNorm::load(weights, &named(name), width);
        let linear = |name: &str, shape| Linear::load(weights, &named(name), shape);
        let square = |name: &str| linear(name, [width, width]);
        let matrix = |name: &str| weights.matrix(&named(&format!("{name}.weight")), [width, width]);
        let bias = |name: &str| values(weights, &named(&format!("{name}.bias")), &[width]);
        let for_windows = |name: &str| {
            let name = named(&format!("{name}.weight"));
            let columns = values(weights, &name, &[width, width])?;
            let linear = ops::Linear::new(&columns, width, weights.matrix_format());
            weights.checked(&name, linear.map_err(candle_core::Error::wrap))
        };
        let [q, k, v] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
        Ok(Self {
            norm: norm("self_attn_layer_norm")?,
            qkv: [matrix(q)?, matrix(k)?, matrix(v)?],
            q_bias: bias(q)?,
            v_bias: bias(v)?,
            out: square("self_attn.out_proj")?,
            cross_norm: norm("encoder_attn_layer_norm")?,
            cross_q: square("encoder_attn.q_proj")?,
            cross_k: for_windows("encoder_attn.k_proj")?,
            cross_v: for_windows("encoder_attn.v_proj")?,
            cross_v_bias: bias("encoder_attn.v_proj")?,
            cross_out: square("encoder_attn.out_proj")?,
            inner_norm: norm("final_layer_norm")?,
            up: linear("fc1", [width, inner])?,
            down: linear("fc2", [inner, width])?,
        })
    }
}

/// Keys and values. Each slot has the blocks that the longest sequence needs; they are a group. The system provides memory
/// when it is written for the first time.
struct Cache {
    kv: KvBlocks,
    /// The indices of each slot's blocks in `kv`.
    blocks: Vec<Vec<u32>>,
}

impl Cache {
    fn new(shape: KvShape, slots: usize, tokens: usize) -> io::Result<Self> {
        let blocks_per_slot = tokens.div_ceil(BLOCK);
        let blocks = (0..slots).map(|slot| {
            (slot * blocks_per_slot..(slot + 1) * blocks_per_slot).map(|block| block as u32).collect()
        });
        Ok(Self { kv: KvBlocks::with_groups(shape, slots, blocks_per_slot)?, blocks: blocks.collect() })
    }

    /// Writes the keys and values of a token, each `[heads·width]`.
    fn put(&mut self, slot: usize, position: usize, layer: usize, key: &[f32], value: &[f32]) {
        let width = self.kv.shape().width;
        let cache_position =
            CachePosition { block: self.blocks[slot][position / BLOCK], offset: position % BLOCK };
        let heads = key.chunks_exact(width).zip(value.chunks_exact(width));
        heads
            .enumerate()
            .for_each(|(head, (key, value))| self.kv.put(cache_position, layer, head, key, value));
    }
}

#[derive(Default)]
struct Buffers {
    x: Vec<f32>,
    normed: Vec<f32>,
    qkv: [Vec<f32>; 3],
    attended: Vec<f32>,
    product: Vec<f32>,
    inner: Vec<f32>,
}

impl Decoder {
    /// Reads the weights. The inner result is the system's error if there is no address space for the caches.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape.
    pub(super) fn load(
        weights: &Weights,
        config: &WhisperConfig,
        slots: usize,
    ) -> Result<io::Result<Self>, LoadError> {
        let WhisperConfig { width, vocabulary, context, decoder, .. } = *config;
        let layers = (0..decoder.count).map(|index| Layer::load(weights, config, index));
        let shape = KvShape {
            layers: decoder.count,
            heads: decoder.heads,
            width: width / decoder.heads,
            numbers: KvNumbers::F32,
        };
        let token_embeddings = weights.matrix("decoder.embed_tokens.weight", [width, vocabulary])?;
        let positions = values(weights, "decoder.embed_positions.weight", &[context, width])?;
        let (layers, norm) =
            (layers.collect::<Result<_, _>>()?, LayerNorm::load(weights, "decoder.layer_norm", width)?);
        let caches = Cache::new(shape, slots, context)
            .and_then(|text| Ok((text, Cache::new(shape, slots, POSITIONS)?)));
        if let Ok((_, windows)) = &caches {
            windows.kv.use_large_pages();
        }
        Ok(caches.map(|(text_kv, window_kv)| Self {
            config: config.clone(),
            token_embeddings,
            positions,
            layers,
            norm,
            text_kv,
            window_kv,
            kept_queries: vec![None; slots],
            has_window: vec![false; slots],
            buffers: Buffers::default(),
        }))
    }

    /// Sets the window of a slot to `encoded` `[POSITIONS, width]`.
    pub fn set_window(&mut self, slot: usize, encoded: &[f32]) {
        let (mut keys, mut values) = (vec![0.0; encoded.len()], vec![0.0; encoded.len()]);
        for (index, layer) in self.layers.iter().enumerate() {
            layer.cross_k.multiply(encoded, &mut keys, |_, _| {});
            layer.cross_v.multiply(encoded, &mut values, |_, block| {
                activate(block, &layer.cross_v_bias, Activation::Identity);
            });
            self.window_kv.kv.put_group(slot, index, &keys, &values);
        }
        self.has_window[slot] = true;
    }

    /// Ends the text of a slot. Its memory is returned to the system once no slot is used: a page that is taken anew has
    /// to be cleared first.
    pub fn release(&mut self, slot: usize) {
        self.kept_queries[slot] = None;
        self.has_window[slot] = false;
        if !self.has_window.contains(&true) {
            for slot in 0..self.has_window.len() {
                self.text_kv.kv.release(slot);
                self.window_kv.kv.release(slot);
            }
        }
    }

    /// Makes a slot keep the queries that [`Decoder::alignment`] needs, from its next token on, until its release.
    pub fn keep_queries(&mut self, slot: usize) {
        let WhisperConfig { width, context, decoder, ref alignment, .. } = self.config;
        self.kept_queries[slot]
            .get_or_insert_with(|| vec![0.0; alignment.len() * context * width / decoder.heads]);
    }

    /// Returns how much each alignment head attended to the first `keys` positions of a slot's window, at each of the
    /// `positions` of its text: `[heads, positions, keys]`. Each row has the sum 1. Empty if the slot keeps no queries
    /// ([`Decoder::keep_queries`]).
    pub fn alignment(&self, slot: usize, positions: &[usize], keys: usize) -> Vec<f32> {
        let WhisperConfig { width, context, decoder, ref alignment, .. } = self.config;
        let width = width / decoder.heads;
        let Some(kept) = &self.kept_queries[slot] else { return Vec::new() };
        let span = CrossSpan { blocks: &self.window_kv.blocks[slot], keys, count: positions.len() };
        let weights_of_head = |(head, queries): (&Head, &[f32])| {
            let queries: Vec<f32> = positions
                .iter()
                .flat_map(|position| &queries[position * width..][..width])
                .copied()
                .collect();
            weights_across(&self.window_kv.kv, head.layer, head.number, span, &queries)
        };
        alignment.iter().zip(kept.chunks_exact(context * width)).flat_map(weights_of_head).collect()
    }

    /// Computes a step, and writes the logits after the rows `wanted` to `logits`, `[wanted, vocabulary]`. `ids` are
    /// the tokens of all `spans`, in their order; they must be in the vocabulary and within the context. Each slot must
    /// have a window. A token that is computed again replaces the earlier one.
    pub fn forward(&mut self, ids: &[u32], spans: &[Span], wanted: &[usize], logits: &mut Vec<f32>) {
        on_one_of_rayons_threads(|| self.step(ids, spans, wanted, logits));
    }

    fn step(&mut self, ids: &[u32], spans: &[Span], wanted: &[usize], logits: &mut Vec<f32>) {
        logits.resize(wanted.len() * self.config.vocabulary, 0.0);
        if ids.is_empty() {
            return;
        }
        let width = self.config.width;
        let mut buffers = std::mem::take(&mut self.buffers);
        buffers.x.resize(ids.len() * width, 0.0);
        let positions = spans.iter().flat_map(|span| span.first..span.first + span.count);
        for ((id, position), row) in ids.iter().zip(positions).zip(buffers.x.chunks_exact_mut(width)) {
            self.token_embeddings.column(*id as usize, row);
            add(row, &self.positions[position * width..][..width]);
        }
        for index in 0..self.layers.len() {
            self.attention(index, spans, &mut buffers);
            self.cross_attention(index, spans, &mut buffers);
            self.feed_forward(index, &mut buffers);
        }
        let mut last = Vec::with_capacity(wanted.len() * width);
        wanted.iter().for_each(|row| last.extend_from_slice(&buffers.x[row * width..][..width]));
        self.norm.apply(&last, &mut buffers.normed);
        self.token_embeddings.multiply(&buffers.normed, logits);
        self.buffers = buffers;
    }

    /// x += attention(norm(x))·O + bias. Each token attends to itself and to the tokens before it.
    fn attention(&mut self, index: usize, spans: &[Span], buffers: &mut Buffers) {
        let (layer, width) = (&self.layers[index], self.config.width);
        let Buffers { x, normed, qkv, attended, product, .. } = buffers;
        layer.norm.apply(x, normed);
        qkv.iter_mut().for_each(|part| part.resize(x.len(), 0.0));
        multiply_together(layer.qkv.each_ref(), normed, qkv.each_mut().map(Vec::as_mut_slice));
        let [queries, keys, values] = qkv;
        activate(queries, &layer.q_bias, Activation::Identity);
        activate(values, &layer.v_bias, Activation::Identity);
        let positions = slots_and_positions(spans);
        let rows = keys.chunks_exact(width).zip(values.chunks_exact(width));
        for ((slot, position), (key, value)) in positions.zip(rows) {
            self.text_kv.put(slot, position, index, key, value);
        }
        let text_kv = &self.text_kv;
        let spans = spans.iter().map(|span| causal::Span {
            blocks: &text_kv.blocks[span.slot],
            first: span.first,
            count: span.count,
        });
        attended.resize(x.len(), 0.0);
        let scoring = causal::Scoring::usual(text_kv.kv.shape().width);
        attend(&text_kv.kv, index, scoring, &spans.collect::<Vec<_>>(), queries, attended);
        add_layer(x, &layer.out, attended, product);
    }

    /// x += attention(norm(x))·O + bias, over the window.
    fn cross_attention(&mut self, index: usize, spans: &[Span], buffers: &mut Buffers) {
        let layer = &self.layers[index];
        let Buffers { x, normed, qkv: [queries, ..], attended, product, .. } = buffers;
        layer.cross_norm.apply(x, normed);
        layer.cross_q.multiply(normed, queries);
        activate(queries, &layer.cross_q.bias, Activation::Identity);
        let WhisperConfig { width, context, decoder, ref alignment, .. } = self.config;
        let head_width = width / decoder.heads;
        let positions = slots_and_positions(spans);
        for ((slot, position), query) in positions.zip(queries.chunks_exact(width)) {
            let Some(kept) = &mut self.kept_queries[slot] else { continue };
            for (head, kept) in alignment.iter().zip(kept.chunks_exact_mut(context * head_width)) {
                if head.layer == index {
                    let query = &query[head.number * head_width..][..head_width];
                    kept[position * head_width..][..head_width].copy_from_slice(query);
                }
            }
        }
        let window_kv = &self.window_kv;
        let spans = spans.iter().map(|span| CrossSpan {
            blocks: &window_kv.blocks[span.slot],
            keys: POSITIONS,
            count: span.count,
        });
        attended.resize(x.len(), 0.0);
        attend_across(&window_kv.kv, index, &spans.collect::<Vec<_>>(), queries, attended);
        add_layer(x, &layer.cross_out, attended, product);
    }

    /// x += gelu(norm(x)·U + bias)·D + bias.
    fn feed_forward(&self, index: usize, buffers: &mut Buffers) {
        let layer = &self.layers[index];
        let Buffers { x, normed, product, inner, .. } = buffers;
        layer.inner_norm.apply(x, normed);
        layer.up.multiply(normed, inner);
        activate(inner, &layer.up.bias, Activation::Gelu);
        add_layer(x, &layer.down, inner, product);
    }
}

/// The slot and the position of each token.
fn slots_and_positions(spans: &[Span]) -> impl Iterator<Item = (usize, usize)> {
    spans.iter().flat_map(|span| (span.first..span.first + span.count).map(|position| (span.slot, position)))
}

/// `x` += `rows` times the layer's matrix, plus its bias. `product` is overwritten.
fn add_layer(x: &mut [f32], layer: &Linear, rows: &[f32], product: &mut Vec<f32>) {
    layer.multiply(rows, product);
    activate(product, &layer.bias, Activation::Identity);
    add(x, product);
}

/// `x` += `other`.
fn add(x: &mut [f32], other: &[f32]) {
    x.iter_mut().zip(other).for_each(|(x, other)| *x += *other);
}
