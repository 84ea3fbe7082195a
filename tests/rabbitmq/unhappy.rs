//! `nobody-stops-the-others`: a reply queue that takes nothing, a queue that somebody deleted, a broker
//! that refuses. Each costs its own tasks, and every other one is answered, once.

#![allow(clippy::print_stderr, reason = "how long others waited is worth seeing")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lapin::types::AMQPValue;
use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::busy_with;
use crate::support::client::{Client, Inbox, Received, Task};
use crate::support::proxy::Proxy;
use crate::support::rabbit::{Rabbit, Stats};
use crate::support::sconce::{Sconce, Settings, signal};
use crate::support::wait::until;

const IDLE: Stats = Stats { ready: 0, unacked: 0, consumers: 1 };

fn quorum() -> (&'static str, AMQPValue) {
    ("x-queue-type", AMQPValue::LongString("quorum".into()))
}

/// Quorum queues that confirm nothing any more, as those that have lost their majority.
async fn stuck_queues(rabbit: &Rabbit, client: &Client, names: &[String]) {
    for name in names {
        client.declare(name, &[quorum()]).await;
    }
    for_each_queue(rabbit, "suspend", names);
}

fn revive(rabbit: &Rabbit, names: &[String]) {
    for_each_queue(rabbit, "resume", names);
}

/// Calls this function of Erlang's `sys` for the process of each queue.
fn for_each_queue(rabbit: &Rabbit, function: &str, names: &[String]) {
    let processes: Vec<_> = names.iter().map(|name| format!("'%2F_{name}'")).collect();
    rabbit.eval(&format!("[sys:{function}({{Name, node()}}) || Name <- [{}]].", processes.join(", ")));
}

fn tasks(prefix: &str, count: usize, reply_to: &str) -> Vec<Task> {
    let task = |n| Task::new(json!({"input": n})).id(format!("{prefix}{n}")).reply_to(reply_to);
    (0..count).map(task).collect()
}

/// Takes `count` replies, which are to be of as many tasks: one each.
async fn one_each(inbox: &mut Inbox, count: usize) -> BTreeMap<String, Received> {
    let replies = inbox.take(count).await;
    let by_id: BTreeMap<_, _> = replies.into_iter().map(|it| (it.correlation_id.clone(), it)).collect();
    assert_eq!(by_id.len(), count, "one reply each");
    by_id
}

