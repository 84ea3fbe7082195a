//! `sconce dead purge`: deletes letters, once somebody has said yes.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};

use anyhow::anyhow;

use super::desk::Desk;
use super::view::{self, Row};
use crate::broker::Delivery;
use crate::cli::DeadPurge;
use crate::protocol::letter::Letter;
use crate::shutdown::Exit;

/// Deletes, or says what it would.
pub(super) async fn run(arguments: &DeadPurge) -> anyhow::Result<Exit> {
    let asks = !arguments.yes && !arguments.dry_run;
    if asks && !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        let error = anyhow!("purge asks before it deletes, and here is no terminal to ask on: give --yes");
        return Err(error.context(Exit::Usage));
    }
    let mut desk = Desk::open(&arguments.source, &arguments.ids, &arguments.filters).await?;
    if arguments.dry_run {
        return rehearse(desk).await;
    }
    let (meant, reasons) = gather(&mut desk).await?;
    let told = format!("{}{}", view::letters(meant.len()), view::by_reason(&reasons));
    let queue = desk.pool.dead_letter_queue.clone();
    let agreed = meant.is_empty() || !asks || ask(format!("delete from {queue} {told}? [y/N] ")).await?;
    let deleted = if agreed { told } else { "nothing".into() };
    for delivery in meant {
        match agreed {
            true => desk.look.ack(&delivery),
            false => desk.leave(delivery).await?,
        }
    }
    let missing = desk.close().await?.missing;
    writeln!(io::stdout(), "deleted from {queue}: {deleted}")?;
    Ok(if missing { Exit::No } else { Exit::Done })
}

/// The letters that are meant, without their bodies where nobody needs them again.
async fn gather(desk: &mut Desk) -> anyhow::Result<(Vec<Delivery>, BTreeMap<String, usize>)> {
    let (mut meant, mut reasons) = (Vec::new(), BTreeMap::new());
    while let Some(mut delivery) = desk.next().await? {
        *reasons.entry(Letter::of(&delivery.message).reason().to_owned()).or_default() += 1;
        if !desk.look.is_worn(&delivery) {
            delivery.message = <_>::default();
        }
        meant.push(delivery);
    }
    Ok((meant, reasons))
}

/// Asks whoever sits at the terminal; anything but yes is no. The connection lives on meanwhile.
async fn ask(question: String) -> anyhow::Result<bool> {
    let asked = tokio::task::spawn_blocking(move || {
        let mut answer = String::new();
        write!(io::stderr(), "{question}")?;
        io::stderr().flush()?;
        io::stdin().read_line(&mut answer)?;
        io::Result::Ok(answer)
    });
    let answer = asked.await??;
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

async fn rehearse(mut desk: Desk) -> anyhow::Result<Exit> {
    let mut rows = Vec::new();
    while let Some(delivery) = desk.next().await? {
        rows.push(Row::of(&delivery, desk.now()));
        desk.leave(delivery).await?;
    }
    let closed = desk.close().await?;
    let mut out = io::stdout().lock();
    if !rows.is_empty() {
        let cells = rows.iter().map(|row| row.cells(row.error())).collect();
        writeln!(out, "{}", view::table("ERROR", cells, view::terminal_width()))?;
    }
    writeln!(out, "would delete from {}: {}", closed.queue, view::letters(rows.len()))?;
    Ok(if closed.missing { Exit::No } else { Exit::Done })
}
