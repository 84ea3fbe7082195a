//! Workers that are slow, or cannot say what they have computed: they hold what their prefetch
//! allows and no more, and go on by themselves.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::busy_with;
use crate::support::client::{Client, Task};
use crate::support::proxy::Proxy;
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};
use crate::support::wait::until_within;

const PREFETCH: u32 = 8;

fn settings(url: impl Into<String>) -> Settings {
    let settings = Settings::echo(url).set("pool[0].prefetch", PREFETCH);
    settings.set("pool[0].batch.max_requests", 2)
}

/// Kibibytes of memory in which a process has something.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn until_confirms_come_a_worker_takes_only_its_prefetch_then_goes_on() {
    const TASKS: usize = 2000;
    const TEXT: usize = 16 << 10;
    let rabbit = Rabbit::shared();
    let proxy = Proxy::before(rabbit.address()).await;
    let settings = settings(proxy.url()).set("broker.confirm_timeout", "1s").set("broker.heartbeat", "60s");
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    client.publish(&settings.tasks, Task::new(json!({"input": "the publisher connects"}))).await;
    assert_eq!(replies.next().await.status_code(), 200);
    // All but the consuming one, which was the first.
    proxy.hold(1..usize::MAX);
    let text = "x".repeat(TEXT);
    let task = |n: usize| Task::new(json!({"input": text})).id(n.to_string());
    let worker = sconce.workers()[0];
    let before = resident(worker);
    client.publish_all(&settings.tasks, (0..TASKS).map(task)).await;
    sconce.wait_for_log("no confirm; reconnecting").await;
    sconce.wait_for_log_times("no broker; trying again", 1).await;
    assert_eq!(client.look(&settings.tasks).await, Some((TASKS as u32 - PREFETCH, 1)));
    let grown = resident(worker).saturating_sub(before);
    assert!(grown < (TASKS * TEXT / 1024 / 2) as u64, "{grown} KiB more, of {TASKS} tasks of {TEXT} bytes");
    proxy.release();
    let mut answered = BTreeSet::new();
    while answered.len() < TASKS {
        let reply = replies.next().await;
        assert_eq!(reply.status_code(), 200);
        answered.insert(reply.correlation_id);
    }
    client.ready_becomes(&settings.tasks, 0).await;
    assert_eq!(sconce.workers(), [worker], "the same process");
    assert_eq!(sconce.logged("lost the broker"), 0, "consuming went on: {}", sconce.log());
    assert_eq!(sconce.stop().await, 0);
    client.becomes(&settings.tasks, (0, 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn beside_a_slow_worker_a_fast_one_does_all_but_the_slow_ones_prefetch() {
    const QUICK: usize = 60;
    let rabbit = Rabbit::shared();
    let settings =
        settings(rabbit.url()).set("pool[0].workers_per_device", 2).set("launcher.shutdown_grace", "500ms");
    let mut sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let slow = Task::new(json!({"input": "slow"})).id("slow");
    busy_with(&sconce, &client, &settings, slow).await;
    client.publish_all(&settings.tasks, (0..QUICK).map(|n| Task::new(json!({"input": n})))).await;
    // The slow task is one of those that its worker holds.
    let done = replies.take(QUICK + 1 - PREFETCH as usize).await;
    let workers: BTreeSet<_> = done.iter().map(|reply| reply.header("worker")).collect();
    assert_eq!(workers.len(), 1, "the fast one: {workers:?}");
    sconce.signal(Signal::SIGTERM);
    assert_eq!(sconce.exit_code().await, 84, "aborted: the slow task is still computed");
    let left = client.look(&settings.tasks).await.map_or(0, |(ready, _)| ready);
    assert!(left <= PREFETCH, "the slow worker held {left}");
}

/// The prefetch that the broker knows of the queue's only consumer.
fn prefetch_at(rabbit: &Rabbit, queue: &str) -> u32 {
    rabbit.only_consumer(queue).map_or(0, |(_, prefetch)| prefetch)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_prefetch_follows_what_messages_carry_and_none_of_them_is_lost() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("pool[0].batch.max_tokens", 320);
    let mut sconce = Sconce::launch(&settings);
    sconce.consumes(1).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    assert_eq!(prefetch_at(rabbit, &settings.tasks), 8, "as many of the largest as 64 MiB hold");
    let mut sent = 0;
    // Two batches of 320 tokens: of one a message that is 640 messages, of 80 it is 8, less what the average
    // remembers and what is too little for a change. A wave is more than the prefetch: one that never fills is left as
    // it is.
    for (inputs, wave, wanted) in [(1, 700, 420..641), (80, 700, 6..13)] {
        let body = json!({"input": vec!["x"; inputs]});
        // A wave takes a slow machine longer than most waits in tests.
        until_within(Duration::from_secs(120), &format!("a prefetch of {wanted:?}"), || {
            let (client, settings, body, first) = (&client, &settings, body.clone(), sent);
            let wanted = wanted.clone();
            sent += wave;
            async move {
                let tasks = (first..first + wave).map(|n| Task::new(body.clone()).id(n.to_string()));
                client.publish_all(&settings.tasks, tasks).await;
                wanted.contains(&prefetch_at(rabbit, &settings.tasks)).then_some(())
            }
        })
        .await;
    }
    let came = replies.take(sent).await;
    let ids: BTreeSet<_> = came.iter().map(|reply| &reply.correlation_id).collect();
    assert_eq!(ids.len(), sent, "one reply each");
    client.publish(&settings.tasks, Task::sentinel()).await;
    assert_eq!(sconce.exit_code().await, 0);
    client.becomes(&settings.tasks, (0, 0)).await;
}
