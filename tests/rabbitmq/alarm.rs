//! A broker that is out of memory takes no replies for a while.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;

use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};
use crate::support::wait::{bounded, until};

/// Publishes tasks of 100 ms, always some ahead of the worker, until told that it is enough; gives
/// how many. A producer too stands still while the broker takes no messages.
async fn produce(client: Client, queue: String, enough: Arc<AtomicBool>) -> usize {
    let mut count = 0;
    while !enough.load(Ordering::Relaxed) {
        until("few tasks are waiting", || async { client.look(&queue).await.filter(|it| it.0 < 10) }).await;
        let task = Task::new(json!({"input": count, "sleep_ms": 100})).id(count.to_string());
        client.publish(&queue, task).await;
        count += 1;
    }
    count
}

#[tokio::test(flavor = "multi_thread")]
async fn during_a_memory_alarm_nothing_is_acked_without_its_reply_and_after_it_all_is_answered() {
    let rabbit = Rabbit::private();
    // Alarm longer than the heartbeat and the wait for a confirm: neither may take the block for a
    // dead connection.
    let settings = Settings::echo(rabbit.url())
        .set("broker.heartbeat", "1s")
        .set("broker.confirm_timeout", "1s")
        .set("pool[0].batch.max_requests", 1)
        .set("pool[0].prefetch", 4);
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let enough = Arc::new(AtomicBool::new(false));
    let producer = Client::connect(&rabbit.url()).await;
    let producing = tokio::spawn(produce(producer, settings.tasks.clone(), enough.clone()));
    until("some replies", || async { client.look(&settings.replies).await.filter(|(ready, _)| *ready > 2) })
        .await;
    rabbit.ctl(&["set_vm_memory_high_watermark", "0.0000001"]);
    sconce.wait_for_log("takes no messages for now").await;
    enough.store(true, Ordering::Relaxed);
    // The block itself is what lasts here: there is no event to wait for.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let answered = client.look(&settings.replies).await.expect("the reply queue").0 as u64;
    let held = rabbit.stats(&settings.tasks).expect("the task queue");
    assert_eq!(sconce.logged("no confirm"), 0, "{}", sconce.log());
    assert_eq!(sconce.logged("lost the broker"), 0, "{}", sconce.log());
    rabbit.ctl(&["set_vm_memory_high_watermark", "0.4"]);
    let tasks = bounded("the producer ends", producing).await.expect("its count");
    // The last one may have come to the broker after the alarm.
    let before = tasks as u64 - 1;
    assert!(held.ready + held.unacked + answered >= before, "acked without a reply: {held:?} {answered}");
    assert!(answered < before, "the alarm came too late to test anything");
    let mut replies = client.inbox(&settings.replies).await;
    let ids: BTreeSet<_> = replies.take(tasks).await.into_iter().map(|it| it.correlation_id).collect();
    assert_eq!(ids.len(), tasks, "a reply came twice though no connection was lost");
    client.ready_becomes(&settings.tasks, 0).await;
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&settings.tasks, 0).await;
}
