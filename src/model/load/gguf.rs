//! The tensors and metadata of a GGUF file. Decides which number types are read, and whether their numbers stay
//! quantised or become floats, and in how many bits. Owns the file's mapping. Every range in the file is checked before
//! it is read.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufReader, Cursor, Read, Seek, SeekFrom};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use half::{bf16, f16};
use memmap2::Mmap;

use super::weights::{map_file, not_finite_problem};
use crate::model::LoadError;
use crate::model::ops::{Group, Matrix, NumberFormat};

/// The number types that are read.
const READ_TYPES: &str = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and Q2_K to Q6_K";

/// The names of types in llama.cpp, by their numbers from [`FIRST_NAMED`] on. Empty: llama.cpp no longer has the type.
const TYPE_NAMES: [&str; 26] = [
    "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64",
    "F64", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "", "", "", "MXFP4", "NVFP4", "Q1_0",
];
const FIRST_NAMED: usize = 16;

/// Most values that are read of a file's metadata. Those of a vocabulary of 262,144 tokens and 515,000 merges are 2.1 million.
/// The library needs up to 87 bytes of memory for each: 365 MB.
const MAX_READS: usize = 1 << 22;

/// A GGUF file.
pub struct Gguf {
    path: PathBuf,
    content: Content,
    bytes: Mmap,
}

