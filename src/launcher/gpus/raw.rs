//! NVML calls that nvml-wrapper lacks: the MIG device in which an event happened, and the instance ids of a MIG
//! device. No other file calls NVML directly.
#![expect(unsafe_code, reason = "the driver's functions are C; each is called as nvml.h declares it")]

use std::time::Duration;

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper::{Device, EventSet, Nvml};

/// The instance id in nvml.h that means "not in a MIG device".
const NO_INSTANCE: u32 = u32::MAX;

/// A position in a GPU with MIG: a GPU instance, which may be divided into compute instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MigPlace {
    gpu_instance: u32,
    /// None: the whole GPU instance.
    compute_instance: Option<u32>,
}

impl MigPlace {
    /// Whether an event at this place affects the device at the other place.
    pub(super) fn includes(self, device: Self) -> bool {
        let same_compute_instance =
            self.compute_instance.is_none_or(|instance| device.compute_instance == Some(instance));
        self.gpu_instance == device.gpu_instance && same_compute_instance
    }
}

pub(super) struct Event<'a> {
    pub(super) device: Device<'a>,
    pub(super) kind: EventTypes,
    /// The Xid number, for an Xid event.
    pub(super) data: u64,
    /// None: the event concerns the whole GPU.
    pub(super) place: Option<MigPlace>,
}

/// Waits for the next event, like `EventSet::wait`, but also returns its place.
///
/// # Errors
/// [`NvmlError::Timeout`] if no event came in time, or the driver's error.
pub(super) fn wait<'a>(nvml: &'a Nvml, set: &EventSet<'a>, time: Duration) -> Result<Event<'a>, NvmlError> {
    let function = nvml.lib().nvmlEventSetWait_v2.as_ref();
    let function = *function.map_err(|error| NvmlError::FailedToLoadSymbol(error.to_string()))?;
    // SAFETY: it is a plain C struct of a pointer and numbers. The driver writes it before it is read.
    let mut event = unsafe { std::mem::zeroed() };
    // SAFETY: the set belongs to this session, and is freed with `set`, which outlives the call.
    nvml_try(unsafe { function(set.handle(), &raw mut event, time.as_millis() as u32) })?;
    let compute_instance = Some(event.computeInstanceId).filter(|instance| *instance != NO_INSTANCE);
    let gpu_instance = Some(event.gpuInstanceId).filter(|instance| *instance != NO_INSTANCE);
    Ok(Event {
        // SAFETY: the driver gave this handle, which is valid as long as the session.
        device: unsafe { Device::new(event.device, nvml) },
        kind: EventTypes::from_bits_truncate(event.eventType),
        data: event.eventData,
        place: gpu_instance.map(|gpu_instance| MigPlace { gpu_instance, compute_instance }),
    })
}

/// The place of a MIG device.
///
/// # Errors
/// The device is not a MIG device, or the driver does not report its place.
pub(super) fn place(nvml: &Nvml, part: &Device<'_>) -> Result<MigPlace, NvmlError> {
    let missing = |error: &_| NvmlError::FailedToLoadSymbol(format!("{error}"));
    let (mut gpu_instance, mut compute_instance) = (NO_INSTANCE, NO_INSTANCE);
    let function = *nvml.lib().nvmlDeviceGetGpuInstanceId.as_ref().map_err(missing)?;
    // SAFETY: the handle belongs to this session, and the pointer has room for one number.
    nvml_try(unsafe { function(part.handle(), &raw mut gpu_instance) })?;
    let function = *nvml.lib().nvmlDeviceGetComputeInstanceId.as_ref().map_err(missing)?;
    // SAFETY: as above.
    nvml_try(unsafe { function(part.handle(), &raw mut compute_instance) })?;
    Ok(MigPlace { gpu_instance, compute_instance: Some(compute_instance) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_in_a_mig_device_affects_no_other_mig_device() {
        let place = |gpu_instance, compute_instance| MigPlace { gpu_instance, compute_instance };
        let device = place(2, Some(0));
        assert!(place(2, Some(0)).includes(device) && place(2, None).includes(device));
        assert!(!place(1, Some(0)).includes(device) && !place(2, Some(1)).includes(device));
    }
}
