//! A decoder by Candle's operations, for any device and precision: some tokens of any sequences in one pass, each row
//! with its own place. Decides which rows share a product of attention. Owns the weights, and the keys and values of
//! all blocks, on the device. Numbers between products of weights are f32; attention is computed in f32.
//!
//! A token's numbers are the same in any company but for the order of sums: products of another shape may sum in
//! another order, so that nothing is promised to the bit.
//!
//! Every operation here has a kernel in candle-kernels for f32 and, where weights or keys pass through it, for f16 and
//! bf16. No operation counts more than [`MOST_NUMBERS`] numbers.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::ops::{rms_norm, softmax_last_dim};
use candle_nn::rotary_emb::rope;

use super::config::DecoderConfig;
use super::{Weights, host};
use crate::model::nets::{fitness, uniform};
use crate::model::ops::causal::Span;
use crate::model::ops::kv::{BLOCK, HeldAt, KvNumbers};
use crate::model::ops::{Matrix, Rotary, turns};
use crate::model::{Dtype, ForwardError, LoadError, LoadSpec};

/// Candle's kernels count the numbers of a tensor in 32 bits (candle-kernels, indexing.cu).
const MOST_NUMBERS: usize = u32::MAX as usize;
/// The most numbers of keys, and of scores, that are made at once, unless one token alone has more: 256 MiB.
const MOST_AT_ONCE: usize = 1 << 26;
/// Tokens of the prompt, and the layers, by which a device is compared with a CPU.
const KNOWN: usize = 40;
const PROVEN: usize = 2;

type Loaded<T> = std::result::Result<T, LoadError>;

/// What is held for sequences.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// The most tokens of a sequence.
    pub context: usize,
    /// Blocks of keys and values.
    pub blocks: usize,
    /// How these are kept.
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
    /// `[vocabulary, hidden]`; the tokens' embeddings where these are the last layer too.
    head: Tensor,
    rotary: Rotary,
    /// The place that no token is written to, whose keys and values are zeros: what shorter sequences are padded with.
    nowhere: u32,
}

/// Matrices are `[width, depth]` in the precision of the weights, vectors f32.
struct Layer {
    norm: Tensor,
    /// Of queries, keys and values, one below the other.
    qkv: Tensor,
    biases: Option<Tensor>,
    head_norms: Option<[Tensor; 2]>,
    out: Tensor,
    inner_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    /// Keys and values: `[kv_heads, blocks·BLOCK + 1, head_width]`. The heads come first, so that what is selected for
    /// some sequences is a batch of matrices as it lies.
    held: [Tensor; 2],
}

/// What all layers need of a step.
struct Step {
    /// Where the rows' keys and values are written: `[kv_heads, rows, head_width]`.
    slots: Tensor,
    /// Cosines and sines of the rows' places.
    turns: [Tensor; 2],
    groups: Vec<Group>,
}

/// Rows that are attended together: either one token of each of some sequences, or some tokens of one.
struct Group {
    rows: Range<usize>,
    sequences: usize,
    /// Keys of each sequence: those of the longest.
    keys: usize,
    /// Where they are: `[sequences·keys]`.
    slots: Tensor,
    /// 0 for a key that a row sees and −∞ for others: `[1, sequences, rows of each, keys]`.
    mask: Tensor,
}

