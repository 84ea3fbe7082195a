//! Remote control of a launcher: takes requests from the control exchange one by one, has the launcher carry
//! them out, and answers for the addressed slots. Decides what a request does. The routing key names the
//! addressed slots, so that the broker's topic permissions can restrict who may control which slots. Requests with the
//! key of requesters are in `cancellations`. Owns the connection.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::broker::{BrokerError, BrokerSession, ConsumerEvent, Delivery, Published};
use crate::launcher::order::{Handle, Outcome};
use crate::launcher::status_board::StatusBoard;
use crate::protocol::admin::{ControlRequest, LauncherAnswer, SlotReport, Target};
use crate::protocol::{JSON, Message, Properties, shorten};
use crate::telemetry::{self, Throttle};

/// The longest wait for slots to carry out an order. They do so at once, unless their worker does not read
/// its control lines.
pub(super) const ORDER_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest wait for the broker to accept an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The shortest time between two log lines about refused requests.
const LOG_INTERVAL: Duration = Duration::from_secs(1);
/// The largest request, in bytes.
const MAX_REQUEST_BYTES: usize = 64 << 10;

/// The parts of the controlled launcher that requests read or change.
pub struct ControlledLauncher {
    /// Its name.
    pub name: String,
    /// Its host's name.
    pub host: String,
    /// The board with the state of its slots.
    pub board: Arc<StatusBoard>,
    /// The handle that takes orders.
    pub handle: Handle,
    /// One permit, held while a request is being answered.
    pub answer_permit: Semaphore,
    /// Bounds the log lines about refused requests.
    pub refusals: Mutex<Throttle>,
}

/// Serves requests until the broker refuses the connection or is unreachable for too long.
///
/// # Errors
/// The broker refuses the connection, or has been unreachable for too long.
pub async fn control(mut session: BrokerSession, launcher: &ControlledLauncher) -> Result<(), BrokerError> {
    loop {
        match session.consumer.next().await? {
            ConsumerEvent::Delivery(delivery) => {
                // A request may shut this launcher down. The shutdown waits for this permit, so that the answer is sent
                // first.
                let _permit = launcher.answer_permit.acquire().await;
                handle_delivery(&session, launcher, &delivery).await;
                // Acked last: the prefetch is one, so until then further requests wait at the broker, where they can
                // expire.
                session.acker.ack(delivery.delivery_tag).await;
            }
            ConsumerEvent::Lost { .. } => {}
            ConsumerEvent::End => return Ok(()),
        }
    }
}

async fn handle_delivery(session: &BrokerSession, launcher: &ControlledLauncher, delivery: &Delivery) {
    let Some(answer) = launcher.serve(delivery).await else { return };
    // A cancellation of a requester's kind may come with an operator's key too. It is not answered: its reply queue gets
    // the cancelled task's reply, and nothing else.
    if ControlRequest::cancellation_in(&delivery.message.properties).is_none() {
        send_answer(session, delivery, &answer).await;
    }
}

pub(super) async fn send_answer(session: &BrokerSession, delivery: &Delivery, answer: &LauncherAnswer) {
    let Some(reply_to) = &delivery.message.properties.reply_to else { return };
    // If the requester is gone, an unroutable answer is not an error.
    let message = Arc::new(build_message(&delivery.message, answer));
    let published = tokio::time::timeout(ANSWER_TIMEOUT, session.publisher.publish(reply_to, message)).await;
    if !matches!(published, Ok(Ok(Published::Confirmed))) {
        tracing::debug!(reply_to, "remote control: the answer was not delivered");
    }
}

fn build_message(request: &Message, answer: &LauncherAnswer) -> Message {
    let properties = Properties {
        content_type: Some(JSON.into()),
        correlation_id: request.properties.correlation_id.clone(),
        kind: Some("control.answer".into()),
        ..Properties::default()
    };
    Message { properties, body: serde_json::to_vec(answer).unwrap_or_default().into() }
}

