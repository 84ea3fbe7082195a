//! The real model behind the broker: OpenAI's request in its forms, held against what
//! sentence-transformers answers.

use base64::Engine;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::messages::{minilm, serve};
use crate::support::client::{Received, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Settings, signal};

fn settings() -> Settings {
    Settings::echo(Rabbit::shared().url()).set("pool[0].model", minilm().display())
}

/// Texts and vectors, by sentence-transformers.
fn expected() -> Vec<(String, Vec<f64>)> {
    let file = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/minilm/expected.json"));
    let rows: Vec<Value> = serde_json::from_slice(&file.expect("the fixture")).expect("a list");
    let row = |row: &Value| {
        let text = row["text"].as_str().expect("a text").to_owned();
        (text, serde_json::from_value(row["vector"].clone()).expect("numbers"))
    };
    rows.iter().map(row).collect()
}

fn vector(reply: &Received, index: usize) -> Vec<f64> {
    assert_eq!(reply.body["data"][index]["object"], "embedding", "{:?}", reply.body);
    assert_eq!(reply.body["data"][index]["index"], index);
    serde_json::from_value(reply.body["data"][index]["embedding"].clone()).expect("a list of numbers")
}

#[track_caller]
fn assert_close(ours: &[f64], theirs: &[f64]) {
    assert_eq!(ours.len(), theirs.len());
    let off = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off < 1e-5, "off by {off:e}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_form_of_input_gives_the_vectors_of_sentence_transformers() {
    let settings = settings();
    let (_sconce, client, mut inbox) = serve(&settings).await;
    let known = expected();
    let texts: Vec<&str> =
        known.iter().map(|(text, _)| text.as_str()).filter(|text| !text.is_empty()).collect();
    let theirs = |text: &str| &known.iter().find(|(it, _)| it == text).expect("a known text").1;

    client.publish(&settings.tasks, Task::new(json!({"input": "Hello, world!", "user": "ignored"}))).await;
    let reply = inbox.next().await;
    assert_eq!((reply.status_code(), &reply.body["object"]), (200, &json!("list")));
    assert_close(&vector(&reply, 0), theirs("Hello, world!"));
    let usage = json!({"prompt_tokens": 6, "total_tokens": 6});
    assert_eq!(reply.body["usage"], usage);
    assert_eq!(reply.headers["batch_tokens"].as_i64(), Some(6));

    client.publish(&settings.tasks, Task::new(json!({"input": texts}))).await;
    let listed = inbox.next().await;
    assert_eq!(listed.body["data"].as_array().map(Vec::len), Some(texts.len()));
    for (index, text) in texts.iter().enumerate() {
        assert_close(&vector(&listed, index), theirs(text));
    }

    let ids = json!([101, 7592, 1010, 2088, 999, 102]);
    for input in [ids.clone(), json!([ids, ids])] {
        client.publish(&settings.tasks, Task::new(json!({"input": input}))).await;
        assert_close(&vector(&inbox.next().await, 0), theirs("Hello, world!"));
    }

    client
        .publish(&settings.tasks, Task::new(json!({"input": "Hello, world!", "encoding_format": "base64"})))
        .await;
    let encoded = inbox.next().await.body["data"][0]["embedding"].as_str().expect("a text").to_owned();
    let bytes = base64::engine::general_purpose::STANDARD.decode(encoded).expect("base64");
    let floats = bytes.chunks_exact(4).map(|it| f32::from_le_bytes([it[0], it[1], it[2], it[3]]).into());
    assert_close(&floats.collect::<Vec<f64>>(), theirs("Hello, world!"));

    client.publish(&settings.tasks, Task::new(json!({"input": "Hello, world!", "dimensions": 64}))).await;
    let short = vector(&inbox.next().await, 0);
    let length = theirs("Hello, world!")[..64].iter().map(|it| it * it).sum::<f64>().sqrt();
    let cut: Vec<f64> = theirs("Hello, world!")[..64].iter().map(|it| it / length).collect();
    assert_close(&short, &cut);
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_that_share_a_batch_get_what_each_gets_alone() {
    let settings = settings();
    let (sconce, client, mut inbox) = serve(&settings).await;
    let known = expected();
    let tasks = known.iter().filter(|(text, _)| !text.is_empty()).cycle().take(64).enumerate();
    let tasks: Vec<_> = tasks.map(|(n, (text, vector))| (n, text.clone(), vector.clone())).collect();
    let task = |(n, text, _): &(usize, String, Vec<f64>)| Task::new(json!({"input": text})).id(n.to_string());
    // The worker stands still until all are there, so that they come to it together.
    let worker = sconce.workers()[0];
    signal(worker, Signal::SIGSTOP);
    client.publish_all(&settings.tasks, tasks.iter().map(task)).await;
    signal(worker, Signal::SIGCONT);
    let mut shared = 0;
    for reply in inbox.take(64).await {
        let n: usize = reply.correlation_id.parse().expect("one of ours");
        assert_close(&vector(&reply, 0), &tasks[n].2);
        shared += usize::from(reply.headers["batch_size"].as_i64() > Some(1));
    }
    assert!(shared > 0, "no two of 64 tasks shared a batch");
}
