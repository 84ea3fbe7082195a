//! A decoder on a device, for any number format. One pass computes some tokens of any sequences; each row has its own
//! position. Owns the weights, and the keys and values of all blocks, on the device. On a GPU the step is computed by
//! kernels (`by_kernels`) if they fit the decoder's heads; otherwise, and on a CPU, by candle's operations here. With these,
//! numbers between the products with weights are f32; attention is computed in f32.
//!
//! A token's results do not depend on what else is in the step, except for the order of sums: products of another shape
//! may sum in another order, so equality to the bit is not guaranteed.
//!
//! Every operation here has a kernel in candle-kernels for f32 and, where weights or keys pass through it, for f16 and
//! bf16. No operation takes or makes a tensor of more than [`MAX_NUMBERS`] numbers.

#[cfg(feature = "cuda")]
mod by_kernels;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::ops::rms_norm;
use candle_nn::rotary_emb::rope;

use super::config::{DecoderConfig, LayerConfig};
use super::host::{FeedForward, Gated, Linear, RouterFaults, choose_experts};
use super::{Choice, DecoderWeights, KNOWN_TOKENS, host, known_ids};
use crate::model::nets::cached_attention::{Group, Packed, Reach, indices, linear, token_slot};
use crate::model::nets::{fitness, uniform_formats};
use crate::model::ops::causal::Span;
use crate::model::ops::gpu::{Draw, ElementType, PagedHeads};
use crate::model::ops::kv::{BLOCK, KvNumbers};
use crate::model::ops::{Activation, Matrix, Rotary, cos_sin};
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
    /// `[vocabulary, hidden]`; the same tensor as the token embeddings if the two are tied. None if vectors are wanted
    /// instead of logits.
    head: Option<Tensor>,
    /// One for each of the configuration's rotations.
    rotaries: Vec<Rotary>,
    /// The windows of the layers, each once.
    windows: Vec<Option<usize>>,
    /// The slot with which shorter sequences are padded. No token is written to it, and its keys and values are zeros.
    padding_slot: u32,
    /// The heads if kernels compute the steps.
    kernel_heads: Option<PagedHeads>,
    /// The faults of the last step.
    faults: RouterFaults,
}

/// Matrices are `[width, depth]` in the number format of the weights, vectors f32.
struct Layer {
    config: LayerConfig,
    /// The norms before and after attention.
    norms: [Option<Tensor>; 2],
    /// The projections to queries, keys and values, one below the other.
    qkv: DeviceLinear,
    head_norms: Option<[Tensor; 2]>,
    out: DeviceLinear,
    /// The norms before and after the feed-forward sublayer.
    inner_norms: [Option<Tensor>; 2],
    /// None in layers without experts.
    router: Option<Tensor>,
    /// The feed-forward network, or the experts.
    networks: Vec<DeviceGated>,
    /// Keys and values. For kernels `[blocks, kv_heads, BLOCK, head_width]` numbers, whose order is theirs. For candle's
    /// operations `[kv_heads, blocks·BLOCK + 1, head_width]`: the heads come first, so that the slots that are selected for
    /// some sequences are a batch of matrices, which needs no transposition.
    kv: [Tensor; 2],
}

/// A matrix with its bias.
struct DeviceLinear {
    matrix: Tensor,
    bias: Option<Tensor>,
}

impl DeviceLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let product = linear(x, &self.matrix)?;
        match &self.bias {
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }
}

/// (activation(x·G) * x·U)·D.
struct DeviceGated {
    /// G and U, one below the other.
    gate_up: DeviceLinear,
    down: DeviceLinear,
}

impl DeviceGated {
    fn forward(&self, activation: Activation, x: &Tensor) -> Result<Tensor> {
        let both = self.gate_up.forward(x)?;
        let inner = both.dim(1)? / 2;
        let gates = both.narrow(1, 0, inner)?;
        let gates = match activation {
            Activation::Silu => gates.silu()?,
            Activation::Gelu => gates.gelu_erf()?,
            Activation::GeluTanh => gates.gelu()?,
            Activation::Relu => gates.relu()?,
            Activation::Identity => gates,
        };
        self.down.forward(&(gates * both.narrow(1, inner, inner)?)?)
    }
}

