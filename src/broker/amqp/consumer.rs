//! The receiving side of RabbitMQ: one task supervises sessions (connect, declare, qos, consume), passes on
//! their deliveries, and opens a new session whenever the old one ends. Owns the session; deliveries are
//! settled only on the current session's channel, because delivery tags belong to a channel.

use std::mem;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use lapin::message::Delivery;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::acker::{AmqpAcker, CurrentSession, OpenSession};
use super::admin::is_stream;
use super::cause::message;
use super::connect::{CLOSE_TIMEOUT, Connector, Failure, ReconnectPolicy};
use super::session::{Session, Subscription, cancel, delivery_from};
use super::shared_connection::SharedConnector;
use crate::broker::{BrokerError, Consumer, ConsumerEvent};

/// Smallest bound of the channel of events to the consumer's owner.
const MIN_EVENTS_BOUND: usize = 260;
/// A session that ends sooner counts as a failed attempt, and the delay before the next attempt grows.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// Receives the deliveries of one queue, over as many sessions as needed.
pub struct AmqpConsumer {
    /// Written by the supervisor. Bound: the first prefetch, at least [`MIN_EVENTS_BOUND`]. Further deliveries wait in
    /// lapin's buffer.
    events: mpsc::Receiver<Result<ConsumerEvent, BrokerError>>,
    /// Stops consuming; also cancelled by `close`. Read by the supervisor.
    cancel: CancellationToken,
    /// The prefetch that was set last. Read by the supervisor.
    prefetch: watch::Sender<u16>,
    /// The prefetch of the broker's consumer. Written by the supervisor.
    granted: Arc<AtomicU16>,
    current: CurrentSession,
    /// Ends the supervisor, which drops its end of `events` when the session is closed.
    close: CancellationToken,
}

/// Starts consuming. The first session is opened in the background; [`Consumer::next`] reports failures.
pub fn subscribe(
    connector: Connector,
    subscription: Subscription,
    prefetch: u16,
) -> (AmqpConsumer, AmqpAcker) {
    start(Arc::new(SharedConnector::new(connector)), subscription, prefetch)
}

/// As [`subscribe`], for several queues: each has a channel and a prefetch of its own, on one connection.
pub fn subscribe_all(
    connector: Connector,
    subscriptions: impl IntoIterator<Item = Subscription>,
    prefetch: u16,
) -> Vec<(AmqpConsumer, AmqpAcker)> {
    let connector = Arc::new(SharedConnector::new(connector));
    let start = |subscription| start(connector.clone(), subscription, prefetch);
    subscriptions.into_iter().map(start).collect()
}

fn start(
    connector: Arc<SharedConnector>,
    subscription: Subscription,
    prefetch: u16,
) -> (AmqpConsumer, AmqpAcker) {
    let (event_sender, events) = mpsc::channel(usize::from(prefetch).max(MIN_EVENTS_BOUND));
    let close = CancellationToken::new();
    let cancel = close.child_token();
    let granted = Arc::new(AtomicU16::new(prefetch));
    let (prefetch, prefetch_receiver) = watch::channel(prefetch);
    let current = CurrentSession::default();
    let supervisor = Supervisor {
        connector,
        subscription,
        prefetch: prefetch_receiver,
        granted: granted.clone(),
        events: event_sender,
        cancel: cancel.clone(),
        close: close.clone(),
        current: current.clone(),
    };
    tokio::spawn(supervisor.run());
    let consumer = AmqpConsumer { events, cancel, prefetch, granted, current: current.clone(), close };
    (consumer, AmqpAcker::new(current))
}

impl Consumer for AmqpConsumer {
    fn next(&mut self) -> BoxFuture<'_, Result<ConsumerEvent, BrokerError>> {
        Box::pin(async { self.events.recv().await.unwrap_or(Ok(ConsumerEvent::End)) })
    }

    fn set_prefetch(&mut self, prefetch: NonZeroU16) -> BoxFuture<'_, ()> {
        self.prefetch.send_replace(prefetch.get());
        Box::pin(std::future::ready(()))
    }

    fn granted(&self) -> u16 {
        self.granted.load(Ordering::Relaxed)
    }

    fn cancel(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            // The flag is set before the current session is read, so a session that begins meanwhile sees the flag.
            self.cancel.cancel();
            // Awaited here, not left to the supervisor: the caller returns messages to the queue after this, and a
            // consumer that still existed would get them again, out of order.
            if let Some(open) = self.current.open() {
                let consumer_tag = open.consumer_tag.lock().await;
                cancel(&open.channel, consumer_tag.clone()).await;
            }
        })
    }

    fn close(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.close.cancel();
            let closed = async { while self.events.recv().await.is_some() {} };
            let _ = tokio::time::timeout(2 * CLOSE_TIMEOUT, closed).await;
        })
    }
}

