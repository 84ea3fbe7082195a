//! Decoder networks, which generate text: Llama, Qwen2, Qwen3. One step (a forward pass) takes tokens of any number of
//! sequences, one row for each token. This file defines the names of tensors; `host` and `on_device` compute.

pub mod config;
mod host;
mod on_device;

pub use host::{Decoder, compare_with_f32};
pub use on_device::{DeviceDecoder, KvSizes};

use std::path::PathBuf;

use candle_core::Device;

use self::config::{DecoderConfig, Family};
use crate::model::LoadError;
use crate::model::load::ModelFiles;
use crate::model::load::gguf::Gguf;
use crate::model::load::packed_cache::PackedCache;
use crate::model::load::weights::{Precision, Weights};
use crate::model::ops::causal::Span;
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
    /// On any device, by candle's operations.
    Device(DeviceDecoder),
}

impl CachedDecoder {
    /// [`Decoder::forward`] or [`DeviceDecoder::forward`].
    ///
    /// # Errors
    /// Those of [`DeviceDecoder::forward`]; [`Decoder::forward`] has none.
    pub fn forward(
        &mut self,
        ids: &[u32],
        spans: &[Span<'_>],
        wanted: &[usize],
        logits: &mut Vec<f32>,
    ) -> candle_core::Result<()> {
        match self {
            Self::Host(decoder, kv) => {
                decoder.forward(kv, ids, spans, wanted, logits);
                Ok(())
            }
            Self::Device(decoder) => decoder.forward(ids, spans, wanted, logits),
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
    family: Family,
    /// The cache of packed matrices, if there is one.
    packed_cache: Option<PackedCache>,
    /// The format to which rows are converted before they are multiplied with quantised matrices.
    row_format: RowFormat,
}

enum Files {
    Safetensors(Weights),
    Gguf(Gguf),
}

/// The names of a layer's tensors.
pub struct TensorNames {
    /// The norm before attention.
    pub norm: &'static str,
    /// The projections to queries, keys and values.
    pub qkv: [&'static str; 3],
    /// The biases of these projections, where the architecture has them.
    pub biases: Option<[&'static str; 3]>,
    /// The norms of heads of queries and keys, where the architecture has them.
    pub head_norms: Option<[&'static str; 2]>,
    /// The output matrix of attention, O.
    pub out: &'static str,
    /// The norm before the feed-forward sublayer.
    pub inner_norm: &'static str,
    /// The gate of the feed-forward sublayer, G.
    pub gate: &'static str,
    /// The up projection, U.
    pub up: &'static str,
    /// The down projection, D.
    pub down: &'static str,
}

/// The name of the output projection (the LM head) in safetensors files. It never has a prefix.
const HEAD: &str = "lm_head.weight";

/// The name of the token embeddings in GGUF files.
pub const GGUF_EMBEDDINGS: &str = "token_embd.weight";

const SAFETENSORS: TensorNames = TensorNames {
    norm: "input_layernorm.weight",
    qkv: ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    biases: Some(["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"]),
    head_norms: Some(["self_attn.q_norm.weight", "self_attn.k_norm.weight"]),
    out: "self_attn.o_proj.weight",
    inner_norm: "post_attention_layernorm.weight",
    gate: "mlp.gate_proj.weight",
    up: "mlp.up_proj.weight",
    down: "mlp.down_proj.weight",
};

const GGUF: TensorNames = TensorNames {
    norm: "attn_norm.weight",
    qkv: ["attn_q.weight", "attn_k.weight", "attn_v.weight"],
    biases: Some(["attn_q.bias", "attn_k.bias", "attn_v.bias"]),
    head_norms: Some(["attn_q_norm.weight", "attn_k_norm.weight"]),
    out: "attn_output.weight",
    inner_norm: "ffn_norm.weight",
    gate: "ffn_gate.weight",
    up: "ffn_up.weight",
    down: "ffn_down.weight",
};

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
        let (base, marker) = ("model", "embed_tokens.weight");
        let precision = Precision { matrices: format, ..Precision::F32 };
        let tensors = Weights::read(&paths, base, marker, &Device::Cpu, precision)?;
        Ok(Self {
            files: Files::Safetensors(tensors),
            family: config.family,
            packed_cache: None,
            row_format: RowFormat::F32,
        })
    }

    /// The tensors of a GGUF file.
    pub fn from_gguf(gguf: Gguf, config: &DecoderConfig) -> Self {
        Self {
            files: Files::Gguf(gguf),
            family: config.family,
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

    /// The full name of a layer's tensor.
    fn layer_name(&self, index: usize, part: &str) -> String {
        match self.files {
            Files::Safetensors(_) => format!("layers.{index}.{part}"),
            Files::Gguf(_) => format!("blk.{index}.{part}"),
        }
    }

    /// The names of a layer's tensors.
    fn tensor_names(&self) -> TensorNames {
        let names = match self.files {
            Files::Safetensors(_) => SAFETENSORS,
            Files::Gguf(_) => GGUF,
        };
        TensorNames {
            biases: names.biases.filter(|_| self.family == Family::Qwen2),
            head_norms: names.head_norms.filter(|_| self.family == Family::Qwen3),
            ..names
        }
    }

    fn vector(&self, layer: usize, part: &str, length: usize) -> Result<Vec<f32>, LoadError> {
        self.vector_by_name(&self.layer_name(layer, part), length)
    }

    fn vector_by_name(&self, name: &str, length: usize) -> Result<Vec<f32>, LoadError> {
        match &self.files {
            Files::Safetensors(tensors) => tensors.values(&format!("{}{name}", tensors.prefix()), &[length]),
            Files::Gguf(gguf) => gguf.vector(name, length),
        }
    }

    /// The matrix `[inputs, outputs]` of a linear layer.
    fn matrix(&self, layer: usize, part: &str, shape: [usize; 2]) -> Result<Matrix, LoadError> {
        self.matrix_by_name(&self.layer_name(layer, part), shape, |column| column)
    }

    /// The projection to queries or keys, whose heads are rotated in pairs of numbers. In GGUF files of Llama the two
    /// numbers of a pair are adjacent; in all other files, and in the result, they are half a head apart.
    fn rotary_matrix(
        &self,
        layer: usize,
        part: &str,
        shape: [usize; 2],
        heads: usize,
    ) -> Result<Matrix, LoadError> {
        let width = shape[1] / heads;
        let is_interleaved = matches!(self.files, Files::Gguf(_)) && self.family == Family::Llama;
        self.matrix_by_name(&self.layer_name(layer, part), shape, |column| {
            if !is_interleaved {
                return column;
            }
            let (head, index_in_head) = (column / width, column % width);
            let (half, pair) = (index_in_head / (width / 2), index_in_head % (width / 2));
            head * width + 2 * pair + half
        })
    }

    /// Reads the matrix `name` `[inputs, outputs]`, from the cache if it is there. In a GGUF file, column `c` of the
    /// result is row `row(c)` of the file's matrix; `row` is not used for other files.
    fn matrix_by_name(
        &self,
        name: &str,
        [inputs, outputs]: [usize; 2],
        row: impl Fn(usize) -> usize,
    ) -> Result<Matrix, LoadError> {
        let cached = self.packed_cache.as_ref().and_then(|cache| cache.matrix(name, [inputs, outputs]));
        let matrix = match (cached, &self.files) {
            (Some(matrix), _) => matrix,
            (None, Files::Safetensors(tensors)) if name == HEAD => {
                tensors.matrix_by_full_name(name, [inputs, outputs])?
            }
            (None, Files::Safetensors(tensors)) => tensors.matrix(name, [inputs, outputs])?,
            (None, Files::Gguf(gguf)) => gguf.matrix(name, [inputs, outputs], row)?,
        };
        Ok(matrix.with_rows_as(self.row_format))
    }

    /// The token embeddings `[hidden, vocabulary]`.
    fn token_embeddings(&self, shape: [usize; 2]) -> Result<Matrix, LoadError> {
        self.matrix_by_name(self.token_embeddings_name(), shape, |column| column)
    }

    /// The output projection.
    fn head(&self, shape: [usize; 2]) -> Result<Matrix, LoadError> {
        self.matrix_by_name(self.head_name(), shape, |column| column)
    }

    fn token_embeddings_name(&self) -> &'static str {
        match self.files {
            Files::Safetensors(_) => "embed_tokens.weight",
            Files::Gguf(_) => GGUF_EMBEDDINGS,
        }
    }

    fn head_name(&self) -> &'static str {
        match self.files {
            Files::Safetensors(_) => HEAD,
            Files::Gguf(_) => "output.weight",
        }
    }

    fn last_norm(&self, hidden: usize) -> Result<Vec<f32>, LoadError> {
        self.vector_by_name(
            match self.files {
                Files::Safetensors(_) => "norm.weight",
                Files::Gguf(_) => "output_norm.weight",
            },
            hidden,
        )
    }
}
