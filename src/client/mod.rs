//! A client of a task queue, shared by `publish`, `bench`, `run-batch` and `submit`: publishes tasks with confirms and
//! gathers their replies by `correlation_id`, each once. Owns the connection and a bounded number of tasks under way.
//! Its submodules serve every front end: jobs, statistics of the fleet, dead letters. Knows no worker, no model and no
//! terminal.

pub(crate) mod answer;
pub(crate) mod batch_file;
pub(crate) mod dead;
pub(crate) mod fleet;
mod gather;
pub(crate) mod job;
pub(crate) mod replies;
mod resend;
pub(crate) mod tally;
pub(crate) mod whole_file;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, Stream, StreamExt as _};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use self::gather::{Answered, Gather};
use self::resend::{LateTask, Resends};
use crate::broker::amqp::{
    AmqpPublisher, Connector, Subscription, Topology, declare, declare_job, subscribe,
};
use crate::broker::{
    Acker, BrokerError, BrokerSession, Consumer, ConsumerEvent, Delivery, DeliveryTag, Published, Publisher,
    QueueState,
};
use crate::config::Broker;
use crate::protocol::admin::CANCEL;
use crate::protocol::batch_line::RequestBody;
use crate::protocol::message::URL;
use crate::protocol::reply::is_part;
use crate::protocol::{Headers, JSON, Message, Properties};

/// Maximum number of publishes under way at once. The publisher has at most 190 unconfirmed messages on its shared
/// channel, so it never waits for new ones.
const MAX_PUBLISHING: usize = 2_048;
/// Maximum bytes of the bodies of tasks that are not answered yet, such as recordings: 256 MiB. One task may be larger.
const MAX_BYTES: usize = 256 << 20;
/// Maximum number of replies that are read and acked together.
const MAX_BURST: usize = 512;
/// How often a job checks whether workers consume, and which replies are late.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Delay before a task that a full queue did not accept is published again.
const NACK_DELAY: Duration = Duration::from_secs(1);

/// A task to publish, with the caller's data.
pub(crate) struct ClientTask<M> {
    /// The caller's data, given back with the reply.
    pub(crate) meta: M,
    /// None: nothing is published, for example for an invalid line of a batch file. The task counts as answered.
    pub(crate) message: Option<TaskMessage>,
}

/// The part of a task's message that differs between tasks.
pub(crate) struct TaskMessage {
    pub(crate) message_id: String,
    pub(crate) headers: Headers,
    pub(crate) body: RequestBody,
    /// The queue that the task is published to; none: the client's task queue.
    pub(crate) queue: Option<Arc<str>>,
    /// Time to live, for tasks whose reply nobody waits for after that time.
    pub(crate) expires: Option<Duration>,
}

impl TaskMessage {
    /// The message of a task for `url`; none: the first URL that the pool serves.
    pub(crate) fn new(message_id: String, url: Option<&str>, body: RequestBody) -> Self {
        let headers = url.map(|url| (URL.to_owned(), url.into())).into_iter().collect();
        Self { message_id, headers, body, queue: None, expires: None }
    }
}

pub(crate) use self::resend::Resend;

/// The bounds of a run, and how it passes replies on.
pub(crate) struct Bounds {
    /// Maximum number of tasks that are begun and whose answers are not yet given to the sink.
    pub(crate) max_tasks: usize,
    /// Longest wait for the next reply; none: no limit.
    pub(crate) timeout: Option<Duration>,
    /// Whether the sink gets replies in the order of the tasks. Otherwise it gets them as they arrive.
    pub(crate) in_order: bool,
    /// When tasks are published again; none: never.
    pub(crate) resend: Option<Resend>,
}

/// Receives the events of a run. A task's number is its index in the run plus `first` of [`Client::run`].
pub(crate) trait Sink<M, E> {
    /// A task is about to be published.
    fn begun(&mut self, _number: u64, _meta: &M) {}

    /// The broker has confirmed a task.
    fn confirmed(&mut self, _number: u64) {}

