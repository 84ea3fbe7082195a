//! Counts what the outputs of a task hold together, so that a reply that would be too large ends the task before all of
//! its inputs are computed. Owns the count.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The sum of a task's shares that exist now. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Held(Arc<AtomicUsize>);

/// The part of one output. It no longer counts once it is dropped, because a batch may be computed again.
#[derive(Debug)]
pub struct Share {
    size: usize,
    held: Held,
}

impl Held {
    /// Counts an output of this size.
    pub fn add(&self, size: usize) -> Share {
        self.0.fetch_add(size, Ordering::Relaxed);
        Share { size, held: self.clone() }
    }

    /// The sum now.
    pub fn total(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.held.0.fetch_sub(self.size, Ordering::Relaxed);
    }
}
