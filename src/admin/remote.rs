//! Remote control at a launcher: takes requests from the control exchange one by one, has the
//! launcher obey, answers with the slots that were meant. Decides what a request does; who is meant,
//! its routing key says, which the broker's topic permissions can restrict. Owns the link.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::broker::{BrokerError, BrokerSession, Delivery, Event, Published};
use crate::launcher::order::{Handle, Order, Outcome};
use crate::launcher::status_board::StatusBoard;
use crate::protocol::admin::{Answer, Request, SlotReport, Target};
use crate::protocol::{JSON, Message, Properties, shorten};

/// Longest wait for slots to take an order: they obey at once, or their worker does not read.
const OBEYING: Duration = Duration::from_secs(5);
/// Longest wait for the broker to take an answer.
const ANSWERING: Duration = Duration::from_secs(5);
/// Largest request.
const LONGEST: usize = 64 << 10;

/// The launcher that is controlled.
pub struct Place {
    /// Its host's name.
    pub host: String,
    /// What is known of its slots.
    pub board: Arc<StatusBoard>,
    /// By which it is asked.
    pub handle: Handle,
    /// Sets its own log filter, or says what is wrong with one.
    pub log_filter: fn(&str) -> Result<(), String>,
    /// Its one permit is held while a request is being answered.
    pub answering: Semaphore,
}

/// Serves requests until the broker refuses us or is gone for too long.
///
/// # Errors
/// It refuses, or is gone.
pub async fn control(mut link: BrokerSession, place: &Place) -> Result<(), BrokerError> {
    loop {
        match link.consumer.next().await? {
            Event::Delivery(delivery) => {
                // Held until the answer is out: a launcher that ends by this request waits for it.
                let _answering = place.answering.acquire().await;
                answer(&link, place, &delivery).await;
                // Not before: with one request in hand at a time, those behind it expire at the broker.
                link.acker.ack(delivery.delivery_tag).await;
            }
            Event::Lost { .. } => {}
            Event::End => return Ok(()),
        }
    }
}

async fn answer(link: &BrokerSession, place: &Place, delivery: &Delivery) {
    let Some(answer) = place.serve(delivery).await else { return };
    let Some(reply_to) = &delivery.message.properties.reply_to else { return };
    // Whoever asked may be gone: then nobody misses the answer.
    let answered = Arc::new(answered(&delivery.message, &answer));
    let published = tokio::time::timeout(ANSWERING, link.publisher.publish(reply_to, answered)).await;
    if !matches!(published, Ok(Ok(Published::Confirmed))) {
        tracing::debug!(?published, reply_to, "remote control: nobody took the answer");
    }
}

fn answered(request: &Message, answer: &Answer) -> Message {
    let properties = Properties {
        content_type: Some(JSON.into()),
        correlation_id: request.properties.correlation_id.clone(),
        kind: Some("control.answer".into()),
        ..Properties::default()
    };
    Message { properties, body: serde_json::to_vec(answer).unwrap_or_default().into() }
}

impl Place {
    /// Does what is asked. None: nobody here is meant, and others may be.
    async fn serve(&self, delivery: &Delivery) -> Option<Answer> {
        let key = delivery.routing_key.as_deref().unwrap_or_default();
        let Some(target) = Target::of_routing_key(key) else {
            return Some(self.refusal(format!("{key:?} addresses nobody: all, host.…, pool.… or slot.…")));
        };
        let meant = |report: &SlotReport| target.means(&self.host, &report.pool, &report.worker);
        if !self.board.read(|status| status.slots.values().any(|entry| meant(&entry.report))) {
            return None;
        }
        let body = &delivery.message.body;
        if body.len() > LONGEST {
            return Some(
                self.refusal(format!("the request is {} bytes; at most {LONGEST} are read", body.len())),
            );
        }
        let request: Request = match serde_json::from_slice(body) {
            Ok(request) => request,
            Err(error) => return Some(self.refusal(shorten(&format!("not a request: {error}"), 500))),
        };
        if request.only_asks() {
            tracing::debug!(key, ?request, "remote control");
        } else {
            tracing::info!(key, ?request, "remote control");
        }
        let outcomes = match self.obey(&request, &target).await {
            Ok(outcomes) => outcomes,
            Err(words) => return Some(self.refusal(words)),
        };
        Some(self.answer(&request, &target, &outcomes))
    }

    /// Has the slots obey; nothing for a question.
    async fn obey(&self, request: &Request, target: &Target) -> Result<BTreeMap<String, Outcome>, String> {
        let order = match request {
            Request::Ping | Request::Stats | Request::Active => return Ok(BTreeMap::new()),
            Request::Pause => Order::Pause,
            Request::Resume => Order::Resume,
            Request::Drain => Order::Drain,
            Request::Shutdown => Order::Shutdown,
            Request::Restart => Order::Restart,
            Request::SetBatch(change) => match change.problem() {
                Some(problem) => return Err(problem),
                None => Order::SetBatch(*change),
            },
            Request::LogLevel { filter } => {
                (self.log_filter)(filter).map_err(|problem| format!("log filter {filter:?}: {problem}"))?;
                Order::LogLevel(filter.clone())
            }
        };
        let obeyed = tokio::time::timeout(OBEYING, self.handle.order(target.clone(), order)).await;
        let outcomes = obeyed.map_err(|_| format!("not every slot has obeyed within {OBEYING:?}"))?;
        Ok(outcomes.into_iter().collect())
    }

    fn answer(&self, request: &Request, target: &Target, outcomes: &BTreeMap<String, Outcome>) -> Answer {
        let slots = self.board.read(|status| {
            let reports = status.slots.values().map(|entry| entry.report());
            reports.filter(|it| target.means(&self.host, &it.pool, &it.worker)).collect::<Vec<_>>()
        });
        let told = slots.into_iter().map(|mut report| {
            if *request != Request::Stats {
                report.stats = None;
            }
            if *request != Request::Active && *request != Request::Stats {
                report.active.clear();
            }
            match outcomes.get(&report.slot) {
                Some(Ok(done)) => report.done = Some((*done).to_owned()),
                Some(Err(words)) => report.refused = Some(words.clone()),
                None => {}
            }
            report
        });
        Answer { slots: told.collect(), ..self.signature() }
    }

    fn refusal(&self, words: String) -> Answer {
        tracing::warn!(error = words, "remote control: refused");
        Answer { error: Some(words), ..self.signature() }
    }

    fn signature(&self) -> Answer {
        Answer {
            host: self.host.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: self.board.uptime().as_millis() as u64,
            ..Answer::default()
        }
    }
}
