//! The receiving side of a worker's connection: turns the reader task's messages into events. Owns the
//! deliveries not yet taken. Never reads the socket.

use std::num::NonZeroU16;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use super::socket::Incoming;
use super::{Connection, SESSION, unreachable_queue};
use crate::broker::embedded::wire::{LauncherHead, WorkerHead};
use crate::broker::{BrokerError, Consumer, ConsumerEvent, Delivery, DeliveryTag, Source};
use crate::protocol::Message;

/// One subscription over the shared connection.
pub(super) struct SocketConsumer {
    connection: Arc<Connection>,
    incoming: mpsc::Receiver<Incoming>,
    prefetch: NonZeroU16,
    /// No more deliveries follow.
    ended: bool,
}

impl SocketConsumer {
    /// Subscribes, and waits for the launcher's answer.
    pub async fn subscribe(
        connection: Arc<Connection>,
        incoming: mpsc::Receiver<Incoming>,
        queue: String,
        prefetch: NonZeroU16,
    ) -> Result<Self, BrokerError> {
        let mut consumer = Self { connection, incoming, prefetch, ended: false };
        consumer.connection.send(&WorkerHead::Consume { queue, prefetch }).await?;
        match consumer.incoming.recv().await {
            Some(Ok((LauncherHead::Consuming, _))) => Ok(consumer),
            Some(Err(reason)) => {
                Err(BrokerError::Refused { broker: consumer.connection.path.clone(), reason })
            }
            _ => Err(consumer.connection.closed_error()),
        }
    }
}

impl Consumer for SocketConsumer {
    fn next(&mut self) -> BoxFuture<'_, Result<ConsumerEvent, BrokerError>> {
        async move {
            while !self.ended {
                match self.incoming.recv().await {
                    Some(Ok((
                        LauncherHead::Deliver { tag, redelivered, delivery_count, properties },
                        body,
                    ))) => {
                        return Ok(ConsumerEvent::Delivery(Box::new(Delivery {
                            message: Message { properties: *properties, body },
                            delivery_tag: DeliveryTag { source: Source::FIRST, session: SESSION, tag },
                            routing_key: None,
                            redelivered,
                            delivery_count: Some(delivery_count),
                        })));
                    }
                    Some(Ok((LauncherHead::Cancelled | LauncherHead::Left, _))) => self.ended = true,
                    Some(Ok(_)) => {}
                    Some(Err(reason)) => return Err(unreachable_queue(&self.connection.path, &reason)),
                    None => return Err(self.connection.closed_error()),
                }
            }
            Ok(ConsumerEvent::End)
        }
        .boxed()
    }

    fn set_prefetch(&mut self, prefetch: NonZeroU16) -> BoxFuture<'_, ()> {
        self.prefetch = prefetch;
        async move {
            // If this fails, `next` reports the error.
            let _ = self.connection.send(&WorkerHead::Prefetch { prefetch }).await;
        }
        .boxed()
    }

    fn granted(&self) -> u16 {
        self.prefetch.get()
    }

    fn cancel(&mut self) -> BoxFuture<'_, ()> {
        async move {
            // If this fails, `next` reports the error.
            let _ = self.connection.send(&WorkerHead::Cancel).await;
        }
        .boxed()
    }

    fn close(&mut self) -> BoxFuture<'_, ()> {
        async move {
            if self.connection.consumer_closed.is_cancelled() {
                return;
            }
            self.connection.consumer_closed.cancel();
            if self.connection.send(&WorkerHead::Leave).await.is_err() {
                return;
            }
            // Deliveries that arrive meanwhile are dropped: the launcher returns their messages to the queue.
            while let Some(answer) = self.incoming.recv().await {
                if matches!(answer, Ok((LauncherHead::Left, _))) {
                    break;
                }
            }
            self.ended = true;
        }
        .boxed()
    }
}
