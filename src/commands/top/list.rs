//! Decides which slots are listed, in which order, and which one is selected. Owns the sort column, the filter and the
//! selection, which follows its slot when the order changes. Does no I/O.

use std::cmp::Ordering;

use crate::client::fleet::{History, SlotHistory, SlotKey};

/// The longest filter, in characters.
const MAX_FILTER_CHARS: usize = 60;

/// A column that slots can be sorted by: its title, and the value that is compared.
type Sort = (&'static str, fn(&SlotHistory) -> f64);

/// All sort columns, in the order of the screen. A terminal of 80 characters a line shows all of them. Slots with equal
/// values are sorted by name.
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
    /// The sort column, as an index of [`SORTS`].
    sort: usize,
    is_reversed: bool,
    filter: String,
    selected: Option<SlotKey>,
    /// The row of the selected slot when it was last listed.
    row: usize,
}

impl List {
    /// The slots that match the filter, sorted.
    pub(super) fn slots<'a>(&self, history: &'a History) -> Vec<&'a SlotHistory> {
        let wanted = self.filter.to_lowercase();
        let is_wanted = |slot: &&SlotHistory| {
            let report = &slot.report;
            let texts = [&report.worker, &report.pool, slot.state(), &report.device].map(str::to_lowercase);
            wanted.split_whitespace().all(|word| texts.iter().any(|text| text.contains(word)))
        };
        let mut slots: Vec<&SlotHistory> = history.slots.values().filter(is_wanted).collect();
        slots.sort_by(|one, other| self.compare(one, other));
        slots
    }

    /// Compares by the sort column. Names are in ascending order, and numbers in descending order, unless the order is
    /// reversed.
    fn compare(&self, one: &SlotHistory, other: &SlotHistory) -> Ordering {
        let (_, value) = SORTS[self.sort];
        let by_name = || name_key(&one.key).cmp(&name_key(&other.key)).then_with(|| one.key.cmp(&other.key));
        // The order if `is_reversed`: names descending, numbers ascending. The default order is its reverse.
        let order = match self.sort {
            0 => by_name().reverse(),
            _ => value(one).total_cmp(&value(other)),
        };
        (if self.is_reversed { order } else { order.reverse() }).then_with(by_name)
    }

    /// The arrow beside the title of the sort column: ▲ if ascending, ▼ if descending. Empty for other columns.
    pub(super) fn mark(&self, title: &str) -> &'static str {
        match SORTS[self.sort].0 == title {
            true if (self.sort == 0) == self.is_reversed => "▼",
            true => "▲",
            false => "",
        }
    }

    pub(super) fn sort_by_next(&mut self) {
        (self.sort, self.is_reversed) = ((self.sort + 1) % SORTS.len(), false);
    }

    pub(super) fn reverse(&mut self) {
        self.is_reversed = !self.is_reversed;
    }

    pub(super) fn filter(&self) -> &str {
        &self.filter
    }

    /// Appends a character to the filter. With none, removes the last character.
    pub(super) fn edit_filter(&mut self, character: Option<char>) {
        match character {
            Some(character) if self.filter.chars().count() < MAX_FILTER_CHARS => self.filter.push(character),
            Some(_) => {}
            None => drop(self.filter.pop()),
        }
    }

    pub(super) fn clear_filter(&mut self) {
        self.filter.clear();
    }

    /// Moves the selection by this number of rows; down if it is positive.
    pub(super) fn step(&mut self, rows: isize, history: &History) {
        let slots = self.slots(history);
        let row = self.row.saturating_add_signed(rows).min(slots.len().saturating_sub(1));
        (self.row, self.selected) = (row, slots.get(row).map(|slot| slot.key.clone()));
    }

    /// Follows the selected slot to its current row. If the slot is gone, selects the slot that is now in its row.
    pub(super) fn follow(&mut self, history: &History) {
        let slots = self.slots(history);
        match slots.iter().position(|slot| Some(&slot.key) == self.selected.as_ref()) {
            Some(row) => self.row = row,
            None => self.step(0, history),
        }
    }

    /// The row of the selected slot, from 0.
    pub(super) fn selected_row(&self) -> usize {
        self.row
    }

    pub(super) fn selected<'a>(&self, history: &'a History) -> Option<&'a SlotHistory> {
        history.slots.get(self.selected.as_ref()?)
    }
}

/// A worker's name as a sort key, in which slot 10 of a pool comes after slot 9.
fn name_key(key: &SlotKey) -> (&str, u64) {
    let (pool, index) = key.worker.rsplit_once('/').unwrap_or((&key.worker, ""));
    (pool, index.parse().unwrap_or_default())
}
