//! A Python process: starts it by way of its supervisor, waits for its end, and gives it up if it ends, breaks the protocol
//! or takes too long. Then the channels are closed, upon which the supervisor kills it with all its descendants, and whoever
//! waits for it learns the reason. Owns the channels, and the ids of tasks that the process must still forget.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::Serialize;
use tokio::sync::oneshot;

use super::descendants::memory_of_descendants;
use super::environment;
use super::frames::{Frame, read_frame, write_frame};
use super::messages::{FromProcess, ToProcess};
use super::output::PrintedOutput;
use super::supervisor::SIGNALLED;
use crate::config::Python;

/// The command with which this program supervises the interpreter.
const COMMAND: &str = "python-process";
/// The exit status of the supervisor if there is no interpreter.
const NO_INTERPRETER: i32 = 82;
/// How often the memory is measured.
const MEMORY_INTERVAL: Duration = Duration::from_secs(2);
/// How long ids of tasks are gathered before the process is told to forget them, unless another frame takes them along.
const DROP_DELAY: Duration = Duration::from_millis(100);
/// How long the end of a process that has closed its channel is waited for.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The program that supervises the interpreter. Only tests set it, since a test program has no such command.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Sets the program that supervises the interpreter, for tests.
#[cfg(test)]
pub(super) fn set_program(program: PathBuf) {
    let _ = PROGRAM.set(program);
}

/// With what a process is started.
pub(super) struct ProcessSettings<'a> {
    /// The pool's section `python`.
    pub(super) python: &'a Python,
    /// `cpu`, or the UUID of the GPU that it sees.
    pub(super) device: &'a str,
    /// Threads of libraries.
    pub(super) threads: usize,
    /// How long one call of the class may take.
    pub(super) timeout: Duration,
}

/// A Python process.
pub struct Process {
    supervisor: i32,
    timeout: Duration,
    /// Locked for a request and its answer, by the threads that prepare tasks and write replies.
    side_channel: Mutex<UnixStream>,
    /// Another handle of each channel, to close them when the process is lost.
    channels: [UnixStream; 2],
    /// Tasks that the process must forget. Bound: the tasks that leave between two frames.
    dropped: Mutex<Vec<u64>>,
    has_dropped: Condvar,
    /// Why the process is lost. Written once.
    lost: Mutex<Option<Lost>>,
    is_lost: Condvar,
    /// Gets the reason when the process is lost.
    on_lost: Mutex<Option<oneshot::Sender<String>>>,
    memory: Arc<AtomicU64>,
}

/// A process that was started.
pub(super) struct Started {
    pub(super) process: Arc<Process>,
    /// For the one that computes.
    pub(super) model_channel: UnixStream,
    /// Gets the reason when the process is lost.
    pub(super) lost: oneshot::Receiver<String>,
}

/// Why a process is lost.
#[derive(Clone, Debug)]
pub(super) struct Lost {
    pub(super) reason: String,
    /// Whether the operator must act: there is no such interpreter, or it has no package `sconce_model`.
    pub(super) is_setup: bool,
}

impl Process {
    /// Starts the interpreter.
    ///
    /// # Errors
    /// The system cannot start a process or a thread. A missing interpreter is found later.
    pub(super) fn start(settings: &ProcessSettings<'_>) -> io::Result<Started> {
        let (model_channel, model_remote) = UnixStream::pair()?;
        let (side_channel, side_remote) = UnixStream::pair()?;
        side_channel.set_write_timeout(Some(settings.timeout))?;
        let (pipe, log) = io::pipe()?;
        let ProcessSettings { python, device, threads, timeout } = settings;
        // Not the program's path, since the file may have been replaced by a new version.
        let program = PROGRAM.get().cloned().unwrap_or_else(|| "/proc/self/exe".into());
        let child = Command::new(program)
            .args([COMMAND, &python.executable])
            .env_clear()
            .envs(environment::variables(python, device, *threads, std::env::vars_os()))
            .stdin(OwnedFd::from(model_remote))
            .stdout(OwnedFd::from(side_remote))
            .stderr(log)
            // Of its own, since whoever signals the group of the worker does not mean the supervisor.
            .process_group(0)
            .spawn()?;
        let (on_lost, lost) = oneshot::channel();
        let process = Arc::new(Self {
            supervisor: i32::try_from(child.id()).map_err(io::Error::other)?,
            timeout: *timeout,
            channels: [model_channel.try_clone()?, side_channel.try_clone()?],
            side_channel: Mutex::new(side_channel),
            dropped: Mutex::default(),
            has_dropped: Condvar::new(),
            lost: Mutex::default(),
            is_lost: Condvar::new(),
            on_lost: Mutex::new(Some(on_lost)),
            memory: Arc::default(),
        });
        let output = PrintedOutput::log(pipe)?;
        let watched = process.clone();
        thread::Builder::new()
            .name("python-exit".into())
            .spawn(move || watched.wait_for_end(child, &output))?;
        let cared = process.clone();
        thread::Builder::new().name("python-care".into()).spawn(move || cared.take_care())?;
        Ok(Started { process, model_channel, lost })
    }

