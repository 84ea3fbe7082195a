//! Queues that others made, and queues that vanish.

use lapin::types::AMQPValue;
use serde_json::json;

use super::messages::serve;
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

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_as_the_task_queue_is_refused_at_the_start_or_at_its_first_delivery() {
    let stream = ("x-queue-type", AMQPValue::LongString("stream".into()));
    let age = ("x-max-age", AMQPValue::LongString("1h".into()));
    let bytes = ("x-max-length-bytes", AMQPValue::LongLongInt(1_000_000));
    let url = Rabbit::shared().url();
    let client = Client::connect(&url).await;
    // The last one's arguments do not tell a stream from other queues, and the one before may not be declared.
    for (arguments, declare) in [
        (vec![stream.clone()], true),
        (vec![stream.clone(), age], true),
        (vec![stream.clone()], false),
        (vec![stream, bytes], true),
    ] {
        let mut settings = Settings::echo(url.clone());
        if !declare {
            crate::amqp_rig::declare_queues(&settings, 20).await;
            client.delete(&settings.tasks).await;
            settings = settings.set("broker.declare", false);
        }
        client.declare(&settings.tasks, &arguments).await;
        let mut sconce = Sconce::launch(&settings);
        if !declare || arguments.len() == 2 && arguments[1].0 == "x-max-length-bytes" {
            sconce.consumes(1).await;
            client.publish(&settings.tasks, Task::new(json!({"input": "a"}))).await;
        }
        assert_eq!(sconce.exit_code().await, 78, "{arguments:?}: {}", sconce.log());
        assert!(sconce.log().contains("is a stream, from which nothing is taken away"), "{}", sconce.log());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_claims_to_be_from_a_stream_is_answered_like_any_other() {
    let settings = Settings::echo(Rabbit::shared().url());
    let (_sconce, client, mut inbox) = serve(&settings).await;
    for n in 0..3 {
        let claims = Task::new(json!({"input": n})).id(n.to_string()).header("x-stream-offset", "7");
        client.publish(&settings.tasks, claims).await;
        assert_eq!(inbox.next().await.status_code(), 200);
    }
}