impl Gguf {
    /// Opens a file.
    ///
    /// # Errors
    /// [`LoadError::File`] if it is not a GGUF file.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        let fault = |reason: String| LoadError::File { path: path.to_owned(), reason };
        let bytes = map_file(path).map_err(|error| fault(error.to_string()))?;
        let content = read_content(&mut Cursor::new(&*bytes)).map_err(fault)?;
        Ok(Self { path: path.to_owned(), content, bytes })
    }

    /// The architecture that a file names. Reads only the file's header.
    ///
    /// # Errors
    /// [`LoadError::File`] if it is not a GGUF file, or names no architecture.
    pub fn architecture(path: &Path) -> Result<String, LoadError> {
        let fault = |reason: String| LoadError::File { path: path.to_owned(), reason };
        let file = File::open(path).map_err(|error| fault(error.to_string()))?;
        let content = read_content(&mut BufReader::new(file)).map_err(fault)?;
        let architecture = content.metadata.get("general.architecture");
        let architecture = architecture.and_then(|value| value.to_string().ok()).cloned();
        architecture.ok_or_else(|| fault("the file names no general.architecture".to_owned()))
    }

    /// Checks that the file has the matrix of a linear layer with `depth` inputs and `width` outputs. Callers do this
    /// before they allocate memory for the outputs.
    ///
    /// # Errors
    /// As [`Gguf::matrix_of_rows`].
    pub fn check(&self, name: &str, [depth, width]: [usize; 2]) -> Result<(), LoadError> {
        self.linear(name, [depth, width]).map(drop)
    }

    /// Checks that the file holds the bytes of every tensor in its table.
    ///
    /// # Errors
    /// [`LoadError::File`] with the number of bytes that are missing.
    pub fn check_length(&self) -> Result<(), LoadError> {
        let mut end = 0;
        for (name, info) in &self.content.tensor_infos {
            end = end.max(self.byte_range(name, info)?.end);
        }
        match end.checked_sub(self.bytes.len()) {
            None | Some(0) => Ok(()),
            Some(missing) => {
                let bytes = self.bytes.len();
                Err(self.fault(format!(
                    "its tensors take {end} bytes, and it has {bytes}: {missing} are missing"
                )))
            }
        }
    }

    /// Checks the numbers of all tensors, and the scales and offsets of those that are quantised.
    ///
    /// # Errors
    /// [`LoadError::File`] with the first one that is not finite.
    pub fn check_finite(&self) -> Result<(), LoadError> {
        let mut tensors: Vec<_> = self.content.tensor_infos.iter().collect();
        tensors.sort_by_key(|(_, info)| info.offset);
        for (name, info) in tensors {
            let (info, bytes) = self.tensor(name, info.shape.dims())?;
            let dtype = info.ggml_dtype;
            let not_finite = |number: &f32| !number.is_finite();
            let found = match (float_reader(dtype), group_reader(dtype)) {
                (Some(read), _) => {
                    let mut numbers = bytes.chunks_exact(dtype.type_size()).map(read).enumerate();
                    numbers.find(|(_, number)| not_finite(number))
                }
                (None, Some((format, read))) => {
                    let numbers = bytes.len() / dtype.type_size() * dtype.block_size();
                    (0..numbers / format.group()).find_map(|index| {
                        let Group { scale, offset, .. } = read(bytes, index);
                        let number = [scale, offset].into_iter().find(not_finite)?;
                        Some((index * format.group(), number))
                    })
                }
                // Loading refuses it.
                (None, None) => None,
            };
            if let Some((position, number)) = found {
                return Err(self.fault(not_finite_problem(name, position, number)));
            }
        }
        Ok(())
    }

    /// A value of the metadata.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(key)
    }

    /// A string of the metadata.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.value(key)?.to_string().ok().map(String::as_str)
    }

    /// A whole number of the metadata.
    pub fn number(&self, key: &str) -> Option<usize> {
        match self.value(key)? {
            Value::U8(x) => Some(usize::from(*x)),
            Value::U16(x) => Some(usize::from(*x)),
            Value::U32(x) => usize::try_from(*x).ok(),
            Value::U64(x) => usize::try_from(*x).ok(),
            Value::I32(x) => usize::try_from(*x).ok(),
            Value::I64(x) => usize::try_from(*x).ok(),
            _ => None,
        }
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// The number types whose matrices are kept in wider types in the memory of a CPU, because no kernel computes in
    /// them. None if the file has none of these.
    pub fn widened_types(&self) -> Option<String> {
        let matrices = self.content.tensor_infos.values().filter(|info| info.shape.rank() > 1);
        let widened = matrices.filter_map(|info| {
            let dtype = info.ggml_dtype;
            let (kept, bits) = match dtype {
                GgmlDType::F16 => ("f32", 32),
                GgmlDType::Q8_0 => return None,
                _ => match group_reader(dtype)?.0 {
                    NumberFormat::Bits4 => return None,
                    // Each group has a scale and an offset in f32.
                    format => ("8 bits", 8 + 64 / format.group()),
                },
            };
            let in_file = dtype.type_size() as f32 * 8.0 / dtype.block_size() as f32;
            let name = type_name(dtype);
            Some(format!("{name} in {kept} ({bits} bits each in memory, {in_file} in the file)"))
        });
        let widened: Vec<String> = widened.collect::<BTreeSet<_>>().into_iter().collect();
        let all = widened.join(", ");
        (!all.is_empty())
            .then(|| format!("the numbers of these types are unchanged, but kept in wider types: {all}"))
    }

    /// The numbers of a vector of this length.
    ///
    /// # Errors
    /// [`LoadError::File`] naming the tensor.
    pub fn vector(&self, name: &str, length: usize) -> Result<Vec<f32>, LoadError> {
        let (info, bytes) = self.tensor(name, &[length])?;
        let dtype = info.ggml_dtype;
        match float_reader(dtype) {
            Some(read) => Ok(bytes.chunks_exact(dtype.type_size()).map(read).collect()),
            None => {
                let found = type_name(dtype);
                Err(self.fault(format!("tensor {name} is {found}; vectors are read as F32, F16 and BF16")))
            }
        }
    }

    /// The matrix `[depth, width]` of a linear layer with `depth` inputs and `width` outputs. Column `c` of the result
    /// is row `row_of_column(c)` of the tensor, whose shape is `shape`; the last number of the shape is `depth`.
    ///
    /// # Errors
    /// [`LoadError::File`] naming the tensor, for a shape or number type that is not as expected.
    pub fn matrix_of_rows(
        &self,
        name: &str,
        shape: &[usize],
        [depth, width]: [usize; 2],
        row_of_column: impl Fn(usize) -> usize,
    ) -> Result<Matrix, LoadError> {
        let (info, bytes) = self.tensor(name, shape)?;
        let dtype = info.ggml_dtype;
        let row_bytes = depth / dtype.block_size() * dtype.type_size();
        let row_of = |column: usize| &bytes[row_of_column(column) * row_bytes..][..row_bytes];
        if let Some(read) = float_reader(dtype) {
            let numbers = |column| row_of(column).chunks_exact(dtype.type_size()).map(read);
            let columns: Vec<f32> = (0..width).flat_map(numbers).collect();
            return Ok(match dtype {
                GgmlDType::BF16 => Matrix::of_bf16(&columns, depth),
                _ => Matrix::of_f32(&columns, depth),
            });
        }
        let (format, read) = group_reader(dtype).ok_or_else(|| {
            self.fault(format!("tensor {name} is {}; read are {READ_TYPES}", type_name(dtype)))
        })?;
        Ok(Matrix::of_groups(format, [depth, width], &|column, group| read(row_of(column), group)))
    }

    /// The tensor of a linear layer with `depth` inputs and `width` outputs. The file has a row of `depth` numbers for
    /// each output, so its shape is `[width, depth]`.
    fn linear(&self, name: &str, [depth, width]: [usize; 2]) -> Result<(&TensorInfo, &[u8]), LoadError> {
        self.tensor(name, &[width, depth])
    }

    /// Returns a tensor's description and bytes. Its shape must be `shape`: for a matrix, the number of rows and their
    /// length.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<(&TensorInfo, &[u8]), LoadError> {
        let info = self.content.tensor_infos.get(name);
        let info = info.ok_or_else(|| self.fault(format!("tensor {name} is missing")))?;
        if info.shape.dims() != shape {
            let found = info.shape.dims();
            let reason =
                format!("tensor {name} has the shape {found:?}, and the metadata makes it {shape:?}");
            return Err(self.fault(reason));
        }
        let dtype = info.ggml_dtype;
        if shape.last().is_some_and(|depth| depth % dtype.block_size() != 0) {
            return Err(self.fault(format!(
                "tensor {name} has rows that are no multiple of a block of {}",
                type_name(dtype)
            )));
        }
        let bytes = self.bytes.get(self.byte_range(name, info)?);
        let bytes =
            bytes.ok_or_else(|| self.fault(format!("tensor {name} extends past the end of the file")))?;
        Ok((info, bytes))
    }

    /// The range of a tensor's bytes, which may exceed the file's end.
    fn byte_range(&self, name: &str, info: &TensorInfo) -> Result<Range<usize>, LoadError> {
        let (shape, dtype) = (info.shape.dims(), info.ggml_dtype);
        let numbers = shape.iter().try_fold(1, |count: usize, length| count.checked_mul(*length));
        let size = numbers.and_then(|count| (count / dtype.block_size()).checked_mul(dtype.type_size()));
        let start = self.content.tensor_data_offset.checked_add(info.offset);
        let start = start.and_then(|start| usize::try_from(start).ok());
        let range = start.zip(size).and_then(|(start, size)| Some(start..start.checked_add(size)?));
        range.ok_or_else(|| self.fault(format!("tensor {name} is too large: {shape:?}")))
    }

    /// An error of this file.
    pub fn fault(&self, reason: String) -> LoadError {
        LoadError::File { path: self.path.clone(), reason }
    }
}

