//! Reads names of queues, exchanges and devices, and names by which requests call a model. Checks their form, not
//! whether they exist.

use std::collections::BTreeSet;

use ::config::{Value, ValueKind};
use serde::{Deserialize, Serialize};

use super::reader::Expected;
use super::values::{list, name, optional_name};

/// The longest name, in bytes: AMQP carries a name's length in one byte.
const MAX_NAME_BYTES: usize = 255;
/// The longest suffix of a retry queue's name, in bytes: `.retry-2592000000ms`, which is 30 days.
const MAX_SUFFIX_BYTES: usize = 19;

/// A queue.
pub(crate) fn queue(value: &Value) -> Result<String, Expected> {
    queue_name(value, MAX_NAME_BYTES)
}

/// A queue, with room for the suffix of its retry queues.
pub(crate) fn task_queue(value: &Value) -> Result<String, Expected> {
    queue_name(value, MAX_NAME_BYTES - MAX_SUFFIX_BYTES)
}

/// A queue, or `""` for none.
pub(crate) fn optional_queue(value: &Value) -> Result<Option<String>, Expected> {
    optional_name(value)?.map(|_| queue(value)).transpose()
}

fn queue_name(value: &Value, max_bytes: usize) -> Result<String, Expected> {
    let queue = name(value).map_err(|_| "the name of a queue".to_owned())?;
    if queue.len() > max_bytes {
        return Err(format!("a queue name of at most {max_bytes} bytes"));
    }
    if queue.starts_with("amq.") {
        return Err("a queue name that does not start with `amq.`, the broker's own".to_owned());
    }
    Ok(queue)
}

/// An exchange, or `""` for none.
pub(crate) fn exchange(value: &Value) -> Result<Option<String>, Expected> {
    let exchange = optional_name(value).map_err(|_| "the name of an exchange, or \"\"".to_owned())?;
    match &exchange {
        Some(name) if name.len() > MAX_NAME_BYTES => Err(format!("a name of at most {MAX_NAME_BYTES} bytes")),
        Some(name) if name.starts_with("amq.") => {
            Err("a name that does not start with `amq.`, the broker's own".to_owned())
        }
        _ => Ok(exchange),
    }
}

/// Names by which requests may call a model.
pub(crate) fn served_names(value: &Value) -> Result<Vec<String>, Expected> {
    let names = list(value)?;
    if names.iter().any(String::is_empty) {
        return Err("a list without empty names".to_owned());
    }
    Ok(names)
}

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
    let is_invalid = |device: &String| device.is_empty() || device == "auto";
    if devices.is_empty() || devices.iter().any(is_invalid) {
        return Err(EXPECTED.to_owned());
    }
    let mut seen = BTreeSet::new();
    let mut gpus = devices.iter().filter(|device| *device != "cpu");
    match gpus.find(|device| !seen.insert(device.as_str())) {
        Some(device) => {
            Err(format!("each GPU once, not {device} twice; workers_per_device runs several workers on one"))
        }
        None => Ok(Devices::List(devices)),
    }
}
