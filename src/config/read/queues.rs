//! Reads `[[pool.queue]]`: the queues that a pool's tasks come from. Checks their form, not whether they exist.

use std::collections::BTreeSet;

use ::config::{Value, ValueKind};
use serde::{Deserialize, Serialize};

use super::names::task_queue;
use super::reader::Expected;
use super::values::{parse_array, switch, typed};

/// The most queues of a pool. Each has a channel, a prefetch and retry queues of its own.
const MAX_QUEUES: usize = 32;
/// The range of shares. Both ends are far beyond any use; they keep sums exact.
const MIN_SHARE: f64 = 0.001;
const MAX_SHARE: f64 = 1_000.0;

/// A queue that a pool's tasks come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskQueue {
    /// The queue's name.
    pub name: String,
    /// How much of the devices its tasks get while those of other queues wait, in thousandths.
    pub share: u32,
    /// Whether its tasks only fill up batches.
    pub background: bool,
    /// Whether its tasks return through the pool's first queue when they are tried again, instead of through retry
    /// queues of their own. True only for the queue of the setting `background_queue`.
    pub returns_to_first: bool,
}

impl TaskQueue {
    /// A queue with a share of 1.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), share: 1_000, background: false, returns_to_first: false }
    }
}

/// A list of tables `{ name = "…", share = 2, background = true }`.
pub(crate) fn task_queues(value: &Value) -> Result<Vec<TaskQueue>, Expected> {
    let items = match &value.kind {
        ValueKind::String(written) => return task_queues(&parse_array(written).ok_or_else(expected_list)?),
        ValueKind::Array(items) => items,
        _ => return Err(expected_list()),
    };
    if items.len() > MAX_QUEUES {
        return Err(format!("at most {MAX_QUEUES} queues, got {}", items.len()));
    }
    let queues: Vec<TaskQueue> = items.iter().map(item).collect::<Result<_, _>>()?;
    let mut names = BTreeSet::new();
    match queues.iter().find(|queue| !names.insert(queue.name.as_str())) {
        Some(queue) => Err(format!("each queue once, got {:?} twice", queue.name)),
        None => Ok(queues),
    }
}

fn item(value: &Value) -> Result<TaskQueue, Expected> {
    let ValueKind::Table(fields) = &value.kind else { return Err(expected_list()) };
    if let Some(unknown) = fields.keys().find(|key| !["name", "share", "background"].contains(&key.as_str()))
    {
        return Err(format!("queues with the keys name, share and background, got {unknown}"));
    }
    let name = fields.get("name").ok_or_else(|| "a name for each queue".to_owned())?;
    let mut queue = TaskQueue::new(task_queue(name)?);
    if let Some(value) = fields.get("share") {
        queue.share = share(value).ok_or_else(|| {
            format!("share of {:?} to be a number from {MIN_SHARE} to {MAX_SHARE}", queue.name)
        })?;
    }
    if let Some(value) = fields.get("background") {
        queue.background =
            switch(value).map_err(|expected| format!("background of {:?} to be {expected}", queue.name))?;
    }
    Ok(queue)
}

/// A share in thousandths.
fn share(value: &Value) -> Option<u32> {
    let share = match typed(value).kind {
        ValueKind::Float(share) => share,
        ValueKind::I64(share) => share as f64,
        _ => return None,
    };
    (MIN_SHARE..=MAX_SHARE).contains(&share).then(|| (share * 1_000.0).round() as u32)
}

fn expected_list() -> Expected {
    "a list of queues, each written as [[pool.queue]] with a name".to_owned()
}
