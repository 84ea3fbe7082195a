//! Sends requests to running launchers over the control exchange, and gathers their answers. Owns the connection, and
//! does not reconnect.

use std::ops::Range;
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use tokio::time::Instant;

#[cfg(feature = "top")]
use crate::broker::amqp::QueueDepth;
use crate::broker::amqp::{Connector, ControlClient};
use crate::broker::{BrokerError, Published};
use crate::config::Settings;
use crate::protocol::admin::{CANCEL, ControlRequest, LauncherAnswer, Target};
use crate::protocol::control::{Cancellation, WITHDRAWN_FOR};
use crate::protocol::{Headers, Properties};

/// The least time without an answer after which no further one is expected.
const MIN_QUIET: Duration = Duration::from_millis(150);

/// The most cancellations of tasks whose confirms are awaited at once.
const MAX_CANCELLING: usize = 256;

/// How long to wait for the next answer: three times as long as the first answer took, but at least [`MIN_QUIET`].
fn quiet_timeout(first_took: Duration) -> Duration {
    (3 * first_took).max(MIN_QUIET)
}

/// Why a request to launchers fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FleetError {
    /// The settings say that there is no remote control.
    #[error("admin.control_exchange = \"\": there is no remote control")]
    NoExchange,
    /// No launcher has declared the exchange.
    #[error("nobody has answered: {0}")]
    Nobody(String),
    /// The connection was lost while answers were awaited.
    #[error("the broker was lost while answers were awaited")]
    Lost,
    /// The broker cannot be reached, or refuses.
    #[error(transparent)]
    Broker(#[from] BrokerError),
}

/// How long answers are gathered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AnswerWait {
    /// Until no more are expected: the wait for each further answer depends on how long the first one took.
    UntilQuiet,
    /// For the whole time, or until there are this many.
    Expected(usize),
}

/// A connection to the control exchange.
pub(crate) struct Control {
    client: ControlClient,
}

impl Control {
    /// Connects.
    ///
    /// # Errors
    /// The settings name no exchange, or the broker cannot be reached or refuses.
    pub(crate) async fn open(settings: &Settings) -> Result<Self, FleetError> {
        let exchange = settings.admin.control_exchange.as_deref().ok_or(FleetError::NoExchange)?;
        let connector = Connector::new(settings.broker.clone(), "sconce ctl");
        Ok(Self { client: ControlClient::connect(&connector, exchange).await? })
    }

    /// Sends a request, and returns the answers that arrive, sorted by launcher. Waits until this time for all of them,
    /// or for the first.
    ///
    /// # Errors
    /// Nobody can answer, or the broker is lost.
    pub(crate) async fn request(
        &mut self,
        target: &Target,
        request: &ControlRequest,
        until: Instant,
        wait: AnswerWait,
    ) -> Result<Vec<LauncherAnswer>, FleetError> {
        let requested_at = Instant::now();
        let (mut first_took, mut quiet_at) = (None, until);
        let id = uuid::Uuid::new_v4().to_string();
        let expires = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        // A request holds only strings and numbers, so serializing it cannot fail.
        let body = serde_json::to_vec(request).unwrap_or_default();
        let mut answers: Vec<LauncherAnswer> = Vec::new();
        match self.client.publish_request(&target.routing_key(), &body, &id, expires).await {
            // No launcher is bound to this routing key.
            Ok(Published::Unroutable) => return Ok(answers),
            Ok(Published::Confirmed) => {}
            // The other launchers have got it.
            Ok(_) => answers.push(failed(
                "the queue of requests of a launcher is full; it did not get this one".to_owned(),
            )),
            // No launcher has declared the exchange, so none is running.
            Err(BrokerError::Missing { reason, .. }) => {
                return Err(FleetError::Nobody(reason));
            }
            Err(error) => return Err(error.into()),
        }
        let expected = if let AnswerWait::Expected(count) = wait { count } else { usize::MAX };
        while answers.len() < expected {
            let Ok(next) = tokio::time::timeout_at(quiet_at, self.client.next()).await else { break };
            let message = next.ok_or(FleetError::Lost)?;
            // Late answers to earlier requests are ignored.
            if message.properties.correlation_id.as_ref() == Some(&id) {
                if wait == AnswerWait::UntilQuiet {
                    let took = *first_took.get_or_insert_with(|| requested_at.elapsed());
                    quiet_at = until.min(Instant::now() + quiet_timeout(took));
                }
                // An unreadable answer, from a launcher of another version, must not hide the others.
                let answer = serde_json::from_slice(&message.body);
                answers.push(answer.unwrap_or_else(|error: serde_json::Error| {
                    failed(format!("an answer that this version cannot read: {error}"))
                }));
            }
        }
        answers.sort_by(|one, other| (&one.launcher, one.pid).cmp(&(&other.launcher, other.pid)));
        Ok(answers)
    }

    /// Cancels the tasks with these numbers as their `correlation_id`, and with this `reply_to`. Returns how many of the
    /// cancellations the broker has passed on to launchers.
    ///
    /// # Errors
    /// The broker refuses or is lost, or no launcher has declared the exchange.
    pub(crate) async fn cancel_tasks(&self, numbers: Range<u64>, reply_to: &str) -> Result<u64, FleetError> {
        let key = Target::Cancel.routing_key();
        let cancellations = numbers.map(|number| Properties {
            kind: Some(CANCEL.to_owned()),
            correlation_id: Some(number.to_string()),
            reply_to: Some(reply_to.to_owned()),
            headers: Headers::from([(
                "timestamp_in_ms".to_owned(),
                jiff::Timestamp::now().as_millisecond().into(),
            )]),
            ..Properties::default()
        });
        let client = &self.client;
        let published = stream::iter(cancellations)
            .map(|properties| {
                let key = &key;
                async move { client.publish(key, &properties, &[]).await }
            })
            .buffer_unordered(MAX_CANCELLING);
        let confirmed = published.try_fold(0, |count, published| async move {
            Ok(count + u64::from(published == Published::Confirmed))
        });
        match confirmed.await {
            Err(BrokerError::Missing { reason, .. }) => Err(FleetError::Nobody(reason)),
            counted => Ok(counted?),
        }
    }

    /// Stores a withdrawal at the broker, for launchers that start later.
    ///
    /// # Errors
    /// The broker refuses or is lost.
    pub(crate) async fn keep_withdrawal(&self, cancellation: &Cancellation) -> Result<(), FleetError> {
        // A cancellation holds only strings, so serializing it cannot fail.
        let body = serde_json::to_vec(cancellation).unwrap_or_default();
        Ok(self.client.keep_withdrawal(&body, WITHDRAWN_FOR).await?)
    }

    /// The depth of a queue; none if the queue cannot be inspected.
    ///
    /// # Errors
    /// The broker is lost.
    #[cfg(feature = "top")]
    pub(crate) async fn depth(&self, queue: &str) -> Result<Option<QueueDepth>, FleetError> {
        Ok(self.client.depth(queue).await?)
    }

    pub(crate) async fn close(self) {
        self.client.close().await;
    }
}

/// Stands for the answer of an unknown launcher: one that cannot be parsed, or that will not come.
fn failed(problem: String) -> LauncherAnswer {
    LauncherAnswer { host: "unknown".to_owned(), error: Some(problem), ..LauncherAnswer::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_launchers_have_more_time_between_answers_than_near_ones() {
        assert_eq!(quiet_timeout(Duration::from_millis(4)), MIN_QUIET);
        assert_eq!(quiet_timeout(Duration::from_millis(200)), Duration::from_millis(600));
    }
}
