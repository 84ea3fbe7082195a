//! The launcher: discovers the host's devices, plans slots, and spawns, watches, restarts and stops a worker in each
//! slot. It knows workers only as processes and control lines. It connects to no broker, loads no model and opens no
//! device.
//!
//! | file | decides |
//! |---|---|
//! | `gpus` | which GPUs there are, and what a `devices` entry means |
//! | `plan` | which slots there are, and whether their weights fit the devices |
//! | `fleet` | which slots run, and which slots an order of `sconce ctl` addresses |
//! | `slot` | what happens in one slot over time (`slot_state` holds and shows its state) |
//! | `replace` | when a slot's worker is replaced by a new one |
//! | `worker_handle` | one worker process, from its spawn to its end |
//! | `worker_monitor` | what a worker reports, and what its death means |
//! | `fault` | the name of the reason for a worker's end |
//! | `device_health` | which devices have failed, by the reports of the driver |
//! | `termination` | how a worker is ended, step by step |
//! | `child` | how a worker process is spawned, and how its pipes are used |
//! | `guard` | which workers are killed once the launcher is gone |
//! | `status_board` | what is known about every slot |
//! | `name` | a launcher's name, unique on its host |
//! | `withdrawals` | which cancelled jobs and withdrawn sentinels workers that start later are told of |
//! | `order` | which requests a running launcher accepts: orders of `sconce ctl`, and new settings |
//! | `crash_records` | which tasks kill workers |
//! | `oom` | whether the kernel's out-of-memory killer may have ended a worker |
//! | `restart` | what follows a worker's end |
//! | `logs` | how a worker's log lines appear in the launcher's log, and which are kept |

mod child;
mod crash_records;
mod device_health;
mod fault;
mod fleet;
pub mod gpus;
mod guard;
mod logs;
mod name;
mod oom;
pub mod order;
mod plan;
mod replace;
mod restart;
mod slot;
mod slot_state;
pub mod status_board;
mod termination;
mod withdrawals;
mod worker_handle;
mod worker_monitor;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc, watch};

use crate::config::{self, Assignment, Broker};
use crate::protocol::admin::State;
use crate::shutdown::{Exit, Phase, Stop};
use crash_records::CrashRegister;
use fleet::Fleet;
use guard::Guard;
use order::{Handle, LauncherRequest};
use status_board::{Entry, StatusBoard};

pub use child::environment;
pub use guard::guard_workers;
pub use logs::RawLines;
pub use name::{LauncherName, launchers_at};
pub use plan::{Cuda, Host, fit, plan};
pub use restart::{Death, RestartReason, Verdict, judge};
pub use withdrawals::Withdrawals;

/// Why nothing was launched.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A device does not exist or cannot be used. No other device is used instead.
    #[error("pool {pool:?}: device {device:?} cannot be used: {reason}; devices here: {here}")]
    Device {
        /// The pool.
        pool: String,
        /// Its `devices` entry.
        device: String,
        /// Why it cannot be used, and what to do.
        reason: String,
        /// The devices of this host.
        here: String,
    },
    /// The CPU of this host lacks the vector units that the settings name.
    #[error("pool {pool:?}: {reason}")]
    CpuFeatures {
        /// The pool.
        pool: String,
        /// Names the setting and its value.
        reason: String,
    },
    /// The device's memory is too small for the weights of its workers.
    #[error(
        "device {device:?}: too many copies: the weights of its {workers} workers need {needed}, and {free} of \
         {total} are free; lower workers_per_device, take pool.dtype = \"f16\", or see `sconce devices` for who \
         holds the rest"
    )]
    Memory {
        /// Its UUID.
        device: String,
        /// Workers on it.
        workers: usize,
        /// The memory that their weights need together.
        needed: String,
        /// The memory that no process uses.
        free: String,
        /// All memory of the device.
        total: String,
    },
}

/// The state and the settings that all slots of a launcher share.
struct LauncherContext {
    program: PathBuf,
    /// Written when settings are reloaded, read by every slot.
    policy: watch::Receiver<config::Launcher>,
    stop: Stop,
    crash_records: CrashRegister,
    device_health: Arc<device_health::DeviceHealth>,
    board: Arc<StatusBoard>,
    /// Has one permit, so that only one slot at a time replaces its worker.
    replacement_turn: Arc<Semaphore>,
    /// Writes workers' log lines unchanged, if the launcher's log is JSON too.
    raw_lines: Option<RawLines>,
    /// What is logged once for all workers.
    logged: logs::RecentlyLogged,
    /// Kills workers that outlive the launcher.
    guard: Arc<Guard>,
    /// Cancelled jobs and withdrawn sentinels of `sconce stop`, for workers that start later.
    withdrawals: Arc<Withdrawals>,
    /// The broker that has accepted a worker. Written by worker monitors, read when a worker ends or starts.
    reached_broker: Mutex<Option<Broker>>,
}

