//! One set of traits for all brokers: deliver, publish with confirm, settle. `amqp` connects to RabbitMQ through lapin,
//! and `embedded` to a queue inside the launcher, over a Unix socket. Knows neither model nor batching nor worker.
//!
//! Over AMQP, a consumer or publisher rebuilds its own connection with backoff. The consumer then reports the lost
//! session ([`ConsumerEvent::Lost`]), because the deliveries of that session can no longer be settled.

pub mod amqp;
pub mod embedded;
#[cfg(test)]
pub(crate) mod memory;
mod source;

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::protocol::Message;

pub use source::Source;

/// Identifies one delivery; used to settle it. Tags are ordered by source, then by session, then by the order of
/// delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeliveryTag {
    /// The queue that the message came from.
    pub source: Source,
    /// Number of the session that delivered the message, counting from 1 for each source.
    pub session: u64,
    /// The broker's delivery tag, unique within the session.
    pub tag: u64,
}

impl DeliveryTag {
    /// Whether the delivery can no longer be settled once this session of this source has ended: it belongs to that
    /// session or to an earlier one of the same source.
    pub fn is_over_with(self, source: Source, session: u64) -> bool {
        self.source == source && self.session <= session
    }
}

/// A message that the broker has delivered and that is not settled yet.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// The message.
    pub message: Message,
    /// The tag used to settle it.
    pub delivery_tag: DeliveryTag,
    /// The routing key that the message was published with; only for a subscription to a topic exchange.
    pub routing_key: Option<String>,
    /// Whether the broker has delivered the message before.
    pub redelivered: bool,
    /// Number of earlier deliveries that were not acked. None: the broker does not count them, and
    /// `redelivered` alone says whether there were any.
    pub delivery_count: Option<u64>,
}

/// What a consumer receives.
#[derive(Debug)]
pub enum ConsumerEvent {
    /// A message.
    Delivery(Box<Delivery>),
    /// The session ended. The broker will deliver its unsettled messages again; a new session is being opened.
    Lost {
        /// The queue that the session consumed.
        source: Source,
        /// The session that is over.
        session: u64,
    },
    /// No more events follow. This event comes only after [`Consumer::cancel`].
    End,
}

/// The receiving side. One owner.
pub trait Consumer: Send {
    /// The next event. Safe to cancel: dropping the future loses no event.
    ///
    /// # Errors
    /// [`BrokerError`] when no session can be opened: the caller gives up and exits.
    fn next(&mut self) -> BoxFuture<'_, Result<ConsumerEvent, BrokerError>>;

    /// Changes how many unsettled messages the broker may send. Over AMQP the change needs a new consumer, and takes
    /// effect once the unsettled messages fill the former prefetch. They do not count against the new prefetch.
    fn set_prefetch(&mut self, prefetch: NonZeroU16) -> BoxFuture<'_, ()>;

    /// The prefetch that the broker applies now. Over AMQP it may differ from the one that was set last.
    fn granted(&self) -> u16;

    /// Stops the deliveries. `next` still returns the messages that the broker has sent already, and then
    /// [`ConsumerEvent::End`].
    fn cancel(&mut self) -> BoxFuture<'_, ()>;

    /// Closes the session gracefully: afterwards the broker has every ack that was written before.
    fn close(&mut self) -> BoxFuture<'_, ()>;
}

/// Settles deliveries; shared.
pub trait Acker: Send + Sync {
    /// Acks. False when the session is over: the broker will deliver the message again.
    fn ack(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool>;
    /// Returns the message to its queue for redelivery, at its old position if the broker supports that. False as
    /// for `ack`.
    fn requeue(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool>;
    /// Waits until the broker has probably acted on everything settled before.
    fn flush(&self) -> BoxFuture<'_, ()>;
    /// Whether there is a session now.
    fn is_connected(&self) -> bool;
    /// Why there is no session: the broker's address, and how the last session ended or why the last attempt failed.
    /// None if there is a session, or before the first attempt has failed.
    fn trouble(&self) -> Option<String> {
        None
    }
}

/// The consumer, acker and publisher of one worker.
pub struct BrokerSession {
    /// Receives the deliveries of the only queue, or of the pool's first one.
    pub consumer: Box<dyn Consumer>,
    /// Each receives the deliveries of a further queue of the pool, in their order.
    pub further: Vec<Box<dyn Consumer>>,
    /// Settles deliveries.
    pub acker: Arc<dyn Acker>,
    /// Publishes replies and other messages.
    pub publisher: Arc<dyn Publisher>,
}

/// How long a message waits before the broker puts it into its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    /// The wait.
    pub after: Duration,
    /// Upper bound of `after`. Messages with the same ceiling wait in one retry queue.
    pub ceiling: Duration,
}

/// The outcome of a publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Published {
    /// The broker has it, in a queue.
    Confirmed,
    /// The queue does not exist; the broker returned the message.
    Unroutable,
    /// The broker could not take the message now (a full queue, trouble on its side); later it may.
    Nacked,
    /// The broker denies write access, with its reason; an administrator may grant it later.
    Forbidden(String),
    /// The broker will never take this message (for example, it is too large), with its reason.
    Refused(String),
}

