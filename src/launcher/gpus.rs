//! The GPUs of this host, as NVML reports them: resolves a `devices` entry, and decides which GPU can take a
//! worker. Pure, except `nvml` and `watch`, which call the driver. Never opens CUDA, because that may create a
//! context on each device.

pub(super) mod device_fault;
mod nvml;
pub(super) mod watch;

use serde::Serialize;

/// The state of a GPU on which MIG is enabled but which has no MIG devices.
const WITHOUT_PARTS: &str = "MIG is on and it has no parts";

/// What NVML reports about this host.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Gpus {
    /// In the order of their PCI bus ids: `cuda:0` is the first.
    pub gpus: Vec<Gpu>,
    /// The driver's version, such as 580.65.06.
    pub driver: Option<String>,
    /// The newest CUDA version that the driver supports, such as 13.0.
    pub cuda: Option<String>,
    /// Why NVML could not be queried; none if it answered.
    pub unknown: Option<String>,
    /// Whether a driver is installed, even if it does not answer.
    pub installed: bool,
}

/// One GPU.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Gpu {
    /// `GPU-…`.
    pub uuid: String,
    /// The card's name.
    pub name: String,
    /// Such as 00000000:17:00.0.
    pub pci: Option<String>,
    /// Major and minor number.
    pub compute_capability: Option<(i32, i32)>,
    /// In bytes.
    pub memory: Option<Memory>,
    /// Percent of the driver's last sample period in which the GPU computed.
    pub utilization_percent: Option<u32>,
    /// The processes that use it.
    pub processes: Vec<GpuProcess>,
    /// Its MIG devices, if MIG is on. Then only these can be used.
    pub parts: Option<Vec<MigDevice>>,
    /// Why the GPU cannot be used, in the driver's words.
    pub fault: Option<String>,
}

/// A MIG device.
#[derive(Clone, Debug, Default, Serialize)]
pub struct MigDevice {
    /// `MIG-…`.
    pub uuid: String,
    /// In bytes.
    pub memory: Option<Memory>,
}

/// A device's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// Bytes that no process uses.
    pub free: u64,
}

/// A process on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuProcess {
    /// The process id on the host. Inside a container the process may have another one.
    pub pid: u32,
    /// The bytes that it uses, if the driver reports them.
    pub memory: Option<u64>,
}

impl Gpus {
    /// Queries NVML. Without a driver there are no GPUs, and `unknown` says why.
    pub fn here() -> Self {
        nvml::query()
    }

    /// The UUIDs of all devices that can be used: GPUs, or their MIG devices.
    pub fn usable(&self) -> Vec<&str> {
        let working = self.gpus.iter().filter(|gpu| gpu.fault.is_none());
        working
            .flat_map(|gpu| match &gpu.parts {
                None => vec![gpu.uuid.as_str()],
                Some(parts) => parts.iter().map(|part| part.uuid.as_str()).collect(),
            })
            .collect()
    }

    /// The UUID of a `devices` entry: `cuda:1`, a UUID, or the beginning of one.
    ///
    /// # Errors
    /// Why the entry names no usable device, as a text for people.
    pub fn resolve(&self, entry: &str) -> Result<&str, String> {
        let require_nvml = || self.unknown.as_ref().map_or(Ok(()), |reason| Err(reason.clone()));
        let uuid = if let Some(index) = entry.strip_prefix("cuda:") {
            let index: usize =
                index.parse().map_err(|_| "`cuda:` must be followed by a number, counted from 0")?;
            require_nvml()?;
            let gpu = self.gpus.get(index).ok_or_else(|| format!("there are {} GPUs", self.gpus.len()))?;
            gpu.uuid.as_str()
        } else if entry.starts_with("GPU-") || entry.starts_with("MIG-") {
            require_nvml()?;
            let mut matching = self.uuids().filter(|uuid| uuid.starts_with(entry));
            let first = matching.next().ok_or("there is none of this name")?;
            if let Some(other) = matching.next() {
                return Err(format!("{first} and {other} both begin so"));
            }
            first
        } else {
            return Err("a device is \"cpu\", \"cuda:0\", \"GPU-…\" or \"MIG-…\"".to_owned());
        };
        match self.gpu_of(uuid) {
            Some(Gpu { fault: Some(fault), .. }) => Err(format!("the driver says: {fault}")),
            Some(Gpu { parts: Some(parts), uuid: whole, .. }) if whole == uuid => Err(match parts[..] {
                [] => format!("{WITHOUT_PARTS}: make some (nvidia-smi mig -cgi … -C), or end MIG (-mig 0)"),
                _ => "it is divided by MIG; name one of its parts".to_owned(),
            }),
            _ => Ok(uuid),
        }
    }

