//! Computes batches, over the model channel. The inputs of a batch are in the process; the outputs come to the worker if they are
//! numbers, and otherwise stay there. Owns the channel.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::frames::write_frame;
use super::messages::{
    Answer, Failure, FailureKind, FromProcess, InputFailure, InputRange, Outputs, ToProcess,
};
use super::process::{Lost, Process};
use super::processor::{Input, Output};
use super::replies;
use crate::model::{Forward, ForwardError, TaskError, TaskErrorKind};

/// What computes the batches of a class in Python.
pub struct Batches {
    pub(super) process: Arc<Process>,
    pub(super) channel: UnixStream,
    /// Whether the outputs are numbers.
    pub(super) gives_numbers: bool,
}

/// The result of each input of a batch.
type BatchResults = Vec<Result<Output, TaskError>>;

impl Batches {
    /// The error for the engine, after an error on the channel.
    fn lost(&self, inputs: usize, error: &io::Error) -> ForwardError {
        let Lost { reason, .. } = self.process.why_lost(&format!("a batch of {inputs} inputs"), error);
        ForwardError::Device(reason)
    }

    /// The result of each input. An error says what is wrong with the message.
    fn results(&self, outputs: Outputs, numbers: &[u8], inputs: usize) -> Result<BatchResults, String> {
        let Outputs { count, lengths, errors } = outputs;
        if count != inputs {
            return Err(format!("{count} outputs for {inputs} inputs"));
        }
        let mut results: BatchResults = if self.gives_numbers {
            let vectors = split(numbers, &lengths).filter(|vectors| vectors.len() == count);
            let vectors = vectors.ok_or_else(|| {
                format!("{} bytes of numbers, which {} lengths do not match", numbers.len(), lengths.len())
            })?;
            vectors.into_iter().map(|vector| Ok(Output::Numbers(vector))).collect()
        } else {
            (0..count).map(|_| Ok(Output::InProcess)).collect()
        };
        for InputFailure { index, failure } in errors {
            let result =
                results.get_mut(index).ok_or_else(|| format!("an error for output {index} of {count}"))?;
            *result = Err(replies::task_error(failure, TaskErrorKind::Fault));
        }
        Ok(results)
    }
}

/// Divides little-endian numbers into vectors of these lengths. None if that does not come out even.
fn split(mut bytes: &[u8], lengths: &[usize]) -> Option<Vec<Vec<f32>>> {
    let mut vectors = Vec::with_capacity(lengths.len());
    for length in lengths {
        let (vector, rest) = bytes.split_at_checked(length.checked_mul(4)?)?;
        vectors.push(vector.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect());
        bytes = rest;
    }
    bytes.is_empty().then_some(vectors)
}

/// The inputs of a batch as ranges of adjacent inputs.
fn ranges(batch: &[&Input]) -> Vec<InputRange> {
    let mut ranges: Vec<InputRange> = Vec::new();
    for Input { held, index, .. } in batch {
        match ranges.last_mut() {
            Some(range) if range.task == held.id && range.first + range.count == *index => range.count += 1,
            _ => ranges.push(InputRange { task: held.id, first: *index, count: 1 }),
        }
    }
    ranges
}

/// What the failure of a batch means. A `TaskError` refuses an input that is alone in its batch. In a larger batch it is an
/// ordinary failure, after which the engine halves the batch.
fn failed(failure: Failure, inputs: usize) -> Result<BatchResults, ForwardError> {
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

    fn wait(&mut self, inputs: usize) -> Result<BatchResults, ForwardError> {
        let answer = Answer::read(&self.channel, Some(self.process.timeout()));
        let mut answer = answer.map_err(|error| self.lost(inputs, &error))?;
        let body = answer.body();
        let results = match answer.message {
            FromProcess::Outputs(outputs) => self.results(outputs, &body, inputs),
            FromProcess::Failed(failure) => return failed(failure, inputs),
            _ => Err("an answer to something else".to_owned()),
        };
        results.map_err(|problem| self.lost(inputs, &io::Error::new(io::ErrorKind::InvalidData, problem)))
    }
}
