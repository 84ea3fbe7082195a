//! What a worker tells its launcher: control lines on stdout, and the counters behind `stats`.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use crate::protocol::control::{Event, Stats, TaskName, encode};
use crate::shutdown::{Phase, Stop};

/// How often `stats` is sent while there is something to say.
pub(super) const STATS_EVERY: Duration = Duration::from_secs(5);

enum Line {
    Event(Vec<u8>),
    /// Told once everything before it is written.
    Mark(oneshot::Sender<()>),
}

/// Sends control lines. Clones share the thread that writes them.
#[derive(Clone)]
pub struct Reporter {
    /// Written by the worker's tasks, read by the writing thread. Bound: a launcher that does not
    /// read is soon gone; meanwhile `stats` are dropped and other events wait.
    lines: mpsc::Sender<Line>,
    /// Held for one write, by the writing thread and by the model thread.
    out: Arc<Mutex<dyn Write + Send>>,
}

impl Reporter {
    /// Writes to `out`, the worker's stdout, from a thread of its own because a pipe can block.
    ///
    /// # Errors
    /// The system has no thread for us.
    pub fn start(out: impl Write + Send + 'static) -> std::io::Result<Self> {
        let (lines, mut queued) = mpsc::channel::<Line>(64);
        let out: Arc<Mutex<dyn Write + Send>> = Arc::new(Mutex::new(out));
        let shared = out.clone();
        thread::Builder::new().name("control-lines".into()).spawn(move || {
            while let Some(line) = queued.blocking_recv() {
                match line {
                    Line::Event(line) => write(&shared, &line),
                    Line::Mark(written) => drop(written.send(())),
                }
            }
        })?;
        Ok(Self { lines, out })
    }

    /// Tells, before a forward pass, which tasks are in it; none: the device is idle. Written when
    /// this returns: the process may not live to write it later. Blocks; for the model thread alone,
    /// whose order it keeps.
    pub(super) fn forward(&self, tasks: Vec<TaskName>) {
        write(&self.out, &encode(&Event::Forward { tasks }));
    }

    /// Sends an event that the launcher acts on.
    pub async fn send(&self, event: &Event) {
        let _ = self.lines.send(Line::Event(encode(event))).await;
    }

    /// Sends an event that may be missed.
    pub fn mention(&self, event: &Event) {
        let _ = self.lines.try_send(Line::Event(encode(event)));
    }

    /// Waits until everything sent before is written, or for a second.
    pub async fn flush(&self) {
        let (mark, written) = oneshot::channel();
        let write = async {
            let _ = self.lines.send(Line::Mark(mark)).await;
            let _ = written.await;
        };
        let _ = tokio::time::timeout(Duration::from_secs(1), write).await;
    }
}

/// A launcher that is gone shows as the end of our stdin, not here.
fn write(out: &Mutex<dyn Write + Send>, line: &[u8]) {
    let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
    drop(out.write_all(line).and_then(|()| out.flush()));
}

/// Sends `stats` now and then, when there is something to say.
pub(super) async fn every(period: Duration, counters: Arc<Counters>, reporter: Reporter) {
    loop {
        let since = Instant::now();
        tokio::time::sleep(period).await;
        let stats = counters.take(since);
        if !stats.is_idle() {
            reporter.mention(&Event::Stats(stats));
        }
    }
}

/// Sends `draining` when a stop begins.
pub(super) async fn draining(stop: Stop, reporter: Reporter) {
    stop.reached(Phase::Finishing).await;
    reporter.send(&Event::Draining { cause: stop.cause().unwrap_or_default() }).await;
}

/// Counts of what was done. Written by the task futures and the batch former; taken by `stats`.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) succeeded: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) dead_lettered: AtomicU64,
    pub(super) requeued: AtomicU64,
    pub(super) retried: AtomicU64,
    batches: AtomicU64,
    inputs: AtomicU64,
    tokens: AtomicU64,
    busy_us: AtomicU64,
}

impl Counters {
    /// Counts one forward pass.
    pub(super) fn batch(&self, inputs: usize, tokens: usize, took: Duration) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.inputs.fetch_add(inputs as u64, Ordering::Relaxed);
        self.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        self.busy_us.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
    }

    /// The counts since the last call, which was at `since`.
    pub(super) fn take(&self, since: Instant) -> Stats {
        let take = |counter: &AtomicU64| counter.swap(0, Ordering::Relaxed);
        Stats {
            succeeded: take(&self.succeeded),
            failed: take(&self.failed),
            dead_lettered: take(&self.dead_lettered),
            requeued: take(&self.requeued),
            retried: take(&self.retried),
            batches: take(&self.batches),
            inputs: take(&self.inputs),
            tokens: take(&self.tokens),
            busy_ms: take(&self.busy_us) / 1_000,
            span_ms: since.elapsed().as_millis() as u64,
        }
    }
}
