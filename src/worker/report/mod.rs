//! What a worker tells its launcher: control lines on stdout, and the counters in `stats`. `traced` writes the
//! spans of tasks and batches.

mod traced;

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use self::traced::passed;
use super::Control;
use crate::broker::Acker;
use crate::engine::{Observer, Passed};
use crate::protocol::control::{Event, TaskName, encode};
use crate::protocol::stats::{Standing, Stats};
use crate::shutdown::{Phase, Stop};
use crate::telemetry::traces::Traces;

pub(super) use self::traced::Traced;

/// The least time between two `stats`.
const STATS_EVERY: Duration = Duration::from_secs(1);
/// The longest time without `stats`.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);

enum Line {
    Event(Vec<u8>),
    /// Answered once everything before it is written.
    Mark(oneshot::Sender<()>),
}

/// Sends control lines. Clones share the thread that writes them.
#[derive(Clone)]
pub struct Reporter {
    /// Written by the worker's tasks, read by the writing thread. When it is full, `stats` are dropped and
    /// other events wait. A launcher that does not read ends soon.
    lines: mpsc::Sender<Line>,
    /// Locked for one write, by the writing thread or the model thread.
    out: Arc<Mutex<Out>>,
}

struct Out {
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
        let mut out = lock(&self.reporter.out);
        if let Some(at) = out.preprocessing.iter().position(|task| task == self.task) {
            out.preprocessing.swap_remove(at);
        }
        out.tell_preprocessing();
    }
}

/// The state of the device that the launcher knows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Device {
    /// Computing; the launcher knows.
    Busy,
    /// Idle; the launcher must be told before the next line.
    Idle,
    ToldIdle,
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
        let out = Arc::new(Mutex::new(Out {
            stdout: Box::new(out),
            device: Device::ToldIdle,
            preprocessing: Vec::new(),
        }));
        (Self { lines, out }, queued)
    }

    /// Before a forward pass: tells which tasks are in it. Written when this returns, since the process may die
    /// in the pass. Blocks; only for the model thread, whose order it keeps.
    pub(super) fn forward(&self, tasks: Vec<TaskName>) {
        let line = encode(&Event::Forward { tasks });
        let mut out = lock(&self.out);
        out.device = Device::Busy;
        out.write(&line);
    }

    /// Before a task is preprocessed: tells the launcher, since the process may die of it. Blocks; only for the threads
    /// that preprocess.
    pub(super) fn preprocessing<'a>(&'a self, task: &'a TaskName) -> Preprocessing<'a> {
        let mut out = lock(&self.out);
        out.preprocessing.push(task.clone());
        out.tell_preprocessing();
        Preprocessing { reporter: self, task }
    }

    /// The device is idle. The launcher is told with the next line, or by [`Reporter::tell_idle`]: telling it
    /// at once would take a core from the replies that are about to leave.
    pub(super) fn mark_idle(&self) {
        lock(&self.out).mark_idle();
    }

    /// Tells the launcher that the device is idle, unless it knows.
    pub(super) fn tell_idle(&self) {
        let mut out = lock(&self.out);
        out.mark_idle();
        out.write(b"");
    }

    /// Sends an event that the launcher acts on.
    pub async fn send(&self, event: &Event) {
        let _ = self.lines.send(Line::Event(encode(event))).await;
    }

    /// Sends an event, or drops it if lines are waiting.
    pub fn mention(&self, event: &Event) {
        let _ = self.lines.try_send(Line::Event(encode(event)));
    }

    /// Waits until everything sent before is written, at most one second.
    pub async fn flush(&self) {
        let (mark, written) = oneshot::channel();
        let write = async {
            let _ = self.lines.send(Line::Mark(mark)).await;
            let _ = written.await;
        };
        let _ = tokio::time::timeout(Duration::from_secs(1), write).await;
    }
}

fn write(out: &Mutex<Out>, line: Line) {
    match line {
        Line::Event(line) => lock(out).write(&line),
        Line::Mark(written) => drop(written.send(())),
    }
}

fn lock(out: &Mutex<Out>) -> MutexGuard<'_, Out> {
    out.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Out {
    fn mark_idle(&mut self) {
        if self.device == Device::Busy {
            self.device = Device::Idle;
        }
    }

    fn tell_preprocessing(&mut self) {
        let line = encode(&Event::Preprocessing { tasks: self.preprocessing.clone() });
        self.write(&line);
    }

    /// Write errors are ignored: that the launcher is gone shows as the end of stdin.
    fn write(&mut self, line: &[u8]) {
        if self.device == Device::Idle {
            self.device = Device::ToldIdle;
            drop(self.stdout.write_all(&encode(&Event::Forward { tasks: Vec::new() })));
        }
        drop(self.stdout.write_all(line).and_then(|()| self.stdout.flush()));
    }
}

/// Reports the model thread's work to the launcher, the counters and the spans.
pub(super) struct DeviceReport {
    reporter: Reporter,
    counters: Arc<Counters>,
    traces: Traces,
}

