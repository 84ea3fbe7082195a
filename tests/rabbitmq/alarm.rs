//! A broker that is out of memory takes no replies for a while.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;

use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};
use crate::support::wait::{bounded, until, until_within};

/// Longer than any alarm here, with all that is done while it lasts.
const ALARM: Duration = Duration::from_secs(300);

const PREFETCH: u64 = 4;

/// Publishes tasks of 300 ms, always some ahead of the worker, until told that it is enough. A
/// producer too stands still while the broker takes no messages: `count` is of those it has taken.
async fn produce(client: Client, queue: String, enough: Arc<AtomicBool>, count: Arc<AtomicU64>) {
    while !enough.load(Ordering::Relaxed) {
        let few = || async { client.look(&queue).await.filter(|it| it.0 < 10) };
        until_within(ALARM, "few tasks are waiting", few).await;
        let number = count.load(Ordering::Relaxed);
        let task = Task::new(json!({"input": number, "sleep_ms": 300})).id(number.to_string());
        client.publish(&queue, task).await;
        count.store(number + 1, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn under_a_memory_alarm_no_unanswered_task_is_acked_and_none_is_lost() {
    let rabbit = Rabbit::private();
    // Alarm longer than two heartbeats and the wait for a confirm: neither may take the block for a
    // dead connection.
    let settings = Settings::echo(rabbit.url())
        .set("broker.heartbeat", "2s")
        .set("broker.confirm_timeout", "5s")
        .set("pool[0].batch.max_requests", 1)
        .set("pool[0].prefetch", PREFETCH);
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let (enough, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let producer = Client::connect(&rabbit.url()).await;
    let producing = tokio::spawn(produce(producer, settings.tasks.clone(), enough.clone(), count.clone()));
    until("some replies", || async { client.look(&settings.replies).await.filter(|(ready, _)| *ready > 2) })
        .await;
    rabbit.set_memory_watermark(0.000_000_1);
    sconce.wait_for_log("takes no messages for now").await;
    enough.store(true, Ordering::Relaxed);
    // The block itself is what lasts here: there is no event to wait for.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let answered = client.look(&settings.replies).await.expect("the reply queue").0 as u64;
    let taken = count.load(Ordering::Relaxed);
    // While tasks are ready, the worker holds all that it may.
    let ready = client.look(&settings.tasks).await.expect("the task queue").0 as u64;
    assert!(ready > 0, "nothing waits: {answered} of {taken} are answered");
    assert!(
        ready + PREFETCH + answered >= taken,
        "acked without a reply: {ready} ready, {answered} of {taken}"
    );
    assert_eq!(sconce.logged("no confirm"), 0, "{}", sconce.log());
    assert_eq!(sconce.logged("lost the broker"), 0, "{}", sconce.log());
    rabbit.set_memory_watermark(0.4);
    bounded("the producer ends", producing).await.expect("no panic");
    let tasks = count.load(Ordering::Relaxed) as usize;
    let mut replies = client.inbox(&settings.replies).await;
    let ids: BTreeSet<_> = replies.take(tasks).await.into_iter().map(|it| it.correlation_id).collect();
    assert_eq!(ids.len(), tasks, "a reply came twice though no connection was lost");
    client.ready_becomes(&settings.tasks, 0).await;
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&settings.tasks, 0).await;
}