    /// A task's reply arrived at this time; called once per task. The reply is none if nothing was published, if no
    /// replies are expected, or if the task was given up ([`Resend`]).
    ///
    /// # Errors
    /// Ends the run.
    fn answered(&mut self, number: u64, meta: M, reply: Option<Message>, at: Instant) -> Result<(), E>;

    /// A part of a task's reply arrived.
    ///
    /// # Errors
    /// Ends the run.
    fn part(&mut self, _number: u64, _part: &Message) -> Result<(), E> {
        Ok(())
    }

    /// Somebody has withdrawn this run, by a message of the type [`CANCEL`] in the queue of replies.
    ///
    /// # Errors
    /// Ends the run.
    fn withdrawn(&mut self) -> Result<(), E> {
        Ok(())
    }

    /// This number of duplicate replies arrived.
    fn duplicates(&mut self, _count: usize) {}

    /// The broker will never accept this task, for this reason. `answered` follows, without a reply. Called only where
    /// tasks may be published again; otherwise a refusal ends the run.
    fn refused(&mut self, _number: u64, _reason: String) {}

    /// This number of tasks is published again.
    fn resent(&mut self, _count: usize) {}

    /// Whether workers consume from the task queue. Called from time to time where tasks may be published again.
    fn consumed(&mut self, _is_consumed: bool) {}
}

/// Why a run ended before its tasks were answered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// The broker refuses a task, or is lost.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// No reply came in time. Published tasks stay published.
    #[error("no reply for {timeout:?}; {missing} of {published} published tasks are not answered")]
    NoReply { timeout: Duration, missing: usize, published: u64 },
    /// The session was lost, and with it replies: their queue was private to the connection.
    #[error(
        "the reply queue was lost with the connection; {missing} of {published} published tasks are not answered"
    )]
    Lost { missing: usize, published: u64 },
}

/// A connection to a task queue, and to the queue of replies.
pub(crate) struct Client {
    publisher: Arc<dyn Publisher>,
    task_queue: Arc<str>,
    replies: Option<Replies>,
}

struct Replies {
    /// The `reply_to` of tasks.
    queue: String,
    /// The queue outlives its connection: a lost session loses no reply.
    is_durable: bool,
    consumer: Box<dyn Consumer>,
    acker: Arc<dyn Acker>,
    /// Read and not acked yet. Bound: [`MAX_BURST`].
    unacked: Vec<DeliveryTag>,
}

impl Client {
    /// Connects to RabbitMQ. With a `prefetch`, replies come to a private queue, consumed with this prefetch;
    /// without, no replies are consumed.
    ///
    /// # Errors
    /// No broker could be reached, or it refuses.
    pub(crate) async fn connect(
        broker: &Broker,
        name: &str,
        task_queue: &str,
        topology: Option<&Topology>,
        prefetch: Option<u16>,
    ) -> Result<Self, ClientError> {
        let connector = || Connector::new(broker.clone(), name);
        if let Some(topology) = topology {
            declare(&connector(), topology).await?;
        }
        let replies = match prefetch {
            Some(prefetch) => Some(Replies::private(connector(), prefetch).await?),
            None => None,
        };
        let publisher = Arc::new(AmqpPublisher::new(connector()));
        Ok(Self { publisher, task_queue: task_queue.into(), replies })
    }

    /// Connects to RabbitMQ for a job, whose replies come to `reply_queue`, a durable queue of its own. The broker
    /// deletes that queue after `keep` without a consumer.
    ///
    /// # Errors
    /// No broker could be reached, it refuses, or the task queue does not exist.
    pub(crate) async fn for_job(
        broker: &Broker,
        name: &str,
        task_queue: &str,
        reply_queue: &str,
        keep: Duration,
        prefetch: u16,
    ) -> Result<Self, ClientError> {
        let connector = || Connector::new(broker.clone(), name);
        // Declared before the first task is published: without the queue, the task's reply would be unroutable.
        declare_job(&connector(), task_queue, reply_queue, keep).await?;
        let subscription = Subscription::Job { queue: reply_queue.to_owned(), keep };
        let (consumer, acker) = subscribe(connector(), subscription, prefetch);
        let (consumer, acker) = (Box::new(consumer), Arc::new(acker));
        let replies =
            Replies { queue: reply_queue.to_owned(), is_durable: true, consumer, acker, unacked: Vec::new() };
        let publisher = Arc::new(AmqpPublisher::new(connector()));
        Ok(Self { publisher, task_queue: task_queue.into(), replies: Some(replies) })
    }

