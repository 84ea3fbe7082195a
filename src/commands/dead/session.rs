//! What each of the commands works at: the browser of the queue, and which of its dead letters are meant.
//! Owns both until it is closed.

use std::time::SystemTime;

use super::selection::Selection;
use super::{tell, view};
use crate::broker::amqp::{AmqpPublisher, Connector, DeadLetterBrowser, LeftBehind};
use crate::broker::{BrokerError, Delivery};
use crate::cli::{DeadFilters, DeadSource};
use crate::commands::{load, pool_named};
use crate::config::{Broker, Pool};
use crate::protocol::dead_letter::DeadLetter;
use crate::shutdown::Exit;

/// A held queue of dead letters, and which of them a command is about.
pub(super) struct BrowserSession {
    pub(super) browser: DeadLetterBrowser,
    pub(super) pool: Pool,
    broker: Broker,
    selection: Selection,
}

/// What remains of it.
pub(super) struct Closed {
    /// Whose letters they were.
    pub(super) queue: String,
    /// Some that were asked for by id are not there, or some could not be left as safe as they were.
    wanting: bool,
}

impl Closed {
    /// What the command ends with when all else went well.
    pub(super) fn exit(&self) -> Exit {
        if self.wanting { Exit::No } else { Exit::Done }
    }
}

impl BrowserSession {
    /// Settles what is meant, then connects.
    pub(super) async fn open(
        source: &DeadSource,
        ids: &[String],
        filters: &DeadFilters,
    ) -> anyhow::Result<Self> {
        let settings = load(&source.settings, &[])?.settings;
        let (_, pool) = pool_named(&settings.pools, source.pool.as_deref())?;
        let selection = Selection::new(ids, filters, SystemTime::now())?.of(&pool.name, &pool.task_queue);
        let connector = || Connector::new(settings.broker.clone(), "sconce dead");
        let queue = &pool.dead_letter_queue;
        let browser = DeadLetterBrowser::open(connector(), queue, AmqpPublisher::new(connector())).await?;
        if let Some(assumed) = browser.assumed_limit() {
            tell(&format!(
                "after how many deliveries {queue} drops a letter cannot be known: {assumed} is assumed"
            ))?;
        }
        Ok(Self { browser, pool: pool.clone(), broker: settings.broker, selection })
    }

    /// For what goes to other queues. It connects with the first message.
    pub(super) fn publisher(&self) -> AmqpPublisher {
        AmqpPublisher::new(Connector::new(self.broker.clone(), "sconce dead (publisher)"))
    }

    /// The time by which ages are reckoned.
    pub(super) fn now(&self) -> SystemTime {
        self.selection.now()
    }

    /// Letters are asked for by their ids.
    pub(super) fn by_name(&self) -> bool {
        self.selection.by_name()
    }

    /// The next letter that is meant; all others stay.
    pub(super) async fn next(&mut self) -> Result<Option<Delivery>, BrokerError> {
        while let Some(delivery) = self.browser.next().await? {
            if self.selection.takes(&DeadLetter::of(&delivery.message)) {
                return Ok(Some(delivery));
            }
            self.browser.leave(delivery).await?;
        }
        Ok(None)
    }

    /// A letter that was meant stays all the same.
    pub(super) async fn leave(&mut self, delivery: Delivery) -> Result<(), BrokerError> {
        self.browser.leave(delivery).await
    }

    /// Hands back what stays, and says on stderr what the result does not.
    pub(super) async fn close(self) -> anyhow::Result<Closed> {
        let LeftBehind { renewed, near_limit } = self.browser.hand_back().await?;
        let queue = self.pool.dead_letter_queue;
        if renewed > 0 {
            let told = view::letters(renewed);
            tell(&format!(
                "{told} put into {queue} anew, at its end: the broker would have dropped them soon"
            ))?;
        }
        if near_limit > 0 {
            let told = view::letters(near_limit);
            tell(&format!(
                "{told} in {queue} will be dropped by the broker after a few more looks, and could not be put \
                 into it anew: is it full, or may this user not write to amq.default?"
            ))?;
        }
        if let Some(told) = self.selection.foreign() {
            tell(&format!(
                "{told}, in {queue} too: choose theirs with --pool or their settings, or give ids"
            ))?;
        }
        let missing = self.selection.missing();
        if !missing.is_empty() {
            tell(&format!("no letter in {queue} is meant by {}", missing.join(", ")))?;
        }
        Ok(Closed { queue, wanting: near_limit > 0 || !missing.is_empty() })
    }
}
