//! EfficientNet-Lite: inverted residual blocks with depthwise convolutions, without squeeze-and-excitation. The
//! tensors have the names of the PyTorch weights. `scripts/fetch-efficientnet` writes `config.json`. Owns the
//! weights.

use candle_core::{Result, Tensor};
use serde::Deserialize;

use super::{Backbone, Loaded, NormedConvolution};
use crate::model::LoadSpec;
use crate::model::load::weights::Weights;
use crate::model::ops::{Clamp, Convolution, Padding, mean_pool};

/// The sizes of `config.json`; the lists have an entry for each stage.
#[derive(Deserialize)]
pub(super) struct Config {
    stem_channels: usize,
    kernel_sizes: Vec<usize>,
    strides: Vec<usize>,
    in_channels: Vec<usize>,
    out_channels: Vec<usize>,
    num_block_repeats: Vec<usize>,
    expand_ratios: Vec<usize>,
    hidden_dim: usize,
    batch_norm_eps: f64,
}

/// The network.
pub(super) struct Lite {
    stem: Convolution,
    blocks: Vec<Block>,
    head: Convolution,
}

struct Block {
    expand: Option<Convolution>,
    depthwise: Convolution,
    project: Convolution,
    /// Whether the block's input is added to its result.
    is_residual: bool,
}

impl Config {
    /// Whether each list has an entry for each stage.
    fn has_all_stages(&self) -> bool {
        let Self { kernel_sizes, strides, in_channels, out_channels, expand_ratios, .. } = self;
        let stages = self.num_block_repeats.len();
        [kernel_sizes, strides, in_channels, out_channels, expand_ratios].iter().all(|it| it.len() >= stages)
    }
}

impl Lite {
    /// The network, and the width of its vectors.
    pub(super) fn load(weights: &Weights, config: &Config, spec: &LoadSpec) -> Loaded<(Self, usize)> {
        if !config.has_all_stages() {
            let reason = "config.json has more num_block_repeats than another list has entries".to_owned();
            return Err(spec.unsupported(reason));
        }
        let normed = |convolution: String, norm: String, shape, stride, clamp| NormedConvolution {
            convolution,
            norm,
            shape,
            stride,
            padding: Padding::Same,
            clamp,
            is_depthwise: false,
            eps: config.batch_norm_eps,
            weights,
        };
        let stem = [config.stem_channels, 3, 3, 3];
        let stem = normed("_conv_stem.weight".into(), "_bn0".into(), stem, 2, Clamp::RELU6).load()?;
        let mut blocks = Vec::new();
        let mut channels = config.stem_channels;
        for (stage, repeats) in config.num_block_repeats.iter().enumerate() {
            for repeat in 0..*repeats {
                let (from, to) = if repeat == 0 {
                    (config.in_channels[stage], config.out_channels[stage])
                } else {
                    (config.out_channels[stage], config.out_channels[stage])
                };
                let stride = if repeat == 0 { config.strides[stage] } else { 1 };
                let size = config.kernel_sizes[stage];
                let expanded = from.saturating_mul(config.expand_ratios[stage]);
                let index = blocks.len();
                let named = |name: &str| format!("_blocks.{index}.{name}");
                let expand = (expanded != from).then(|| {
                    let (name, norm) = (named("_expand_conv.weight"), named("_bn0"));
                    normed(name, norm, [expanded, from, 1, 1], 1, Clamp::RELU6).load()
                });
                let (name, norm) = (named("_depthwise_conv.weight"), named("_bn1"));
                let depthwise = NormedConvolution {
                    is_depthwise: true,
                    ..normed(name, norm, [expanded, 1, size, size], stride, Clamp::RELU6)
                };
                let (name, norm) = (named("_project_conv.weight"), named("_bn2"));
                blocks.push(Block {
                    expand: expand.transpose()?,
                    depthwise: depthwise.load()?,
                    project: normed(name, norm, [to, expanded, 1, 1], 1, Clamp::NONE).load()?,
                    is_residual: stride == 1 && from == to,
                });
                channels = to;
            }
        }
        let head = [config.hidden_dim, channels, 1, 1];
        let head = normed("_conv_head.weight".into(), "_bn1".into(), head, 1, Clamp::RELU6).load()?;
        Ok((Self { stem, blocks, head }, config.hidden_dim))
    }
}

impl Backbone for Lite {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.stem.forward(x)?;
        for Block { expand, depthwise, project, is_residual } in &self.blocks {
            let inner = match expand {
                Some(expand) => depthwise.forward(&expand.forward(&x)?)?,
                None => depthwise.forward(&x)?,
            };
            let out = project.forward(&inner)?;
            x = if *is_residual { (x + out)? } else { out };
        }
        mean_pool(&self.head.forward(&x)?)
    }
}
