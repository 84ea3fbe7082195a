//! What ends among the dead letters, and what must not.

use std::collections::BTreeSet;

use serde_json::json;

use crate::amqp_rig::declare_queues;
use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

#[tokio::test(flavor = "multi_thread")]
async fn of_200_pipelined_replies_exactly_those_to_a_missing_queue_are_parked() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.private_inbox().await;
    let tasks: Vec<Task> = (0..200)
        .map(|n| {
            let to = if n % 7 == 0 { "missing" } else { replies.queue.as_str() };
            Task::new(json!({"input": n})).id(n.to_string()).reply_to(to)
        })
        .collect();
    client.publish_all(&settings.tasks, tasks).await;
    let (lost, routed): (BTreeSet<_>, BTreeSet<_>) = (0..200).partition(|n| n % 7 == 0);
    let number = |id: String| id.parse::<i32>().expect("a number");
    let came = replies.take(routed.len()).await.into_iter().map(|it| number(it.correlation_id));
    assert_eq!(came.collect::<BTreeSet<_>>(), routed);
    let mut dead = client.inbox(&settings.dead).await;
    let parked = dead.take(lost.len()).await;
    for letter in &parked {
        assert_eq!(letter.header("reason"), "unroutable");
        assert!(letter.header("error").contains("missing"), "{letter:?}");
        assert_eq!(letter.body["input"], json!(number(letter.correlation_id.clone())));
    }
    assert_eq!(parked.into_iter().map(|it| number(it.correlation_id)).collect::<BTreeSet<_>>(), lost);
    assert_eq!(sconce.stop().await, 0);
    for queue in [&settings.tasks, &settings.dead, &settings.replies] {
        client.ready_becomes(queue, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_message_is_not_dead_lettered_one_over_the_delivery_limit_is() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    declare_queues(&settings, 1).await;
    let client = Client::connect(&rabbit.url()).await;
    let expiring = |task: Task| task.with(|properties| properties.with_expiration("1".into()));
    client.publish_all(&settings.tasks, (0..3).map(|_| expiring(Task::new(json!({}))))).await;
    client.publish(&settings.tasks, expiring(Task::sentinel())).await;
    client.publish(&settings.tasks, Task::new(json!({"input": "poison"})).id("poison")).await;
    // The backstop is the broker's own: no worker of ours looks at it.
    for _ in 0..2 {
        client.return_one(&settings.tasks).await;
    }
    let letter = client.get(&settings.dead).await;
    assert_eq!(letter.correlation_id, "poison");
    assert_eq!(letter.header("x-first-death-reason"), "delivery_limit");
    // Whatever had expired has been dropped, and nothing else was parked.
    let mut sconce = Sconce::launch(&settings);
    client.publish(&settings.tasks, Task::new(json!({"input": "a"})).id("after")).await;
    let mut replies = client.inbox(&settings.replies).await;
    assert_eq!(replies.next().await.correlation_id, "after");
    client.ready_becomes(&settings.tasks, 0).await;
    client.ready_becomes(&settings.dead, 0).await;
    sconce.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(sconce.exit_code().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_with_headers_as_large_as_a_frame_are_refused_and_stop_nobody() {
    let settings = Settings::echo(Rabbit::shared().url());
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    let large = "x".repeat(130_950);
    let traced = Task::new(json!({"input": "a"})).id("traced").header("tracestate", &large);
    client.publish(&settings.tasks, traced).await;
    let refused = client.get(&settings.replies).await;
    assert_eq!(refused.status_code(), 413);
    assert!(refused.body.to_string().contains("the headers have 130"), "{}", refused.body);
    let unroutable = Task::raw("no json").id("odd").header("large", &large).reply_to("no such queue");
    client.publish(&settings.tasks, unroutable).await;
    let letter = client.get(&settings.dead).await;
    assert_eq!((letter.header("reason").as_str(), letter.correlation_id.as_str()), ("refused", "odd"));
    assert_eq!(letter.raw, b"no json");
    assert_eq!(letter.headers["headers_dropped"].as_i64(), Some(1));
    let half = "x".repeat(65_000);
    let traced = Task::new(json!({"input": "a"})).id("half").header("tracestate", &half);
    client.publish(&settings.tasks, traced).await;
    assert_eq!(client.get(&settings.replies).await.status_code(), 200);
    assert_eq!(sconce.stop().await, 0);
}
