//! The readers of the reply queue and of the dead letters: take each message, enter it into the
//! ledger, and ack it only then, so that what we have not counted comes again. Own their connections,
//! made anew when the broker goes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use tokio::time::sleep;

use super::ledger::{Seen, digest};
use super::producers::{Desk, now};
use crate::support::client::Received;

const WINDOW: u16 = 200;
const AGAIN: Duration = Duration::from_millis(200);

/// Which list a queue's messages go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    Replies,
    Letters,
}

/// Reads a queue until aborted.
pub async fn read(desk: Arc<Desk>, queue: String, list: List) {
    static SESSIONS: AtomicU64 = AtomicU64::new(0);
    loop {
        let session = SESSIONS.fetch_add(1, Ordering::SeqCst);
        // Whatever ends a session, the next one goes on.
        let _ = session_of(&desk, &queue, (list, session)).await;
        sleep(AGAIN).await;
    }
}

async fn session_of(desk: &Desk, queue: &str, (list, session): (List, u64)) -> lapin::Result<()> {
    let name = ConnectionProperties::default().with_connection_name("soak reader".into());
    let connection = Connection::connect(&desk.url, name).await?;
    let channel = connection.create_channel().await?;
    channel.basic_qos(WINDOW, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    let mut consumer = channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await?;
    while let Some(delivery) = consumer.next().await {
        let Delivery { acker, data, properties, redelivered, .. } = delivery?;
        enter(desk, Received::new(data, properties, redelivered), (list, session));
        acker.ack(BasicAckOptions::default()).await?;
    }
    Ok(())
}

fn enter(desk: &Desk, message: Received, (list, session): (List, u64)) {
    let id = message.correlation_id.clone();
    let mut ledger = desk.ledger();
    let queued = message.headers.get("queue_us").and_then(serde_json::Value::as_u64).map(|us| us / 1_000);
    let begun = ledger.published_at(&id).zip(queued).map(|(published, queued)| published + queued);
    let (code, reason) = (message.header("status_code"), message.header("reason"));
    let worker = message.header("worker");
    let seen = Seen {
        at: now(),
        session,
        redelivered: message.redelivered,
        message_id: message.properties.message_id().as_ref().map(ToString::to_string).unwrap_or_default(),
        verdict: if list == List::Replies { code } else { reason },
        // Without the host, which all share.
        worker: worker.split_once('/').map_or(worker.as_str(), |(_, slot)| slot).to_owned(),
        attempt: message.header("attempt"),
        begun,
        body: digest(&message.raw),
    };
    match list {
        List::Replies => ledger.reply(&id, seen),
        List::Letters => ledger.letter(&id, seen),
    }
}
