//! Rerank, score, classify and images behind the broker: three pools under one launcher, requests that nobody can
//! answer, and a task of 500 documents that holds nobody up.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::admin::metrics;
use super::messages::{minilm, serve};
use super::sentinels::make_queue;
use crate::support::client::{Client, Inbox, Received, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn expected(name: &str) -> Value {
    let file = std::fs::read(fixture(name).join("expected.json")).expect("a fixture");
    serde_json::from_slice(&file).expect("JSON")
}

fn settings(model: &str) -> Settings {
    Settings::echo(Rabbit::shared().url()).set("pool[0].model", fixture(model).display())
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
async fn a_cross_encoder_answers_both_urls_and_refuses_others() {
    let settings = settings("score-bert");
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let right = expected("score-bert");
    let pairs: Vec<[String; 2]> = serde_json::from_value(right["pairs"].clone()).expect("pairs");
    let side = |index: usize| pairs.iter().map(|pair| pair[index].clone()).collect::<Vec<_>>();
    let body = json!({"text_1": side(0), "text_2": side(1)});
    let reply = ask(&client, &mut inbox, &settings.tasks, Task::new(body).header("url", "/v1/score")).await;
    assert_eq!(reply.status_code(), 200, "{reply:?}");
    for (index, right) in right["scores"].as_array().expect("scores").iter().enumerate() {
        let ours = reply.body["data"][index]["score"].as_f64().expect("a score");
        assert!((ours - right.as_f64().expect("a score")).abs() < 1e-5, "pair {index}: {ours} {right}");
    }
    // Without a URL, the pool's first.
    let body = json!({"query": "q", "documents": ["a queue", "the tide", "a man"], "top_n": 2});
    let reply = ask(&client, &mut inbox, &settings.tasks, Task::new(body)).await;
    assert_eq!(reply.body["results"].as_array().map(Vec::len), Some(2), "{reply:?}");
    for (task, status, param) in [
        (Task::new(json!({"query": "q", "documents": []})), 400, json!("documents")),
        (Task::new(json!({"query": "q", "documents": vec!["a"; 10_000]})), 413, json!("documents")),
        (Task::new(json!({"querry": "q", "documents": ["a"]})), 400, json!("querry")),
        (Task::new(json!({"input": "a"})).header("url", "/v1/embeddings"), 404, json!("url")),
    ] {
        let reply = ask(&client, &mut inbox, &settings.tasks, task).await;
        assert_eq!((reply.status_code(), &reply.body["error"]["param"]), (status, &param), "{reply:?}");
    }
    let long = "the tide carries a message ".repeat(50);
    let body = json!({"query": "q", "documents": ["a", long]});
    let reply = ask(&client, &mut inbox, &settings.tasks, Task::new(body)).await;
    assert_eq!(reply.headers["truncated"].as_i64(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_of_500_documents_is_answered_once_and_holds_nobody_up() {
    // A batch takes eight inputs, so that the large task needs 63 batches of its own.
    let settings = settings("score-bert").set("pool[0].batch.max_requests", 8);
    // All tasks wait in the queue before the worker starts: otherwise a fast worker could answer the large one
    // before a slow broker has confirmed the small ones.
    let client = Client::connect(&Rabbit::shared().url()).await;
    make_queue(&client, &settings).await;
    let documents: Vec<String> = (0..500).map(|n| format!("the tide carries message {n}")).collect();
    let giant = Task::new(json!({"query": "which message?", "documents": documents})).id("giant");
    let small = |n: usize| Task::new(json!({"query": "q", "documents": ["a queue"]})).id(n.to_string());
    client.publish_all(&settings.tasks, std::iter::once(giant).chain((0..20).map(small))).await;
    let (_sconce, _, mut inbox) = serve(&settings).await;
    let order: Vec<String> = inbox.take(21).await.into_iter().map(|reply| reply.correlation_id).collect();
    assert_eq!(order.last().map(String::as_str), Some("giant"), "{order:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn three_pools_under_one_launcher_answer_each_its_own() {
    let mut settings = Settings::echo(Rabbit::shared().url()).set("pool[0].model", minilm().display());
    let rerank = settings.beside("rerank", fixture("score-xlm-roberta").display());
    let labels = settings.beside("labels", fixture("score-roberta").display());
    let images = settings.beside("images", fixture("tiny-vit").display());
    let sconce = Sconce::launch(&settings);
    sconce.consumes(4).await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    let mut inbox = client.inbox(&settings.replies).await;
    let reply = ask(&client, &mut inbox, &settings.tasks, Task::new(json!({"input": "a"}))).await;
    assert_eq!(reply.body["data"][0]["embedding"].as_array().map(Vec::len), Some(384));
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

#[tokio::test(flavor = "multi_thread")]
async fn bad_images_are_refused_and_their_neighbours_answered() {
    let settings = settings("tiny-vit");
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let whole = std::fs::read(fixture("images/rgb.jpg")).expect("an image");
    let cut = Task::raw(&whole[..whole.len() / 2]).with(|it| it.with_content_type("image/jpeg".into()));
    let tasks = [
        (image("rgb.png", "image/png"), 200),
        (image("huge.png", "image/png"), 413),
        (image("rgb.jpg", "image/jpeg"), 200),
        (cut, 400),
        // The bytes tell what it is.
        (image("rgb.png", "image/webp"), 200),
        (image("rgb.png", "application/data"), 200),
        (image("rgb.png", "application/x-python-serialize"), 400),
        (Task::raw(b"GIF89a").with(|it| it.with_content_type("image/gif".into())), 400),
        (Task::new(json!({"image_url": "https://example.org/a.png"})), 400),
        (image("rgb.webp", "image/webp"), 200),
    ];
    let mut right = Vec::new();
    for (index, (task, status)) in tasks.into_iter().enumerate() {
        client.publish(&settings.tasks, task.id(index.to_string())).await;
        right.push(status);
    }
    let mut replies = inbox.take(right.len()).await;
    replies.sort_by_key(|reply| reply.correlation_id.parse::<usize>().expect("a number"));
    for (reply, status) in replies.iter().zip(right) {
        assert_eq!(reply.status_code(), status, "{reply:?}");
    }
    let top = Task::raw(whole).header("top_k", "2").with(|it| it.with_content_type("image/jpeg".into()));
    let reply = ask(&client, &mut inbox, &settings.tasks, top).await;
    assert_eq!(reply.body.as_array().map(Vec::len), Some(2), "{reply:?}");
}
