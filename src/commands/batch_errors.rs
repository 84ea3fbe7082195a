//! For `submit` and `run-batch`: formats the commonest errors of a batch's output and the number of texts that were cut,
//! and chooses the exit code once all rows are answered. Owns no state.

use std::fmt::Write as _;

use crate::client::batch_file::{CommonError, ErrorCounts};
use crate::shutdown::Exit;

/// The exit code of a run whose rows are all answered.
pub(super) fn exit_of(errors: &ErrorCounts) -> Exit {
    if errors.total() > 0 { Exit::DoneWithErrors } else { Exit::Done }
}

/// One line for each of the commonest errors, and one for the others. Empty if there are no errors.
pub(super) fn summary(errors: &ErrorCounts) -> String {
    let commonest = errors.commonest();
    let mut summary = String::new();
    let mut others = errors.total();
    for CommonError { count, code, message } in &commonest {
        others -= count;
        let message = message.as_deref().unwrap_or("different errors");
        // The message is from outside and may be printed to a terminal, so control characters are removed.
        let message: String = message.chars().map(|it| if it.is_control() { ' ' } else { it }).collect();
        let _ = writeln!(summary, "{count:>8} × {code}: {message}");
    }
    if others > 0 {
        let _ = writeln!(summary, "{others:>8} × other errors");
    }
    summary
}

/// A line that says how many texts were cut in this run. Empty if there were none.
pub(super) fn of_truncated(count: u64) -> String {
    match count {
        0 => String::new(),
        1 => "1 text was longer than the model takes, and was cut\n".to_owned(),
        count => format!("{count} texts were longer than the model takes, and were cut\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::batch_line::OutputError;

    #[test]
    fn the_summary_counts_errors_and_strips_control_characters() {
        let mut errors = ErrorCounts::default();
        assert_eq!((summary(&errors).as_str(), exit_of(&errors)), ("", Exit::Done));
        for (count, message) in [(3, "no such\u{1b}URL"), (1, "a"), (1, "b"), (1, "c"), (1, "d"), (1, "e")] {
            let error = || OutputError { code: "404".into(), message: message.into() };
            (0..count).for_each(|_| errors.add(error()));
        }
        let summary = summary(&errors);
        assert!(summary.starts_with("       3 × 404: no such URL\n"), "{summary}");
        assert!(summary.ends_with("       1 × other errors\n") && summary.lines().count() == 6, "{summary}");
        assert_eq!(exit_of(&errors), Exit::DoneWithErrors);
    }
}
