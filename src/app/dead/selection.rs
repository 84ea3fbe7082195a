//! Which letters are meant: by id, by reason, by age, and by pool where several share a dead-letter
//! queue. Pure. Owns the account of which ids have been found.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use anyhow::bail;

use super::age;
use crate::cli::DeadFilters;
use crate::config::Pool;
use crate::protocol::letter::{Letter, reasons};
use crate::shutdown::Exit;

/// See the module.
#[derive(Debug)]
pub(super) struct Selection {
    ids: Vec<String>,
    reasons: Vec<String>,
    older_than: Option<Duration>,
    newer_than: Option<Duration>,
    now: SystemTime,
    task_queue: String,
    /// Names and task queues of other pools whose letters are in this queue too.
    sharers: Vec<(String, String)>,
    found: BTreeSet<String>,
    foreign: usize,
}

impl Selection {
    /// Without ids and filters, all.
    pub(super) fn new(ids: &[String], filters: &DeadFilters, now: SystemTime) -> anyhow::Result<Self> {
        if let Some(wrong) = filters.reason.iter().find(|wanted| !reasons().any(|known| known == **wanted)) {
            let known = reasons().collect::<Vec<_>>().join(", ");
            bail!(
                anyhow::anyhow!("no letter has the reason {wrong:?}; there are: {known}")
                    .context(Exit::Usage)
            );
        }
        Ok(Self {
            ids: ids.to_vec(),
            reasons: filters.reason.clone(),
            older_than: filters.older_than,
            newer_than: filters.newer_than,
            now,
            task_queue: String::new(),
            sharers: Vec::new(),
            found: BTreeSet::new(),
            foreign: 0,
        })
    }

    /// Only those of `pool`, where others of `pools` have the same dead-letter queue.
    pub(super) fn of(mut self, pool: &Pool, pools: &[Pool]) -> Self {
        let shares = |it: &&Pool| it.name != pool.name && it.dead_letter_queue == pool.dead_letter_queue;
        let named = |it: &Pool| (it.name.clone(), it.task_queue.clone());
        self.sharers = pools.iter().filter(shares).map(named).collect();
        self.task_queue = pool.task_queue.clone();
        self
    }

    /// See [`super::desk::Desk::now`].
    pub(super) fn now(&self) -> SystemTime {
        self.now
    }

    /// See [`super::desk::Desk::by_name`].
    pub(super) fn by_name(&self) -> bool {
        !self.ids.is_empty()
    }

    /// Whether this letter is meant.
    pub(super) fn takes(&mut self, letter: &Letter<'_>) -> bool {
        if self.is_foreign(letter) {
            self.foreign += 1;
            return false;
        }
        let names: Vec<&String> = self.ids.iter().filter(|id| letter.is_named(id)).collect();
        let named = self.ids.is_empty() || !names.is_empty();
        let of_reason = || self.reasons.is_empty() || self.reasons.iter().any(|it| it == letter.reason());
        let taken = named && of_reason() && self.is_of_age(letter);
        if taken {
            self.found.extend(names.into_iter().cloned());
        }
        taken
    }

    fn is_of_age(&self, letter: &Letter<'_>) -> bool {
        if (self.older_than, self.newer_than) == (None, None) {
            return true;
        }
        let Some(age) = letter.died_at().map(|at| age(at, self.now)) else { return false };
        self.older_than.is_none_or(|than| age > than) && self.newer_than.is_none_or(|than| age <= than)
    }

    /// What does not say whose it is belongs to whoever asks.
    fn is_foreign(&self, letter: &Letter<'_>) -> bool {
        if let Some(pool) = letter.pool() {
            return self.sharers.iter().any(|(name, _)| name == pool);
        }
        let Some(queue) = letter.died_in() else { return false };
        let is_of = |tasks: &str| queue == tasks || queue.starts_with(&format!("{tasks}.retry."));
        !is_of(&self.task_queue) && self.sharers.iter().any(|(_, tasks)| is_of(tasks))
    }

    /// How many letters were passed over because they are another pool's.
    pub(super) fn foreign(&self) -> usize {
        self.foreign
    }

