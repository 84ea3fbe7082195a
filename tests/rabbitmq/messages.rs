//! Tasks and replies on the wire: where a reply goes, and what `sconce publish` says. The contract of messages, to the
//! letter, is in `src/worker/tests/messages.rs`.

use serde_json::json;
use std::path::{Path, PathBuf};

use crate::support::client::{Client, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Gate, Sconce, Settings};

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
