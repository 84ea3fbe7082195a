//! Records which tasks were on a device when their worker died, and how many there were. A task is poison when
//! enough workers died with this task alone that chance, or somebody's SIGKILL, is unlikely. Owns the records
//! of one launcher, which are lost when it ends; every slot sends them to its workers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;

use crate::protocol::control::{CrashRecord, CrashTail, TaskName};

/// Tasks remembered, the latest ones: with their crash tails they fit into the `start` line.
const REMEMBERED: usize = 2_000;
/// Of these, the most poison tasks: only they carry crash tails.
const POISON: usize = 200;

/// The crash records of all tasks. Shared by all slots.
pub(super) struct Register {
    /// The number of deaths with the task alone that makes it poison.
    limit: AtomicU32,
    /// Oldest death first. Locked for one pass over the records.
    tasks: Mutex<VecDeque<CrashRecord>>,
    /// The records that workers are told. Written here, read by the slots.
    known: watch::Sender<Vec<CrashRecord>>,
}

impl Register {
    pub(super) fn new(limit: u32) -> Self {
        Self { limit: limit.into(), tasks: Mutex::default(), known: watch::Sender::new(Vec::new()) }
    }

    pub(super) fn set_limit(&self, limit: u32) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// A worker died with these tasks; `isolated`: they were all that it worked on. True: one of them is poison
    /// now.
    pub(super) fn died(&self, with: &[TaskName], isolated: bool, last: &CrashTail) -> bool {
        let among = u32::try_from(with.len()).unwrap_or(u32::MAX);
        let alone = isolated && among == 1;
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut convicted = false;
        for name in with {
            let known = tasks.iter().position(|deaths| deaths.task == name.fingerprint);
            let mut deaths = known.and_then(|at| tasks.remove(at)).unwrap_or_else(|| CrashRecord {
                task: name.fingerprint.clone(),
                count: 0,
                alone: 0,
                among,
                poison: None,
            });
            // Deaths of a group do not count: they only narrow down which of its tasks is to blame.
            deaths.count += u32::from(!isolated || alone);
            deaths.alone += u32::from(alone);
            deaths.among = deaths.among.min(among);
            if deaths.alone >= self.limit.load(Ordering::Relaxed) {
                convicted |= deaths.poison.replace(last.clone()).is_none();
            }
            tasks.push_back(deaths);
        }
        forget(&mut tasks, POISON, |deaths| deaths.poison.is_some());
        forget(&mut tasks, REMEMBERED - POISON, |deaths| deaths.poison.is_none());
        self.known.send_replace(tasks.iter().cloned().collect());
        convicted
    }

    /// An isolated task was finished and its worker lives: removes its record, unless it is poison.
    pub(super) fn survived(&self, task: &TaskName) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
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
        let goes = surplus > 0 && kind(entry);
        surplus -= usize::from(goes);
        !goes
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
    fn the_deaths_of_isolated_groups_are_no_attempts_and_narrow_down_who_is_to_blame() {
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
    fn a_task_that_a_worker_survives_begins_anew() {
        let register = Register::new(2);
        let task = &names(&["a"])[..];
        assert!(!register.died(task, true, &last("1")));
        register.survived(&task[0]);
        assert!(!register.died(task, true, &last("2")) && register.died(task, true, &last("3")));
        register.survived(&task[0]);
        assert!(register.known().borrow()[0].poison.is_some(), "not what is answered as poison");
    }

    #[test]
    fn what_is_remembered_is_bounded_and_poison_is_not_crowded_out() {
        let register = Register::new(1);
        register.died(&names(&["poison"]), true, &last("x"));
        let many: Vec<String> = (0..2 * REMEMBERED).map(|n| n.to_string()).collect();
        register.died(&names(&many.iter().map(String::as_str).collect::<Vec<_>>()), false, &last("x"));
        for n in 0..POISON - 1 {
            register.died(&names(&[&format!("p{n}")]), true, &last("x"));
        }
        let known = register.known();
        assert!(known.borrow().len() <= REMEMBERED);
        assert_eq!(known.borrow().iter().filter(|it| it.poison.is_some()).count(), POISON);
        assert!(known.borrow().iter().any(|it| it.task == "poison"));
        assert!(known.borrow().iter().all(|it| it.task != "0"), "the oldest goes first");
    }
}
