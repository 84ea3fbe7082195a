//! A look at the messages of a queue, each once, in order, page by page: they are held, unacked, until
//! they are acked or all handed back to their places. Decides how many are taken at once, and what is
//! not handed back because RabbitMQ would drop it. One-off, on a connection of its own, which when it
//! is lost leaves all where it was. Owns the messages in hand.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::{Connection, Error, ErrorKind};

use super::admin::{connect, ready_in};
use super::connect::{Connector, words};
use super::page::{FULL, Page};
use super::publisher::AmqpPublisher;
use super::session::{FAREWELL, delivery_from};
use super::topology::delivery_limit;
use crate::broker::{BrokerError, Delivery, Published, Publisher};
use crate::protocol::dead_letter::without_acting_properties;

/// Messages in the first page, before anybody knows how large they are.
const FIRST: u16 = 16;
/// Bytes of bodies to hold at most, by the largest so far.
const PAGE_BYTES: usize = 64 << 20;
/// Without a message for so long, the broker is asked whether there are more.
const IDLE: Duration = Duration::from_millis(250);

/// Where nobody knows after how many deliveries the queue drops a message, RabbitMQ 4's default.
const UNKNOWN_LIMIT: u64 = 20;
/// So many deliveries before the limit a message is put into the queue anew: this look is one, and
/// others may look too.
const MARGIN: u64 = 3;

/// See the module.
pub struct Look {
    connection: Connection,
    broker: String,
    queue: String,
    patience: Duration,
    publisher: AmqpPublisher,
    /// Deliveries after which the queue drops a message.
    limit: u64,
    /// How many of those that were there at the start nobody has taken yet.
    left: u32,
    largest: usize,
    /// A receipt's session is the number of its page, from 0.
    pages: Vec<Page>,
    /// Read and not yet asked for. Bound: a page.
    at_hand: VecDeque<Delivery>,
    /// Page and tag of all that came, in the queue's order.
    order: Vec<(usize, u64)>,
    renewed: usize,
}

impl Look {
    /// Begins to look at what `queue` holds now. `publisher` puts messages into it that must not be
    /// handed back once more.
    ///
    /// # Errors
    /// No address could be reached, or the broker refuses; a queue that does not exist is refused.
    pub async fn open(
        connector: &Connector,
        queue: &str,
        publisher: AmqpPublisher,
    ) -> Result<Self, BrokerError> {
        let (connection, broker) = connect(connector).await?;
        let refuse = |error| failed(&broker, queue, &error);
        let left = ready_in(&connection, queue).await.map_err(refuse)?;
        let limit = match connector.settings().declare {
            true => delivery_limit(&connection, queue).await.map_err(refuse)?,
            false => None,
        };
        Ok(Self {
            connection,
            broker,
            queue: queue.to_owned(),
            patience: connector.settings().connect_timeout,
            publisher,
            limit: limit.unwrap_or(UNKNOWN_LIMIT),
            left,
            largest: 0,
            pages: Vec::new(),
            at_hand: VecDeque::new(),
            order: Vec::new(),
            renewed: 0,
        })
    }

    /// The next message; none behind the last of those that were there at the start. Each is to be
    /// given to [`Look::ack`] or [`Look::leave`].
    ///
    /// # Errors
    /// The connection is lost, or the broker refuses: all that is in hand is the broker's again.
    pub async fn next(&mut self) -> Result<Option<Delivery>, BrokerError> {
        if self.at_hand.is_empty() && self.left > 0 {
            self.turn().await?;
        }
        Ok(self.at_hand.pop_front())
    }

    /// Takes a page.
    async fn turn(&mut self) -> Result<(), BrokerError> {
        let affordable = match self.pages.is_empty() {
            true => FIRST,
            false => u16::try_from(PAGE_BYTES / self.largest.max(1)).unwrap_or(FULL).clamp(1, FULL),
        };
        let size = u16::try_from(self.left).unwrap_or(u16::MAX).min(affordable);
        let number = self.pages.len();
        let mut page = Page::open(&self.connection).await.map_err(|error| self.failed(&error))?;
        let mut consumer = page.consume(&self.queue, size).await.map_err(|error| self.failed(&error))?;
        let (mut came, mut waited) = (Vec::new(), Duration::ZERO);
        while came.len() < usize::from(size) {
            match tokio::time::timeout(IDLE, consumer.next()).await {
                Ok(Some(delivery)) => {
                    let delivery = delivery.map_err(|error| self.failed(&error))?;
                    page.came(&delivery);
                    came.push(delivery);
                    waited = Duration::ZERO;
                }
                Ok(None) => break,
                // Others have taken some.
                Err(_) if self.ready().await? == 0 => break,
                Err(_) if waited < self.patience => waited += IDLE,
                Err(_) => return Err(self.silent()),
            }
        }
        came.extend(page.cancel(consumer).await.map_err(|error| self.failed(&error))?);
        self.pages.push(page);
        let over = came.len() < usize::from(size);
        self.came(number, came);
        if over {
            self.left = 0;
        }
        Ok(())
    }

