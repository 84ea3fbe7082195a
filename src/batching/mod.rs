//! Decides what the device computes together. The files are pure state machines: the time is passed in, and they use
//! neither clocks nor channels.
//!
//! | file | decides |
//! |---|---|
//! | `fill` | when a batch of one-pass inputs is full or due |
//! | `admit` | which sequences run, and which rows a step computes |
//! | `shares` | which of a pool's queues is served next |
//! | `queue_bytes` | how many bytes each of a pool's queues may hold |
//! | `prompts` | how the tokens of a step are divided among prompts |
//! | `windows` | whose windows (inputs of an encoder) a step encodes |

pub mod admit;
mod fill;
mod prompts;
mod queue_bytes;
mod shares;
mod windows;

pub use admit::Group;
pub use fill::{Batch, Batcher, DeviceState, Policy};
pub use queue_bytes::QueueBytes;
pub use shares::{Owner, QueueShare, Shares, divide_by_weight};
pub use windows::Encoding;
