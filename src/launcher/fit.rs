//! Checks before the start whether the planned workers fit their devices' memory. Otherwise too many copies of
//! a model would show one by one, as failures to load or as batches without memory.

use std::collections::BTreeMap;

use super::LaunchError;
use super::gpus::Gpus;
use crate::config::Assignment;

/// Bytes that CUDA itself takes for each process: its context, the compiled kernels, the workspace of cuBLAS. A
/// common value; it differs between cards and drivers.
const CONTEXT: u64 = 600 << 20;

/// The memory that one worker needs, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// For its copy of the model.
    pub weights: u64,
    /// For its largest forward pass.
    pub working: u64,
}

impl Needs {
    fn in_all(self) -> u64 {
        CONTEXT + self.weights + self.working
    }
}

/// Sums up what the workers of each GPU need. A worker of unknown size counts with the context alone; a device
/// whose free memory is unknown is skipped.
///
/// # Errors
/// [`LaunchError::Memory`] with the numbers of the first device that is too small.
pub fn fit(
    assignments: &[Assignment],
    gpus: &Gpus,
    needs: impl Fn(&Assignment) -> Option<Needs>,
) -> Result<(), LaunchError> {
    let mut by_device: BTreeMap<&str, Vec<(&str, Needs)>> = BTreeMap::new();
    for assignment in assignments.iter().filter(|it| gpus.memory_of(&it.device).is_some()) {
        let needs = needs(assignment).unwrap_or_default();
        by_device.entry(&assignment.device).or_default().push((&assignment.slot, needs));
    }
    for (device, workers) in by_device {
        let Some(memory) = gpus.memory_of(device) else { continue };
        let needed = workers.iter().map(|(_, needs)| needs.in_all()).sum();
        if needed > memory.free {
            let workers = workers.iter().map(|(slot, needs)| in_words(slot, *needs)).collect::<Vec<_>>();
            return Err(LaunchError::Memory {
                device: device.to_owned(),
                workers: workers.join(", "),
                needed: gib(needed),
                free: gib(memory.free),
                total: gib(memory.total),
            });
        }
    }
    Ok(())
}

fn in_words(slot: &str, needs: Needs) -> String {
    let Needs { weights, working } = needs;
    format!(
        "{slot}: {} ({} weights, {} for a batch, {} CUDA)",
        gib(needs.in_all()),
        gib(weights),
        gib(working),
        gib(CONTEXT)
    )
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

    const NEEDS: Needs = Needs { weights: 3 << 30, working: 1 << 30 };

    /// Plans workers on one GPU with `free` bytes, and checks whether they fit.
    fn fits(free: u64, workers: &str) -> Result<(), String> {
        let memory = Some(Memory { total: 24 << 30, free });
        let gpu = Gpu { uuid: "GPU-a".into(), memory, ..Gpu::default() };
        let gpus = Gpus { gpus: vec![gpu], ..Gpus::default() };
        let cuda = Some(Cuda { version: (13, 0), compute_capability: (8, 0) });
        let host = Host { name: "host".into(), cores: 4, gpus, visible: None, cuda };
        let flags = [("pool[0].devices", "cuda:0,cpu"), ("pool[0].workers_per_device", workers)];
        let flags = flags.map(|(path, value)| (path.to_owned(), value.to_owned()));
        let settings = config::load(&[], [], &flags).unwrap().settings;
        let assignments = plan(&settings, &host).unwrap();
        fit(&assignments, &host.gpus, |_| Some(NEEDS)).map_err(|error| error.to_string())
    }

    #[test]
    fn as_many_copies_as_fit_are_taken_and_one_more_is_refused_with_the_numbers() {
        assert_eq!(fits(10 << 30, "2"), Ok(()));
        let error = fits(10 << 30, "3").unwrap_err();
        for words in ["GPU-a", "embed/2", "13.76 GiB", "10.00 GiB", "24.00 GiB", "3.00 GiB weights"] {
            assert!(error.contains(words), "{words:?} is not in {error}");
        }
    }

    #[test]
    fn a_model_of_which_nothing_is_known_needs_a_context_at_least() {
        let known = |free| {
            let memory = Some(Memory { total: free, free });
            let gpu = Gpu { uuid: "GPU-a".into(), memory, ..Gpu::default() };
            Gpus { gpus: vec![gpu], ..Gpus::default() }
        };
        let cuda = Some(Cuda { version: (13, 0), compute_capability: (8, 0) });
        let host = Host { name: "host".into(), cores: 1, gpus: known(CONTEXT), visible: None, cuda };
        let flags = [("pool[0].devices".to_owned(), "cuda:0".to_owned())];
        let assignments = plan(&config::load(&[], [], &flags).unwrap().settings, &host).unwrap();
        assert!(fit(&assignments, &host.gpus, |_| None).is_ok());
        assert!(fit(&assignments, &known(CONTEXT - 1), |_| None).is_err());
        assert!(fit(&assignments, &Gpus::default(), |_| None).is_ok(), "a device that says nothing");
    }
}
