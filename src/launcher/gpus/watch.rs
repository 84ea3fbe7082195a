//! Listens to the driver while the launcher runs: waits for events of the GPUs (Xid, ECC), and checks every 2 s whether
//! they are still present and which recovery action the driver wants. Owns its NVML session. Calls of the driver may
//! block, so this needs a thread of its own.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
use nvml_wrapper::{Device, EventSet, Nvml};

use super::device_fault::{DeviceFault, Kind, Severity, recovery, xid};
use super::nvml::{describe, open};
use super::raw::{self, MigPlace};

/// The time between two checks of all devices, and before a lost driver session is opened again.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How long one wait for an event lasts.
const EVENT_TIMEOUT: Duration = Duration::from_millis(500);

/// A report about devices.
#[derive(Debug)]
pub(crate) enum DriverReport {
    /// An event on these devices.
    Event { devices: Vec<String>, device_fault: DeviceFault, severity: Severity },
    /// The state of all devices. For each device: the fault that prevents its use now, if there is one.
    State(BTreeMap<String, Option<DeviceFault>>),
}

/// A GPU that the driver knows or has known.
#[derive(Default)]
struct Card {
    /// Its MIG devices by UUID, with their places.
    parts: BTreeMap<String, Option<MigPlace>>,
    /// The fault of the last event that marked the GPU as failed.
    last_failure: Option<DeviceFault>,
}

/// All GPUs that were ever seen, by UUID.
type Cards = BTreeMap<String, Card>;

/// Listens until `report` returns false. Returns at once if there is no driver.
pub(crate) fn listen(mut report: impl FnMut(DriverReport) -> bool) {
    let mut cards = Cards::new();
    loop {
        match open() {
            Ok(nvml) => match session(&nvml, &mut cards, &mut report) {
                Ok(SessionEnd::NobodyListens) => return,
                Ok(SessionEnd::Changed) => continue,
                Err(error) => tracing::warn!(%error, "lost the session with the driver; opening another"),
            },
            Err(error) if cards.is_empty() => {
                tracing::info!(reason = describe(&error), "devices are not watched");
                return;
            }
            Err(error) => {
                let gone = DeviceFault { kind: Kind::OffTheBus, message: describe(&error) };
                let all = cards.iter().flat_map(|(uuid, card)| card.parts.keys().chain([uuid]));
                if !report(DriverReport::State(all.map(|uuid| (uuid.clone(), Some(gone.clone()))).collect()))
                {
                    return;
                }
            }
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Why a session has ended.
enum SessionEnd {
    /// Nobody receives the reports any more.
    NobodyListens,
    /// Devices have disappeared or come back: their events must be registered again.
    Changed,
}

/// Listens until the session with the driver must be opened again.
fn session(
    nvml: &Nvml,
    cards: &mut Cards,
    report: &mut impl FnMut(DriverReport) -> bool,
) -> Result<SessionEnd, NvmlError> {
    discover(nvml, cards)?;
    let set = register(nvml, cards)
        .inspect_err(|error| tracing::info!(%error, "the driver reports no events; polling it instead"))
        .ok();
    let mut known = check_devices(nvml, cards);
    if !report(DriverReport::State(known.clone())) {
        return Ok(SessionEnd::NobodyListens);
    }
    let mut last_check = Instant::now();
    loop {
        let event = match &set {
            Some(set) => raw::wait(nvml, set, EVENT_TIMEOUT),
            None => {
                thread::sleep(EVENT_TIMEOUT);
                Err(NvmlError::Timeout)
            }
        };
        let (event_report, check_now) = match event {
            Ok(event) => (event_on(&event, cards), true),
            Err(NvmlError::Timeout) => (None, false),
            Err(NvmlError::GpuLost) => {
                // A device is lost. The next wait may also return at once, so this thread sleeps first.
                thread::sleep(EVENT_TIMEOUT);
                (None, true)
            }
            Err(error) => return Err(error),
        };
        if !event_report.is_none_or(&mut *report) {
            return Ok(SessionEnd::NobodyListens);
        }
        if !check_now && last_check.elapsed() < POLL_INTERVAL {
            continue;
        }
        let now = check_devices(nvml, cards);
        last_check = Instant::now();
        let changed = now.iter().any(|(uuid, device_fault)| {
            known.get(uuid).is_none_or(|before| before.is_some() != device_fault.is_some())
        });
        known.clone_from(&now);
        if !report(DriverReport::State(now)) {
            return Ok(SessionEnd::NobodyListens);
        }
        if changed {
            return Ok(SessionEnd::Changed);
        }
    }
}

/// Adds newly found GPUs and MIG devices to the known ones.
fn discover(nvml: &Nvml, cards: &mut Cards) -> Result<(), NvmlError> {
    for index in 0..nvml.device_count()? {
        let Ok((uuid, device)) = nvml.device_by_index(index).and_then(|it| Ok((it.uuid()?, it))) else {
            continue;
        };
        let card = cards.entry(uuid).or_default();
        let mig_indices = 0..device.mig_device_count().unwrap_or(0);
        for part in mig_indices.filter_map(|mig_index| device.mig_device_by_index(mig_index).ok()) {
            if let Ok(uuid) = part.uuid() {
                card.parts.insert(uuid, raw::place(nvml, &part).ok());
            }
        }
    }
    Ok(())
}

/// Registers for the events of every GPU that supports them.
fn register<'a>(nvml: &'a Nvml, cards: &Cards) -> Result<EventSet<'a>, NvmlError> {
    let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
    let mut failed = Vec::new();
    'retry: loop {
        let mut set = nvml.create_event_set()?;
        for uuid in cards.keys().filter(|uuid| !failed.contains(uuid)) {
            let Ok(device) = nvml.device_by_uuid(uuid.as_str()) else { continue };
            let supported = device.supported_event_types().unwrap_or(EventTypes::empty()) & wanted;
            if supported.is_empty() {
                tracing::info!(device = uuid, "the driver reports no Xid or ECC events of this device");
                continue;
            }
            match device.register_events(supported, set) {
                Ok(registered) => set = registered,
                // `register_events` consumes the set even if it fails.
                Err(error) => {
                    tracing::warn!(device = uuid, %error, "cannot register for the events of this device");
                    failed.push(uuid);
                    continue 'retry;
                }
            }
        }
        return Ok(set);
    }
}

