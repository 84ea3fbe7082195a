//! Decides what the device computes together. Pure state machines: time is passed in, and they know neither clocks nor
//! channels.
//!
//! | file | decides |
//! |---|---|
//! | `fill` | when a batch of one-pass inputs is full or due |
//! | `admit` | which sequences run, and which rows a step computes |
//! | `prompts` | how the tokens of a step are divided among prompts |
//! | `windows` | how often windows are encoded, and whose |

pub mod admit;
mod fill;
mod prompts;
mod windows;

pub use admit::Group;
pub use fill::{Batch, Batcher, Device, Policy};
pub use windows::Encoding;
