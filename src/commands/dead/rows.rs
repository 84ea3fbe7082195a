//! The rows of a result, the oldest dead letter first, and the number for each reason. Bounded, because a
//! dead-letter queue is not.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::view::{Row, dead_letters, printable};

/// Most rows without `--limit`.
pub(super) const MOST: usize = 10_000;

/// The oldest `most` rows, and the number of all by reason.
pub(super) struct Rows {
    most: usize,
    kept: Vec<Row>,
    reasons: BTreeMap<String, usize>,
}

impl Rows {
    /// Empty, for at most this many rows.
    pub(super) fn at_most(most: usize) -> Self {
        Self { most, kept: Vec::new(), reasons: BTreeMap::new() }
    }

    pub(super) fn add(&mut self, row: Row) {
        *self.reasons.entry(row.reason.clone()).or_default() += 1;
        self.kept.push(row);
        // Cut only sometimes, so that adding a row is cheap; at most twice the limit is held.
        if self.kept.len() >= self.most.saturating_mul(2) {
            self.cut();
        }
    }

    /// Sorts by time, rows without one last, and drops those over the limit.
    fn cut(&mut self) {
        self.kept.sort_by(|one, other| match (&one.dead_lettered_at, &other.dead_lettered_at) {
            (Some(one), Some(other)) => one.cmp(other),
            (one, other) => other.is_some().cmp(&one.is_some()),
        });
        self.kept.truncate(self.most);
    }

    fn count(&self) -> usize {
        self.reasons.values().sum()
    }

    pub(super) fn more(&self) -> usize {
        self.count().saturating_sub(self.most)
    }

    /// A line for all rows: `2 dead letters{place}: 1 attempts, 1 poison`.
    pub(super) fn summary(&self, place: &str) -> String {
        let reasons = self.reasons.iter().map(|(reason, count)| format!("{count} {}", printable(reason)));
        let colon = if self.reasons.is_empty() { "" } else { ": " };
        format!("{}{place}{colon}{}", dead_letters(self.count()), reasons.collect::<Vec<_>>().join(", "))
    }

    /// One JSON object a line.
    pub(super) fn write_json(&mut self, out: &mut impl Write) -> io::Result<()> {
        self.cut();
        self.kept.iter().try_for_each(|row| writeln!(out, "{}", serde_json::to_string(row)?))
    }

    /// Writes a table, with `last` as the head of its last column, and a line for rows not shown; nothing
    /// without rows.
    pub(super) fn write_table(&mut self, out: &mut impl Write, last: &str) -> io::Result<()> {
        self.cut();
        if self.kept.is_empty() {
            return Ok(());
        }
        writeln!(out, "{}", table(last, self.kept.iter().map(Row::cells)))?;
        match self.more() {
            0 => Ok(()),
            more => writeln!(out, "and {more} more"),
        }
    }
}

/// Formats rows under a head, with columns as wide as needed.
fn table(last: &str, rows: impl Iterator<Item = [String; 6]>) -> String {
    let head = ["TASK", "REASON", "AGE", "WORKER", "BYTES", last].map(str::to_owned);
    let rows: Vec<_> = std::iter::once(head).chain(rows).collect();
    let widest = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let [a, b, c, d, e]: [usize; 5] = std::array::from_fn(widest);
    let lines = rows.iter().map(|[id, reason, age, worker, size, last]| {
        let line = format!("{id:a$}  {reason:b$}  {age:>c$}  {worker:d$}  {size:>e$}  {last}");
        line.trim_end().to_owned()
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::broker::{Delivery, DeliveryTag, Source};

    /// The row of a dead letter with this time of publication.
    fn row(timestamp: Option<u64>, error: &str) -> Row {
        let mut message = crate::protocol::Message::default();
        message.properties.timestamp = timestamp;
        message.properties.message_id = Some(format!("{timestamp:?}"));
        let delivery_tag = DeliveryTag { source: Source::Main, session: 0, tag: 1 };
        let delivery = Delivery {
            message,
            delivery_tag,
            routing_key: None,
            redelivered: false,
            delivery_count: Some(0),
        };
        Row::of(&delivery, SystemTime::UNIX_EPOCH).to(error.into())
    }

    #[test]
    fn the_oldest_rows_are_kept_those_without_a_time_last_and_all_are_counted() {
        let mut rows = Rows::at_most(3);
        for timestamp in [None, Some(9), Some(2), None, Some(7), Some(1), Some(8), None] {
            rows.add(row(timestamp, "it broke"));
        }
        let mut shown = Vec::new();
        rows.write_table(&mut shown, "ERROR").unwrap();
        let shown = String::from_utf8(shown).unwrap();
        let first: Vec<_> = shown.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert!(shown.starts_with(
            "TASK     REASON   AGE  WORKER  BYTES  ERROR\nSome(1)  unknown   0s  -           0  it broke\n"
        ));
        assert_eq!(first, ["TASK", "Some(1)", "Some(2)", "Some(7)", "and"]);
        assert!(
            shown.ends_with("\nand 5 more\n") && rows.summary("") == "8 dead letters: 8 unknown",
            "{shown}"
        );
        let mut rows = Rows::at_most(2);
        [None, Some(9)].into_iter().for_each(|timestamp| rows.add(row(timestamp, "")));
        let mut lines = Vec::new();
        rows.write_json(&mut lines).unwrap();
        assert!(lines.starts_with(b"{\"task_id\":\"Some(9)\"") && rows.more() == 0);
    }
}
