//! Models that are classes in Python, from outside: the program, its workers, and their Python processes. The classes need
//! Python's own library and `sconce_model` alone.

#![allow(clippy::unwrap_used, reason = "what is missing in a helper fails its test")]

mod answers;
mod design;
mod faults;
mod pools;
mod refusals;
mod runs;
mod streams;

use crate::run_batch::rig;
use crate::support::processes;
