//! Serves one worker's connection: passes its requests to the queue store, and writes the answers to its
//! socket. Owns both halves of the socket and the worker's one consumer; returns the consumer's unsettled
//! messages when the connection ends, however it ends. Decides nothing about messages.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
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

use super::consumer_sender::{ConsumerSender, OUTLET_BOUND, Outgoing};
use super::queue_store::{Membership, QueueStore};
use super::wire::{FLUSH_AT, Frame, FrameCodec, MAX_PIPELINE, Request, Response, WireError, append};
use crate::broker::Published;
use crate::protocol::Message;

/// How long a peer may take to read its last answers when the connection ends.
const LAST_LINES: Duration = Duration::from_secs(1);

struct Reader {
    queue_store: Arc<QueueStore>,
    consumer_sender: ConsumerSender,
    member: Option<Membership>,
    /// Number of publishes not yet answered: the reader adds, the writer subtracts. Bound: `MAX_PIPELINE`.
    unanswered: Arc<AtomicUsize>,
}

enum Ending {
    /// The worker asked for it.
    Asked,
    /// The socket was closed or failed.
    Gone,
    /// The worker broke the protocol, or the broker is shutting down.
    Cut(String),
}

/// Serves until the worker closes, disappears or breaks the protocol, or `stop` is cancelled.
pub(super) async fn serve(
    id: u64,
    stream: UnixStream,
    queue_store: Arc<QueueStore>,
    stop: CancellationToken,
) {
    let (read, write) = stream.into_split();
    let (messages, outgoing) = mpsc::channel(OUTLET_BOUND);
    let consumer_sender = ConsumerSender { id, messages, cut: CancellationToken::new() };
    let unanswered = Arc::new(AtomicUsize::new(0));
    let writer = tokio::spawn(write_all(write, outgoing, consumer_sender.cut.clone(), unanswered.clone()));
    let mut reader = Reader { queue_store, consumer_sender, member: None, unanswered };
    let ending = reader.read_all(read, stop).await;
    reader.end(ending);
    // This drops the last sender: the writer ends when it has written what is left.
    drop(reader);
    let writing = writer.abort_handle();
    if timeout(LAST_LINES, writer).await.is_err() {
        writing.abort();
    }
}

