//! Whisper by candle's operations, for any device and number format. One pass of the decoder computes some tokens of
//! any slots; each row has its own position. Owns the weights, and the keys and values of all slots, on the device. In
//! the decoder, numbers are f32, except in the products with its weights and with the keys and values of windows.
//!
//! A token's results do not depend on what else is in the step, except for the order of sums: products of another shape
//! may sum in another order, so equality to the bit is not guaranteed.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::ops::{layer_norm, softmax_last_dim};

use super::config::{Head, Layers, POSITIONS, WhisperConfig};
use super::{EPS, Span, encoder, uniform_formats, values};
use crate::model::load::weights::Weights;
use crate::model::nets::block::Blocks;
use crate::model::nets::cached_attention::{Group, MAX_ELEMENTS, Packed, Reach, indices, linear, token_slot};
use crate::model::ops::causal;
use crate::model::ops::kv::BLOCK;
use crate::model::sound::features::FRAMES;
use crate::model::{LoadError, LoadSpec};

type Loaded<T> = std::result::Result<T, LoadError>;

/// Both networks on a device.
pub struct DeviceWhisper {
    config: WhisperConfig,
    device: Device,
    /// The number format of the weights, and of the encoder's numbers.
    dtype: DType,
    convolutions: [Convolution; 2],
    /// `[POSITIONS, width]`.
    encoder_position_embeddings: Tensor,
    blocks: Blocks,
    /// `[vocabulary, width]`; also the last layer.
    token_embeddings: Tensor,
    /// `[context, width]` in f32.
    positions: Tensor,
    layers: Vec<Layer>,
    norm: Norm,
    /// The indices of the blocks of each slot's text.
    text_blocks: Vec<Vec<u32>>,
    /// The slot in the `text_kv` caches with which shorter texts are padded. No token is written to it, and its keys
    /// and values are zeros.
    padding_slot: u32,
    /// The queries of the alignment heads, for each slot that keeps them, on the host: for each head
    /// `[context, head width]`.
    kept_queries: Vec<Option<Vec<f32>>>,
}

/// A convolution over time.
struct Convolution {
    /// `[out, in, 3]`.
    weights: Tensor,
    /// `[1, out, 1]`.
    bias: Tensor,
    stride: usize,
}

/// The parameters of a layer norm, in f32.
struct Norm {
    weight: Tensor,
    shift: Tensor,
}

/// Matrices are `[width, depth]` in the number format of the weights, vectors f32.
struct Layer {
    norm: Norm,
    /// The projections to queries, keys and values, one below the other. The bias of the keys is zero.
    qkv: Linear,
    out: Linear,
    cross_norm: Norm,
    cross_q: Linear,
    /// The projections of encoded positions to keys and values. The bias of the keys is zero.
    cross_kv: Linear,
    cross_out: Linear,
    inner_norm: Norm,
    up: Linear,
    down: Linear,
    /// Keys and values of the texts: `[heads, tokens of all slots + 1, head width]` in f32.
    text_kv: [Tensor; 2],
    /// Keys and values of the windows: `[slots, heads, POSITIONS, head width]`, in the number format of the weights.
    window_kv: [Tensor; 2],
}

/// A linear layer with its bias.
struct Linear {
    matrix: Tensor,
    bias: Tensor,
}

impl Linear {
    /// `[rows, width]` in f32 from `[rows, depth]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        linear(x, &self.matrix)?.broadcast_add(&self.bias)
    }
}

impl Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        layer_norm(x, &self.weight, &self.shift, EPS)
    }
}

/// What all layers of a step share.
struct Step<'a> {
    packed: Packed<'a>,
    /// The slot of each packed row.
    slots: Vec<usize>,
    /// The slots of `text_kv` to which the rows' keys and values are written: `[heads, rows, head width]`.
    token_slots: Tensor,
    groups: Vec<Group>,
}

