//! The launcher's side of the embedded queue: listens on a private Unix socket, accepts workers,
//! and is itself the producer of tasks and the consumer of replies. Owns the socket's folder, which
//! it makes and removes. Decides nothing about messages: that is the hub's.

use std::io;
use std::num::NonZeroU16;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::connection::serve;
use super::consumer_sender::{ConsumerSender, Outgoing};
use super::queue::{QueueDelivery, Stats};
use super::queue_store::{Membership, QueueSpec, QueueStore};
use crate::broker::Published;
use crate::protocol::Message;

/// Unsettled messages that a consumer inside the launcher may hold.
const LOCAL_PREFETCH: NonZeroU16 = NonZeroU16::new(256).expect("256 is not zero");

/// After a failed accept (no file descriptors left): the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The queues of one launcher, and the socket that workers reach them by. Dropped: stops serving,
/// and removes the socket and its folder.
pub struct EmbeddedBroker {
    queue_store: Arc<QueueStore>,
    path: PathBuf,
    /// Ids of outlets: the accept loop and `consume` draw.
    next_outlet: Arc<AtomicU64>,
    /// Cancelled by `shutdown` and drop; the accept loop and each connection listen.
    stop: CancellationToken,
    /// The accept loop and each connection.
    tasks: TaskTracker,
}

impl EmbeddedBroker {
    /// Makes the queues and listens at `path`. The folder that holds `path` is made here, for this
    /// user alone, and must not exist yet. To be called inside a tokio runtime.
    ///
    /// # Errors
    /// The folder exists or cannot be made, the path is too long for a socket (about 100 bytes), a
    /// queue is named twice, or a dead-letter queue is missing: the operator or caller mends it.
    pub fn bind(path: impl Into<PathBuf>, queues: &[QueueSpec]) -> io::Result<Self> {
        let path = path.into();
        let queue_store =
            QueueStore::new(queues).map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        let folder = path.parent().unwrap_or(Path::new("/"));
        // Private from its first moment, and never someone else's folder taken over.
        std::fs::DirBuilder::new().mode(0o700).create(folder).map_err(|error| at(folder, &error))?;
        let listener = match UnixListener::bind(&path) {
            Ok(listener) => listener,
            Err(error) => {
                // Ours and empty; the bind's error says more than a failure here.
                let _ = std::fs::remove_dir(folder);
                return Err(at(&path, &error));
            }
        };
        let broker = Self {
            queue_store: Arc::new(queue_store),
            path,
            next_outlet: Arc::new(AtomicU64::new(0)),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        broker.tasks.spawn(accept_all(
            listener,
            broker.queue_store.clone(),
            broker.next_outlet.clone(),
            broker.stop.clone(),
            broker.tasks.clone(),
        ));
        Ok(broker)
    }

    /// Where workers connect.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts a message into a queue; waits while that is full. Dropped while waiting: not put.
    pub async fn publish(&self, queue: &str, message: Message) -> Published {
        self.queue_store.publish_when_room(queue, message).await
    }

    /// Takes messages from a queue inside the launcher. None: no such queue.
    pub fn consume(&self, queue: &str) -> Option<LocalConsumer> {
        let id = self.next_outlet.fetch_add(1, Ordering::Relaxed);
        // The hub writes, the `LocalConsumer` reads. Bound: the prefetch, and the first answer.
        let (messages, incoming) = mpsc::channel(usize::from(LOCAL_PREFETCH.get()) + 1);
        let consumer_sender = ConsumerSender { id, messages, cut: CancellationToken::new() };
        let member = self.queue_store.join(queue, LOCAL_PREFETCH, consumer_sender)?;
        Some(LocalConsumer { queue_store: self.queue_store.clone(), member, incoming })
    }

    /// How full a queue is. None: no such queue.
    pub fn stats(&self, queue: &str) -> Option<Stats> {
        self.queue_store.stats(queue)
    }

    /// Tells every worker that it ends, waits until their connections are closed, a second at most
    /// each. Publishing and consuming inside the launcher go on until the broker is dropped.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for EmbeddedBroker {
    fn drop(&mut self) {
        self.stop.cancel();
        self.queue_store.end();
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        let removed = std::fs::remove_file(&self.path).and_then(|()| std::fs::remove_dir(folder));
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the queue's socket");
        }
    }
}

fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

async fn accept_all(
    listener: UnixListener,
    queue_store: Arc<QueueStore>,
    ids: Arc<AtomicU64>,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let id = ids.fetch_add(1, Ordering::Relaxed);
                tasks.spawn(serve(id, stream, queue_store.clone(), stop.clone()));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a worker; trying again");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// A consumer inside the launcher. Dropped: what it took and did not ack returns to the queue.
pub struct LocalConsumer {
    queue_store: Arc<QueueStore>,
    member: Membership,
    incoming: mpsc::Receiver<Outgoing>,
}

impl LocalConsumer {
    /// The next message; waits for one. None when the broker is dropped. Safe to cancel.
    pub async fn next(&mut self) -> Option<Taken> {
        loop {
            if let Outgoing::Deliver(queue_delivery) = self.incoming.recv().await? {
                return Some(Taken {
                    queue_store: self.queue_store.clone(),
                    member: self.member,
                    queue_delivery: *queue_delivery,
                });
            }
        }
    }
}

impl Drop for LocalConsumer {
    fn drop(&mut self) {
        self.queue_store.leave(self.member);
    }
}

/// A message taken inside the launcher, the queue's until acked.
pub struct Taken {
    queue_store: Arc<QueueStore>,
    member: Membership,
    queue_delivery: QueueDelivery,
}

impl Taken {
    /// The message.
    pub fn message(&self) -> &Message {
        &self.queue_delivery.message
    }

    /// Removes it from the queue. Dropped without this, it returns when its consumer ends.
    pub fn ack(self) -> Message {
        self.queue_store.ack(self.member, self.queue_delivery.tag);
        self.queue_delivery.message
    }
}
