//! The files of `sconce run-batch`: input lines read as a stream, the place in the output where an interrupted run goes on, and what made the output, which says whether it
//! may. Standard file I/O only, blocking: call it from a blocking task. Knows the lines' ids, not what
//! they ask.

mod input;
mod lines;
mod made_by;
mod resume;

pub use input::{CountedInput, InputChanged};
pub use lines::{InputLine, MAX_LINE};
pub use made_by::MadeBy;
pub use resume::{ResumePoint, claim};
