//! Decoder networks, which generate text, or compute vectors of texts in one pass. All are one network, described by its configuration. One step (a forward pass)
//! takes tokens of any number of sequences, one row for each token.
//!
//! `architectures` is the table of what is served, `config` the description, `read` makes it from a model's files, and
//! `host`, `on_device` and `one_pass` compute. This file finds the tensors by their names.

pub mod architectures;
pub mod config;
mod host;
mod on_device;
mod one_pass;
mod read;
pub mod rope;

pub(super) use host::on_one_of_rayons_threads;
pub use host::{Decoder, RouterFaults, compare_with_f32};
pub use on_device::{DeviceDecoder, KvSizes};
pub use one_pass::{OnePassDecoder, ProductFormats};

use std::path::PathBuf;

use candle_core::Device;

use self::architectures::{Architecture, HeadNorms, Norms};
use self::config::{DecoderConfig, Experts};
use self::host::Linear;
use crate::model::LoadError;
use crate::model::load::ModelFiles;
use crate::model::load::gguf::Gguf;
use crate::model::load::packed_cache::PackedCache;
use crate::model::load::weights::{NumberFormats, Weights};
use crate::model::ops::causal::Span;
use crate::model::ops::gpu::{Draw, Drawn};
use crate::model::ops::kv::KvBlocks;
use crate::model::ops::{Matrix, NumberFormat, RowFormat};

/// Tokens of the known prompt by which a device or a number format is compared with a CPU in f32.
const KNOWN_TOKENS: usize = 40;

/// The known prompt.
fn known_ids(vocabulary: usize) -> Vec<u32> {
    // 7,919 is a prime, so that the tokens differ.
    (1..=KNOWN_TOKENS).map(|n| (n * 7_919 % vocabulary) as u32).collect()
}

/// A decoder with the keys and values of its sequences.
pub enum CachedDecoder {
    /// On the host. A token's results are the same to the last bit, whatever else is in the batch.
    Host(Box<Decoder>, KvBlocks),
    /// On any device.
    Device(Box<DeviceDecoder>),
}

/// Chooses the tokens of a step that a device computes meanwhile, and waits for them. It takes the masks of the draws that
/// have one: a bit for each token in bytes, the lowest bit first; missing bits are 0.
pub type Choice = Box<dyn FnOnce(&[&[u8]]) -> candle_core::Result<Vec<Drawn>>>;

impl CachedDecoder {
    /// Whether the decoder chooses tokens.
    pub fn can_choose(&self) -> bool {
        match self {
            Self::Host(..) => false,
            Self::Device(decoder) => decoder.can_choose(),
        }
    }

    /// [`Decoder::forward`] or [`DeviceDecoder::forward_and_choose`]. There are no draws if the decoder cannot choose tokens;
    /// then there is no choice, but logits.
    ///
    /// # Errors
    /// Those of [`DeviceDecoder::forward_and_choose`]; [`Decoder::forward`] has none.
    pub fn forward(
        &mut self,
        ids: &[u32],
        spans: &[Span<'_>],
        wanted: &[usize],
        draws: &[Draw],
        logits: &mut Vec<f32>,
    ) -> candle_core::Result<Option<Choice>> {
        match self {
            Self::Host(decoder, kv) => {
                decoder.forward(kv, ids, spans, wanted, logits);
                Ok(None)
            }
            Self::Device(decoder) => decoder.forward_and_choose(ids, spans, wanted, draws, logits),
        }
    }

    /// The faults of the last step, by its rows. The logits after such a row are not finite.
    pub fn faults(&self) -> &RouterFaults {
        match self {
            Self::Host(decoder, _) => decoder.faults(),
            Self::Device(decoder) => decoder.faults(),
        }
    }

    /// Returns a block's memory to the system. On a device the memory is kept for other sequences.
    pub fn release(&mut self, block: u32) {
        if let Self::Host(_, kv) = self {
            // Each block is a group.
            kv.release(block as usize);
        }
    }
}

/// A decoder's tensors by their names in its files.
pub struct DecoderWeights {
    files: Files,
    architecture: &'static Architecture,
    /// The cache of packed matrices, if there is one.
    packed_cache: Option<PackedCache>,
    /// The format to which rows are converted before they are multiplied with quantised matrices.
    row_format: RowFormat,
}

enum Files {
    Safetensors(Weights),
    Gguf(Gguf),
}

/// A part of a layer, by its name in safetensors and in GGUF files.
#[derive(Clone, Copy)]
struct Part {
    safetensors: &'static str,
    gguf: &'static str,
}

/// The parts of a layer.
mod parts {
    use super::Part;