/// Reads a file's header and metadata. The library limits each count in it by the size of the file, but keeps each number
/// of an array in 32 bytes: [`MAX_READS`] bounds them.
fn read_content<R: Read + Seek>(file: &mut R) -> Result<Content, String> {
    let mut counted = CountedReads { file, left: MAX_READS };
    // The library divides by the alignment that the file states, and panics if that is 0.
    let read = catch_unwind(AssertUnwindSafe(|| Content::read(&mut counted)));
    let is_too_long = counted.left == 0;
    match read {
        Ok(Err(_)) if is_too_long => {
            Err(format!("its metadata and its table of tensors have more than {MAX_READS} values"))
        }
        Ok(read) => read.map_err(|error| with_type_name(&error.to_string())),
        Err(_) => Err("its metadata cannot be read: general.alignment is 0".to_owned()),
    }
}

/// A file of which a limited number of values is read. The library reads each number on its own, and a string in two parts.
struct CountedReads<'a, R> {
    file: &'a mut R,
    left: usize,
}

impl<R: Read> Read for CountedReads<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            return Err(io::Error::other("too many values"));
        }
        self.file.read(buffer)
    }
}

impl<R: Seek> Seek for CountedReads<'_, R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }

    // That of a buffered reader keeps its buffer.
    fn stream_position(&mut self) -> io::Result<u64> {
        self.file.stream_position()
    }
}

/// The library's error, with the name of a type that it does not know in the place of the type's number.
fn with_type_name(error: &str) -> String {
    let number = error.strip_prefix("unknown dtype for tensor ").and_then(|rest| {
        let digits = rest.split(|character: char| !character.is_ascii_digit()).next()?;
        digits.parse::<usize>().ok()
    });
    let Some(number) = number else { return error.to_owned() };
    let name = number.checked_sub(FIRST_NAMED).and_then(|index| TYPE_NAMES.get(index));
    match name.filter(|name| !name.is_empty()) {
        Some(name) => format!("a tensor is {name}; read are {READ_TYPES}"),
        None => format!("a tensor is of the unknown type {number}; read are {READ_TYPES}"),
    }
}

