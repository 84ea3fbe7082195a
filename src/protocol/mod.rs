//! Data that crosses a process or host boundary: messages and their properties, tasks, replies, sentinels,
//! control lines, batch lines. Converts bytes to values and back. Pure: owns no state, does no I/O; knows
//! neither broker nor model nor clock.

pub mod admin;
pub mod batch_line;
pub mod control;
pub mod dead_letter;
pub mod embeddings;
pub mod fields;
pub mod files;
pub mod generate;
pub mod images;
pub mod labels;
pub mod message;
pub mod reply;
pub mod requests;
pub mod rerank;
pub mod stats;
pub mod task;
pub mod task_error;
pub mod transcriptions;

pub use files::{FileUrl, Files, data_url};
pub use message::{Headers, MAX_HEADER_BYTES, Message, Properties, Value};
pub use reply::{Body, Timings, WorkerInfo};
pub use task::{Incoming, Sentinels, Task, classify};
pub use task_error::{TaskError, TaskErrorKind};

/// Media type of every body, unless a model says otherwise.
pub const JSON: &str = "application/json";

/// Shortens `text` for an error message: if it has over `most` bytes, it is cut and its length in bytes is added.
pub fn shorten(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let end = (0..=most).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    format!("{}… ({} bytes)", &text[..end], text.len())
}
