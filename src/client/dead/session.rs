//! A session with a pool's dead-letter queue: reads the selected dead letters, and returns the others to the queue.
//! Owns the selection; the caller closes the browser.

use super::selection::Selection;
use crate::broker::amqp::{Connector, DeadLetterBrowser};
use crate::broker::{BrokerError, Delivery};
use crate::config::Broker;
use crate::protocol::dead_letter::DeadLetter;

/// The dead letters of a queue, and the selection.
pub(crate) struct BrowserSession {
    pub(crate) browser: DeadLetterBrowser,
    pub(crate) selection: Selection,
    pub(crate) queue: String,
}

/// What happens to a selected dead letter.
pub(crate) enum Fate {
    Leave,
    Delete,
}

impl BrowserSession {
    /// Opens the dead-letter queue over a new connection with this name.
    ///
    /// # Errors
    /// The broker refuses, or the queue is missing.
    pub(crate) async fn open(
        broker: &Broker,
        name: &str,
        queue: &str,
        selection: Selection,
    ) -> Result<Self, BrokerError> {
        let browser = DeadLetterBrowser::open(Connector::new(broker.clone(), name), queue).await?;
        Ok(Self { browser, selection, queue: queue.to_owned() })
    }

    /// The next selected dead letter. All others stay in the queue.
    ///
    /// # Errors
    /// The broker is lost, or refuses.
    pub(crate) async fn next(&mut self) -> Result<Option<Delivery>, BrokerError> {
        while let Some(delivery) = self.browser.next().await? {
            if self.selection.matches(&DeadLetter::new(&delivery.message)) {
                return Ok(Some(delivery));
            }
            self.browser.leave(delivery).await?;
        }
        Ok(None)
    }

    /// Leaves or deletes each selected dead letter, as `decide` says.
    ///
    /// # Errors
    /// The broker is lost, or refuses. Dead letters deleted by then stay deleted.
    pub(crate) async fn for_each(
        &mut self,
        mut decide: impl FnMut(&Delivery, &Selection) -> Fate,
    ) -> Result<(), BrokerError> {
        while let Some(delivery) = self.next().await? {
            match decide(&delivery, &self.selection) {
                Fate::Leave => self.browser.leave(delivery).await?,
                Fate::Delete => self.browser.ack(delivery.delivery_tag).await?,
            }
        }
        self.browser.flush().await
    }
}
