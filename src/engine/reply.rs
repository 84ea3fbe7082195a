//! Writes a task's reply, whole and in parts. Decides how much is written at a time, so that replies of other tasks
//! get a turn, and so that no part grows without bound while its reader is slow. Owns the task's context. Never waits
//! for the device.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::panics::caught;
use crate::model::{Body, Processor, TaskError};

/// The maximum number of pieces and outputs together whose parts may count as brief work.
pub(super) const BRIEF_PARTS: usize = 32;
/// The maximum number of pieces in a part. With 20 probabilities for each token, it has about half a megabyte.
pub(super) const MAX_PIECES: usize = 256;
/// How long parts are written without a pause. The time is checked between two parts.
pub(super) const WRITE_TIME: Duration = Duration::from_millis(10);

/// The part of a task's reply that is known so far.
pub(super) struct Reply<P: Processor> {
    context: P::Context,
    /// Pieces that are in no part yet. Each entry has at most [`MAX_PIECES`] pieces of one input.
    pieces: VecDeque<(usize, Vec<P::Piece>)>,
    /// Outputs of the first inputs, if parts are made from outputs. The other outputs are still in the job's `Outputs`.
    outputs: Vec<P::Output>,
    /// The number of these outputs that were written into parts.
    written: usize,
}

impl<P: Processor> Reply<P> {
    pub(super) fn new(context: P::Context) -> Self {
        Self { context, pieces: VecDeque::new(), outputs: Vec::new(), written: 0 }
    }

    /// Adds pieces, and the outputs of the next inputs, from which parts can be written.
    pub(super) fn add(&mut self, pieces: Vec<(usize, Vec<P::Piece>)>, outputs: Vec<P::Output>) {
        self.pieces.extend(pieces);
        self.outputs.extend(outputs);
    }

    /// Whether a part can be written.
    pub(super) fn has_parts(&self) -> bool {
        !self.pieces.is_empty() || self.written < self.outputs.len()
    }

    /// Whether the parts that can be written have at most `max` pieces and outputs together.
    pub(super) fn has_at_most(&self, max: usize) -> bool {
        let outputs = self.outputs.len() - self.written;
        // Each entry has at least one piece, so the number of entries may decide without counting the pieces.
        let pieces = || self.pieces.iter().map(|(_, pieces)| pieces.len()).sum::<usize>();
        outputs + self.pieces.len() <= max && outputs + pieces() <= max
    }

    /// Writes parts until none is left or [`WRITE_TIME`] has passed. A part that cannot be written is left out; the
    /// reply still holds everything.
    pub(super) fn write_parts(&mut self, processor: &P, task: &str) -> Vec<Body> {
        let began = Instant::now();
        let mut parts = Vec::new();
        while let Some(written) = self.write_next(processor) {
            match written {
                Ok(written) => parts.extend(written),
                Err(panic) => tracing::error!(task.id = task, panic, "a part of a reply is left out"),
            }
            if began.elapsed() >= WRITE_TIME {
                break;
            }
        }
        parts
    }

    /// Writes the next part. None: there is none. An error is the message of a panic.
    fn write_next(&mut self, processor: &P) -> Option<Result<Vec<Body>, String>> {
        let Self { context, pieces, outputs, written } = self;
        if let Some((input, pieces)) = pieces.pop_front() {
            return Some(caught(|| processor.parts(context, input, pieces)));
        }
        let (input, output) = (*written, outputs.get(*written)?);
        *written += 1;
        Some(caught(|| processor.output_parts(context, input, output)))
    }

    /// Whether writing the whole reply takes long.
    pub(super) fn is_finish_slow(&self, processor: &P) -> bool {
        processor.is_finish_slow(&self.context)
    }

    /// Writes the whole reply. `rest`: the outputs that were not added.
    ///
    /// # Errors
    /// As [`Processor::finish`].
    pub(super) fn finish(self, processor: &P, rest: Vec<P::Output>) -> Result<Body, TaskError> {
        let Self { context, mut outputs, .. } = self;
        outputs.extend(rest);
        processor.finish(context, outputs)
    }
}
