//! Wires concrete types together: settings, telemetry, registry, broker, worker, launcher; turns
//! what happened into exit codes. One file a command. No policy of its own.

pub mod batch_file;
mod bench;
mod bench_device;
mod broker_session;
mod check_config;
mod ctl;
mod dead;
mod devices;
mod guard;
mod healthcheck;
mod launch;
mod numa;
mod producer;
mod progress;
mod publish;
mod registry;
mod requests;
mod run_batch;
mod spans;
mod stop;
mod top;
mod worker;

use std::fs;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

use anyhow::Context;
use clap::Parser;

use crate::cli::{self, Cli, Command};
use crate::config::{self, ConfigError, Loaded, Pool};
use crate::launcher::LaunchError;
use crate::shutdown::Exit;
use crate::telemetry::{self, Format};
use crate::worker::WorkerError;

pub use registry::Registry;

/// What std reads, when the first thread is made, as the stack of every thread that names none, in bytes.
const MIN_STACK: &str = "RUST_MIN_STACK";
/// The stack of every thread, in bytes. Lapin reads the headers of a message by recursion, and a frame
/// holds 26,000 arrays one inside the other: with Rust's 2 MiB such a message, which anybody may send, kills
/// whoever takes it, worker or command. Address space; memory is used only as deep as it gets.
const STACK: usize = 64 << 20;

/// The program: parses the command line, runs the command, returns the exit code.
///
/// Call it first in `main`, before any other thread exists: it sets `RUST_MIN_STACK` in the environment,
/// which only a process of one thread can do. Where there are others it leaves the environment as it is,
/// and threads have the stacks that it gives them.
pub fn main(registry: &Registry) -> ExitCode {
    deepen_stacks();
    // The first thread's stack is the shell's to limit. This one lives to the end too: the kernel ties
    // workers to the thread that spawned them.
    let exit = thread::scope(|scope| {
        let main = thread::Builder::new().name("main".into()).stack_size(STACK);
        match main.spawn_scoped(scope, || run(registry)) {
            // A panic has said why.
            Ok(main) => main.join().unwrap_or(Exit::Internal),
            Err(error) => {
                eprintln_error(&anyhow::Error::new(error).context("a thread for the command"));
                Exit::Internal
            }
        }
    });
    ExitCode::from(exit.code())
}

#[expect(unsafe_code, clippy::disallowed_methods, reason = "before the first thread the environment is ours")]
fn deepen_stacks() {
    let set = std::env::var(MIN_STACK).ok().and_then(|bytes| bytes.parse::<usize>().ok());
    let alone = fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1);
    if alone && set.is_none_or(|bytes| bytes < STACK) {
        // SAFETY: no other thread can read the environment meanwhile, because there is none.
        unsafe { std::env::set_var(MIN_STACK, STACK.to_string()) };
    }
}

fn run(registry: &Registry) -> Exit {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(help_or_error) => {
            let _ = help_or_error.print();
            return if help_or_error.use_stderr() { Exit::Usage } else { Exit::Done };
        }
    };
    let ended = match cli.command {
        Command::Launch(settings) => launch::run(&settings, registry),
        Command::Worker(arguments) => worker::run(&arguments, registry),
        Command::Guard => guard::run(),
        Command::Publish(arguments) => publish::run(arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::BenchDevice(arguments) => bench_device::run(&arguments, registry),
        Command::Dead(command) => dead::run(&command),
        Command::Stop(arguments) => stop::run(&arguments),
        Command::Ctl(arguments) => ctl::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Healthcheck(arguments) => healthcheck::run(&arguments),
        Command::RunBatch(arguments) => run_batch::run(&arguments, registry),
        Command::CheckConfig(arguments) => check_config::run(&arguments, registry),
        Command::Devices(arguments) => devices::run(&arguments, registry),
    };
    ended.unwrap_or_else(|error| {
        eprintln_error(&error);
        exit_of(&error)
    })
}

#[expect(clippy::print_stderr, reason = "the last word of a command goes to its user")]
fn eprintln_error(error: &anyhow::Error) {
    eprintln!("sconce: {error:#}");
}

/// Who must act decides the code.
fn exit_of(error: &anyhow::Error) -> Exit {
    if error.is::<ConfigError>() || error.is::<LaunchError>() {
        return Exit::Config;
    }
    if let Some(error) = error.downcast_ref::<WorkerError>() {
        return error.exit();
    }
    if let Some(error) = error.downcast_ref::<crate::broker::BrokerError>() {
        return WorkerError::from(error.clone()).exit();
    }
    error.downcast_ref::<Exit>().copied().unwrap_or(Exit::Internal)
}

/// Loads the settings: files, environment, flags.
fn load(settings: &cli::Settings, flags: &[(String, String)]) -> Result<Loaded, ConfigError> {
    let mut files = settings.config.clone();
    if files.is_empty() {
        let listed = std::env::var_os("SCONCE_CONFIG").unwrap_or_default();
        files = std::env::split_paths(&listed).filter(|path| *path != PathBuf::new()).collect();
    }
    // Variables that are not UTF-8 cannot be settings.
    let environment = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let overrides: Vec<_> = settings.set.iter().chain(flags).cloned().collect();
    config::load(&files, environment, &overrides)
}

/// The pool of that name, or the only one.
fn pool_named<'a>(pools: &'a [Pool], name: Option<&str>) -> anyhow::Result<(usize, &'a Pool)> {
    let names = || pools.iter().map(|pool| pool.name.as_str()).collect::<Vec<_>>().join(", ");
    let mut numbered = pools.iter().enumerate();
    match name {
        Some(name) => numbered.find(|(_, pool)| pool.name == name),
        None if pools.len() == 1 => numbered.next(),
        None => None,
    }
    .with_context(|| match name {
        Some(name) => format!("no pool is named {name:?}; the settings have: {}", names()),
        None => format!("there are several pools, choose one with --pool: {}", names()),
    })
    .map_err(|error| error.context(Exit::Usage))
}

/// Starts logging for a command that a person or a service manager runs.
fn start_logging(unless_told: Option<&str>) {
    let filter = std::env::var("SCONCE_LOG").ok();
    let format = log_format(unless_told.is_none());
    if let Some(problem) = telemetry::start(filter.as_deref().or(unless_told), format) {
        tracing::warn!(problem, "SCONCE_LOG cannot be read; the default is used");
    }
}

/// How lines look: as `SCONCE_LOG_FORMAT` says; else for a person, except those of a service whose stderr
/// goes to a collector of logs.
fn log_format(is_service: bool) -> Format {
    match std::env::var("SCONCE_LOG_FORMAT").as_deref() {
        Ok("json") => Format::Json,
        Ok("human") => Format::Human,
        _ if is_service && !std::io::stderr().is_terminal() => Format::Json,
        _ => Format::Human,
    }
}
