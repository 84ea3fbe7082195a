//! The program's entry point: sets the stack size of threads, parses the command line and maps errors to exit codes.
//! Makes no other decisions.

use std::fs;
use std::io;
use std::process::ExitCode;
use std::thread;

use clap::Parser;

use crate::cli::Cli;
use crate::client::ClientError;
use crate::commands::{self, exits::WithExit};
use crate::config::ConfigError;
use crate::launcher::LaunchError;
use crate::shutdown::Exit;
use crate::worker::WorkerError;

pub use crate::commands::{Allocator, Registry};

/// Environment variable with the default stack size of threads, in bytes. std reads it when it spawns the first thread.
const MIN_STACK_VARIABLE: &str = "RUST_MIN_STACK";
/// The stack size of every thread, in bytes. Lapin parses message headers recursively, and a frame can hold 26,000
/// nested arrays. With Rust's default of 2 MiB such a message, which any producer may send, would kill the worker or
/// command that receives it. The size is reserved as address space; memory is used only up to the depth that the stack
/// reaches.
const STACK_BYTES: usize = 64 << 20;

/// The program: parses the command line, runs the command, returns the exit code.
///
/// Call it first in `main`, before any other thread exists: it sets `RUST_MIN_STACK` in the environment, which is safe
/// only in a process with one thread. In a process with more threads it does not change the environment, so stacks
/// keep the size that is set there.
pub fn main(registry: &Registry) -> ExitCode {
    raise_default_stack_size();
    // The command runs on a separate thread, because the shell limits the stack of the first thread. This thread lives
    // until the process ends, because the kernel kills workers when the thread that spawned them ends.
    let exit = thread::scope(|scope| {
        let main = thread::Builder::new().name("main".into()).stack_size(STACK_BYTES);
        match main.spawn_scoped(scope, || run(registry)) {
            // The panic has printed its message.
            Ok(main) => main.join().unwrap_or(Exit::Internal),
            Err(error) => {
                eprintln_error(&anyhow::Error::new(error).context("cannot spawn the command's thread"));
                Exit::Internal
            }
        }
    });
    ExitCode::from(exit.code())
}

#[expect(
    unsafe_code,
    clippy::disallowed_methods,
    reason = "no other thread exists yet that could read the environment"
)]
fn raise_default_stack_size() {
    let current = std::env::var(MIN_STACK_VARIABLE).ok().and_then(|bytes| bytes.parse::<usize>().ok());
    let is_only_thread = fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1);
    if is_only_thread && current.is_none_or(|bytes| bytes < STACK_BYTES) {
        // SAFETY: no other thread exists that could read the environment meanwhile.
        unsafe { std::env::set_var(MIN_STACK_VARIABLE, STACK_BYTES.to_string()) };
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
    commands::run(cli.command, registry).unwrap_or_else(|error| {
        // This is not an error: the reader has read enough, such as `head` in `sconce check-config | head`.
        if is_closed_pipe(&error) {
            return Exit::Done;
        }
        eprintln_error(&error);
        exit_of(&error)
    })
}

/// Whether the error is a closed pipe: nobody reads the command's output any more.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    if let Some(WithExit { error, .. }) = error.downcast_ref() {
        return is_closed_pipe(error);
    }
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

#[expect(clippy::print_stderr, reason = "the error of a command is printed for its user")]
fn eprintln_error(error: &anyhow::Error) {
    eprintln!("sconce: {error:#}");
}

/// The exit code, which says who has to act. The kind of the error decides it. If the kind does not, the outermost code
/// that the command attached decides.
fn exit_of(error: &anyhow::Error) -> Exit {
    let (mut inner, mut attached) = (error, None);
    loop {
        if let Some(exit) = exit_of_kind(inner) {
            return exit;
        }
        let Some(WithExit { exit, error }) = inner.downcast_ref() else {
            return attached.unwrap_or(Exit::Internal);
        };
        attached = attached.or(Some(*exit));
        inner = error;
    }
}

/// The exit code of this kind of error; none if the kind does not say who has to act.
fn exit_of_kind(error: &anyhow::Error) -> Option<Exit> {
    if error.is::<ConfigError>() || error.is::<LaunchError>() {
        return Some(Exit::Config);
    }
    if let Some(error) = error.downcast_ref::<WorkerError>() {
        return Some(error.exit());
    }
    if let Some(error) = error.downcast_ref::<crate::broker::BrokerError>() {
        return Some(WorkerError::from(error.clone()).exit());
    }
    Some(match error.downcast_ref::<ClientError>()? {
        ClientError::Broker(error) => WorkerError::from(error.clone()).exit(),
        ClientError::NoReply { .. } => Exit::Aborted,
        ClientError::Lost { .. } => Exit::BrokerLost,
    })
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;
    use crate::commands::exits::ExitsWith as _;

    #[test]
    fn an_error_prints_its_message_and_not_its_exit_code() {
        // A message that is also the text of an exit code.
        let message = Exit::Aborted.to_string();
        let error = anyhow!(message.clone()).exits_with(Exit::Usage).context("one").exits_with(Exit::Refused);
        assert_eq!(format!("{error:#}"), format!("one: {message}"));
        assert_eq!(exit_of(&error), Exit::Refused, "the outermost code");
        let read = std::fs::read("/nowhere/at/all").context("two").exits_with(Exit::Config).unwrap_err();
        assert!(format!("{read:#}").starts_with("two: No such file"), "{read:#}");
        assert_eq!(exit_of(&read.context("three")), Exit::Config);
    }

    #[test]
    fn the_kind_of_an_error_overrides_the_attached_exit_code() {
        let lost = || ClientError::Lost { missing: 1, published: 2 };
        for error in [anyhow::Error::from(lost()), anyhow::Error::from(lost()).context("why")] {
            assert_eq!(exit_of(&error.exits_with(Exit::Usage).context("more")), Exit::BrokerLost);
        }
        assert_eq!(exit_of(&anyhow!("a bug")), Exit::Internal);
    }

    #[test]
    fn a_closed_pipe_is_recognized_in_any_context() {
        let closed = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_closed_pipe(&anyhow::Error::from(closed()).context("one")));
        assert!(is_closed_pipe(&anyhow::Error::from(closed()).exits_with(Exit::Usage).context("two")));
        assert!(!is_closed_pipe(&anyhow::Error::from(io::Error::from(io::ErrorKind::NotFound))));
    }
}
