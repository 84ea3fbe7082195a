//! The description of a decoder: its sizes, constants and parts. `read` makes it from a model's files, and the network is
//! computed from it alone. A description that cannot be computed is refused here.

use super::architectures::Architecture;
use super::rope::{Refusal, Rotation};
use crate::model::ops::causal::Scoring;
use crate::model::ops::kv::{KvNumbers, KvShape};
use crate::model::ops::{Activation, Rotary, tanh};

/// The description of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Its architecture.
    pub architecture: &'static Architecture,
    /// Its layers.
    pub layers: Vec<LayerConfig>,
    /// The width of a token's vector.
    pub hidden: usize,
    /// The inner width of the feed-forward sublayer of layers without experts.
    pub inner: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; they divide `heads`.
    pub kv_heads: usize,
    /// The width of a head.
    pub head_width: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// The token with which texts of a batch are padded elsewhere. A head for labels does not count it at the end of a text.
    pub padding: Option<u32>,
    /// The largest number of tokens of a sequence.
    pub context: usize,
    /// Added to the mean square of a norm.
    pub eps: f32,
    /// Which linear layers have biases.
    pub biases: Biases,
    /// The function of the gates of the feed-forward sublayer.
    pub activation: Activation,
    /// The experts of the layers that have some.
    pub experts: Option<Experts>,
    /// Whether a token attends only to the tokens up to itself. Otherwise it attends to the tokens on either side, and no
    /// text can be generated.
    pub is_causal: bool,
    /// How heads are rotated. Layers refer to it by its index.
    pub rotations: Vec<Rotation>,
    /// How the queries are multiplied according to their positions.
    pub query_growth: Option<QueryGrowth>,
    /// The factor of the products of queries and keys.
    pub attention_scale: f32,
    /// The bound of the scores of attention: [`Scoring::soft_cap`].
    pub attention_cap: Option<f32>,
    /// The bound c of the logits, each of which becomes c·tanh(logit / c).
    pub logit_cap: Option<f32>,
    /// The factor of token embeddings.
    pub embedding_scale: f32,
    /// The factor of each sublayer's result.
    pub residual_scale: f32,
    /// The divisor of the logits.
    pub logit_divisor: f32,
    /// Whether the token embeddings are also the last layer.
    pub is_tied: bool,
}

/// What distinguishes a layer from the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// A token attends only to tokens whose distance from it is smaller than this. None if there is no limit.
    pub window: Option<usize>,
    /// The index of the rotation of its heads. None if they are not rotated, so that the layer knows no positions.
    pub rotation: Option<usize>,
    /// Whether its feed-forward sublayer has experts.
    pub has_experts: bool,
}

/// Which linear layers have biases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// The projections to queries, keys and values.
    pub qkv: bool,
    /// The output matrix of attention.
    pub out: bool,
    /// The matrices of the feed-forward sublayer.
    pub feed_forward: bool,
}

/// A feed-forward sublayer with experts: each token is computed by some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// The number of experts.
    pub count: usize,
    /// The number of experts that compute a token.
    pub used: usize,
    /// The inner width of an expert.
    pub inner: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub is_normalised: bool,
}

/// Queries at position p are multiplied by 1 + beta·ln(1 + ⌊p / original⌋).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// The factor of the logarithm.
    pub beta: f32,
    /// The number of positions between two steps.
    pub original: usize,
}

impl QueryGrowth {
    /// The factor of a query at `position`.
    pub fn at(&self, position: usize) -> f32 {
        1.0 + self.beta * ((1 + position / self.original) as f32).ln()
    }
}

/// The largest sizes that are accepted. They are far above those of any model, but their products do not overflow. A
/// wrong size is detected by the shape of a tensor, before more than about 100 MB are allocated.
pub(super) const MAX_LAYERS: usize = 1 << 16;
/// Also the largest width of a head.
pub(super) const MAX_HEADS: usize = 1 << 16;
const MAX_WIDTH: usize = 1 << 24;
const MAX_VOCABULARY: usize = 1 << 22;
const MAX_CONTEXT: usize = 1 << 31;
const MAX_EXPERTS: usize = 1 << 12;

impl DecoderConfig {
    /// How the scores of a layer become weights.
    pub fn scoring(&self, layer: &LayerConfig) -> Scoring {
        Scoring { scale: self.attention_scale, window: layer.window, soft_cap: self.attention_cap }
    }

