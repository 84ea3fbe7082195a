//! Listens to the driver while the launcher runs: waits for events of the GPUs (Xid, ECC), and asks every few
//! seconds whether they are still there and what the driver wants done with them. Owns its NVML session. Blocks
//! while the driver does, so it needs a thread of its own.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
use nvml_wrapper::{Device, EventSet, Nvml};

use super::device_fault::{DeviceFault, Kind, Weight, recovery, xid};
use super::nvml::{in_words, open};
use super::raw::{self, Place};

/// The time between two checks of all devices, and before a lost driver session is opened again.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How long to wait for an event before checking whether anybody still listens.
const WAIT: Duration = Duration::from_millis(500);

/// A report about devices.
#[derive(Debug)]
pub(crate) enum Word {
    /// An event that concerns these devices.
    Event { devices: Vec<String>, device_fault: DeviceFault, weight: Weight },
    /// All devices, each with the fault that prevents its use now.
    Look(BTreeMap<String, Option<DeviceFault>>),
}

/// A GPU that the driver has known.
#[derive(Default)]
struct Card {
    /// Its MIG devices by UUID, with their places.
    parts: BTreeMap<String, Option<Place>>,
    /// The last event that marked it as failed.
    last: Option<DeviceFault>,
}

/// All GPUs that were ever seen, by UUID.
type Cards = BTreeMap<String, Card>;

