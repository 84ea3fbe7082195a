//! `sconce dead requeue`: publishes dead letters to their queues, and removes from the dead-letter queue only
//! what the broker has confirmed there (`confirm-before-ack`).

use std::io::{self, Write};
use std::sync::Arc;

use futures_util::future::join_all;

use super::rows::{self, Rows};
use super::selection::Selection;
use super::session::{BrowserSession, Fate};
use super::tell;
use super::view::{self, Row};
use crate::broker::{BrokerError, Delivery, Published, Publisher};
use crate::cli::{DeadRequeue, DeadWhich};
use crate::protocol::dead_letter::restored;
use crate::shutdown::Exit;

/// Dead letters published at once: the most that a crash may leave in both queues.
const WINDOW: usize = 64;
/// Most bytes of their bodies.
const WINDOW_BYTES: usize = 16 << 20;

/// How many dead letters went to the task queue, and how many could not go.
#[derive(Default)]
struct Requeued {
    went: usize,
    stayed: usize,
}

/// Requeues, or prints what it would do.
pub(super) async fn run(arguments: &DeadRequeue) -> anyhow::Result<Exit> {
    let DeadWhich { source, ids, filters, .. } = &arguments.which;
    let mut session = BrowserSession::open(source, ids, filters).await?;
    let (mut requeued, mut rows) = (Requeued::default(), Rows::at_most(rows::MOST));
    let ended = match arguments.dry_run {
        true => {
            let rehearse = |delivery: &Delivery, selection: &Selection| {
                let to = match selection.stays(delivery) {
                    None => {
                        requeued.went += 1;
                        selection.task_queue.clone()
                    }
                    Some(why) => {
                        requeued.stayed += 1;
                        format!("stays: {why}")
                    }
                };
                rows.add(Row::of(delivery, selection.now).to(to));
                Fate::Leave
            };
            session.for_each(rehearse).await
        }
        false => requeue(&mut session, &mut requeued).await,
    };
    let task_queue = view::printable(&session.selection.task_queue);
    let closed = session.close().await;
    let mut out = io::stdout().lock();
    rows.write_table(&mut out, "TO")?;
    // Printed also after an error: dead letters requeued by then stay requeued.
    let verb = if arguments.dry_run { "would requeue" } else { "requeued" };
    match requeued.went {
        0 => writeln!(out, "{verb} no dead letter")?,
        went => writeln!(out, "{verb} {} to {task_queue}", view::dead_letters(went))?,
    }
    if requeued.stayed > 0 {
        writeln!(out, "{} asked for, but not requeued", view::dead_letters(requeued.stayed))?;
    }
    ended?;
    let exit = closed?;
    Ok(if requeued.stayed > 0 { Exit::No } else { exit })
}

async fn requeue(session: &mut BrowserSession, requeued: &mut Requeued) -> Result<(), BrokerError> {
    loop {
        let window = window(session).await?;
        if window.is_empty() {
            return Ok(());
        }
        let sent = join_all(window.iter().map(|delivery| send(session, delivery))).await;
        let mut ended = Ok(());
        for (sent, delivery) in sent.into_iter().zip(window) {
            let settled = match sent {
                Ok(None) => {
                    requeued.went += 1;
                    session.browser.ack(delivery.delivery_tag).await
                }
                Ok(Some(why)) => {
                    let [id, reason, ..] = Row::of(&delivery, session.selection.now).cells();
                    // A closed stderr must not prevent the acks of confirmed messages.
                    let _ = tell(&format!("dead letter {id} ({reason}) stays: {why}"));
                    requeued.stayed += 1;
                    session.browser.leave(delivery).await
                }
                Err(error) => Err(error),
            };
            ended = ended.and(settled);
        }
        session.browser.flush().await?;
        ended?;
    }
}

async fn window(session: &mut BrowserSession) -> Result<Vec<Delivery>, BrokerError> {
    let (mut window, mut bytes) = (Vec::new(), 0);
    while window.len() < WINDOW
        && bytes < WINDOW_BYTES
        && let Some(delivery) = session.next().await?
    {
        bytes += delivery.message.body.len();
        window.push(delivery);
    }
    Ok(window)
}

/// Why it stays; none: the task queue has confirmed it.
async fn send(session: &BrowserSession, delivery: &Delivery) -> Result<Option<String>, BrokerError> {
    if let Some(why) = session.selection.stays(delivery) {
        return Ok(Some(why));
    }
    let queue = session.selection.task_queue.as_str();
    let message = Arc::new(restored(delivery.message.clone()));
    Ok(match session.browser.publisher().publish(queue, message).await? {
        Published::Confirmed => None,
        Published::Unroutable => Some(format!("queue {queue:?} does not exist")),
        Published::Nacked => Some(format!("queue {queue:?} takes no message now; is it full?")),
        Published::Refused(words) | Published::Forbidden(words) => Some(format!("queue {queue:?}: {words}")),
    })
}
