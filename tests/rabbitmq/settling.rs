//! Workers killed between the steps of settling: what is answered may be answered twice, what is
//! not is never lost, and what is acked does not come again.

use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::busy_with;
use crate::support::client::{Client, Task};
use crate::support::proxy::Proxy;
use crate::support::rabbit::{Rabbit, Stats};
use crate::support::sconce::{Sconce, Settings, signal};

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_killed_between_confirm_and_ack_leaves_two_replies_never_none() {
    let rabbit = Rabbit::shared();
    let proxy = Proxy::before(rabbit.address()).await;
    let settings = Settings::echo(proxy.url());
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    // Acks go over the first connection; replies over a second one, which is made for the first
    // reply. So the reply comes, and its ack does not.
    assert_eq!(proxy.open(), 1);
    proxy.hold(0..1);
    client.publish(&settings.tasks, Task::new(json!({"input": "a"})).id("twice")).await;
    let first = replies.next().await;
    signal(sconce.workers()[0], Signal::SIGKILL);
    proxy.cut();
    let second = replies.next().await;
    for reply in [&first, &second] {
        assert_eq!((reply.correlation_id.as_str(), reply.status_code()), ("twice", 200));
    }
    assert_eq!(first.header("attempt"), "1");
    client.ready_becomes(&settings.tasks, 0).await;
    assert_eq!(sconce.stop().await, 0);
    client.becomes(&settings.tasks, (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_tasks_settled_out_of_order_only_the_unfinished_return_after_a_kill() {
    let rabbit = Rabbit::shared();
    let settings =
        Settings::echo(rabbit.url()).set("pool[0].prefetch", 10).set("pool[0].batch.max_requests", 1);
    let worker = Sconce::run(&settings, &["worker"]);
    worker.consumes(1).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let busy = Task::new(json!({"input": 0})).id("0");
    busy_with(&worker, &client, &settings, busy).await;
    // Refused as they are read, while those before and between them wait for the device.
    let task = |n: usize| match n % 2 {
        0 => Task::new(json!({"input": n})).id(n.to_string()),
        _ => Task::new(json!({"input": n, "sleep_ms": "long"})).id(n.to_string()),
    };
    client.publish_all(&settings.tasks, (1..7).map(task)).await;
    let mut refused: Vec<_> = replies.take(3).await.into_iter().map(|it| it.correlation_id).collect();
    refused.sort();
    assert_eq!(refused, ["1", "3", "5"]);
    rabbit.stats_become(&settings.tasks, Stats { ready: 0, unacked: 4, consumers: 1 }).await;
    worker.signal(Signal::SIGKILL);
    client.becomes(&settings.tasks, (4, 0)).await;
    for id in ["0", "2", "4", "6"] {
        let returned = client.get(&settings.tasks).await;
        assert!(returned.redelivered && returned.correlation_id == id, "{returned:?}, not {id}");
    }
}
