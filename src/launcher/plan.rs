//! Plans the slots (pools × devices × workers per device), and checks whether the weights of their models fit in the
//! devices' memory. The caller passes in what the host has, except the vector units of its CPU, which are asked here.
//! Never opens a device, and never substitutes another device for the one in the settings.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use super::LaunchError;
use super::gpus::Gpus;
use crate::config::{Assignment, Devices, Pool, Settings};

/// The maximum number of CPU workers that `devices = "auto"` makes. With more cores, each worker gets several.
const MAX_CPU_WORKERS: usize = 16;
const CPU: &str = "cpu";

/// What this host has.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// The name of the launcher, which is the first part of the names of workers. It is the host's name unless the
    /// settings give another, or a second launcher runs here.
    pub launcher: String,
    /// The cores that this process may use.
    pub cores: usize,
    /// Its GPUs.
    pub gpus: Gpus,
    /// The `CUDA_VISIBLE_DEVICES` of this launcher, if set. It limits the devices that `auto` may use.
    pub visible: Option<String>,
    /// The CUDA version of this program; none if it computes on CPUs only.
    pub cuda: Option<Cuda>,
}

/// The drivers and cards for which this program was built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cuda {
    /// Its CUDA version, which the driver must support.
    pub version: (i32, i32),
    /// The lowest compute capability that it has code for.
    pub compute_capability: (i32, i32),
}

impl Cuda {
    /// No requirements: a class in Python brings its own CUDA, so that any driver and any card will do for this program.
    pub const NO_REQUIREMENTS: Self = Self { version: (0, 0), compute_capability: (0, 0) };

    /// The versions with which `scripts/build-cuda` built this program; none without CUDA.
    pub fn of_this_build() -> Option<Self> {
        let capability: i32 = option_env!("CUDA_COMPUTE_CAP").and_then(|it| it.parse().ok()).unwrap_or(80);
        let compute_capability = (capability / 10, capability % 10);
        cfg!(feature = "cuda").then_some(Self { version: (13, 0), compute_capability })
    }
}

impl Host {
    /// This host: cores by affinity and cgroup quota, GPUs by NVML.
    pub fn here() -> Self {
        let name = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
        let name = name.unwrap_or_else(|| "localhost".into());
        Self {
            launcher: name.clone(),
            name,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            gpus: Gpus::here(),
            visible: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
            cuda: Cuda::of_this_build(),
        }
    }

    /// The same host for this pool: if its model is a class in Python, the GPUs that NVML reports can be used in every build
    /// of this program.
    pub fn for_pool(&self, pool: &Pool) -> Cow<'_, Self> {
        match pool.python_class() {
            Some(_) => Cow::Owned(Self { cuda: Some(Cuda::NO_REQUIREMENTS), ..self.clone() }),
            None => Cow::Borrowed(self),
        }
    }

    /// The UUID of the GPU that a pool's `devices` entry names.
    ///
    /// # Errors
    /// [`LaunchError::Device`] for a GPU that does not exist, or that this program cannot compute on.
    pub fn device(&self, entry: &str, pool: &str) -> Result<String, LaunchError> {
        let uuid = self.gpus.resolve(entry).map_err(|reason| self.device_error(entry, pool, reason))?;
        match self.obstacle(uuid) {
            Some(reason) => Err(self.device_error(entry, pool, reason)),
            None => Ok(uuid.to_owned()),
        }
    }

    /// The devices that `CUDA_VISIBLE_DEVICES` names, by number or UUID.
    fn visible_devices(&self, visible: &str) -> Result<Vec<String>, Refused> {
        let entries = visible.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        let uuid = |entry: &str| {
            let is_number = entry.bytes().all(|byte| byte.is_ascii_digit());
            let entry = if is_number { format!("cuda:{entry}") } else { entry.to_owned() };
            let refused =
                |reason| Refused { device: format!("auto, of CUDA_VISIBLE_DEVICES={visible}"), reason };
            let uuid = self.gpus.resolve(&entry).map_err(refused)?;
            match self.obstacle(uuid) {
                Some(reason) => Err(refused(reason)),
                None => Ok(uuid.to_owned()),
            }
        };
        entries.map(uuid).collect()
    }

    fn device_error(&self, device: &str, pool: &str, reason: String) -> LaunchError {
        let (device, pool) = (device.to_owned(), pool.to_owned());
        LaunchError::Device { pool, device, reason, here: self.gpus.describe() }
    }

    /// Why this program cannot compute on a GPU; none if it can.
    fn obstacle(&self, uuid: &str) -> Option<String> {
        let Some(cuda) = self.cuda else {
            return Some("this build of sconce has no CUDA; `make cuda` builds one with CUDA".to_owned());
        };
        let format_version = |(major, minor): (i32, i32)| format!("{major}.{minor}");
        let supported = self.gpus.cuda.as_deref().and_then(version);
        if let Some(supported) = supported.filter(|supported| *supported < cuda.version) {
            let driver = self.gpus.driver.as_deref().unwrap_or("unknown");
            return Some(format!(
                "the driver {driver} supports CUDA {}, but this build needs {}: update the driver to 580 or later",
                format_version(supported),
                format_version(cuda.version),
            ));
        }
        let found = self.gpus.gpu_of(uuid)?.compute_capability?;
        (found < cuda.compute_capability).then(|| {
            let (major, minor) = found;
            format!(
                "its compute capability is {}, but this build has code only for {} and later: \
                 CUDA_COMPUTE_CAP={major}{minor} make cuda",
                format_version(found),
                format_version(cuda.compute_capability),
            )
        })
    }
}

