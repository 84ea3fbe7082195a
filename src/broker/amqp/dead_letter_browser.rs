//! Browses the messages of a queue, each once, in order, page by page: they are held, unacked, until
//! they are acked or all handed back to their places. Decides where the pages are, and what is not handed
//! back because RabbitMQ would drop it. One-off, on connections of its own, which when they are lost leave
//! all where it was. Owns the messages in hand.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::{Connection, Error, ErrorKind};

use super::admin::{connect, ready_in};
use super::connect::{Connector, FAREWELL, OpenConnection, words};
use super::fetch_size::FetchSize;
use super::limit::{USUAL_LIMIT, delivery_limit};
use super::page::Page;
use super::publisher::AmqpPublisher;
use super::session::delivery_from;
use crate::broker::{BrokerError, Delivery, DeliveryTag, Published, Publisher};
use crate::protocol::message::without_acting_properties;

/// Without a message for so long, the broker is asked whether there are more.
const IDLE: Duration = Duration::from_millis(250);

/// Channels of a connection that hold no page: its own, and those of questions.
const OTHER_CHANNELS: u16 = 4;
/// Between two questions whether all is back.
const MOMENT: Duration = Duration::from_millis(20);
/// So many deliveries before the limit a message is put into the queue anew: this look is one, and
/// others may look too.
const MARGIN: u64 = 3;

/// Messages of one queue, held unacked.
pub struct DeadLetterBrowser {
    connector: Connector,
    /// One, and another for each time that its channels were not enough.
    connections: Vec<OpenConnection>,
    /// How many pages the last of them can still have.
    pages_left: u16,
    broker: String,
    queue: String,
    publisher: AmqpPublisher,
    /// Deliveries after which the queue drops a message, where that is known.
    limit: Option<u64>,
    /// How many of those that were there at the start nobody has taken yet.
    left: u32,
    fetch_size: FetchSize,
    /// A delivery tag's session is the number of its page, from 0.
    pages: Vec<Page>,
    /// Read and not yet asked for. Bound: a turn.
    at_hand: VecDeque<Delivery>,
    /// Page and tag of all that came, in the queue's order.
    order: Vec<(usize, u64)>,
    left_behind: LeftBehind,
}

/// What a browser could not hand back to its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftBehind {
    /// Messages put into the queue anew, at its end: it would have dropped them soon.
    pub renewed: usize,
    /// Messages that it will drop soon and that could not be put into it anew.
    pub near_limit: usize,
}

impl DeadLetterBrowser {
    /// Begins to look at what `queue` holds now. `publisher` puts messages into it that must not be
    /// handed back once more.
    ///
    /// # Errors
    /// No address could be reached, or the broker refuses; a queue that does not exist is refused.
    pub async fn open(
        connector: Connector,
        queue: &str,
        publisher: AmqpPublisher,
    ) -> Result<Self, BrokerError> {
        let (connection, broker) = connect(&connector).await?;
        let refuse = |error| failed(&broker, queue, &error);
        let left = ready_in(&connection, queue).await.map_err(refuse)?;
        let limit = match connector.settings().declare {
            true => delivery_limit(&connection, queue).await.map_err(refuse)?,
            false => None,
        };
        Ok(Self {
            connector,
            pages_left: pages_on(&connection),
            connections: vec![connection],
            broker,
            queue: queue.to_owned(),
            publisher,
            limit,
            left,
            fetch_size: FetchSize::default(),
            pages: Vec::new(),
            at_hand: VecDeque::new(),
            order: Vec::new(),
            left_behind: LeftBehind::default(),
        })
    }

    /// After how many deliveries the queue drops a message, where that is not known but assumed.
    pub fn assumed_limit(&self) -> Option<u64> {
        self.limit.is_none().then_some(USUAL_LIMIT)
    }

    /// The next message; none behind the last of those that were there at the start. Each is to be
    /// given to [`DeadLetterBrowser::ack`] or [`DeadLetterBrowser::leave`].
    ///
    /// # Errors
    /// The connection is lost, or the broker refuses: all that is in hand is the broker's again.
    pub async fn next(&mut self) -> Result<Option<Delivery>, BrokerError> {
        if self.at_hand.is_empty() && self.left > 0 {
            self.turn().await?;
        }
        Ok(self.at_hand.pop_front())
    }

    /// Takes some.
    async fn turn(&mut self) -> Result<(), BrokerError> {
        let number = self.page_with_room().await?;
        let affordable = self.fetch_size.most().min(self.pages[number].room());
        let size = u16::try_from(self.left).unwrap_or(u16::MAX).min(affordable);
        let consumer = self.pages[number].consume(&self.queue, size).await;
        let mut consumer = consumer.map_err(|error| self.failed(&error))?;
        let (mut came, mut waited) = (Vec::new(), Duration::ZERO);
        while came.len() < usize::from(size) {
            match tokio::time::timeout(IDLE, consumer.next()).await {
                Ok(Some(delivery)) => {
                    let delivery = delivery.map_err(|error| self.failed(&error))?;
                    self.pages[number].came(&delivery);
                    came.push(delivery);
                    waited = Duration::ZERO;
                }
                Ok(None) => break,
                // Others have taken some.
                Err(_) if self.ready().await? == 0 => break,
                Err(_) if waited < self.patience() => waited += IDLE,
                Err(_) => return Err(self.silent()),
            }
        }
        let last = self.pages[number].cancel(consumer).await;
        came.extend(last.map_err(|error| self.failed(&error))?);
        let over = came.len() < usize::from(size);
        self.fetch_size.took(came.iter().map(|delivery| delivery.data.len()).max().unwrap_or_default());
        self.came(number, came);
        if over {
            self.left = 0;
        }
        Ok(())
    }

