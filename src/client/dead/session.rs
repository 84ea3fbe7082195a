//! A session with a pool's dead-letter queue: reads the selected dead letters, and returns the others to the queue.
//! Owns the browser and the selection until it is closed.

use super::selection::Selection;
use crate::broker::amqp::{Connector, DeadLetterBrowser, NearLimit};
use crate::broker::{BrokerError, Delivery};
use crate::config::Broker;
use crate::protocol::dead_letter::DeadLetter;

/// The dead letters of a queue, and the selection.
pub(crate) struct BrowserSession {
    pub(super) browser: DeadLetterBrowser,
    pub(crate) selection: Selection,
    queue: String,
}

/// What happens to a selected dead letter.
pub(crate) enum Fate {
    Leave,
    Delete,
}

/// The results of a session that are known when it is closed.
#[derive(Debug)]
pub(crate) struct CloseReport {
    /// Dead letters published to the queue again, at its end, because the broker would have dropped them soon.
    pub(crate) republished: usize,
    /// Dead letters that could not be published again, and that the broker will drop after a few more deliveries.
    pub(crate) near_limit: usize,
    /// Dead letters that matched, but belong to other pools.
    pub(crate) of_other_pools: usize,
    /// The ids for which there was no dead letter.
    pub(crate) missing: Vec<String>,
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

    pub(crate) fn queue(&self) -> &str {
        &self.queue
    }

    /// The number of deliveries after which the queue is assumed to drop a message; none if its limit is known.
    pub(crate) fn assumed_limit(&self) -> Option<u64> {
        self.browser.assumed_limit()
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

    /// Returns to the queue the dead letters that were left.
    ///
    /// # Errors
    /// The broker is lost, or refuses.
    pub(crate) async fn close(self) -> Result<CloseReport, BrokerError> {
        let NearLimit { republished, returned } = self.browser.close().await?;
        let missing = self.selection.missing().into_iter().map(str::to_owned).collect();
        let of_other_pools = self.selection.of_other_pools;
        Ok(CloseReport { republished, near_limit: returned, of_other_pools, missing })
    }
}
