//! The receiving side of RabbitMQ: one task supervises sessions (connect, declare, qos, consume),
//! pumps their deliveries, and makes a new one whenever the old one ends, for whatever reason. Owns
//! the session; settling works on the current session's channel and on no other, because delivery
//! tags are a channel's own.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use lapin::options::{BasicCancelOptions, BasicConsumeOptions, BasicQosOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Connection, Error, ErrorKind};
use tokio::sync::{mpsc, oneshot, watch};

use super::connect::{Connector, Failure, Outage, words};
use super::convert::{properties_from, short};
use super::settler::{AmqpSettler, Current, Open, current};
use super::topology::Topology;
use crate::broker::{BrokerError, Consumer, Delivery, Event, Receipt};
use crate::protocol::Message;

/// Longest wait for the broker's answer to a cancel or close.
const FAREWELL: Duration = Duration::from_secs(5);
/// A session that ends sooner counts as a failed attempt: the next one waits, longer each time.
const STEADY: Duration = Duration::from_secs(10);
/// Longest pause after an unreadable message: the broker is well, and every other message waits until
/// this one has used up its deliveries.
const BRIEF: Duration = Duration::from_millis(300);
/// How long a session takes one message at a time after one that broke on an unreadable message, so
/// that this message alone uses up its deliveries, and not those that are received with it.
const CAREFUL: Duration = Duration::from_secs(60);

/// RabbitMQ's own, which need not be asked for.
const USUAL_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// What to consume.
pub enum Subscription {
    /// A pool's task queue, made with its fellows where they are missing; none: touch nothing.
    Tasks {
        /// The queue's name.
        queue: String,
        /// What to make, if anything.
        topology: Option<Topology>,
    },
    /// A queue of our own, which the broker names and deletes with the connection. Its name is sent
    /// here, once a session. Unsettled messages are lost with the session.
    Private(watch::Sender<Option<String>>),
}

struct Session {
    connection: Connection,
    channel: Channel,
    consumer: lapin::Consumer,
}

/// See [`Consumer`].
pub struct AmqpConsumer {
    /// Written by the supervisor. Bound: prefetch and a little, which the broker keeps to.
    events: mpsc::Receiver<Result<Event, BrokerError>>,
    /// True once: stop consuming. Read by the supervisor.
    cancel: watch::Sender<bool>,
    current: Current,
    /// Ends the supervisor, which answers when the session is closed.
    close: mpsc::Sender<oneshot::Sender<()>>,
}

/// Starts to consume. The first session is made in the background; failures come from
/// [`Consumer::next`].
pub fn subscribe(
    connector: Connector,
    subscription: Subscription,
    prefetch: u16,
) -> (AmqpConsumer, AmqpSettler) {
    let (events_in, events) = mpsc::channel(usize::from(prefetch) + 4);
    let (cancel, cancelled) = watch::channel(false);
    let (close, closing) = mpsc::channel(1);
    let current = Current::default();
    let supervisor = Supervisor {
        connector,
        subscription,
        prefetch,
        events: events_in,
        cancelled,
        closing,
        current: current.clone(),
    };
    tokio::spawn(supervisor.run());
    (AmqpConsumer { events, cancel, current: current.clone(), close }, AmqpSettler::new(current))
}

impl Consumer for AmqpConsumer {
    fn next(&mut self) -> BoxFuture<'_, Result<Event, BrokerError>> {
        Box::pin(async { self.events.recv().await.unwrap_or(Ok(Event::End)) })
    }

    fn cancel(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            // The flag before the look: a session that begins meanwhile sees the flag.
            self.cancel.send_replace(true);
            // Awaited here, not left to the supervisor: what is handed back after this must find no
            // consumer, or the broker would deliver it to us again, and out of its order.
            if let Some(open) = current(&self.current) {
                cancel(&open.channel, open.consumer_tag).await;
            }
        })
    }

    fn close(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let (closed_in, closed) = oneshot::channel();
            if self.close.send(closed_in).await.is_ok() {
                let _ = tokio::time::timeout(2 * FAREWELL, closed).await;
            }
        })
    }
}

struct Supervisor {
    connector: Connector,
    subscription: Subscription,
    prefetch: u16,
    events: mpsc::Sender<Result<Event, BrokerError>>,
    cancelled: watch::Receiver<bool>,
    closing: mpsc::Receiver<oneshot::Sender<()>>,
    current: Current,
}

