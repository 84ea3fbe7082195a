//! The rows of a result: the first of them, and how many there are of which reason. Bounded, since a
//! queue of dead letters is not.

use std::collections::BTreeMap;

use super::view::{self, Row};

/// Most rows where nobody says how many are wanted.
pub(super) const MOST: usize = 10_000;

/// The first `most` rows, and the number of all by reason.
pub(super) struct Rows {
    most: usize,
    /// With what stands in the last column.
    kept: Vec<(Row, String)>,
    count: usize,
    reasons: BTreeMap<String, usize>,
}

impl Rows {
    /// None yet, and never more than so many.
    pub(super) fn at_most(most: usize) -> Self {
        Self { most, kept: Vec::new(), count: 0, reasons: BTreeMap::new() }
    }

    /// One more. `last`: in the last column.
    pub(super) fn add(&mut self, row: Row, last: String) {
        self.count += 1;
        *self.reasons.entry(row.reason().to_owned()).or_default() += 1;
        if self.kept.len() < self.most {
            self.kept.push((row, last));
        }
    }

    /// How many there were.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// How many of them are not kept.
    pub(super) fn more(&self) -> usize {
        self.count - self.kept.len()
    }

    /// `2 letters: 1 attempts, 1 poison`, of all.
    pub(super) fn told(&self) -> (String, String) {
        (view::letters(self.count), view::by_reason(&self.reasons))
    }

    /// Those that are kept.
    pub(super) fn kept(&self) -> impl Iterator<Item = &Row> {
        self.kept.iter().map(|(row, _)| row)
    }

    /// A table under this head of its last column, with a line for what is not kept; none without rows.
    pub(super) fn table(&self, last: &str, width: Option<usize>) -> Option<String> {
        let cells: Vec<_> = self.kept.iter().map(|(row, last)| row.cells(last)).collect();
        let mut table = (!cells.is_empty()).then(|| view::table(last, cells, width))?;
        if self.more() > 0 {
            table.push_str(&format!("\nand {} more", self.more()));
        }
        Some(table)
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::broker::{Delivery, DeliveryTag};

    #[test]
    fn beyond_the_most_rows_are_counted_and_no_longer_kept() {
        let delivery = Delivery {
            message: <_>::default(),
            delivery_tag: DeliveryTag { session: 0, tag: 1 },
            routing_key: None,
            redelivered: false,
            delivery_count: Some(0),
        };
        let mut rows = Rows::at_most(2);
        assert!(rows.table("ERROR", None).is_none());
        for _ in 0..5 {
            rows.add(Row::of(&delivery, SystemTime::UNIX_EPOCH), "it broke".into());
        }
        assert_eq!((rows.kept().count(), rows.more(), rows.count()), (2, 3, 5));
        assert_eq!(rows.told(), ("5 letters".into(), ": 5 unknown".into()));
        assert!(rows.table("ERROR", None).unwrap().ends_with("\nand 3 more"));
    }
}
