//! `sconce dead`: lists, shows, requeues or deletes the dead letters of a pool.

mod requeue;
mod table;
mod view;

use std::io::{self, Write};

use anyhow::anyhow;

use super::{load, pool_named, start_logging, tolerate_broken_pipe};
use crate::broker::Delivery;
use crate::broker::amqp::NearLimit;
use crate::cli::{Dead, DeadFilters, DeadList, DeadPurge, DeadShow, DeadSource, DeadWhich};
use crate::client::dead::{BrowserSession, DeadLetterSummary, Fate, Filters, Listing, Selection};
use crate::commands::exits::ExitsWith as _;
use crate::protocol::printable;
use crate::shutdown::Exit;
use crate::telemetry::QUIET;

/// Maximum bytes of bodies that `show` keeps in memory: 64 MiB. The first body is kept whatever its size.
const SHOWN_BYTES: usize = 64 << 20;

pub(super) fn run(command: &Dead) -> anyhow::Result<Exit> {
    start_logging(Some(QUIET))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        match command {
            Dead::List(arguments) => list(arguments).await,
            Dead::Show(arguments) => show(arguments).await,
            Dead::Requeue(arguments) => requeue::run(arguments).await,
            Dead::Purge(arguments) => purge(arguments).await,
        }
    })
}

/// Lists dead letters. Hands all of them back to the queue before it prints, because a pager may block printing.
async fn list(arguments: &DeadList) -> anyhow::Result<Exit> {
    let mut session = open(&arguments.source, &[], &arguments.filters).await?;
    let mut listing = Listing::with_limit(arguments.limit);
    let add = |delivery: &Delivery, selection: &Selection| {
        listing.add(DeadLetterSummary::of(delivery, selection.now));
        Fate::Leave
    };
    session.for_each(add).await?;
    let queue = session.queue.clone();
    let exit = close(session).await?;
    let mut out = Vec::new();
    if arguments.json {
        table::write_json(&mut listing, &mut out)?;
    } else {
        table::write_table(&mut listing, &mut out, "ERROR")?;
        writeln!(out, "{}", table::summary(&listing, &format!(" in {queue}")))?;
    }
    tolerate_broken_pipe(io::stdout().write_all(&out))?;
    if arguments.json && listing.omitted() > 0 {
        print_note(&format!("and {} more: see --limit", listing.omitted()))?;
    }
    Ok(exit)
}

async fn show(arguments: &DeadShow) -> anyhow::Result<Exit> {
    let ids = std::slice::from_ref(&arguments.id);
    let mut session = open(&arguments.source, ids, &<_>::default()).await?;
    let (mut found, mut bytes, mut more) = (Vec::<Delivery>::new(), 0, 0);
    let keep = |delivery: &Delivery, _: &Selection| {
        bytes += delivery.message.body.len();
        if found.is_empty() || bytes <= SHOWN_BYTES {
            found.push(delivery.clone());
        } else {
            more += 1;
        }
        Fate::Leave
    };
    session.for_each(keep).await?;
    let (now, queue) = (session.selection.now, session.queue.clone());
    let exit = close(session).await?;
    if found.is_empty() {
        return Err(
            anyhow!("no dead letter in {queue} has the id {:?}", arguments.id).exits_with(Exit::Refused)
        );
    }
    if more > 0 {
        let hidden = view::dead_letters(more);
        let max_mib = SHOWN_BYTES >> 20;
        print_note(&format!("{hidden} with this id not shown: the bodies exceed {max_mib} MiB together"))?;
    }
    let mut out = Vec::new();
    for delivery in &found {
        if arguments.json {
            writeln!(out, "{}", view::full_json(delivery, now))?;
        } else {
            writeln!(out, "{}", view::full_text(delivery, now))?;
        }
    }
    tolerate_broken_pipe(io::stdout().write_all(&out))?;
    Ok(exit)
}

