//! The loop of sequences with small decoders: preemption does not change a text. Windows, whose blocks are freed behind
//! them, and experts are where a sequence that begins again could differ.

use serde_json::{Value, json};

use super::continuous::{Ended, Rig, state_of};
use super::*;
use crate::model::tasks::generate;
use crate::protocol::endpoints::COMPLETIONS_URL;

/// An engine with a decoder of the fixtures, whose keys and values have room for four of [`long_request`].
fn rig(name: &str) -> Rig {
    let source = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    Rig::of(&crate::engine::continuous(generate::load), |log| {
        let mut setup = setup(&source, 64, log);
        setup.spec.options.insert("kv_tokens".to_owned(), json!(960));
        setup
    })
}

/// The 90 tokens with which all requests begin, and 149 that follow, drawn with a seed. It grows past the windows of
/// all fixtures.
fn long_request(seed: usize) -> Value {
    let ids: Vec<usize> = (0..90).map(|index| 3 + index * 7 % 350).collect();
    json!({"prompt": [ids], "max_tokens": 149, "temperature": 0.9, "seed": seed, "logprobs": 2,
           "ignore_eos": true, "stream": true})
}

async fn run(rig: &Rig, task: Arc<TaskState>, request: Value) -> Ended {
    let mut message = Message { body: request.to_string().into(), ..Message::default() };
    message.properties.headers.insert("url".to_owned(), COMPLETIONS_URL.into());
    rig.run_message(message, task, None).await
}

fn choice(ended: &Ended) -> &Value {
    &ended.body()["choices"][0]
}

/// The text of a streamed answer, from its parts.
fn streamed(ended: &Ended) -> String {
    let text = |(_, part): &(u64, String)| {
        let part: Value = serde_json::from_str(part).unwrap();
        part["choices"][0]["text"].as_str().unwrap_or_default().to_owned()
    };
    ended.parts.iter().map(text).collect()
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_preempted_sequence_with_windows_or_experts_gets_the_text_that_it_gets_alone() {
    for name in ["generate-mistral", "generate-gemma2", "generate-gemma3", "generate-qwen3_moe"] {
        let mut alone = Vec::new();
        for seed in 0..6 {
            let ended = run(&rig(name), state_of("alone", 1), long_request(seed)).await;
            alone.push(choice(&ended).clone());
        }
        let rig = rig(name);
        let ids: Vec<String> = (0..6).map(|seed| seed.to_string()).collect();
        let runs = ids.iter().enumerate().map(|(seed, id)| run(&rig, state_of(id, 1), long_request(seed)));
        let other = async {
            rig.log.passes(60).await;
            let before = rig.log.ended_passes();
            let request = json!({"prompt": [[5, 6, 7]], "max_tokens": 20, "ignore_eos": true});
            run(&rig, state_of("other", 2), request).await;
            rig.log.ended_passes() - before
        };
        let (all, passes) = tokio::join!(futures_util::future::join_all(runs), other);
        // No long answer ends meanwhile, so that one was preempted for the other requester.
        assert!((20..40).contains(&passes), "{name}: {passes} passes");
        for (ended, alone) in all.iter().zip(&alone) {
            assert_eq!(choice(ended), alone, "{name}");
            assert_eq!(
                streamed(ended),
                alone["text"].as_str().unwrap(),
                "{name}: a part is missing or twice"
            );
        }
    }
}
