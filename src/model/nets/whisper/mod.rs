//! Whisper, OpenAI's network for speech recognition, on a CPU in f32: an encoder of windows of 30 s, and a decoder that
//! writes a text about one window. Defines the names of their tensors, which are those of the transformers library. Owns
//! no state; `encoder` and `decoder` own the weights, and `decoder` the keys and values of each slot.

pub mod config;
mod decoder;
mod encoder;

pub use decoder::{Decoder, Span};
pub use encoder::Encoder;

use candle_core::Device;

use self::config::WhisperConfig;
use crate::model::load::ModelFiles;
use crate::model::load::weights::{Precision, Weights};
use crate::model::ops::{Matrix, layer_norm};
use crate::model::{Dtype, LoadError, LoadSpec};

/// Added to the variance of each norm.
const EPS: f32 = 1e-5;

/// Both networks.
pub struct Whisper {
    /// Encodes windows.
    pub encoder: Encoder,
    /// Writes texts about encoded windows.
    pub decoder: Decoder,
}

impl Whisper {
    /// Reads the weights. The decoder has `slots` places for windows with their texts.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape, [`LoadError::Unsupported`] for a device
    /// or precision that is not supported, [`LoadError::Device`] if the address space for keys and values is missing.
    pub fn load(
        spec: &LoadSpec,
        device: &Device,
        config: &WhisperConfig,
        slots: usize,
    ) -> Result<Self, LoadError> {
        let unsupported = |reason: String| LoadError::Unsupported { model: spec.source.clone(), reason };
        if !device.is_cpu() {
            return Err(unsupported(format!("the device is {}; Whisper is served on CPUs", spec.device)));
        }
        if spec.dtype != Dtype::F32 {
            let reason = format!("dtype is {:?}; Whisper is computed in f32", spec.dtype.name());
            return Err(unsupported(reason));
        }
        let paths = ModelFiles::locate(&spec.source)?.weights()?;
        let marker = "decoder.embed_tokens.weight";
        let weights = Weights::read(&paths, "model", marker, &Device::Cpu, Precision::F32)?;
        let decoder = Decoder::load(&weights, config, slots)?;
        Ok(Self {
            encoder: Encoder::load(&weights, config)?,
            decoder: decoder.map_err(|error| spec.failed(format!("keys and values: {error}")))?,
        })
    }
}

/// The numbers of the tensor `name`.
fn values(weights: &Weights, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
    weights.values(&format!("{}{name}", weights.prefix()), shape)
}

/// The parameters of a layer norm.
struct LayerNorm {
    weight: Vec<f32>,
    shift: Vec<f32>,
}

impl LayerNorm {
    fn load(weights: &Weights, name: &str, width: usize) -> Result<Self, LoadError> {
        Ok(Self {
            weight: values(weights, &format!("{name}.weight"), &[width])?,
            shift: values(weights, &format!("{name}.bias"), &[width])?,
        })
    }

    /// `out` ← LayerNorm(`rows`), both `[n, width]`.
    fn apply(&self, rows: &[f32], out: &mut Vec<f32>) {
        out.resize(rows.len(), 0.0);
        layer_norm(rows, &self.weight, &self.shift, EPS, out);
    }
}

/// A linear layer with its bias.
struct Linear {
    matrix: Matrix,
    bias: Vec<f32>,
}

impl Linear {
    /// Reads the layer `name`, from rows of `depth` numbers to rows of `width` numbers.
    fn load(weights: &Weights, name: &str, [depth, width]: [usize; 2]) -> Result<Self, LoadError> {
        Ok(Self {
            matrix: weights.matrix(&format!("{name}.weight"), [depth, width])?,
            bias: values(weights, &format!("{name}.bias"), &[width])?,
        })
    }

    /// The product without the bias: `out` `[n, width]` ← `rows` `[n, depth]` times the matrix.
    fn multiply(&self, rows: &[f32], out: &mut Vec<f32>) {
        out.resize(rows.len() / self.matrix.depth() * self.matrix.width(), 0.0);
        self.matrix.multiply(rows, out);
    }
}
