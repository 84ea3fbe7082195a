//! The crates in `examples/`: models of one's own, as `docs/own-models.md` shows them.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::client::{Client, Inbox, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Sconce, Settings};

/// 8 × 6 pixels, nearly all green.
const GREEN: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAGCAIAAABxZ0isAAAAEUlEQVR4nGMQOaGBFTEMpAQARegwwbHAal4AAAAASUVORK5CYII=";
/// Says that it has 40,000 × 40,000 pixels.
const GIANT: &str =
    "iVBORw0KGgoAAAANSUhEUgAAnEAAAJxACAIAAADebplSAAAADElEQVR4nGNgoD0AAABkAAGGZDw1AAAAAElFTkSuQmCC";

async fn serve(
    program: &str,
    model: &str,
    option: Option<(&str, &str)>,
) -> (Sconce, Client, Settings, Inbox) {
    let mut settings = Settings::echo(Rabbit::shared().url()).by(program).set("pool[0].model", model);
    if let Some((name, value)) = option {
        settings = settings.set(&format!("pool[0].options.{name}"), value);
    }
    let sconce = Sconce::launched(&settings).await;
    let client = Client::connect(&Rabbit::shared().url()).await;
    let inbox = client.inbox(&settings.replies).await;
    (sconce, client, settings, inbox)
}

fn image(base64: &str, media_type: &'static str) -> Task {
    let bytes = STANDARD.decode(base64).expect("an image");
    Task::raw(bytes).with(|properties| properties.with_content_type(media_type.into()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_png_as_the_body_is_classified_and_a_giant_or_broken_one_refused() {
    let labels = r#"["rouge", "vert", "bleu"]"#;
    let (_sconce, client, settings, mut inbox) =
        serve("image-classifier", "colours", Some(("labels", labels))).await;
    client.publish(&settings.tasks, image(GREEN, "image/png")).await;
    let reply = inbox.next().await;
    assert_eq!(reply.status_code(), 200, "{reply:?}");
    assert_eq!(reply.body[0]["label"], "vert", "{reply:?}");
    assert!(reply.body[0]["score"].as_f64() > Some(0.9), "{reply:?}");
    for (bad, media_type) in [(GIANT, "image/png"), ("QUJD", "image/png"), (GREEN, "image/jpeg")] {
        client.publish(&settings.tasks, image(bad, media_type)).await;
        assert_eq!(inbox.next().await.status_code(), 400, "{bad}");
    }
    client.publish(&settings.tasks, image(GREEN, "image/png")).await;
    assert_eq!(inbox.next().await.status_code(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generator_streams_and_says_the_same_alone_and_among_others() {
    let (_sconce, client, settings, mut inbox) =
        serve("toy-generator", "letters", Some(("text", "abcabcabd"))).await;
    let body = |prompt: &str, stream| json!({"prompt": prompt, "max_tokens": 7, "stream": stream});
    let task = |n: usize| Task::new(body("xa", false)).id(n.to_string());
    client.publish_all(&settings.tasks, (0..20).map(task)).await;
    for reply in inbox.take(20).await {
        assert_eq!(reply.body["choices"][0]["text"], "bcabcab", "{reply:?}");
    }
    client.publish(&settings.tasks, Task::new(body("a", true)).reply_to(&settings.replies)).await;
    let mut parts = String::new();
    let reply = loop {
        let one = inbox.next().await;
        if one.kind == "reply" {
            break one;
        }
        parts.push_str(one.body["choices"][0]["text"].as_str().unwrap_or_default());
    };
    assert_eq!((&reply.body["choices"][0]["text"], &*parts), (&Value::from("bcabcab"), "bcabcab"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_of_candle_transformers_gives_the_probabilities_of_transformers() {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny-segformer");
    let (_sconce, client, settings, mut inbox) =
        serve("segformer", "segformer", Some(("folder", fixture))).await;
    let file = |name: &str| std::fs::read(format!("{fixture}/{name}")).expect("a fixture");
    let png = |bytes| Task::raw(bytes).with(|properties| properties.with_content_type("image/png".into()));
    client.publish(&settings.tasks, png(file("image.png"))).await;
    let reply = inbox.next().await;
    assert_eq!(reply.status_code(), 200, "{reply:?}");
    let expected: Vec<f64> = serde_json::from_slice(&file("expected.json")).expect("JSON");
    let rows = reply.body.as_array().expect("labels");
    assert_eq!(rows.len(), expected.len());
    for (index, expected) in expected.iter().enumerate() {
        let row = rows.iter().find(|row| row["label"] == format!("label {index}")).expect("the label");
        let off = (row["score"].as_f64().expect("a score") - expected).abs();
        assert!(off < 1e-3, "label {index} is off by {off}");
    }
    client.publish(&settings.tasks, png(b"no image".to_vec())).await;
    assert_eq!(inbox.next().await.status_code(), 400);
}

/// A folder with all-MiniLM-L6-v2 and the head of the fixture, each in a file of its own.
fn bert_with_head() -> TempDir {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (bert, head) = (root.join("models/all-MiniLM-L6-v2"), root.join("tests/fixtures/text-head"));
    assert!(bert.join("model.safetensors").exists(), "run scripts/fetch-model");
    let folder = tempfile::tempdir().expect("a folder");
    let link = |from: PathBuf, name: &str| symlink(from, folder.path().join(name)).expect("a link");
    for name in ["config.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json"] {
        link(bert.join(name), name);
    }
    link(bert.join("model.safetensors"), "bert.safetensors");
    for name in ["head.safetensors", "model.safetensors.index.json"] {
        link(head.join(name), name);
    }
    folder
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_on_our_encoder_gives_the_scores_of_transformers_and_the_same_bits_alone_and_together() {
    let folder = bert_with_head();
    let model = format!("text-head:{}", folder.path().display());
    let (_sconce, client, settings, mut inbox) = serve("text-head", &model, None).await;
    let expected = include_str!("../fixtures/text-head/expected.json");
    let expected: Vec<Value> = serde_json::from_str(expected).expect("JSON");
    let texts: Vec<&Value> = expected.iter().map(|row| &row["text"]).collect();
    client.publish(&settings.tasks, Task::new(json!({ "input": texts }))).await;
    let together = inbox.next().await;
    assert_eq!(together.status_code(), 200, "{together:?}");
    for (index, row) in expected.iter().enumerate() {
        let (ours, what) = (&together.body[index], &row["text"]);
        for (label, theirs) in
            ["calm", "glad", "urgent"].iter().zip(row["scores"].as_array().expect("scores"))
        {
            let off = ours[label].as_f64().expect("a score") - theirs.as_f64().expect("a score");
            assert!(off.abs() < 1e-5, "{what}: {label} is off by {off}");
        }
        client.publish(&settings.tasks, Task::new(json!({ "input": [what] }))).await;
        assert_eq!(inbox.next().await.body[0], *ours, "{what}, alone and together");
    }
    for (bad, status, message) in [
        (json!({"inputs": ["a"]}), 400, "missing field `input`"),
        (
            json!({"input": ["a", "word ".repeat(300)]}),
            400,
            "input[1] is too long: this model takes at most 256 tokens",
        ),
        (json!({"input": vec!["a"; 3_000]}), 413, "input holds 3000 items"),
    ] {
        client.publish(&settings.tasks, Task::new(bad)).await;
        let reply = inbox.next().await;
        let found = reply.body["error"]["message"].as_str().unwrap_or_default();
        assert!(reply.status_code() == status && found.contains(message), "{reply:?}");
    }
}
