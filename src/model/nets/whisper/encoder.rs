//! Whisper's encoder: two convolutions over time, then the blocks of a transformer over all positions of a window. Owns
//! the weights. Windows that are encoded together do not change each other's results, not even in the last bit.

use candle_core::{Result, Tensor};

use super::config::{Layers, POSITIONS, WhisperConfig};
use super::{EPS, values};
use crate::model::LoadError;
use crate::model::load::weights::Weights;
use crate::model::nets::block::{Block, Blocks, PreNorms};
use crate::model::ops::{
    Activation, AttentionWeights, Epilogue, FeedForward, InputWeights, NormParams, Panels, PositionTerms,
    SelfAttention, activate, in_parallel, multiply_rows,
};
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
    let reader = Reader { weights, width, layers };
    let blocks = (0..layers.count).map(|index| reader.block(index));
    let blocks = blocks.collect::<std::result::Result<_, _>>()?;
    Ok(Blocks { blocks, last_norm: Some(reader.norm("encoder.layer_norm")?) })
}

/// Reads blocks.
struct Reader<'a> {
    weights: &'a Weights,
    width: usize,
    layers: Layers,
}

impl Reader<'_> {
    fn norm(&self, name: &str) -> std::result::Result<NormParams, LoadError> {
        let get = |part: &str| self.weights.get(&format!("{name}.{part}"), &[self.width]);
        // `NormParams` also adds the bias of a linear layer before the norm. There is none here.
        let no_bias = self.zeros(name)?;
        self.weights.checked(name, NormParams::new(&no_bias, &get("weight")?, &get("bias")?, EPS))
    }

    fn zeros(&self, name: &str) -> std::result::Result<Tensor, LoadError> {
        self.weights.checked(name, self.weights.zeros(&[self.width]))
    }

    fn block(&self, index: usize) -> std::result::Result<Block, LoadError> {
        let (width, Layers { heads, inner, .. }) = (self.width, self.layers);
        let named = |name: &str| format!("encoder.layers.{index}.{name}");
        let matrix = |name: &str, from, to| self.weights.get(&format!("{}.weight", named(name)), &[to, from]);
        let bias = |name: &str, to| self.weights.get(&format!("{}.bias", named(name)), &[to]);
        let epilogue = |name: &str| self.weights.checked(name, Epilogue::bias(&bias(name, width)?));
        let part = |name: &str| matrix(name, width, width);
        let [q, k, v, out] =
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"];
        let (position_terms, format) = (PositionTerms::default(), self.weights.matrix_format());
        let qkv = [(part(q)?, bias(q, width)?), (part(k)?, self.zeros(k)?), (part(v)?, bias(v, width)?)];
        let attention_weights = AttentionWeights { qkv, out: part(out)?, heads, position_terms, format };
        let attention = SelfAttention::new(attention_weights, epilogue(out)?);
        let up = InputWeights {
            matrix: matrix("fc1", width, inner)?,
            bias: bias("fc1", inner)?,
            gate: None,
            format,
        };
        let down = matrix("fc2", inner, width)?;
        let feed_forward = FeedForward::new(up, &down, epilogue("fc2")?, Activation::Gelu);
        Ok(Block {
            pre_norms: Some(PreNorms {
                attention: Some(self.norm(&named("self_attn_layer_norm"))?),
                feed_forward: self.norm(&named("final_layer_norm"))?,
            }),
            attention: self.weights.checked(out, attention)?,
            feed_forward: self.weights.checked("fc2", feed_forward)?,
        })
    }
}
