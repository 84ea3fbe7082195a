//! Checks before the start whether the weights of the planned workers fit their devices' memory. Otherwise too
//! many copies of a model would show one by one, as failures to load.

use std::collections::BTreeMap;

use super::LaunchError;
use super::gpus::Gpus;
use crate::config::Assignment;

/// Compares the sum of the `weights` (bytes) of each GPU's workers with its free memory. Batches need memory
/// too, but how much is only known when they run. A worker or a device of unknown size is skipped.
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
#[allow(clippy::unwrap_used, reason = "settings that cannot be read fail their test")]
mod tests {
    use super::super::gpus::{Gpu, Memory};
    use super::super::plan::{Cuda, Host, plan};
    use super::*;
    use crate::config;

    /// Plans `workers` on one GPU with `free` bytes, and checks whether their weights of 3 GiB fit.
    fn fits(free: Option<u64>, workers: &str) -> Result<(), String> {
        let memory = free.map(|free| Memory { total: 24 << 30, free });
        let gpu = Gpu { uuid: "GPU-a".into(), memory, ..Gpu::default() };
        let gpus = Gpus { gpus: vec![gpu], ..Gpus::default() };
        let cuda = Some(Cuda { version: (13, 0), compute_capability: (8, 0) });
        let host = Host { name: "host".into(), cores: 4, gpus, visible: None, cuda };
        let flags = [("pool[0].devices", "cuda:0,cpu"), ("pool[0].workers_per_device", workers)];
        let flags = flags.map(|(path, value)| (path.to_owned(), value.to_owned()));
        let settings = config::load(&[], [], &flags).unwrap().settings;
        let assignments = plan(&settings, &host).unwrap();
        fit(&assignments, &host.gpus, |_| Some(3 << 30)).map_err(|error| error.to_string())
    }

    #[test]
    fn as_many_copies_as_fit_are_taken_and_one_more_is_refused_with_the_numbers() {
        assert_eq!(fits(Some(9 << 30), "3"), Ok(()));
        let error = fits(Some(9 << 30), "4").unwrap_err();
        for words in ["GPU-a", "4 workers", "12.00 GiB", "9.00 GiB", "24.00 GiB"] {
            assert!(error.contains(words), "{words:?} is not in {error}");
        }
        assert_eq!(fits(None, "4"), Ok(()), "a device that says nothing");
    }
}