/// With `--yes`, deletes dead letters. Without it, shows which ones `--yes` would delete.
async fn purge(arguments: &DeadPurge) -> anyhow::Result<Exit> {
    let DeadWhich { source, ids, filters, .. } = &arguments.which;
    let mut session = open(source, ids, filters).await?;
    let mut listing = Listing::with_limit(if arguments.yes { 0 } else { Listing::DEFAULT_LIMIT });
    let purge = |delivery: &Delivery, selection: &Selection| {
        listing.add(DeadLetterSummary::of(delivery, selection.now));
        if arguments.yes { Fate::Delete } else { Fate::Leave }
    };
    let ended = session.for_each(purge).await;
    let queue = session.queue.clone();
    let closed = close(session).await;
    let mut out = Vec::new();
    if arguments.yes {
        // Also printed after an error, because dead letters that were deleted before it stay deleted.
        let at_most = if ended.is_err() { "at most " } else { "" };
        writeln!(out, "deleted from {queue}: {at_most}{}", table::summary(&listing, ""))?;
    } else if ended.is_ok() {
        table::write_table(&mut listing, &mut out, "ERROR")?;
        writeln!(out, "would delete from {queue}: {}", table::summary(&listing, ""))?;
    }
    tolerate_broken_pipe(io::stdout().write_all(&out))?;
    if !arguments.yes && ended.is_ok() {
        print_note("nothing was deleted: give --yes to delete")?;
    }
    ended?;
    closed
}

/// Opens the dead-letter queue of the pool.
async fn open(source: &DeadSource, ids: &[String], filters: &DeadFilters) -> anyhow::Result<BrowserSession> {
    let settings = load(&source.settings, &[])?.settings;
    let (_, pool) = pool_named(&settings.pools, source.pool.as_deref())?;
    let DeadFilters { reason, older_than, newer_than } = filters.clone();
    let filters = Filters { reason, older_than, newer_than };
    let selection = Selection::new(ids, filters, &pool.name, pool.queues());
    let queue = &pool.dead_letter_queue;
    let session = BrowserSession::open(&settings.broker, "sconce dead", queue, selection).await?;
    if let Some(limit) = session.browser.assumed_limit() {
        print_note(&format!("the delivery limit of {queue} cannot be known: {limit} is assumed"))?;
    }
    Ok(session)
}

/// Hands back the dead letters that stay in the queue, and prints notes about them to stderr. Returns the exit code for
/// the case that the rest of the command succeeds.
async fn close(session: BrowserSession) -> anyhow::Result<Exit> {
    let BrowserSession { browser, selection, queue } = session;
    let NearLimit { republished, returned } = browser.close().await?;
    let (of_other_pools, missing) = (selection.of_other_pools, selection.missing());
    if republished > 0 {
        let count = view::dead_letters(republished);
        print_note(&format!(
            "{count} republished to the end of {queue}, because the broker would have dropped them soon"
        ))?;
    }
    if returned > 0 {
        let count = view::dead_letters(returned);
        print_note(&format!(
            "{count} in {queue} will be dropped by the broker after a few more deliveries, and could not be \
             republished: is the queue full, or may this user not write to amq.default?"
        ))?;
    }
    if of_other_pools > 0 {
        let count = view::dead_letters(of_other_pools);
        print_note(&format!(
            "{count} of other pools in {queue} left out: select them with --pool, their settings, or their ids"
        ))?;
    }
    if !missing.is_empty() {
        print_note(&format!("no dead letter in {queue} matches {}", missing.join(", ")))?;
    }
    Ok(if returned > 0 || !missing.is_empty() { Exit::Refused } else { Exit::Done })
}

/// Prints a line to stderr, apart from the result on stdout. Removes control characters, because the line may quote a
/// dead letter.
fn print_note(line: &str) -> io::Result<()> {
    writeln!(io::stderr(), "sconce: {}", printable(line))
}
