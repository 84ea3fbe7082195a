//! The launcher: discovers what the host has, plans slots, spawns a worker for each, watches,
//! restarts, stops. Knows workers as processes and control lines; never a broker, a model or a
//! device.
//!
//! | file | decides |
//! |---|---|
//! | `gpus` | which GPUs there are, and what a `devices` entry means |
//! | `plan` | which slots there are |
//! | `fit` | whether they fit their devices' memory |
//! | `slot` | what happens with one of them over time |
//! | `child` | how a worker process is spawned and spoken to |
//! | `deaths` | which tasks kill workers |
//! | `last_words` | what is kept of a worker's log |
//! | `restart` | what follows a worker's end |
//! | `logs` | how a worker's log lines appear in ours |

mod child;
mod deaths;
mod fit;
pub mod gpus;
mod last_words;
mod logs;
mod plan;
mod restart;
mod slot;

use std::path::Path;

use futures_util::future::join_all;

use crate::config::{Assignment, Launcher};
use crate::shutdown::{Exit, Stop};
use slot::{Slot, SlotEnd};

pub use fit::{Needs, fit};
pub use plan::{Cuda, Host, plan};
pub use restart::{Death, Verdict, judge};

/// Why nothing was launched.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A device that is not here. There is no fall-back to another.
    #[error("pool {pool:?}: device {device:?} cannot be used: {reason}; devices here: {here}")]
    Device {
        /// The pool.
        pool: String,
        /// Its `devices` entry.
        device: String,
        /// Why not, and what to do.
        reason: String,
        /// What there is.
        here: String,
    },
    /// Its workers would not fit.
    #[error(
        "device {device:?}: too many copies: {workers} need {needed} together, and {free} of {total} are \
         free; lower workers_per_device or batch.max_tokens, take pool.dtype = \"f16\", or see `sconce \
         devices` for who holds the rest"
    )]
    Memory {
        /// Its UUID.
        device: String,
        /// What each worker needs.
        workers: String,
        /// All of them.
        needed: String,
        /// What nobody holds.
        free: String,
        /// What the device has.
        total: String,
    },
}

/// Runs one worker for each assignment until all have ended, by spawning `program`. Call it on a
/// runtime whose thread lives as long as the process: see `child`.
pub async fn run(program: &Path, assignments: &[Assignment], policy: &Launcher, stop: &Stop) -> Exit {
    tracing::info!(slots = assignments.len(), "launching");
    let deaths = deaths::Register::new(policy.poison_deaths);
    let keep = |assignment| Slot { program, assignment, policy, stop, deaths: &deaths }.keep();
    let slots = assignments.iter().map(keep);
    let ends = join_all(slots).await;
    let given_up = ends.iter().find_map(|end| match end {
        SlotEnd::GivenUp(exit) => Some(*exit),
        _ => None,
    });
    let exit = match given_up {
        Some(exit) => exit,
        None if ends.contains(&SlotEnd::Aborted) => Exit::Aborted,
        None => Exit::Done,
    };
    tracing::info!(exit = exit.code(), "all workers have ended");
    exit
}