impl Drop for AmqpConsumer {
    fn drop(&mut self) {
        self.close.cancel();
    }
}

/// The task that opens sessions; see [`AmqpConsumer`] for its channels.
struct Supervisor {
    connector: Arc<SharedConnector>,
    subscription: Subscription,
    prefetch: watch::Receiver<u16>,
    granted: Arc<AtomicU16>,
    events: mpsc::Sender<Result<ConsumerEvent, BrokerError>>,
    cancel: CancellationToken,
    close: CancellationToken,
    current: CurrentSession,
}

impl Supervisor {
    async fn run(mut self) {
        let mut reconnect = ReconnectPolicy::default();
        let source = self.subscription.source();
        let mut sessions = 0;
        loop {
            let prefetch = *self.prefetch.borrow_and_update();
            let opened = tokio::select! {
                opened = Session::open(&self.connector, &self.subscription, prefetch) => opened,
                // Without a session there is nothing to cancel: the supervisor ends.
                () = self.cancel.cancelled() => return,
            };
            let failure = match opened {
                Ok(session) => {
                    let broker = session.connection.broker.clone();
                    reconnect.connected();
                    sessions += 1;
                    let (number, began) = (sessions, Instant::now());
                    let Some(reason) = self.run_session(number, session).await else { return };
                    tracing::warn!(session = number, reason, "lost the broker");
                    if self.events.send(Ok(ConsumerEvent::Lost { source, session: number })).await.is_err() {
                        return;
                    }
                    if began.elapsed() >= STABLE_AFTER {
                        reconnect.reset();
                    }
                    Failure::without_answer(broker, reason)
                }
                Err(failure) => failure,
            };
            self.current.fail(&failure);
            match reconnect.failed(failure, &self.connector) {
                Ok(delay) => tokio::select! {
                    () = tokio::time::sleep(delay) => {}
                    () = self.cancel.cancelled() => return,
                },
                Err(error) => {
                    let _ = self.events.send(Err(error)).await;
                    return;
                }
            }
        }
    }

