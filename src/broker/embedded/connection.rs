//! Serves one worker's connection: passes its requests to the queue store, and writes the answers to its socket. Owns
//! both halves of the socket and the worker's one consumer. When the connection ends in any way, returns the consumer's
//! unsettled messages to the queue. Decides nothing about messages.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::codec::FramedRead;
use tokio_util::sync::CancellationToken;

use super::queue::{ConsumerId, Queue};
use super::queue_store::{ConnectionOutlet, ConsumerKey, OUTLET_BOUND, QueueStore};
use super::wire::{Frame, FrameCodec, LauncherHead, WireError, WorkerHead, write_all};
use crate::protocol::Message;

/// How long a peer may take to read its last answers when the connection ends.
const LAST_ANSWERS_TIMEOUT: Duration = Duration::from_secs(1);

/// Reads the requests of one connection, and owns its consumer.
struct Reader {
    queue_store: Arc<QueueStore>,
    /// Sends answers to the connection's writer.
    outlet: ConnectionOutlet,
    /// The connection's consumer, once it consumes.
    consumer: Option<ConsumerKey>,
}

/// Why a connection ends.
enum Ending {
    /// The worker closed it.
    Requested,
    /// The socket was closed or failed.
    Disconnected,
    /// We close it, for this reason: the worker broke the protocol, or the launcher stops.
    Aborted(String),
}

/// Serves until the worker closes the connection, disappears or breaks the protocol, or until `stop` is cancelled.
pub(super) async fn serve(
    id: u64,
    stream: UnixStream,
    queue_store: Arc<QueueStore>,
    stop: CancellationToken,
) {
    let (read, write) = stream.into_split();
    let (frames, outgoing) = mpsc::channel(OUTLET_BOUND);
    let outlet = ConnectionOutlet { id, frames, disconnect: CancellationToken::new() };
    let disconnect = outlet.disconnect.clone();
    let writer = tokio::spawn(async move {
        if let Err(error) = write_all(write, outgoing, |(head, body)| Frame::new(&head, body)).await {
            tracing::debug!(%error, "cannot write to a worker's connection");
            disconnect.cancel();
        }
    });
    let mut reader = Reader { queue_store, outlet, consumer: None };
    let ending = reader.read_all(read, stop).await;
    reader.end(ending);
    // This drops the last sender: the writer ends when it has written what is left.
    drop(reader);
    let writing = writer.abort_handle();
    if timeout(LAST_ANSWERS_TIMEOUT, writer).await.is_err() {
        writing.abort();
    }
}

impl Reader {
    async fn read_all(&mut self, read: OwnedReadHalf, stop: CancellationToken) -> Ending {
        let mut frames = FramedRead::new(read, FrameCodec);
        let disconnect = self.outlet.disconnect.clone();
        loop {
            let frame = tokio::select! {
                () = disconnect.cancelled() => {
                    return Ending::Aborted("answers to the worker cannot be written".to_owned());
                }
                () = stop.cancelled() => return Ending::Aborted("the launcher is stopping".to_owned()),
                frame = frames.next() => frame,
            };
            let ending = match frame {
                None | Some(Err(WireError::Io(_))) => Some(Ending::Disconnected),
                Some(Err(error)) => Some(Ending::Aborted(error.to_string())),
                Some(Ok(frame)) => match frame.head() {
                    Ok(head) => self.handle(head, frame.body),
                    Err(error) => Some(Ending::Aborted(error.to_string())),
                },
            };
            if let Some(ending) = ending {
                return ending;
            }
        }
    }

    fn handle(&mut self, head: WorkerHead, body: Bytes) -> Option<Ending> {
        match head {
            WorkerHead::Publish { id, queue, properties, delay } => {
                let message = Message { properties: *properties, body };
                self.queue_store.publish(&self.outlet, id, &queue, delay, message);
            }
            WorkerHead::Consume { queue, prefetch } => return self.consume(&queue, prefetch),
            WorkerHead::Prefetch { prefetch } => {
                if let Some(consumer) = self.consumer {
                    self.queue_store.change(consumer, |queue, id| queue.set_prefetch(id, prefetch));
                }
            }
            WorkerHead::Cancel => {
                if let Some(consumer) = self.consumer {
                    self.queue_store.cancel_consumer(consumer);
                }
            }
            WorkerHead::Ack { tag } => self.settle(|queue, id| queue.ack(id, tag)),
            WorkerHead::Nack { tag } => self.settle(|queue, id| queue.requeue(id, tag)),
            WorkerHead::Leave => {
                self.remove_consumer();
                self.outlet.send(LauncherHead::Left, Bytes::new());
            }
            WorkerHead::Close => return Some(Ending::Requested),
        }
        None
    }

    /// Adds the connection's consumer. Returns why that ends the connection, if it does.
    fn consume(&mut self, queue: &str, prefetch: NonZeroU16) -> Option<Ending> {
        if self.consumer.is_some() {
            return Some(Ending::Aborted("a second consumer on one connection".to_owned()));
        }
        self.consumer = self.queue_store.add_consumer(queue, prefetch, self.outlet.clone());
        self.consumer.is_none().then(|| Ending::Aborted(format!("no queue {queue:?}")))
    }

    /// Settles a delivery with `change`, which returns false for a delivery that the consumer does not hold.
    fn settle(&self, change: impl FnOnce(&mut Queue, ConsumerId) -> bool) {
        if self.consumer.is_some_and(|consumer| !self.queue_store.change(consumer, change)) {
            tracing::warn!(
                connection = self.outlet.id,
                "the worker settled a delivery that it does not hold"
            );
        }
    }

    fn remove_consumer(&mut self) {
        if let Some(consumer) = self.consumer.take() {
            self.queue_store.remove_consumer(consumer);
        }
    }

    fn end(&mut self, ending: Ending) {
        self.remove_consumer();
        let reason = match ending {
            Ending::Disconnected => return,
            Ending::Requested => None,
            Ending::Aborted(reason) => Some(reason),
        };
        tracing::debug!(connection = self.outlet.id, reason, "closing a worker's connection");
        self.outlet.send(LauncherHead::Closed { reason }, Bytes::new());
    }
}
