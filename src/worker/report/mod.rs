//! Reports to the launcher: writes control lines to stdout, among them `stats` with the counters. `traced` writes the
//! spans of tasks. Owns the thread that writes to stdout, and the counters.

mod traced;

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::Control;
use crate::broker::Acker;
use crate::engine::{EndedPass, Observer, ReservedTokens};
use crate::protocol::control::{Event, TaskName, encode};
use crate::protocol::stats::{Stats, WorkerState};
use crate::shutdown::{Phase, Stop};

pub(super) use self::traced::Traced;

/// How often the counters are checked for changes, and the shortest time between two `stats` lines.
const STATS_INTERVAL: Duration = Duration::from_secs(1);
/// The longest time without a `stats` line.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);

enum Line {
    Event(Vec<u8>),
    /// Completed once everything before it is written.
    Flush(oneshot::Sender<()>),
}

/// Sends control lines. Clones share the thread that writes them.
#[derive(Clone)]
pub struct Reporter {
    /// Written by the worker's tasks, read by the writing thread. Bound: 64. When it is full, `stats` are skipped,
    /// [`Reporter::try_send`] drops its event, and [`Reporter::send`] waits. That does not last: a launcher that does
    /// not read is about to end.
    lines: mpsc::Sender<Line>,
    /// Locked for one write, by the writing thread, the model thread or a preprocess thread.
    out: Arc<Mutex<ControlOutput>>,
}

struct ControlOutput {
    stdout: Box<dyn Write + Send>,
    device: Device,
    /// The tasks that are being preprocessed, as the launcher knows them.
    preprocessing: Vec<TaskName>,
}

/// While this exists, the launcher knows that the task is being preprocessed.
pub(super) struct Preprocessing<'a> {
    reporter: &'a Reporter,
    task: &'a TaskName,
}

impl Drop for Preprocessing<'_> {
    fn drop(&mut self) {
        let mut out = self.reporter.out.lock();
        if let Some(index) = out.preprocessing.iter().position(|task| task == self.task) {
            out.preprocessing.swap_remove(index);
        }
        out.report_preprocessing();
    }
}

/// Whether the device computes, and whether the launcher knows that.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Device {
    /// Computing; the launcher knows.
    Busy,
    /// Idle; this must be reported before the next line.
    Idle,
    /// Idle; the launcher knows.
    ReportedIdle,
}

impl Reporter {
    /// Writes to `out`, the worker's stdout, from a thread of its own because a pipe can block.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(out: impl Write + Send + 'static) -> std::io::Result<Self> {
        let (reporter, mut queued) = Self::new(out);
        let out = reporter.out.clone();
        thread::Builder::new().name("control-lines".into()).spawn(move || {
            while let Some(line) = queued.blocking_recv() {
                write(&out, line);
            }
        })?;
        Ok(reporter)
    }

    /// Writes from a task of the caller's runtime, whose time may be paused.
    #[cfg(test)]
    pub(super) fn start_here(out: impl Write + Send + 'static) -> Self {
        let (reporter, mut queued) = Self::new(out);
        let out = reporter.out.clone();
        tokio::spawn(async move {
            while let Some(line) = queued.recv().await {
                write(&out, line);
            }
        });
        reporter
    }

    fn new(out: impl Write + Send + 'static) -> (Self, mpsc::Receiver<Line>) {
        let (lines, queued) = mpsc::channel(64);
        let out = Arc::new(Mutex::new(ControlOutput {
            stdout: Box::new(out),
            device: Device::ReportedIdle,
            preprocessing: Vec::new(),
        }));
        (Self { lines, out }, queued)
    }

    /// Reports the tasks of a forward pass before it begins. The line is written when this returns, since the process
    /// may die in the pass. Blocks; only for the model thread, whose lines stay in order.
    pub(super) fn forward(&self, tasks: Vec<TaskName>) {
        let line = encode(&Event::Forward { tasks });
        let mut out = self.out.lock();
        out.device = Device::Busy;
        out.write(&line);
    }

    /// Reports that a task is about to be preprocessed, since the process may die of it. Blocks; only for the
    /// preprocess threads.
    pub(super) fn preprocessing<'a>(&'a self, task: &'a TaskName) -> Preprocessing<'a> {
        let mut out = self.out.lock();
        out.preprocessing.push(task.clone());
        out.report_preprocessing();
        Preprocessing { reporter: self, task }
    }

    /// Records that the device is idle. This is reported with the next line, or by [`Reporter::report_idle`]. Reporting
    /// it at once would take a CPU core from the replies that are about to be published.
    pub(super) fn mark_idle(&self) {
        self.out.lock().mark_idle();
    }

    /// Reports that the device is idle, unless that was reported before.
    pub(super) fn report_idle(&self) {
        let mut out = self.out.lock();
        out.mark_idle();
        out.write(b"");
    }

    /// Sends an event that the launcher acts on.
    pub async fn send(&self, event: &Event) {
        let _ = self.lines.send(Line::Event(encode(event))).await;
    }

    /// Sends an event, or drops it if the channel of lines is full.
    pub fn try_send(&self, event: &Event) {
        let _ = self.lines.try_send(Line::Event(encode(event)));
    }

    /// Waits until everything sent before is written, at most one second.
    pub async fn flush(&self) {
        let (flushed, written) = oneshot::channel();
        let write = async {
            let _ = self.lines.send(Line::Flush(flushed)).await;
            let _ = written.await;
        };
        let _ = tokio::time::timeout(Duration::from_secs(1), write).await;
    }
}

