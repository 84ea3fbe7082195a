//! One worker process: spawns it, sends it commands, reads its pipes, kills it. Owns its pipes. The spawning
//! thread must live as long as the launcher, because the kernel signals the child when that thread ends
//! (`PR_SET_PDEATHSIG`). Therefore the launcher's runtime has one thread, on which `app::main` runs every command.
//! The guard kills a worker that this signal does not end.

use std::io;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::io::{AsyncRead, AsyncWriteExt};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::{Instant, sleep_until};

use tokio_util::codec::{AnyDelimiterCodec, AnyDelimiterCodecError, FramedRead};

use super::guard::{Guard, Guarded};
use crate::config::Assignment;
use crate::protocol::control::{self, MAX_LINE, encode};

/// Lines of at most [`MAX_LINE`] bytes; longer ones are skipped.
type Lines<R> = FramedRead<R, AnyDelimiterCodec>;

/// How long a worker may take to read a command before it is killed.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the output of an ended worker is still read if another process keeps its pipes open.
const OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);

/// A worker process with its pipes.
pub(super) struct WorkerProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    events: Option<Lines<ChildStdout>>,
    logs: Option<Lines<ChildStderr>>,
    /// How the process ended, and until when the rest of its events and of its log is read.
    ended: Option<(ExitStatus, Instant)>,
    /// Makes the guard watch this worker until it is reaped. None if the guard does not know it, or it is reaped.
    guarded: Option<Guarded>,
    was_killed: bool,
}

pub(super) enum ChildEvent {
    EventLine(String),
    LogLine(String),
    Ended(ExitStatus),
}

impl WorkerProcess {
    /// Spawns `program worker …`, registers the worker with the guard, and sends the worker its assignment, the crash
    /// records and the withdrawals. `withdrawn`: none while the withdrawals are still being read; a later command sends
    /// them.
    ///
    /// # Errors
    /// The program cannot be started.
    pub(super) async fn spawn(
        program: &Path,
        guard: &Arc<Guard>,
        assignment: &Assignment,
        crashes: Vec<control::CrashRecord>,
        withdrawn: Option<Vec<control::Cancellation>>,
        paused: bool,
    ) -> io::Result<Self> {
        guard.start_if_missing();
        let mut child = Command::new(program)
            .args(["worker", "--launched-by", &std::process::id().to_string(), "--slot", &assignment.slot])
            .envs(environment(assignment))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // It has its own process group, so that Ctrl-C in the terminal reaches only the launcher, and counts once.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let mut process = Self {
            guarded: guard.register(child.id()),
            stdin: child.stdin.take(),
            events: child.stdout.take().map(lines),
            logs: child.stderr.take().map(lines),
            ended: None,
            was_killed: false,
            child,
        };
        let assignment = serde_json::to_value(assignment)?;
        process.send(&control::Command::Start { assignment, crashes, paused, withdrawn }).await;
        Ok(process)
    }

    /// The process id, until the worker is reaped.
    pub(super) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Sends a command. A worker that does not read is killed. A closed pipe is ignored: the worker is about to end,
    /// and `next` will report its end.
    pub(super) async fn send(&mut self, command: &control::Command) {
        let Some(stdin) = &mut self.stdin else { return };
        let line = encode(command);
        let write = async {
            let _ = stdin.write_all(&line).await;
            let _ = stdin.flush().await;
        };
        if tokio::time::timeout(WRITE_TIMEOUT, write).await.is_err() {
            tracing::error!(
                pid = self.pid(),
                seconds = WRITE_TIMEOUT.as_secs(),
                "the worker does not read; killing it"
            );
            self.kill();
        }
    }

    /// The next event. The worker's end is returned last, after everything that the worker has written. Safe to cancel.
    pub(super) async fn next(&mut self) -> io::Result<ChildEvent> {
        loop {
            let (events, logs) = (&mut self.events, &mut self.logs);
            if let Some((status, until)) = self.ended
                && (events.is_none() && logs.is_none() || until <= Instant::now())
            {
                return Ok(ChildEvent::Ended(status));
            }
            let until = self.ended.map(|(_, until)| until);
            tokio::select! {
                line = read_line(events), if events.is_some() => match line {
                    Some(line) => return Ok(ChildEvent::EventLine(line)),
                    None => self.events = None,
                },
                line = read_line(logs), if logs.is_some() => match line {
                    Some(line) => return Ok(ChildEvent::LogLine(line)),
                    None => self.logs = None,
                },
                // The process must be awaited apart from its pipes: a process that it started may keep the pipes open.
                status = self.child.wait(), if until.is_none() => {
                    self.ended = Some((status?, Instant::now() + OUTPUT_TIMEOUT));
                    // From now on another process may get this process id.
                    drop(self.guarded.take());
                }
                () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {}
            }
        }
    }

    /// Whether the launcher has killed it.
    pub(super) fn was_killed_here(&self) -> bool {
        self.was_killed
    }

    pub(super) fn kill(&mut self) {
        self.was_killed = true;
        let _ = self.child.start_kill();
    }
}

/// The worker's environment: its number of threads, its device, and how long the allocator keeps free memory.
pub fn environment(assignment: &Assignment) -> [(&'static str, String); 5] {
    let threads = assignment.threads.to_string();
    let device = if assignment.device == "cpu" { "" } else { &assignment.device };
    [
        ("RAYON_NUM_THREADS", threads.clone()),
        ("CANDLE_NUM_THREADS", threads),
        // CUDA shows the worker only its own device, as number 0; a CPU worker sees none. The device is named by UUID,
        // because an index that does not exist would silently hide all devices after it in the list.
        ("CUDA_VISIBLE_DEVICES", device.to_owned()),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()),
        // In milliseconds. With mimalloc's 10 ms, batches that take longer get all their memory anew from the kernel,
        // which has to clear it: a tenth of the time of a network with large intermediate tensors.
        ("MIMALLOC_PURGE_DELAY", "1000".to_owned()),
    ]
}

fn lines<R: AsyncRead>(pipe: R) -> Lines<R> {
    FramedRead::new(pipe, AnyDelimiterCodec::new_with_max_length(b"\n".to_vec(), Vec::new(), MAX_LINE))
}

/// The next line; none at the end of the pipe.
async fn read_line<R: AsyncRead + Unpin>(lines: &mut Option<Lines<R>>) -> Option<String> {
    let lines = lines.as_mut()?;
    loop {
        match lines.next().await? {
            // Lossy, because a library may print any bytes, and reading must continue.
            Ok(line) => return Some(String::from_utf8_lossy(&line).into_owned()),
            Err(AnyDelimiterCodecError::MaxChunkLengthExceeded) => {}
            Err(AnyDelimiterCodecError::Io(_)) => return None,
        }
    }
}
