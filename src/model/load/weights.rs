//! The tensors of a model's files, by name: safetensors, or `.bin` as PyTorch writes them. Decides which prefix the
//! files use. A tensor that is missing, or whose shape differs from `config.json`, is an error that names it. Owns the
//! mappings of the files, whose pages are in the system's page cache, once for all workers of a host. A tensor is
//! created on request.

use std::collections::BTreeMap;
#[cfg(feature = "candle-transformers")]
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::TensorInfo;

use super::torch;
use crate::model::LoadError;
use crate::model::ops::{Matrix, NumberFormat};

/// The number formats in which a network computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberFormats {
    /// The type of tensors.
    pub tensors: DType,
    /// The type in which the matrices of linear layers are kept if tensors are f32 on a CPU.
    pub matrices: NumberFormat,
}

impl NumberFormats {
    /// 32 bits throughout.
    pub const F32: Self = Self { tensors: DType::F32, matrices: NumberFormat::F32 };
}

/// All tensors of a model.
pub struct Weights {
    /// One file, or several parts.
    shards: Vec<Shard>,
    prefix: String,
    device: Device,
    dtype: DType,
    matrix_format: NumberFormat,
}

impl Weights {
    /// Reads files of weights, for tensors on `device` in these number formats. In files that were saved from a model
    /// with a head, names begin with `{base}.`. Such a file is recognised by the tensor `{base}.{marker}`.
    ///
    /// # Errors
    /// [`LoadError::File`] if a file is truncated, corrupt or holds no such model.
    pub fn read(
        paths: &[PathBuf],
        base: &str,
        marker: &str,
        device: &Device,
        NumberFormats { tensors: dtype, matrices: matrix_format }: NumberFormats,
    ) -> Result<Self, LoadError> {
        let shards = paths.iter().map(|path| Shard::read(path)).collect::<Result<Vec<_>, _>>()?;
        let prefix = format!("{base}.");
        let marker = format!("{prefix}{marker}");
        let names = [other_name(&marker), marker];
        let has_prefix = shards.iter().any(|shard| names.iter().any(|name| shard.tensors.contains_key(name)));
        let prefix = if has_prefix { prefix } else { String::new() };
        Ok(Self { shards, prefix, device: device.clone(), dtype, matrix_format })
    }

