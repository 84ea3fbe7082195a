//! The sending side of RabbitMQ. Each message is confirmed individually; `channel_choice` decides its channel, so that
//! no queue, refusal or large message delays others. Owns the handles to two connections, each with a task of its
//! own: one for messages with plain headers (see `Properties::is_plain`), and a second, opened when needed, for
//! messages with other headers, called foreign headers. These may make a broker close the connection.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::admin::{connect, declare};
use super::cause::Cause;
use super::confirmed_publish::QueuedMessage;
use super::connect::{Connector, OpenConnection};
use super::sending::{MAX_QUEUED, SendTask};
use super::topology::{Topology, inspect, retry_queue};
use crate::broker::{BrokerError, Delay, PublishFuture, Publisher, QueueState};
use crate::protocol::Message;

/// How long queues that were just declared are assumed to exist.
const DECLARED_FOR: Duration = Duration::from_secs(1);
/// Largest body, in bytes, of a message that may share a channel, if no pool sets a limit. A message with a larger body
/// gets a channel of its own, because the broker may refuse it.
const DEFAULT_MAX_SHARED_BODY: usize = 1 << 20;

/// How long a queue that we may not inspect is not inspected again. The broker logs each refusal.
const REFUSAL_TTL: Duration = Duration::from_secs(60);
/// Maximum number of such queues that are remembered. It is bounded because requesters choose their names.
const MAX_REFUSED: usize = 1_024;

/// Publishes over connections of its own: one for messages with plain headers, one for all others.
pub struct AmqpPublisher {
    connector: Arc<Connector>,
    /// The pool's queues, which [`Publisher::restore`] declares if they are missing; none: it declares nothing.
    topology: Option<Topology>,
    /// When the queues were last declared. The lock is held while they are being declared, so that other callers wait
    /// for the result.
    declared_at: Mutex<Option<Instant>>,
    plain: ConnectionHandle,
    foreign: ConnectionHandle,
    /// Locked during an inspection, so that there is one at a time.
    inspector: Mutex<Inspector>,
}

/// Inspects queues.
#[derive(Default)]
struct Inspector {
    /// A connection of its own, because an alarm blocks those that publish. Opened when needed.
    connection: Option<OpenConnection>,
    /// The queues that we may not inspect, and when the broker refused. The oldest is first.
    refused: VecDeque<(String, Instant)>,
}

impl Inspector {
    async fn inspect(&mut self, connector: &Connector, queue: &str) -> Option<QueueState> {
        let now = Instant::now();
        while self.refused.front().is_some_and(|(_, since)| now >= *since + REFUSAL_TTL) {
            self.refused.pop_front();
        }
        if self.refused.iter().any(|(name, _)| name == queue) {
            return None;
        }
        if !self.connection.as_ref().is_some_and(|connection| connection.status().connected()) {
            self.connection = Some(connect(connector).await.ok()?);
        }
        let error = match inspect(self.connection.as_ref()?, queue).await {
            Ok(queue) => {
                let (consumers, ready) = (queue.consumer_count(), queue.message_count());
                return Some(QueueState::Exists { consumers, ready });
            }
            Err(error) => error,
        };
        match Cause::of(&error) {
            Cause::Missing => Some(QueueState::Missing),
            Cause::Unavailable => Some(QueueState::Unavailable),
            Cause::Exclusive => Some(QueueState::Exclusive),
            // RabbitMQ 4.3 requires the permission `configure` to inspect a queue.
            Cause::AccessRefused => {
                if self.refused.len() == MAX_REFUSED {
                    self.refused.pop_front();
                }
                self.refused.push_back((queue.to_owned(), now));
                None
            }
            _ => None,
        }
    }
}

/// Handle to the task that owns a connection.
struct ConnectionHandle {
    /// Whether the broker takes messages over this connection. Written by its task.
    takes_messages: Arc<AtomicBool>,
    /// Written by every task that publishes, read by the connection's task.
    queued: mpsc::Sender<QueuedMessage>,
    /// Ends the connection's task, which drops its end of `queued` when the connection is closed.
    close: CancellationToken,
}