/// How a session ended.
enum End {
    /// By itself; a new one is made.
    Lost(Lost),
    /// By our close, which wants to hear of it, or because nobody listens any more.
    Closed(Option<oneshot::Sender<()>>),
}

struct Lost {
    reason: String,
    /// The broker sent what lapin cannot read: a message, most likely, with a property that is not
    /// UTF-8. It will be sent again.
    unreadable: bool,
}

impl From<&Error> for Lost {
    fn from(error: &Error) -> Self {
        let unreadable = matches!(error.kind(), ErrorKind::ParsingError(_));
        Self { reason: words(error).0, unreadable }
    }
}

impl From<&str> for Lost {
    fn from(reason: &str) -> Self {
        Self { reason: reason.to_owned(), unreadable: false }
    }
}

impl Supervisor {
    async fn run(mut self) {
        let mut outage = Outage::default();
        let mut careful = false;
        let mut sessions = 0;
        loop {
            let prefetch = if careful { 1 } else { self.prefetch };
            let opened = tokio::select! {
                opened = open(&self.connector, &self.subscription, prefetch) => opened,
                // Without a session there is nothing to cancel: our end is the consumer's.
                _ = raised(&mut self.cancelled) => return,
                closing = self.closing.recv() => {
                    let _ = closing.map(|closed| closed.send(()));
                    return;
                }
            };
            let failure = match opened {
                Ok((session, broker)) => {
                    outage.connected();
                    sessions += 1;
                    let (number, began) = (sessions, Instant::now());
                    let lost = match self.live(number, session, careful).await {
                        End::Closed(_) => return,
                        End::Lost(lost) => lost,
                    };
                    let reason = lost.reason;
                    tracing::warn!(session = number, reason, "lost the broker");
                    if self.events.send(Ok(Event::Lost { session: number })).await.is_err() {
                        return;
                    }
                    careful = lost.unreadable;
                    if began.elapsed() >= STEADY {
                        outage.over();
                    }
                    Failure { broker, reason, refused: false }
                }
                Err(failure) => failure,
            };
            match outage.failed(failure, self.connector.settings().give_up_after) {
                Ok(delay) => tokio::select! {
                    () = tokio::time::sleep(if careful { delay.min(BRIEF) } else { delay }) => {}
                    () = self.events.closed() => return,
                    _ = raised(&mut self.cancelled) => return,
                    closing = self.closing.recv() => {
                        let _ = closing.map(|closed| closed.send(()));
                        return;
                    }
                },
                Err(error) => {
                    let _ = self.events.send(Err(error)).await;
                    return;
                }
            }
        }
    }

    /// Pumps one session until it ends.
    async fn live(&mut self, number: u64, mut session: Session, careful: bool) -> End {
        let (channel, consumer_tag) = (session.channel.clone(), session.consumer.tag());
        let open = Open { session: number, channel, consumer_tag, ledger: Arc::default() };
        self.hold(Some(open.clone()));
        let mut end = tokio::select! {
            end = self.pump(&open, &mut session) => end,
            () = tokio::time::sleep(CAREFUL), if careful => {
                End::Lost(Lost { reason: "back to the full prefetch".into(), unreadable: false })
            }
        };
        self.hold(None);
        if let End::Closed(closed) = &mut end {
            // Close waits for the broker's answer, so every ack written before has been read.
            let goodbye = async {
                let _ = session.channel.close(200, "done".into()).await;
                let _ = session.connection.close(200, "done".into()).await;
            };
            let _ = tokio::time::timeout(FAREWELL, goodbye).await;
            let _ = closed.take().map(|closed| closed.send(()));
        }
        end
    }

    fn hold(&self, current: Option<Open>) {
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = current;
    }

