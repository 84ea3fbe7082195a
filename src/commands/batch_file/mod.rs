//! The files of `sconce run-batch`: input lines read as a stream, the place in the output where an interrupted run goes on, and what made the output, which says whether it
//! may. Standard file I/O only, blocking: call it from a blocking task. Knows the lines' ids, not what
//! they ask.

mod input;
mod lines;
mod made_by;
mod resume;

pub use input::{Change, CountedInput, InputChanged, InputDigest};
pub use lines::{InputLine, InputLines, MAX_LINE};
pub use made_by::{MadeBy, MadeByError};
pub use resume::{ResumeError, ResumePoint, claim};
