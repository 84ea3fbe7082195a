//! The cancellations that requesters send: takes them from a queue of their own, and passes on as many at once as have
//! come, so that a flood of them delays neither an operator's request nor another requester's cancellation for long.
//! Owns the connection.

use futures_util::FutureExt as _;

use super::remote::{ControlledLauncher, ORDER_TIMEOUT, send_answer};
use crate::broker::{BrokerError, BrokerSession, ConsumerEvent, Delivery};
use crate::protocol::admin::{CANCEL, ControlRequest, LauncherAnswer, Target};
use crate::protocol::control::{Cancellation, MAX_CANCELLATIONS};

/// Serves cancellations until the broker refuses the connection or is unreachable for too long.
///
/// # Errors
/// The broker refuses the connection, or has been unreachable for too long.
pub async fn cancellations(
    mut session: BrokerSession,
    launcher: &ControlledLauncher,
) -> Result<(), BrokerError> {
    loop {
        let mut next = Some(session.consumer.next().await?);
        let (mut deliveries, mut accepted) = (Vec::new(), Vec::new());
        while let Some(event) = next.take() {
            match event {
                ConsumerEvent::Delivery(delivery) => {
                    match cancellation(&delivery) {
                        Ok(cancellation) => accepted.push(cancellation),
                        // Only logged ones are answered: an answer to each of a flood would take longer than the rest.
                        Err(problem) => {
                            if launcher.log_refusal(&problem) {
                                let answer = LauncherAnswer { error: Some(problem), ..launcher.identity() };
                                send_answer(&session, &delivery, &answer).await;
                            }
                        }
                    }
                    deliveries.push(delivery.delivery_tag);
                }
                ConsumerEvent::Lost { .. } => deliveries.clear(),
                ConsumerEvent::End => return Ok(()),
            }
            if deliveries.len() < MAX_CANCELLATIONS {
                next = session.consumer.next().now_or_never().transpose()?;
            }
        }
        tracing::debug!(count = accepted.len(), "remote control: cancellations by requesters");
        if !accepted.is_empty() {
            let order = launcher.handle.order(Target::All, ControlRequest::CancelAll(accepted.into()));
            // The wait is bounded, since a slot may not take the order. Whoever is not served may cancel again.
            let _ = tokio::time::timeout(ORDER_TIMEOUT, order).await;
        }
        // Acked last, so that further ones wait in the queue, whose length is bounded.
        for delivery_tag in deliveries {
            session.acker.ack(delivery_tag).await;
        }
    }
}

/// The cancellation in a message with the routing key of requesters.
fn cancellation(delivery: &Delivery) -> Result<Cancellation, String> {
    let Some(cancellation) = ControlRequest::cancellation_in(&delivery.message.properties) else {
        let key = Target::Cancel.routing_key();
        return Err(format!("the key {key:?} only takes messages of the type {CANCEL}"));
    };
    match cancellation.problem() {
        Some(problem) => Err(problem.to_owned()),
        None => Ok(cancellation),
    }
}
