//! Processes as `/proc` shows them. A zombie is not alive.

use std::fs;

/// The children of a process that run this command of ours (their first argument), oldest id first. One
/// that is just being started still looks like its parent, and is not among them.
pub fn children(pid: u32, command: &str) -> Vec<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut children: Vec<u32> = pids
        .filter(|child| {
            parent_of(*child) == Some(pid) && first_argument_of(*child).as_deref() == Some(command)
        })
        .collect();
    children.sort_unstable();
    children
}

pub fn lives(pid: u32) -> bool {
    parent_of(pid).is_some()
}

fn first_argument_of(pid: u32) -> Option<String> {
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let command = arguments.split(|byte| *byte == 0).nth(1)?;
    Some(String::from_utf8_lossy(command).into_owned())
}

/// The parent of a living process.
fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.next()?.parse().ok()
}
