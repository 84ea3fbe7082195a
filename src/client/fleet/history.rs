//! The history of every slot: its last report, its rates, and whether its launcher still answers. Owns
//! that state, which is bounded by the launchers that answered recently. Has no clock: time is passed in.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::rates::Rates;
use crate::broker::amqp::QueueDepth;
use crate::protocol::admin::{LauncherAnswer, SlotReport, State};
use crate::protocol::stats::Stats;

/// How long the slots of a launcher that stopped answering are shown.
pub(crate) const REMEMBERED: Duration = Duration::from_secs(30);
/// Rates are means over at least this many milliseconds. Workers report each second, so a single second may hold no
/// report, or two.
const MEAN_MS: u64 = 2_800;
/// Maximum number of counts of a slot that are kept for these means.
const MAX_COUNTS: usize = 8;

/// The answers of all launchers, and the queues of their pools, at one time.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub(crate) at: Instant,
    /// The same time, in milliseconds since 1970.
    pub(crate) wall_ms: u64,
    pub(crate) answers: Vec<LauncherAnswer>,
    pub(crate) queues: Queues,
}

/// The depth of each queue, by name; none if the queue cannot be inspected.
pub(crate) type Queues = BTreeMap<String, Option<QueueDepth>>;

/// Identifies a slot: the worker's name and the launcher's process, because two launchers may have the same name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SlotKey {
    pub(crate) worker: String,
    launcher: (String, u32),
}

/// One slot.
#[derive(Clone, Debug, Default)]
pub(crate) struct SlotHistory {
    pub(crate) key: SlotKey,
    pub(crate) report: SlotReport,
    pub(crate) rates: Rates,
    /// Milliseconds since its worker was ready, by the clock of this host.
    pub(crate) age_ms: Option<u64>,
    /// Since when its launcher has not answered, although the broker was connected.
    pub(crate) missing_since: Option<Instant>,
    /// The launcher's uptime in milliseconds, and the counts at that time; oldest first, at most [`MAX_COUNTS`].
    counts: VecDeque<(u64, Stats)>,
}

/// All slots.
#[derive(Default)]
pub(crate) struct History {
    pub(crate) slots: BTreeMap<SlotKey, SlotHistory>,
    pub(crate) queues: Queues,
    pub(crate) launchers: usize,
    /// When launchers were last queried successfully.
    pub(crate) polled_at: Option<Instant>,
    /// The message of a launcher that answered with an error.
    pub(crate) error: Option<String>,
}

impl History {
    /// Adds a snapshot, and forgets the slots that are gone.
    pub(crate) fn add(&mut self, snapshot: Snapshot) {
        let Snapshot { at, wall_ms, answers, queues } = snapshot;
        let (mut live, mut names, mut launchers) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        self.error = answers.iter().find_map(|answer| answer.error.clone());
        self.launchers = answers.len();
        for answer in answers {
            let launcher = (answer.host, answer.pid);
            for report in answer.slots {
                let key = SlotKey { worker: report.worker.clone(), launcher: launcher.clone() };
                let slot = self.slots.entry(key.clone()).or_default();
                slot.key = key.clone();
                slot.add(report, answer.uptime_ms, wall_ms);
                names.insert(key.worker.clone());
                live.insert(key);
            }
            launchers.insert(launcher);
        }
        self.slots.retain(|key, slot| {
            // The launcher has answered without this slot, or another launcher's slot has this worker's name.
            let is_gone = launchers.contains(&key.launcher) || names.contains(&key.worker);
            live.contains(key) || {
                let since = *slot.missing_since.get_or_insert(at);
                !is_gone && at.saturating_duration_since(since) < REMEMBERED
            }
        });
        (self.queues, self.polled_at) = (queues, Some(at));
    }
}

impl SlotHistory {
    fn add(&mut self, report: SlotReport, uptime_ms: u64, wall_ms: u64) {
        let now = report.stats.as_deref().cloned().unwrap_or_default();
        // A launcher that was started again, perhaps with the same process id, counts from zero.
        if self.counts.back().is_some_and(|(at, _)| *at >= uptime_ms) {
            self.counts.clear();
        }
        // The oldest count is dropped if the second oldest is old enough for the means.
        let is_old_enough =
            |count: Option<&(u64, Stats)>| count.is_some_and(|(at, _)| uptime_ms - at >= MEAN_MS);
        while is_old_enough(self.counts.get(1)) || self.counts.len() >= MAX_COUNTS {
            self.counts.pop_front();
        }
        self.rates = match self.counts.front() {
            Some((at, before)) => {
                let seconds = (uptime_ms - at) as f64 / 1e3;
                Rates::between(before, &now, seconds, report.batch.max_tokens)
            }
            None => Rates::default(),
        };
        self.counts.push_back((uptime_ms, now));
        self.age_ms = report.ready_at_ms.map(|ready| wall_ms.saturating_sub(ready));
        (self.report, self.missing_since) = (report, None);
    }

    /// Its state. A silent launcher, or a worker without a broker, takes precedence.
    pub(crate) fn state(&self) -> &'static str {
        match self.report.state {
            _ if self.missing_since.is_some() => "silent",
            state if state.is_serving() && !self.is_connected() => "no broker",
            state => state.name(),
        }
    }

    /// Whether it takes tasks now.
    pub(crate) fn works(&self) -> bool {
        self.missing_since.is_none() && self.report.state.is_serving() && self.is_connected()
    }

    /// How urgently its state needs an operator: higher is worse.
    pub(crate) fn severity(&self) -> usize {
        let rank = || State::ALL.iter().position(|(state, _)| *state == self.report.state);
        match self.state() {
            "silent" => State::ALL.len() + 1,
            "no broker" => State::ALL.len(),
            _ => rank().unwrap_or_default(),
        }
    }

    /// Tasks delivered to it and not yet settled.
    pub(crate) fn held(&self) -> u64 {
        self.report.stats.as_ref().map_or(0, |stats| stats.now.held)
    }

    /// How many times its worker was restarted.
    pub(crate) fn restarts(&self) -> u64 {
        self.report.restarts.values().sum()
    }

    /// Bytes of memory that only its worker uses.
    pub(crate) fn resident(&self) -> Option<u64> {
        self.report.stats.as_ref().map(|stats| stats.now.resident).filter(|bytes| *bytes > 0)
    }

    fn is_connected(&self) -> bool {
        self.report.stats.as_ref().is_none_or(|stats| stats.now.connected)
    }
}
