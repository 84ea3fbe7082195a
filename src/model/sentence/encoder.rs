//! The network: from the token ids of a batch, whose texts follow each other, to a vector for each token. There
//! is no padding: linear layers see one `[tokens, hidden]` matrix, and only attention knows where a text ends.
//! Owns the weights.

use candle_core::{Device, Result, Tensor};

use super::config::{Family, NetworkConfig};
#[cfg(feature = "cuda")]
use super::kernels::gpu::{
    Plan,
    cuda::{Planned, attends, embed},
};
use super::kernels::{FeedForward, NormParams, Published, SelfAttention, add_norm};
use super::weights::{Table, WORDS, Weights};
use crate::model::LoadError;

type Loaded<T> = std::result::Result<T, LoadError>;

/// The network's weights on one device.
pub struct Encoder {
    /// `[vocabulary, hidden]`.
    words: Table,
    /// `[positions, hidden]`, with the vector of token type 0 added.
    positions: Tensor,
    norm: NormParams,
    layers: Vec<Layer>,
    padding: Option<u32>,
    width: usize,
    /// The number of queries in attention's smallest tile.
    #[cfg(feature = "cuda")]
    smallest_tile: u32,
}

/// One block.
struct Layer {
    attention: SelfAttention,
    feed_forward: FeedForward,
}

/// The names of a block's parts.
struct Names {
    layer: &'static str,
    qkv: [&'static str; 3],
    out: &'static str,
    out_norm: &'static str,
    up: &'static str,
    down: &'static str,
    down_norm: &'static str,
}

const BERT: Names = Names {
    layer: "encoder.layer",
    qkv: ["attention.self.query", "attention.self.key", "attention.self.value"],
    out: "attention.output.dense",
    out_norm: "attention.output.LayerNorm",
    up: "intermediate.dense",
    down: "output.dense",
    down_norm: "output.LayerNorm",
};

const DISTILBERT: Names = Names {
    layer: "transformer.layer",
    qkv: ["attention.q_lin", "attention.k_lin", "attention.v_lin"],
    out: "attention.out_lin",
    out_norm: "sa_layer_norm",
    up: "ffn.lin1",
    down: "ffn.lin2",
    down_norm: "output_layer_norm",
};

/// Reads the parts of one block.
struct Reader<'a> {
    weights: &'a Weights,
    config: &'a NetworkConfig,
    prefix: String,
}

impl Reader<'_> {
    /// The matrix `[to, from]` of a linear layer, and its bias.
    fn linear(&self, name: &str, from: usize, to: usize) -> Loaded<(Tensor, Tensor)> {
        let name = format!("{}.{name}", self.prefix);
        let matrix = self.weights.get(&format!("{name}.weight"), &[to, from])?;
        Ok((matrix, self.weights.get(&format!("{name}.bias"), &[to])?))
    }

    /// The parameters of a norm, with the bias of the linear layer before it.
    fn norm(&self, name: &str, bias: &Tensor) -> Loaded<NormParams> {
        norm(self.weights, self.config, &format!("{}.{name}", self.prefix), bias)
    }

    fn layer(&self, names: &Names) -> Loaded<Layer> {
        let NetworkConfig { hidden, inner, heads, activation, .. } = *self.config;
        let part = |index: usize| self.linear(names.qkv[index], hidden, hidden);
        let qkv = [part(0)?, part(1)?, part(2)?];
        let (out, out_bias) = self.linear(names.out, hidden, hidden)?;
        let (up, up_bias) = self.linear(names.up, hidden, inner)?;
        let (down, down_bias) = self.linear(names.down, inner, hidden)?;
        let out_norm = self.norm(names.out_norm, &out_bias)?;
        let down_norm = self.norm(names.down_norm, &down_bias)?;
        let attention = SelfAttention::new(Published { qkv, out, heads }, out_norm);
        let feed_forward = FeedForward::new((&up, up_bias), &down, down_norm, activation);
        Ok(Layer {
            attention: self.weights.checked(names.out, attention)?,
            feed_forward: self.weights.checked(names.up, feed_forward)?,
        })
    }
}

fn norm(weights: &Weights, config: &NetworkConfig, name: &str, bias: &Tensor) -> Loaded<NormParams> {
    let weight = weights.get(&format!("{name}.weight"), &[config.hidden])?;
    let shift = weights.get(&format!("{name}.bias"), &[config.hidden])?;
    weights.checked(name, NormParams::new(bias, &weight, &shift, config.eps))
}