    /// The ids that no letter answered to.
    pub(super) fn missing(&self) -> Vec<&str> {
        self.ids.iter().filter(|id| !self.found.contains(*id)).map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::dead_letter::{Cause, Reason, dead_letter};
    use crate::protocol::{Incoming, Message, Properties, classify};

    const NOW: u64 = 1_000_000;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// A letter of this task and reason that died so many seconds ago.
    fn letter(id: &str, reason: Reason, ago: u64) -> Message {
        let properties = Properties { message_id: Some(id.into()), ..Properties::default() };
        let message = Message { properties, body: "{}".into() };
        let Incoming::Task(task) = classify(message, at(0), String::new) else { panic!("a task") };
        dead_letter(&task, &Cause { reason, error: "", worker: "host/embed/0", at: at(NOW - ago) })
    }

    fn selection(ids: &[&str], reason: &[&str], older: Option<u64>, newer: Option<u64>) -> Selection {
        let ids: Vec<String> = ids.iter().map(|&id| id.into()).collect();
        let filters = DeadFilters {
            reason: reason.iter().map(|&it| it.into()).collect(),
            older_than: older.map(Duration::from_secs),
            newer_than: newer.map(Duration::from_secs),
        };
        Selection::new(&ids, &filters, at(NOW)).unwrap()
    }

    #[test]
    fn all_that_is_asked_for_must_hold() {
        let poison = letter("a", Reason::Poison, 100);
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
            assert_eq!(selection.takes(&Letter::of(&poison)), wanted, "{selection:?}");
        }
    }

    #[test]
    fn what_has_no_time_is_of_no_age() {
        let bare = Message::default();
        let bare = Letter::of(&bare);
        assert!(selection(&[], &["unknown"], None, None).takes(&bare));
        assert!(!selection(&[], &[], Some(1), None).takes(&bare));
        assert!(!selection(&[], &[], None, Some(u64::MAX)).takes(&bare));
    }

    #[test]
    fn a_clock_that_is_ahead_makes_a_letter_new_and_not_unknown() {
        let mut ahead = letter("a", Reason::Poison, 0);
        ahead.properties.headers.insert("dead_lettered_at".into(), "2999-01-01T00:00:00Z".into());
        assert!(selection(&[], &[], None, Some(1)).takes(&Letter::of(&ahead)));
    }

    #[test]
    fn an_unknown_reason_is_an_error_that_lists_those_there_are() {
        let filters = DeadFilters { reason: vec!["poisson".into()], ..DeadFilters::default() };
        let error = Selection::new(&[], &filters, at(NOW)).unwrap_err();
        assert_eq!(error.downcast_ref(), Some(&Exit::Usage));
        let words = format!("{error:#}");
        for part in ["\"poisson\"", "poison", "delivery_limit"] {
            assert!(words.contains(part), "no {part} in {words}");
        }
    }

    #[test]
    fn the_help_teaches_every_reason() {
        use clap::CommandFactory as _;
        let program = crate::cli::Cli::command();
        let help =
            program.find_subcommand("dead").and_then(|dead| dead.get_after_help()).unwrap().to_string();
        for reason in reasons() {
            assert!(help.contains(reason), "{reason}");
        }
    }

    #[test]
    fn ids_that_no_letter_answers_to_are_named() {
        let mut selection = selection(&["a", "b", "c"], &[], None, None);
        for id in ["x", "b"] {
            selection.takes(&Letter::of(&letter(id, Reason::Poison, 1)));
        }
        assert_eq!(selection.missing(), ["a", "c"]);
    }

    #[test]
    fn where_pools_share_a_queue_the_letters_of_the_others_are_left_alone() {
        let mut selection = selection(&[], &[], None, None);
        selection.task_queue = "tasks".into();
        selection.sharers = vec![("rerank".into(), "rerank.tasks".into())];
        let mut of = |worker: &str| {
            let mut letter = letter("a", Reason::Poison, 1);
            letter.properties.headers.insert("worker".into(), worker.into());
            selection.takes(&Letter::of(&letter))
        };
        assert!(of("host/embed/0") && of("host/gone/0") && !of("host/rerank/1"));
        assert_eq!(selection.foreign(), 1);
    }
}
