//! The configuration of a network for texts, which is an encoder or a decoder. Decides by `model_type` which of them a
//! model's `config.json` describes.

use serde::Deserialize;

use super::config::{Family, NetworkConfig};
use crate::model::load::ModelFiles;
use crate::model::nets::decoder::ProductFormats;
use crate::model::nets::decoder::architectures::CONFIG_ARCHITECTURES;
use crate::model::nets::decoder::config::DecoderConfig;
use crate::model::nets::{check_widths, joined};
use crate::model::{LoadError, LoadSpec};

/// The names of all architectures in `model_type`.
pub const NAMES: [&str; Family::NAMES.len() + CONFIG_ARCHITECTURES.len()] =
    joined(&Family::NAMES, &CONFIG_ARCHITECTURES);

/// The maximum number of tokens of a text for a decoder, even if its `max_position_embeddings` is larger. The time of
/// attention is proportional to the square of this number.
pub const MAX_DECODER_TOKENS: usize = 1 << 17;

/// The configuration of a network for texts.
#[derive(Clone, Debug)]
pub enum TextConfig {
    /// An encoder of BERT's family.
    Encoder(NetworkConfig),
    /// A decoder, which computes texts in one pass.
    Decoder(DecoderConfig),
}

#[derive(Deserialize)]
struct ModelType {
    model_type: Option<String>,
}

impl TextConfig {
    /// Reads the `config.json` of the model `source`.
    ///
    /// # Errors
    /// As [`NetworkConfig::read`] and [`DecoderConfig::read`].
    pub fn read(files: &ModelFiles, source: &str) -> Result<Self, LoadError> {
        let ModelType { model_type } = files.required_json("config.json")?;
        if CONFIG_ARCHITECTURES.contains(&model_type.as_deref().unwrap_or_default()) {
            DecoderConfig::read(files, source).map(Self::Decoder)
        } else {
            NetworkConfig::read(files, source).map(Self::Encoder)
        }
    }

    /// The width of a token's vector.
    pub fn hidden(&self) -> usize {
        match self {
            Self::Encoder(config) => config.hidden,
            Self::Decoder(config) => config.hidden,
        }
    }

    /// The number of token ids.
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Encoder(config) => config.vocabulary,
            Self::Decoder(config) => config.vocabulary,
        }
    }

    /// The maximum number of tokens of a text.
    pub fn max_tokens(&self) -> usize {
        match self {
            Self::Encoder(config) => config.max_tokens(),
            Self::Decoder(config) => config.context.min(MAX_DECODER_TOKENS),
        }
    }

    /// Checks that the pool's device can compute the network in the pool's `dtype`.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] if it cannot.
    pub fn check(&self, spec: &LoadSpec) -> Result<(), LoadError> {
        match self {
            Self::Encoder(config) => {
                check_widths(spec, &[("hidden", config.hidden), ("inner", config.inner)])
            }
            Self::Decoder(config) => {
                ProductFormats::of(spec)?;
                let heads = config.query_width();
                check_widths(spec, &[("hidden", config.hidden), ("inner", config.inner), ("heads'", heads)])
            }
        }
    }
}
