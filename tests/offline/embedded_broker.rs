//! What the embedded queue promises beyond the broker traits: a private
//! socket, and an end that everyone notices.

use std::num::NonZeroU16;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use futures_util::poll;
use sconce::broker::embedded::{EmbeddedBroker, MAX_MESSAGE, QueueSpec, connect};
use sconce::broker::{BrokerError, BrokerSession, ConsumerEvent, Delivery, Published};
use sconce::protocol::Message;

const PATIENCE: Duration = Duration::from_secs(20);

fn spec(name: &str) -> QueueSpec {
    QueueSpec { name: name.to_owned(), kept: true }
}

fn text(body: &str) -> Message {
    Message { body: body.to_owned().into(), ..Message::default() }
}

/// A broker in a folder of its own; the folder is to be held.
fn broker(queues: &[QueueSpec]) -> (EmbeddedBroker, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let queues: Vec<QueueSpec> = queues.iter().cloned().chain([spec("quiet")]).collect();
    let broker = EmbeddedBroker::bind(folder.path().join("queue/socket"), &queues).expect("the socket");
    (broker, folder)
}

/// A message of a connection that takes none.
async fn publish(broker: &EmbeddedBroker, queue: &str, message: Message) -> Published {
    let link = open(broker, "quiet", 1).await.expect("a connection");
    link.publisher.publish(queue, message.into()).await.expect("an answer")
}

async fn open(broker: &EmbeddedBroker, queue: &str, prefetch: u16) -> Result<BrokerSession, BrokerError> {
    let prefetch = NonZeroU16::new(prefetch).expect("a prefetch");
    connect(broker.path(), queue.to_owned(), prefetch).await
}

async fn take(link: &mut BrokerSession) -> Delivery {
    match tokio::time::timeout(PATIENCE, link.consumer.next()).await {
        Ok(Ok(ConsumerEvent::Delivery(delivery))) => *delivery,
        other => panic!("no delivery but {other:?}"),
    }
}

#[tokio::test]
async fn publishes_given_up_half_way_do_not_clog_the_pipeline() {
    let (broker, _folder) = broker(&[spec("tasks"), spec("replies")]);
    let link = open(&broker, "tasks", 1).await.unwrap();
    for _ in 0..40 {
        // More than the socket takes at once: some are dropped at each stage of being sent.
        let all = (0..100).map(|_| link.publisher.publish("replies", text("reply").into()));
        assert!(poll!(futures_util::future::join_all(all)).is_pending());
    }
    let last = tokio::time::timeout(PATIENCE, link.publisher.publish("replies", text("last").into())).await;
    assert_eq!(last.unwrap().ok(), Some(Published::Confirmed));
}

#[tokio::test]
async fn what_nobody_reads_is_confirmed_and_dropped() {
    let (broker, _folder) = broker(&[QueueSpec { name: "dead".into(), kept: false }]);
    for _ in 0..3 {
        assert_eq!(publish(&broker, "dead", text("a dead letter")).await, Published::Confirmed);
    }
    assert_eq!(broker.stats("dead").unwrap().ready, 0);
}

#[tokio::test]
async fn at_the_launchers_end_publish_and_consumer_fail_and_settling_is_false() {
    let (broker, _folder) = broker(&[spec("tasks"), spec("replies")]);
    publish(&broker, "tasks", text("task")).await;
    let mut link = open(&broker, "tasks", 1).await.unwrap();
    let held = take(&mut link).await;
    tokio::time::timeout(PATIENCE, broker.shutdown()).await.unwrap();
    assert!(matches!(link.consumer.next().await, Err(BrokerError::Unreachable { .. })));
    assert!(!link.acker.ack(held.delivery_tag).await);
    let late = link.publisher.publish("replies", text("late").into()).await;
    assert!(matches!(late, Err(BrokerError::Unreachable { .. })));
}

