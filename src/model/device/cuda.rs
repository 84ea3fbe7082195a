//! Opens the one GPU that this process can see (`CUDA_VISIBLE_DEVICES`), and reads its UUID from the driver.
//! CUDA's libraries are loaded at run time; a missing one is an error, not a panic.

mod copies;

use std::panic::catch_unwind;

use candle_core::Device;
use candle_core::cuda_backend::cudarc;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result, sys};
use sys::CUdevice_attribute_enum as Attribute;

use super::GpuUnits;
pub use copies::{Copies, DeviceToHost, HostToDevice};

/// The libraries that every computation needs, and what to do if one is missing.
const NEEDED: [(&str, &str); 3] = [
    ("cuda", "no NVIDIA driver here; install one, and in a container give it the GPUs"),
    ("cublas", "CUDA 13's cuBLAS is not here; install CUDA's runtime libraries, or use an image with them"),
    ("curand", "CUDA 13's cuRAND is not here; install CUDA's runtime libraries, or use an image with them"),
];

/// Opens the GPU. Returns it with its name: the UUID that the driver reports, after `MIG-` if `requested` begins with
/// that, otherwise after `GPU-`.
///
/// # Errors
/// The reason why it cannot be opened.
pub(super) fn open(requested: &str) -> Result<(Device, String), String> {
    for (library, missing) in NEEDED {
        if !is_installed(library) {
            return Err(format!("lib{library} is not found: {missing}"));
        }
    }
    // candle panics if it does not find a library, and it needs more libraries than those above.
    let opened = catch_unwind(|| Device::new_cuda_with_stream(0)).map_err(|panic| {
        let message = panic.downcast_ref::<String>().cloned().unwrap_or_default();
        format!("CUDA cannot be started; are the libraries of CUDA 13 installed? {message}")
    })?;
    let device = opened.map_err(|error| error.to_string())?;
    let cuda = device.as_cuda_device().map_err(|error| error.to_string())?;
    let stream = cuda.cuda_stream();
    configure(stream.context()).map_err(|error| format!("its memory pool cannot be configured: {error}"))?;
    let uuid = stream.context().uuid().map_err(|error| format!("no UUID: {error}"))?;
    let kind = if requested.starts_with("MIG-") { "MIG" } else { "GPU" };
    let uuid = uuid::Uuid::from_bytes(uuid.bytes.map(|byte| byte.cast_unsigned()));
    Ok((device, format!("{kind}-{uuid}")))
}

/// Turns off event tracking, which costs two events per tensor, since this program orders its streams itself. Makes the
/// memory pool keep freed memory for the next pass; by default the driver returns it to the system at each wait.
#[expect(unsafe_code, reason = "the driver's interface has no safe form for either")]
fn configure(context: &CudaContext) -> Result<(), DriverError> {
    // SAFETY: tensors are used on one stream. `copies` orders the accesses of other streams.
    unsafe { context.disable_event_tracking() };
    if !context.has_async_alloc() {
        return Ok(());
    }
    let mut kept = u64::MAX;
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the device is this context's, the pool the device's, and the threshold is a 64-bit number.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        result::mem_pool::set_attribute(pool, threshold, std::ptr::from_mut(&mut kept).cast())
    }
}

/// The GPU's multiprocessors, and its peak speed in f32: at the highest clock that the driver reports, with one
/// multiplication and one addition per unit and cycle.
pub(super) fn gpu_units(device: &Device) -> Option<GpuUnits> {
    let stream = device.as_cuda_device().ok()?.cuda_stream();
    let attribute = |which| stream.context().attribute(which).ok().filter(|value| *value > 0);
    let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    // The f32 units of a multiprocessor, according to CUDA's programming guide.
    let capability = stream.context().compute_capability().ok()?;
    let f32_units = if capability <= (8, 0) { 64.0 } else { 128.0 };
    let clock =
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE).map(|kilohertz| f64::from(kilohertz) * 1e3);
    let peak_rate = clock.map(|clock| f64::from(multiprocessors) * f32_units * 2.0 * clock);
    Some(GpuUnits { multiprocessors: multiprocessors as usize, peak_rate })
}

#[expect(unsafe_code, reason = "opening a library runs its initialisers; these are the driver's own")]
fn is_installed(library: &str) -> bool {
    let mut names = cudarc::get_lib_name_candidates(library).into_iter();
    // SAFETY: NVIDIA's libraries may be opened by any thread at any time; candle opens them next.
    names.any(|name| unsafe { libloading::Library::new(name) }.is_ok())
}
