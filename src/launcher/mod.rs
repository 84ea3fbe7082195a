//! The launcher: discovers what the host has, plans slots, spawns a worker for each, watches,
//! restarts, stops. Knows workers as processes and control lines; never a broker, a model or a
//! device.
//!
//! | file | decides |
//! |---|---|
//! | `gpus` | which GPUs there are, and what a `devices` entry means |
//! | `plan` | which slots there are |
//! | `fit` | whether they fit their devices' memory |
//! | `fleet` | which of them run, and who is meant by an order |
//! | `slot` | what happens with one of them over time |
//! | `shown` | what the board shows of it |
//! | `replace` | when its worker is replaced by a new one |
//! | `running` | one worker process, from its spawn to its end |
//! | `monitor` | what is seen of it, and what its death means |
//! | `fault` | what it ended of, by name |
//! | `health` | which devices are out of order, by the driver |
//! | `leave` | how it is brought to its end |
//! | `child` | how a worker process is spawned and spoken to |
//! | `guard` | which workers are killed once the launcher is gone |
//! | `board` | what is known of every slot |
//! | `order` | what a running launcher can be asked |
//! | `deaths` | which tasks kill workers |
//! | `last_words` | what is kept of a worker's log |
//! | `restart` | what follows a worker's end |
//! | `logs` | how a worker's log lines appear in ours |

mod child;
mod crash_records;
mod crash_tail;
mod fault;
mod fit;
mod fleet;
pub mod gpus;
mod guard;
mod health;
mod leave;
mod logs;
pub mod order;
mod plan;
mod replace;
mod restart;
mod shown;
mod slot;
mod slot_state;
pub mod status_board;
mod worker_handle;
mod worker_monitor;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Semaphore, mpsc, watch};

use crate::config::{Assignment, Broker, Launcher};
use crate::shutdown::{Exit, Stop};
use fleet::Fleet;
use guard::Guard;
use order::{Ask, Handle};
use status_board::StatusBoard;

pub use child::environment;
pub use fit::{Needs, fit};
pub use guard::guard_workers;
pub use logs::RawLines;
pub use plan::{Cuda, Host, plan};
pub use restart::{Death, REASONS, Verdict, judge};

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

/// What all slots share.
struct Launch {
    program: PathBuf,
    /// Written when settings are loaded again, read by every slot.
    policy: watch::Receiver<Launcher>,
    stop: Stop,
    deaths: crash_records::Register,
    health: Arc<health::Health>,
    board: Arc<StatusBoard>,
    /// One slot at a time changes its worker for a new one.
    turn: Arc<Semaphore>,
    /// Takes workers' log lines as they are, where ours are JSON too.
    raw_lines: Option<RawLines>,
    /// Told of every worker.
    guard: Arc<Guard>,
    /// The broker that has taken a worker. Written by what is seen of workers, read when one is started.
    reached: Mutex<Option<Broker>>,
}

impl Launch {
    /// A worker has reached this broker.
    fn note_broker(&self, broker: &Broker) {
        let mut reached = self.reached.lock().unwrap_or_else(PoisonError::into_inner);
        if reached.as_ref() != Some(broker) {
            *reached = Some(broker.clone());
        }
    }

    /// Whether one has: then a refusal is no matter of settings.
    fn has_reached(&self, broker: &Broker) -> bool {
        self.reached.lock().unwrap_or_else(PoisonError::into_inner).as_ref() == Some(broker)
    }
}

/// A launcher that has not begun: what shows it, and by which it is asked, are there already.
pub struct Launching {
    launch: Arc<Launch>,
    policy: watch::Sender<Launcher>,
    asks: mpsc::Receiver<Ask>,
    handle: Handle,
}

impl Launching {
    /// One that spawns `program`, treats its workers by `policy`, and ends with `stop`. Without a guard:
    /// `program` need not be sconce.
    pub fn new(program: &Path, policy: &Launcher, stop: &Stop) -> Self {
        Self::over((program, None), policy, stop, None)
    }

    /// The same, where `program` is sconce, which is started as the guard too: no worker outlives the
    /// launcher by more than the shutdown grace, though that is killed and the worker is stopped.
    /// Workers' log lines are written by `raw_lines` as they are, where it is given.
    pub fn guarded(program: &Path, policy: &Launcher, stop: &Stop, raw_lines: Option<RawLines>) -> Self {
        Self::over((program, Some(program)), policy, stop, raw_lines)
    }

    fn over(
        (program, guard): (&Path, Option<&Path>),
        policy: &Launcher,
        stop: &Stop,
        raw_lines: Option<RawLines>,
    ) -> Self {
        let (sender, policy) = watch::channel(policy.clone());
        let board = Arc::<StatusBoard>::default();
        let (handle, asks) = Handle::new(board.clone());
        let deaths = crash_records::Register::new(policy.borrow().poison_deaths);
        let (program, stop, turn) = (program.to_owned(), stop.clone(), Arc::new(Semaphore::new(1)));
        let guard = Arc::new(Guard::new(guard.map(Path::to_owned), policy.clone()));
        let health = Arc::default();
        let launch = Launch {
            program,
            policy,
            stop,
            deaths,
            health,
            board,
            turn,
            raw_lines,
            guard,
            reached: Mutex::default(),
        };
        Self { launch: Arc::new(launch), policy: sender, asks, handle }
    }

    /// What is known of its slots.
    pub fn board(&self) -> Arc<StatusBoard> {
        self.launch.board.clone()
    }

    /// By which it is asked.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Runs one worker for each assignment until all have ended. Call it on a runtime whose thread
    /// lives as long as the process: see `child`.
    pub async fn run(self, assignments: &[Assignment]) -> Exit {
        tracing::info!(slots = assignments.len(), "launching");
        // Held: without it there would be nobody left to ask, which an order is never to see.
        let Self { launch, policy, asks, handle: _handle } = self;
        let exit = Fleet::new(launch, policy, assignments).run(asks).await;
        tracing::info!(exit = exit.code(), "all workers have ended");
        exit
    }
}

/// As [`Launching::run`] of one that is [`Launching::guarded`], and that nobody looks at or asks.
pub async fn run(program: &Path, assignments: &[Assignment], policy: &Launcher, stop: &Stop) -> Exit {
    Launching::guarded(program, policy, stop, None).run(assignments).await
}