impl DeviceWhisper {
    /// Reads the weights, and allocates the memory for `slots` windows with their texts.
    ///
    /// # Errors
    /// As [`super::Whisper::load`].
    pub fn load(spec: &LoadSpec, device: &Device, config: &WhisperConfig, slots: usize) -> Loaded<Self> {
        let WhisperConfig { width, mels, vocabulary, context, decoder, .. } = *config;
        let weights = super::weights(spec, device, uniform_formats(spec)?)?;
        let blocks_per_slot = context.div_ceil(BLOCK);
        let reader = Reader { spec, device, weights: &weights, config, slots };
        let layers = (0..decoder.count).map(|index| reader.layer(index));
        Ok(Self {
            convolutions: [
                reader.convolution("encoder.conv1", [mels, width], 1)?,
                reader.convolution("encoder.conv2", [width, width], 2)?,
            ],
            encoder_position_embeddings: weights
                .get("encoder.embed_positions.weight", &[POSITIONS, width])?,
            blocks: encoder::blocks(&weights, width, config.encoder)?,
            token_embeddings: weights.get("decoder.embed_tokens.weight", &[vocabulary, width])?,
            positions: reader.vector("decoder.embed_positions.weight", &[context, width])?,
            layers: layers.collect::<Loaded<_>>()?,
            norm: reader.norm("decoder.layer_norm")?,
            text_blocks: (0..slots)
                .map(|slot| {
                    (slot * blocks_per_slot..(slot + 1) * blocks_per_slot).map(|block| block as u32).collect()
                })
                .collect(),
            padding_slot: (slots * blocks_per_slot * BLOCK) as u32,
            kept_queries: vec![None; slots],
            dtype: weights.dtype(),
            device: device.clone(),
            config: config.clone(),
        })
    }