    /// The largest number of tokens that a token attends to in any layer. None if there is no limit.
    pub fn window(&self) -> Option<usize> {
        self.layers.iter().map(|layer| layer.window).try_fold(0, |most, window| Some(most.max(window?)))
    }

    /// The width of the queries of a token.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_width
    }

    /// The width of the keys, and of the values, of a token.
    pub fn key_width(&self) -> usize {
        self.kv_heads * self.head_width
    }

    /// The shape of the keys and values of one token.
    pub fn kv_shape(&self, numbers: KvNumbers) -> KvShape {
        KvShape { layers: self.layers.len(), heads: self.kv_heads, width: self.head_width, numbers }
    }

    /// The tables of its rotations, for pools whose sequences have up to `context` tokens.
    pub fn rotaries(&self, context: usize) -> Vec<Rotary> {
        self.rotations.iter().map(|rotation| rotation.table(self.head_width, context)).collect()
    }

    /// Turns the last layer's results into logits.
    pub fn finish_logits(&self, logits: &mut [f32]) {
        if self.logit_divisor != 1.0 {
            logits.iter_mut().for_each(|logit| *logit /= self.logit_divisor);
        }
        if let Some(cap) = self.logit_cap {
            logits.iter_mut().for_each(|logit| *logit /= cap);
            tanh(logits);
            logits.iter_mut().for_each(|logit| *logit *= cap);
        }
    }

    /// Checks that the description can be computed.
    ///
    /// # Errors
    /// The property that is impossible, with its value.
    pub(super) fn checked(self) -> Result<Self, Refusal> {
        let Self { hidden, heads, kv_heads, head_width, .. } = self;
        for (name, size, max) in [
            ("the number of heads", heads, MAX_HEADS),
            ("the number of heads of keys", kv_heads, MAX_HEADS),
            ("the number of layers", self.layers.len(), MAX_LAYERS),
            ("the width", hidden, MAX_WIDTH),
            ("the width of the feed-forward sublayer", self.inner, MAX_WIDTH),
            ("the vocabulary", self.vocabulary, MAX_VOCABULARY),
            ("the context", self.context, MAX_CONTEXT),
        ] {
            at_most(name, size, max)?;
            if size == 0 {
                return Err(format!("{name} is 0"));
            }
        }
        if heads % kv_heads != 0 {
            return Err(format!("{heads} heads of queries cannot share {kv_heads} heads of keys"));
        }
        if head_width == 0 || head_width % 2 != 0 {
            return Err(format!("heads of {head_width} numbers cannot be rotated in pairs"));
        }
        if let Some(window) = self.layers.iter().find_map(|layer| layer.window.filter(|window| *window == 0))
        {
            return Err(format!("sliding_window is {window}, so no token could attend to any"));
        }
        self.checked_experts()?;
        for (name, number) in [
            ("rms_norm_eps", self.eps),
            ("attention_scale", self.attention_scale),
            ("the factor of embeddings", self.embedding_scale),
            ("residual_multiplier", self.residual_scale),
            ("logits_scaling", self.logit_divisor),
            ("attn_logit_softcapping", self.attention_cap.unwrap_or(1.0)),
            ("final_logit_softcapping", self.logit_cap.unwrap_or(1.0)),
        ] {
            if !number.is_finite() || number <= 0.0 {
                return Err(format!("{name} is {number}, and must be a number above 0"));
            }
        }
        Ok(self)
    }

    fn checked_experts(&self) -> Result<(), Refusal> {
        let Some(Experts { count, used, inner, .. }) = self.experts else { return Ok(()) };
        at_most("num_experts", count, MAX_EXPERTS)?;
        at_most("moe_intermediate_size", inner, MAX_WIDTH)?;
        if used == 0 || used > count {
            return Err(format!("num_experts_per_tok is {used}, and num_experts {count}"));
        }
        if inner == 0 { Err("moe_intermediate_size is 0".to_owned()) } else { Ok(()) }
    }
}

/// Checks a size.
///
/// # Errors
/// The size is above `max`.
pub(super) fn at_most(name: &str, size: usize, max: usize) -> Result<(), Refusal> {
    if size > max { Err(format!("{name} is {size}; at most {max} is read")) } else { Ok(()) }
}
