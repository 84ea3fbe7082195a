//! Sparse vectors of SPLADE. The head of `…ForMaskedLM` computes a logit for each token of a text and each token of the
//! vocabulary. Pooling over the text's tokens leaves one number for each token of the vocabulary. Decides the names of
//! the head's tensors, and which numbers of a vector are kept. The network runs on its device, the head on the host in
//! f32. Owns the head's weights.
//!
//! The logits of a whole text never exist at once: they would take 60 MB for 512 tokens and BERT's vocabulary. They are
//! computed and pooled in tiles, and only the numbers that are not 0 leave this file.

use std::sync::Arc;

use candle_core::Device;

use super::config::{Family, NetworkConfig};
use super::{Output, TextNetwork};
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::{TextTokenizer, Tokens};
use crate::model::load::weights::{NumberFormats, Weights};
use crate::model::nets::held::{Held, Share};
use crate::model::ops::{Activation, Panels, activate, in_parallel, layer_norm, multiply_rows};
use crate::model::{Forward, ForwardError, LoadError, LoadSpec, TaskError, TaskErrorKind};

/// Tokens of the vocabulary in a tile of logits: their weights fit into a core's cache.
const TILE_COLUMNS: usize = 1_024;
/// Tokens of a text in a tile of logits, which takes 256 KiB.
const TILE_ROWS: usize = 64;
/// Texts whose vectors are pooled together. Each takes four bytes for each token of the vocabulary until its numbers are
/// chosen. More texts together read the weights less often.
const TEXTS_TOGETHER: usize = 16;
/// The most numbers in all vectors of a task. Each takes at most 40 bytes of the reply, so the reply has less than 16
/// MiB, the largest message that RabbitMQ 4 accepts by default.
const MAX_NUMBERS: usize = 400_000;

/// How the logits of a text's tokens become one number for each token of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparsePooling {
    /// Whether the numbers of the tokens are added; otherwise the largest is taken.
    pub sums: bool,
    /// How often log(1 + x) is applied to max(logit, 0): once (`relu`) or twice (`log1p_relu`).
    pub logarithms: usize,
}

impl SparsePooling {
    /// Applies the activation to a logit. The result is not NaN unless the logit is.
    fn activate(self, logit: f32) -> f32 {
        if logit <= 0.0 { 0.0 } else { (0..self.logarithms).fold(logit, |x, _| x.ln_1p()) }
    }
}

/// Which numbers of its vectors a task keeps. It also counts the numbers that its vectors have together.
#[derive(Debug, Default)]
pub struct Selection {
    /// The most numbers of a vector: the largest are kept, and of equal ones the first.
    pub top_k: Option<usize>,
    /// The smallest number that is kept.
    pub threshold: f32,
    held: Held,
}

impl Selection {
    /// Keeps the `top_k` largest numbers of a vector that are not below `threshold`.
    pub fn new(top_k: Option<usize>, threshold: f32) -> Self {
        Self { top_k, threshold, held: Held::default() }
    }

    /// The count of numbers in the task's vectors that exist now.
    pub fn held(&self) -> usize {
        self.held.total()
    }