    const fn part(safetensors: &'static str, gguf: &'static str) -> Part {
        Part { safetensors, gguf }
    }

    pub const NORM: Part = part("input_layernorm", "attn_norm");
    /// In layers with norms after their sublayers, this norm follows attention.
    pub const POST_NORM: Part = part("post_attention_layernorm", "post_attention_norm");
    /// The same name in safetensors files, where it precedes the feed-forward sublayer.
    pub const INNER_NORM: Part = part("post_attention_layernorm", "ffn_norm");
    pub const PRE_INNER_NORM: Part = part("pre_feedforward_layernorm", "ffn_norm");
    pub const POST_INNER_NORM: Part = part("post_feedforward_layernorm", "post_ffw_norm");
    pub const QKV: [Part; 3] = [
        part("self_attn.q_proj", "attn_q"),
        part("self_attn.k_proj", "attn_k"),
        part("self_attn.v_proj", "attn_v"),
    ];
    pub const FUSED_QKV: Part = part("self_attn.qkv_proj", "attn_qkv");
    pub const HEAD_NORMS: [Part; 2] =
        [part("self_attn.q_norm", "attn_q_norm"), part("self_attn.k_norm", "attn_k_norm")];
    pub const OUT: Part = part("self_attn.o_proj", "attn_output");
    pub const GATE: Part = part("mlp.gate_proj", "ffn_gate");
    pub const UP: Part = part("mlp.up_proj", "ffn_up");
    /// The gate, and below it the up projection.
    pub const FUSED_GATE_UP: Part = part("mlp.gate_up_proj", "ffn_up");
    pub const DOWN: Part = part("mlp.down_proj", "ffn_down");
    pub const ROUTER: Part = part("mlp.gate", "ffn_gate_inp");
    /// The matrices of experts: in safetensors files one tensor for each expert, in GGUF files all in one.
    pub const EXPERTS: [Part; 3] = [
        part("gate_proj", "ffn_gate_exps"),
        part("up_proj", "ffn_up_exps"),
        part("down_proj", "ffn_down_exps"),
    ];
}

/// Where a matrix is in the files: in these rows of a tensor.
struct MatrixLocation {
    /// The tensor's name.
    tensor: String,
    /// The tensor's shape. All dimensions but the last count its rows.
    shape: Vec<usize>,
    /// The matrix's first row.
    first_row: usize,
}

impl MatrixLocation {
    /// A name for the packed matrix.
    fn key(&self) -> String {
        let Self { tensor, shape, first_row } = self;
        match (shape.len(), *first_row) {
            (2, 0) => tensor.clone(),
            _ => format!("{tensor} from row {first_row}"),
        }
    }
}

/// The name of the output projection (the LM head) in safetensors files. It has no prefix but that of the text part.
const HEAD: &str = "lm_head.weight";

/// The name of the head for labels in safetensors files. It has no prefix.
const SCORE: &str = "score.weight";

/// The name of the token embeddings in GGUF files.
pub const GGUF_EMBEDDINGS: &str = "token_embd.weight";

/// The prefixes of tensors in safetensors files: of a decoder, and of the text part of a model for images and text.
const BASES: [&str; 3] = ["model", "language_model.model", "model.language_model"];

impl DecoderWeights {
    /// The tensors of safetensors files. `format` is the number format of the matrices.
    ///
    /// # Errors
    /// [`LoadError::File`] for a file that is missing or broken.
    pub fn from_safetensors(
        files: &ModelFiles,
        config: &DecoderConfig,
        format: NumberFormat,
    ) -> Result<Self, LoadError> {
        let paths: Vec<PathBuf> = files.weights()?;
        let formats = NumberFormats { matrices: format, ..NumberFormats::F32 };
        let read = |base| Weights::read(&paths, base, "embed_tokens.weight", &Device::Cpu, formats);
        let mut tensors = read(BASES[0])?;
        for base in &BASES[1..] {
            if tensors.prefix().is_empty() {
                tensors = read(base)?;
            }
        }
        Ok(Self {
            files: Files::Safetensors(tensors),
            architecture: config.architecture,
            packed_cache: None,
            row_format: RowFormat::F32,
        })
    }

