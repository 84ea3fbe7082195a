//! The supervisor: a small process between the worker and the interpreter of a class in Python (`sconce python-process`).
//! It starts the interpreter. Once the interpreter has ended, or the worker has closed the model channel or is gone, it kills all
//! its descendants. None escapes: a descendant that loses its parent becomes a child of the supervisor, whatever group, session
//! and environment it has. Owns the interpreter and its descendants.

use std::io;
use std::os::fd::{AsFd, IntoRawFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::thread;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::{set_child_subreaper, set_pdeathsig};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, dup2_raw, getpid, getppid};

use super::descendants::descendants;
use crate::shutdown::ignore_stop_signals;

/// The file descriptors of the two channels in the interpreter.
const MODEL_CHANNEL: i32 = 3;
const SIDE_CHANNEL: i32 = 4;
/// What the interpreter runs. It first removes the current folder from the path of modules, where it stands with `-c` as with
/// `-m`: a file `queue.py` in it would take the place of Python's own module. Python before 3.11 has no flag against that.
const PROGRAM: &str =
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); from sconce_model.__main__ import main; main()";
/// If a signal has ended the interpreter, the exit status is this number plus the signal's, as in a shell.
pub(super) const SIGNALLED: i32 = 128;

/// Runs the interpreter `executable` until it has ended and none of its descendants is left. The model channel is stdin, the
/// side channel stdout. Returns the exit status of the interpreter, or [`SIGNALLED`] plus the number of its signal.
///
/// # Errors
/// There is no such interpreter.
pub fn supervise(executable: &str) -> io::Result<i32> {
    set_child_subreaper(true)?;
    move_to(io::stdin(), MODEL_CHANNEL)?;
    move_to(io::stdout(), SIDE_CHANNEL)?;
    let interpreter = Pid::from_raw(start(executable)?);
    // A service manager signals every process of a service, but this one must outlive the interpreter. Ignored only now, so
    // that the interpreter does not inherit it.
    ignore_stop_signals()?;
    thread::Builder::new().name("hang-up".into()).spawn(|| {
        let model_channel = io::stdin();
        // Without flags, `poll` waits for the end of the channel alone. It fails if a signal interrupts it.
        while poll(&mut [PollFd::new(model_channel.as_fd(), PollFlags::empty())], PollTimeout::NONE).is_err()
        {
        }
        kill_descendants();
    })?;
    let status = loop {
        match waitpid(None::<Pid>, None) {
            Ok(WaitStatus::Exited(id, status)) if id == interpreter => break status,
            Ok(WaitStatus::Signaled(id, signal, _)) if id == interpreter => break SIGNALLED + signal as i32,
            Ok(_) => {}
            // nix does not know the signal.
            Err(_) => break SIGNALLED,
        }
    };
    loop {
        kill_descendants();
        // A descendant that has ended may have left children to this process.
        if waitpid(None::<Pid>, None) == Err(Errno::ECHILD) {
            return Ok(status);
        }
    }
}

/// Starts the interpreter in a process group of its own, and returns its id. The calling thread must live as long as the
/// interpreter, since its end is what the interpreter's death signal follows.
#[expect(unsafe_code, reason = "what is called between fork and exec must not take locks or memory")]
fn start(executable: &str) -> io::Result<i32> {
    let supervisor = getpid();
    let mut command = Command::new(executable);
    command
        .args(["-u", "-c", PROGRAM])
        // Set by `app::main` for the threads of this program.
        .env_remove("RUST_MIN_STACK")
        .stdin(Stdio::null())
        .stdout(io::stderr().as_fd().try_clone_to_owned()?)
        .process_group(0);
    let die_with_supervisor = move || -> io::Result<()> {
        set_pdeathsig(Signal::SIGKILL)?;
        // The supervisor may have died before the signal was set.
        if getppid() == supervisor { Ok(()) } else { Err(Errno::ESRCH.into()) }
    };
    // SAFETY: the closure makes two system calls, and nothing else.
    unsafe { command.pre_exec(die_with_supervisor) };
    i32::try_from(command.spawn()?.id()).map_err(io::Error::other)
}

fn kill_descendants() {
    for process in descendants(getpid().as_raw()) {
        // An error means that it has ended, or that it runs as another user.
        let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
    }
}

#[expect(unsafe_code, reason = "dup2(2) is unsafe because it closes what the number stood for")]
fn move_to(from: impl AsFd, number: i32) -> io::Result<()> {
    // SAFETY: nothing uses this number, since the program has opened no file yet.
    let moved = unsafe { dup2_raw(from, number) }?;
    // It is not closed here, since the interpreter inherits it.
    let _ = moved.into_raw_fd();
    Ok(())
}