/// The state of a queue, as the broker reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueState {
    /// It does not exist.
    Missing,
    /// It exists, but cannot be reached now, because the node that holds it is down.
    Unavailable,
    /// It exists, and is exclusive to another connection.
    Exclusive,
    /// It exists, and can be inspected.
    Exists {
        /// Its consumers now, on all hosts.
        consumers: u32,
        /// Number of its ready messages: not yet delivered to a consumer.
        ready: u32,
    },
}

/// The outcome of a publish, or why it is unknown.
pub type PublishResult = Result<Published, BrokerError>;
/// What [`Publisher::publish`] returns.
pub type PublishFuture<'a> = BoxFuture<'a, PublishResult>;

/// The sending side; shared. After a lost connection, publishes a message again until the broker has answered.
pub trait Publisher: Send + Sync {
    /// Publishes to a queue by name, as mandatory, and waits for the broker's confirm.
    ///
    /// # Errors
    /// [`BrokerError`] when no connection can be opened any more. The message may have arrived or not.
    fn publish<'a>(&'a self, queue: &'a str, message: Arc<Message>) -> PublishFuture<'a>;

    /// Publishes a message that reaches the named queue after the delay. Confirmed: the message waits at the
    /// broker, even if this process ends. Unroutable: the retry queue does not exist.
    ///
    /// # Errors
    /// As [`Publisher::publish`].
    fn publish_later<'a>(&'a self, queue: &'a str, delay: Delay, message: Arc<Message>) -> PublishFuture<'a>;

    /// Whether the broker takes messages now: it is connected, answers, and has no alarm. A single queue that
    /// does not confirm makes no difference.
    fn takes_messages(&self) -> bool {
        true
    }

    /// Declares the pool's missing queues again. False: this publisher declares no queues.
    ///
    /// # Errors
    /// As [`Publisher::publish`].
    fn restore(&self) -> BoxFuture<'_, Result<bool, BrokerError>> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Inspects a queue and returns its state; none if it cannot be inspected now. Nothing is declared.
    fn queue_state<'a>(&'a self, _queue: &'a str) -> BoxFuture<'a, Option<QueueState>> {
        Box::pin(std::future::ready(None))
    }

    /// Closes the connection gracefully.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// Why the broker cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BrokerError {
    /// The broker refuses us: the password, virtual host, permissions or queue arguments are wrong. Waiting does not
    /// help.
    #[error("{broker} refused: {reason}")]
    Refused {
        /// The broker's address, without its password, or the name of the queue or exchange that was used.
        broker: String,
        /// The broker's message, and what to check.
        reason: String,
    },
    /// The queue or exchange does not exist.
    #[error("{broker} refused: {reason}")]
    Missing {
        /// The broker's address, without its password, or the name of what is missing.
        broker: String,
        /// The broker's message, and what to check.
        reason: String,
    },
    /// The queue of tasks is a stream, which gives every worker each task.
    #[error("queue {queue:?} {IS_STREAM}")]
    Stream {
        /// The queue.
        queue: String,
    },
    /// No broker could be reached for longer than allowed, a connection was lost, or an answer did not come in time.
    #[error("no broker reached{}: {reason}", duration(*seconds))]
    Unreachable {
        /// How long this process tried or waited, in seconds; 0: not stated.
        seconds: u64,
        /// The last failure, with the address.
        reason: String,
    },
}

/// Why a stream is refused, after the queue's name.
pub(crate) const IS_STREAM: &str = "is a stream, from which nothing is taken away: every worker would get each task. Name a quorum or a classic queue";

/// A part of an error message: how long something lasted, if that was a second or more.
fn duration(seconds: u64) -> String {
    if seconds == 0 { String::new() } else { format!(" for {seconds} s") }
}
