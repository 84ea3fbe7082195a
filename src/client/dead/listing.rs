//! A list of dead letters, the oldest first, and the number for each reason. Bounded, because a dead-letter queue is
//! not.

use std::collections::BTreeMap;

use super::summary::DeadLetterSummary;

/// The oldest dead letters, at most `limit`, and the number of all by reason.
pub(crate) struct Listing {
    limit: usize,
    kept: Vec<DeadLetterSummary>,
    reasons: BTreeMap<String, usize>,
}

impl Listing {
    /// Default of the maximum number of rows.
    pub(crate) const DEFAULT_LIMIT: usize = 10_000;

    /// An empty list, for at most this many rows.
    pub(crate) fn with_limit(limit: usize) -> Self {
        Self { limit, kept: Vec::new(), reasons: BTreeMap::new() }
    }

    pub(crate) fn add(&mut self, row: DeadLetterSummary) {
        *self.reasons.entry(row.reason.clone()).or_default() += 1;
        self.kept.push(row);
        // Rows are cut only at twice the limit, so that adding a row is cheap.
        if self.kept.len() >= self.limit.saturating_mul(2) {
            self.cut();
        }
    }

    /// Sorts by time, rows without one last, and drops those over the limit.
    fn cut(&mut self) {
        self.kept.sort_by(|one, other| match (&one.dead_lettered_at, &other.dead_lettered_at) {
            (Some(one), Some(other)) => one.cmp(other),
            (one, other) => other.is_some().cmp(&one.is_some()),
        });
        self.kept.truncate(self.limit);
    }

    /// The rows, the oldest first; those without a time last.
    pub(crate) fn rows(&mut self) -> &[DeadLetterSummary] {
        self.cut();
        &self.kept
    }

    /// How many dead letters were added.
    pub(crate) fn count(&self) -> usize {
        self.reasons.values().sum()
    }

    /// How many of them are over the limit, and not among the rows.
    pub(crate) fn omitted(&self) -> usize {
        self.count().saturating_sub(self.limit)
    }

    /// How many were added of each reason.
    pub(crate) fn reasons(&self) -> &BTreeMap<String, usize> {
        &self.reasons
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::broker::Delivery;
    use crate::protocol::Message;

    /// The row of a dead letter with this time of publication.
    fn row(timestamp: Option<u64>) -> DeadLetterSummary {
        let mut message = Message::default();
        message.properties.timestamp = timestamp;
        message.properties.message_id = Some(format!("{timestamp:?}"));
        DeadLetterSummary::of(&Delivery::made(message, 1, 0), SystemTime::UNIX_EPOCH)
    }

    fn ids(listing: &mut Listing) -> Vec<&str> {
        listing.rows().iter().filter_map(|row| row.message_id.as_deref()).collect()
    }

    #[test]
    fn the_oldest_rows_are_kept_and_all_are_counted() {
        let mut listing = Listing::with_limit(3);
        for timestamp in [None, Some(9), Some(2), None, Some(7), Some(1), Some(8), None] {
            listing.add(row(timestamp));
        }
        assert_eq!(ids(&mut listing), ["Some(1)", "Some(2)", "Some(7)"]);
        assert_eq!((listing.count(), listing.omitted()), (8, 5));
        assert_eq!(listing.reasons().get("unknown"), Some(&8));
        let mut listing = Listing::with_limit(2);
        [None, Some(9)].into_iter().for_each(|timestamp| listing.add(row(timestamp)));
        assert_eq!(ids(&mut listing), ["Some(9)", "None"]);
        assert_eq!(listing.omitted(), 0);
    }
}
