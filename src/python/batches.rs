//! Computes batches, over the model channel: a batch is a list of ids, and its results are values, or stay in the process.
//! Owns the channel.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::frames::{Frame, read_frame, write_frame};
use super::messages::{Failure, FailureKind, FromProcess, Lengths, Outputs, Range, ToProcess};
use super::process::{Lost, Process};
use super::processor::{Input, Output};
use super::replies;
use crate::model::{Forward, ForwardError, TaskError, TaskErrorKind};

/// What computes the batches of a class in Python.
pub struct Batches {
    pub(super) process: Arc<Process>,
    pub(super) channel: UnixStream,
    /// Whether outputs come with the results.
    pub(super) has_values: bool,
}

impl Batches {
    fn lost(&self, inputs: usize, error: &io::Error) -> ForwardError {
        let Lost { reason, .. } = self.process.why_lost(&format!("a batch of {inputs} inputs"), error);
        ForwardError::Device(reason)
    }

    /// The results in a frame.
    fn results(
        &self,
        outputs: Outputs,
        inputs: usize,
        mut frame: Frame,
    ) -> Result<Vec<Result<Output, TaskError>>, String> {
        let Outputs { count, lengths, errors } = outputs;
        if count != inputs {
            return Err(format!("{count} outputs for {inputs} inputs"));
        }
        let lengths = match lengths {
            Lengths::Same(length) => vec![length; count],
            Lengths::Each(lengths) => lengths,
        };
        let values = frame.body();
        let expected =
            lengths.iter().try_fold(0_usize, |sum, length| sum.checked_add(length.checked_mul(4)?));
        if self.has_values && (lengths.len() != count || expected != Some(values.len())) {
            let (bytes, lengths) = (values.len(), lengths.len());
            return Err(format!("{bytes} bytes of values, and {lengths} lengths that need other ones"));
        }
        let mut rest = &values[..];
        let mut results: Vec<Result<Output, TaskError>> = if self.has_values {
            let mut next = |length: usize| {
                let (values, after) = rest.split_at_checked(4 * length).unwrap_or_default();
                rest = after;
                let numbers = values
                    .chunks_exact(4)
                    .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap_or_default()));
                Ok(Output::Values(numbers.collect()))
            };
            lengths.into_iter().map(&mut next).collect()
        } else {
            (0..count).map(|_| Ok(Output::Kept)).collect()
        };
        for (index, failure) in errors {
            let result =
                results.get_mut(index).ok_or_else(|| format!("an error for output {index} of {count}"))?;
            *result = Err(replies::task_error(failure, TaskErrorKind::Fault));
        }
        Ok(results)
    }
}

/// The inputs as ranges of adjacent ones.
fn ranges(batch: &[&Input]) -> Vec<Range> {
    let mut ranges: Vec<Range> = Vec::new();
    for Input { held, index, .. } in batch {
        match ranges.last_mut() {
            Some((task, first, count)) if *task == held.id && *first + *count == *index => *count += 1,
            _ => ranges.push((held.id, *index, 1)),
        }
    }
    ranges
}

/// What the failure of a batch means. A `TaskError` refuses the input if it is alone, and is an ordinary failure
/// otherwise.
fn failed(failure: Failure, inputs: usize) -> Result<Vec<Result<Output, TaskError>>, ForwardError> {
    match failure.kind {
        FailureKind::OutOfMemory => Err(ForwardError::OutOfMemory(failure.message)),
        FailureKind::Task if inputs == 1 => Ok(vec![Err(replies::task_error(failure, TaskErrorKind::Fault))]),
        _ => Err(ForwardError::Failed(failure.message)),
    }
}

impl Forward for Batches {
    type Input = Input;
    type Output = Output;
    /// The number of inputs.
    type Pending = usize;

    fn submit(&mut self, batch: &[&Input]) -> Result<usize, ForwardError> {
        let inputs = ranges(batch);
        write_frame(&self.channel, &ToProcess::Forward { inputs: &inputs }, &[])
            .map_err(|error| self.lost(batch.len(), &error))?;
        Ok(batch.len())
    }

    fn wait(&mut self, inputs: usize) -> Result<Vec<Result<Output, TaskError>>, ForwardError> {
        let answer = read_frame(&self.channel, Some(self.process.timeout()))
            .and_then(|frame| Ok((frame.header()?, frame)));
        let (answer, frame) = answer.map_err(|error| self.lost(inputs, &error))?;
        let results = match answer {
            FromProcess::Outputs(outputs) => self.results(outputs, inputs, frame),
            FromProcess::Failed(failure) => return failed(failure, inputs),
            _ => Err("an answer to something else".to_owned()),
        };
        results.map_err(|problem| self.lost(inputs, &io::Error::new(io::ErrorKind::InvalidData, problem)))
    }
}
