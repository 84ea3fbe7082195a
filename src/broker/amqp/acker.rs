//! Settles deliveries on the session that delivered them. Decides how acks and returns are paced: by the
//! `ack_tracker`, and with fixed pauses where RabbitMQ needs time but gives no sign when it is done.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, try_join_all};
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicNackOptions};
use lapin::types::ShortString;
use parking_lot::Mutex;

use super::ack_tracker::{Ack, AckTracker, Flush};
use super::connect::Failure;
use crate::broker::{Acker, DeliveryTag};

/// How long the broker takes to act on settlements, with a margin. It does not report that it has acted.
/// `ack_tracker` explains which acks could be lost.
const FLUSH_WAIT: Duration = Duration::from_millis(100);
/// How long an ack waits for others. The broker writes each ack command to disk. A client that has received a reply may
/// send its next task at once, and that task would wait for the write. Within 2 ms that task has been delivered, so the
/// write no longer delays it.
const GATHER_TIME: Duration = Duration::from_millis(2);
/// Number of deliveries returned between two pauses: half of the 32 commands that RabbitMQ allows under way on a quorum
/// queue (see `ack_tracker`).
const RETURNS_PER_PAUSE: usize = 16;
/// The pause after [`RETURNS_PER_PAUSE`] returned deliveries.
const RETURN_PAUSE: Duration = Duration::from_millis(10);

/// The current session, or why there is none. Written by the supervisor when a session begins, ends or cannot be
/// opened; read by every settle and by a cancel. The lock is held only to clone or replace the value.
#[derive(Clone, Default)]
pub(super) struct CurrentSession(Arc<Mutex<SessionState>>);

#[derive(Default)]
struct SessionState {
    open: Option<OpenSession>,
    trouble: Option<String>,
}

impl CurrentSession {
    pub(super) fn open(&self) -> Option<OpenSession> {
        self.0.lock().open.clone()
    }

    pub(super) fn set(&self, open: Option<OpenSession>) {
        *self.0.lock() = SessionState { open, trouble: None };
    }

    /// Records why there is no session.
    pub(super) fn fail(&self, failure: &Failure) {
        self.0.lock().trouble = Some(format!("{}: {}", failure.broker, failure.reason));
    }
}

/// The parts of an open session that settling needs.
#[derive(Clone)]
pub(super) struct OpenSession {
    pub(super) session: u64,
    pub(super) channel: Channel,
    /// The consumer's tag. Written by the supervisor when it makes a new consumer, and read by a cancel. Both hold
    /// the lock until the broker has answered.
    pub(super) consumer_tag: Arc<tokio::sync::Mutex<ShortString>>,
    /// Written by the supervisor for each delivery, and by every settle. The lock is held for a few instructions.
    pub(super) ack_tracker: Arc<Mutex<AckTracker>>,
}

impl OpenSession {
    /// Acks a delivery. Concurrent acks are combined into few commands: the caller that sends also sends the acks
    /// that arrive meanwhile. False: the session is over.
    async fn ack(&self, tag: u64) -> bool {
        let flush = self.ack_tracker.lock().ack(tag);
        if flush == Flush::Delegated {
            return true;
        }
        let open = self.clone();
        let send = async move {
            if flush == Flush::Gather {
                tokio::time::sleep(GATHER_TIME).await;
                if !open.ack_tracker.lock().become_sender() {
                    return true;
                }
            }
            open.send_acks().await
        };
        // A task of its own, because the acks of others depend on it: it must finish even if this caller is cancelled.
        tokio::spawn(send).await.unwrap_or(false)
    }

    /// Sends the waiting acks, as the sender. False: the session is over.
    pub(super) async fn send_acks(&self) -> bool {
        loop {
            // The other replies of a batch are confirmed at the same moment, so their acks can go with these.
            tokio::task::yield_now().await;
            let acks = self.ack_tracker.lock().take();
            if acks.is_empty() {
                return true;
            }
            let send = |Ack { tag, multiple }| self.channel.basic_ack(tag, BasicAckOptions { multiple });
            // Each future ends once its command is written: awaited one by one, each would be a separate
            // write.
            if try_join_all(acks.into_iter().map(send)).await.is_err() {
                return false;
            }
        }
    }
}

/// Settles deliveries of the current session on its channel; shared.
pub struct AmqpAcker {
    current: CurrentSession,
    /// Number of deliveries returned so far. Written by every `requeue`.
    returned: tokio::sync::Mutex<usize>,
}

impl AmqpAcker {
    pub(super) fn new(current: CurrentSession) -> Self {
        Self { current, returned: tokio::sync::Mutex::new(0) }
    }

    /// The session of this delivery; none if it is over.
    fn open(&self, delivery_tag: DeliveryTag) -> Option<OpenSession> {
        self.current.open().filter(|open| open.session == delivery_tag.session)
    }
}

impl Acker for AmqpAcker {
    fn ack(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        Box::pin(async move {
            match self.open(delivery_tag) {
                Some(open) => open.ack(delivery_tag.tag).await,
                None => false,
            }
        })
    }

    fn requeue(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        Box::pin(async move {
            let Some(open) = self.open(delivery_tag) else { return false };
            // The lock is held during the command, so that returns keep their order.
            let mut returned = self.returned.lock().await;
            *returned += 1;
            if *returned % RETURNS_PER_PAUSE == 0 {
                tokio::time::sleep(RETURN_PAUSE).await;
            }
            let requeue = BasicNackOptions { requeue: true, multiple: false };
            let sent = open.channel.basic_nack(delivery_tag.tag, requeue).await.is_ok();
            open.ack_tracker.lock().returned(delivery_tag.tag);
            sent
        })
    }

    fn flush(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if self.current.open().is_some() {
                tokio::time::sleep(FLUSH_WAIT).await;
            }
        })
    }

    fn is_connected(&self) -> bool {
        self.current.open().is_some()
    }

    fn trouble(&self) -> Option<String> {
        self.current.0.lock().trouble.clone()
    }
}
