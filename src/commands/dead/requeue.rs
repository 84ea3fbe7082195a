//! `sconce dead requeue`: requeues dead letters, or with `--dry-run` prints what it would requeue.

use std::io::{self, Write};

use super::{close, open, print_note, table, view};
use crate::broker::Delivery;
use crate::cli::{DeadRequeue, DeadWhich};
use crate::client::dead::{DeadLetterSummary, Fate, Listing, Requeued, Selection, requeue};
use crate::commands::tolerate_broken_pipe;
use crate::protocol::dead_letter::DeadLetter;
use crate::protocol::printable;
use crate::shutdown::Exit;

/// Requeues dead letters. With `--dry-run`, prints which ones it would requeue and to which queue.
pub(super) async fn run(arguments: &DeadRequeue) -> anyhow::Result<Exit> {
    let DeadWhich { source, ids, filters, .. } = &arguments.which;
    let mut session = open(source, ids, filters).await?;
    let (mut requeued, mut listing) = (Requeued::default(), Listing::with_limit(Listing::DEFAULT_LIMIT));
    let ended = if arguments.dry_run {
        let preview = |delivery: &Delivery, selection: &Selection| {
            let to = match selection.refusal(delivery) {
                None => {
                    requeued.moved += 1;
                    selection.queue_of(&DeadLetter::new(&delivery.message)).to_owned()
                }
                Some(why) => {
                    requeued.left += 1;
                    format!("stays: {why}")
                }
            };
            listing.add(DeadLetterSummary::of(delivery, selection.now).with_destination(to));
            Fate::Leave
        };
        session.for_each(preview).await
    } else {
        let now = session.selection.now;
        let report_stayed = |delivery: &Delivery, why: &str| {
            let [id, reason, ..] = view::cells(&DeadLetterSummary::of(delivery, now));
            // A closed stderr must not prevent the acks of confirmed messages.
            let _ = print_note(&format!("dead letter {id} ({reason}) stays: {why}"));
        };
        requeue(&mut session, &mut requeued, report_stayed).await
    };
    let queues = printable(&session.selection.queue_names());
    let closed = close(session).await;
    let mut out = Vec::new();
    table::write_table(&mut listing, &mut out, "TO")?;
    // Also printed after an error, because dead letters that were requeued before it stay requeued.
    let verb = if arguments.dry_run { "would requeue" } else { "requeued" };
    match requeued.moved {
        0 => writeln!(out, "{verb} no dead letter")?,
        went => writeln!(out, "{verb} {} to {queues}", view::dead_letters(went))?,
    }
    if requeued.left > 0 {
        writeln!(out, "{} asked for, but not requeued", view::dead_letters(requeued.left))?;
    }
    tolerate_broken_pipe(io::stdout().write_all(&out))?;
    ended?;
    let exit = closed?;
    Ok(if requeued.left > 0 { Exit::Refused } else { exit })
}
