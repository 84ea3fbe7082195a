//! The blocks of a transformer's encoder: attention, then feed-forward. Decides where norms and residuals are.
//! Owns the weights.

use candle_core::{Result, Tensor};

use crate::model::ops::{FeedForward, NormParams, SelfAttention, add_norm};

/// All blocks.
pub struct Blocks {
    /// In order.
    pub blocks: Vec<Block>,
    /// The norm after the last block, if norms come before their sublayers.
    pub last_norm: Option<NormParams>,
}

/// One block.
pub struct Block {
    /// The norms before the two sublayers; the first block may have none before its attention. None if norms come after
    /// the sublayers, and belong to them.
    pub before: Option<(Option<NormParams>, NormParams)>,
    /// The first sublayer.
    pub attention: SelfAttention,
    /// The second sublayer.
    pub feed_forward: FeedForward,
}

impl Blocks {
    /// Computes all blocks on `x` `[tokens, hidden]`. `attend` applies an attention sublayer, and knows which tokens
    /// belong to one text.
    ///
    /// # Errors
    /// The error of candle or the device.
    pub fn forward(
        &self,
        mut x: Tensor,
        attend: impl Fn(&SelfAttention, Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        for Block { before, attention, feed_forward } in &self.blocks {
            match before {
                None => x = feed_forward.forward(attend(attention, x)?)?,
                Some((attention_norm, feed_forward_norm)) => {
                    x = (&x + attend(attention, normed(&x, attention_norm.as_ref())?)?)?;
                    x = (&x + feed_forward.forward(normed(&x, Some(feed_forward_norm))?)?)?;
                }
            }
        }
        match &self.last_norm {
            Some(norm) => normed(&x, Some(norm)),
            None => Ok(x),
        }
    }
}

/// `x` normed, in new memory; without a norm, a copy of `x`.
pub(super) fn normed(x: &Tensor, norm: Option<&NormParams>) -> Result<Tensor> {
    match norm {
        Some(norm) => add_norm(x.copy()?, &x.zeros_like()?, norm),
        None => x.copy(),
    }
}
