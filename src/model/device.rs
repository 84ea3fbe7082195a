//! Opens the requested device, or fails (`device-or-fail`); classifies candle's errors by what the worker must do. Owns
//! no state; never uses another device instead.

#[cfg(feature = "cuda")]
mod cuda;
mod fitness;

use candle_core::{Device, Error};

pub use fitness::{Proven, prove};

use super::{ForwardError, LoadError};

/// The arithmetic units of a GPU.
#[derive(Debug)]
struct GpuUnits {
    multiprocessors: usize,
    /// The peak speed in f32, in operations per second; none if the driver reports no clock.
    peak_rate: Option<f64>,
}

/// Opens `device`: `cpu`, or a GPU by its UUID in a build with CUDA. Also returns the name of the opened device:
/// `cpu`, or the UUID that the driver reports.
///
/// # Errors
/// [`LoadError::Device`] if this build or machine does not have the device, or if another one was opened.
pub fn open(device: &str) -> Result<(Device, String), LoadError> {
    let fault = |reason: String| LoadError::Device { device: device.into(), reason };
    match device {
        "cpu" => Ok((Device::Cpu, device.to_owned())),
        "" => Err(fault("no device was named; write \"cpu\" to compute on the CPU".into())),
        _ => match open_gpu(device).map_err(fault)? {
            (_, found) if found != device => Err(fault(format!(
                "CUDA shows this process {found} in its place; does something else set CUDA_VISIBLE_DEVICES?"
            ))),
            opened => Ok(opened),
        },
    }
}

#[cfg(feature = "cuda")]
use cuda::open as open_gpu;
#[cfg(feature = "cuda")]
pub use cuda::{Copies, DeviceToHost, HostToDevice};

#[cfg(not(feature = "cuda"))]
fn open_gpu(_: &str) -> Result<(Device, String), String> {
    Err("this build has no CUDA; it opens \"cpu\" only".into())
}

/// Classifies a failure of candle by what it means for the worker.
pub fn forward_error(error: &Error) -> ForwardError {
    let message = error.to_string();
    let lower = message.to_lowercase();
    if lower.contains("out of memory") || lower.contains("out_of_memory") {
        return ForwardError::OutOfMemory(message);
    }
    match error {
        Error::Cuda(_) => ForwardError::Device(message),
        // Candle wraps an error with the place where it occurred.
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
        assert!(open("cpu").is_ok_and(|(device, name)| device.is_cpu() && name == "cpu"));
    }

    #[test]
    fn errors_are_classified_by_what_the_worker_must_do() {
        let cuda = |text: &str| forward_error(&Error::Cuda(text.into()));
        assert!(matches!(cuda("CUDA_ERROR_OUT_OF_MEMORY"), ForwardError::OutOfMemory(_)));
        assert!(matches!(cuda("CUDA_ERROR_ILLEGAL_ADDRESS"), ForwardError::Device(_)));
        let shapes = forward_error(&Error::Msg("shape mismatch".into()));
        assert!(matches!(shapes, ForwardError::Failed(_)));
    }
}
