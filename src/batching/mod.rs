//! Decides what the device computes together. The files are pure state machines: the time is passed in, and they use
//! neither clocks nor channels.
//!
//! | file | decides |
//! |---|---|
//! | `fill` | when a batch of one-pass inputs is full or due |
//! | `sequences/` | which sequences run, and which rows a step computes |
//! | `shares` | which of a pool's queues is served next |
//! | `queue_bytes` | how many bytes each of a pool's queues may hold |

mod fill;
mod queue_bytes;
pub mod sequences;
mod shares;

pub use fill::{Batch, Batcher, DeviceState, Policy};
pub use queue_bytes::QueueBytes;
pub use sequences::{Encoding, Group};
pub use shares::{Owner, QueueShare, Shares, divide_by_weight};
