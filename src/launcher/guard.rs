//! The guard: a small process that outlives the launcher. It kills workers that also outlive the launcher, because they
//! are suspended (SIGSTOP) or their driver hangs. This file has both sides: the launcher's, which starts the guard and
//! registers every worker with it, and the guard's own ([`guard_workers`]). A worker is killed when the launcher's end
//! of the socket between launcher and guard is closed and the shutdown grace is over. The guard never signals another
//! process that has got the same id in the meantime.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use parking_lot::Mutex;
use tokio::process::{Child, Command};
use tokio::sync::watch;

use crate::config::Launcher;
use crate::shutdown::ignore_stop_signals;

/// The command with which sconce runs as its own guard.
const COMMAND: &str = "guard";
/// How often the guard checks which workers are still alive, once the launcher is gone.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The first words of the launcher's lines to the guard: a worker was spawned; a worker was reaped.
const SPAWNED: &str = "spawned";
const REAPED: &str = "reaped";

/// The launcher's side, shared by all slots.
pub(super) struct Guard {
    /// The path of sconce itself; none if there is no guard.
    program: Option<PathBuf>,
    /// Contains the shutdown grace. Written when settings are reloaded.
    policy: watch::Receiver<Launcher>,
    /// Locked for a few short writes; never across an await.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// None before the first worker, and between the loss of a guard and the next spawn of a worker.
    running: Option<GuardProcess>,
    /// Workers that are spawned and not reaped. A new guard is informed of all of them.
    workers: BTreeSet<Process>,
}

/// A guard process, as the launcher sees it.
struct GuardProcess {
    child: Child,
    /// The guard's stdin. Written only here and never blocks: a guard that reads too slowly is replaced.
    lines: UnixStream,
}

/// A worker that the guard watches until this is dropped.
pub(super) struct Guarded {
    guard: Arc<Guard>,
    worker: Process,
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let mut state = self.guard.state.lock();
        state.workers.remove(&self.worker);
        state.send(&format!("{REAPED} {}\n", self.worker.fields()));
    }
}

impl Guard {
    /// `program` is the path of sconce itself. Without it there is no guard.
    pub(super) fn new(program: Option<PathBuf>, policy: watch::Receiver<Launcher>) -> Self {
        Self { program, policy, state: Mutex::default() }
    }

    /// Starts a guard if none runs. If that fails, a warning is logged. Call this inside the runtime, before each spawn
    /// of a worker.
    pub(super) fn start_if_missing(&self) {
        let Some(program) = &self.program else { return };
        let grace = self.grace();
        let mut state = self.state.lock();
        if state.running.as_mut().is_some_and(GuardProcess::is_alive) {
            return;
        }
        let started = GuardProcess::start(program).inspect_err(|error| {
            let program = program.display();
            tracing::warn!(%program, %error, "no guard: a worker that is stopped may outlive a killed launcher");
        });
        if let Some(ended) = std::mem::replace(&mut state.running, started.ok()) {
            ended.kill();
        }
        for worker in state.workers.clone() {
            state.send(&spawned(worker, grace));
        }
    }

    /// Registers a worker that was just spawned and is not reaped yet.
    pub(super) fn register(self: &Arc<Self>, worker: Option<u32>) -> Option<Guarded> {
        self.program.as_ref()?;
        let Some(worker) = worker.and_then(|pid| Process::of(i32::try_from(pid).ok()?)) else {
            tracing::warn!(
                pid = worker,
                "the guard cannot watch this worker: /proc does not show when it was started"
            );
            return None;
        };
        let grace = self.grace();
        let mut state = self.state.lock();
        state.workers.insert(worker);
        state.send(&spawned(worker, grace));
        Some(Guarded { guard: self.clone(), worker })
    }

    fn grace(&self) -> Duration {
        self.policy.borrow().shutdown_grace
    }
}