fn write(out: &Mutex<ControlOutput>, line: Line) {
    match line {
        Line::Event(line) => out.lock().write(&line),
        Line::Flush(flushed) => drop(flushed.send(())),
    }
}

impl ControlOutput {
    fn mark_idle(&mut self) {
        if self.device == Device::Busy {
            self.device = Device::Idle;
        }
    }

    fn report_preprocessing(&mut self) {
        let line = encode(&Event::Preprocessing { tasks: self.preprocessing.clone() });
        self.write(&line);
    }

    /// Writes a line, after the report of an idle device if that is due. Write errors are ignored: the end of stdin
    /// shows that the launcher is gone.
    fn write(&mut self, line: &[u8]) {
        if self.device == Device::Idle {
            self.device = Device::ReportedIdle;
            drop(self.stdout.write_all(&encode(&Event::Forward { tasks: Vec::new() })));
        }
        drop(self.stdout.write_all(line).and_then(|()| self.stdout.flush()));
    }
}

/// Reports the model thread's work to the launcher and the counters.
pub(super) struct DeviceReport {
    reporter: Reporter,
    counters: Arc<Counters>,
}

impl DeviceReport {
    pub(super) fn new(control: &Control, counters: Arc<Counters>) -> Self {
        Self { reporter: control.reporter.clone(), counters }
    }
}

impl Observer for DeviceReport {
    fn on_device(&self, tasks: Vec<TaskName>) {
        self.reporter.forward(tasks);
    }

    fn mark_idle(&self) {
        self.reporter.mark_idle();
        self.counters.count(|stats| stats.now.kv_reserved = 0);
    }

    fn report_idle(&self) {
        self.reporter.report_idle();
    }

    fn pass_ended(&self, pass: &EndedPass) {
        if !pass.has_failed {
            let (inputs, tokens) = (pass.pass.size, pass.pass.tokens);
            self.counters.count(|stats| {
                stats.observe_batch(inputs, tokens, pass.took.as_secs_f64());
                if let Some(ReservedTokens { now, max }) = pass.reserved {
                    (stats.now.kv_reserved, stats.now.kv_tokens) = (now as u64, max as u64);
                }
            });
        }
    }
}

/// Sends `stats` when there is something new, and at least every [`HEARTBEAT_INTERVAL`], to show that the worker lives.
pub(super) async fn send_stats(counters: Arc<Counters>, reporter: Reporter) {
    let mut since_last = Duration::ZERO;
    let mut reported = WorkerState::default();
    loop {
        tokio::time::sleep(STATS_INTERVAL).await;
        since_last += STATS_INTERVAL;
        // If the channel is full, the counts are sent next time.
        let Ok(room) = reporter.lines.try_reserve() else { continue };
        if let Some(stats) = counters.take(|stats| {
            let watched = |now: &WorkerState| (now.held, now.connected, now.problem.clone());
            let has_changed = watched(&stats.now) != watched(&reported);
            has_changed || since_last >= HEARTBEAT_INTERVAL || !stats.is_idle()
        }) {
            (since_last, reported) = (Duration::ZERO, stats.now.clone());
            room.send(Line::Event(encode(&Event::Stats(Box::new(stats)))));
        }
    }
}

/// Records whether there is a session with the broker, and which problems the worker has.
pub(super) async fn watch_connection(acker: Arc<dyn Acker>, counters: Arc<Counters>) {
    loop {
        let connected = acker.is_connected();
        let broker_problem =
            acker.trouble().filter(|_| !connected).map(|message| format!("no broker: {message}"));
        let problem = broker_problem.or_else(|| counters.dead_letter_problem());
        counters.count(|stats| (stats.now.connected, stats.now.problem) = (connected, problem));
        counters.broker_reached.fetch_or(connected, Ordering::Relaxed);
        tokio::time::sleep(STATS_INTERVAL / 4).await;
    }
}

/// Sends `draining` when a stop begins.
pub(super) async fn announce_drain(stop: Stop, reporter: Reporter) {
    stop.reached(Phase::Finishing).await;
    reporter.send(&Event::Draining { cause: stop.cause().unwrap_or_default() }).await;
}

/// The counts since the last `stats` line. Written by task runs, the intake and the model thread; read for `stats`.
/// Locked for arithmetic only.
#[derive(Default)]
pub(super) struct Counters {
    interval: Mutex<Interval>,
    /// Dead letters that the dead-letter queue does not accept. Written by task runs, read by [`watch_connection`].
    /// Locked for a few instructions.
    waiting_dead_letters: Mutex<WaitingDeadLetters>,
    /// Whether there has been a session with the broker.
    broker_reached: AtomicBool,
    /// Bytes of memory of the process that holds the model, if that is not this one. Written by who watches that process.
    model_memory: OnceLock<Arc<AtomicU64>>,
}

