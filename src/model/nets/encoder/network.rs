//! The network computes a vector for each token from the token ids of a batch. Texts follow each other without padding:
//! linear layers see one `[tokens, hidden]` matrix, and only attention knows where a text ends. Owns the weights.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};

use super::config::{DISTANCE_BUCKETS, Family, LayerPositionTerms, NetworkConfig};
use super::relative_positions::RelativeReader;
use crate::model::LoadError;
use crate::model::load::tokenizer::Tokens;
use crate::model::load::weights::{Table, Weights};
use crate::model::nets::block::{Block, Blocks, PreNorms};
#[cfg(feature = "cuda")]
use crate::model::ops::gpu::{
    Plan,
    cuda::{Planned, embed, heads_with_kernel},
};
use crate::model::ops::{
    AttentionWeights, Epilogue, FeedForward, InputWeights, NormParams, NumberFormat, PositionTerms,
    RelativeBias, Rotary, SelfAttention, TimeConvolution, add_norm,
};

type Loaded<T> = std::result::Result<T, LoadError>;

/// The number of token types in a batch: one for each text of a pair.
const TOKEN_TYPES: usize = 2;

/// The network's weights on one device.
pub struct Encoder {
    /// `[vocabulary, hidden]`.
    token_embeddings: Table,
    /// The sums of a position embedding and a token type embedding: `[types·positions, hidden]`, where the positions
    /// of type 0 come first. The second text of a pair has type 1. Without position embeddings, one row for each type.
    position_embeddings: Tensor,
    /// How the positions of a text's tokens are counted.
    counting: Counting,
    /// Rows of `position_embeddings` for one type; 0 if there is only one type.
    positions_of_type: usize,
    /// The norm of the embeddings.
    norm: Option<NormParams>,
    projection: Option<Projection>,
    blocks: Blocks,
    width: usize,
    /// The number of queries in the smallest tile of attention.
    #[cfg(feature = "cuda")]
    smallest_tile: u32,
}

/// A linear layer that projects embeddings to the width of the layers.
struct Projection {
    layer: TimeConvolution,
    /// Whether it projects the embeddings of tokens before those of positions are added, which are projected when the
    /// network is loaded. Otherwise it projects their normed sums.
    is_first: bool,
}

impl Projection {
    fn load(reader: &Reader<'_>) -> Loaded<Self> {
        let Reader { weights, config: NetworkConfig { hidden, embedding, family, .. }, zeros } = reader;
        let is_first = *family == Family::Deberta;
        let name = if is_first { "embeddings.embed_proj" } else { "embeddings_project" };
        let (matrix, bias) = match is_first {
            true => (weights.get(&format!("{name}.weight"), &[*hidden, *embedding])?, zeros.clone()),
            false => reader.linear(name, *embedding, *hidden)?,
        };
        let layer = TimeConvolution::linear(&matrix, &bias, NumberFormat::F32);
        Ok(Self { layer: weights.checked(name, layer)?, is_first })
    }
}

/// How the positions of a text's tokens are counted.
#[derive(Clone, Copy)]
enum Counting {
    /// They are not counted, since there are no position embeddings: all are 0.
    None,
    /// They are counted from 0.
    FromZero,
    /// They are counted from the number after this padding id. Tokens with that id, which a text can contain, get the id
    /// itself as their position, and are not counted.
    AfterPadding(u32),
}

/// The names of a block's tensors.
struct Names {
    layer: &'static str,
    qkv: Qkv,
    out: &'static str,
    out_norm: &'static str,
    up: InputMatrices,
    down: &'static str,
    down_norm: &'static str,
}

