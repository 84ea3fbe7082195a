//! Writes the answers to requests for text, whole and in chunks, in OpenAI's form.

use std::borrow::Cow;

use serde::{Serialize, Serializer};

use super::request::Api;
use crate::model::tasks::to_json;
use crate::protocol::TaskError;

/// Written in place of a log probability that is not finite, which JSON cannot express. OpenAI writes it for very
/// unlikely tokens.
const MIN_LOGPROB: f32 = -9999.0;

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// The model or a stop string ended it.
    Stop,
    /// It reached its maximum number of tokens.
    Length,
}

/// A generated token with its natural log probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScore {
    /// The token's text.
    pub text: String,
    /// The bytes that it adds to the answer; they may be a part of a character.
    pub bytes: Vec<u8>,
    /// Its log probability.
    pub logprob: f32,
    /// The most probable tokens at this position, best first.
    pub top: Vec<TopScore>,
}

/// One of the most probable tokens at a position.
#[derive(Clone, Debug, PartialEq)]
pub struct TopScore {
    /// The token's text.
    pub text: String,
    /// The token's bytes.
    pub bytes: Vec<u8>,
    /// Its log probability.
    pub logprob: f32,
}

impl TokenScore {
    /// The number of characters that begin in this token; see [`Chunk::offset`].
    pub fn characters(&self) -> usize {
        self.bytes.iter().filter(|byte| begins_character(**byte)).count()
    }
}

/// Whether a byte of UTF-8 is the first of its character.
fn begins_character(byte: u8) -> bool {
    byte & 0b1100_0000 != 0b1000_0000
}

/// One answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Its index among all answers of the reply.
    pub index: usize,
    /// The text; if the prompt is echoed, the prompt's text comes first.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// Its tokens, if log probabilities were requested.
    pub logprobs: Option<Vec<TokenScore>>,
}

/// What was added to one answer since the last chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chunk<'a> {
    /// The answer's index among all answers of the reply.
    pub choice: usize,
    /// The text added.
    pub text: &'a str,
    /// Whether this is the answer's first chunk, which in a chat has the role.
    pub is_first: bool,
    /// The tokens added, if log probabilities were requested.
    pub logprobs: Option<&'a [TokenScore]>,
    /// Number of characters of the answer that begin before these tokens: the sum of [`TokenScore::characters`] over
    /// earlier chunks. It is written only for completions with `logprobs`.
    pub offset: usize,
    /// Why the answer ended, in its last chunk.
    pub finish: Option<Finish>,
}

/// Tokens of a whole reply, written as OpenAI's `usage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of all prompts, each counted once.
    pub prompt_tokens: usize,
    /// Tokens of all answers.
    pub completion_tokens: usize,
    /// Tokens of prompts that were reused from a cache instead of computed.
    pub cached_tokens: usize,
}

/// What all bodies of one reply share.
#[derive(Clone, Copy, Debug)]
pub struct Reply<'a> {
    /// The endpoint.
    pub api: Api,
    /// The same in all chunks; see [`new_id`].
    pub id: &'a str,
    /// Seconds since 1970, the same in all chunks.
    pub created: u64,
    /// The model's name.
    pub model: &'a str,
}

/// A new id of a reply.
pub fn new_id(api: Api) -> String {
    let prefix = match api {
        Api::Completions => "cmpl",
        Api::Chat => "chatcmpl",
    };
    format!("{prefix}-{}", uuid::Uuid::new_v4().simple())
}