    /// A client over a session that consumes `reply_queue`.
    pub(crate) fn over(session: BrokerSession, task_queue: &str, reply_queue: &str) -> Self {
        let BrokerSession { consumer, acker, publisher, .. } = session;
        let (queue, unacked) = (reply_queue.to_owned(), Vec::new());
        let replies = Some(Replies { queue, is_durable: false, consumer, acker, unacked });
        Self { publisher, task_queue: task_queue.into(), replies }
    }

    /// The `reply_to` of tasks; none if no replies are consumed.
    pub(crate) fn reply_queue(&self) -> Option<&str> {
        self.replies.as_ref().map(|replies| replies.queue.as_str())
    }

    /// Publishes a message to `queue`, and returns once the broker has confirmed it.
    ///
    /// # Errors
    /// The broker refuses it, or is lost.
    pub(crate) async fn publish(&mut self, queue: &str, message: Message) -> Result<(), ClientError> {
        publish(&*self.publisher, queue, message).await
    }

    /// Publishes the tasks and gathers their replies. The first task has the number `first`.
    ///
    /// # Errors
    /// Those of the stream and of the sink, and [`ClientError`].
    pub(crate) async fn run<M, E: From<ClientError>>(
        &mut self,
        first: u64,
        tasks: impl Stream<Item = Result<ClientTask<M>, E>>,
        bounds: &Bounds,
        sink: &mut impl Sink<M, E>,
    ) -> Result<(), E> {
        let Self { publisher, task_queue, replies } = self;
        let mut run = Run::new(&**publisher, task_queue, replies.as_ref(), first, bounds);
        let mut tasks = pin!(tasks);
        let mut all_begun = false;
        let mut publishes = FuturesUnordered::new();
        let mut poll_interval = tokio::time::interval(POLL_INTERVAL);
        poll_interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut inspections = FuturesUnordered::new();
        loop {
            run.deliver_answers(sink)?;
            // Acks are not sent in an arm of the `select!` below, because the arm's future may be dropped halfway.
            if let Some(replies) = replies.as_mut() {
                let mut acked = pin!(replies.ack_all());
                loop {
                    // Acks and publishes may share one bounded channel, whose places are granted in turn. A publish
                    // that is granted a place and is not polled would block the acks for ever.
                    tokio::select! {
                        biased;
                        () = &mut acked => break,
                        Some(published) = publishes.next() => run.publish_ended(published?, sink),
                    }
                }
            }
            if all_begun && run.gather.under_way() == 0 && publishes.is_empty() {
                return Ok(());
            }
            let deadline = run.deadline();
            tokio::select! {
                biased;
                Some(published) = publishes.next() => run.publish_ended(published?, sink),
                burst = next_burst(replies.as_mut()) => {
                    run.last_reply = Instant::now();
                    let deliveries = burst?.ok_or_else(|| run.gather.lost_error())?;
                    run.gather.take(deliveries, run.last_reply, sink)?;
                }
                task = tasks.next(), if !all_begun && run.has_room() && publishes.len() < MAX_PUBLISHING => {
                    match task {
                        None => all_begun = true,
                        Some(task) => publishes.extend(run.begin(task?, sink)),
                    }
                }
                _ = poll_interval.tick(), if run.resends.is_some() && inspections.is_empty() => {
                    inspections.push(publisher.queue_state(task_queue));
                }
                Some(state) = inspections.next() => publishes.extend(run.inspected(state, sink)),
                () = tokio::time::sleep_until(deadline.unwrap_or(run.last_reply)), if deadline.is_some() => {
                    return Err(run.gather.no_reply_error(bounds.timeout.unwrap_or_default()).into());
                }
            }
        }
    }

