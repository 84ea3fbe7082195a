//! Reads a decoder's configuration from `config.json` or a GGUF file. Decides which properties are refused.

use std::f32::consts::PI;

use serde::Deserialize;

use crate::model::LoadError;
use crate::model::load::ModelFiles;
use crate::model::load::gguf::Gguf;
use crate::model::nets::names;

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
    /// All architectures, by their names in `model_type` and in GGUF files.
    pub const ALL: [(&str, Self); 3] =
        [("llama", Self::Llama), ("qwen2", Self::Qwen2), ("qwen3", Self::Qwen3)];
    /// The names of the architectures.
    pub const NAMES: [&str; 3] = names(&Self::ALL);

    /// The architecture with this name.
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
    /// The inner width of the feed-forward sublayer.
    pub inner: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; they divide `heads`.
    pub kv_heads: usize,
    /// The width of a head.
    pub head_width: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// The largest number of tokens of a sequence.
    pub context: usize,
    /// Added to the mean square of a norm.
    pub eps: f32,
    /// The rotary embedding's angle for each pair of a head's numbers, in radians per position.
    pub frequencies: Vec<f32>,
    /// Whether the token embeddings are also the last layer.
    pub is_tied: bool,
}

#[derive(Deserialize)]
struct RawConfig {
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

/// Why a configuration is refused: a property is not supported or impossible.
type Refusal = String;

/// The largest sizes that are accepted. They are far above those of any model, but their products do not overflow. A
/// wrong size is detected by the shape of a tensor, before more than about 100 MB are allocated.
const MAX_LAYERS: usize = 1 << 16;
/// Also the largest width of a head.
const MAX_HEADS: usize = 1 << 16;
const MAX_WIDTH: usize = 1 << 24;
const MAX_VOCABULARY: usize = 1 << 22;
const MAX_CONTEXT: usize = 1 << 31;

impl DecoderConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// [`LoadError::File`] for an invalid file, [`LoadError::Unsupported`] naming a property that is not
    /// supported.
    pub fn read(files: &ModelFiles, source: &str) -> Result<Self, LoadError> {
        let raw: RawConfig = files.required_json("config.json")?;
        let refused = |reason| LoadError::Unsupported { model: source.to_owned(), reason };
        Self::from_raw(raw).and_then(Self::checked).map_err(refused)
    }

    fn from_raw(raw: RawConfig) -> Result<Self, Refusal> {
        let kind = &raw.model_type;
        let family = Family::named(kind).ok_or_else(|| format!("model_type {kind:?} is no decoder"))?;
        let heads = raw.num_attention_heads;
        let refused = [
            ("use_sliding_window", raw.use_sliding_window),
            ("mlp_bias", raw.mlp_bias),
            ("attention_bias", raw.attention_bias == Some(true) && family != Family::Qwen2),
        ];
        if let Some((name, _)) = refused.iter().find(|(_, is_set)| *is_set) {
            return Err(format!("{name} is true, and only false is supported"));
        }
        if let Some(other) = raw.hidden_act.filter(|name| name != "silu") {
            return Err(format!("hidden_act is {other:?}, and only silu is supported"));
        }
        let head_width = raw.head_dim.unwrap_or(raw.hidden_size / heads.max(1));
        at_most("head_dim", head_width, MAX_HEADS)?;
        let rope = raw.rope_parameters.or(raw.rope_scaling);
        let base = rope.as_ref().and_then(|rope| rope.rope_theta).or(raw.rope_theta).unwrap_or(10_000.0);
        let mut frequencies = frequencies(base, head_width);
        if let Some(rope) = rope {
            rope.scale(&mut frequencies)?;
        }
        Ok(Self {
            family,
            layers: raw.num_hidden_layers,
            hidden: raw.hidden_size,
            inner: raw.intermediate_size,
            heads,
            kv_heads: raw.num_key_value_heads.unwrap_or(heads),
            head_width,
            vocabulary: raw.vocab_size,
            context: raw.max_position_embeddings,
            eps: raw.rms_norm_eps,
            frequencies,
            is_tied: raw.tie_word_embeddings,
        })
    }

