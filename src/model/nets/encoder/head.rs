//! The classification heads of `…ForSequenceClassification`: they compute one number for each label, before softmax or
//! sigmoid, from a text's pooled vector. They run on the host in f32, since a head takes a thousandth of the network's
//! time. Owns the head's weights.

use candle_core::cpu::erf::erf_f64;

use super::config::{Family, NetworkConfig};
use crate::model::LoadError;
use crate::model::load::weights::Weights;
use crate::model::ops::{Panels, multiply_rows};

/// Two linear layers with an activation between them, and in ModernBERT a norm.
pub struct Head {
    dense: Linear,
    activation: fn(f32) -> f32,
    norm: Option<Norm>,
    out: Linear,
}

struct Norm {
    weights: Vec<f32>,
    eps: f64,
}

struct Linear {
    weights: Panels,
    bias: Vec<f32>,
}

impl Head {
    /// Reads the head of a network, for `labels` labels.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape.
    pub fn load(weights: &Weights, config: &NetworkConfig, labels: usize) -> Result<Self, LoadError> {
        let hidden = config.hidden;
        let pooler = format!("{}pooler.dense", weights.prefix());
        let (dense, activation, out): (_, fn(f32) -> f32, _) = match config.family {
            // There is no public Nomic model with a head.
            Family::Bert | Family::Nomic => (pooler.as_str(), f32::tanh, "classifier"),
            Family::Roberta | Family::MpNet => ("classifier.dense", f32::tanh, "classifier.out_proj"),
            Family::DistilBert => ("pre_classifier", |x| x.max(0.0), "classifier"),
            Family::ModernBert => ("head.dense", gelu, "classifier"),
            Family::Deberta => ("pooler.dense", gelu, "classifier"),
        };
        let is_modern = config.family == Family::ModernBert;
        let linear = |name: &str, width: usize| {
            let matrix = weights.values(&format!("{name}.weight"), &[width, hidden])?;
            let bias = match name {
                "head.dense" => vec![0.0; width],
                _ => weights.values(&format!("{name}.bias"), &[width])?,
            };
            Ok::<_, LoadError>(Linear { weights: Panels::new(&matrix, hidden), bias })
        };
        let norm = is_modern.then(|| weights.values("head.norm.weight", &[hidden])).transpose()?;
        let norm = norm.map(|weights| Norm { weights, eps: config.eps.into() });
        Ok(Self { dense: linear(dense, hidden)?, activation, norm, out: linear(out, labels)? })
    }

    /// For each of `vectors`, a number for each label.
    pub fn apply(&self, vectors: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let mut inner = self.dense.apply(&vectors.concat(), self.activation);
        if let Some(norm) = &self.norm {
            inner.chunks_exact_mut(norm.weights.len()).for_each(|row| norm.apply(row));
        }
        let labels = self.out.apply(&inner, |x| x);
        labels.chunks_exact(self.out.bias.len()).map(<[f32]>::to_vec).collect()
    }
}

/// x·Φ(x), by the error function.
fn gelu(x: f32) -> f32 {
    let x = f64::from(x);
    (0.5 * x * (1.0 + erf_f64(x * std::f64::consts::FRAC_1_SQRT_2))) as f32
}

impl Norm {
    fn apply(&self, row: &mut [f32]) {
        let count = row.len() as f64;
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / count;
        let variance = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / count;
        let scale = 1.0 / (variance + self.eps).sqrt();
        row.iter_mut().zip(&self.weights).for_each(|(x, weight)| {
            *x = ((f64::from(*x) - mean) * scale) as f32 * weight;
        });
    }
}

impl Linear {
    /// activation(rows · weights + bias).
    fn apply(&self, rows: &[f32], activation: fn(f32) -> f32) -> Vec<f32> {
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