    /// The tensor `name`; its shape must be `shape`.
    ///
    /// # Errors
    /// [`LoadError::File`] naming the tensor.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        let (shard, info) = self.info(name, shape)?;
        self.checked(name, self.tensor(shard, info))
    }

    /// The numbers of the tensor `name` in f32 on the host. `name` is the full name, which has no prefix for the
    /// tensors of a head.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let (shard, info) = self.info_by_full_name(name.to_owned(), shape)?;
        let bytes = &shard.bytes[shard.byte_range(info)];
        let values = DType::try_from(info.dtype)
            .and_then(|dtype| Tensor::from_raw_buffer(bytes, dtype, &info.shape, &Device::Cpu))
            .and_then(|tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1());
        self.checked(name, values)
    }

    /// The matrix `[depth, width]` of a linear layer, for steps of sequences. In place of f32 it is in bf16 if the file has
    /// bf16.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn matrix(&self, name: &str, [depth, width]: [usize; 2]) -> Result<Matrix, LoadError> {
        self.matrix_of_rows(&format!("{}{name}", self.prefix), &[width, depth], 0, [depth, width])
    }

    /// As [`matrix`](Self::matrix), from `width` rows of the tensor with the full name `name`, beginning with `first_row`. The
    /// tensor has the shape `shape`, whose last number is `depth`.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn matrix_of_rows(
        &self,
        name: &str,
        shape: &[usize],
        first_row: usize,
        [depth, width]: [usize; 2],
    ) -> Result<Matrix, LoadError> {
        let (shard, info) = self.info_by_full_name(name.to_owned(), shape)?;
        let columns = DType::try_from(info.dtype).and_then(|dtype| {
            let row_bytes = depth * dtype.size_in_bytes();
            let bytes = &shard.bytes[shard.byte_range(info)][first_row * row_bytes..][..width * row_bytes];
            let rows = Tensor::from_raw_buffer(bytes, dtype, &[width, depth], &Device::Cpu)?;
            rows.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()
        });
        let columns = self.checked(name, columns)?;
        let is_half = info.dtype == safetensors::Dtype::BF16 && depth % 2 == 0;
        if is_half && self.matrix_format == NumberFormat::F32 {
            return Ok(Matrix::of_bf16(&columns, depth));
        }
        let matrix = Matrix::for_steps(&columns, depth, self.matrix_format);
        matrix.map_err(|error| self.fault(format!("{name}: {error}")))
    }

    /// All tensors, by their full names. Whole numbers, which some files have beside the weights, are converted too.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that cannot be read.
    #[cfg(feature = "candle-transformers")]
    pub fn all(&self) -> Result<HashMap<String, Tensor>, LoadError> {
        let mut all = HashMap::new();
        for shard in &self.shards {
            for (name, info) in &shard.tensors {
                let tensor = self.checked(name, self.tensor(shard, info))?;
                all.insert(name.clone(), tensor);
            }
        }
        Ok(all)
    }

    /// Zeros of the weights' type on their device.
    ///
    /// # Errors
    /// The device fails.
    pub fn zeros(&self, shape: &[usize]) -> candle_core::Result<Tensor> {
        Tensor::zeros(shape, self.dtype, &self.device)
    }

    /// A tensor of these numbers, of the weights' type on their device.
    ///
    /// # Errors
    /// The device fails.
    pub fn tensor_of(&self, numbers: Vec<f32>, shape: &[usize]) -> candle_core::Result<Tensor> {
        Tensor::from_vec(numbers, shape, &self.device)?.to_dtype(self.dtype)
    }

    /// The type in which the matrices of linear layers are kept if their tensors are f32 on a CPU.
    pub fn matrix_format(&self) -> NumberFormat {
        self.matrix_format
    }

    /// The type of tensors.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device on which tensors are created.
    #[cfg(feature = "cuda")]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The prefix of the names of all tensors but the head's: empty, or `{base}.`.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Whether the files have a tensor with this full name.
    pub fn has(&self, name: &str) -> bool {
        self.shards.iter().any(|shard| shard.tensors.contains_key(name))
    }

    fn info(&self, name: &str, shape: &[usize]) -> Result<(&Shard, &TensorInfo), LoadError> {
        self.info_by_full_name(format!("{}{name}", self.prefix), shape)
    }

    fn info_by_full_name(&self, name: String, shape: &[usize]) -> Result<(&Shard, &TensorInfo), LoadError> {
        let other_name = other_name(&name);
        let found = self.shards.iter().find_map(|shard| {
            let info = shard.tensors.get(&name).or_else(|| shard.tensors.get(&other_name));
            Some((shard, info?))
        });
        let (shard, info) = found.ok_or_else(|| self.fault(format!("tensor {name} is missing")))?;
        if info.shape != shape {
            let found = &info.shape;
            return Err(shard.fault(format!(
                "tensor {name} has the shape {found:?}; by the model's settings it should have {shape:?}"
            )));
        }
        Ok((shard, info))
    }

    fn tensor(&self, shard: &Shard, info: &TensorInfo) -> candle_core::Result<Tensor> {
        let dtype = DType::try_from(info.dtype)?;
        let bytes = &shard.bytes[shard.byte_range(info)];
        Tensor::from_raw_buffer(bytes, dtype, &info.shape, &self.device)?.to_dtype(self.dtype)
    }

    /// The rows of the tensor `name`, which must have the shape `[rows, width]`. On a CPU they stay mapped if they are
    /// f32 both in the file and in the network.
    ///
    /// # Errors
    /// As [`Weights::get`].
    pub fn table(&self, name: &str, [rows, width]: [usize; 2]) -> Result<Table, LoadError> {
        let (shard, info) = self.info(name, &[rows, width])?;
        let as_in_file = info.dtype == safetensors::Dtype::F32 && self.dtype == DType::F32;
        if as_in_file && self.device.is_cpu() {
            return Ok(Table::Mapped { file: shard.bytes.clone(), range: shard.byte_range(info), width });
        }
        self.get(name, &[rows, width]).map(Table::Tensor)
    }

    /// Converts an error that candle returns while weights are prepared.
    ///
    /// # Errors
    /// [`LoadError::File`] naming `what`.
    pub fn checked<T>(&self, what: &str, result: candle_core::Result<T>) -> Result<T, LoadError> {
        result.map_err(|error| self.fault(format!("{what}: {error}")))
    }

    /// An error that concerns no single file. It names the last one.
    fn fault(&self, reason: String) -> LoadError {
        match self.shards.last() {
            Some(shard) => shard.fault(reason),
            None => LoadError::File { path: PathBuf::new(), reason },
        }
    }
}

