//! A broker in memory that implements the broker's traits. The test makes deliveries, and everything that is published
//! or settled is recorded. Each queue reacts to messages as the test has set.

use std::collections::HashMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, ready};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use super::{
    Acker, BrokerError, BrokerSession, Consumer, ConsumerEvent, Delay, Delivery, DeliveryTag, PublishFuture,
    Published, Publisher, QueueState, Source,
};
use crate::protocol::Message;

/// How a delivery, identified by its number, was settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    Acked(u64),
    Requeued(u64),
}

/// How a queue reacts to a message.
#[derive(Clone, Debug)]
pub(crate) enum Reaction {
    /// Answers at once.
    Answer(Published),
    /// Answers after this time.
    AnswerAfter(Duration, Published),
    /// Never answers.
    Nothing,
}

/// What workers make of a message that is published: it is accepted or not, and they may deliver replies to it.
type Workers = Arc<dyn Fn(&Memory, &Message) -> Published + Send + Sync>;

/// Waits for what must come. Panics if it does not come within 100,000 seconds of paused time.
pub(crate) async fn in_time<T>(wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(100_000), wait).await.expect("it comes")
}

#[derive(Clone, Default)]
pub(crate) struct Memory(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// Of each queue that is consumed; empty without a session.
    deliveries: Vec<mpsc::Sender<ConsumerEvent>>,
    /// Deliveries for the next session, with their queues.
    waiting: Vec<(Source, ConsumerEvent)>,
    sessions: u64,
    tags: u64,
    settled: Vec<Settled>,
    published: Vec<(String, Message)>,
    queues: HashMap<String, Reaction>,
    /// Decides in the place of `queues`, if it is set.
    workers: Option<Workers>,
    /// What `queue_state` returns for a queue, where it does not follow from how the queue reacts.
    queue_states: HashMap<String, Option<QueueState>>,
    prefetch: Vec<u16>,
    /// How many unsettled messages the consumer reports as granted; none: the prefetch that was set last.
    granted: Option<u16>,
}

impl Delivery {
    /// A delivery with this number, of a message that was delivered `earlier` times before.
    pub(crate) fn made(message: Message, tag: u64, earlier: u64) -> Self {
        let delivery_tag = DeliveryTag { source: Source::FIRST, session: 1, tag };
        let (routing_key, redelivered, delivery_count) = (None, earlier > 0, Some(earlier));
        Self { message, delivery_tag, routing_key, redelivered, delivery_count }
    }
}

impl Memory {
    /// Delivers messages for the first time. Deliveries are numbered from 1.
    pub(crate) fn deliver(&self, messages: impl IntoIterator<Item = Message>) {
        messages.into_iter().for_each(|message| self.deliver_again(message, 0));
    }

    /// Delivers messages from one of the pool's queues.
    pub(crate) fn deliver_from(&self, source: Source, messages: impl IntoIterator<Item = Message>) {
        messages.into_iter().for_each(|message| self.deliver_one(source, message, 0));
    }

    /// Delivers a message that was delivered `earlier` times before.
    pub(crate) fn deliver_again(&self, message: Message, earlier: u64) {
        self.deliver_one(Source::FIRST, message, earlier);
    }

    fn deliver_one(&self, source: Source, message: Message, earlier: u64) {
        let mut state = self.0.state.lock();
        state.tags += 1;
        let mut delivery = Delivery::made(message, state.tags, earlier);
        (delivery.delivery_tag.source, delivery.delivery_tag.session) = (source, state.sessions.max(1));
        let event = ConsumerEvent::Delivery(Box::new(delivery));
        match state.deliveries.get(source.0) {
            Some(deliveries) => drop(deliveries.try_send(event)),
            None => state.waiting.push((source, event)),
        }
    }

    /// Ends the session; its deliveries go back to the broker.
    pub(crate) fn lose_session(&self) {
        let mut state = self.0.state.lock();
        let session = state.sessions;
        state.sessions += 1;
        for (index, deliveries) in state.deliveries.iter().enumerate() {
            drop(deliveries.try_send(ConsumerEvent::Lost { source: Source(index), session }));
        }
    }

    pub(crate) fn has_session(&self) -> bool {
        !self.0.state.lock().deliveries.is_empty()
    }

    /// Sets how a queue reacts to messages from now on.
    pub(crate) fn set_reaction(&self, name: &str, reaction: Reaction) {
        self.0.state.lock().queues.insert(name.to_owned(), reaction);
    }

    /// Sets what workers make of messages from now on.
    pub(crate) fn set_workers(&self, workers: impl Fn(&Self, &Message) -> Published + Send + Sync + 'static) {
        self.0.state.lock().workers = Some(Arc::new(workers));
    }

    /// Sets what `queue_state` returns for the queue.
    pub(crate) fn set_queue_state(&self, name: &str, state: Option<QueueState>) {
        self.0.state.lock().queue_states.insert(name.to_owned(), state);
    }

    pub(crate) fn set_granted(&self, granted: u16) {
        self.0.state.lock().granted = Some(granted);
    }

    pub(crate) fn settled(&self) -> Vec<Settled> {
        self.0.state.lock().settled.clone()
    }

    pub(crate) fn published(&self, queue: &str) -> Vec<Message> {
        let state = self.0.state.lock();
        state.published.iter().filter(|(to, _)| to == queue).map(|(_, message)| message.clone()).collect()
    }