impl Encoder {
    /// Arranges the weights for the forward pass.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape.
    pub fn load(weights: &Weights, config: &NetworkConfig) -> Loaded<Self> {
        let hidden = config.hidden;
        let words = weights.table(WORDS, [config.vocabulary, hidden])?;
        let name = "embeddings.position_embeddings.weight";
        let mut positions = weights.get(name, &[config.positions, hidden])?;
        if config.token_types > 0 {
            let name = "embeddings.token_type_embeddings.weight";
            let types = weights.get(name, &[config.token_types, hidden])?;
            let sum = types.get(0).and_then(|first| positions.broadcast_add(&first));
            positions = weights.checked(name, sum)?;
        }
        let no_bias = weights.checked("embeddings", positions.get(0).and_then(|row| row.zeros_like()))?;
        let names = if config.family == Family::DistilBert { DISTILBERT } else { BERT };
        let layer =
            |index| Reader { weights, config, prefix: format!("{}.{index}", names.layer) }.layer(&names);
        Ok(Self {
            #[cfg(feature = "cuda")]
            smallest_tile: attends(positions.dtype(), config.heads, hidden / config.heads)
                .map_or(u32::MAX, |heads| heads.queries()),
            words,
            positions,
            width: hidden,
            norm: norm(weights, config, "embeddings.LayerNorm", &no_bias)?,
            layers: (0..config.layers).map(layer).collect::<Loaded<_>>()?,
            padding: config.padding,
        })
    }

    /// The width of a token's vector.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The batch's plan for a GPU's kernels.
    #[cfg(feature = "cuda")]
    pub fn plan(&self, ids: &[u32], lengths: &[usize]) -> Plan {
        Plan::new(ids, &places(ids, lengths, self.padding), lengths, self.smallest_tile)
    }

    /// As [`Encoder::forward`], for a batch whose plan is on the device.
    ///
    /// # Errors
    /// The error of candle or the device.
    #[cfg(feature = "cuda")]
    pub fn forward_planned(&self, planned: &Planned) -> Result<Tensor> {
        let Table::Tensor(words) = &self.words else { candle_core::bail!("the words are not on the GPU") };
        let mut x = match embed([words, &self.positions], planned, self.norm.constants())? {
            Some(x) => x,
            None => {
                let words = words.index_select(&planned.ids()?, 0)?;
                add_norm(words, &self.positions.index_select(&planned.places()?, 0)?, &self.norm)?
            }
        };
        for layer in &self.layers {
            x = layer.attention.forward_planned(x, planned)?;
            x = layer.feed_forward.forward(x)?;
        }
        Ok(x)
    }

    /// The last layer's vectors `[tokens, hidden]` of texts with `lengths` tokens. `ids` has the texts' ids in
    /// a row. Ids must be in the vocabulary, and lengths within the table of positions.
    ///
    /// # Errors
    /// The error of candle or the device.
    pub fn forward(&self, ids: Vec<u32>, lengths: &[usize]) -> Result<Tensor> {
        let device: &Device = self.positions.device();
        let tokens = ids.len();
        let places = Tensor::from_vec(places(&ids, lengths, self.padding), tokens, device)?;
        let words = self.words.select(ids, device)?;
        let mut x = add_norm(words, &self.positions.index_select(&places, 0)?, &self.norm)?;
        for layer in &self.layers {
            x = layer.attention.forward(x, lengths)?;
            x = layer.feed_forward.forward(x)?;
        }
        Ok(x)
    }
}

/// The position of each token. RoBERTa numbers from after its padding id, and does not count tokens with that
/// id, which a text can contain.
fn places(ids: &[u32], lengths: &[usize], padding: Option<u32>) -> Vec<u32> {
    let mut places = Vec::with_capacity(ids.len());
    let mut rest = ids;
    for n in lengths {
        let (text, others) = rest.split_at(*n);
        rest = others;
        let mut next = padding.map_or(0, |id| id + 1);
        for id in text {
            if Some(*id) == padding {
                places.push(*id);
            } else {
                places.push(next);
                next += 1;
            }
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::places;

    #[test]
    fn each_text_has_positions_of_its_own() {
        assert_eq!(places(&[7, 1, 9, 4, 5], &[3, 2], None), [0, 1, 2, 0, 1]);
        assert_eq!(places(&[7, 1, 9, 4, 5], &[3, 2], Some(1)), [2, 1, 3, 2, 3]);
    }
}