impl DeviceReport {
    pub(super) fn new(control: &Control, counters: Arc<Counters>) -> Self {
        Self { reporter: control.reporter.clone(), counters, traces: control.traces.clone() }
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

    fn tell_idle(&self) {
        self.reporter.tell_idle();
    }

    fn passed(&self, pass: &Passed<'_>) {
        passed(&self.traces, pass);
        if pass.fault.is_none() {
            let (inputs, tokens) = (pass.pass.size, pass.pass.tokens);
            self.counters.count(|stats| {
                stats.batch(inputs, tokens, pass.took.as_secs_f64());
                if let Some((reserved, most)) = pass.reserved {
                    (stats.now.kv_reserved, stats.now.kv_tokens) = (reserved as u64, most as u64);
                }
            });
        }
    }
}

/// Sends `stats` when there is something new, and every [`SIGN_OF_LIFE`] in any case, which shows that the
/// worker lives.
pub(super) async fn every(counters: Arc<Counters>, reporter: Reporter) {
    let mut silent = Duration::ZERO;
    let mut stood = Standing::default();
    loop {
        tokio::time::sleep(STATS_EVERY).await;
        silent += STATS_EVERY;
        // Without room the counts wait for the next time.
        let Ok(room) = reporter.lines.try_reserve() else { continue };
        if let Some(stats) = counters.take(|stats| {
            let of = |now: &Standing| (now.held, now.connected, now.problem.clone());
            let moved = of(&stats.now) != of(&stood);
            moved || silent >= SIGN_OF_LIFE || !stats.is_idle()
        }) {
            (silent, stood) = (Duration::ZERO, stats.now.clone());
            room.send(Line::Event(encode(&Event::Stats(Box::new(stats)))));
        }
    }
}

/// Records whether there is a session with the broker, and which problems the worker has.
pub(super) async fn connection(acker: Arc<dyn Acker>, counters: Arc<Counters>) {
    loop {
        let connected = acker.is_connected();
        let broker = acker.trouble().filter(|_| !connected).map(|message| format!("no broker: {message}"));
        let problem = broker.or_else(|| counters.unparked());
        counters.count(|stats| (stats.now.connected, stats.now.problem) = (connected, problem));
        counters.reached.fetch_or(connected, Ordering::Relaxed);
        tokio::time::sleep(STATS_EVERY / 4).await;
    }
}

/// Sends `draining` when a stop begins.
pub(super) async fn draining(stop: Stop, reporter: Reporter) {
    stop.reached(Phase::Finishing).await;
    reporter.send(&Event::Draining { cause: stop.cause().unwrap_or_default() }).await;
}

/// The counts since the last `stats`. Written by task runs, the intake and the model thread; read for `stats`.
/// Locked for arithmetic only.
#[derive(Default)]
pub(super) struct Counters {
    span: Mutex<Span>,
    /// Dead letters that no queue accepts: their number, and the reason of the last one. Written by task runs,
    /// read now and then. Locked for a few instructions.
    unparked: Mutex<(usize, String)>,
    /// There has been a session with the broker.
    reached: AtomicBool,
}

/// While this guard exists, one dead letter counts as waiting.
pub(super) struct Unparked<'a>(&'a Counters);

impl Drop for Unparked<'_> {
    fn drop(&mut self) {
        self.0.unparked.lock().unwrap_or_else(PoisonError::into_inner).0 -= 1;
    }
}

struct Span {
    stats: Stats,
    since: Instant,
}

impl Default for Span {
    fn default() -> Self {
        Self { stats: Stats::default(), since: Instant::now() }
    }
}

impl Counters {
    pub(super) fn count(&self, count: impl FnOnce(&mut Stats)) {
        count(&mut self.lock().stats);
    }

    /// The counts since the last call, if they are `wanted`.
    pub(super) fn take(&self, wanted: impl FnOnce(&Stats) -> bool) -> Option<Stats> {
        let mut span = self.lock();
        span.stats.now.resident = resident();
        span.stats.span_ms = span.since.elapsed().as_millis() as u64;
        if !wanted(&span.stats) {
            return None;
        }
        span.since = Instant::now();
        let next = Stats { now: span.stats.now.clone(), ..Stats::default() };
        Some(std::mem::replace(&mut span.stats, next))
    }

    /// Whether there has been a session with the broker.
    pub(super) fn has_reached_the_broker(&self) -> bool {
        self.reached.load(Ordering::Relaxed)
    }

    /// Counts a dead letter as waiting, with the reason. `before`: the guard that it has already.
    pub(super) fn wait_to_park<'a>(&'a self, failure: String, before: Option<Unparked<'a>>) -> Unparked<'a> {
        let mut unparked = self.unparked.lock().unwrap_or_else(PoisonError::into_inner);
        unparked.1 = failure;
        unparked.0 += usize::from(before.is_none());
        drop(unparked);
        before.unwrap_or_else(|| Unparked(self))
    }

    /// How many dead letters wait, and why, if any do.
    fn unparked(&self) -> Option<String> {
        let unparked = self.unparked.lock().unwrap_or_else(PoisonError::into_inner);
        let (letters, failure) = &*unparked;
        (*letters > 0).then(|| format!("{letters} dead letters wait: {failure}"))
    }

    fn lock(&self) -> MutexGuard<'_, Span> {
        self.span.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of memory in use that only this process has: the weights are mapped files, which all workers share in
/// the page cache. 0 if the system does not say.
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
    async fn that_the_device_is_idle_is_told_once_and_before_anything_else() {
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
        reporter.tell_idle();
        pass("c");
        reporter.tell_idle();
        drop(reporter);
        let mut text = String::new();
        lines.read_to_string(&mut text).unwrap();
        let said = text.lines().map(|line| match decode(line).unwrap() {
            Event::Forward { tasks } => tasks.first().map_or("idle".to_owned(), |task| task.id.clone()),
            Event::Isolated { .. } => "isolated".to_owned(),
            other => panic!("{other:?}"),
        });
        assert_eq!(said.collect::<Vec<_>>(), ["a", "b", "idle", "isolated", "c", "idle"]);
    }

    #[test]
    fn counts_are_given_once_and_where_the_worker_stands_each_time() {
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
