//! Records which tasks a worker had when it died, and how many there were. A task is poison when so many workers died
//! with this task alone (`launcher.poison_deaths`) that chance, or somebody's SIGKILL, is an unlikely cause. Owns the
//! records of one launcher, which are lost when it ends. Every slot sends them to its workers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::protocol::control::{CrashRecord, CrashTail, TaskName};

/// The most records. Those of the latest deaths are kept. With their crash tails they fit into the `start` line.
const MAX_RECORDS: usize = 2_000;
/// The most records of poison tasks among these. Only they carry crash tails.
const MAX_POISON: usize = 200;

/// The crash records of all tasks. Shared by all slots.
pub(super) struct Register {
    /// A task is poison after this many deaths of workers that had only this task.
    limit: AtomicU32,
    /// Oldest death first. Locked for one pass over the records.
    tasks: Mutex<VecDeque<CrashRecord>>,
    /// The records that are sent to workers. Written here, read by the slots.
    known: watch::Sender<Vec<CrashRecord>>,
}

impl Register {
    pub(super) fn new(limit: u32) -> Self {
        Self { limit: limit.into(), tasks: Mutex::default(), known: watch::Sender::new(Vec::new()) }
    }

    pub(super) fn set_limit(&self, limit: u32) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Records that a worker died with these tasks. `isolated`: it had no others. Returns whether one of them has become
    /// poison.
    pub(super) fn died(&self, with: &[TaskName], isolated: bool, last: &CrashTail) -> bool {
        let among = u32::try_from(with.len()).unwrap_or(u32::MAX);
        let alone = isolated && among == 1;
        let mut tasks = self.tasks.lock();
        let mut found_poison = false;
        for name in with {
            let known = tasks.iter().position(|deaths| deaths.task == name.fingerprint);
            let mut deaths = known.and_then(|at| tasks.remove(at)).unwrap_or_else(|| CrashRecord {
                task: name.fingerprint.clone(),
                count: 0,
                alone: 0,
                among,
                poison: None,
            });
            // The death of an isolated group does not count. It only narrows down which of its tasks is to blame.
            deaths.count += u32::from(!isolated || alone);
            deaths.alone += u32::from(alone);
            deaths.among = deaths.among.min(among);
            if deaths.alone >= self.limit.load(Ordering::Relaxed) {
                found_poison |= deaths.poison.replace(last.clone()).is_none();
            }
            tasks.push_back(deaths);
        }
        forget(&mut tasks, MAX_POISON, |deaths| deaths.poison.is_some());
        forget(&mut tasks, MAX_RECORDS - MAX_POISON, |deaths| deaths.poison.is_none());
        self.known.send_replace(tasks.iter().cloned().collect());
        found_poison
    }

    /// Removes the record of an isolated task that was finished without its worker dying, unless it is poison.
    pub(super) fn survived(&self, task: &TaskName) {
        let mut tasks = self.tasks.lock();
        tasks.retain(|deaths| deaths.task != task.fingerprint || deaths.poison.is_some());
    }

    /// The records, with later changes.
    pub(super) fn known(&self) -> watch::Receiver<Vec<CrashRecord>> {
        self.known.subscribe()
    }
}

/// Removes the oldest records of a kind, beyond `most`.
fn forget(tasks: &mut VecDeque<CrashRecord>, most: usize, kind: impl Fn(&CrashRecord) -> bool) {
    let mut surplus = tasks.iter().filter(|entry| kind(entry)).count().saturating_sub(most);
    tasks.retain(|entry| {
        let is_removed = surplus > 0 && kind(entry);
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

    fn last(exit: &str) -> CrashTail {
        CrashTail { exit: exit.to_owned(), log: String::new() }
    }

    #[test]
    fn a_task_is_poison_at_its_third_death_alone_and_its_batch_mates_never() {
        let register = Register::new(3);
        let known = register.known();
        let died = |tasks: &[&str], exit: &str| register.died(&names(tasks), tasks.len() == 1, &last(exit));
        assert!(!died(&["a", "b", "c"], "0") && !died(&["a"], "1") && !died(&["b"], "1"));
        assert!(!died(&["a"], "2") && died(&["a"], "3"));
        let known = known.borrow();
        let of = |task: &str| known.iter().find(|it| it.task == task).expect("known").clone();
        assert_eq!((of("a").count, of("a").poison), (4, Some(last("3"))));
        assert_eq!((of("b").count, of("b").among, of("b").poison), (2, 1, None));
        assert_eq!((of("c").count, of("c").among, of("c").poison), (1, 3, None));
    }

    #[test]
    fn deaths_of_isolated_groups_do_not_count_but_narrow_down_the_suspects() {
        let register = Register::new(3);
        let known = register.known();
        let seen = || {
            let known = known.borrow();
            known.iter().map(|it| (it.task.clone(), it.count, it.among)).collect::<Vec<_>>()
        };
        register.died(&names(&["a", "b", "c", "d"]), false, &last("0"));
        register.died(&names(&["a", "b"]), true, &last("1"));
        let row = |task: &str, count, among| (task.to_owned(), count, among);
        assert_eq!(seen(), [row("c", 1, 4), row("d", 1, 4), row("a", 1, 2), row("b", 1, 2)]);
        register.died(&names(&["b"]), true, &last("2"));
        assert_eq!(seen().last(), Some(&row("b", 2, 1)));
    }

    #[test]
    fn a_task_that_its_worker_survives_loses_its_record() {
        let register = Register::new(2);
        let task = &names(&["a"])[..];
        assert!(!register.died(task, true, &last("1")));
        register.survived(&task[0]);
        assert!(!register.died(task, true, &last("2")) && register.died(task, true, &last("3")));
        register.survived(&task[0]);
        assert!(register.known().borrow()[0].poison.is_some(), "poison stays recorded");
    }

    #[test]
    fn records_are_bounded_and_do_not_displace_poison_tasks() {
        let register = Register::new(1);
        register.died(&names(&["poison"]), true, &last("x"));
        let many: Vec<String> = (0..2 * MAX_RECORDS).map(|n| n.to_string()).collect();
        register.died(&names(&many.iter().map(String::as_str).collect::<Vec<_>>()), false, &last("x"));
        for n in 0..MAX_POISON - 1 {
            register.died(&names(&[&format!("p{n}")]), true, &last("x"));
        }
        let known = register.known();
        assert!(known.borrow().len() <= MAX_RECORDS);
        assert_eq!(known.borrow().iter().filter(|it| it.poison.is_some()).count(), MAX_POISON);
        assert!(known.borrow().iter().any(|it| it.task == "poison"));
        assert!(known.borrow().iter().all(|it| it.task != "0"), "the oldest is removed first");
    }
}
