//! The real model behind the broker, held against what sentence-transformers answers. The forms of a request are in
//! `tests/models/embeddings.rs`.

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
