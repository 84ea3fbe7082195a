//! Decides which files a job can have as inputs and output, and where it continues. Opens and locks the output.

use std::cell::RefCell;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::ordered::Ordered;
use super::record::Record;
use super::state::Job;
use crate::client::batch_file::{Batch, FileError, OpenBatch, Results, is_table};

/// Opens and locks the output of a job, cuts it off after its last whole line, and finds where to continue. The rows go
/// through `queue`. A task without a reply is published `attempts` times in all.
///
/// # Errors
/// These files cannot be used, and the operator has to name others.
pub(crate) fn open_job(batch: &Batch, queue: &str, attempts: u32) -> Result<RefCell<Job>, FileError> {
    let record = batch.record_of();
    if let Some((inputs, output)) = batch.one_output()
        && !are_files(inputs, output)?
    {
        if inputs.iter().any(|input| is_table(input)) {
            return Err(FileError::Refused("a table must be a file, which is read twice".to_owned()));
        }
        let results = Results::begin(output)?;
        Record { queue: queue.to_owned(), input: None }.continue_output(&record, 0)?;
        let (output, fields) = (Ordered::new(results, &record, 0), batch.common_fields(None));
        return Ok(RefCell::new(Job::new(output, fields, None, attempts)));
    }
    let OpenBatch { results, point, rows } = batch.open(|point| {
        let input = Some(point.input.clone());
        Record { queue: queue.to_owned(), input }.continue_output(&record, point.done)
    })?;
    let output = Ordered::new(results, &record, point.done as u64);
    let fields = batch.common_fields(Some(&point));
    Ok(RefCell::new(Job::new(output, fields, Some((point, rows)), attempts)))
}

/// Whether the inputs are files. Checked before the output is created, so that a wrong name leaves no file. No input is
/// opened here: the writer of a FIFO would lose its reader when the FIFO is closed again.
fn are_files(inputs: &[PathBuf], output: &Path) -> Result<bool, FileError> {
    let shown = output.display();
    if output == Path::new("-") || output.metadata().is_ok_and(|it| !it.is_file()) {
        let problem = format!("the output {shown} is no file: an interrupted run could not continue it");
        return Err(FileError::Refused(problem));
    }
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
    Ok(are_files)
}
