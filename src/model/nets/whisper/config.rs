//! Reads Whisper's configuration from `config.json`. Decides which properties are refused.

use serde::Deserialize;

use crate::model::LoadError;
use crate::model::load::ModelFiles;
use crate::model::sound::features::FRAMES;

/// The `model_type` of `config.json`.
pub const MODEL_TYPE: &str = "whisper";
/// Positions of an encoded window: the second convolution halves the number of frames.
pub const POSITIONS: usize = FRAMES / 2;

/// The largest sizes that are accepted. They are far above those of any model, but their products do not overflow, and
/// at most a few megabytes are allocated before the shape of a tensor reveals a wrong size.
const MAX_LAYERS: usize = 1 << 10;
const MAX_WIDTH: usize = 1 << 16;
const MAX_INNER: usize = 1 << 18;
const MAX_VOCABULARY: usize = 1 << 22;
const MAX_CONTEXT: usize = 1 << 16;
/// The largest number of heads in [`WhisperConfig::alignment`]. OpenAI's models have up to 23.
const MAX_ALIGNMENT_HEADS: usize = 64;
/// The smallest context, in tokens: it has room for a prompt's special tokens and some text.
const MIN_CONTEXT: usize = 16;
/// The largest number of mel bins: each is a filter over 201 bins of a spectrum.
const MAX_MELS: usize = 201;

/// The sizes of Whisper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WhisperConfig {
    /// The width of a position's or token's vector.
    pub width: usize,
    /// Mel bins of a frame.
    pub mels: usize,
    /// The encoder.
    pub encoder: Layers,
    /// The decoder.
    pub decoder: Layers,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// The largest number of tokens of a prompt with its answer.
    pub context: usize,
    /// The cross-attention heads of the decoder that show where in the audio a token is spoken. Empty if the files do
    /// not name them.
    pub alignment: Vec<Head>,
}

/// A head of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The index of its layer.
    pub layer: usize,
    /// Its index in the layer.
    pub number: usize,
}

/// The layers of one of the two networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layers {
    /// The number of layers.
    pub count: usize,
    /// Heads of attention; they divide the width.
    pub heads: usize,
    /// The inner width of the feed-forward sublayer.
    pub inner: usize,
}

#[derive(Deserialize)]
struct RawConfig {
    d_model: usize,
    num_mel_bins: usize,
    encoder_layers: usize,
    encoder_attention_heads: usize,
    encoder_ffn_dim: usize,
    decoder_layers: usize,
    decoder_attention_heads: usize,
    decoder_ffn_dim: usize,
    vocab_size: usize,
    max_source_positions: usize,
    max_target_positions: usize,
    activation_function: String,
    #[serde(default)]
    scale_embedding: bool,
}

/// The fields of `generation_config.json` that are read here.
#[derive(Default, Deserialize)]
struct Generation {
    alignment_heads: Option<Vec<[usize; 2]>>,
}

impl WhisperConfig {
    /// Reads `config.json`, and the heads for the alignment from `generation_config.json`, if there is one.
    ///
    /// # Errors
    /// [`LoadError::File`] for an invalid file, [`LoadError::Unsupported`] naming a property that is not supported.
    pub fn read(files: &ModelFiles, source: &str) -> Result<Self, LoadError> {
        let raw: RawConfig = files.required_json("config.json")?;
        let refused = |reason| LoadError::Unsupported { model: source.to_owned(), reason };
        let config = Self::from_raw(&raw).map_err(refused)?;
        let generation = files.json::<Generation>("generation_config.json")?.unwrap_or_default();
        config.with_alignment(&generation.alignment_heads.unwrap_or_default()).map_err(refused)
    }

    /// Sets the alignment heads, which are pairs of a layer and the number of a head.
    fn with_alignment(self, heads: &[[usize; 2]]) -> Result<Self, String> {
        let Layers { count, heads: heads_per_layer, .. } = self.decoder;
        if heads.len() > MAX_ALIGNMENT_HEADS {
            let listed = heads.len();
            return Err(format!(
                "alignment_heads lists {listed} heads; at most {MAX_ALIGNMENT_HEADS} are allowed"
            ));
        }
        if let Some([layer, number]) =
            heads.iter().find(|[layer, number]| *layer >= count || *number >= heads_per_layer)
        {
            return Err(format!(
                "alignment_heads names head {number} of layer {layer}; the decoder has {count} layers of {heads_per_layer} heads"
            ));
        }
        let alignment = heads.iter().map(|[layer, number]| Head { layer: *layer, number: *number }).collect();
        Ok(Self { alignment, ..self })
    }

