//! Fixtures for the tests of the fleet and of its display: slots, answers and snapshots.

use std::time::{Duration, Instant};

use super::PoolQueues;
use super::history::Snapshot;
use crate::broker::amqp::QueueDepth;
use crate::protocol::admin::{BatchBounds, LauncherAnswer, SlotReport, State};
use crate::protocol::stats::{Stage, Stats, WorkerState};

pub(crate) const GPU: &str = "GPU-5a1b2c3d-0000-1111-2222-333344445555";

/// A slot that has answered this many tasks, each alone in a batch of 500 tokens that took 20 ms. `worker` is
/// launcher/pool/index.
pub(crate) fn slot(worker: &str, device: &str, tasks: u64) -> SlotReport {
    let mut stats = Stats::default();
    stats.count_answers("succeeded", "", tasks);
    for _ in 0..tasks {
        stats.observe_stage(Stage::Compute, 0.02);
        stats.observe_batch(1, 500, 0.02);
    }
    // 1.5 GiB of memory.
    stats.now = WorkerState { connected: true, held: 3, resident: 3 << 29, ..WorkerState::default() };
    let (_, slot) = worker.split_once('/').expect("launcher/pool/index");
    let (pool, _) = slot.rsplit_once('/').expect("pool/index");
    SlotReport {
        slot: slot.into(),
        worker: worker.into(),
        pool: pool.into(),
        queue: format!("{pool}.tasks"),
        device: device.into(),
        dtype: Some("int8".into()),
        model: "sentence-transformers/all-MiniLM-L6-v2".into(),
        state: State::Busy,
        state_ms: 4_000,
        pid: Some(41),
        ready_at_ms: Some(1_000),
        batch: BatchBounds { max_tokens: Some(1_000), ..BatchBounds::default() },
        stats: Some(Box::new(stats)),
        ..SlotReport::default()
    }
}

/// The answer of a launcher that has been running for `uptime` seconds. Its name is the host's.
pub(crate) fn answer(host: &str, uptime: u64, slots: Vec<SlotReport>) -> LauncherAnswer {
    let (host, uptime_ms) = (host.to_owned(), 1_000 * uptime);
    LauncherAnswer { launcher: host.clone(), host, pid: 7, uptime_ms, slots, ..LauncherAnswer::default() }
}

/// The snapshot taken `at` seconds after `start`.
pub(crate) fn snapshot(start: Instant, at: u64, answers: Vec<LauncherAnswer>) -> Snapshot {
    let queues = [("embed.tasks", 12, 2), ("embed.dead", 2, 0), ("embed.retry-1000ms", 5, 0)];
    let depth =
        |(name, ready, consumers): (&str, _, _)| (name.to_owned(), Some(QueueDepth { ready, consumers }));
    let queues = queues.map(depth).into();
    let at_instant = start + Duration::from_secs(at);
    Snapshot { at: at_instant, wall_ms: 61_000 + 1_000 * at, answers, queues }
}

/// The queues of a pool, as the settings name them.
pub(crate) fn pool() -> PoolQueues {
    PoolQueues {
        pool: "embed".into(),
        task_queue: "embed.tasks".into(),
        further: Vec::new(),
        background: Vec::new(),
        retries: vec!["embed.retry-1000ms".into()],
        dead: "embed.dead".into(),
    }
}

/// Two launchers with two pools. One slot fails, and one is quarantined.
pub(crate) fn two_hosts(start: Instant, at: u64) -> Snapshot {
    let mut failing = slot("gpu1/embed/1", "GPU-66660000", 2 * at);
    failing.stats.as_mut().expect("counts").count_answers("failed", "invalid_request", at);
    failing.restarts = [("crashed".to_owned(), 2)].into();
    failing.last_failure = Some("CUDA_ERROR_ILLEGAL_ADDRESS in a forward pass of 12 tasks. ".repeat(4));
    failing.active = vec!["7f3e".into(), "91b0".into()];
    (failing.active_ms, failing.in_flight) = (Some(1_250), 5);
    let mut quarantined = slot("gpu2.example.com/generate/0", GPU, 0);
    quarantined.state = State::Quarantined;
    let first = vec![
        // 20 tasks a second, and 30 more at once every 6 s, so that the curve of its rates has peaks.
        slot("gpu1/embed/0", GPU, 20 * at + 30 * (at / 6)),
        failing,
        slot("gpu1/embed/2", "cpu", 9 * at),
    ];
    snapshot(start, at, vec![answer("gpu1", at, first), answer("gpu2.example.com", at, vec![quarantined])])
}
