//! Opens the device that was asked for, or fails (`device-or-fail`); sorts candle's errors by who
//! must act. Owns no state; never falls back to another device.

use candle_core::{Device, Error};

use super::{ForwardError, LoadError};

/// Opens `device`: `cpu`, or a GPU in a build that has CUDA.
///
/// # Errors
/// [`LoadError::Device`] for a device that this build or machine does not have.
pub fn open(device: &str) -> Result<Device, LoadError> {
    let fault = |reason: &str| LoadError::Device { device: device.into(), reason: reason.into() };
    match device {
        "cpu" => Ok(Device::Cpu),
        "" => Err(fault("no device was named; write \"cpu\" to compute on the CPU")),
        _ => Err(fault("this build has no CUDA; it opens \"cpu\" only")),
    }
}

/// What a failure of candle means for the worker.
pub fn forward_error(error: &Error) -> ForwardError {
    let message = error.to_string();
    let lower = message.to_lowercase();
    if lower.contains("out of memory") || lower.contains("out_of_memory") {
        return ForwardError::OutOfMemory(message);
    }
    match error {
        Error::Cuda(_) => ForwardError::Device(message),
        // Candle wraps an error in where it came from.
        Error::WithBacktrace { inner, .. } | Error::Context { inner, .. } => forward_error(inner),
        _ => ForwardError::Failed(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_this_build_cannot_open_is_an_error_and_never_the_cpu() {
        for device in ["cuda:0", "GPU-5a", "", "CPU"] {
            let error = open(device).expect_err(device).to_string();
            assert!(error.contains(&format!("{device:?}")), "{error}");
        }
        assert!(open("cpu").is_ok_and(|device| device.is_cpu()));
    }

    #[test]
    fn errors_are_sorted_by_who_must_act() {
        let cuda = |text: &str| forward_error(&Error::Cuda(text.into()));
        assert!(matches!(cuda("CUDA_ERROR_OUT_OF_MEMORY"), ForwardError::OutOfMemory(_)));
        assert!(matches!(cuda("CUDA_ERROR_ILLEGAL_ADDRESS"), ForwardError::Device(_)));
        let shapes = forward_error(&Error::Msg("shape mismatch".into()));
        assert!(matches!(shapes, ForwardError::Failed(_)));
    }
}