    /// Makes a vector of the numbers that are kept. `numbers` has one for each token of the vocabulary.
    ///
    /// # Errors
    /// `Internal` if a number is not finite, `TooLarge` if the task's vectors have too many numbers together.
    fn vector(&self, numbers: impl Iterator<Item = f32>) -> Result<SparseVector, TaskError> {
        let mut pairs: Vec<(u32, f32)> = Vec::new();
        for (index, number) in numbers.enumerate() {
            if !number.is_finite() {
                return Err(TaskError::internal(format!("the model gave {number} for token {index}")));
            }
            if number > 0.0 && number >= self.threshold {
                pairs.push((index as u32, number));
            }
        }
        if let Some(count) = self.top_k.filter(|count| *count < pairs.len()) {
            pairs.select_nth_unstable_by(count, |(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
            pairs.truncate(count);
            pairs.sort_unstable_by_key(|(index, _)| *index);
        }
        // The space of numbers that were left out would stay allocated until the reply is written.
        pairs.shrink_to_fit();
        let share = self.held.add(pairs.len());
        if self.held() > MAX_NUMBERS {
            let message = format!(
                "the sparse vectors of the texts have more than {MAX_NUMBERS} numbers together; send fewer texts, or a \
                 smaller top_k or a larger threshold"
            );
            return Err(TaskError::new(TaskErrorKind::TooLarge, message));
        }
        Ok(SparseVector { pairs, _share: share })
    }
}

/// One text, with what its task keeps of its vector.
pub struct SparseInput {
    /// The text.
    pub tokens: Tokens,
    /// The selection of its task.
    pub selection: Arc<Selection>,
}

/// The numbers of a text's vector that are kept.
#[derive(Debug)]
pub struct SparseVector {
    /// Tokens of the vocabulary, in ascending order, and their numbers, all above 0.
    pairs: Vec<(u32, f32)>,
    _share: Share,
}

impl SparseVector {
    /// Tokens of the vocabulary, in ascending order, and their numbers, all above 0.
    pub fn pairs(&self) -> &[(u32, f32)] {
        &self.pairs
    }
}

/// The names of a head's tensors, and its activation.
pub struct HeadNames {
    dense: &'static str,
    activation: Activation,
    norm: &'static str,
    /// The linear layer to the vocabulary, which the reference library calls a decoder.
    projection: &'static str,
    bias: &'static str,
}

impl HeadNames {
    /// The names for a network's architecture. None if its head is not supported.
    pub fn of(config: &NetworkConfig) -> Option<Self> {
        Some(match config.family {
            Family::Bert => Self {
                dense: "cls.predictions.transform.dense",
                activation: config.activation,
                norm: "cls.predictions.transform.LayerNorm",
                projection: "cls.predictions.decoder",
                bias: "cls.predictions.bias",
            },
            Family::DistilBert => Self {
                dense: "vocab_transform",
                activation: config.activation,
                norm: "vocab_layer_norm",
                projection: "vocab_projector",
                bias: "vocab_projector.bias",
            },
            Family::Roberta | Family::MpNet => Self {
                dense: "lm_head.dense",
                activation: Activation::Gelu,
                norm: "lm_head.layer_norm",
                projection: "lm_head.decoder",
                bias: "lm_head.bias",
            },
            Family::ModernBert => Self {
                dense: "head.dense",
                activation: Activation::Gelu,
                norm: "head.norm",
                projection: "decoder",
                bias: "decoder.bias",
            },
            Family::Nomic | Family::Electra | Family::Deberta | Family::T5 => return None,
        })
    }
}

/// How a head makes vectors.
pub struct SparseHead {
    /// How its logits become numbers.
    pub pooling: SparsePooling,
    /// Its tensors.
    pub names: HeadNames,
    /// Whether it may use the matrix of the token embeddings. Otherwise it must have one of its own.
    pub is_tied: bool,
}

/// The head of `…ForMaskedLM`.
struct MaskedHead {
    dense: Panels,
    dense_bias: Vec<f32>,
    activation: Activation,
    norm: Vec<f32>,
    norm_shift: Vec<f32>,
    eps: f32,
    /// The linear layer to the vocabulary in blocks of [`TILE_COLUMNS`] tokens; the last may have fewer.
    projection: Vec<VocabularyBlock>,
}

/// The part of the linear layer for some tokens of the vocabulary.
struct VocabularyBlock {
    weights: Panels,
    bias: Vec<f32>,
}

impl MaskedHead {
    /// Reads the head. The projection's matrix is that of the token embeddings, unless it has one of its own in the
    /// files. Without `is_tied` it must have its own.
    ///
    /// The bias has two names in the reference library. If the head is tied, they mean one tensor, and most files have
    /// only the second. If the two differ, the library uses the first. If the head is not tied, it uses the first alone,
    /// and zeros in its place.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape.
    fn load(
        weights: &Weights,
        config: &NetworkConfig,
        names: &HeadNames,
        is_tied: bool,
    ) -> Result<Self, LoadError> {
        let NetworkConfig { hidden, vocabulary, family, eps, .. } = *config;
        let of_weight = |name: &str| format!("{name}.weight");
        let bias_of = |name: &str| match family {
            Family::ModernBert => Ok(vec![0.0; hidden]),
            _ => weights.values(&format!("{name}.bias"), &[hidden]),
        };
        let own_matrix = of_weight(names.projection);
        let matrix = if weights.has(&own_matrix) || !is_tied {
            own_matrix
        } else {
            format!("{}{}", weights.prefix(), family.token_embeddings())
        };
        let own_bias = format!("{}.bias", names.projection);
        let bias = if weights.has(&own_bias) {
            weights.values(&own_bias, &[vocabulary])?
        } else if is_tied || names.bias == own_bias {
            weights.values(names.bias, &[vocabulary])?
        } else {
            tracing::warn!("the files have no {own_bias}; it is zero, as in the transformers library");
            vec![0.0; vocabulary]
        };
        let matrix = weights.values(&matrix, &[vocabulary, hidden])?;
        let blocks = matrix.chunks(TILE_COLUMNS * hidden).zip(bias.chunks(TILE_COLUMNS));
        let block = |(columns, bias): (&[f32], &[f32])| VocabularyBlock {
            weights: Panels::new(columns, hidden),
            bias: bias.to_vec(),
        };
        Ok(Self {
            dense: Panels::new(&weights.values(&of_weight(names.dense), &[hidden, hidden])?, hidden),
            dense_bias: bias_of(names.dense)?,
            activation: names.activation,
            norm: weights.values(&of_weight(names.norm), &[hidden])?,
            norm_shift: bias_of(names.norm)?,
            eps,
            projection: blocks.map(block).collect(),
        })
    }

    /// The vectors `[tokens, hidden]` that are multiplied by the vocabulary, from those of the network.
    fn transformed(&self, rows: &[f32]) -> Vec<f32> {
        let mut dense = vec![0.0; rows.len()];
        multiply_rows(rows, &self.dense, &mut dense, |_, block| {
            activate(block, &self.dense_bias, self.activation);
        });
        let mut normed = vec![0.0; rows.len()];
        layer_norm(&dense, &self.norm, &self.norm_shift, self.eps, &mut normed);
        normed
    }

    /// Pools the logits of texts, given the network's vectors `[tokens, hidden]` of each. The result is
    /// `[blocks, texts, TILE_COLUMNS]`; numbers after the end of the vocabulary are 0.
    fn pooled(&self, texts: &[&[f32]], pooling: SparsePooling) -> Vec<f32> {
        let texts: Vec<Vec<f32>> = texts.iter().map(|rows| self.transformed(rows)).collect();
        let mut pooled = vec![0.0; self.projection.len() * texts.len() * TILE_COLUMNS];
        let blocks = self.projection.iter().zip(pooled.chunks_exact_mut(texts.len() * TILE_COLUMNS));
        in_parallel(blocks, |(block, pooled)| {
            let mut logits = vec![0.0; TILE_ROWS * TILE_COLUMNS];
            for (rows, pooled) in texts.iter().zip(pooled.chunks_exact_mut(TILE_COLUMNS)) {
                block.pool(rows, pooling, &mut logits, &mut pooled[..block.bias.len()]);
            }
        });
        pooled
    }
}

impl VocabularyBlock {
    /// Pools the logits of a text's tokens `rows` `[tokens, hidden]` into `pooled`, which holds zeros. `logits` is
    /// memory that is overwritten.
    fn pool(&self, rows: &[f32], pooling: SparsePooling, logits: &mut [f32], pooled: &mut [f32]) {
        let width = self.bias.len();
        for rows in rows.chunks(TILE_ROWS * self.weights.depth()) {
            let logits = &mut logits[..rows.len() / self.weights.depth() * width];
            multiply_rows(rows, &self.weights, logits, |_, _| ());
            for row in logits.chunks_exact(width) {
                let logits = row.iter().zip(&self.bias).map(|(x, bias)| x + bias);
                let all = pooled.iter_mut().zip(logits);
                if pooling.sums {
                    all.for_each(|(sum, logit)| *sum += pooling.activate(logit));
                } else {
                    // `f32::max` would drop NaN.
                    all.for_each(|(largest, logit)| {
                        if logit > *largest || logit.is_nan() {
                            *largest = logit;
                        }
                    });
                }
            }
        }
        if !pooling.sums {
            pooled.iter_mut().for_each(|number| *number = pooling.activate(*number));
        }
    }
}

/// An encoder with the head of `…ForMaskedLM`, which computes a sparse vector for each text.
pub struct SparseNetwork {
    tokens: TextNetwork,
    head: MaskedHead,
    pooling: SparsePooling,
}

impl SparseNetwork {
    /// Loads the network onto its device, and compares its results with those of a CPU, as [`TextNetwork::load`] does.
    ///
    /// # Errors
    /// As [`TextNetwork::load`].
    pub(in crate::model) fn load(
        spec: &LoadSpec,
        device: &Device,
        files: &ModelFiles,
        config: &NetworkConfig,
        tokenizer: &TextTokenizer,
        head: &SparseHead,
    ) -> Result<Self, LoadError> {
        let tokens = TextNetwork::load_encoder(spec, device, files, config, tokenizer, &Output::Tokens)?;
        let (base, marker) = (config.family.base(), config.family.token_embeddings());
        let weights = Weights::read(&files.weights()?, base, marker, &Device::Cpu, NumberFormats::F32)?;
        let SparseHead { pooling, names, is_tied } = head;
        Ok(Self { tokens, head: MaskedHead::load(&weights, config, names, *is_tied)?, pooling: *pooling })
    }

    /// The vectors of texts, given the network's vectors of the tokens of each.
    fn vectors(&self, inputs: &[&SparseInput], rows: &[&[f32]]) -> Vec<Result<SparseVector, TaskError>> {
        let mut vectors = Vec::with_capacity(inputs.len());
        for (inputs, rows) in inputs.chunks(TEXTS_TOGETHER).zip(rows.chunks(TEXTS_TOGETHER)) {
            let pooled = self.head.pooled(rows, self.pooling);
            for (index, input) in inputs.iter().enumerate() {
                let tiles = pooled.chunks_exact(TILE_COLUMNS).skip(index).step_by(inputs.len());
                vectors.push(input.selection.vector(tiles.flatten().copied()));
            }
        }
        vectors
    }
}

impl Forward for SparseNetwork {
    type Input = SparseInput;
    type Output = SparseVector;
    type Pending = Vec<Result<SparseVector, TaskError>>;

    fn submit(&mut self, inputs: &[&SparseInput]) -> Result<Self::Pending, ForwardError> {
        let texts: Vec<&Tokens> = inputs.iter().map(|input| &input.tokens).collect();
        let computed = self.tokens.forward(&texts)?;
        let good: Vec<(&SparseInput, &[f32])> = inputs
            .iter()
            .zip(&computed)
            .filter_map(|(input, rows)| Some((*input, &**rows.as_ref().ok()?)))
            .collect();
        let (good_inputs, rows): (Vec<_>, Vec<_>) = good.into_iter().unzip();
        let mut vectors = self.vectors(&good_inputs, &rows).into_iter();
        let outputs = computed.into_iter().map(|rows| match rows {
            Ok(_) => vectors.next().unwrap_or_else(|| Err(TaskError::internal("a vector is missing"))),
            Err(error) => Err(error),
        });
        Ok(outputs.collect())
    }

    fn wait(&mut self, pending: Self::Pending) -> Result<Self::Pending, ForwardError> {
        Ok(pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of which many are 0 and many are equal.
    fn numbers(seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_769).wrapping_add(1);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 16
        };
        let count = next() % 200;
        (0..count).map(|_| (next() % 17).saturating_sub(8) as f32 / 4.0).collect()
    }

    fn pairs(selection: Selection, numbers: &[f32]) -> Vec<(u32, f32)> {
        selection.vector(numbers.iter().copied()).unwrap().pairs().to_vec()
    }

    #[test]
    fn all_numbers_above_0_are_kept_in_the_order_of_their_tokens() {
        for seed in 0..100 {
            let numbers = numbers(seed);
            let expected: Vec<(u32, f32)> =
                (0..).zip(numbers.iter().copied()).filter(|(_, number)| *number > 0.0).collect();
            assert_eq!(pairs(Selection::default(), &numbers), expected, "{seed}");
        }
    }

    #[test]
    fn top_k_keeps_the_largest_and_of_equal_ones_the_first_and_threshold_those_not_below_it() {
        for seed in 0..300 {
            let numbers = numbers(seed);
            let (top_k, threshold) = (1 + seed as usize % 60, (seed % 5) as f32 / 4.0);
            let mut expected: Vec<(u32, f32)> = (0..).zip(numbers.iter().copied()).collect();
            expected.retain(|(_, number)| *number > 0.0 && *number >= threshold);
            // The sort is stable.
            expected.sort_by(|(_, a), (_, b)| b.total_cmp(a));
            expected.truncate(top_k);
            expected.sort_by_key(|(index, _)| *index);
            assert_eq!(pairs(Selection::new(Some(top_k), threshold), &numbers), expected, "{seed}");
        }
    }

    #[test]
    fn the_numbers_of_a_task_are_bounded_together_and_vectors_that_are_gone_do_not_count() {
        let selection = Selection::default();
        let ones = |count: usize| std::iter::repeat_n(1.0, count);
        let first = selection.vector(ones(MAX_NUMBERS - 10)).unwrap();
        let last = selection.vector(ones(10)).unwrap();
        let error = selection.vector(ones(1)).unwrap_err();
        assert_eq!(error.kind, TaskErrorKind::TooLarge);
        assert!(error.message.contains("more than 400000 numbers together"), "{error}");
        assert_eq!(selection.held(), MAX_NUMBERS);
        drop(first);
        assert_eq!(selection.held(), 10);
        assert!(selection.vector(ones(100)).is_ok());
        drop(last);
        assert_eq!(selection.held(), 0);
        let other = Selection::new(Some(3), 0.0);
        assert_eq!(other.vector(ones(MAX_NUMBERS + 1)).unwrap().pairs(), [(0, 1.0), (1, 1.0), (2, 1.0)]);
    }

    #[test]
    fn a_number_that_is_not_finite_is_an_error_in_either_pooling() {
        for (sums, bad) in
            [(false, f32::NAN), (true, f32::NAN), (false, f32::INFINITY), (true, f32::INFINITY)]
        {
            let pooling = SparsePooling { sums, logarithms: 1 };
            let block = VocabularyBlock { weights: Panels::new(&[1.0, 1.0], 1), bias: vec![0.0, 1.0] };
            let (mut logits, mut pooled) = ([0.0; 6], [0.0; 2]);
            block.pool(&[1.0, bad, 2.0], pooling, &mut logits, &mut pooled);
            let error = Selection::default().vector(pooled.into_iter()).unwrap_err();
            assert_eq!(error.kind, TaskErrorKind::Internal, "{sums} {bad}");
        }
    }
}