    async fn pump(&mut self, open: &Open, session: &mut Session) -> End {
        let mut failures = session.connection.events_listener();
        let mut cancelling = *self.cancelled.borrow();
        let mut ended = false;
        if cancelling {
            cancel(&session.channel, session.consumer.tag()).await;
        }
        loop {
            tokio::select! {
                delivered = session.consumer.next(), if !ended => match delivered {
                    Some(Ok(delivery)) => {
                        open.ledger().delivered(delivery.delivery_tag);
                        let event = Event::Delivery(Box::new(delivery_from(delivery, open.session)));
                        if self.events.send(Ok(event)).await.is_err() {
                            break End::Closed(None);
                        }
                    }
                    Some(Err(error)) => break End::Lost((&error).into()),
                    // The flag itself: it was raised before the broker was told, so it is up by now
                    // even where the branch below has not seen it.
                    None if *self.cancelled.borrow() => {
                        cancelling = true;
                        ended = true;
                        let _ = self.events.send(Ok(Event::End)).await;
                    }
                    None => break End::Lost("the broker cancelled the consumer; was the queue deleted?".into()),
                },
                raised = raised(&mut self.cancelled), if !cancelling => {
                    // Without its sender, the consumer was dropped: then nobody wants more.
                    if !raised {
                        break End::Closed(None);
                    }
                    cancelling = true;
                }
                event = failures.next() => match event {
                    Some(lapin::Event::Error(error)) => break End::Lost((&error).into()),
                    Some(_) => {}
                    None => break End::Lost("the connection ended".into()),
                },
                closed = self.closing.recv() => break End::Closed(closed),
            }
        }
    }
}

/// Waits for the flag; false when it can no longer be raised.
async fn raised(flag: &mut watch::Receiver<bool>) -> bool {
    flag.wait_for(|raised| *raised).await.is_ok()
}

/// Returns when the broker sends no more, or no longer answers: then the session ends by itself.
async fn cancel(channel: &Channel, consumer_tag: ShortString) {
    let cancel = channel.basic_cancel(consumer_tag, BasicCancelOptions::default());
    let _ = tokio::time::timeout(FAREWELL, cancel).await;
}

async fn open(
    connector: &Connector,
    subscription: &Subscription,
    prefetch: u16,
) -> Result<(Session, String), Failure> {
    let (connection, broker) = connector.attempt().await?;
    let session = set_up(connection, subscription, prefetch, connector);
    let limit = connector.settings().connect_timeout;
    let (reason, refused) = match tokio::time::timeout(limit, session).await {
        Ok(Ok((session, queue))) => {
            tracing::info!(broker, queue, "consuming");
            return Ok((session, broker));
        }
        Ok(Err(error)) => words(&error),
        Err(_) => (format!("the queue could not be opened within {limit:?}"), false),
    };
    connector.pass_turn();
    Err(Failure { broker, reason, refused })
}

async fn set_up(
    connection: Connection,
    subscription: &Subscription,
    prefetch: u16,
    connector: &Connector,
) -> Result<(Session, String), Error> {
    let channel = connection.create_channel().await?;
    let queue = match subscription {
        Subscription::Tasks { queue, topology } => {
            if let Some(topology) = topology {
                topology.declare(&connection).await?;
            }
            queue.clone()
        }
        Subscription::Private(told) => {
            let own = QueueDeclareOptions { exclusive: true, auto_delete: true, ..Default::default() };
            let queue = channel.queue_declare("".into(), own, FieldTable::default()).await?;
            let queue = queue.name().as_str().to_owned();
            told.send_replace(Some(queue.clone()));
            queue
        }
    };
    // Before consume: RabbitMQ applies it to consumers made after it.
    channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    let (tag, options) = (short(connector.name()), BasicConsumeOptions::default());
    let arguments = arguments(connector.settings().consumer_timeout);
    let consumer = channel.basic_consume(short(&queue), tag, options, arguments).await?;
    Ok((Session { connection, channel, consumer }, queue))
}

/// Asks for a timeout of ours where the user has one in mind: RabbitMQ 4.3 grants it on quorum queues
/// and prefers it to the queue's own, before it the argument means nothing.
fn arguments(timeout: Duration) -> FieldTable {
    let mut arguments = FieldTable::default();
    if timeout != USUAL_TIMEOUT {
        let ms = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
        arguments.insert("x-consumer-timeout".into(), AMQPValue::LongLongInt(ms));
    }
    arguments
}

fn delivery_from(lapin: lapin::message::Delivery, session: u64) -> Delivery {
    let mut properties = properties_from(&lapin.properties);
    // The broker's count of this message, or of another that somebody published with all its headers.
    let counted = properties.headers.remove("x-delivery-count").and_then(|count| count.as_i64());
    let counted = counted.map_or(1, |count| count.max(1) as u64);
    let delivery_count = if lapin.redelivered { counted } else { 0 };
    Delivery {
        message: Message { properties, body: lapin.data.into() },
        receipt: Receipt { session, tag: lapin.delivery_tag },
        redelivered: lapin.redelivered,
        delivery_count,
    }
}
