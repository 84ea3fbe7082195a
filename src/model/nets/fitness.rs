//! Checks whether a network, on its device and in its number format, computes the same as on a CPU in f32. Tests
//! compare the results of a CPU in f32 with the reference library. Owns no state.

use candle_core::Device;

use crate::config::Dtype;
use crate::model::load::check_finite;
use crate::model::{ForwardError, LoadError, LoadSpec, Unfit};

/// Whether the comparison is needed: a CPU in f32 is the reference itself.
pub fn needs_comparison(device: &Device, dtype: Dtype) -> bool {
    !device.is_cpu() || dtype != Dtype::F32
}

/// Returns the largest accepted error of a vector, relative to its Euclidean norm. In f32, results differ by the order
/// of sums; in 16 bits, by rounding in every layer. The results of a broken device differ by much more.
pub fn tolerance(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 1e-3,
        Dtype::F16 => 0.025,
        // bf16 has three bits of precision fewer than f16.
        Dtype::Bf16 => 0.2,
        // With AVX2 the matrices have 6 bits at worst.
        Dtype::Int8 => 0.2,
    }
}

/// A further bound of each vector's error if `auto` chose the number format. Its cosine is at least 0.985 then.
const AUTO_TOLERANCE: f64 = 0.172;
/// The largest accepted root mean square of all vectors' errors. The mean of their cosines is at least 0.997 then.
const AUTO_MEAN_TOLERANCE: f64 = 0.077;

/// The largest accepted root mean square of the errors of scores in a number format that `auto` chose, relative to the
/// root mean square of the scores' distances from their label's mean over the known inputs. Their correlation is 0.995
/// at least then.
const AUTO_SCORE_TOLERANCE: f64 = 0.1;

/// A known input, and its vectors as the network computes it and as a CPU computes it in f32. A vector is None if any
/// of its numbers is not finite.
pub struct Compared {
    /// Names the input.
    pub what: String,
    /// The network's vector.
    pub found: Option<Vec<f32>>,
    /// The CPU's vector in f32.
    pub expected: Option<Vec<f32>>,
}

/// The number of layers that are compared where the whole network in f32 may take more memory than the worker has.
pub const COMPARED_LAYERS: usize = 2;

/// Compares the logits after one known input, without their mean: what all logits have in common changes no
/// probability, and must not hide a difference. `what` names the input.
///
/// # Errors
/// [`LoadError::Unfit`] if they differ.
pub fn compare_logits(
    spec: &LoadSpec,
    what: &str,
    mut found: Vec<f32>,
    mut expected: Vec<f32>,
) -> Result<(), LoadError> {
    for logits in [&mut found, &mut expected] {
        let mean = logits.iter().sum::<f32>() / logits.len() as f32;
        logits.iter_mut().for_each(|logit| *logit -= mean);
    }
    compare(spec, what, found, expected)
}

/// Compares the vector of one known input. `what` names the input.
///
/// # Errors
/// [`LoadError::Unfit`] if the vectors differ.
pub fn compare(spec: &LoadSpec, what: &str, found: Vec<f32>, expected: Vec<f32>) -> Result<(), LoadError> {
    let finite = |vector: Vec<f32>| vector.iter().all(|x| x.is_finite()).then_some(vector);
    compare_all(spec, &[Compared { what: what.to_owned(), found: finite(found), expected: finite(expected) }])
}

/// As [`compare`], of vectors that two devices have just computed.
///
/// # Errors
/// As [`compare`], and [`LoadError`] if a device fails.
pub fn compare_computed(
    spec: &LoadSpec,
    what: &str,
    found: candle_core::Result<Vec<f32>>,
    expected: candle_core::Result<Vec<f32>>,
) -> Result<(), LoadError> {
    let failed = |error| failed(spec, &ForwardError::from(&error));
    compare(spec, what, found.map_err(failed)?, expected.map_err(failed)?)
}

/// Compares the vectors of known inputs.
///
/// # Errors
/// [`LoadError::File`] if weights are not finite. [`LoadError::Unfit`] with the first input whose vectors differ too
/// much or, if `auto` chose the number format, with the root mean square of all errors.
pub fn compare_all(spec: &LoadSpec, inputs: &[Compared]) -> Result<(), LoadError> {
    let mut errors = Vec::new();
    for Compared { what, found, expected } in inputs {
        let Some(expected) = expected else {
            // Another number format may hide that the weights are at fault. If they are not, the input is no measure.
            check_finite(spec)?;
            continue;
        };
        let error = found.as_ref().map_or(f64::NAN, |found| distance(found, expected));
        check(spec, what, error)?;
        errors.push(error);
    }
    let root_mean_square =
        (errors.iter().map(|error| error * error).sum::<f64>() / errors.len().max(1) as f64).sqrt();
    if !spec.is_dtype_auto || root_mean_square <= AUTO_MEAN_TOLERANCE {
        return Ok(());
    }
    let reason = format!(
        "the vectors of known inputs in {} differ from those in f32 by {root_mean_square:.2e} of their length (root mean \
         square); at most {AUTO_MEAN_TOLERANCE} is allowed",
        spec.dtype.name()
    );
    Err(LoadError::Unfit { device: spec.device.clone(), why: Unfit::WrongResult, reason })
}

