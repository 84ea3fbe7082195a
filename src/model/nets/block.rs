//! The blocks of a transformer's encoder: attention, then feed-forward. Decides where norms and residuals are.
//! Owns the weights.

use candle_core::{Result, Tensor};

use crate::model::ops::{FeedForward, NormParams, SelfAttention, add, add_norm};

/// All blocks.
pub struct Blocks {
    /// In order.
    pub blocks: Vec<Block>,
    /// The norm after the last block, if norms come before their sublayers.
    pub last_norm: Option<NormParams>,
}

/// One block.
pub struct Block {
    /// The norms before the sublayers. None if norms come after the sublayers, and belong to them.
    pub pre_norms: Option<PreNorms>,
    /// The first sublayer.
    pub attention: SelfAttention,
    /// The second sublayer.
    pub feed_forward: FeedForward,
}

/// The norms before a block's two sublayers.
pub struct PreNorms {
    /// Before attention. The first block may have none.
    pub attention: Option<NormParams>,
    /// Before the feed-forward sublayer.
    pub feed_forward: NormParams,
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
        for Block { pre_norms, attention, feed_forward } in &self.blocks {
            match pre_norms {
                None => x = feed_forward.forward(attend(attention, x)?)?,
                Some(norms) => {
                    x = add(attend(attention, normed(&x, norms.attention.as_ref())?)?, &x)?;
                    x = add(feed_forward.forward(normed(&x, Some(&norms.feed_forward))?)?, &x)?;
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
        Some(norm) => add_norm(x.zeros_like()?, x, norm),
        None => x.copy(),
    }
}