    /// Reads the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a value that is missing or impossible.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, LoadError> {
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
        at_most("attention.key_length", head_width, MAX_HEADS).map_err(|reason| gguf.fault(reason))?;
        let mut frequencies = frequencies(float("rope.freq_base").map_or(10_000.0, f64::from), head_width);
        if gguf.has("rope_freqs.weight") {
            let factors = gguf.vector("rope_freqs.weight", head_width / 2)?;
            frequencies.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= factor);
        }
        let tokens =
            gguf.value("tokenizer.ggml.tokens").and_then(|tokens| tokens.to_vec().ok()).map(Vec::len);
        let config = Self {
            family,
            layers: number("block_count")?,
            hidden,
            inner: number("feed_forward_length")?,
            heads,
            kv_heads: optional("attention.head_count_kv").unwrap_or(heads),
            head_width,
            vocabulary: optional("vocab_size").or(tokens).unwrap_or(0),
            context: number("context_length")?,
            eps: float("attention.layer_norm_rms_epsilon").unwrap_or(1e-5),
            frequencies,
            is_tied: !gguf.has("output.weight"),
        };
        config.checked().map_err(|reason| gguf.fault(reason))
    }

    fn checked(self) -> Result<Self, Refusal> {
        let Self { hidden, heads, kv_heads, head_width, .. } = self;
        for (name, size, max) in [
            ("the number of layers", self.layers, MAX_LAYERS),
            ("the number of heads", heads, MAX_HEADS),
            ("the number of heads of keys", kv_heads, MAX_HEADS),
            ("the width", hidden, MAX_WIDTH),
            ("the width of the feed-forward sublayer", self.inner, MAX_WIDTH),
            ("the vocabulary", self.vocabulary, MAX_VOCABULARY),
            ("the context", self.context, MAX_CONTEXT),
        ] {
            at_most(name, size, max)?;
        }
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

fn at_most(name: &str, size: usize, max: usize) -> Result<(), Refusal> {
    if size > max { Err(format!("{name} is {size}; at most {max} is read")) } else { Ok(()) }
}

/// The angle of each pair of numbers, in radians per position.
fn frequencies(base: f64, width: usize) -> Vec<f32> {
    (0..width / 2).map(|pair| (1.0 / base.powf(2.0 * pair as f64 / width as f64)) as f32).collect()
}

impl Rope {
    /// Scales the angles as in Llama 3.1, or leaves them unchanged, as `rope_type` says.
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
            let wavelength = 2.0 * PI / *frequency;
            if wavelength > original / low {
                *frequency /= factor;
            } else if wavelength >= original / high {
                let share = (original / wavelength - low) / (high - low);
                *frequency = (1.0 - share) * *frequency / factor + share * *frequency;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file;
    use serde_json::{Value, json};

    use super::*;

    fn read(changes: &[(&str, Value)]) -> Result<DecoderConfig, String> {
        let mut raw = json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        });
        changes.iter().for_each(|(name, value)| raw[*name] = value.clone());
        let raw: RawConfig = serde_json::from_value(raw).unwrap();
        DecoderConfig::from_raw(raw).and_then(DecoderConfig::checked)
    }

    #[test]
    fn an_impossible_size_is_refused_before_memory_is_allocated() {
        assert_eq!(read(&[]).unwrap().frequencies.len(), 8);
        for (name, message) in [
            ("hidden_size", "head_dim is"),
            ("intermediate_size", "the width of the feed-forward sublayer is"),
            ("num_hidden_layers", "the number of layers is"),
            ("num_attention_heads", "the number of heads is"),
            ("num_key_value_heads", "the number of heads of keys is"),
            ("head_dim", "head_dim is"),
            ("vocab_size", "the vocabulary is"),
            ("max_position_embeddings", "the context is"),
        ] {
            for size in [1_u64 << 32, u64::MAX] {
                let error = read(&[(name, size.into())]).unwrap_err();
                assert!(error.starts_with(message) && error.ends_with("is read"), "{name}: {error}");
            }
        }
    }

    #[test]
    fn an_impossible_size_in_a_gguf_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let names = ["architecture", "block_count", "embedding_length", "feed_forward_length"];
        let names = [&names[..], &["attention.head_count", "context_length", "vocab_size"]].concat();
        let names: Vec<String> = names
            .into_iter()
            .map(
                |name| {
                    if name == "architecture" { format!("general.{name}") } else { format!("llama.{name}") }
                },
            )
            .collect();
        let read = |impossible: &str| {
            let value = |name: &String| match name.as_str() {
                "general.architecture" => gguf_file::Value::String("llama".to_owned()),
                name if name.ends_with(impossible) => gguf_file::Value::U32(u32::MAX),
                _ => gguf_file::Value::U32(4),
            };
            let values: Vec<(&String, gguf_file::Value)> =
                names.iter().map(|name| (name, value(name))).collect();
            let values: Vec<_> = values.iter().map(|(name, value)| (name.as_str(), value)).collect();
            let values = [&values[..], &[("llama.attention.key_length", &gguf_file::Value::U32(2))]].concat();
            gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &values, &[]).unwrap();
            DecoderConfig::from_gguf(&Gguf::read(&path).unwrap()).map_err(|error| error.to_string())
        };
        assert_eq!(read("none").unwrap().vocabulary, 4);
        for name in &names[1..] {
            let name = name.trim_start_matches("llama.");
            assert!(read(name).unwrap_err().ends_with("is read"), "{name}");
        }
    }
}
