//! `sconce dead`, over a real dead-letter queue: what it shows, what it moves, and what it leaves.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use lapin::types::AMQPValue;
use nix::sys::signal::Signal;
use sconce::broker::amqp::{DeadLetterBrowser, NearLimit};
use serde_json::{Value, json};

use crate::amqp_rig::declare_queues;
use crate::support::client::{Client, Received, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};
use crate::support::wait::until;

/// A pool whose dead letters are those of [`dead_letter`].
fn echo() -> Settings {
    Settings::echo(Rabbit::shared().url()).set("pool[0].name", "pool")
}

/// A pool whose queues have been made, without a worker.
async fn idle_pool() -> (Settings, Client) {
    let settings = echo();
    declare_queues(&settings, 20).await;
    (settings, Client::connect(&Rabbit::shared().url()).await)
}

fn quorum() -> (&'static str, AMQPValue) {
    ("x-queue-type", AMQPValue::LongString("quorum".into()))
}

/// What a worker writes, `ago` seconds ago.
fn dead_letter(id: impl ToString, reason: &str, ago: u64) -> Task {
    let at = jiff::Timestamp::try_from(SystemTime::now() - Duration::from_secs(ago)).expect("a time");
    Task::new(json!({"input": id.to_string()}))
        .id(id.to_string())
        .header("reason", reason)
        .header("error", "it broke")
        .header("task_id", &id.to_string())
        .header("worker", "host/pool/0")
        .header("dead_lettered_at", &at.to_string())
}

/// Runs `sconce dead` with these words: the exit code and what it said.
async fn dead(settings: &Settings, words: &str) -> (i32, String) {
    let arguments: Vec<&str> = std::iter::once("dead").chain(words.split_whitespace()).collect();
    let mut sconce = Sconce::run(settings, &arguments);
    (sconce.exit_code().await, sconce.log())
}

/// The same, where it is to end with `code` and to say all of these.
async fn dead_says(settings: &Settings, words: &str, code: i32, parts: &[&str]) {
    let (ended, said) = dead(settings, words).await;
    assert_eq!(ended, code, "{words}: {said}");
    for part in parts {
        assert!(said.contains(part), "{words}: no {part} in {said}");
    }
}

/// The task ids that `sconce dead list` tells, in order.
async fn listed(settings: &Settings, filters: &str) -> Vec<String> {
    let (code, said) = dead(settings, &format!("list --json {filters}")).await;
    assert_eq!(code, 0, "{said}");
    let id = |line: &str| serde_json::from_str::<Value>(line).ok()?["task_id"].as_str().map(str::to_owned);
    said.lines().filter_map(id).collect()
}

/// Takes `count` messages: their ids.
async fn taken(client: &Client, queue: &str, count: usize) -> BTreeSet<String> {
    let taken = client.inbox(queue).await.take(count).await;
    taken.into_iter().map(|it| it.correlation_id).collect()
}

fn numbers<T: FromIterator<String>>(numbers: impl IntoIterator<Item = usize>) -> T {
    numbers.into_iter().map(|number| number.to_string()).collect()
}

/// All headers but the one that a quorum queue adds to each delivery.
fn sent_headers(mut task: Received) -> Vec<(String, Value)> {
    task.headers.remove("x-delivery-count");
    task.headers.into_iter().collect()
}

