//! One set of traits for all brokers: deliver, publish with confirm, settle. `amqp` speaks to RabbitMQ through
//! lapin; `embedded` to a queue inside the launcher, over a Unix socket. Knows neither model nor batching nor
//! worker.
//!
//! A consumer or publisher rebuilds its own connection with backoff. A consumer reports a lost session
//! ([`Event::Lost`]), because its deliveries can no longer be settled.

pub mod amqp;
pub mod embedded;
mod source;

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::protocol::Message;

pub use source::{PerSource, Source};

/// Names one delivery, to settle it by. Tags are ordered by source, then as its sessions delivered.
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
    /// Whether the delivery is over once this session of this source is: it belongs to that session or to an earlier
    /// one of the same source.
    pub fn is_over_with(self, source: Source, session: u64) -> bool {
        self.source == source && self.session <= session
    }
}

/// A message that the broker has delivered and that is not settled yet.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// The message.
    pub message: Message,
    /// The tag to settle it by.
    pub delivery_tag: DeliveryTag,
    /// The routing key that the message was published with; only for a subscription to a topic exchange.
    pub routing_key: Option<String>,
    /// The broker has delivered the message before.
    pub redelivered: bool,
    /// Number of earlier deliveries that were not acked. None: the broker does not count them, and
    /// `redelivered` alone says whether there were any.
    pub delivery_count: Option<u64>,
}

/// What a consumer receives.
#[derive(Debug)]
pub enum Event {
    /// A message.
    Delivery(Box<Delivery>),
    /// The session ended. The broker will deliver its unsettled messages again; a new session is being made.
    Lost {
        /// The queue that it consumed.
        source: Source,
        /// The session that is over.
        session: u64,
    },
    /// After [`Consumer::cancel`]: no more events follow.
    End,
}

/// The receiving side. One owner.
pub trait Consumer: Send {
    /// The next event. Safe to cancel: dropping the future loses no event.
    ///
    /// # Errors
    /// [`BrokerError`] when no session can be made: the caller gives up and exits.
    fn next(&mut self) -> BoxFuture<'_, Result<Event, BrokerError>>;

    /// Changes how many unsettled messages the broker may send. Over AMQP the change takes effect once the
    /// former prefetch is full, by a new consumer; the unsettled messages of the former consumer then come on
    /// top.
    fn set_prefetch(&mut self, prefetch: NonZeroU16) -> BoxFuture<'_, ()>;

    /// How many unsettled messages the broker sends at most now. Over AMQP it may differ from what was set last.
    fn granted(&self) -> u16;

    /// Stops the deliveries; messages that the broker sent before still come from `next`, then
    /// [`Event::End`].
    fn cancel(&mut self) -> BoxFuture<'_, ()>;

    /// Closes the session in order: afterwards every ack written before is at the broker.
    fn close(&mut self) -> BoxFuture<'_, ()>;
}

/// Settles deliveries; shared.
pub trait Acker: Send + Sync {
    /// Acks. False when the session is over: the broker will deliver the message again.
    fn ack(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool>;
    /// Hands the message back for redelivery, at its old place where the broker can. False as for `ack`.
    fn requeue(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool>;
    /// Waits until the broker has probably acted on everything settled before.
    fn flush(&self) -> BoxFuture<'_, ()>;
    /// Whether there is a session now.
    fn is_connected(&self) -> bool;
    /// Why there is no session, where an attempt failed: the broker's address and its message.
    fn trouble(&self) -> Option<String> {
        None
    }
}

/// The consumer, acker and publisher of one worker.
pub struct BrokerSession {
    /// Receives deliveries.
    pub consumer: Box<dyn Consumer>,
    /// Receives those of the background queue, if there is one.
    pub background: Option<Box<dyn Consumer>>,
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
    /// Upper bound of the random wait. Messages with the same ceiling wait in one retry queue.
    pub ceiling: Duration,
}

/// What became of a published message.
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

/// What there is of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It does not exist.
    Gone,
    /// It exists, and cannot be reached now: the node that holds it is down.
    Away,
    /// It is another connection's own.
    Private,
    /// It exists.
    There {
        /// Its consumers now, on all hosts.
        consumers: u32,
        /// Its messages that wait.
        ready: u32,
    },
}

/// The sending side; shared. Publishes again after a lost connection until the broker has answered.
pub trait Publisher: Send + Sync {
    /// Publishes to a queue by name, as mandatory, and waits for the broker's confirm.
    ///
    /// # Errors
    /// [`BrokerError`] when no connection can be made any more. The message may have arrived or not.
    fn publish<'a>(
        &'a self,
        queue: &'a str,
        message: Arc<Message>,
    ) -> BoxFuture<'a, Result<Published, BrokerError>>;

    /// Publishes a message that reaches the named queue after the delay. Confirmed: the message waits at the
    /// broker, also when this process ends. Unroutable: the retry queue does not exist.
    ///
    /// # Errors
    /// As [`Publisher::publish`].
    fn publish_later<'a>(
        &'a self,
        queue: &'a str,
        delay: Delay,
        message: Arc<Message>,
    ) -> BoxFuture<'a, Result<Published, BrokerError>>;

    /// Whether the broker takes messages now: it is connected, answers, and has no alarm. A single queue that
    /// does not confirm makes no difference.
    fn takes_messages(&self) -> bool {
        true
    }

    /// Makes the pool's missing queues again. False: this publisher makes no queues.
    ///
    /// # Errors
    /// As [`Publisher::publish`].
    fn restore(&self) -> BoxFuture<'_, Result<bool, BrokerError>> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// What there is of a queue; none where that cannot be seen now. Nothing is made.
    fn look<'a>(&'a self, _queue: &'a str) -> BoxFuture<'a, Option<Seen>> {
        Box::pin(std::future::ready(None))
    }

    /// Closes the connection in order.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// Why the broker cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BrokerError {
    /// The broker answered and refuses us: password, virtual host, permission, arguments. Waiting does not
    /// help.
    #[error("{broker} refused: {reason}")]
    Refused {
        /// The broker's address, without its password.
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
    /// No broker could be reached for longer than allowed.
    #[error("no broker reached for {seconds} s: {reason}")]
    Unreachable {
        /// How long this process tried, in seconds.
        seconds: u64,
        /// The last failure, with the address.
        reason: String,
    },
}
