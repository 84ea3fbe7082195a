//! Records in `OUTPUT.run.json` which input an output answers and through which queue, and decides whether a run may
//! continue the output. Owns that file; the caller holds the output's lock, so there is one writer.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::client::batch_file::{FileError, InputDigest, read_record, record_path, write_record};

/// The input that an output answers, and the queue that its rows went through.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// The queue that the rows were published to.
    pub(super) queue: String,
    /// None: standard input, which cannot be read again.
    pub(super) input: Option<InputDigest>,
}

impl Record {
    /// Compares this run with the record of the output, which has `done` whole lines. If there is no record or no whole
    /// line, writes this run's record.
    ///
    /// # Errors
    /// This run may not continue the output, and the operator has to name another one. Nothing is changed then.
    pub(super) fn continue_output(&self, output: &Path, done: usize) -> Result<(), FileError> {
        let path = record_path(output);
        let shown = path.display();
        let earlier: Option<Self> = if done > 0 {
            let hint = "give another output file, or remove it and the output";
            read_record(&path).map_err(FileError::at(format!("{shown} is of another kind of run: {hint}")))?
        } else {
            None
        };
        let Some(earlier) = earlier else {
            return write_record(&path, self).map_err(FileError::at(&shown));
        };
        let input = |record: &Self| match &record.input {
            Some(digest) => format!("an input of {digest}"),
            None => "standard input".to_owned(),
        };
        let (then, now) = match (&earlier.input, &self.input) {
            (Some(then), Some(now)) if then != now => then.differences(now),
            _ => (input(&earlier), input(self)),
        };
        if (&earlier.input, &earlier.queue) != (&self.input, &self.queue) || self.input.is_none() {
            return Err(FileError::Refused(format!(
                "the output was made from {then} through {:?}; this run has {now} and {:?}: give another output file, or \
                 remove {} and {shown}",
                earlier.queue,
                self.queue,
                output.display()
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let input =
            InputDigest { lines: 3, bytes: 90, sha256: "0123456789abcdef".repeat(4), parameters: None };
        Record { queue: "sconce.tasks".into(), input: Some(input) }
    }

    #[test]
    fn an_output_is_continued_only_with_the_same_input_and_queue() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out.jsonl");
        let error = |record: &Record, done| record.continue_output(&output, done).unwrap_err().to_string();
        record().continue_output(&output, 0).unwrap();
        record().continue_output(&output, 2).unwrap();
        let other = Record { queue: "other".into(), ..record() };
        let message = error(&other, 2);
        assert!(
            message.contains("through \"sconce.tasks\"; this run has") && message.contains("\"other\""),
            "{message}"
        );
        let stdin = Record { input: None, ..record() };
        assert!(error(&stdin, 1).contains("this run has standard input"));
        other.continue_output(&output, 0).unwrap();
        assert!(error(&record(), 1).contains("through \"other\""), "a new output is recorded anew");
        std::fs::write(record_path(&output), r#"{"format":2,"pools":[]}"#).unwrap();
        assert!(error(&record(), 1).contains("of another kind of run"));
    }
}
