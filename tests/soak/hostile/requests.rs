//! Makes the tasks of a storm of hostile requesters: the innocent ones, of which there are few so that the answer to
//! each is known, the hostile ones, and an ordinary one for each kind of hostile ones. Pure but for the photographs,
//! which it reads once.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::plan::{Manners, Pool, REQUESTS, Trouble, Way};
use crate::support::client::Task;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

const QUESTIONS: [&str; REQUESTS] = [
    "What is the capital of France?",
    "Name three colours of a rainbow.",
    "Why is the sky blue?",
    "How many legs has a spider?",
    "Write a line about autumn.",
    "What do bees make?",
];

const SENTENCES: [&str; REQUESTS] = [
    "The cat sleeps on the warm stones of the wall.",
    "Interest rates were raised by a quarter of a percent.",
    "A recipe for bread that needs no kneading, only time.",
    "The spacecraft entered its orbit around Mars on Tuesday.",
    "How do I change the tyre of a bicycle?",
    "Rain is expected in the north, and strong winds at the coast.",
];

const PHOTOGRAPHS: [&str; REQUESTS] =
    ["cat.jpg", "coffee.webp", "flower.jpg", "palace.jpg", "photographer.jpg", "rocket.png"];

/// Salts beyond 256 bytes are refused.
const LARGE_SALT: usize = 64 * 1024;
const STOP: usize = 4 * 1024 * 1024;
const MANY_PROMPTS: usize = 512;
const MANY_IMAGES: usize = 300;
/// Pixels of a giant image on each side: just below 40 million in all, so that four are within 160 million.
const GIANT: u32 = 6_300;
/// The same of an ordinary one: 24 million, as a good camera has. It is of the same format, so that the two phases
/// compare sizes and not decoders.
const PHOTOGRAPH: u32 = 4_900;

/// Every task of the storm, ready to be made.
pub struct Requests {
    photographs: Vec<Vec<u8>>,
    /// Large images, as data URLs.
    photograph: String,
    giant: String,
    /// Tokens of a long prompt.
    prompt: usize,
}

impl Requests {
    pub fn new(prompt: usize) -> Self {
        let folder = root().join("examples/images");
        let read = |name: &str| std::fs::read(folder.join(name)).expect("a photograph");
        let photographs: Vec<_> = PHOTOGRAPHS.map(read).into();
        let url = |side: u32| format!("data:image/webp;base64,{}", STANDARD.encode(plain_webp(side)));
        Self { photographs, photograph: url(PHOTOGRAPH), giant: url(GIANT), prompt }
    }

    /// One of the requests of an innocent requester.
    pub fn innocent(&self, pool: Pool, request: usize, way: Way) -> Task {
        match pool {
            Pool::Texts => Task::new(json!({
                "messages": [{"role": "user", "content": QUESTIONS[request]}],
                "max_tokens": 8 + request, "temperature": 0.8, "seed": request, "stream": way == Way::Streamed,
            }))
            .header("url", CHAT),
            Pool::Embeddings => Task::new(json!({"input": SENTENCES[request]})),
            Pool::Images => {
                let (_, kind) = PHOTOGRAPHS[request].split_once('.').expect("an extension");
                let kind = format!("image/{}", kind.replace("jpg", "jpeg"));
                Task::raw(self.photographs[request].clone()).with(|it| it.with_content_type(kind.into()))
            }
        }
    }

    /// A task of a hostile requester, or the one that an ordinary requester publishes in its place.
    pub fn other(&self, trouble: Trouble, manners: Manners, number: usize) -> Task {
        match (trouble.pool(), manners) {
            (Pool::Texts, Manners::Hostile) => self.hostile_text(trouble, number),
            (Pool::Texts, Manners::Ordinary) => self.ordinary_text(trouble, number),
            (Pool::Images, _) => Task::new(self.images(trouble, manners)),
            // What is hostile is the queue.
            (Pool::Embeddings, _) => Task::new(json!({"input": SENTENCES[number % REQUESTS]})),
        }
    }

    fn images(&self, trouble: Trouble, manners: Manners) -> Value {
        let urls = match (trouble, manners) {
            (Trouble::ManyImages, Manners::Hostile) => vec![&self.giant; MANY_IMAGES],
            (_, Manners::Hostile) => vec![&self.giant; 4],
            (_, Manners::Ordinary) => vec![&self.photograph],
        };
        json!({"image_url": urls, "top_k": 1})
    }

    fn hostile_text(&self, trouble: Trouble, number: usize) -> Task {
        let text = "a".repeat(match trouble {
            Trouble::LargeSalt => LARGE_SALT,
            Trouble::Stops => STOP,
            _ => 0,
        });
        let body = match trouble {
            Trouble::Grammar => return chat(number, &exploding(number)),
            Trouble::Stops => {
                json!({"prompt": vec!["a"; MANY_PROMPTS], "max_tokens": 1, "stop": text})
            }
            Trouble::LargeSalt => {
                let field = ["cache_salt", "user"][number % 2];
                json!({"prompt": "It is", "max_tokens": 1, field: format!("{number} {text}")})
            }
            Trouble::ManySalts => {
                json!({"prompt": "It is", "max_tokens": 1, "cache_salt": format!("{number:0200}")})
            }
            Trouble::LongPrompts => json!({"prompt": tokens(number, self.prompt), "max_tokens": 16}),
            Trouble::Reservation => {
                let format = json!({"type": "regex", "regex": "[a-z ]{20,40}"});
                json!({"prompt": "It is", "n": 8, "max_tokens": 500, "response_format": format, "seed": number})
            }
            _ => return self.ordinary_text(trouble, number),
        };
        Task::new(body).header("url", COMPLETIONS)
    }

