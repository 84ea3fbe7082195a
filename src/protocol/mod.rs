//! Data that crosses a process or host boundary: messages and their properties, tasks, replies, sentinels, control lines,
//! batch lines. Converts bytes to values and back, except the bodies of endpoints: `model::tasks` reads and writes them,
//! and the table in `endpoints` says what clients know of them. Pure: owns no state, does no I/O, and knows neither the
//! broker nor the model nor the clock.

pub mod admin;
pub mod batch_line;
pub mod control;
pub mod dead_letter;
pub mod endpoints;
pub mod files;
pub mod message;
pub mod raw_text;
pub mod reply;
pub mod requests;
pub mod results;
pub mod stats;
pub mod task;
pub mod task_error;

pub use files::{FileUrl, Files, data_url, from_base64};
pub use message::{Headers, MAX_HEADER_BYTES, Message, Properties, Value};
pub use reply::{Body, Timings, WorkerInfo};
pub use task::{Incoming, Sentinels, Task, classify};
pub use task_error::{TaskError, TaskErrorKind};

/// Media type of every body, unless a model says otherwise.
pub const JSON: &str = "application/json";
/// Media type of bytes that nothing is said about.
pub const BYTES: &str = "application/octet-stream";
/// Media type that kombu, the library of Celery, gives to bytes.
pub const KOMBU_BYTES: &str = "application/data";

/// `text` on one line, with a space in the place of each control character: it is from outside, and may be printed to a
/// terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|it| if it.is_control() { ' ' } else { it }).collect()
}

/// Shortens `text` for an error message: a text of more than `max_bytes` bytes is cut, and its full length is appended.
pub fn shorten(text: &str, max_bytes: usize) -> String {
    if text.len() <= max_bytes {
        return text.to_owned();
    }
    let end = (0..=max_bytes).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    format!("{}… ({} bytes)", &text[..end], text.len())
}