/// Interprets an event; none if its GPU is unknown.
fn event_on(event: &raw::Event<'_>, cards: &mut Cards) -> Option<DriverReport> {
    let uuid = event.device.uuid().ok()?;
    let card = cards.get_mut(&uuid)?;
    let (device_fault, severity) = match event.kind {
        kind if kind.contains(EventTypes::CRITICAL_XID_ERROR) => xid(event.data),
        _ => (
            DeviceFault { kind: Kind::Ecc, message: "double bit ECC error".to_owned() },
            Severity::DeviceFailed,
        ),
    };
    let affected: Vec<String> = match event.place {
        Some(place) => {
            let is_affected = |part: &Option<MigPlace>| part.is_some_and(|part| place.includes(part));
            card.parts.iter().filter(|(_, part)| is_affected(part)).map(|(uuid, _)| uuid.clone()).collect()
        }
        None => card.parts.keys().chain([&uuid]).cloned().collect(),
    };
    if severity == Severity::DeviceFailed && event.place.is_none() {
        card.last_failure = Some(device_fault.clone());
    }
    let has_failed = severity == Severity::DeviceFailed;
    tracing::warn!(device = uuid, devices = ?affected, has_failed, fault = device_fault.message, "the driver reports an event");
    Some(DriverReport::Event { devices: affected, device_fault, severity })
}

/// The fault that prevents the use of each GPU and MIG device now, if there is one.
fn check_devices(nvml: &Nvml, cards: &mut Cards) -> BTreeMap<String, Option<DeviceFault>> {
    let mut states = BTreeMap::new();
    for (uuid, card) in cards {
        let found = nvml.device_by_uuid(uuid.as_str());
        let device_fault = match &found {
            Ok(device) => loss_of(device).or_else(|| recovery_fault(device, card.last_failure.as_ref())),
            Err(error) => loss(error),
        };
        if device_fault.is_none() {
            card.last_failure = None;
        }
        for part in card.parts.keys() {
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

/// The fault of a GPU that needs a recovery action before it is used again. `cause`: the event that led to it.
fn recovery_fault(device: &Device<'_>, cause: Option<&DeviceFault>) -> Option<DeviceFault> {
    let mut answers = device.field_values_for(&[FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)]).ok()?;
    let action = match answers.pop()?.ok()?.value.ok()? {
        SampleValue::U32(action) => action.into(),
        SampleValue::U64(action) => action,
        _ => return None,
    };
    let advice = recovery(action)?;
    Some(match cause {
        Some(DeviceFault { kind, message }) => {
            DeviceFault { kind: *kind, message: format!("{message}; {advice}") }
        }
        None => DeviceFault { kind: Kind::Xid, message: advice.to_owned() },
    })
}