/// Reads the headers of files of weights, without their tensors.
///
/// # Errors
/// [`LoadError::File`] if a file is not as long as its header says, its header is invalid, or something in it is
/// refused.
pub fn check(paths: &[PathBuf]) -> Result<(), LoadError> {
    paths.iter().try_for_each(|path| Shard::read(path).map(drop))
}

/// Checks the floating-point numbers of all tensors.
///
/// # Errors
/// [`LoadError::File`] with the first one that is not finite.
pub fn check_finite(paths: &[PathBuf]) -> Result<(), LoadError> {
    for path in paths {
        let shard = Shard::read(path)?;
        let mut tensors: Vec<_> = shard.tensors.iter().collect();
        tensors.sort_by_key(|(_, info)| info.data_offsets);
        for (name, info) in tensors {
            let bytes = &shard.bytes[shard.byte_range(info)];
            let found = match info.dtype {
                safetensors::Dtype::F32 => not_finite(bytes, f32::from_le_bytes),
                safetensors::Dtype::F64 => not_finite(bytes, |x| f64::from_le_bytes(x) as f32),
                safetensors::Dtype::BF16 => not_finite(bytes, |x| bf16::from_le_bytes(x).to_f32()),
                safetensors::Dtype::F16 => not_finite(bytes, |x| f16::from_le_bytes(x).to_f32()),
                _ => None,
            };
            if let Some((position, number)) = found {
                return Err(shard.fault(not_finite_problem(name, position, number)));
            }
        }
    }
    Ok(())
}

/// What is wrong with a tensor that holds this number at this position.
pub(super) fn not_finite_problem(tensor: &str, position: usize, number: f32) -> String {
    format!(
        "tensor {tensor} is not finite: its number {position} is {number}, so the model cannot be computed; export the \
         model again"
    )
}

/// The first number that is not finite, with its position. `number` makes it of its bytes.
fn not_finite<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f32) -> Option<(usize, f32)> {
    let mut numbers = bytes.as_chunks().0.iter().map(|x| number(*x)).enumerate();
    numbers.find(|(_, number)| !number.is_finite())
}

/// Another name that files have for a tensor: checkpoints converted from TensorFlow keep its names for a norm's
/// parameters, and T5's token embeddings, which have two names, may be saved under the second alone.
fn other_name(name: &str) -> String {
    name.replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta")
        .replace("shared.weight", "encoder.embed_tokens.weight")
}

struct Shard {
    path: PathBuf,
    bytes: Arc<Mmap>,
    /// By name. Their offsets count from the beginning of the file, and lie within it.
    tensors: BTreeMap<String, TensorInfo>,
}

impl Shard {
    fn read(path: &Path) -> Result<Self, LoadError> {
        let fault = |reason: String| LoadError::File { path: path.to_owned(), reason };
        let bytes = map_file(path).map_err(|error| fault(error.to_string()))?;
        let (problem, tensors) = if path.extension().is_some_and(|extension| extension == "bin") {
            ("not readable as weights of PyTorch", torch::tensors(&bytes))
        } else {
            ("not a whole safetensors file", safetensors(&bytes))
        };
        let mut tensors =
            tensors.map_err(|error| fault(format!("{problem} ({} bytes): {error}", bytes.len())))?;
        // PyTorch's DataParallel, which holds the network as its `module`, was saved in the network's place.
        if tensors.keys().all(|name| name.starts_with("module.")) {
            tensors =
                tensors.into_iter().map(|(name, info)| (name["module.".len()..].to_owned(), info)).collect();
        }
        Ok(Self { path: path.to_owned(), bytes: Arc::new(bytes), tensors })
    }

    fn byte_range(&self, info: &TensorInfo) -> Range<usize> {
        let (start, end) = info.data_offsets;
        start..end
    }

    fn fault(&self, reason: String) -> LoadError {
        LoadError::File { path: self.path.clone(), reason }
    }
}

/// The tensors of a safetensors file, with their offsets from the beginning of the file.
fn safetensors(file: &[u8]) -> Result<BTreeMap<String, TensorInfo>, String> {
    let (header, metadata) = SafeTensors::read_metadata(file).map_err(|error| error.to_string())?;
    let data = size_of::<u64>() + header;
    let in_file = |(name, info): (String, &TensorInfo)| {
        let (start, end) = info.data_offsets;
        (name, TensorInfo { data_offsets: (data + start, data + end), ..info.clone() })
    };
    Ok(metadata.tensors().into_iter().map(in_file).collect())
}

