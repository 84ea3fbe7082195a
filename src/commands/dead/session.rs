//! The state that every command uses: the browser of the pool's dead-letter queue, and the selection. Owns both
//! until it is closed.

use super::selection::Selection;
use super::{tell, view};
use crate::broker::amqp::{Connector, DeadLetterBrowser, LeftBehind};
use crate::broker::{BrokerError, Delivery};
use crate::cli::{DeadFilters, DeadSource};
use crate::commands::{load, pool_named};
use crate::protocol::dead_letter::DeadLetter;
use crate::shutdown::Exit;

/// The dead letters of a pool, and the selection.
pub(super) struct BrowserSession {
    pub(super) browser: DeadLetterBrowser,
    pub(super) selection: Selection,
    queue: String,
}

/// What happens to a selected dead letter.
pub(super) enum Fate {
    Leave,
    Delete,
}

impl BrowserSession {
    pub(super) async fn open(
        source: &DeadSource,
        ids: &[String],
        filters: &DeadFilters,
    ) -> anyhow::Result<Self> {
        let settings = load(&source.settings, &[])?.settings;
        let (_, pool) = pool_named(&settings.pools, source.pool.as_deref())?;
        let queue = &pool.dead_letter_queue;
        let browser = DeadLetterBrowser::open(Connector::new(settings.broker, "sconce dead"), queue).await?;
        if let Some(limit) = browser.assumed_limit() {
            tell(&format!(
                "after how many deliveries {queue} drops a message cannot be known: {limit} is assumed"
            ))?;
        }
        let selection = Selection::new(ids, filters, &pool.name, &pool.task_queue);
        Ok(Self { browser, selection, queue: queue.clone() })
    }

    pub(super) fn queue(&self) -> &str {
        &self.queue
    }

    /// The next selected dead letter; all others are left.
    pub(super) async fn next(&mut self) -> Result<Option<Delivery>, BrokerError> {
        while let Some(delivery) = self.browser.next().await? {
            if self.selection.matches(&DeadLetter::of(&delivery.message)) {
                return Ok(Some(delivery));
            }
            self.browser.leave(delivery).await?;
        }
        Ok(None)
    }

    /// Leaves or deletes each selected dead letter, as `decide` says.
    pub(super) async fn for_each(
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

    /// Hands back the dead letters that were left, and prints to stderr what the command's result does not say.
    /// Returns the exit code of a command that did everything it was asked.
    pub(super) async fn close(self) -> anyhow::Result<Exit> {
        let LeftBehind { renewed, near_limit } = self.browser.close().await?;
        let queue = self.queue;
        if renewed > 0 {
            let told = view::dead_letters(renewed);
            tell(&format!(
                "{told} put into {queue} anew, at its end: the broker would have dropped them soon"
            ))?;
        }
        if near_limit > 0 {
            let told = view::dead_letters(near_limit);
            tell(&format!(
                "{told} in {queue} will be dropped by the broker after a few more deliveries, and could not be \
                 put into it anew: is it full, or may this user not write to amq.default?"
            ))?;
        }
        if self.selection.others > 0 {
            let told = view::dead_letters(self.selection.others);
            tell(&format!(
                "{told} of other pools in {queue} too: choose them with --pool or their settings, or by their ids"
            ))?;
        }
        let missing = self.selection.missing();
        if !missing.is_empty() {
            tell(&format!("no dead letter in {queue} matches {}", missing.join(", ")))?;
        }
        Ok(if near_limit > 0 || !missing.is_empty() { Exit::No } else { Exit::Done })
    }
}
