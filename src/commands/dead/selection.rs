//! Which letters are meant: by id, by reason, by age, and by pool, since several may share a dead-letter
//! queue and no settings know them all. Pure. Owns the account of which ids have been found, and of whose
//! letters were passed over.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use anyhow::bail;

use super::{age, view};
use crate::cli::DeadFilters;
use crate::protocol::dead_letter::{DeadLetter, reasons};
use crate::protocol::shorten;
use crate::shutdown::Exit;

/// Most owners of other letters that are told apart.
const OWNERS: usize = 8;
/// Longest name of one.
const NAME_BYTES: usize = 100;

/// The conditions that a letter must meet, and what has met them so far.
#[derive(Debug)]
pub(super) struct Selection {
    ids: Vec<String>,
    reasons: Vec<String>,
    older_than: Option<Duration>,
    newer_than: Option<Duration>,
    now: SystemTime,
    pool: String,
    task_queue: String,
    found: BTreeSet<String>,
    /// Whose letters were passed over, and how many of each.
    foreign: BTreeMap<String, usize>,
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
            pool: String::new(),
            task_queue: String::new(),
            found: BTreeSet::new(),
            foreign: BTreeMap::new(),
        })
    }

    /// Only those of this pool, and of nobody.
    pub(super) fn of(self, pool: &str, task_queue: &str) -> Self {
        Self { pool: pool.to_owned(), task_queue: task_queue.to_owned(), ..self }
    }

    /// See [`super::session::BrowserSession::now`].
    pub(super) fn now(&self) -> SystemTime {
        self.now
    }

    /// See [`super::session::BrowserSession::by_name`].
    pub(super) fn by_name(&self) -> bool {
        !self.ids.is_empty()
    }

    /// Whether this letter is meant.
    pub(super) fn takes(&mut self, letter: &DeadLetter<'_>) -> bool {
        let names: Vec<&String> = self.ids.iter().filter(|id| letter.has_id(id)).collect();
        let named = self.ids.is_empty() || !names.is_empty();
        let of_reason = || self.reasons.is_empty() || self.reasons.iter().any(|it| it == letter.reason());
        if !(named && of_reason() && self.is_of_age(letter)) {
            return false;
        }
        // Who gives an id means that letter, whosever it is: a pool may have had another name.
        if names.is_empty()
            && let Some(owner) = self.owner(letter)
        {
            let is_known = self.foreign.contains_key(&owner) || self.foreign.len() < OWNERS;
            *self.foreign.entry(if is_known { owner } else { "further ones".into() }).or_default() += 1;
            return false;
        }
        self.found.extend(names.into_iter().cloned());
        true
    }

    fn is_of_age(&self, letter: &DeadLetter<'_>) -> bool {
        if (self.older_than, self.newer_than) == (None, None) {
            return true;
        }
        let Some(age) = letter.dead_lettered_at().map(|at| age(at, self.now)) else { return false };
        self.older_than.is_none_or(|than| age > than) && self.newer_than.is_none_or(|than| age <= than)
    }

    /// Whose it is if not ours. What does not say whose it is belongs to whoever asks.
    fn owner(&self, letter: &DeadLetter<'_>) -> Option<String> {
        if let Some(pool) = letter.pool() {
            return (pool != self.pool).then(|| format!("pool {}", shorten(pool, NAME_BYTES)));
        }
        let queue = letter.source_queue()?;
        let waits = queue.strip_prefix(&self.task_queue).and_then(|rest| rest.strip_prefix(".retry"));
        let ours = queue == self.task_queue || waits.is_some();
        (!ours).then(|| format!("queue {}", shorten(queue, NAME_BYTES)))
    }

    /// How many letters were passed over because they are another's, and whose; none: none were.
    pub(super) fn foreign(&self) -> Option<String> {
        let count: usize = self.foreign.values().sum();
        let whose: Vec<_> = self.foreign.iter().map(|(owner, count)| format!("{count} of {owner}")).collect();
        (count > 0).then(|| format!("{} left out: {}", view::letters(count), whose.join(", ")))
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
    use crate::protocol::{Headers, Incoming, Message, Properties, Value, classify};

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
        Selection::new(&ids, &filters, at(NOW)).unwrap().of("embed", "tasks")
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
            assert_eq!(selection.takes(&DeadLetter::of(&poison)), wanted, "{selection:?}");
        }
    }

    #[test]
    fn what_has_no_time_is_of_no_age() {
        let bare = Message::default();
        let bare = DeadLetter::of(&bare);
        assert!(selection(&[], &["unknown"], None, None).takes(&bare));
        assert!(!selection(&[], &[], Some(1), None).takes(&bare));
        assert!(!selection(&[], &[], None, Some(u64::MAX)).takes(&bare));
    }

    #[test]
    fn a_clock_that_is_ahead_makes_a_letter_new_and_not_unknown() {
        let mut ahead = letter("a", Reason::Poison, 0);
        ahead.properties.headers.insert("dead_lettered_at".into(), "2999-01-01T00:00:00Z".into());
        assert!(selection(&[], &[], None, Some(1)).takes(&DeadLetter::of(&ahead)));
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
            selection.takes(&DeadLetter::of(&letter(id, Reason::Poison, 1)));
        }
        assert_eq!(selection.missing(), ["a", "c"]);
    }

    /// As RabbitMQ writes it.
    fn died_in(queue: &str) -> Message {
        let death = Headers::from([("reason".into(), "expired".into()), ("queue".into(), queue.into())]);
        let headers = Headers::from([("x-death".into(), Value::Array(vec![Value::Table(death)]))]);
        Message { properties: Properties { headers, ..Properties::default() }, body: "{}".into() }
    }

    #[test]
    fn letters_of_other_pools_are_left_alone_also_of_those_that_nobody_knows_here() {
        let mut selection = selection(&[], &[], None, None);
        let mut of = |worker: &str| {
            let mut letter = letter("a", Reason::Poison, 1);
            letter.properties.headers.insert("worker".into(), worker.into());
            selection.takes(&DeadLetter::of(&letter))
        };
        assert!(of("host/embed/0") && of("elsewhere/embed/7"));
        assert!(!of("host/rerank/1") && !of("host/rerank/2") && !of("host/embed.old/0"));
        let mut died = |queue: &str| selection.takes(&DeadLetter::of(&died_in(queue)));
        assert!(died("tasks") && died("tasks.retry.1000ms"));
        assert!(!died("tasks.other") && !died("rerank.tasks"));
        assert!(selection.takes(&DeadLetter::of(&Message::default())), "it says of nobody that it is theirs");
        assert_eq!(
            selection.foreign().as_deref(),
            Some(
                "5 letters left out: 1 of pool embed.old, 2 of pool rerank, 1 of queue rerank.tasks, \
                 1 of queue tasks.other"
            )
        );
    }

    #[test]
    fn a_letter_of_another_pool_is_meant_by_its_id_alone() {
        let mut theirs = letter("a", Reason::Poison, 1);
        theirs.properties.headers.insert("worker".into(), "host/rerank/0".into());
        let theirs = DeadLetter::of(&theirs);
        let mut by_id = selection(&["a"], &[], None, None);
        assert!(by_id.takes(&theirs) && by_id.missing().is_empty() && by_id.foreign().is_none());
        let mut by_reason = selection(&[], &["poison"], None, None);
        assert!(!by_reason.takes(&theirs) && by_reason.foreign().is_some());
        let mut by_another = selection(&[], &["attempts"], None, None);
        assert!(!by_another.takes(&theirs) && by_another.foreign().is_none(), "nobody asked for it");
    }

    #[test]
    fn few_owners_are_told_apart() {
        let mut selection = selection(&[], &[], None, None);
        for number in 0..20 {
            selection.takes(&DeadLetter::of(&died_in(&format!("queue-{number:02}"))));
        }
        let told = selection.foreign().unwrap();
        assert!(told.starts_with("20 letters") && told.contains("12 of further ones"), "{told}");
    }
}