    pub(crate) async fn close(mut self) {
        self.publisher.close().await;
        if let Some(replies) = &mut self.replies {
            replies.consumer.close().await;
        }
    }
}

/// A publish of a task, until it is confirmed or refused.
type Publishing<'a> = BoxFuture<'a, Result<SentTask, ClientError>>;

/// The outcome of the publish of a task.
struct SentTask {
    number: u64,
    /// Why the broker will never accept the task; none: it has accepted it.
    refused: Option<String>,
}

/// The state of one [`Client::run`].
struct Run<'a, M> {
    publisher: &'a dyn Publisher,
    task_queue: &'a Arc<str>,
    /// None: no replies are expected.
    reply_to: Option<String>,
    first: u64,
    bounds: &'a Bounds,
    gather: Gather<M>,
    resends: Option<Resends>,
    /// When the last replies arrived; at first the start of the run.
    last_reply: Instant,
}

impl<'a, M> Run<'a, M> {
    fn new(
        publisher: &'a dyn Publisher,
        task_queue: &'a Arc<str>,
        replies: Option<&Replies>,
        first: u64,
        bounds: &'a Bounds,
    ) -> Self {
        let now = Instant::now();
        Self {
            publisher,
            task_queue,
            reply_to: replies.map(|replies| replies.queue.clone()),
            first,
            bounds,
            gather: Gather::new(first, bounds.in_order),
            resends: bounds.resend.map(|resend| Resends::new(resend, now)),
            last_reply: now,
        }
    }

    /// Gives the sink the answers whose turn it is.
    fn deliver_answers<E>(&mut self, sink: &mut impl Sink<M, E>) -> Result<(), E> {
        while let Some(Answered { number, meta, reply, at }) = self.gather.next() {
            if let Some(resends) = &mut self.resends {
                resends.answered(number, at);
            }
            sink.answered(number, meta, reply, at)?;
        }
        Ok(())
    }

    /// Whether one more task may be under way.
    fn has_room(&self) -> bool {
        let max_tasks = self.bounds.max_tasks;
        match &self.resends {
            Some(resends) => resends.has_room(max_tasks),
            None => self.gather.under_way() < max_tasks && self.gather.bytes() < MAX_BYTES,
        }
    }

    /// When the wait for the next reply ends; none if there is nothing to wait for, or no limit.
    fn deadline(&self) -> Option<Instant> {
        self.reply_to.as_ref()?;
        let (timeout, oldest) = (self.bounds.timeout?, self.gather.oldest_begun_at()?);
        Some(oldest.max(self.last_reply) + timeout)
    }

