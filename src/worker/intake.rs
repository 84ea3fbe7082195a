//! Takes deliveries one by one, in order, and starts a task run for each; handles the sentinel, the stop, and
//! the loss of a session. Owns the set of tasks in flight, so it is the one that hands tasks back, in delivery
//! order. Ends when everything accepted has been settled.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use tokio::sync::{broadcast, mpsc};
use tokio::task::{AbortHandle, JoinError, JoinSet};

use super::WorkerError;
use super::live_settings::LiveSettings;
use super::report::Traced;
use super::settle::Accepted;
use super::task_run::{Expected, Shared};
use crate::broker::{BrokerError, Consumer, Delivery, DeliveryTag, Event, PerSource, Source};
use crate::engine::{TaskState, now as instant};
use crate::protocol::control::{self, Cancellation, TaskName};
use crate::protocol::task::{STOP, published, sentinel_is_expired};
use crate::protocol::{Incoming, Message, Properties, Task, Value, classify};
use crate::shutdown::{Phase, Stop};

/// How long replies may still take once the device has failed.
const SETTLING: Duration = Duration::from_secs(1);

/// How a worker ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// A signal or the launcher asked for the end; everything is settled or handed back.
    Drained,
    /// A sentinel asked for the end; everything before the sentinel is answered, and it is acked.
    OnRequest,
    /// The worker did not wait for unsettled tasks; the broker has them again once the session closes.
    Aborted,
}

pub(super) enum SessionEnd {
    /// The worker ends too.
    Worker(Ended),
    /// The launcher asked for a pause; everything is settled or handed back.
    Paused,
}

struct InFlight {
    task: Arc<Task>,
    /// None for a message that is settled without the model.
    state: Option<Arc<TaskState>>,
    abort: AbortHandle,
}

impl InFlight {
    /// The task goes back to the broker. False: it is committed already.
    fn withdraw(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.withdraw())
    }
}

/// The consumers; none: there is no background queue, or the consumer has ended.
type Consumers<'a> = PerSource<Option<&'a mut Box<dyn Consumer>>>;

/// Takes deliveries from the consumers until they end.
pub(super) struct Intake<'a> {
    shared: Arc<Shared>,
    consumers: Consumers<'a>,
    /// How many unsettled messages the broker sends at most of all of them, as the settlement knows it.
    granted: u16,
    stop: Stop,
    settings: LiveSettings,
    cancellations: broadcast::Receiver<Cancellation>,
    /// Tasks accepted and not yet settled, by delivery.
    in_flight: BTreeMap<DeliveryTag, InFlight>,
    runs: JoinSet<(DeliveryTag, Result<(), WorkerError>)>,
    sentinel: Option<DeliveryTag>,
    /// The last phase of the stop that has been acted on.
    phase: Phase,
}

/// The next event, and the source of its consumer. Without consumers it never returns. Safe to cancel: a consumer's is.
async fn next_of(consumers: &mut Consumers<'_>) -> (Source, Result<Event, BrokerError>) {
    let PerSource { main, background } = consumers;
    let next = async |consumer: &mut Option<&mut Box<dyn Consumer>>| match consumer {
        Some(consumer) => consumer.next().await,
        None => std::future::pending().await,
    };
    tokio::select! {
        biased;
        event = next(main) => (Source::Main, event),
        event = next(background) => (Source::Background, event),
    }
}

impl<'a> Intake<'a> {
    pub(super) fn new(
        shared: Arc<Shared>,
        consumers: Consumers<'a>,
        (stop, settings): (Stop, LiveSettings),
        cancellations: broadcast::Receiver<Cancellation>,
    ) -> Self {
        Self {
            granted: 0,
            shared,
            consumers,
            stop,
            settings,
            cancellations,
            in_flight: BTreeMap::new(),
            runs: JoinSet::new(),
            sentinel: None,
            phase: Phase::Running,
        }
    }

    /// Runs until everything accepted is settled after a stop.
    ///
    /// # Errors
    /// [`WorkerError`]: this process cannot go on; the broker gets unsettled tasks back when the session
    /// closes.
    pub(super) async fn run(
        self,
        fault: &mut mpsc::Receiver<WorkerError>,
    ) -> Result<SessionEnd, WorkerError> {
        let stop = self.stop.clone();
        tokio::select! {
            ended = self.work(fault) => ended,
            // An abort interrupts everything, even a wait for the broker.
            () = stop.reached(Phase::Aborting) => Ok(SessionEnd::Worker(Ended::Aborted)),
        }
    }

