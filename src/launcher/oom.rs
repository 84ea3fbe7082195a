//! Finds out whether the kernel's out-of-memory killer may have ended a worker. Reads the count of its kills in this
//! process's cgroup, which is the workers' too. Decides what people are told about a SIGKILL.

use std::path::Path;

/// How many processes of this cgroup any out-of-memory killer of the kernel has ended. None if the system does not tell.
pub(super) fn kills() -> Option<u64> {
    kills_below(Path::new("/sys/fs/cgroup"), &std::fs::read_to_string("/proc/self/cgroup").ok()?)
}

/// As [`kills`]. `root`: where the cgroups are mounted; `cgroups`: the lines of `/proc/self/cgroup`.
fn kills_below(root: &Path, cgroups: &str) -> Option<u64> {
    let files = cgroups.lines().filter_map(|line| {
        let [_, controllers, path] = line.splitn(3, ':').collect::<Vec<_>>()[..] else { return None };
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.events"),
            _ if controllers.split(',').any(|it| it == "memory") => {
                (root.join("memory"), "memory.oom_control")
            }
            _ => return None,
        };
        // In a container the path may be that of the host, and the container's own cgroup is the root.
        Some([root.join(path.trim_start_matches('/')).join(file), root.join(file)])
    });
    files.flatten().find_map(|file| {
        let text = std::fs::read_to_string(file).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
    })
}

/// What a SIGKILL from outside may mean. `before` and `now`: [`kills`] at the worker's start and after its end.
pub(super) fn hint(before: Option<u64>, now: Option<u64>) -> String {
    match before.zip(now) {
        Some((before, now)) if now > before => format!(
            "the kernel's out-of-memory killer has ended {} of this cgroup's processes since the worker began, so memory \
             has probably run out",
            now - before
        ),
        Some(_) => {
            "the kernel counts no out-of-memory kill in this cgroup since the worker began, so somebody sent \
                    the signal"
                .to_owned()
        }
        None => {
            "mostly this is the kernel's out-of-memory killer: `journalctl -k` or `dmesg` tells".to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_count_is_found_in_both_versions_of_cgroups_and_in_containers() {
        let root = tempfile::tempdir().unwrap();
        let write = |folder: &str, file: &str, text: &str| {
            let folder = root.path().join(folder);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(file), text).unwrap();
        };
        let kills = |cgroups: &str| kills_below(root.path(), cgroups);
        assert_eq!(kills("0::/system.slice/sconce.service\n"), None);
        write("memory/docker/a", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n");
        assert_eq!(kills("5:cpu,cpuacct:/b\n4:memory:/docker/a\n0::/\n"), Some(2));
        write("system.slice/sconce.service", "memory.events", "low 0\noom 7\noom_kill 3\noom_group_kill 0\n");
        assert_eq!(kills("0::/system.slice/sconce.service\n"), Some(3));
        write("", "memory.events", "oom 7\noom_kill 4\n");
        assert_eq!(kills("0::/\n"), Some(4));
        assert_eq!(kills("0::/docker/of-the-host\n"), Some(4));
    }

    #[test]
    fn a_sigkill_is_explained_by_what_the_kernel_has_counted() {
        assert!(hint(Some(1), Some(3)).contains("has ended 2 of this cgroup's processes"));
        assert!(hint(Some(1), Some(1)).contains("counts no out-of-memory kill"));
        assert!(hint(None, Some(1)).contains("dmesg"));
    }
}
