//! Decides which files a job can have as inputs and output, and where it continues. Opens and locks the output.

use std::cell::RefCell;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::ordered::Ordered;
use super::record::Record;
use super::state::Job;
use crate::client::batch_file::{FileError, ResumePoint, claim};

/// The files of a job, checked: the output is open, locked and cut off after its last whole line.
pub(crate) struct JobFiles {
    output: Ordered,
    /// Where to continue; none if the input can be read only once.
    point: Option<ResumePoint>,
}

impl JobFiles {
    /// Opens and locks the output, and finds where to continue. The rows go through `queue`.
    ///
    /// # Errors
    /// These files cannot be used, and the operator has to name others.
    pub(crate) fn open(inputs: &[PathBuf], output: &Path, queue: &str) -> Result<Self, FileError> {
        let shown = output.display();
        if output == Path::new("-") || output.metadata().is_ok_and(|it| !it.is_file()) {
            let problem = format!("the output {shown} is no file: an interrupted run could not continue it");
            return Err(FileError::Refused(problem));
        }
        // Checked before the output is created, so that a wrong name leaves no file. No input is opened here: the
        // writer of a FIFO would lose its reader when the FIFO is closed again.
        let mut are_files = true;
        let file_of = |metadata: Metadata| (metadata.dev(), metadata.ino());
        let existing = output.metadata().ok().map(file_of);
        for input in inputs {
            if existing.is_some() && input.metadata().ok().map(file_of) == existing {
                let problem = format!("the output {shown} is also an input; give another name");
                return Err(FileError::Refused(problem));
            }
            if input.is_dir() {
                return Err(FileError::Refused(format!("the input {} is a folder", input.display())));
            }
            let is_stdin = input == Path::new("-");
            let is_file = || input.metadata().map(|it| it.is_file()).map_err(FileError::at(input.display()));
            are_files &= !is_stdin && is_file()?;
        }
        if !are_files && inputs.len() > 1 {
            let problem = "an input that is no file, such as standard input or a pipe, must be the only one";
            return Err(FileError::Refused(problem.to_owned()));
        }
        let mut claimed = claim(output)?;
        let point = if are_files { Some(ResumePoint::find(inputs, output)?) } else { None };
        if let Some(point) = &point {
            let input = Some(point.input.clone());
            Record { queue: queue.to_owned(), input }.continue_output(output, point.done)?;
            point.cut(&mut claimed, output)?;
        } else {
            if claimed.metadata().map_err(FileError::at(&shown))?.len() > 0 {
                return Err(FileError::Refused(format!(
                    "{shown} has lines already, and an input that is no file cannot be read again to continue them"
                )));
            }
            Record { queue: queue.to_owned(), input: None }.continue_output(output, 0)?;
        }
        let done = point.as_ref().map_or(0, |point| point.done as u64);
        let output = Ordered::new(claimed, output, done);
        Ok(Self { output, point })
    }

    /// The job for these files. A task without a reply is published `attempts` times in all.
    pub(crate) fn job(self, attempts: u32) -> RefCell<Job> {
        RefCell::new(Job::new(self.output, self.point, attempts))
    }
}
