//! One worker process: how it is spawned, spoken to, listened to and killed. Owns its pipes. The
//! spawning thread must live as long as the launcher, because the kernel ties the child to that
//! thread (`PR_SET_PDEATHSIG`): hence the launcher's runtime has one thread, the one that `app::main`
//! runs every command on. A worker that this signal cannot end is the guard's matter.

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

/// How long a worker may take to read a command.
const HEARING: Duration = Duration::from_secs(10);
/// How long what an ended worker wrote is read, should others hold its pipes open.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A running worker.
pub(super) struct Worker {
    child: Child,
    stdin: Option<ChildStdin>,
    events: Option<Lines<ChildStdout>>,
    logs: Option<Lines<ChildStderr>>,
    /// Its end, with the time until which the rest of its log is read.
    ended: Option<(ExitStatus, Instant)>,
    /// Until it has been reaped. None: the guard does not know of it.
    guarded: Option<Guarded>,
}

/// What a worker process does.
pub(super) enum ChildEvent {
    /// It wrote a control line.
    Event(String),
    /// It wrote to its stderr.
    Log(String),
    /// It ended.
    Ended(ExitStatus),
}

impl Worker {
    /// Spawns `program worker …`, tells the guard of it, and it its assignment, and which tasks workers
    /// died of.
    ///
    /// # Errors
    /// The program cannot be started.
    pub(super) async fn spawn(
        (program, guard): (&Path, &Arc<Guard>),
        assignment: &Assignment,
        deaths: Vec<control::CrashRecord>,
        paused: bool,
    ) -> io::Result<Self> {
        guard.start_if_missing();
        let mut child = Command::new(program)
            .args(["worker", "--launched-by", &std::process::id().to_string(), "--slot", &assignment.slot])
            .envs(environment(assignment))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own: the terminal's Ctrl-C reaches the launcher alone, and counts once.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let mut worker = Self {
            guarded: guard.watch_over(child.id()),
            stdin: child.stdin.take(),
            events: child.stdout.take().map(lines),
            logs: child.stderr.take().map(lines),
            ended: None,
            child,
        };
        let assignment = serde_json::to_value(assignment)?;
        worker.tell(&control::Command::Start { assignment, crashes: deaths, paused }).await;
        Ok(worker)
    }

    /// Its process id, while it lives.
    pub(super) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Sends a command. A worker whose pipe has ended is about to end too, which `next` will show; one
    /// that does not read is killed.
    pub(super) async fn tell(&mut self, command: &control::Command) {
        let Some(stdin) = &mut self.stdin else { return };
        let line = encode(command);
        let write = async {
            let _ = stdin.write_all(&line).await;
            let _ = stdin.flush().await;
        };
        if tokio::time::timeout(HEARING, write).await.is_err() {
            tracing::error!(
                pid = self.pid(),
                seconds = HEARING.as_secs(),
                "the worker does not read; killing it"
            );
            self.kill();
        }
    }

    /// The next thing it does; its end comes after all it had written. Safe to cancel.
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
                line = read(events), if events.is_some() => match line {
                    Some(line) => return Ok(ChildEvent::Event(line)),
                    None => self.events = None,
                },
                line = read(logs), if logs.is_some() => match line {
                    Some(line) => return Ok(ChildEvent::Log(line)),
                    None => self.logs = None,
                },
                // Not when its pipes end: a process that it started may hold them open.
                status = self.child.wait(), if until.is_none() => {
                    self.ended = Some((status?, Instant::now() + LAST_WORDS));
                    // From now on its process id may be another's.
                    drop(self.guarded.take());
                }
                () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {}
            }
        }
    }

    /// SIGKILL.
    pub(super) fn kill(&mut self) {
        let _ = self.child.start_kill();
    }
}

/// What a worker finds in its environment: its threads, and its device.
pub fn environment(assignment: &Assignment) -> [(&'static str, String); 4] {
    let threads = assignment.threads.to_string();
    let device = if assignment.device == "cpu" { "" } else { &assignment.device };
    [
        ("RAYON_NUM_THREADS", threads.clone()),
        ("CANDLE_NUM_THREADS", threads),
        // All that CUDA shows it is its own device, as number 0; a CPU worker sees none. By UUID: an index
        // that is not there would hide every later one, and no error.
        ("CUDA_VISIBLE_DEVICES", device.to_owned()),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()),
    ]
}

fn lines<R: AsyncRead>(pipe: R) -> Lines<R> {
    FramedRead::new(pipe, AnyDelimiterCodec::new_with_max_length(b"\n".to_vec(), Vec::new(), MAX_LINE))
}

/// The next line; none at the end of the pipe.
async fn read<R: AsyncRead + Unpin>(lines: &mut Option<Lines<R>>) -> Option<String> {
    let lines = lines.as_mut()?;
    loop {
        match lines.next().await? {
            // Lossy: a library may print anything, and the pipe must be read on.
            Ok(line) => return Some(String::from_utf8_lossy(&line).into_owned()),
            Err(AnyDelimiterCodecError::MaxChunkLengthExceeded) => {}
            Err(AnyDelimiterCodecError::Io(_)) => return None,
        }
    }
}
