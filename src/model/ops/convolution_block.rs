//! A block of ConvNeXt over time, on any device: x + feed-forward(LayerNorm(depthwise convolution of x)). Owns its weights.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use sconce_kernels as kernels;

use super::time_convolution::checked_frames;
use super::{FeedForward, NormParams, TimeConvolution, add, add_norm, values};

/// One block.
pub struct ConvolutionBlock {
    /// A depthwise convolution.
    pub convolution: TimeConvolution,
    /// The bias that it adds before norming is 0.
    pub norm: NormParams,
    /// Its epilogue only adds a bias.
    pub feed_forward: FeedForward,
}

impl ConvolutionBlock {
    /// `[frames, width]` from `x` `[frames, width]`. `lengths` are the frames of each sequence; their sum is `frames`.
    ///
    /// # Errors
    /// Shapes or types do not match: a bug of the caller.
    pub fn forward(&self, x: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        let Self { convolution, norm, feed_forward } = self;
        let (Some(convolution), Some((feed_forward, bias))) = (convolution.packed(), feed_forward.packed())
        else {
            return self.composed(x, lengths);
        };
        let block = kernels::ConvolutionBlock { convolution, norm: norm.host(), feed_forward, bias };
        x.contiguous()?.apply_op1_no_bwd(&Fused { block, lengths })
    }

    /// As [`forward`](Self::forward), step by step.
    fn composed(&self, x: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        let convolved = self.convolution.forward(x, lengths)?.contiguous()?;
        let normed = add_norm(convolved, &x.zeros_like()?, &self.norm)?;
        add(self.feed_forward.forward(normed)?, x)
    }
}

/// The CPU's kernel, applied to frames.
struct Fused<'a> {
    block: kernels::ConvolutionBlock<'a>,
    lengths: &'a [usize],
}

impl CustomOp1 for Fused<'_> {
    fn name(&self) -> &'static str {
        "convolution block"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        checked_frames(layout, self.lengths, self.block.norm.width())?;
        let out = self.block.forward(values(x, layout)?, self.lengths);
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::super::testing::{difference, noise};
    use super::super::{Activation, Epilogue, InputWeights, NumberFormat};
    use super::*;

    #[test]
    fn the_kernel_equals_its_steps() {
        let cases = [&[1][..], &[1, 40, 7], &[200, 3]].map(|lengths| (lengths, 24, 40, NumberFormat::F32));
        let in_8_bits = (&[5, 90][..], 32, 64, NumberFormat::Bits8);
        for (lengths, width, inner, format) in cases.into_iter().chain([in_8_bits]) {
            let filters = noise(&[width, 1, 7], 0.5, 1).unwrap();
            let zeros = Tensor::zeros(width, DType::F32, &Device::Cpu).unwrap();
            let vector = |seed| noise(&[width], 0.5, seed).unwrap();
            let up = InputWeights {
                matrix: noise(&[inner, width], 0.3, 3).unwrap(),
                bias: noise(&[inner], 0.5, 4).unwrap(),
                gate: None,
                format,
            };
            let down = noise(&[width, inner], 0.3, 5).unwrap();
            let block = ConvolutionBlock {
                convolution: TimeConvolution::new(&filters, &vector(2), 2, true).unwrap(),
                norm: NormParams::new(&zeros, &vector(6), &vector(7), 1e-5).unwrap(),
                feed_forward: FeedForward::new(
                    up,
                    &down,
                    Epilogue::bias(&vector(8)).unwrap(),
                    Activation::Gelu,
                )
                .unwrap(),
            };
            assert!(block.convolution.packed().is_some() && block.feed_forward.packed().is_some());
            let x = noise(&[lengths.iter().sum(), width], 1.0, 9).unwrap();
            let (ours, expected) =
                (block.forward(&x, lengths).unwrap(), block.composed(&x, lengths).unwrap());
            assert_eq!(ours.dims(), x.dims());
            let error = difference(&ours, &expected).unwrap();
            assert!(error < 1e-6, "{lengths:?}: {error}");
        }
    }
}
