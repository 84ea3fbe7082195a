//! Runs the commands. Each command has a file or a folder; this file holds what several commands share.

mod batch_errors;
mod bench;
mod bench_device;
mod broker_session;
mod check_config;
mod ctl;
mod dead;
mod devices;
pub(crate) mod exits;
mod healthcheck;
mod launch;
mod progress;
mod publish;
mod published_files;
mod registry;
mod requests;
mod run_batch;
mod show;
mod stop;
mod submit;
#[cfg(feature = "top")]
mod top;
mod worker;

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;

use anyhow::{Context, anyhow};

use self::exits::ExitsWith as _;
use crate::cli::{self, Command};
use crate::config::{self, ConfigError, LoadedSettings, Pool};
use crate::launcher::guard_workers;
use crate::model::sequences::grammar;
use crate::python::supervise;
use crate::shutdown::Exit;
use crate::telemetry::{self, Format};

pub use crate::model::sequences::grammar::Allocator;
pub use registry::Registry;

/// Runs a command.
///
/// # Errors
/// Why the command failed. The exit code follows from the error's kind, or else is the one that `exits_with` attached.
pub fn run(command: Command, registry: &Registry) -> anyhow::Result<Exit> {
    match command {
        Command::Launch(arguments) => launch::run(&arguments, registry),
        Command::Worker(arguments) => worker::run(&arguments, registry),
        Command::Guard => {
            start_logging(None)?;
            guard_workers(std::io::stdin().lock())
                .context("cannot ignore the signals that stop a service")?;
            Ok(Exit::Done)
        }
        Command::GrammarServer => {
            // Stdin is the socket to the worker that starts this command.
            let worker = std::io::stdin().as_fd().try_clone_to_owned()?;
            grammar::serve(worker.into()).context("serving grammars")?;
            Ok(Exit::Done)
        }
        Command::PythonProcess { executable } => match supervise(&executable) {
            #[expect(
                clippy::disallowed_methods,
                reason = "the status is the interpreter's, and has no `Exit`"
            )]
            Ok(status) => std::process::exit(status),
            Err(error) => {
                Err(anyhow!("pool.python.executable = {executable:?}: {error}").exits_with(Exit::ModelFailed))
            }
        },
        Command::Publish(arguments) => publish::run(&arguments, registry),
        Command::Bench(arguments) => bench::run(&arguments, registry),
        Command::BenchDevice(arguments) => bench_device::run(&arguments, registry),
        Command::Dead(command) => dead::run(&command),
        Command::Stop(arguments) => stop::run(&arguments),
        Command::Ctl(arguments) => ctl::run(&arguments),
        #[cfg(feature = "top")]
        Command::Top(arguments) => top::run(&arguments),
        Command::Healthcheck(arguments) => healthcheck::run(&arguments),
        Command::RunBatch(arguments) => run_batch::run(&arguments, registry),
        Command::Submit(arguments) => submit::run(&arguments, registry),
        Command::CheckConfig(arguments) => check_config::run(&arguments, registry),
        Command::Devices(arguments) => devices::run(&arguments, registry),
    }
}

/// Loads the settings: files, environment, flags.
fn load(
    settings: &cli::SettingsArguments,
    flags: &[(String, String)],
) -> Result<LoadedSettings, ConfigError> {
    let mut files = settings.config.clone();
    if files.is_empty() {
        let paths = std::env::var_os("SCONCE_CONFIG").unwrap_or_default();
        files = std::env::split_paths(&paths).filter(|path| *path != PathBuf::new()).collect();
    }
    // Variables that are not UTF-8 cannot be settings.
    let environment = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let overrides: Vec<_> = settings.set.iter().chain(flags).cloned().collect();
    config::load(&files, environment, &overrides)
}

/// Returns the pool with this name, with its index. Without a name, returns the only pool.
///
/// # Errors
/// No pool has this name, or none is named and there are several.
fn pool_named<'a>(pools: &'a [Pool], name: Option<&str>) -> anyhow::Result<(usize, &'a Pool)> {
    let names = || pools.iter().map(|pool| pool.name.as_str()).collect::<Vec<_>>().join(", ");
    let mut indexed = pools.iter().enumerate();
    match name {
        Some(name) => indexed.find(|(_, pool)| pool.name == name),
        None if pools.len() == 1 => indexed.next(),
        None => None,
    }
    .with_context(|| match name {
        Some(name) => format!("no pool is named {name:?}; the settings have: {}", names()),
        None => format!("there are several pools, choose one with --pool: {}", names()),
    })
    .map_err(|error| error.exits_with(Exit::Usage))
}

/// The name of a pool's queue: the one that was named, or the first one.
fn queue_named(pool: &Pool, name: Option<&str>) -> anyhow::Result<String> {
    let queue = pool.queue_named(name).map(|queue| queue.name);
    queue
        .with_context(|| {
            let names: Vec<String> = pool.queues().into_iter().map(|queue| queue.name).collect();
            let name = name.unwrap_or_default();
            format!("pool {:?} has no queue {name:?}; the settings name: {}", pool.name, names.join(", "))
        })
        .map_err(|error| error.exits_with(Exit::Usage))
}

/// Starts logging. `default_filter` applies if SCONCE_LOG is not set. A command that a person runs passes one. A
/// service passes none, and logs by the program's default filter.
///
/// # Errors
/// SCONCE_LOG or SCONCE_LOG_FORMAT has an invalid value.
fn start_logging(default_filter: Option<&str>) -> anyhow::Result<()> {
    let filter = std::env::var("SCONCE_LOG").ok();
    let format = log_format(default_filter.is_none())?;
    let refused = |problem: String| anyhow!("SCONCE_LOG: {problem}").exits_with(Exit::Config);
    telemetry::start(filter.as_deref().or(default_filter), format).map_err(refused)
}

/// The format of log lines: `SCONCE_LOG_FORMAT`, if it is set. Otherwise JSON for a service whose stderr is not a
/// terminal, because a log collector reads it, and human-readable text for all others.
fn log_format(is_service: bool) -> anyhow::Result<Format> {
    match std::env::var("SCONCE_LOG_FORMAT").as_deref() {
        Ok("json") => Ok(Format::Json),
        Ok("human") => Ok(Format::Human),
        Err(_) | Ok("") if is_service && !std::io::stderr().is_terminal() => Ok(Format::Json),
        Err(_) | Ok("") => Ok(Format::Human),
        Ok(other) => {
            Err(anyhow!("SCONCE_LOG_FORMAT is {other:?}; expected human or json").exits_with(Exit::Config))
        }
    }
}

/// Turns a broken pipe into `Ok(false)`. A reader that has closed its end, as in `… | head`, stops the printing, but
/// not a command that has other work to do.
fn tolerate_broken_pipe(printed: io::Result<()>) -> io::Result<bool> {
    match printed {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

/// Restarts this program in the same process (`exec`) with these variables set, because CUDA and thread pools read them
/// only once. Does nothing if all of them have these values already.
fn reexec_with_environment(variables: &[(&str, String)]) -> anyhow::Result<()> {
    if variables.iter().all(|(name, value)| std::env::var(name).as_ref() == Ok(value)) {
        return Ok(());
    }
    let program = std::env::current_exe().context("cannot find this program's file")?;
    let mut command = std::process::Command::new(program);
    command.args(std::env::args_os().skip(1)).envs(variables.iter().cloned());
    Err(command.exec()).context("cannot start this program again with the environment of a worker")
}
