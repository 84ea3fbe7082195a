//! Decides what the device computes together. The files are pure state machines: the time is passed in, and they use
//! neither clocks nor channels.
//!
//! | file | decides |
//! |---|---|
//! | `fill` | when a batch of one-pass inputs is full or due |
//! | `admit` | which sequences run, and which rows a step computes |
//! | `prompts` | how the tokens of a step are divided among prompts |
//! | `windows` | whose windows (inputs of an encoder) a step encodes |

pub mod admit;
mod fill;
mod prompts;
mod windows;

pub use admit::Group;
pub use fill::{Batch, Batcher, DeviceState, Owner, Policy};
pub use windows::Encoding;
