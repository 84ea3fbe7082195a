//! Sums up slots and queues by pool. Does no I/O.

use std::collections::BTreeMap;

use super::history::{History, Queues, SlotHistory};
use crate::broker::amqp::retry_queues;
use crate::config::{Pool, TaskQueue};

/// The names of the queues of a pool in the settings.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolQueues {
    pub(crate) pool: String,
    pub(crate) task_queue: String,
    /// The further queues that tasks come from, without background queues.
    pub(crate) further: Vec<String>,
    pub(crate) background: Vec<String>,
    pub(crate) retries: Vec<String>,
    pub(crate) dead: String,
}

impl PoolQueues {
    /// The queues of this pool.
    pub(crate) fn of(pool: &Pool) -> Self {
        let queues = pool.queues();
        let names = |is_wanted: &dyn Fn(&TaskQueue) -> bool| -> Vec<String> {
            queues.iter().skip(1).filter(|it| is_wanted(it)).map(|it| it.name.clone()).collect()
        };
        Self {
            pool: pool.name.clone(),
            task_queue: pool.task_queue.clone(),
            further: names(&|queue| !queue.background),
            background: names(&|queue| queue.background),
            retries: retry_queues(pool),
            dead: pool.dead_letter_queue.clone(),
        }
    }

    /// All queues except the first.
    pub(crate) fn other_queues(&self) -> impl Iterator<Item = &String> {
        self.further.iter().chain(&self.background).chain(&self.retries).chain([&self.dead])
    }
}

/// How many messages wait in queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Depth {
    /// The settings of this command name no such queue.
    #[default]
    NoQueue,
    /// At least one of the queues cannot be inspected.
    Unknown,
    Messages(u64),
}

/// The slots of all launchers with the same pool and task queue, and the pool's queues.
#[derive(Clone, Debug, Default)]
pub(crate) struct Total {
    pub(crate) pool: String,
    pub(crate) queue: String,
    pub(crate) slots: usize,
    /// Slots that take tasks.
    pub(crate) working: usize,
    /// Tasks answered per second.
    pub(crate) tasks: f64,
    /// Tokens computed per second.
    pub(crate) tokens: f64,
    /// Tasks answered with an error per second.
    pub(crate) errors: f64,
    /// Mean share of the time that the devices of working slots computed, from 0 to 1.
    pub(crate) busy: f64,
    /// Tasks delivered and not yet settled.
    pub(crate) held: u64,
    /// Messages in the queues that tasks come from, without background queues.
    pub(crate) waiting: Depth,
    /// The same for each of several queues, with its name.
    pub(crate) by_queue: Vec<(String, Depth)>,
    /// Consumers of the task queue; none if it cannot be inspected.
    pub(crate) consumers: Option<u32>,
    pub(crate) background: Depth,
    pub(crate) retry: Depth,
    pub(crate) dead: Depth,
}

/// The totals of all pools, by name. `pool_queues` are the queues that the settings name.
pub(crate) fn totals(history: &History, pool_queues: &[PoolQueues]) -> Vec<Total> {
    let mut totals: BTreeMap<(&str, &str), Total> = BTreeMap::new();
    for slot in history.slots.values() {
        totals.entry((&slot.report.pool, &slot.report.queue)).or_default().add(slot);
    }
    let finish = |((pool, queue), mut total): ((&str, &str), Total)| {
        let queues = pool_queues.iter().find(|it| it.pool == pool && it.task_queue == queue);
        let depth = |names: &[&String]| depth(&history.queues, names);
        (total.pool, total.queue) = (pool.to_owned(), queue.to_owned());
        total.busy /= total.working.max(1) as f64;
        let further: Vec<&String> = queues.iter().flat_map(|queues| &queues.further).collect();
        let tasks: Vec<&String> = [&total.queue].into_iter().chain(further).collect();
        total.waiting = depth(&tasks);
        if tasks.len() > 1 {
            total.by_queue = tasks.into_iter().map(|name| (name.clone(), depth(&[name]))).collect();
        }
        total.consumers = history.queues.get(queue).copied().flatten().map(|depth| depth.consumers);
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
    fn add(&mut self, slot: &SlotHistory) {
        self.slots += 1;
        self.working += usize::from(slot.works());
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
    let ready = |name: &&String| queues.get(*name).copied().flatten().map(|depth| u64::from(depth.ready));
    match names {
        [] => Depth::NoQueue,
        names => names.iter().map(ready).sum::<Option<u64>>().map_or(Depth::Unknown, Depth::Messages),
    }
}
