//! Tasks that fail and may pass at another time: how often they are tried, where they wait, and what
//! does not count as a try.

use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::{busy_with, serve};
use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings, signal};

fn settings() -> Settings {
    Settings::echo(Rabbit::shared().url()).set("launcher.restart_delay", "50ms")
}

fn failing(kind: &str) -> Task {
    Task::new(json!({"input": "a", "fail": kind})).id(kind)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_once_is_tried_again_and_answered() {
    let settings = settings().set("pool[0].retry.delay", "100ms");
    let (sconce, client, mut inbox) = serve(&settings).await;
    client.publish(&settings.tasks, failing("once")).await;
    let reply = inbox.next().await;
    assert_eq!((reply.status_code(), reply.header("attempt").as_str()), (200, "2"));
    assert_eq!(sconce.logged("it is tried again"), 1);
    assert_eq!(sconce.stop().await, 0);
    assert_eq!(client.look(&settings.dead).await, Some((0, 0)));
    client.ready_becomes(&settings.tasks, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_always_fails_is_answered_and_dead_lettered_after_its_last_attempt() {
    let settings = settings().set("pool[0].retry.delay", "50ms").set("pool[0].retry.max_attempts", 4);
    let (sconce, client, mut inbox) = serve(&settings).await;
    let task = failing("error").header("own", "kept").with(|it| it.with_message_id("m".into()));
    client.publish(&settings.tasks, task).await;
    let reply = inbox.next().await;
    assert_eq!((reply.status_code(), reply.header("attempt").as_str()), (500, "4"));
    assert_eq!(sconce.logged("it is tried again"), 3);
    let letter = client.get(&settings.dead).await;
    assert_eq!((letter.header("reason").as_str(), letter.header("task_id").as_str()), ("attempts", "m"));
    assert_eq!((letter.header("own").as_str(), letter.header("sconce_attempt").as_str()), ("kept", ""));
    assert_eq!(letter.body, json!({"input": "a", "fail": "error"}));
    // Put back by hand, it begins anew.
    client.publish(&settings.tasks, Task { body: letter.raw, properties: letter.properties }).await;
    assert_eq!(inbox.next().await.header("attempt"), "4");
    assert_eq!(sconce.logged("it is tried again"), 6);
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_for_a_retry_blocks_no_other_and_outlives_its_worker() {
    let settings = settings().set("pool[0].retry.delay", "3s").set("pool[0].prefetch", 1);
    let (sconce, client, mut inbox) = serve(&settings).await;
    let tasks = [failing("once"), Task::new(json!({"input": "b"})).id("b")];
    client.publish_all(&settings.tasks, tasks).await;
    assert_eq!(inbox.next().await.correlation_id, "b");
    assert_eq!(sconce.stop().await, 0);
    let _second = Sconce::launched(&settings).await;
    let reply = inbox.next().await;
    assert_eq!((reply.correlation_id.as_str(), reply.status_code()), ("once", 200));
    assert_eq!(reply.header("attempt"), "2");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_time_is_over_by_then_is_answered_at_once_with_its_error() {
    let settings = settings().set("pool[0].retry.delay", "30s");
    let (_sconce, client, mut inbox) = serve(&settings).await;
    client.publish(&settings.tasks, failing("error").with(|it| it.with_expiration("10000".into()))).await;
    let reply = inbox.next().await;
    assert_eq!((reply.status_code(), reply.header("attempt").as_str()), (500, "1"));
    assert_eq!(client.look(&settings.dead).await, Some((0, 0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_holds_over_attempts() {
    let settings = settings().set("pool[0].retry.delay", "1s").set("pool[0].retry.max_attempts", 9);
    let (_sconce, client, mut inbox) = serve(&settings).await;
    client.publish(&settings.tasks, failing("error").with(|it| it.with_expiration("2000".into()))).await;
    let reply = inbox.next().await;
    let attempt = reply.headers["attempt"].as_i64().expect("a number");
    assert!(attempt < 9 && [408, 500].contains(&reply.status_code()), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nothing_was_declared_to_wait_in_the_first_attempt_is_the_last() {
    let settings = settings();
    let client = Client::connect(&Rabbit::shared().url()).await;
    for queue in [&settings.tasks, &settings.replies, &settings.dead] {
        client.declare(queue, &[]).await;
    }
    let settings = settings.set("broker.declare", false);
    let (_sconce, client, mut inbox) = serve(&settings).await;
    client.publish(&settings.tasks, failing("once")).await;
    let reply = inbox.next().await;
    assert_eq!((reply.status_code(), reply.header("attempt").as_str()), (500, "1"));
    assert!(reply.body["error"]["message"].as_str().is_some_and(|it| it.contains("no queue to wait in")));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_drain_hands_back_has_used_no_attempt() {
    let settings = settings();
    let (mut sconce, client, mut inbox) = serve(&settings).await;
    let gate = busy_with(&sconce, &client, &settings, Task::new(json!({"input": 0})).id("0")).await;
    client.publish(&settings.tasks, Task::new(json!({"input": 1})).id("1")).await;
    client.ready_becomes(&settings.tasks, 0).await;
    sconce.signal(Signal::SIGTERM);
    client.ready_becomes(&settings.tasks, 1).await;
    gate.open();
    assert_eq!(sconce.exit_code().await, 0);
    assert_eq!(inbox.next().await.correlation_id, "0");
    client.ready_becomes(&settings.tasks, 1).await;
    let _second = Sconce::launched(&settings).await;
    let reply = inbox.next().await;
    assert_eq!((reply.correlation_id.as_str(), reply.header("attempt").as_str()), ("1", "1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_in_the_forward_pass_uses_an_attempt_of_only_the_tasks_in_it() {
    let settings = settings().set("pool[0].batch.max_requests", 1).set("pool[0].prefetch", 2);
    let (sconce, client, mut inbox) = serve(&settings).await;
    let gate = busy_with(&sconce, &client, &settings, Task::new(json!({"input": 0})).id("0")).await;
    client.publish(&settings.tasks, Task::new(json!({"input": 1})).id("1")).await;
    client.ready_becomes(&settings.tasks, 0).await;
    signal(sconce.workers()[0], Signal::SIGKILL);
    gate.open();
    for _ in 0..2 {
        let reply = inbox.next().await;
        let attempt = if reply.correlation_id == "0" { "2" } else { "1" };
        assert_eq!(reply.header("attempt"), attempt, "{}", reply.correlation_id);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_tried_again_that_dies_of_the_delivery_limit_is_dead_lettered() {
    let settings = settings().set("pool[0].retry.delay", "1s").set("broker.delivery_limit", 1);
    let (sconce, client, _inbox) = serve(&settings).await;
    client.publish(&settings.tasks, failing("once")).await;
    sconce.wait_for_log("it is tried again").await;
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&settings.tasks, 1).await;
    for _ in 0..2 {
        client.return_one(&settings.tasks).await;
    }
    let letter = client.get(&settings.dead).await;
    assert_eq!(letter.correlation_id, "once");
}
