//! The requesters of one phase: publish the plan at its times, whatever became of what went before (an open loop), and
//! read all reply queues and the dead letters into the books. Own their connections: innocent ones share one, all
//! others another, so that large messages of these do not hold up those on the way to the broker.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lapin::options::{BasicGetOptions, BasicPublishOptions, QueueDeleteOptions};
use lapin::types::AMQPValue;
use lapin::{BasicProperties, Channel};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::super::plan::Dice;
use super::super::producers::FILLER;
use super::books::Books;
use super::plan::{Manners, Planned, Pool, Role, Trouble, Way, innocent_id};
use super::requests::Requests;
use crate::support::client::{Client, Received, Task};

/// A reply queue is deleted at a random time between these after its task is published, so that it is mostly away when
/// the worker first asks for it, 5 s after it took the task.
const DELETED_MS: [u64; 2] = [3_500, 5_000];
/// After so long it is made again.
const AWAY_MS: [u64; 2] = [1_000, 1_500];
const POLL: Duration = Duration::from_millis(100);

/// Where tasks go and replies come from.
#[derive(Clone)]
pub struct Queues {
    /// The prefix of the requesters' queues.
    pub name: String,
    pub tasks: BTreeMap<Pool, String>,
    /// To which those who are not innocent publish.
    pub others: BTreeMap<Pool, String>,
    /// The reply queue of all pools.
    pub replies: String,
    pub dead: String,
    pub control: String,
}

/// What requesters and readers of one phase share.
pub struct Desk {
    pub manners: Manners,
    queues: Queues,
    requests: Arc<Requests>,
    /// When the phase began.
    begun: Instant,
    innocent: Client,
    other: Client,
    /// On which strangers publish to the control exchange.
    control: Channel,
    /// Locked for map operations only.
    books: Mutex<Books>,
    /// Told of each reply and each dead letter, once it is in the books.
    entered: Notify,
}

impl Queues {
    fn innocent(&self, pool: Pool, way: Way) -> Option<String> {
        (way != Way::PoolQueue).then(|| format!("{}.innocent.{pool:?}.{way:?}", self.name))
    }

    fn other(&self, trouble: Trouble) -> String {
        format!("{}.other.{trouble:?}", self.name)
    }

    /// Every reply queue that stands for the whole phase and is read in it.
    fn read(&self, manners: Manners) -> Vec<String> {
        let pools =
            self.tasks.keys().map(|pool| (*pool, Way::OwnQueue)).chain([(Pool::Texts, Way::Streamed)]);
        let pools = pools.filter_map(|(pool, way)| self.innocent(pool, way));
        let full = |trouble: &Trouble| manners == Manners::Hostile && *trouble == Trouble::FullQueue;
        let others = Trouble::ALL.into_iter().filter(|it| !full(it) && !it.has_queue_for_each());
        pools.chain(others.map(|trouble| self.other(trouble))).collect()
    }
}

impl Desk {
    /// Connects, and makes the requesters' queues. The phase begins when they are there.
    pub async fn open(
        url: &str,
        manners: Manners,
        queues: Queues,
        requests: Arc<Requests>,
        books: Books,
    ) -> Self {
        let [innocent, other] = [Client::connect(url).await, Client::connect(url).await];
        for queue in queues.read(manners) {
            innocent.declare(&queue, &[]).await;
        }
        if manners == Manners::Hostile {
            let text = |text: &str| AMQPValue::LongString(text.into());
            let full = [
                ("x-queue-type", text("quorum")),
                ("x-max-length", AMQPValue::LongInt(1)),
                ("x-overflow", text("reject-publish")),
            ];
            let queue = queues.other(Trouble::FullQueue);
            other.declare(&queue, &full).await;
            other.publish(&queue, Task::raw("full").id(FILLER)).await;
        }
        let control = other.channel().await;
        let (begun, books) = (Instant::now(), Mutex::new(books));
        Self { manners, queues, requests, begun, innocent, other, control, books, entered: Notify::new() }
    }

    pub fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the queues of all requesters, the pools' reply queue and the dead letters, until the set is dropped.
    pub async fn read(self: &Arc<Self>, readers: &mut JoinSet<()>) {
        let queues = self.queues.read(self.manners);
        for queue in queues.into_iter().chain([self.queues.replies.clone(), self.queues.dead.clone()]) {
            self.read_one(&queue, readers).await;
        }
    }

    /// Reads the queue that is full, from now on.
    pub async fn read_full(self: &Arc<Self>, readers: &mut JoinSet<()>) {
        if self.manners == Manners::Hostile {
            self.read_one(&self.queues.other(Trouble::FullQueue), readers).await;
        }
    }

    async fn read_one(self: &Arc<Self>, queue: &str, readers: &mut JoinSet<()>) {
        let (desk, mut inbox) = (self.clone(), self.other.inbox(queue).await);
        readers.spawn(async move {
            while let Some(message) = inbox.received().await {
                desk.enter(&message, inbox.queue == desk.queues.dead);
            }
        });
    }

