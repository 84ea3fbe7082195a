//! Records which tasks a worker had when it died, and how many there were. A task is poison when
//! `launcher.poison_deaths` workers have died while they had no other task: so many that chance, or somebody's SIGKILL,
//! is an unlikely cause. Owns the records of one launcher, which are lost when it ends. Every slot sends them to its
//! workers.

use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::watch;

use crate::protocol::control::{CrashRecord, CrashTail, TaskName};

/// The maximum number of records. The oldest are removed. With their crash tails they fit into the `start` line.
const MAX_RECORDS: usize = 2_000;
/// The maximum number of records of poison tasks among these. Only records of poison tasks have crash tails.
const MAX_POISON: usize = 200;

/// The crash records of all tasks. Shared by all slots.
pub(super) struct CrashRegister {
    /// A task is poison after this many deaths of workers that had only this task.
    poison_deaths: AtomicU32,
    /// Oldest death first. Written here, read by the slots, which send them to their workers.
    records: watch::Sender<Vec<CrashRecord>>,
}

impl CrashRegister {
    pub(super) fn new(poison_deaths: u32) -> Self {
        Self { poison_deaths: poison_deaths.into(), records: watch::Sender::default() }
    }

    pub(super) fn set_poison_deaths(&self, poison_deaths: u32) {
        self.poison_deaths.store(poison_deaths, Ordering::Relaxed);
    }

    /// Records that a worker died with these tasks. `isolated`: it had no others. Returns whether one of them has
    /// become poison.
    pub(super) fn record_death(&self, tasks: &[TaskName], isolated: bool, tail: &CrashTail) -> bool {
        let among = u32::try_from(tasks.len()).unwrap_or(u32::MAX);
        let alone = isolated && among == 1;
        let mut found_poison = false;
        self.records.send_modify(|records| {
            for name in tasks {
                let index = records.iter().position(|record| record.task == name.fingerprint);
                let mut record = index.map(|index| records.remove(index)).unwrap_or_else(|| CrashRecord {
                    task: name.fingerprint.clone(),
                    count: 0,
                    alone: 0,
                    among,
                    poison: None,
                });
                // The death of an isolated group does not count. It only narrows down which of its tasks is to blame.
                record.count += u32::from(!isolated || alone);
                record.alone += u32::from(alone);
                record.among = record.among.min(among);
                if record.alone >= self.poison_deaths.load(Ordering::Relaxed) {
                    found_poison |= record.poison.replace(tail.clone()).is_none();
                }
                records.push(record);
            }
            remove_oldest(records, MAX_POISON, |record| record.poison.is_some());
            remove_oldest(records, MAX_RECORDS - MAX_POISON, |record| record.poison.is_none());
        });
        found_poison
    }

    /// Removes the record of an isolated task that its worker survived, unless the task is poison. Running workers are
    /// not told, because the list is long; those that start later do not get the record.
    pub(super) fn record_survival(&self, task: &TaskName) {
        let stays = |record: &CrashRecord| record.task != task.fingerprint || record.poison.is_some();
        self.records.send_if_modified(|records| {
            records.retain(stays);
            false
        });
    }

    /// The records, with later changes.
    pub(super) fn subscribe(&self) -> watch::Receiver<Vec<CrashRecord>> {
        self.records.subscribe()
    }
}

/// Removes the oldest records of a kind, so that at most `max` of them are left.
fn remove_oldest(records: &mut Vec<CrashRecord>, max: usize, is_kind: impl Fn(&CrashRecord) -> bool) {
    let mut surplus = records.iter().filter(|record| is_kind(record)).count().saturating_sub(max);
    records.retain(|record| {
        let is_removed = surplus > 0 && is_kind(record);
        surplus -= usize::from(is_removed);
        !is_removed
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(fingerprints: &[&str]) -> Vec<TaskName> {
        let name = |it: &&str| TaskName { id: format!("id {it}"), fingerprint: (*it).to_owned() };
        fingerprints.iter().map(name).collect()
    }

    fn tail(exit: &str) -> CrashTail {
        CrashTail { exit: exit.to_owned(), log: String::new() }
    }

    #[test]
    fn a_task_is_poison_at_its_third_death_alone_and_its_batch_mates_never() {
        let register = CrashRegister::new(3);
        let known = register.subscribe();
        let died =
            |tasks: &[&str], exit: &str| register.record_death(&names(tasks), tasks.len() == 1, &tail(exit));
        assert!(!died(&["a", "b", "c"], "0") && !died(&["a"], "1") && !died(&["b"], "1"));
        assert!(!died(&["a"], "2") && died(&["a"], "3"));
        let known = known.borrow();
        let record = |task: &str| known.iter().find(|it| it.task == task).expect("known").clone();
        assert_eq!((record("a").count, record("a").poison), (4, Some(tail("3"))));
        assert_eq!((record("b").count, record("b").among, record("b").poison), (2, 1, None));
        assert_eq!((record("c").count, record("c").among, record("c").poison), (1, 3, None));
    }

    #[test]
    fn deaths_of_isolated_groups_do_not_count_but_narrow_down_the_suspects() {
        let register = CrashRegister::new(3);
        let known = register.subscribe();
        let seen = || {
            let known = known.borrow();
            known.iter().map(|it| (it.task.clone(), it.count, it.among)).collect::<Vec<_>>()
        };
        register.record_death(&names(&["a", "b", "c", "d"]), false, &tail("0"));
        register.record_death(&names(&["a", "b"]), true, &tail("1"));
        let row = |task: &str, count, among| (task.to_owned(), count, among);
        assert_eq!(seen(), [row("c", 1, 4), row("d", 1, 4), row("a", 1, 2), row("b", 1, 2)]);
        register.record_death(&names(&["b"]), true, &tail("2"));
        assert_eq!(seen().last(), Some(&row("b", 2, 1)));
    }

    #[test]
    fn a_task_that_its_worker_survives_loses_its_record() {
        let register = CrashRegister::new(2);
        let task = &names(&["a"])[..];
        assert!(!register.record_death(task, true, &tail("1")));
        register.record_survival(&task[0]);
        assert!(register.subscribe().borrow().is_empty(), "a worker that starts now does not get it");
        assert!(
            !register.record_death(task, true, &tail("2")) && register.record_death(task, true, &tail("3"))
        );
        register.record_survival(&task[0]);
        assert!(register.subscribe().borrow()[0].poison.is_some(), "poison stays recorded");
    }

    #[test]
    fn records_are_bounded_and_do_not_displace_poison_tasks() {
        let register = CrashRegister::new(1);
        register.record_death(&names(&["poison"]), true, &tail("x"));
        let many: Vec<String> = (0..2 * MAX_RECORDS).map(|n| n.to_string()).collect();
        register.record_death(
            &names(&many.iter().map(String::as_str).collect::<Vec<_>>()),
            false,
            &tail("x"),
        );
        for n in 0..MAX_POISON - 1 {
            register.record_death(&names(&[&format!("p{n}")]), true, &tail("x"));
        }
        let known = register.subscribe();
        assert!(known.borrow().len() <= MAX_RECORDS);
        assert_eq!(known.borrow().iter().filter(|it| it.poison.is_some()).count(), MAX_POISON);
        assert!(known.borrow().iter().any(|it| it.task == "poison"));
        assert!(known.borrow().iter().all(|it| it.task != "0"), "the oldest is removed first");
    }
}
