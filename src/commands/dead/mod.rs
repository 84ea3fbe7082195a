//! `sconce dead`: browses the pool's dead letters, and what is done with those that match. One file
//! a command that changes the queue.

mod purge;
mod requeue;
mod rows;
mod selection;
mod session;
mod view;

use std::io::{self, Write};
use std::time::SystemTime;

use anyhow::anyhow;

use self::rows::Rows;
use self::session::BrowserSession;
use self::view::Row;
use super::start_logging;
use crate::broker::Delivery;
use crate::cli::{Dead, DeadList, DeadShow};
use crate::shutdown::Exit;
use crate::telemetry::QUIET;

/// Bytes of bodies that `show` holds.
const SHOWN_BYTES: usize = 64 << 20;

/// Runs one of its commands.
pub(super) fn run(command: &Dead) -> anyhow::Result<Exit> {
    start_logging(Some(QUIET));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        match command {
            Dead::List(arguments) => list(arguments).await,
            Dead::Show(arguments) => show(arguments).await,
            Dead::Requeue(arguments) => requeue::run(arguments).await,
            Dead::Purge(arguments) => purge::run(arguments).await,
        }
    })
}

/// What is printed waits until the letters are back: who reads it may take their time.
async fn list(arguments: &DeadList) -> anyhow::Result<Exit> {
    let mut session = BrowserSession::open(&arguments.source, &[], &arguments.filters).await?;
    // `--limit N` prints at most N rows; without it, as many as the table holds.
    let mut rows = Rows::at_most(arguments.limit.unwrap_or(rows::MOST));
    while arguments.limit.is_none_or(|limit| rows.count() < limit)
        && let Some(delivery) = session.next().await?
    {
        let row = Row::of(&delivery, session.now());
        let error = row.error().to_owned();
        rows.add(row, error);
        session.leave(delivery).await?;
    }
    let closed = session.close().await?;
    let mut out = io::stdout().lock();
    if arguments.json {
        for row in rows.kept() {
            writeln!(out, "{}", row.json())?;
        }
        if rows.more() > 0 {
            tell(&format!("and {} more: give --limit to see so many", rows.more()))?;
        }
        return Ok(closed.exit());
    }
    if let Some(table) = rows.table("ERROR", view::terminal_width()) {
        writeln!(out, "{table}")?;
    }
    let cut = if arguments.limit == Some(rows.count()) { "the oldest " } else { "" };
    let (letters, reasons) = rows.told();
    writeln!(out, "{cut}{letters} in {}{reasons}", closed.queue)?;
    Ok(closed.exit())
}

async fn show(arguments: &DeadShow) -> anyhow::Result<Exit> {
    let mut session =
        BrowserSession::open(&arguments.source, std::slice::from_ref(&arguments.id), &<_>::default()).await?;
    let (mut found, mut bytes, mut more) = (Vec::<Delivery>::new(), 0, 0);
    while let Some(delivery) = session.next().await? {
        bytes += delivery.message.body.len();
        match found.is_empty() || bytes <= SHOWN_BYTES {
            true => found.push(delivery.clone()),
            false => more += 1,
        }
        session.leave(delivery).await?;
    }
    let now = session.now();
    let closed = session.close().await?;
    if found.is_empty() {
        let error = anyhow!("no letter in {} is named {:?}", closed.queue, arguments.id);
        return Err(error.context(Exit::No));
    }
    if more > 0 {
        let told = view::letters(more);
        tell(&format!("{told} more of this name, too large to show beside the others"))?;
    }
    let mut out = io::stdout().lock();
    for delivery in &found {
        match arguments.json {
            true => writeln!(out, "{}", view::whole_json(delivery, now))?,
            false => writeln!(out, "{}", view::whole(delivery, now))?,
        }
    }
    Ok(closed.exit())
}

/// A line to whoever runs this, beside the result. Much of it may be words of a letter's.
fn tell(line: &str) -> io::Result<()> {
    writeln!(io::stderr(), "{}", told(line))
}

fn told(line: &str) -> String {
    format!("sconce: {}", view::printable(line))
}

/// How long ago; what lies in the future is of now: clocks differ.
fn age(since: SystemTime, now: SystemTime) -> std::time::Duration {
    now.duration_since(since).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_line_that_is_told_commands_the_terminal() {
        assert_eq!(
            super::told("it is a \u{1b}[2Jcontrol\nmessage\u{9b}"),
            "sconce: it is a  [2Jcontrol message "
        );
    }
}
