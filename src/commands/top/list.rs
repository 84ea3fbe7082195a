//! Decides which slots are listed, in which order, and which one is chosen. Owns the sort column, the filter and
//! the choice, which follows its slot. Pure.

use std::cmp::Ordering;

use crate::client::fleet::{History, Key, Slot};

/// The most characters of a filter.
const FILTER: usize = 60;

/// A column that slots can be sorted by: its title, and what is compared.
type Sort = (&'static str, fn(&Slot) -> f64);

/// All of them, in the order of the columns. At 80 columns each is shown. Equal slots are sorted by name.
pub(super) const SORTS: [Sort; 9] = [
    ("worker", |_| 0.0),
    ("state", |slot| slot.severity() as f64),
    ("age", |slot| slot.age_ms.map_or(-1.0, |ms| ms as f64)),
    ("tasks/s", |slot| slot.rates.tasks),
    ("tok/s", |slot| slot.rates.tokens),
    ("busy", |slot| slot.rates.busy),
    ("held", |slot| slot.held() as f64),
    ("err/s", |slot| slot.rates.errors),
    ("↻", |slot| slot.restarts() as f64),
];

/// How slots are listed.
#[derive(Default)]
pub(super) struct List {
    /// The column of [`SORTS`].
    by: usize,
    is_reversed: bool,
    filter: String,
    chosen: Option<Key>,
    /// Where the chosen slot stood last.
    at: usize,
}

impl List {
    /// The slots that the filter lets through, sorted.
    pub(super) fn slots<'a>(&self, history: &'a History) -> Vec<&'a Slot> {
        let wanted = self.filter.to_lowercase();
        let is_wanted = |slot: &&Slot| {
            let report = &slot.report;
            let texts = [&report.worker, &report.pool, slot.state(), &report.device].map(str::to_lowercase);
            wanted.split_whitespace().all(|word| texts.iter().any(|text| text.contains(word)))
        };
        let mut slots: Vec<&Slot> = history.slots.values().filter(is_wanted).collect();
        slots.sort_by(|one, other| self.compare(one, other));
        slots
    }

    /// Names begin with the first, numbers with the largest, until they are reversed.
    fn compare(&self, one: &Slot, other: &Slot) -> Ordering {
        let (_, value) = SORTS[self.by];
        let by_name = || name(&one.key).cmp(&name(&other.key)).then_with(|| one.key.cmp(&other.key));
        let order = match self.by {
            0 => by_name().reverse(),
            _ => value(one).total_cmp(&value(other)),
        };
        (if self.is_reversed { order } else { order.reverse() }).then_with(by_name)
    }

    /// The mark of a column with this title, if slots are sorted by it.
    pub(super) fn mark(&self, title: &str) -> &'static str {
        match SORTS[self.by].0 == title {
            true if (self.by == 0) == self.is_reversed => "▼",
            true => "▲",
            false => "",
        }
    }

    pub(super) fn sort_by_next(&mut self) {
        (self.by, self.is_reversed) = ((self.by + 1) % SORTS.len(), false);
    }

    pub(super) fn reverse(&mut self) {
        self.is_reversed = !self.is_reversed;
    }

    pub(super) fn filter(&self) -> &str {
        &self.filter
    }

    /// Changes the filter: a further character, or none to take the last away.
    pub(super) fn type_filter(&mut self, character: Option<char>) {
        match character {
            Some(character) if self.filter.chars().count() < FILTER => self.filter.push(character),
            Some(_) => {}
            None => drop(self.filter.pop()),
        }
    }

    pub(super) fn clear_filter(&mut self) {
        self.filter.clear();
    }

    /// Moves the choice by so many rows.
    pub(super) fn step(&mut self, by: isize, history: &History) {
        let slots = self.slots(history);
        let at = self.at.saturating_add_signed(by).min(slots.len().saturating_sub(1));
        (self.at, self.chosen) = (at, slots.get(at).map(|slot| slot.key.clone()));
    }

    /// Follows the chosen slot to where it is now. One that is gone hands the choice to the slot in its place.
    pub(super) fn follow(&mut self, history: &History) {
        let slots = self.slots(history);
        match slots.iter().position(|slot| Some(&slot.key) == self.chosen.as_ref()) {
            Some(at) => self.at = at,
            None => self.step(0, history),
        }
    }

    /// The row of the chosen slot, from 0.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn chosen<'a>(&self, history: &'a History) -> Option<&'a Slot> {
        history.slots.get(self.chosen.as_ref()?)
    }
}

/// A worker's name for sorting: slot 10 of a pool comes after slot 9.
fn name(key: &Key) -> (&str, u64) {
    let (pool, index) = key.worker.rsplit_once('/').unwrap_or((&key.worker, ""));
    (pool, index.parse().unwrap_or_default())
}
