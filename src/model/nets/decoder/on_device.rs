//! A decoder by candle's operations, for any device and precision. One pass computes some tokens of any sequences; each
//! row has its own position. Owns the weights, and the keys and values of all blocks, on the device. Between the
//! products with weights, numbers are f32; attention is computed in f32.
//!
//! A token's results do not depend on what else is in the step, except for the order of sums: products of another shape
//! may sum in another order, so equality to the bit is not guaranteed.
//!
//! Every operation here has a kernel in candle-kernels for f32 and, where weights or keys pass through it, for f16 and
//! bf16. No operation takes or makes a tensor of more than [`MAX_NUMBERS`] numbers.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::ops::rms_norm;
use candle_nn::rotary_emb::rope;

use super::config::DecoderConfig;
use super::{DecoderWeights, KNOWN_TOKENS, host, known_ids};
use crate::model::nets::cached_attention::{Group, Packed, indices, linear, token_slot};
use crate::model::nets::{fitness, uniform_precision};
use crate::model::ops::causal::Span;
use crate::model::ops::kv::{BLOCK, KvNumbers};
use crate::model::ops::{Matrix, Rotary, cos_sin};
use crate::model::{Dtype, ForwardError, LoadError, LoadSpec};

/// Candle's kernels count the numbers of a tensor in 32 bits (candle-kernels, indexing.cu).
const MAX_NUMBERS: usize = u32::MAX as usize;

type Loaded<T> = std::result::Result<T, LoadError>;

/// The sizes of the memory for keys and values.
#[derive(Clone, Copy, Debug)]
pub struct KvSizes {
    /// The largest number of tokens of a sequence.
    pub context: usize,
    /// The number of blocks.
    pub blocks: usize,
    /// The number format of keys and values.
    pub numbers: KvNumbers,
}

/// The weights of a decoder and the memory of its sequences on a device.
pub struct DeviceDecoder {
    config: DecoderConfig,
    device: Device,
    /// `[vocabulary, hidden]`.
    token_embeddings: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    /// `[vocabulary, hidden]`; the same tensor as the token embeddings if the two are tied.
    head: Tensor,
    rotary: Rotary,
    /// The slot with which shorter sequences are padded. No token is written to it, and its keys and values are zeros.
    padding_slot: u32,
}

/// Matrices are `[width, depth]` in the precision of the weights, vectors f32.
struct Layer {
    norm: Tensor,
    /// The projections to queries, keys and values, one below the other.
    qkv: Tensor,
    biases: Option<Tensor>,
    head_norms: Option<[Tensor; 2]>,
    out: Tensor,
    inner_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    /// Keys and values: `[kv_heads, blocks·BLOCK + 1, head_width]`. The heads come first, so that the slots that are
    /// selected for some sequences are a batch of matrices, which needs no transposition.
    kv: [Tensor; 2],
}

/// The parts of a step that all layers share.
struct Step {
    /// The slots to which the rows' keys and values are written: `[kv_heads, rows, head_width]`.
    slots: Tensor,
    /// Cosines and sines of the rotation at the rows' positions.
    cos_sin: [Tensor; 2],
    groups: Vec<Group>,
}

