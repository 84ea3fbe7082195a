//! Prints a listing of dead letters: as a table, as JSON lines, or as one line that counts them by reason.

use std::io::{self, Write};

use super::view::{cells, dead_letters};
use crate::client::dead::Listing;
use crate::protocol::printable;

/// One line that counts all dead letters by reason: `2 dead letters{place}: 1 attempts, 1 poison`.
pub(super) fn summary(listing: &Listing, place: &str) -> String {
    let reasons = listing.reasons();
    let counts = reasons.iter().map(|(reason, count)| format!("{count} {}", printable(reason)));
    let colon = if reasons.is_empty() { "" } else { ": " };
    format!("{}{place}{colon}{}", dead_letters(listing.count()), counts.collect::<Vec<_>>().join(", "))
}

/// Writes one line with a JSON object for each dead letter.
pub(super) fn write_json(listing: &mut Listing, out: &mut impl Write) -> io::Result<()> {
    listing.rows().iter().try_for_each(|row| writeln!(out, "{}", serde_json::to_string(row)?))
}

/// Writes a table whose last column has the title `last_title`, and a line that counts the rows not shown. Writes
/// nothing if there are no rows.
pub(super) fn write_table(listing: &mut Listing, out: &mut impl Write, last_title: &str) -> io::Result<()> {
    let rows = listing.rows();
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(out, "{}", table(last_title, rows.iter().map(cells)))?;
    match listing.omitted() {
        0 => Ok(()),
        more => writeln!(out, "and {more} more"),
    }
}

/// Formats rows below a header, with columns as wide as their longest cell.
fn table(last_title: &str, rows: impl Iterator<Item = [String; 6]>) -> String {
    let header = ["TASK", "REASON", "AGE", "WORKER", "BYTES", last_title].map(str::to_owned);
    let rows: Vec<_> = std::iter::once(header).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let [a, b, c, d, e]: [usize; 5] = std::array::from_fn(width);
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
    use crate::broker::Delivery;
    use crate::client::dead::DeadLetterSummary;
    use crate::protocol::{Message, Properties};

    #[test]
    fn a_table_aligns_its_header_and_counts_the_rows_left_out() {
        let mut listing = Listing::with_limit(1);
        for timestamp in [2, 1] {
            let message_id = Some(format!("id-{timestamp}"));
            let properties = Properties { timestamp: Some(timestamp), message_id, ..Properties::default() };
            let delivery = Delivery::made(Message { properties, ..Message::default() }, 1, 0);
            listing.add(
                DeadLetterSummary::of(&delivery, SystemTime::UNIX_EPOCH).with_destination("it broke".into()),
            );
        }
        let mut shown = Vec::new();
        write_table(&mut listing, &mut shown, "ERROR").unwrap();
        assert_eq!(
            String::from_utf8(shown).unwrap(),
            "TASK  REASON   AGE  WORKER  BYTES  ERROR\nid-1  unknown   0s  -           0  it broke\nand 1 more\n"
        );
        assert_eq!(summary(&listing, " in q"), "2 dead letters in q: 2 unknown");
        let mut lines = Vec::new();
        write_json(&mut listing, &mut lines).unwrap();
        assert!(lines.starts_with(b"{\"task_id\":\"id-1\""));
    }
}
