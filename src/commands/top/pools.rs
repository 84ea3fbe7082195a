//! Sums up slots and queues by pool. Pure.

use std::collections::BTreeMap;

use super::history::{History, Queues, Slot};

/// The queues of a pool of the settings, by their names.
#[derive(Clone, Debug, Default)]
pub(super) struct PoolQueues {
    pub(super) pool: String,
    pub(super) task: String,
    pub(super) background: Option<String>,
    pub(super) retries: Vec<String>,
    pub(super) dead: String,
}

impl PoolQueues {
    /// The queues beside the task queue.
    pub(super) fn beside(&self) -> impl Iterator<Item = &String> {
        self.background.iter().chain(&self.retries).chain([&self.dead])
    }
}

/// How many messages wait in queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Depth {
    /// The settings of this command name no such queue.
    #[default]
    NoQueue,
    /// At least one of the queues cannot be inspected.
    Unknown,
    Messages(u64),
}

/// The slots of all launchers with the same pool and task queue, and the pool's queues.
#[derive(Clone, Debug, Default)]
pub(super) struct Total {
    pub(super) pool: String,
    pub(super) queue: String,
    pub(super) slots: usize,
    /// Slots that take tasks.
    pub(super) work: usize,
    pub(super) tasks: f64,
    pub(super) tokens: f64,
    pub(super) errors: f64,
    /// Mean share of the time that devices computed, of the slots that work.
    pub(super) busy: f64,
    pub(super) held: u64,
    pub(super) waiting: Depth,
    pub(super) consumers: Option<u32>,
    pub(super) background: Depth,
    pub(super) retry: Depth,
    pub(super) dead: Depth,
}

/// The totals of all pools, by name.
pub(super) fn totals(history: &History, known: &[PoolQueues]) -> Vec<Total> {
    let mut totals: BTreeMap<(&str, &str), Total> = BTreeMap::new();
    for slot in history.slots.values() {
        totals.entry((&slot.report.pool, &slot.report.queue)).or_default().add(slot);
    }
    let finish = |((pool, queue), mut total): ((&str, &str), Total)| {
        let queues = known.iter().find(|it| it.pool == pool && it.task == queue);
        let depth = |names: &[&String]| depth(&history.queues, names);
        (total.pool, total.queue) = (pool.to_owned(), queue.to_owned());
        total.busy /= total.work.max(1) as f64;
        total.waiting = depth(&[&total.queue]);
        total.consumers = history.queues.get(queue).copied().flatten().map(|(_, consumers)| consumers);
        if let Some(queues) = queues {
            total.background = depth(&queues.background.iter().collect::<Vec<_>>());
            total.retry = depth(&queues.retries.iter().collect::<Vec<_>>());
            total.dead = depth(&[&queues.dead]);
        }
        total
    };
    totals.into_iter().map(finish).collect()
}

impl Total {
    fn add(&mut self, slot: &Slot) {
        self.slots += 1;
        self.work += usize::from(slot.works());
        if slot.missing_since.is_some() {
            return;
        }
        self.tasks += slot.rates.tasks;
        self.tokens += slot.rates.tokens;
        self.errors += slot.rates.errors;
        self.busy += if slot.works() { slot.rates.busy } else { 0.0 };
        self.held += slot.held();
    }
}

fn depth(queues: &Queues, names: &[&String]) -> Depth {
    let ready = |name: &&String| queues.get(*name).copied().flatten().map(|(ready, _)| u64::from(ready));
    match names {
        [] => Depth::NoQueue,
        names => names.iter().map(ready).sum::<Option<u64>>().map_or(Depth::Unknown, Depth::Messages),
    }
}
