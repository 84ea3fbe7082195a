//! The command line of `sconce ctl`, `sconce top` and `sconce healthcheck`.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::{SettingsArguments, duration};
use crate::protocol::admin::{ControlRequest, Target};
use crate::protocol::control::Cancellation;

/// Examples for the help of `ctl`.
pub(super) const CTL_EXAMPLES: &str = "Examples:
  sconce ctl ping                                 who is there
  sconce ctl stats --json | jq .
  sconce ctl --pool embed pause                   every slot of a pool, on all hosts
  sconce ctl --host gpu1 drain                    the workers end, the launcher stays; resume starts them
  sconce ctl --slot gpu1/embed/0 restart          works also for a quarantined slot
  sconce ctl --host gpu1 log-level debug
  sconce ctl cancel 7f3e…                         a task that a worker holds, by its id

Requests go through the exchange that the setting admin.control_exchange names, to every launcher. \
Answers are gathered until no more arrive. Whoever may publish to that exchange may control the \
launchers; docs/operating.md says how to restrict it. The exit code is 1 if nobody answered, or a slot \
refused.";

/// Examples for the help of `healthcheck`.
pub(super) const HEALTH_EXAMPLES: &str = "Examples:
  sconce healthcheck                              ready: every pool has a worker that takes tasks
  sconce healthcheck --live                       alive: no worker is stuck
  sconce healthcheck --url http://gpu1:9464

Asks the launcher at admin.listen, as a probe of a container runtime would. The exit code is 0 or 1, or \
78 if the settings are wrong.";

/// `sconce ctl`.
#[derive(Debug, Args)]
pub struct Ctl {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// Every slot of every launcher; the default for ping, stats, active and cancel
    #[arg(long, global = true)]
    pub all: bool,
    /// The slots of all launchers of a host
    #[arg(long, global = true, value_name = "HOST")]
    pub host: Option<String>,
    /// The slots of a launcher
    #[arg(long, global = true, value_name = "LAUNCHER")]
    pub launcher: Option<String>,
    /// The slots of a pool, on all hosts
    #[arg(long = "pool", global = true, id = "to_pool", value_name = "POOL")]
    pub pool: Option<String>,
    /// One slot: launcher/pool/index, as in replies
    #[arg(long, global = true, value_name = "LAUNCHER/POOL/INDEX")]
    pub slot: Option<String>,
    /// Gather answers for this whole time. Without it, ctl waits up to a second for the first answer, and then until
    /// no more arrive
    #[arg(long, global = true, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Stop waiting when N launchers have answered; fail if fewer do
    #[arg(long, global = true, value_name = "N")]
    pub expect: Option<usize>,
    /// After pause, resume, restart, drain or shutdown: wait until each slot has reached that state, at most this long
    #[arg(long, global = true, value_name = "DURATION", value_parser = duration)]
    pub wait: Option<Duration>,
    /// Print answers as JSON, one per line
    #[arg(long, global = true)]
    pub json: bool,
    /// What to ask for or to change
    #[command(subcommand)]
    pub command: CtlCommand,
}

/// The commands of `sconce ctl`.
#[derive(Clone, Debug, Subcommand)]
pub enum CtlCommand {
    /// Show the slots and their states
    Ping,
    /// Show the counts since each launcher started
    Stats,
    /// Show the tasks on the devices now
    Active,
    /// Take no more tasks, finish accepted ones, keep the model loaded
    Pause,
    /// Consume again; a slot without a worker gets a new one
    Resume,
    /// Finish accepted tasks and end the workers; slots stay empty
    Drain,
    /// Finish accepted tasks and end the workers for good; a launcher ends with its last slot
    Shutdown,
    /// Finish accepted tasks, end the workers, start new ones; in each launcher one slot after the other
    Restart,
    /// Change what launchers and workers log
    LogLevel {
        /// A filter as in SCONCE_LOG: debug, or sconce::worker=trace; `default` restores the filter set at startup
        filter: String,
    },
    /// End a task that a worker holds; it is answered with 499
    Cancel {
        /// The task's id: its message_id, else its correlation_id
        task: String,
    },
}

impl CtlCommand {
    /// The request to send.
    pub fn request(&self) -> ControlRequest {
        match self {
            Self::Ping => ControlRequest::Ping,
            Self::Stats => ControlRequest::Stats,
            Self::Active => ControlRequest::Active,
            Self::Pause => ControlRequest::Pause,
            Self::Resume => ControlRequest::Resume,
            Self::Drain => ControlRequest::Drain,
            Self::Shutdown => ControlRequest::Shutdown,
            Self::Restart => ControlRequest::Restart,
            Self::LogLevel { filter } => ControlRequest::LogLevel { filter: filter.clone() },
            Self::Cancel { task } => {
                ControlRequest::Cancel(Cancellation { task: Some(task.clone()), ..Cancellation::default() })
            }
        }
    }
}

impl Ctl {
    /// The target of the request.
    ///
    /// # Errors
    /// No target is given for a command that needs one, or several are. The error is a sentence for the user. Clap does
    /// not check this, because the flags are global: they may stand before or after the command.
    pub fn target(&self) -> Result<Target, &'static str> {
        let named = [
            self.all.then_some(Target::All),
            self.host.clone().map(Target::Host),
            self.launcher.clone().map(Target::Launcher),
            self.pool.clone().map(Target::Pool),
            self.slot.clone().map(Target::Slot),
        ];
        let mut named = named.into_iter().flatten();
        match (named.next(), named.next()) {
            (Some(target), None) => Ok(target),
            (Some(_), Some(_)) => Err("give only one of --all, --host, --launcher, --pool and --slot"),
            (None, _) if self.command.request().is_query() => Ok(Target::All),
            // A task id is unambiguous across launchers, so cancel needs no target.
            (None, _) if matches!(self.command, CtlCommand::Cancel { .. }) => Ok(Target::All),
            (None, _) => Err("this command needs a target: --all, --host, --launcher, --pool or --slot"),
        }
    }
}

#[cfg(feature = "top")]
/// `sconce top`.
#[derive(Debug, Args)]
pub struct Top {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// How often launchers are queried
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = duration)]
    pub every: Duration,
}

/// `sconce healthcheck`.
#[derive(Debug, Args)]
pub struct Healthcheck {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArguments,
    /// Ask whether it is alive: no worker is stuck
    #[arg(long, conflicts_with = "startup")]
    pub live: bool,
    /// Ask whether it has started: every pool has had a worker that was ready
    #[arg(long)]
    pub startup: bool,
    /// Address of the launcher to ask, instead of admin.listen; it may be on another host
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// Longest wait for the answer
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration)]
    pub timeout: Duration,
}
