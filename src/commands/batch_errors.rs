//! For `submit` and `run-batch`: formats the commonest errors of a batch's output and the number of texts that were cut,
//! and chooses the exit code once all rows are answered. Owns no state.

use std::fmt::Write as _;

use crate::client::batch_file::{CommonError, ErrorCounts};
use crate::protocol::printable;
use crate::shutdown::Exit;

/// The exit code of a run whose rows are all answered.
pub(super) fn exit_of(errors: &ErrorCounts) -> Exit {
    if errors.total() > 0 { Exit::DoneWithErrors } else { Exit::Done }
}

/// The `remarks`, a line for each of the commonest errors and one for the others, unless the remarks name them all
/// (`names_errors`), and a line with the number of texts that were cut.
pub(super) fn summary(
    remarks: &[String],
    names_errors: bool,
    errors: &ErrorCounts,
    truncated: u64,
) -> String {
    let mut summary: String = remarks.iter().map(|remark| format!("{remark}\n")).collect();
    if !names_errors {
        add_commonest(&mut summary, errors);
    }
    match truncated {
        0 => {}
        1 => summary += "1 text was longer than the model takes, and was cut\n",
        count => _ = writeln!(summary, "{count} texts were longer than the model takes, and were cut"),
    }
    summary
}

fn add_commonest(summary: &mut String, errors: &ErrorCounts) {
    let commonest = errors.commonest();
    let mut others = errors.total();
    for CommonError { count, code, message } in &commonest {
        others -= count;
        let message = message.as_deref().unwrap_or("different errors");
        let _ = writeln!(summary, "{count:>8} × {code}: {}", printable(message));
    }
    if others > 0 {
        let _ = writeln!(summary, "{others:>8} × other errors");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::batch_line::OutputError;

    #[test]
    fn the_summary_counts_errors_and_strips_control_characters() {
        let mut errors = ErrorCounts::default();
        assert_eq!((summary(&[], false, &errors, 0).as_str(), exit_of(&errors)), ("", Exit::Done));
        for (count, message) in [(3, "no such\u{1b}URL"), (1, "a"), (1, "b"), (1, "c"), (1, "d"), (1, "e")] {
            let error = || OutputError { code: "404".into(), message: message.into() };
            (0..count).for_each(|_| errors.add(error()));
        }
        let summary = summary(&[], false, &errors, 0);
        assert!(summary.starts_with("       3 × 404: no such URL\n"), "{summary}");
        assert!(summary.ends_with("       1 × other errors\n") && summary.lines().count() == 6, "{summary}");
        assert_eq!(exit_of(&errors), Exit::DoneWithErrors);
    }
}
