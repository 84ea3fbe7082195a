//! The worker processes of a phase, as `/proc` and the launcher's log show them: their largest memory, the processor
//! time that they took, and how many died. Owns what was sampled.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::super::fleet::field;
use crate::support::sconce::Sconce;

const SAMPLE: Duration = Duration::from_millis(500);
/// Of the times in `/proc/<pid>/stat`, on every Linux that Rust runs on.
const TICKS_A_SECOND: f64 = 100.0;

/// What is known of the workers.
pub struct Watch {
    begun: Instant,
    /// By process: its slot, the largest resident memory in KiB, and its processor time at first and at last.
    seen: BTreeMap<u32, Process>,
    /// Workers that ended though nobody stopped them.
    pub deaths: usize,
    pub took: Duration,
    /// How many there are to be.
    workers: usize,
}

struct Process {
    slot: String,
    peak_kib: u64,
    ticks: [u64; 2],
}

impl Watch {
    pub fn new(sconce: &Sconce) -> Self {
        let (begun, workers) = (Instant::now(), sconce.workers().len());
        let mut watch = Self { begun, seen: BTreeMap::new(), deaths: 0, took: Duration::ZERO, workers };
        watch.look(sconce);
        watch
    }

    /// Looks on and on.
    pub async fn sample(&mut self, sconce: &Sconce) -> Infallible {
        loop {
            self.look(sconce);
            sleep(SAMPLE).await;
        }
    }

    /// Looks for the last time, before the launcher is stopped.
    pub fn ends(&mut self, sconce: &Sconce) {
        self.look(sconce);
        self.took = self.begun.elapsed();
        // The launcher is silent about the end of a worker that said why it ends.
        self.deaths =
            (sconce.logged("worker spawned") - self.workers).max(sconce.logged("worker died slot="));
    }

    fn look(&mut self, sconce: &Sconce) {
        for line in sconce.lines_from(0).iter().filter(|line| line.contains("worker spawned")) {
            let pid = field(line, "pid").and_then(|pid| pid.parse().ok());
            let (Some(pid), Some(slot)) = (pid, field(line, "slot")) else { continue };
            let Some((peak_kib, now)) = peak_of(pid).zip(ticks_of(pid)) else { continue };
            let process = self.seen.entry(pid).or_insert(Process { slot, peak_kib, ticks: [now; 2] });
            (process.peak_kib, process.ticks[1]) = (peak_kib, now);
        }
    }

    /// In one line.
    pub fn summary(&self) -> String {
        let mut peaks = BTreeMap::<&str, u64>::new();
        for process in self.seen.values() {
            let peak = peaks.entry(&process.slot).or_default();
            *peak = process.peak_kib.max(*peak);
        }
        let peaks: Vec<_> =
            peaks.into_iter().map(|(slot, kib)| format!("{slot} {} MiB", kib / 1024)).collect();
        let ticks: u64 = self.seen.values().map(|it| it.ticks[1] - it.ticks[0]).sum();
        let cores = ticks as f64 / TICKS_A_SECOND / self.took.as_secs_f64();
        format!(
            "{} workers died; they took {cores:.2} cores for {:.0} s; largest memory: {}",
            self.deaths,
            self.took.as_secs_f64(),
            peaks.join(", ")
        )
    }
}

/// `VmHWM` of a process, in KiB.
fn peak_of(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

/// User and system time of a process, in ticks.
fn ticks_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}
