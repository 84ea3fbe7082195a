//! Takes deliveries one by one, in order, and starts a task run for each. Handles sentinels, the stop, and the loss
//! of a session. Hands tasks back in delivery order. Ends when everything accepted has been settled. Owns the set of
//! tasks in flight.

use std::collections::{BTreeMap, HashSet};
use std::future::poll_fn;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hash};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::timeout;

use super::WorkerError;
use super::cancellations::IntakeEnd;
use super::pause::Pause;
use super::report::Traced;
use super::settle::Accepted;
use super::task_run::{Expected, Shared};
use crate::batching::Owner;
use crate::broker::{BrokerError, Consumer, ConsumerEvent, Delivery, DeliveryTag, Source};
use crate::engine::{TaskState, now as instant};
use crate::protocol::control::{self, Cancellation, TaskName};
use crate::protocol::task::{STOP, published, sentinel_is_expired};
use crate::protocol::{Incoming, Message, Properties, Task, Value, classify};
use crate::shutdown::{Phase, Stop};

/// How long computed tasks may still take to settle once the device has failed.
const SETTLING_TIMEOUT: Duration = Duration::from_secs(1);

/// How a worker ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// A signal or the launcher requested the end; everything is settled or handed back.
    Drained,
    /// A sentinel requested the end; everything before the sentinel is answered, and the sentinel is acked.
    OnRequest,
    /// The worker did not wait for unsettled tasks; they go back to the broker when the session closes.
    Aborted,
}

/// Why a session ended without an error.
pub(super) enum SessionEnd {
    /// The worker ends too.
    Worker(Ended),
    /// The launcher requested a pause; everything is settled or handed back.
    Paused,
}

struct InFlight {
    task: Arc<Task>,
    /// None for a message that is settled without the model.
    state: Option<Arc<TaskState>>,
    abort: AbortHandle,
}

impl InFlight {
    /// Stops the task's run, so that its message can go back to the broker. Returns false if the task is being settled,
    /// or is a message that is settled without the model.
    fn withdraw(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.withdraw())
    }
}

/// The consumers of the pool's queues, by source. None: the consumer has ended.
type Consumers<'a> = Vec<Option<&'a mut Box<dyn Consumer>>>;

/// Takes deliveries from the consumers until they end.
pub(super) struct Intake<'a> {
    shared: Arc<Shared>,
    consumers: Consumers<'a>,
    /// The queue whose consumer is polled first.
    turn: Source,
    /// The sum of the prefetches that the broker has granted to the consumers, as last passed on to the settlement.
    granted: u16,
    stop: Stop,
    pause: Pause,
    cancellations: IntakeEnd,
    /// Tasks accepted and not yet settled, by delivery.
    in_flight: BTreeMap<DeliveryTag, InFlight>,
    runs: JoinSet<(DeliveryTag, Result<(), WorkerError>)>,
    sentinel: Option<DeliveryTag>,
    /// The last phase of the stop that has been acted on.
    phase: Phase,
}

