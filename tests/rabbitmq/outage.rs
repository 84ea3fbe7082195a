//! A broker that goes away and comes back. One that is not there yet is in `sentinels`, and one that never comes in
//! `tests/offline/without_broker.rs`.

use std::collections::BTreeSet;

use serde_json::json;

use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};
use crate::support::wait::until;

#[tokio::test(flavor = "multi_thread")]
async fn once_a_killed_broker_is_back_queued_tasks_are_answered_not_acked_ones() {
    const TASKS: usize = 30;
    let rabbit = Rabbit::private();
    let settings =
        Settings::echo(rabbit.url()).set("pool[0].batch.max_requests", 1).set("pool[0].prefetch", 2);
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let tasks = (0..TASKS).map(|n| Task::new(json!({"input": n, "sleep_ms": 100})).id(n.to_string()));
    client.publish_all(&settings.tasks, tasks).await;
    until("some replies", || async { client.look(&settings.replies).await.filter(|(ready, _)| *ready >= 5) })
        .await;
    // RabbitMQ 3.10 writes the names of its quorum queues to disk within three minutes, and forgets a
    // queue with all it holds when it is killed before. This queue is to be an older one.
    rabbit.eval("[dets:sync(Table) || Table <- dets:all()].");
    tokio::task::block_in_place(|| {
        rabbit.kill();
        rabbit.start();
    });
    sconce.wait_for_log("lost the broker").await;
    sconce.consumes(2).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let mut answered = BTreeSet::new();
    let mut came = 0;
    while answered.len() < TASKS {
        answered.insert(replies.next().await.correlation_id);
        came += 1;
    }
    client.ready_becomes(&settings.tasks, 0).await;
    // Twice only what the worker held when the broker died: acked tasks did not come again.
    assert!(came <= TASKS + 2, "{came} replies");
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&settings.tasks, 0).await;
}
