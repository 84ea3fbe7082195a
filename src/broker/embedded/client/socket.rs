//! The task that reads the answers to a worker's connection, and passes them on. Owns the read half of the socket, and the
//! publishes that wait for their confirms.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::{mpsc, oneshot};
use tokio_util::codec::FramedRead;
use tokio_util::sync::CancellationToken;

use crate::broker::Published;
use crate::broker::embedded::wire::{FrameCodec, LauncherHead};

/// The publishes that wait for their confirms. Publishers add, the reader task removes and closes. The lock is
/// held for map operations only. Bound: the publishes that callers wait for.
#[derive(Default)]
pub(super) struct UnconfirmedPublishes {
    confirms: Mutex<HashMap<u64, oneshot::Sender<Published>>>,
    /// Cancelled by the reader task, under the lock, when the connection ends.
    pub closed: CancellationToken,
}

impl UnconfirmedPublishes {
    /// Registers a publish. False: the connection has ended.
    pub fn add(&self, id: u64, confirm: oneshot::Sender<Published>) -> bool {
        let mut confirms = self.confirms.lock();
        // Checked under the lock, so that `close` misses no publish.
        if self.closed.is_cancelled() {
            return false;
        }
        confirms.insert(id, confirm);
        true
    }

    /// Reports the outcome of a publish to its caller.
    pub fn answer(&self, id: u64, outcome: Published) {
        if let Some(sender) = self.confirms.lock().remove(&id) {
            // Fails only if the caller no longer waits.
            let _ = sender.send(outcome);
        }
    }

    /// Fails all waiting publishes, and all later ones.
    pub fn close(&self) {
        let mut confirms = self.confirms.lock();
        self.closed.cancel();
        confirms.clear();
    }
}

/// An answer to the consumer, with the body of a delivery; or why the connection ends.
pub(super) type Incoming = Result<(LauncherHead, Bytes), String>;

/// Reads answers until the socket ends; then fails all waiting publishes.
pub(super) async fn read_all(
    read: OwnedReadHalf,
    answers: mpsc::Sender<Incoming>,
    unconfirmed: Arc<UnconfirmedPublishes>,
) {
    let mut frames = FramedRead::new(read, FrameCodec);
    while let Some(frame) = frames.next().await {
        let answer = match frame.and_then(|frame| Ok((frame.head()?, frame.body))) {
            Ok((LauncherHead::Confirmed { id }, _)) => {
                unconfirmed.answer(id, Published::Confirmed);
                continue;
            }
            Ok((LauncherHead::Unroutable { id }, _)) => {
                unconfirmed.answer(id, Published::Unroutable);
                continue;
            }
            Ok((LauncherHead::Closed { reason: Some(reason) }, _)) => Err(reason),
            Ok((LauncherHead::Closed { reason: None }, _)) => break,
            other => other.map_err(|error| error.to_string()),
        };
        let last = answer.is_err();
        // Fails only if the consumer was dropped. Its deliveries return to the queue when the connection ends.
        let _ = answers.try_send(answer);
        if last {
            break;
        }
    }
    unconfirmed.close();
}
