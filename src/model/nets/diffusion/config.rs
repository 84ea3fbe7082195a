//! Reads the configuration of a Stable Diffusion pipeline in the folder layout of diffusers. Refuses settings with which
//! candle-transformers does not compute the published model.

use candle_transformers::models::stable_diffusion::unet_2d::{BlockConfig, UNet2DConditionModelConfig};
use candle_transformers::models::stable_diffusion::vae::AutoEncoderKLConfig;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::schedule::ScheduleConfig;
use super::text::TextConfig;
use crate::model::load::ModelFiles;
use crate::model::{LoadError, LoadSpec};

/// The pipeline, as `_class_name` of `model_index.json` names it.
pub const PIPELINE: &str = "StableDiffusionPipeline";
/// The files with the configurations of the parts.
const TEXT: &str = "text_encoder/config.json";
const UNET: &str = "unet/config.json";
const VAE: &str = "vae/config.json";
const SCHEDULE: &str = "scheduler/scheduler_config.json";
/// Fields of `unet/config.json` that change the network, and the only value of each that is supported. An absent field
/// has this value.
const UNET_FIXED: [(&str, &str); 13] = [
    ("act_fn", "\"silu\""),
    ("addition_embed_type", "null"),
    ("class_embed_type", "null"),
    ("conv_in_kernel", "3"),
    ("conv_out_kernel", "3"),
    ("dual_cross_attention", "false"),
    ("encoder_hid_dim_type", "null"),
    ("mid_block_type", "\"UNetMidBlock2DCrossAttn\""),
    ("num_class_embeds", "null"),
    ("only_cross_attention", "false"),
    ("resnet_time_scale_shift", "\"default\""),
    ("time_embedding_type", "\"positional\""),
    ("transformer_layers_per_block", "1"),
];
/// The same for `vae/config.json`.
const VAE_FIXED: [(&str, &str); 6] = [
    ("act_fn", "\"silu\""),
    ("latents_mean", "null"),
    ("latents_std", "null"),
    ("mid_block_add_attention", "true"),
    ("out_channels", "3"),
    ("shift_factor", "null"),
];

/// The configuration of all parts.
pub struct DiffusionConfig {
    pub(super) text: TextConfig,
    pub(super) unet: UNet2DConditionModelConfig,
    pub(super) vae: AutoEncoderKLConfig,
    /// The noise in training, and what the network predicts.
    pub schedule: ScheduleConfig,
    /// Number of channels of latents.
    pub channels: usize,
    /// Pixels along a side that one number of the latents stands for.
    pub scale: usize,
    /// The side of images of the size of the training, in pixels.
    pub native_side: usize,
    /// The encoder of images multiplies latents by this, so their decoder divides by it.
    pub(super) scaling_factor: f64,
}

#[derive(Deserialize)]
struct UnetFields {
    in_channels: usize,
    out_channels: usize,
    sample_size: usize,
    down_block_types: Vec<String>,
    up_block_types: Vec<String>,
    block_out_channels: Vec<usize>,
    layers_per_block: usize,
    /// Despite its name in diffusers, for these models it is the number of heads.
    attention_head_dim: OneOrMany,
    cross_attention_dim: usize,
    #[serde(default)]
    center_input_sample: bool,
    flip_sin_to_cos: Option<bool>,
    #[serde(default)]
    freq_shift: f64,
    #[serde(default = "one")]
    downsample_padding: usize,
    mid_block_scale_factor: Option<f64>,
    #[serde(default = "groups")]
    norm_num_groups: usize,
    norm_eps: Option<f64>,
    #[serde(default)]
    use_linear_projection: bool,
}

#[derive(Deserialize)]
struct VaeFields {
    block_out_channels: Vec<usize>,
    layers_per_block: usize,
    latent_channels: usize,
    #[serde(default = "groups")]
    norm_num_groups: usize,
    #[serde(default = "scaling_factor")]
    scaling_factor: f64,
    use_quant_conv: Option<bool>,
    use_post_quant_conv: Option<bool>,
}

