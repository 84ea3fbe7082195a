//! Serves one worker's connection: passes its requests to the queue store, and writes the answers to its
//! socket. Owns both halves of the socket and the worker's one consumer; returns the consumer's unsettled
//! messages when the connection ends, however it ends. Decides nothing about messages.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::codec::FramedRead;
use tokio_util::sync::CancellationToken;

use super::queue::{ConsumerId, Queue};
use super::queue_store::{ConsumerSender, Membership, OUTLET_BOUND, QueueStore};
use super::wire::{FLUSH_AT, Frame, FrameCodec, Request, Response, WireError, append};
use crate::protocol::Message;

/// How long a peer may take to read its last answers when the connection ends.
const LAST_ANSWERS_TIMEOUT: Duration = Duration::from_secs(1);

/// Reads the requests of one connection, and owns its consumer.
struct Reader {
    queue_store: Arc<QueueStore>,
    consumer_sender: ConsumerSender,
    member: Option<Membership>,
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
    let (messages, outgoing) = mpsc::channel(OUTLET_BOUND);
    let consumer_sender = ConsumerSender { id, messages, cut: CancellationToken::new() };
    let writer = tokio::spawn(write_all(write, outgoing, consumer_sender.cut.clone()));
    let mut reader = Reader { queue_store, consumer_sender, member: None };
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
        let cut = self.consumer_sender.cut.clone();
        loop {
            let frame = tokio::select! {
                () = cut.cancelled() => return Ending::Aborted("the worker did not read its answers".to_owned()),
                () = stop.cancelled() => return Ending::Aborted("the launcher is stopping".to_owned()),
                frame = frames.next() => frame,
            };
            let ending = match frame {
                None | Some(Err(WireError::Io(_))) => Some(Ending::Disconnected),
                Some(Err(error)) => Some(Ending::Aborted(error.to_string())),
                Some(Ok(frame)) => match frame.head() {
                    Ok(request) => self.handle(request, frame.body),
                    Err(error) => Some(Ending::Aborted(error.to_string())),
                },
            };
            if let Some(ending) = ending {
                return ending;
            }
        }
    }

    fn handle(&mut self, request: Request, body: Bytes) -> Option<Ending> {
        match request {
            Request::Publish { id, queue, properties, delay } => {
                let message = Message { properties: *properties, body };
                self.queue_store.publish(&self.consumer_sender, id, &queue, delay, message);
            }
            Request::Consume { queue, prefetch } => {
                if self.member.is_some() {
                    return Some(Ending::Aborted("a second consumer on one connection".to_owned()));
                }
                self.member = self.queue_store.join(&queue, prefetch, self.consumer_sender.clone());
                return self.member.is_none().then(|| Ending::Aborted(format!("no queue {queue:?}")));
            }
            Request::Prefetch { prefetch } => self.change(|queue, id| {
                queue.set_prefetch(id, prefetch);
                true
            }),
            Request::Cancel => self.member.into_iter().for_each(|member| self.queue_store.cancel(member)),
            Request::Ack { tag } => self.change(|queue, id| queue.ack(id, tag)),
            Request::Nack { tag } => self.change(|queue, id| queue.requeue(id, tag)),
            Request::Leave => {
                self.leave();
                self.consumer_sender.send(Response::Left, Bytes::new());
            }
            Request::Close => return Some(Ending::Requested),
        }
        None
    }

    /// Applies `act` to the consumer's queue. `act` returns false for a delivery that the consumer does not hold.
    fn change(&self, act: impl FnOnce(&mut Queue, ConsumerId) -> bool) {
        if self.member.is_some_and(|member| !self.queue_store.change(member, act)) {
            tracing::warn!(
                connection = self.consumer_sender.id,
                "the worker settled a delivery that it does not hold"
            );
        }
    }

    fn leave(&mut self) {
        if let Some(member) = self.member.take() {
            self.queue_store.leave(member);
        }
    }

    fn end(&mut self, ending: Ending) {
        self.leave();
        let reason = match ending {
            Ending::Disconnected => return,
            Ending::Requested => None,
            Ending::Aborted(reason) => Some(reason),
        };
        tracing::debug!(connection = self.consumer_sender.id, reason, "closing a worker's connection");
        self.consumer_sender.send(Response::Closed { reason }, Bytes::new());
    }
}

async fn write_all(
    mut write: OwnedWriteHalf,
    mut outgoing: mpsc::Receiver<(Response, Bytes)>,
    cut: CancellationToken,
) {
    let mut gathered = BytesMut::new();
    while let Some((response, body)) = outgoing.recv().await {
        match Frame::new(&response, body) {
            Ok(frame) => append(&frame, &mut gathered),
            Err(error) => {
                tracing::error!(%error, "cannot write an answer to a worker");
                return cut.cancel();
            }
        }
        // Small answers are collected into one write.
        if !outgoing.is_empty() && gathered.len() < FLUSH_AT {
            continue;
        }
        if let Err(error) = write.write_all_buf(&mut gathered).await {
            tracing::debug!(%error, "cannot write to a worker's connection");
            return cut.cancel();
        }
    }
}
