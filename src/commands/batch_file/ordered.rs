//! Puts lines that are ready in any order back into the order of their numbers. Decides when a line
//! is written. Owns the lines that wait for a predecessor, within a window.

use std::collections::BTreeMap;
use std::io::{self, Write};

/// A line too far ahead of the next one to be written: the caller took on more than the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {sequence} is outside the window {next}..{end}")]
pub struct OutsideWindow {
    /// The line submitted.
    pub sequence: usize,
    /// The next to be written.
    pub next: usize,
    /// The first that is too far ahead.
    pub end: usize,
}

/// Why a line was not taken.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The caller's error.
    #[error(transparent)]
    OutsideWindow(#[from] OutsideWindow),
    /// The output cannot be written: give up; what was flushed stays.
    #[error("cannot write the output: {0}")]
    Io(#[from] io::Error),
}

/// Writes each line once all before it are written.
///
/// The window bounds what is held, and has to bound what is in work: begin line `n` only when
/// [`OrderedWriter::may_begin`] says so. Holding back finished lines instead would wait for ever
/// when the missing one stands behind them in a full reply queue.
#[derive(Debug)]
pub struct OrderedWriter<W> {
    output: W,
    next: usize,
    window: usize,
    /// Lines whose predecessors are missing. Bound: `window`.
    waiting: BTreeMap<usize, Vec<u8>>,
}

impl<W: Write> OrderedWriter<W> {
    /// A writer whose first line is number `first`, and which holds `window` lines at most.
    pub fn new(output: W, first: usize, window: usize) -> Self {
        Self { output, next: first, window: window.max(1), waiting: BTreeMap::new() }
    }

    /// Whether the work for a line may begin: its place in the window is free.
    pub fn may_begin(&self, sequence: usize) -> bool {
        sequence < self.end()
    }

    /// The next line to be written, which is how many are done when counting from 0.
    pub fn next(&self) -> usize {
        self.next
    }

    fn end(&self) -> usize {
        self.next.saturating_add(self.window)
    }

    /// Takes line `sequence`, newline included, and writes and flushes all that are now in order.
    /// A line taken before is ignored: replies are delivered at least once. Returns how many lines
    /// were written.
    ///
    /// # Errors
    /// [`WriteError::OutsideWindow`]: nothing is changed. [`WriteError::Io`]: give up.
    pub fn submit(&mut self, sequence: usize, line: Vec<u8>) -> Result<usize, WriteError> {
        if sequence >= self.end() {
            return Err(OutsideWindow { sequence, next: self.next, end: self.end() }.into());
        }
        if sequence < self.next {
            return Ok(0);
        }
        self.waiting.entry(sequence).or_insert(line);
        let mut written = 0;
        while let Some(line) = self.waiting.remove(&self.next) {
            self.output.write_all(&line)?;
            self.next += 1;
            written += 1;
        }
        if written > 0 {
            self.output.flush()?;
        }
        Ok(written)
    }

    /// The output, for syncing it at the end. Lines still waiting are dropped.
    pub fn into_inner(self) -> W {
        self.output
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn line(n: usize) -> Vec<u8> {
        format!("{n}\n").into_bytes()
    }

    #[test]
    fn a_line_waits_for_its_predecessors() {
        let mut writer = OrderedWriter::new(Vec::new(), 3, 4);
        assert_eq!(writer.submit(4, line(4)).unwrap(), 0);
        assert_eq!(writer.submit(5, line(5)).unwrap(), 0);
        assert_eq!(writer.submit(3, line(3)).unwrap(), 3);
        assert_eq!(writer.next(), 6);
        assert_eq!(writer.into_inner(), b"3\n4\n5\n");
    }

    #[test]
    fn a_line_that_comes_twice_is_written_once() {
        let mut writer = OrderedWriter::new(Vec::new(), 0, 4);
        for n in [1, 1, 0, 0, 1] {
            writer.submit(n, line(n)).unwrap();
        }
        assert_eq!(writer.into_inner(), b"0\n1\n");
    }

    #[test]
    fn a_line_outside_the_window_is_refused_and_may_not_begin() {
        let mut writer = OrderedWriter::new(Vec::new(), 0, 2);
        assert!(writer.may_begin(1));
        assert!(!writer.may_begin(2));
        assert!(matches!(writer.submit(2, line(2)), Err(WriteError::OutsideWindow(_))));
        writer.submit(0, line(0)).unwrap();
        assert!(writer.may_begin(2));
        writer.submit(2, line(2)).unwrap();
        writer.submit(1, line(1)).unwrap();
        assert_eq!(writer.into_inner(), b"0\n1\n2\n");
    }

    proptest! {
        #[test]
        fn any_order_within_the_window_comes_out_in_order(
            count in 0usize..60, window in 1usize..9, picks in prop::collection::vec(any::<prop::sample::Index>(), 60),
        ) {
            let mut writer = OrderedWriter::new(Vec::new(), 0, window);
            let mut begun = Vec::new();
            let mut next = 0;
            for pick in picks.iter().take(count) {
                while next < count && writer.may_begin(next) {
                    begun.push(next);
                    next += 1;
                }
                let n = begun.swap_remove(pick.index(begun.len()));
                writer.submit(n, line(n)).unwrap();
            }
            let expected: Vec<u8> = (0..count).flat_map(line).collect();
            prop_assert_eq!(writer.into_inner(), expected);
        }
    }
}