#[expect(unsafe_code, reason = "a mapped file can change while it is read, so there is no safe interface")]
pub(super) fn map_file(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the bytes are only read, and any bytes are a valid number. If a new file takes the name, this mapping
    // keeps the old one. If the file is truncated in place, the workers that use it crash.
    unsafe { Mmap::map(&file) }
}

/// A matrix that is read row by row.
pub enum Table {
    /// f32 rows that stay in the mapped file.
    Mapped {
        /// The whole file.
        file: Arc<Mmap>,
        /// The byte range of the rows in the file.
        range: Range<usize>,
        /// The width of a row.
        width: usize,
    },
    /// `[rows, width]` on its device.
    Tensor(Tensor),
}

impl Table {
    /// The rows with these indices, which must exist: `[indices, width]`.
    ///
    /// # Errors
    /// The device fails.
    pub fn select(&self, indices: Vec<u32>, device: &Device) -> candle_core::Result<Tensor> {
        let count = indices.len();
        match self {
            Self::Mapped { file, range, width } => {
                let table = file[range.clone()].as_chunks::<4>().0;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
    }

    fn read(files: &[&str]) -> Result<Weights, LoadError> {
        let paths: Vec<PathBuf> = files.iter().map(|name| fixture(name)).collect();
        Weights::read(&paths, "bert", "embeddings.word_embeddings.weight", &Device::Cpu, NumberFormats::F32)
    }

    #[test]
    fn files_of_pytorch_whole_or_in_shards_have_the_numbers_of_the_safetensors_file() {
        let expected = read(&["tiny-bert-cls/model.safetensors"]).unwrap();
        let shards = ["1", "2"].map(|n| format!("torch/shards/pytorch_model-0000{n}-of-00002.bin"));
        let of_pytorch = [
            (read(&["torch/pytorch_model.bin"]).unwrap(), "bert.", ""),
            (read(&shards.each_ref().map(|name| &**name)).unwrap(), "", "bert."),
        ];
        for (weights, prefix, dropped) in &of_pytorch {
            assert_eq!(weights.prefix(), *prefix);
            let mut compared = 0;
            for (name, info) in &expected.shards[0].tensors {
                // The shards have no head.
                let Some(name_here) = name.strip_prefix(dropped) else { continue };
                let bits = |weights: &Weights, name: &str| -> Vec<u32> {
                    let numbers = weights.values(name, &info.shape).unwrap();
                    numbers.into_iter().map(f32::to_bits).collect()
                };
                assert_eq!(bits(weights, name_here), bits(&expected, name), "{name}");
                compared += 1;
            }
            assert!(compared >= 37, "{compared}");
            let shape = [300, 32];
            let table = weights.table("embeddings.word_embeddings.weight", shape).unwrap();
            assert!(matches!(table, Table::Mapped { .. }));
            let rows = |table: &Table| -> Vec<Vec<f32>> {
                table.select(vec![7, 299], &Device::Cpu).unwrap().to_vec2().unwrap()
            };
            let theirs = expected.table("embeddings.word_embeddings.weight", shape).unwrap();
            assert_eq!(rows(&table), rows(&theirs));
        }
        // A buffer of whole numbers, and the second name of a matrix.
        let whole = &of_pytorch[0].0;
        let positions: Vec<f32> = (0..64_u8).map(f32::from).collect();
        assert_eq!(whole.values("bert.embeddings.position_ids", &[1, 64]).unwrap(), positions);
        let names = ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"];
        let [first, second] = names.map(|name| whole.shards[0].tensors[name].data_offsets);
        assert_eq!(first, second);
    }

    #[test]
    fn names_of_a_parallel_module_and_the_second_name_of_embeddings_are_read() {
        let weights = read(&["torch/parallel.bin"]).unwrap();
        assert_eq!(weights.prefix(), "bert.");
        assert_eq!(weights.values("bert.embeddings.word_embeddings.weight", &[2, 1]).unwrap(), [1.5, -2.0]);
        let paths = [fixture("torch/t5.bin")];
        let weights =
            Weights::read(&paths, "transformer", "shared.weight", &Device::Cpu, NumberFormats::F32).unwrap();
        assert_eq!(weights.prefix(), "transformer.");
        assert_eq!(weights.values("transformer.shared.weight", &[3]).unwrap(), [0.0, 1024.0, -0.25]);
    }

    #[test]
    fn every_type_that_pytorch_saves_is_read() {
        let weights = read(&["torch/types.bin"]).unwrap();
        let numbers = [1.5, -2.0, 0.0, 1024.0, -0.25, 3.0];
        for name in ["f32", "f16", "bf16", "f64"] {
            assert_eq!(weights.values(name, &[6]).unwrap(), numbers, "{name}");
        }
        for name in ["i64", "i32", "i16", "u8"] {
            assert_eq!(weights.values(name, &[6]).unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "{name}");
        }
        assert_eq!(weights.values("matrix", &[2, 3]).unwrap(), numbers);
        assert_eq!(weights.values("part", &[3]).unwrap(), numbers[2..5]);
        assert_eq!(weights.values("scalar", &[]).unwrap(), [7.0]);
        assert!(weights.values("empty", &[0, 4]).unwrap().is_empty());
        // They fail nothing unless they are asked for.
        assert!(
            weights.shards[0].tensors.contains_key("i8") && weights.shards[0].tensors.contains_key("bool")
        );
        let error = weights.values("matrix", &[3, 2]).unwrap_err().to_string();
        assert!(error.contains("types.bin: tensor matrix has the shape [2, 3]"), "{error}");
    }

    #[test]
    fn files_that_pytorch_writes_and_that_are_not_read_are_refused_by_name() {
        for (file, words) in [
            ("command.bin", "posix.system is refused"),
            ("older.bin", "before version 1.6"),
            ("transposed.bin", "tensor a.weight: its numbers are not in the order of its shape [3, 2]"),
            ("f8.bin", "torch._utils._rebuild_tensor_v3 is refused"),
        ] {
            let path = format!("torch/{file}");
            let error = read(&[&path]).err().unwrap().to_string();
            let checked = check(&[fixture(&path)]).unwrap_err().to_string();
            assert!(error.contains(file) && error.contains(words) && error == checked, "{error}");
        }
    }

    #[test]
    fn a_number_of_a_pytorch_file_that_is_not_finite_is_found() {
        let mut bytes = std::fs::read(fixture("torch/types.bin")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pytorch_model.bin");
        let offsets = torch::tensors(&bytes).unwrap()["f16"].data_offsets;
        bytes[offsets.0 + 2..offsets.0 + 4].copy_from_slice(&0x7c00_u16.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        check(std::slice::from_ref(&path)).unwrap();
        let error = check_finite(&[path]).unwrap_err().to_string();
        assert!(error.contains("tensor f16 is not finite: its number 1 is inf"), "{error}");
    }

    #[test]
    fn the_first_number_that_is_not_finite_is_found_in_every_type() {
        let (inf, largest) = (f32::INFINITY, f32::MAX.to_le_bytes());
        let f32s = [largest, (-inf).to_le_bytes(), f32::NAN.to_le_bytes()].concat();
        assert_eq!(not_finite(&f32s, f32::from_le_bytes), Some((1, -inf)));
        assert_eq!(not_finite(&f32s[..4], f32::from_le_bytes), None);
        let f64s = [f64::from(f32::MAX), 1e300].map(f64::to_le_bytes).concat();
        assert_eq!(not_finite(&f64s, |x| f64::from_le_bytes(x) as f32), Some((1, inf)));
        // The largest number, then infinity.
        let bytes = |bits: [u16; 2]| bits.map(u16::to_le_bytes).concat();
        let not_finite_bf16 = |bytes: &[u8]| not_finite(bytes, |x| bf16::from_le_bytes(x).to_f32());
        let not_finite_f16 = |bytes: &[u8]| not_finite(bytes, |x| f16::from_le_bytes(x).to_f32());
        assert_eq!(not_finite_bf16(&bytes([0x7f7f, 0x7f80])), Some((1, inf)));
        assert_eq!(not_finite_f16(&bytes([0x7bff, 0xfc00])), Some((1, -inf)));
        assert!(not_finite_f16(&bytes([0x7c01, 0])).is_some_and(|(at, number)| at == 0 && number.is_nan()));
        assert_eq!(not_finite_f16(&bytes([0x7bff, 0x0001])), None);
    }
}
