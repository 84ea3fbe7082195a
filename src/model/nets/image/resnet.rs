//! ResNet as in the transformers library (`microsoft/resnet-50` and its like). Owns the weights.
//!
//! The ResNet of candle-transformers has fixed widths and torchvision's names; this one takes any width.

use candle_core::{Result, Tensor};
use serde::Deserialize;

use super::{Backbone, Loaded, NormedConvolution};
use crate::model::LoadSpec;
use crate::model::load::weights::Weights;
use crate::model::ops::{Clamp, Convolution, Padding, max_pool, mean_pool};

/// Added to the variance in batch norm: PyTorch's default, which the transformers library does not change.
const EPS: f64 = 1e-5;
/// The outer width of a bottleneck block divided by its inner widths.
const REDUCTION: usize = 4;

/// The sizes of `config.json`.
#[derive(Deserialize)]
pub(super) struct Config {
    embedding_size: usize,
    hidden_sizes: Vec<usize>,
    depths: Vec<usize>,
    layer_type: String,
    hidden_act: String,
    #[serde(default)]
    downsample_in_first_stage: bool,
    #[serde(default)]
    downsample_in_bottleneck: bool,
}

/// The network.
pub(super) struct ResNet {
    stem: Convolution,
    blocks: Vec<Block>,
}

struct Block {
    layers: Vec<Convolution>,
    shortcut: Option<Convolution>,
}

impl ResNet {
    /// The network, and the width of its vectors.
    pub(super) fn load(weights: &Weights, config: &Config, spec: &LoadSpec) -> Loaded<(Self, usize)> {
        let is_bottleneck = match config.layer_type.as_str() {
            "bottleneck" => true,
            "basic" => false,
            other => {
                let reason = format!("layer_type is {other:?}; bottleneck and basic are supported");
                return Err(spec.unsupported(reason));
            }
        };
        if config.hidden_act != "relu" {
            return Err(spec.unsupported(format!("hidden_act is {:?}; relu is supported", config.hidden_act)));
        }
        let convolution = |name: String, [out, from, size]: [usize; 3], stride, clamp| {
            let normed = NormedConvolution {
                convolution: format!("{name}.convolution.weight"),
                norm: format!("{name}.normalization"),
                shape: [out, from, size, size],
                stride,
                padding: Padding::Each(size / 2),
                clamp,
                is_depthwise: false,
                eps: EPS,
                weights,
            };
            normed.load()
        };
        let stem = [config.embedding_size, 3, 7];
        let stem = convolution("embedder.embedder".into(), stem, 2, Clamp::RELU)?;
        let mut blocks = Vec::new();
        let mut from = config.embedding_size;
        for (stage, (out, depth)) in config.hidden_sizes.iter().copied().zip(&config.depths).enumerate() {
            for layer in 0..*depth {
                let is_downsampling = layer == 0 && (stage > 0 || config.downsample_in_first_stage);
                let stride = if is_downsampling { 2 } else { 1 };
                let named = |part: &str| format!("encoder.stages.{stage}.layers.{layer}.{part}");
                let layers = if is_bottleneck {
                    let inner = out / REDUCTION;
                    let (first, second) =
                        if config.downsample_in_bottleneck { (stride, 1) } else { (1, stride) };
                    vec![
                        convolution(named("layer.0"), [inner, from, 1], first, Clamp::RELU)?,
                        convolution(named("layer.1"), [inner, inner, 3], second, Clamp::RELU)?,
                        convolution(named("layer.2"), [out, inner, 1], 1, Clamp::NONE)?,
                    ]
                } else {
                    vec![
                        convolution(named("layer.0"), [out, from, 3], stride, Clamp::RELU)?,
                        convolution(named("layer.1"), [out, out, 3], 1, Clamp::NONE)?,
                    ]
                };
                let has_shortcut = from != out || stride != 1;
                let shortcut =
                    has_shortcut.then(|| convolution(named("shortcut"), [out, from, 1], stride, Clamp::NONE));
                blocks.push(Block { layers, shortcut: shortcut.transpose()? });
                from = out;
            }
        }
        Ok((Self { stem, blocks }, from))
    }
}

impl Backbone for ResNet {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = max_pool(&self.stem.forward(x)?)?;
        for Block { layers, shortcut } in &self.blocks {
            let mut out = x.clone();
            for layer in layers {
                out = layer.forward(&out)?;
            }
            let residual = shortcut.as_ref().map(|shortcut| shortcut.forward(&x)).transpose()?;
            x = (out + residual.unwrap_or(x))?.relu()?;
        }
        mean_pool(&x)
    }
}