impl ControlledLauncher {
    /// Carries out a request and returns the answer. None if the request addresses no slot of this launcher, but perhaps
    /// slots of others.
    async fn serve(&self, delivery: &Delivery) -> Option<LauncherAnswer> {
        let key = delivery.routing_key.as_deref().unwrap_or_default();
        let Some(target) = Target::from_routing_key(key) else {
            return Some(self.refusal(format!(
                "{key:?} is no routing key of requests; expected all, cancel, host.…, launcher.…, pool.… or slot.…"
            )));
        };
        let target = target.narrowed_to(&self.host, &self.name)?;
        let is_addressed = |report: &SlotReport| target.matches(&report.pool, &report.worker);
        if !self.board.read(|status| status.slots.values().any(|entry| is_addressed(&entry.report))) {
            return None;
        }
        let body = &delivery.message.body;
        if body.len() > MAX_REQUEST_BYTES {
            return Some(self.refusal(format!(
                "the request has {} bytes; at most {MAX_REQUEST_BYTES} are allowed",
                body.len()
            )));
        }
        let request = match ControlRequest::cancellation_in(&delivery.message.properties) {
            Some(cancellation) => ControlRequest::Cancel(cancellation),
            None => match serde_json::from_slice(body) {
                Ok(request) => request,
                Err(error) => return Some(self.refusal(shorten(&format!("not a request: {error}"), 500))),
            },
        };
        let request_text = serde_json::to_string(&request).unwrap_or_default();
        if request.is_query() {
            tracing::debug!(key, request = request_text, "remote control");
        } else {
            tracing::info!(key, request = request_text, "remote control");
        }
        let before = self.reports(&target);
        let outcomes = match self.carry_out(&request, &target).await {
            Ok(outcomes) => outcomes,
            Err(message) => return Some(self.refusal(message)),
        };
        let mut slots = self.reports(&target);
        if request == ControlRequest::Restart {
            set_replaced_pids(&mut slots, &before);
        }
        Some(self.build_answer(&request, slots, &outcomes))
    }

    /// The current reports of the slots of `target`.
    fn reports(&self, target: &Target) -> Vec<SlotReport> {
        self.board.read(|status| {
            let reports = status.slots.values().map(|entry| entry.report());
            reports.filter(|it| target.matches(&it.pool, &it.worker)).collect()
        })
    }

    /// Validates an order, sets the launcher's own log filter if the order asks for that, and has the slots carry out
    /// the order. A query changes nothing.
    async fn carry_out(
        &self,
        request: &ControlRequest,
        target: &Target,
    ) -> Result<BTreeMap<String, Outcome>, String> {
        if request.is_query() {
            return Ok(BTreeMap::new());
        }
        if let ControlRequest::Cancel(cancellation) = request
            && let Some(problem) = cancellation.problem()
        {
            return Err(problem.to_owned());
        }
        if let ControlRequest::LogLevel { filter } = request {
            telemetry::set_filter(filter).map_err(|problem| format!("log filter {filter:?}: {problem}"))?;
        }
        let outcomes =
            tokio::time::timeout(ORDER_TIMEOUT, self.handle.order(target.clone(), request.clone())).await;
        let outcomes = outcomes
            .map_err(|_| format!("not every slot has carried out the order within {ORDER_TIMEOUT:?}"))?;
        Ok(outcomes.into_iter().collect())
    }

    fn build_answer(
        &self,
        request: &ControlRequest,
        slots: Vec<SlotReport>,
        outcomes: &BTreeMap<String, Outcome>,
    ) -> LauncherAnswer {
        let reports = slots.into_iter().map(|mut report| {
            if *request != ControlRequest::Stats {
                report.stats = None;
            }
            if *request != ControlRequest::Active && *request != ControlRequest::Stats {
                report.active.clear();
            }
            match outcomes.get(&report.slot) {
                Some(Ok(done)) => {
                    report.done = Some(done.what.to_owned());
                    report.cancelled = done.cancelled;
                }
                Some(Err(message)) => report.refused = Some(message.clone()),
                None => {}
            }
            report
        });
        LauncherAnswer { slots: reports.collect(), ..self.identity() }
    }

    /// The answer to a request that is refused.
    fn refusal(&self, message: String) -> LauncherAnswer {
        self.log_refusal(&message);
        LauncherAnswer { error: Some(message), ..self.identity() }
    }

    /// Logs that a request is refused. Returns false if the line is held back, because there were others.
    pub(super) fn log_refusal(&self, message: &str) -> bool {
        let unlogged = self.refusals.lock().pass(LOG_INTERVAL, Instant::now());
        if let Some(unlogged) = unlogged {
            tracing::warn!(error = message, unlogged, "remote control: refused");
        }
        unlogged.is_some()
    }

    /// An answer that names this launcher, and no slots.
    pub(super) fn identity(&self) -> LauncherAnswer {
        LauncherAnswer {
            launcher: self.name.clone(),
            host: self.host.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: self.board.uptime().as_millis() as u64,
            ..LauncherAnswer::default()
        }
    }
}

/// Puts the process ids of the replaced workers into the reports of restarted slots. `sconce ctl restart --wait` waits
/// for another process id than the one in the answer, and a quick worker may be running before the answer is built.
fn set_replaced_pids(slots: &mut [SlotReport], before: &[SlotReport]) {
    for slot in slots {
        slot.pid = before.iter().find(|it| it.slot == slot.slot).and_then(|it| it.pid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_a_restart_names_the_replaced_process_even_if_the_new_one_runs() {
        let report = |slot: &str, pid| SlotReport { slot: slot.into(), pid, ..SlotReport::default() };
        let before = [report("embed/0", Some(10)), report("embed/1", None)];
        let mut slots = [report("embed/0", Some(20)), report("embed/1", Some(21))];
        set_replaced_pids(&mut slots, &before);
        assert_eq!(slots.map(|slot| slot.pid), [Some(10), None]);
    }
}