    /// The tensors of a GGUF file.
    pub fn from_gguf(gguf: Gguf, config: &DecoderConfig) -> Self {
        Self {
            files: Files::Gguf(gguf),
            architecture: config.architecture,
            packed_cache: None,
            row_format: RowFormat::F32,
        }
    }

    /// Takes matrices from this cache if it has them.
    pub fn use_cache(&mut self, packed_cache: PackedCache) {
        self.packed_cache = Some(packed_cache);
    }

    /// Sets the format to which rows are converted before they are multiplied ([`Matrix::with_rows_as`]).
    pub fn multiply_rows_as(&mut self, rows: RowFormat) {
        self.row_format = rows;
    }

    /// The full name of a layer's tensor; `kind` is `weight` or `bias`.
    fn name(&self, layer: usize, part: Part, kind: &str) -> String {
        match &self.files {
            Files::Safetensors(tensors) => {
                format!("{}layers.{layer}.{}.{kind}", tensors.prefix(), part.safetensors)
            }
            Files::Gguf(_) => format!("blk.{layer}.{}.{kind}", part.gguf),
        }
    }

    /// A name beside the layers: with the prefix in safetensors files, or that in GGUF files.
    fn other_name(&self, safetensors: &str, gguf: &str) -> String {
        match &self.files {
            Files::Safetensors(tensors) => format!("{}{safetensors}", tensors.prefix()),
            Files::Gguf(_) => gguf.to_owned(),
        }
    }

    fn vector(&self, name: &str, length: usize) -> Result<Vec<f32>, LoadError> {
        match &self.files {
            Files::Safetensors(tensors) => tensors.values(name, &[length]),
            Files::Gguf(gguf) => gguf.vector(name, length),
        }
    }

    /// The weights of a norm, whose name is `name`.
    fn norm(&self, name: &str, length: usize) -> Result<Vec<f32>, LoadError> {
        let mut weights = self.vector(name, length)?;
        if matches!(self.files, Files::Safetensors(_)) {
            weights.iter_mut().for_each(|weight| *weight += self.architecture.norm_offset);
        }
        Ok(weights)
    }

    /// The norms of a layer: before and after attention, before and after the feed-forward sublayer.
    fn layer_norms(&self, layer: usize, hidden: usize) -> Result<[Option<Vec<f32>>; 4], LoadError> {
        let norm = |part| self.norm(&self.name(layer, part, "weight"), hidden).map(Some);
        Ok(match self.architecture.norms {
            Norms::Before => [norm(parts::NORM)?, None, norm(parts::INNER_NORM)?, None],
            Norms::After => [None, norm(parts::POST_NORM)?, None, norm(parts::POST_INNER_NORM)?],
            Norms::Both => [
                norm(parts::NORM)?,
                norm(parts::POST_NORM)?,
                norm(parts::PRE_INNER_NORM)?,
                norm(parts::POST_INNER_NORM)?,
            ],
        })
    }

    /// The norms of queries and keys.
    fn head_norms(&self, layer: usize, config: &DecoderConfig) -> Result<Option<[Vec<f32>; 2]>, LoadError> {
        let lengths = match self.architecture.head_norms {
            HeadNorms::None => return Ok(None),
            HeadNorms::Each => [config.head_width; 2],
            HeadNorms::All => [config.query_width(), config.key_width()],
        };
        let norm =
            |index: usize| self.norm(&self.name(layer, parts::HEAD_NORMS[index], "weight"), lengths[index]);
        Ok(Some([norm(0)?, norm(1)?]))
    }

    /// The linear layer of one part.
    fn linear(
        &self,
        layer: usize,
        part: Part,
        shape: [usize; 2],
        has_bias: bool,
    ) -> Result<Linear, LoadError> {
        self.rows_of(layer, part, shape, 0, shape[1], has_bias, |column| column)
    }

    /// The output matrix of attention.
    fn out(&self, layer: usize, config: &DecoderConfig) -> Result<Linear, LoadError> {
        self.linear(layer, parts::OUT, [config.query_width(), config.hidden], config.biases.out)
    }

    /// The matrix that gives each expert's score. It is kept in f32, since a small difference may choose another expert.
    fn router(&self, layer: usize, [hidden, count]: [usize; 2]) -> Result<Matrix, LoadError> {
        let name = self.name(layer, parts::ROUTER, "weight");
        match &self.files {
            Files::Safetensors(tensors) => {
                Ok(Matrix::of_f32(&tensors.values(&name, &[count, hidden])?, hidden))
            }
            Files::Gguf(gguf) => {
                gguf.matrix_of_rows(&name, &[count, hidden], [hidden, count], |column| column)
            }
        }
    }

