//! What the queue store says to one connection.
//! Decides what happens to a peer that does not read: it is cut off, nobody waits for it.

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::queue::QueueDelivery;
use super::wire::MAX_PIPELINE;
use crate::broker::Published;

/// What goes to one consumer or publisher.
#[derive(Debug)]
pub(super) enum Outgoing {
    Deliver(Box<QueueDelivery>),
    Published { id: u64, outcome: Published },
    Consuming,
    Cancelled,
    Left,
    Closed { reason: Option<String> },
}

/// The queue store's way to one connection.
#[derive(Clone, Debug)]
pub(super) struct ConsumerSender {
    /// Names it among all connections.
    pub id: u64,
    /// The queue store and the connection's reader write, its writer reads. Bound: [`OUTLET_BOUND`], which
    /// prefetch and pipelining keep it below, so a send never waits.
    pub messages: mpsc::Sender<Outgoing>,
    /// Cancelled by whoever finds that the peer keeps no bound; its reader listens.
    pub cut: CancellationToken,
}

/// What a sender holds at most: a full prefetch, every confirm of the pipeline, and the few
/// answers to consume, cancel, leave and close.
pub(super) const OUTLET_BOUND: usize = u16::MAX as usize + MAX_PIPELINE + 8;

impl ConsumerSender {
    /// Sends without waiting. A full sender is a peer that takes more than it may: it is cut off,
    /// and what it held returns when its connection ends.
    pub fn send(&self, message: Outgoing) {
        if self.messages.try_send(message).is_err() {
            self.cut.cancel();
        }
    }
}
