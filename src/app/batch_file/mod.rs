//! The files of `sconce run-batch`: input lines read as a stream, output lines written in input
//! order, and the place where an interrupted run goes on. Standard file I/O only, blocking: call it
//! from a blocking task. Knows the lines' ids, not what they ask.

mod lines;
mod ordered;
mod resume;

pub use lines::{InputLine, InputLines, MAX_LINE};
pub use ordered::{OrderedWriter, OutsideWindow, WriteError};
pub use resume::{ResumeError, ResumePoint, claim};
