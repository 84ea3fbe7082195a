//! A Python process: starts its supervisor, which starts the interpreter, and waits for its end. The process is lost if it has
//! ended, breaks the protocol or takes too long. Then the channels are closed, whereupon the supervisor kills it with all its
//! descendants, and whoever waits for it learns the reason. Owns the side channel, and the ids of tasks that the process must
//! still forget.

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
use tokio::sync::oneshot;

use super::descendants::memory_of_descendants;
use super::environment;
use super::frames::write_frame;
use super::messages::{Answer, ToProcess};
use super::output::PrintedOutput;
use super::supervisor::SIGNALLED;
use crate::config::Python;
use crate::shutdown::Exit;

/// The command with which this program supervises the interpreter.
const COMMAND: &str = "python-process";
/// How often the memory is measured.
const MEMORY_INTERVAL: Duration = Duration::from_secs(2);
/// How long ids of tasks are gathered before a frame of their own tells the process to forget them.
const DROP_DELAY: Duration = Duration::from_millis(100);
/// How long to wait for the end of a process that has closed a channel.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The program that supervises the interpreter. Only tests set it, since a test program has no such command.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Sets the program that supervises the interpreter, for tests.
#[cfg(test)]
pub(super) fn set_program(program: PathBuf) {
    let _ = PROGRAM.set(program);
}

/// The settings of a process.
pub(super) struct ProcessSettings<'a> {
    /// The pool's section `python`.
    pub(super) python: &'a Python,
    /// `cpu`, or the UUID of the GPU that it sees.
    pub(super) device: &'a str,
    /// How many threads numerical libraries may use.
    pub(super) threads: usize,
    /// How long one call of the class may take.
    pub(super) timeout: Duration,
}

/// A Python process.
pub struct Process {
    /// The process id of the supervisor.
    supervisor: i32,
    timeout: Duration,
    /// Locked for a request and its answer, by the threads that prepare tasks and write replies.
    side_channel: Mutex<UnixStream>,
    /// Another handle of each channel, to close both when the process is lost.
    channels: [UnixStream; 2],
    /// The ids of tasks that the process must forget. Bounded by the tasks that leave the worker between two frames.
    dropped: Mutex<Vec<u64>>,
    has_dropped: Condvar,
    /// Why the process is lost. Written once.
    lost: Mutex<Option<Lost>>,
    is_lost: Condvar,
    /// Sends the reason when the process is lost.
    on_lost: Mutex<Option<oneshot::Sender<String>>>,
    /// Bytes, as last measured.
    memory: Arc<AtomicU64>,
}

/// A process that was started.
pub(super) struct Started {
    pub(super) process: Arc<Process>,
    /// For loading, then for batches or streams.
    pub(super) model_channel: UnixStream,
    /// Gets the reason when the process is lost.
    pub(super) lost: oneshot::Receiver<String>,
}

/// Why a process is lost.
#[derive(Clone, Debug)]
pub(super) struct Lost {
    pub(super) reason: String,
    /// Whether the operator must act: there is no such interpreter, or it has no package `sconce_model`.
    pub(super) must_operator_act: bool,
}

impl Process {
    /// Starts the supervisor, which starts the interpreter.
    ///
    /// # Errors
    /// The system cannot start a process or a thread. A missing interpreter is no error here, but the process is then lost.
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
            // In a group of its own, since whoever signals the group of the worker does not mean the supervisor.
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
        let kept = process.clone();
        thread::Builder::new().name("python-upkeep".into()).spawn(move || kept.drop_and_measure())?;
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

    /// Waits until the process and all its descendants have ended. Then it is lost.
    fn wait_for_end(&self, mut supervisor: Child, output: &PrintedOutput) {
        let ended = supervisor.wait();
        let last_line = output.last_line();
        let mut details =
            if last_line.is_empty() { String::new() } else { format!("; its last line: {last_line}") };
        let lacks_package = last_line.ends_with("No module named 'sconce_model'");
        if lacks_package {
            details += "; install sconce-client for this interpreter";
        }
        let (how, code) = match ended.map(|status| (status, status.code())) {
            Ok((_, Some(code))) if code > SIGNALLED => {
                (ExitStatus::from_raw(code - SIGNALLED).to_string(), None)
            }
            Ok((status, code)) => (status.to_string(), code),
            Err(error) => (format!("it cannot be waited for: {error}"), None),
        };
        // The supervisor exits with this code if there is no interpreter.
        let lacks_interpreter = code == Some(i32::from(Exit::ModelFailed.code()));
        self.lose(Lost {
            reason: format!("the Python process has ended ({how}){details}"),
            must_operator_act: lacks_interpreter || lacks_package,
        });
    }

    /// Has the process killed with its descendants.
    pub(super) fn give_up(&self, reason: impl Into<String>) {
        self.lose(Lost { reason: reason.into(), must_operator_act: false });
    }

    /// Closes the channels, and tells whoever waits why the process is lost. Only the first call does anything.
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
            // The supervisor waits for this.
            let _ = channel.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Why the process is lost, after `error` on one of its channels. A closed channel means that the process is ending: its end
    /// is awaited, since its exit status tells more. Other errors give the process up. `doing`: what it was asked for.
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
        self.lost.lock().clone().unwrap_or(Lost { reason: error.to_string(), must_operator_act: false })
    }

    /// Sends a request over the side channel, and returns the answer. `request` makes it from the ids of tasks that the process
    /// must forget. If the process is lost, this never returns: the worker is about to end, and the task must neither be
    /// answered nor refused. `doing`: what the process is asked for.
    pub(super) fn ask<'a>(
        &self,
        doing: &str,
        request: impl FnOnce(Vec<u64>) -> ToProcess<'a>,
        buffers: &[&[u8]],
    ) -> Answer {
        let channel = self.side_channel.lock();
        let request = request(std::mem::take(&mut *self.dropped.lock()));
        let answer = write_frame(&channel, &request, buffers)
            .and_then(|()| Answer::read(&channel, Some(self.timeout)));
        answer.unwrap_or_else(|error| {
            let Lost { reason, .. } = self.why_lost(doing, &error);
            tracing::debug!(reason, "a task is left to the next worker");
            loop {
                thread::park();
            }
        })
    }

    /// Has the process forget a task with the next frame on the side channel.
    pub(super) fn forget(&self, task: u64) {
        self.dropped.lock().push(task);
        self.has_dropped.notify_one();
    }

    /// Sends the ids of tasks to forget if no other frame does, and measures the memory, until the process is lost.
    fn drop_and_measure(&self) {
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
            let drop = std::mem::take(&mut *self.dropped.lock());
            if !drop.is_empty() {
                // An error is noticed by the next request, or by the wait for the end.
                let _ = write_frame(&channel, &ToProcess::Drop { drop }, &[]);
            }
        }
    }
}
