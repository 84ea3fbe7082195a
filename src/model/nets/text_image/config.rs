//! Reads `config.json` of CLIP and SigLIP models. Refuses settings with which candle-transformers does not compute the
//! published model.

use candle_nn::Activation;
use candle_transformers::models::clip::ClipConfig;
use candle_transformers::models::clip::text_model::{self, ClipTextConfig};
use candle_transformers::models::clip::vision_model::ClipVisionConfig;
use candle_transformers::models::siglip;
use serde::Deserialize;

use crate::model::load::ModelFiles;
use crate::model::nets::image::Sides;
use crate::model::{LoadError, LoadSpec};

/// The architectures, as `model_type` names them.
pub const ARCHITECTURES: [&str; 2] = ["clip", "siglip"];
/// `layer_norm_eps` of CLIP, which candle-transformers does not read from the file.
const CLIP_EPS: f64 = 1e-5;

/// The configuration of a model.
pub struct TextImageConfig {
    pub(super) network: NetworkConfig,
    /// The sides of an image, in pixels.
    pub sides: Sides,
    /// The number of tokens of an image: its patches, and CLIP's class token.
    pub image_tokens: usize,
    /// Token ids are below this number.
    pub vocabulary: usize,
    /// Maximum number of tokens of a text, special ones included.
    pub max_tokens: usize,
    /// Number of dimensions of an embedding.
    pub width: usize,
}

pub(super) enum NetworkConfig {
    Clip(ClipConfig),
    Siglip(siglip::Config),
}

/// A tower in CLIP's `config.json`. Fields that are absent have the defaults of the transformers library.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ClipTower {
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    max_position_embeddings: Option<usize>,
    num_channels: Option<usize>,
    image_size: Option<usize>,
    patch_size: Option<usize>,
    hidden_act: Option<String>,
    layer_norm_eps: Option<f64>,
}

#[derive(Deserialize)]
struct Clip {
    #[serde(default)]
    text_config: ClipTower,
    #[serde(default)]
    vision_config: ClipTower,
    projection_dim: Option<usize>,
}

#[derive(Deserialize)]
struct ModelType {
    model_type: String,
}

/// The fields of SigLIP's `config.json` that candle-transformers ignores.
#[derive(Deserialize)]
struct SiglipProjection {
    text_config: ProjectedTower,
}

#[derive(Deserialize)]
struct ProjectedTower {
    projection_size: Option<usize>,
}

