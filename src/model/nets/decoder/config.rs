//! What `config.json` or a GGUF file says of a decoder. Decides what is refused.

use std::f32::consts::PI;

use serde::Deserialize;

use crate::model::LoadError;
use crate::model::load::ModelFiles;
use crate::model::load::gguf::Gguf;

/// The architectures of decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama, SmolLM2.
    Llama,
    /// With biases of queries, keys and values.
    Qwen2,
    /// With norms of queries and keys.
    Qwen3,
}

impl Family {
    /// All, as `model_type` and GGUF files name them.
    pub const ALL: [(&str, Self); 3] =
        [("llama", Self::Llama), ("qwen2", Self::Qwen2), ("qwen3", Self::Qwen3)];

    /// The architecture of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, family)| *family)
    }
}

/// The sizes and constants of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Its architecture.
    pub family: Family,
    /// Layers.
    pub layers: usize,
    /// The width of a token's vector.
    pub hidden: usize,
    /// The inner width of the feed-forward half.
    pub inner: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; they divide `heads`.
    pub kv_heads: usize,
    /// Numbers of a head.
    pub head_width: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// The most tokens of a sequence.
    pub context: usize,
    /// Added to the mean square of a norm.
    pub eps: f32,
    /// The turn of each pair of a head's numbers from one place to the next.
    pub frequencies: Vec<f32>,
    /// Whether the words' vectors are the last layer too.
    pub is_tied: bool,
}

#[derive(Deserialize)]
struct Written {
    model_type: String,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f32,
    rope_theta: Option<f64>,
    rope_scaling: Option<Rope>,
    rope_parameters: Option<Rope>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    use_sliding_window: bool,
    attention_bias: Option<bool>,
    #[serde(default)]
    mlp_bias: bool,
    hidden_act: Option<String>,
}

#[derive(Deserialize)]
struct Rope {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<f32>,
}

/// What is not done here, or is impossible.
type Refusal = String;