/// The parts of a step that all layers share.
struct Step {
    /// The slots to which the rows' keys and values are written: `[kv_heads, rows, head_width]`.
    slots: Tensor,
    /// Cosines and sines at the rows' positions, for each of the configuration's rotations.
    cos_sin: Vec<[Tensor; 2]>,
    /// The factors of queries, `[1, rows, 1]`, if they depend on the positions.
    growth: Option<Tensor>,
    /// The groups of rows for each of the decoder's windows.
    groups: Vec<Vec<Group>>,
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
        let mut decoder = Self::load_layers(spec, device, weights, config, kv_sizes, false)?;
        decoder.head = Some(match config.is_tied {
            true => decoder.token_embeddings.clone(),
            false => {
                let head = weights.head([config.hidden, config.vocabulary])?;
                Upload { spec, device, dtype: uniform_formats(spec)?.tensors }.matrix(&head.matrix)?
            }
        });
        Ok(decoder)
    }

    /// As [`DeviceDecoder::load`], for whole texts of which [`DeviceDecoder::forward`] gives the vectors of the last
    /// layer, normalised, instead of logits. The layers use the same memory for keys and values, one after the other.
    ///
    /// # Errors
    /// As [`DeviceDecoder::load`].
    pub fn load_for_texts(
        spec: &LoadSpec,
        device: &Device,
        weights: &DecoderWeights,
        config: &DecoderConfig,
        kv_sizes: KvSizes,
    ) -> Loaded<Self> {
        Self::load_layers(spec, device, weights, config, kv_sizes, true)
    }

    /// Reads the weights of all but the head. `shares_kv` is whether all layers have the same memory for keys and
    /// values.
    fn load_layers(
        spec: &LoadSpec,
        device: &Device,
        weights: &DecoderWeights,
        config: &DecoderConfig,
        kv_sizes: KvSizes,
        shares_kv: bool,
    ) -> Loaded<Self> {
        let DecoderConfig { hidden, vocabulary, kv_heads, head_width, .. } = *config;
        let kernel_heads = kernel_heads(config, kv_sizes.numbers, device);
        let slots = kv_sizes.blocks * BLOCK + usize::from(kernel_heads.is_none());
        if kv_heads * head_width * slots > MAX_NUMBERS {
            let max_slots = MAX_NUMBERS / (kv_heads * head_width);
            return Err(LoadError::Unsupported {
                model: spec.source.clone(),
                reason: format!(
                    "[pool.options]: kv_tokens make {slots} slots for tokens; a device has at most {max_slots}"
                ),
            });
        }
        let upload = Upload { spec, device, dtype: uniform_formats(spec)?.tensors };
        let token_embeddings = upload.matrix(&weights.token_embeddings([hidden, vocabulary])?.matrix)?;
        let kv_layers = if shares_kv { 1 } else { config.layers.len() };
        let kv_shape = match kernel_heads {
            Some(_) => [kv_sizes.blocks, kv_heads, BLOCK, head_width],
            None => [1, kv_heads, slots, head_width],
        };
        let new_kv = || upload.kv(kv_shape, kv_sizes.numbers, kv_layers);
        let shared_kv = if shares_kv { Some(new_kv()?) } else { None };
        let layer = |index| {
            // A clone of a tensor is the same memory.
            let kv = shared_kv.clone().map_or_else(&new_kv, Ok)?;
            upload.layer(host::Layer::load(weights, config, index)?, config.layers[index], kv)
        };
        let mut windows: Vec<Option<usize>> = config.layers.iter().map(|layer| layer.window).collect();
        windows.sort_unstable();
        windows.dedup();
        Ok(Self {
            layers: (0..config.layers.len()).map(layer).collect::<Loaded<_>>()?,
            windows,
            norm: upload.vector(weights.last_norm(hidden)?)?,
            token_embeddings,
            head: None,
            rotaries: config.rotaries(kv_sizes.context.max(KNOWN_TOKENS)),
            // Fits into 32 bits, by the check above.
            padding_slot: (slots - 1) as u32,
            kernel_heads,
            faults: RouterFaults::new(),
            device: device.clone(),
            config: config.clone(),
        })
    }

    /// Computes a step, and writes the logits after the rows `wanted` to `logits`, `[wanted, vocabulary]`, or without a
    /// head the vectors of these rows, `[wanted, hidden]`. `ids` are the tokens of all `spans`, in their order; they
    /// must be in the vocabulary. Their keys and values are written to the blocks, even if a later part of the step
    /// fails.
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
        let mut faults = RouterFaults::new();
        let result = self.logits_of(ids, spans, wanted, &self.layers, &mut faults);
        self.faults = faults;
        *logits = result?;
        Ok(())
    }

    /// Whether [`DeviceDecoder::forward_and_choose`] chooses tokens.
    pub fn can_choose(&self) -> bool {
        self.kernel_heads.is_some()
    }

    /// As [`DeviceDecoder::forward`]. If the decoder can choose tokens, there is a draw for each wanted row; the device
    /// begins to compute the step, and the choice is returned in the place of logits.
    ///
    /// # Errors
    /// As [`DeviceDecoder::forward`].
    pub fn forward_and_choose(
        &mut self,
        ids: &[u32],
        spans: &[Span<'_>],
        wanted: &[usize],
        draws: &[Draw],
        logits: &mut Vec<f32>,
    ) -> Result<Option<Choice>> {
        #[cfg(feature = "cuda")]
        if let Some(heads) = self.kernel_heads.filter(|_| !ids.is_empty()) {
            let mut faults = RouterFaults::new();
            let choice = self.choice_by_kernels(heads, ids, spans, wanted, draws, &mut faults);
            self.faults = faults;
            return choice.map(Some);
        }
        debug_assert!(draws.is_empty(), "only kernels choose tokens");
        self.forward(ids, spans, wanted, logits).map(|()| None)
    }

    /// As [`Decoder::faults`](super::Decoder::faults).
    pub fn faults(&self) -> &RouterFaults {
        &self.faults
    }

    /// Compares the results of the first layers for a known prompt with those of a CPU in f32. `kv_sizes` are those with
    /// which this was loaded: positions may depend on the context, and keys and values on their format. On a CPU in f32
    /// nothing is compared. Only the first layers are compared, since the whole model would take as much memory on the
    /// host as on the device.
    ///
    /// # Errors
    /// [`LoadError::Unfit`] if they differ, [`LoadError::Device`] if the device fails.
    pub fn compare_with_cpu(
        &self,
        spec: &LoadSpec,
        weights: &DecoderWeights,
        kv_sizes: KvSizes,
    ) -> Loaded<()> {
        let candle = |error: candle_core::Error| fitness::failed(spec, &ForwardError::from(&error));
        if !fitness::needs_comparison(&self.device, spec.dtype) {
            return Ok(());
        }
        let mut config = self.config.clone();
        config.layers.truncate(fitness::COMPARED_LAYERS);
        let kv_sizes = KvSizes { blocks: KNOWN_TOKENS.div_ceil(BLOCK), ..kv_sizes };
        let cpu_spec = LoadSpec { dtype: Dtype::F32, ..spec.clone() };
        let reference = Self::load(&cpu_spec, &Device::Cpu, weights, &config, kv_sizes)?;
        let (found, expected) = (
            self.known_logits(config.layers.len()).map_err(candle)?,
            reference.known_logits(config.layers.len()).map_err(candle)?,
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
        // The logits show the faults too.
        let mut faults = RouterFaults::new();
        self.logits_of(first, &[span(0, KNOWN_TOKENS - 1)], &[], layers, &mut faults)?;
        self.logits_of(last, &[span(KNOWN_TOKENS - 1, 1)], &[0], layers, &mut faults)
    }

    /// Computes a step with these layers. Returns the logits after the rows `wanted`, or their vectors, and adds the
    /// rows' faults.
    fn logits_of(
        &self,
        ids: &[u32],
        spans: &[Span<'_>],
        wanted: &[usize],
        layers: &[Layer],
        faults: &mut RouterFaults,
    ) -> Result<Vec<f32>> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        #[cfg(feature = "cuda")]
        if let Some(heads) = self.kernel_heads {
            return self.logits_by_kernels(heads, ids, spans, wanted, layers, faults);
        }
        let DecoderConfig { eps, embedding_scale, .. } = self.config;
        let packed = Packed::new(spans, self.config.heads, self.config.key_width());
        let step = self.step(&packed)?;
        let ids: Vec<u32> = packed.order.iter().map(|row| ids[*row]).collect();
        let mut x =
            self.token_embeddings.index_select(&indices(ids, &self.device)?, 0)?.to_dtype(DType::F32)?;
        if embedding_scale != 1.0 {
            x = (x * f64::from(embedding_scale))?;
        }
        let mut packed_faults = RouterFaults::new();
        for (index, layer) in layers.iter().enumerate() {
            let [before, after] = &layer.norms;
            let attended = self.attention(layer, &self.norm(before.as_ref(), &x)?, &step)?;
            x = self.add(&x, attended, after.as_ref())?;
            let [before, after] = &layer.inner_norms;
            let x_normed = self.norm(before.as_ref(), &x)?;
            let result = self.feed_forward(layer, index, &x_normed, &mut packed_faults)?;
            x = self.add(&x, result, after.as_ref())?;
        }
        faults.extend(packed_faults.into_iter().map(|(row, fault)| (packed.order[row], fault)));
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let mut packed_rows = vec![0; packed.order.len()];
        (0..).zip(&packed.order).for_each(|(packed_row, row)| packed_rows[*row] = packed_row);
        let wanted = wanted.iter().map(|row| packed_rows[*row]).collect();
        let last = rms_norm(&x.index_select(&indices(wanted, &self.device)?, 0)?, &self.norm, eps)?;
        let Some(head) = &self.head else { return last.flatten_all()?.to_vec1() };
        let mut logits: Vec<f32> = linear(&last, head)?.flatten_all()?.to_vec1()?;
        self.config.finish_logits(&mut logits);
        Ok(logits)
    }

    /// The normalised rows, or the same if there is no norm.
    fn norm(&self, norm: Option<&Tensor>, x: &Tensor) -> Result<Tensor> {
        norm.map_or_else(|| Ok(x.clone()), |norm| rms_norm(x, norm, self.config.eps))
    }

    /// x + norm(`result`), times the factor of results.
    fn add(&self, x: &Tensor, result: Tensor, norm: Option<&Tensor>) -> Result<Tensor> {
        let mut result = self.norm(norm, &result)?;
        if self.config.residual_scale != 1.0 {
            result = (result * f64::from(self.config.residual_scale))?;
        }
        x + result
    }

    /// The feed-forward sublayer. The host chooses the experts.
    fn feed_forward(
        &self,
        layer: &Layer,
        index: usize,
        x: &Tensor,
        faults: &mut RouterFaults,
    ) -> Result<Tensor> {
        let activation = self.config.activation;
        let (router, experts) = match (&layer.router, self.config.experts, &*layer.networks) {
            (Some(router), Some(experts), _) => (router, experts),
            (_, _, [network, ..]) => return network.forward(activation, x),
            (_, _, []) => unreachable!("a layer has a network"),
        };
        let scores: Vec<f32> = x.matmul(&router.t()?)?.flatten_all()?.to_vec1()?;
        let chosen = choose_experts(&scores, experts, index, faults);
        let mut sum = x.zeros_like()?;
        for (index, network) in layer.networks.iter().enumerate() {
            let (mut rows, mut weights) = (Vec::new(), Vec::new());
            for (row, chosen) in (0..).zip(&chosen) {
                for (_, weight) in chosen.iter().filter(|(expert, _)| *expert == index) {
                    rows.push(row);
                    weights.push(*weight);
                }
            }
            if rows.is_empty() {
                continue;
            }
            let (count, rows) = (rows.len(), indices(rows, &self.device)?);
            let result = network.forward(activation, &x.index_select(&rows, 0)?)?;
            let weights = Tensor::from_vec(weights, (count, 1), &self.device)?;
            sum = sum.index_add(&rows, &result.broadcast_mul(&weights)?, 0)?;
        }
        Ok(sum)
    }

    /// Copies the plan of a step to the device.
    fn step(&self, packed: &Packed<'_>) -> Result<Step> {
        let DecoderConfig { kv_heads, head_width, .. } = self.config;
        let slots = packed.rows.iter().map(|(span, position)| token_slot(span, *position)).collect();
        let positions: Vec<usize> = packed.rows.iter().map(|(_, position)| *position).collect();
        let shape = (kv_heads, positions.len(), head_width);
        let groups_of = |window: &Option<usize>| {
            let reach = Reach { window: *window, is_causal: self.config.is_causal };
            let group = |group| Group::new(packed, group, reach, self.padding_slot, &self.device);
            packed.groups.iter().map(group).collect::<Result<Vec<_>>>()
        };
        let cos_sin_of = |rotary: &Rotary| cos_sin(rotary, &positions, &self.device);
        let growth = self.config.query_growth.map(|growth| {
            let factors: Vec<f32> = positions.iter().map(|position| growth.at(*position)).collect();
            Tensor::from_vec(factors, (1, positions.len(), 1), &self.device)
        });
        Ok(Step {
            slots: indices(slots, &self.device)?.reshape((1, (), 1))?.broadcast_as(shape)?.contiguous()?,
            cos_sin: self.rotaries.iter().map(cos_sin_of).collect::<Result<_>>()?,
            growth: growth.transpose()?,
            groups: self.windows.iter().map(groups_of).collect::<Result<_>>()?,
        })
    }

    /// attention(x)·O.
    fn attention(&self, layer: &Layer, x: &Tensor, step: &Step) -> Result<Tensor> {
        let DecoderConfig { heads, kv_heads, head_width, attention_scale, attention_cap, .. } = self.config;
        let rows = x.dim(0)?;
        let qkv = layer.qkv.forward(x)?;
        // Heads come first, so that queries, keys and values are contiguous.
        let part = |first: usize, count: usize, norm: Option<&Tensor>| {
            let part = qkv.narrow(1, first * head_width, count * head_width)?;
            let is_of_all_heads = |norm: &&Tensor| norm.elem_count() > head_width;
            let part = self.norm(norm.filter(is_of_all_heads), &part.contiguous()?)?;
            let by_heads = part.reshape((rows, count, head_width))?.transpose(0, 1)?.contiguous()?;
            self.norm(norm.filter(|norm| !is_of_all_heads(norm)), &by_heads)
        };
        let [q_norm, k_norm] = match &layer.head_norms {
            Some([q_norm, k_norm]) => [Some(q_norm), Some(k_norm)],
            None => [None, None],
        };
        let rotated = |x: Tensor| match layer.config.rotation {
            Some(rotation) => rotated(&x, &step.cos_sin[rotation]),
            None => Ok(x),
        };
        let mut queries = rotated(part(0, heads, q_norm)?)?;
        let keys = rotated(part(heads, kv_heads, k_norm)?)?;
        let values = part(heads + kv_heads, kv_heads, None)?;
        for (cache, rows) in layer.kv.iter().zip([keys, values]) {
            cache.scatter_set(&step.slots, &rows.to_dtype(cache.dtype())?, 1)?;
        }
        if let Some(growth) = &step.growth {
            queries = queries.broadcast_mul(growth)?;
        }
        let queries = (queries * f64::from(attention_scale))?;
        let queries = queries.reshape((kv_heads, heads / kv_heads, rows, head_width))?;
        let window = self.windows.iter().position(|window| *window == layer.config.window);
        let groups = window.and_then(|window| step.groups.get(window)).into_iter().flatten();
        let attended: Vec<Tensor> =
            groups.map(|group| group.attend(&queries, &layer.kv, attention_cap)).collect::<Result<_>>()?;
        layer.out.forward(&Tensor::cat(&attended, 0)?.reshape((rows, heads * head_width))?)
    }
}

fn dtype_of(numbers: KvNumbers) -> DType {
    match numbers {
        KvNumbers::F32 => DType::F32,
        KvNumbers::Bf16 => DType::BF16,
    }
}

/// The heads of a decoder if kernels compute its steps on this device.
fn kernel_heads(config: &DecoderConfig, numbers: KvNumbers, device: &Device) -> Option<PagedHeads> {
    let [count, kv_count, width] = [config.heads, config.kv_heads, config.head_width].map(|size| size as u32);
    let heads = PagedHeads { count, kv_count, width, kv_type: ElementType::of(dtype_of(numbers))? };
    // Kernels read four numbers of a row at once.
    let fits =
        heads.have_kernel() && [config.hidden, config.inner].iter().all(|width| width.is_multiple_of(4));
    (device.is_cuda() && fits).then_some(heads)
}

/// The heads `[heads, rows, width]`, of which the first numbers are rotated, two for each cosine.
fn rotated(x: &Tensor, [cos, sin]: &[Tensor; 2]) -> Result<Tensor> {
    let (width, rotated) = (x.dim(2)?, 2 * cos.dim(1)?);
    let first = x.narrow(2, 0, rotated)?.contiguous()?;
    let first = rope(&first.unsqueeze(0)?, cos, sin)?.squeeze(0)?;
    if rotated == width {
        return Ok(first);
    }
    Tensor::cat(&[first, x.narrow(2, rotated, width - rotated)?], 2)?.contiguous()
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

    /// Linear layers of the same depth, one below the other. If one has a bias, all have.
    fn stacked(&self, linears: &[&Linear]) -> Loaded<DeviceLinear> {
        let matrices: Vec<&Matrix> = linears.iter().map(|linear| &linear.matrix).collect();
        let biases: Option<Vec<&[f32]>> = linears.iter().map(|linear| linear.bias.as_deref()).collect();
        let bias = biases.map(|biases| self.vector(biases.concat())).transpose()?;
        Ok(DeviceLinear { matrix: self.matrices(&matrices)?, bias })
    }

    fn gated(&self, Gated { gate, up, down }: Gated) -> Loaded<DeviceGated> {
        Ok(DeviceGated { gate_up: self.stacked(&[&gate, &up])?, down: self.stacked(&[&down])? })
    }

    /// Empty memory for the keys and values of a layer: `[blocks, heads, tokens, width]` each. `layers` is the number of
    /// layers that each have such memory.
    fn kv(&self, shape: [usize; 4], numbers: KvNumbers, layers: usize) -> Loaded<[Tensor; 2]> {
        let dtype = dtype_of(numbers);
        let [blocks, heads, tokens, width] = shape;
        let empty = || {
            let memory = Tensor::zeros((blocks * heads, tokens, width), dtype, self.device);
            memory.map_err(|error| {
                let slots = blocks * tokens;
                let bytes = 2 * layers * heads * slots * width * dtype.size_in_bytes();
                // Whole texts need memory for one layer alone.
                let advice = match layers {
                    1 => "",
                    _ => "; lower kv_tokens or sequences in [pool.options]",
                };
                self.spec.failed(format!(
                    "keys and values of {slots} tokens need {bytes} bytes of its memory: {error}{advice}"
                ))
            })
        };
        Ok([empty()?, empty()?])
    }

    fn layer(&self, layer: host::Layer, config: LayerConfig, kv: [Tensor; 2]) -> Loaded<Layer> {
        let norms = |[before, after]: [Option<Vec<f32>>; 2]| {
            let norm = |norm: Option<Vec<f32>>| norm.map(|norm| self.vector(norm)).transpose();
            Ok::<_, LoadError>([norm(before)?, norm(after)?])
        };
        let (router, networks) = match layer.feed_forward {
            FeedForward::Dense(network) => (None, vec![*network]),
            FeedForward::Experts { router, experts } => (Some(router), experts),
        };
        // The router's numbers stay f32, since a small difference may choose another expert.
        let router = router.map(|router| {
            let Self { spec, device, .. } = *self;
            Upload { spec, device, dtype: DType::F32 }.matrix(&router)
        });
        Ok(Layer {
            config,
            norms: norms(layer.norms)?,
            qkv: self.stacked(&layer.qkv.each_ref())?,
            head_norms: match layer.head_norms {
                Some([q_norm, k_norm]) => Some([self.vector(q_norm)?, self.vector(k_norm)?]),
                None => None,
            },
            out: self.stacked(&[&layer.out])?,
            inner_norms: norms(layer.inner_norms)?,
            router: router.transpose()?,
            networks: networks.into_iter().map(|network| self.gated(network)).collect::<Loaded<_>>()?,
            kv,
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
    use crate::model::ops::kv::KvBlocks;

    const BLOCKS: usize = 40;

    const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");

    /// The names of the fixtures of decoders with random weights.
    fn tiny() -> Vec<String> {
        let entries = std::fs::read_dir(FIXTURES).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("generate-")).collect()
    }

    struct Case {
        spec: LoadSpec,
        config: DecoderConfig,
        weights: DecoderWeights,
        prompts: Vec<Vec<u32>>,
    }

    fn case(name: &str) -> Case {
        let folder = Path::new(FIXTURES).join(name);
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
            let shape = self.config.kv_shape(KvNumbers::F32);
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
        for name in tiny() {
            let case = case(&name);
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
        for name in tiny() {
            let case = case(&name);
            let (expected, tables) = (case.expected().concat(), case.tables());
            for (dtype, numbers, tolerance) in [
                (Dtype::F32, KvNumbers::Bf16, 0.03),
                (Dtype::F16, KvNumbers::F32, 0.01),
                (Dtype::Bf16, KvNumbers::Bf16, 0.08),
            ] {
                let found = case.fed(&mut case.on_device(dtype, numbers), &tables, 0, CUT).concat();
                let error = distance(&found, &expected);
                // Where another expert is chosen, the numbers are others.
                let tolerance = if name.contains("moe") { 5.0 * tolerance } else { tolerance };
                assert!(error > 0.0 && error < tolerance, "{name}, {dtype:?}, {numbers:?}: {error}");
            }
        }
    }

    #[test]
    fn a_device_is_compared_at_the_positions_of_its_own_context() {
        // Its positions in a context of 256 tokens are not those in a context of 128.
        let case = case("generate-phi3");
        let spec = LoadSpec { dtype: Dtype::F16, ..case.spec.clone() };
        let [short, long] =
            [128, 256].map(|context| KvSizes { context, blocks: BLOCKS, numbers: KvNumbers::F32 });
        let decoder = DeviceDecoder::load(&spec, &Device::Cpu, &case.weights, &case.config, long).unwrap();
        decoder.compare_with_cpu(&spec, &case.weights, long).unwrap();
        assert!(decoder.compare_with_cpu(&spec, &case.weights, short).is_err());
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
