//! Whisper's encoder: two convolutions over time, then the blocks of a transformer over all positions of a window. Owns
//! the weights. Windows that are encoded together do not change each other's results, not even in the last bit.

use candle_core::{Result, Tensor};

use super::config::{Layers, POSITIONS, WhisperConfig};
use super::{EPS, values};
use crate::model::LoadError;
use crate::model::load::weights::Weights;
use crate::model::nets::block::{Blocks, PreNormBlock, PreNormReader};
use crate::model::ops::{Activation, Panels, activate, in_parallel, multiply_rows};
use crate::model::sound::features::FRAMES;

/// The kernel size of each convolution, in frames.
const TAPS: usize = 3;

/// The encoder.
pub struct Encoder {
    convolutions: [TimeConvolution; 2],
    /// `[POSITIONS, width]`.
    positions: Vec<f32>,
    blocks: Blocks,
    mels: usize,
    width: usize,
}

impl Encoder {
    /// Reads the weights.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape.
    pub(super) fn load(weights: &Weights, config: &WhisperConfig) -> std::result::Result<Self, LoadError> {
        let WhisperConfig { width, mels, encoder: layers, .. } = *config;
        Ok(Self {
            convolutions: [
                TimeConvolution::load(weights, "encoder.conv1", [mels, width], 1)?,
                TimeConvolution::load(weights, "encoder.conv2", [width, width], 2)?,
            ],
            positions: values(weights, "encoder.embed_positions.weight", &[POSITIONS, width])?,
            blocks: blocks(weights, width, layers)?,
            mels,
            width,
        })
    }

    /// Encodes windows, each given by its features `[mels, FRAMES]`. The result is `[windows, POSITIONS, width]`.
    ///
    /// # Errors
    /// An error of candle, which would be a bug of this program.
    pub fn forward(&self, windows: &[&[f32]]) -> Result<Vec<f32>> {
        let window_len = POSITIONS * self.width;
        let mut x = vec![0.0; windows.len() * window_len];
        in_parallel(x.chunks_exact_mut(window_len).zip(windows), |(x, features)| {
            let mut frames = transposed(features, self.mels);
            for convolution in &self.convolutions {
                frames = convolution.forward(&frames);
            }
            for (x, (frame, position)) in x.iter_mut().zip(frames.iter().zip(&self.positions)) {
                *x = frame + position;
            }
        });
        let x = Tensor::from_vec(x, (windows.len() * POSITIONS, self.width), &candle_core::Device::Cpu)?;
        let lengths = vec![POSITIONS; windows.len()];
        let encoded = self.blocks.forward(x, |attention, x| attention.forward(x, &lengths))?;
        encoded.flatten_all()?.to_vec1()
    }
}

/// `[FRAMES, mels]` from features `[mels, FRAMES]`.
fn transposed(features: &[f32], mels: usize) -> Vec<f32> {
    let mut frames = vec![0.0; features.len()];
    for (mel, row) in features.chunks_exact(FRAMES).enumerate() {
        frames[mel..].iter_mut().step_by(mels).zip(row).for_each(|(to, x)| *to = *x);
    }
    frames
}

/// A convolution over time with GELU. A frame of zeros precedes the first frame, and one follows the last.
struct TimeConvolution {
    /// `[TAPS·in, out]`: the frames of a patch follow each other, each with all its channels.
    weights: Panels,
    bias: Vec<f32>,
    /// The channels of a frame.
    channels: usize,
    /// Frames from one patch to the next.
    stride: usize,
}

impl TimeConvolution {
    fn load(
        weights: &Weights,
        name: &str,
        [channels, width]: [usize; 2],
        stride: usize,
    ) -> std::result::Result<Self, LoadError> {
        let filters = values(weights, &format!("{name}.weight"), &[width, channels, TAPS])?;
        // From `[channels, TAPS]`, as in the file, to `[TAPS, channels]`, as in a patch.
        let by_tap = |filter: &[f32]| -> Vec<f32> {
            (0..TAPS).flat_map(|tap| filter[tap..].iter().step_by(TAPS)).copied().collect()
        };
        let columns: Vec<f32> = filters.chunks_exact(channels * TAPS).flat_map(by_tap).collect();
        Ok(Self {
            weights: Panels::new(&columns, channels * TAPS),
            bias: values(weights, &format!("{name}.bias"), &[width])?,
            channels,
            stride,
        })
    }

    /// `[count / stride, out]` from frames `[count, in]`.
    fn forward(&self, frames: &[f32]) -> Vec<f32> {
        let padding = vec![0.0; self.channels];
        let padded = [&padding, frames, &padding].concat();
        let mut patches = Vec::with_capacity(TAPS * padded.len() / self.stride);
        for patch in padded.windows(TAPS * self.channels).step_by(self.stride * self.channels) {
            patches.extend_from_slice(patch);
        }
        let mut out = vec![0.0; patches.len() / (TAPS * self.channels) * self.bias.len()];
        multiply_rows(&patches, &self.weights, &mut out, |_, block| {
            activate(block, &self.bias, Activation::Gelu);
        });
        out
    }
}

/// Reads the blocks of the transformer, for the device of the weights.
///
/// # Errors
/// [`LoadError::File`] naming a tensor that is missing or has another shape.
pub(super) fn blocks(
    weights: &Weights,
    width: usize,
    layers: Layers,
) -> std::result::Result<Blocks, LoadError> {
    let reader = PreNormReader { weights, format: weights.matrix_format(), eps: EPS };
    let block = |index: usize| {
        let prefix = format!("encoder.layers.{index}");
        let part =
            |name: &str, has_bias| reader.linear(&format!("{prefix}.self_attn.{name}"), [width; 2], has_bias);
        let block = PreNormBlock {
            prefix: &prefix,
            norms: ["self_attn_layer_norm", "final_layer_norm"],
            out: "self_attn.out_proj",
            feed_forward: ["fc1", "fc2"],
            inner: layers.inner,
            heads: layers.heads,
            activation: Activation::Gelu,
        };
        reader.block(block, [part("q_proj", true)?, part("k_proj", false)?, part("v_proj", true)?])
    };
    let blocks = (0..layers.count).map(block).collect::<std::result::Result<_, _>>()?;
    Ok(Blocks { blocks, last_norm: Some(reader.norm("encoder.layer_norm", width)?) })
}