/// A type's name in llama.cpp.
fn type_name(dtype: GgmlDType) -> String {
    format!("{dtype:?}").replace('K', "_K")
}

/// How the numbers of a type are read that is not quantised.
fn float_reader(dtype: GgmlDType) -> Option<fn(&[u8]) -> f32> {
    match dtype {
        GgmlDType::F32 => Some(f32_number),
        GgmlDType::F16 => Some(f16_number),
        GgmlDType::BF16 => Some(bf16_number),
        _ => None,
    }
}

/// How a group in a row of a quantised type is read, by its index.
type GroupReader = fn(&[u8], usize) -> Group;

/// The format in which the numbers of a quantised type are kept, unchanged, and how they are read. None for a type that
/// is not read.
fn group_reader(dtype: GgmlDType) -> Option<(NumberFormat, GroupReader)> {
    Some(match dtype {
        GgmlDType::Q4_0 => (NumberFormat::Bits4, q4_0),
        GgmlDType::Q4_1 => (NumberFormat::Bits4, q4_1),
        GgmlDType::Q5_0 => (NumberFormat::Bits8, q5_0),
        GgmlDType::Q5_1 => (NumberFormat::Bits8, q5_1),
        GgmlDType::Q8_0 => (NumberFormat::Bits8, q8_0),
        GgmlDType::Q2K => (NumberFormat::Bits8By16, q2_k),
        GgmlDType::Q3K => (NumberFormat::Bits8By16, q3_k),
        GgmlDType::Q4K => (NumberFormat::Bits4, q4_k),
        GgmlDType::Q5K => (NumberFormat::Bits8, q5_k),
        GgmlDType::Q6K => (NumberFormat::Bits8By16, q6_k),
        _ => return None,
    })
}

fn f32_number(bytes: &[u8]) -> f32 {
    bytes.first_chunk().map_or(0.0, |x| f32::from_le_bytes(*x))
}

fn bf16_number(bytes: &[u8]) -> f32 {
    bytes.first_chunk().map_or(0.0, |x| bf16::from_le_bytes(*x).to_f32())
}

fn f16_number(bytes: &[u8]) -> f32 {
    bytes.first_chunk().map_or(0.0, |x| f16::from_le_bytes(*x).to_f32())
}

/// 32 numbers of 4 bits. The first 16 are in the lower halves of the bytes, the others in the upper halves.
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    let mut q = [0; 32];
    for (index, byte) in bytes.iter().enumerate() {
        (q[index], q[index + 16]) = (byte & 15, byte >> 4);
    }
    q
}

/// Adds the fifth bits of numbers: those of 8 numbers are in one byte.
fn with_fifth_bits(mut q: [u8; 32], bits: &[u8]) -> [u8; 32] {
    for (index, q) in q.iter_mut().enumerate() {
        *q |= (bits[index / 8] >> (index % 8) & 1) << 4;
    }
    q
}

/// The block holds a scale, then 32 4-bit numbers, stored with 8 added.
fn q4_0(row: &[u8], group: usize) -> Group {
    let block = &row[group * 18..][..18];
    let scale = f16_number(block);
    Group { scale, offset: -8.0 * scale, q: nibbles(&block[2..]) }
}

/// The block holds a scale and an offset, then 32 4-bit numbers.
fn q4_1(row: &[u8], group: usize) -> Group {
    let block = &row[group * 20..][..20];
    Group { scale: f16_number(block), offset: f16_number(&block[2..]), q: nibbles(&block[4..]) }
}

/// The block holds a scale, then the fifth bits and the lower 4 bits of 32 5-bit numbers, stored with 16 added.
fn q5_0(row: &[u8], group: usize) -> Group {
    let block = &row[group * 22..][..22];
    let scale = f16_number(block);
    Group { scale, offset: -16.0 * scale, q: with_fifth_bits(nibbles(&block[6..]), &block[2..6]) }
}

/// The block holds a scale and an offset, then the fifth bits and the lower 4 bits of 32 5-bit numbers.
fn q5_1(row: &[u8], group: usize) -> Group {
    let block = &row[group * 24..][..24];
    let q = with_fifth_bits(nibbles(&block[8..]), &block[4..8]);
    Group { scale: f16_number(block), offset: f16_number(&block[2..]), q }
}

