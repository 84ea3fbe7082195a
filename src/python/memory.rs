//! The memory of a process group: the sum over its processes of the memory that only they use. Reads `/proc`. Owns no
//! state.

use std::fs;

/// Bytes that the processes of the group use alone; 0 if the system does not tell. Mapped files and memory shared with
/// others do not count.
pub(super) fn of_group(group: i32) -> u64 {
    let Ok(processes) = fs::read_dir("/proc") else { return 0 };
    let ids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    ids.filter(|id| group_of(*id) == Some(group)).map(of_process).sum()
}

/// Field 5 of `/proc/PID/stat`. The name in parentheses before it may contain anything.
fn group_of(process: i32) -> Option<i32> {
    let stat = fs::read(format!("/proc/{process}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(2)?.parse().ok()
}

fn of_process(process: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes = anonymous.and_then(|text| text.trim().strip_suffix(" kB")?.parse().ok());
    1_024 * kilobytes.unwrap_or(0_u64)
}

#[cfg(test)]
mod tests {
    use nix::unistd::getpgrp;

    use super::*;

    #[test]
    fn the_memory_of_a_group_has_that_of_this_process() {
        let own = of_process(i32::try_from(std::process::id()).unwrap());
        assert!(own > 100_000, "{own}");
        assert!(of_group(getpgrp().as_raw()) >= own / 2);
        assert_eq!(of_group(i32::MAX), 0);
    }
}
