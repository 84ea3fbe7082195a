//! Makes a text's vector from the vectors of its tokens, as models of sentence-transformers do: by pooling, and by the
//! modules after it. The modules run on the host in f32, since they take a thousandth of the network's time. Owns their
//! weights. Does not know the files in which that library describes them.

use std::sync::Arc;

use candle_core::Device;

use super::head::{Linear, Norm, gelu};
use crate::model::LoadError;
use crate::model::load::ModelFiles;
use crate::model::load::weights::{self, NumberFormats, Weights};
use crate::model::ops::Panels;
use crate::model::ops::pooling::{Pooling, normalize};
use crate::model::ops::probabilities::sigmoid;

/// The default epsilon of PyTorch's `LayerNorm`. The module's settings do not contain it.
const NORM_EPS: f64 = 1e-5;

/// Pooling, and the modules after it, in order.
#[derive(Clone)]
pub struct SentenceHead {
    /// How the vectors of tokens become one vector. If the first module after it is Normalize, the pooling does that,
    /// and the module is not in `modules`.
    pub pooling: Pooling,
    /// The modules after the pooling, in order.
    pub modules: Arc<[SentenceModule]>,
}

impl From<Pooling> for SentenceHead {
    fn from(pooling: Pooling) -> Self {
        Self { pooling, modules: Arc::default() }
    }
}

impl SentenceHead {
    /// The width of a text's vector, given the width of a token's vector.
    pub fn width(&self, hidden: usize) -> usize {
        let last = self.modules.iter().rev().find_map(SentenceModule::width);
        last.unwrap_or_else(|| self.pooling.width(hidden))
    }

    /// Whether vectors are normalised last, so that they have the length 1.
    pub fn normalizes(&self) -> bool {
        match self.modules.last() {
            None => self.pooling.normalize,
            Some(module) => matches!(module, SentenceModule::Normalize),
        }
    }
}

/// A module after the pooling.
pub enum SentenceModule {
    /// A linear layer, and the activation after it.
    Dense(Linear, fn(f32) -> f32),
    /// A layer norm with a scale and a bias for each number.
    LayerNorm(Norm),
    /// Scales the vector to length 1.
    Normalize,
}

impl SentenceModule {
    /// Reads a `Dense` of `depth` numbers in and `width` numbers out. `stem` is the module's folder and the beginning
    /// of the names of its weights' files.
    ///
    /// # Errors
    /// [`LoadError::File`] naming the file or tensor that is missing or has another shape, [`LoadError::Hub`] if the hub
    /// cannot be reached.
    pub fn dense(
        files: &ModelFiles,
        stem: &str,
        [depth, width]: [usize; 2],
        has_bias: bool,
        activation: fn(f32) -> f32,
    ) -> Result<Self, LoadError> {
        let weights = read(files, stem)?;
        let matrix = weights.values("linear.weight", &[width, depth])?;
        let bias = if has_bias { weights.values("linear.bias", &[width])? } else { vec![0.0; width] };
        let linear = Linear { weights: Panels::new(&matrix, depth), bias };
        Ok(Self::Dense(linear, activation))
    }

    /// Reads a `LayerNorm` of vectors of `width` numbers.
    ///
    /// # Errors
    /// As [`dense`](Self::dense).
    pub fn layer_norm(files: &ModelFiles, stem: &str, width: usize) -> Result<Self, LoadError> {
        let weights = read(files, stem)?;
        let values = |name: &str| weights.values(name, &[width]);
        let norm = Norm { weights: values("norm.weight")?, bias: values("norm.bias")?, eps: NORM_EPS };
        Ok(Self::LayerNorm(norm))
    }

    /// The width of its vectors, if it sets one.
    fn width(&self) -> Option<usize> {
        match self {
            Self::Dense(linear, _) => Some(linear.bias.len()),
            Self::LayerNorm(_) | Self::Normalize => None,
        }
    }

    /// Computes the module's vectors from those of the module before it. All vectors have the same width.
    pub(super) fn apply(&self, mut vectors: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
        match self {
            Self::Dense(linear, activation) => {
                let rows = linear.apply(&vectors.concat(), *activation);
                return rows.chunks_exact(linear.bias.len()).map(<[f32]>::to_vec).collect();
            }
            Self::LayerNorm(norm) => vectors.iter_mut().for_each(|vector| norm.apply(vector)),
            Self::Normalize => vectors.iter_mut().for_each(|vector| normalize(vector)),
        }
        vectors
    }
}

/// The activation of PyTorch's class `name` with its default arguments. None if it is not supported.
pub fn activation(name: &str) -> Option<fn(f32) -> f32> {
    Some(match name {
        "Identity" => |x| x,
        "Tanh" => f32::tanh,
        "GELU" => gelu,
        // `f32::max` would drop NaN.
        "ReLU" => |x| if x < 0.0 { 0.0 } else { x },
        "Sigmoid" => sigmoid,
        "SiLU" => |x| x * sigmoid(x),
        _ => return None,
    })
}

/// The names that [`activation`] supports, for errors.
pub const ACTIVATIONS: &str = "Identity, Tanh, GELU, ReLU, Sigmoid and SiLU";

/// Reads the weights of a module, in which every number must be finite.
fn read(files: &ModelFiles, stem: &str) -> Result<Weights, LoadError> {
    let paths = files.weights_of(stem)?;
    weights::check_finite(&paths)?;
    // The names of the tensors of a module have no prefix.
    Weights::read(&paths, "", "", &Device::Cpu, NumberFormats::F32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_are_those_of_pytorch_and_lose_no_nan() {
        let expected = [
            ("Identity", -1.5),
            ("Tanh", -0.905_148_27),
            ("GELU", -0.100_210_8),
            ("ReLU", 0.0),
            ("Sigmoid", 0.182_425_52),
            ("SiLU", -0.273_638_3),
        ];
        for (name, right) in expected {
            let activation = activation(name).unwrap();
            assert!((activation(-1.5) - right).abs() < 1e-6, "{name}: {}", activation(-1.5));
            assert!(activation(f32::NAN).is_nan(), "{name}");
            assert!(ACTIVATIONS.contains(name));
        }
        assert!(activation("Softplus").is_none());
    }
}
