//! Reads the `devices` setting. Checks the form of entries, not whether the devices exist.

use std::collections::BTreeSet;

use ::config::{Value, ValueKind};
use serde::{Deserialize, Serialize};

use super::reader::Expected;
use super::values::list;

/// The `devices` setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Devices {
    /// Every GPU, else CPU workers with the cores divided among them.
    Auto,
    /// These, in this order; not empty.
    List(Vec<String>),
}

/// Reads `"auto"`, or a list that names each GPU once.
pub(crate) fn devices(value: &Value) -> Result<Devices, Expected> {
    const EXPECTED: &str =
        "\"auto\", or a list of devices such as [\"cpu\", \"cpu\"] or [\"GPU-5a…\", \"cuda:1\"]";
    let devices = list(value).map_err(|_| EXPECTED.to_owned())?;
    if matches!(&value.kind, ValueKind::String(text) if text == "auto") {
        return Ok(Devices::Auto);
    }
    let strange = |device: &String| device.is_empty() || device == "auto";
    if devices.is_empty() || devices.iter().any(strange) {
        return Err(EXPECTED.to_owned());
    }
    let mut seen = BTreeSet::new();
    let mut gpus = devices.iter().filter(|device| *device != "cpu");
    match gpus.find(|device| !seen.insert(device.as_str())) {
        Some(device) => {
            Err(format!("each device once, not {device} twice; workers_per_device runs several on one"))
        }
        None => Ok(Devices::List(devices)),
    }
}
