//! Rerank, classify and images behind the broker: three pools under one launcher. Requests that nobody can answer are in
//! `src/worker/tests/kinds.rs`.

use std::path::PathBuf;

use serde_json::json;

use super::admin::metrics;
use crate::support::client::{Client, Inbox, Received, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn image(name: &str, media_type: &'static str) -> Task {
    let bytes = std::fs::read(fixture("images").join(name)).expect("an image");
    Task::raw(bytes).with(|properties| properties.with_content_type(media_type.into()))
}

async fn ask(client: &Client, inbox: &mut Inbox, queue: &str, task: Task) -> Received {
    client.publish(queue, task).await;
    inbox.next().await
}

#[tokio::test(flavor = "multi_thread")]
async fn three_pools_under_one_launcher_answer_each_its_own() {
    let mut settings =
        Settings::echo(Rabbit::shared().url()).set("pool[0].model", fixture("tiny-bert-cls").display());
    let rerank = settings.beside("rerank", fixture("score-xlm-roberta").display());
    let labels = settings.beside("labels", fixture("score-roberta").display());
    let images = settings.beside("images", fixture("tiny-vit").display());
    let sconce = Sconce::launch(&settings);
    sconce.consumes(4).await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    let mut inbox = client.inbox(&settings.replies).await;
    let reply = ask(&client, &mut inbox, &settings.tasks, Task::new(json!({"input": "a"}))).await;
    assert_eq!(reply.body["data"][0]["embedding"].as_array().map(Vec::len), Some(32));
    let body = json!({"query": "q", "documents": ["a", "b"]});
    let reply = ask(&client, &mut inbox, &rerank, Task::new(body)).await;
    assert_eq!(reply.body["results"].as_array().map(Vec::len), Some(2), "{reply:?}");
    let reply = ask(&client, &mut inbox, &labels, Task::new(json!({"input": ["a", "b"]}))).await;
    assert_eq!(reply.body["data"][1]["num_classes"], 3, "{reply:?}");
    let reply = ask(&client, &mut inbox, &images, image("rgb.png", "image/png")).await;
    assert_eq!(reply.body.as_array().map(Vec::len), Some(5), "{reply:?}");
    let metrics = metrics(&sconce.admin().await).await;
    for pool in ["rerank", "labels", "images"] {
        assert!(metrics.keys().any(|name| name.contains(&format!("pool=\"{pool}\""))), "{metrics:?}");
    }
}
