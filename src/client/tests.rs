//! Tests of `Client::run` over a queue in memory, with delays where RabbitMQ may be slow.

use std::collections::BTreeSet;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream;
use tokio::sync::mpsc;

use super::*;
use crate::broker::memory::Memory;
use crate::broker::{Delay, DeliveryTag, PublishFuture};
use crate::protocol::reply::PART;

/// Answers each task at once.
struct Broker {
    memory: Memory,
    /// The tasks with these numbers get a second reply.
    twice: BTreeSet<u64>,
    /// Answers nothing from this number on.
    deaf_from: u64,
    /// The bounded channel that messages and acks share.
    shared_channel: mpsc::Sender<()>,
}

/// Sends acks through the channel that messages use too.
struct SlowAcker(mpsc::Sender<()>);

impl Publisher for Broker {
    fn publish<'a>(&'a self, _: &'a str, message: Arc<Message>) -> PublishFuture<'a> {
        Box::pin(async move {
            self.shared_channel.reserve().await.expect("an open channel").send(());
            let number = number_of(&message).expect("a number");
            if number < self.deaf_from {
                let times = 1 + usize::from(self.twice.contains(&number));
                self.memory.deliver(vec![(*message).clone(); times]);
            }
            tokio::task::yield_now().await;
            Ok(Published::Confirmed)
        })
    }

    fn publish_later<'a>(&'a self, queue: &'a str, _: Delay, message: Arc<Message>) -> PublishFuture<'a> {
        self.publish(queue, message)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

impl Acker for SlowAcker {
    fn ack(&self, _: DeliveryTag) -> BoxFuture<'_, bool> {
        Box::pin(async {
            self.0.send(()).await.expect("an open channel");
            tokio::time::sleep(Duration::from_millis(1)).await;
            true
        })
    }

    fn requeue(&self, _: DeliveryTag) -> BoxFuture<'_, bool> {
        Box::pin(std::future::ready(true))
    }

    fn flush(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn is_connected(&self) -> bool {
        true
    }
}

#[derive(Default)]
struct Counts {
    answered: Vec<u64>,
    confirmed: usize,
    duplicates: usize,
}

impl Sink<u64, ClientError> for Counts {
    fn confirmed(&mut self, _: u64) {
        self.confirmed += 1;
    }

    fn answered(
        &mut self,
        number: u64,
        meta: u64,
        _: Option<Message>,
        _: Instant,
    ) -> Result<(), ClientError> {
        assert_eq!(number, meta);
        self.answered.push(number);
        Ok(())
    }

    fn duplicates(&mut self, count: usize) {
        self.duplicates += count;
    }
}

/// A run of this many tasks. The other fields are as in [`Broker`] and [`Bounds`].
struct Case {
    count: u64,
    twice: &'static [u64],
    deaf_from: u64,
    in_order: bool,
}

async fn run(case: Case) -> (Counts, Result<(), ClientError>) {
    let Case { count, twice, deaf_from, in_order } = case;
    let memory = Memory::default();
    // The capacity is 1, granted in turn, so that a publish that nobody polls can hold it and block the acks.
    let (shared_channel, mut read) = mpsc::channel(1);
    tokio::spawn(async move { while read.recv().await.is_some() {} });
    let twice = twice.iter().copied().collect();
    let broker = Broker { memory: memory.clone(), twice, deaf_from, shared_channel: shared_channel.clone() };
    let (acker, publisher) = (Arc::new(SlowAcker(shared_channel)), Arc::new(broker));
    let session = BrokerSession { acker, publisher, ..memory.open() };
    let message = || TaskMessage::new(String::new(), None, String::new().into());
    let tasks = stream::iter((0..count).map(|meta| Ok(ClientTask { meta, message: Some(message()) })));
    let bounds = Bounds { max_tasks: 3, timeout: Some(Duration::from_secs(60)), in_order, resend: None };
    let mut counts = Counts::default();
    let ended = Client::over(session, "tasks", "replies").run(0, tasks, &bounds, &mut counts).await;
    (counts, ended)
}

#[tokio::test(start_paused = true)]
async fn no_reply_is_lost_while_another_is_acked_or_published() {
    for in_order in [false, true] {
        let (mut counts, ended) = run(Case { count: 500, twice: &[], deaf_from: u64::MAX, in_order }).await;
        assert!(ended.is_ok(), "{ended:?}");
        assert!(!in_order || counts.answered.is_sorted());
        counts.answered.sort_unstable();
        assert_eq!(counts.answered, (0..500).collect::<Vec<_>>());
        assert_eq!((counts.confirmed, counts.duplicates), (500, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_reply_that_comes_twice_is_passed_on_once_and_counted() {
    let (counts, ended) = run(Case { count: 50, twice: &[7, 9], deaf_from: u64::MAX, in_order: true }).await;
    assert!(ended.is_ok(), "{ended:?}");
    assert_eq!((counts.answered.len(), counts.duplicates), (50, 2));
}

#[tokio::test(start_paused = true)]
async fn a_reply_that_does_not_come_ends_the_run_with_what_is_missing() {
    let (counts, ended) = run(Case { count: 50, twice: &[], deaf_from: 40, in_order: false }).await;
    assert_eq!(counts.answered.len(), 40);
    assert!(
        matches!(ended, Err(ClientError::NoReply { missing: 3, published: 43, .. })),
        "no more than the bound is under way: {ended:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn parts_are_passed_on_before_their_reply_and_are_no_replies() {
    /// What arrives of each task, in order.
    #[derive(Default)]
    struct Arrivals(Vec<(u64, &'static str)>);

    impl Sink<u64, ClientError> for Arrivals {
        fn part(&mut self, number: u64, _: &Message) -> Result<(), ClientError> {
            self.0.push((number, "part"));
            Ok(())
        }

        fn answered(
            &mut self,
            number: u64,
            _: u64,
            _: Option<Message>,
            _: Instant,
        ) -> Result<(), ClientError> {
            self.0.push((number, "reply"));
            Ok(())
        }
    }

    let memory = Memory::default();
    memory.set_workers(|memory, task| {
        let kinds = [PART, PART, "reply"].map(|kind| Some(kind.to_owned()));
        let properties = kinds.map(|kind| Properties { kind, ..task.properties.clone() });
        memory.deliver(properties.map(|properties| Message { properties, body: Bytes::new() }));
        Published::Confirmed
    });
    let request = || TaskMessage::new(String::new(), None, String::new().into());
    let tasks = stream::iter((0..9).map(|meta| Ok(ClientTask { meta, message: Some(request()) })));
    let bounds =
        Bounds { max_tasks: 3, timeout: Some(Duration::from_secs(60)), in_order: false, resend: None };
    let mut arrivals = Arrivals::default();
    let mut client = Client::over(memory.open(), "tasks", "replies");
    let ended = client.run(0, tasks, &bounds, &mut arrivals).await;
    assert!(ended.is_ok(), "{ended:?}");
    let expected = (0..9).flat_map(|number| ["part", "part", "reply"].map(|what| (number, what)));
    assert_eq!(arrivals.0, expected.collect::<Vec<_>>());
}
