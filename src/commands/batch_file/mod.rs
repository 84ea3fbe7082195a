//! The files of `sconce run-batch`: input lines read as a stream, the position in the output where an
//! interrupted run continues, and the record of what made the output. Blocking file I/O only: call it from a
//! blocking task. Knows the lines' ids, not their requests.

mod ids;
mod input;
mod lines;
mod made_by;
mod resume;

pub use ids::RepeatedIds;
pub use input::{CountedInput, InputDigest};
pub use lines::{InputLine, InputLines, MAX_LINE};
pub use made_by::MadeBy;
pub(super) use made_by::{beside, read_record, write_record};
pub use resume::{ResumePoint, claim};
