//! A block of ConvNeXt over time: x + feed-forward(LayerNorm(depthwise convolution of x)). Computes blocks of frames, so
//! that the numbers between the steps stay in a near cache.

use std::cell::RefCell;

use super::add_norm::{Epilogue, Norm, layer_norm};
use super::feed_forward::FeedForward;
use super::gemm::by_blocks;
use super::time_convolution::{TimeConvolution, sequences};

/// The weights of a block.
pub struct ConvolutionBlock<'a> {
    /// A depthwise convolution; another one panics.
    pub convolution: &'a TimeConvolution,
    /// The bias that it adds before norming is not used; it must be 0.
    pub norm: &'a Norm,
    /// The two products.
    pub feed_forward: &'a FeedForward,
    /// The bias of the second product, `[width]`.
    pub bias: &'a [f32],
}

thread_local! {
    /// The convolved frames. Reused by the next block: new memory costs a page fault every 4 KiB.
    static CONVOLVED: RefCell<Vec<f32>> = RefCell::default();
}

impl ConvolutionBlock<'_> {
    /// `[frames, width]` from `x` `[frames, width]`. `lengths` are the numbers of frames of the sequences; their sum is
    /// `frames`. In parallel if there are several threads.
    pub fn forward(&self, x: &[f32], lengths: &[usize]) -> Vec<f32> {
        let width = self.norm.width();
        let (weight, shift) = self.norm.rows[width..].split_at(width);
        let sequences = sequences(lengths);
        let mut out = vec![0.0; x.len()];
        by_blocks(&mut out, width, |first, out| {
            let mut convolved = CONVOLVED.take();
            convolved.resize(out.len(), 0.0);
            self.convolution.depthwise_block(x, &sequences, first, &mut convolved);
            layer_norm(&convolved, weight, shift, self.norm.eps, out);
            CONVOLVED.set(convolved);
            self.feed_forward.forward_block(out, Epilogue::Bias(self.bias));
            out.iter_mut().zip(&x[first * width..]).for_each(|(out, x)| *out += x);
        });
        out
    }
}