#[tokio::test]
async fn thousands_of_publishes_at_once_are_all_confirmed() {
    let (broker, _folder) = broker(&[spec("tasks"), spec("replies")]);
    let link = open(&broker, "tasks", 1).await.unwrap();
    let all = (0..5_000).map(|_| link.publisher.publish("replies", text("reply").into()));
    let answers = tokio::time::timeout(PATIENCE, futures_util::future::join_all(all)).await.unwrap();
    assert!(answers.iter().all(|answer| matches!(answer, Ok(Published::Confirmed))));
    assert_eq!(broker.stats("replies").unwrap().ready, 5_000);
}

#[tokio::test]
async fn a_message_over_the_limit_is_refused_and_the_connection_lives() {
    let (broker, _folder) = broker(&[spec("tasks")]);
    let link = open(&broker, "tasks", 1).await.unwrap();
    let large = Message { body: vec![0; MAX_MESSAGE].into(), ..Message::default() };
    let refused = link.publisher.publish("tasks", large.into()).await;
    assert!(matches!(refused, Ok(Published::Refused(_))));
    let fine = link.publisher.publish("tasks", text("fine").into()).await;
    assert_eq!(fine.ok(), Some(Published::Confirmed));
}

#[tokio::test]
async fn a_missing_queue_is_refused_by_name() {
    let (broker, _folder) = broker(&[spec("tasks")]);
    match open(&broker, "other", 1).await {
        Err(BrokerError::Refused { reason, .. }) => assert!(reason.contains("other"), "{reason}"),
        _ => panic!("a queue that is not there was opened"),
    }
    assert_eq!(publish(&broker, "other", text("x")).await, Published::Unroutable);
}

#[tokio::test]
async fn the_sockets_folder_is_private_and_goes_with_the_broker() {
    let (broker, folder) = broker(&[spec("tasks")]);
    let inner = folder.path().join("queue");
    let mode = std::fs::metadata(&inner).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let path = broker.path().to_owned();
    assert!(EmbeddedBroker::bind(&path, &[]).is_err(), "a folder that exists is not taken over");
    drop(broker);
    assert!(!inner.exists());
    let link = connect(&path, "tasks".into(), NonZeroU16::MIN).await;
    assert!(matches!(link, Err(BrokerError::Unreachable { .. })));
}

#[tokio::test]
async fn a_queue_named_twice_is_refused_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queue/socket");
    assert!(EmbeddedBroker::bind(&path, &[spec("a"), spec("a")]).is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn with_workers_crashing_at_random_every_task_is_still_finished() {
    let (broker, _folder) = broker(&[spec("tasks"), spec("replies")]);
    let broker = std::sync::Arc::new(broker);
    let mut workers = tokio::task::JoinSet::new();
    for worker in 0..4usize {
        let broker = broker.clone();
        workers.spawn(async move {
            // Lives of a few tasks each: a dropped link is a crash with deliveries in hand.
            for life in 1.. {
                let mut link = open(&broker, "tasks", 8).await.unwrap();
                for _ in 0..(worker + life * 7) % 23 + 1 {
                    let delivery = take(&mut link).await;
                    let reply = delivery.message.clone();
                    let published = link.publisher.publish("replies", reply.into()).await;
                    assert_eq!(published.ok(), Some(Published::Confirmed));
                    link.acker.ack(delivery.delivery_tag).await;
                }
            }
        });
    }
    let producer = broker.clone();
    let produced = tokio::spawn(async move {
        let link = open(&producer, "quiet", 1).await.unwrap();
        for n in 0..2_000 {
            let published = link.publisher.publish("tasks", text(&n.to_string()).into()).await;
            assert_eq!(published.ok(), Some(Published::Confirmed));
        }
    });
    let mut replies = open(&broker, "replies", 8).await.unwrap();
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < 2_000 {
        let reply = take(&mut replies).await;
        replies.acker.ack(reply.delivery_tag).await;
        seen.insert(reply.message.body);
    }
    produced.await.unwrap();
    workers.shutdown().await;
}
