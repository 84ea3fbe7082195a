//! The weights of a linear layer on a CPU, in any number format. Decides which layout and which product a format gets.
//! Owns the weights.

use super::matrix::{Group, Matrix};
use super::number_format::{NumberFormat, RowFormat};
#[cfg(target_arch = "x86_64")]
use super::signed_bytes::{ByteProducts, SignedBytes};
use super::{Panels, Rows, by_blocks, multiply_rows};
use crate::cpu::may_use_amx;
#[cfg(target_arch = "x86_64")]
use crate::cpu::{may_use_avx_vnni, may_use_avx2, may_use_vnni};
use crate::{may_use_bf16, may_use_int16};

/// The depth of a matrix is not a multiple of the group size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{format:?} needs a multiple of {} numbers in each row, and there are {depth}", format.group())]
pub struct NotWholeGroups {
    /// The requested number format.
    pub format: NumberFormat,
    /// The numbers in each row of the checkpoint's weights, and in each column of the packed matrix.
    pub depth: usize,
}

/// The right matrix of a linear layer's product, `[depth, width]`.
pub enum Linear {
    /// In f32.
    Panels(Panels),
    /// In bf16, or quantised with an offset.
    Narrow(Matrix),
    /// In signed bytes.
    #[cfg(target_arch = "x86_64")]
    Bytes(SignedBytes),
}

impl Linear {
    /// Packs a matrix that is given by its columns, `[width, depth]`, as checkpoints store linear layers. `Bits8` becomes
    /// `SignedBytes`, whose rows are rounded to 8 bits, where the CPU multiplies bytes. Rows are converted to bf16 for
    /// a matrix in bf16 where the CPU multiplies such numbers faster ([`may_use_bf16`]), and with AMX for a quantised one.
    ///
    /// # Errors
    /// `depth` is not a multiple of the group size of `format`.
    pub fn new(columns: &[f32], depth: usize, format: NumberFormat) -> Result<Self, NotWholeGroups> {
        if !depth.is_multiple_of(format.group()) {
            return Err(NotWholeGroups { format, depth });
        }
        Ok(match format {
            NumberFormat::F32 => Self::Panels(Panels::new(columns, depth)),
            NumberFormat::Bf16 => {
                let matrix = Matrix::of_bf16(columns, depth);
                Self::Narrow(if may_use_bf16() { matrix.with_rows_as(RowFormat::Bf16) } else { matrix })
            }
            _ => {
                #[cfg(target_arch = "x86_64")]
                if format == NumberFormat::Bits8
                    && let Some(products) = byte_products()
                {
                    return Ok(Self::Bytes(SignedBytes::new(columns, depth, products)));
                }
                let matrix = quantised_matrix(columns, depth, format);
                // With AMX, products of bf16 are so fast that unpacking the matrix for each block of rows pays.
                Self::Narrow(if may_use_amx() { matrix.with_rows_as(RowFormat::Bf16) } else { matrix })
            }
        })
    }

    /// The number of rows.
    pub fn depth(&self) -> usize {
        match self {
            Self::Panels(panels) => panels.depth(),
            Self::Narrow(matrix) => matrix.depth(),
            #[cfg(target_arch = "x86_64")]
            Self::Bytes(matrix) => matrix.depth(),
        }
    }

    /// The number of columns.
    pub fn width(&self) -> usize {
        match self {
            Self::Panels(panels) => panels.width(),
            Self::Narrow(matrix) => matrix.width(),
            #[cfg(target_arch = "x86_64")]
            Self::Bytes(matrix) => matrix.width(),
        }
    }

    /// `out` `[count, width]` ← `rows` `[count, depth]` times this matrix, in blocks of rows. `then` gets each block
    /// while it is in the cache, with the index of its first row.
    pub fn multiply(&self, rows: &[f32], out: &mut [f32], then: impl Fn(usize, &mut [f32]) + Send + Sync) {
        if let Self::Panels(panels) = self {
            return multiply_rows(rows, panels, out, then);
        }
        let (depth, width) = (self.depth(), self.width());
        by_blocks(out, width, |first, out| {
            self.multiply_single_threaded(&rows[first * depth..][..out.len() / width * depth], out);
            then(first, out);
        });
    }

    /// As [`multiply`](Self::multiply), but on this thread alone, and in one block.
    pub fn multiply_single_threaded(&self, rows: &[f32], out: &mut [f32]) {
        match self {
            Self::Panels(panels) => Rows::new(rows, panels.depth()).multiply(0, panels, out, panels.width()),
            Self::Narrow(matrix) => matrix.multiply_single_threaded(rows, out),
            #[cfg(target_arch = "x86_64")]
            Self::Bytes(matrix) => matrix.multiply(rows, out),
        }
    }
}

/// The fastest instructions that may multiply bytes. None if there are none, or if AMX multiplies bf16 faster.
#[cfg(target_arch = "x86_64")]
fn byte_products() -> Option<ByteProducts> {
    match () {
        () if may_use_amx() => None,
        () if may_use_vnni() => Some(ByteProducts::Avx512Vnni),
        () if !may_use_avx2() => None,
        () if may_use_avx_vnni() => Some(ByteProducts::AvxVnni),
        () => Some(ByteProducts::Avx2),
    }
}