/// Listens until `hear` returns false. Returns at once if there is no driver.
pub(crate) fn listen(mut hear: impl FnMut(Word) -> bool) {
    let mut cards = Cards::new();
    loop {
        match open() {
            Ok(nvml) => match session(&nvml, &mut cards, &mut hear) {
                Ok(Over::NobodyListens) => return,
                Ok(Over::Changed) => continue,
                Err(error) => tracing::warn!(%error, "lost the session with the driver; opening another"),
            },
            Err(error) if cards.is_empty() => {
                tracing::info!(reason = in_words(&error), "devices are not watched");
                return;
            }
            Err(error) => {
                let gone = DeviceFault { kind: Kind::OffTheBus, message: in_words(&error) };
                let all = cards.iter().flat_map(|(uuid, card)| card.parts.keys().chain([uuid]));
                if !hear(Word::Look(all.map(|uuid| (uuid.clone(), Some(gone.clone()))).collect())) {
                    return;
                }
            }
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Why a session has ended.
enum Over {
    /// Nobody listens any more.
    NobodyListens,
    /// Devices have disappeared or come back: their events must be registered again.
    Changed,
}

fn session(nvml: &Nvml, cards: &mut Cards, hear: &mut impl FnMut(Word) -> bool) -> Result<Over, NvmlError> {
    get_to_know(nvml, cards)?;
    let set = register(nvml, cards)
        .inspect_err(|error| tracing::info!(%error, "the driver reports no events; polling it instead"))
        .ok();
    let mut known = look(nvml, cards);
    if !hear(Word::Look(known.clone())) {
        return Ok(Over::NobodyListens);
    }
    let mut looked = Instant::now();
    loop {
        let event = set.as_ref().map_or_else(
            || {
                thread::sleep(WAIT);
                Err(NvmlError::Timeout)
            },
            |set| raw::wait(nvml, set, WAIT),
        );
        let (word, at_once) = match event {
            Ok(event) => (event_on(&event, cards), true),
            Err(NvmlError::Timeout) => (None, false),
            Err(NvmlError::GpuLost) => {
                // A device is lost, and the next wait may return at once too.
                thread::sleep(WAIT);
                (None, true)
            }
            Err(error) => return Err(error),
        };
        if !word.is_none_or(&mut *hear) {
            return Ok(Over::NobodyListens);
        }
        if !at_once && looked.elapsed() < POLL_INTERVAL {
            continue;
        }
        let now = look(nvml, cards);
        looked = Instant::now();
        let changed = now.iter().any(|(uuid, device_fault)| {
            known.get(uuid).is_none_or(|before| before.is_some() != device_fault.is_some())
        });
        known.clone_from(&now);
        if !hear(Word::Look(now)) {
            return Ok(Over::NobodyListens);
        }
        if changed {
            return Ok(Over::Changed);
        }
    }
}

/// Adds newly found GPUs and MIG devices to the known ones.
fn get_to_know(nvml: &Nvml, cards: &mut Cards) -> Result<(), NvmlError> {
    for index in 0..nvml.device_count()? {
        let Ok((uuid, device)) = nvml.device_by_index(index).and_then(|it| Ok((it.uuid()?, it))) else {
            continue;
        };
        let card = cards.entry(uuid).or_default();
        let places = 0..device.mig_device_count().unwrap_or(0);
        for part in places.filter_map(|place| device.mig_device_by_index(place).ok()) {
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
    let mut deaf = Vec::new();
    'anew: loop {
        let mut set = nvml.create_event_set()?;
        for uuid in cards.keys().filter(|uuid| !deaf.contains(uuid)) {
            let Ok(device) = nvml.device_by_uuid(uuid.as_str()) else { continue };
            let has = device.supported_event_types().unwrap_or(EventTypes::empty()) & wanted;
            if has.is_empty() {
                tracing::info!(device = uuid, "the driver reports no Xid or ECC events of this device");
                continue;
            }
            match device.register_events(has, set) {
                Ok(registered) => set = registered,
                // `register_events` consumes the set, also on failure.
                Err(error) => {
                    tracing::warn!(device = uuid, %error, "cannot register for the events of this device");
                    deaf.push(uuid);
                    continue 'anew;
                }
            }
        }
        return Ok(set);
    }
}

/// Interprets an event; none if its GPU is unknown.
fn event_on(event: &raw::Event<'_>, cards: &mut Cards) -> Option<Word> {
    let uuid = event.device.uuid().ok()?;
    let card = cards.get_mut(&uuid)?;
    let (device_fault, weight) = match event.kind {
        kind if kind.contains(EventTypes::CRITICAL_XID_ERROR) => xid(event.data),
        _ => (
            DeviceFault { kind: Kind::Ecc, message: "double bit ECC error".to_owned() },
            Weight::DeviceFailed,
        ),
    };
    let meant: Vec<String> = match event.place {
        Some(place) => {
            let of_place = |found: &Option<Place>| found.is_some_and(|found| place.holds(found));
            card.parts.iter().filter(|(_, found)| of_place(found)).map(|(part, _)| part.clone()).collect()
        }
        None => card.parts.keys().chain([&uuid]).cloned().collect(),
    };
    if weight == Weight::DeviceFailed && event.place.is_none() {
        card.last = Some(device_fault.clone());
    }
    let has_failed = weight == Weight::DeviceFailed;
    tracing::warn!(device = uuid, devices = ?meant, has_failed, fault = device_fault.message, "the driver reports an event");
    Some(Word::Event { devices: meant, device_fault, weight })
}

/// Asks for every GPU and MIG device which fault prevents its use.
fn look(nvml: &Nvml, cards: &mut Cards) -> BTreeMap<String, Option<DeviceFault>> {
    let mut states = BTreeMap::new();
    for (uuid, card) in cards {
        let found = nvml.device_by_uuid(uuid.as_str());
        let device_fault = match &found {
            Ok(device) => lost(device).or_else(|| wants(device, card.last.as_ref())),
            Err(error) => absent(error),
        };
        if device_fault.is_none() {
            card.last = None;
        }
        for part in card.parts.keys() {
            let of_part = || match nvml.device_by_uuid(part.as_str()) {
                Ok(device) => lost(&device),
                Err(error) => absent(&error),
            };
            states.insert(part.clone(), device_fault.clone().or_else(of_part));
        }
        states.insert(uuid.clone(), device_fault);
    }
    states
}

/// The fault of a device that is gone: the driver still knows its UUID, but answers nothing else.
fn lost(device: &Device<'_>) -> Option<DeviceFault> {
    device.memory_info().err().and_then(|error| absent(&error))
}

/// The fault if an error says that the device is gone; other errors say that it lacks the function.
fn absent(error: &NvmlError) -> Option<DeviceFault> {
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

/// The recovery action that the driver wants before the GPU is used again, with the event that caused it.
fn wants(device: &Device<'_>, after: Option<&DeviceFault>) -> Option<DeviceFault> {
    let mut answers = device.field_values_for(&[FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)]).ok()?;
    let action = match answers.pop()?.ok()?.value.ok()? {
        SampleValue::U32(action) => action.into(),
        SampleValue::U64(action) => action,
        _ => return None,
    };
    let wanted = recovery(action)?;
    Some(match after {
        Some(DeviceFault { kind, message }) => {
            DeviceFault { kind: *kind, message: format!("{message}; {wanted}") }
        }
        None => DeviceFault { kind: Kind::Xid, message: wanted.to_owned() },
    })
}