    /// What is beyond those that were there at the start is held, for the sake of the order, and shown
    /// to nobody.
    fn came(&mut self, page: usize, deliveries: Vec<lapin::message::Delivery>) {
        for delivery in deliveries {
            self.order.push((page, delivery.delivery_tag));
            self.largest = self.largest.max(delivery.data.len());
            if self.left > 0 {
                self.left -= 1;
                self.at_hand.push_back(delivery_from(delivery, page as u64, false));
            }
        }
    }

    async fn ready(&self) -> Result<u32, BrokerError> {
        ready_in(&self.connection, &self.queue).await.map_err(|error| self.failed(&error))
    }

    fn silent(&self) -> BrokerError {
        let (queue, patience) = (&self.queue, self.patience);
        let reason = format!(
            "queue {queue:?} holds messages and gives none for {patience:?}: has another consumer all?"
        );
        BrokerError::Refused { broker: self.broker.clone(), reason }
    }

    /// Whether the queue would soon drop the message: its body is needed if it is to stay.
    pub fn is_worn(&self, delivery: &Delivery) -> bool {
        delivery.delivery_count.saturating_add(MARGIN) >= self.limit
    }

    /// Takes the message out of the queue, with the next [`Look::settle`].
    pub fn ack(&mut self, delivery: &Delivery) {
        if let Some(page) = self.pages.get_mut(delivery.receipt.session as usize) {
            page.ack(delivery.receipt.tag);
        }
    }

    /// Leaves the message in the queue: at its place, or, where it could be dropped from there, anew at
    /// the end.
    ///
    /// # Errors
    /// No broker could be reached to put it into the queue.
    pub async fn leave(&mut self, mut delivery: Delivery) -> Result<(), BrokerError> {
        if !self.is_worn(&delivery) {
            return Ok(());
        }
        let message = without_acting_properties(std::mem::take(&mut delivery.message));
        let published = self.publisher.publish(&self.queue, Arc::new(message)).await?;
        if published == Published::Confirmed {
            self.ack(&delivery);
            self.renewed += 1;
        } else {
            let (queue, count) = (&self.queue, delivery.delivery_count);
            tracing::warn!(
                queue,
                count,
                ?published,
                "a message nears its delivery limit and cannot be renewed"
            );
        }
        Ok(())
    }

    /// Acks what is to be acked.
    ///
    /// # Errors
    /// The connection is lost: messages that were acked may come again.
    pub async fn settle(&mut self) -> Result<(), BrokerError> {
        for number in 0..self.pages.len() {
            let settled = self.pages[number].settle(&self.queue).await;
            let brought = settled.map_err(|error| self.failed(&error))?;
            self.came(number, brought);
        }
        Ok(())
    }

    /// Settles, hands back all that was left, in order, and closes. How many messages were put into the
    /// queue anew.
    ///
    /// # Errors
    /// The connection is lost: all that was not acked is the broker's again.
    pub async fn hand_back(mut self) -> Result<usize, BrokerError> {
        // To the last, also where nobody has asked for it: RabbitMQ's quorum queues put what comes back
        // behind what came back before, and would end in another order.
        loop {
            while let Some(delivery) = self.next().await? {
                self.leave(delivery).await?;
            }
            self.settle().await?;
            if self.at_hand.is_empty() {
                break;
            }
        }
        let pages = &self.pages;
        let held: Vec<_> =
            self.order.iter().filter(|(page, tag)| pages[*page].holds(*tag)).copied().collect();
        for of_page in held.chunk_by(|(one, _), (other, _)| one == other) {
            let tags: Vec<u64> = of_page.iter().map(|(_, tag)| *tag).collect();
            let handed_back = self.pages[of_page[0].0].hand_back(&tags).await;
            handed_back.map_err(|error| self.failed(&error))?;
        }
        let goodbye = async {
            let _ = self.connection.close(200, "done".into()).await;
            self.publisher.close().await;
        };
        let _ = tokio::time::timeout(FAREWELL, goodbye).await;
        Ok(self.renewed)
    }

    fn failed(&self, error: &Error) -> BrokerError {
        failed(&self.broker, &self.queue, error)
    }
}

fn failed(broker: &str, queue: &str, error: &Error) -> BrokerError {
    let reason = format!("queue {queue:?}: {}", words(error).0);
    match error.kind() {
        ErrorKind::ProtocolError(_) => BrokerError::Refused { broker: broker.to_owned(), reason },
        _ => BrokerError::Unreachable { seconds: 0, reason: format!("{broker}: {reason}") },
    }
}