/// One assignment for each slot, in the order of the settings.
///
/// # Errors
/// [`LaunchError::Device`] for a device that this build or this host does not have, [`LaunchError::CpuFeatures`] for vector
/// units that this CPU does not have.
pub fn plan(settings: &Settings, host: &Host) -> Result<Vec<Assignment>, LaunchError> {
    let auto_pools = settings.pools.iter().filter(|pool| pool.devices == Devices::Auto).count();
    let cpu_workers = (host.cores / auto_pools.max(1)).clamp(1, MAX_CPU_WORKERS);
    let mut planned = Vec::new();
    for pool in &settings.pools {
        for device in devices_of(pool, &host.for_pool(pool), cpu_workers)? {
            if device == CPU {
                let lacks = |reason| LaunchError::CpuFeatures { pool: pool.name.clone(), reason };
                pool.cpu_features.check().map_err(lacks)?;
            }
            for _ in 0..pool.workers_per_device {
                planned.push((pool, device.clone()));
            }
        }
    }
    let threads = (host.cores / planned.len().max(1)).max(1);
    let mut slot_counts = HashMap::<&str, usize>::new();
    let mut assignments = Vec::with_capacity(planned.len());
    for (pool, device) in planned {
        let index = slot_counts.entry(&pool.name).or_default();
        let slot = format!("{}/{index}", pool.name);
        *index += 1;
        assignments.push(Assignment {
            worker: format!("{}/{slot}", host.launcher),
            slot,
            device,
            sharers: 1,
            threads: pool.threads.unwrap_or(threads),
            pool: pool.clone(),
            broker: settings.broker.clone(),
            telemetry: settings.telemetry.clone(),
            reserved_queues: settings.reserved_queues(),
            broker_reached: false,
        });
    }
    Ok(assignments)
}