impl DecoderConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// [`LoadError::File`] for an invalid file, [`LoadError::Unsupported`] naming a property that is not
    /// supported.
    pub fn read(files: &ModelFiles, source: &str) -> Result<Self, LoadError> {
        let written: Written = files.required_json("config.json")?;
        let refused = |reason| LoadError::Unsupported { model: source.to_owned(), reason };
        Self::of(written).and_then(Self::checked).map_err(refused)
    }

    fn of(written: Written) -> Result<Self, Refusal> {
        let kind = &written.model_type;
        let family = Family::named(kind).ok_or_else(|| format!("model_type {kind:?} is no decoder"))?;
        let heads = written.num_attention_heads;
        let refused = [
            ("use_sliding_window", written.use_sliding_window),
            ("mlp_bias", written.mlp_bias),
            ("attention_bias", written.attention_bias == Some(true) && family != Family::Qwen2),
        ];
        if let Some((name, _)) = refused.iter().find(|(_, is_set)| *is_set) {
            return Err(format!("{name} is true, and only false is supported"));
        }
        if let Some(other) = written.hidden_act.filter(|name| name != "silu") {
            return Err(format!("hidden_act is {other:?}, and only silu is supported"));
        }
        let head_width = written.head_dim.unwrap_or(written.hidden_size / heads.max(1));
        let rope = written.rope_parameters.or(written.rope_scaling);
        let base = rope.as_ref().and_then(|rope| rope.rope_theta).or(written.rope_theta).unwrap_or(10_000.0);
        let mut frequencies = frequencies(base, head_width);
        if let Some(rope) = rope {
            rope.scale(&mut frequencies)?;
        }
        Ok(Self {
            family,
            layers: written.num_hidden_layers,
            hidden: written.hidden_size,
            inner: written.intermediate_size,
            heads,
            kv_heads: written.num_key_value_heads.unwrap_or(heads),
            head_width,
            vocabulary: written.vocab_size,
            context: written.max_position_embeddings,
            eps: written.rms_norm_eps,
            frequencies,
            is_tied: written.tie_word_embeddings,
        })
    }

    /// Reads the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a value that is missing or impossible.
    pub fn of_gguf(gguf: &Gguf) -> Result<Self, LoadError> {
        let architecture = gguf.text("general.architecture").unwrap_or("(none)");
        let family = Family::named(architecture)
            .ok_or_else(|| gguf.fault(format!("general.architecture {architecture:?} is no decoder")))?;
        let optional = |name: &str| gguf.number(&format!("{architecture}.{name}"));
        let number = |name: &str| {
            optional(name).ok_or_else(|| gguf.fault(format!("the metadata has no {architecture}.{name}")))
        };
        let float = |name: &str| gguf.value(&format!("{architecture}.{name}")).and_then(|x| x.to_f32().ok());
        if let Some(kind) =
            gguf.text(&format!("{architecture}.rope.scaling.type")).filter(|kind| *kind != "none")
        {
            return Err(gguf.fault(format!("rope scaling {kind:?} is not supported in GGUF files")));
        }
        let (hidden, heads) = (number("embedding_length")?, number("attention.head_count")?);
        let head_width = optional("attention.key_length").unwrap_or(hidden / heads.max(1));
        let mut frequencies = frequencies(float("rope.freq_base").map_or(10_000.0, f64::from), head_width);
        if gguf.has("rope_freqs.weight") {
            let factors = gguf.vector("rope_freqs.weight", head_width / 2)?;
            frequencies.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= factor);
        }
        let words = gguf.value("tokenizer.ggml.tokens").and_then(|tokens| tokens.to_vec().ok()).map(Vec::len);
        let config = Self {
            family,
            layers: number("block_count")?,
            hidden,
            inner: number("feed_forward_length")?,
            heads,
            kv_heads: optional("attention.head_count_kv").unwrap_or(heads),
            head_width,
            vocabulary: optional("vocab_size").or(words).unwrap_or(0),
            context: number("context_length")?,
            eps: float("attention.layer_norm_rms_epsilon").unwrap_or(1e-5),
            frequencies,
            is_tied: !gguf.has("output.weight"),
        };
        config.checked().map_err(|reason| gguf.fault(reason))
    }

    fn checked(self) -> Result<Self, Refusal> {
        let Self { hidden, heads, kv_heads, head_width, .. } = self;
        if hidden == 0 || kv_heads == 0 || heads == 0 || heads % kv_heads != 0 {
            return Err(format!("{heads} heads of queries cannot share {kv_heads} heads of keys"));
        }
        if head_width == 0 || head_width % 2 != 0 {
            return Err(format!("heads of {head_width} numbers cannot be rotated in pairs"));
        }
        if self.layers == 0 || self.inner == 0 || self.vocabulary == 0 || self.context == 0 {
            return Err("it has no layers, no vocabulary or no context".to_owned());
        }
        Ok(self)
    }
}

/// The turn of each pair of numbers from one place to the next.
fn frequencies(base: f64, width: usize) -> Vec<f32> {
    (0..width / 2).map(|pair| (1.0 / base.powf(2.0 * pair as f64 / width as f64)) as f32).collect()
}

impl Rope {
    /// Scales the turns as Llama 3.1 does, or not at all.
    fn scale(&self, frequencies: &mut [f32]) -> Result<(), Refusal> {
        match self.rope_type.as_deref() {
            None | Some("default") => return Ok(()),
            Some("llama3") => {}
            Some(other) => {
                return Err(format!("rope scaling {other:?} is not supported; llama3 and default are"));
            }
        }
        let [Some(factor), Some(low), Some(high), Some(original)] =
            [self.factor, self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings]
        else {
            return Err("rope scaling llama3 lacks one of its four numbers".to_owned());
        };
        for frequency in frequencies {
            let length = 2.0 * PI / *frequency;
            if length > original / low {
                *frequency /= factor;
            } else if length >= original / high {
                let share = (original / length - low) / (high - low);
                *frequency = (1.0 - share) * *frequency / factor + share * *frequency;
            }
        }
        Ok(())
    }
}
