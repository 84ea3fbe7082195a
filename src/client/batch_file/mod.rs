//! The files of a batch: input lines read as a stream, the position in the output where an interrupted run continues,
//! and the record beside the output. Blocking file I/O only: call it from a blocking task. Knows the lines' ids, not
//! their requests.

mod ids;
mod input;
mod lines;
mod record;
mod resume;

pub use ids::RepeatedIds;
pub use input::{CountedInput, InputDigest};
pub use lines::{InputLine, InputLines, MAX_LINE};
pub(crate) use record::{beside, read_record, write_record};
pub use resume::{ResumePoint, claim};