    fn from_raw(raw: &RawConfig) -> Result<Self, String> {
        if raw.activation_function != "gelu" {
            let name = &raw.activation_function;
            return Err(format!("activation_function is {name:?}, and only gelu is supported"));
        }
        if raw.scale_embedding {
            return Err("scale_embedding is true, and only false is supported".to_owned());
        }
        if raw.max_source_positions != POSITIONS {
            let positions = raw.max_source_positions;
            return Err(format!("max_source_positions is {positions}; windows of 30 s have {POSITIONS}"));
        }
        for (name, size, max) in [
            ("d_model", raw.d_model, MAX_WIDTH),
            ("num_mel_bins", raw.num_mel_bins, MAX_MELS),
            ("encoder_layers", raw.encoder_layers, MAX_LAYERS),
            ("decoder_layers", raw.decoder_layers, MAX_LAYERS),
            ("encoder_ffn_dim", raw.encoder_ffn_dim, MAX_INNER),
            ("decoder_ffn_dim", raw.decoder_ffn_dim, MAX_INNER),
            ("vocab_size", raw.vocab_size, MAX_VOCABULARY),
            ("max_target_positions", raw.max_target_positions, MAX_CONTEXT),
        ] {
            if !(1..=max).contains(&size) {
                return Err(format!("{name} is {size}; it must be from 1 to {max}"));
            }
        }
        if raw.max_target_positions < MIN_CONTEXT {
            let context = raw.max_target_positions;
            return Err(format!("max_target_positions is {context}; at least {MIN_CONTEXT} are needed"));
        }
        let width = raw.d_model;
        for (name, heads) in [
            ("encoder_attention_heads", raw.encoder_attention_heads),
            ("decoder_attention_heads", raw.decoder_attention_heads),
        ] {
            // The cache of keys and values holds heads of an even width.
            if !(1..=width).contains(&heads) || !width.is_multiple_of(2 * heads) {
                return Err(format!(
                    "{name} is {heads}, which does not divide d_model {width} into even heads"
                ));
            }
        }
        Ok(Self {
            width,
            mels: raw.num_mel_bins,
            encoder: Layers {
                count: raw.encoder_layers,
                heads: raw.encoder_attention_heads,
                inner: raw.encoder_ffn_dim,
            },
            decoder: Layers {
                count: raw.decoder_layers,
                heads: raw.decoder_attention_heads,
                inner: raw.decoder_ffn_dim,
            },
            vocabulary: raw.vocab_size,
            context: raw.max_target_positions,
            alignment: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(name: &str, value: Value) -> Result<WhisperConfig, String> {
        let mut raw = json!({
            "d_model": 64, "num_mel_bins": 80, "encoder_layers": 2, "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128, "decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 96,
            "vocab_size": 100, "max_source_positions": 1500, "max_target_positions": 448,
            "activation_function": "gelu",
        });
        raw[name] = value;
        WhisperConfig::from_raw(&serde_json::from_value(raw).unwrap())
    }

    #[test]
    fn unknown_or_too_many_alignment_heads_are_refused() {
        let aligned =
            |heads: &[[usize; 2]]| read("model_type", "whisper".into()).unwrap().with_alignment(heads);
        assert_eq!(aligned(&[[2, 1]]).unwrap().alignment, [Head { layer: 2, number: 1 }]);
        let wrong = aligned(&[[0, 0], [3, 0]]).unwrap_err();
        assert_eq!(wrong, "alignment_heads names head 0 of layer 3; the decoder has 3 layers of 2 heads");
        assert!(aligned(&[[0, 2]]).is_err());
        assert!(aligned(&[[0, 0]; 65]).unwrap_err().starts_with("alignment_heads lists 65 heads"));
    }

    #[test]
    fn a_property_that_is_not_supported_is_named_with_its_value() {
        let config = read("model_type", "whisper".into()).unwrap();
        assert_eq!((config.encoder.heads, config.decoder.count, config.context), (4, 3, 448));
        for (name, value, message) in [
            ("activation_function", json!("relu"), "activation_function is \"relu\""),
            ("scale_embedding", json!(true), "scale_embedding is true"),
            ("max_source_positions", json!(750), "max_source_positions is 750; windows of 30 s have 1500"),
            ("encoder_attention_heads", json!(0), "encoder_attention_heads is 0"),
            ("encoder_attention_heads", json!(u64::MAX), "encoder_attention_heads is 18446744073709551615"),
            (
                "decoder_attention_heads",
                json!(64),
                "decoder_attention_heads is 64, which does not divide d_model 64",
            ),
            ("d_model", json!(u64::MAX), "d_model is 18446744073709551615; it must be from 1 to 65536"),
            ("num_mel_bins", json!(0), "num_mel_bins is 0"),
            ("max_target_positions", json!(9), "max_target_positions is 9; at least 16 are needed"),
            ("vocab_size", json!(1_u64 << 40), "vocab_size is 1099511627776"),
        ] {
            let error = read(name, value).unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
