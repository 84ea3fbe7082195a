//! `sconce dead`, over a real dead-letter queue: what it shows, what it moves, and what it leaves as it
//! was.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use lapin::types::AMQPValue;
use nix::sys::signal::Signal;
use sconce::broker::amqp::{AmqpPublisher, DeadLetterBrowser, LeftBehind};
use serde_json::{Value, json};

use crate::support::client::{Client, Received, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{OnTerminal, Sconce, Settings};
use crate::support::wait::until;

/// A pool whose letters are those of [`letter`].
fn echo() -> Settings {
    Settings::echo(Rabbit::shared().url()).set("pool[0].name", "pool")
}

/// A pool whose queues have been made, without a worker.
async fn idle_pool() -> (Settings, Client) {
    let settings = echo();
    assert_eq!(Sconce::launched(&settings).await.stop().await, 0);
    (settings, Client::connect(&Rabbit::shared().url()).await)
}

/// What a worker writes, `ago` seconds ago.
fn letter(id: impl ToString, reason: &str, ago: u64) -> Task {
    let at = jiff::Timestamp::try_from(SystemTime::now() - Duration::from_secs(ago)).expect("a time");
    Task::new(json!({"input": id.to_string()}))
        .id(id.to_string())
        .header("reason", reason)
        .header("error", "it broke")
        .header("task_id", &id.to_string())
        .header("worker", "host/pool/0")
        .header("dead_lettered_at", &at.to_string())
}

/// One of another pool, which shares the queue.
fn letter_of(worker: &str, id: &str) -> Task {
    letter(id, "poison", 1).header("worker", worker)
}

/// Runs `sconce dead` with these words: the exit code and what it said.
async fn dead(settings: &Settings, words: &str) -> (i32, String) {
    let arguments: Vec<&str> = std::iter::once("dead").chain(words.split_whitespace()).collect();
    let mut sconce = Sconce::run(settings, &arguments);
    (sconce.exit_code().await, sconce.log())
}

/// The task ids that `sconce dead list` tells, in order.
async fn listed(settings: &Settings, filters: &str) -> Vec<String> {
    let (code, said) = dead(settings, &format!("list --json {filters}")).await;
    assert_eq!(code, 0, "{said}");
    let id = |line: &str| serde_json::from_str::<Value>(line).ok()?["task_id"].as_str().map(str::to_owned);
    said.lines().filter_map(id).collect()
}

fn ids(letters: &[Received]) -> Vec<String> {
    letters.iter().map(|letter| letter.correlation_id.clone()).collect()
}

fn numbers(numbers: impl IntoIterator<Item = usize>) -> Vec<String> {
    numbers.into_iter().map(|number| number.to_string()).collect()
}

/// All headers but the one that a quorum queue adds to each delivery.
fn sent_headers(mut task: Received) -> Vec<(String, Value)> {
    task.headers.remove("x-delivery-count");
    task.headers.into_iter().collect()
}

/// Pages of letters looked at, moved and deleted, with others left between them.
async fn keeps_order(settings: &Settings, client: &Client) {
    // More than two pages.
    let reason = |n: usize| ["poison", "attempts", "undecodable"][n % 3];
    client.publish_all(&settings.dead, (0..700).map(|n| letter(n, reason(n), 1))).await;
    assert_eq!(listed(settings, "").await, numbers(0..700));
    assert_eq!(listed(settings, "--limit 40").await, numbers(0..40), "each look leaves all in their order");
    let (code, said) = dead(settings, "requeue --reason poison").await;
    assert_eq!((code, said.contains("requeued 234 letters")), (0, true), "{said}");
    let (code, said) = dead(settings, "purge --yes --reason attempts").await;
    assert_eq!((code, said.contains("233 letters: 233 attempts")), (0, true), "{said}");
    let mut tasks = client.inbox(&settings.tasks).await;
    assert_eq!(ids(&tasks.take(234).await), numbers((0..700).step_by(3)));
    let left = numbers((2..700).step_by(3));
    assert_eq!(listed(settings, "").await, left);
    let mut dead = client.inbox(&settings.dead).await;
    assert_eq!(ids(&dead.take(left.len()).await), left);
    client.ready_becomes(&settings.dead, 0).await;
    client.ready_becomes(&settings.tasks, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn letters_in_a_quorum_queue_are_seen_once_and_keep_their_order() {
    let (settings, client) = idle_pool().await;
    keeps_order(&settings, &client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn letters_in_a_classic_queue_are_seen_once_and_keep_their_order() {
    let settings = echo();
    let client = Client::connect(&Rabbit::shared().url()).await;
    client.declare(&settings.dead, &[]).await;
    client.declare(&settings.tasks, &[]).await;
    keeps_order(&settings, &client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn letters_in_a_quorum_queue_of_the_users_keep_their_order_without_a_delivery_limit_too() {
    let settings = echo();
    let client = Client::connect(&Rabbit::shared().url()).await;
    let quorum = ("x-queue-type", AMQPValue::LongString("quorum".into()));
    client.declare(&settings.dead, &[quorum]).await;
    client.declare(&settings.tasks, &[]).await;
    keeps_order(&settings, &client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_is_narrowed_by_reason_and_age_and_ends_with_a_count() {
    let (settings, client) = idle_pool().await;
    let timeless = Task::new(json!({})).id("timeless");
    let letters =
        [letter("old", "poison", 7_200), letter("new", "poison", 60), letter("odd", "attempts", 60)];
    client.publish_all(&settings.dead, letters.into_iter().chain([timeless])).await;
    for (filters, wanted) in [
        ("", vec!["old", "new", "odd", "timeless"]),
        ("--reason poison", vec!["old", "new"]),
        ("--reason attempts --reason unknown", vec!["odd", "timeless"]),
        ("--older-than 1h", vec!["old"]),
        ("--newer-than 1h", vec!["new", "odd"]),
        ("--newer-than 1d --older-than 90s", vec!["old"]),
        ("--reason unroutable", vec![]),
    ] {
        assert_eq!(listed(&settings, filters).await, wanted, "{filters}");
    }
    let (code, said) = dead(&settings, "list").await;
    assert_eq!(code, 0, "{said}");
    let line = said.lines().find(|line| line.starts_with("old")).unwrap_or_default();
    assert!(line.contains("2h 0m") && line.contains("host/pool/0") && line.ends_with("it broke"), "{said}");
    assert!(
        said.contains(&format!("4 letters in {}: 1 attempts, 2 poison, 1 unknown", settings.dead)),
        "{said}"
    );
    let (code, said) = dead(&settings, "list --reason poisson").await;
    assert!(code == 64 && said.contains("poisson") && said.contains("delivery_limit"), "{code}: {said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_letter_is_shown_whole_by_the_id_of_its_task_or_its_own() {
    let (settings, client) = idle_pool().await;
    let named = letter("t", "poison", 60).header("mine", "kept").with(|it| it.with_message_id("m".into()));
    client.publish_all(&settings.dead, [letter("other", "poison", 60), named]).await;
    for id in ["t", "m"] {
        let (code, said) = dead(&settings, &format!("show {id}")).await;
        assert_eq!(code, 0, "{said}");
        for part in ["reason  poison", "message_id  m", "mine  kept", "{\"input\":\"t\"}"] {
            assert!(said.contains(part), "no {part} in {said}");
        }
        let (_, said) = dead(&settings, &format!("show {id} --json")).await;
        let shown: Value = serde_json::from_str(said.trim()).expect("one JSON line");
        assert_eq!(
            (&shown["headers"]["mine"], &shown["properties"]["message_id"]),
            (&json!("kept"), &json!("m"))
        );
        assert_eq!((&shown["reason"], &shown["body"]), (&json!("poison"), &json!("{\"input\":\"t\"}")));
    }
    let (code, said) = dead(&settings, "show nobody").await;
    assert!(code == 1 && said.contains("\"nobody\""), "{code}: {said}");
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
    assert_eq!(newest, ["m"], "a worker writes down when it died");
    let (code, said) = dead(&settings, "requeue --all --dry-run").await;
    assert!(code == 0 && said.contains("would requeue 1 letter to"), "{code}: {said}");
    client.ready_becomes(&settings.dead, 1).await;
    client.ready_becomes(&settings.tasks, 0).await;
    let (code, said) = dead(&settings, "requeue m").await;
    assert!(code == 0 && said.contains("requeued 1 letter to"), "{code}: {said}");
    let task = client.get(&settings.tasks).await;
    assert_eq!((task.raw.as_slice(), task.correlation_id.as_str()), (&b"no json"[..], "c"));
    let (priority, expiration) = (task.properties.priority(), task.properties.expiration());
    assert_eq!((*priority, expiration), (Some(2), &None), "it would expire at once");
    assert_eq!(sent_headers(task), [("mine".to_owned(), json!("kept"))]);
    client.ready_becomes(&settings.dead, 0).await;
    let (code, said) = dead(&settings, "requeue m").await;
    assert!(code == 1 && said.contains("is meant by m"), "{code}: {said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_reply_found_no_queue_is_computed_again_when_it_is_requeued() {
    let settings = echo();
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    let wanted = format!("{}.wanted", settings.name);
    client.publish(&settings.tasks, Task::new(json!({"input": "a"})).id("lost").reply_to(&wanted)).await;
    client.ready_becomes(&settings.dead, 1).await;
    client.declare(&wanted, &[]).await;
    let (code, said) = dead(&settings, "requeue --reason unroutable").await;
    assert_eq!(code, 0, "{said}");
    let reply = client.get(&wanted).await;
    assert_eq!((reply.correlation_id.as_str(), reply.status_code()), ("lost", 200));
    assert_eq!(sconce.stop().await, 0);
    for queue in [&settings.dead, &settings.tasks, &settings.replies] {
        client.ready_becomes(queue, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parked_reply_of_an_earlier_version_goes_to_its_queue_once_there_is_one() {
    let (settings, client) = idle_pool().await;
    let wanted = format!("{}.wanted", settings.name);
    let parked = letter("lost", "unroutable", 1).header("reply_queue", &wanted).header("status_code", "200");
    client.publish(&settings.dead, parked.with(|it| it.with_type("reply".into()))).await;
    client.publish(&settings.dead, letter("task", "poison", 1)).await;
    let (code, said) = dead(&settings, "requeue --all").await;
    assert!(code == 1 && said.contains(&wanted) && said.contains("does not exist"), "{code}: {said}");
    assert_eq!(client.get(&settings.tasks).await.correlation_id, "task", "its neighbour went");
    assert_eq!(listed(&settings, "").await, ["lost"]);
    client.declare(&wanted, &[]).await;
    let (code, said) = dead(&settings, "requeue --reason unroutable").await;
    assert_eq!(code, 0, "{said}");
    let reply = client.get(&wanted).await;
    assert_eq!((reply.correlation_id.as_str(), reply.header("status_code").as_str()), ("lost", "200"));
    assert!(reply.header("task_id") == "lost" && !reply.header("worker").is_empty(), "{reply:?}");
    assert!(
        !["reason", "error", "reply_queue", "dead_lettered_at"]
            .iter()
            .any(|it| reply.headers.contains_key(*it))
    );
    for queue in [&settings.dead, &settings.tasks, &settings.replies] {
        client.ready_becomes(queue, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_full_queue_does_not_take_stays_in_its_place() {
    let settings = echo();
    let client = Client::connect(&Rabbit::shared().url()).await;
    let overflow = AMQPValue::LongString("reject-publish".into());
    client
        .declare(&settings.tasks, &[("x-max-length", AMQPValue::LongInt(2)), ("x-overflow", overflow)])
        .await;
    client.declare(&settings.dead, &[]).await;
    client.publish_all(&settings.dead, (0..5).map(|n| letter(n, "attempts", 1))).await;
    let (code, said) = dead(&settings, "requeue --all").await;
    assert!(code == 1 && said.contains("is it full?"), "{code}: {said}");
    assert_eq!(client.get(&settings.tasks).await.correlation_id, "0");
    client.ready_becomes(&settings.tasks, 1).await;
    assert_eq!(listed(&settings, "").await, numbers(2..5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_control_message_is_requeued_only_by_its_id() {
    let (settings, client) = idle_pool().await;
    let reboot = letter("r", "unknown_control", 1).with(|it| it.with_type("control.reboot".into()));
    client.publish_all(&settings.dead, [reboot, Task::sentinel().id("s")]).await;
    let (code, said) = dead(&settings, "requeue --all").await;
    assert!(
        code == 1 && said.contains("control.reboot") && said.contains("control.shutdown"),
        "{code}: {said}"
    );
    assert_eq!(listed(&settings, "").await, ["r", "s"]);
    assert_eq!(dead(&settings, "requeue r").await.0, 0);
    assert_eq!(client.get(&settings.tasks).await.kind, "control.reboot");
    assert_eq!(listed(&settings, "").await, ["s"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_deleted_without_a_yes_and_nothing_changes_without_being_named() {
    let (settings, client) = idle_pool().await;
    client.publish_all(&settings.dead, (0..3).map(|n| letter(n, "poison", 1))).await;
    for (words, said) in [
        ("purge --all", "--yes"),
        ("purge --yes", "--all"),
        ("requeue", "--all"),
        ("requeue --dry-run", "--all"),
    ] {
        let (code, log) = dead(&settings, words).await;
        assert!(code == 64 && log.contains(said), "{words}: {code}: {log}");
    }
    let (code, said) = dead(&settings, "purge 1 --dry-run").await;
    assert!(code == 0 && said.contains("would delete") && said.contains("1 letter"), "{code}: {said}");
    assert_eq!(listed(&settings, "").await, numbers(0..3));
    let (code, said) = dead(&settings, "purge 1 4 --yes").await;
    assert!(code == 1 && said.contains("is meant by 4"), "{code}: {said}");
    assert_eq!(listed(&settings, "").await, ["0", "2"]);
    assert_eq!(dead(&settings, "purge --all --yes").await.0, 0);
    client.ready_becomes(&settings.dead, 0).await;
}

/// What `sconce dead purge --all` shows on a terminal, with this answer.
async fn purge_on_a_terminal(settings: &Settings, answer: &str) -> String {
    let queue = [("pool[0].name", "pool"), ("pool[0].dead_letter_queue", settings.dead.as_str())];
    let mut purge = OnTerminal::start("dead purge --all", &Rabbit::shared().url(), &queue);
    purge.press(answer);
    let (code, shown) = purge.end().await;
    assert_eq!(code, 0, "{shown}");
    shown
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_terminal_purge_asks_and_anything_but_yes_is_no() {
    let (settings, client) = idle_pool().await;
    client.publish_all(&settings.dead, (0..3).map(|n| letter(n, "poison", 1))).await;
    let shown = purge_on_a_terminal(&settings, "\n").await;
    assert!(shown.contains("3 letters: 3 poison? [y/N]") && shown.contains(": nothing"), "{shown}");
    assert_eq!(listed(&settings, "").await, numbers(0..3));
    let shown = purge_on_a_terminal(&settings, "y\n").await;
    assert!(shown.contains("deleted from") && shown.contains("3 letters"), "{shown}");
    client.ready_becomes(&settings.dead, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_broker_gave_up_is_listed_with_its_reason_and_begins_anew() {
    let settings = echo().set("broker.delivery_limit", 1);
    assert_eq!(Sconce::launched(&settings).await.stop().await, 0);
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
async fn no_number_of_looks_loses_a_letter_to_the_queues_delivery_limit() {
    let settings = echo();
    let client = Client::connect(&Rabbit::shared().url()).await;
    let quorum = ("x-queue-type", AMQPValue::LongString("quorum".into()));
    client.declare(&settings.dead, &[quorum, ("x-delivery-limit", AMQPValue::LongInt(4))]).await;
    client.publish_all(&settings.dead, (0..20).map(|n| letter(n, "poison", 1))).await;
    for _ in 0..8 {
        assert_eq!(listed(&settings, "").await, numbers(0..20));
    }
    let (_, said) = dead(&settings, "list").await;
    let (_, then) = dead(&settings, "list").await;
    assert!(format!("{said}{then}").contains("20 letters put into"), "{said}{then}");
    let mut letters = client.inbox(&settings.dead).await;
    let letters = letters.take(20).await;
    assert_eq!(ids(&letters), numbers(0..20));
    assert!(letters.iter().all(|it| it.header("reason") == "poison" && it.body["input"].is_string()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_look_ends_where_others_take_letters_and_passes_over_those_that_come_meanwhile() {
    let (settings, client) = idle_pool().await;
    let connector = || crate::amqp_rig::connector(Rabbit::shared().url());
    let publisher = || AmqpPublisher::new(connector());
    client.publish_all(&settings.dead, (0..6).map(|n| letter(n, "poison", 1))).await;
    let look = DeadLetterBrowser::open(connector(), &settings.dead, publisher()).await.expect("a look");
    client.publish(&settings.dead, letter("late", "poison", 1)).await;
    assert_eq!(seen(look).await, numbers(0..6));
    let look = DeadLetterBrowser::open(connector(), &settings.dead, publisher()).await.expect("a look");
    for _ in 0..4 {
        client.get(&settings.dead).await;
    }
    assert_eq!(seen(look).await, ["4", "5", "late"]);
    client.ready_becomes(&settings.dead, 3).await;
}

async fn seen(mut look: DeadLetterBrowser) -> Vec<String> {
    let mut seen = Vec::new();
    while let Some(delivery) = look.next().await.expect("a broker") {
        seen.extend(delivery.message.properties.correlation_id.clone());
        look.leave(delivery).await.expect("a broker");
    }
    assert_eq!(look.hand_back().await.ok(), Some(LeftBehind::default()));
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn a_requeue_that_is_killed_leaves_each_letter_in_one_queue_or_in_both() {
    const LETTERS: usize = 10_000;
    let (settings, client) = idle_pool().await;
    client.publish_all(&settings.dead, (0..LETTERS).map(|n| letter(n, "attempts", 1))).await;
    let mut sconce = Sconce::run(&settings, &["dead", "requeue", "--all"]);
    until("some tasks", || async { client.look(&settings.tasks).await.filter(|(ready, _)| *ready > 64) })
        .await;
    sconce.signal(Signal::SIGKILL);
    assert_eq!(sconce.exit_code().await, -9, "{}", sconce.log());
    // What the command held is the broker's again once nothing is unacked.
    let counts = until("every letter is in a queue", || async {
        let [tasks, dead] = [&settings.tasks, &settings.dead].map(|queue| Rabbit::shared().stats(queue));
        let (tasks, dead) = (tasks?, dead?);
        let all = (tasks.ready + dead.ready) as usize >= LETTERS;
        (all && dead.unacked == 0).then_some((tasks.ready as usize, dead.ready as usize))
    });
    let (in_tasks, in_dead) = counts.await;
    let ids = async |queue: &str, count: usize| {
        let taken = client.inbox(queue).await.take(count).await;
        taken.into_iter().map(|it| it.correlation_id).collect::<BTreeSet<_>>()
    };
    let (requeued, left) = (ids(&settings.tasks, in_tasks).await, ids(&settings.dead, in_dead).await);
    assert_eq!((requeued.len(), left.len()), (in_tasks, in_dead), "none twice in a queue");
    assert_eq!(requeued.union(&left).count(), LETTERS);
    let both = requeued.intersection(&left).count();
    assert!(both <= 64, "{both} in both queues");
}

#[tokio::test(flavor = "multi_thread")]
async fn letters_of_other_pools_stay_unless_they_are_asked_for_by_id() {
    let (settings, client) = idle_pool().await;
    let theirs = [letter_of("elsewhere/rerank/0", "a"), letter_of("host/rerank/1", "b")];
    client.publish_all(&settings.dead, theirs.into_iter().chain([letter("mine", "poison", 1)])).await;
    assert_eq!(listed(&settings, "").await, ["mine"]);
    for words in ["purge --yes --older-than 1w", "requeue --all", "purge --yes --all"] {
        let (code, said) = dead(&settings, words).await;
        assert_eq!((code, said.contains("2 of pool rerank")), (0, !words.contains("1w")), "{said}");
    }
    assert_eq!(client.get(&settings.tasks).await.correlation_id, "mine");
    let (code, said) = dead(&settings, "purge --yes a").await;
    assert!(code == 0 && !said.contains("rerank"), "{code}: {said}");
    assert_eq!(client.get(&settings.dead).await.correlation_id, "b");
    client.ready_becomes(&settings.dead, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_letter_holds_is_told_without_what_commands_a_terminal() {
    let (settings, client) = idle_pool().await;
    let hostile = letter("h", "poison", 1).with(|it| it.with_type("control.\u{1b}[2Jwipe".into()));
    client.publish(&settings.dead, hostile).await;
    let (code, said) = dead(&settings, "requeue --all").await;
    assert!(code == 1 && said.contains("[2Jwipe"), "{code}: {said}");
    assert!(!said.contains('\u{1b}'), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_delivery_limit_of_a_queue_is_found_behind_its_other_arguments() {
    let settings = echo();
    let client = Client::connect(&Rabbit::shared().url()).await;
    let arguments = [
        ("x-queue-type", AMQPValue::LongString("quorum".into())),
        ("x-delivery-limit", AMQPValue::LongInt(4)),
        ("x-message-ttl", AMQPValue::LongInt(3_600_000)),
        ("x-max-length", AMQPValue::LongLongInt(1_000)),
        ("x-overflow", AMQPValue::LongString("reject-publish".into())),
        ("x-dead-letter-exchange", AMQPValue::LongString("".into())),
        ("x-dead-letter-routing-key", AMQPValue::LongString("nowhere".into())),
    ];
    client.declare(&settings.dead, &arguments).await;
    client.publish_all(&settings.dead, (0..3).map(|n| letter(n, "poison", 1))).await;
    for _ in 0..8 {
        let (code, said) = dead(&settings, "list").await;
        assert!(code == 0 && said.contains("3 letters in") && !said.contains("assumed"), "{code}: {said}");
    }
    let (_, said) = dead(&settings.set("broker.declare", false), "list").await;
    assert!(said.contains("cannot be known: 20 is assumed"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worn_letter_that_cannot_be_put_into_the_queue_anew_is_told_of() {
    let rabbit = Rabbit::shared();
    rabbit.ctl(&["add_user", "keeper", "pw"]);
    rabbit.ctl(&["set_permissions", "-p", "/", "keeper", ".*", "^nothing$", ".*"]);
    let settings = Settings::echo(rabbit.url_for("keeper:pw", "/")).set("pool[0].name", "pool");
    let client = Client::connect(&rabbit.url()).await;
    let quorum = ("x-queue-type", AMQPValue::LongString("quorum".into()));
    client.declare(&settings.dead, &[quorum, ("x-delivery-limit", AMQPValue::LongInt(4))]).await;
    client.publish_all(&settings.dead, (0..2).map(|n| letter(n, "poison", 1))).await;
    assert_eq!(dead(&settings, "list").await.0, 0);
    let (code, said) = dead(&settings, "list").await;
    assert!(code == 1 && said.contains("2 letters in") && said.contains("amq.default"), "{code}: {said}");
    client.ready_becomes(&settings.dead, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_look_needs_few_channels_and_connects_again_where_there_are_fewer() {
    let (settings, client) = idle_pool().await;
    client.publish_all(&settings.dead, (0..5_000).map(|n| letter(n, "poison", 1))).await;
    let narrow = crate::amqp_rig::connector(format!("{}?channel_max=8", Rabbit::shared().url()));
    let publisher = AmqpPublisher::new(crate::amqp_rig::connector(Rabbit::shared().url()));
    let look = DeadLetterBrowser::open(narrow, &settings.dead, publisher).await.expect("a look");
    assert_eq!(seen(look).await, numbers(0..5_000));
    let mut dead = client.inbox(&settings.dead).await;
    assert_eq!(ids(&dead.take(5_000).await), numbers(0..5_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_large_letter_few_are_taken_at_once_and_all_keep_their_order() {
    let (settings, client) = idle_pool().await;
    client.publish_all(&settings.dead, (0..300).map(|n| large(n, &[100, 101]))).await;
    for _ in 0..2 {
        assert_eq!(listed(&settings, "").await, numbers(0..300));
    }
    let (code, said) = dead(&settings, "requeue 7 100 299").await;
    assert!(code == 0 && said.contains("requeued 3 letters"), "{code}: {said}");
    let left: Vec<String> = numbers((0..300).filter(|n| ![7, 100, 299].contains(n)));
    assert_eq!(listed(&settings, "").await, left);
}

/// A letter, of 15 MiB where it is one of these: RabbitMQ 4 takes 16.
fn large(n: usize, of: &[usize]) -> Task {
    let letter = letter(n, "poison", 1);
    if of.contains(&n) { Task { body: vec![b' '; 15 << 20], ..letter } } else { letter }
}