/// Waits for the next event of a consumer, and returns it with the consumer's source. The consumers are polled in turn,
/// beginning with `first`, so that one with many deliveries does not keep the others' from being taken. Never returns if
/// there is no consumer. Safe to cancel, because [`Consumer::next`] is.
async fn next_of(
    consumers: &mut [Option<&mut Box<dyn Consumer>>],
    first: Source,
) -> (Source, Result<ConsumerEvent, BrokerError>) {
    let mut next: Vec<_> =
        consumers.iter_mut().map(|consumer| consumer.as_mut().map(|consumer| consumer.next())).collect();
    let (later, sooner) = next.split_at_mut(first.0);
    let in_turn = (first.0..).zip(sooner).chain((0..).zip(later));
    let mut in_turn: Vec<_> = in_turn.filter_map(|(index, next)| Some((index, next.as_mut()?))).collect();
    poll_fn(|context| {
        let ready = in_turn.iter_mut().find_map(|(index, next)| match next.as_mut().poll(context) {
            Poll::Ready(event) => Some((Source(*index), event)),
            Poll::Pending => None,
        });
        ready.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

fn hash_of(value: impl Hash) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(value)
}

impl<'a> Intake<'a> {
    pub(super) fn new(
        shared: Arc<Shared>,
        consumers: Consumers<'a>,
        stop: Stop,
        pause: Pause,
        cancellations: IntakeEnd,
    ) -> Self {
        Self {
            granted: 0,
            shared,
            consumers,
            turn: Source::FIRST,
            stop,
            pause,
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
        faults: &mut mpsc::Receiver<WorkerError>,
    ) -> Result<SessionEnd, WorkerError> {
        let stop = self.stop.clone();
        tokio::select! {
            ended = self.work(faults) => ended,
            // An abort interrupts everything, even a wait for the broker.
            () = stop.reached(Phase::Aborting) => Ok(SessionEnd::Worker(Ended::Aborted)),
        }
    }

    async fn work(mut self, faults: &mut mpsc::Receiver<WorkerError>) -> Result<SessionEnd, WorkerError> {
        let withdrawn = self.shared.withdrawn.clone();
        let mut withdrawals = pin!(withdrawn.wait_until_complete());
        let mut are_withdrawals_known = false;
        // A delivery that came before the withdrawals were known. Until one comes, events are read, so that a refusal
        // by the broker is noticed. After that, none is read until the withdrawals are known.
        let mut early: Option<Box<Delivery>> = None;
        while self.consumers.iter().any(Option::is_some) || !self.runs.is_empty() {
            let unsettled = self.in_flight.len() as u64;
            self.shared.settlement.counters.count(|stats| stats.now.held = unsettled);
            let may_take = are_withdrawals_known || self.phase != Phase::Running;
            if may_take && let Some(delivery) = early.take() {
                self.handle_delivery(*delivery).await;
                continue;
            }
            tokio::select! {
                // The launcher may still be reading the withdrawals when this worker connects, and sends them later.
                () = &mut withdrawals, if !are_withdrawals_known => are_withdrawals_known = true,
                (source, event) = next_of(&mut self.consumers, self.turn), if may_take || early.is_none() => match self.took_turn(source, event)? {
                    ConsumerEvent::Delivery(delivery) if may_take => self.handle_delivery(*delivery).await,
                    ConsumerEvent::Delivery(delivery) => early = Some(delivery),
                    ConsumerEvent::Lost { source, session } => self.drop_lost_session(source, session)?,
                    ConsumerEvent::End if self.phase == Phase::Running && self.stop.phase() == Phase::Running => {
                        let message = "the broker's deliveries ended, though no stop was requested";
                        return Err(WorkerError::Internal(message.into()));
                    }
                    ConsumerEvent::End => self.consumers[source.0] = None,
                },
                Some(ended) = self.runs.join_next() => self.on_run_ended(ended)?,
                error = faults.recv() => {
                    self.finish_settling().await;
                    let closed = || WorkerError::Internal("the channel from the model thread is closed".into());
                    return Err(error.unwrap_or_else(closed));
                }
                cancellations = self.cancellations.take() => self.cancel_all(&cancellations),
                () = self.pause.wait_until_set(), if self.phase == Phase::Running => self.finish("pause").await,
                () = self.stop.reached(Phase::Finishing), if self.phase == Phase::Running => {
                    self.finish("stop requested").await;
                }
                () = self.stop.reached(Phase::Returning), if self.phase < Phase::Returning => {
                    self.hand_back().await;
                }
            }
        }
        self.shared.settlement.acker.flush().await;
        // Without a stop, only a pause ends the loop.
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

    /// The next queue's consumer is polled first from now on.
    fn took_turn(
        &mut self,
        source: Source,
        event: Result<ConsumerEvent, BrokerError>,
    ) -> Result<ConsumerEvent, BrokerError> {
        self.turn = Source((source.0 + 1) % self.consumers.len());
        event
    }

    /// Handles a delivery: starts a task run, handles a sentinel, or hands the message back if the worker is stopping.
    async fn handle_delivery(&mut self, delivery: Delivery) {
        if self.phase > Phase::Running {
            return self.requeue(delivery.delivery_tag).await;
        }
        let now = SystemTime::now();
        let new_id = || uuid::Uuid::new_v4().to_string();
        let delivery_tag = delivery.delivery_tag;
        let is_counted = delivery.delivery_count.is_some();
        let redeliveries =
            delivery.delivery_count.unwrap_or_default().max(delivery.redelivered.into()) as i64;
        if redeliveries > 0 {
            self.shared.settlement.counters.count(|stats| stats.redelivered += 1);
        }
        self.update_prefetch(&delivery).await;
        match classify(delivery.message, now, self.shared.sentinels, new_id) {
            Incoming::Task(task) => {
                self.start_run(Accepted::new(task, delivery_tag, redeliveries, is_counted))
            }
            Incoming::UnknownControl(task, kind) => {
                self.refuse_control(Accepted::new(task, delivery_tag, redeliveries, is_counted), kind)
            }
            Incoming::Sentinel(message) => self.handle_sentinel(&message, delivery_tag, now).await,
        }
    }

    /// Sets the prefetch by the sizes of the messages received so far. Tells the settlement how many messages the broker
    /// grants.
    async fn update_prefetch(&mut self, delivery: &Delivery) {
        let source = delivery.delivery_tag.source;
        if let Some(prefetch) = self.shared.prefetch[source.0].received(delivery.message.body.len())
            && let Some(consumer) = &mut self.consumers[source.0]
        {
            consumer.set_prefetch(prefetch).await;
        }
        // A changed prefetch is granted to a consumer later, or never; so the granted sum is read with each message.
        let granted = self.consumers.iter().flatten().map(|it| it.granted()).fold(0, u16::saturating_add);
        if granted != self.granted {
            self.granted = granted;
            self.shared.settlement.stalled.set_granted(granted);
        }
    }

    fn start_run(&mut self, mut accepted: Accepted) {
        let delivery_tag = accepted.delivery;
        accepted.traced = Traced::begin(&self.shared.traces, &accepted.task, accepted.redeliveries);
        let deadline = accepted.time_left().map(|left| instant() + left);
        let mut state = TaskState::new(TaskName::new(&accepted.task), deadline);
        state.priority = accepted.task.message.properties.priority.unwrap_or_default();
        state.owner = Owner {
            queue: self.shared.shares[delivery_tag.source.0],
            requester: hash_of(accepted.task.requester()),
            background: self.shared.settlement.queues.tasks[delivery_tag.source.0].background,
        };
        if self.shared.withdrawn.has(accepted.task.reply_to(), instant())
            || self.cancellations.had(&accepted.task)
        {
            state.cancel();
        }
        let (state, task) = (Arc::new(state), accepted.task.clone());
        // The engine is told now that inputs will come, so that it batches tasks that arrive together.
        let expected = Expected::new(self.shared.engine.queue());
        let (shared, run_state) = (self.shared.clone(), state.clone());
        let abort =
            self.runs.spawn(async move { (delivery_tag, shared.run(accepted, run_state, expected).await) });
        self.in_flight.insert(delivery_tag, InFlight { task, state: Some(state), abort });
    }

    /// Starts a run that only settles a control message of an unknown type.
    fn refuse_control(&mut self, mut accepted: Accepted, kind: String) {
        accepted.traced = Traced::begin(&self.shared.traces, &accepted.task, accepted.redeliveries);
        let (delivery_tag, shared, task) = (accepted.delivery, self.shared.clone(), accepted.task.clone());
        let abort =
            self.runs.spawn(async move { (delivery_tag, shared.refuse_control(accepted, kind).await) });
        self.in_flight.insert(delivery_tag, InFlight { task, state: None, abort });
    }

    /// Starts to drain, unless the sentinel is withdrawn or expired.
    async fn handle_sentinel(&mut self, sentinel: &Message, delivery_tag: DeliveryTag, now: SystemTime) {
        let Properties { message_id, headers, .. } = &sentinel.properties;
        let stop = headers.get(STOP).and_then(Value::as_str);
        let is_withdrawn = stop.is_some_and(|stop| self.shared.withdrawn.has_stop(stop, instant()));
        let mut cause = format!("sentinel {}", stop.or(message_id.as_deref()).unwrap_or("without an id"));
        if let Some(age) = published(sentinel).and_then(|published| now.duration_since(published).ok()) {
            cause += &format!(", published {} s ago", age.as_secs());
        }
        if is_withdrawn || sentinel_is_expired(sentinel, now) {
            tracing::info!(cause, is_withdrawn, "ignoring a sentinel that is withdrawn or expired");
            self.shared.settlement.acker.ack(delivery_tag).await;
            return;
        }
        let unsettled = self.in_flight.len();
        tracing::info!(cause, unsettled, "sentinel received; finishing the tasks before it");
        self.stop_consuming().await;
        self.sentinel = Some(delivery_tag);
        self.phase = Phase::Finishing;
        self.shared.settlement.counters.count(|stats| stats.sentinels += 1);
        self.stop.advance(Phase::Finishing, cause);
    }

    /// Cancels the tasks in flight that match these cancellations. If one names a task by its id, reports to the
    /// launcher how many matched it.
    fn cancel_all(&self, cancellations: &[Cancellation]) {
        // Requesters may send any number of these, so they are compared with the tasks together.
        let by_requesters: HashSet<_> =
            cancellations.iter().filter_map(Cancellation::requester_ids).collect();
        if !by_requesters.is_empty() {
            self.cancel(|task| task.requester_ids().is_some_and(|ids| by_requesters.contains(&ids)));
        }
        for cancellation in cancellations.iter().filter(|it| it.requester_ids().is_none()) {
            let tasks = self.cancel(|task| cancellation.matches(task));
            if cancellation.task.is_some() {
                let event = control::Event::Cancelled { cancellation: cancellation.clone(), tasks };
                self.shared.reporter.try_send(&event);
            }
        }
    }

    /// Cancels the tasks in flight that match. Returns their number.
    fn cancel(&self, matches: impl Fn(&Task) -> bool) -> u64 {
        let mut tasks = 0;
        for InFlight { task, state, .. } in self.in_flight.values() {
            if let Some(state) = state
                && matches(task)
            {
                tracing::debug!(task.id = task.id, "cancelled on request");
                state.cancel();
                tasks += 1;
            }
        }
        tasks
    }

    /// Stops consuming. The accepted tasks are finished.
    async fn finish(&mut self, cause: &str) {
        tracing::info!(
            cause,
            unsettled = self.in_flight.len(),
            "no longer consuming; finishing the accepted tasks"
        );
        self.phase = Phase::Finishing;
        self.stop_consuming().await;
    }

    async fn stop_consuming(&mut self) {
        for consumer in self.consumers.iter_mut().flatten() {
            consumer.cancel().await;
        }
    }

    /// Hands back the tasks that are not being settled, and then the sentinel if there is one. They go back in delivery
    /// order, before any later delivery is taken, because some queues keep that order.
    async fn hand_back(&mut self) {
        self.phase = Phase::Returning;
        self.stop_consuming().await;
        let mut handed_back: Vec<DeliveryTag> = Vec::new();
        for (delivery_tag, task) in &self.in_flight {
            if task.withdraw() {
                task.abort.abort();
                handed_back.push(*delivery_tag);
            }
        }
        handed_back.extend(self.sentinel.take());
        tracing::info!(handed_back = handed_back.len(), unsettled = self.in_flight.len(), "draining");
        for delivery_tag in handed_back {
            self.in_flight.remove(&delivery_tag);
            self.requeue(delivery_tag).await;
        }
    }

    /// Called when the device has failed. Waits up to [`SETTLING_TIMEOUT`] until the computed tasks are answered and
    /// acked; the others go back to the broker when the session closes.
    async fn finish_settling(&mut self) {
        self.phase = Phase::Returning;
        for task in self.in_flight.values() {
            if task.withdraw() {
                task.abort.abort();
            }
        }
        let settled = async { while self.runs.join_next().await.is_some() {} };
        let _ = timeout(SETTLING_TIMEOUT, settled).await;
    }

    async fn requeue(&mut self, delivery_tag: DeliveryTag) {
        self.shared.settlement.counters.count(|stats| stats.requeued += 1);
        self.shared.settlement.acker.requeue(delivery_tag).await;
    }

    /// Drops the tasks of a session that is over, including those whose reply waits for a connection: the broker has
    /// taken back everything that it delivered in that session.
    fn drop_lost_session(&mut self, source: Source, session: u64) -> Result<(), WorkerError> {
        self.shared.settlement.counters.count(|stats| stats.lost_sessions += 1);
        self.shared.settlement.lost_sessions[source.0].store(session, Ordering::Release);
        let of_session = |delivery_tag: &DeliveryTag| delivery_tag.is_over_with(source, session);
        for (delivery_tag, task) in &self.in_flight {
            if of_session(delivery_tag) {
                task.withdraw();
                task.abort.abort();
            }
        }
        self.in_flight.retain(|delivery_tag, _| !of_session(delivery_tag));
        // The sentinel is delivered to another worker too; going on would stop two workers with one sentinel.
        if self.sentinel.as_ref().is_some_and(of_session) { Err(WorkerError::SentinelLost) } else { Ok(()) }
    }

    fn on_run_ended(
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
