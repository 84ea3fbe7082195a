//! The text encoder of a diffusion model: CLIP's, whose vectors of all tokens are used. That of candle-transformers has
//! fixed sizes, and the wrong GELU for version 2.1.

use candle_core::{D, DType, Result as CandleResult, Tensor};
use candle_nn::{
    Activation, Embedding, LayerNorm, Linear, Module, VarBuilder, embedding, layer_norm, linear, ops,
};
use serde::Deserialize;

/// `text_encoder/config.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct TextConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    /// The number of tokens of a prompt, special ones and padding included.
    pub max_position_embeddings: usize,
    #[serde(default = "quick_gelu")]
    pub hidden_act: String,
    #[serde(default = "default_eps")]
    pub layer_norm_eps: f64,
}

fn quick_gelu() -> String {
    "quick_gelu".to_owned()
}

fn default_eps() -> f64 {
    1e-5
}

impl TextConfig {
    /// Refuses what is not computed as published.
    ///
    /// # Errors
    /// The setting, with its value.
    pub fn check(&self) -> Result<(), String> {
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        if heads == 0 || hidden == 0 || !hidden.is_multiple_of(heads) {
            return Err(format!("hidden_size {hidden} cannot be divided among {heads} heads"));
        }
        self.activation().map(drop)
    }

    fn activation(&self) -> Result<QuickOrExact, String> {
        match self.hidden_act.as_str() {
            "quick_gelu" => Ok(QuickOrExact::Quick),
            "gelu" => Ok(QuickOrExact::Exact),
            other => Err(format!("hidden_act is {other:?}; quick_gelu and gelu are supported")),
        }
    }
}

/// The two forms of GELU.
#[derive(Clone, Copy, Debug)]
enum QuickOrExact {
    /// x · sigmoid(1.702 x), of version 1.5.
    Quick,
    /// By the error function, of version 2.1.
    Exact,
}

/// The network.
pub struct TextEncoder {
    tokens: Embedding,
    /// `[tokens, hidden]`.
    positions: Tensor,
    layers: Vec<Layer>,
    norm: LayerNorm,
    /// `[tokens, tokens]`: a token attends to itself and to those before it.
    mask: Tensor,
}

struct Layer {
    norm_1: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm_2: LayerNorm,
    up: Linear,
    down: Linear,
    activation: QuickOrExact,
    heads: usize,
}

impl TextEncoder {
    /// Loads the network from the tensors of transformers' `CLIPTextModel`.
    ///
    /// # Errors
    /// A tensor is missing, or has another shape.
    pub fn load(builder: &VarBuilder<'_>, config: &TextConfig) -> CandleResult<Self> {
        // Recent versions of transformers save no prefix.
        let has_prefix = builder.contains_tensor("text_model.final_layer_norm.weight");
        let builder = if has_prefix { builder.pp("text_model") } else { builder.clone() };
        let (hidden, count) = (config.hidden_size, config.max_position_embeddings);
        let embeddings = builder.pp("embeddings");
        let layer = |index: usize| Layer::load(&builder.pp("encoder.layers").pp(index), config);
        // Found missing before memory is taken for the mask.
        let positions = embeddings.get((count, hidden), "position_embedding.weight")?;
        let mask: Vec<f32> = (0..count)
            .flat_map(|row| (0..count).map(move |column| if column > row { f32::NEG_INFINITY } else { 0.0 }))
            .collect();
        Ok(Self {
            tokens: embedding(config.vocab_size, hidden, embeddings.pp("token_embedding"))?,
            positions,
            layers: (0..config.num_hidden_layers).map(layer).collect::<CandleResult<_>>()?,
            norm: layer_norm(hidden, config.layer_norm_eps, builder.pp("final_layer_norm"))?,
            mask: Tensor::from_vec(mask, (count, count), builder.device())?,
        })
    }

    /// The vectors of the tokens of prompts: `[prompts, tokens, hidden]` from `[prompts, tokens]`.
    ///
    /// # Errors
    /// The device fails.
    pub fn forward(&self, ids: &Tensor) -> CandleResult<Tensor> {
        let mut x = self.tokens.forward(ids)?.broadcast_add(&self.positions)?;
        for layer in &self.layers {
            x = layer.forward(&x, &self.mask)?;
        }
        self.norm.forward(&x)
    }
}

impl Layer {
    fn load(builder: &VarBuilder<'_>, config: &TextConfig) -> CandleResult<Self> {
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.layer_norm_eps);
        let attention = builder.pp("self_attn");
        let activation = config.activation().map_err(candle_core::Error::msg)?;
        Ok(Self {
            norm_1: layer_norm(hidden, eps, builder.pp("layer_norm1"))?,
            query: linear(hidden, hidden, attention.pp("q_proj"))?,
            key: linear(hidden, hidden, attention.pp("k_proj"))?,
            value: linear(hidden, hidden, attention.pp("v_proj"))?,
            output: linear(hidden, hidden, attention.pp("out_proj"))?,
            norm_2: layer_norm(hidden, eps, builder.pp("layer_norm2"))?,
            up: linear(hidden, inner, builder.pp("mlp.fc1"))?,
            down: linear(inner, hidden, builder.pp("mlp.fc2"))?,
            activation,
            heads: config.num_attention_heads,
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> CandleResult<Tensor> {
        let x = (x + self.attend(&self.norm_1.forward(x)?, mask)?)?;
        let inner = self.up.forward(&self.norm_2.forward(&x)?)?;
        let inner = match self.activation {
            QuickOrExact::Quick => (&inner * ops::sigmoid(&(&inner * 1.702)?)?)?,
            QuickOrExact::Exact => Activation::Gelu.forward(&inner)?,
        };
        x + self.down.forward(&inner)?
    }

    /// Attention, with scores in f32.
    fn attend(&self, x: &Tensor, mask: &Tensor) -> CandleResult<Tensor> {
        let (prompts, tokens, hidden) = x.dims3()?;
        let width = hidden / self.heads;
        let by_head = |projected: Tensor| {
            projected
                .reshape((prompts, tokens, self.heads, width))?
                .transpose(1, 2)?
                .contiguous()?
                .to_dtype(DType::F32)
        };
        let query = (by_head(self.query.forward(x)?)? / (width as f64).sqrt())?;
        let key = by_head(self.key.forward(x)?)?;
        let value = by_head(self.value.forward(x)?)?;
        let scores = query.matmul(&key.t()?)?.broadcast_add(mask)?;
        let mixed = ops::softmax(&scores, D::Minus1)?.matmul(&value)?.to_dtype(x.dtype())?;
        self.output.forward(&mixed.transpose(1, 2)?.reshape((prompts, tokens, hidden))?)
    }
}
