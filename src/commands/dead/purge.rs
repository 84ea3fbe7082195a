//! `sconce dead purge`: deletes letters, once somebody has said yes.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};

use anyhow::anyhow;

use super::rows::{self, Rows};
use super::session::BrowserSession;
use super::tell;
use super::view::{self, Row};
use crate::broker::{Delivery, DeliveryTag};
use crate::cli::DeadPurge;
use crate::protocol::dead_letter::DeadLetter;
use crate::shutdown::Exit;

/// Letters deleted before they are counted as that.
const WINDOW: usize = 512;
/// Bytes of bodies that are held while somebody is asked.
const HELD_BYTES: usize = 64 << 20;

/// How many of each reason.
type Reasons = BTreeMap<String, usize>;

/// Deletes, or says what it would.
pub(super) async fn run(arguments: &DeadPurge) -> anyhow::Result<Exit> {
    let asks = !arguments.yes && !arguments.dry_run;
    if asks && !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        let error = anyhow!("purge asks before it deletes, and here is no terminal to ask on: give --yes");
        return Err(error.context(Exit::Usage));
    }
    let mut session = BrowserSession::open(&arguments.source, &arguments.ids, &arguments.filters).await?;
    if arguments.dry_run {
        return rehearse(session).await;
    }
    let mut deleted = Reasons::new();
    let ended = match asks {
        true => delete_if_agreed(&mut session, &mut deleted).await,
        false => delete(&mut session, &mut deleted).await,
    };
    let queue = session.pool.dead_letter_queue.clone();
    let closed = session.close().await;
    // What is deleted is deleted, also where the rest could not be, or could not go back.
    let told = if deleted.is_empty() { "nothing".into() } else { told(&deleted) };
    writeln!(io::stdout(), "deleted from {queue}: {told}")?;
    ended?;
    Ok(closed?.exit())
}

fn told(reasons: &Reasons) -> String {
    format!("{}{}", view::letters(reasons.values().sum()), view::by_reason(reasons))
}

/// As they come: nobody is asked.
async fn delete(session: &mut BrowserSession, deleted: &mut Reasons) -> anyhow::Result<()> {
    loop {
        let mut window = Vec::new();
        while window.len() < WINDOW
            && let Some(delivery) = session.next().await?
        {
            window.push((delivery.delivery_tag, reason_of(&delivery)));
        }
        if window.is_empty() {
            return Ok(());
        }
        delete_these(session, window, deleted).await?;
    }
}

async fn delete_these(
    session: &mut BrowserSession,
    letters: impl IntoIterator<Item = (DeliveryTag, String)>,
    deleted: &mut Reasons,
) -> anyhow::Result<()> {
    let mut reasons = Vec::new();
    for (delivery_tag, reason) in letters {
        session.browser.ack(delivery_tag);
        reasons.push(reason);
    }
    session.browser.settle().await?;
    for reason in reasons {
        *deleted.entry(reason).or_default() += 1;
    }
    Ok(())
}
fn reason_of(delivery: &Delivery) -> String {
    DeadLetter::of(&delivery.message).reason().to_owned()
}

/// All at once, when somebody has said yes to just these.
async fn delete_if_agreed(session: &mut BrowserSession, deleted: &mut Reasons) -> anyhow::Result<()> {
    let Held { letters, near_limit, reasons } = hold(session).await?;
    let question = format!("delete from {} {}? [y/N] ", session.pool.dead_letter_queue, told(&reasons));
    if letters.is_empty() || ask(question).await? {
        return delete_these(session, letters, deleted).await;
    }
    for delivery in near_limit {
        session.leave(delivery).await?;
    }
    Ok(())
}

/// What waits for an answer.
#[derive(Default)]
struct Held {
    letters: Vec<(DeliveryTag, String)>,
    reasons: Reasons,
    /// Those that can only be left with their bodies.
    near_limit: Vec<Delivery>,
}

/// The letters that are meant, without their bodies where nobody needs them again.
async fn hold(session: &mut BrowserSession) -> anyhow::Result<Held> {
    let (mut held, mut bytes, mut left) = (Held::default(), 0, 0);
    while let Some(delivery) = session.next().await? {
        let near_limit = session.browser.is_worn(&delivery);
        if near_limit && bytes >= HELD_BYTES {
            session.leave(delivery).await?;
            left += 1;
            continue;
        }
        let reason = reason_of(&delivery);
        *held.reasons.entry(reason.clone()).or_default() += 1;
        held.letters.push((delivery.delivery_tag, reason));
        if near_limit {
            bytes += delivery.message.body.len();
            held.near_limit.push(delivery);
        }
    }
    if left > 0 {
        let left = view::letters(left);
        tell(&format!("{left} more near the delivery limit, too large to wait for an answer: purge again"))?;
    }
    Ok(held)
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

async fn rehearse(mut session: BrowserSession) -> anyhow::Result<Exit> {
    let mut rows = Rows::at_most(rows::MOST);
    while let Some(delivery) = session.next().await? {
        let row = Row::of(&delivery, session.now());
        let error = row.error().to_owned();
        rows.add(row, error);
        session.leave(delivery).await?;
    }
    let closed = session.close().await?;
    let mut out = io::stdout().lock();
    if let Some(table) = rows.table("ERROR", view::terminal_width()) {
        writeln!(out, "{table}")?;
    }
    writeln!(out, "would delete from {}: {}", closed.queue, rows.told().0)?;
    Ok(closed.exit())
}