impl AmqpPublisher {
    /// A publisher without a pool. Connects when the first message is published.
    pub fn new(connector: Connector) -> Self {
        Self::for_pool(connector, DEFAULT_MAX_SHARED_BODY, None)
    }

    /// A pool's publisher. Messages with bodies of more than `max_shared_body` bytes go on channels of their own, and
    /// [`Publisher::restore`] declares `topology`.
    pub fn for_pool(connector: Connector, max_shared_body: usize, topology: Option<Topology>) -> Self {
        let foreign =
            Connector::new(connector.settings.clone(), format!("{} (foreign headers)", connector.name));
        let foreign = Arc::new(foreign.with_refusals(connector.refusals));
        let connector = Arc::new(connector);
        Self {
            plain: ConnectionHandle::start(connector.clone(), Some(max_shared_body)),
            foreign: ConnectionHandle::start(foreign, None),
            connector,
            topology,
            declared_at: Mutex::default(),
            inspector: Mutex::default(),
        }
    }
}

impl ConnectionHandle {
    /// Starts the task of a connection. `max_shared_body` is as in [`super::channel_choice::Messages::new`].
    fn start(connector: Arc<Connector>, max_shared_body: Option<usize>) -> Self {
        let (queued, receiver) = mpsc::channel(MAX_QUEUED);
        let close = CancellationToken::new();
        let takes_messages = Arc::new(AtomicBool::new(false));
        tokio::spawn(
            SendTask::new(connector, max_shared_body, takes_messages.clone()).run(receiver, close.clone()),
        );
        Self { takes_messages, queued, close }
    }

    async fn close(&self) {
        self.close.cancel();
        self.queued.closed().await;
    }
}

impl Publisher for AmqpPublisher {
    /// Dropping the future blocks no other publish. Its message may still arrive.
    fn publish<'a>(&'a self, queue: &'a str, message: Arc<Message>) -> PublishFuture<'a> {
        Box::pin(async move {
            let closed = || BrokerError::Unreachable { seconds: 0, reason: "the publisher is closed".into() };
            let (result_sender, result) = oneshot::channel();
            let connection = if message.properties.is_plain() { &self.plain } else { &self.foreign };
            let message = QueuedMessage { queue: queue.into(), message, suspicions: 0, result_sender };
            connection.queued.send(message).await.map_err(|_| closed())?;
            result.await.map_err(|_| closed())?
        })
    }

    /// Publishes into the retry queue, from which the broker moves the message when it expires.
    fn publish_later<'a>(
        &'a self,
        to: &'a str,
        delay: Delay,
        mut message: Arc<Message>,
    ) -> PublishFuture<'a> {
        Arc::make_mut(&mut message).properties.expiration = Some(delay.after.as_millis().to_string());
        Box::pin(async move { self.publish(&retry_queue(to, delay.ceiling), message).await })
    }

    fn takes_messages(&self) -> bool {
        self.plain.takes_messages.load(Ordering::Relaxed)
    }

    fn restore(&self) -> BoxFuture<'_, Result<bool, BrokerError>> {
        Box::pin(async {
            let Some(topology) = &self.topology else { return Ok(false) };
            let mut declared_at = self.declared_at.lock().await;
            if declared_at.is_some_and(|at| at.elapsed() < DECLARED_FOR) {
                return Ok(true);
            }
            let limit = 2 * self.connector.settings.connect_timeout;
            match timeout(limit, declare(&self.connector, topology)).await {
                Ok(done) => done?,
                Err(_) => {
                    let reason = "the queues could not be declared in time".to_owned();
                    return Err(BrokerError::Unreachable { seconds: limit.as_secs(), reason });
                }
            }
            *declared_at = Some(Instant::now());
            Ok(true)
        })
    }

    fn queue_state<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, Option<QueueState>> {
        let inspection = async move { self.inspector.lock().await.inspect(&self.connector, queue).await };
        let limit = self.connector.settings.connect_timeout;
        Box::pin(async move { timeout(limit, inspection).await.ok().flatten() })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            tokio::join!(self.plain.close(), self.foreign.close());
            if let Some(connection) = self.inspector.lock().await.connection.take() {
                let _ = connection.close(200, "done".into()).await;
            }
        })
    }
}