#[derive(Default)]
struct WaitingDeadLetters {
    count: usize,
    /// Why the queue did not accept the latest.
    failure: String,
}

/// While this guard exists, one dead letter counts as waiting.
pub(super) struct WaitingDeadLetter<'a>(&'a Counters);

impl Drop for WaitingDeadLetter<'_> {
    fn drop(&mut self) {
        self.0.waiting_dead_letters.lock().count -= 1;
    }
}

/// The counts of the time since the last `stats` line.
struct Interval {
    stats: Stats,
    since: Instant,
}

impl Default for Interval {
    fn default() -> Self {
        Self { stats: Stats::default(), since: Instant::now() }
    }
}

impl Counters {
    pub(super) fn count(&self, count: impl FnOnce(&mut Stats)) {
        count(&mut self.interval.lock().stats);
    }

    /// Takes the counts since the last call, if `wanted` returns true for them. The current values in `now` are kept.
    pub(super) fn take(&self, wanted: impl FnOnce(&Stats) -> bool) -> Option<Stats> {
        let mut interval = self.interval.lock();
        let of_model = self.model_memory.get().map_or(0, |memory| memory.load(Ordering::Relaxed));
        interval.stats.now.resident = resident() + of_model;
        interval.stats.span_ms = interval.since.elapsed().as_millis() as u64;
        if !wanted(&interval.stats) {
            return None;
        }
        interval.since = Instant::now();
        let next = Stats { now: interval.stats.now.clone(), ..Stats::default() };
        Some(std::mem::replace(&mut interval.stats, next))
    }

    /// From now on counts this memory too: that of the process that holds the model.
    pub(super) fn count_memory_of(&self, model: Arc<AtomicU64>) {
        let _ = self.model_memory.set(model);
    }

    /// Whether there has been a session with the broker.
    pub(super) fn has_reached_the_broker(&self) -> bool {
        self.broker_reached.load(Ordering::Relaxed)
    }

    /// Counts a dead letter as waiting, with the reason. `before`: the guard of that dead letter, if it is counted
    /// already.
    pub(super) fn count_waiting_dead_letter<'a>(
        &'a self,
        failure: String,
        before: Option<WaitingDeadLetter<'a>>,
    ) -> WaitingDeadLetter<'a> {
        let mut waiting = self.waiting_dead_letters.lock();
        waiting.failure = failure;
        waiting.count += usize::from(before.is_none());
        drop(waiting);
        before.unwrap_or_else(|| WaitingDeadLetter(self))
    }

    /// How many dead letters wait, and why, if any do.
    fn dead_letter_problem(&self) -> Option<String> {
        let waiting = self.waiting_dead_letters.lock();
        (waiting.count > 0).then(|| format!("{} dead letters wait: {}", waiting.count, waiting.failure))
    }
}

/// Bytes of memory in use by this process alone. Weights do not count: they are mapped files, which all workers share
/// in the page cache. 0 if the system does not report it.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kilobytes = anonymous.and_then(|text| text.trim().strip_suffix(" kB")?.parse().ok());
    1_024 * kilobytes.unwrap_or(0_u64)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;
    use crate::protocol::control::decode;

    #[tokio::test]
    async fn idleness_is_reported_once_and_before_the_next_line() {
        let (mut lines, out) = std::io::pipe().unwrap();
        let reporter = Reporter::start(out).unwrap();
        let pass = |id: &str| reporter.forward(vec![TaskName { id: id.into(), fingerprint: "f".into() }]);
        pass("a");
        reporter.mark_idle();
        pass("b");
        reporter.mark_idle();
        reporter.send(&Event::Isolated { tasks: Vec::new(), through: Vec::new() }).await;
        reporter.flush().await;
        reporter.mark_idle();
        reporter.report_idle();
        pass("c");
        reporter.report_idle();
        drop(reporter);
        let mut text = String::new();
        lines.read_to_string(&mut text).unwrap();
        let reported = text.lines().map(|line| match decode(line).unwrap() {
            Event::Forward { tasks } => tasks.first().map_or("idle".to_owned(), |task| task.id.clone()),
            Event::Isolated { .. } => "isolated".to_owned(),
            other => panic!("{other:?}"),
        });
        assert_eq!(reported.collect::<Vec<_>>(), ["a", "b", "idle", "isolated", "c", "idle"]);
    }

    #[test]
    fn counts_are_reported_once_and_gauges_every_time() {
        let counters = Counters::default();
        counters.count(|stats| (stats.retried, stats.now.held) = (2, 7));
        assert_eq!(counters.take(|_| false), None);
        let first = counters.take(|stats| !stats.is_idle()).unwrap();
        assert_eq!((first.retried, first.now.held), (2, 7));
        assert!(first.now.resident > 100_000, "{first:?}");
        let second = counters.take(|_| true).unwrap();
        assert_eq!((second.retried, second.now.held), (0, 7));
        assert!(second.is_idle());
    }
}