/// The block holds a scale, then 32 signed bytes. A `Group` has bytes without a sign, so 128 is added to them here.
fn q8_0(row: &[u8], group: usize) -> Group {
    let block = &row[group * 34..][..34];
    let scale = f16_number(block);
    let mut q = [0; 32];
    q.iter_mut().zip(&block[2..]).for_each(|(q, byte)| *q = byte ^ 0x80);
    Group { scale, offset: -128.0 * scale, q }
}

/// 16 numbers of 2 bits. A block's 256 numbers take 64 bytes, in two halves of 128 numbers. The four quarters of 32
/// numbers in a half share bytes.
fn two_bits(bytes: &[u8], group: usize) -> [u8; 32] {
    let (half, quarter, first) = (group / 8, group % 8 / 2, group % 2 * 16);
    let mut q = [0; 32];
    for (q, byte) in q.iter_mut().zip(&bytes[half * 32 + first..][..16]) {
        *q = byte >> (2 * quarter) & 3;
    }
    q
}

/// The block holds 256 2-bit numbers in 16 groups of 16. Its scale and its minimum are multiplied by those of each
/// group, which have 4 bits.
fn q2_k(row: &[u8], group: usize) -> Group {
    let block = &row[group / 16 * 84..][..84];
    let index = group % 16;
    let (scale, min, of_group) = (f16_number(&block[80..]), f16_number(&block[82..]), block[index]);
    Group {
        scale: scale * f32::from(of_group & 15),
        offset: -(min * f32::from(of_group >> 4)),
        q: two_bits(&block[16..80], index),
    }
}

/// The block holds 256 3-bit numbers, stored with 4 added, in 16 groups of 16. Its scale is multiplied by the 6-bit
/// number of each group, which is stored with 32 added.
fn q3_k(row: &[u8], group: usize) -> Group {
    let block = &row[group / 16 * 110..][..110];
    let (high, rest) = block.split_at(32);
    let (low, rest) = rest.split_at(64);
    let (packed, scale) = rest.split_at(12);
    let index = group % 16;
    let mut q = two_bits(low, index);
    // Each byte has the upper bits of 8 numbers that are 32 apart.
    for (q, byte) in q.iter_mut().zip(&high[index % 2 * 16..][..16]) {
        *q |= (byte >> (index / 2) & 1) << 2;
    }
    // The halves of the first 8 bytes are the lower 4 bits of the groups' numbers, and the quarters of the other 4
    // bytes their upper 2 bits.
    let lower = if index < 8 { packed[index] & 15 } else { packed[index - 8] >> 4 };
    let upper = packed[8 + index % 4] >> (2 * (index / 4)) & 3;
    let scale = f16_number(scale) * (f32::from(lower | upper << 4) - 32.0);
    Group { scale, offset: -4.0 * scale, q }
}

/// The block holds 256 4-bit numbers in 8 groups, after the block's scales.
fn q4_k(row: &[u8], group: usize) -> Group {
    let block = &row[group / 8 * 144..][..144];
    group_of_256(block, &block[16..], group % 8)
}

/// As [`q4_k`], but between the scales and the lower 4 bits of the numbers are their fifth bits: each byte has those of
/// 8 numbers, one of each group.
fn q5_k(row: &[u8], group: usize) -> Group {
    let block = &row[group / 8 * 176..][..176];
    let index = group % 8;
    let mut group = group_of_256(block, &block[48..], index);
    for (q, bits) in group.q.iter_mut().zip(&block[16..48]) {
        *q |= (bits >> index & 1) << 4;
    }
    group
}