/// Takes so many dead letters, and gives the reasons and bodies.
async fn letters(client: &Client, settings: &Settings, count: usize) -> Vec<(String, serde_json::Value)> {
    let mut letters = Vec::new();
    for _ in 0..count {
        let letter = client.get(&settings.dead).await;
        letters.push((letter.header("reason"), letter.body.clone()));
    }
    letters
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_queue_that_never_confirms_costs_only_the_tasks_that_name_it() {
    const STUCK: usize = 40;
    let rabbit = Rabbit::shared();
    let settings =
        Settings::echo(rabbit.url()).set("pool[0].reply_timeout", "4s").set("pool[0].prefetch", 64);
    let client = Client::connect(&rabbit.url()).await;
    let stuck = format!("{}.stuck", settings.name);
    stuck_queues(rabbit, &client, std::slice::from_ref(&stuck)).await;
    let mut sconce = Sconce::launched(&settings).await;
    let mut own = client.private_inbox().await;
    client.publish_all(&settings.tasks, tasks("s", STUCK, &stuck)).await;
    for round in 0..4 {
        client.publish_all(&settings.tasks, tasks(&format!("{round}."), 50, &own.queue)).await;
        assert!(one_each(&mut own, 50).await.values().all(|reply| reply.status_code() == 200));
    }
    assert_eq!(
        client.look(&settings.dead).await.map(|(ready, _)| ready < STUCK as u32),
        Some(true),
        "at once"
    );
    let dead = letters(&client, &settings, STUCK).await;
    assert!(
        dead.iter().all(|(reason, body)| reason == "unconfirmed" && body["input"].is_number()),
        "{dead:?}"
    );
    rabbit.stats_become(&settings.tasks, IDLE).await;
    client.publish_all(&settings.tasks, tasks("t", 3, &stuck)).await;
    client.publish(&settings.tasks, Task::sentinel()).await;
    assert_eq!(sconce.exit_code().await, 0, "a sentinel behind such tasks completes");
    assert_eq!(sconce.logged("; reconnecting"), 0, "{}", sconce.log());
    until("the last three are dead letters, or come back from where they waited", || async {
        let ready = async |queue| client.look(queue).await.map_or(0, |(ready, _)| ready);
        (ready(&settings.dead).await + ready(&settings.tasks).await == 3).then_some(())
    })
    .await;
    revive(rabbit, &[stuck]);
}

#[tokio::test(flavor = "multi_thread")]
async fn as_many_stuck_reply_queues_as_a_worker_may_hold_tasks_stop_nobody() {
    const QUEUES: usize = 24;
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("pool[0].prefetch", 16);
    let client = Client::connect(&rabbit.url()).await;
    let sconce = Sconce::launched(&settings).await;
    let mut pools = client.inbox(&settings.replies).await;
    // The pool's own queue is well known by the time.
    client.publish(&settings.tasks, Task::new(json!({"input": 0}))).await;
    assert_eq!(pools.next().await.status_code(), 200);
    let names: Vec<_> = (0..QUEUES).map(|n| format!("{}.stuck{n}", settings.name)).collect();
    stuck_queues(rabbit, &client, &names).await;
    for name in &names {
        client.publish_all(&settings.tasks, tasks(name, 2, name)).await;
    }
    let mut own = client.private_inbox().await;
    client.publish_all(&settings.tasks, tasks("n", 50, &own.queue)).await;
    client.publish_all(&settings.tasks, (0..50).map(|n| Task::new(json!({"input": n})))).await;
    one_each(&mut own, 50).await;
    one_each(&mut pools, 50).await;
    // Its time-out is a minute: beyond half of the prefetch those that wait longest wait no more.
    let dead = letters(&client, &settings, 2 * QUEUES - 8).await;
    assert!(dead.iter().all(|(reason, _)| reason == "unconfirmed"), "{dead:?}");
    drop(sconce);
    revive(rabbit, &names);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_reply_queue_holds_only_its_own_tasks_until_their_time_is_over() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("pool[0].prefetch", 8);
    let client = Client::connect(&rabbit.url()).await;
    let sconce = Sconce::launched(&settings).await;
    let full = format!("{}.full", settings.name);
    let overflow = AMQPValue::LongString("reject-publish".into());
    client.declare(&full, &[("x-max-length", AMQPValue::LongInt(1)), ("x-overflow", overflow)]).await;
    let deadline = |task: Task| task.with(|it| it.with_expiration("3000".into()));
    client.publish_all(&settings.tasks, tasks("f", 4, &full).into_iter().map(deadline)).await;
    let mut own = client.private_inbox().await;
    client.publish_all(&settings.tasks, tasks("n", 50, &own.queue)).await;
    one_each(&mut own, 50).await;
    let dead = letters(&client, &settings, 3).await;
    assert!(dead.iter().all(|(reason, _)| reason == "unconfirmed"), "{dead:?}");
    assert_eq!(client.get(&full).await.status_code(), 200, "the one that had room");
    rabbit.stats_become(&settings.tasks, IDLE).await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_for_a_full_reply_queue_wait_uncomputed_and_others_do_not() {
    const MANY: usize = 2_500;
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    let client = Client::connect(&rabbit.url()).await;
    let full = format!("{}.full", settings.name);
    let overflow = AMQPValue::LongString("reject-publish".into());
    let one = [quorum(), ("x-max-length", AMQPValue::LongInt(1)), ("x-overflow", overflow)];
    client.declare(&full, &one).await;
    let sconce = Sconce::launched(&settings).await;
    client.publish_all(&settings.tasks, tasks("f", MANY, &full)).await;
    let mut own = client.private_inbox().await;
    let begun = Instant::now();
    client.publish_all(&settings.tasks, tasks("n", 50, &own.queue)).await;
    one_each(&mut own, 50).await;
    let took = begun.elapsed();
    eprintln!("50 replies beside {MANY} that no queue takes: {took:?}");
    assert!(took < Duration::from_secs(60), "{took:?}: their time is 90 s");
    assert_eq!(
        client.look(&settings.dead).await.map(|(ready, _)| ready),
        Some(0),
        "none has waited its time"
    );
    // Somebody reads again.
    let begun = Instant::now();
    let mut inbox = client.inbox(&full).await;
    let replies = one_each(&mut inbox, MANY).await;
    eprintln!("{MANY} replies once they are read: {:?}", begun.elapsed());
    assert!(replies.values().all(|it| it.status_code() == 200 && it.header("attempt") == "1"));
    rabbit.stats_become(&settings.tasks, IDLE).await;
    assert_eq!(client.look(&settings.dead).await.map(|(ready, _)| ready), Some(0));
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_told_to_stop_hands_back_what_no_queue_takes() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    let client = Client::connect(&rabbit.url()).await;
    let stuck = format!("{}.stuck", settings.name);
    stuck_queues(rabbit, &client, std::slice::from_ref(&stuck)).await;
    let mut sconce = Sconce::launched(&settings).await;
    let task = Task::new(json!({"input": 1})).reply_to(&stuck);
    let gate = busy_with(&sconce, &client, &settings, task).await;
    sconce.signal(Signal::SIGTERM);
    gate.open();
    assert_eq!(sconce.exit_code().await, 0, "within its grace");
    client.becomes(&settings.tasks, (1, 0)).await;
    revive(rabbit, &[stuck]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_dead_letter_queue_is_made_again() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url());
    let client = Client::connect(&rabbit.url()).await;
    let sconce = Sconce::launched(&settings).await;
    let mut replies = client.inbox(&settings.replies).await;
    let workers = sconce.workers();
    client.wait_for_queue(&settings.dead).await;
    client.delete(&settings.dead).await;
    client.publish(&settings.tasks, Task::raw("no JSON").id("bad")).await;
    client.publish(&settings.tasks, Task::new(json!({"input": 1})).id("good")).await;
    let answered = one_each(&mut replies, 2).await;
    assert_eq!((answered["bad"].status_code(), answered["good"].status_code()), (400, 200));
    assert_eq!(client.get(&settings.dead).await.header("reason"), "undecodable");
    assert_eq!(sconce.workers(), workers, "the same process");
    assert_eq!(sconce.stop().await, 0);
}

/// What `/readyz` says.
async fn readiness(sconce: &Sconce) -> (u16, String) {
    let address = format!("{}/readyz", sconce.admin().await);
    let asked = tokio::task::spawn_blocking(move || match ureq::get(&address).call() {
        Ok(answer) => (answer.status(), answer.into_string().unwrap_or_default()),
        Err(ureq::Error::Status(status, answer)) => (status, answer.into_string().unwrap_or_default()),
        Err(error) => (0, error.to_string()),
    });
    asked.await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_waits_for_its_undeclared_queue_and_readiness_says_so() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("broker.declare", false);
    let client = Client::connect(&rabbit.url()).await;
    for queue in [&settings.tasks, &settings.replies] {
        client.declare(queue, &[]).await;
    }
    let sconce = Sconce::launched(&settings).await;
    let mut replies = client.inbox(&settings.replies).await;
    client.publish(&settings.tasks, Task::raw("no JSON").id("bad")).await;
    client
        .publish_all(&settings.tasks, (0..20).map(|n| Task::new(json!({"input": n})).id(n.to_string())))
        .await;
    one_each(&mut replies, 20).await;
    let said = until("readiness says why", || async {
        let (status, words) = readiness(&sconce).await;
        words.contains(&settings.dead).then_some((status, words))
    })
    .await;
    assert!(said.0 == 200 && said.1.contains("does not exist"), "{said:?}");
    client.declare(&settings.dead, &[]).await;
    assert_eq!(client.get(&settings.dead).await.correlation_id, "bad");
    assert_eq!(replies.next().await.correlation_id, "bad");
    until("readiness has nothing more to say", || async {
        (!readiness(&sconce).await.1.contains(&settings.dead)).then_some(())
    })
    .await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_expiration_in_a_retry_queue_holds_up_none_behind_it() {
    let rabbit = Rabbit::shared();
    let settings = Settings::echo(rabbit.url()).set("pool[0].retry.delay", "500ms");
    let client = Client::connect(&rabbit.url()).await;
    let sconce = Sconce::launched(&settings).await;
    let mut replies = client.inbox(&settings.replies).await;
    let now = format!("{}.retry-500ms", settings.tasks);
    client.publish(&now, Task::new(json!({"input": 3})).id("third")).await;
    client.publish(&settings.tasks, Task::new(json!({"input": 4, "fail": "once"})).id("fourth")).await;
    one_each(&mut replies, 2).await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_connections_at_the_start_is_waited_for() {
    let rabbit = Rabbit::shared();
    // The same failure is told once at `info`.
    let settings =
        Settings::echo(rabbit.url_for("many:pw", "/")).environment("SCONCE_LOG", "warn,sconce=debug");
    rabbit.add_user("many", "pw", [".*", ".*", ".*"]);
    rabbit.limit_connections("many", Some(0));
    let sconce = Sconce::launch(&settings);
    sconce.wait_for_log_times("limit", 4).await;
    let (status, words) = readiness(&sconce).await;
    assert!(status == 503 && words.contains("limit"), "{words}");
    rabbit.limit_connections("many", None);
    sconce.consumes(1).await;
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_started_while_a_password_is_refused_return_once_it_is_taken() {
    let rabbit = Rabbit::shared();
    rabbit.add_user("moody", "right", [".*", ".*", ".*"]);
    let settings = Settings::echo(rabbit.url_for("moody:right", "/")).set("launcher.max_quick_failures", 2);
    // The same failure is told once at `info`.
    let settings = settings.environment("SCONCE_LOG", "warn,sconce=debug");
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    // The launcher hears once a second that its worker has the broker.
    until("the launcher is ready", || async { (readiness(&sconce).await.0 == 200).then_some(()) }).await;
    rabbit.change_password("moody", "wrong");
    signal(sconce.workers()[0], Signal::SIGKILL);
    // Longer than a new service would bear it.
    sconce.wait_for_log_times("403", 8).await;
    rabbit.change_password("moody", "right");
    sconce.consumes(2).await;
    assert_eq!(sconce.logged("slot given up"), 0, "{}", sconce.log());
    client.publish(&settings.tasks, Task::new(json!({"input": 1}))).await;
    assert_eq!(client.get(&settings.replies).await.status_code(), 200);
    assert_eq!(sconce.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn over_a_slow_link_each_reply_goes_once() {
    const REPLIES: usize = 8;
    let rabbit = Rabbit::shared();
    let proxy = Proxy::before(rabbit.address()).await;
    // 8 × 256 KiB at 512 KiB/s take four times as long as a confirm may.
    let settings =
        Settings::echo(proxy.url()).set("broker.confirm_timeout", "1s").set("pool[0].prefetch", 16);
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&rabbit.url()).await;
    let mut replies = client.inbox(&settings.replies).await;
    let text = "x".repeat(256 << 10);
    client.publish(&settings.tasks, Task::new(json!({"input": text})).id("first")).await;
    assert_eq!(replies.next().await.correlation_id, "first");
    proxy.slow_down(512 << 10);
    let task = |n: usize| Task::new(json!({"input": text})).id(n.to_string());
    client.publish_all(&settings.tasks, (0..REPLIES).map(task)).await;
    one_each(&mut replies, REPLIES).await;
    client.publish(&settings.tasks, Task::new(json!({"input": "last"})).id("last")).await;
    assert_eq!(replies.next().await.correlation_id, "last", "and nothing between");
    assert_eq!(sconce.logged("; reconnecting"), 0, "{}", sconce.log());
    proxy.slow_down(usize::MAX);
    assert_eq!(sconce.stop().await, 0);
}
