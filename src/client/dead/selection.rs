//! Decides which dead letters are selected: by id, reason, age and pool. The pool matters because several pools may
//! share a dead-letter queue, and the settings may not name all of these pools. Owns the set of found ids, and the
//! number of dead letters of other pools that were left out.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use crate::broker::Delivery;
use crate::config::TaskQueue;
use crate::protocol::dead_letter::DeadLetter;

/// Conditions for a dead letter; all given ones must hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct Filters {
    /// Its reason is one of these; empty: any.
    pub(crate) reason: Vec<String>,
    /// It is older than this. A dead letter without a time never matches.
    pub(crate) older_than: Option<Duration>,
    /// It is not older than this. A dead letter without a time never matches.
    pub(crate) newer_than: Option<Duration>,
}

/// The conditions for a dead letter, and what has matched so far.
#[derive(Debug)]
pub(crate) struct Selection {
    ids: Vec<String>,
    filters: Filters,
    pool: String,
    /// The queues of the pool, the first one first.
    queues: Vec<TaskQueue>,
    /// The time from which ages are computed.
    pub(crate) now: SystemTime,
    found: BTreeSet<String>,
    /// How many matched, but belong to another pool.
    pub(crate) of_other_pools: usize,
}

impl Selection {
    /// Without ids and filters, selects all dead letters of this pool, and those that name neither a pool nor the queue
    /// that they come from.
    pub(crate) fn new(ids: &[String], filters: Filters, pool: &str, queues: Vec<TaskQueue>) -> Self {
        Self {
            ids: ids.to_vec(),
            filters,
            pool: pool.to_owned(),
            queues,
            now: SystemTime::now(),
            found: BTreeSet::new(),
            of_other_pools: 0,
        }
    }

    /// Whether a dead letter is selected. Records its ids as found. Counts it in `of_other_pools` if only its pool
    /// excludes it.
    pub(crate) fn matches(&mut self, dead_letter: &DeadLetter<'_>) -> bool {
        let ids: Vec<&String> = self.ids.iter().filter(|id| dead_letter.has_id(id)).collect();
        let Filters { reason, older_than, newer_than } = &self.filters;
        let is_wanted = (self.ids.is_empty() || !ids.is_empty())
            && (reason.is_empty() || reason.iter().any(|it| it == dead_letter.reason()))
            && match dead_letter.age(self.now) {
                Some(age) => {
                    older_than.is_none_or(|min| age > min) && newer_than.is_none_or(|max| age <= max)
                }
                None => older_than.is_none() && newer_than.is_none(),
            };
        if !is_wanted {
            return false;
        }
        // An id selects a dead letter of any pool: the pool may have been renamed.
        if ids.is_empty() && self.is_of_another_pool(dead_letter) {
            self.of_other_pools += 1;
            return false;
        }
        self.found.extend(ids.into_iter().cloned());
        true
    }

    /// Why a matching dead letter may not be requeued; none: it may.
    pub(crate) fn refusal(&self, delivery: &Delivery) -> Option<String> {
        DeadLetter::new(&delivery.message).refusal(!self.ids.is_empty())
    }

    /// Whether a dead letter names another pool or, without a pool, comes from the queue of another one. A dead letter
    /// that names neither counts as ours.
    fn is_of_another_pool(&self, dead_letter: &DeadLetter<'_>) -> bool {
        if let Some(pool) = dead_letter.pool() {
            return pool != self.pool;
        }
        dead_letter.source_queue().is_some_and(|queue| self.own_queue(queue).is_none())
    }

    /// The queue of the pool that has this name, or a retry queue of this name.
    fn own_queue(&self, name: &str) -> Option<&TaskQueue> {
        self.queues.iter().find(|queue| {
            let suffix = name.strip_prefix(&queue.name);
            suffix.is_some_and(|suffix| suffix.is_empty() || suffix.starts_with(".retry"))
        })
    }

    /// The queue to which the task of a dead letter is published again: the one that it came from, if that is a queue of
    /// the pool, and else the first one.
    pub(crate) fn queue_of(&self, dead_letter: &DeadLetter<'_>) -> &str {
        let from = dead_letter.queue().or_else(|| dead_letter.source_queue());
        let own = from.and_then(|name| self.own_queue(name)).filter(|queue| !queue.returns_to_first);
        own.or(self.queues.first()).map_or("", |queue| &queue.name)
    }

    /// The names of the pool's queues, for messages to users.
    pub(crate) fn queue_names(&self) -> String {
        let names: Vec<&str> = self.queues.iter().map(|queue| queue.name.as_str()).collect();
        names.join(", ")
    }

    /// The ids without a dead letter.
    pub(crate) fn missing(&self) -> Vec<&str> {
        self.ids.iter().filter(|id| !self.found.contains(*id)).map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Headers, Message, Properties, Value};

    const NOW: u64 = 1_000_000;

    /// A poison dead letter of this worker, this many seconds old.
    fn dead(id: &str, worker: &str, age: i64) -> Message {
        let at = jiff::Timestamp::from_second(NOW as i64 - age).unwrap().to_string();
        let headers = [
            ("reason", "poison"),
            ("error", ""),
            ("task_id", id),
            ("worker", worker),
            ("dead_lettered_at", &at),
        ];
        let headers = headers.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        Message { properties: Properties { headers, ..Properties::default() }, body: "{}".into() }
    }

