//! Asks the driver while the launcher runs: checks every 2 s whether the GPUs are still present and which recovery action
//! the driver wants. Owns its NVML session. Calls of the driver may block, so this needs a thread of its own.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::thread;
use std::time::Duration;

use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
use nvml_wrapper::{Device, Nvml};

use super::device_fault::{DeviceFault, Kind, recovery};
use super::nvml::{describe, open};

/// The time between two checks of all devices, and before a lost driver session is opened again.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// For each device, by UUID: the fault that prevents its use now, if there is one.
pub(crate) type DeviceStates = BTreeMap<String, Option<DeviceFault>>;

/// All GPUs that were ever seen, with their MIG devices, by UUID.
type Cards = BTreeMap<String, Vec<String>>;

/// Asks the driver until `report` returns false. Returns at once if there is no driver.
pub(crate) fn watch(mut report: impl FnMut(DeviceStates) -> bool) {
    let mut cards = Cards::new();
    loop {
        match open() {
            Ok(nvml) => match session(&nvml, &mut cards, &mut report) {
                Ok(ControlFlow::Break(())) => return,
                Ok(ControlFlow::Continue(())) => continue,
                Err(error) => tracing::warn!(%error, "lost the session with the driver; opening another"),
            },
            Err(error) if cards.is_empty() => {
                tracing::info!(reason = describe(&error), "devices are not watched");
                return;
            }
            Err(error) => {
                let gone = DeviceFault { kind: Kind::OffTheBus, message: describe(&error) };
                let all = cards.iter().flat_map(|(uuid, parts)| parts.iter().chain([uuid]));
                if !report(all.map(|uuid| (uuid.clone(), Some(gone.clone()))).collect()) {
                    return;
                }
            }
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Checks the devices until the session with the driver must be opened again: devices have disappeared or come back, and a
/// session that was opened before may not find them again. Breaks when nobody receives the reports any more.
fn session(
    nvml: &Nvml,
    cards: &mut Cards,
    report: &mut impl FnMut(DeviceStates) -> bool,
) -> Result<ControlFlow<()>, NvmlError> {
    discover(nvml, cards)?;
    let mut faulty_before: Option<Vec<bool>> = None;
    loop {
        let states = check_devices(nvml, cards);
        let faulty: Vec<bool> = states.values().map(Option::is_some).collect();
        if !report(states) {
            return Ok(ControlFlow::Break(()));
        }
        if faulty_before.is_some_and(|before| before != faulty) {
            return Ok(ControlFlow::Continue(()));
        }
        faulty_before = Some(faulty);
        thread::sleep(POLL_INTERVAL);
    }
}

/// Adds newly found GPUs and MIG devices to the known ones.
fn discover(nvml: &Nvml, cards: &mut Cards) -> Result<(), NvmlError> {
    for index in 0..nvml.device_count()? {
        let Ok((uuid, device)) = nvml.device_by_index(index).and_then(|it| Ok((it.uuid()?, it))) else {
            continue;
        };
        let known = cards.entry(uuid).or_default();
        let mig_indices = 0..device.mig_device_count().unwrap_or(0);
        let parts =
            mig_indices.filter_map(|mig_index| device.mig_device_by_index(mig_index).ok()?.uuid().ok());
        for part in parts.collect::<Vec<_>>() {
            if !known.contains(&part) {
                known.push(part);
            }
        }
    }
    Ok(())
}

/// The fault that prevents the use of each GPU and MIG device now, if there is one.
fn check_devices(nvml: &Nvml, cards: &Cards) -> DeviceStates {
    let mut states = DeviceStates::new();
    for (uuid, parts) in cards {
        let device_fault = match nvml.device_by_uuid(uuid.as_str()) {
            Ok(device) => loss_of(&device).or_else(|| recovery_fault(&device)),
            Err(error) => loss(&error),
        };
        for part in parts {
            let part_fault = || match nvml.device_by_uuid(part.as_str()) {
                Ok(device) => loss_of(&device),
                Err(error) => loss(&error),
            };
            states.insert(part.clone(), device_fault.clone().or_else(part_fault));
        }
        states.insert(uuid.clone(), device_fault);
    }
    states
}

/// The fault of a device that is gone: the driver still knows its UUID, but does not answer other queries.
fn loss_of(device: &Device<'_>) -> Option<DeviceFault> {
    device.memory_info().err().and_then(|error| loss(&error))
}

/// The fault, if an error means that the device is gone. Other errors mean that it does not support the query.
fn loss(error: &NvmlError) -> Option<DeviceFault> {
    let message = format!("the driver says: {error}");
    match error {
        NvmlError::GpuLost
        | NvmlError::NotFound
        | NvmlError::InsufficientPower
        | NvmlError::IrqIssue
        | NvmlError::Unknown => Some(DeviceFault { kind: Kind::OffTheBus, message }),
        NvmlError::ResetRequired => Some(DeviceFault { kind: Kind::Xid, message }),
        _ => None,
    }
}

/// The fault of a GPU that needs a recovery action before it is used again.
fn recovery_fault(device: &Device<'_>) -> Option<DeviceFault> {
    let mut answers = device.field_values_for(&[FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)]).ok()?;
    let action = match answers.pop()?.ok()?.value.ok()? {
        SampleValue::U32(action) => action.into(),
        SampleValue::U64(action) => action,
        _ => return None,
    };
    Some(DeviceFault { kind: Kind::Xid, message: recovery(action)?.to_owned() })
}
