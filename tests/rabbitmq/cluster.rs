//! A cluster of three nodes, of which one is killed under load: nothing is lost, and the workers go
//! on over another node.

#![allow(clippy::print_stderr, reason = "how long the work stood still is worth seeing")]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::client::{Client, Inbox, Task};
use crate::support::cluster::Cluster;
use crate::support::sconce::{Sconce, Settings};
use crate::support::wait::until_within;

const TASKS: usize = 400;
const WORKERS: usize = 3;

/// One test, because each part kills a node of the same cluster and brings it back. As tests of their own, they would take
/// all test threads to wait for each other.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_whichever_node_of_a_cluster_dies() {
    let cluster = tokio::task::block_in_place(Cluster::start);
    // The node that workers are connected to, the one that leads the queue, and one that is both.
    for (first, leader, victim) in [(0, 1, 0), (0, 1, 1), (2, 2, 2)] {
        survives(&cluster, first, leader, victim).await;
    }
    a_killed_node_that_comes_back_carries_the_work_when_another_dies(&cluster).await;
    a_classic_reply_queue_whose_node_was_away_gets_its_generated_reply(&cluster).await;
}

/// A service whose workers connect to the node of that number first.
async fn launched(cluster: &Cluster, first: usize) -> (Sconce, Settings) {
    let settings = Settings::echo(cluster.url_from(first))
        .set("pool[0].workers_per_device", WORKERS)
        .set("pool[0].batch.max_requests", 2)
        .set("pool[0].prefetch", 6);
    (Sconce::launch(&settings), settings)
}

fn tasks(numbers: std::ops::Range<usize>) -> impl Iterator<Item = Task> {
    numbers.map(|n| Task::new(json!({"input": n, "sleep_ms": 60})).id(n.to_string()))
}

/// Takes replies until `count` tasks have one. Gives the longest pause between two of them.
async fn all_answered(replies: &mut Inbox, answered: &mut BTreeSet<usize>, count: usize) -> Duration {
    let mut pause = Duration::ZERO;
    while answered.len() < count {
        let asked = Instant::now();
        let reply = replies.next().await;
        pause = pause.max(asked.elapsed());
        assert_eq!(reply.status_code(), 200, "{reply:?}");
        assert_eq!(reply.body["input"].to_string(), reply.correlation_id);
        answered.insert(reply.correlation_id.parse().expect("one of ours"));
    }
    pause
}

