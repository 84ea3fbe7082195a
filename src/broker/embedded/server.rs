//! The launcher's side of the embedded queue: listens on a private Unix socket and accepts connections of workers and
//! of the launcher's own client. Owns the socket's folder, which it creates and removes. Leaves all decisions about
//! messages to the queue store.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::connection::serve;
use super::queue::QueueCounts;
use super::queue_store::{QueueSpec, QueueStore};

/// Pause after a failed accept, for example when no file descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The queues of one launcher, and the socket for workers. Dropping it stops serving, and removes the socket and its
/// folder.
pub struct EmbeddedBroker {
    queue_store: Arc<QueueStore>,
    path: PathBuf,
    /// Cancelled by `shutdown` and drop. It ends the accept loop and all connections.
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl EmbeddedBroker {
    /// Creates the queues and listens at `path`. Creates the folder of `path` for this user alone; it must not exist
    /// yet. Call inside a tokio runtime.
    ///
    /// # Errors
    /// The folder exists or cannot be created, the path is too long for a socket (about 100 bytes), or a queue is
    /// named twice.
    pub fn bind(path: impl Into<PathBuf>, queues: &[QueueSpec]) -> io::Result<Self> {
        let path = path.into();
        let queue_store =
            QueueStore::new(queues).map_err(|reason| io::Error::new(io::ErrorKind::InvalidInput, reason))?;
        let folder = path.parent().unwrap_or(Path::new("/"));
        // Created with its final mode, so it is never open to others; an existing folder is an error.
        std::fs::DirBuilder::new().mode(0o700).create(folder).map_err(|error| with_path(folder, &error))?;
        let listener = match UnixListener::bind(&path) {
            Ok(listener) => listener,
            Err(error) => {
                // The folder is ours and empty. The error of the bind says more than an error of this call.
                let _ = std::fs::remove_dir(folder);
                return Err(with_path(&path, &error));
            }
        };
        let broker = Self {
            queue_store: Arc::new(queue_store),
            path,
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        broker.tasks.spawn(accept_all(
            listener,
            broker.queue_store.clone(),
            broker.stop.clone(),
            broker.tasks.clone(),
        ));
        Ok(broker)
    }

    /// The socket that workers connect to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of messages of a queue, by their state. None: no such queue.
    pub fn stats(&self, queue: &str) -> Option<QueueCounts> {
        self.queue_store.stats(queue)
    }

    /// Returns once a queue holds no message: each one was acked. Returns at once if there is no such queue.
    pub async fn drained(&self, queue: &str) {
        self.queue_store.drained(queue).await;
    }

    /// Ends all connections, tells each peer the reason, and waits until all are closed. They close at the same time,
    /// each within about a second.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for EmbeddedBroker {
    fn drop(&mut self) {
        self.stop.cancel();
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        let removed = std::fs::remove_file(&self.path).and_then(|()| std::fs::remove_dir(folder));
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the queue's socket");
        }
    }
}

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

async fn accept_all(
    listener: UnixListener,
    queue_store: Arc<QueueStore>,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    for id in 0.. {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                tasks.spawn(serve(id, stream, queue_store.clone(), stop.clone()));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a worker; trying again");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}
