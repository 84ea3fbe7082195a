//! Publishes a load and takes its replies. Decides when the next task goes out: when a reply has made
//! room, or when it is due; and when a reply counts as lost. Owns the clock of a run; what replies mean
//! is the tally's.

use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use indicatif::ProgressBar;
use tokio::sync::Semaphore;

use super::answer::Answer;
use super::load::{Arrivals, Bodies};
use super::report::Measured;
use super::tally::Tally;
use crate::broker::amqp::{AmqpAcker, AmqpConsumer, AmqpPublisher};
use crate::broker::{Acker as _, Consumer as _, Delivery, Event};
use crate::commands::producer;
use crate::protocol::Message;
use crate::protocol::reply::is_part;
use crate::shutdown::Exit;

/// Publishes under way at once: some windows of the publisher.
const PIPELINED: usize = 2_048;
/// A task that waits in its queue for so many time-outs is dropped there.
const KEPT: u32 = 10;
/// Replies taken and acked together: what came while the last ones were counted.
const BURST: usize = 512;

/// How many tasks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) warmup: usize,
    pub(super) tasks: usize,
    /// That follow the measured ones, to keep the loop full.
    pub(super) behind: usize,
}

impl Plan {
    /// All that are published.
    pub(super) fn total(self) -> usize {
        self.warmup + self.tasks + self.behind
    }
}

/// When the next task goes out.
pub(super) enum Pace {
    /// While fewer than so many are under way.
    Closed(usize),
    /// When it is due.
    Open(Arrivals),
}

/// Where tasks go and replies come from.
pub(super) struct Way<'a> {
    pub(super) publisher: &'a AmqpPublisher,
    pub(super) queue: &'a str,
    pub(super) reply_to: &'a str,
}

/// One run of a load.
pub(super) struct Drive<'a> {
    way: Way<'a>,
    bar: &'a ProgressBar,
    total: usize,
    timeout: Duration,
    start: Instant,
    /// Permits of a closed loop: taken by the feed, given by the collector for each reply.
    room: Semaphore,
    /// Written by the feed and by the collector, held for a few instructions.
    tally: Mutex<Tally>,
}

impl<'a> Drive<'a> {
    /// The clock starts.
    pub(super) fn new(way: Way<'a>, plan: Plan, bar: &'a ProgressBar, timeout: Duration) -> Self {
        let tally = Mutex::new(Tally::new(plan.warmup, plan.tasks));
        let (total, start, room) = (plan.total(), Instant::now(), Semaphore::new(0));
        Self { way, bar, total, timeout, start, room, tally }
    }

    /// Publishes all tasks and waits for all replies. Where one does not come in time, the error says
    /// so beside what was measured until then.
    ///
    /// # Errors
    /// The broker refuses a task or is gone.
    pub(super) async fn run(
        self,
        bodies: Bodies,
        pace: Pace,
        replies: (&mut AmqpConsumer, &AmqpAcker),
    ) -> anyhow::Result<(Measured, Option<anyhow::Error>)> {
        if let Pace::Closed(in_flight) = pace {
            self.room.add_permits(in_flight);
        }
        let unanswered = match tokio::try_join!(self.feed(bodies, pace), self.collect(replies)) {
            Ok(_) => None,
            Err(error) if error.downcast_ref() == Some(&Exit::Aborted) => Some(error),
            Err(error) => return Err(error),
        };
        Ok((self.tally.into_inner().unwrap_or_else(PoisonError::into_inner).measured(), unanswered))
    }

    async fn feed(&self, bodies: Bodies, mut pace: Pace) -> anyhow::Result<()> {
        let run = uuid::Uuid::new_v4();
        let mut under_way = FuturesUnordered::new();
        for (number, work) in bodies.take(self.total).enumerate() {
            let mut turn = pin!(self.turn(&mut pace));
            let due = loop {
                tokio::select! {
                    biased;
                    Some(published) = under_way.next() => published?,
                    due = &mut turn, if under_way.len() < PIPELINED => break due?,
                }
            };
            self.tally().published(due, work.inputs);
            let (id, reply_to) = (format!("{run}/{number}"), Some(self.way.reply_to.to_owned()));
            let mut task = producer::task(number as u64, id, work.body, reply_to);
            // Nobody else wants it: should this run end early, it does not stay in the queue.
            task.properties.expiration = Some((KEPT * self.timeout).as_millis().to_string());
            under_way.push(self.publish(number, task));
        }
        while let Some(published) = under_way.next().await {
            published?;
        }
        Ok(())
    }

    /// Waits until the next task may go out. Returns when it was due.
    async fn turn(&self, pace: &mut Pace) -> anyhow::Result<Duration> {
        match pace {
            Pace::Closed(_) => {
                self.room.acquire().await?.forget();
                Ok(self.start.elapsed())
            }
            Pace::Open(arrivals) => {
                let due = arrivals.next();
                let early = due.saturating_sub(self.start.elapsed());
                if !early.is_zero() {
                    tokio::time::sleep(early).await;
                }
                Ok(due)
            }
        }
    }

    async fn publish(&self, number: usize, message: Message) -> anyhow::Result<()> {
        producer::publish(self.way.publisher, self.way.queue, message).await?;
        self.tally().confirmed(number, self.start.elapsed());
        Ok(())
    }

    async fn collect(&self, replies: (&mut AmqpConsumer, &AmqpAcker)) -> anyhow::Result<()> {
        let (consumer, acker) = replies;
        let mut burst = Vec::with_capacity(BURST);
        while self.tally().answered() < self.total {
            let since = self.start.elapsed();
            match tokio::time::timeout(self.timeout, consumer.next()).await {
                Ok(event) => burst.push(self.delivered(event?)?),
                Err(_) if self.tally().waits_since(since) => {
                    let words = format!("no reply for {:?}; {}", self.timeout, self.tally().missing());
                    return Err(anyhow::Error::msg(words).context(Exit::Aborted));
                }
                Err(_) => continue,
            }
            while let Some(event) = consumer.next().now_or_never().filter(|_| burst.len() < BURST) {
                burst.push(self.delivered(event?)?);
            }
            for (at, delivery) in &burst {
                self.count(*at, &delivery.message);
            }
            // Together they are few commands.
            join_all(burst.drain(..).map(|(_, delivery)| acker.ack(delivery.delivery_tag))).await;
        }
        Ok(())
    }

    fn delivered(&self, event: Event) -> anyhow::Result<(Duration, Box<Delivery>)> {
        match event {
            Event::Delivery(delivery) => Ok((self.start.elapsed(), delivery)),
            Event::Lost { .. } | Event::End => {
                let missing = self.tally().missing();
                let words = format!("the reply queue was lost with the connection; {missing}");
                Err(anyhow::Error::msg(words).context(Exit::BrokerLost))
            }
        }
    }

    fn count(&self, at: Duration, reply: &Message) {
        if is_part(reply) {
            return;
        }
        let number = reply.properties.correlation_id.as_deref().and_then(|id| id.parse().ok());
        let Some(number) = number else { return };
        let answer = Answer::of(reply);
        if self.tally().reply(number, at, &answer) {
            self.room.add_permits(1);
            self.bar.inc(1);
        }
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
