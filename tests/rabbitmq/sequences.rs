//! Sequences over RabbitMQ: streamed in parts, cancelled, ended when nobody listens, and run again after a crash.

use std::collections::BTreeMap;
use std::time::Instant;

use lapin::options::{BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Confirmation};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::messages::serve;
use crate::support::client::{Client, Inbox, Received, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings, signal};
use crate::support::wait::until;

fn settings() -> Settings {
    Settings::echo(Rabbit::shared().url()).set("pool[0].model", "script?faults")
}

/// Where 10,000 tokens have room, which take 200 s.
const LONG: &str = "script?sequences=2&context=20000&tokens=80000";

/// A sequence of so many tokens, whose steps take 20 ms.
fn sequence(max_tokens: usize, more: Value) -> Value {
    let mut script = json!({"prompt": 4, "max_tokens": max_tokens, "step_ms": 20});
    let (Some(fields), Value::Object(more)) = (script.as_object_mut(), more) else { panic!("objects") };
    fields.extend(more);
    script
}

fn words(count: usize) -> String {
    (0..count).map(|word| format!("{word} ")).collect()
}

/// What arrives until so many final replies have, in the order of its coming.
async fn received(inbox: &mut Inbox, replies: usize) -> Vec<Received> {
    let mut all = Vec::new();
    let mut left = replies;
    while left > 0 {
        let one = inbox.next().await;
        left -= usize::from(one.kind == "reply");
        all.push(one);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_come_in_order_before_their_reply_over_any_kind_of_queue() {
    let settings = settings();
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let classic = format!("{}.classic", settings.name);
    client.declare(&classic, &[]).await;
    let mut second = client.inbox(&classic).await;
    let task =
        |id: &str, queue: &str| Task::new(sequence(40, json!({"stream": true}))).id(id).reply_to(queue);
    client.publish_all(&settings.tasks, [task("quorum", &settings.replies), task("classic", &classic)]).await;
    for (inbox, id) in [(&mut inbox, "quorum"), (&mut second, "classic")] {
        let all = received(inbox, 1).await;
        let (reply, parts) = all.split_last().expect("a reply");
        assert_eq!((reply.status_code(), &*reply.correlation_id), (200, id), "{reply:?}");
        assert_eq!(reply.body["text"], words(40));
        assert!(reply.headers["first_token_us"].as_i64() > Some(0), "{reply:?}");
        assert!(parts.len() >= 2, "{parts:?}");
        for (seq, part) in parts.iter().enumerate() {
            assert_eq!((&*part.kind, &*part.correlation_id), ("reply.part", id));
            assert_eq!(part.headers["seq"].as_i64(), Some(seq as i64));
            assert_eq!(*part.properties.delivery_mode(), Some(1), "transient");
        }
        let text: String = parts.iter().filter_map(|part| part.body["text"].as_str()).collect();
        assert_eq!(text, words(40));
    }
}

/// The texts of so many tasks, by task.
async fn texts(inbox: &mut Inbox, tasks: usize) -> BTreeMap<String, String> {
    let mut texts = BTreeMap::new();
    while texts.len() < tasks {
        let reply = inbox.next().await;
        if reply.kind == "reply" {
            let text = reply.body["text"].as_str().unwrap_or_else(|| panic!("{reply:?}")).to_owned();
            texts.insert(reply.correlation_id, text);
        }
    }
    texts
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_killed_with_sixteen_sequences_running_brings_them_all_again() {
    let settings = settings().set("launcher.restart_delay", "50ms");
    let (sconce, client, mut inbox) = serve(&settings).await;
    let task =
        |n: usize| Task::new(sequence(100 + n, json!({"stream": n.is_multiple_of(2)}))).id(n.to_string());
    client.publish_all(&settings.tasks, (0..16).map(|n| task(n).reply_to(&settings.replies))).await;
    assert_eq!(inbox.next().await.kind, "reply.part");
    signal(sconce.workers()[0], Signal::SIGKILL);
    for (id, text) in texts(&mut inbox, 16).await {
        assert_eq!(text, words(100 + id.parse::<usize>().expect("a number")), "{id}");
    }
    assert_eq!(client.look(&settings.dead).await.expect("a queue").0, 0, "none is blamed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadly_sequence_is_found_among_sixteen_and_the_others_are_answered() {
    found_among_sixteen(json!({"fail": "exit", "at": 3})).await;
}

async fn found_among_sixteen(killer: Value) {
    let settings = settings().set("launcher.restart_delay", "50ms");
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let task = |n: usize| {
        let more = if n == 11 { killer.clone() } else { json!({}) };
        Task::new(sequence(20, more)).id(n.to_string())
    };
    client.publish_all(&settings.tasks, (0..16).map(task)).await;
    let mut answered = 0;
    while answered < 16 {
        let reply = inbox.next().await;
        answered += 1;
        let expected = if reply.correlation_id == "11" { 500 } else { 200 };
        assert_eq!(reply.status_code(), expected, "{reply:?}");
    }
    let letter = client.get(&settings.dead).await;
    assert_eq!((&*letter.correlation_id, &*letter.header("reason")), ("11", "poison"));
}

/// Publishes a message to an exchange, and returns once the broker has it in a queue.
#[expect(clippy::disallowed_methods, reason = "a requester publishes as any producer does")]
async fn publish_to(client: &Client, (exchange, key): (&str, &str), properties: BasicProperties, body: &str) {
    let channel = client.channel().await;
    channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
    let mandatory = BasicPublishOptions { mandatory: true, immediate: false };
    let sent =
        channel.basic_publish(exchange.into(), key.into(), mandatory, body.as_bytes(), properties).await;
    let confirmed = sent.expect("an open channel").await.expect("a confirm");
    assert!(confirmed.take_message().is_none(), "nobody listens to {exchange}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_requester_ends_its_own_task_and_an_operator_any_by_its_id() {
    let settings = settings().set("pool[0].model", LONG).controlled().set("pool[0].devices", "cpu,cpu");
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let long =
        |id: &str| Task::new(sequence(10_000, json!({"stream": true}))).id(id).reply_to(&settings.replies);
    client.publish_all(&settings.tasks, ["a", "b", "c"].map(long)).await;
    let mut running = std::collections::BTreeSet::new();
    while running.len() < 3 {
        running.insert(inbox.next().await.correlation_id);
    }
    let cancel = |kind: &str, id: &str| {
        BasicProperties::default()
            .with_type(kind.into())
            .with_correlation_id(id.into())
            .with_reply_to(settings.replies.as_str().into())
    };
    let exchange = settings.control();
    publish_to(&client, (exchange, "cancel"), cancel("control.cancel", "b"), "").await;
    // What only an operator may is not done for a requester's key.
    publish_to(&client, (exchange, "cancel"), cancel("", "x"), r#"{"command": "shutdown"}"#).await;
    let by_operator = Sconce::run(&settings, &["ctl", "cancel", "a", "--expect", "1"]).exit_code().await;
    assert_eq!(by_operator, 0);
    let mut unknown = Sconce::run(&settings, &["ctl", "cancel", "nope", "--expect", "1"]);
    assert_eq!(unknown.exit_code().await, 1, "{}", unknown.log());
    unknown.wait_for_log("no worker holds a task \"nope\"").await;
    let (mut ended, mut refused) = (Vec::new(), 0);
    while ended.len() < 2 || refused == 0 {
        let one = inbox.next().await;
        match &*one.kind {
            "reply" => ended.push((one.correlation_id.clone(), one.status_code(), one.header("status"))),
            "control.answer" => {
                assert!(
                    one.body["error"].as_str().is_some_and(|it| it.contains("control.cancel")),
                    "{one:?}"
                );
                refused += 1;
            }
            _ => {}
        }
    }
    ended.sort();
    let cancelled = |id: &str| (id.to_owned(), 499, "cancelled".to_owned());
    assert_eq!(ended, [cancelled("a"), cancelled("b")]);
    assert_eq!(inbox.next().await.correlation_id, "c", "it goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_cancellations_delays_no_order_and_fills_no_log() {
    let settings = settings().set("pool[0].model", LONG).controlled();
    let (mut sconce, client, mut inbox) = serve(&settings).await;
    let long = Task::new(sequence(10_000, json!({"stream": true}))).id("a").reply_to(&settings.replies);
    client.publish(&settings.tasks, long).await;
    inbox.next().await;
    let cancel = |kind: &str, id: &str| {
        BasicProperties::default()
            .with_type(kind.into())
            .with_correlation_id(id.into())
            .with_reply_to(settings.replies.as_str().into())
    };
    let began = Instant::now();
    let channel = client.channel().await;
    for number in 0..40_000 {
        let kind = if number % 2 == 0 { "control.cancel" } else { "nonsense" };
        drop(flood(&channel, settings.control(), cancel(kind, &number.to_string())).await);
    }
    let order = ["ctl", "pause", "--all", "--timeout", "30s", "--expect", "1"];
    let paused = Sconce::run(&settings, &order).exit_code().await;
    assert_eq!(paused, 0, "the order is carried out beside the flood");
    // The broker refuses a cancellation while too many wait.
    let own = client.channel().await;
    own.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    until("the cancellation is accepted", async || {
        let confirm = flood(&own, settings.control(), cancel("control.cancel", "a")).await;
        confirm.await.unwrap().is_ack().then_some(())
    })
    .await;
    loop {
        let one = inbox.next().await;
        if one.kind == "reply" {
            assert_eq!((one.correlation_id.as_str(), one.status_code()), ("a", 499));
            break;
        }
    }
    let warnings = sconce.logged("remote control: refused") as u64;
    assert!((1..=began.elapsed().as_secs() + 1).contains(&warnings), "{warnings} warnings");
    assert_eq!(Sconce::run(&settings, &["ctl", "shutdown", "--all"]).exit_code().await, 0);
    assert_eq!(sconce.exit_code().await, 0);
}

#[expect(clippy::disallowed_methods, reason = "a requester publishes as any producer does")]
async fn flood(
    channel: &lapin::Channel,
    exchange: &str,
    properties: BasicProperties,
) -> impl Future<Output = lapin::Result<Confirmation>> + use<> {
    let options = BasicPublishOptions::default();
    channel
        .basic_publish(exchange.into(), "cancel".into(), options, b"", properties)
        .await
        .expect("published")
}

#[expect(clippy::disallowed_methods, reason = "direct reply-to wants the channel that consumes")]
async fn ask_directly(channel: &lapin::Channel, queue: &str, body: &Value) -> lapin::Consumer {
    let direct = "amq.rabbitmq.reply-to";
    let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
    let replies = channel.basic_consume(direct.into(), "".into(), options, FieldTable::default()).await;
    let properties = BasicProperties::default().with_reply_to(direct.into());
    let body = body.to_string();
    let sent =
        channel.basic_publish("".into(), queue.into(), Default::default(), body.as_bytes(), properties).await;
    sent.expect("an open channel").await.expect("a sent task");
    replies.expect("a consumer")
}

#[tokio::test(flavor = "multi_thread")]
async fn requesters_who_left_are_missed_with_parts_or_without_also_over_direct_reply_to() {
    let settings = settings().set("pool[0].model", LONG);
    let (sconce, client, mut inbox) = serve(&settings).await;
    let long = sequence(10_000, json!({}));
    let streamed = sequence(10_000, json!({"stream": true}));
    let own = Client::connect(&Rabbit::shared().url()).await;
    let (named, mut reads_parts) = (own.private_inbox().await, own.private_inbox().await);
    client.publish(&settings.tasks, Task::new(long.clone()).reply_to(&named.queue)).await;
    client.publish(&settings.tasks, Task::new(streamed.clone()).reply_to(&reads_parts.queue)).await;
    assert_eq!(reads_parts.next().await.kind, "reply.part");
    let leaving = client.channel().await;
    let unheard = ask_directly(&leaving, &settings.tasks, &long).await;
    let stays = Task::new(sequence(10, json!({}))).id("stays");
    client.publish(&settings.tasks, stays).await;
    leaving.close(200, "the requester leaves".into()).await.expect("closed");
    drop((own, named, reads_parts, unheard));
    assert_eq!(inbox.next().await.correlation_id, "stays");
    client.becomes(&settings.tasks, (0, 1)).await;
    until("both of no parts are missed", || async { (sconce.logged("the task ends") == 2).then_some(()) })
        .await;
    let mut kept = Vec::new();
    for _ in 0..3 {
        let letter = client.get(&settings.dead).await;
        assert_eq!(letter.header("reason"), "unroutable", "{letter:?}");
        kept.push(letter.body);
    }
    assert_eq!(kept.iter().filter(|body| **body == long).count(), 2);
    assert!(kept.contains(&streamed), "{kept:?}");
}
