//! The tensors of `model.safetensors`, by name. Decides which prefix a file uses, and that a tensor
//! which is missing or has another shape than `config.json` says is an error that names it.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};

use crate::model::LoadError;
use crate::model::source;

/// All tensors of a weights file.
pub struct Weights {
    path: PathBuf,
    tensors: HashMap<String, Tensor>,
    prefix: String,
    dtype: DType,
}

impl Weights {
    /// Reads a safetensors file onto `device`, to be used as `dtype`. Names may begin with `{base}.`
    /// where the file was saved from a model with a head.
    ///
    /// # Errors
    /// [`LoadError::File`] when the file is cut off, corrupt or holds no such model.
    pub fn read(path: PathBuf, base: &str, device: &Device, dtype: DType) -> Result<Self, LoadError> {
        let bytes = source::read(&path)?;
        let tensors = match candle_core::safetensors::load_buffer(&bytes, device) {
            Ok(tensors) => tensors,
            Err(error) => {
                let reason = format!("not a whole safetensors file ({} bytes): {error}", bytes.len());
                return Err(LoadError::File { path, reason });
            }
        };
        let prefix = format!("{base}.");
        let prefixed = tensors.contains_key(&format!("{prefix}{WORDS}"));
        Ok(Self { path, tensors, prefix: if prefixed { prefix } else { String::new() }, dtype })
    }

    /// The tensor `name`; its shape must be `shape`.
    ///
    /// # Errors
    /// [`LoadError::File`] naming the tensor.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        let name = format!("{}{name}", self.prefix);
        // Checkpoints converted from TensorFlow keep its names for a norm's parameters.
        let older =
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
        let tensor = self.tensors.get(&name).or_else(|| self.tensors.get(&older));
        let tensor = tensor.ok_or_else(|| self.fault(format!("tensor {name} is missing")))?;
        if tensor.dims() != shape {
            let found = tensor.dims();
            return Err(self.fault(format!(
                "tensor {name} has the shape {found:?}, and config.json makes it {shape:?}"
            )));
        }
        self.checked(&name, tensor.to_dtype(self.dtype))
    }

    /// Passes on a result of candle while weights are arranged.
    ///
    /// # Errors
    /// [`LoadError::File`] naming `what`.
    pub fn checked<T>(&self, what: &str, result: candle_core::Result<T>) -> Result<T, LoadError> {
        result.map_err(|error| self.fault(format!("{what}: {error}")))
    }

    fn fault(&self, reason: String) -> LoadError {
        LoadError::File { path: self.path.clone(), reason }
    }
}

/// The table of word vectors, which every architecture here has under this name.
pub const WORDS: &str = "embeddings.word_embeddings.weight";