/// One number for all blocks, or one for each.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(usize),
    Many(Vec<usize>),
}

fn one() -> usize {
    1
}

fn groups() -> usize {
    32
}

fn scaling_factor() -> f64 {
    0.18215
}

impl DiffusionConfig {
    /// Reads the configurations of the text encoder, of the denoising network, of the decoder and of the schedule.
    ///
    /// # Errors
    /// [`LoadError::File`] if one is missing or invalid, [`LoadError::Unsupported`] for a setting that is not
    /// implemented.
    pub fn read(files: &ModelFiles, spec: &LoadSpec) -> Result<Self, LoadError> {
        let text: TextConfig = files.required_json(TEXT)?;
        text.check().map_err(|reason| refused(spec, TEXT, &reason))?;
        let schedule: ScheduleConfig = files.required_json(SCHEDULE)?;
        schedule.check().map_err(|reason| refused(spec, SCHEDULE, &reason))?;
        let unet: UnetFields = fields(files, spec, UNET, &UNET_FIXED)?;
        let vae: VaeFields = fields(files, spec, VAE, &VAE_FIXED)?;
        vae.check().map_err(|reason| refused(spec, VAE, &reason))?;
        unet.check(&text, &vae).map_err(|reason| refused(spec, UNET, &reason))?;
        let scale = 1 << (vae.block_out_channels.len() - 1);
        Ok(Self {
            channels: vae.latent_channels,
            scale,
            native_side: unet.sample_size * scale,
            scaling_factor: vae.scaling_factor,
            unet: unet.network().map_err(|reason| refused(spec, UNET, &reason))?,
            vae: AutoEncoderKLConfig {
                block_out_channels: vae.block_out_channels,
                layers_per_block: vae.layers_per_block,
                latent_channels: vae.latent_channels,
                norm_num_groups: vae.norm_num_groups,
                use_quant_conv: vae.use_quant_conv.unwrap_or(true),
                use_post_quant_conv: vae.use_post_quant_conv.unwrap_or(true),
            },
            text,
            schedule,
        })
    }

    /// The number of tokens of a prompt, special ones and padding included.
    pub fn prompt_tokens(&self) -> usize {
        self.text.max_position_embeddings
    }

    /// The number of levels of the denoising network. Each but the last halves the sides of the latents.
    pub fn levels(&self) -> usize {
        self.unet.blocks.len()
    }

    /// Token ids are below this number.
    pub fn vocabulary(&self) -> usize {
        self.text.vocab_size
    }
}

/// The error of a file of the model.
fn refused(spec: &LoadSpec, file: &str, reason: &str) -> LoadError {
    spec.unsupported(format!("{file}: {reason}"))
}

/// The fields of a file, in which those of `fixed` must have the given values.
fn fields<T: DeserializeOwned>(
    files: &ModelFiles,
    spec: &LoadSpec,
    name: &str,
    fixed: &[(&str, &str)],
) -> Result<T, LoadError> {
    let all: Value = files.required_json(name)?;
    for (field, supported) in fixed {
        if let Some(value) = all.get(field).map(Value::to_string)
            && value != *supported
        {
            let reason = format!("{field} is {value}; only {supported} is supported");
            return Err(refused(spec, name, &reason));
        }
    }
    files.required_json(name)
}

impl UnetFields {
    /// Whether the network fits to the other parts.
    fn check(&self, text: &TextConfig, vae: &VaeFields) -> Result<(), String> {
        if self.cross_attention_dim != text.hidden_size {
            return Err(format!(
                "cross_attention_dim is {}, and text_encoder.hidden_size is {}; they must be equal",
                self.cross_attention_dim, text.hidden_size
            ));
        }
        if [self.in_channels, self.out_channels] != [vae.latent_channels; 2] {
            return Err(format!(
                "in_channels is {} and out_channels is {}; they must be vae.latent_channels, {}",
                self.in_channels, self.out_channels, vae.latent_channels
            ));
        }
        // Latents of 1024 numbers along a side are images of 8192 pixels.
        if !(1..=1_024).contains(&self.sample_size) || !(1..=8).contains(&self.down_block_types.len()) {
            return Err(format!(
                "sample_size is {} and there are {} down_block_types; from 1 to 1024 and from 1 to 8 are supported",
                self.sample_size,
                self.down_block_types.len()
            ));
        }
        if self.downsample_padding > 1 {
            return Err(format!("downsample_padding is {}; 0 and 1 are supported", self.downsample_padding));
        }
        Ok(())
    }

