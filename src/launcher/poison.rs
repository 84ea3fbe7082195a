//! Which tasks kill workers. Convicts a task when it was alone on a device at so many deaths that
//! chance, or somebody's SIGKILL, is no longer likely. Owns the counts and the convictions of one
//! launcher, which end with it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;

/// Deaths of workers that make a task poison.
const DEATHS: u32 = 3;
/// Tasks remembered, in each of two lists: a fingerprint is 16 bytes, and `start` carries them.
const REMEMBERED: usize = 1_000;

/// See the module. Shared by all slots.
pub(super) struct Poison {
    /// Deaths by task. Held for map operations only.
    deaths: Mutex<BTreeMap<String, u32>>,
    /// Fingerprints, oldest first. Written here; read by the slots, which tell their workers.
    known: watch::Sender<Vec<String>>,
}

impl Default for Poison {
    fn default() -> Self {
        Self { deaths: Mutex::default(), known: watch::Sender::new(Vec::new()) }
    }
}

impl Poison {
    /// A worker died with `task` alone on its device. True: that makes it poison.
    pub(super) fn blame(&self, task: &str) -> bool {
        let mut deaths = self.deaths.lock().unwrap_or_else(PoisonError::into_inner);
        if deaths.len() >= REMEMBERED && !deaths.contains_key(task) {
            deaths.pop_first();
        }
        let count = deaths.entry(task.to_owned()).or_default();
        *count += 1;
        if *count < DEATHS {
            return false;
        }
        deaths.remove(task);
        self.known.send_modify(|known| {
            if known.len() >= REMEMBERED {
                known.remove(0);
            }
            known.push(task.to_owned());
        });
        true
    }

    /// What is known, now and from now on.
    pub(super) fn known(&self) -> watch::Receiver<Vec<String>> {
        self.known.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_poison_at_its_third_death_and_others_are_not() {
        let poison = Poison::default();
        let known = poison.known();
        assert!(!poison.blame("a") && !poison.blame("b") && !poison.blame("a"));
        assert!(known.borrow().is_empty());
        assert!(poison.blame("a"));
        assert_eq!(*known.borrow(), ["a"]);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let poison = Poison::default();
        for task in 0..REMEMBERED + 5 {
            for _ in 0..DEATHS {
                poison.blame(&task.to_string());
            }
            poison.blame(&format!("once {task}"));
        }
        assert_eq!(poison.known().borrow().len(), REMEMBERED);
        assert_eq!(poison.known().borrow()[0], "5");
        assert!(poison.deaths.lock().unwrap().len() <= REMEMBERED);
    }
}
