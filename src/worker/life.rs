//! The life of one task, from acceptance to its settlement: check, prepare, wait for the forward
//! pass, write the reply. One future a task; each step names what can end it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::mpsc;

use super::WorkerError;
use super::batches::{Submission, expiry};
use super::deaths::KnownDeaths;
use super::engine::Item;
use super::isolation::{Isolation, Stay, suspicion};
use super::lane::{Effort, Lane};
use super::outcome::Outcome;
use super::prefetch::Live;
use super::settle::{Accepted, Settlement};
use super::ticket::Ticket;
use crate::model::{Codec, Prepared};
use crate::protocol::task::URL;
use crate::protocol::{Receipt, Task, TaskError, TaskErrorKind, shorten};
use crate::telemetry::traces::Traces;

/// How long a task that came back waits for the launcher's word on what a worker died of.
const NEWS: Duration = Duration::from_millis(200);

/// What every task's future shares.
pub(super) struct Shared<C: Codec> {
    pub(super) codec: Arc<C>,
    pub(super) prepare: Lane,
    pub(super) respond: Lane,
    /// To the batch former.
    pub(super) submit: mpsc::Sender<Submission<C>>,
    /// See the batch former.
    pub(super) preparing: Arc<AtomicUsize>,
    pub(super) settlement: Settlement,
    pub(super) isolation: Arc<Isolation>,
    pub(super) deaths: KnownDeaths,
    pub(super) prefetch: Live,
    pub(super) traces: Traces,
    pub(super) max_body: u64,
    /// Deliveries of a task, where the broker counts them. The broker's own limit is one more, and
    /// only the backstop: it tells the producer nothing.
    pub(super) max_deliveries: i64,
}

/// Counts a task as being prepared for as long as it lives.
struct Preparing<'a>(&'a AtomicUsize);

