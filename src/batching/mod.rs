//! Decides what the device computes together. Pure state machines: time is passed in; they know no task, clock
//! or channel.
//!
//! | file | decides |
//! |---|---|
//! | `fill` | when a batch of one-pass inputs is full or due |
//! | `admit` | which sequences run, and which rows a step computes |

pub mod admit;
mod fill;

pub use fill::{Batch, Batcher, Device, Policy};
