//! Tasks and replies, to the letter of the contract: every property and header of a reply, where it
//! goes, deadlines, traces, dead letters.

use lapin::types::AMQPValue;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

use crate::support::client::{Client, Received, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Gate, Sconce, Settings};

const ONE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// The folder of the real weights.
pub fn minilm() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/all-MiniLM-L6-v2");
    assert!(folder.join("model.safetensors").is_file(), "the real weights are needed: make models");
    folder
}

/// A service, a client, and its default reply queue.
pub async fn serve(settings: &Settings) -> (Sconce, Client, crate::support::client::Inbox) {
    let sconce = Sconce::launched(settings).await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    let inbox = client.inbox(&settings.replies).await;
    (sconce, client, inbox)
}

/// Has a service compute `task`, before anything else can join it, until the gate is opened.
pub async fn busy_with(sconce: &Sconce, client: &Client, settings: &Settings, task: Task) -> Gate {
    let gate = sconce.gate();
    client.publish(&settings.tasks, task.held_at(&gate)).await;
    gate.held().await;
    gate
}

/// Waits until a worker has preprocessed all that was published before: what is no task is answered at once,
/// behind what came before it.
pub async fn are_taken(client: &Client, settings: &Settings, inbox: &mut crate::support::client::Inbox) {
    client.publish(&settings.tasks, Task::new(json!({"sleep_ms": "long"})).id("mark")).await;
    assert_eq!(inbox.next().await.correlation_id, "mark");
}

fn now_plus(ms: i64) -> String {
    (jiff::Timestamp::now() + jiff::SignedDuration::from_millis(ms)).to_string()
}

fn message_id(reply: &Received) -> String {
    reply.properties.message_id().as_ref().map(|id| id.as_str().to_owned()).unwrap_or_default()
}

