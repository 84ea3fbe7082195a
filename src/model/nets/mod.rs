//! Networks compute numbers from inputs. `tasks` makes the inputs from requests.

#[cfg(feature = "candle-transformers")]
pub mod blip;
mod block;
mod cached_attention;
pub mod decoder;
#[cfg(feature = "candle-transformers")]
pub mod diffusion;
pub mod encoder;
mod fitness;
pub mod held;
pub mod hibari;
pub mod image;
#[cfg(feature = "candle-transformers")]
pub mod text_image;
pub mod whisper;

use candle_core::DType;

use self::fitness::needs_comparison;
use super::load::weights::NumberFormats;
use super::ops::NumberFormat;
use super::{Dtype, LoadError, LoadSpec};

/// The names of a table of architectures.
const fn names<T, const N: usize>(all: &[(&'static str, T); N]) -> [&'static str; N] {
    let mut names = [""; N];
    let mut index = 0;
    while index < N {
        names[index] = all[index].0;
        index += 1;
    }
    names
}

/// Two lists of names in one.
const fn joined<const N: usize>(first: &[&'static str], second: &[&'static str]) -> [&'static str; N] {
    let (mut names, mut index) = ([""; N], 0);
    while index < N {
        names[index] = if index < first.len() { first[index] } else { second[index - first.len()] };
        index += 1;
    }
    names
}

/// The number formats in which a network of linear layers computes on its device. On a CPU, bf16 and int8 are only for
/// the matrices, and all other numbers are f32.
///
/// # Errors
/// [`LoadError::Unsupported`] for a number format that the device does not have.
pub fn number_formats(spec: &LoadSpec) -> Result<NumberFormats, LoadError> {
    let with_matrices = |matrices| NumberFormats { matrices, ..NumberFormats::F32 };
    let on_cpu = spec.device == "cpu";
    match spec.dtype {
        Dtype::Bf16 if on_cpu => Ok(with_matrices(NumberFormat::Bf16)),
        Dtype::Int8 if on_cpu => Ok(with_matrices(NumberFormat::Bits8)),
        _ => uniform_formats(spec),
    }
}

/// Checks that matrices whose rows have these widths can have the number format. Each width comes with its name.
///
/// # Errors
/// [`LoadError::Unsupported`] for a width that the groups of numbers with a common scale do not divide.
pub fn check_widths(spec: &LoadSpec, widths: &[(&str, usize)]) -> Result<(), LoadError> {
    let group = number_formats(spec)?.matrices.group();
    let Some((name, width)) = widths.iter().find(|(_, width)| !width.is_multiple_of(group)) else {
        return Ok(());
    };
    let dtype = spec.dtype.name();
    let reason = format!(
        "dtype is {dtype:?}, which needs widths that are multiples of {group}; the {name} width is {width}"
    );
    Err(spec.unsupported(reason))
}

/// The number format of a network whose numbers all have one type.
///
/// # Errors
/// [`LoadError::Unsupported`] for a number format that only the matrices of linear layers can have, and for one that
/// `auto` chose on a CPU that would be slower than f32.
pub fn uniform_formats(spec: &LoadSpec) -> Result<NumberFormats, LoadError> {
    if spec.is_dtype_auto && spec.device == "cpu" && spec.dtype != Dtype::F32 {
        let reason = "for this network on a CPU, dtype = \"auto\" means f32, which is the fastest there";
        return Err(spec.unsupported(reason));
    }
    let tensors = match spec.dtype {
        Dtype::F32 => DType::F32,
        Dtype::Bf16 => DType::BF16,
        Dtype::F16 => DType::F16,
        Dtype::Int8 => {
            let reason = "dtype is \"int8\", which is only for texts, ViT, speech recognition and speech synthesis on a CPU";
            return Err(spec.unsupported(reason));
        }
    };
    Ok(NumberFormats { tensors, ..NumberFormats::F32 })
}