    /// How long one call of the class may take.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Bytes of memory of it and its descendants, as last measured.
    pub(super) fn memory(&self) -> &Arc<AtomicU64> {
        &self.memory
    }

    /// Waits until the process and all its descendants have ended.
    fn wait_for_end(&self, mut supervisor: Child, output: &PrintedOutput) {
        let ended = supervisor.wait();
        let last_line = output.last_line();
        let mut told =
            if last_line.is_empty() { String::new() } else { format!("; its last line: {last_line}") };
        let lacks_package = last_line.ends_with("No module named 'sconce_model'");
        if lacks_package {
            told += "; install sconce-client for this interpreter";
        }
        let (how, code) = match ended.map(|status| (status, status.code())) {
            Ok((_, Some(code))) if code > SIGNALLED => {
                (ExitStatus::from_raw(code - SIGNALLED).to_string(), None)
            }
            Ok((status, code)) => (status.to_string(), code),
            Err(error) => (format!("it cannot be waited for: {error}"), None),
        };
        let is_setup = code == Some(NO_INTERPRETER) || lacks_package;
        self.lose(Lost { reason: format!("the Python process has ended ({how}){told}"), is_setup });
    }

    /// Gives the process up: it is killed with its descendants.
    pub(super) fn give_up(&self, reason: impl Into<String>) {
        self.lose(Lost { reason: reason.into(), is_setup: false });
    }

    /// Only the first reason counts.
    fn lose(&self, why: Lost) {
        let mut lost = self.lost.lock();
        if lost.is_some() {
            return;
        }
        if let Some(on_lost) = self.on_lost.lock().take() {
            let _ = on_lost.send(why.reason.clone());
        }
        *lost = Some(why);
        self.is_lost.notify_all();
        for channel in &self.channels {
            // What its supervisor waits for.
            let _ = channel.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Why the process is lost, after `error` on one of its channels. A closed channel means that it ends.
    pub(super) fn why_lost(&self, doing: &str, error: &io::Error) -> Lost {
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                let seconds = self.timeout.as_secs_f64();
                self.give_up(format!(
                    "the Python process took longer than batch.timeout ({seconds} s) for {doing}"
                ));
            }
            io::ErrorKind::InvalidData => {
                self.give_up(format!(
                    "the Python process has sent something else than expected for {doing}: {error}"
                ));
            }
            _ => {
                let mut lost = self.lost.lock();
                let deadline = Instant::now() + END_TIMEOUT;
                while lost.is_none() && !self.is_lost.wait_until(&mut lost, deadline).timed_out() {}
                drop(lost);
                self.give_up(format!("the Python process has closed its channel ({doing}: {error})"));
            }
        }
        self.lost.lock().clone().unwrap_or(Lost { reason: error.to_string(), is_setup: false })
    }

    /// Sends a request over the side channel, and returns the answer. `request` is made with the ids of the tasks that the
    /// process must forget. If the process is lost, this never returns: the worker is about to end, and nothing must be
    /// said about the task.
    pub(super) fn ask<'a, R: Serialize>(
        &self,
        doing: &str,
        request: impl FnOnce(&'a [u64]) -> R,
        buffers: &[&[u8]],
        dropped: &'a mut Vec<u64>,
    ) -> (FromProcess, Frame) {
        let channel = self.side_channel.lock();
        *dropped = std::mem::take(&mut *self.dropped.lock());
        let answer = write_frame(&channel, &request(dropped), buffers)
            .and_then(|()| read_frame(&channel, Some(self.timeout)))
            .and_then(|frame| Ok((frame.header()?, frame)));
        answer.unwrap_or_else(|error| {
            let Lost { reason, .. } = self.why_lost(doing, &error);
            tracing::debug!(reason, "a task is left as it is");
            loop {
                thread::park();
            }
        })
    }

    /// Has the process forget a task, soon.
    pub(super) fn forget(&self, task: u64) {
        self.dropped.lock().push(task);
        self.has_dropped.notify_one();
    }

    /// Sends the ids of forgotten tasks that no other frame takes along, and measures the memory.
    fn take_care(&self) {
        let mut measured = Instant::now();
        while self.lost.lock().is_none() {
            if measured.elapsed() >= MEMORY_INTERVAL || self.memory.load(Ordering::Relaxed) == 0 {
                self.memory.store(memory_of_descendants(self.supervisor), Ordering::Relaxed);
                measured = Instant::now();
            }
            let mut dropped = self.dropped.lock();
            if dropped.is_empty() {
                self.has_dropped.wait_for(&mut dropped, MEMORY_INTERVAL);
            }
            drop(dropped);
            thread::sleep(DROP_DELAY);
            let Some(channel) = self.side_channel.try_lock() else { continue };
            let dropped = std::mem::take(&mut *self.dropped.lock());
            // An error is found by the next request, or by the wait for the end.
            if !dropped.is_empty() {
                let _ = write_frame(&channel, &ToProcess::Drop { drop: &dropped }, &[]);
            }
        }
    }
}
