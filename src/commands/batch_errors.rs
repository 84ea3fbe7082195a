//! How `submit` and `run-batch` end when all rows are answered: prints the commonest errors of the output, and chooses the
//! exit code. Owns no state.

use std::fmt::Write as _;

use crate::client::batch_file::{CommonError, ErrorCounts};
use crate::shutdown::Exit;

/// The exit code of a run whose rows are all answered.
pub(super) fn exit_of(errors: &ErrorCounts) -> Exit {
    if errors.total() > 0 { Exit::DoneWithErrors } else { Exit::Done }
}

/// A line for each of the commonest errors, and one for the rest; empty without errors.
pub(super) fn told(errors: &ErrorCounts) -> String {
    let commonest = errors.commonest();
    let mut told = String::new();
    let mut rest = errors.total();
    for CommonError { count, code, message } in &commonest {
        rest -= count;
        let message = message.as_deref().unwrap_or("different errors");
        // A message is a stranger's, and this may be a terminal.
        let message: String = message.chars().map(|it| if it.is_control() { ' ' } else { it }).collect();
        let _ = writeln!(told, "{count:>8} × {code}: {message}");
    }
    if rest > 0 {
        let _ = writeln!(told, "{rest:>8} × other errors");
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::batch_line::OutputError;

    #[test]
    fn errors_are_told_with_their_counts_and_without_control_characters() {
        let mut errors = ErrorCounts::default();
        assert_eq!((told(&errors).as_str(), exit_of(&errors)), ("", Exit::Done));
        for (count, message) in [(3, "no such\u{1b}URL"), (1, "a"), (1, "b"), (1, "c"), (1, "d"), (1, "e")] {
            let error = || OutputError { code: "404".into(), message: message.into() };
            (0..count).for_each(|_| errors.add(error()));
        }
        let told = told(&errors);
        assert!(told.starts_with("       3 × 404: no such URL\n"), "{told}");
        assert!(told.ends_with("       1 × other errors\n") && told.lines().count() == 6, "{told}");
        assert_eq!(exit_of(&errors), Exit::DoneWithErrors);
    }
}