impl DeviceDecoder {
    /// Reads the weights, and takes the memory for all blocks.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape, [`LoadError::Device`] with the bytes
    /// that were asked for if the device has no memory for them, [`LoadError::Unsupported`] for more blocks than can be
    /// counted.
    pub fn load(
        spec: &LoadSpec,
        device: &Device,
        weights: &Weights,
        config: &DecoderConfig,
        held: Held,
    ) -> Loaded<Self> {
        let DecoderConfig { hidden, vocabulary, kv_heads, head_width, .. } = *config;
        let places = held.blocks * BLOCK + 1;
        if kv_heads * head_width * places > MOST_NUMBERS {
            let most = MOST_NUMBERS / (kv_heads * head_width);
            return Err(LoadError::Unsupported {
                model: spec.source.clone(),
                reason: format!(
                    "[pool.options]: kv_tokens make {places} places; on a device there are {most}"
                ),
            });
        }
        let put = Put { spec, device, dtype: uniform(spec)?.tensors };
        let token_embeddings = put.matrix(&weights.token_embeddings([hidden, vocabulary])?)?;
        let head = match config.is_tied {
            true => token_embeddings.clone(),
            false => put.matrix(&weights.head([hidden, vocabulary])?)?,
        };
        let layer =
            |index| put.layer(host::Layer::load(weights, config, index)?, config, places, held.numbers);
        Ok(Self {
            layers: (0..config.layers).map(layer).collect::<Loaded<_>>()?,
            norm: put.vector(weights.last_norm(hidden)?)?,
            token_embeddings,
            head,
            rotary: Rotary::of(&config.frequencies, held.context.max(KNOWN)),
            // Counted in 32 bits, by the check above.
            nowhere: (places - 1) as u32,
            device: device.clone(),
            config: config.clone(),
        })
    }