impl State {
    /// Writes a line to the guard, if there is one. A guard that cannot accept it is killed.
    fn send(&mut self, line: &str) {
        let Some(running) = &mut self.running else { return };
        if let Err(error) = running.lines.write_all(line.as_bytes()) {
            tracing::warn!(%error, "the guard was lost; another is started with the next worker");
            if let Some(lost) = self.running.take() {
                lost.kill();
            }
        }
    }
}

impl GuardProcess {
    fn start(program: &Path) -> io::Result<Self> {
        // Both ends are closed on exec, so no worker holds the launcher's end open.
        let (lines, stdin) = UnixStream::pair()?;
        lines.set_nonblocking(true)?;
        let child = Command::new(program)
            .arg(COMMAND)
            .stdin(Stdio::from(OwnedFd::from(stdin)))
            .stdout(Stdio::null())
            // It inherits the launcher's stderr. Its own process group keeps Ctrl-C in the terminal from it.
            .process_group(0)
            .spawn()?;
        tracing::debug!(pid = child.id(), "guard started");
        Ok(Self { child, lines })
    }

    fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Kills the guard before its stdin closes: a living guard would conclude that the launcher has ended.
    fn kill(mut self) {
        let _ = self.child.start_kill();
    }
}

fn spawned(worker: Process, grace: Duration) -> String {
    format!("{SPAWNED} {} {}\n", worker.fields(), grace.as_millis())
}

/// A process. Its start time distinguishes it from a later one with the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Process {
    pid: i32,
    /// Start time in clock ticks since boot.
    start_ticks: u64,
}

impl Process {
    fn of(pid: i32) -> Option<Self> {
        let (_, start_ticks) = state_and_start(pid)?;
        Some(Self { pid, start_ticks })
    }

    /// Whether the process runs or is stopped. A zombie does not count.
    fn is_alive(&self) -> bool {
        state_and_start(self.pid).is_some_and(|(state, start_ticks)| {
            start_ticks == self.start_ticks && !matches!(state, 'Z' | 'X')
        })
    }

    fn kill(&self) -> bool {
        self.is_alive() && kill(Pid::from_raw(self.pid), Signal::SIGKILL).is_ok()
    }

    /// The process as two fields of a line.
    fn fields(&self) -> String {
        format!("{} {}", self.pid, self.start_ticks)
    }
}

/// The state and the start time of a process, in clock ticks since boot.
fn state_and_start(pid: i32) -> Option<(char, u64)> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(&String::from_utf8_lossy(&stat))
}

