//! Plans the slots: pools × devices × workers. Pure: what the host has is passed in. Never opens a
//! device.

use std::collections::HashMap;

use super::LaunchError;
use crate::config::{Assignment, Devices, Pool, Settings};

/// Most CPU workers that `devices = "auto"` makes; with more cores than this, each gets several.
const MOST_CPU_WORKERS: usize = 16;
/// The device name of a CPU slot.
const CPU: &str = "cpu";

/// What this host has.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its name, for replies.
    pub name: String,
    /// Cores that this process may use.
    pub cores: usize,
}

impl Host {
    /// This host: cores by affinity and cgroup quota.
    pub fn here() -> Self {
        let name = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
        Self {
            name: name.unwrap_or_else(|| "localhost".into()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// One assignment a slot, in the order of the settings.
///
/// # Errors
/// [`LaunchError::Device`] for a device that this build or this host does not have.
pub fn plan(settings: &Settings, host: &Host) -> Result<Vec<Assignment>, LaunchError> {
    let automatic = settings.pools.iter().filter(|pool| pool.devices == Devices::Auto).count();
    let share = (host.cores / automatic.max(1)).clamp(1, MOST_CPU_WORKERS);
    let mut planned = Vec::new();
    for pool in &settings.pools {
        for device in devices_of(pool, share)? {
            for _ in 0..pool.workers_per_device {
                planned.push((pool, device.clone()));
            }
        }
    }
    let threads = (host.cores / planned.len().max(1)).max(1);
    let mut slots_of = HashMap::<&str, usize>::new();
    let mut assignments = Vec::with_capacity(planned.len());
    for (pool, device) in planned {
        let index = slots_of.entry(&pool.name).or_default();
        let slot = format!("{}/{index}", pool.name);
        *index += 1;
        assignments.push(Assignment {
            worker: format!("{}/{slot}", host.name),
            slot,
            device,
            threads: pool.threads.unwrap_or(threads),
            pool: pool.clone(),
            broker: settings.broker.clone(),
        });
    }
    Ok(assignments)
}

fn devices_of(pool: &Pool, share: usize) -> Result<Vec<String>, LaunchError> {
    let listed = match &pool.devices {
        Devices::Auto => return Ok(vec![CPU.to_owned(); share]),
        Devices::List(listed) => listed,
    };
    listed
        .iter()
        .map(|device| match device.as_str() {
            CPU => Ok(CPU.to_owned()),
            other => Err(LaunchError::Device { pool: pool.name.clone(), device: other.to_owned() }),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    fn planned(cores: usize, flags: &[(&str, &str)]) -> Result<Vec<Assignment>, LaunchError> {
        let flags: Vec<_> = flags.iter().map(|(path, value)| ((*path).into(), (*value).into())).collect();
        let settings = config::load(&[], [], &flags).unwrap().settings;
        plan(&settings, &Host { name: "host".into(), cores })
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
    fn a_device_that_is_not_here_is_an_error_that_names_it() {
        let error = planned(4, &[("pool[0].devices", "cpu,cuda:1")]).unwrap_err().to_string();
        assert!(error.contains("\"embed\"") && error.contains("\"cuda:1\""), "{error}");
    }
}
