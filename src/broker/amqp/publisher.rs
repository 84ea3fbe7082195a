//! The sending side of RabbitMQ. Each message is confirmed individually; `routes` decides its channel, so that
//! no queue, refusal or large message holds up others. Owns the channels to the tasks of two connections: one
//! for messages with plain headers, and a second, opened when needed, for messages with foreign headers,
//! because a broker may close a connection over those.

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
use super::connect::{Connector, OpenConnection};
use super::exchange::{Answer, Request};
use super::sending::{REQUESTS, Sending};
use super::topology::{Topology, look, retry_queue};
use crate::broker::{BrokerError, Delay, Publisher, Seen};
use crate::protocol::Message;

/// How long queues that were just made are assumed to exist.
const RESTORED: Duration = Duration::from_secs(1);
/// Messages with larger bodies get a channel of their own, because the broker may refuse them; used where no
/// pool sets a limit.
const LARGE: usize = 1 << 20;

/// How long a queue that we may not look at is not looked at again. Each refusal is a line in the broker's log.
const REFUSED: Duration = Duration::from_secs(60);
/// The most such queues that are remembered: requesters choose their names.
const MOST_REFUSED: usize = 1_024;

/// Publishes over connections of its own: one for messages with plain headers, one for all others.
pub struct AmqpPublisher {
    connector: Arc<Connector>,
    /// The pool's queues, made again where they are missing; none: nothing is made.
    topology: Option<Topology>,
    /// When the queues were last made. The lock is held while they are being made, so other callers wait for
    /// the result.
    restored: Mutex<Option<Instant>>,
    plain: Line,
    foreign: Line,
    /// Locked during a look, so that there is one at a time.
    looking: Mutex<Looking>,
}

/// What looks at queues need.
#[derive(Default)]
struct Looking {
    /// A connection that only looks, opened when needed: an alarm blocks those that publish.
    connection: Option<OpenConnection>,
    /// The queues that we may not look at, and when the broker said so. The oldest is first.
    refused: VecDeque<(String, Instant)>,
}

impl Looking {
    async fn look(&mut self, connector: &Connector, queue: &str) -> Option<Seen> {
        let now = Instant::now();
        while self.refused.front().is_some_and(|(_, since)| now >= *since + REFUSED) {
            self.refused.pop_front();
        }
        if self.refused.iter().any(|(name, _)| name == queue) {
            return None;
        }
        if !self.connection.as_ref().is_some_and(|connection| connection.status().connected()) {
            self.connection = Some(connect(connector).await.ok()?.0);
        }
        let error = match look(self.connection.as_ref()?, queue).await {
            Ok(queue) => {
                let (consumers, ready) = (queue.consumer_count(), queue.message_count());
                return Some(Seen::There { consumers, ready });
            }
            Err(error) => error,
        };
        match Cause::of(&error) {
            Cause::Missing => Some(Seen::Gone),
            Cause::Away => Some(Seen::Away),
            Cause::Private => Some(Seen::Private),
            // RabbitMQ 4.3 asks for the permission `configure`.
            Cause::AccessRefused => {
                if self.refused.len() == MOST_REFUSED {
                    self.refused.pop_front();
                }
                self.refused.push_back((queue.to_owned(), now));
                None
            }
            _ => None,
        }
    }
}

/// Handle of the task that owns a connection.
struct Line {
    /// Whether the broker takes messages over this connection. Written by its task.
    well: Arc<AtomicBool>,
    /// Written by every task that publishes, read by the connection's task.
    requests: mpsc::Sender<Request>,
    /// Ends the connection's task, which drops its end of `requests` when the connection is closed.
    close: CancellationToken,
}

impl AmqpPublisher {
    /// A publisher without a pool. Connects when the first message is published.
    pub fn new(connector: Connector) -> Self {
        Self::for_pool(connector, LARGE, None)
    }

    /// A pool's publisher: messages of more than `large` bytes go on channels of their own, and
    /// [`Publisher::restore`] makes `topology`.
    pub fn for_pool(connector: Connector, large: usize, topology: Option<Topology>) -> Self {
        let foreign =
            Connector::new(connector.settings.clone(), format!("{} (foreign headers)", connector.name));
        let foreign = Arc::new(foreign.with_refusals(connector.refusals));
        let connector = Arc::new(connector);
        let plain = Line::start(connector.clone(), Some(large));
        let restored = Mutex::default();
        let (looking, foreign) = (Mutex::default(), Line::start(foreign, None));
        Self { connector, topology, restored, plain, foreign, looking }
    }
}

impl Line {
    fn start(connector: Arc<Connector>, large: Option<usize>) -> Self {
        let (requests, queued) = mpsc::channel(REQUESTS);
        let close = CancellationToken::new();
        let well = Arc::new(AtomicBool::new(false));
        tokio::spawn(Sending::new(connector, large, well.clone()).run(queued, close.clone()));
        Self { well, requests, close }
    }

    async fn close(&self) {
        self.close.cancel();
        self.requests.closed().await;
    }
}

impl Publisher for AmqpPublisher {
    /// A dropped future holds up nothing; its message may still arrive.
    fn publish<'a>(&'a self, queue: &'a str, message: Arc<Message>) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let gone = || BrokerError::Unreachable { seconds: 0, reason: "the publisher is closed".into() };
            let (answer, answered) = oneshot::channel();
            let line = if message.properties.is_plain() { &self.plain } else { &self.foreign };
            let request = Request { queue: queue.into(), message, suspicions: 0, answer };
            line.requests.send(request).await.map_err(|_| gone())?;
            answered.await.map_err(|_| gone())?
        })
    }

    /// Publishes into the retry queue, from which the broker moves the message when it expires.
    fn publish_later<'a>(
        &'a self,
        queue: &'a str,
        delay: Delay,
        mut message: Arc<Message>,
    ) -> BoxFuture<'a, Answer> {
        Arc::make_mut(&mut message).properties.expiration = Some(delay.after.as_millis().to_string());
        Box::pin(async move { self.publish(&retry_queue(queue, delay.ceiling), message).await })
    }

    fn takes_messages(&self) -> bool {
        self.plain.well.load(Ordering::Relaxed)
    }

    fn restore(&self) -> BoxFuture<'_, Result<bool, BrokerError>> {
        Box::pin(async {
            let Some(topology) = &self.topology else { return Ok(false) };
            let mut restored = self.restored.lock().await;
            if restored.is_some_and(|at| at.elapsed() < RESTORED) {
                return Ok(true);
            }
            let limit = 2 * self.connector.settings.connect_timeout;
            match timeout(limit, declare(&self.connector, topology)).await {
                Ok(done) => done?,
                Err(_) => {
                    let reason = "the queues could not be made in time".to_owned();
                    return Err(BrokerError::Unreachable { seconds: limit.as_secs(), reason });
                }
            }
            *restored = Some(Instant::now());
            Ok(true)
        })
    }

    fn look<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, Option<Seen>> {
        let look = async move { self.looking.lock().await.look(&self.connector, queue).await };
        let limit = self.connector.settings.connect_timeout;
        Box::pin(async move { timeout(limit, look).await.ok().flatten() })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            tokio::join!(self.plain.close(), self.foreign.close());
            if let Some(connection) = self.looking.lock().await.connection.take() {
                let _ = connection.close(200, "done".into()).await;
            }
        })
    }
}
