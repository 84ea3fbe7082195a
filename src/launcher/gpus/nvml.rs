//! Queries the NVIDIA driver through NVML, whose library is opened at run time. An error of one GPU is reported as that
//! GPU's fault, and hides no other GPU.

use std::ffi::OsStr;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml, cuda_driver_version_major, cuda_driver_version_minor};

use super::{Gpu, GpuProcess, Gpus, Memory, MigDevice};

/// The file names of NVML. The first is installed with every driver, the second only with the development files.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

pub(super) fn query() -> Gpus {
    let nvml = match open() {
        Ok(nvml) => nvml,
        Err(error) => {
            let installed = !matches!(error, NvmlError::LibloadingError(_));
            return Gpus { unknown: Some(describe(&error)), installed, ..Gpus::default() };
        }
    };
    let count = match nvml.device_count() {
        Ok(count) => count,
        Err(error) => return Gpus { unknown: Some(describe(&error)), installed: true, ..Gpus::default() },
    };
    let mut gpus: Vec<Gpu> = (0..count).map(|index| query_gpu(&nvml, index)).collect();
    // This is CUDA's order with CUDA_DEVICE_ORDER=PCI_BUS_ID. GPUs without a bus id come last.
    gpus.sort_by_key(|gpu| (gpu.pci.is_none(), gpu.pci.clone()));
    let cuda = nvml.sys_cuda_driver_version().ok();
    Gpus {
        gpus,
        driver: nvml.sys_driver_version().ok(),
        cuda: cuda.map(|it| format!("{}.{}", cuda_driver_version_major(it), cuda_driver_version_minor(it))),
        unknown: None,
        installed: true,
    }
}

/// Opens a session with the driver.
///
/// # Errors
/// The library or the driver cannot be used; [`describe`] says what to do.
pub(super) fn open() -> Result<Nvml, NvmlError> {
    let mut opened = Nvml::builder().lib_path(OsStr::new(LIBRARIES[0])).init();
    if matches!(opened, Err(NvmlError::LibloadingError(_))) {
        opened = Nvml::builder().lib_path(OsStr::new(LIBRARIES[1])).init();
    }
    opened
}

/// Describes an error, and says what to do.
pub(super) fn describe(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(_) => {
            "no NVIDIA driver here (libnvidia-ml.so.1 is not found); install one, and in a container give \
             it the GPUs (docker run --gpus all)"
                .to_owned()
        }
        NvmlError::DriverNotLoaded => {
            "the NVIDIA driver is installed but not loaded (modprobe nvidia; see dmesg)".to_owned()
        }
        NvmlError::NoPermission => {
            "this user may not talk to the NVIDIA driver (/dev/nvidia* and /dev/nvidiactl)".to_owned()
        }
        NvmlError::LibRmVersionMismatch => {
            "the loaded NVIDIA driver is of another version than its libraries; reboot after an update"
                .to_owned()
        }
        other => format!("NVML: {other}"),
    }
}

fn query_gpu(nvml: &Nvml, index: u32) -> Gpu {
    let device = match nvml.device_by_index(index) {
        Ok(device) => device,
        Err(error) => {
            let (uuid, fault) = (format!("number {index} of NVML"), Some(error.to_string()));
            return Gpu { uuid, fault, ..Gpu::default() };
        }
    };
    let (uuid, fault) = match device.uuid() {
        Ok(uuid) => (uuid, loss_of(&device)),
        Err(error) => (format!("number {index} of NVML"), Some(error.to_string())),
    };
    let pci = device.pci_info().ok().map(|pci| pci.bus_id);
    Gpu {
        uuid,
        name: device.name().unwrap_or_default(),
        pci,
        compute_capability: device.cuda_compute_capability().ok().map(|it| (it.major, it.minor)),
        memory: memory(&device),
        utilization_percent: device.utilization_rates().ok().map(|it| it.gpu),
        processes: processes(&device),
        parts: parts(&device),
        fault,
    }
}

/// The fault of a device that has fallen off the bus. The driver then still knows its UUID, and little else.
fn loss_of(device: &Device<'_>) -> Option<String> {
    match device.memory_info() {
        Err(error @ (NvmlError::GpuLost | NvmlError::Unknown)) => Some(error.to_string()),
        _ => None,
    }
}

fn memory(device: &Device<'_>) -> Option<Memory> {
    device.memory_info().ok().map(|info| Memory { total: info.total, free: info.free })
}

fn processes(device: &Device<'_>) -> Vec<GpuProcess> {
    let known = device.running_compute_processes().unwrap_or_default();
    let process = |it: nvml_wrapper::struct_wrappers::device::ProcessInfo| GpuProcess {
        pid: it.pid,
        memory: match it.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
    };
    known.into_iter().map(process).collect()
}

/// Its MIG devices, if MIG is on.
fn parts(device: &Device<'_>) -> Option<Vec<MigDevice>> {
    const MIG_ENABLED: u32 = 1;
    device.mig_mode().ok().filter(|mode| mode.current == MIG_ENABLED)?;
    let mig_indices = 0..device.mig_device_count().unwrap_or(0);
    // An index without a device returns an error.
    let found = mig_indices.filter_map(|mig_index| device.mig_device_by_index(mig_index).ok());
    Some(
        found.filter_map(|part| Some(MigDevice { uuid: part.uuid().ok()?, memory: memory(&part) })).collect(),
    )
}
