//! Queues that others made, and queues that vanish.

use lapin::types::AMQPValue;
use serde_json::json;

use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

async fn answers(client: &Client, settings: &Settings, input: &str) {
    let mut replies = client.private_inbox().await;
    client.publish(&settings.tasks, Task::new(json!({"input": input})).reply_to(&replies.queue)).await;
    assert_eq!(replies.next().await.body["input"], json!(input));
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_made_before_with_other_arguments_are_used_as_they_are() {
    let rabbit = Rabbit::shared();
    let client = Client::connect(&rabbit.url()).await;
    for declare in [true, false] {
        let settings = Settings::echo(rabbit.url()).set("broker.declare", declare);
        let length = ("x-max-length", AMQPValue::LongInt(1000));
        for queue in [&settings.tasks, &settings.replies, &settings.dead] {
            client.declare(queue, &[("x-max-priority", AMQPValue::LongInt(5)), length.clone()]).await;
        }
        let sconce = Sconce::launched(&settings).await;
        answers(&client, &settings, "a").await;
        assert_eq!(sconce.stop().await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_task_queue_is_made_again_and_consumed_by_each_worker_once() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    answers(&client, &settings, "before").await;
    client.delete(&settings.tasks).await;
    sconce.wait_for_log("lost the broker").await;
    client.consumers_become(&settings.tasks, 1).await;
    answers(&client, &settings, "after").await;
    client.consumers_become(&settings.tasks, 1).await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nothing_is_declared_a_task_queue_made_again_is_consumed_again() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("broker.declare", false);
    let client = Client::connect(&rabbit.url()).await;
    let make = async || {
        for queue in [&settings.tasks, &settings.dead] {
            client.declare(queue, &[]).await;
        }
    };
    let sconce = Sconce::launch(&settings);
    sconce.wait_for_log("no queue").await;
    make().await;
    sconce.consumes(1).await;
    answers(&client, &settings, "before").await;
    client.delete(&settings.tasks).await;
    sconce.wait_for_log("lost the broker").await;
    make().await;
    client.consumers_become(&settings.tasks, 1).await;
    answers(&client, &settings, "after").await;
    assert_eq!(sconce.stop().await, 0);
}
