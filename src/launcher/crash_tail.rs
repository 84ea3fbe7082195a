//! The last few lines of a worker's log, kept in case it dies of a task, and short enough for a message's
//! headers. Owns these lines.

use std::collections::VecDeque;
use std::process::ExitStatus;

use crate::protocol::control::CrashTail;
use crate::protocol::shorten;
use crate::shutdown::Exit;

const LINES: usize = 5;
/// The most bytes of a line.
const LINE: usize = 200;

/// The last lines of one worker's log.
#[derive(Default)]
pub(super) struct LogTail(VecDeque<String>);

impl LogTail {
    pub(super) fn push(&mut self, line: &str) {
        if self.0.len() >= LINES {
            self.0.pop_front();
        }
        // In a control line each control character would take six bytes.
        let plain: String = line.chars().map(|it| if it.is_control() { ' ' } else { it }).collect();
        self.0.push_back(shorten(&plain, LINE));
    }

    /// The crash tail: these lines, and how the process ended.
    pub(super) fn at_the_end(self, status: Option<ExitStatus>) -> CrashTail {
        let exit = status.map_or_else(|| "unknown".to_owned(), |status| status.to_string());
        let meaning = status.and_then(|status| status.code()).and_then(Exit::from_code);
        let exit = meaning.map_or(exit.clone(), |meaning| format!("{exit} ({meaning})"));
        CrashTail { exit, log: Vec::from(self.0).join("\n") }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn the_last_lines_and_the_end_are_kept_in_short() {
        let mut tail = LogTail::default();
        (0..9).for_each(|n| tail.push(&format!("line {n}")));
        tail.push(&"x".repeat(100_000));
        let words = tail.at_the_end(Some(ExitStatus::from_raw(9)));
        assert_eq!(words.exit, "signal: 9 (SIGKILL)");
        assert!(words.log.starts_with("line 5\nline 6\n") && words.log.len() < LINES * (LINE + 40));
        let words = LogTail::default().at_the_end(Some(ExitStatus::from_raw(83 << 8)));
        assert_eq!(words.exit, "exit status: 83 (the device failed)");
    }
}
