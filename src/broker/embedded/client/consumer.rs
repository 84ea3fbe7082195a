//! The receiving side of a worker's connection: turns the reader task's messages into events. Owns the
//! deliveries not yet taken. Never reads the socket.

use std::num::NonZeroU16;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use super::socket::Incoming;
use super::{Subscription, Wire, unreached};
use crate::broker::embedded::wire::Request;
use crate::broker::{BrokerError, Consumer, Event};

/// One subscription over the shared connection.
pub(super) struct SocketConsumer {
    wire: Arc<Wire>,
    incoming: mpsc::Receiver<Incoming>,
    ended: bool,
}

impl SocketConsumer {
    /// Subscribes, and waits for the launcher's answer.
    pub async fn subscribe(
        wire: Arc<Wire>,
        incoming: mpsc::Receiver<Incoming>,
        subscription: Subscription,
    ) -> Result<Self, BrokerError> {
        let mut consumer = Self { wire, incoming, ended: false };
        let Subscription { queue, prefetch } = subscription;
        consumer.wire.send(&Request::Consume { queue, prefetch }).await?;
        match consumer.incoming.recv().await {
            Some(Incoming::Consuming) => Ok(consumer),
            Some(Incoming::Refused(Some(reason))) => {
                Err(BrokerError::Refused { broker: consumer.wire.at.clone(), reason })
            }
            _ => Err(consumer.wire.gone()),
        }
    }
}

impl Consumer for SocketConsumer {
    fn next(&mut self) -> BoxFuture<'_, Result<Event, BrokerError>> {
        async move {
            while !self.ended {
                match self.incoming.recv().await {
                    Some(Incoming::Delivery(delivery)) => return Ok(Event::Delivery(delivery)),
                    Some(Incoming::Cancelled | Incoming::Left) => self.ended = true,
                    Some(Incoming::Consuming) => {}
                    Some(Incoming::Refused(Some(reason))) => {
                        return Err(unreached(&self.wire.at, &reason));
                    }
                    Some(Incoming::Refused(None)) | None => return Err(self.wire.gone()),
                }
            }
            Ok(Event::End)
        }
        .boxed()
    }

    fn set_prefetch(&mut self, prefetch: NonZeroU16) -> BoxFuture<'_, ()> {
        async move {
            // When this fails, `next` says so.
            let _ = self.wire.send(&Request::Prefetch { prefetch }).await;
        }
        .boxed()
    }

    fn cancel(&mut self) -> BoxFuture<'_, ()> {
        async move {
            // When this fails, `next` says so.
            let _ = self.wire.send(&Request::Cancel).await;
        }
        .boxed()
    }

    fn close(&mut self) -> BoxFuture<'_, ()> {
        async move {
            if self.wire.consumer_closed.is_cancelled() {
                return;
            }
            self.wire.consumer_closed.cancel();
            if self.wire.send(&Request::Leave).await.is_err() {
                return;
            }
            // Messages delivered meanwhile return to the queue.
            while let Some(answer) = self.incoming.recv().await {
                if matches!(answer, Incoming::Left) {
                    break;
                }
            }
            self.ended = true;
        }
        .boxed()
    }
}
