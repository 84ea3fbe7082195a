//! `sconce dead requeue`: publishes letters to where they belong, and takes out of the dead-letter
//! queue what the broker has confirmed there (`confirm-before-ack`), and only that.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Arc;

use futures_util::future::join_all;

use super::rows::{self, Rows};
use super::session::{BrowserSession, Closed};
use super::tell;
use super::view::{self, Row};
use crate::broker::amqp::AmqpPublisher;
use crate::broker::{BrokerError, Delivery, Published, Publisher};
use crate::cli::DeadRequeue;
use crate::config::Pool;
use crate::protocol::dead_letter::{DeadLetter, restored};
use crate::shutdown::Exit;

/// Letters published at once: what a crash may leave in both queues.
const WINDOW: usize = 64;
/// And bytes of their bodies.
const WINDOW_BYTES: usize = 16 << 20;

/// Requeues, or says what it would.
pub(super) async fn run(arguments: &DeadRequeue) -> anyhow::Result<Exit> {
    let mut session = BrowserSession::open(&arguments.source, &arguments.ids, &arguments.filters).await?;
    let mut done = Done::default();
    if arguments.dry_run {
        let rows = rehearse(&mut session, &mut done).await?;
        let closed = session.close().await?;
        if let Some(table) = rows.table("TO", view::terminal_width()) {
            writeln!(io::stdout(), "{table}")?;
        }
        done.tell(true)?;
        return Ok(done.exit(&closed));
    }
    let publisher = session.publisher();
    let ended = requeue(&mut session, &publisher, &mut done).await;
    publisher.close().await;
    let closed = session.close().await;
    // What is done is done, also where the rest could not be, or could not go back.
    done.tell(false)?;
    ended?;
    Ok(done.exit(&closed?))
}

/// What became of the letters.
#[derive(Default)]
struct Done {
    /// How many went to which queue.
    requeued: BTreeMap<String, usize>,
    stayed: usize,
}

impl Done {
    fn exit(&self, closed: &Closed) -> Exit {
        if self.stayed > 0 { Exit::No } else { closed.exit() }
    }

    fn tell(&self, rehearsed: bool) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let verb = if rehearsed { "would requeue" } else { "requeued" };
        for (queue, count) in &self.requeued {
            writeln!(out, "{verb} {} to {}", view::letters(*count), view::printable(queue))?;
        }
        if self.requeued.is_empty() {
            writeln!(out, "{verb} no letter")?;
        }
        match self.stayed {
            0 => Ok(()),
            stayed => writeln!(out, "{} asked for, but not requeued", view::letters(stayed)),
        }
    }
}

fn destination(delivery: &Delivery, pool: &Pool, by_name: bool) -> Result<String, String> {
    let letter = DeadLetter::of(&delivery.message);
    let queue = letter.destination(&pool.task_queue, by_name);
    queue.map(str::to_owned)
}

async fn rehearse(session: &mut BrowserSession, done: &mut Done) -> anyhow::Result<Rows> {
    let mut rows = Rows::at_most(rows::MOST);
    while let Some(delivery) = session.next().await? {
        let row = Row::of(&delivery, session.now());
        match destination(&delivery, &session.pool, session.by_name()) {
            Ok(queue) => {
                *done.requeued.entry(queue.clone()).or_default() += 1;
                rows.add(row, queue);
            }
            Err(why) => {
                rows.add(row, format!("stays: {why}"));
                done.stayed += 1;
            }
        }
        session.leave(delivery).await?;
    }
    Ok(rows)
}

async fn requeue(
    session: &mut BrowserSession,
    publisher: &AmqpPublisher,
    done: &mut Done,
) -> anyhow::Result<()> {
    loop {
        let window = window(session).await?;
        if window.is_empty() {
            return Ok(());
        }
        let (pool, by_name) = (session.pool.clone(), session.by_name());
        let sends = window.iter().map(|delivery| send(publisher, delivery, &pool, by_name));
        let mut broken = None;
        for (sent, delivery) in join_all(sends).await.into_iter().zip(window) {
            let why = match sent {
                Ok(Ok(queue)) => {
                    session.browser.ack(delivery.delivery_tag);
                    *done.requeued.entry(queue).or_default() += 1;
                    continue;
                }
                Ok(Err(why)) => why,
                Err(error) => {
                    broken = Some(error);
                    continue;
                }
            };
            let row = Row::of(&delivery, session.now());
            let [id, reason, ..] = row.cells("");
            // Nothing may stand between a confirm and its ack.
            let _ = tell(&format!("letter {id} ({reason}) stays: {why}"));
            done.stayed += 1;
            if let Err(error) = session.leave(delivery).await {
                broken = Some(error);
            }
        }
        session.browser.settle().await?;
        if let Some(error) = broken {
            return Err(error.into());
        }
    }
}

/// The next letters to publish.
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

/// The queue that has it now, or why none has.
async fn send(
    publisher: &AmqpPublisher,
    delivery: &Delivery,
    pool: &Pool,
    by_name: bool,
) -> Result<Result<String, String>, BrokerError> {
    let queue = match destination(delivery, pool, by_name) {
        Ok(queue) => queue,
        Err(why) => return Ok(Err(why)),
    };
    let message = Arc::new(restored(delivery.message.clone()));
    Ok(match publisher.publish(&queue, message).await? {
        Published::Confirmed => Ok(queue),
        Published::Unroutable => Err(format!("queue {queue:?} does not exist")),
        Published::Nacked => Err(format!("queue {queue:?} takes no message now; is it full?")),
        Published::Refused(words) | Published::Forbidden(words) => Err(format!("queue {queue:?}: {words}")),
    })
}