    fn enter(&self, message: &Received, is_letter: bool) {
        let (id, at) = (&*message.correlation_id, self.begun.elapsed());
        if is_letter {
            self.books().letter(id, &message.header("reason"));
        } else if message.kind == "reply" {
            let code = message.status_code().to_string();
            self.books().reply(id, &code, &message.body, at);
        }
        self.entered.notify_one();
    }

    /// Returns when a reply or a dead letter has come since the last call. For one caller.
    pub async fn entered(&self) {
        self.entered.notified().await;
    }

    /// Publishes what is planned, each at its time. The set ends once the broker has everything, and every queue of a
    /// single task has given what it got.
    pub async fn publish(self: &Arc<Self>, plan: Vec<Planned>, under_way: &mut JoinSet<()>) {
        for planned in plan {
            sleep_until(self.begun + planned.due).await;
            if !matches!(planned.role, Role::Cancel { .. }) {
                self.books().publishes(&planned.id, planned.role, planned.due);
            }
            under_way.spawn(self.clone().publish_one(planned));
        }
    }

    async fn publish_one(self: Arc<Self>, planned: Planned) {
        match planned.role {
            Role::Innocent { pool, request, way } => {
                let mut task = self.requests.innocent(pool, request, way).id(planned.id);
                if let Some(queue) = self.queues.innocent(pool, way) {
                    task = task.reply_to(&queue);
                }
                self.innocent.publish(&self.queues.tasks[&pool], task).await;
            }
            Role::Other { trouble, number } => {
                let task = self.requests.other(trouble, self.manners, number).id(planned.id.as_str());
                if trouble.has_queue_for_each() {
                    self.publish_with_queue(&planned.id, (trouble, number), task).await;
                } else {
                    let task = task.reply_to(&self.queues.other(trouble));
                    self.other.publish(&self.queues.others[&trouble.pool()], task).await;
                }
            }
            Role::Cancel { task } => self.cancel(task).await,
        }
    }

    /// A task whose reply queue is its own and, of a hostile requester, does not stay.
    async fn publish_with_queue(&self, id: &str, (trouble, number): (Trouble, usize), task: Task) {
        let queue = format!("{}.of.{id}", self.queues.name);
        self.other.declare(&queue, &[]).await;
        self.other.publish(&self.queues.others[&trouble.pool()], task.reply_to(&queue)).await;
        let mut stands = true;
        if self.manners == Manners::Hostile {
            let mut dice = Dice::new(number as u64);
            let mut between =
                |[least, most]: [u64; 2]| Duration::from_millis(least + dice.below(most - least));
            let (deleted, away) = (between(DELETED_MS), between(AWAY_MS));
            sleep(deleted).await;
            self.delete_empty(&queue).await;
            stands = trouble == Trouble::QueueMadeAgain;
            if stands {
                sleep(away).await;
                self.other.declare(&queue, &[]).await;
            }
        }
        while !self.books().has_verdict(id) {
            if stands {
                self.take_all(&queue).await;
            }
            sleep(POLL).await;
        }
        if stands {
            self.other.delete(&queue).await;
        }
    }

    /// Deletes a queue of which nothing is unread: a reply that was in it would otherwise be gone.
    async fn delete_empty(&self, queue: &str) {
        loop {
            self.take_all(queue).await;
            let empty = QueueDeleteOptions { if_empty: true, ..Default::default() };
            // The broker closes the channel to say no.
            if self.other.channel().await.queue_delete(queue.into(), empty).await.is_ok() {
                return;
            }
        }
    }

    async fn take_all(&self, queue: &str) {
        let channel = self.other.channel().await;
        let options = BasicGetOptions { no_ack: true };
        while let Ok(Some(message)) = channel.basic_get(queue.into(), options).await {
            let message = message.delivery;
            self.enter(&Received::new(message.data, message.properties, message.redelivered), false);
        }
        let _ = channel.close(200, "done".into()).await;
    }

    /// A stranger guesses an innocent task's id, and names no reply queue or its own. An ordinary requester instead is
    /// late: it cancels a task that has ended.
    #[expect(clippy::disallowed_methods, reason = "a requester publishes as any producer does")]
    async fn cancel(&self, task: usize) {
        let own = self.queues.other(Trouble::ManySalts);
        let properties = BasicProperties::default().with_type("control.cancel".into());
        let id = match self.manners {
            Manners::Hostile => innocent_id(Pool::Texts, task),
            Manners::Ordinary => format!("ended-{task}"),
        };
        let properties = properties.with_correlation_id(id.into());
        let properties = match self.manners {
            Manners::Hostile if task.is_multiple_of(2) => properties,
            _ => properties.with_reply_to(own.into()),
        };
        let options = BasicPublishOptions::default();
        let exchange = self.queues.control.as_str().into();
        let sent = self.control.basic_publish(exchange, "cancel".into(), options, b"", properties).await;
        sent.expect("an open channel");
    }
}