    /// The numbers of the next token, `[wanted, vocabulary]`, after the rows `wanted`, to `logits`. `ids` are the tokens
    /// of all `spans`, in their order; their keys and values are put into the blocks, also where a later part of the step
    /// fails. Ids are in the vocabulary.
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
        *logits = self.computed(ids, spans, wanted, &self.layers)?;
        Ok(())
    }

    /// Compares what the first layers give for a known prompt with what a CPU computes in f32, with keys and values kept
    /// as `numbers` too; on a CPU in f32 nothing is compared. The whole model would take as much memory on the host.
    ///
    /// # Errors
    /// [`LoadError::Unfit`] if they differ, [`LoadError::Device`] if the device fails.
    pub fn prove(&self, spec: &LoadSpec, weights: &Weights, numbers: KvNumbers) -> Loaded<()> {
        let candle = |error: candle_core::Error| fitness::failed(spec, &ForwardError::from(&error));
        if !fitness::is_to_be_compared(&self.device, spec.dtype) {
            return Ok(());
        }
        let config = DecoderConfig { layers: self.layers.len().min(PROVEN), ..self.config.clone() };
        let held = Held { context: KNOWN, blocks: KNOWN.div_ceil(BLOCK), numbers };
        let of_cpu = LoadSpec { dtype: Dtype::F32, ..spec.clone() };
        let reference = Self::load(&of_cpu, &Device::Cpu, weights, &config, held)?;
        let (found, expected) = (self.known().map_err(candle)?, reference.known().map_err(candle)?);
        let finite = |logits: &[f32]| logits.iter().all(|x| x.is_finite());
        let expected = Some(&*expected).filter(|logits| finite(logits));
        fitness::compare(spec, &format!("prompt of {KNOWN} tokens"), Some(&found), expected)
    }

    /// What the first layers give after a known prompt, whose last token is fed by itself.
    fn known(&self) -> Result<Vec<f32>> {
        // A prime, so that tokens differ.
        let ids: Vec<u32> = (1..=KNOWN).map(|n| (n * 7_919 % self.config.vocabulary) as u32).collect();
        let blocks: Vec<u32> = (0..KNOWN.div_ceil(BLOCK) as u32).collect();
        let layers = &self.layers[..self.layers.len().min(PROVEN)];
        let (first, last) = ids.split_at(KNOWN - 1);
        let span = |first, count| Span { blocks: &blocks, first, count };
        self.computed(first, &[span(0, KNOWN - 1)], &[], layers)?;
        self.computed(last, &[span(KNOWN - 1, 1)], &[0], layers)
    }

    fn computed(
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
        let mut x = self.token_embeddings.index_select(&self.indices(ids)?, 0)?.to_dtype(DType::F32)?;
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
        (0..).zip(&packed.order).for_each(|(at, row)| packed_rows[*row] = at);
        let wanted = wanted.iter().map(|row| packed_rows[*row]).collect();
        let last = rms_norm(&x.index_select(&self.indices(wanted)?, 0)?, &self.norm, eps)?;
        linear(&last, &self.head)?.flatten_all()?.to_vec1()
    }

    fn indices(&self, indices: Vec<u32>) -> Result<Tensor> {
        let count = indices.len();
        Tensor::from_vec(indices, count, &self.device)
    }

    /// Copies the plan of a step to the device.
    fn step(&self, packed: &Packed<'_>) -> Result<Step> {
        let DecoderConfig { kv_heads, head_width, .. } = self.config;
        let slots = packed.rows.iter().map(|(span, place)| slot(span, *place)).collect();
        let places: Vec<usize> = packed.rows.iter().map(|(_, place)| *place).collect();
        let shape = (kv_heads, places.len(), head_width);
        Ok(Step {
            slots: self.indices(slots)?.reshape((1, (), 1))?.broadcast_as(shape)?.contiguous()?,
            turns: turns(&self.rotary, &places, &self.device)?,
            groups: packed.groups.iter().map(|group| self.group(packed, group)).collect::<Result<_>>()?,
        })
    }

    fn group(&self, packed: &Packed<'_>, (rows, sequences): &(Range<usize>, usize)) -> Result<Group> {
        let own = &packed.rows[rows.clone()];
        let keys = own.iter().map(|(_, place)| place + 1).max().unwrap_or_default();
        let mut slots = Vec::with_capacity(sequences * keys);
        for (span, place) in &own[own.len() - sequences..] {
            slots.extend((0..=*place).map(|key| slot(span, key)));
            slots.resize(slots.len().next_multiple_of(keys), self.nowhere);
        }
        let seen = |(_, place): &(&Span<'_>, usize)| {
            let place = *place;
            (0..keys).map(move |key| if key <= place { 0.0 } else { f32::NEG_INFINITY })
        };
        let mask: Vec<f32> = own.iter().flat_map(seen).collect();
        let shape = (1, *sequences, own.len() / sequences, keys);
        let mask = Tensor::from_vec(mask, shape, &self.device)?;
        Ok(Group { rows: rows.clone(), sequences: *sequences, keys, slots: self.indices(slots)?, mask })
    }

    /// attention(norm(x))·O.
    fn attention(&self, layer: &Layer, x: &Tensor, step: &Step) -> Result<Tensor> {
        let DecoderConfig { heads, kv_heads, head_width, eps, .. } = self.config;
        let rows = x.dim(0)?;
        let mut qkv = linear(&rms_norm(x, &layer.norm, eps)?, &layer.qkv)?;
        if let Some(biases) = &layer.biases {
            qkv = qkv.broadcast_add(biases)?;
        }
        // By heads: each of the three parts lies whole.
        let parts = qkv.reshape((rows, heads + 2 * kv_heads, head_width))?.transpose(0, 1)?.contiguous()?;
        let [queries, keys] =
            [(0, heads), (heads, kv_heads)].map(|(first, count)| parts.narrow(0, first, count));
        let (mut queries, mut keys) = (queries?, keys?);
        if let Some([of_queries, of_keys]) = &layer.head_norms {
            (queries, keys) = (rms_norm(&queries, of_queries, eps)?, rms_norm(&keys, of_keys, eps)?);
        }
        let [cos, sin] = &step.turns;
        let turned = |x: Tensor| rope(&x.unsqueeze(0)?, cos, sin)?.squeeze(0);
        let values = parts.narrow(0, heads + kv_heads, kv_heads)?;
        for (held, made) in layer.held.iter().zip([turned(keys)?, values]) {
            held.scatter_set(&step.slots, &made.to_dtype(held.dtype())?, 1)?;
        }
        let queries = (turned(queries)? * (1.0 / (head_width as f64).sqrt()))?;
        let queries = queries.reshape((kv_heads, heads / kv_heads, rows, head_width))?;
        let seen: Vec<Tensor> =
            step.groups.iter().map(|group| group.attend(&queries, &layer.held)).collect::<Result<_>>()?;
        linear(&Tensor::cat(&seen, 0)?.reshape((rows, heads * head_width))?, &layer.out)
    }
}

