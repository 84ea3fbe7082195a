//! The files of a batch: reads rows as a stream, finds the position in the output at which an interrupted run continues,
//! writes results, and reads and writes the record beside the output. Blocking file I/O only: call it from a blocking
//! task.

use std::io;

mod errors;
mod fields;
mod folder;
mod ids;
mod input;
mod lines;
mod matrix;
#[cfg(feature = "tables")]
mod quotes;
mod record;
mod results;
mod resume;
mod rows;
#[cfg(feature = "tables")]
mod tables;

pub use errors::{CommonError, ErrorCounts};
pub use fields::CommonFields;
pub use ids::RepeatedIds;
pub use input::InputDigest;
pub use lines::InputLines;
pub(crate) use record::{read_record, record_path, write_record};
pub use results::{Batch, OpenBatch, Results, Source, is_of_vectors};
pub use resume::ResumePoint;
pub use rows::{InputFile, InputRow, Rows, is_table};
#[cfg(feature = "tables")]
pub use tables::Table;

/// Why a run cannot use its files. The operator has to name other files, or repair these.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A file cannot be opened, read or written.
    #[error("{what}")]
    Io {
        /// The file's name, or what it is for.
        what: String,
        /// The file system's error.
        source: io::Error,
    },
    /// The files cannot be used, as this message says.
    #[error("{0}")]
    Refused(String),
}

impl FileError {
    /// Wraps a file system error of this file.
    pub fn at(what: impl ToString) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what: what.to_string(), source }
    }
}