/// Fields 3 and 22 of `/proc/PID/stat`. The name in parentheses before them may contain anything.
fn parse_stat(stat: &str) -> Option<(char, u64)> {
    let (_, from_field_3) = stat.rsplit_once(')')?;
    let mut fields = from_field_3.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    // Field 3 was read; field 22 is the 19th after it.
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[derive(Default)]
struct WatchedWorkers {
    workers: BTreeSet<Process>,
    grace: Duration,
}

impl WatchedWorkers {
    /// Applies one line of the launcher. None if it is not such a line.
    fn apply(&mut self, line: &str) -> Option<()> {
        let mut fields = line.split(' ');
        let verb = fields.next()?;
        let worker = Process { pid: fields.next()?.parse().ok()?, start_ticks: fields.next()?.parse().ok()? };
        match verb {
            SPAWNED => {
                self.grace = Duration::from_millis(fields.next()?.parse().ok()?);
                self.workers.insert(worker);
            }
            REAPED => _ = self.workers.remove(&worker),
            _ => return None,
        }
        Some(())
    }
}

/// Runs as the guard: reads lines about workers until the launcher's end of the socket closes, then kills those that
/// are still alive after the grace. Returns as soon as none is left. Blocks its thread.
///
/// # Errors
/// The signals that end a service cannot be ignored. Then there is no guard.
pub fn guard_workers(launcher: impl BufRead) -> io::Result<()> {
    // A service manager signals every process of a service, but the guard must outlive the launcher.
    ignore_stop_signals()?;
    let killed = kill_survivors(launcher);
    if !killed.is_empty() {
        // Logged after the kills, because writing may fail or block if nobody reads the log any more.
        let ids: Vec<String> = killed.iter().map(ToString::to_string).collect();
        tracing::warn!(?ids, "the launcher is gone; killed the workers left after the grace");
    }
    Ok(())
}

/// Waits for the launcher's end and the grace, and kills the workers that are left. Returns their process ids.
fn kill_survivors(launcher: impl BufRead) -> Vec<i32> {
    let mut watched = WatchedWorkers::default();
    // A read error ends the loop too, since nothing more can be read from the launcher.
    for line in launcher.lines().map_while(Result::ok) {
        if watched.apply(&line).is_none() {
            tracing::warn!(line, "unreadable line from the launcher");
        }
    }
    let deadline = Instant::now() + watched.grace;
    loop {
        watched.workers.retain(Process::is_alive);
        let remaining = deadline.saturating_duration_since(Instant::now());
        if watched.workers.is_empty() || remaining.is_zero() {
            break;
        }
        thread::sleep(remaining.min(POLL_INTERVAL));
    }
    watched.workers.iter().filter(|worker| worker.kill()).map(|worker| worker.pid).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process;

    use super::*;

    const GRACE: Duration = Duration::from_millis(200);

    fn sleeper() -> (process::Child, Process) {
        let child = process::Command::new("sleep").arg("1000").spawn().expect("a process");
        let worker = Process::of(child.id() as i32).expect("a process");
        (child, worker)
    }

    fn reaped(worker: Process) -> String {
        format!("{REAPED} {}\n", worker.fields())
    }

    #[test]
    fn state_and_start_are_parsed_whatever_the_process_name_contains() {
        let rest = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21";
        assert_eq!(parse_stat(&format!("12 (sconce) {rest}\n")), Some(('S', 4711)));
        assert_eq!(parse_stat(&format!("12 (a) Z 9 (b) {rest}\n")), Some(('S', 4711)));
        assert_eq!(parse_stat("12 (sconce) S 1 2"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn a_worker_alive_after_the_grace_is_killed_even_if_it_is_stopped() {
        let (mut child, worker) = sleeper();
        kill(Pid::from_raw(worker.pid), Signal::SIGSTOP).unwrap();
        let begun = Instant::now();
        assert_eq!(kill_survivors(spawned(worker, GRACE).as_bytes()), [worker.pid]);
        assert!(begun.elapsed() >= GRACE, "{:?}", begun.elapsed());
        assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
    }

    #[test]
    fn the_guard_does_not_wait_once_all_workers_are_gone() {
        let ((mut gone, one), (mut alive, other)) = (sleeper(), sleeper());
        let hour = Duration::from_secs(3_600);
        // A zombie: killed, but not reaped.
        kill(Pid::from_raw(one.pid), Signal::SIGKILL).unwrap();
        let lines = spawned(one, hour) + &spawned(other, hour) + &reaped(other);
        assert!(kill_survivors(lines.as_bytes()).is_empty());
        gone.wait().unwrap();
        assert!(other.is_alive(), "the guard does not watch a reaped worker");
        alive.kill().unwrap();
        alive.wait().unwrap();
    }

    #[test]
    fn another_process_with_the_same_id_is_not_killed() {
        let (mut child, worker) = sleeper();
        let earlier = Process { start_ticks: worker.start_ticks - 1, ..worker };
        assert!(kill_survivors(spawned(earlier, GRACE).as_bytes()).is_empty());
        assert!(worker.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn unreadable_lines_change_nothing() {
        let mut watched = WatchedWorkers::default();
        for line in ["", "spawned", "spawned 1 2", "spawned one 2 3", "reaped 1", "killed 1 2"] {
            assert_eq!(watched.apply(line), None, "{line}");
        }
        assert!(watched.workers.is_empty());
    }
}
