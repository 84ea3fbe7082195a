//! The blocks of a transformer's encoder: attention, then feed-forward. Decides where norms and residuals are, and reads
//! the blocks whose norms come before their sublayers and that have no positional terms. Owns the weights.

use candle_core::{Result, Tensor};

use crate::model::LoadError;
use crate::model::load::weights::Weights;
use crate::model::ops::{
    Activation, AttentionWeights, Epilogue, FeedForward, InputWeights, NormParams, NumberFormat,
    PositionTerms, SelfAttention, add, add_norm,
};

type Loaded<T> = std::result::Result<T, LoadError>;

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

/// Reads blocks whose norms come before their sublayers, and the norms beside them.
#[derive(Clone, Copy)]
pub(super) struct PreNormReader<'a> {
    pub weights: &'a Weights,
    /// The number format of matrices.
    pub format: NumberFormat,
    /// Added to the variance of each norm.
    pub eps: f32,
}

/// The sizes of a block, and the names of its layers in the files.
#[derive(Clone, Copy)]
pub(super) struct PreNormBlock<'a> {
    /// The beginning of all names.
    pub prefix: &'a str,
    /// The norms before attention, and before the feed-forward sublayer.
    pub norms: [&'a str; 2],
    /// The output projection of attention.
    pub out: &'a str,
    /// The layers before and after the activation of the feed-forward sublayer.
    pub feed_forward: [&'a str; 2],
    /// The inner width of the feed-forward sublayer.
    pub inner: usize,
    /// Heads of attention.
    pub heads: usize,
    pub activation: Activation,
}

impl PreNormReader<'_> {
    /// A norm of `width` numbers.
    pub fn norm(&self, name: &str, width: usize) -> Loaded<NormParams> {
        let get = |part: &str| self.weights.get(&format!("{name}.{part}"), &[width]);
        // `NormParams` also has the bias of a linear layer before the norm. There is none here.
        let no_bias = self.weights.checked(name, self.weights.zeros(&[width]))?;
        self.weights.checked(name, NormParams::new(&no_bias, &get("weight")?, &get("bias")?, self.eps))
    }

    /// The matrix `[to, from]` of a linear layer, and its bias `[to]`: zeros if it has none.
    pub fn linear(&self, name: &str, [from, to]: [usize; 2], has_bias: bool) -> Loaded<(Tensor, Tensor)> {
        let matrix = self.weights.get(&format!("{name}.weight"), &[to, from])?;
        let bias = match has_bias {
            true => self.weights.get(&format!("{name}.bias"), &[to])?,
            false => self.weights.checked(name, self.weights.zeros(&[to]))?,
        };
        Ok((matrix, bias))
    }

    /// A block with these projections to queries, keys and values, each with its bias.
    pub fn block(&self, block: PreNormBlock<'_>, qkv: [(Tensor, Tensor); 3]) -> Loaded<Block> {
        let PreNormBlock { prefix, norms, out, feed_forward: [up, down], inner, heads, activation } = block;
        let (width, format) = (qkv[0].1.elem_count(), self.format);
        let norm = |name: &str| self.norm(&format!("{prefix}.{name}"), width);
        let linear = |name: &str, shape| self.linear(&format!("{prefix}.{name}"), shape, true);
        let epilogue = |name: &str, bias: &Tensor| self.weights.checked(name, Epilogue::bias(bias));
        let (out_matrix, out_bias) = linear(out, [width, width])?;
        let (up_matrix, up_bias) = linear(up, [width, inner])?;
        let (down_matrix, down_bias) = linear(down, [inner, width])?;
        let position_terms = PositionTerms::default();
        let attention = AttentionWeights { qkv, out: out_matrix, heads, position_terms, format };
        let attention = SelfAttention::new(attention, epilogue(out, &out_bias)?);
        let input = InputWeights { matrix: up_matrix, bias: up_bias, gate: None, format };
        let feed_forward = FeedForward::new(input, &down_matrix, epilogue(down, &down_bias)?, activation);
        Ok(Block {
            pre_norms: Some(PreNorms { attention: Some(norm(norms[0])?), feed_forward: norm(norms[1])? }),
            attention: self.weights.checked(out, attention)?,
            feed_forward: self.weights.checked(down, feed_forward)?,
        })
    }
}