impl DeviceDecoder {
    /// Reads the weights, and allocates the memory for all blocks.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape, [`LoadError::Device`] with the
    /// requested bytes if the device has not enough memory, [`LoadError::Unsupported`] for more blocks than can be
    /// counted.
    pub fn load(
        spec: &LoadSpec,
        device: &Device,
        weights: &DecoderWeights,
        config: &DecoderConfig,
        kv_sizes: KvSizes,
    ) -> Loaded<Self> {
        let DecoderConfig { hidden, vocabulary, kv_heads, head_width, .. } = *config;
        let slots = kv_sizes.blocks * BLOCK + 1;
        if kv_heads * head_width * slots > MAX_NUMBERS {
            let max_slots = MAX_NUMBERS / (kv_heads * head_width);
            return Err(LoadError::Unsupported {
                model: spec.source.clone(),
                reason: format!(
                    "[pool.options]: kv_tokens make {slots} slots for tokens; a device has at most {max_slots}"
                ),
            });
        }
        let upload = Upload { spec, device, dtype: uniform_precision(spec)?.tensors };
        let token_embeddings = upload.matrix(&weights.token_embeddings([hidden, vocabulary])?)?;
        let head = match config.is_tied {
            true => token_embeddings.clone(),
            false => upload.matrix(&weights.head([hidden, vocabulary])?)?,
        };
        let layer =
            |index| upload.layer(host::Layer::load(weights, config, index)?, config, slots, kv_sizes.numbers);
        Ok(Self {
            layers: (0..config.layers).map(layer).collect::<Loaded<_>>()?,
            norm: upload.vector(weights.last_norm(hidden)?)?,
            token_embeddings,
            head,
            rotary: Rotary::from_frequencies(&config.frequencies, kv_sizes.context.max(KNOWN_TOKENS)),
            // Fits into 32 bits, by the check above.
            padding_slot: (slots - 1) as u32,
            device: device.clone(),
            config: config.clone(),
        })
    }

