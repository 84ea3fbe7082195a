//! The sending side of RabbitMQ. Each message is confirmed individually; `routes` decides its channel, so that
//! no queue, refusal or large message holds up others. Owns the channels to the tasks of two connections: one
//! for messages with plain headers, and a second, opened when needed, for messages with foreign headers,
//! because a broker may close a connection over those.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::admin::{connect, declare};
use super::connect::{Connector, OpenConnection};
use super::exchange::{Answer, Request, code};
use super::sending::{REQUESTS, Sending};
use super::topology::{Topology, look, retry_queue};
use crate::broker::{BrokerError, Delay, Publisher, Seen};
use crate::protocol::Message;

/// How long queues that were just made are assumed to exist.
const RESTORED: Duration = Duration::from_secs(1);
/// Messages with larger bodies get a channel of their own, because the broker may refuse them; used where no
/// pool sets a limit.
const LARGE: usize = 1 << 20;

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
    /// A connection that only looks at queues, opened when needed: an alarm blocks those that publish. Locked
    /// during a look, so that there is one at a time.
    looking: Mutex<Option<OpenConnection>>,
    /// The broker has refused a look: it is not asked again.
    may_not_look: AtomicBool,
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
        let (looking, may_not_look) = (Mutex::default(), AtomicBool::new(false));
        let foreign = Line::start(foreign, None);
        Self { connector, topology, restored, plain, foreign, looking, may_not_look }
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
        let look = async move {
            let mut looking = self.looking.lock().await;
            if self.may_not_look.load(Ordering::Relaxed) {
                return None;
            }
            if !looking.as_ref().is_some_and(|connection| connection.status().connected()) {
                *looking = Some(connect(&self.connector).await.ok()?.0);
            }
            match look(looking.as_ref()?, queue).await {
                Ok(queue) => {
                    let (consumers, ready) = (queue.consumer_count(), queue.message_count());
                    Some(Seen::There { consumers, ready })
                }
                Err(error) => match code(&error) {
                    Some(404) => Some(Seen::Gone),
                    // An exclusive queue of another connection.
                    Some(405) => Some(Seen::Private),
                    // RabbitMQ 4.3 asks for the permission `configure`.
                    Some(403) => {
                        self.may_not_look.store(true, Ordering::Relaxed);
                        None
                    }
                    _ => None,
                },
            }
        };
        let limit = self.connector.settings.connect_timeout;
        Box::pin(async move { timeout(limit, look).await.ok().flatten() })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            tokio::join!(self.plain.close(), self.foreign.close());
            if let Some(connection) = self.looking.lock().await.take() {
                let _ = connection.close(200, "done".into()).await;
            }
        })
    }
}