impl Matrix {
    /// Packs a matrix that is given by its columns, `[width, depth]`, for products with few rows, such as those of a step of
    /// some sequences. Rows are converted too if the CPU multiplies them faster so: to bf16 for a matrix in bf16, to 16
    /// bits for a quantised one.
    ///
    /// # Errors
    /// `depth` is not a multiple of the group size of `format`.
    pub fn for_steps(columns: &[f32], depth: usize, format: NumberFormat) -> Result<Self, NotWholeGroups> {
        if !depth.is_multiple_of(format.group()) {
            return Err(NotWholeGroups { format, depth });
        }
        let (matrix, rows) = match format {
            NumberFormat::F32 => return Ok(Self::of_f32(columns, depth)),
            NumberFormat::Bf16 => (Self::of_bf16(columns, depth), may_use_bf16().then_some(RowFormat::Bf16)),
            _ => (quantised_matrix(columns, depth, format), may_use_int16().then_some(RowFormat::Int16)),
        };
        Ok(matrix.with_rows_as(rows.unwrap_or(RowFormat::F32)))
    }
}

/// Quantises a matrix that is given by its columns, `[width, depth]`.
fn quantised_matrix(columns: &[f32], depth: usize, format: NumberFormat) -> Matrix {
    let group = |column: usize, index: usize| {
        let first = column * depth + index * format.group();
        quantised(&columns[first..][..format.group()], format.max_quantised())
    };
    Matrix::of_groups(format, [depth, columns.len() / depth], &group)
}

/// Quantises a group of numbers to whole numbers from 0 to `max`, rounded to the nearest. The smallest and the largest
/// number of the group are exact.
fn quantised(numbers: &[f32], max: u8) -> Group {
    let low = numbers.iter().copied().fold(f32::INFINITY, f32::min);
    let high = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (high - low) / f32::from(max);
    let mut q = [0; 32];
    if scale > 0.0 {
        for (q, number) in q.iter_mut().zip(numbers) {
            // The conversion truncates. `round` would be a call of a function for each number.
            *q = ((number - low) / scale + 0.5) as u8;
        }
    }
    // A group with a number that is not finite becomes NaN, which the check of the outputs finds.
    let offset = if numbers.iter().all(|number| number.is_finite()) { low } else { f32::NAN };
    Group { scale, offset, q }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{noise, on_every_cpu};
    use super::*;

    fn flat(shape: &[usize], seed: u32) -> Vec<f32> {
        noise(shape, 1.0, seed)
    }

    #[test]
    fn every_format_gives_the_plain_product_within_its_rounding() {
        on_every_cpu(|| {
            for (format, tolerance) in
                [(NumberFormat::F32, 1e-6), (NumberFormat::Bf16, 3e-3), (NumberFormat::Bits8, 1e-2)]
            {
                for (rows, width) in [(1, 7), (30, 64), (70, 130)] {
                    let (x, columns) = (flat(&[rows, 96], 3), flat(&[width, 96], 4));
                    let layer = Linear::new(&columns, 96, format).unwrap();
                    let mut out = vec![f32::NAN; rows * width];
                    layer.multiply(&x, &mut out, |_, block| block.iter_mut().for_each(|y| *y += 1.0));
                    for (at, ours) in out.iter().enumerate() {
                        let (row, column) = (&x[at / width * 96..][..96], &columns[at % width * 96..][..96]);
                        let products = row.iter().zip(column).map(|(a, b)| f64::from(*a) * f64::from(*b));
                        let size: f64 = products.clone().map(f64::abs).sum();
                        let error = (f64::from(*ours) - 1.0 - products.sum::<f64>()).abs();
                        assert!(
                            error < tolerance * size,
                            "{format:?} {rows}×{width} {at}: {error} of {size}"
                        );
                    }
                }
            }
        });
    }

    #[test]
    fn a_group_keeps_its_extremes_and_is_nan_if_a_number_is_not_finite() {
        let numbers: Vec<f32> = (0..32).map(|n| n as f32 - 9.5).collect();
        let Group { scale, offset, q } = quantised(&numbers, 255);
        for (q, number) in q.iter().zip(&numbers) {
            assert!((f32::from(*q) * scale + offset - number).abs() <= scale / 2.0 + 1e-6);
        }
        assert_eq!((q[0], q[31]), (0, 255));
        assert_eq!(quantised(&[0.25; 32], 255), Group { scale: 0.0, offset: 0.25, q: [0; 32] });
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(quantised(&[1.0, bad, 2.0], 255).offset.is_nan());
        }
    }

    #[test]
    fn a_depth_that_is_not_a_multiple_of_the_group_is_refused() {
        let error = Linear::new(&[0.0; 80], 40, NumberFormat::Bits8).err().unwrap().to_string();
        assert!(error.contains("multiple of 32") && error.contains("40"), "{error}");
    }
}