/// The headers of a reply to task `m-1`, with two inputs, in a batch of its own.
fn assert_headers(reply: &Received, pool: &str) {
    let table = reply.properties.headers().clone().unwrap_or_default();
    assert_eq!(table.inner().len(), reply.headers.len(), "headers are flat scalars");
    let mut names: Vec<_> = reply.headers.keys().map(String::as_str).collect();
    names.sort_unstable();
    let expected = [
        "attempt",
        "batch_size",
        "batch_tokens",
        "compute_us",
        "device",
        "dtype",
        "model",
        "prepare_us",
        "queue_us",
        "status",
        "status_code",
        "task_id",
        "traceparent",
        "tracestate",
        "wait_us",
        "worker",
    ];
    assert_eq!(names, expected);
    let texts = [
        ("status", "succeeded"),
        ("task_id", "m-1"),
        ("device", "cpu"),
        ("dtype", "f32"),
        ("model", "echo?faults"),
        ("traceparent", ONE),
        ("tracestate", "vendor=1"),
    ];
    for (name, value) in texts {
        assert_eq!(reply.header(name), value, "{name}");
    }
    let worker = reply.header("worker");
    assert!(worker.ends_with(&format!("/{}/0", pool)) && worker.split('/').count() == 3, "{worker}");
    for (name, value) in [("status_code", 200), ("attempt", 1), ("batch_size", 2), ("batch_tokens", 2)] {
        assert_eq!(reply.headers[name].as_i64(), Some(value), "{name}");
    }
    for name in ["queue_us", "prepare_us", "wait_us", "compute_us"] {
        let us = reply.headers[name].as_i64().unwrap_or(-1);
        assert!((0..60_000_000).contains(&us), "{name} is {us}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_carries_every_property_and_header_of_the_contract() {
    let settings = Settings::echo(Rabbit::shared().url());
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let mut ids = Vec::new();
    for mode in [1, 2] {
        let task = Task::new(json!({"input": ["a", "b"]}))
            .id("the same")
            .header("traceparent", ONE)
            .header("tracestate", "vendor=1")
            .with(|it| it.with_message_id("m-1".into()).with_delivery_mode(mode).with_priority(3));
        client.publish(&settings.tasks, task).await;
        let reply = inbox.next().await;
        assert_eq!(reply.correlation_id, "the same");
        assert_eq!(reply.kind, "reply");
        assert_eq!(*reply.properties.delivery_mode(), Some(mode), "as the task's");
        assert_eq!(reply.properties.content_type().as_ref().map(|it| it.as_str()), Some("application/json"));
        ids.push(message_id(&reply));
        assert_headers(&reply, &settings.name);
        assert_eq!(reply.body, json!({"object": "echo", "input": ["a", "b"], "model": "echo"}));
    }
    assert!(ids[0] != ids[1] && ids.iter().all(|id| !id.is_empty() && id != "m-1"), "{ids:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tasks_id_is_its_message_id_else_its_correlation_id_else_one_is_made() {
    let settings = Settings::echo(Rabbit::shared().url());
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let task = || Task::new(json!({"input": "a"})).id("corr");
    client.publish(&settings.tasks, task().with(|it| it.with_message_id("mess".into()))).await;
    assert_eq!(inbox.next().await.header("task_id"), "mess");
    client.publish(&settings.tasks, task()).await;
    assert_eq!(inbox.next().await.header("task_id"), "corr");
    client.publish(&settings.tasks, task().with(|_| lapin::BasicProperties::default())).await;
    let nameless = inbox.next().await;
    assert!(nameless.header("task_id").len() > 8, "{nameless:?}");
    assert!(nameless.properties.correlation_id().is_none(), "there is none to echo");
}

#[tokio::test(flavor = "multi_thread")]
async fn direct_reply_to_works() {
    use futures_util::StreamExt;
    let settings = Settings::echo(Rabbit::shared().url());
    let (_sconce, client, _inbox) = serve(&settings).await;
    let channel = client.channel().await;
    let options = lapin::options::BasicConsumeOptions { no_ack: true, ..Default::default() };
    let direct = "amq.rabbitmq.reply-to";
    let consumer = channel.basic_consume(direct.into(), "".into(), options, Default::default()).await;
    let mut consumer = consumer.expect("a consumer");
    let task = Task::new(json!({"input": "direct"})).id("d").reply_to(direct);
    #[expect(clippy::disallowed_methods, reason = "direct replies come to the channel that asked")]
    let sent = channel
        .basic_publish(
            "".into(),
            settings.tasks.as_str().into(),
            Default::default(),
            &task.body,
            task.properties,
        )
        .await;
    sent.expect("an open channel");
    let reply = crate::support::wait::bounded("a direct reply", consumer.next()).await;
    let reply = reply.expect("an open channel").expect("a delivery");
    let body: Value = serde_json::from_slice(&reply.data).expect("JSON");
    assert_eq!(body["input"], "direct");
    assert_eq!(reply.properties.correlation_id().as_ref().map(|it| it.as_str()), Some("d"));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_reply_queue_a_task_is_computed_and_acked() {
    let settings = Settings::echo(Rabbit::shared().url()).set("pool[0].reply_queue", "\"\"");
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    let mut own = client.private_inbox().await;
    client.publish(&settings.tasks, Task::new(json!({"input": "quiet"}))).await;
    client.publish(&settings.tasks, Task::new(json!({"input": "loud"})).reply_to(&own.queue)).await;
    assert_eq!(own.next().await.body["input"], "loud");
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&settings.tasks, 0).await;
    assert_eq!(client.look(&settings.dead).await, Some((0, 0)));
    assert_eq!(client.look(&settings.replies).await, None, "nobody asked for that queue");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_has_nowhere_to_go_is_parked_among_the_dead_letters() {
    let settings = Settings::echo(Rabbit::shared().url());
    let (sconce, client, mut inbox) = serve(&settings).await;
    client
        .publish(&settings.tasks, Task::new(json!({"input": "a"})).id("lost").reply_to("no.such.queue"))
        .await;
    let letter = client.get(&settings.dead).await;
    assert_eq!((letter.header("reason").as_str(), letter.correlation_id.as_str()), ("unroutable", "lost"));
    assert!(letter.header("error").contains("no.such.queue"), "{letter:?}");
    assert_eq!(letter.body["input"], "a", "the answer itself");
    client.publish(&settings.tasks, Task::new(json!({"input": "b"}))).await;
    assert_eq!(inbox.next().await.body["input"], "b");
    assert_eq!(sconce.stop().await, 0);
    client.ready_becomes(&settings.tasks, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_different_sizes_share_a_batch_and_each_gets_its_own_reply() {
    let settings = Settings::echo(Rabbit::shared().url());
    let (sconce, client, mut inbox) = serve(&settings).await;
    let busy = Task::new(json!({"input": "busy"})).id("first");
    let gate = busy_with(&sconce, &client, &settings, busy).await;
    let inputs = [json!("one"), json!(["two", "three"]), json!(["four", "five", "six"])];
    let task = |n: usize| Task::new(json!({"input": inputs[n]})).id(n.to_string());
    client.publish_all(&settings.tasks, (0..3).map(task)).await;
    are_taken(&client, &settings, &mut inbox).await;
    gate.open();
    for reply in inbox.take(4).await {
        let Ok(n) = reply.correlation_id.parse::<usize>() else {
            assert_eq!(reply.headers["batch_size"].as_i64(), Some(1), "{reply:?}");
            continue;
        };
        assert_eq!(reply.body["input"], inputs[n]);
        assert_eq!(reply.headers["batch_size"].as_i64(), Some(6), "{reply:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_past_its_deadline_is_answered_as_expired_and_not_computed() {
    // That a deadline passes while a task waits is shown with paused time, in src/worker/tests.
    let settings = Settings::echo(Rabbit::shared().url());
    let (_sconce, client, mut inbox) = serve(&settings).await;
    // A fault that would show if it were computed.
    let deadly = || Task::new(json!({"input": "late", "fail": "error"}));
    client.publish(&settings.tasks, deadly().header("expires", "2020-01-01T00:00:00Z")).await;
    let late = inbox.next().await;
    assert_eq!((late.header("status").as_str(), late.status_code()), ("expired", 408), "{late:?}");
    assert_eq!(late.headers["batch_size"].as_i64(), Some(0), "it was in no batch");
    assert_eq!(late.body["error"]["code"], "expired");
    let in_time = Task::new(json!({"input": "in time"})).header("expires", &now_plus(60_000));
    client.publish(&settings.tasks, in_time.with(|it| it.with_expiration("60000".into()))).await;
    assert_eq!(inbox.next().await.status_code(), 200);
    client.publish(&settings.tasks, deadly().header("expires", "tomorrow")).await;
    let unreadable = inbox.next().await;
    assert_eq!((unreadable.status_code(), &unreadable.body["error"]["param"]), (400, &json!("expires")));
    assert!(unreadable.body["error"]["message"].to_string().contains("tomorrow"), "{unreadable:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undecodable_message_is_dead_lettered_as_it_came_and_answered() {
    let settings = Settings::echo(Rabbit::shared().url());
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let body = b"{\"input\": \"\xff\xfe\"}".to_vec();
    let task = Task::raw(body.clone())
        .id("bytes")
        .header("mine", "kept")
        .with(|it| it.with_message_id("m-9".into()).with_app_id("producer".into()).with_priority(2));
    client.publish(&settings.tasks, task).await;
    let reply = inbox.next().await;
    assert_eq!((reply.correlation_id.as_str(), reply.header("status").as_str()), ("bytes", "rejected"));
    assert_eq!((reply.status_code(), &reply.body["error"]["code"]), (400, &json!("undecodable")));
    let letter = client.get(&settings.dead).await;
    assert_eq!(letter.raw, body);
    assert_eq!(message_id(&letter), "m-9");
    let properties = &letter.properties;
    assert_eq!(properties.app_id().as_ref().map(|it| it.as_str()), Some("producer"));
    assert_eq!((*properties.priority(), *properties.delivery_mode()), (Some(2), Some(2)));
    for (name, value) in [("reason", "undecodable"), ("task_id", "m-9"), ("mine", "kept")] {
        assert_eq!(letter.header(name), value, "{name}");
    }
    assert!(letter.header("error").contains("not JSON"), "{}", letter.header("error"));
    assert!(letter.header("worker").ends_with(&format!("/{}/0", settings.name)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_control_message_is_dead_lettered_and_stops_nobody() {
    let settings = Settings::echo(Rabbit::shared().url());
    let (sconce, client, mut inbox) = serve(&settings).await;
    let reboot = Task::new(json!(null)).id("r").with(|it| it.with_type("control.reboot".into()));
    client.publish(&settings.tasks, reboot).await;
    let letter = client.get(&settings.dead).await;
    assert_eq!(
        (letter.header("reason").as_str(), letter.kind.as_str()),
        ("unknown_control", "control.reboot")
    );
    assert!(letter.header("error").contains("control.reboot"));
    assert_eq!(inbox.next().await.status_code(), 400);
    // Any other type is a task.
    client
        .publish(&settings.tasks, Task::new(json!({"input": 1})).with(|it| it.with_type("job".into())))
        .await;
    assert_eq!(inbox.next().await.status_code(), 200);
    assert_eq!(sconce.workers().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_content_type_that_the_model_does_not_read_is_refused_by_name() {
    let settings = Settings::echo(Rabbit::shared().url());
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let typed = |kind: &str| Task::new(json!({"input": 1})).with(|it| it.with_content_type(kind.into()));
    client.publish(&settings.tasks, typed("application/json; charset=utf-8")).await;
    assert_eq!(inbox.next().await.status_code(), 200);
    client.publish(&settings.tasks, typed("application/x-pickle")).await;
    let refused = inbox.next().await;
    assert_eq!((refused.status_code(), &refused.body["error"]["param"]), (400, &json!("content_type")));
    assert!(refused.body["error"]["message"].to_string().contains("x-pickle"), "{refused:?}");
    assert_eq!(client.get(&settings.dead).await.header("reason"), "undecodable");
}

/// For the exact field types of a header, beside what `Received` makes of them.
#[tokio::test(flavor = "multi_thread")]
async fn numbers_in_headers_are_numbers_on_the_wire() {
    let settings = Settings::echo(Rabbit::shared().url());
    let (_sconce, client, mut inbox) = serve(&settings).await;
    client.publish(&settings.tasks, Task::new(json!({"input": 1}))).await;
    let reply = inbox.next().await;
    let table = reply.properties.headers().clone().unwrap_or_default();
    let value = |name: &str| table.inner().get(name).cloned();
    assert_eq!(value("status_code"), Some(AMQPValue::LongInt(200)));
    assert!(matches!(value("compute_us"), Some(AMQPValue::LongInt(_))), "pika cuts doubles");
    assert!(matches!(value("status"), Some(AMQPValue::LongString(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_celery_message_is_named_in_its_refusal_or_else_in_its_dead_letter() {
    let settings = Settings::echo(Rabbit::shared().url());
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let celery = |id: &str| {
        let body =
            json!([["a text"], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]);
        Task::new(body).id(id).header("task", "shop.tasks.embed").header("id", id)
    };
    client.publish(&settings.tasks, celery("answered")).await;
    let reply = inbox.next().await;
    assert_eq!(reply.status_code(), 400);
    assert!(reply.body["error"]["message"].to_string().contains("Celery"), "{reply:?}");
    assert_eq!(reply.body["status"], "FAILURE", "Celery's rpc:// backend reads it");
    client.publish(&settings.tasks, celery("lost").reply_to("no.such.queue")).await;
    let letter = client.get(&settings.dead).await;
    assert_eq!((letter.header("reason").as_str(), letter.correlation_id.as_str()), ("refused", "lost"));
    let error = letter.header("error");
    assert!(error.contains("Celery") && error.contains("no.such.queue"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn publish_makes_no_queue_unless_asked_and_says_when_nobody_consumes() {
    let settings = Settings::echo(Rabbit::shared().url());
    let client = Client::connect(&Rabbit::shared().url()).await;
    let mut mistyped = Sconce::run(&settings, &["publish", "--wait", "text"]);
    assert_eq!(mistyped.exit_code().await, 78, "{}", mistyped.log());
    let words = format!("queue {:?} does not exist", settings.tasks);
    assert!(mistyped.log().contains(&words), "{}", mistyped.log());
    assert_eq!(client.look(&settings.tasks).await, None);
    let waits = ["publish", "--declare", "text"];
    let mut declared = Sconce::run(&settings, &waits);
    assert_eq!(declared.exit_code().await, 0, "{}", declared.log());
    let mut early = Sconce::run(&settings, &["publish", "--wait", "text"]);
    early.wait_for_log("nobody consumes from").await;
    let sconce = Sconce::launched(&settings).await;
    assert_eq!(early.exit_code().await, 0, "{}", early.log());
    assert_eq!(sconce.stop().await, 0);
}