impl Reply<'_> {
    /// The body of the reply.
    ///
    /// # Errors
    /// `Internal` if the body cannot be written.
    pub fn whole(&self, choices: &[Choice], usage: Usage) -> Result<Vec<u8>, TaskError> {
        match self.api {
            Api::Completions => {
                let choices = choices.iter().map(|choice| TextChoice {
                    index: choice.index,
                    text: &choice.text,
                    logprobs: choice.logprobs.as_deref().map(|tokens| TextLogprobs::of(tokens, 0)),
                    finish_reason: Some(choice.finish),
                });
                self.body("text_completion", choices.collect(), Some(usage))
            }
            Api::Chat => {
                let choices = choices.iter().map(|choice| ChatChoice {
                    index: choice.index,
                    message: Answer { role: "assistant", content: &choice.text, refusal: () },
                    logprobs: choice.logprobs.as_deref().map(ChatLogprobs::of),
                    finish_reason: choice.finish,
                });
                self.body("chat.completion", choices.collect(), Some(usage))
            }
        }
    }

    /// The body of a reply part: what was added to one answer.
    ///
    /// # Errors
    /// `Internal` if the body cannot be written.
    pub fn chunk(&self, chunk: &Chunk<'_>) -> Result<Vec<u8>, TaskError> {
        match self.api {
            Api::Completions => {
                let choice = TextChoice {
                    index: chunk.choice,
                    text: chunk.text,
                    logprobs: chunk.logprobs.map(|tokens| TextLogprobs::of(tokens, chunk.offset)),
                    finish_reason: chunk.finish,
                };
                self.body(self.chunk_object(), vec![choice], None)
            }
            Api::Chat => {
                let choice = ChatChunk {
                    index: chunk.choice,
                    delta: Delta {
                        role: chunk.is_first.then_some("assistant"),
                        content: (chunk.is_first || !chunk.text.is_empty()).then_some(chunk.text),
                    },
                    logprobs: chunk.logprobs.map(ChatLogprobs::of),
                    finish_reason: chunk.finish,
                };
                self.body(self.chunk_object(), vec![choice], None)
            }
        }
    }

    /// The body of the last reply part: the usage, and no choices.
    ///
    /// # Errors
    /// `Internal` if the body cannot be written.
    pub fn usage_chunk(&self, usage: Usage) -> Result<Vec<u8>, TaskError> {
        self.body(self.chunk_object(), Vec::<TextChoice<'_>>::new(), Some(usage))
    }

    fn chunk_object(&self) -> &'static str {
        match self.api {
            Api::Completions => "text_completion",
            Api::Chat => "chat.completion.chunk",
        }
    }

    fn body<C: Serialize>(
        &self,
        object: &'static str,
        choices: Vec<C>,
        usage: Option<Usage>,
    ) -> Result<Vec<u8>, TaskError> {
        let Self { id, created, model, .. } = *self;
        to_json(&Object { id, object, created, model, choices, usage })
    }
}

/// A reply or a chunk.
#[derive(Serialize)]
struct Object<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Wire {
            prompt_tokens: usize,
            completion_tokens: usize,
            total_tokens: usize,
            prompt_tokens_details: Details,
        }
        #[derive(Serialize)]
        struct Details {
            cached_tokens: usize,
        }
        let wire = Wire {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            total_tokens: self.prompt_tokens.saturating_add(self.completion_tokens),
            prompt_tokens_details: Details { cached_tokens: self.cached_tokens },
        };
        wire.serialize(serializer)
    }
}

/// A choice of a completion, whole or a chunk of it.
#[derive(Serialize)]
struct TextChoice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<TextLogprobs<'a>>,
    finish_reason: Option<Finish>,
}

/// The tokens of a completion. Each list has one entry per token.
#[derive(Serialize)]
struct TextLogprobs<'a> {
    tokens: Vec<Cow<'a, str>>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<TopLogprobs<'a>>,
    /// Where each token begins in the answer's text, in characters.
    text_offset: Vec<usize>,
}

impl<'a> TextLogprobs<'a> {
    /// `offset` is the number of characters of the answer that begin before these tokens.
    fn of(tokens: &'a [TokenScore], mut offset: usize) -> Self {
        let mut text_offset = Vec::with_capacity(tokens.len());
        for token in tokens {
            // A token that begins inside a character has that character's offset.
            let is_inside_character = token.bytes.first().is_some_and(|byte| !begins_character(*byte));
            text_offset.push(offset.saturating_sub(usize::from(is_inside_character)));
            offset = offset.saturating_add(token.characters());
        }
        Self {
            tokens: tokens.iter().map(|token| text_or_bytes(&token.text, &token.bytes)).collect(),
            token_logprobs: tokens.iter().map(|token| finite(token.logprob)).collect(),
            top_logprobs: tokens.iter().map(TopLogprobs).collect(),
            text_offset,
        }
    }
}

/// A token's text in a completion. As in OpenAI's replies, a token with parts of characters is `bytes:\xf0\x9f`, so that
/// such tokens differ.
fn text_or_bytes<'a>(text: &'a str, bytes: &[u8]) -> Cow<'a, str> {
    if str::from_utf8(bytes).is_ok() {
        return text.into();
    }
    let bytes: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
    format!("bytes:{bytes}").into()
}

