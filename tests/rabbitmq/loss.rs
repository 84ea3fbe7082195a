//! Connections that break while tasks are at work: nothing is lost, no more is held than allowed,
//! and each worker comes back as one consumer.

use std::collections::BTreeSet;

use serde_json::json;

use super::messages::busy_with;
use crate::support::client::{Client, Inbox, Received, Task};
use crate::support::proxy::Proxy;
use crate::support::rabbit::{Rabbit, Stats};
use crate::support::sconce::{Sconce, Settings};
use crate::support::wait::until;

const TASKS: usize = 40;
const PREFETCH: u64 = 6;

fn slowly(settings: Settings) -> Settings {
    settings.set("pool[0].prefetch", PREFETCH).set("pool[0].batch.max_requests", 2)
}

fn tasks(count: usize, sleep_ms: u64) -> impl Iterator<Item = Task> {
    (0..count).map(move |n| Task::new(json!({"input": n, "sleep_ms": sleep_ms})).id(n.to_string()))
}

/// Which tasks have their reply, and how many replies came.
#[derive(Default)]
struct Answered {
    ids: BTreeSet<String>,
    came: usize,
}

impl Answered {
    async fn next(&mut self, replies: &mut Inbox) -> Received {
        let reply = replies.next().await;
        assert_eq!(reply.status_code(), 200, "{reply:?}");
        assert_eq!(reply.body["input"].to_string(), reply.correlation_id);
        self.ids.insert(reply.correlation_id.clone());
        self.came += 1;
        reply
    }

    /// Takes replies until `count` tasks have one.
    async fn become_all(&mut self, replies: &mut Inbox, count: usize) {
        while self.ids.len() < count {
            self.next(replies).await;
        }
    }
}

/// Waits until one worker holds as many of `count` tasks as it may; panics when it holds more.
async fn one_prefetch_is_held(client: &Client, settings: &Settings, count: usize) {
    let least = count as u32 - PREFETCH as u32;
    until("a full prefetch is held", || async {
        // In this order, so that a task that is answered meanwhile is counted twice and not missed.
        let (waiting, _) = client.look(&settings.tasks).await?;
        let (answered, _) = client.look(&settings.replies).await?;
        assert!(waiting + answered >= least, "{waiting} wait, {answered} are answered, of {count}");
        (waiting + answered == least).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_in_mid_batch_loses_no_task_and_leaves_one_consumer() {
    let rabbit = Rabbit::shared();
    let proxy = Proxy::before(rabbit.address()).await;
    let settings = slowly(Settings::echo(proxy.url()));
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    // The first keeps the device busy over both cuts.
    let gate = busy_with(&sconce, &client, &settings, Task::new(json!({"input": 0})).id("0")).await;
    client.publish_all(&settings.tasks, tasks(TASKS, 100).skip(1)).await;
    for cuts in 1..=2 {
        one_prefetch_is_held(&client, &settings, TASKS).await;
        proxy.cut();
        sconce.wait_for_log_times("lost the broker", cuts).await;
        sconce.consumes(cuts + 1).await;
        client.consumers_become(&settings.tasks, 1).await;
    }
    one_prefetch_is_held(&client, &settings, TASKS).await;
    gate.open();
    let mut replies = client.inbox(&settings.replies).await;
    let mut answered = Answered::default();
    answered.become_all(&mut replies, TASKS).await;
    let came = answered.came;
    // Only what was between its reply and its ack may be answered twice, at each cut.
    assert!(came <= TASKS + 2 * PREFETCH as usize, "{came} replies to {TASKS} tasks");
    rabbit.stats_become(&settings.tasks, Stats { ready: 0, unacked: 0, consumers: 1 }).await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_closed_by_an_operator_are_made_again() {
    let rabbit = Rabbit::shared();
    let settings = slowly(Settings::echo(rabbit.url())).set("pool[0].workers_per_device", 2);
    let sconce = Sconce::launch(&settings);
    sconce.consumes(2).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    client.publish_all(&settings.tasks, tasks(TASKS, 100)).await;
    // A worker opens its publishing connection with its first reply.
    let (mut answered, mut workers) = (Answered::default(), BTreeSet::new());
    while workers.len() < 2 {
        workers.insert(answered.next(&mut replies).await.header("worker"));
    }
    // Two workers, with a connection each for consuming and publishing.
    assert_eq!(rabbit.cut(&format!("/{}/", settings.name)), 4);
    client.publish_all(&settings.tasks, tasks(2 * TASKS, 0).skip(TASKS)).await;
    answered.become_all(&mut replies, 2 * TASKS).await;
    client.consumers_become(&settings.tasks, 2).await;
    rabbit.stats_become(&settings.tasks, Stats { ready: 0, unacked: 0, consumers: 2 }).await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_publishing_connection_costs_no_reply() {
    let rabbit = Rabbit::shared();
    let settings = slowly(Settings::echo(rabbit.url()));
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    client.publish_all(&settings.tasks, tasks(TASKS, 100)).await;
    let mut answered = Answered::default();
    answered.become_all(&mut replies, 2).await;
    assert_eq!(rabbit.cut(&format!("/{}/0 (publisher)", settings.name)), 1);
    client.publish_all(&settings.tasks, tasks(2 * TASKS, 0).skip(TASKS)).await;
    answered.become_all(&mut replies, 2 * TASKS).await;
    assert_eq!(sconce.logged("lost the broker"), 0, "consuming goes on: {}", sconce.log());
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&settings.tasks, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forward_pass_of_several_heartbeats_keeps_the_connection() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("broker.heartbeat", "2s");
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    client.publish(&settings.tasks, Task::new(json!({"input": "a", "sleep_ms": 9000}))).await;
    let reply = replies.next().await;
    assert_eq!((reply.status_code(), reply.header("attempt").as_str()), (200, "1"));
    assert_eq!(sconce.logged("lost the broker"), 0, "{}", sconce.log());
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&settings.tasks, 0).await;
}
