//! Checks whether a network, on its device and in its precision, computes the same as on a CPU in f32. Tests compare
//! the results of a CPU in f32 with the reference library. Owns no state.

use candle_core::Device;

use crate::config::Dtype;
use crate::model::{ForwardError, LoadError, LoadSpec, Unfit};

/// Whether the comparison is needed: a CPU in f32 is the reference itself.
pub fn needs_comparison(device: &Device, dtype: Dtype) -> bool {
    !device.is_cpu() || dtype != Dtype::F32
}

/// Returns the largest accepted error of a vector, relative to its Euclidean norm. In f32, results differ by the order
/// of sums; in half precision, by rounding in every layer. The results of a broken device differ by much more.
pub fn tolerance(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 1e-3,
        Dtype::F16 => 0.025,
        // bf16 has three bits of precision fewer than f16.
        Dtype::Bf16 => 0.2,
        // 8 bits, with a scale for each 32 numbers.
        Dtype::Int8 => 0.2,
    }
}

/// Compares `found`, the vector of a known input, with `expected`, which a CPU computes in f32. A vector is None if any
/// of its numbers is not finite. `what` names the input.
///
/// # Errors
/// [`LoadError::Unfit`] if they differ.
pub fn compare(
    LoadSpec { device, dtype, .. }: &LoadSpec,
    what: &str,
    found: Option<&[f32]>,
    expected: Option<&[f32]>,
) -> Result<(), LoadError> {
    // If the result is not finite even on a CPU, the weights are at fault. That is reported later.
    let Some(expected) = expected else { return Ok(()) };
    let error = found.map_or(f64::NAN, |found| distance(found, expected));
    let tolerance = tolerance(*dtype);
    if error <= tolerance {
        return Ok(());
    }
    let dtype = dtype.name();
    let reason = format!(
        "it computes wrongly: of a known {what} the vector in {dtype} is off by {error:.2e} of its length from what \
         a CPU computes in f32, and {tolerance} is allowed; look at the card (dcgmi diag -r 3, nvidia-smi -q -d ECC) and \
         take it out of `devices`; if all cards fail, the model is unfit for this precision (pool.dtype)"
    );
    Err(LoadError::Unfit { device: device.clone(), why: Unfit::WrongResult, reason })
}

/// Makes the load error of a forward pass that fails over known inputs.
pub fn failed(spec: &LoadSpec, error: &ForwardError) -> LoadError {
    spec.failed(format!("the test forward pass fails: {error}"))
}

/// Returns the Euclidean distance of `found` from `expected`, relative to the norm of `expected`.
pub fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let pairs = found.iter().zip(expected).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let (error, norm) =
        pairs.fold((0.0, 0.0), |(error, norm), (a, b)| (error + (a - b).powi(2), norm + b * b));
    (error / f64::max(norm, f64::MIN_POSITIVE)).sqrt()
}