impl TextImageConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// [`LoadError::File`] if it is missing or invalid, [`LoadError::Unsupported`] for a setting that
    /// candle-transformers does not implement.
    pub fn read(files: &ModelFiles, spec: &LoadSpec) -> Result<Self, LoadError> {
        let ModelType { model_type } = files.required_json("config.json")?;
        let config = match model_type.as_str() {
            "clip" => Self::of_clip(files.required_json("config.json")?),
            "siglip" => {
                let projection: SiglipProjection = files.required_json("config.json")?;
                Self::of_siglip(files.required_json("config.json")?, &projection)
            }
            other => {
                let known = ARCHITECTURES.join(", ");
                Err(format!("model_type is {other:?}; vectors of texts and images are computed by {known}"))
            }
        };
        config.map_err(|reason| spec.unsupported(reason))
    }

    fn of_clip(
        Clip { text_config: text, vision_config: vision, projection_dim }: Clip,
    ) -> Result<Self, String> {
        for (name, tower) in [("text_config", &text), ("vision_config", &vision)] {
            let activation = tower.hidden_act.as_deref().unwrap_or("quick_gelu");
            if activation != "quick_gelu" {
                return Err(format!(
                    "{name}.hidden_act is {activation:?}; only quick_gelu is supported, the activation of OpenAI's models"
                ));
            }
            let eps = tower.layer_norm_eps.unwrap_or(CLIP_EPS);
            if eps != CLIP_EPS {
                return Err(format!("{name}.layer_norm_eps is {eps}; CLIP is computed with {CLIP_EPS}"));
            }
        }
        let width = projection_dim.unwrap_or(512);
        let text = ClipTextConfig {
            vocab_size: text.vocab_size.unwrap_or(49_408),
            embed_dim: text.hidden_size.unwrap_or(512),
            activation: text_model::Activation::QuickGelu,
            intermediate_size: text.intermediate_size.unwrap_or(2_048),
            max_position_embeddings: text.max_position_embeddings.unwrap_or(77),
            pad_with: None,
            num_hidden_layers: text.num_hidden_layers.unwrap_or(12),
            num_attention_heads: text.num_attention_heads.unwrap_or(8),
            projection_dim: width,
        };
        let vision = ClipVisionConfig {
            embed_dim: vision.hidden_size.unwrap_or(768),
            activation: text_model::Activation::QuickGelu,
            intermediate_size: vision.intermediate_size.unwrap_or(3_072),
            num_hidden_layers: vision.num_hidden_layers.unwrap_or(12),
            num_attention_heads: vision.num_attention_heads.unwrap_or(12),
            projection_dim: width,
            num_channels: vision.num_channels.unwrap_or(3),
            image_size: vision.image_size.unwrap_or(224),
            patch_size: vision.patch_size.unwrap_or(32),
        };
        check_heads("text_config", text.embed_dim, text.num_attention_heads)?;
        check_heads("vision_config", vision.embed_dim, vision.num_attention_heads)?;
        let patches = patches(vision.image_size, vision.patch_size, vision.num_channels)?;
        Ok(Self {
            sides: Sides { height: vision.image_size, width: vision.image_size },
            image_tokens: patches + 1,
            vocabulary: text.vocab_size,
            max_tokens: text.max_position_embeddings,
            width,
            network: NetworkConfig::Clip(ClipConfig {
                image_size: vision.image_size,
                text_config: text,
                vision_config: vision,
                logit_scale_init_value: 2.6592,
            }),
        })
    }

    fn of_siglip(
        config: siglip::Config,
        SiglipProjection { text_config: ProjectedTower { projection_size } }: &SiglipProjection,
    ) -> Result<Self, String> {
        let siglip::Config { text_config: text, vision_config: vision } = &config;
        let width = vision.hidden_size;
        let projection = projection_size.unwrap_or(text.hidden_size);
        if text.hidden_size != width || projection != width {
            return Err(format!(
                "text_config.hidden_size is {}, text_config.projection_size is {projection}, and \
                 vision_config.hidden_size is {width}; they must be equal",
                text.hidden_size
            ));
        }
        for (name, activation) in [("text_config", text.hidden_act), ("vision_config", vision.hidden_act)] {
            if activation != Activation::GeluPytorchTanh {
                return Err(format!(
                    "{name}.hidden_act is {activation:?}; SigLIP is computed with gelu_pytorch_tanh"
                ));
            }
        }
        check_heads("text_config", text.hidden_size, text.num_attention_heads)?;
        check_heads("vision_config", width, vision.num_attention_heads)?;
        let image_tokens = patches(vision.image_size, vision.patch_size, vision.num_channels)?;
        Ok(Self {
            sides: Sides { height: vision.image_size, width: vision.image_size },
            image_tokens,
            vocabulary: text.vocab_size,
            max_tokens: text.max_position_embeddings,
            width,
            network: NetworkConfig::Siglip(config),
        })
    }

    /// Whether every text is padded to the maximum number of tokens. SigLIP was trained with padded texts, and takes the
    /// vector of the last position.
    pub fn pads_texts(&self) -> bool {
        matches!(self.network, NetworkConfig::Siglip(_))
    }
}

/// The number of patches of a square image.
fn patches(image: usize, patch: usize, channels: usize) -> Result<usize, String> {
    if channels != 3 {
        return Err(format!("vision_config.num_channels is {channels}; images have 3"));
    }
    match image.checked_div(patch) {
        Some(side @ 1..) if image.is_multiple_of(patch) => Ok(side * side),
        _ => Err(format!("vision_config: image_size {image} is not a multiple of patch_size {patch}")),
    }
}

fn check_heads(name: &str, hidden: usize, heads: usize) -> Result<(), String> {
    if heads > 0 && hidden > 0 && hidden.is_multiple_of(heads) {
        return Ok(());
    }
    Err(format!("{name}: hidden_size {hidden} cannot be divided among {heads} heads"))
}
