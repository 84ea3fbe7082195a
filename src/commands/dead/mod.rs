//! `sconce dead`: lists, shows, requeues or deletes the dead letters of a pool.

mod requeue;
mod rows;
mod selection;
mod session;
mod view;

use std::io::{self, Write};

use anyhow::anyhow;

use self::rows::Rows;
use self::selection::Selection;
use self::session::{BrowserSession, Fate};
use self::view::Row;
use super::start_logging;
use crate::broker::Delivery;
use crate::cli::{Dead, DeadList, DeadPurge, DeadShow, DeadWhich};
use crate::commands::exits::ExitsWith as _;
use crate::shutdown::Exit;
use crate::telemetry::QUIET;

/// Most bytes of bodies that `show` holds.
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

/// Prints only after the dead letters are back in the queue, because a pager may delay the printing.
async fn list(arguments: &DeadList) -> anyhow::Result<Exit> {
    let mut session = BrowserSession::open(&arguments.source, &[], &arguments.filters).await?;
    let mut rows = Rows::at_most(arguments.limit);
    let list = |delivery: &Delivery, selection: &Selection| {
        rows.add(Row::of(delivery, selection.now));
        Fate::Leave
    };
    session.for_each(list).await?;
    let queue = session.queue().to_owned();
    let exit = session.close().await?;
    let mut out = io::stdout().lock();
    if arguments.json {
        rows.write_json(&mut out)?;
        if rows.more() > 0 {
            tell(&format!("and {} more: see --limit", rows.more()))?;
        }
    } else {
        rows.write_table(&mut out, "ERROR")?;
        writeln!(out, "{}", rows.summary(&format!(" in {queue}")))?;
    }
    Ok(exit)
}

async fn show(arguments: &DeadShow) -> anyhow::Result<Exit> {
    let ids = std::slice::from_ref(&arguments.id);
    let mut session = BrowserSession::open(&arguments.source, ids, &<_>::default()).await?;
    let (mut found, mut bytes, mut more) = (Vec::<Delivery>::new(), 0, 0);
    let show = |delivery: &Delivery, _: &Selection| {
        bytes += delivery.message.body.len();
        match found.is_empty() || bytes <= SHOWN_BYTES {
            true => found.push(delivery.clone()),
            false => more += 1,
        }
        Fate::Leave
    };
    session.for_each(show).await?;
    let (now, queue) = (session.selection.now, session.queue().to_owned());
    let exit = session.close().await?;
    if found.is_empty() {
        return Err(anyhow!("no dead letter in {queue} has the id {:?}", arguments.id).exits_with(Exit::No));
    }
    if more > 0 {
        let told = view::dead_letters(more);
        tell(&format!("{told} more with this id, too large to show beside the others"))?;
    }
    let mut out = io::stdout().lock();
    for delivery in &found {
        match arguments.json {
            true => writeln!(out, "{}", view::whole_json(delivery, now))?,
            false => writeln!(out, "{}", view::whole(delivery, now))?,
        }
    }
    Ok(exit)
}

/// Deletes with `--yes`; without it, shows what that would delete.
async fn purge(arguments: &DeadPurge) -> anyhow::Result<Exit> {
    let DeadWhich { source, ids, filters, .. } = &arguments.which;
    let mut session = BrowserSession::open(source, ids, filters).await?;
    let mut rows = Rows::at_most(if arguments.yes { 0 } else { rows::MOST });
    let purge = |delivery: &Delivery, selection: &Selection| {
        rows.add(Row::of(delivery, selection.now));
        if arguments.yes { Fate::Delete } else { Fate::Leave }
    };
    let ended = session.for_each(purge).await;
    let queue = session.queue().to_owned();
    let closed = session.close().await;
    let mut out = io::stdout().lock();
    if arguments.yes {
        // Printed also after an error: dead letters deleted by then stay deleted.
        let at_most = if ended.is_err() { "at most " } else { "" };
        writeln!(out, "deleted from {queue}: {at_most}{}", rows.summary(""))?;
    } else if ended.is_ok() {
        rows.write_table(&mut out, "ERROR")?;
        writeln!(out, "would delete from {queue}: {}", rows.summary(""))?;
        tell("nothing is deleted: --yes deletes")?;
    }
    ended?;
    closed
}

/// Prints a line to stderr, beside the result. It may contain text of a dead letter.
fn tell(line: &str) -> io::Result<()> {
    writeln!(io::stderr(), "sconce: {}", view::printable(line))
}
