//! Real text over RabbitMQ: streamed, the same after a kill, and from several workers.

use std::collections::BTreeMap;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::json;

use super::messages::serve;
use crate::support::client::{Inbox, Received, Task};
use crate::support::rabbit::Rabbit;
use crate::support::sconce::{Settings, signal};

fn settings() -> Settings {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/smollm2-135m-instruct");
    let path = folder.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "{} is missing: run scripts/fetch-smollm2", path.display());
    Settings::echo(Rabbit::shared().url()).set("pool[0].model", path.display())
}

/// A drawn answer without a seed of its own.
fn chat(number: usize) -> Task {
    let messages = json!([{"role": "user", "content": format!("Write {number} words about the sea.")}]);
    let body = json!({"messages": messages, "max_tokens": 20 + number, "temperature": 0.8, "ignore_eos": true,
                      "stream": number.is_multiple_of(4)});
    Task::new(body).id(format!("chat-{number}")).header("url", "/v1/chat/completions")
}

/// The texts of sixteen answers, by task. Checks the texts of their parts, of which `first` was read before.
async fn texts(first: Option<Received>, inbox: &mut Inbox) -> BTreeMap<String, String> {
    let mut texts = BTreeMap::new();
    let mut streams: BTreeMap<(String, String), String> = BTreeMap::new();
    let mut first = first;
    while texts.len() < 16 {
        let one = match first.take() {
            Some(first) => first,
            None => inbox.next().await,
        };
        if one.kind == "reply.part" {
            let stream = one.header("stream_id");
            let delta = one.body["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
            streams.entry((one.correlation_id, stream)).or_default().push_str(delta);
            continue;
        }
        assert_eq!(one.status_code(), 200, "{one:?}");
        let text = one.body["choices"][0]["message"]["content"].as_str().expect("a text").to_owned();
        assert_eq!(one.body["choices"][0]["finish_reason"], "length");
        texts.insert(one.correlation_id, text);
    }
    for ((task, _), text) in streams {
        assert!(texts[&task].starts_with(&text), "{task}: {text:?} is no beginning of {:?}", texts[&task]);
    }
    texts
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_drawn_texts_are_the_same_after_a_kill_and_from_two_workers() {
    let undisturbed = settings();
    let (_sconce, client, mut inbox) = serve(&undisturbed).await;
    let all = |settings: &Settings| -> Vec<Task> {
        (1..=16).map(|number| chat(number).reply_to(&settings.replies)).collect()
    };
    client.publish_all(&undisturbed.tasks, all(&undisturbed)).await;
    let right = texts(None, &mut inbox).await;
    assert!(right.values().collect::<std::collections::BTreeSet<_>>().len() == 16, "{right:?}");

    let killed = settings().set("launcher.restart_delay", "50ms").set("pool[0].devices", "cpu,cpu");
    let (sconce, client, mut inbox) = serve(&killed).await;
    client.publish_all(&killed.tasks, all(&killed)).await;
    // A part: sequences are running.
    let part = inbox.next().await;
    assert_eq!(part.kind, "reply.part");
    sconce.workers().iter().for_each(|worker| signal(*worker, Signal::SIGKILL));
    assert_eq!(texts(Some(part), &mut inbox).await, right);
    assert_eq!(client.look(&killed.dead).await.expect("a queue").0, 0, "none is blamed");
}

#[tokio::test(flavor = "multi_thread")]
async fn grammars_that_explode_are_refused_while_others_are_answered() {
    let settings = settings();
    let (sconce, client, mut inbox) = serve(&settings).await;
    let workers = sconce.workers();
    let hostile = |number: usize| {
        // A prime of its own for each, so that none is known from before.
        let prime = [4_000_037, 200_000_033, 100_000_007, 50_000_017, 15_485_863, 32_452_843][number % 6];
        let multiple = json!({"type": "integer", "multipleOf": prime, "minimum": number});
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": multiple}});
        Task::new(json!({"prompt": "a", "max_tokens": 8, "response_format": format}))
            .id(format!("hostile-{number}"))
            .header("url", "/v1/completions")
    };
    let innocent = |number: usize| {
        Task::new(json!({"prompt": "Count: one, two, three, four, five,", "max_tokens": 4, "temperature": 0}))
            .id(format!("innocent-{number}"))
            .header("url", "/v1/completions")
    };
    client.publish_all(&settings.tasks, (0..12).map(hostile)).await;
    client.publish_all(&settings.tasks, (0..4).map(innocent)).await;
    let replies = inbox.take(16).await;
    let place =
        |id: &str| replies.iter().position(|reply| reply.correlation_id == id).expect("one reply each");
    for reply in &replies {
        let (status, param) = (reply.status_code(), &reply.body["error"]["param"]);
        match reply.correlation_id.starts_with("hostile") {
            true => assert_eq!((status, param), (400, &json!("response_format")), "{reply:?}"),
            false => assert_eq!(status, 200, "{reply:?}"),
        }
    }
    let last = (0..4).map(|number| place(&format!("innocent-{number}"))).max().expect("four");
    assert!(last < place("hostile-11"), "the grammars are built beside the other tasks");
    assert_eq!(sconce.workers(), workers, "the same process");
}