impl Group {
    /// softmax(Q·Kᵀ)·V of these rows of `queries` `[kv_heads, shared, all rows, head_width]`, which are scaled.
    /// Returns `[rows, kv_heads, shared, head_width]`.
    fn attend(&self, queries: &Tensor, [keys, values]: &[Tensor; 2]) -> Result<Tensor> {
        let (heads, shared, _, width) = queries.dims4()?;
        let rows = self.rows.len();
        let own = queries.narrow(2, self.rows.start, rows)?;
        // The queries that see the same keys come together: the heads of a token, or the tokens of a sequence.
        let is_mixed = self.sequences > 1;
        let (own, [a, b]) = match is_mixed {
            true => (own.transpose(1, 2)?, [rows, shared]),
            false => (own, [shared, rows]),
        };
        let each = shared * rows / self.sequences;
        let held = |all: &Tensor| {
            let own = all.index_select(&self.slots, 1)?;
            own.reshape((heads, self.sequences, self.keys, width))?.to_dtype(DType::F32)
        };
        let own = own.contiguous()?.reshape((heads, self.sequences, each, width))?;
        let scores = own.matmul(&held(keys)?.t()?)?.reshape((heads, a, b, self.keys))?;
        // Padding weighs exactly 0 and its values are 0, whatever the blocks hold.
        let weights = softmax_last_dim(&scores.broadcast_add(&self.mask)?)?;
        let weights = weights.reshape((heads, self.sequences, each, self.keys))?;
        let seen = weights.matmul(&held(values)?)?.reshape((heads, a, b, width))?;
        if is_mixed { seen.permute((1, 0, 2, 3)) } else { seen.permute((2, 0, 1, 3)) }
    }
}

/// `x` `[rows, depth]` in f32 times the transposed `matrix` `[width, depth]`, multiplied in the matrix's precision.
fn linear(x: &Tensor, matrix: &Tensor) -> Result<Tensor> {
    x.to_dtype(matrix.dtype())?.matmul(&matrix.t()?)?.to_dtype(DType::F32)
}

/// Where the token at `place` of a sequence lies among all places.
fn slot(span: &Span<'_>, place: usize) -> u32 {
    let HeldAt { block, offset } = span.held_at(place);
    block * BLOCK as u32 + offset as u32
}

/// The rows of a step in the order of their groups.
struct Packed<'a> {
    /// The row among all `spans`, for each packed row.
    order: Vec<usize>,
    /// The span of each packed row, and its place in its sequence.
    rows: Vec<(&'a Span<'a>, usize)>,
    /// Packed rows, and of how many sequences they are.
    groups: Vec<(Range<usize>, usize)>,
}

impl<'a> Packed<'a> {
    /// First the spans of one token, the shortest sequences first: those of similar lengths are padded to the longest
    /// of them. Then the longer spans, in parts. `heads` are those of queries, and `narrow` the numbers of a key.
    fn new(spans: &'a [Span<'a>], heads: usize, narrow: usize) -> Self {
        let starts = spans.iter().scan(0, |next, span| Some(std::mem::replace(next, *next + span.count)));
        let (mut singles, longer): (Vec<_>, Vec<_>) =
            spans.iter().zip(starts).partition(|(span, _)| span.count == 1);
        singles.sort_by_key(|(span, _)| span.first);
        let mut packed = Self { order: Vec::new(), rows: Vec::new(), groups: Vec::new() };
        for (span, start) in singles {
            let at = packed.take(span, start, 0..1);
            let fits = |(rows, _): &&mut (Range<usize>, usize)| {
                (rows.len() + 1) * (span.first + 1) * narrow.max(heads) <= MOST_AT_ONCE
            };
            match packed.groups.last_mut().filter(fits) {
                Some((rows, sequences)) => (rows.end, *sequences) = (at.end, *sequences + 1),
                None => packed.groups.push((at, 1)),
            }
        }
        for (span, start) in longer {
            let most = (MOST_AT_ONCE / ((span.first + span.count) * heads)).max(1);
            for first in (0..span.count).step_by(most) {
                let at = packed.take(span, start, first..span.count.min(first + most));
                packed.groups.push((at, 1));
            }
        }
        packed
    }

    /// Appends some tokens of a span whose first row is `start`.
    fn take(&mut self, span: &'a Span<'a>, start: usize, tokens: Range<usize>) -> Range<usize> {
        let begin = self.rows.len();
        self.order.extend(tokens.clone().map(|token| start + token));
        self.rows.extend(tokens.map(|token| (span, span.first + token)));
        begin..self.rows.len()
    }
}