impl<'a> Preparing<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Preparing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<C: Codec> Shared<C> {
    /// Lives one task to its end.
    ///
    /// # Errors
    /// As [`Settlement::settle`].
    pub(super) async fn live(
        &self,
        mut accepted: Accepted,
        ticket: Arc<Ticket<C::Output>>,
    ) -> Result<(), WorkerError> {
        let mut receipt =
            Receipt { queue_ms: accepted.task.queued_ms(SystemTime::now()), ..Receipt::default() };
        let again = accepted.redeliveries > 0;
        if again {
            // The launcher hears of a worker's death at about the time when the broker does.
            tokio::time::sleep(NEWS).await;
        }
        let known = self.deaths.of(&ticket.name.fingerprint);
        let suspicion = suspicion(accepted.redeliveries, accepted.counted, known.as_ref());
        let stay = match suspicion {
            Some(most) => self.isolation.enter(ticket.name.clone(), most).await,
            None => None,
        };
        // Not before its turn: others may have died of it meanwhile.
        accepted.deaths = self.deaths.of(&ticket.name.fingerprint);
        let is_poison = accepted.deaths.as_ref().is_some_and(|deaths| deaths.poison.is_some());
        let outcome = if let Some(queue) = self.misaddressed(&accepted.task) {
            Outcome::Misaddressed(queue)
        } else if again && is_poison {
            Outcome::Poison
        } else if accepted.redeliveries >= self.max_deliveries {
            Outcome::OutOfDeliveries(accepted.redeliveries)
        } else {
            match self.work(&accepted.task, &ticket, stay.is_some(), &mut receipt).await {
                Ok(body) => Outcome::Answered(body),
                Err(error) => Outcome::Failed(error),
            }
        };
        stay.map(Stay::end).unwrap_or_default();
        if !ticket.commit() {
            return Ok(());
        }
        accepted.traced.worked(&receipt, accepted.attempt());
        self.settlement.settle(&accepted, outcome, &receipt).await
    }

    /// The queue that the task wants its reply in, where none may go there.
    fn misaddressed(&self, task: &Task) -> Option<String> {
        task.reply_to().filter(|queue| self.settlement.queues.is_reserved(queue)).map(str::to_owned)
    }

    /// Settles a control message that nobody knows.
    ///
    /// # Errors
    /// As [`Settlement::settle`].
    pub(super) async fn refuse_control(&self, accepted: Accepted, kind: String) -> Result<(), WorkerError> {
        self.settlement.settle(&accepted, Outcome::UnknownControl(kind), &Receipt::default()).await
    }

    async fn work(
        &self,
        task: &Arc<Task>,
        ticket: &Arc<Ticket<C::Output>>,
        isolated: bool,
        receipt: &mut Receipt,
    ) -> Result<Vec<u8>, TaskError> {
        let preparing = Preparing::begin(&self.preparing);
        task.deadline()?;
        self.check(task, ticket.deadline)?;
        let began = Instant::now();
        let (codec, own) = (self.codec.clone(), task.clone());
        let preparation = move || codec.prepare(&own.message);
        let bytes = task.message.body.len();
        let brief = self.codec.prepares_briefly(bytes);
        let prepared = self.beside_others(isolated, self.prepare.run(Effort::of(brief), preparation)).await;
        let Prepared { request, inputs } = prepared.map_err(internal)??;
        receipt.prepare_ms = ms(began);
        if inputs.is_empty() {
            return Err(internal("the model made no input of this task".into()));
        }
        self.prefetch.prepared(inputs.len(), inputs.iter().map(|input| input.tokens).sum());
        let prepared = Instant::now();
        let computed = ticket.expect(inputs.len());
        let brief = self.codec.responds_briefly(bytes, inputs.len());
        let items = inputs.into_iter().enumerate().map(|(index, costed)| Item {
            input: costed.input,
            tokens: costed.tokens,
            index,
            ticket: ticket.clone(),
        });
        let submission = Submission { items: items.collect(), isolated };
        let Ok(place) = self.submit.reserve().await else { return the_worker_ends().await };
        // Before it is sent: whoever receives it must not wait for it.
        drop(preparing);
        place.send(submission);
        let Ok(computed) = computed.await else { return the_worker_ends().await };
        receipt.wait_ms = computed.started.map_or(0.0, |at| (at - prepared).as_secs_f64() * 1e3);
        receipt.compute_ms = computed.compute.as_secs_f64() * 1e3;
        receipt.batch_size = computed.last.size as i64;
        receipt.batch_tokens = computed.last.tokens as i64;
        let (codec, outputs) = (self.codec.clone(), computed.outputs?);
        let response = move || codec.respond(request, outputs);
        self.beside_others(isolated, self.respond.run(Effort::of(brief), response)).await.map_err(internal)?
    }

    /// Does something of a task on a lane: while no others are isolated, if it is not one of them.
    async fn beside_others<T>(&self, isolated: bool, work: impl Future<Output = T>) -> T {
        let _out = if isolated { None } else { Some(self.isolation.keep_out().await) };
        work.await
    }

    /// What can be said of a task without reading its body.
    fn check(&self, task: &Task, deadline: Option<SystemTime>) -> Result<(), TaskError> {
        if deadline.is_some_and(|deadline| deadline <= SystemTime::now()) {
            return Err(expiry());
        }
        let properties = &task.message.properties;
        let size = task.message.body.len() as u64;
        if size > self.max_body {
            let words = format!("the body is {size} bytes; this pool takes at most {}", self.max_body);
            return Err(TaskError::new(TaskErrorKind::TooLarge, words));
        }
        let served = self.codec.endpoint();
        let asked = properties.headers.get(URL).and_then(|url| url.as_str());
        if let Some(asked) = asked.filter(|asked| served != "*" && *asked != served) {
            let words =
                format!("url {:?} is not served here; this pool answers {served}", shorten(asked, 80));
            return Err(TaskError::new(TaskErrorKind::UnknownModel, words).at("url"));
        }
        let types = self.codec.content_types();
        if let Some(given) = task.content_type().filter(|given| !types.contains(&given.as_str())) {
            let words = format!("content_type is {:?}; this model reads {types:?}", shorten(&given, 80));
            return Err(TaskError::new(TaskErrorKind::Undecodable, words).at("content_type"));
        }
        match properties.content_encoding.as_deref().map(str::to_ascii_lowercase).as_deref() {
            None | Some("" | "utf-8" | "utf8" | "identity") => Ok(()),
            Some(other) => {
                let words = format!("content_encoding {:?} is not supported; send utf-8", shorten(other, 80));
                Err(TaskError::new(TaskErrorKind::Undecodable, words).at("content_encoding"))
            }
        }
    }
}

/// The batch former is gone, and the intake knows or is about to: the device failed. That is not the
/// task's fault, so it gets no answer; it goes back with the session.
async fn the_worker_ends<T>() -> T {
    std::future::pending().await
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn internal(words: String) -> TaskError {
    tracing::error!(error = words, "a task failed inside sconce");
    TaskError::new(TaskErrorKind::Internal, words)
}
