//! Tests of requests of several kinds that nobody can answer, or that are large, with small real models: each is answered
//! by name, and its neighbours are answered too. What the models compute is shown in `tests/models`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use super::*;
use crate::model::tasks::{embed, generate, image, pairs};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Starts a worker of a model of the fixtures, whose forward passes are computed.
fn start(starter: &Starter, name: &str, change: impl FnOnce(&mut Assignment)) -> Rig {
    Rig::start_model(starter, fixture(name).to_str().unwrap(), change)
}

/// Returns the reply to a body with the given headers.
async fn ask(rig: &Rig, bytes: impl Into<Vec<u8>>, headers: &[(&str, &str)]) -> Message {
    let before = rig.memory.published("mine").len();
    let message = Message { body: bytes.into().into(), ..task("id", "mine", &Value::Null) };
    rig.memory.deliver([with_headers(message, headers)]);
    rig.memory.until_published("mine", before + 1).await.remove(before)
}

/// A request that is refused.
struct Bad {
    body: Vec<u8>,
    url: Option<&'static str>,
    status: i64,
    /// The field at fault.
    param: Option<&'static str>,
    /// Part of the message.
    words: &'static str,
}

fn bad(body: &Value, status: i64, param: &'static str, words: &'static str) -> Bad {
    Bad { body: body.to_string().into_bytes(), url: None, status, param: Some(param), words }
}