    /// The projections to queries, keys and values.
    fn qkv(&self, layer: usize, config: &DecoderConfig) -> Result<[Linear; 3], LoadError> {
        let DecoderConfig { hidden, head_width, .. } = *config;
        let widths = [config.query_width(), config.key_width(), config.key_width()];
        let is_adjacent = matches!(self.files, Files::Gguf(_)) && self.architecture.gguf_has_adjacent_pairs;
        let linear = |index: usize| {
            // Queries and keys are rotated; in the result, the two numbers of a pair are half a head apart.
            let rotated = config.rotations.first().map_or(0, |rotation| 2 * rotation.frequencies.len());
            let row = |column: usize| {
                let (head, at) = (column / head_width, column % head_width);
                if !is_adjacent || index == 2 || at >= rotated {
                    return column;
                }
                let (half, pair) = (at / (rotated / 2), at % (rotated / 2));
                head * head_width + 2 * pair + half
            };
            let shape = [hidden, widths[index]];
            match self.architecture.is_fused {
                true => {
                    let (first, rows) = (widths[..index].iter().sum(), widths.iter().sum());
                    self.rows_of(layer, parts::FUSED_QKV, shape, first, rows, config.biases.qkv, row)
                }
                false => self.rows_of(layer, parts::QKV[index], shape, 0, shape[1], config.biases.qkv, row),
            }
        };
        Ok([linear(0)?, linear(1)?, linear(2)?])
    }

    /// The gate, the up and the down projection of a layer without experts.
    fn feed_forward(&self, layer: usize, config: &DecoderConfig) -> Result<[Linear; 3], LoadError> {
        let DecoderConfig { hidden, inner, biases, .. } = *config;
        let has_bias = biases.feed_forward;
        let down = self.linear(layer, parts::DOWN, [inner, hidden], has_bias)?;
        let shape = [hidden, inner];
        if self.architecture.is_fused {
            let half = |first| {
                self.rows_of(layer, parts::FUSED_GATE_UP, shape, first, 2 * inner, has_bias, |column| column)
            };
            return Ok([half(0)?, half(inner)?, down]);
        }
        let linear = |part| self.linear(layer, part, shape, has_bias);
        Ok([linear(parts::GATE)?, linear(parts::UP)?, down])
    }

    /// The gate, the up and the down projection of an expert.
    fn expert(
        &self,
        layer: usize,
        expert: usize,
        experts: Experts,
        hidden: usize,
    ) -> Result<[Linear; 3], LoadError> {
        let linear = |index: usize| {
            let part = parts::EXPERTS[index];
            let [inputs, outputs] =
                if index == 2 { [experts.inner, hidden] } else { [hidden, experts.inner] };
            let location = match &self.files {
                Files::Safetensors(tensors) => MatrixLocation {
                    tensor: format!(
                        "{}layers.{layer}.mlp.experts.{expert}.{}.weight",
                        tensors.prefix(),
                        part.safetensors
                    ),
                    shape: vec![outputs, inputs],
                    first_row: 0,
                },
                Files::Gguf(_) => MatrixLocation {
                    tensor: self.name(layer, part, "weight"),
                    shape: vec![experts.count, outputs, inputs],
                    first_row: expert * outputs,
                },
            };
            let matrix = self.matrix(&location, [inputs, outputs], |column| column)?;
            Ok(Linear { key: location.key(), matrix, bias: None })
        };
        Ok([linear(0)?, linear(1)?, linear(2)?])
    }

    /// The linear layer `[inputs, outputs]` whose matrix is some rows of a part's tensor: from `first` on, of `rows`. In a
    /// GGUF file, column `c` of the result is row `row(c)` of these; `row` is not used for other files.
    #[expect(clippy::too_many_arguments, reason = "a place in a file has many coordinates")]
    fn rows_of(
        &self,
        layer: usize,
        part: Part,
        shape: [usize; 2],
        first: usize,
        rows: usize,
        has_bias: bool,
        row: impl Fn(usize) -> usize,
    ) -> Result<Linear, LoadError> {
        let bias = match has_bias {
            true => {
                let all = self.vector(&self.name(layer, part, "bias"), rows)?;
                let of_column = |column| match self.files {
                    Files::Safetensors(_) => all[first + column],
                    Files::Gguf(_) => all[first + row(column)],
                };
                Some((0..shape[1]).map(of_column).collect())
            }
            false => None,
        };
        let tensor = self.name(layer, part, "weight");
        let location = MatrixLocation { tensor, shape: vec![rows, shape[0]], first_row: first };
        let matrix = self.matrix(&location, shape, row)?;
        Ok(Linear { key: location.key(), matrix, bias })
    }