impl Reader {
    async fn read_all(&mut self, read: OwnedReadHalf, stop: CancellationToken) -> Ending {
        let mut frames = FramedRead::new(read, FrameCodec);
        let cut = self.consumer_sender.cut.clone();
        loop {
            let frame = tokio::select! {
                () = cut.cancelled() => return Ending::Cut("answers were not read".to_owned()),
                () = stop.cancelled() => return Ending::Cut("the launcher stops".to_owned()),
                frame = frames.next() => frame,
            };
            let ending = match frame {
                None | Some(Err(WireError::Io(_))) => Some(Ending::Gone),
                Some(Err(error)) => Some(Ending::Cut(error.to_string())),
                Some(Ok(frame)) => match frame.head() {
                    Ok(request) => self.handle(request, frame.body),
                    Err(error) => Some(Ending::Cut(error.to_string())),
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
                if self.unanswered.fetch_add(1, Ordering::Relaxed) >= MAX_PIPELINE {
                    return Some(Ending::Cut(format!("more than {MAX_PIPELINE} unanswered publishes")));
                }
                let message = Message { properties: *properties, body };
                match delay {
                    None => self.queue_store.publish_from(&self.consumer_sender, id, &queue, message),
                    Some(delay) => self.queue_store.clone().publish_later(
                        &self.consumer_sender,
                        id,
                        queue,
                        (delay, message),
                    ),
                }
                None
            }
            Request::Consume { queue, prefetch } => {
                if self.member.is_some() {
                    return Some(Ending::Cut("a second consumer on one connection".to_owned()));
                }
                self.member = self.queue_store.join(&queue, prefetch, self.consumer_sender.clone());
                self.member.is_none().then(|| Ending::Cut(format!("no queue {queue:?}")))
            }
            Request::Prefetch { prefetch } => {
                self.with_member(|queue_store, member| queue_store.set_prefetch(member, prefetch));
                None
            }
            Request::Cancel => {
                self.with_member(|queue_store, member| queue_store.cancel(member));
                None
            }
            Request::Ack { tag } => {
                self.settle(tag, QueueStore::ack);
                None
            }
            Request::Nack { tag } => {
                self.settle(tag, QueueStore::requeue);
                None
            }
            Request::Leave => {
                self.leave();
                self.consumer_sender.send(Outgoing::Left);
                None
            }
            Request::Close => Some(Ending::Asked),
        }
    }

    fn with_member(&self, act: impl FnOnce(&QueueStore, Membership)) {
        if let Some(member) = self.member {
            act(&self.queue_store, member);
        }
    }

    fn settle(&self, tag: u64, how: impl FnOnce(&QueueStore, Membership, u64) -> bool) {
        self.with_member(|queue_store, member| {
            if !how(queue_store, member, tag) {
                tracing::warn!(connection = self.consumer_sender.id, tag, "settled a delivery not held");
            }
        });
    }

    fn leave(&mut self) {
        if let Some(member) = self.member.take() {
            self.queue_store.leave(member);
        }
    }

    fn end(&mut self, ending: Ending) {
        self.leave();
        self.queue_store.forget(&self.consumer_sender);
        match ending {
            Ending::Asked => self.consumer_sender.send(Outgoing::Closed { reason: None }),
            Ending::Gone => {
                tracing::debug!(connection = self.consumer_sender.id, "worker's connection ended");
            }
            Ending::Cut(reason) => {
                tracing::debug!(connection = self.consumer_sender.id, reason, "ending worker's connection");
                self.consumer_sender.send(Outgoing::Closed { reason: Some(reason) });
            }
        }
    }
}

async fn write_all(
    mut write: OwnedWriteHalf,
    mut outgoing: mpsc::Receiver<Outgoing>,
    cut: CancellationToken,
    unanswered: Arc<AtomicUsize>,
) {
    let mut gathered = BytesMut::new();
    while let Some(message) = outgoing.recv().await {
        // Subtracted before the answer is written: the worker publishes its next message only after reading it.
        if matches!(message, Outgoing::Published { .. }) {
            unanswered.fetch_sub(1, Ordering::Relaxed);
        }
        let frame = match frame(message) {
            Ok(frame) => frame,
            Err(error) => {
                tracing::error!(%error, "cannot write an answer to a worker");
                return cut.cancel();
            }
        };
        append(&frame, &mut gathered);
        // Small answers are collected into one write.
        if !outgoing.is_empty() && gathered.len() < FLUSH_AT {
            continue;
        }
        if let Err(error) = write.write_all_buf(&mut gathered).await {
            tracing::debug!(%error, "worker's connection cannot be written");
            return cut.cancel();
        }
    }
}

fn frame(message: Outgoing) -> Result<Frame, WireError> {
    let mut body = Bytes::new();
    let response = match message {
        Outgoing::Deliver(queue_delivery) => {
            let queue_delivery = *queue_delivery;
            body = queue_delivery.message.body;
            Response::Deliver {
                tag: queue_delivery.tag,
                redelivered: queue_delivery.redelivered,
                delivery_count: queue_delivery.delivery_count,
                properties: Box::new(queue_delivery.message.properties),
            }
        }
        Outgoing::Published { id, outcome: Published::Confirmed } => Response::Confirmed { id },
        Outgoing::Published { id, outcome: Published::Unroutable } => Response::Unroutable { id },
        Outgoing::Published { id, outcome: Published::Refused(reason) } => Response::Refused { id, reason },
        // Does not occur: the queue store delays a confirm instead.
        Outgoing::Published { id, outcome: Published::Nacked | Published::Forbidden(_) } => {
            Response::Refused { id, reason: "not taken".into() }
        }
        Outgoing::Consuming => Response::Consuming,
        Outgoing::Cancelled => Response::Cancelled,
        Outgoing::Left => Response::Left,
        Outgoing::Closed { reason } => Response::Closed { reason },
    };
    Frame::new(&response, body)
}