    /// A device's memory.
    pub fn memory_of(&self, uuid: &str) -> Option<Memory> {
        self.gpus.iter().find_map(|gpu| {
            let part = gpu.parts.iter().flatten().find(|part| part.uuid == uuid);
            match part {
                Some(part) => part.memory,
                None => gpu.memory.filter(|_| gpu.uuid == uuid),
            }
        })
    }

    /// The GPU with this UUID, or the one that has the MIG device with this UUID.
    pub fn gpu_of(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid || gpu.has_part(uuid))
    }

    /// The devices of this host with their entries, for an error message.
    pub fn describe(&self) -> String {
        let gpu = |(index, gpu): (usize, &Gpu)| match (&gpu.fault, &gpu.parts) {
            (Some(fault), _) => format!("cuda:{index} = {} (out of order: {fault})", gpu.uuid),
            (None, None) => format!("cuda:{index} = {}", gpu.uuid),
            (None, Some(parts)) if parts.is_empty() => {
                format!("cuda:{index} = {} ({WITHOUT_PARTS})", gpu.uuid)
            }
            (None, Some(parts)) => parts.iter().map(|part| part.uuid.as_str()).collect::<Vec<_>>().join(", "),
        };
        let mut devices = vec!["cpu".to_owned()];
        devices.extend(self.gpus.iter().enumerate().map(gpu));
        devices.join(", ")
    }

    fn uuids(&self) -> impl Iterator<Item = &str> {
        self.gpus.iter().flat_map(|gpu| {
            let parts = gpu.parts.iter().flatten().map(|part| part.uuid.as_str());
            std::iter::once(gpu.uuid.as_str()).chain(parts)
        })
    }
}

impl Gpu {
    fn has_part(&self, uuid: &str) -> bool {
        self.parts.iter().flatten().any(|part| part.uuid == uuid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: &str) -> Gpu {
        Gpu { uuid: uuid.into(), ..Gpu::default() }
    }

    fn host() -> Gpus {
        let part = |uuid: &str| MigDevice { uuid: uuid.into(), memory: None };
        let divided = Gpu { parts: Some(vec![part("MIG-1"), part("MIG-2")]), ..gpu("GPU-c") };
        let bare = Gpu { parts: Some(Vec::new()), ..gpu("GPU-bare") };
        let broken = Gpu { fault: Some("GPU is lost".into()), ..gpu("GPU-dead") };
        Gpus { gpus: vec![gpu("GPU-aa1"), gpu("GPU-aa2"), divided, broken, bare], ..Gpus::default() }
    }

    #[test]
    fn whole_gpus_and_mig_devices_are_usable_and_broken_gpus_are_not() {
        assert_eq!(host().usable(), ["GPU-aa1", "GPU-aa2", "MIG-1", "MIG-2"]);
    }

    #[test]
    fn an_entry_is_a_number_a_uuid_or_the_beginning_of_one() {
        let host = host();
        for (entry, uuid) in
            [("cuda:1", "GPU-aa2"), ("GPU-aa1", "GPU-aa1"), ("MIG-2", "MIG-2"), ("GPU-aa2", "GPU-aa2")]
        {
            assert_eq!(host.resolve(entry), Ok(uuid), "{entry}");
        }
    }

    #[test]
    fn an_entry_that_names_no_device_or_several_is_refused_with_the_reason() {
        let host = host();
        for (entry, reason) in [
            ("cuda:5", "there are 5 GPUs"),
            ("cuda:x", "number"),
            ("cuda:-1", "number"),
            ("GPU-aa", "GPU-aa1 and GPU-aa2"),
            ("GPU-z", "none of this name"),
            ("MIG-", "MIG-1 and MIG-2"),
            ("cuda:2", "divided by MIG"),
            ("GPU-c", "divided by MIG"),
            ("cuda:3", "GPU is lost"),
            ("gpu", "a device is"),
            ("GPU-bare", "no parts"),
            ("", "a device is"),
        ] {
            let message = host.resolve(entry).unwrap_err();
            assert!(message.contains(reason), "{entry:?}: {message}");
        }
        let without = Gpus { unknown: Some("no driver".into()), ..Gpus::default() };
        assert_eq!(without.resolve("cuda:0"), Err("no driver".into()));
        assert!(without.resolve("cup").unwrap_err().contains("a device is"), "the entry first");
    }
}