/// The most probable tokens at a position and the chosen one, as an object that maps texts to log probabilities. Of
/// tokens with the same text only the most probable is written, because an object cannot hold a key twice.
struct TopLogprobs<'a>(&'a TokenScore);

impl Serialize for TopLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(token) = self;
        let top = token.top.iter().map(|it| (text_or_bytes(&it.text, &it.bytes), it.logprob));
        let mut entries: Vec<(Cow<'_, str>, f32)> = Vec::with_capacity(token.top.len() + 1);
        for (text, logprob) in top.chain([(text_or_bytes(&token.text, &token.bytes), token.logprob)]) {
            if !entries.iter().any(|(known, _)| *known == text) {
                entries.push((text, finite(logprob)));
            }
        }
        serializer.collect_map(entries)
    }
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: usize,
    message: Answer<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Finish,
}

#[derive(Serialize)]
struct Answer<'a> {
    role: &'static str,
    content: &'a str,
    /// `null`.
    refusal: (),
}

#[derive(Serialize)]
struct ChatChunk<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<Finish>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
struct ChatLogprobs<'a> {
    content: Vec<ChatToken<'a>>,
    /// `null`.
    refusal: (),
}

#[derive(Serialize)]
struct ChatToken<'a> {
    token: &'a str,
    logprob: f32,
    bytes: &'a [u8],
    top_logprobs: Vec<TopToken<'a>>,
}

#[derive(Serialize)]
struct TopToken<'a> {
    token: &'a str,
    logprob: f32,
    bytes: &'a [u8],
}

impl<'a> ChatLogprobs<'a> {
    fn of(tokens: &'a [TokenScore]) -> Self {
        Self { content: tokens.iter().map(ChatToken::of).collect(), refusal: () }
    }
}

impl<'a> ChatToken<'a> {
    fn of(token: &'a TokenScore) -> Self {
        let top = token.top.iter().map(|it| TopToken {
            token: &it.text,
            logprob: finite(it.logprob),
            bytes: &it.bytes,
        });
        Self {
            token: &token.text,
            logprob: finite(token.logprob),
            bytes: &token.bytes,
            top_logprobs: top.collect(),
        }
    }
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { MIN_LOGPROB }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const USAGE: Usage = Usage { prompt_tokens: 5, completion_tokens: 2, cached_tokens: 3 };

