//! The two tasks of a worker's connection: one writes requests, one reads answers and passes them on. Owns both
//! halves of the socket, and the publishes that wait for their confirms.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::BytesMut;
use futures_util::StreamExt;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio_util::codec::FramedRead;
use tokio_util::sync::CancellationToken;

use super::SESSION;
use crate::broker::embedded::wire::{FLUSH_AT, Frame, FrameCodec, Response, WireError, append};
use crate::broker::{Delivery, DeliveryTag, Published};
use crate::protocol::Message;

/// A publish that waits for its confirm. The permit is its place in the pipeline.
pub(super) type Confirm = (oneshot::Sender<Published>, OwnedSemaphorePermit);

/// The publishes that wait for their confirms. Publishers add, the reader task removes and closes. The lock is
/// held for map operations only. Bound: the pipeline's permits.
#[derive(Default)]
pub(super) struct Waiting {
    confirms: Mutex<HashMap<u64, Confirm>>,
    /// Cancelled by the reader task, under the lock, when the connection ends.
    pub over: CancellationToken,
}

impl Waiting {
    fn confirms(&self) -> MutexGuard<'_, HashMap<u64, Confirm>> {
        self.confirms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False: the connection has ended.
    pub fn add(&self, id: u64, confirm: Confirm) -> bool {
        let mut confirms = self.confirms();
        // Checked under the lock, so that `close` misses no publish.
        if self.over.is_cancelled() {
            return false;
        }
        confirms.insert(id, confirm);
        true
    }

    pub fn answer(&self, id: u64, outcome: Published) {
        if let Some((publisher, _permit)) = self.confirms().remove(&id) {
            // Fails only when the publisher no longer waits.
            let _ = publisher.send(outcome);
        }
    }

    pub fn close(&self) {
        let mut confirms = self.confirms();
        self.over.cancel();
        confirms.clear();
    }
}

/// A message from the reader task to the consumer.
pub(super) enum Incoming {
    Consuming,
    Delivery(Box<Delivery>),
    Cancelled,
    Left,
    Refused(Option<String>),
}

/// Writes requests until all handles are dropped or the socket fails.
pub(super) async fn write_all(mut write: OwnedWriteHalf, mut queued: mpsc::Receiver<Frame>) {
    let mut gathered = BytesMut::new();
    while let Some(frame) = queued.recv().await {
        append(&frame, &mut gathered);
        // Small requests are collected into one write.
        if !queued.is_empty() && gathered.len() < FLUSH_AT {
            continue;
        }
        if let Err(error) = write.write_all_buf(&mut gathered).await {
            tracing::debug!(%error, "the launcher's queue cannot be written");
            return;
        }
    }
}

/// Reads answers until the socket ends; then fails all waiting publishes.
pub(super) async fn read_all(read: OwnedReadHalf, answers: mpsc::Sender<Incoming>, waiting: Arc<Waiting>) {
    let mut frames = FramedRead::new(read, FrameCodec);
    while let Some(frame) = frames.next().await {
        let answer = match frame.and_then(|frame| read_one(frame, &waiting)) {
            Ok(answer) => answer,
            Err(error) => Some(Incoming::Refused(Some(error.to_string()))),
        };
        let Some(answer) = answer else { continue };
        let last = matches!(answer, Incoming::Refused(_));
        // Fails only when the consumer is dropped: its deliveries return when the connection ends.
        let _ = answers.try_send(answer);
        if last {
            break;
        }
    }
    waiting.close();
}

fn read_one(frame: Frame, waiting: &Waiting) -> Result<Option<Incoming>, WireError> {
    let (id, outcome) = match frame.head()? {
        Response::Confirmed { id } => (id, Published::Confirmed),
        Response::Unroutable { id } => (id, Published::Unroutable),
        Response::Refused { id, reason } => (id, Published::Refused(reason)),
        Response::Consuming => return Ok(Some(Incoming::Consuming)),
        Response::Cancelled => return Ok(Some(Incoming::Cancelled)),
        Response::Left => return Ok(Some(Incoming::Left)),
        Response::Closed { reason } => return Ok(Some(Incoming::Refused(reason))),
        Response::Deliver { tag, redelivered, delivery_count, properties } => {
            let message = Message { properties: *properties, body: frame.body };
            let delivery_tag = DeliveryTag { session: SESSION, tag };
            let delivery_count = Some(delivery_count);
            let delivery = Delivery { message, delivery_tag, routing_key: None, redelivered, delivery_count };
            return Ok(Some(Incoming::Delivery(Box::new(delivery))));
        }
    };
    waiting.answer(id, outcome);
    Ok(None)
}
