//! Counts the errors of an output by code and message. Owns the counts, whose number is bounded, because each line of
//! an output may hold a different error.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::protocol::batch_line::{OutputError, read_output};

/// Maximum number of distinct errors that are counted by code and message, and of distinct codes counted alone.
const MAX_DISTINCT: usize = 100;
/// How many of the commonest errors are reported.
const COMMONEST: usize = 5;

/// The errors of an output, those of earlier runs included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ErrorCounts {
    total: u64,
    /// By code and message. Bound: [`MAX_DISTINCT`].
    by_message: BTreeMap<(String, String), u64>,
    /// Errors for which `by_message` had no room, by code. Bound: [`MAX_DISTINCT`].
    by_code: BTreeMap<String, u64>,
}

/// An error with the number of lines that hold it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CommonError {
    /// How many lines hold it.
    pub count: u64,
    /// Its code.
    pub code: String,
    /// Its message; none: several errors with different messages.
    pub message: Option<String>,
}

impl ErrorCounts {
    /// Counts an error.
    pub fn add(&mut self, error: OutputError) {
        self.total += 1;
        let OutputError { code, message } = error;
        let key = (code, message);
        if let Some(count) = self.by_message.get_mut(&key) {
            *count += 1;
        } else if self.by_message.len() < MAX_DISTINCT {
            self.by_message.insert(key, 1);
        } else if self.by_code.len() < MAX_DISTINCT || self.by_code.contains_key(&key.0) {
            *self.by_code.entry(key.0).or_default() += 1;
        }
    }

    /// Counts the error of a written line, if it holds one.
    pub fn add_line(&mut self, line: &[u8]) {
        if let Some(error) = read_output(line).ok().and_then(|line| line.error) {
            self.add(error);
        }
    }

    /// How many lines hold an error.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The commonest errors, the commonest first.
    pub fn commonest(&self) -> Vec<CommonError> {
        let by_message = self.by_message.iter().map(|((code, message), count)| CommonError {
            count: *count,
            code: code.clone(),
            message: Some(message.clone()),
        });
        let by_code = self.by_code.iter().map(|(code, count)| CommonError {
            count: *count,
            code: code.clone(),
            message: None,
        });
        let mut all: Vec<CommonError> = by_message.chain(by_code).collect();
        all.sort_by_key(|error| std::cmp::Reverse(error.count));
        all.truncate(COMMONEST);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: &str, message: &str) -> OutputError {
        OutputError { code: code.to_owned(), message: message.to_owned() }
    }

    #[test]
    fn the_commonest_errors_come_first_and_all_are_counted() {
        let mut errors = ErrorCounts::default();
        (0..7).for_each(|_| errors.add(error("404", "no such URL")));
        (0..2).for_each(|_| errors.add(error("400", "too long")));
        (0..9).for_each(|number| errors.add(error("400", &format!("input {number}"))));
        let reported: Vec<_> = errors.commonest().into_iter().map(|it| (it.count, it.code)).collect();
        assert_eq!(reported[..2], [(7, "404".to_owned()), (2, "400".to_owned())]);
        assert_eq!((reported.len(), errors.total()), (COMMONEST, 18));
    }

    #[test]
    fn any_number_of_different_errors_is_held_in_bounded_memory() {
        let mut errors = ErrorCounts::default();
        for number in 0..1_000 {
            errors.add(error("400", &format!("input {number}")));
            errors.add(error(&format!("code {number}"), ""));
        }
        assert!(errors.by_message.len() <= MAX_DISTINCT && errors.by_code.len() <= MAX_DISTINCT);
        let first = errors.commonest().remove(0);
        assert_eq!((first.count, first.code.as_str(), first.message), (950, "400", None));
        assert_eq!(errors.total(), 2_000);
    }
}