    /// Reads a matrix `[inputs, outputs]`, from the cache if it is there. `row` is as for [`Self::rows_of`].
    fn matrix(
        &self,
        location: &MatrixLocation,
        shape: [usize; 2],
        row: impl Fn(usize) -> usize,
    ) -> Result<Matrix, LoadError> {
        let cached = self.packed_cache.as_ref().and_then(|cache| cache.matrix(&location.key(), shape));
        let MatrixLocation { tensor, shape: whole, first_row } = location;
        let matrix = match (cached, &self.files) {
            (Some(matrix), _) => matrix,
            (None, Files::Safetensors(tensors)) => {
                tensors.matrix_of_rows(tensor, whole, *first_row, shape)?
            }
            (None, Files::Gguf(gguf)) => {
                gguf.matrix_of_rows(tensor, whole, shape, |column| first_row + row(column))?
            }
        };
        Ok(matrix.with_rows_as(self.row_format))
    }

    /// A matrix beside the layers, with its name for the cache.
    fn other_matrix(&self, tensor: String, [inputs, outputs]: [usize; 2]) -> Result<Linear, LoadError> {
        let location = MatrixLocation { tensor, shape: vec![outputs, inputs], first_row: 0 };
        let matrix = self.matrix(&location, [inputs, outputs], |column| column)?;
        Ok(Linear { key: location.tensor, matrix, bias: None })
    }

    /// The token embeddings `[hidden, vocabulary]`.
    fn token_embeddings(&self, shape: [usize; 2]) -> Result<Linear, LoadError> {
        self.other_matrix(self.other_name("embed_tokens.weight", GGUF_EMBEDDINGS), shape)
    }

    /// The output projection.
    fn head(&self, shape: [usize; 2]) -> Result<Linear, LoadError> {
        self.other_matrix(self.head_name(), shape)
    }

    fn head_name(&self) -> String {
        match &self.files {
            // A text part has its own prefix, and may have the head within or beside it.
            Files::Safetensors(tensors) if tensors.prefix() == "language_model.model." => {
                format!("language_model.{HEAD}")
            }
            Files::Safetensors(_) => HEAD.to_owned(),
            Files::Gguf(_) => "output.weight".to_owned(),
        }
    }

    /// The rows `[ids, hidden]` of the output projection by which the logits of these tokens are computed.
    ///
    /// # Errors
    /// [`LoadError::File`] naming the tensor.
    pub fn logit_rows(&self, ids: &[u32], config: &DecoderConfig) -> Result<Vec<f32>, LoadError> {
        let DecoderConfig { hidden, vocabulary, is_tied, .. } = *config;
        let tensor = match is_tied {
            true => self.other_name("embed_tokens.weight", GGUF_EMBEDDINGS),
            false => self.head_name(),
        };
        let mut rows = vec![0.0; ids.len() * hidden];
        for (id, row) in ids.iter().zip(rows.chunks_exact_mut(hidden)) {
            let location = MatrixLocation {
                tensor: tensor.clone(),
                shape: vec![vocabulary, hidden],
                first_row: *id as usize,
            };
            self.matrix(&location, [hidden, 1], |column| column)?.column(0, row);
        }
        Ok(rows)
    }

    /// The rows `[labels, hidden]` of a head for labels, which has no bias.
    ///
    /// # Errors
    /// [`LoadError::File`] naming the tensor.
    pub fn label_rows(&self, [labels, hidden]: [usize; 2]) -> Result<Vec<f32>, LoadError> {
        match &self.files {
            Files::Safetensors(tensors) => tensors.values(SCORE, &[labels, hidden]),
            Files::Gguf(gguf) => gguf.vector(SCORE, labels * hidden),
        }
    }

    fn last_norm(&self, hidden: usize) -> Result<Vec<f32>, LoadError> {
        self.norm(&self.other_name("norm.weight", "output_norm.weight"), hidden)
    }
}
