//! Pools with several queues: their channels, their retry queues and dead letters, settings of before beside new ones,
//! and how workers are stopped.

use std::collections::BTreeSet;

use serde_json::json;

use super::admin::metric_becomes;
use super::messages::busy_with;
use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

fn echo(id: impl Into<String>) -> Task {
    Task::new(json!({"input": "a"})).id(id)
}

/// A task whose first attempt fails.
fn failing_once(id: impl Into<String>) -> Task {
    Task::new(json!({"input": "a", "fail": "once"})).id(id)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_queue_has_a_channel_on_one_connection_and_loses_it_alone() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).with_queue("b", "share = 2.5");
    let second = format!("{}.b", settings.tasks);
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let channels =
        || [&settings.tasks, &second].map(|queue| rabbit.only_consumer(queue).expect("a consumer").0);
    let before = channels();
    assert_ne!(before[0], before[1]);
    assert_eq!(rabbit.connection_of(&before[0]), rabbit.connection_of(&before[1]));
    for queue in [&settings.tasks, &second] {
        client.publish(queue, echo(queue.as_str())).await;
        assert_eq!(replies.next().await.correlation_id, *queue);
    }
    client.delete(&second).await;
    sconce.wait_for_log("lost the broker").await;
    client.wait_for_queue(&second).await;
    client.consumers_become(&second, 1).await;
    assert_eq!(channels()[0], before[0], "the other queue's channel goes on");
    client.publish(&second, echo("again")).await;
    assert_eq!(replies.next().await.correlation_id, "again");
    assert_eq!(sconce.logged("lost the broker"), 1, "{}", sconce.log());
    assert_eq!(sconce.stop().await, 0);
    client.becomes(&settings.tasks, (0, 0)).await;
    client.becomes(&second, (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_task_of_an_existing_background_queue_is_dead_lettered_at_its_delivery_limit() {
    const LIMIT: usize = 3;
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url())
        .set("broker.delivery_limit", LIMIT)
        .set("pool[0].retry.delay", "4s")
        .set("pool[0].retry.max_attempts", 2);
    let queue = format!("{}.b", settings.tasks);
    // The settings of before make the queue, with the task queue's dead-letter exchange.
    let before = Sconce::launch(&settings.clone().set("pool[0].background_queue", &queue));
    before.consumes(2).await;
    assert_eq!(before.stop().await, 0);
    let sconce = Sconce::launch(&settings.clone().with_queue("b", "background = true"));
    sconce.consumes(2).await;
    let client = Client::connect(&rabbit.url()).await;
    client.publish(&queue, failing_once("retried")).await;
    client.ready_becomes(&format!("{queue}.retry-4000ms"), 1).await;
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&queue, 1).await;
    for _ in 0..=LIMIT {
        client.return_one(&queue).await;
    }
    client.ready_becomes(&settings.dead, 1).await;
    assert_eq!(client.get(&settings.dead).await.correlation_id, "retried");
    assert_eq!(client.look(&queue).await, Some((0, 0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nothing_is_declared_several_queues_are_consumed_and_what_cannot_return_is_dead_lettered() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("broker.declare", false).with_queue("b", "");
    let second = format!("{}.b", settings.tasks);
    let client = Client::connect(&rabbit.url()).await;
    for queue in [&settings.tasks, &second, &settings.dead] {
        client.declare(queue, &[]).await;
    }
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let mut replies = client.private_inbox().await;
    for queue in [&settings.tasks, &second] {
        client.publish(queue, echo(queue.as_str()).reply_to(&replies.queue)).await;
        assert_eq!(replies.next().await.correlation_id, *queue);
    }
    client.publish(&second, failing_once("bad").reply_to(&replies.queue)).await;
    assert_eq!(replies.next().await.status_code(), 500);
    let letter = client.get(&settings.dead).await;
    assert_eq!((letter.correlation_id.as_str(), letter.header("queue")), ("bad", second.clone()));
    // The header leads it back where it came from.
    let mut failed = Sconce::run(&settings, &["dead", "list"]);
    assert_eq!(failed.exit_code().await, 0, "{}", failed.log());
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_of_a_further_queue_is_requeued_there() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).with_queue("b", "");
    let second = format!("{}.b", settings.tasks);
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let client = Client::connect(&rabbit.url()).await;
    client.publish(&second, Task::raw("no JSON").id("bad")).await;
    client.ready_becomes(&settings.dead, 1).await;
    assert_eq!(sconce.stop().await, 0);
    let mut requeue = Sconce::run(&settings, &["dead", "requeue", "--all"]);
    assert_eq!(requeue.exit_code().await, 0, "{}", requeue.log());
    assert_eq!(client.look(&second).await, Some((1, 0)));
    assert_eq!(client.look(&settings.tasks).await, Some((0, 0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_update_in_both_directions_loses_no_task_that_waits_in_a_retry_queue() {
    const TASKS: usize = 12;
    let rabbit = Rabbit::shared();
    let base = Settings::echo(rabbit.url()).set("pool[0].retry.delay", "6s");
    let [background, third] = ["b", "c"].map(|end| format!("{}.{end}", base.tasks));
    let old = base.clone().set("pool[0].background_queue", &background);
    let new = base.clone().with_queue("b", "background = true").with_queue("c", "");
    // Forward: the old worker puts tasks of both its queues into retry queues, and is replaced meanwhile.
    let before = Sconce::launch(&old);
    before.consumes(2).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&base.replies).await;
    let publish = async |queue: &str, round: &str| {
        let tasks = (0..TASKS).map(|number| failing_once(format!("{round} {queue} {number}")));
        client.publish_all(queue, tasks).await;
    };
    let mut answered = BTreeSet::new();
    let mut are_answered = async |count: usize| {
        for reply in replies.take(count).await {
            assert_eq!((reply.status_code(), reply.header("attempt").as_str()), (200, "2"), "{reply:?}");
            assert!(answered.insert(reply.correlation_id.clone()), "{} twice", reply.correlation_id);
        }
    };

    publish(&base.tasks, "forward").await;
    publish(&background, "forward").await;
    let retry = format!("{}.retry-6000ms", base.tasks);
    client.ready_becomes(&retry, 2 * TASKS as u32).await;
    let after = Sconce::launch(&new);
    after.consumes(3).await;
    assert_eq!(before.stop().await, 0);
    are_answered(2 * TASKS).await;

    // Backward: the new worker's tasks wait in retry queues of all three queues. The old one takes what returns to its
    // queues; the third queue keeps its tasks.
    for queue in [&base.tasks, &background, &third] {
        publish(queue, "backward").await;
    }
    for queue in [&base.tasks, &background, &third] {
        client.ready_becomes(&format!("{queue}.retry-6000ms"), TASKS as u32).await;
    }
    assert_eq!(after.stop().await, 0);
    let before = Sconce::launch(&old);
    before.consumes(2).await;
    are_answered(2 * TASKS).await;
    client.ready_becomes(&third, TASKS as u32).await;

    // Side by side, and forward again.
    let after = Sconce::launch(&new);
    after.consumes(3).await;
    are_answered(TASKS).await;
    publish(&base.tasks, "beside").await;
    publish(&background, "beside").await;
    are_answered(2 * TASKS).await;
    assert_eq!((before.stop().await, after.stop().await), (0, 0));
    assert_eq!(client.look(&base.dead).await, Some((0, 0)), "no dead letter");
    for queue in [&base.tasks, &background, &third] {
        client.becomes(queue, (0, 0)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_all_workers_is_refused_while_another_queue_has_messages_and_one_sentinel_ends_all_consuming()
 {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url())
        .set("pool[0].prefetch", 2)
        .set("pool[0].batch.max_requests", 1)
        .with_queue("b", "");
    let second = format!("{}.b", settings.tasks);
    let mut sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let gate = busy_with(&sconce, &client, &settings, echo("held")).await;
    // Two are delivered and wait for the device, and two wait in the queue.
    client.publish_all(&second, (0..4).map(|number| echo(number.to_string()))).await;
    client.ready_becomes(&second, 2).await;
    let mut refused = Sconce::run(&settings, &["stop", "--all"]);
    assert_eq!(refused.exit_code().await, 1, "{}", refused.log());
    assert!(refused.log().contains(&format!("2 in {second}")), "{}", refused.log());
    assert!(refused.log().contains("--now"), "{}", refused.log());
    let mut unknown = Sconce::run(&settings, &["stop", "--queue", "nobody's"]);
    assert_eq!(unknown.exit_code().await, 64, "{}", unknown.log());
    let mut stop = Sconce::run(&settings, &["stop", "--all", "--now"]);
    assert_eq!(stop.exit_code().await, 0, "{}", stop.log());
    assert!(stop.log().contains("asked 1 worker"), "a worker counts once: {}", stop.log());
    sconce.wait_for_log("sentinel received").await;
    gate.open();
    assert_eq!(sconce.exit_code().await, 0);
    let answered: BTreeSet<_> = replies.take(3).await.into_iter().map(|it| it.correlation_id).collect();
    let accepted = BTreeSet::from(["held", "0", "1"].map(str::to_owned));
    assert_eq!(answered, accepted, "what was accepted before it");
    client.becomes(&second, (2, 0)).await;
    client.becomes(&settings.tasks, (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_publish_to_the_queue_that_they_name_and_metrics_count_by_queue() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).with_queue("b", "");
    let second = format!("{}.b", settings.tasks);
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let slot = format!(r#"pool="{0}",slot="{0}/0""#, settings.name);
    let mut publish = Sconce::run(&settings, &["publish", "hello", "--queue", &second, "--wait"]);
    assert_eq!(publish.exit_code().await, 0, "{}", publish.log());
    let admin = sconce.admin().await;
    for (queue, count) in [(&settings.tasks, 0.0), (&second, 1.0)] {
        let name = format!(r#"sconce_queue_tasks_total{{{slot},queue="{queue}"}}"#);
        metric_becomes(&admin, &name, count).await;
    }
    let dead_letters = format!("sconce_queue_messages{{queue={:?},kind=\"dead_letter\"}}", settings.dead);
    metric_becomes(&admin, &dead_letters, 0.0).await;
    assert_eq!(sconce.stop().await, 0);
}
