//! A broker with tight limits: deliveries time out after seconds, messages may not be large.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use nix::sys::signal::Signal;
use serde_json::json;

use crate::support::client::{Client, Task};
use crate::support::rabbit::{Conf, Rabbit};
use crate::support::sconce::{Sconce, Settings};

const MOST_BYTES: usize = 20_000;

fn strict() -> &'static Rabbit {
    static STRICT: OnceLock<Rabbit> = OnceLock::new();
    STRICT.get_or_init(|| {
        let conf = Conf::default().line("consumer_timeout", 3000).line("max_message_size", MOST_BYTES);
        Rabbit::private_with(conf)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_that_the_broker_closes_is_replaced_and_consuming_resumes() {
    let rabbit = strict();
    // A delivery that times out (406 PRECONDITION_FAILED) is the only attempt the task has.
    let settings = Settings::echo(rabbit.url()).set("broker.delivery_limit", 1);
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    client.publish(&settings.tasks, Task::new(json!({"input": 1, "sleep_ms": 7000})).id("slow")).await;
    sconce.wait_for_log("406").await;
    sconce.consumes(2).await;
    assert_eq!(client.get(&settings.dead).await.correlation_id, "slow");
    client.consumers_become(&settings.tasks, 1).await;
    client.publish(&settings.tasks, Task::new(json!({"input": 2})).id("quick")).await;
    // The quick one waits for the forward pass that nobody wants any more, and on a busy machine for
    // longer than the broker allows: then it too is given up, with an answer.
    let mut replies: Vec<_> =
        replies.take(2).await.into_iter().map(|it| (it.correlation_id.clone(), it.status_code())).collect();
    replies.sort();
    assert_eq!(replies[1], ("slow".to_owned(), 500));
    assert_eq!(replies[0].0, "quick");
    client.consumers_become(&settings.tasks, 1).await;
    assert_eq!(sconce.workers().len(), 1);
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&settings.tasks, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_longer_than_the_wait_for_an_ack_costs_a_channel_and_no_task() {
    const QUICK: usize = 20;
    let rabbit = strict();
    // With more than one task in hand, those behind the long one would go back with it each time.
    let settings = Settings::echo(rabbit.url())
        .set("pool[0].workers_per_device", 2)
        .set("pool[0].batch.max_requests", 1)
        .set("pool[0].prefetch", 1)
        .set("launcher.shutdown_grace", "500ms");
    let mut sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let workers = sconce.workers();
    client.publish(&settings.tasks, Task::new(json!({"input": 0, "sleep_ms": 6000})).id("slow")).await;
    let quick = |n: usize| Task::new(json!({"input": n})).id(n.to_string());
    let mut answered = BTreeSet::new();
    for half in 1..=2 {
        client.publish_all(&settings.tasks, (answered.len()..half * QUICK).map(quick)).await;
        while answered.len() < half * QUICK {
            let reply = replies.next().await;
            assert_eq!(reply.status_code(), 200, "{reply:?}");
            answered.insert(reply.correlation_id);
        }
        sconce.wait_for_log_times("406", half).await;
        sconce.consumes(2 + half).await;
    }
    assert_eq!(sconce.workers(), workers, "the same processes");
    sconce.signal(Signal::SIGTERM);
    sconce.exit_code().await;
    client.becomes(&settings.tasks, (1, 0)).await;
    assert_eq!(client.get(&settings.tasks).await.correlation_id, "slow");
    client.ready_becomes(&settings.dead, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_too_large_for_the_broker_is_an_error_and_others_come_whole() {
    let rabbit = strict();
    let settings = Settings::echo(rabbit.url());
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    // The answer repeats the input and adds some bytes, which is what makes it too large.
    let body = json!({"input": "x".repeat(MOST_BYTES - 20)});
    assert!(body.to_string().len() <= MOST_BYTES);
    let large = Task::new(body).id("large");
    let tasks = (0..9).map(|n| match n {
        4 => large.clone(),
        n => Task::new(json!({"input": n})).id(n.to_string()),
    });
    client.publish_all(&settings.tasks, tasks).await;
    // One reply each: that the broker closes a channel over one is nobody else's matter.
    let came = replies.take(9).await;
    let mut answered: BTreeMap<_, _> = came.into_iter().map(|it| (it.correlation_id.clone(), it)).collect();
    assert_eq!(answered.len(), 9);
    let refused = answered.remove("large").expect("a reply");
    assert_eq!((refused.status_code(), refused.header("status").as_str()), (413, "rejected"));
    assert!(refused.body["error"]["message"].as_str().is_some_and(|it| it.contains("larger")), "{refused:?}");
    assert!(answered.values().all(|reply| reply.status_code() == 200));
    client.publish(&settings.tasks, Task::new(json!({"input": "after"})).id("after")).await;
    assert_eq!(replies.next().await.correlation_id, "after");
    assert_eq!(sconce.logged("lost the broker"), 0, "{}", sconce.log());
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&settings.tasks, 0).await;
    client.ready_becomes(&settings.dead, 0).await;
}
