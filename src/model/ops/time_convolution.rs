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
    /// For candle's operations: as published, and the bias `[1, out, 1]`.
    Plain { weights: Tensor, bias: Tensor, groups: usize },
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
        let (width, _, taps) = weights.dims3()?;
        let weights = match (host_values(weights)?, host_values(bias)?) {
            (Some(numbers), Some(bias)) => {
                let filters = TimeFilters { weights: &numbers, bias, taps, dilation, is_depthwise, format };
                let packed = time_convolution::TimeConvolution::new(filters);
                Weights::Packed(packed.map_err(candle_core::Error::wrap)?)
            }
            _ => Weights::Plain {
                weights: weights.clone(),
                bias: bias.reshape((1, width, 1))?,
                groups: if is_depthwise { width } else { 1 },
            },
        };
        Ok(Self { weights, dilation })
    }

    /// Convolves `x` `[frames, channels]`. `lengths` are the frames of each sequence; their sum is `frames`.
    ///
    /// # Errors
    /// Shapes or types do not match: a bug of the caller.
    pub fn forward(&self, x: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        match &self.weights {
            Weights::Packed(packed) => x.contiguous()?.apply_op1_no_bwd(&Convolve { packed, lengths }),
            Weights::Plain { weights, bias, groups } => {
                let padding = weights.dim(2)? / 2 * self.dilation;
                let mut start = 0;
                let mut convolved = |length: &usize| {
                    let sequence = x.narrow(0, start, *length)?.t()?.unsqueeze(0)?.contiguous()?;
                    start += length;
                    let out = sequence.conv1d(weights, padding, 1, self.dilation, *groups)?;
                    out.broadcast_add(bias)?.squeeze(0)?.t()
                };
                let sequences = lengths.iter().map(&mut convolved).collect::<Result<Vec<_>>>()?;
                Tensor::cat(&sequences, 0)
            }
        }
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
        let frames = self.lengths.iter().sum::<usize>();
        if layout.dims() != [frames, self.packed.channels()] {
            let channels = self.packed.channels();
            bail!(
                "a convolution of {frames} frames of {channels} channels got the shape {:?}",
                layout.dims()
            );
        }
        let out = self.packed.forward(values(x, layout)?, self.lengths);
        Ok((CpuStorage::F32(out), Shape::from((frames, self.packed.width()))))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{difference, noise};
    use super::*;

    #[test]
    fn the_kernel_equals_candles_convolution() {
        for (channels, taps, dilation, is_depthwise) in
            [(3, 1, 1, false), (12, 7, 1, false), (20, 7, 8, true), (16, 5, 2, true), (9, 3, 1, false)]
        {
            let (out, each) = if is_depthwise { (channels, 1) } else { (5, channels) };
            let weights = noise(&[out, each, taps], 0.5, 1).unwrap();
            let bias = noise(&[out], 0.5, 2).unwrap();
            let x = noise(&[48, channels], 1.0, 3).unwrap();
            let kernel = TimeConvolution::new(&weights, &bias, dilation, is_depthwise).unwrap();
            let plain = TimeConvolution {
                weights: Weights::Plain {
                    weights: weights.clone(),
                    bias: bias.reshape((1, out, 1)).unwrap(),
                    groups: if is_depthwise { channels } else { 1 },
                },
                dilation,
            };
            let lengths = [1, 40, 7];
            let (ours, candles) =
                (kernel.forward(&x, &lengths).unwrap(), plain.forward(&x, &lengths).unwrap());
            let off = difference(&ours, &candles).unwrap();
            assert!(off < 5e-5, "{channels} channels, {taps} taps, depthwise: {is_depthwise}: {off}");
        }
    }
}