    /// Computes a step, and writes the logits after the rows `wanted` to `logits`, `[wanted, vocabulary]`. `ids` are
    /// the tokens of all `spans`, in their order; they must be in the vocabulary. Their keys and values are written to
    /// the blocks, even if a later part of the step fails.
    ///
    /// # Errors
    /// The device has no memory for the step, or fails.
    pub fn forward(
        &mut self,
        ids: &[u32],
        spans: &[Span<'_>],
        wanted: &[usize],
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        *logits = self.logits_of(ids, spans, wanted, &self.layers)?;
        Ok(())
    }

    /// Compares the results of the first layers for a known prompt with those of a CPU in f32, which stores keys and
    /// values as `numbers` too. On a CPU in f32 nothing is compared. Only the first layers are compared, since the
    /// whole model would take as much memory on the host as on the device.
    ///
    /// # Errors
    /// [`LoadError::Unfit`] if they differ, [`LoadError::Device`] if the device fails.
    pub fn compare_with_cpu(
        &self,
        spec: &LoadSpec,
        weights: &DecoderWeights,
        numbers: KvNumbers,
    ) -> Loaded<()> {
        let candle = |error: candle_core::Error| fitness::failed(spec, &ForwardError::from(&error));
        if !fitness::needs_comparison(&self.device, spec.dtype) {
            return Ok(());
        }
        let config =
            DecoderConfig { layers: self.layers.len().min(fitness::COMPARED_LAYERS), ..self.config.clone() };
        let kv_sizes = KvSizes { context: KNOWN_TOKENS, blocks: KNOWN_TOKENS.div_ceil(BLOCK), numbers };
        let cpu_spec = LoadSpec { dtype: Dtype::F32, ..spec.clone() };
        let reference = Self::load(&cpu_spec, &Device::Cpu, weights, &config, kv_sizes)?;
        let (found, expected) = (
            self.known_logits(config.layers).map_err(candle)?,
            reference.known_logits(config.layers).map_err(candle)?,
        );
        fitness::compare(spec, &format!("prompt of {KNOWN_TOKENS} tokens"), found, expected)
    }

    /// The logits of the first layers after a known prompt, whose last token is fed in a separate step.
    fn known_logits(&self, layers: usize) -> Result<Vec<f32>> {
        let ids = known_ids(self.config.vocabulary);
        let blocks: Vec<u32> = (0..KNOWN_TOKENS.div_ceil(BLOCK) as u32).collect();
        let layers = &self.layers[..layers];
        let (first, last) = ids.split_at(KNOWN_TOKENS - 1);
        let span = |first, count| Span { blocks: &blocks, first, count };
        self.logits_of(first, &[span(0, KNOWN_TOKENS - 1)], &[], layers)?;
        self.logits_of(last, &[span(KNOWN_TOKENS - 1, 1)], &[0], layers)
    }

    /// Computes a step with these layers. Returns the logits after the rows `wanted`.
    fn logits_of(
        &self,
        ids: &[u32],
        spans: &[Span<'_>],
        wanted: &[usize],
        layers: &[Layer],
    ) -> Result<Vec<f32>> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let DecoderConfig { eps, .. } = self.config;
        let packed = Packed::new(spans, self.config.heads, self.config.kv_heads * self.config.head_width);
        let step = self.step(&packed)?;
        let ids: Vec<u32> = packed.order.iter().map(|row| ids[*row]).collect();
        let mut x =
            self.token_embeddings.index_select(&indices(ids, &self.device)?, 0)?.to_dtype(DType::F32)?;
        for layer in layers {
            x = (&x + self.attention(layer, &x, &step)?)?;
            let normed = rms_norm(&x, &layer.inner_norm, eps)?;
            let gated = (linear(&normed, &layer.gate)?.silu()? * linear(&normed, &layer.up)?)?;
            x = (x + linear(&gated, &layer.down)?)?;
        }
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let mut packed_rows = vec![0; packed.order.len()];
        (0..).zip(&packed.order).for_each(|(packed_row, row)| packed_rows[*row] = packed_row);
        let wanted = wanted.iter().map(|row| packed_rows[*row]).collect();
        let last = rms_norm(&x.index_select(&indices(wanted, &self.device)?, 0)?, &self.norm, eps)?;
        linear(&last, &self.head)?.flatten_all()?.to_vec1()
    }

    /// Copies the plan of a step to the device.
    fn step(&self, packed: &Packed<'_>) -> Result<Step> {
        let DecoderConfig { kv_heads, head_width, .. } = self.config;
        let slots = packed.rows.iter().map(|(span, position)| token_slot(span, *position)).collect();
        let positions: Vec<usize> = packed.rows.iter().map(|(_, position)| *position).collect();
        let shape = (kv_heads, positions.len(), head_width);
        let group = |group| Group::new(packed, group, self.padding_slot, &self.device);
        Ok(Step {
            slots: indices(slots, &self.device)?.reshape((1, (), 1))?.broadcast_as(shape)?.contiguous()?,
            cos_sin: cos_sin(&self.rotary, &positions, &self.device)?,
            groups: packed.groups.iter().map(group).collect::<Result<_>>()?,
        })
    }

    /// attention(norm(x))·O.
    fn attention(&self, layer: &Layer, x: &Tensor, step: &Step) -> Result<Tensor> {
        let DecoderConfig { heads, kv_heads, head_width, eps, .. } = self.config;
        let rows = x.dim(0)?;
        let mut qkv = linear(&rms_norm(x, &layer.norm, eps)?, &layer.qkv)?;
        if let Some(biases) = &layer.biases {
            qkv = qkv.broadcast_add(biases)?;
        }
        // Heads come first, so that queries, keys and values are contiguous.
        let parts = qkv.reshape((rows, heads + 2 * kv_heads, head_width))?.transpose(0, 1)?.contiguous()?;
        let [queries, keys] =
            [(0, heads), (heads, kv_heads)].map(|(first, count)| parts.narrow(0, first, count));
        let (mut queries, mut keys) = (queries?, keys?);
        if let Some([q_norm, k_norm]) = &layer.head_norms {
            (queries, keys) = (rms_norm(&queries, q_norm, eps)?, rms_norm(&keys, k_norm, eps)?);
        }
        let [cos, sin] = &step.cos_sin;
        let rotated = |x: Tensor| rope(&x.unsqueeze(0)?, cos, sin)?.squeeze(0);
        let values = parts.narrow(0, heads + kv_heads, kv_heads)?;
        for (cache, rows) in layer.kv.iter().zip([rotated(keys)?, values]) {
            cache.scatter_set(&step.slots, &rows.to_dtype(cache.dtype())?, 1)?;
        }
        let queries = (rotated(queries)? * (1.0 / (head_width as f64).sqrt()))?;
        let queries = queries.reshape((kv_heads, heads / kv_heads, rows, head_width))?;
        let attended: Vec<Tensor> =
            step.groups.iter().map(|group| group.attend(&queries, &layer.kv)).collect::<Result<_>>()?;
        linear(&Tensor::cat(&attended, 0)?.reshape((rows, heads * head_width))?, &layer.out)
    }
}

/// Copies weights to a device.
struct Upload<'a> {
    spec: &'a LoadSpec,
    device: &'a Device,
    dtype: DType,
}

