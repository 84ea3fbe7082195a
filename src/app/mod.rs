//! The program's entry: the stacks of its threads, the command line, exit codes. Makes no other decisions.

use std::fs;
use std::process::ExitCode;
use std::thread;

use clap::Parser;

use crate::cli::Cli;
use crate::client::ClientError;
use crate::commands;
use crate::config::ConfigError;
use crate::launcher::LaunchError;
use crate::shutdown::Exit;
use crate::worker::WorkerError;

pub use crate::commands::{Allocator, Registry};

/// The variable that std reads, when the first thread is made, as the default stack size in bytes.
const MIN_STACK: &str = "RUST_MIN_STACK";
/// The stack of every thread, in bytes. Lapin reads message headers by recursion, and a frame can hold 26,000
/// nested arrays: with Rust's 2 MiB such a message, which any producer may send, kills the worker or command
/// that receives it. This is address space; memory is used only as deep as the stack gets.
const STACK: usize = 64 << 20;

/// The program: parses the command line, runs the command, returns the exit code.
///
/// Call it first in `main`, before any other thread exists: it sets `RUST_MIN_STACK` in the environment, which
/// is safe only in a process with one thread. With more threads it leaves the environment alone, and the stacks
/// have the size given there.
pub fn main(registry: &Registry) -> ExitCode {
    deepen_stacks();
    // The shell limits the first thread's stack. The thread spawned here lives to the end too: the kernel ties
    // workers to the thread that spawned them.
    let exit = thread::scope(|scope| {
        let main = thread::Builder::new().name("main".into()).stack_size(STACK);
        match main.spawn_scoped(scope, || run(registry)) {
            // The panic has printed its message.
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
    commands::run(cli.command, registry).unwrap_or_else(|error| {
        eprintln_error(&error);
        exit_of(&error)
    })
}

#[expect(clippy::print_stderr, reason = "the last word of a command goes to its user")]
fn eprintln_error(error: &anyhow::Error) {
    // An exit code in the chain is for the caller of the program, not for its reader.
    let is_code = |words: &String| Exit::ALL.iter().any(|(_, meaning)| meaning == words);
    let mut words: Vec<String> = error.chain().map(ToString::to_string).filter(|it| !is_code(it)).collect();
    if words.is_empty() {
        words = vec![error.to_string()];
    }
    eprintln!("sconce: {}", words.join(": "));
}

/// The exit code tells who has to act.
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
    match error.downcast_ref::<ClientError>() {
        Some(ClientError::Broker(error)) => return WorkerError::from(error.clone()).exit(),
        Some(ClientError::NoReply { .. }) => return Exit::Aborted,
        Some(ClientError::Lost { .. }) => return Exit::BrokerLost,
        None => {}
    }
    error.downcast_ref::<Exit>().copied().unwrap_or(Exit::Internal)
}