    /// Begins a task. Returns the future that publishes it; none if nothing is to be published.
    fn begin<E>(&mut self, task: ClientTask<M>, sink: &mut impl Sink<M, E>) -> Option<Publishing<'a>> {
        let ClientTask { meta, message } = task;
        let (number, now) = (self.gather.begun() + self.first, Instant::now());
        sink.begun(number, &meta);
        self.gather.begin(meta, message.as_ref().map_or(0, |message| message.body.len()), now);
        let Some(message) = message else {
            self.gather.answer(number, None, now);
            return None;
        };
        let queue = message.queue.clone().unwrap_or_else(|| self.task_queue.clone());
        let message = Arc::new(complete(number, message, self.reply_to.clone()));
        if let Some(resends) = &mut self.resends {
            resends.begin(number, queue.clone(), message.clone());
        }
        let on_refusal = if self.resends.is_some() { OnRefusal::Report } else { OnRefusal::Fail };
        Some(Box::pin(publish_task(self.publisher, queue, number, message, on_refusal)))
    }

    /// Handles the outcome of a publish.
    fn publish_ended<E>(&mut self, SentTask { number, refused }: SentTask, sink: &mut impl Sink<M, E>) {
        let now = Instant::now();
        if let Some(reason) = refused {
            sink.refused(number, reason);
            self.gather.answer(number, None, now);
            return;
        }
        sink.confirmed(number);
        if let Some(resends) = &mut self.resends {
            resends.confirmed(number, now);
        }
        if self.reply_to.is_none() {
            self.gather.answer(number, None, now);
        }
    }

    /// Handles the state of the task queue. Returns the publishes of the tasks that are late.
    fn inspected<E>(&mut self, state: Option<QueueState>, sink: &mut impl Sink<M, E>) -> Vec<Publishing<'a>> {
        let Some(resends) = &mut self.resends else { return Vec::new() };
        let is_consumed = match state {
            Some(QueueState::Exists { consumers, .. }) => consumers > 0,
            Some(QueueState::Missing) => false,
            // The queue cannot be inspected. Workers are assumed to consume if the broker takes messages.
            Some(QueueState::Exclusive | QueueState::Unavailable) | None => self.publisher.takes_messages(),
        };
        let now = Instant::now();
        resends.consumed(is_consumed, now);
        sink.consumed(is_consumed);
        let mut publishes: Vec<Publishing<'a>> = Vec::new();
        for late in resends.late(now) {
            match late {
                LateTask::Republish(number, queue, message) => {
                    let publish = publish_task(self.publisher, queue, number, message, OnRefusal::Report);
                    publishes.push(Box::pin(publish));
                }
                LateTask::GiveUp(number) => _ = self.gather.answer(number, None, now),
            }
        }
        sink.resent(publishes.len());
        publishes
    }
}

impl Replies {
    /// Acks all replies read so far. Acks that are sent together are combined into few commands.
    async fn ack_all(&mut self) {
        join_all(self.unacked.drain(..).map(|delivery_tag| self.acker.ack(delivery_tag))).await;
    }

    /// Subscribes to a private queue, and waits until the broker has created it.
    async fn private(connector: Connector, prefetch: u16) -> Result<Self, ClientError> {
        // Written by the consumer, once the broker has created the queue.
        let (name_sender, mut name) = watch::channel(None);
        let (mut consumer, acker) = subscribe(connector, Subscription::Private(name_sender), prefetch);
        let failed = |reason: &str| BrokerError::Unreachable { seconds: 0, reason: reason.into() };
        let queue = tokio::select! {
            // `wait_for` fails only if the consumer has ended; then the consumer's event has the reason.
            Ok(named) = name.wait_for(Option::is_some) => named.clone(),
            event = consumer.next() => return Err(event.err().unwrap_or_else(|| failed("no reply queue")).into()),
        };
        let queue = queue.ok_or_else(|| failed("the reply queue has no name"))?;
        let (consumer, acker) = (Box::new(consumer), Arc::new(acker));
        Ok(Self { queue, is_durable: false, consumer, acker, unacked: Vec::new() })
    }
}

/// Waits for an event, and returns the deliveries that have arrived, at most [`MAX_BURST`]. The list may be empty if
/// the session with a durable queue was lost. None: the session is over. Never returns if no replies are consumed. Safe
/// to cancel: deliveries that were read are returned at once.
async fn next_burst(replies: Option<&mut Replies>) -> Result<Option<Vec<Delivery>>, ClientError> {
    let Some(Replies { consumer, unacked, is_durable, .. }) = replies else {
        return std::future::pending().await;
    };
    let mut deliveries = Vec::new();
    let mut event = Some(consumer.next().await?);
    while let Some(received) = event {
        match received {
            ConsumerEvent::Delivery(delivery) => {
                unacked.push(delivery.delivery_tag);
                deliveries.push(*delivery);
            }
            ConsumerEvent::Lost { .. } if *is_durable => {}
            ConsumerEvent::Lost { .. } | ConsumerEvent::End => return Ok(None),
        }
        event = if deliveries.len() < MAX_BURST { consumer.next().now_or_never().transpose()? } else { None };
    }
    Ok(Some(deliveries))
}

