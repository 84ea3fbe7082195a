//! The tensors and metadata of a GGUF file. Decides which number types are read, and whether their numbers stay
//! quantised or become floats. Owns the file's mapping. Every range in the file is checked before it is read.

use std::collections::BTreeSet;
use std::io::{Cursor, Read, Seek};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use memmap2::Mmap;

use super::finite;
use super::weights::map_file;
use crate::model::LoadError;
use crate::model::ops::{Group, Matrix, NumberFormat};

/// The number types of matrices that are read.
const READ_TYPES: &str = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and Q2_K to Q6_K";

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
        let content = read_content(&mut Cursor::new(&*bytes));
        let content = content.map_err(|reason| fault(first_unread_type(&bytes).unwrap_or(reason)))?;
        Ok(Self { path: path.to_owned(), content, bytes })
    }

    /// The architecture that a file names. Reads only the file's header.
    ///
    /// # Errors
    /// [`LoadError::File`] if it is not a GGUF file, or names no architecture.
    pub fn architecture(path: &Path) -> Result<String, LoadError> {
        let file = Self::read(path)?;
        let architecture = file.text("general.architecture").map(str::to_owned);
        architecture.ok_or_else(|| file.fault("the file names no general.architecture".to_owned()))
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

    /// The number types of its tensors that take more bits here than in the file.
    pub fn widened_types(&self) -> Vec<String> {
        let types = self.content.tensor_infos.values().map(|info| info.ggml_dtype).filter(|dtype| {
            matches!(
                dtype,
                GgmlDType::Q2K | GgmlDType::Q3K | GgmlDType::Q5_0 | GgmlDType::Q5_1 | GgmlDType::Q5K
            )
        });
        let types: BTreeSet<String> = types.map(|dtype| format!("{dtype:?}")).collect();
        types.into_iter().collect()
    }

    /// Checks the numbers of all tensors, and the scales of those that are quantised.
    ///
    /// # Errors
    /// [`LoadError::File`] with the first one that is not finite.
    pub fn check_finite(&self) -> Result<(), LoadError> {
        let mut tensors: Vec<_> = self.content.tensor_infos.iter().collect();
        tensors.sort_by_key(|(_, info)| info.offset);
        for (name, info) in tensors {
            let (info, bytes) = self.tensor(name, info.shape.dims())?;
            let block_bytes = info.ggml_dtype.type_size();
            // Where a block has its f16 numbers.
            let in_blocks = |scales: Range<usize>| {
                let mut blocks = bytes.chunks_exact(block_bytes).enumerate();
                blocks.find_map(|(block, bytes)| {
                    let (_, number) = finite::not_finite_f16(&bytes[scales.clone()])?;
                    Some((block * info.ggml_dtype.block_size(), number))
                })
            };
            let found = match info.ggml_dtype {
                GgmlDType::F32 => finite::not_finite_f32(bytes),
                GgmlDType::F16 => finite::not_finite_f16(bytes),
                GgmlDType::BF16 => finite::not_finite_bf16(bytes),
                GgmlDType::Q4_0 | GgmlDType::Q5_0 | GgmlDType::Q8_0 => in_blocks(0..2),
                GgmlDType::Q4_1 | GgmlDType::Q5_1 | GgmlDType::Q4K | GgmlDType::Q5K => in_blocks(0..4),
                GgmlDType::Q3K | GgmlDType::Q6K => in_blocks(block_bytes - 2..block_bytes),
                GgmlDType::Q2K => in_blocks(block_bytes - 4..block_bytes),
                // Loading refuses it.
                _ => None,
            };
            if let Some((position, number)) = found {
                return Err(self.fault(finite::problem(name, position, number)));
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

    /// The numbers of a vector of this length.
    ///
    /// # Errors
    /// [`LoadError::File`] naming the tensor.
    pub fn vector(&self, name: &str, length: usize) -> Result<Vec<f32>, LoadError> {
        let (info, bytes) = self.tensor(name, &[length])?;
        match info.ggml_dtype {
            GgmlDType::F32 => Ok(bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()),
            other => Err(self.fault(format!("tensor {name} is {other:?}; vectors are read as F32"))),
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
        let floats = |read: fn(&[u8]) -> f32| {
            let size = dtype.type_size();
            let columns: Vec<f32> =
                (0..width).flat_map(|column| row_of(column).chunks_exact(size).map(read)).collect();
            columns
        };
        let groups = |format, read: fn(&[u8], usize) -> Group| {
            Matrix::of_groups(format, [depth, width], |column, group| read(row_of(column), group))
        };
        Ok(match dtype {
            GgmlDType::F32 => Matrix::of_f32(&floats(f32_number), depth),
            GgmlDType::F16 => Matrix::of_f32(&floats(f16_number), depth),
            GgmlDType::BF16 => Matrix::of_bf16(&floats(bf16_number), depth),
            GgmlDType::Q4_0 => groups(NumberFormat::Bits4, q4_0),
            GgmlDType::Q4_1 => groups(NumberFormat::Bits4, q4_1),
            GgmlDType::Q8_0 => groups(NumberFormat::Bits8, q8_0),
            GgmlDType::Q4K => groups(NumberFormat::Bits4, q4_k),
            GgmlDType::Q6K => groups(NumberFormat::Bits8By16, q6_k),
            // These have no kernel of their own. Their numbers stay as they are, in 8 bits each.
            GgmlDType::Q5_0 => groups(NumberFormat::Bits8, q5_0),
            GgmlDType::Q5_1 => groups(NumberFormat::Bits8, q5_1),
            GgmlDType::Q5K => groups(NumberFormat::Bits8, q5_k),
            GgmlDType::Q3K => groups(NumberFormat::Bits8By16, q3_k),
            GgmlDType::Q2K => groups(NumberFormat::Bits8By16, q2_k),
            other => return Err(self.fault(format!("tensor {name} is {other:?}; read are {READ_TYPES}"))),
        })
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
            return Err(
                self.fault(format!("tensor {name} has rows that are no multiple of a block of {dtype:?}"))
            );
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

/// Reads a file's header and metadata. The library limits each count in it by the size of the file.
fn read_content<R: Read + Seek>(file: &mut R) -> Result<Content, String> {
    // The library divides by the alignment that the file states, and panics if that is 0.
    let read = catch_unwind(AssertUnwindSafe(|| Content::read(file)));
    match read {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(_) => Err("its metadata cannot be read: general.alignment is 0".to_owned()),
    }
}

/// The number types that the library does not know, by their numbers in GGUF files. Where the library refuses a file, the
/// first of its tensors with such a type is named.
const UNREAD_TYPES: [(u32, &str); 17] = [
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

/// Why a file is refused: its first tensor with a number type of [`UNREAD_TYPES`]. None if there is none.
fn first_unread_type(file: &[u8]) -> Option<String> {
    let mut rest = file.strip_prefix(b"GGUF")?.get(4..)?;
    let (tensors, values) = (take_u64(&mut rest)?, take_u64(&mut rest)?);
    // Each of them takes some bytes of the file, so that its length bounds the loops.
    for _ in 0..values {
        take_text(&mut rest)?;
        let kind = take_u32(&mut rest)?;
        skip_value(&mut rest, kind, 2)?;
    }
    for _ in 0..tensors {
        let name = take_text(&mut rest)?;
        let dimensions = usize::try_from(take_u32(&mut rest)?).ok()?;
        rest = rest.get(dimensions.checked_mul(8)?..)?;
        let kind = take_u32(&mut rest)?;
        take_u64(&mut rest)?;
        if let Some((_, kind)) = UNREAD_TYPES.iter().find(|(number, _)| *number == kind) {
            let name = String::from_utf8_lossy(name);
            return Some(format!("tensor {name} is {kind}, which is not read; read are {READ_TYPES}"));
        }
    }
    None
}

fn take_u32(bytes: &mut &[u8]) -> Option<u32> {
    let (number, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u32::from_le_bytes(*number))
}

fn take_u64(bytes: &mut &[u8]) -> Option<u64> {
    let (number, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*number))
}

fn take_text<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(take_u64(bytes)?).ok()?;
    let (text, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(text)
}

/// Skips a value of the metadata; lists may be nested in `depth` others.
fn skip_value(bytes: &mut &[u8], kind: u32, depth: usize) -> Option<()> {
    let size = match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        8 => return take_text(bytes).map(drop),
        9 if depth > 0 => {
            let (kind, count) = (take_u32(bytes)?, take_u64(bytes)?);
            return (0..count).try_for_each(|_| skip_value(bytes, kind, depth - 1));
        }
        _ => return None,
    };
    *bytes = bytes.get(size..)?;
    Some(())
}

fn f32_number(bytes: &[u8]) -> f32 {
    bytes.first_chunk().map_or(0.0, |x| f32::from_le_bytes(*x))
}

fn bf16_number(bytes: &[u8]) -> f32 {
    bytes.first_chunk().map_or(0.0, |x| f32::from_bits(u32::from(u16::from_le_bytes(*x)) << 16))
}

fn f16_number(bytes: &[u8]) -> f32 {
    bytes.first_chunk().map_or(0.0, |x| f16_value(u16::from_le_bytes(*x)))
}

/// The value of an f16.
fn f16_value(bits: u16) -> f32 {
    let (sign, magnitude) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff));
    let value = match magnitude >> 10 {
        // Shifted by 13, the number is an f32 that is too small by a factor of 2^112: the exponent's bias is 127 in an
        // f32, and 15 in an f16. The multiplication also makes subnormal numbers normal.
        0..31 => (f32::from_bits(magnitude << 13) * f32::from_bits((112 + 127) << 23)).to_bits(),
        _ => 0x7f80_0000 | magnitude << 13,
    };
    f32::from_bits(sign | value)
}

/// 32 numbers of 4 bits. The first 16 are in the lower halves of the bytes, the others in the upper halves.
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    let mut q = [0; 32];
    for (index, byte) in bytes.iter().enumerate() {
        (q[index], q[index + 16]) = (byte & 15, byte >> 4);
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

/// The block holds a scale, then 32 signed bytes. A `Group` has bytes without a sign, so 128 is added to them here.
fn q8_0(row: &[u8], group: usize) -> Group {
    let block = &row[group * 34..][..34];
    let scale = f16_number(block);
    let mut q = [0; 32];
    q.iter_mut().zip(&block[2..]).for_each(|(q, byte)| *q = byte ^ 0x80);
    Group { scale, offset: -128.0 * scale, q }
}

/// The scale and the minimum of a group of 32 numbers in a block of Q4_K or Q5_K.
fn k_scale_and_min(packed: &[u8], index: usize) -> (u8, u8) {
    // 12 bytes hold the scales and the minimums of the 8 groups, each a number of 6 bits. For groups 0 to 3, the lower
    // 6 bits of bytes 0 to 3 are the scales, and the lower 6 bits of bytes 4 to 7 the minimums. For groups 4 to 7, the
    // lower halves of bytes 8 to 11 are the lower 4 bits of the scales, and their upper halves the lower 4 bits of the
    // minimums. The upper 2 bits of these scales are the upper 2 bits of bytes 0 to 3, and those of the minimums of
    // bytes 4 to 7.
    match index {
        0..4 => (packed[index] & 63, packed[index + 4] & 63),
        _ => (
            packed[index + 4] & 15 | packed[index - 4] >> 6 << 4,
            packed[index + 4] >> 4 | packed[index] >> 6 << 4,
        ),
    }
}

/// The block holds 256 4-bit numbers in 8 groups. It has a scale and a minimum, which are multiplied by the scale and
/// the minimum of each group.
fn q4_k(row: &[u8], group: usize) -> Group {
    let block = &row[group / 8 * 144..][..144];
    let (scale, min, packed, numbers) =
        (f16_number(block), f16_number(&block[2..]), &block[4..16], &block[16..]);
    let index = group % 8;
    let (group_scale, group_min) = k_scale_and_min(packed, index);
    let mut q = [0; 32];
    // Two groups share 32 bytes: one has the lower halves, the other the upper ones.
    for (q, byte) in q.iter_mut().zip(&numbers[index / 2 * 32..]) {
        *q = if index.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
    }
    Group { scale: scale * f32::from(group_scale), offset: -(min * f32::from(group_min)), q }
}

/// 32 numbers of 5 bits, whose upper bits are in the first 4 bytes, number 0's in the lowest bit.
fn fives(bytes: &[u8]) -> [u8; 32] {
    let high = bytes.first_chunk().map_or(0, |bits| u32::from_le_bytes(*bits));
    let mut q = nibbles(&bytes[4..]);
    (0..).zip(&mut q).for_each(|(index, q)| *q |= ((high >> index & 1) as u8) << 4);
    q
}

/// The block holds a scale, then 32 5-bit numbers, stored with 16 added.
fn q5_0(row: &[u8], group: usize) -> Group {
    let block = &row[group * 22..][..22];
    let scale = f16_number(block);
    Group { scale, offset: -16.0 * scale, q: fives(&block[2..]) }
}

/// The block holds a scale and an offset, then 32 5-bit numbers.
fn q5_1(row: &[u8], group: usize) -> Group {
    let block = &row[group * 24..][..24];
    Group { scale: f16_number(block), offset: f16_number(&block[2..]), q: fives(&block[4..]) }
}

/// As [`q4_k`], with a fifth bit of each number: that of group g is bit g of 32 bytes that all groups share.
fn q5_k(row: &[u8], group: usize) -> Group {
    let block = &row[group / 8 * 176..][..176];
    let (packed, high, numbers) = (&block[4..16], &block[16..48], &block[48..]);
    let index = group % 8;
    let (group_scale, group_min) = k_scale_and_min(packed, index);
    let mut q = [0; 32];
    for ((q, byte), high) in q.iter_mut().zip(&numbers[index / 2 * 32..]).zip(high) {
        let lower = if index.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
        *q = lower | (high >> index & 1) << 4;
    }
    let (scale, min) = (f16_number(block), f16_number(&block[2..]));
    Group { scale: scale * f32::from(group_scale), offset: -(min * f32::from(group_min)), q }
}

/// The 16 2-bit numbers of a group, of 256 in 64 bytes. The block has two halves of 128 numbers. The four quarters of 32
/// numbers in a half share bytes, and have two groups each.
fn twos(bytes: &[u8], index: usize) -> [u8; 32] {
    let (half, quarter, first) = (index / 8, index % 8 / 2, index % 2 * 16);
    let mut q = [0; 32];
    let numbers = &bytes[half * 32 + first..];
    q.iter_mut().take(16).zip(numbers).for_each(|(q, byte)| *q = byte >> (2 * quarter) & 3);
    q
}

/// The block holds 256 3-bit numbers, stored with 4 added, in 16 groups of 16: first the upper bits, then the lower two.
/// Its scale is multiplied by the scale of each group, of 6 bits, stored with 32 added.
fn q3_k(row: &[u8], group: usize) -> Group {
    let block = &row[group / 16 * 110..][..110];
    let (high, rest) = block.split_at(32);
    let (low, rest) = rest.split_at(64);
    let (scales, scale) = rest.split_at(12);
    let index = group % 16;
    let mut q = twos(low, index);
    for (q, high) in q.iter_mut().take(16).zip(&high[index % 2 * 16..]) {
        *q |= (high >> (index / 2) & 1) << 2;
    }
    // The lower 4 bits of the scales are in the halves of the first 8 bytes, and the upper 2 in the last 4 bytes.
    let lower = if index < 8 { scales[index] & 15 } else { scales[index - 8] >> 4 };
    let group_scale = lower | (scales[8 + index % 4] >> (2 * (index / 4)) & 3) << 4;
    let scale = f16_number(scale) * (f32::from(group_scale) - 32.0);
    Group { scale, offset: -4.0 * scale, q }
}

/// The block holds 256 2-bit numbers in 16 groups of 16. A byte for each group has its scale and, in the upper half, its
/// minimum, which are multiplied by those of the block.
fn q2_k(row: &[u8], group: usize) -> Group {
    let block = &row[group / 16 * 84..][..84];
    let index = group % 16;
    let (scale, min) = (f16_number(&block[80..]), f16_number(&block[82..]));
    let (group_scale, group_min) = (f32::from(block[index] & 15), f32::from(block[index] >> 4));
    Group { scale: scale * group_scale, offset: -(min * group_min), q: twos(&block[16..80], index) }
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
    fn a_number_type_that_the_library_does_not_know_is_named_with_its_tensor() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let x = Tensor::zeros((2, 32), candle_core::DType::F32, &Device::Cpu).unwrap();
        let tensor = QTensor::quantize(&x, GgmlDType::Q8_0).unwrap();
        let (text, list) =
            (Value::String("text".to_owned()), Value::Array(vec![Value::U32(1), Value::U32(2)]));
        let values = [("a", &text), ("b", &list), ("c", &Value::Bool(true))];
        gguf_file::write(&mut File::create(&path).unwrap(), &values, &[("blk.0.w", &tensor)]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let at = whole.windows(7).position(|bytes| bytes == b"blk.0.w").unwrap();
        for (number, name) in [(20_u32, "IQ4_NL"), (23, "IQ4_XS"), (39, "MXFP4")] {
            let mut bytes = whole.clone();
            // The name is followed by the number of dimensions and two of them.
            bytes[at + 7 + 4 + 16..][..4].copy_from_slice(&number.to_le_bytes());
            std::fs::write(&path, &bytes).unwrap();
            let error = Gguf::read(&path).err().unwrap().to_string();
            assert!(error.contains(&format!("tensor blk.0.w is {name}, which is not read")), "{error}");
            for length in 0..at + 40 {
                std::fs::write(&path, &bytes[..length]).unwrap();
                assert!(Gguf::read(&path).is_err(), "{length}");
            }
        }
    }

    #[test]
    fn a_scale_that_is_not_finite_is_named_with_its_tensor() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let x = Tensor::randn(0f32, 1.0, (3, 512), &Device::Cpu).unwrap();
        // Where the file has an f16, and the number that is named.
        for (dtype, at, number) in [
            (GgmlDType::F16, 10, 5),
            (GgmlDType::Q4_0, 18, 32),
            (GgmlDType::Q4_1, 2, 0),
            (GgmlDType::Q5_0, 22, 32),
            (GgmlDType::Q5_1, 2, 0),
            (GgmlDType::Q8_0, 2 * 34, 64),
            (GgmlDType::Q2K, 82, 0),
            (GgmlDType::Q3K, 110 + 108, 256),
            (GgmlDType::Q4K, 144 + 2, 256),
            (GgmlDType::Q5K, 2, 0),
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
            let words = format!("tensor w is not finite: its number {number} is -inf");
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
        assert!(error(&gguf, "w", [32, 2]).contains("Q8_1; read are F32"));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 32]).unwrap();
        assert!(error(&Gguf::read(&path).unwrap(), "w", [32, 2]).contains("past the end of the file"));
        std::fs::write(&path, &bytes[..9]).unwrap();
        assert!(Gguf::read(&path).is_err());
    }

    /// A file with one tensor of 64 bytes. Its dimensions and metadata may be false.
    fn forged(dimensions: [u64; 2], metadata: &[(&str, u32)]) -> Result<Gguf, LoadError> {
        let mut bytes = b"GGUF".to_vec();
        let text = |bytes: &mut Vec<u8>, text: &str| {
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        };
        bytes.extend(3_u32.to_le_bytes());
        [1, metadata.len() as u64].iter().for_each(|count| bytes.extend(count.to_le_bytes()));
        for (key, value) in metadata {
            text(&mut bytes, key);
            [4_u32, *value].iter().for_each(|it| bytes.extend(it.to_le_bytes()));
        }
        text(&mut bytes, "w");
        bytes.extend(2_u32.to_le_bytes());
        dimensions.iter().for_each(|length| bytes.extend(length.to_le_bytes()));
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(0_u64.to_le_bytes());
        bytes.extend([0; 64]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        std::fs::write(&path, bytes).unwrap();
        Gguf::read(&path)
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

    #[test]
    fn f16_numbers_are_read_exactly() {
        for bits in 0..=u16::MAX {
            let expected = half::f16::from_bits(bits).to_f32();
            let ours = super::f16_value(bits);
            assert!(ours.to_bits() == expected.to_bits() || ours.is_nan() && expected.is_nan(), "{bits:x}");
        }
    }
}