    /// As [`super::Whisper::encode`].
    ///
    /// # Errors
    /// The device fails.
    pub fn encode(&mut self, slots: &[usize], windows: &[&[f32]]) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        let WhisperConfig { width, mels, decoder: Layers { heads, .. }, .. } = self.config;
        let count = windows.len();
        let features = Tensor::from_vec(windows.concat(), (count, mels, FRAMES), &Device::Cpu)?;
        let mut x = features.to_dtype(self.dtype)?.to_device(&self.device)?;
        for Convolution { weights, bias, stride } in &self.convolutions {
            x = x.conv1d(weights, 1, *stride, 1, 1)?.broadcast_add(bias)?.gelu_erf()?;
        }
        let x = x.transpose(1, 2)?.contiguous()?.broadcast_add(&self.encoder_position_embeddings)?;
        let lengths = vec![POSITIONS; count];
        let x = x.reshape((count * POSITIONS, width))?;
        let encoded = self.blocks.forward(x, |attention, x| attention.forward(x, &lengths))?;
        for layer in &self.layers {
            let both = layer.cross_kv.forward(&encoded)?.to_dtype(self.dtype)?;
            let both = both.reshape((count, POSITIONS, 2 * heads, width / heads))?.transpose(1, 2)?;
            for (part, cache) in layer.window_kv.iter().enumerate() {
                let part = both.narrow(1, part * heads, heads)?;
                for (window, slot) in slots.iter().enumerate() {
                    cache.slice_set(&part.narrow(0, window, 1)?.contiguous()?, 0, *slot)?;
                }
            }
        }
        Ok(())
    }

    /// As [`super::Whisper::keep_queries`].
    pub fn keep_queries(&mut self, slot: usize) {
        let WhisperConfig { width, context, decoder, ref alignment, .. } = self.config;
        self.kept_queries[slot]
            .get_or_insert_with(|| vec![0.0; alignment.len() * context * width / decoder.heads]);
    }

    /// As [`super::Whisper::release`].
    pub fn release(&mut self, slot: usize) {
        self.kept_queries[slot] = None;
    }

    /// As [`super::Whisper::alignment`].
    ///
    /// # Errors
    /// The device fails.
    pub fn alignment(&self, slot: usize, positions: &[usize], keys: usize) -> Result<Vec<f32>> {
        let WhisperConfig { width, context, decoder, ref alignment, .. } = self.config;
        let width = width / decoder.heads;
        let Some(kept) = self.kept_queries[slot].as_ref().filter(|_| !positions.is_empty()) else {
            return Ok(Vec::new());
        };
        let mut all = Vec::with_capacity(alignment.len() * positions.len() * keys);
        for (Head { layer, number }, queries) in alignment.iter().zip(kept.chunks_exact(context * width)) {
            let queries: Vec<f32> = positions
                .iter()
                .flat_map(|position| &queries[position * width..][..width])
                .copied()
                .collect();
            let queries = Tensor::from_vec(queries, (positions.len(), width), &self.device)?;
            let [cache, _] = &self.layers[*layer].window_kv;
            let keys = cache.narrow(0, slot, 1)?.narrow(1, *number, 1)?.narrow(2, 0, keys)?;
            let keys = keys.to_dtype(DType::F32)?.reshape(((), width))?;
            let scores = (queries.matmul(&keys.t()?)? * scale(width))?;
            all.extend(softmax_last_dim(&scores)?.flatten_all()?.to_vec1::<f32>()?);
        }
        Ok(all)
    }

    /// As [`super::Whisper::forward`].
    ///
    /// # Errors
    /// The device has no memory for the step, or fails.
    pub fn forward(
        &mut self,
        ids: &[u32],
        spans: &[Span],
        wanted: &[usize],
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        logits.clear();
        if ids.is_empty() {
            return Ok(());
        }
        let WhisperConfig { width, decoder: Layers { heads, .. }, .. } = self.config;
        let text = |span: &Span| causal::Span {
            blocks: &self.text_blocks[span.slot],
            first: span.first,
            count: span.count,
        };
        let texts: Vec<causal::Span<'_>> = spans.iter().map(text).collect();
        let step = self.step(Packed::new(&texts, heads, width), spans)?;
        let ids: Vec<u32> = step.packed.order.iter().map(|row| ids[*row]).collect();
        let positions = step.packed.rows.iter().map(|(_, position)| *position as u32).collect();
        let x = self.token_embeddings.index_select(&indices(ids, &self.device)?, 0)?.to_dtype(DType::F32)?;
        let mut x = (x + self.positions.index_select(&indices(positions, &self.device)?, 0)?)?;
        let mut queries = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            x = (&x + self.attention(layer, &x, &step)?)?;
            let (attended, cross_queries) = self.cross_attention(layer, &x, &step)?;
            x = (x + attended)?;
            let inner = layer.up.forward(&layer.inner_norm.forward(&x)?)?.gelu_erf()?;
            x = (x + layer.down.forward(&inner)?)?;
            let is_kept = self.config.alignment.iter().any(|head| head.layer == index)
                && step.slots.iter().any(|slot| self.kept_queries[*slot].is_some());
            if is_kept {
                queries.push((index, cross_queries.flatten_all()?.to_vec1::<f32>()?));
            }
        }
        let mut packed_rows = vec![0; step.packed.order.len()];
        (0..).zip(&step.packed.order).for_each(|(packed_row, row)| packed_rows[*row] = packed_row);
        let slots_and_positions: Vec<(usize, usize)> =
            step.slots.iter().copied().zip(step.packed.rows.iter().map(|(_, position)| *position)).collect();
        if !wanted.is_empty() {
            let wanted = wanted.iter().map(|row| packed_rows[*row]).collect();
            let last = self.norm.forward(&x.index_select(&indices(wanted, &self.device)?, 0)?)?;
            *logits = linear(&last, &self.token_embeddings)?.flatten_all()?.to_vec1()?;
        }
        for (index, queries) in queries {
            self.store_queries(index, &slots_and_positions, &queries);
        }
        Ok(())
    }

    /// Stores the queries `[heads, rows, head width]` of a layer for the rows whose slots keep them. `rows` has the
    /// slot and the position of each row.
    fn store_queries(&mut self, layer: usize, rows: &[(usize, usize)], queries: &[f32]) {
        let WhisperConfig { width, context, decoder, ref alignment, .. } = self.config;
        let width = width / decoder.heads;
        for (row, (slot, position)) in rows.iter().enumerate() {
            let Some(kept) = &mut self.kept_queries[*slot] else { continue };
            for (head, kept) in alignment.iter().zip(kept.chunks_exact_mut(context * width)) {
                if head.layer == layer {
                    let from = (head.number * rows.len() + row) * width;
                    kept[position * width..][..width].copy_from_slice(&queries[from..][..width]);
                }
            }
        }
    }

    /// Copies the plan of a step to the device.
    fn step<'a>(&self, packed: Packed<'a>, spans: &[Span]) -> Result<Step<'a>> {
        let WhisperConfig { width, decoder: Layers { heads, .. }, .. } = self.config;
        let slot_of_row: Vec<usize> =
            spans.iter().flat_map(|span| std::iter::repeat_n(span.slot, span.count)).collect();
        let token_slots = packed.rows.iter().map(|(span, position)| token_slot(span, *position)).collect();
        let shape = (heads, packed.rows.len(), width / heads);
        let token_slots = indices(token_slots, &self.device)?.reshape((1, (), 1))?;
        let group = |group| Group::new(&packed, group, Reach::CAUSAL, self.padding_slot, &self.device);
        Ok(Step {
            slots: packed.order.iter().map(|row| slot_of_row[*row]).collect(),
            token_slots: token_slots.broadcast_as(shape)?.contiguous()?,
            groups: packed.groups.iter().map(group).collect::<Result<_>>()?,
            packed,
        })
    }

    /// attention(norm(x))·O + bias. Each token attends to itself and to the tokens before it.
    fn attention(&self, layer: &Layer, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        let WhisperConfig { width, decoder: Layers { heads, .. }, .. } = self.config;
        let (rows, head_width) = (x.dim(0)?, width / heads);
        let qkv = layer.qkv.forward(&layer.norm.forward(x)?)?;
        // Heads come first, so that queries, keys and values are contiguous.
        let parts = qkv.reshape((rows, 3 * heads, head_width))?.transpose(0, 1)?.contiguous()?;
        for (cache, part) in layer.text_kv.iter().zip([1, 2]) {
            cache.scatter_set(&step.token_slots, &parts.narrow(0, part * heads, heads)?, 1)?;
        }
        let queries = (parts.narrow(0, 0, heads)? * scale(head_width))?.unsqueeze(1)?;
        let attended: Vec<Tensor> = step
            .groups
            .iter()
            .map(|group| group.attend(&queries, &layer.text_kv, None))
            .collect::<Result<_>>()?;
        layer.out.forward(&Tensor::cat(&attended, 0)?.reshape((rows, width))?)
    }

    /// attention(norm(x))·O + bias over the windows, and the queries `[heads, rows, head width]`.
    fn cross_attention(&self, layer: &Layer, x: &Tensor, step: &Step<'_>) -> Result<(Tensor, Tensor)> {
        let WhisperConfig { width, decoder: Layers { heads, .. }, .. } = self.config;
        let (rows, head_width) = (x.dim(0)?, width / heads);
        let queries = layer.cross_q.forward(&layer.cross_norm.forward(x)?)?;
        let queries = queries.reshape((rows, heads, head_width))?.transpose(0, 1)?.contiguous()?;
        let scaled = (&queries * scale(head_width))?;
        let max_sequences = (MAX_ELEMENTS / (POSITIONS * width)).max(1);
        let mut attended = Vec::new();
        for group in &step.packed.groups {
            let tokens = group.rows.len() / group.sequences;
            for first in group.rows.clone().step_by(max_sequences * tokens) {
                let count = (group.rows.end - first).min(max_sequences * tokens);
                let sequences = count / tokens;
                let slots: Vec<u32> =
                    (0..sequences).map(|index| step.slots[first + index * tokens] as u32).collect();
                // `[sequences, heads, tokens, head width]`.
                let queries = scaled.narrow(1, first, count)?;
                let queries =
                    queries.reshape((heads, sequences, tokens, head_width))?.transpose(0, 1)?.contiguous()?;
                let [keys, values] = &layer.window_kv;
                let slots = indices(slots, &self.device)?;
                let keys = keys.index_select(&slots, 0)?;
                let scores = queries.to_dtype(self.dtype)?.matmul(&keys.t()?)?.to_dtype(DType::F32)?;
                let weights = softmax_last_dim(&scores)?.to_dtype(self.dtype)?;
                let context = weights.matmul(&values.index_select(&slots, 0)?)?.to_dtype(DType::F32)?;
                attended.push(context.transpose(1, 2)?.reshape((count, width))?);
            }
        }
        Ok((layer.cross_out.forward(&Tensor::cat(&attended, 0)?)?, queries))
    }
}

