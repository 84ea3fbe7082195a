//! Messages that nobody sends by mistake: the worker that takes one lives on, and answers the next.

use std::collections::BTreeMap;

use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::serve;
use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::raw_amqp::{LARGEST_TABLE, nested, publish};
use crate::support::sconce::{Sconce, Settings};

/// Arrays, one inside the other: many more than the stack that Rust gives a thread holds, and they leave room
/// in a frame for what a broker adds.
const DEEP: usize = 20_000;

#[tokio::test(flavor = "multi_thread")]
async fn headers_nested_as_deeply_as_a_frame_allows_kill_no_worker() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("launcher.max_quick_failures", 2);
    let (sconce, client, mut inbox) = serve(&settings).await;
    let workers = sconce.workers();
    // Each level takes 5 bytes. A task may have 64 KiB of headers.
    let (deep, deepest) = (12_000, LARGEST_TABLE / 5 - 2);
    let [one, two, three] = ["{\"input\":1}", "{\"input\":2}", "{\"input\":3}"];
    for (depth, body) in [(100, one), (deep, two), (deepest, three), (100, "no JSON")] {
        publish(rabbit.address(), &settings.tasks, &nested(depth), body.as_bytes());
    }
    client.publish(&settings.tasks, Task::new(json!({"input": "next"})).id("next")).await;
    let answered: BTreeMap<_, _> =
        inbox.take(5).await.into_iter().map(|it| (it.header("task_id"), it.status_code())).collect();
    assert_eq!(answered.len(), 5, "one reply each");
    let mut codes: Vec<i64> = answered.into_values().collect();
    codes.sort_unstable();
    assert_eq!(codes, [200, 200, 200, 400, 413]);
    let letter = client.get(&settings.dead).await;
    assert_eq!((letter.header("reason").as_str(), &letter.raw[..]), ("undecodable", &b"no JSON"[..]));
    assert_eq!(sconce.workers(), workers, "the same process");
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_with_deeply_nested_headers_is_listed_like_any_other() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    crate::amqp_rig::declare_queues(&settings, 20).await;
    publish(rabbit.address(), &settings.dead, &nested(DEEP), b"{\"input\":1}");
    let client = Client::connect(&rabbit.url()).await;
    client.ready_becomes(&settings.dead, 1).await;
    let mut list = Sconce::run(&settings, &["dead", "list"]);
    assert_eq!(list.exit_code().await, 0, "{}", list.log());
    let told = format!("1 dead letter in {}", settings.dead);
    assert!(list.log().contains(&told), "{}", list.log());
    client.ready_becomes(&settings.dead, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deeply_nested_headers_do_not_kill_a_worker_that_was_started_by_hand() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    let mut worker = Sconce::run(&settings, &["worker"]);
    worker.consumes(1).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut inbox = client.inbox(&settings.replies).await;
    publish(rabbit.address(), &settings.tasks, &nested(DEEP), b"{\"input\":\"deep\"}");
    let reply = inbox.next().await;
    assert_eq!(reply.status_code(), 413, "{}", reply.body);
    worker.signal(Signal::SIGTERM);
    assert_eq!(worker.exit_code().await, 0, "{}", worker.log());
}
