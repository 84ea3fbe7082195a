//! Publishes dead letters to the queue that they came from, and removes from the dead-letter queue only what the broker has
//! confirmed there (`confirm-before-ack`).

use std::sync::Arc;

use futures_util::future::join_all;

use super::session::BrowserSession;
use crate::broker::{BrokerError, Delivery, Published, Publisher};
use crate::protocol::dead_letter::{DeadLetter, restored};

/// Number of dead letters published at once. A crash may leave at most this many in both queues.
const WINDOW: usize = 64;
/// No further dead letter joins a window that has this many bytes of bodies.
const WINDOW_BYTES: usize = 16 << 20;

/// The number of selected dead letters, by their outcome.
#[derive(Default)]
pub(crate) struct Requeued {
    /// Moved to the task queue.
    pub(crate) moved: usize,
    /// Left in the dead-letter queue.
    pub(crate) left: usize,
}

/// Requeues all selected dead letters. Calls `report_left` with each one that cannot be requeued, and the reason.
/// After an error, `requeued` counts what was done before it.
///
/// # Errors
/// The broker is lost, or refuses.
pub(crate) async fn requeue(
    session: &mut BrowserSession,
    requeued: &mut Requeued,
    mut report_left: impl FnMut(&Delivery, &str),
) -> Result<(), BrokerError> {
    loop {
        let window = window(session).await?;
        if window.is_empty() {
            return Ok(());
        }
        let sent = join_all(window.iter().map(|delivery| send(session, delivery))).await;
        let mut result = Ok(());
        for (sent, delivery) in sent.into_iter().zip(window) {
            let settled = match sent {
                Ok(Sent::Moved) => {
                    requeued.moved += 1;
                    session.browser.ack(delivery.delivery_tag).await
                }
                Ok(Sent::Left(reason)) => {
                    report_left(&delivery, &reason);
                    requeued.left += 1;
                    session.browser.leave(delivery).await
                }
                Err(error) => Err(error),
            };
            result = result.and(settled);
        }
        session.browser.flush().await?;
        result?;
    }
}

/// The next dead letters to publish at once; empty when there are no more.
async fn window(session: &mut BrowserSession) -> Result<Vec<Delivery>, BrokerError> {
    let (mut window, mut bytes) = (Vec::new(), 0);
    while window.len() < WINDOW
        && bytes < WINDOW_BYTES
        && let Some(delivery) = session.next().await?
    {
        bytes += delivery.message.body.len();
        window.push(delivery);
    }
    Ok(window)
}

/// What became of a dead letter that was to be published to the queue that it came from.
enum Sent {
    /// That queue has confirmed it.
    Moved,
    /// It stays in the dead-letter queue, for this reason.
    Left(String),
}

/// Publishes a dead letter to the queue that it came from.
async fn send(session: &BrowserSession, delivery: &Delivery) -> Result<Sent, BrokerError> {
    if let Some(reason) = session.selection.refusal(delivery) {
        return Ok(Sent::Left(reason));
    }
    let queue = session.selection.queue_of(&DeadLetter::new(&delivery.message));
    let message = Arc::new(restored(delivery.message.clone()));
    Ok(match session.browser.publisher().publish(queue, message).await? {
        Published::Confirmed => Sent::Moved,
        Published::Unroutable => Sent::Left(format!("queue {queue:?} does not exist")),
        Published::Nacked => Sent::Left(format!("queue {queue:?} did not accept the message; is it full?")),
        Published::Refused(reason) | Published::Forbidden(reason) => {
            Sent::Left(format!("queue {queue:?}: {reason}"))
        }
    })
}