/// A group of a block of 256 numbers, of which `numbers` has 4 bits each. The block begins with a scale and a minimum,
/// which are multiplied by the scale and the minimum of each group.
fn group_of_256(block: &[u8], numbers: &[u8], index: usize) -> Group {
    let (scale, min, packed) = (f16_number(block), f16_number(&block[2..]), &block[4..16]);
    // 12 bytes hold the scales and the minimums of the 8 groups, each a number of 6 bits. For groups 0 to 3, the lower
    // 6 bits of bytes 0 to 3 are the scales, and the lower 6 bits of bytes 4 to 7 the minimums. For groups 4 to 7, the
    // lower halves of bytes 8 to 11 are the lower 4 bits of the scales, and their upper halves the lower 4 bits of the
    // minimums. The upper 2 bits of these scales are the upper 2 bits of bytes 0 to 3, and those of the minimums of
    // bytes 4 to 7.
    let (group_scale, group_min) = match index {
        0..4 => (packed[index] & 63, packed[index + 4] & 63),
        _ => (
            packed[index + 4] & 15 | packed[index - 4] >> 6 << 4,
            packed[index + 4] >> 4 | packed[index] >> 6 << 4,
        ),
    };
    let mut q = [0; 32];
    // Two groups share 32 bytes: one has the lower halves, the other the upper ones.
    for (q, byte) in q.iter_mut().zip(&numbers[index / 2 * 32..]) {
        *q = if index.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
    }
    Group { scale: scale * f32::from(group_scale), offset: -(min * f32::from(group_min)), q }
}