/// Kills `victim` under load, while workers are connected to `first` and the queue is led by
/// `leader`; then brings it back.
async fn survives(cluster: &Cluster, first: usize, leader: usize, victim: usize) {
    let (witness, other) = match victim {
        0 => (1, 2),
        1 => (2, 0),
        _ => (0, 1),
    };
    // A queue is led by the node over which it was made.
    let (maker, settings) = launched(cluster, leader).await;
    maker.consumes(WORKERS).await;
    assert_eq!(maker.stop().await, 0);
    assert_eq!(cluster.leader_of(&settings.tasks, leader), leader);
    cluster.all_members_are_online(leader, &[&settings.tasks, &settings.replies]).await;
    let settings = settings.over(cluster.url_from(first));
    let sconce = Sconce::launch(&settings);
    sconce.consumes(WORKERS).await;
    assert_eq!(sconce.logged(&consuming_from(cluster, first)), WORKERS, "{}", sconce.log());

    let client = Client::connect(&cluster.nodes[witness].url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    client.publish_all(&settings.tasks, tasks(0..TASKS)).await;
    let mut answered = BTreeSet::new();
    all_answered(&mut replies, &mut answered, 20).await;
    tokio::task::block_in_place(|| cluster.nodes[victim].kill());
    let pause = all_answered(&mut replies, &mut answered, TASKS).await;
    eprintln!("connected to {first}, led by {leader}, {victim} killed: no reply for {pause:?}");
    if first == victim {
        sconce.wait_for_log_times("lost the broker", WORKERS).await;
        sconce.consumes(2 * WORKERS).await;
        let elsewhere = [witness, other].map(|node| sconce.logged(&consuming_from(cluster, node)));
        assert_eq!(elsewhere.iter().sum::<usize>(), WORKERS, "{}", sconce.log());
    }
    client.ready_becomes(&settings.tasks, 0).await;
    assert_eq!(client.look(&settings.dead).await.map(|(ready, _)| ready), Some(0));
    cluster.bring_back(victim, &[&settings.tasks, &settings.replies]).await;
    assert_eq!(sconce.stop().await, 0);
    client.becomes(&settings.tasks, (0, 0)).await;
}

fn consuming_from(cluster: &Cluster, node: usize) -> String {
    format!("consuming broker=\"amqp://guest:***@{}", cluster.nodes[node].address())
}

async fn a_killed_node_that_comes_back_carries_the_work_when_another_dies(cluster: &Cluster) {
    let (sconce, settings) = launched(cluster, 0).await;
    sconce.consumes(WORKERS).await;
    let client = Client::connect(&cluster.nodes[2].url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let mut answered = BTreeSet::new();
    cluster.all_members_are_online(0, &[&settings.tasks, &settings.replies]).await;
    // With one node still away, the second death would leave no majority.
    for (round, victim) in [0, 1].into_iter().enumerate() {
        let numbers = round * TASKS..(round + 1) * TASKS;
        client.publish_all(&settings.tasks, tasks(numbers)).await;
        all_answered(&mut replies, &mut answered, round * TASKS + 20).await;
        tokio::task::block_in_place(|| cluster.nodes[victim].kill());
        all_answered(&mut replies, &mut answered, round * TASKS + 60).await;
        cluster.bring_back(victim, &[&settings.tasks, &settings.replies]).await;
        all_answered(&mut replies, &mut answered, (round + 1) * TASKS).await;
    }
    client.ready_becomes(&settings.tasks, 0).await;
    assert_eq!(client.look(&settings.dead).await.map(|(ready, _)| ready), Some(0));
    assert_eq!(sconce.stop().await, 0);
}

async fn a_classic_reply_queue_whose_node_was_away_gets_its_generated_reply(cluster: &Cluster) {
    const AWAY: usize = 2;
    // A minute, in which the node is back.
    const TOKENS: usize = 3_000;
    let settings = Settings::echo(cluster.url_from(0))
        .set("pool[0].model", "script?sequences=2&context=20000&tokens=80000");
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&cluster.nodes[0].url()).await;
    let far = format!("{}.far", settings.name);
    // RabbitMQ puts a classic queue on the node that the client is connected to.
    Client::connect(&cluster.nodes[AWAY].url()).await.declare(&far, &[]).await;
    let task = Task::new(json!({"prompt": 4, "max_tokens": TOKENS, "step_ms": 20})).reply_to(&far);
    client.publish(&settings.tasks, task).await;
    client.ready_becomes(&settings.tasks, 0).await;
    tokio::task::block_in_place(|| cluster.nodes[AWAY].kill());
    // Longer than a queue may be missing whose requester still counts as being there.
    tokio::time::sleep(Duration::from_secs(18)).await;
    assert_eq!(sconce.logged("the task ends"), 0, "{}", sconce.log());
    cluster.bring_back(AWAY, &[&settings.tasks, &settings.dead]).await;
    let back = Client::connect(&cluster.nodes[AWAY].url()).await;
    let found = until_within(Duration::from_secs(120), "a reply, or a dead letter", || async {
        let ready = async |queue| back.look(queue).await.map_or(0, |(ready, _)| ready);
        (ready(&far).await + ready(&settings.dead).await > 0).then_some(())
    });
    found.await;
    let reply = back.get(&far).await;
    assert_eq!(reply.status_code(), 200, "{reply:?}");
    assert_eq!(client.look(&settings.dead).await.map(|(ready, _)| ready), Some(0));
    assert_eq!(sconce.stop().await, 0);
}
