//! The broker's patience with unacked deliveries: a worker that will use it up says so before.

use serde_json::json;

use super::messages::serve;
use crate::support::client::{Client, Task};
use crate::support::rabbit::{Conf, Rabbit};
use crate::support::sconce::{Sconce, Settings};

#[tokio::test(flavor = "multi_thread")]
async fn a_prefetch_that_outlasts_half_of_the_brokers_timeout_is_warned_of_once_and_in_time() {
    let rabbit = Rabbit::private_with(Conf::default().line("consumer_timeout", 16_000));
    let settings = Settings::echo(rabbit.url())
        .set("broker.consumer_timeout", "16s")
        .set("pool[0].prefetch", 8)
        .set("pool[0].batch.max_requests", 1);
    // This broker does not know the argument that asks for the timeout, and takes it.
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut inbox = client.inbox(&settings.replies).await;
    let slow = (0..10).map(|n| Task::new(json!({"input": n, "sleep_ms": 1_000})));
    client.publish_all(&settings.tasks, slow).await;
    sconce.wait_for_log("consumer timeout: lower pool.prefetch").await;
    let warning = sconce.log().lines().find(|line| line.contains("consumer timeout")).map(str::to_owned);
    let warning = warning.unwrap_or_default();
    for words in
        ["prefetch 8 × ", " s a task + ", " s a pass = ", "of the broker's 16.0 s", "broker.consumer_timeout"]
    {
        assert!(warning.contains(words), "{words}: {warning}");
    }
    inbox.take(10).await;
    assert_eq!(sconce.logged("consumer timeout"), 1, "{}", sconce.log());
    assert_eq!(sconce.logged("lost the broker"), 0, "the warning came before the broker's limit");
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_in_hand_for_half_of_the_brokers_timeout_is_warned_of_while_it_is_computed() {
    let settings = Settings::echo(Rabbit::shared().url()).set("broker.consumer_timeout", "10s");
    let (sconce, client, mut inbox) = serve(&settings).await;
    client.publish(&settings.tasks, Task::new(json!({"input": 1}))).await;
    inbox.next().await;
    assert_eq!(sconce.logged("consumer timeout"), 0, "a quick task is no reason");
    client.publish(&settings.tasks, Task::new(json!({"input": 2, "sleep_ms": 20_000}))).await;
    sconce.wait_for_log("a task has been in hand for ").await;
    assert_eq!(sconce.logged("of the broker's 10.0 s consumer timeout"), 1);
}
