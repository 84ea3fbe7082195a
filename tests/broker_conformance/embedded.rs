//! The rig of the embedded queue: its own broker and socket for each case.

use std::num::NonZeroU16;
use std::sync::atomic::{AtomicUsize, Ordering};

use sconce::broker::Published;
use sconce::broker::embedded::{EmbeddedBroker, QueueSpec, connect};
use sconce::protocol::Message;

use crate::rig::{Link, Rig};

/// Queues are made at the start; a case needs few.
const QUEUES: usize = 4;
/// A queue that holds nothing, for a connection that only publishes.
const QUIET: &str = "quiet";

pub struct EmbeddedRig {
    broker: EmbeddedBroker,
    used: AtomicUsize,
    /// Dropped after the broker, which removes its own folder inside.
    _folder: tempfile::TempDir,
}

impl Rig for EmbeddedRig {
    async fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let queues: Vec<QueueSpec> = (0..QUEUES)
            .map(|n| QueueSpec { name: format!("queue-{n}"), kept: true })
            .chain([QueueSpec { name: QUIET.into(), kept: true }])
            .collect();
        let path = folder.path().join("queue").join("socket");
        let broker = EmbeddedBroker::bind(path, &queues).expect("the socket");
        Self { broker, used: AtomicUsize::new(0), _folder: folder }
    }

    async fn fresh_queue(&self) -> String {
        let n = self.used.fetch_add(1, Ordering::Relaxed);
        assert!(n < QUEUES, "a case uses more queues than the rig makes");
        format!("queue-{n}")
    }

    async fn open(&self, queue: &str, prefetch: u16) -> Link {
        let prefetch = NonZeroU16::new(prefetch).expect("a prefetch");
        let link = connect(self.broker.path(), queue.to_owned(), prefetch).await.expect("a connection");
        Link { consumer: link.consumer, acker: link.acker, publisher: link.publisher }
    }

    async fn crash(&self, link: Link) {
        // The last handle closes the socket, as the kernel does for a dead process.
        drop(link);
    }

    async fn publish(&self, queue: &str, message: Message) {
        let link = self.open(QUIET, 1).await;
        assert_eq!(link.publisher.publish(queue, message.into()).await.ok(), Some(Published::Confirmed));
    }

    async fn ready(&self, queue: &str) -> usize {
        self.broker.stats(queue).expect("a queue of the rig").ready
    }
}