/// Puts weights onto a device.
struct Put<'a> {
    spec: &'a LoadSpec,
    device: &'a Device,
    dtype: DType,
}

impl Put<'_> {
    fn on_device(&self, numbers: Vec<f32>, shape: &[usize], dtype: DType) -> Loaded<Tensor> {
        // Rounded on the host: the device never holds a matrix twice.
        let put = || Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(self.device);
        put().map_err(|error| self.spec.failed(format!("weights of the shape {shape:?}: {error}")))
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
        places: usize,
        numbers: KvNumbers,
    ) -> Loaded<Layer> {
        let dtype = match numbers {
            KvNumbers::F32 => DType::F32,
            KvNumbers::Bf16 => DType::BF16,
        };
        let none = || {
            Tensor::zeros((*kv_heads, places, *head_width), dtype, self.device).map_err(|error| {
                let bytes = 2 * layers * kv_heads * places * head_width * dtype.size_in_bytes();
                self.spec.failed(format!(
                    "keys and values of {places} tokens need {bytes} bytes of its memory: {error}; lower kv_tokens \
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
                Some([of_queries, of_keys]) => Some([self.vector(of_queries)?, self.vector(of_keys)?]),
                None => None,
            },
            out: self.matrix(&layer.out)?,
            inner_norm: self.vector(layer.inner_norm)?,
            gate: self.matrix(&layer.gate)?,
            up: self.matrix(&layer.up)?,
            down: self.matrix(&layer.down)?,
            held: [none()?, none()?],
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
    use crate::model::ops::kv::{KvBlocks, KvShape};

    const TINY: [&str; 4] = ["generate-llama", "generate-llama3", "generate-qwen2", "generate-qwen3"];
    const BLOCKS: usize = 40;

    struct Case {
        spec: LoadSpec,
        config: DecoderConfig,
        weights: Weights,
        prompts: Vec<Vec<u32>>,
    }

    fn case(name: &str) -> Case {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let spec = LoadSpec::new(folder.to_str().unwrap());
        let files = ModelFiles::locate(&spec.source).unwrap();
        let config = DecoderConfig::read(&files, name).unwrap();
        let weights = Weights::of_files(&files, &config).unwrap();
        let text = std::fs::read_to_string(folder.join("expected.json")).unwrap();
        let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
        let prompts = expected["prompts"].as_array().unwrap().iter();
        let prompts = prompts.map(|it| serde_json::from_value(it["ids"].clone()).unwrap()).collect();
        Case { spec, config, weights, prompts }
    }

    impl Case {
        fn on_device(&self, dtype: Dtype, numbers: KvNumbers) -> DeviceDecoder {
            let spec = LoadSpec { dtype, ..self.spec.clone() };
            let held = Held { context: 256, blocks: BLOCKS, numbers };
            DeviceDecoder::load(&spec, &Device::Cpu, &self.weights, &self.config, held).unwrap()
        }

        /// What the host gives after each prompt.
        fn right(&self) -> Vec<Vec<f32>> {
            let mut decoder = Decoder::load(&self.weights, &self.config, 256).unwrap();
            let DecoderConfig { layers, kv_heads: heads, head_width: width, .. } = self.config;
            let shape = KvShape { layers, heads, width, numbers: KvNumbers::F32 };
            let blocks: Vec<u32> = (0..BLOCKS as u32).collect();
            let of = |ids: &Vec<u32>| {
                let mut kv = KvBlocks::new(shape, BLOCKS).unwrap();
                let (span, mut logits) = (Span { blocks: &blocks, first: 0, count: ids.len() }, Vec::new());
                decoder.forward(&mut kv, ids, &[span], &[ids.len() - 1], &mut logits);
                logits
            };
            self.prompts.iter().map(of).collect()
        }

        /// The prompts' blocks, in disorder.
        fn tables(&self) -> Vec<Vec<u32>> {
            let mut free: Vec<u32> =
                (0..BLOCKS as u32).rev().step_by(2).chain((0..BLOCKS as u32).step_by(2)).collect();
            self.prompts.iter().map(|ids| free.split_off(free.len() - ids.len().div_ceil(BLOCK))).collect()
        }

        /// Feeds all prompts together, each in chunks of its own size, from the `first` token on. Returns what follows
        /// each.
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

    fn off(found: &[Vec<f32>], right: &[Vec<f32>]) -> f32 {
        let pairs = found.iter().flatten().zip(right.iter().flatten());
        pairs
            .map(|(a, b)| (a - b).abs())
            .map(|off| if off.is_nan() { f32::INFINITY } else { off })
            .fold(0.0, f32::max)
    }

    const WHOLE: [usize; 5] = [200; 5];
    /// One token of each at a time for most, so that sequences of different lengths are padded.
    const CUT: [usize; 5] = [1, 1, 1, 33, 1];

    #[test]
    fn logits_are_the_hosts_in_any_company_and_however_prompts_are_cut() {
        for name in TINY {
            let case = case(name);
            let (right, tables) = (case.right(), case.tables());
            let mut most = 0.0_f32;
            for chunks in [WHOLE, CUT, [1; 5], [7, 5, 20, 64, 100]] {
                let mut decoder = case.on_device(Dtype::F32, KvNumbers::F32);
                most = most.max(off(&case.fed(&mut decoder, &tables, 0, chunks), &right));
                // The beginnings are in the blocks by now.
                most = most.max(off(&case.fed(&mut decoder, &tables, 96, chunks), &right));
            }
            assert!(most < 1e-4, "{name}: {most}");
        }
    }

    #[test]
    fn what_other_blocks_hold_has_no_influence() {
        let case = case("generate-qwen3");
        let tables = case.tables();
        let mut found = Vec::new();
        for filled in [0.0, f32::NAN] {
            let mut decoder = case.on_device(Dtype::F32, KvNumbers::F32);
            for held in decoder.layers.iter().flat_map(|layer| &layer.held) {
                let (heads, places, width) = held.dims3().unwrap();
                let filling = Tensor::full(filled, (heads, places - 1, width), &Device::Cpu).unwrap();
                held.slice_set(&filling, 1, 0).unwrap();
            }
            found.push(case.fed(&mut decoder, &tables, 0, CUT));
        }
        assert_eq!(found[0], found[1]);
    }

    #[test]
    fn lower_precisions_are_near() {
        for name in TINY {
            let case = case(name);
            let (right, tables) = (case.right().concat(), case.tables());
            for (dtype, numbers, most) in [
                (Dtype::F32, KvNumbers::Bf16, 0.03),
                (Dtype::F16, KvNumbers::F32, 0.01),
                (Dtype::Bf16, KvNumbers::Bf16, 0.08),
            ] {
                let found = case.fed(&mut case.on_device(dtype, numbers), &tables, 0, CUT).concat();
                let off = distance(&found, &right);
                assert!(off > 0.0 && off < most, "{name}, {dtype:?}, {numbers:?}: {off}");
            }
        }
    }

    #[test]
    fn more_places_than_can_be_counted_are_refused_by_their_number() {
        let case = case("generate-llama");
        let held = Held { context: 256, blocks: 1 << 23, numbers: KvNumbers::F32 };
        let refused = DeviceDecoder::load(&case.spec, &Device::Cpu, &case.weights, &case.config, held);
        let error = refused.err().unwrap().to_string();
        assert!(error.contains("kv_tokens") && error.contains("268435457 places"), "{error}");
    }
}