impl Upload<'_> {
    fn on_device(&self, numbers: Vec<f32>, shape: &[usize], dtype: DType) -> Loaded<Tensor> {
        // The host converts the numbers, so that the device never has a matrix in two types at once.
        let upload =
            || Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(self.device);
        upload().map_err(|error| self.spec.failed(format!("weights of the shape {shape:?}: {error}")))
    }

    fn vector(&self, numbers: Vec<f32>) -> Loaded<Tensor> {
        let shape = [numbers.len()];
        self.on_device(numbers, &shape, DType::F32)
    }

    fn matrix(&self, matrix: &Matrix) -> Loaded<Tensor> {
        self.matrices(&[matrix])
    }

    /// Matrices of the same depth, one below the other.
    fn matrices(&self, matrices: &[&Matrix]) -> Loaded<Tensor> {
        let depth = matrices.first().map_or(0, |matrix| matrix.depth());
        let width: usize = matrices.iter().map(|matrix| matrix.width()).sum();
        let mut numbers = vec![0.0; width * depth];
        let columns =
            matrices.iter().flat_map(|matrix| (0..matrix.width()).map(move |column| (matrix, column)));
        for ((matrix, column), to) in columns.zip(numbers.chunks_exact_mut(depth)) {
            matrix.column(column, to);
        }
        self.on_device(numbers, &[width, depth], self.dtype)
    }

    fn layer(
        &self,
        layer: host::Layer,
        DecoderConfig { layers, kv_heads, head_width, .. }: &DecoderConfig,
        slots: usize,
        numbers: KvNumbers,
    ) -> Loaded<Layer> {
        let dtype = match numbers {
            KvNumbers::F32 => DType::F32,
            KvNumbers::Bf16 => DType::BF16,
        };
        let empty = || {
            Tensor::zeros((*kv_heads, slots, *head_width), dtype, self.device).map_err(|error| {
                let bytes = 2 * layers * kv_heads * slots * head_width * dtype.size_in_bytes();
                self.spec.failed(format!(
                    "keys and values of {slots} tokens need {bytes} bytes of its memory: {error}; lower kv_tokens \
                     or sequences in [pool.options]"
                ))
            })
        };
        let [q, k, v] = &layer.qkv;
        Ok(Layer {
            norm: self.vector(layer.norm)?,
            qkv: self.matrices(&[q, k, v])?,
            biases: layer.biases.map(|biases| self.vector(biases.concat())).transpose()?,
            head_norms: match layer.head_norms {
                Some([q_norm, k_norm]) => Some([self.vector(q_norm)?, self.vector(k_norm)?]),
                None => None,
            },
            out: self.matrix(&layer.out)?,
            inner_norm: self.vector(layer.inner_norm)?,
            gate: self.matrix(&layer.gate)?,
            up: self.matrix(&layer.up)?,
            down: self.matrix(&layer.down)?,
            kv: [empty()?, empty()?],
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a fixture that cannot be read fails its test")]
mod tests {
    use std::path::Path;

    use super::super::Decoder;
    use super::*;
    use crate::model::load::ModelFiles;
    use crate::model::nets::fitness::distance;
    use crate::model::ops::NumberFormat;
    use crate::model::ops::kv::{KvBlocks, KvShape};

    const TINY: [&str; 4] = ["generate-llama", "generate-llama3", "generate-qwen2", "generate-qwen3"];
    const BLOCKS: usize = 40;

    struct Case {
        spec: LoadSpec,
        config: DecoderConfig,
        weights: DecoderWeights,
        prompts: Vec<Vec<u32>>,
    }

    fn case(name: &str) -> Case {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let spec = LoadSpec::new(folder.to_str().unwrap());
        let files = ModelFiles::locate(&spec.source).unwrap();
        let config = DecoderConfig::read(&files, name).unwrap();
        let weights = DecoderWeights::from_safetensors(&files, &config, NumberFormat::F32).unwrap();
        let text = std::fs::read_to_string(folder.join("expected.json")).unwrap();
        let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
        let prompts = expected["prompts"].as_array().unwrap().iter();
        let prompts = prompts.map(|it| serde_json::from_value(it["ids"].clone()).unwrap()).collect();
        Case { spec, config, weights, prompts }
    }

    impl Case {
        fn on_device(&self, dtype: Dtype, numbers: KvNumbers) -> DeviceDecoder {
            let spec = LoadSpec { dtype, ..self.spec.clone() };
            let kv_sizes = KvSizes { context: 256, blocks: BLOCKS, numbers };
            DeviceDecoder::load(&spec, &Device::Cpu, &self.weights, &self.config, kv_sizes).unwrap()
        }

        /// The host's logits after each prompt.
        fn expected(&self) -> Vec<Vec<f32>> {
            let mut decoder = Decoder::load(&self.weights, &self.config, 256).unwrap();
            let DecoderConfig { layers, kv_heads: heads, head_width: width, .. } = self.config;
            let shape = KvShape { layers, heads, width, numbers: KvNumbers::F32 };
            let blocks: Vec<u32> = (0..BLOCKS as u32).collect();
            let logits_after = |ids: &Vec<u32>| {
                let mut kv = KvBlocks::new(shape, BLOCKS).unwrap();
                let (span, mut logits) = (Span { blocks: &blocks, first: 0, count: ids.len() }, Vec::new());
                decoder.forward(&mut kv, ids, &[span], &[ids.len() - 1], &mut logits);
                logits
            };
            self.prompts.iter().map(logits_after).collect()
        }

        /// The prompts' blocks, in disorder.
        fn tables(&self) -> Vec<Vec<u32>> {
            let mut free: Vec<u32> =
                (0..BLOCKS as u32).rev().step_by(2).chain((0..BLOCKS as u32).step_by(2)).collect();
            self.prompts.iter().map(|ids| free.split_off(free.len() - ids.len().div_ceil(BLOCK))).collect()
        }

        /// Feeds all prompts together, prompt `i` in chunks of `chunks[i]` tokens. A prompt is fed from the token
        /// `first` on, or from its beginning if it is not longer. Returns the logits after each prompt.
        fn fed(
            &self,
            decoder: &mut DeviceDecoder,
            tables: &[Vec<u32>],
            first: usize,
            chunks: [usize; 5],
        ) -> Vec<Vec<f32>> {
            let mut done: Vec<usize> =
                self.prompts.iter().map(|ids| if ids.len() > first { first } else { 0 }).collect();
            let mut found = vec![Vec::new(); done.len()];
            while found.iter().any(Vec::is_empty) {
                let (mut ids, mut spans, mut wanted, mut ends) =
                    (Vec::new(), Vec::new(), Vec::new(), Vec::new());
                for (at, prompt) in self.prompts.iter().enumerate() {
                    if done[at] == prompt.len() {
                        continue;
                    }
                    let count = chunks[at].min(prompt.len() - done[at]);
                    spans.push(Span { blocks: &tables[at], first: done[at], count });
                    ids.extend(&prompt[done[at]..done[at] + count]);
                    done[at] += count;
                    if done[at] == prompt.len() {
                        wanted.push(ids.len() - 1);
                        ends.push(at);
                    }
                }
                let mut logits = Vec::new();
                decoder.forward(&ids, &spans, &wanted, &mut logits).unwrap();
                for (at, logits) in ends.into_iter().zip(logits.chunks_exact(self.config.vocabulary)) {
                    found[at] = logits.to_vec();
                }
            }
            found
        }
    }

    fn largest_error(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f32 {
        let pairs = found.iter().flatten().zip(expected.iter().flatten());
        pairs
            .map(|(a, b)| (a - b).abs())
            .map(|error| if error.is_nan() { f32::INFINITY } else { error })
            .fold(0.0, f32::max)
    }

    const WHOLE: [usize; 5] = [200; 5];
    /// Most prompts are fed one token at a time, so that sequences of different lengths are padded.
    const CUT: [usize; 5] = [1, 1, 1, 33, 1];

    #[test]
    fn logits_equal_those_of_the_host_for_any_chunks_and_batches() {
        for name in TINY {
            let case = case(name);
            let (expected, tables) = (case.expected(), case.tables());
            let mut error = 0.0_f32;
            for chunks in [WHOLE, CUT, [1; 5], [7, 5, 20, 64, 100]] {
                let mut decoder = case.on_device(Dtype::F32, KvNumbers::F32);
                error = error.max(largest_error(&case.fed(&mut decoder, &tables, 0, chunks), &expected));
                // The beginnings of the prompts are in the blocks by now.
                error = error.max(largest_error(&case.fed(&mut decoder, &tables, 96, chunks), &expected));
            }
            assert!(error < 1e-4, "{name}: {error}");
        }
    }

    #[test]
    fn earlier_contents_of_the_blocks_have_no_influence() {
        let case = case("generate-qwen3");
        let tables = case.tables();
        let mut found = Vec::new();
        for filled in [0.0, f32::NAN] {
            let mut decoder = case.on_device(Dtype::F32, KvNumbers::F32);
            for cache in decoder.layers.iter().flat_map(|layer| &layer.kv) {
                let (heads, slots, width) = cache.dims3().unwrap();
                let filling = Tensor::full(filled, (heads, slots - 1, width), &Device::Cpu).unwrap();
                cache.slice_set(&filling, 1, 0).unwrap();
            }
            found.push(case.fed(&mut decoder, &tables, 0, CUT));
        }
        assert_eq!(found[0], found[1]);
    }

    #[test]
    fn lower_precisions_are_close_to_f32() {
        for name in TINY {
            let case = case(name);
            let (expected, tables) = (case.expected().concat(), case.tables());
            for (dtype, numbers, tolerance) in [
                (Dtype::F32, KvNumbers::Bf16, 0.03),
                (Dtype::F16, KvNumbers::F32, 0.01),
                (Dtype::Bf16, KvNumbers::Bf16, 0.08),
            ] {
                let found = case.fed(&mut case.on_device(dtype, numbers), &tables, 0, CUT).concat();
                let error = distance(&found, &expected);
                assert!(error > 0.0 && error < tolerance, "{name}, {dtype:?}, {numbers:?}: {error}");
            }
        }
    }

    #[test]
    fn more_slots_than_32_bits_can_count_are_refused() {
        let case = case("generate-llama");
        let kv_sizes = KvSizes { context: 256, blocks: 1 << 23, numbers: KvNumbers::F32 };
        let refused = DeviceDecoder::load(&case.spec, &Device::Cpu, &case.weights, &case.config, kv_sizes);
        let error = refused.err().unwrap().to_string();
        assert!(error.contains("kv_tokens") && error.contains("268435457 slots"), "{error}");
    }
}