    /// Waits until `count` deliveries are settled, and returns them.
    pub(crate) async fn until_settled(&self, count: usize) -> Vec<Settled> {
        self.until(|memory| Some(memory.settled()).filter(|settled| settled.len() >= count)).await
    }

    /// Waits until `count` messages are published to a queue, and returns them.
    pub(crate) async fn until_published(&self, queue: &str, count: usize) -> Vec<Message> {
        self.until(|memory| Some(memory.published(queue)).filter(|published| published.len() >= count)).await
    }

    /// Waits until something is settled or published.
    pub(crate) async fn wait_for_change(&self) {
        in_time(self.0.changed.notified()).await;
    }

    async fn until<T>(&self, found: impl Fn(&Self) -> Option<T>) -> T {
        loop {
            let changed = self.0.changed.notified();
            if let Some(found) = found(self) {
                return found;
            }
            in_time(changed).await;
        }
    }

    /// Opens a session of one queue, with the deliveries that wait for it.
    pub(crate) fn open(&self) -> BrokerSession {
        self.open_queues(1)
    }

    /// Opens a session of several queues.
    pub(crate) fn open_queues(&self, queues: usize) -> BrokerSession {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..queues).map(|_| mpsc::channel(10_000)).unzip();
        let mut state = self.0.state.lock();
        state.sessions += 1;
        for (source, event) in std::mem::take(&mut state.waiting) {
            drop(senders[source.0].try_send(event));
        }
        state.deliveries = senders;
        drop(state);
        let session = |events| Box::new(Session { memory: self.clone(), events }) as Box<dyn Consumer>;
        let mut consumers = receivers.into_iter().map(session);
        let consumer = consumers.next().expect("a queue");
        let further = consumers.collect();
        let (acker, publisher) = (Arc::new(self.clone()), Arc::new(self.clone()));
        BrokerSession { consumer, further, acker, publisher }
    }

    /// Handles a message that is published to a queue. Retry queues of a queue have the name `<queue>, later`.
    async fn accept(&self, queue: &str, message: &Message) -> Published {
        let (reaction, workers) = self.0.state.lock().record(queue, message);
        self.0.changed.notify_waiters();
        if let Some(workers) = workers {
            return workers(self, message);
        }
        match reaction {
            Reaction::Answer(published) => published,
            Reaction::AnswerAfter(time, published) => {
                tokio::time::sleep(time).await;
                published
            }
            Reaction::Nothing => std::future::pending().await,
        }
    }

    fn settle(&self, settled: Settled) -> BoxFuture<'_, bool> {
        self.0.state.lock().settled.push(settled);
        self.0.changed.notify_waiters();
        Box::pin(ready(true))
    }
}

impl State {
    /// Records a message, unless its queue does not exist. Returns the reaction of the queue, and the workers.
    fn record(&mut self, queue: &str, message: &Message) -> (Reaction, Option<Workers>) {
        let reaction = self.queues.get(queue).cloned().unwrap_or(Reaction::Answer(Published::Confirmed));
        if !matches!(reaction, Reaction::Answer(Published::Unroutable)) {
            self.published.push((queue.to_owned(), message.clone()));
        }
        (reaction, self.workers.clone())
    }
}

struct Session {
    memory: Memory,
    events: mpsc::Receiver<ConsumerEvent>,
}

impl Consumer for Session {
    fn next(&mut self) -> BoxFuture<'_, Result<ConsumerEvent, BrokerError>> {
        Box::pin(async { Ok(self.events.recv().await.unwrap_or(ConsumerEvent::End)) })
    }

    fn set_prefetch(&mut self, prefetch: NonZeroU16) -> BoxFuture<'_, ()> {
        self.memory.0.state.lock().prefetch.push(prefetch.get());
        Box::pin(ready(()))
    }

    fn granted(&self) -> u16 {
        let state = self.memory.0.state.lock();
        state.granted.or(state.prefetch.last().copied()).unwrap_or(u16::MAX)
    }

    fn cancel(&mut self) -> BoxFuture<'_, ()> {
        self.memory.0.state.lock().deliveries.clear();
        Box::pin(ready(()))
    }

    fn close(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(ready(()))
    }
}

impl Acker for Memory {
    fn ack(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        self.settle(Settled::Acked(delivery_tag.tag))
    }

    fn requeue(&self, delivery_tag: DeliveryTag) -> BoxFuture<'_, bool> {
        self.settle(Settled::Requeued(delivery_tag.tag))
    }

    fn flush(&self) -> BoxFuture<'_, ()> {
        Box::pin(ready(()))
    }

    fn is_connected(&self) -> bool {
        true
    }
}

impl Publisher for Memory {
    fn publish<'a>(&'a self, queue: &'a str, message: Arc<Message>) -> PublishFuture<'a> {
        Box::pin(async move { Ok(self.accept(queue, &message).await) })
    }

    fn publish_later<'a>(&'a self, queue: &'a str, _: Delay, message: Arc<Message>) -> PublishFuture<'a> {
        Box::pin(async move { Ok(self.accept(&format!("{queue}, later"), &message).await) })
    }

    fn queue_state<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, Option<QueueState>> {
        let state = self.0.state.lock();
        let is_missing = matches!(state.queues.get(queue), Some(Reaction::Answer(Published::Unroutable)));
        let usual = Some(if is_missing {
            QueueState::Missing
        } else {
            QueueState::Exists { consumers: 0, ready: 0 }
        });
        Box::pin(ready(state.queue_states.get(queue).copied().unwrap_or(usual)))
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(ready(()))
    }
}
