//! Brokers behind one set of traits: deliver, publish with confirm, settle. `amqp` speaks to
//! RabbitMQ through lapin; `embedded` to a queue inside the launcher, over a Unix socket. Knows
//! neither model nor batching nor worker.
//!
//! A broker object supervises its own connection: it rebuilds it with backoff and says so
//! ([`Event::Lost`]) because deliveries of the old one can no longer be settled.

pub mod amqp;
pub mod embedded;

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::protocol::Message;

/// Names one delivery for settling it. Ordered as delivered, within a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeliveryTag {
    /// Which life of the connection delivered it, counting from 1.
    pub session: u64,
    /// The broker's delivery tag, unique within the session.
    pub tag: u64,
}

/// A message that we owe an ack.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// The message.
    pub message: Message,
    /// What to settle it by.
    pub delivery_tag: DeliveryTag,
    /// The routing key that it was published with, where the subscription goes by that.
    pub routing_key: Option<String>,
    /// The broker has delivered it before.
    pub redelivered: bool,
    /// Earlier deliveries that were not acked, where the broker counts them; none: it does not, and there
    /// were some where `redelivered` says so.
    pub delivery_count: Option<u64>,
}

/// What a consumer sees.
#[derive(Debug)]
pub enum Event {
    /// A message.
    Delivery(Box<Delivery>),
    /// The session ended; its unsettled deliveries are the broker's again and will come back.
    /// A new session is being made.
    Lost {
        /// The session that is over.
        session: u64,
    },
    /// After [`Consumer::cancel`]: nothing more will come.
    End,
}

/// The receiving side. One owner.
pub trait Consumer: Send {
    /// The next event. Safe to cancel: an event is never lost in a dropped future.
    ///
    /// # Errors
    /// [`BrokerError`] when no session can be made: the caller gives up and exits.
    fn next(&mut self) -> BoxFuture<'_, Result<Event, BrokerError>>;

    /// From now on, lets the broker send so many messages ahead of what is settled. Over AMQP it takes
    /// effect once the former prefetch is full, with a consumer made anew, in order: what the former one
    /// brought comes on top until it is settled.
    fn set_prefetch(&mut self, prefetch: NonZeroU16) -> BoxFuture<'_, ()>;

    /// Asks the broker for no more; what it had sent before still comes from `next`, then
    /// [`Event::End`].
    fn cancel(&mut self) -> BoxFuture<'_, ()>;

    /// Closes the session in order, so that every ack written before is at the broker.
    fn close(&mut self) -> BoxFuture<'_, ()>;
}

/// Settles deliveries; shared by all who finish tasks.
pub trait Acker: Send + Sync {
    /// Acks. False when the session is over: the delivery is the broker's again.
    fn ack(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool>;
    /// Hands back for redelivery, at its old place where the broker can. False as for `ack`.
    fn requeue(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool>;
    /// Waits until the broker can be taken to have acted on all that was settled before.
    fn flush(&self) -> BoxFuture<'_, ()>;
    /// There is a session now.
    fn is_connected(&self) -> bool;
    /// Why there is none, where there was a failure: the broker's address and words.
    fn trouble(&self) -> Option<String> {
        None
    }
}

/// A broker's three faces, as one worker holds them.
pub struct BrokerSession {
    /// Receives.
    pub consumer: Box<dyn Consumer>,
    /// Settles what was received.
    pub acker: Arc<dyn Acker>,
    /// Sends.
    pub publisher: Arc<dyn Publisher>,
}

/// How long a message is to wait before it is in its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    /// The wait.
    pub after: Duration,
    /// What it was drawn below. Messages of one ceiling may wait in one line, behind each other.
    pub ceiling: Duration,
}

/// What became of a published message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Published {
    /// The broker has it, in a queue.
    Confirmed,
    /// No such queue; the broker returned it.
    Unroutable,
    /// The broker could not take it now (a full queue, trouble on its side); later it may.
    Nacked,
    /// We may not write there, in its words; somebody may grant it later.
    Forbidden(String),
    /// The broker will not take this message (it is too large): its words.
    Refused(String),
}

/// The sending side; shared. Retries over lost connections until it has an answer.
pub trait Publisher: Send + Sync {
    /// Publishes to a queue by name, mandatory, and waits for the broker's confirm.
    ///
    /// # Errors
    /// [`BrokerError`] when no connection can be made any more. The message may or may not have
    /// arrived.
    fn publish<'a>(
        &'a self,
        queue: &'a str,
        message: Arc<Message>,
    ) -> BoxFuture<'a, Result<Published, BrokerError>>;

    /// Publishes to a queue by name, where the message is to be after the delay. Confirmed: it waits
    /// at the broker, and outlives us. Unroutable: there is nothing to wait in.
    ///
    /// # Errors
    /// As [`Publisher::publish`].
    fn publish_later<'a>(
        &'a self,
        queue: &'a str,
        delay: Delay,
        message: Arc<Message>,
    ) -> BoxFuture<'a, Result<Published, BrokerError>>;

    /// The broker takes messages now: there is a connection, it answers, and no alarm holds it up. What a
    /// queue does not confirm meanwhile is the queue's matter.
    fn takes_messages(&self) -> bool {
        true
    }

    /// Makes the pool's own queues again, where they are missing. False: that is not ours to do.
    ///
    /// # Errors
    /// As [`Publisher::publish`].
    fn restore(&self) -> BoxFuture<'_, Result<bool, BrokerError>> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Closes the connection in order.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// Why there is no broker to work with.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BrokerError {
    /// The broker answered and refuses us: password, vhost, permission, arguments. Does not pass
    /// by itself.
    #[error("{broker} refused: {reason}")]
    Refused {
        /// The broker's address, without its password.
        broker: String,
        /// The broker's words, and what to check.
        reason: String,
    },
    /// No broker could be reached for longer than allowed.
    #[error("no broker reached for {seconds} s: {reason}")]
    Unreachable {
        /// How long it was tried, in seconds.
        seconds: u64,
        /// The last failure, with the address.
        reason: String,
    },
}