/// Compares the scores that a head computes for each of some known inputs, one for each label, in a number format that
/// `auto` chose. All labels are taken together, so that those whose score hardly changes count little. Scores rank
/// inputs: where they are close together, only small errors keep their order.
///
/// # Errors
/// [`LoadError::Unfit`] if they differ too much for how far they are apart.
pub fn compare_scores(spec: &LoadSpec, found: &[Vec<f32>], expected: &[Vec<f32>]) -> Result<(), LoadError> {
    debug_assert_eq!(found.len(), expected.len());
    let labels = expected.first().map_or(0, Vec::len);
    let count = expected.len() as f64;
    let mean = |label| expected.iter().map(|scores| f64::from(scores[label])).sum::<f64>() / count;
    let means: Vec<f64> = (0..labels).map(mean).collect();
    let squares = |others: &mut dyn Iterator<Item = f64>| {
        let pairs = expected.iter().flatten().zip(others);
        pairs.map(|(score, other)| (f64::from(*score) - other).powi(2)).sum::<f64>()
    };
    let spread = squares(&mut means.iter().copied().cycle());
    let error = squares(&mut found.iter().flatten().copied().map(f64::from));
    let relative = (error / spread.max(f64::MIN_POSITIVE)).sqrt();
    if relative <= AUTO_SCORE_TOLERANCE {
        return Ok(());
    }
    let reason = format!(
        "the scores of known inputs in {} differ from those in f32 by {relative:.2e} of their standard deviation (root mean \
         square); at most {AUTO_SCORE_TOLERANCE} is allowed",
        spec.dtype.name()
    );
    Err(LoadError::Unfit { device: spec.device.clone(), why: Unfit::WrongResult, reason })
}

/// Checks the error of one vector.
fn check(
    LoadSpec { device, dtype, is_dtype_auto, .. }: &LoadSpec,
    what: &str,
    error: f64,
) -> Result<(), LoadError> {
    let tolerance = if *is_dtype_auto { tolerance(*dtype).min(AUTO_TOLERANCE) } else { tolerance(*dtype) };
    if error <= tolerance {
        return Ok(());
    }
    let difference = if error.is_nan() {
        "has a number that is not finite, and that of a CPU in f32 has none".to_owned()
    } else {
        format!(
            "differs from that of a CPU in f32 by {error:.2e} of its length; at most {tolerance} is allowed"
        )
    };
    let reason = format!("the vector of a known {what} in {} {difference}", dtype.name());
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares vectors, each of which has its angle to the expected one in degrees.
    fn compared(spec: &LoadSpec, degrees: &[f32]) -> Result<(), String> {
        let input = |degrees: &f32| {
            let (sine, cosine) = degrees.to_radians().sin_cos();
            let (found, expected) = (Some(vec![3.0 * cosine, 3.0 * sine]), Some(vec![3.0, 0.0]));
            Compared { what: format!("text at {degrees}"), found, expected }
        };
        let inputs: Vec<_> = degrees.iter().map(input).collect();
        compare_all(spec, &inputs).map_err(|error| error.to_string())
    }

    #[test]
    fn a_number_format_that_auto_chose_keeps_cosines_above_the_documented_ones() {
        let operators = LoadSpec { dtype: Dtype::Int8, ..LoadSpec::new("a") };
        let chosen = LoadSpec { is_dtype_auto: true, ..operators.clone() };
        // cos 10° = 0.9848, cos 4.5° = 0.9969.
        assert_eq!(compared(&chosen, &[9.8, 1.0, 1.0, 1.0, 1.0, 1.0]), Ok(()));
        let error = compared(&chosen, &[1.0, 10.0, 1.0, 1.0, 1.0, 1.0]).unwrap_err();
        assert!(error.contains("text at 10") && error.contains("0.172 is allowed"), "{error}");
        let error = compared(&chosen, &[4.5; 6]).unwrap_err();
        assert!(error.contains("root mean square") && error.contains("int8"), "{error}");
        assert!(compared(&operators, &[12.0]).unwrap_err().contains("0.2 is allowed"));
        assert_eq!(compared(&operators, &[10.0; 6]), Ok(()), "what the operator set");
        let nan = Compared { what: "text".into(), found: None, expected: Some(vec![1.0]) };
        assert!(compare_all(&chosen, &[nan]).is_err());
    }
    #[test]
    fn scores_may_be_wrong_by_a_tenth_of_how_far_they_are_apart() {
        let chosen = LoadSpec { dtype: Dtype::Int8, is_dtype_auto: true, ..LoadSpec::new("a") };
        // The standard deviation is 2 for both labels together, whatever they have in common.
        let expected = [vec![102.0, -7.0], vec![98.0, -3.0], vec![102.0, -3.0], vec![98.0, -7.0]];
        let with_error = |error: f32| {
            let wrong = |scores: &Vec<f32>| scores.iter().map(|score| score + error).collect();
            let found: Vec<Vec<f32>> = expected.iter().map(wrong).collect();
            compare_scores(&chosen, &found, &expected).map_err(|error| error.to_string())
        };
        assert_eq!(with_error(0.19), Ok(()));
        let error = with_error(-0.21).unwrap_err();
        assert!(error.contains("int8") && error.contains("0.1 is allowed"), "{error}");
        assert!(with_error(f32::NAN).is_err());
        assert!(compare_scores(&chosen, &[], &[]).is_ok());
    }
}