/// The block holds 256 6-bit numbers, stored with 32 added, in 16 groups of 16. Its scale is multiplied by the signed
/// byte of each group. A [`Group`] has room for 32 numbers; here the first 16 are used.
fn q6_k(row: &[u8], group: usize) -> Group {
    let block = &row[group / 16 * 210..][..210];
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, scale) = rest.split_at(16);
    let index = group % 16;
    // The block has two halves of 128 numbers. The four quarters of 32 numbers in a half share bytes.
    let (half, quarter, first) = (index / 8, index % 8 / 2, index % 2 * 16);
    let mut q = [0; 32];
    for (offset, q) in q.iter_mut().take(16).enumerate() {
        let index = first + offset;
        let byte = low[half * 64 + quarter % 2 * 32 + index];
        let lower = if quarter < 2 { byte & 15 } else { byte >> 4 };
        *q = lower | (high[half * 32 + index] >> (2 * quarter) & 3) << 4;
    }
    let scale = f16_number(scale) * f32::from(scales[index] as i8);
    Group { scale, offset: -32.0 * scale, q }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use candle_core::quantized::{QTensor, gguf_file};
    use candle_core::{Device, Tensor};

    use super::*;

    #[test]
    fn a_matrix_of_any_type_has_the_numbers_that_candle_reads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let (depth, width) = (512, 3);
        let x = Tensor::randn(0f32, 1.0, (width, depth), &Device::Cpu).unwrap();
        for dtype in [
            GgmlDType::F32,
            GgmlDType::F16,
            GgmlDType::BF16,
            GgmlDType::Q4_0,
            GgmlDType::Q4_1,
            GgmlDType::Q5_0,
            GgmlDType::Q5_1,
            GgmlDType::Q8_0,
            GgmlDType::Q2K,
            GgmlDType::Q3K,
            GgmlDType::Q4K,
            GgmlDType::Q5K,
            GgmlDType::Q6K,
        ] {
            let tensor = QTensor::quantize(&x, dtype).unwrap();
            gguf_file::write(&mut File::create(&path).unwrap(), &[], &[("w", &tensor)]).unwrap();
            let expected: Vec<Vec<f32>> = tensor.dequantize(&Device::Cpu).unwrap().to_vec2().unwrap();
            let matrix = Gguf::read(&path)
                .unwrap()
                .matrix_of_rows("w", &[width, depth], [depth, width], |row| 2 - row)
                .unwrap();
            for (column, expected) in expected.iter().rev().enumerate() {
                let mut ours = vec![0.0; depth];
                matrix.column(column, &mut ours);
                let error = ours.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(error < 2e-6, "{dtype:?}: {error}");
            }
        }
    }

    #[test]
    fn a_long_array_in_the_metadata_is_refused_before_it_is_in_memory() {
        // Version 3, no tensors, one entry: an array of bytes.
        let file = |length: u64| {
            let mut bytes = b"GGUF\x03\0\0\0".to_vec();
            bytes.extend([0_u64, 1, 4].map(u64::to_le_bytes).concat());
            bytes.extend(b"name\x09\0\0\0\0\0\0\0");
            bytes.extend(length.to_le_bytes());
            bytes.resize(bytes.len() + length as usize, 7);
            Cursor::new(bytes)
        };
        let content = read_content(&mut file(1_000_000)).unwrap();
        assert_eq!(content.metadata["name"].to_vec().unwrap().len(), 1_000_000);
        let error = read_content(&mut file(MAX_READS as u64)).err().unwrap();
        assert_eq!(error, "its metadata and its table of tensors have more than 4194304 values");
    }

    #[test]
    fn a_scale_that_is_not_finite_is_named_with_its_tensor() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let x = Tensor::randn(0f32, 1.0, (3, 512), &Device::Cpu).unwrap();
        // Where the file has an f16 of a scale or an offset, and the number that is named.
        for (dtype, at, number) in [
            (GgmlDType::F16, 10, 5),
            (GgmlDType::Q4_0, 18, 32),
            (GgmlDType::Q4_1, 2, 0),
            (GgmlDType::Q5_0, 22, 32),
            (GgmlDType::Q5_1, 24 + 2, 32),
            (GgmlDType::Q8_0, 2 * 34, 64),
            (GgmlDType::Q2K, 82, 0),
            (GgmlDType::Q3K, 110 + 108, 256),
            (GgmlDType::Q4K, 144 + 2, 256),
            (GgmlDType::Q5K, 176 + 2, 256),
            (GgmlDType::Q6K, 208, 0),
        ] {
            let tensor = QTensor::quantize(&x, dtype).unwrap();
            gguf_file::write(&mut File::create(&path).unwrap(), &[], &[("w", &tensor)]).unwrap();
            let gguf = Gguf::read(&path).unwrap();
            assert!(gguf.check_finite().is_ok(), "{dtype:?}");
            let start = gguf.byte_range("w", &gguf.content.tensor_infos["w"]).unwrap().start;
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[start + at..][..2].copy_from_slice(&[0x00, 0xfc]);
            std::fs::write(&path, bytes).unwrap();
            let error = Gguf::read(&path).unwrap().check_finite().unwrap_err().to_string();
            let words = format!("tensor w is not finite: its number {number} is ");
            assert!(error.contains("m.gguf") && error.contains(&words), "{dtype:?}: {error}");
        }
    }

    #[test]
    fn a_tensor_that_is_not_as_expected_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let x = Tensor::zeros((2, 32), candle_core::DType::F32, &Device::Cpu).unwrap();
        let tensor = QTensor::quantize(&x, GgmlDType::Q8_1).unwrap();
        gguf_file::write(&mut File::create(&path).unwrap(), &[], &[("w", &tensor)]).unwrap();
        let error = |gguf: &Gguf, name, shape: [usize; 2]| {
            gguf.matrix_of_rows(name, &[shape[1], shape[0]], shape, |row| row).err().unwrap().to_string()
        };
        let gguf = Gguf::read(&path).unwrap();
        assert!(error(&gguf, "v", [32, 2]).contains("tensor v is missing"));
        assert!(error(&gguf, "w", [32, 3]).contains("[2, 32]"));
        assert!(error(&gguf, "w", [32, 2]).contains("tensor w is Q8_1; read are F32"));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 32]).unwrap();
        assert!(error(&Gguf::read(&path).unwrap(), "w", [32, 2]).contains("past the end of the file"));
        std::fs::write(&path, &bytes[..9]).unwrap();
        assert!(Gguf::read(&path).is_err());
    }

    #[test]
    fn a_vector_of_floats_is_read_and_a_quantised_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let expected = [1.0, -0.5, 384.0, 0.0];
        let x = Tensor::new(&expected.repeat(8)[..], &Device::Cpu).unwrap();
        let read = |dtype| {
            let tensor = QTensor::quantize(&x, dtype).unwrap();
            gguf_file::write(&mut File::create(&path).unwrap(), &[], &[("v", &tensor)]).unwrap();
            Gguf::read(&path).unwrap().vector("v", 32)
        };
        for dtype in [GgmlDType::F32, GgmlDType::F16, GgmlDType::BF16] {
            assert_eq!(read(dtype).unwrap(), expected.repeat(8), "{dtype:?}");
        }
        let error = read(GgmlDType::Q8_0).unwrap_err().to_string();
        assert!(error.contains("tensor v is Q8_0; vectors are read as F32"), "{error}");
    }

    #[test]
    fn each_type_that_is_kept_in_a_wider_one_is_told_once() {
        use GgmlDType::{F16, F32, Q3K, Q4K, Q5_0, Q8_0};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let x = Tensor::randn(0f32, 1.0, (3, 256), &Device::Cpu).unwrap();
        let told = |dtypes: &[GgmlDType]| {
            let tensors: Vec<(String, QTensor)> = (0..)
                .zip(dtypes)
                .map(|(index, dtype)| (format!("w{index}"), QTensor::quantize(&x, *dtype).unwrap()))
                .collect();
            let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
            gguf_file::write(&mut File::create(&path).unwrap(), &[], &tensors).unwrap();
            Gguf::read(&path).unwrap().widened_types()
        };
        let expected = "the numbers of these types are unchanged, but kept in wider types: \
                        F16 in f32 (32 bits each in memory, 16 in the file), \
                        Q3_K in 8 bits (12 bits each in memory, 3.4375 in the file), \
                        Q5_0 in 8 bits (10 bits each in memory, 5.5 in the file)";
        assert_eq!(told(&[F32, Q5_0, F16, Q4K, Q3K, Q5_0, Q8_0]).as_deref(), Some(expected));
        assert_eq!(told(&[F32, Q4K, Q8_0]), None);
    }

    /// A file with one tensor of 64 bytes. Its dimensions and metadata may be false.
    fn forged(dimensions: [u64; 2], metadata: &[(&str, u32)]) -> Result<Gguf, LoadError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let bytes = [forged_header(&[("w", 0)], dimensions, metadata), vec![0; 64]].concat();
        std::fs::write(&path, bytes).unwrap();
        Gguf::read(&path)
    }

    /// The header of a file with tensors, each with its name and the number of its type.
    fn forged_header(tensors: &[(&str, u32)], dimensions: [u64; 2], metadata: &[(&str, u32)]) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        let text = |bytes: &mut Vec<u8>, text: &str| {
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        };
        bytes.extend(3_u32.to_le_bytes());
        [tensors.len(), metadata.len()].iter().for_each(|count| bytes.extend((*count as u64).to_le_bytes()));
        for (key, value) in metadata {
            text(&mut bytes, key);
            [4_u32, *value].iter().for_each(|it| bytes.extend(it.to_le_bytes()));
        }
        for (name, number) in tensors {
            text(&mut bytes, name);
            bytes.extend(2_u32.to_le_bytes());
            dimensions.iter().for_each(|length| bytes.extend(length.to_le_bytes()));
            bytes.extend(number.to_le_bytes());
            bytes.extend(0_u64.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn a_type_that_is_not_read_is_refused_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        for (number, message) in [
            (16, "a tensor is IQ2_XXS; read are F32, F16, BF16, Q8_0"),
            (23, "a tensor is IQ4_XS; read are F32"),
            (29, "a tensor is IQ1_M; read are F32"),
            (34, "a tensor is TQ1_0; read are F32"),
            (39, "a tensor is MXFP4; read are F32"),
            (41, "a tensor is Q1_0; read are F32"),
            (31, "a tensor is of the unknown type 31; read are F32"),
            (99, "a tensor is of the unknown type 99; read are F32"),
        ] {
            let tensors = [("first", 12), ("w", number), ("last", 20)];
            let header = forged_header(&tensors, [32, 4], &[("general.alignment", 64)]);
            std::fs::write(&path, &header).unwrap();
            let errors = [Gguf::read(&path).err().unwrap(), Gguf::architecture(&path).unwrap_err()];
            for error in errors.map(|error| error.to_string()) {
                assert!(error.contains("m.gguf") && error.contains(message), "{error}");
            }
        }
        // A file that ends within its table has a type that is read.
        let header = forged_header(&[("w", 12)], [32, 4], &[]);
        for missing in 1..header.len() {
            std::fs::write(&path, &header[..header.len() - missing]).unwrap();
            let error = Gguf::read(&path).err().unwrap().to_string();
            assert!(!error.contains("read are"), "{missing}: {error}");
        }
    }

    #[test]
    fn sizes_beyond_the_file_are_refused_before_memory_is_allocated() {
        for (dimensions, message) in [
            ([1 << 33, 1 << 31], "is too large"),
            ([1 << 32, 1 << 32], "is too large"),
            ([u64::MAX, 1], "is too large"),
            ([1 << 20, 1 << 20], "past the end of the file"),
            ([32, 1], "past the end of the file"),
        ] {
            let gguf = forged(dimensions, &[]).unwrap();
            let [depth, width] = dimensions.map(|length| length as usize);
            let error = gguf.check("w", [depth, width]).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
            let error = gguf
                .matrix_of_rows("w", &[width, depth], [depth, width], |row| row)
                .err()
                .unwrap()
                .to_string();
            assert!(error.contains(message), "{error}");
        }
        let error = forged([4, 4], &[("general.alignment", 0)]).err().unwrap().to_string();
        assert!(error.contains("general.alignment is 0"), "{error}");
    }
}
