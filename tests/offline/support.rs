//! What tests of other crates stand on too; see `tests/support`.

#![allow(dead_code, reason = "each test crate uses a part of it")]
#![allow(clippy::print_stderr, reason = "what a failed test shows")]
#![allow(clippy::unwrap_used, reason = "what is missing in a helper fails its test")]

#[path = "../support/nvml.rs"]
pub mod nvml;
#[path = "../support/processes.rs"]
pub mod processes;
#[path = "../support/sconce.rs"]
pub mod sconce;
#[path = "../support/wait.rs"]
pub mod wait;
