//! Models that are classes in Python, from outside: the program, its workers, and their Python processes. The classes need
//! Python's own library and `sconce_model` alone. No RabbitMQ.

#![allow(clippy::unwrap_used, reason = "what is missing in a helper fails its test")]

mod answers;
mod design;
mod faults;
#[path = "../support/processes.rs"]
mod processes;
mod refusals;
#[path = "../offline/run_batch/rig.rs"]
mod rig;
mod runs;
