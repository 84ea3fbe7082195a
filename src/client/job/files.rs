//! Decides where a job continues. Opens and locks its output.

use std::cell::RefCell;

use super::ordered::Ordered;
use super::record::Record;
use super::state::Job;
use crate::client::batch_file::{Batch, FileError, OpenBatch, Results};

/// Opens and locks the output of a job, cuts it off after its last whole line, and finds where to continue. The rows go
/// through `queue`. A task without a reply is published `attempts` times in all.
///
/// # Errors
/// These files cannot be used, and the operator has to name others.
pub(crate) fn open_job(batch: &Batch, queue: &str, attempts: u32) -> Result<RefCell<Job>, FileError> {
    let record = batch.record_of();
    if let Batch::Rows { output, .. } = batch
        && !batch.has_files()?
    {
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