impl LauncherContext {
    /// Records that a worker has reached this broker.
    fn note_broker(&self, broker: &Broker) {
        if !self.has_reached(broker) {
            *self.reached_broker.lock() = Some(broker.clone());
        }
    }

    /// Whether a worker has reached this broker. If so, a later refusal is not a mistake in the settings.
    fn has_reached(&self, broker: &Broker) -> bool {
        self.reached_broker.lock().as_ref() == Some(broker)
    }
}

/// The parts and settings of a launcher.
#[derive(Clone, Copy)]
pub struct LaunchSpec<'a> {
    /// The program that is spawned as workers.
    pub worker_program: &'a Path,
    /// The path of sconce itself, which also runs as the guard. With a guard, a worker outlives a killed launcher by at
    /// most the shutdown grace, even if the worker is suspended (SIGSTOP). None: no guard.
    pub guard_program: Option<&'a Path>,
    /// How workers are restarted.
    pub policy: &'a config::Launcher,
    /// The stop that ends the launcher.
    pub stop: &'a Stop,
    /// Writes workers' log lines unchanged. None: the lines are logged as the launcher's own.
    pub raw_lines: Option<RawLines>,
}

/// A launcher that is not running yet. Its board and its handle can be used already.
pub struct PreparedLauncher {
    context: Arc<LauncherContext>,
    policy: watch::Sender<config::Launcher>,
    requests: mpsc::Receiver<LauncherRequest>,
    handle: Handle,
}

impl PreparedLauncher {
    /// Makes a launcher; `run` starts it.
    pub fn new(spec: LaunchSpec<'_>) -> Self {
        let LaunchSpec { worker_program, guard_program, policy, stop, raw_lines } = spec;
        let (sender, policy) = watch::channel(policy.clone());
        let board = Arc::<StatusBoard>::default();
        let (handle, requests) = Handle::new(board.clone());
        let crash_records = CrashRegister::new(policy.borrow().poison_deaths);
        let (program, stop) = (worker_program.to_owned(), stop.clone());
        let guard = Arc::new(Guard::new(guard_program.map(Path::to_owned), policy.clone()));
        let device_health = Arc::default();
        let context = LauncherContext {
            program,
            policy,
            stop,
            crash_records,
            device_health,
            board,
            replacement_turn: Arc::new(Semaphore::new(1)),
            raw_lines,
            logged: logs::RecentlyLogged::default(),
            guard,
            withdrawals: Arc::default(),
            reached_broker: Mutex::default(),
        };
        Self { context: Arc::new(context), policy: sender, requests, handle }
    }

    /// The board with the state of its slots.
    pub fn board(&self) -> Arc<StatusBoard> {
        self.context.board.clone()
    }

    /// The list of withdrawals. The caller fills it from the broker's stream.
    pub fn withdrawals(&self) -> Arc<Withdrawals> {
        self.context.withdrawals.clone()
    }

    /// The handle that sends it requests.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Runs one worker for each assignment until all have ended. Call it on a runtime whose thread lives as
    /// long as the process: `child` explains why.
    pub async fn run(self, assignments: &[Assignment]) -> Exit {
        tracing::info!(slots = assignments.len(), "launching");
        // The handle is kept, so that the channel stays open: an order must never find it closed.
        let Self { context, policy, requests, handle: _handle } = self;
        let board = context.board.clone();
        // Logs the cause, and never ends.
        let log_cause = async {
            context.stop.reached(Phase::Returning).await;
            tracing::info!(cause = context.stop.cause(), "stopping");
            std::future::pending().await
        };
        let fleet = Fleet::new(context.clone(), policy, assignments);
        let exit = tokio::select! {
            exit = fleet.run(requests) => exit,
            never = log_cause => never,
        };
        let given_up = |entry: &Entry| entry.report.state == State::Quarantined;
        let last_failure = |entry: &Entry| entry.report.last_failure.clone();
        let error =
            board.read(|status| status.slots.values().find(|entry| given_up(entry)).and_then(last_failure));
        match error.filter(|_| exit != Exit::Done) {
            Some(error) => tracing::error!(exit = exit.code(), error, "all workers have ended"),
            None => tracing::info!(exit = exit.code(), "all workers have ended"),
        }
        exit
    }
}
