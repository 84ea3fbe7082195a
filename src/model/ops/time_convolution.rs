//! Convolution over time, on any device, of sequences that follow each other without padding: `[frames, channels]`.
//! Zeros precede and follow each sequence, so that it keeps its length. With one tap it is a linear layer. Decides the
//! form in which its weights are kept, and owns them.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use sconce_kernels::NumberFormat;
use sconce_kernels::time_convolution::{self, TimeFilters};

use super::{host_values, values};

/// One convolution with its bias.
pub struct TimeConvolution {
    weights: Weights,
    dilation: usize,
}

enum Weights {
    /// On a CPU, in f32.
    Packed(time_convolution::TimeConvolution),
    /// For candle's operations.
    Plain(Taps),
}

impl TimeConvolution {
    /// Prepares the weights for their device. `weights` are as published: `[out, in, taps]`, or `[channels, 1, taps]`
    /// if each channel is convolved by itself; the number of taps is odd. `bias` is `[out]`. Two neighbouring taps are
    /// `dilation` frames apart.
    ///
    /// # Errors
    /// Shapes do not match, or the device fails.
    pub fn new(weights: &Tensor, bias: &Tensor, dilation: usize, is_depthwise: bool) -> Result<Self> {
        Self::with_format(weights, bias, dilation, is_depthwise, NumberFormat::F32)
    }

    /// A linear layer: `weights` are `[out, in]`, which a CPU keeps in this format; `bias` is `[out]`.
    ///
    /// # Errors
    /// As [`TimeConvolution::new`], and if `in` is not a multiple of the group size of `format`.
    pub fn linear(weights: &Tensor, bias: &Tensor, format: NumberFormat) -> Result<Self> {
        Self::with_format(&weights.unsqueeze(2)?, bias, 1, false, format)
    }

    fn with_format(
        weights: &Tensor,
        bias: &Tensor,
        dilation: usize,
        is_depthwise: bool,
        format: NumberFormat,
    ) -> Result<Self> {
        let taps = weights.dim(2)?;
        let weights = match (host_values(weights)?, host_values(bias)?) {
            (Some(numbers), Some(bias)) => {
                let filters = TimeFilters { weights: &numbers, bias, taps, dilation, is_depthwise, format };
                let packed = time_convolution::TimeConvolution::new(filters);
                Weights::Packed(packed.map_err(candle_core::Error::wrap)?)
            }
            _ => Weights::Plain(Taps::new(weights, bias, is_depthwise)?),
        };
        Ok(Self { weights, dilation })
    }

    /// The CPU's kernel, if the weights are packed.
    pub(super) fn packed(&self) -> Option<&time_convolution::TimeConvolution> {
        match &self.weights {
            Weights::Packed(packed) => Some(packed),
            Weights::Plain(_) => None,
        }
    }

    /// Convolves `x` `[frames, channels]`. `lengths` are the frames of each sequence; their sum is `frames`.
    ///
    /// # Errors
    /// Shapes or types do not match: a bug of the caller.
    pub fn forward(&self, x: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        match &self.weights {
            Weights::Packed(packed) => x.contiguous()?.apply_op1_no_bwd(&Convolve { packed, lengths }),
            Weights::Plain(taps) => taps.convolve(x, lengths, self.dilation),
        }
    }
}

/// The weights for candle's operations, which convolve tap by tap. (Candle's own convolution computes each group by itself:
/// on a GPU a depthwise one of 512 channels would launch thousands of kernels.)
struct Taps {
    /// For each tap `[in, out]`, or `[1, channels]` if each channel is convolved by itself.
    taps: Vec<Tensor>,
    /// `[1, out]`.
    bias: Tensor,
    is_depthwise: bool,
}

impl Taps {
    fn new(weights: &Tensor, bias: &Tensor, is_depthwise: bool) -> Result<Self> {
        let taps = (0..weights.dim(2)?).map(|tap| weights.narrow(2, tap, 1)?.squeeze(2)?.t()?.contiguous());
        Ok(Self { taps: taps.collect::<Result<_>>()?, bias: bias.unsqueeze(0)?, is_depthwise })
    }