    /// Passes on the deliveries of one session until it ends. Returns why it ended. None: the consumer's owner closed
    /// it.
    async fn run_session(&mut self, number: u64, mut session: Session) -> Option<String> {
        let consumer_tag = Arc::new(tokio::sync::Mutex::new(session.consumer.tag()));
        let channel = session.channel.clone();
        let open = OpenSession { session: number, channel, consumer_tag, ack_tracker: Arc::default() };
        self.granted.store(session.prefetch, Ordering::Relaxed);
        self.set_ack_batch_size(&open, session.prefetch);
        self.current.set(Some(open.clone()));
        let ended = self.forward(&open, &mut session).await;
        self.current.set(None);
        if ended.is_none() {
            // Waiting for the broker's answer to the close ensures that it has read every ack written before.
            let Session { channel, connection, .. } = session;
            let close = async {
                let _ = channel.close(200, "done".into()).await;
                connection.close().await;
            };
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, close).await;
        }
        ended
    }

    /// Forwards the deliveries of a session until it ends, and handles cancel, close and prefetch changes meanwhile.
    async fn forward(&mut self, open: &OpenSession, session: &mut Session) -> Option<String> {
        let mut failures = session.connection.failures();
        let mut is_cancelled = self.cancel.is_cancelled();
        let (mut stream_ended, mut is_resizing, mut is_checked) = (false, false, false);
        if is_cancelled {
            cancel(&session.channel, session.consumer.tag()).await;
        }
        loop {
            let wanted_prefetch = *self.prefetch.borrow();
            if wanted_prefetch != session.prefetch && !is_cancelled && !is_resizing {
                is_resizing = cancel_to_resize(open, session).await;
            }
            tokio::select! {
                delivered = session.consumer.next(), if !stream_ended => match delivered {
                    Some(Ok(delivery)) => {
                        // Anybody may write this header, so the queue itself is asked, once in a session.
                        if names_stream_offset(&delivery) && !mem::replace(&mut is_checked, true)
                            && let Subscription::Tasks { queue, .. } = &self.subscription
                            && is_stream(&self.connector, queue).await
                        {
                            let refusal = BrokerError::Stream { queue: queue.clone() };
                            let _ = self.events.send(Err(refusal)).await;
                            break None;
                        }
                        session.first_tag.get_or_insert(delivery.delivery_tag);
                        open.ack_tracker.lock().delivered(delivery.delivery_tag, delivery.redelivered);
                        let source = self.subscription.source();
                        let raw = session.raw_strings(delivery.delivery_tag);
                        let delivery =
                            delivery_from(delivery, raw.as_ref(), source, open.session, session.with_routing_key);
                        let event = ConsumerEvent::Delivery(Box::new(delivery));
                        if self.events.send(Ok(event)).await.is_err() {
                            break None;
                        }
                    }
                    Some(Err(error)) => break Some(message(&error)),
                    None => match self.consume_again(open, session, mem::take(&mut is_resizing)).await {
                        Ok(true) => {}
                        Ok(false) => {
                            is_cancelled = true;
                            stream_ended = true;
                            let _ = self.events.send(Ok(ConsumerEvent::End)).await;
                        }
                        Err(lost) => break Some(lost),
                    },
                },
                () = self.cancel.cancelled(), if !is_cancelled => is_cancelled = true,
                Ok(()) = self.prefetch.changed(), if !is_cancelled && !is_resizing => {}
                changed = failures.changed() => {
                    // Another channel of the connection may have failed, which does not concern this session.
                    let reason = failures.borrow_and_update().clone();
                    if changed.is_err() || !session.is_open() {
                        break Some(reason.unwrap_or_else(|| "the connection ended".into()));
                    }
                }
                () = self.close.cancelled() => break None,
            }
        }
    }

    /// Handles the end of a consumer's stream, which comes once for each consumer. Creates a new consumer and returns
    /// true if we cancelled the old one to change the prefetch (`is_resizing`). False: the owner cancelled.
    async fn consume_again(
        &mut self,
        open: &OpenSession,
        session: &mut Session,
        is_resizing: bool,
    ) -> Result<bool, String> {
        // The lock is held from reading the flag until the broker has the new consumer, so that a cancel in between
        // waits for the new consumer's tag. The flag is up to date, because `cancel` sets it before it sends the
        // command.
        let mut consumer_tag = open.consumer_tag.lock().await;
        if self.cancel.is_cancelled() {
            return Ok(false);
        }
        if !is_resizing {
            return Err("the broker cancelled the consumer; was the queue deleted?".into());
        }
        let prefetch = *self.prefetch.borrow_and_update();
        session.consume_again(prefetch, &self.connector).await.map_err(|error| message(&error))?;
        *consumer_tag = session.consumer.tag();
        self.granted.store(prefetch, Ordering::Relaxed);
        self.set_ack_batch_size(open, prefetch);
        tracing::debug!(prefetch, "prefetch changed");
        Ok(true)
    }

    /// Makes the acks of a pool's queues wait until their number is a quarter of the prefetch. Acks of other queues
    /// never wait. RabbitMQ does not write the acks of private queues to disk.
    fn set_ack_batch_size(&self, open: &OpenSession, prefetch: u16) {
        if let Subscription::Tasks { .. } = self.subscription {
            open.ack_tracker.lock().set_batch_size(usize::from(prefetch) / 4);
        }
    }
}

/// Whether a delivery has the header that those of a stream have.
fn names_stream_offset(delivery: &Delivery) -> bool {
    let headers = delivery.properties.headers().as_ref();
    headers.is_some_and(|headers| headers.contains_key("x-stream-offset"))
}

/// Cancels the consumer, so that a new one with another prefetch can be created. Acks are held back meanwhile. Returns
/// false, and cancels nothing, if a cancel is not safe now.
///
/// A cancel is safe only while no delivery is in transit: RabbitMQ would requeue that delivery, count it as failed and
/// deliver it again. No delivery is in transit while the unsettled messages of this consumer fill its prefetch and no
/// ack is being sent. All messages of earlier consumers must be settled too, so the unsettled messages never belong to
/// more than two consumers. A prefetch that never fills limits nothing, so it need not change.
async fn cancel_to_resize(open: &OpenSession, session: &Session) -> bool {
    let is_safe =
        open.ack_tracker.lock().hold(session.first_tag.unwrap_or(u64::MAX), session.prefetch.into());
    if is_safe {
        cancel(&session.channel, session.consumer.tag()).await;
        open.send_acks().await;
    }
    is_safe
}