/// The factor of the products of queries and keys.
fn scale(head_width: usize) -> f64 {
    1.0 / (head_width as f64).sqrt()
}

/// Reads weights onto a device.
struct Reader<'a> {
    spec: &'a LoadSpec,
    device: &'a Device,
    weights: &'a Weights,
    config: &'a WhisperConfig,
    slots: usize,
}

impl Reader<'_> {
    /// A tensor in f32.
    fn vector(&self, name: &str, shape: &[usize]) -> Loaded<Tensor> {
        let numbers = values(self.weights, name, shape)?;
        self.weights.checked(name, Tensor::from_vec(numbers, shape, self.device))
    }

    fn norm(&self, name: &str) -> Loaded<Norm> {
        let part = |part: &str| self.vector(&format!("{name}.{part}"), &[self.config.width]);
        Ok(Norm { weight: part("weight")?, shift: part("bias")? })
    }

    fn convolution(&self, name: &str, [from, to]: [usize; 2], stride: usize) -> Loaded<Convolution> {
        let weights = self.weights.get(&format!("{name}.weight"), &[to, from, 3])?;
        let bias = self.weights.get(&format!("{name}.bias"), &[to])?;
        Ok(Convolution { weights, bias: self.weights.checked(name, bias.reshape((1, to, 1)))?, stride })
    }

    /// Linear layers of the same depth, one below the other. Keys have no bias.
    fn linear(&self, names: &[String], [depth, width]: [usize; 2]) -> Loaded<Linear> {
        let (mut matrices, mut bias) = (Vec::new(), Vec::new());
        for name in names {
            matrices.push(self.weights.get(&format!("{name}.weight"), &[width, depth])?);
            match name.ends_with("k_proj") {
                true => bias.resize(bias.len() + width, 0.0),
                false => bias.extend(values(self.weights, &format!("{name}.bias"), &[width])?),
            }
        }
        let what = names.join(", ");
        let matrix = self.weights.checked(&what, Tensor::cat(&matrices, 0))?;
        let bias = self.weights.checked(&what, Tensor::new(bias, self.device))?;
        Ok(Linear { matrix, bias })
    }

    fn layer(&self, index: usize) -> Loaded<Layer> {
        let WhisperConfig { width, context, decoder, .. } = *self.config;
        let Layers { count, heads, inner } = decoder;
        let named = |name: &str| format!("decoder.layers.{index}.{name}");
        let square = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| named(name)).collect();
            self.linear(&names, [width, width])
        };
        let tokens = self.slots * context.next_multiple_of(BLOCK) + 1;
        let dtype = self.weights.dtype();
        let empty = |shape: &[usize], dtype: DType| {
            Tensor::zeros(shape, dtype, self.device).map_err(|error| {
                let text_bytes = tokens * DType::F32.size_in_bytes();
                let bytes =
                    2 * count * width * (text_bytes + self.slots * POSITIONS * dtype.size_in_bytes());
                self.spec.failed(format!(
                    "keys and values of {} windows need {bytes} bytes of its memory: {error}; lower sequences in \
                     [pool.options]",
                    self.slots
                ))
            })
        };
        let text_cache = || empty(&[heads, tokens, width / heads], DType::F32);
        let window_cache = || empty(&[self.slots, heads, POSITIONS, width / heads], dtype);
        Ok(Layer {
            norm: self.norm(&named("self_attn_layer_norm"))?,
            qkv: square(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])?,
            out: square(&["self_attn.out_proj"])?,
            cross_norm: self.norm(&named("encoder_attn_layer_norm"))?,
            cross_q: square(&["encoder_attn.q_proj"])?,
            cross_kv: square(&["encoder_attn.k_proj", "encoder_attn.v_proj"])?,
            cross_out: square(&["encoder_attn.out_proj"])?,
            inner_norm: self.norm(&named("final_layer_norm"))?,
            up: self.linear(&[named("fc1")], [width, inner])?,
            down: self.linear(&[named("fc2")], [inner, width])?,
            text_kv: [text_cache()?, text_cache()?],
            window_kv: [window_cache()?, window_cache()?],
        })
    }
}