    fn convolve(&self, x: &Tensor, lengths: &[usize], dilation: usize) -> Result<Tensor> {
        let padding = self.taps.len() / 2 * dilation;
        // Zeros between two sequences are the end of one and the beginning of the other. Index 0 is a frame of zeros.
        let (mut padded, mut kept, mut frames) = (vec![0_u32; padding], Vec::<u32>::new(), 1_u32..);
        for length in lengths {
            kept.extend((padded.len() - padding..).take(*length).map(|row| row as u32));
            padded.extend(frames.by_ref().take(*length));
            padded.resize(padded.len() + padding, 0);
        }
        let rows = padded.len().saturating_sub(2 * padding);
        let zeros = Tensor::zeros((1, x.dim(1)?), x.dtype(), x.device())?;
        let padded = Tensor::cat(&[&zeros, x], 0)?.index_select(&Tensor::new(padded, x.device())?, 0)?;
        let mut sum: Option<Tensor> = None;
        for (index, weights) in self.taps.iter().enumerate() {
            let part = padded.narrow(0, index * dilation, rows)?;
            let part = if self.is_depthwise { part.broadcast_mul(weights)? } else { part.matmul(weights)? };
            sum = Some(match sum {
                Some(sum) => (sum + part)?,
                None => part,
            });
        }
        let Some(sum) = sum else { bail!("a convolution without taps") };
        sum.index_select(&Tensor::new(kept, x.device())?, 0)?.broadcast_add(&self.bias)
    }
}

/// The CPU's kernel, applied to frames.
struct Convolve<'a> {
    packed: &'a time_convolution::TimeConvolution,
    lengths: &'a [usize],
}

impl CustomOp1 for Convolve<'_> {
    fn name(&self) -> &'static str {
        "convolution over time"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let frames = checked_frames(layout, self.lengths, self.packed.channels())?;
        let out = self.packed.forward(values(x, layout)?, self.lengths);
        Ok((CpuStorage::F32(out), Shape::from((frames, self.packed.width()))))
    }
}

/// The number of frames of a tensor that must be `[frames, channels]`, where `frames` is the sum of the `lengths`.
pub(super) fn checked_frames(layout: &Layout, lengths: &[usize], channels: usize) -> Result<usize> {
    let frames = lengths.iter().sum::<usize>();
    if layout.dims() == [frames, channels] {
        return Ok(frames);
    }
    bail!("a convolution of {frames} frames of {channels} channels got the shape {:?}", layout.dims())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, noise};
    use super::*;

    #[test]
    fn the_kernel_and_the_taps_equal_candles_convolution() {
        for (channels, taps, dilation, is_depthwise) in
            [(3, 1, 1, false), (12, 7, 1, false), (20, 7, 8, true), (16, 5, 2, true), (9, 3, 1, false)]
        {
            let (out, each) = if is_depthwise { (channels, 1) } else { (5, channels) };
            let weights = noise(&[out, each, taps], 0.5, 1).unwrap();
            let bias = noise(&[out], 0.5, 2).unwrap();
            let x = noise(&[48, channels], 1.0, 3).unwrap();
            let kernel = TimeConvolution::new(&weights, &bias, dilation, is_depthwise).unwrap();
            let plain = TimeConvolution {
                weights: Weights::Plain(Taps::new(&weights, &bias, is_depthwise).unwrap()),
                dilation,
            };
            let lengths = [1, 40, 7];
            let groups = if is_depthwise { channels } else { 1 };
            let mut start = 0;
            let candles = lengths.map(|length| {
                let sequence = x.narrow(0, start, length).unwrap().t().unwrap().unsqueeze(0).unwrap();
                start += length;
                let out = sequence.conv1d(&weights, taps / 2 * dilation, 1, dilation, groups).unwrap();
                out.squeeze(0).unwrap().t().unwrap()
            });
            let candles = Tensor::cat(&candles, 0).unwrap().broadcast_add(&bias).unwrap();
            for ours in [kernel, plain].map(|it| it.forward(&x, &lengths).unwrap()) {
                let off = difference(&ours, &candles).unwrap();
                assert!(off < 5e-5, "{channels} channels, {taps} taps, depthwise: {is_depthwise}: {off}");
            }
        }
    }
}