    fn network(self) -> Result<UNet2DConditionModelConfig, String> {
        let blocks = self.down_block_types.len();
        let heads = match self.attention_head_dim {
            OneOrMany::One(heads) => vec![heads; blocks],
            OneOrMany::Many(heads) => heads,
        };
        if blocks == 0
            || [self.block_out_channels.len(), heads.len(), self.up_block_types.len()] != [blocks; 3]
        {
            return Err(format!(
                "{blocks} down_block_types, {} up_block_types, {} block_out_channels and {} attention_head_dim; there must \
                 be equally many",
                self.up_block_types.len(),
                self.block_out_channels.len(),
                heads.len()
            ));
        }
        let mut configs = Vec::with_capacity(blocks);
        for (index, down) in self.down_block_types.iter().enumerate() {
            let (out_channels, heads) = (self.block_out_channels[index], heads[index]);
            let (use_cross_attn, expected_up) = match down.as_str() {
                "CrossAttnDownBlock2D" => (Some(1), "CrossAttnUpBlock2D"),
                "DownBlock2D" => (None, "UpBlock2D"),
                other => {
                    return Err(format!(
                        "a down_block_type is {other:?}; CrossAttnDownBlock2D and DownBlock2D are supported"
                    ));
                }
            };
            let up = &self.up_block_types[blocks - 1 - index];
            if up != expected_up {
                return Err(format!("up_block_types has {up:?} where {down:?} needs {expected_up:?}"));
            }
            for (name, divisor) in [("norm_num_groups", self.norm_num_groups), ("attention_head_dim", heads)]
            {
                if divisor == 0 || !out_channels.is_multiple_of(divisor) {
                    return Err(format!(
                        "{out_channels} channels cannot be divided among {divisor} ({name})"
                    ));
                }
            }
            configs.push(BlockConfig { out_channels, use_cross_attn, attention_head_dim: heads });
        }
        Ok(UNet2DConditionModelConfig {
            center_input_sample: self.center_input_sample,
            flip_sin_to_cos: self.flip_sin_to_cos.unwrap_or(true),
            freq_shift: self.freq_shift,
            blocks: configs,
            layers_per_block: self.layers_per_block,
            downsample_padding: self.downsample_padding,
            mid_block_scale_factor: self.mid_block_scale_factor.unwrap_or(1.0),
            norm_num_groups: self.norm_num_groups,
            norm_eps: self.norm_eps.unwrap_or(1e-5),
            cross_attention_dim: self.cross_attention_dim,
            sliced_attention_size: None,
            use_linear_projection: self.use_linear_projection,
        })
    }
}

impl VaeFields {
    fn check(&self) -> Result<(), String> {
        let groups = self.norm_num_groups;
        // Eight blocks: one number of the latents for 128 pixels along a side.
        if !(1..=8).contains(&self.block_out_channels.len()) || self.latent_channels == 0 {
            return Err(
                "block_out_channels must have 1 to 8 items, and latent_channels must not be 0".to_owned()
            );
        }
        if groups == 0 || self.block_out_channels.iter().any(|channels| !channels.is_multiple_of(groups)) {
            let channels = &self.block_out_channels;
            return Err(format!(
                "block_out_channels {channels:?} cannot be divided among norm_num_groups, {groups}"
            ));
        }
        if !(self.scaling_factor.is_finite() && self.scaling_factor > 0.0) {
            return Err(format!("scaling_factor is {}; it must be positive", self.scaling_factor));
        }
        Ok(())
    }
}
