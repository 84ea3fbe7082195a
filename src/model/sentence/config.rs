//! Reads the network's `config.json`: architecture and sizes. Decides which architectures are supported, and
//! refuses those whose numbers would differ from the published model.

use serde::Deserialize;

use super::kernels::Activation;
use crate::model::LoadError;
use crate::model::source::ModelFiles;

/// The architectures; they differ in tensor names and in the first position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `bert`.
    Bert,
    /// `roberta`, `xlm-roberta`, `camembert`: positions start after that of the padding.
    Roberta,
    /// `distilbert`: no token types, and other tensor names.
    DistilBert,
}

impl Family {
    /// The prefix of tensor names if the file was saved from a model with a head.
    pub fn base(self) -> &'static str {
        match self {
            Self::Bert => "bert",
            Self::Roberta => "roberta",
            Self::DistilBert => "distilbert",
        }
    }
}

/// A network's sizes.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// Its architecture.
    pub family: Family,
    /// Width of a token's vector.
    pub hidden: usize,
    /// Blocks of attention and feed-forward.
    pub layers: usize,
    /// Heads in a block.
    pub heads: usize,
    /// Width between the two halves of a feed-forward block.
    pub inner: usize,
    /// Number of token ids.
    pub vocabulary: usize,
    /// Rows of the table of positions.
    pub positions: usize,
    /// RoBERTa's padding id; its positions start after this number.
    pub padding: Option<u32>,
    /// Rows of the table of token types; 0 where there is none.
    pub token_types: usize,
    /// Added to the variance in LayerNorm.
    pub eps: f32,
    /// The function between the two halves of a feed-forward block.
    pub activation: Activation,
}

#[derive(Deserialize)]
struct Written {
    model_type: Option<String>,
    #[serde(alias = "dim")]
    hidden_size: usize,
    #[serde(alias = "n_layers")]
    num_hidden_layers: usize,
    #[serde(alias = "n_heads")]
    num_attention_heads: usize,
    #[serde(alias = "hidden_dim")]
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    #[serde(default)]
    type_vocab_size: usize,
    layer_norm_eps: Option<f32>,
    #[serde(alias = "activation")]
    hidden_act: Option<String>,
    pad_token_id: Option<u32>,
    position_embedding_type: Option<String>,
    #[serde(default)]
    is_decoder: bool,
}

impl NetworkConfig {
    /// Reads the `config.json` of the model `source`.
    ///
    /// # Errors
    /// [`LoadError::File`] for an invalid file, [`LoadError::Unsupported`] naming a property that is not
    /// supported.
    pub fn read(files: &ModelFiles, source: &str) -> Result<Self, LoadError> {
        let path = files.required("config.json")?;
        let written: Written = files.required_json("config.json")?;
        let refused = |reason: String| LoadError::Unsupported { model: source.into(), reason };
        let family = match written.model_type.as_deref() {
            Some("bert") => Family::Bert,
            Some("roberta" | "xlm-roberta" | "camembert") => Family::Roberta,
            Some("distilbert") => Family::DistilBert,
            other => {
                let other = other.unwrap_or("(none)");
                let known = "bert, roberta, xlm-roberta, camembert and distilbert are supported";
                return Err(refused(format!("model_type is {other:?}; {known}")));
            }
        };
        let activation = match written.hidden_act.as_deref() {
            None | Some("gelu") => Activation::Gelu,
            Some("gelu_new" | "gelu_pytorch_tanh") => Activation::GeluTanh,
            Some("relu") => Activation::Relu,
            Some(other) => {
                let known = "gelu, gelu_new, gelu_pytorch_tanh and relu are supported";
                return Err(refused(format!("hidden_act is {other:?}; {known}")));
            }
        };
        if let Some(kind) = written.position_embedding_type.as_deref().filter(|k| *k != "absolute") {
            let reason = format!("position_embedding_type is {kind:?}; \"absolute\" is supported");
            return Err(refused(reason));
        }
        if written.is_decoder {
            return Err(refused("is_decoder is true; encoders are supported".into()));
        }
        let config = written.sized(family, activation);
        config.check().map_err(|reason| LoadError::File { path, reason })?;
        Ok(config)
    }

    /// The most tokens of a text, by the table of positions.
    pub fn max_tokens(&self) -> usize {
        self.positions.saturating_sub(self.padding.map_or(0, |id| id as usize + 1))
    }

    fn check(&self) -> Result<(), String> {
        let Self { hidden, heads, positions, .. } = *self;
        if hidden == 0 || heads == 0 || hidden % heads != 0 {
            return Err(format!("hidden_size {hidden} does not divide into {heads} heads"));
        }
        if self.max_tokens() == 0 {
            return Err(format!("max_position_embeddings is {positions}: no room for a text"));
        }
        Ok(())
    }
}

impl Written {
    fn sized(self, family: Family, activation: Activation) -> NetworkConfig {
        let padding = (family == Family::Roberta).then_some(self.pad_token_id.unwrap_or(1));
        NetworkConfig {
            family,
            hidden: self.hidden_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            inner: self.intermediate_size,
            vocabulary: self.vocab_size,
            positions: self.max_position_embeddings,
            padding,
            token_types: if family == Family::DistilBert { 0 } else { self.type_vocab_size },
            eps: self.layer_norm_eps.unwrap_or(1e-12),
            activation,
        }
    }
}