    async fn work(mut self, fault: &mut mpsc::Receiver<WorkerError>) -> Result<SessionEnd, WorkerError> {
        while self.consumers.iter().any(Option::is_some) || !self.runs.is_empty() {
            let held = self.in_flight.len() as u64;
            self.shared.settlement.counters.count(|stats| stats.now.held = held);
            tokio::select! {
                (source, event) = next_of(&mut self.consumers) => match event? {
                    Event::Delivery(delivery) => self.take(*delivery).await,
                    Event::Lost { source, session } => self.forget(source, session)?,
                    Event::End if self.phase == Phase::Running && self.stop.phase() == Phase::Running => {
                        let words = "the broker's deliveries ended without being asked to";
                        return Err(WorkerError::Internal(words.into()));
                    }
                    Event::End => self.consumers[source] = None,
                },
                Some(ended) = self.runs.join_next() => self.on_exit(ended)?,
                error = fault.recv() => {
                    self.finish_settling().await;
                    let ended = || WorkerError::Internal("the channel from the model thread is closed".into());
                    return Err(error.unwrap_or_else(ended));
                }
                Ok(cancellation) = self.cancellations.recv() => self.cancel(cancellation),
                () = self.settings.paused(), if self.phase == Phase::Running => self.finish("pause").await,
                () = self.stop.reached(Phase::Finishing), if self.phase == Phase::Running => {
                    self.finish("launcher").await;
                }
                () = self.stop.reached(Phase::Returning), if self.phase < Phase::Returning => {
                    self.hand_back().await;
                }
            }
        }
        self.shared.settlement.acker.flush().await;
        if self.stop.phase() == Phase::Running {
            return Ok(SessionEnd::Paused);
        }
        let Some(sentinel) = self.sentinel else { return Ok(SessionEnd::Worker(Ended::Drained)) };
        // Acked last: if the worker dies before this ack, another worker gets the sentinel.
        if self.shared.settlement.acker.ack(sentinel).await {
            Ok(SessionEnd::Worker(Ended::OnRequest))
        } else {
            Err(WorkerError::SentinelLost)
        }
    }

    async fn take(&mut self, delivery: Delivery) {
        if self.phase > Phase::Running {
            return self.requeue(delivery.delivery_tag).await;
        }
        let now = SystemTime::now();
        let made_id = || uuid::Uuid::new_v4().to_string();
        let delivery_tag = delivery.delivery_tag;
        let counted = delivery.delivery_count.is_some();
        let count = delivery.delivery_count.unwrap_or_default().max(delivery.redelivered.into()) as i64;
        let redeliveries = (count, counted);
        if count > 0 {
            self.shared.settlement.counters.count(|stats| stats.redelivered += 1);
        }
        if let Some(prefetch) = self.shared.prefetch[delivery_tag.source].came(delivery.message.body.len())
            && let Some(consumer) = &mut self.consumers[delivery_tag.source]
        {
            consumer.set_prefetch(prefetch).await;
        }
        // A consumer gets a changed prefetch later, or never: it is read again with each message.
        let granted = self.consumers.iter().flatten().fold(0_u16, |sum, it| sum.saturating_add(it.granted()));
        if granted != self.granted {
            self.granted = granted;
            self.shared.settlement.stalled.set_granted(granted);
            self.shared.turns.set_granted(granted);
        }
        match classify(delivery.message, now, self.shared.sentinels, made_id) {
            Incoming::Task(task) => self.begin(Accepted::new(task, delivery_tag, redeliveries)),
            Incoming::UnknownControl(task, kind) => {
                self.refuse(Accepted::new(task, delivery_tag, redeliveries), kind)
            }
            Incoming::Sentinel(message) => self.obey(&message, delivery_tag, now).await,
        }
    }

    fn begin(&mut self, mut accepted: Accepted) {
        let delivery_tag = accepted.delivery;
        accepted.traced = Traced::begin(&self.shared.traces, &accepted.task, accepted.redeliveries);
        let left = accepted.deadline.map(|at| at.duration_since(SystemTime::now()).unwrap_or_default());
        let mut state = TaskState::new(TaskName::of(&accepted.task), left.map(|left| instant() + left));
        state.priority = accepted.task.message.properties.priority.unwrap_or_default();
        state.background = delivery_tag.source == Source::Background;
        state.requester = BuildHasherDefault::<DefaultHasher>::default().hash_one(accepted.task.requester());
        state.link = accepted.traced.link();
        if self.shared.withdrawn.has(accepted.task.reply_to(), instant()) {
            state.cancel();
        }
        let (state, task) = (Arc::new(state), accepted.task.clone());
        // Counted from here: the first of several tasks that arrive together waits for the others.
        let expected = Expected::new(&self.shared.engine);
        let (shared, own) = (self.shared.clone(), state.clone());
        let abort = self.runs.spawn(async move { (delivery_tag, shared.run(accepted, own, expected).await) });
        self.in_flight.insert(delivery_tag, InFlight { task, state: Some(state), abort });
    }

    fn refuse(&mut self, mut accepted: Accepted, kind: String) {
        accepted.traced = Traced::begin(&self.shared.traces, &accepted.task, accepted.redeliveries);
        let (delivery_tag, shared, task) = (accepted.delivery, self.shared.clone(), accepted.task.clone());
        let abort =
            self.runs.spawn(async move { (delivery_tag, shared.refuse_control(accepted, kind).await) });
        self.in_flight.insert(delivery_tag, InFlight { task, state: None, abort });
    }