/// Makes a task's message persistent and dates it. The task's number is its correlation id.
fn complete(number: u64, task: TaskMessage, reply_to: Option<String>) -> Message {
    let TaskMessage { message_id, mut headers, body, expires, .. } = task;
    let now = jiff::Timestamp::now();
    headers.insert("timestamp_in_ms".into(), now.as_millisecond().into());
    headers.extend(body.headers());
    let properties = Properties {
        content_type: Some(body.media_type.unwrap_or_else(|| JSON.into())),
        correlation_id: Some(number.to_string()),
        message_id: Some(message_id),
        delivery_mode: Some(2),
        timestamp: u64::try_from(now.as_second()).ok(),
        expiration: expires.map(|after| after.as_millis().to_string()),
        headers,
        reply_to,
        ..Properties::default()
    };
    Message { properties, body: body.bytes }
}

/// The methods that need [`Sink`] and [`ClientError`], which `gather` does not know.
impl<M> Gather<M> {
    /// Takes messages of the reply queue. Parts are passed on at once, replies when their turn comes.
    fn take<E>(
        &mut self,
        deliveries: Vec<Delivery>,
        at: Instant,
        sink: &mut impl Sink<M, E>,
    ) -> Result<(), E> {
        let mut duplicates = 0;
        for Delivery { message, .. } in deliveries {
            match number_of(&message) {
                _ if message.properties.kind.as_deref() == Some(CANCEL) => sink.withdrawn()?,
                Some(number) if is_part(&message) => sink.part(number, &message)?,
                Some(number) => duplicates += usize::from(!self.answer(number, Some(message), at)),
                // Not a reply to a task of this run.
                None => {}
            }
        }
        sink.duplicates(duplicates);
        Ok(())
    }

    fn lost_error(&self) -> ClientError {
        ClientError::Lost { missing: self.missing(), published: self.begun() }
    }

    fn no_reply_error(&self, timeout: Duration) -> ClientError {
        ClientError::NoReply { timeout, missing: self.missing(), published: self.begun() }
    }
}

fn number_of(reply: &Message) -> Option<u64> {
    reply.properties.correlation_id.as_deref()?.parse().ok()
}

/// What follows if the broker does not accept a task.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OnRefusal {
    /// An error.
    Fail,
    /// A full queue is tried again. A task that the broker will never accept is reported with the reason.
    Report,
}

/// Publishes a task, and returns once it is confirmed.
async fn publish_task(
    publisher: &dyn Publisher,
    queue: Arc<str>,
    number: u64,
    message: Arc<Message>,
    on_refusal: OnRefusal,
) -> Result<SentTask, ClientError> {
    loop {
        match publisher.publish(&queue, message.clone()).await? {
            // A full queue has room again later.
            Published::Nacked if on_refusal == OnRefusal::Report => tokio::time::sleep(NACK_DELAY).await,
            Published::Refused(reason) if on_refusal == OnRefusal::Report => {
                return Ok(SentTask { number, refused: Some(reason) });
            }
            published => return accepted(published, &queue).map(|()| SentTask { number, refused: None }),
        }
    }
}

/// Publishes a message, and waits for its confirm.
///
/// # Errors
/// The broker refuses it, or is lost.
pub(crate) async fn publish(
    publisher: &dyn Publisher,
    queue: &str,
    message: Message,
) -> Result<(), ClientError> {
    accepted(publisher.publish(queue, message.into()).await?, queue)
}

/// An error unless the broker has confirmed the message.
fn accepted(published: Published, queue: &str) -> Result<(), ClientError> {
    let refused =
        |reason: String| Err(BrokerError::Refused { broker: format!("queue {queue:?}"), reason }.into());
    match published {
        Published::Confirmed => Ok(()),
        Published::Unroutable => {
            refused("it does not exist; the pool's workers make it when they start".into())
        }
        Published::Nacked => {
            refused("the broker did not accept the message (nack); is the queue full?".into())
        }
        Published::Refused(reason) | Published::Forbidden(reason) => refused(reason),
    }
}

#[cfg(test)]
mod tests;
