//! What goes through the device together. Pure state machines: time is passed in; they know neither what a
//! task is nor any clock or channel.
//!
//! | file | decides |
//! |---|---|
//! | `fill` | when a batch of one pass is full, due or flushed |
//! | `admit` | which sequences run, and which rows a step computes |

pub mod admit;
mod fill;

pub use fill::{Batch, Batcher, Device, Policy};