    async fn obey(&mut self, sentinel: &Message, delivery_tag: DeliveryTag, now: SystemTime) {
        let Properties { message_id, headers, .. } = &sentinel.properties;
        let stop = headers.get(STOP).and_then(Value::as_str);
        let is_withdrawn = stop.is_some_and(|stop| self.shared.withdrawn.has_stop(stop, instant()));
        let mut cause = format!("sentinel {}", stop.or(message_id.as_deref()).unwrap_or("without an id"));
        if let Some(age) = published(sentinel).and_then(|at| now.duration_since(at).ok()) {
            cause += &format!(", published {} s ago", age.as_secs());
        }
        if is_withdrawn || sentinel_is_expired(sentinel, now) {
            tracing::info!(cause, is_withdrawn, "ignoring a sentinel that is withdrawn or expired");
            self.shared.settlement.acker.ack(delivery_tag).await;
            return;
        }
        let unsettled = self.in_flight.len();
        tracing::info!(cause, unsettled, "sentinel received; finishing what came before it");
        self.take_no_more().await;
        self.sentinel = Some(delivery_tag);
        self.phase = Phase::Finishing;
        self.shared.settlement.counters.count(|stats| stats.sentinels += 1);
        self.stop.advance(Phase::Finishing, cause);
    }

    /// The answers to these tasks are not wanted any more. Where a task is named by its id, the launcher hears whether it was held.
    fn cancel(&self, cancellation: Cancellation) {
        let mut tasks = 0;
        for InFlight { task, state, .. } in self.in_flight.values() {
            if let Some(state) = state
                && cancellation.means(task)
            {
                tracing::info!(task.id = task.id, "cancelled on request");
                state.cancel();
                tasks += 1;
            }
        }
        if cancellation.task.is_some() {
            self.shared.reporter.mention(&control::Event::Cancelled { cancellation, tasks });
        }
    }

    /// Stops taking tasks; those accepted are finished.
    async fn finish(&mut self, cause: &str) {
        tracing::info!(cause, unsettled = self.in_flight.len(), "taking no more; finishing what was taken");
        self.phase = Phase::Finishing;
        self.take_no_more().await;
    }

    async fn take_no_more(&mut self) {
        for consumer in self.consumers.iter_mut().flatten() {
            consumer.cancel().await;
        }
    }

    /// Hands back the tasks that are not committed, then the sentinel if there is one. Both go back in delivery
    /// order, which some queues keep. Later deliveries come after them.
    async fn hand_back(&mut self) {
        self.phase = Phase::Returning;
        self.take_no_more().await;
        let mut withdrawn: Vec<DeliveryTag> = Vec::new();
        for (delivery_tag, task) in &self.in_flight {
            if task.withdraw() {
                task.abort.abort();
                withdrawn.push(*delivery_tag);
            }
        }
        withdrawn.extend(self.sentinel.take());
        tracing::info!(handed_back = withdrawn.len(), unsettled = self.in_flight.len(), "draining");
        for delivery_tag in withdrawn {
            self.in_flight.remove(&delivery_tag);
            self.requeue(delivery_tag).await;
        }
    }

    /// The device has failed. Tasks computed before are answered and acked; the others go back to the broker
    /// with the session.
    async fn finish_settling(&mut self) {
        self.phase = Phase::Returning;
        for task in self.in_flight.values() {
            if task.withdraw() {
                task.abort.abort();
            }
        }
        let settled = async { while self.runs.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(SETTLING, settled).await;
    }

    async fn requeue(&mut self, delivery_tag: DeliveryTag) {
        self.shared.settlement.counters.count(|stats| stats.requeued += 1);
        self.shared.settlement.acker.requeue(delivery_tag).await;
    }

    /// The session is over, so the broker has everything it delivered again: drops these tasks, including those
    /// whose reply waits for a connection.
    fn forget(&mut self, source: Source, session: u64) -> Result<(), WorkerError> {
        self.shared.settlement.counters.count(|stats| stats.lost_sessions += 1);
        self.shared.settlement.lost[source].store(session, Ordering::Release);
        let of_session = |delivery_tag: &DeliveryTag| delivery_tag.is_over_with(source, session);
        for (delivery_tag, task) in &self.in_flight {
            if of_session(delivery_tag) {
                task.withdraw();
                task.abort.abort();
            }
        }
        self.in_flight.retain(|delivery_tag, _| !of_session(delivery_tag));
        // Another worker gets the sentinel too; going on would stop two workers with one sentinel.
        if self.sentinel.as_ref().is_some_and(of_session) { Err(WorkerError::SentinelLost) } else { Ok(()) }
    }

    fn on_exit(
        &mut self,
        ended: Result<(DeliveryTag, Result<(), WorkerError>), JoinError>,
    ) -> Result<(), WorkerError> {
        match ended {
            Ok((delivery_tag, result)) => {
                self.in_flight.remove(&delivery_tag);
                result
            }
            Err(error) if error.is_cancelled() => Ok(()),
            Err(error) => Err(WorkerError::Internal(error.to_string())),
        }
    }
}
