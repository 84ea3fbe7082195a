//! The classification heads: they compute one number for each label, before softmax or sigmoid, from a text's pooled
//! vector (`…ForSequenceClassification`) or from the vector of each token (`…ForTokenClassification`). They run on the
//! host in f32, since a head takes a thousandth of the network's time. Owns the head's weights.

use candle_core::cpu::erf::erf_f64;

use super::config::{Family, NetworkConfig};
use crate::model::LoadError;
use crate::model::load::weights::Weights;
use crate::model::nets::decoder::config::DecoderConfig;
use crate::model::ops::{Panels, multiply_rows};

type Activation = fn(f32) -> f32;

/// A linear layer with one output for each label. Some heads have another linear layer with an activation before it,
/// and ModernBERT's a norm between them.
pub struct Head {
    dense: Option<(Linear, Activation)>,
    norm: Option<Norm>,
    out: Linear,
    /// Set if the outputs are logits of tokens. Then the score is the first logit, minus the second one if there are
    /// two.
    logits_of: Option<DecoderConfig>,
}

/// A norm of rows.
pub struct Norm {
    pub weights: Vec<f32>,
    pub bias: Vec<f32>,
    pub eps: f64,
}

/// A linear layer, `[depth, width]`.
pub struct Linear {
    pub weights: Panels,
    pub bias: Vec<f32>,
}

impl Head {
    /// Reads the head of a network for pooled vectors, for `labels` labels.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape. T5's head needs
    /// T5's decoder and is not supported: it is read under BERT's names, which T5's files do not have.
    pub fn load(weights: &Weights, config: &NetworkConfig, labels: usize) -> Result<Self, LoadError> {
        let pooler = format!("{}pooler.dense", weights.prefix());
        let (dense, activation, out): (_, Activation, _) = match config.family {
            // There is no public Nomic model with a head.
            Family::Bert | Family::Nomic | Family::T5 => (pooler.as_str(), f32::tanh, "classifier"),
            Family::Roberta | Family::MpNet => ("classifier.dense", f32::tanh, "classifier.out_proj"),
            Family::Electra => ("classifier.dense", gelu, "classifier.out_proj"),
            // `f32::max` would drop NaN.
            Family::DistilBert => ("pre_classifier", |x| if x < 0.0 { 0.0 } else { x }, "classifier"),
            Family::ModernBert => ("head.dense", gelu, "classifier"),
            Family::Deberta => ("pooler.dense", gelu, "classifier"),
        };
        Self::read(weights, config, Some((dense, activation)), out, labels)
    }

    /// Reads the head of a network for the vectors of tokens, for `labels` labels.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn of_tokens(weights: &Weights, config: &NetworkConfig, labels: usize) -> Result<Self, LoadError> {
        let dense: Option<(&str, Activation)> = match config.family {
            Family::ModernBert => Some(("head.dense", gelu)),
            _ => None,
        };
        Self::read(weights, config, dense, "classifier", labels)
    }

    fn read(
        weights: &Weights,
        config: &NetworkConfig,
        dense: Option<(&str, Activation)>,
        out: &str,
        labels: usize,
    ) -> Result<Self, LoadError> {
        let hidden = config.hidden;
        let is_modern = config.family == Family::ModernBert;
        let linear = |name: &str, width: usize| {
            let matrix = weights.values(&format!("{name}.weight"), &[width, hidden])?;
            let bias = match name {
                // ModernBERT's has no bias.
                "head.dense" => vec![0.0; width],
                _ => weights.values(&format!("{name}.bias"), &[width])?,
            };
            Ok::<_, LoadError>(Linear { weights: Panels::new(&matrix, hidden), bias })
        };
        let norm = is_modern.then(|| weights.values("head.norm.weight", &[hidden])).transpose()?;
        let norm = norm.map(|weights| Norm { weights, bias: vec![0.0; hidden], eps: config.eps.into() });
        let dense = dense.map(|(name, activation)| Ok::<_, LoadError>((linear(name, hidden)?, activation)));
        Ok(Self { dense: dense.transpose()?, norm, out: linear(out, labels)?, logits_of: None })
    }

    /// The head of a decoder: `rows` are `[labels, hidden]`. There is no bias.
    pub fn of_rows(rows: &[f32], hidden: usize) -> Self {
        let out = Linear { weights: Panels::new(rows, hidden), bias: vec![0.0; rows.len() / hidden] };
        Self { dense: None, norm: None, out, logits_of: None }
    }

    /// The head that computes the score of a decoder from the logits of one token, or of two. `rows` are those of the
    /// output projection, `[tokens, hidden]`.
    pub fn of_logits(rows: &[f32], config: &DecoderConfig) -> Self {
        Self { logits_of: Some(config.clone()), ..Self::of_rows(rows, config.hidden) }
    }

    /// The number of labels.
    pub fn labels(&self) -> usize {
        self.out.bias.len()
    }

    /// Computes a number for each label, or the score, from each row. An item of `vectors` may have several rows, one
    /// after the other. The result has one item for each row.
    pub fn apply(&self, vectors: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let mut inner = vectors.concat();
        if let Some((dense, activation)) = &self.dense {
            inner = dense.apply(&inner, *activation);
        }
        if let Some(norm) = &self.norm {
            inner.chunks_exact_mut(norm.weights.len()).for_each(|row| norm.apply(row));
        }
        let mut outputs = self.out.apply(&inner, |x| x);
        let outputs = outputs.chunks_exact_mut(self.labels());
        match &self.logits_of {
            None => outputs.map(|row| row.to_vec()).collect(),
            Some(config) => {
                let score = |logits: &mut [f32]| {
                    config.finish_logits(logits);
                    logits[0] - logits.get(1).copied().unwrap_or_default()
                };
                outputs.map(|logits| vec![score(logits)]).collect()
            }
        }
    }
}

/// x·Φ(x), by the error function.
pub(super) fn gelu(x: f32) -> f32 {
    let x = f64::from(x);
    (0.5 * x * (1.0 + erf_f64(x * std::f64::consts::FRAC_1_SQRT_2))) as f32
}

impl Norm {
    /// Normalises a row.
    pub(super) fn apply(&self, row: &mut [f32]) {
        let count = row.len() as f64;
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / count;
        let variance = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / count;
        let scale = 1.0 / (variance + self.eps).sqrt();
        row.iter_mut().zip(&self.weights).zip(&self.bias).for_each(|((x, weight), bias)| {
            *x = ((f64::from(*x) - mean) * scale) as f32 * weight + bias;
        });
    }
}

impl Linear {
    /// activation(rows · weights + bias).
    pub fn apply(&self, rows: &[f32], activation: Activation) -> Vec<f32> {
        let width = self.bias.len();
        let mut out = vec![0.0; rows.len() / self.weights.depth() * width];
        multiply_rows(rows, &self.weights, &mut out, |_, block| {
            for row in block.chunks_exact_mut(width) {
                row.iter_mut().zip(&self.bias).for_each(|(x, bias)| *x = activation(*x + bias));
            }
        });
        out
    }
}