/// Far more acks than RabbitMQ takes from a channel at once, between dead letters that are left.
async fn shows_moves_deletes_and_leaves(settings: &Settings, client: &Client) {
    let reason = |n: usize| ["poison", "attempts", "undecodable"][n % 3];
    let dead_letters = (0..600).map(|n| dead_letter(n, reason(n), 1_000 - n as u64));
    client.publish_all(&settings.dead, dead_letters).await;
    // The second finds all again, and in the order of time however they came back.
    for _ in 0..2 {
        assert_eq!(listed(settings, "").await, numbers::<Vec<_>>(0..600));
    }
    dead_says(settings, "list --limit 3", 0, &["and 597 more", "600 dead letters in"]).await;
    dead_says(settings, "requeue --reason poison", 0, &["requeued 200 dead letters"]).await;
    dead_says(settings, "purge --yes --reason attempts", 0, &["200 dead letters: 200 attempts"]).await;
    client.ready_becomes(&settings.dead, 200).await;
    assert_eq!(taken(client, &settings.tasks, 200).await, numbers((0..600).step_by(3)));
    assert_eq!(taken(client, &settings.dead, 200).await, numbers((2..600).step_by(3)));
    client.ready_becomes(&settings.tasks, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_loses_what_is_requeued_or_deleted_and_gets_the_rest_back() {
    let (settings, client) = idle_pool().await;
    shows_moves_deletes_and_leaves(&settings, &client).await;
    let classic = echo();
    client.declare(&classic.dead, &[]).await;
    client.declare(&classic.tasks, &[]).await;
    shows_moves_deletes_and_leaves(&classic, &client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_is_shown_whole_by_the_id_of_its_task_or_its_own() {
    let (settings, client) = idle_pool().await;
    let named = dead_letter("t", "poison", 60).header("mine", "kept");
    let named = named.with(|it| it.with_message_id("m".into()));
    client.publish_all(&settings.dead, [dead_letter("other", "poison", 60), named]).await;
    for id in ["t", "m"] {
        let parts = ["reason  poison", "message_id  m", "mine  kept", "{\"input\":\"t\"}"];
        dead_says(&settings, &format!("show {id}"), 0, &parts).await;
        let (_, said) = dead(&settings, &format!("show {id} --json")).await;
        let shown: Value = serde_json::from_str(said.trim()).expect("one JSON line");
        assert_eq!((&shown["headers"]["mine"], &shown["reason"]), (&json!("kept"), &json!("poison")));
        assert_eq!(
            (&shown["properties"]["message_id"], &shown["body"]),
            (&json!("m"), &json!("{\"input\":\"t\"}"))
        );
    }
    dead_says(&settings, "show nobody", 1, &["\"nobody\""]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_is_requeued_as_its_producer_sent_it() {
    let settings = echo();
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    let odd = Task::raw(b"no json".to_vec()).id("c").header("mine", "kept");
    let odd = odd.with(|it| it.with_message_id("m".into()).with_priority(2).with_expiration("60000".into()));
    client.publish(&settings.tasks, odd).await;
    client.ready_becomes(&settings.dead, 1).await;
    assert_eq!(sconce.stop().await, 0);
    let newest = listed(&settings, "--newer-than 1h --reason undecodable").await;
    assert_eq!(newest, ["m"], "a worker writes down the time");
    dead_says(&settings, "requeue --all --dry-run", 0, &["would requeue 1 dead letter to"]).await;
    client.ready_becomes(&settings.dead, 1).await;
    client.ready_becomes(&settings.tasks, 0).await;
    dead_says(&settings, "requeue m", 0, &["requeued 1 dead letter to"]).await;
    let task = client.get(&settings.tasks).await;
    assert_eq!((task.raw.as_slice(), task.correlation_id.as_str()), (&b"no json"[..], "c"));
    let (priority, expiration) = (task.properties.priority(), task.properties.expiration());
    assert_eq!((*priority, expiration), (Some(2), &None), "it would expire at once");
    assert_eq!(sent_headers(task), [("mine".to_owned(), json!("kept"))]);
    client.ready_becomes(&settings.dead, 0).await;
    dead_says(&settings, "requeue m", 1, &["matches m"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_brokers_dead_letter_is_listed_with_its_reason_and_begins_anew() {
    let settings = echo();
    declare_queues(&settings, 1).await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    client.publish(&settings.tasks, Task::new(json!({"input": "p"})).id("p").header("mine", "kept")).await;
    for _ in 0..2 {
        client.return_one(&settings.tasks).await;
    }
    client.ready_becomes(&settings.dead, 1).await;
    assert_eq!(listed(&settings, "--reason delivery_limit --newer-than 1h").await, ["p"]);
    assert_eq!(dead(&settings, "requeue --reason delivery_limit").await.0, 0);
    let task = client.get(&settings.tasks).await;
    assert_eq!(task.correlation_id, "p");
    assert_eq!(sent_headers(task), [("mine".to_owned(), json!("kept"))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_its_queue_does_not_take_stays_and_is_named() {
    let settings = echo();
    let client = Client::connect(&Rabbit::shared().url()).await;
    let overflow = AMQPValue::LongString("reject-publish".into());
    let full = [("x-max-length", AMQPValue::LongInt(2)), ("x-overflow", overflow)];
    client.declare(&settings.tasks, &full).await;
    client.declare(&settings.dead, &[]).await;
    let control = dead_letter("r", "unknown_control", 1).with(|it| it.with_type("control.\u{1b}[2Jr".into()));
    let dead_letters = (0..5).map(|n| dead_letter(n, "attempts", 9 - n));
    client.publish_all(&settings.dead, std::iter::once(control).chain(dead_letters)).await;
    let parts = ["is it full?", "control. [2Jr", "4 dead letters asked for, but not requeued"];
    dead_says(&settings, "requeue --all", 1, &parts).await;
    assert_eq!(client.get(&settings.tasks).await.correlation_id, "0");
    client.ready_becomes(&settings.tasks, 1).await;
    assert_eq!(listed(&settings, "").await, ["2", "3", "4", "r"]);
    assert_eq!(dead(&settings, "requeue r").await.0, 0, "a control message goes by its id");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_deleted_without_a_yes_or_changed_without_being_named() {
    let (settings, client) = idle_pool().await;
    client.publish_all(&settings.dead, (0..3).map(|n| dead_letter(n, "poison", 9 - n))).await;
    for words in ["purge --yes", "requeue", "requeue --dry-run"] {
        dead_says(&settings, words, 64, &["--all"]).await;
    }
    let told = format!("would delete from {}: 1 dead letter: 1 poison", settings.dead);
    dead_says(&settings, "purge 1", 0, &[&told, "give --yes to delete"]).await;
    assert_eq!(listed(&settings, "").await, ["0", "1", "2"]);
    dead_says(&settings, "purge 1 4 --yes", 1, &["matches 4"]).await;
    assert_eq!(listed(&settings, "").await, ["0", "2"]);
    assert_eq!(dead(&settings, "purge --all --yes").await.0, 0);
    client.ready_becomes(&settings.dead, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_other_pools_stay_unless_they_are_asked_for_by_id() {
    let (settings, client) = idle_pool().await;
    let theirs = [("elsewhere/rerank/0", "a"), ("host/rerank/1", "b")]
        .map(|(worker, id)| dead_letter(id, "poison", 1).header("worker", worker));
    client.publish_all(&settings.dead, theirs.into_iter().chain([dead_letter("mine", "poison", 1)])).await;
    assert_eq!(listed(&settings, "").await, ["mine"]);
    dead_says(&settings, "requeue --all", 0, &["2 dead letters of other pools in"]).await;
    dead_says(&settings, "purge --yes --all", 0, &["2 dead letters of other pools in"]).await;
    assert_eq!(client.get(&settings.tasks).await.correlation_id, "mine");
    let (code, said) = dead(&settings, "purge --yes a").await;
    assert!(code == 0 && !said.contains("other pools"), "{code}: {said}");
    assert_eq!(client.get(&settings.dead).await.correlation_id, "b");
    client.ready_becomes(&settings.dead, 0).await;
}

async fn browser(settings: &Settings) -> DeadLetterBrowser {
    let connector = crate::amqp_rig::connector(Rabbit::shared().url());
    DeadLetterBrowser::open(connector, &settings.dead).await.expect("a browser")
}

/// Reads all and hands it back: the ids, sorted.
async fn read(mut browser: DeadLetterBrowser) -> Vec<String> {
    let mut ids = Vec::new();
    while let Some(delivery) = browser.next().await.expect("a broker") {
        ids.extend(delivery.message.properties.correlation_id.clone());
        browser.leave(delivery).await.expect("a broker");
    }
    assert_eq!(browser.close().await.ok(), Some(NearLimit::default()));
    ids.sort();
    ids
}

#[tokio::test(flavor = "multi_thread")]
async fn a_browser_ends_where_others_take_messages_and_passes_over_late_ones() {
    let (settings, client) = idle_pool().await;
    client.publish_all(&settings.dead, (0..6).map(|n| dead_letter(n, "poison", 1))).await;
    let before = browser(&settings).await;
    client.publish(&settings.dead, dead_letter("late", "poison", 1)).await;
    assert_eq!(read(before).await, numbers::<Vec<_>>(0..6));
    let before = browser(&settings).await;
    for _ in 0..4 {
        client.get(&settings.dead).await;
    }
    assert_eq!(read(before).await.len(), 3);
    client.ready_becomes(&settings.dead, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_channel_that_closes_right_behind_200_acks_has_acked_them_all() {
    let (settings, client) = idle_pool().await;
    client.publish_all(&settings.dead, (0..300).map(|n| dead_letter(n, "poison", 1))).await;
    let mut browser = browser(&settings).await;
    let mut tags = Vec::new();
    while let Some(delivery) = browser.next().await.expect("a broker") {
        tags.push(delivery.delivery_tag);
    }
    for tag in &tags[..200] {
        browser.ack(*tag).await.expect("a broker");
    }
    browser.close().await.expect("a broker");
    assert_eq!(taken(&client, &settings.dead, 100).await, numbers(200..300));
    client.ready_becomes(&settings.dead, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queues_delivery_limit_loses_nothing_however_often_it_is_read() {
    let settings = echo();
    let client = Client::connect(&Rabbit::shared().url()).await;
    client.declare(&settings.dead, &[quorum(), ("x-delivery-limit", AMQPValue::LongInt(20))]).await;
    client.publish_all(&settings.dead, (0..40).map(|n| dead_letter(n, "poison", 99 - n))).await;
    for _ in 0..17 {
        assert_eq!(read(browser(&settings).await).await.len(), 40);
    }
    let rabbit = Rabbit::shared();
    rabbit.add_user("keeper", "pw", [".*", "^nothing$", ".*"]);
    let keeper = settings.clone().over(rabbit.url_for("keeper:pw", "/"));
    let parts = ["40 dead letters in", "amq.default", "cannot be known: 20 is assumed"];
    dead_says(&keeper, "list", 1, &parts).await;
    dead_says(&settings, "list", 0, &["40 dead letters republished"]).await;
    for _ in 0..5 {
        assert_eq!(listed(&settings, "").await, numbers::<Vec<_>>(0..40));
    }
    let dead_letters = client.inbox(&settings.dead).await.take(40).await;
    assert!(dead_letters.iter().all(|it| it.header("reason") == "poison" && it.body["input"].is_string()));
    client.ready_becomes(&settings.dead, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_requeue_leaves_each_dead_letter_in_one_queue_or_in_both() {
    const COUNT: usize = 10_000;
    let (settings, client) = idle_pool().await;
    client.publish_all(&settings.dead, (0..COUNT).map(|n| dead_letter(n, "attempts", 1))).await;
    let mut sconce = Sconce::run(&settings, &["dead", "requeue", "--all"]);
    until("some tasks", || async { client.look(&settings.tasks).await.filter(|(ready, _)| *ready > 64) })
        .await;
    sconce.signal(Signal::SIGKILL);
    assert_eq!(sconce.exit_code().await, -9, "{}", sconce.log());
    // What the command held is back once nothing is unacked.
    let counts = until("every dead letter is in a queue", || async {
        let [tasks, dead] = [&settings.tasks, &settings.dead].map(|queue| Rabbit::shared().stats(queue));
        let (tasks, dead) = (tasks?, dead?);
        let all = (tasks.ready + dead.ready) as usize >= COUNT;
        (all && dead.unacked == 0).then_some((tasks.ready as usize, dead.ready as usize))
    });
    let (in_tasks, in_dead) = counts.await;
    let requeued = taken(&client, &settings.tasks, in_tasks).await;
    let left = taken(&client, &settings.dead, in_dead).await;
    assert_eq!((requeued.len(), left.len()), (in_tasks, in_dead), "none twice in a queue");
    assert_eq!(requeued.union(&left).count(), COUNT);
    let both = requeued.intersection(&left).count();
    assert!(both <= 64, "{both} in both queues");
}