/// The matrices of queries, keys and values.
enum Qkv {
    Separate([&'static str; 3]),
    /// One matrix: queries, then keys, then values.
    Joined(&'static str),
}

/// The matrices by which a feed-forward sublayer multiplies its input: the one before the activation, and the gate.
enum InputMatrices {
    Plain(&'static str),
    /// Two matrices: the one before the activation, then the gate.
    Gated([&'static str; 2]),
    /// Both in one matrix, in the same order.
    Joined(&'static str),
}

fn names(family: Family, is_gated: bool) -> Names {
    match family {
        Family::Bert | Family::Roberta | Family::Electra => Names {
            layer: "encoder.layer",
            qkv: Qkv::Separate(["attention.self.query", "attention.self.key", "attention.self.value"]),
            out: "attention.output.dense",
            out_norm: "attention.output.LayerNorm",
            up: InputMatrices::Plain("intermediate.dense"),
            down: "output.dense",
            down_norm: "output.LayerNorm",
        },
        Family::DistilBert => Names {
            layer: "transformer.layer",
            qkv: Qkv::Separate(["attention.q_lin", "attention.k_lin", "attention.v_lin"]),
            out: "attention.out_lin",
            out_norm: "sa_layer_norm",
            up: InputMatrices::Plain("ffn.lin1"),
            down: "ffn.lin2",
            down_norm: "output_layer_norm",
        },
        Family::MpNet => Names {
            layer: "encoder.layer",
            qkv: Qkv::Separate(["attention.attn.q", "attention.attn.k", "attention.attn.v"]),
            out: "attention.attn.o",
            out_norm: "attention.LayerNorm",
            up: InputMatrices::Plain("intermediate.dense"),
            down: "output.dense",
            down_norm: "output.LayerNorm",
        },
        Family::Nomic => Names {
            layer: "encoder.layers",
            qkv: Qkv::Joined("attn.Wqkv"),
            out: "attn.out_proj",
            out_norm: "norm1",
            up: InputMatrices::Gated(["mlp.fc12", "mlp.fc11"]),
            down: "mlp.fc2",
            down_norm: "norm2",
        },
        Family::ModernBert => Names {
            layer: "layers",
            qkv: Qkv::Joined("attn.Wqkv"),
            out: "attn.Wo",
            out_norm: "attn_norm",
            up: InputMatrices::Joined("mlp.Wi"),
            down: "mlp.Wo",
            down_norm: "mlp_norm",
        },
        Family::T5 => Names {
            layer: "encoder.block",
            qkv: Qkv::Separate([
                "layer.0.SelfAttention.q",
                "layer.0.SelfAttention.k",
                "layer.0.SelfAttention.v",
            ]),
            out: "layer.0.SelfAttention.o",
            out_norm: "layer.0.layer_norm",
            up: match is_gated {
                true => InputMatrices::Gated(["layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1"]),
                false => InputMatrices::Plain("layer.1.DenseReluDense.wi"),
            },
            down: "layer.1.DenseReluDense.wo",
            down_norm: "layer.1.layer_norm",
        },
        Family::Deberta => Names {
            qkv: Qkv::Separate([
                "attention.self.query_proj",
                "attention.self.key_proj",
                "attention.self.value_proj",
            ]),
            ..names(Family::Bert, is_gated)
        },
    }
}

/// The name of the norm of the embeddings, if there is one.
fn embeddings_norm(family: Family) -> Option<&'static str> {
    match family {
        Family::Nomic => Some("emb_ln"),
        Family::ModernBert => Some("embeddings.norm"),
        Family::T5 => None,
        _ => Some("embeddings.LayerNorm"),
    }
}

/// The name of the norm after the last layer, if norms come before their sublayers.
fn last_norm(family: Family) -> Option<&'static str> {
    match family {
        Family::ModernBert => Some("final_norm"),
        Family::T5 => Some("encoder.final_layer_norm"),
        _ => None,
    }
}

/// Reads a network's tensors.
struct Reader<'a> {
    weights: &'a Weights,
    config: &'a NetworkConfig,
    /// `[hidden]`: replaces a bias that the files do not have.
    zeros: Tensor,
}

impl Reader<'_> {
    /// The matrix `[to, from]` of a linear layer, and its bias `[to]`: zeros if the architecture has none.
    fn linear(&self, name: &str, from: usize, to: usize) -> Loaded<(Tensor, Tensor)> {
        let matrix = self.weights.get(&format!("{name}.weight"), &[to, from])?;
        let bias = match self.config.family {
            Family::Nomic | Family::ModernBert | Family::T5 => {
                self.weights.checked(name, self.zeros_of(to))?
            }
            _ => self.weights.get(&format!("{name}.bias"), &[to])?,
        };
        Ok((matrix, bias))
    }

    fn zeros_of(&self, width: usize) -> Result<Tensor> {
        Tensor::zeros(width, self.zeros.dtype(), self.zeros.device())
    }

    /// The parameters of a norm, with the bias of the linear layer before it.
    fn norm(&self, name: &str, bias: &Tensor) -> Loaded<NormParams> {
        let width = bias.elem_count();
        let weight = self.weights.get(&format!("{name}.weight"), &[width])?;
        let shift = match self.config.family {
            // Its layers have no biases.
            Family::T5 => return self.weights.checked(name, NormParams::rms(&weight, self.config.eps)),
            Family::ModernBert => self.zeros.clone(),
            _ => self.weights.get(&format!("{name}.bias"), &[width])?,
        };
        self.weights.checked(name, NormParams::new(bias, &weight, &shift, self.config.eps))
    }

    /// Rows `part·height..(part + 1)·height` of a matrix.
    fn part(&self, name: &str, matrix: &Tensor, part: usize, height: usize) -> Loaded<Tensor> {
        let rows = matrix.narrow(0, part * height, height).and_then(|rows| rows.contiguous());
        self.weights.checked(name, rows)
    }

    fn layer(&self, index: usize, position_terms: PositionTerms) -> Loaded<Block> {
        let NetworkConfig { hidden, inner, heads, activation, family, is_gated, .. } = *self.config;
        let (names, format) = (names(family, is_gated), self.weights.matrix_format());
        let named = |name: &str| format!("{}.{index}.{name}", names.layer);
        let mut qkv = match names.qkv {
            Qkv::Separate(names) => {
                let part = |index: usize| self.linear(&named(names[index]), hidden, hidden);
                let [mut queries, keys, values] = [part(0)?, part(1)?, part(2)?];
                if family == Family::T5 {
                    // Its scores are not divided by the square root of the width of a head.
                    let factor = ((hidden / heads) as f64).sqrt();
                    queries.0 = self.weights.checked(names[0], queries.0 * factor)?;
                }
                [queries, keys, values]
            }
            Qkv::Joined(name) => {
                let (matrix, _) = self.linear(&named(name), hidden, 3 * hidden)?;
                let part = |index| {
                    Ok::<_, LoadError>((self.part(name, &matrix, index, hidden)?, self.zeros.clone()))
                };
                [part(0)?, part(1)?, part(2)?]
            }
        };
        if let Some(deberta) = self.config.deberta {
            // Attention divides by the root of a head's width.
            let scale = 1.0 / (deberta.score_terms as f64).sqrt();
            let (matrix, bias) = &mut qkv[0];
            *matrix = self.weights.checked("query_proj", &*matrix * scale)?;
            *bias = self.weights.checked("query_proj", &*bias * scale)?;
        }
        let (up, up_bias, gate) = match names.up {
            InputMatrices::Plain(name) => {
                let (up, bias) = self.linear(&named(name), hidden, inner)?;
                (up, bias, None)
            }
            InputMatrices::Gated([up, gate]) => {
                let (up, bias) = self.linear(&named(up), hidden, inner)?;
                (up, bias, Some(self.linear(&named(gate), hidden, inner)?.0))
            }
            InputMatrices::Joined(name) => {
                let (both, _) = self.linear(&named(name), hidden, 2 * inner)?;
                let bias = self.weights.checked(name, self.zeros_of(inner))?;
                (self.part(name, &both, 0, inner)?, bias, Some(self.part(name, &both, 1, inner)?))
            }
        };
        let (out, out_bias) = self.linear(&named(names.out), hidden, hidden)?;
        let (down, down_bias) = self.linear(&named(names.down), inner, hidden)?;
        let out_norm = || self.norm(&named(names.out_norm), &out_bias);
        let down_norm = self.norm(&named(names.down_norm), &down_bias)?;
        let (pre_norms, [out_epilogue, down_epilogue]) = if last_norm(family).is_some() {
            let has_norm = index > 0 || family == Family::T5;
            let out_norm = has_norm.then(out_norm).transpose()?;
            let bias = || self.weights.checked(names.out, Epilogue::bias(&self.zeros));
            (Some(PreNorms { attention: out_norm, feed_forward: down_norm }), [bias()?, bias()?])
        } else {
            (None, [Epilogue::Norm(out_norm()?), Epilogue::Norm(down_norm)])
        };
        let attention =
            SelfAttention::new(AttentionWeights { qkv, out, heads, position_terms, format }, out_epilogue);
        let input = InputWeights { matrix: up, bias: up_bias, gate, format };
        let feed_forward = FeedForward::new(input, &down, down_epilogue, activation);
        Ok(Block {
            pre_norms,
            attention: self.weights.checked(names.out, attention)?,
            feed_forward: self.weights.checked(names.down, feed_forward)?,
        })
    }

    /// The positional terms of each layer. Layers share their tables.
    fn position_terms(&self) -> Loaded<Vec<PositionTerms>> {
        let NetworkConfig { heads, hidden, family, .. } = *self.config;
        let longest = self.config.max_tokens();
        let bias = match family {
            Family::MpNet | Family::T5 => {
                let name = match family {
                    Family::T5 => "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                    _ => "encoder.relative_attention_bias.weight",
                };
                let name = format!("{}{name}", self.weights.prefix());
                let table = self.weights.values(&name, &[DISTANCE_BUCKETS, heads])?;
                let bucket_bias = |head: usize, distance: isize| table[bucket(distance) * heads + head];
                Some(Arc::new(RelativeBias::new(heads, longest, bucket_bias)))
            }
            _ => None,
        };
        let mut rotaries: Vec<(f64, Arc<Rotary>)> = Vec::new();
        let mut shared_rotary = |base: f64| match rotaries.iter().find(|(known, _)| *known == base) {
            Some((_, rotary)) => rotary.clone(),
            None => {
                let rotary = Arc::new(Rotary::new(base, hidden / heads, longest));
                rotaries.push((base, rotary.clone()));
                rotary
            }
        };
        let layer = |layer: &LayerPositionTerms| PositionTerms {
            bias: bias.clone(),
            rotary: layer.rotary.map(&mut shared_rotary),
            window: layer.window,
            disentangled: None,
        };
        let mut layers: Vec<_> = self.config.position_terms.iter().map(layer).collect();
        if let Some(relative) = RelativeReader::new(self.weights, self.config)? {
            for (index, layer) in layers.iter_mut().enumerate() {
                layer.disentangled = Some(Arc::new(relative.layer(index)?));
            }
        }
        Ok(layers)
    }
}

/// The bucket of a distance, which is the key's position minus the query's. Distances below 8 have a bucket each,
/// larger ones share buckets, and all from 91 on share the last. The second half of the buckets is for keys after the
/// query.
fn bucket(distance: isize) -> usize {
    /// The first distance of each shared bucket.
    const FIRST: [usize; 8] = [8, 12, 16, 23, 32, 46, 64, 91];
    let size = distance.unsigned_abs();
    let after = if distance > 0 { DISTANCE_BUCKETS / 2 } else { 0 };
    after + if size < FIRST[0] { size } else { 7 + FIRST.iter().filter(|first| **first <= size).count() }
}

impl Encoder {
    /// Reads the weights and prepares them for the forward pass.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape.
    pub fn load(weights: &Weights, config: &NetworkConfig) -> Loaded<Self> {
        let NetworkConfig { hidden, family, positions: position_count, .. } = *config;
        let width = config.embedding;
        let token_embeddings = weights.table(family.token_embeddings(), [config.vocabulary, width])?;
        let mut position_embeddings = match config.has_positions() {
            true => weights.get("embeddings.position_embeddings.weight", &[position_count, width])?,
            false => weights.checked("embeddings", weights.zeros(&[1, width]))?,
        };
        if config.token_types > 0 {
            let name = "embeddings.token_type_embeddings.weight";
            let types = weights.get(name, &[config.token_types, width])?;
            let sums = (0..config.token_types.min(TOKEN_TYPES))
                .map(|id| position_embeddings.broadcast_add(&types.get(id)?));
            let sums = sums.collect::<Result<Vec<_>>>().and_then(|sums| Tensor::cat(&sums, 0));
            position_embeddings = weights.checked(name, sums)?;
        }
        let zeros = weights.checked("embeddings", weights.zeros(&[hidden]))?;
        let reader = Reader { weights, config, zeros };
        let layers = reader.position_terms()?.into_iter().enumerate();
        let last_norm = last_norm(family).map(|name| reader.norm(name, &reader.zeros));
        let norm = embeddings_norm(family).map(|name| {
            // DeBERTa's norm follows the projection.
            let width = if family == Family::Deberta { hidden } else { width };
            let zeros = weights.checked(name, weights.zeros(&[width]))?;
            reader.norm(name, &zeros)
        });
        let projection = (width != hidden).then(|| Projection::load(&reader));
        let projection = projection.transpose()?;
        if let Some(Projection { layer, is_first: true }) = &projection {
            let rows =
                position_embeddings.dim(0).and_then(|rows| layer.forward(&position_embeddings, &[rows]));
            position_embeddings = weights.checked("embeddings", rows)?;
        }
        Ok(Self {
            #[cfg(feature = "cuda")]
            smallest_tile: heads_with_kernel(
                position_embeddings.dtype(),
                config.heads,
                hidden / config.heads,
            )
            .map_or(u32::MAX, |heads| heads.queries_per_warp()),
            token_embeddings,
            counting: match config.padding {
                Some(id) => Counting::AfterPadding(id),
                None if config.has_positions() => Counting::FromZero,
                None => Counting::None,
            },
            positions_of_type: match (config.token_types >= TOKEN_TYPES, config.has_positions()) {
                (false, _) => 0,
                (true, true) => position_count,
                (true, false) => 1,
            },
            position_embeddings,
            width: hidden,
            norm: norm.transpose()?,
            projection,
            blocks: Blocks {
                blocks: layers
                    .map(|(index, position_terms)| reader.layer(index, position_terms))
                    .collect::<Loaded<_>>()?,
                last_norm: last_norm.transpose()?,
            },
        })
    }

    /// The width of a token's vector.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The batch's plan for the GPU's kernels.
    #[cfg(feature = "cuda")]
    pub fn plan(&self, texts: &[&Tokens], lengths: &[usize]) -> Plan {
        Plan::new(&ids(texts), &self.positions(texts), lengths, self.smallest_tile)
    }

    /// As [`Encoder::forward`], for a batch whose plan is on the device.
    ///
    /// # Errors
    /// The error of candle or the device.
    #[cfg(feature = "cuda")]
    pub fn forward_planned(&self, planned: &Planned) -> Result<Tensor> {
        let Table::Tensor(token_embeddings) = &self.token_embeddings else {
            candle_core::bail!("the embeddings are not on the GPU")
        };
        let tables = [token_embeddings, &self.position_embeddings];
        let fused = match (&self.norm, &self.projection) {
            (None, _) | (_, Some(Projection { is_first: true, .. })) => None,
            (Some(norm), _) => embed(tables, planned, norm.constants())?,
        };
        let x = match fused {
            Some(x) => self.projected(x, false, &planned.lengths)?,
            None => self.embedded(
                token_embeddings.index_select(&planned.ids()?, 0)?,
                &self.position_embeddings.index_select(&planned.positions()?, 0)?,
                &planned.lengths,
            )?,
        };
        self.blocks.forward(x, |attention, x| attention.forward_planned(x, planned))
    }

    /// The last layer's vectors `[tokens, hidden]` of texts with `lengths` tokens. Ids must be in the vocabulary, and
    /// lengths must not exceed the positions of the model.
    ///
    /// # Errors
    /// The error of candle or the device.
    pub fn forward(&self, texts: &[&Tokens], lengths: &[usize]) -> Result<Tensor> {
        let device: &Device = self.position_embeddings.device();
        let positions = self.positions(texts);
        let positions = Tensor::from_slice(&positions, positions.len(), device)?;
        let token_embeddings = self.token_embeddings.select(ids(texts), device)?;
        let x =
            self.embedded(token_embeddings, &self.position_embeddings.index_select(&positions, 0)?, lengths)?;
        self.blocks.forward(x, |attention, x| attention.forward(x, lengths))
    }

    /// The input of the first layer.
    fn embedded(&self, tokens: Tensor, positions: &Tensor, lengths: &[usize]) -> Result<Tensor> {
        let tokens = self.projected(tokens, true, lengths)?;
        let x = match &self.norm {
            Some(norm) => add_norm(tokens, positions, norm)?,
            // Then there are no positions either.
            None => tokens,
        };
        self.projected(x, false, lengths)
    }

    /// Projects `x`, if that is the place of the projection.
    fn projected(&self, x: Tensor, is_first: bool, lengths: &[usize]) -> Result<Tensor> {
        match &self.projection {
            Some(projection) if projection.is_first == is_first => projection.layer.forward(&x, lengths),
            _ => Ok(x),
        }
    }

    /// The row of each token in `position_embeddings`.
    fn positions(&self, texts: &[&Tokens]) -> Vec<u32> {
        let mut positions = Vec::with_capacity(texts.iter().map(|text| text.ids.len()).sum());
        for text in texts {
            let begin = positions.len();
            add_positions(&text.ids, self.counting, &mut positions);
            // Models without a second type do not distinguish the texts of a pair.
            positions[begin + text.second..]
                .iter_mut()
                .for_each(|position| *position += self.positions_of_type as u32);
        }
        positions
    }
}

/// The ids of all texts, one text after the other.
fn ids(texts: &[&Tokens]) -> Vec<u32> {
    texts.iter().flat_map(|text| &text.ids).copied().collect()
}

/// Appends the position of each token of a text to `positions`.
fn add_positions(text: &[u32], counting: Counting, positions: &mut Vec<u32>) {
    match counting {
        Counting::None => positions.extend(text.iter().map(|_| 0)),
        Counting::FromZero => positions.extend(0..text.len() as u32),
        Counting::AfterPadding(padding) => {
            let mut last = padding;
            positions.extend(text.iter().map(|id| {
                if *id == padding {
                    return padding;
                }
                last += 1;
                last
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Counting, add_positions, bucket};

    #[test]
    fn positions_start_anew_for_each_text() {
        let positions = |counting| {
            let mut all = Vec::new();
            add_positions(&[7, 1, 9], counting, &mut all);
            add_positions(&[4, 5], counting, &mut all);
            all
        };
        assert_eq!(positions(Counting::FromZero), [0, 1, 2, 0, 1]);
        assert_eq!(positions(Counting::AfterPadding(1)), [2, 1, 3, 2, 3]);
        assert_eq!(positions(Counting::None), [0; 5]);
    }

    #[test]
    fn larger_distances_share_buckets() {
        for (distance, expected) in
            [(0, 0), (-7, 7), (-8, 8), (-11, 8), (-12, 9), (-91, 15), (-500, 15), (1, 17), (128, 31)]
        {
            assert_eq!(bucket(distance), expected, "{distance}");
        }
        // The reference's formula, away from the limits, where rounding decides.
        for size in [9_u32, 14, 20, 27, 40, 50, 70, 100, 300] {
            let large = 8 + ((f64::from(size) / 8.0).ln() / 16_f64.ln() * 8.0) as usize;
            assert_eq!(bucket(-(size as isize)), large.min(15), "{size}");
        }
    }
}