    fn selection(ids: &[&str], reason: &[&str], older: Option<u64>, newer: Option<u64>) -> Selection {
        let ids: Vec<String> = ids.iter().map(|&id| id.into()).collect();
        let filters = Filters {
            reason: reason.iter().map(|&it| it.into()).collect(),
            older_than: older.map(Duration::from_secs),
            newer_than: newer.map(Duration::from_secs),
        };
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(NOW);
        let background = TaskQueue { returns_to_first: true, ..TaskQueue::new("background") };
        let queues = vec![TaskQueue::new("tasks"), TaskQueue::new("other"), background];
        Selection { now, ..Selection::new(&ids, filters, "embed", queues) }
    }

    #[test]
    fn a_dead_letter_must_meet_all_conditions() {
        let poison = dead("a", "host/embed/0", 100);
        for (mut selection, wanted) in [
            (selection(&[], &[], None, None), true),
            (selection(&["b", "a"], &[], None, None), true),
            (selection(&["b"], &[], None, None), false),
            (selection(&[], &["attempts", "poison"], None, None), true),
            (selection(&["a"], &["attempts"], None, None), false),
            (selection(&[], &[], Some(99), None), true),
            (selection(&[], &[], Some(100), None), false),
            (selection(&[], &[], None, Some(100)), true),
            (selection(&[], &[], None, Some(99)), false),
            (selection(&[], &[], Some(50), Some(150)), true),
        ] {
            assert_eq!(selection.matches(&DeadLetter::new(&poison)), wanted, "{selection:?}");
        }
    }

    #[test]
    fn without_a_time_there_is_no_age_and_a_future_time_counts_as_new() {
        let bare = Message::default();
        let bare = DeadLetter::new(&bare);
        assert!(selection(&[], &["unknown"], None, None).matches(&bare));
        assert!(!selection(&[], &[], Some(1), None).matches(&bare));
        assert!(!selection(&[], &[], None, Some(u64::MAX)).matches(&bare));
        let ahead = dead("a", "host/embed/0", -1_000);
        assert!(selection(&[], &[], None, Some(1)).matches(&DeadLetter::new(&ahead)));
    }

    #[test]
    fn ids_without_a_dead_letter_are_reported() {
        let mut selection = selection(&["a", "b", "c"], &[], None, None);
        for id in ["x", "b"] {
            selection.matches(&DeadLetter::new(&dead(id, "host/embed/0", 1)));
        }
        assert_eq!(selection.missing(), ["a", "c"]);
    }

    /// A message dead-lettered by RabbitMQ.
    fn dropped_from(queue: &str) -> Message {
        let death = Headers::from([("reason".into(), "expired".into()), ("queue".into(), queue.into())]);
        let headers = Headers::from([("x-death".into(), Value::Array(vec![Value::Table(death)]))]);
        Message { properties: Properties { headers, ..Properties::default() }, body: "{}".into() }
    }

    #[test]
    fn dead_letters_of_other_pools_are_left_out_and_counted() {
        let mut selection = selection(&[], &[], None, None);
        let mut by = |worker: &str| selection.matches(&DeadLetter::new(&dead("a", worker, 1)));
        assert!(by("host/embed/0") && by("elsewhere/embed/7"));
        assert!(!by("host/rerank/1") && !by("host/rerank/2") && !by("host/embed.old/0"));
        let mut from = |queue: &str| selection.matches(&DeadLetter::new(&dropped_from(queue)));
        assert!(from("tasks") && from("tasks.retry-1000ms") && from("other") && from("background"));
        assert!(!from("tasks.other") && !from("rerank.tasks"));
        assert!(selection.matches(&DeadLetter::new(&Message::default())), "it does not say whose it is");
        assert_eq!(selection.of_other_pools, 5);
    }

    #[test]
    fn a_task_returns_to_the_queue_that_it_came_from_if_that_is_one_of_the_pool() {
        let selection = selection(&[], &[], None, None);
        let from_worker = |queue: Option<&str>| {
            let mut message = dead("a", "host/embed/0", 1);
            if let Some(queue) = queue {
                message.properties.headers.insert("queue".into(), queue.into());
            }
            selection.queue_of(&DeadLetter::new(&message)).to_owned()
        };
        let queues = [Some("other"), Some("tasks"), Some("background"), Some("of a stranger"), None];
        assert_eq!(queues.map(from_worker), ["other", "tasks", "tasks", "tasks", "tasks"]);
        let from_broker = |queue| selection.queue_of(&DeadLetter::new(&dropped_from(queue))).to_owned();
        let queues = ["other", "other.retry-1000ms", "background", "of a stranger"];
        assert_eq!(queues.map(from_broker), ["other", "other", "tasks", "tasks"]);
    }

    #[test]
    fn a_dead_letter_of_another_pool_is_matched_only_by_its_id() {
        let theirs = dead("a", "host/rerank/0", 1);
        let theirs = DeadLetter::new(&theirs);
        let mut by_id = selection(&["a"], &[], None, None);
        assert!(by_id.matches(&theirs) && by_id.missing().is_empty() && by_id.of_other_pools == 0);
        let mut by_reason = selection(&[], &["poison"], None, None);
        assert!(!by_reason.matches(&theirs) && by_reason.of_other_pools == 1);
        let mut by_another = selection(&[], &["attempts"], None, None);
        assert!(!by_another.matches(&theirs) && by_another.of_other_pools == 0, "nobody asked for it");
    }
}
