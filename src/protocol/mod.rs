//! What crosses a process or host boundary: messages and their properties, tasks, replies,
//! sentinels, control lines, batch lines. Pure: bytes in, values out, and back. Owns no state and
//! never does I/O; knows neither broker nor model nor clock.

pub mod admin;
pub mod batch_line;
pub mod control;
pub mod dead_letter;
pub mod embeddings;
pub mod message;
pub mod reply;
pub mod stats;
pub mod task;
pub mod task_error;

pub use message::{Headers, Message, Properties, Value};
pub use reply::{Body, Timings, WorkerInfo};
pub use task::{Incoming, Task, classify};
pub use task_error::{TaskError, TaskErrorKind};

/// Media type of every body that is read or written unless a model says otherwise.
pub const JSON: &str = "application/json";

/// `text` for an error message: whole when short, else its beginning and its length in bytes.
pub fn shorten(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let end = (0..=most).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    format!("{}… ({} bytes)", &text[..end], text.len())
}