    fn ordinary_text(&self, trouble: Trouble, number: usize) -> Task {
        let body = match trouble {
            Trouble::Grammar => {
                let schema = json!({"type": "object", "properties": {"age": {"type": "integer"}},
                                    "required": ["age"], "additionalProperties": false});
                let format = json!({"type": "json_schema", "json_schema": {"name": "age", "schema": schema}});
                return chat(number, &format);
            }
            Trouble::Stops => json!({"prompt": "It is", "max_tokens": 16, "stop": ".", "seed": number}),
            Trouble::LargeSalt | Trouble::ManySalts => {
                json!({"prompt": "It is", "max_tokens": 1, "user": "somebody"})
            }
            Trouble::LongPrompts => json!({"prompt": tokens(number, self.prompt / 4), "max_tokens": 16}),
            Trouble::Reservation => {
                let format = json!({"type": "regex", "regex": "[a-z ]{20,40}"});
                json!({"prompt": "It is", "max_tokens": 40, "response_format": format, "seed": number})
            }
            // It runs for longer than the 5 s after which a worker first asks whether its reply queue exists.
            _ => json!({"prompt": "It is", "max_tokens": 400, "ignore_eos": true, "seed": number}),
        };
        Task::new(body).header("url", COMPLETIONS)
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// The models by pool; `make soak` and `make test` fetch them.
pub fn model(pool: Pool) -> PathBuf {
    let models = root().join("models");
    let path = match pool {
        Pool::Texts => models.join("smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"),
        Pool::Images => models.join("efficientnet-lite0"),
        Pool::Embeddings => models.join("all-MiniLM-L6-v2"),
    };
    assert!(path.exists(), "{} is missing: run the scripts/fetch-* of the Makefile's soak", path.display());
    path
}

fn chat(number: usize, format: &Value) -> Task {
    let message = json!({"role": "user", "content": QUESTIONS[number % REQUESTS]});
    let body = json!({"messages": [message], "max_tokens": 24, "response_format": format, "seed": number});
    Task::new(body).header("url", CHAT)
}

/// Grammars whose automata have millions of states, most of them different from all others.
fn exploding(number: usize) -> Value {
    let multiple = |of: u32| {
        let schema = json!({"type": "integer", "multipleOf": of});
        json!({"type": "json_schema", "json_schema": {"name": "number", "schema": schema}})
    };
    let optional = |count: usize| json!({"type": "regex", "regex": "a?".repeat(count)});
    match number % 4 {
        0 => optional(100_000),
        1 => multiple(200_000_033),
        _ => multiple(4_000_037 + 2 * number as u32),
    }
}

/// So many tokens by their ids, no two prompts alike.
fn tokens(number: usize, count: usize) -> Vec<usize> {
    (0..count).map(|index| 1_000 + (number * 7_919 + index * 104_729) % 40_000).collect()
}

/// A lossless WebP of one black pixel repeated: each of its five prefix codes has one symbol, which takes no bits.
fn plain_webp(side: u32) -> Vec<u8> {
    let mut bits = Vec::new();
    let mut put = |value: u32, count: u32| bits.extend((0..count).map(|bit| value >> bit & 1 == 1));
    put(side - 1, 14);
    put(side - 1, 14);
    // No alpha; the version.
    put(0, 1);
    put(0, 3);
    // No transform, no colour cache, no further prefix codes.
    put(0, 3);
    for symbol in [0, 0, 0, 255, 0] {
        // A simple code of one symbol of eight bits.
        put(0b101, 3);
        put(symbol, 8);
    }
    let byte = |bits: &[bool]| bits.iter().rev().fold(0_u8, |byte, bit| byte << 1 | u8::from(*bit));
    let mut data: Vec<u8> = bits.chunks(8).map(byte).collect();
    data.insert(0, 0x2f);
    let padding = data.len() % 2;
    let size = |bytes: usize| u32::try_from(bytes).expect("a small file").to_le_bytes();
    let chunk = [&b"VP8L"[..], &size(data.len()), &data, &[0][..padding]].concat();
    [&b"RIFF"[..], &size(4 + chunk.len()), b"WEBP", &chunk].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_giant_image_is_a_file_of_some_dozens_of_bytes_that_decodes() {
        let file = plain_webp(64);
        assert!(file.len() < 45, "{}", file.len());
        let image = image::load_from_memory(&file).expect("a WebP").to_rgb8();
        assert_eq!(image.dimensions(), (64, 64));
        assert!(image.pixels().all(|pixel| pixel.0 == [0; 3]));
        assert_eq!(plain_webp(GIANT).len(), file.len());
        assert!(4 * u64::from(GIANT).pow(2) <= 160_000_000);
    }
}