    fn reply(api: Api) -> Reply<'static> {
        Reply { api, id: "id", created: 7, model: "m" }
    }

    fn token(bytes: &[u8], logprob: f32, top: &[(&str, f32)]) -> TokenScore {
        let top = top.iter().map(|(text, logprob)| TopScore {
            text: (*text).into(),
            bytes: text.as_bytes().into(),
            logprob: *logprob,
        });
        let text = String::from_utf8_lossy(bytes).into_owned();
        TokenScore { text, bytes: bytes.into(), logprob, top: top.collect() }
    }

    fn choice(logprobs: Option<Vec<TokenScore>>) -> Choice {
        Choice { index: 0, text: "hé".into(), finish: Finish::Stop, logprobs }
    }

    fn read(body: Result<Vec<u8>, TaskError>) -> Value {
        serde_json::from_slice(&body.unwrap()).unwrap()
    }

    #[test]
    fn a_whole_completion_has_openais_form() {
        let tokens = vec![token(b"h", -0.5, &[("h", -0.5), ("a", -1.5)]), token("é".as_bytes(), -2.0, &[])];
        let body = read(reply(Api::Completions).whole(&[choice(Some(tokens))], USAGE));
        let expected = json!({
            "id": "id", "object": "text_completion", "created": 7, "model": "m",
            "choices": [{
                "index": 0, "text": "hé", "finish_reason": "stop",
                "logprobs": {
                    "tokens": ["h", "é"], "token_logprobs": [-0.5, -2.0], "text_offset": [0, 1],
                    "top_logprobs": [{"h": -0.5, "a": -1.5}, {"é": -2.0}],
                },
            }],
            "usage": {
                "prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 3},
            },
        });
        assert_eq!(body, expected);
    }

    #[test]
    fn tokens_that_are_parts_of_characters_differ_in_a_completion() {
        let mut score = token(b"\xf0\x9f", -0.5, &[]);
        let part = |bytes: &[u8], logprob| TopScore { text: "\u{fffd}".into(), bytes: bytes.into(), logprob };
        score.top = vec![part(b"\xf0\x9f", -0.5), part(b"\xf0", -1.0), part(b"\x80", -2.0)];
        let body = read(reply(Api::Completions).whole(&[choice(Some(vec![score]))], USAGE));
        let logprobs = &body["choices"][0]["logprobs"];
        assert_eq!(logprobs["tokens"], json!(["bytes:\\xf0\\x9f"]));
        let expected = json!({"bytes:\\xf0\\x9f": -0.5, "bytes:\\xf0": -1.0, "bytes:\\x80": -2.0});
        assert_eq!(logprobs["top_logprobs"], json!([expected]));
    }

    #[test]
    fn a_whole_chat_answer_has_openais_form() {
        let tokens = vec![token("é".as_bytes(), -0.5, &[("a", -1.5)])];
        let body = read(reply(Api::Chat).whole(&[choice(Some(tokens)), choice(None)], USAGE));
        let expected = json!({
            "index": 0, "message": {"role": "assistant", "content": "hé", "refusal": null},
            "logprobs": {"refusal": null, "content": [{
                "token": "é", "logprob": -0.5, "bytes": [195, 169],
                "top_logprobs": [{"token": "a", "logprob": -1.5, "bytes": [97]}],
            }]},
            "finish_reason": "stop",
        });
        assert_eq!((&body["object"], &body["choices"][0]), (&json!("chat.completion"), &expected));
        assert_eq!(body["choices"][1].get("logprobs"), Some(&Value::Null));
    }

    #[test]
    fn the_first_chunk_of_a_chat_has_the_role_and_the_last_the_reason() {
        let chat = reply(Api::Chat);
        let first = Chunk { choice: 1, text: "", is_first: true, logprobs: None, offset: 0, finish: None };
        let last = Chunk { is_first: false, finish: Some(Finish::Length), ..first };
        let middle = Chunk { text: "b", finish: None, ..last };
        let role = json!({"role": "assistant", "content": ""});
        for (chunk, delta, reason) in [
            (first, role, Value::Null),
            (middle, json!({"content": "b"}), Value::Null),
            (last, json!({}), json!("length")),
        ] {
            let choice = json!({"index": 1, "delta": delta, "logprobs": null, "finish_reason": reason});
            let expected = json!({
                "id": "id", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [choice],
            });
            assert_eq!(read(chat.chunk(&chunk)), expected);
        }
        let usage = read(chat.usage_chunk(USAGE));
        assert_eq!((&usage["choices"], &usage["usage"]["total_tokens"]), (&json!([]), &json!(7)));
        assert_eq!(usage["object"], "chat.completion.chunk");
    }

    #[test]
    fn offsets_count_characters_and_continue_over_chunks() {
        let tokens = [token(b"a\xf0\x9f", -1.0, &[]), token(b"\x98\x80", -1.0, &[]), token(b"b", -1.0, &[])];
        let first_characters: usize = tokens[..1].iter().map(TokenScore::characters).sum();
        let chunk = |tokens, offset| Chunk {
            choice: 0,
            text: "",
            is_first: false,
            logprobs: Some(tokens),
            offset,
            finish: None,
        };
        let offsets = |chunk: &Chunk<'_>| {
            read(reply(Api::Completions).chunk(chunk))["choices"][0]["logprobs"]["text_offset"].clone()
        };
        assert_eq!(offsets(&chunk(&tokens[..], 0)), json!([0, 1, 2]));
        assert_eq!(offsets(&chunk(&tokens[1..], first_characters)), json!([1, 2]));
    }

    #[test]
    fn a_logprob_that_is_not_finite_is_written_as_a_number() {
        let tokens = [token(b"a", f32::NEG_INFINITY, &[("b", 0.0), ("b", -3.0), ("c", f32::NAN)])];
        let chunk =
            Chunk { choice: 0, text: "a", is_first: true, logprobs: Some(&tokens), offset: 0, finish: None };
        let body = read(reply(Api::Completions).chunk(&chunk));
        let top = json!([{"b": 0.0, "c": -9999.0, "a": -9999.0}]);
        assert_eq!(body["choices"][0]["logprobs"]["top_logprobs"], top);
        let body = read(reply(Api::Chat).chunk(&chunk));
        assert_eq!(body["choices"][0]["logprobs"]["content"][0]["logprob"], -9999.0);
    }

    #[test]
    fn ids_have_openais_prefixes() {
        assert!(new_id(Api::Completions).starts_with("cmpl-"));
        assert!(new_id(Api::Chat).starts_with("chatcmpl-"));
    }
}
