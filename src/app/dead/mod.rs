//! `sconce dead`: a look at the pool's dead letters, and what is done with those that match. One file
//! a command that changes the queue.

mod desk;
mod purge;
mod requeue;
mod selection;
mod view;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::SystemTime;

use anyhow::anyhow;

use self::desk::Desk;
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
    let mut desk = Desk::open(&arguments.source, &[], &arguments.filters).await?;
    let most = arguments.limit.unwrap_or(usize::MAX);
    let mut rows = Vec::new();
    while rows.len() < most
        && let Some(delivery) = desk.next().await?
    {
        rows.push(Row::of(&delivery, desk.now()));
        desk.leave(delivery).await?;
    }
    let queue = desk.close().await?.queue;
    let mut out = io::stdout().lock();
    if arguments.json {
        for row in &rows {
            writeln!(out, "{}", row.json())?;
        }
        return Ok(Exit::Done);
    }
    if !rows.is_empty() {
        let cells = rows.iter().map(|row| row.cells(row.error())).collect();
        writeln!(out, "{}", view::table("ERROR", cells, view::terminal_width()))?;
    }
    let cut = if rows.len() == most { "the oldest " } else { "" };
    writeln!(out, "{cut}{} in {queue}{}", view::letters(rows.len()), view::by_reason(&count(&rows)))?;
    Ok(Exit::Done)
}

fn count(rows: &[Row]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for row in rows {
        *counts.entry(row.reason().to_owned()).or_default() += 1;
    }
    counts
}

async fn show(arguments: &DeadShow) -> anyhow::Result<Exit> {
    let mut desk =
        Desk::open(&arguments.source, std::slice::from_ref(&arguments.id), &<_>::default()).await?;
    let (mut found, mut bytes, mut more) = (Vec::<Delivery>::new(), 0, 0);
    while let Some(delivery) = desk.next().await? {
        bytes += delivery.message.body.len();
        match found.is_empty() || bytes <= SHOWN_BYTES {
            true => found.push(delivery.clone()),
            false => more += 1,
        }
        desk.leave(delivery).await?;
    }
    let now = desk.now();
    let closed = desk.close().await?;
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
    Ok(Exit::Done)
}

/// A line to whoever runs this, beside the result.
fn tell(line: &str) -> io::Result<()> {
    writeln!(io::stderr(), "sconce: {line}")
}

/// How long ago; what lies in the future is of now: clocks differ.
fn age(since: SystemTime, now: SystemTime) -> std::time::Duration {
    now.duration_since(since).unwrap_or_default()
}
