//! The way of a task through a real broker when nothing goes wrong.

use std::sync::Arc;

use futures_util::future::join_all;
use sconce::broker::amqp::AmqpPublisher;
use sconce::broker::{Published, Publisher as _};
use sconce::protocol::{Message, Properties};
use serde_json::json;

use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

#[tokio::test(flavor = "multi_thread")]
async fn a_task_is_answered_in_the_queue_it_names_and_else_in_the_pools() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut own = client.private_inbox().await;
    let mut pools = client.inbox(&settings.replies).await;
    client.publish(&settings.tasks, Task::new(json!({"input": "a"})).id("1").reply_to(&own.queue)).await;
    client.publish(&settings.tasks, Task::new(json!({"input": "b"})).id("2")).await;
    let (first, second) = (own.next().await, pools.next().await);
    assert_eq!((first.correlation_id.as_str(), second.correlation_id.as_str()), ("1", "2"));
    assert_eq!((first.body["input"].as_str(), first.status_code()), (Some("a"), 200));
    assert_eq!((first.header("status").as_str(), first.kind.as_str()), ("succeeded", "reply"));
    assert_eq!(sconce.workers().len(), 1);
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&settings.tasks, 0).await;
}

/// More of them, and of their bytes, than a publisher sends ahead. On one thread: on several, room that
/// comes about while the last of them ask for it goes to those, before the ones that wait.
#[tokio::test]
async fn what_is_published_arrives_in_its_order() {
    const COUNT: usize = 1_200;
    let rabbit = Rabbit::shared();
    let client = Client::connect(&rabbit.url()).await;
    let mut inbox = client.private_inbox().await;
    let publisher = AmqpPublisher::new(crate::amqp_rig::connector(rabbit.url()));
    let message = |n: usize| {
        let properties = Properties { correlation_id: Some(n.to_string()), ..Properties::default() };
        Arc::new(Message { properties, body: format!("{:4096}", "{}").into() })
    };
    let publishes = join_all((0..COUNT).map(|n| publisher.publish(&inbox.queue, message(n))));
    // Or tokio would make some of them wait, and let others pass them.
    let published = tokio::task::unconstrained(publishes).await;
    assert!(published.into_iter().all(|it| it.ok() == Some(Published::Confirmed)));
    let arrived = inbox.take(COUNT).await.into_iter().map(|it| it.correlation_id);
    let misplaced = arrived.enumerate().find(|(place, id)| place.to_string() != *id);
    assert_eq!(misplaced, None, "(place, message)");
}

/// Has `sconce` answer one task, and stops it.
pub async fn answers(sconce: Sconce, rabbit: &Rabbit, settings: &Settings) {
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    client.publish(&settings.tasks, Task::new(json!({"input": "a"}))).await;
    assert_eq!(replies.next().await.status_code(), 200);
    assert_eq!(sconce.stop().await, 0);
}
