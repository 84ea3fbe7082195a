//! Binds a worker near its GPU: its threads to the cores of that memory node, and with them its memory,
//! which the kernel takes from the node of the thread that first writes to it.

use std::fs;
use std::path::Path;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

const NODES: &str = "/sys/devices/system/node";

/// Binds this thread, and with it those that it starts from now on. Where the node has none of the cores that
/// we may use, as in a container with cores of its own, everything stays as it is.
pub(super) fn bind_near(node: u32) {
    match bind(Path::new(NODES), node) {
        Ok(cores) => tracing::info!(node, cores, "bound to the cores near the device"),
        Err(error) => tracing::warn!(node, error, "not bound to the cores near the device"),
    }
}

/// How many cores we may use from now on.
fn bind(nodes: &Path, node: u32) -> Result<usize, String> {
    let path = nodes.join(format!("node{node}/cpulist"));
    let listed = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let ours = sched_getaffinity(Pid::from_raw(0)).map_err(|error| error.to_string())?;
    let (mut near, mut cores) = (CpuSet::new(), 0);
    for cpu in cpus(&listed).ok_or_else(|| format!("{}: {listed:?} is no list", path.display()))? {
        if ours.is_set(cpu).unwrap_or(false) && near.set(cpu).is_ok() {
            cores += 1;
        }
    }
    if cores == 0 {
        return Err("none of its cores is ours".to_owned());
    }
    sched_setaffinity(Pid::from_raw(0), &near).map_err(|error| error.to_string())?;
    Ok(cores)
}

/// `0-3,8,10-11`.
fn cpus(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a folder that cannot be made fails its test")]
mod tests {
    use super::*;

    fn allowed() -> Vec<usize> {
        let set = sched_getaffinity(Pid::from_raw(0)).unwrap();
        (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap()).collect()
    }

    #[test]
    fn the_kernels_lists_are_read() {
        assert_eq!(cpus("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(cpus("\n"), Some(vec![]));
        assert_eq!(cpus("0-x"), None);
    }

    #[test]
    fn a_node_leaves_of_our_cores_those_that_are_its_own() {
        let nodes = tempfile::tempdir().unwrap();
        let node = |number: u32, list: &str| {
            let folder = nodes.path().join(format!("node{number}"));
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("cpulist"), list).unwrap();
        };
        // On a thread of its own, since it binds the one that calls.
        let before = allowed();
        let kept = *before.last().unwrap();
        node(0, &format!("{kept},1000"));
        node(1, "1000-1001");
        let nodes = nodes.path();
        std::thread::scope(|scope| {
            let bound = scope.spawn(|| {
                let foreign = bind(nodes, 1).unwrap_err();
                assert!(foreign.contains("none of its cores"), "{foreign}");
                assert_eq!(allowed(), before);
                assert_eq!(bind(nodes, 0), Ok(1));
                assert!(bind(nodes, 2).unwrap_err().contains("node2/cpulist"));
                allowed()
            });
            assert_eq!(bound.join().unwrap(), [kept]);
        });
    }
}
