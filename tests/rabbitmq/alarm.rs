//! A broker that is out of memory takes no replies for a while.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;

use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};
use crate::support::wait::until;

const TASKS: usize = 40;

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
    let tasks = (0..TASKS).map(|n| Task::new(json!({"input": n, "sleep_ms": 100})).id(n.to_string()));
    client.publish_all(&settings.tasks, tasks).await;
    until("some replies", || async { client.look(&settings.replies).await.filter(|(ready, _)| *ready > 2) })
        .await;
    rabbit.ctl(&["set_vm_memory_high_watermark", "0.0000001"]);
    sconce.wait_for_log("takes no messages for now").await;
    // The block itself is what lasts here: there is no event to wait for.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let answered = client.look(&settings.replies).await.expect("the reply queue").0 as u64;
    let held = rabbit.stats(&settings.tasks).expect("the task queue");
    assert!(
        held.ready + held.unacked + answered >= TASKS as u64,
        "acked without a reply: {held:?} {answered}"
    );
    assert!((answered as usize) < TASKS, "the alarm came too late to test anything");
    assert_eq!(sconce.logged("no confirm"), 0, "{}", sconce.log());
    assert_eq!(sconce.logged("lost the broker"), 0, "{}", sconce.log());
    rabbit.ctl(&["set_vm_memory_high_watermark", "0.4"]);
    let mut replies = client.inbox(&settings.replies).await;
    let ids: BTreeSet<_> = replies.take(TASKS).await.into_iter().map(|it| it.correlation_id).collect();
    assert_eq!(ids.len(), TASKS, "a reply came twice though no connection was lost");
    client.ready_becomes(&settings.tasks, 0).await;
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&settings.tasks, 0).await;
}
