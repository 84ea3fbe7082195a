//! Where replies go when the way is not the usual one.

use std::collections::BTreeSet;

use futures_util::StreamExt;
use lapin::options::{BasicConsumeOptions, BasicPublishOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel};
use serde_json::json;

use super::messages::busy_with;
use crate::support::client::{Client, Task};
use crate::support::rabbit::{Rabbit, Stats};
use crate::support::sconce::{Sconce, Settings};
use crate::support::wait::bounded;

const DIRECT: &str = "amq.rabbitmq.reply-to";
const IDLE: Stats = Stats { ready: 0, unacked: 0, consumers: 1 };

#[tokio::test(flavor = "multi_thread")]
async fn the_reply_to_a_deleted_queue_is_parked_and_the_worker_lives() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let gone = format!("{}.own", settings.name);
    client.declare(&gone, &[]).await;
    let task = Task::new(json!({"input": "a"})).id("late").reply_to(&gone);
    let gate = busy_with(&sconce, &client, &settings, task).await;
    client.delete(&gone).await;
    gate.open();
    let letter = client.get(&settings.dead).await;
    assert_eq!((letter.correlation_id.as_str(), letter.header("reason").as_str()), ("late", "unroutable"));
    assert_eq!((&letter.body["input"], letter.header("status").as_str()), (&json!("a"), ""), "the task");
    rabbit.stats_become(&settings.tasks, IDLE).await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_reply_queue_holds_results_back_and_loses_none() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    let client = Client::connect(&rabbit.url()).await;
    let overflow = AMQPValue::LongString("reject-publish".into());
    client
        .declare(&settings.replies, &[("x-max-length", AMQPValue::LongInt(1)), ("x-overflow", overflow)])
        .await;
    let sconce = Sconce::launched(&settings).await;
    client
        .publish_all(&settings.tasks, (0..4).map(|n| Task::new(json!({"input": n})).id(n.to_string())))
        .await;
    sconce.wait_for_log("takes no message now").await;
    let mut answered = BTreeSet::new();
    for _ in 0..4 {
        let reply = client.get(&settings.replies).await;
        assert_eq!(reply.status_code(), 200);
        answered.insert(reply.correlation_id);
    }
    assert_eq!(answered.len(), 4, "one reply each");
    client.ready_becomes(&settings.dead, 0).await;
    rabbit.stats_become(&settings.tasks, IDLE).await;
    assert_eq!(sconce.stop().await, 0);
}

#[expect(clippy::disallowed_methods, reason = "direct reply-to wants the channel that consumes")]
async fn ask(channel: &Channel, queue: &str, body: &str) -> lapin::Consumer {
    let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
    let replies = channel.basic_consume(DIRECT.into(), "".into(), options, FieldTable::default()).await;
    let properties =
        BasicProperties::default().with_reply_to(DIRECT.into()).with_correlation_id("direct".into());
    let options = BasicPublishOptions::default();
    let sent = channel.basic_publish("".into(), queue.into(), options, body.as_bytes(), properties).await;
    sent.expect("an open channel").await.expect("a sent task");
    replies.expect("a consumer")
}

#[tokio::test(flavor = "multi_thread")]
async fn direct_reply_to_works_and_a_requester_that_is_gone_harms_nobody() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = ask(&client.channel().await, &settings.tasks, r#"{"input": "a"}"#).await;
    let reply = bounded("a direct reply", replies.next()).await.expect("a reply").expect("a reply");
    assert_eq!(reply.properties.correlation_id().as_ref().map(|it| it.as_str()), Some("direct"));
    let gone = client.channel().await;
    let gate = sconce.gate();
    let body = json!({"input": "b", "hold": gate.name}).to_string();
    let unheard = ask(&gone, &settings.tasks, &body).await;
    gate.held().await;
    gone.close(200, "the requester leaves".into()).await.expect("closed");
    gate.open();
    drop(unheard);
    rabbit.stats_become(&settings.tasks, IDLE).await;
    let mut own = client.private_inbox().await;
    client.publish(&settings.tasks, Task::new(json!({"input": "c"})).reply_to(&own.queue)).await;
    assert_eq!(own.next().await.body["input"], "c");
    assert_eq!(sconce.logged("lost the broker"), 0, "{}", sconce.log());
    assert_eq!(sconce.stop().await, 0);
}
