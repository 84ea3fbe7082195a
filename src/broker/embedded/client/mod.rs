//! A worker's side of the embedded queue: one Unix connection behind the broker traits. The acker and the publisher are
//! in this file. When the socket closes, the launcher has ended: everything fails and nothing reconnects.

mod consumer;
mod socket;

use std::num::NonZeroU16;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use self::consumer::SocketConsumer;
use self::socket::{UnconfirmedPublishes, read_all};
use super::wire::{Frame, WorkerHead, too_long, write_all};
use crate::broker::{
    Acker, BrokerError, BrokerSession, Delay, DeliveryTag, PublishFuture, PublishResult, Published, Publisher,
};
use crate::protocol::Message;

/// There is only one session, because nothing reconnects.
const SESSION: u64 = 1;

/// Bound of the requests that wait for the socket; further callers wait.
const REQUESTS_BOUND: usize = 64;

/// Connects to the launcher's socket at `path` and consumes `queue`, with at most `prefetch` unsettled deliveries.
///
/// # Errors
/// [`BrokerError::Unreachable`]: the launcher does not answer; [`BrokerError::Refused`]: the queue does not
/// exist. The worker exits on either.
pub async fn connect(path: &Path, queue: String, prefetch: NonZeroU16) -> Result<BrokerSession, BrokerError> {
    let stream = UnixStream::connect(path).await;
    let path = path.display().to_string();
    let stream = stream.map_err(|error| unreachable_queue(&path, &error.to_string()))?;
    let (read, write) = stream.into_split();
    // Consumer, acker and publisher write, the writer task reads. The bound is small, because the socket has a buffer
    // too.
    let (requests, queued) = mpsc::channel(REQUESTS_BOUND);
    // The reader task writes, the consumer reads. Bound: the largest prefetch, and the four answers that are not
    // deliveries. So the reader never waits, and confirms never wait until deliveries are taken.
    let (answers, incoming) = mpsc::channel(usize::from(u16::MAX) + 4);
    let unconfirmed = Arc::new(UnconfirmedPublishes::default());
    tokio::spawn(async move {
        if let Err(error) = write_all(write, queued, Ok).await {
            tracing::debug!(%error, "cannot write to the launcher's queue");
        }
    });
    tokio::spawn(read_all(read, answers, unconfirmed.clone()));
    let connection = Arc::new(Connection {
        path,
        requests,
        unconfirmed,
        next_id: AtomicU64::new(0),
        consumer_closed: CancellationToken::new(),
    });
    let consumer = SocketConsumer::subscribe(connection.clone(), incoming, queue, prefetch).await?;
    let acker = connection.clone();
    Ok(BrokerSession { consumer: Box::new(consumer), further: Vec::new(), acker, publisher: connection })
}

fn unreachable_queue(path: &str, reason: &str) -> BrokerError {
    BrokerError::Unreachable { seconds: 0, reason: format!("the launcher's queue at {path}: {reason}") }
}

/// The state of the connection that consumer, acker and publisher share.
struct Connection {
    /// The path of the socket.
    path: String,
    requests: mpsc::Sender<Frame>,
    unconfirmed: Arc<UnconfirmedPublishes>,
    next_id: AtomicU64,
    /// Cancelled when the consumer closes: its deliveries can no longer be settled.
    consumer_closed: CancellationToken,
}

impl Connection {
    fn closed_error(&self) -> BrokerError {
        unreachable_queue(&self.path, "the connection is closed")
    }

    fn frame(&self, head: &WorkerHead, body: Bytes) -> Result<Frame, BrokerError> {
        Frame::new(head, body).map_err(|error| unreachable_queue(&self.path, &error.to_string()))
    }

    async fn send(&self, head: &WorkerHead) -> Result<(), BrokerError> {
        let frame = self.frame(head, Bytes::new())?;
        if self.unconfirmed.closed.is_cancelled() {
            return Err(self.closed_error());
        }
        self.requests.send(frame).await.map_err(|_| self.closed_error())
    }

    async fn settle(&self, delivery_tag: DeliveryTag, head: WorkerHead) -> bool {
        delivery_tag.session == SESSION
            && !self.consumer_closed.is_cancelled()
            && self.send(&head).await.is_ok()
    }
}

impl Acker for Connection {
    fn ack(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        self.settle(delivery_tag, WorkerHead::Ack { tag: delivery_tag.tag }).boxed()
    }

    fn requeue(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        self.settle(delivery_tag, WorkerHead::Nack { tag: delivery_tag.tag }).boxed()
    }

    /// Does nothing: settlements and the close share one stream, which the launcher reads in order.
    fn flush(&self) -> BoxFuture<'_, ()> {
        std::future::ready(()).boxed()
    }

    /// Always true: the connection lasts as long as the launcher.
    fn is_connected(&self) -> bool {
        true
    }
}

impl Connection {
    /// Publishes a message, and waits for the launcher's answer.
    async fn publish_after(
        &self,
        queue: &str,
        delay: Option<Duration>,
        message: Arc<Message>,
    ) -> PublishResult {
        if let Some(reason) = too_long(&message) {
            return Ok(Published::Refused(reason));
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let Message { properties, body } = Arc::unwrap_or_clone(message);
        let properties = Box::new(properties);
        let head = WorkerHead::Publish { id, queue: queue.to_owned(), properties, delay };
        let frame = self.frame(&head, body)?;
        // Room in the channel is reserved first, so that this future cannot be dropped between `add` and `send`.
        let permit = self.requests.reserve().await.map_err(|_| self.closed_error())?;
        let (answer, answered) = oneshot::channel();
        if !self.unconfirmed.add(id, answer) {
            return Err(self.closed_error());
        }
        permit.send(frame);
        answered.await.map_err(|_| self.closed_error())
    }
}

impl Publisher for Connection {
    fn publish<'a>(&'a self, queue: &'a str, message: Arc<Message>) -> PublishFuture<'a> {
        self.publish_after(queue, None, message).boxed()
    }

    fn publish_later<'a>(&'a self, queue: &'a str, delay: Delay, message: Arc<Message>) -> PublishFuture<'a> {
        self.publish_after(queue, Some(delay.after), message).boxed()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        async move {
            if self.send(&WorkerHead::Close).await.is_ok() {
                self.unconfirmed.closed.cancelled().await;
            }
        }
        .boxed()
    }
}