    /// The page that takes the next messages: the last one, or a new one behind it.
    async fn page_with_room(&mut self) -> Result<usize, BrokerError> {
        if self.pages.last().is_none_or(|page| page.room() == 0) {
            if self.pages_left == 0 {
                let (connection, _) = connect(&self.connector).await?;
                self.pages_left = pages_on(&connection);
                self.connections.push(connection);
            }
            let page = Page::open(self.connection()?).await.map_err(|error| self.failed(&error))?;
            self.pages_left -= 1;
            self.pages.push(page);
        }
        Ok(self.pages.len() - 1)
    }

    fn connection(&self) -> Result<&Connection, BrokerError> {
        let gone = || BrokerError::Unreachable { seconds: 0, reason: "the browser is closed".into() };
        self.connections.last().map(|connection| &**connection).ok_or_else(gone)
    }

    /// What is beyond those that were there at the start is held, for the sake of the order, and shown
    /// to nobody.
    fn came(&mut self, page: usize, deliveries: Vec<lapin::message::Delivery>) {
        for delivery in deliveries {
            self.order.push((page, delivery.delivery_tag));
            if self.left > 0 {
                self.left -= 1;
                self.at_hand.push_back(delivery_from(delivery, page as u64, false));
            }
        }
    }

    async fn ready(&self) -> Result<u32, BrokerError> {
        ready_in(self.connection()?, &self.queue).await.map_err(|error| self.failed(&error))
    }

    fn patience(&self) -> Duration {
        self.connector.settings().connect_timeout
    }

    fn silent(&self) -> BrokerError {
        let (queue, patience) = (&self.queue, self.patience());
        let reason = format!(
            "queue {queue:?} holds messages and gives none for {patience:?}: has another consumer all?"
        );
        BrokerError::Refused { broker: self.broker.clone(), reason }
    }

    /// Whether the queue would soon drop the message: its body is needed if it is to stay.
    pub fn is_worn(&self, delivery: &Delivery) -> bool {
        delivery.delivery_count.unwrap_or(1).saturating_add(MARGIN) >= self.limit.unwrap_or(USUAL_LIMIT)
    }

    /// Takes the message out of the queue, with the next [`DeadLetterBrowser::settle`].
    pub fn ack(&mut self, message: DeliveryTag) {
        if let Some(page) = self.pages.get_mut(message.session as usize) {
            page.ack(message.tag);
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
            self.ack(delivery.delivery_tag);
            self.left_behind.renewed += 1;
        } else {
            tracing::debug!(queue = self.queue, ?published, "a near_limit message cannot be renewed");
            self.left_behind.near_limit += 1;
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

    /// Settles, hands back all that was left, in order, and closes.
    ///
    /// # Errors
    /// The connection is lost: all that was not acked is the broker's again.
    pub async fn hand_back(mut self) -> Result<LeftBehind, BrokerError> {
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
        self.wait_until_back(held.len()).await;
        let goodbye = async {
            for connection in &self.connections {
                let _ = connection.close(200, "done".into()).await;
            }
            self.publisher.close().await;
        };
        let _ = tokio::time::timeout(FAREWELL, goodbye).await;
        Ok(self.left_behind)
    }

    /// The broker has been told, and a quorum queue acts on it a moment later: who looks next would miss
    /// what is not yet back. Where others take messages meanwhile, it ends all the same.
    async fn wait_until_back(&self, held: usize) {
        let back = async {
            while self.ready().await.is_ok_and(|ready| (ready as usize) < held) {
                tokio::time::sleep(MOMENT).await;
            }
        };
        let _ = tokio::time::timeout(FAREWELL, back).await;
    }

    fn failed(&self, error: &Error) -> BrokerError {
        failed(&self.broker, &self.queue, error)
    }
}

fn pages_on(connection: &Connection) -> u16 {
    connection.configuration().channel_max().saturating_sub(OTHER_CHANNELS).max(1)
}

fn failed(broker: &str, queue: &str, error: &Error) -> BrokerError {
    let reason = format!("queue {queue:?}: {}", words(error).0);
    match error.kind() {
        ErrorKind::ProtocolError(_) => BrokerError::Refused { broker: broker.to_owned(), reason },
        _ => BrokerError::Unreachable { seconds: 0, reason: format!("{broker}: {reason}") },
    }
}
