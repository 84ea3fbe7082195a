//! Tasks that fail and may pass at another time: how often they are tried, where they wait, and what
//! does not count as a try.

use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::{busy_with, serve};
use crate::support::client::Task;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings, signal};

fn settings() -> Settings {
    Settings::echo(Rabbit::shared().url()).set("launcher.restart_delay", "50ms")
}

fn failing(kind: &str) -> Task {
    Task::new(json!({"input": "a", "fail": kind})).id(kind)
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