/// Parses a version such as `13.0`.
fn version(text: &str) -> Option<(i32, i32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The devices of a pool: `cpu`, or the UUIDs of GPUs. `cpu_workers`: the number of CPU workers of an `auto` pool.
fn devices_of(pool: &Pool, host: &Host, cpu_workers: usize) -> Result<Vec<String>, LaunchError> {
    let refused = |device: &str, reason: String| host.device_error(device, &pool.name, reason);
    let listed = match &pool.devices {
        Devices::Auto => {
            return auto_devices(host, cpu_workers).map_err(|it| refused(&it.device, it.reason));
        }
        Devices::List(listed) => listed,
    };
    let mut devices: Vec<String> = Vec::with_capacity(listed.len());
    for entry in listed {
        if entry == CPU {
            devices.push(CPU.to_owned());
            continue;
        }
        let uuid = host.device(entry, &pool.name)?;
        if devices.contains(&uuid) {
            let reason =
                format!("it is {uuid}, which is already in the list; workers_per_device runs several on one");
            return Err(refused(entry, reason));
        }
        devices.push(uuid);
    }
    Ok(devices)
}

/// A device that cannot be used.
struct Refused {
    device: String,
    reason: String,
}

/// The devices of a pool with `devices = "auto"`: every usable GPU, or those that `CUDA_VISIBLE_DEVICES` lists. If the
/// host has no GPU, if that list is empty, or if this program has no CUDA, the list is `cpu`, repeated for each of
/// `cpu_workers`. It is an error if the host has GPUs, and none of them is usable.
fn auto_devices(host: &Host, cpu_workers: usize) -> Result<Vec<String>, Refused> {
    let usable = host.gpus.usable();
    let cpus = || vec![CPU.to_owned(); cpu_workers];
    if host.cuda.is_none() {
        if !host.gpus.gpus.is_empty() {
            // Not a fall-back: this program never computes on GPUs.
            tracing::warn!(gpus = usable.len(), "this build of sconce has no CUDA and does not use the GPUs");
        }
        return Ok(cpus());
    }
    if let Some(visible) = &host.visible {
        return host
            .visible_devices(visible)
            .map(|devices| if devices.is_empty() { cpus() } else { devices });
    }
    match &host.gpus.unknown {
        Some(failure) if host.gpus.installed => {
            return Err(Refused { device: "auto".to_owned(), reason: failure.clone() });
        }
        Some(failure) => {
            tracing::warn!(why = failure, "no GPUs; computing on CPUs");
            return Ok(cpus());
        }
        None if host.gpus.gpus.is_empty() => return Ok(cpus()),
        None if usable.is_empty() => {
            let reason = "none of the GPUs can be used".to_owned();
            return Err(Refused { device: "auto".to_owned(), reason });
        }
        None => {}
    }
    for gpu in &host.gpus.gpus {
        if let Some(fault) = &gpu.fault {
            tracing::warn!(device = gpu.uuid, fault, "a GPU is out of order and left out");
        }
    }
    let refused = |uuid: &&str| Some(Refused { device: (*uuid).to_owned(), reason: host.obstacle(uuid)? });
    match usable.iter().find_map(refused) {
        Some(refused) => Err(refused),
        None => Ok(usable.into_iter().map(str::to_owned).collect()),
    }
}

/// Compares the sum of the `weights` (bytes) of each GPU's workers with its free memory. Batches need memory too, but
/// how much is known only when they run. A worker with unknown weights and a device with unknown memory are skipped.
///
/// # Errors
/// [`LaunchError::Memory`] with the numbers of the first device that is too small.
pub fn fit(
    assignments: &[Assignment],
    gpus: &Gpus,
    weights: impl Fn(&Assignment) -> Option<u64>,
) -> Result<(), LaunchError> {
    let mut by_device: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for assignment in assignments.iter().filter(|it| gpus.memory_of(&it.device).is_some()) {
        let (workers, needed) = by_device.entry(&assignment.device).or_default();
        (*workers, *needed) = (*workers + 1, *needed + weights(assignment).unwrap_or_default());
    }
    for (device, (workers, needed)) in by_device {
        let Some(memory) = gpus.memory_of(device).filter(|memory| needed > memory.free) else { continue };
        let [needed, free, total] = [needed, memory.free, memory.total].map(gib);
        return Err(LaunchError::Memory { device: device.to_owned(), workers, needed, free, total });
    }
    Ok(())
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::super::gpus::{Gpu, Memory};
    use super::*;
    use crate::config;

    const CUDA: Cuda = Cuda { version: (13, 0), compute_capability: (8, 0) };

    fn planned_on(host: &Host, flags: &[(&str, &str)]) -> Result<Vec<Assignment>, LaunchError> {
        let flags: Vec<_> = flags.iter().map(|(path, value)| ((*path).into(), (*value).into())).collect();
        let settings = config::load(&[], [], &flags).unwrap().settings;
        plan(&settings, host)
    }

    fn planned(cores: usize, flags: &[(&str, &str)]) -> Result<Vec<Assignment>, LaunchError> {
        planned_on(
            &Host {
                name: "host".into(),
                launcher: "host".into(),
                cores,
                gpus: Gpus::default(),
                visible: None,
                cuda: None,
            },
            flags,
        )
    }

    /// A host with two cards, and a program for them.
    fn with_gpus() -> Host {
        let gpu = |uuid: &str| Gpu { uuid: uuid.into(), compute_capability: Some((8, 6)), ..Gpu::default() };
        let gpus = Gpus {
            gpus: vec![gpu("GPU-a"), gpu("GPU-b")],
            driver: Some("580.65.06".into()),
            cuda: Some("13.0".into()),
            unknown: None,
            installed: true,
        };
        Host { name: "host".into(), launcher: "host".into(), cores: 8, gpus, visible: None, cuda: Some(CUDA) }
    }

    fn devices(host: &Host, listed: &str) -> Result<Vec<String>, String> {
        let slots = planned_on(host, &[("pool[0].devices", listed)]).map_err(|error| error.to_string())?;
        Ok(slots.into_iter().map(|slot| slot.device).collect())
    }

    #[test]
    fn auto_divides_the_cores_among_cpu_workers() {
        let shape = |cores| {
            let slots = planned(cores, &[]).unwrap();
            (slots.len(), slots[0].threads)
        };
        assert_eq!([1, 4, 16, 64].map(shape), [(1, 1), (4, 1), (16, 1), (16, 4)]);
    }

    #[test]
    fn a_list_means_a_slot_for_each_entry_and_worker() {
        let flags = [("pool[0].devices", "cpu,cpu"), ("pool[0].workers_per_device", "2")];
        let slots = planned(8, &flags).unwrap();
        let names: Vec<_> = slots.iter().map(|it| (it.slot.as_str(), it.worker.as_str())).collect();
        assert_eq!(names[3], ("embed/3", "host/embed/3"));
        assert_eq!((slots.len(), slots[0].threads), (4, 2));
    }

    #[test]
    fn auto_takes_every_gpu_by_uuid_and_cpus_only_if_there_is_no_gpu() {
        let mut host = with_gpus();
        assert_eq!(devices(&host, "auto").unwrap(), ["GPU-a", "GPU-b"]);
        host.gpus.gpus[0].fault = Some("GPU is lost".into());
        assert_eq!(devices(&host, "auto").unwrap(), ["GPU-b"]);
        host.gpus.gpus[1].fault = Some("GPU is lost".into());
        let error = devices(&host, "auto").unwrap_err();
        assert!(error.contains("none of the GPUs") && error.contains("GPU is lost"), "{error}");
        host.gpus.gpus.clear();
        assert_eq!(devices(&host, "auto").unwrap(), ["cpu"; 8]);
    }

    #[test]
    fn gpu_workers_divide_the_cores_for_their_preprocess_threads() {
        let mut host = with_gpus();
        let threads = |host: &Host, flags: &[(&str, &str)]| {
            let slots = planned_on(host, &[&[("pool[0].devices", "cuda:0,cuda:1,cpu")], flags].concat());
            slots.unwrap().iter().map(|slot| (slot.threads, slot.preprocess_threads())).collect::<Vec<_>>()
        };
        assert_eq!(threads(&host, &[]), [(2, 2), (2, 2), (2, 1)]);
        assert_eq!(threads(&host, &[("pool[0].threads", "3")]), [(3, 3), (3, 3), (3, 1)]);
        host.cores = 2;
        assert_eq!(threads(&host, &[]), [(1, 1); 3]);
        host.cores = 96;
        assert_eq!(threads(&host, &[])[0], (32, 8), "more preprocess threads would be idle");
    }

    #[test]
    fn auto_is_an_error_if_an_installed_driver_does_not_answer() {
        let unknown = Some("reboot after an update".to_owned());
        let mut host = with_gpus();
        host.gpus = Gpus { unknown, installed: true, ..Gpus::default() };
        assert!(devices(&host, "auto").unwrap_err().contains("reboot"));
        host.gpus.installed = false;
        assert_eq!(devices(&host, "auto").unwrap(), ["cpu"; 8]);
    }

    #[test]
    fn auto_takes_only_devices_that_cuda_visible_devices_lists() {
        let shown = |visible: &str| devices(&Host { visible: Some(visible.into()), ..with_gpus() }, "auto");
        assert_eq!(shown("1").unwrap(), ["GPU-b"]);
        assert_eq!(shown("GPU-b, 0").unwrap(), ["GPU-b", "GPU-a"]);
        assert_eq!(shown("").unwrap(), ["cpu"; 8]);
        let error = shown("7").unwrap_err();
        assert!(error.contains("CUDA_VISIBLE_DEVICES=7") && error.contains("there are 2 GPUs"), "{error}");
    }

    #[test]
    fn without_cuda_auto_means_cpus_and_a_listed_gpu_is_refused() {
        let host = Host { cuda: None, ..with_gpus() };
        assert_eq!(devices(&host, "auto").unwrap(), ["cpu"; 8]);
        let error = devices(&host, "cpu,cuda:1").unwrap_err();
        assert!(error.contains("\"embed\"") && error.contains("\"cuda:1\""), "{error}");
        assert!(error.contains("make cuda") && error.contains("cuda:0 = GPU-a"), "{error}");
    }

    #[test]
    fn a_list_is_resolved_to_uuids_and_names_each_gpu_once() {
        let host = with_gpus();
        assert_eq!(devices(&host, "cuda:1,cpu,GPU-a").unwrap(), ["GPU-b", "cpu", "GPU-a"]);
        let error = devices(&host, "cuda:0,GPU-a").unwrap_err();
        assert!(error.contains("GPU-a") && error.contains("workers_per_device"), "{error}");
        let error = devices(&host, "cuda:2").unwrap_err();
        assert!(error.contains("there are 2 GPUs") && error.contains("cuda:1 = GPU-b"), "{error}");
    }

    #[test]
    fn a_card_or_driver_that_is_too_old_is_refused_with_advice() {
        let mut host = with_gpus();
        host.gpus.gpus[1].compute_capability = Some((7, 5));
        assert_eq!(devices(&host, "cuda:0").unwrap(), ["GPU-a"]);
        for listed in ["cuda:1", "auto"] {
            let error = devices(&host, listed).unwrap_err();
            assert!(error.contains("7.5") && error.contains("CUDA_COMPUTE_CAP=75 make cuda"), "{error}");
        }
        host.gpus.cuda = Some("12.8".into());
        let error = devices(&host, "cuda:0").unwrap_err();
        assert!(error.contains("580.65.06") && error.contains("CUDA 12.8"), "{error}");
    }

    /// Plans `workers` on one GPU with `free` bytes, and checks whether their weights of 3 GiB fit.
    fn fits(free: Option<u64>, workers: &str) -> Result<(), String> {
        let memory = free.map(|free| Memory { total: 24 << 30, free });
        let gpu = Gpu { uuid: "GPU-a".into(), memory, ..Gpu::default() };
        let gpus = Gpus { gpus: vec![gpu], ..Gpus::default() };
        let cuda = Some(Cuda { version: (13, 0), compute_capability: (8, 0) });
        let host = Host { name: "host".into(), launcher: "host".into(), cores: 4, gpus, visible: None, cuda };
        let flags = [("pool[0].devices", "cuda:0,cpu"), ("pool[0].workers_per_device", workers)];
        let flags = flags.map(|(path, value)| (path.to_owned(), value.to_owned()));
        let settings = config::load(&[], [], &flags).unwrap().settings;
        let assignments = plan(&settings, &host).unwrap();
        fit(&assignments, &host.gpus, |_| Some(3 << 30)).map_err(|error| error.to_string())
    }

    #[test]
    fn copies_that_fit_are_accepted_and_one_more_is_refused_with_numbers() {
        assert_eq!(fits(Some(9 << 30), "3"), Ok(()));
        let error = fits(Some(9 << 30), "4").unwrap_err();
        for part in ["GPU-a", "4 workers", "12.00 GiB", "9.00 GiB", "24.00 GiB"] {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
        assert_eq!(fits(None, "4"), Ok(()), "a device of unknown memory");
    }
}
