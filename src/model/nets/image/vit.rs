//! ViT as in the transformers library (`google/vit-base-patch16-224` and its like): patches are tokens, and the blocks
//! are the same as for texts. Owns the weights.

use candle_core::{DType, Result, Tensor};
use serde::Deserialize;

use super::{Backbone, Loaded, Sides};
use crate::model::load::weights::Weights;
use crate::model::nets::block::{Block, Blocks, PreNorms};
use crate::model::ops::{
    Activation, AttentionWeights, Clamp, Convolution, Epilogue, FeedForward, Filters, InputWeights,
    NormParams, Padding, PositionTerms, SelfAttention,
};
use crate::model::{LoadError, LoadSpec};

/// The sizes of `config.json`.
#[derive(Deserialize)]
pub(super) struct Config {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    intermediate_size: usize,
    image_size: usize,
    patch_size: usize,
    hidden_act: String,
    layer_norm_eps: f32,
    qkv_bias: Option<bool>,
}

impl Config {
    /// The widths of the rows of its matrices, with their names.
    pub(super) fn widths(&self) -> [(&'static str, usize); 2] {
        [("hidden", self.hidden_size), ("inner", self.intermediate_size)]
    }
}

/// The network.
pub(super) struct Vit {
    patches: Convolution,
    /// The embedding of the CLS token plus its position embedding: `[1, 1, hidden]`.
    cls: Tensor,
    /// The position embeddings of the patches: `[1, patches, hidden]`.
    position_embeddings: Tensor,
    blocks: Blocks,
    hidden: usize,
}

impl Vit {
    /// The network, and the width of its vectors.
    pub(super) fn load(
        weights: &Weights,
        config: &Config,
        sides: Sides,
        spec: &LoadSpec,
    ) -> Loaded<(Self, usize)> {
        let Config { hidden_size: hidden, image_size, patch_size: patch, .. } = *config;
        if sides != (Sides { height: image_size, width: image_size }) {
            let Sides { height, width } = sides;
            let reason = format!(
                "preprocessor_config.json makes images of {width}x{height} pixels, and image_size is {image_size}"
            );
            return Err(spec.unsupported(reason));
        }
        let heads = config.num_attention_heads;
        if patch == 0 || heads == 0 || hidden % heads != 0 {
            let reason = format!(
                "hidden_size {hidden} with {heads} heads and patches of {patch} pixels is no valid ViT"
            );
            return Err(spec.unsupported(reason));
        }
        let activation = match config.hidden_act.as_str() {
            "gelu" => Activation::Gelu,
            "gelu_new" | "gelu_pytorch_tanh" => Activation::GeluTanh,
            other => {
                return Err(
                    spec.unsupported(format!("hidden_act is {other:?}; gelu and gelu_new are supported"))
                );
            }
        };
        let name = "embeddings.patch_embeddings.projection";
        let projection = weights.get(&format!("{name}.weight"), &[hidden, 3, patch, patch])?;
        let bias = weights.get(&format!("{name}.bias"), &[hidden])?;
        let patches = Convolution::new(&Filters {
            weights: &projection,
            bias: &bias,
            stride: patch,
            padding: Padding::Each(0),
            clamp: Clamp::NONE,
            is_depthwise: false,
        });
        let count = (image_size / patch).pow(2);
        let cls = weights.get("embeddings.cls_token", &[1, 1, hidden])?;
        let positions = weights.get("embeddings.position_embeddings", &[1, count + 1, hidden])?;
        let cls = positions.narrow(1, 0, 1).and_then(|position| cls + position);
        let reader = Reader { weights, config, activation };
        let blocks = (0..config.num_hidden_layers).map(|index| reader.block(index)).collect::<Loaded<_>>()?;
        let network = Self {
            patches: weights.checked(name, patches)?,
            cls: weights.checked("embeddings.cls_token", cls)?,
            position_embeddings: weights.checked("embeddings", positions.narrow(1, 1, count))?,
            blocks: Blocks { blocks, last_norm: Some(reader.norm("layernorm")?) },
            hidden,
        };
        Ok((network, hidden))
    }
}

struct Reader<'a> {
    weights: &'a Weights,
    config: &'a Config,
    activation: Activation,
}

impl Reader<'_> {
    fn norm(&self, name: &str) -> Loaded<NormParams> {
        let hidden = self.config.hidden_size;
        let get = |part: &str| self.weights.get(&format!("{name}.{part}"), &[hidden]);
        let no_bias = self.weights.checked(name, self.weights.zeros(&[hidden]))?;
        let norm = NormParams::new(&no_bias, &get("weight")?, &get("bias")?, self.config.layer_norm_eps);
        self.weights.checked(name, norm)
    }

    fn block(&self, index: usize) -> Loaded<Block> {
        let Config { hidden_size: hidden, intermediate_size: inner, num_attention_heads: heads, .. } =
            *self.config;
        let named = |name: &str| format!("encoder.layer.{index}.{name}");
        let matrix = |name: &str, from, to| self.weights.get(&format!("{}.weight", named(name)), &[to, from]);
        let bias = |name: &str, to| self.weights.get(&format!("{}.bias", named(name)), &[to]);
        let has_bias = self.config.qkv_bias.unwrap_or(true);
        let part = |name: &str| {
            let name = format!("attention.attention.{name}");
            let bias = match has_bias {
                true => bias(&name, hidden)?,
                false => self.weights.checked(&name, self.weights.zeros(&[hidden]))?,
            };
            Ok::<_, LoadError>((matrix(&name, hidden, hidden)?, bias))
        };
        let (out, up, down) = ("attention.output.dense", "intermediate.dense", "output.dense");
        let qkv = [part("query")?, part("key")?, part("value")?];
        let (position_terms, format) = (PositionTerms::default(), self.weights.matrix_format());
        let attention_weights =
            AttentionWeights { qkv, out: matrix(out, hidden, hidden)?, heads, position_terms, format };
        let epilogue = |name: &str| self.weights.checked(name, Epilogue::bias(&bias(name, hidden)?));
        let attention = SelfAttention::new(attention_weights, epilogue(out)?);
        let input =
            InputWeights { matrix: matrix(up, hidden, inner)?, bias: bias(up, inner)?, gate: None, format };
        let feed_forward =
            FeedForward::new(input, &matrix(down, inner, hidden)?, epilogue(down)?, self.activation);
        Ok(Block {
            pre_norms: Some(PreNorms {
                attention: Some(self.norm(&named("layernorm_before"))?),
                feed_forward: self.norm(&named("layernorm_after"))?,
            }),
            attention: self.weights.checked(out, attention)?,
            feed_forward: self.weights.checked(down, feed_forward)?,
        })
    }
}

impl Backbone for Vit {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let patches = self.patches.forward(x)?.flatten(1, 2)?;
        let (images, count, _) = patches.dims3()?;
        let patches = patches.broadcast_add(&self.position_embeddings)?;
        let cls = self.cls.broadcast_as((images, 1, self.hidden))?;
        let tokens = Tensor::cat(&[&cls, &patches], 1)?.flatten(0, 1)?;
        let lengths = vec![count + 1; images];
        let out = self.blocks.forward(tokens, |attention, x| attention.forward(x, &lengths))?;
        out.reshape((images, count + 1, self.hidden))?.narrow(1, 0, 1)?.squeeze(1)?.to_dtype(DType::F32)
    }
}
