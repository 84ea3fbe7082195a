//! Finds `custom_id`s that occur more than once: their answers could not be told apart. Owns the ids seen so far.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};

/// Maximum number of ids that are remembered, each as 8 bytes. After that many, a repeated id may be missed.
const MAX_IDS: usize = 1_000_000;

/// The ids of the lines read so far.
#[derive(Debug, Default)]
pub struct RepeatedIds {
    seen: HashSet<u64>,
    repeated: u64,
    /// The first repeated id, and its line.
    first: Option<(String, usize)>,
}

impl RepeatedIds {
    /// Adds the id of a line, counted from 1.
    pub fn add(&mut self, id: &str, line: usize) {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(id);
        if self.seen.contains(&hash) {
            self.repeated += 1;
            self.first.get_or_insert_with(|| (id.to_owned(), line));
        } else if self.seen.len() < MAX_IDS {
            self.seen.insert(hash);
        }
    }

    /// A warning about repeated ids, if there are any.
    pub fn warning(&self) -> Option<String> {
        let (id, line) = self.first.as_ref()?;
        let repeated = self.repeated;
        Some(format!(
            "custom_ids that occur again: {repeated}, first on line {line} ({id:?}); their answers look alike"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warning_names_the_first_line_with_a_repeated_id() {
        let mut ids = RepeatedIds::default();
        ["a", "b"].iter().enumerate().for_each(|(index, id)| ids.add(id, index + 1));
        assert_eq!(ids.warning(), None);
        ["b", "c", "a"].iter().enumerate().for_each(|(index, id)| ids.add(id, index + 3));
        let warning = ids.warning().unwrap();
        assert!(warning.starts_with("custom_ids that occur again: 2, first on line 3 (\"b\")"), "{warning}");
    }
}
