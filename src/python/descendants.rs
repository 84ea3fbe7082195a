//! The descendants of a process, and the memory that they use. Reads `/proc`. Owns no state.

use std::fs;

/// The ids of the processes that descend from this one, without its own. Empty if `/proc` cannot be read.
pub(super) fn descendants(process: i32) -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let all: Vec<(i32, i32)> = ids.filter_map(|id| Some((id, parent_of(id)?))).collect();
    let mut found = vec![process];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        found.extend(all.iter().filter(|(_, of)| *of == parent).map(|(id, _)| *id));
        next += 1;
    }
    found.split_off(1)
}

/// The memory of the descendants of a process, in bytes: each one's anonymous pages, without mapped files.
pub(super) fn memory_of_descendants(process: i32) -> u64 {
    descendants(process).into_iter().map(memory_of).sum()
}

/// The parent is field 4 of `/proc/PID/stat`. Field 2, the name in parentheses, may contain spaces and parentheses.
fn parent_of(process: i32) -> Option<i32> {
    let stat = fs::read(format!("/proc/{process}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

fn memory_of(process: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes = anonymous.and_then(|text| text.trim().strip_suffix(" kB")?.parse().ok());
    1_024 * kilobytes.unwrap_or(0_u64)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;

    #[test]
    fn a_child_of_a_child_is_a_descendant_and_its_memory_counts() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 1000 & echo $!; wait"]).stdout(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (own, child) = (i32::try_from(std::process::id()).unwrap(), line.trim().parse::<i32>().unwrap());
        let found = descendants(own);
        assert!(found.contains(&child) && !found.contains(&own), "{child}: {found:?}");
        assert!(memory_of_descendants(own) >= memory_of(child), "{found:?}");
        assert!(memory_of(child) > 10_000);
        kill(Pid::from_raw(child), Signal::SIGKILL).unwrap();
        shell.wait().unwrap();
        assert!(!descendants(own).contains(&child));
    }
}
