//! The queue store's messages to one connection. A peer that does not read is disconnected; nobody waits for
//! it.

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::queue::QueueDelivery;
use super::wire::MAX_PIPELINE;
use crate::broker::Published;

/// A message to one consumer or publisher.
#[derive(Debug)]
pub(super) enum Outgoing {
    Deliver(Box<QueueDelivery>),
    Published { id: u64, outcome: Published },
    Consuming,
    Cancelled,
    Left,
    Closed { reason: Option<String> },
}

/// The queue store's handle of one connection.
#[derive(Clone, Debug)]
pub(super) struct ConsumerSender {
    /// The connection's number.
    pub id: u64,
    /// The queue store and the connection's reader write; its writer reads. Bound: [`OUTLET_BOUND`], which
    /// prefetch and pipelining never exceed, so a send never waits.
    pub messages: mpsc::Sender<Outgoing>,
    /// Cancelled when the peer exceeds a bound; its reader listens.
    pub cut: CancellationToken,
}

/// The most messages a sender holds: a full prefetch, every confirm of the pipeline, and the few answers to
/// consume, cancel, leave and close.
pub(super) const OUTLET_BOUND: usize = u16::MAX as usize + MAX_PIPELINE + 8;

impl ConsumerSender {
    /// Sends without waiting. If the channel is full, the peer has exceeded its bounds: it is disconnected, and
    /// its deliveries return to the queue when its connection ends.
    pub fn send(&self, message: Outgoing) {
        if self.messages.try_send(message).is_err() {
            self.cut.cancel();
        }
    }
}
