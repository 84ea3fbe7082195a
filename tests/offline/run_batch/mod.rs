//! `sconce run-batch` from outside: the program, its files, its processes. No RabbitMQ.

#![allow(clippy::unwrap_used, reason = "what is missing in a helper fails its test")]

mod interrupted;
mod lines;
mod made_by;
mod poison;
mod pools;
mod results;
pub mod rig;
mod terminal;
