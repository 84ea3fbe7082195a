//! ViT as in the transformers library (`google/vit-base-patch16-224` and its like): patches are tokens, and the blocks
//! are the same as for texts. Owns the weights.

use candle_core::{DType, Result, Tensor};
use serde::Deserialize;

use super::{Backbone, Loaded, Sides};
use crate::model::LoadSpec;
use crate::model::load::weights::Weights;
use crate::model::nets::block::{Blocks, PreNormBlock, PreNormReader};
use crate::model::ops::{Activation, Clamp, Convolution, Filters, Padding};

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
        let reader = PreNormReader { weights, format: weights.matrix_format(), eps: config.layer_norm_eps };
        let block = |index: usize| {
            let prefix = format!("encoder.layer.{index}");
            let has_bias = config.qkv_bias.unwrap_or(true);
            let part = |name: &str| {
                reader.linear(&format!("{prefix}.attention.attention.{name}"), [hidden; 2], has_bias)
            };
            let block = PreNormBlock {
                prefix: &prefix,
                norms: ["layernorm_before", "layernorm_after"],
                out: "attention.output.dense",
                feed_forward: ["intermediate.dense", "output.dense"],
                inner: config.intermediate_size,
                heads,
                activation,
            };
            reader.block(block, [part("query")?, part("key")?, part("value")?])
        };
        let blocks = (0..config.num_hidden_layers).map(block).collect::<Loaded<_>>()?;
        let network = Self {
            patches: weights.checked(name, patches)?,
            cls: weights.checked("embeddings.cls_token", cls)?,
            position_embeddings: weights.checked("embeddings", positions.narrow(1, 1, count))?,
            blocks: Blocks { blocks, last_norm: Some(reader.norm("layernorm", hidden)?) },
            hidden,
        };
        Ok((network, hidden))
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
