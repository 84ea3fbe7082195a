//! What a task's reply is written from, whole and in parts. Decides how much is written at a time, so that replies of
//! other tasks have their turn, and so that no part grows without bound while its reader is slow. Owns the task's context.
//! Never waits for the device.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::panics::caught;
use crate::model::{Body, Processor, TaskError};

/// The most pieces that may count as brief work: as many tokens as 16 sequences give in some 10 ms.
pub(super) const BRIEF_PIECES: usize = 32;
/// The most pieces of one part. With 20 probabilities for each token, its body has about half a megabyte.
pub(super) const PIECES_AT_ONCE: usize = 256;
/// How long parts are written without a pause. It is looked at between two parts.
pub(super) const SLICE: Duration = Duration::from_millis(10);

/// A task's reply, as far as it is known.
pub(super) struct Reply<R: Processor> {
    context: R::Context,
    /// Pieces that are in no part yet: each entry of one input, and at most [`PIECES_AT_ONCE`].
    pieces: VecDeque<(usize, Vec<R::Piece>)>,
}

impl<R: Processor> Reply<R> {
    pub(super) fn new(context: R::Context) -> Self {
        Self { context, pieces: VecDeque::new() }
    }

    pub(super) fn add(&mut self, pieces: Vec<(usize, Vec<R::Piece>)>) {
        self.pieces.extend(pieces);
    }

    /// Whether a part can be written.
    pub(super) fn has_parts(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// Whether the parts that can be written have at most so many pieces together.
    pub(super) fn has_at_most(&self, most: usize) -> bool {
        // Each entry has a piece, so that no more of them need be counted.
        self.pieces.len() <= most && self.pieces.iter().map(|(_, pieces)| pieces.len()).sum::<usize>() <= most
    }

    /// Writes parts until none is left, or until [`SLICE`] is over. A part whose writing fails is left out: the reply
    /// still holds everything.
    pub(super) fn write_parts(&mut self, processor: &R, task: &str) -> Vec<Body> {
        let began = Instant::now();
        let mut parts = Vec::new();
        while let Some((input, pieces)) = self.pieces.pop_front() {
            match caught(|| processor.parts(&mut self.context, input, pieces)) {
                Ok(written) => parts.extend(written),
                Err(panic) => tracing::error!(task.id = task, panic, "a part of a reply is left out"),
            }
            if began.elapsed() >= SLICE {
                break;
            }
        }
        parts
    }

    /// Writes the reply.
    ///
    /// # Errors
    /// As [`Processor::finish`].
    pub(super) fn finish(self, processor: &R, outputs: Vec<R::Output>) -> Result<Body, TaskError> {
        processor.finish(self.context, outputs)
    }
}
