//! The tensors of `model.safetensors`, by name. Decides which prefix a file uses, and that a tensor
//! which is missing or has another shape than `config.json` says is an error that names it. Owns the
//! file's mapping: what is read from it lies in the system's cache of files, once for all workers of a
//! host. A tensor is made when it is asked for.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::model::LoadError;

/// All tensors of a weights file.
pub struct Weights {
    path: PathBuf,
    bytes: Arc<Mmap>,
    /// Where the tensors' data begins.
    data: usize,
    metadata: Metadata,
    prefix: String,
    device: Device,
    dtype: DType,
}

impl Weights {
    /// Reads a safetensors file onto `device`, to be used as `dtype`. Names may begin with `{base}.`
    /// where the file was saved from a model with a head.
    ///
    /// # Errors
    /// [`LoadError::File`] when the file is cut off, corrupt or holds no such model.
    pub fn read(path: PathBuf, base: &str, device: &Device, dtype: DType) -> Result<Self, LoadError> {
        let bytes = match map(&path) {
            Ok(bytes) => Arc::new(bytes),
            Err(error) => return Err(LoadError::File { path, reason: error.to_string() }),
        };
        let (header, metadata) = match SafeTensors::read_metadata(&bytes) {
            Ok(read) => read,
            Err(error) => {
                let reason = format!("not a whole safetensors file ({} bytes): {error}", bytes.len());
                return Err(LoadError::File { path, reason });
            }
        };
        let prefix = format!("{base}.");
        let prefixed = metadata.info(&format!("{prefix}{WORDS}")).is_some();
        let prefix = if prefixed { prefix } else { String::new() };
        let data = size_of::<u64>() + header;
        Ok(Self { path, bytes, data, metadata, prefix, device: device.clone(), dtype })
    }

    /// Numbers in all tensors.
    pub fn numbers(&self) -> usize {
        self.metadata.tensors().values().map(|tensor| tensor.shape.iter().product::<usize>()).sum()
    }

    /// The tensor `name`; its shape must be `shape`.
    ///
    /// # Errors
    /// [`LoadError::File`] naming the tensor.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        let info = self.info(name, shape)?;
        self.checked(name, self.tensor(info))
    }

    fn info(&self, name: &str, shape: &[usize]) -> Result<&TensorInfo, LoadError> {
        let name = format!("{}{name}", self.prefix);
        // Checkpoints converted from TensorFlow keep its names for a norm's parameters.
        let older =
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
        let info = self.metadata.info(&name).or_else(|| self.metadata.info(&older));
        let info = info.ok_or_else(|| self.fault(format!("tensor {name} is missing")))?;
        if info.shape != shape {
            let found = &info.shape;
            return Err(self.fault(format!(
                "tensor {name} has the shape {found:?}, and config.json makes it {shape:?}"
            )));
        }
        Ok(info)
    }

    fn tensor(&self, info: &TensorInfo) -> candle_core::Result<Tensor> {
        let dtype = DType::try_from(info.dtype)?;
        let bytes = &self.bytes[self.place(info)];
        Tensor::from_raw_buffer(bytes, dtype, &info.shape, &self.device)?.to_dtype(self.dtype)
    }

    fn place(&self, info: &TensorInfo) -> Range<usize> {
        let (start, end) = info.data_offsets;
        self.data + start..self.data + end
    }

    /// The rows of the tensor `name`, which must have the shape `[rows, width]`. Where they are used as
    /// the file has them they stay in it.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn table(&self, name: &str, [rows, width]: [usize; 2]) -> Result<Table, LoadError> {
        let info = self.info(name, &[rows, width])?;
        let as_in_file = info.dtype == safetensors::Dtype::F32 && self.dtype == DType::F32;
        if as_in_file && self.device.is_cpu() {
            return Ok(Table::Mapped { file: self.bytes.clone(), place: self.place(info), width });
        }
        self.get(name, &[rows, width]).map(Table::Tensor)
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

#[expect(unsafe_code, reason = "a map of a file can change under us; no safe interface has it")]
fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the bytes are only ever read, and any of them make a number. Weights are replaced by
    // another file of the same name, which leaves this one as it is; whoever cuts a file short in place
    // ends the workers that use it.
    unsafe { Mmap::map(&file) }
}

/// A matrix that is read row by row.
pub enum Table {
    /// f32, where the file has it.
    Mapped {
        /// The whole file.
        file: Arc<Mmap>,
        /// The rows in it.
        place: Range<usize>,
        /// Numbers a row.
        width: usize,
    },
    /// `[rows, width]` on its device.
    Tensor(Tensor),
}

impl Table {
    /// The rows of these indices, which exist: `[indices, width]`.
    ///
    /// # Errors
    /// When the device fails.
    pub fn select(&self, indices: Vec<u32>, device: &Device) -> candle_core::Result<Tensor> {
        let count = indices.len();
        match self {
            Self::Mapped { file, place, width } => {
                let table = file[place.clone()].as_chunks::<4>().0;
                let mut rows = Vec::with_capacity(count * width);
                for index in indices {
                    let row = &table[index as usize * width..][..*width];
                    rows.extend(row.iter().map(|bytes| f32::from_le_bytes(*bytes)));
                }
                Tensor::from_vec(rows, (count, *width), device)
            }
            Self::Tensor(table) => table.index_select(&Tensor::from_vec(indices, count, device)?, 0),
        }
    }
}

/// The table of word vectors, which every architecture here has under this name.
pub const WORDS: &str = "embeddings.word_embeddings.weight";