/// Asks each, and after each the good one.
async fn check(rig: &Rig, cases: Vec<Bad>, good: &Value, url: Option<&str>) {
    for case in cases {
        let shown = String::from_utf8_lossy(&case.body[..case.body.len().min(60)]).into_owned();
        let url_of = |url: Option<&'static str>| Vec::from_iter(url.map(|url| ("url", url)));
        let reply = ask(rig, case.body, &url_of(case.url)).await;
        let error = &body(&reply)["error"];
        assert_eq!(status(&reply), case.status, "{shown}: {error}");
        assert_eq!(reply.properties.headers["status"].as_str(), Some("rejected"), "{shown}");
        assert_eq!(error["param"].as_str(), case.param, "{shown}: {error}");
        assert!(error["message"].as_str().is_some_and(|it| it.contains(case.words)), "{shown}: {error}");
        let headers = Vec::from_iter(url.map(|url| ("url", url)));
        let reply = ask(rig, good.to_string(), &headers).await;
        assert_eq!(status(&reply), 200, "after {shown}: {reply:?}");
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn each_bad_request_for_vectors_is_answered_by_name_and_the_same_worker_goes_on() {
    let rig = start(&one_pass(embed::load), "tiny-bert-cls", |_| ());
    let undecodable =
        |body: &[u8], words| Bad { body: body.to_vec(), url: None, status: 400, param: None, words };
    let shape = |body: Value| undecodable(body.to_string().as_bytes(), "object");
    let giant = json!({"input": "word ".repeat(2 << 20)}).to_string().into_bytes();
    let cases = vec![
        undecodable(b"STOP", "not JSON"),
        undecodable(b"", "not JSON"),
        undecodable(b"{\"input\": \"torn", "not JSON"),
        undecodable(b"{\"input\": \"\xff\xfe\"}", "not UTF-8"),
        shape(json!([1, 2])),
        shape(json!("a text")),
        shape(json!(42)),
        bad(&json!({}), 400, "input", "input"),
        bad(&json!({"input": 7}), 400, "input", "7"),
        bad(&json!({"input": {"text": "x"}}), 400, "input", "text"),
        bad(&json!({"input": null}), 400, "input", "missing"),
        bad(&json!({"input": []}), 400, "input", "empty"),
        bad(&json!({"input": ["ok", 7]}), 400, "input[1]", "7"),
        bad(&json!({"input": [[5], [999_999]]}), 400, "input[1]", "999999"),
        bad(&json!({"input": "x", "encoding_format": "hex"}), 400, "encoding_format", "hex"),
        bad(&json!({"input": "x", "dimensions": 100_000}), 400, "dimensions", "100000"),
        bad(&json!({"input": "x", "dimensions": "many"}), 400, "dimensions", "many"),
        bad(&json!({"input": "x", "model": "gpt-9"}), 404, "model", "gpt-9"),
        bad(&json!({"input": vec!["x"; 100_000]}), 413, "input", "100000"),
        Bad { body: giant, url: None, status: 413, param: None, words: "bytes" },
    ];
    check(&rig, cases, &json!({"input": "and on"}), None).await;
    let letters = rig.memory.published(DEAD);
    assert_eq!(letters.len(), 4, "only those that are not JSON: {letters:?}");
    assert_eq!(rig.finish().await.0, Ended::Drained);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_cross_encoder_answers_both_urls_and_refuses_others() {
    let rig = start(&one_pass(pairs::load), "score-bert", |_| ());
    let expected: Value =
        serde_json::from_slice(&fs::read(fixture("score-bert").join("expected.json")).unwrap()).unwrap();
    let side = |index: usize| {
        let pairs = expected["pairs"].as_array().unwrap().iter();
        pairs.map(|pair| pair[index].clone()).collect::<Vec<_>>()
    };
    let pairs = json!({"text_1": side(0), "text_2": side(1)});
    let reply = ask(&rig, pairs.to_string(), &[("url", "/v1/score")]).await;
    assert_eq!(status(&reply), 200, "{reply:?}");
    for (index, right) in expected["scores"].as_array().unwrap().iter().enumerate() {
        let ours = body(&reply)["data"][index]["score"].as_f64().unwrap();
        assert!((ours - right.as_f64().unwrap()).abs() < 1e-5, "pair {index}: {ours} {right}");
    }
    // Without a URL, the pool's first.
    let ranked = json!({"query": "q", "documents": ["a queue", "the tide", "a man"], "top_n": 2});
    let reply = ask(&rig, ranked.to_string(), &[]).await;
    assert_eq!(body(&reply)["results"].as_array().map(Vec::len), Some(2), "{reply:?}");
    let elsewhere = bad(&json!({"input": "a"}), 404, "url", "/v1/embeddings");
    let cases = vec![
        bad(&json!({"query": "q", "documents": []}), 400, "documents", "documents"),
        bad(&json!({"query": "q", "documents": vec!["a"; 10_000]}), 413, "documents", "10000"),
        bad(&json!({"querry": "q", "documents": ["a"]}), 400, "querry", "querry"),
        Bad { url: Some("/v1/embeddings"), ..elsewhere },
    ];
    check(&rig, cases, &ranked, None).await;
    let long = json!({"query": "q", "documents": ["a", "the tide carries a message ".repeat(50)]});
    let reply = ask(&rig, long.to_string(), &[]).await;
    assert_eq!(reply.properties.headers["truncated"].as_i64(), Some(1));
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_task_of_500_documents_is_answered_once_and_holds_nobody_up() {
    // A batch takes eight inputs, so that the large task needs 63 batches of its own.
    let rig =
        start(&one_pass(pairs::load), "score-bert", |assignment| assignment.pool.batch.max_requests = 8);
    let documents: Vec<String> = (0..500).map(|n| format!("the tide carries message {n}")).collect();
    let giant = task("giant", "mine", &json!({"query": "which message?", "documents": documents}));
    let small = |n: usize| task(&n.to_string(), "mine", &json!({"query": "q", "documents": ["a queue"]}));
    rig.memory.deliver(std::iter::once(giant).chain((0..20).map(small)));
    let replies = rig.memory.until_published("mine", 21).await;
    let order: Vec<_> = replies.iter().filter_map(|it| it.properties.correlation_id.as_deref()).collect();
    assert_eq!((order.len(), order.last()), (21, Some(&"giant")), "{order:?}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn bad_images_are_refused_and_their_neighbours_answered() {
    let rig = start(&one_pass(image::load), "tiny-vit", |_| ());
    let read = |name: &str| fs::read(fixture("images").join(name)).unwrap();
    let whole = read("rgb.jpg");
    let tasks = [
        (read("rgb.png"), "image/png", 200),
        (read("huge.png"), "image/png", 413),
        (whole.clone(), "image/jpeg", 200),
        (whole[..whole.len() / 2].to_vec(), "image/jpeg", 400),
        // The bytes tell what it is.
        (read("rgb.png"), "image/webp", 200),
        (read("rgb.png"), "application/data", 200),
        (read("rgb.png"), "application/x-python-serialize", 400),
        (b"GIF89a".to_vec(), "image/gif", 400),
        (json!({"image_url": "https://example.org/a.png"}).to_string().into_bytes(), "application/json", 400),
        (read("rgb.webp"), "image/webp", 200),
    ];
    let message = |id: &str, bytes: &[u8], media_type: &str| {
        let mut message = Message { body: bytes.to_vec().into(), ..task(id, "mine", &Value::Null) };
        message.properties.content_type = Some(media_type.to_owned());
        message
    };
    let numbered = tasks.iter().enumerate();
    rig.memory
        .deliver(numbered.map(|(n, (bytes, media_type, _))| message(&n.to_string(), bytes, media_type)));
    for reply in rig.memory.until_published("mine", tasks.len()).await {
        let number: usize = reply.properties.correlation_id.as_deref().unwrap().parse().unwrap();
        assert_eq!(status(&reply), tasks[number].2, "{number}: {reply:?}");
    }
    rig.memory.deliver([with_headers(message("top", &whole, "image/jpeg"), &[("top_k", "2")])]);
    let reply = rig.memory.until_published("mine", tasks.len() + 1).await.remove(tasks.len());
    assert_eq!(body(&reply).as_array().map(Vec::len), Some(2), "{reply:?}");
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn what_a_pool_of_texts_cannot_answer_is_refused_and_the_rest_answered() {
    let rig = start(&continuous(generate::load), "generate-llama", |assignment| {
        assignment.pool.options.insert("context".into(), 128.into());
    });
    let vocabulary: Value =
        serde_json::from_slice(&fs::read(fixture("generate-llama").join("config.json")).unwrap()).unwrap();
    let beyond = vocabulary["vocab_size"].as_u64().unwrap();
    let url = "/v1/completions";
    let cases = [
        bad(&json!({"prompt": "word ".repeat(200)}), 400, "prompt", "128"),
        bad(&json!({"prompt": "a", "n": 9}), 400, "n", "9"),
        bad(&json!({"prompt": "a", "logit_bias": {"1": 2}}), 400, "logit_bias", "logit_bias"),
        bad(&json!({"prompt": "a", "model": "gpt-5"}), 404, "model", "gpt-5"),
        bad(&json!({"prompt": [beyond]}), 400, "prompt", "token"),
    ];
    let cases = cases.into_iter().map(|case| Bad { url: Some(url), ..case }).collect();
    check(&rig, cases, &json!({"prompt": "the", "max_tokens": 4, "temperature": 0}), Some(url)).await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn texts_drawn_without_a_seed_are_the_same_after_a_redelivery_to_another_worker() {
    let mut found = Vec::new();
    for (worker, earlier) in [("host/test/0", 0), ("host/test/1", 1)] {
        let rig = start(&continuous(generate::load), "generate-llama", |assignment| {
            assignment.worker = worker.into();
            assignment.pool.options.insert("context".into(), 128.into());
        });
        let ask = |n: usize| {
            let body = json!({"prompt": format!("the {n}"), "max_tokens": 10 + n, "temperature": 0.8,
                              "ignore_eos": true, "stream": n.is_multiple_of(4)});
            with_headers(task(&n.to_string(), "mine", &body), &[("url", "/v1/completions")])
        };
        // Others join and leave, in another order.
        let mut tasks: Vec<Message> = (0..16).map(ask).collect();
        tasks.rotate_left(7 * earlier as usize);
        tasks.into_iter().for_each(|task| rig.memory.deliver_again(task, earlier));
        rig.memory.until_settled(16).await;
        let replies = rig.memory.published("mine").into_iter();
        let replies = replies.filter(|it| it.properties.kind.as_deref() == Some("reply"));
        let text = |reply: Message| {
            assert_eq!(status(&reply), 200, "{reply:?}");
            (reply.properties.correlation_id.clone(), body(&reply)["choices"][0]["text"].clone())
        };
        found.push(replies.map(text).collect::<BTreeMap<_, _>>());
    }
    let texts: BTreeSet<String> = found[0].values().map(Value::to_string).collect();
    assert_eq!((found[0].len(), texts.len()), (16, 16), "{texts:?}");
    assert_eq!(found[0], found[1]);
}
