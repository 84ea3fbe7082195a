//! What clients read from requests and replies of any endpoint, and what they build:
//! - the number of a request's inputs, and the model that it names;
//! - the bodies of requests for given texts;
//! - one request from several that can share a task, and their replies from its reply;
//! - the text and the tokens of a reply.
//!
//! Does no I/O. `endpoints` has the names of the fields that are read here.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::Message;
use super::endpoints::{CHAT_URL, ENDPOINTS, Endpoint, RERANK_URL, SCORE_URL, Sharing};

/// The number of inputs: the items of a list, unless they are the token ids of one text. A pool counts the same, but
/// multiplies by `n` for generated text and by the
/// labels of a request to classify texts.
pub fn count_inputs(body: &[u8]) -> usize {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    match ENDPOINTS.iter().flat_map(|endpoint| endpoint.inputs).find_map(|name| body.get(name)) {
        Some(Value::Array(items)) if !items.first().is_some_and(Value::is_number) => items.len().max(1),
        _ => 1,
    }
}

/// The body of a request to `url` for one text, as [`bodies_of_texts`] makes it.
pub fn body_of_text(url: &str, text: &str) -> String {
    bodies_of_texts(url, &[text.to_owned()], false).swap_remove(0)
}

/// The bodies of requests to `url` that carry these texts: one body for each text. For `/v1/rerank` and `/v1/score` it
/// is one body, in which the first text is compared with the others. For an unknown URL the text is `input`, as for
/// embeddings.
pub fn bodies_of_texts(url: &str, texts: &[String], is_streamed: bool) -> Vec<String> {
    let field = Endpoint::of(url).and_then(|endpoint| endpoint.inputs.first()).unwrap_or(&"input");
    let body = |text: &String| match url {
        CHAT_URL => json!({"messages": [{"role": "user", "content": text}]}),
        _ => json!({ *field: text }),
    };
    let mut bodies: Vec<Value> = match (url, texts) {
        (RERANK_URL, [first, others @ ..]) => vec![json!({"query": first, "documents": others})],
        (SCORE_URL, [first, others @ ..]) => vec![json!({"text_1": first, "text_2": others})],
        _ => texts.iter().map(body).collect(),
    };
    if is_streamed {
        bodies.iter_mut().for_each(|body| body["stream"] = true.into());
    }
    bodies.iter().map(Value::to_string).collect()
}

/// The model that a request names, if its body is JSON and names one.
pub fn model_of(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        model: Option<String>,
    }
    serde_json::from_slice::<Named>(body).ok()?.model
}

/// A request that may share a task with others.
#[derive(Clone, Debug)]
pub struct ShareableRequest {
    /// Its inputs, each as in its body.
    pub inputs: Vec<Box<RawValue>>,
    /// Whether the reply to this request alone is the item of its only input.
    pub is_unwrapped: bool,
    field: &'static str,
    /// The other fields: requests in which these are equal can share a task.
    other_fields: String,
}

type Fields = BTreeMap<String, Box<RawValue>>;

impl ShareableRequest {
    /// The request to `url` with this body, if it can share a task.
    pub fn from_request(url: &str, body: &[u8]) -> Option<Self> {
        let Endpoint { inputs: input_fields, sharing, .. } = Endpoint::of(url)?;
        let Sharing { unless, unwraps } = sharing.as_ref()?;
        let mut fields: Fields = serde_json::from_slice(body).ok()?;
        if unless.iter().any(|field| fields.contains_key(*field)) {
            return None;
        }
        let field = input_fields.iter().find(|field| fields.contains_key(**field))?;
        let input = fields.remove(*field)?;
        if input_fields.iter().any(|field| fields.contains_key(*field)) {
            return None;
        }
        let is_text = |value: &RawValue| value.get().starts_with('"');
        let is_unwrapped = *unwraps && is_text(&input);
        let inputs = if is_text(&input) { vec![input] } else { serde_json::from_str(input.get()).ok()? };
        let all_are_texts = !inputs.is_empty() && inputs.iter().all(|input| is_text(input));
        let other_fields = serde_json::to_string(&fields).ok()?;
        all_are_texts.then_some(Self { inputs, is_unwrapped, field, other_fields })
    }

    /// Whether both requests differ in their inputs only.
    pub fn is_like(&self, other: &Self) -> bool {
        self.field == other.field && self.other_fields == other.other_fields
    }

    /// The body of a request like this one for `inputs`.
    pub fn body_for<'a>(&self, inputs: impl Iterator<Item = &'a RawValue>) -> String {
        let Self { field, other_fields, .. } = self;
        // The inputs follow the other fields.
        let mut body = other_fields.strip_suffix('}').unwrap_or(other_fields).to_owned();
        let comma = if body.len() > 1 { "," } else { "" };
        body.push_str(&format!("{comma}\"{field}\":["));
        for (index, input) in inputs.enumerate() {
            if index > 0 {
                body.push(',');
            }
            body.push_str(input.get());
        }
        body.push_str("]}");
        body
    }
}

/// The part of a shared task's reply that answers one of its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyShare {
    /// The number of the request's inputs.
    pub inputs: usize,
    /// As [`ShareableRequest::is_unwrapped`].
    pub is_unwrapped: bool,
}

/// The bodies of the replies to requests that shared a task, made from the reply to that task. `shares` has the share of
/// each request, in their order. Only the first body has the task's usage; the others have zeros, so that sums are right.
///
/// # Errors
/// A message: the reply is not JSON, or does not have one item for each input.
pub fn divide_reply(reply: &Message, shares: &[ReplyShare]) -> Result<Vec<Box<RawValue>>, String> {
    if !reply.is_json() {
        return Err(format!(
            "a reply has the content type {:?}, which cannot be divided",
            reply.properties.content_type
        ));
    }
    let unreadable = |what: &'static str| move |error: serde_json::Error| format!("{what}: {error}");
    let input_count: usize = shares.iter().map(|share| share.inputs).sum();
    let check = |items: usize| match items == input_count {
        true => Ok(()),
        false => Err(format!("a reply has {items} items, and its task had {input_count} inputs")),
    };
    if let Ok(items) = serde_json::from_slice::<Vec<Box<RawValue>>>(&reply.body) {
        check(items.len())?;
        let mut items = items.into_iter();
        let body = |share: &ReplyShare| match (
            share.is_unwrapped,
            items.by_ref().take(share.inputs).collect::<Vec<_>>(),
        ) {
            (true, mut own) if own.len() == 1 => Ok(own.swap_remove(0)),
            (_, own) => raw(&own),
        };
        return shares.iter().map(body).collect();
    }
    let mut fields: Fields =
        serde_json::from_slice(&reply.body).map_err(unreadable("a reply's body is not a JSON object"))?;
    let data = fields.remove("data").ok_or("a reply has no data")?;
    let data: Vec<Fields> = serde_json::from_str(data.get()).map_err(unreadable("a reply's data"))?;
    check(data.len())?;
    let mut items = data.into_iter();
    let mut bodies = Vec::with_capacity(shares.len());
    for (request, share) in shares.iter().enumerate() {
        let mut request_items: Vec<Fields> = items.by_ref().take(share.inputs).collect();
        for (index, item) in request_items.iter_mut().enumerate() {
            item.insert("index".to_owned(), raw(&index)?);
        }
        fields.insert("data".to_owned(), raw(&request_items)?);
        // This is done once, before the second body: the zeros stay in `fields` for all later bodies.
        if request == 1
            && let Some(usage) = fields.get_mut("usage")
        {
            let counts: BTreeMap<String, Value> =
                serde_json::from_str(usage.get()).map_err(unreadable("a reply's usage"))?;
            let zeros: BTreeMap<String, u64> = counts.into_keys().map(|name| (name, 0)).collect();
            *usage = raw(&zeros)?;
        }
        bodies.push(raw(&fields)?);
    }
    Ok(bodies)
}

fn raw(value: &impl serde::Serialize) -> Result<Box<RawValue>, String> {
    to_raw_value(value).map_err(|error| error.to_string())
}

/// The text of a reply or of a reply part: a body that is text, or the text in a JSON body. None if the reply has no
/// text, such as a vector or a sound.
pub fn text_of(reply: &Message) -> Option<String> {
    reply.text().map(str::to_owned).or_else(|| text_in(&reply.body))
}

/// The text in a JSON body: the first answer of generated text, a transcript, or the only caption.
pub fn text_in(body: &[u8]) -> Option<String> {
    generated_text(body).or_else(|| transcript(body)).or_else(|| caption(body))
}

/// The text of the first answer in a reply or in a part of it; none if the body is no generated text.
fn generated_text(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Body {
        choices: Vec<Answer>,
    }
    #[derive(Deserialize)]
    struct Answer {
        index: usize,
        text: Option<String>,
        #[serde(alias = "delta")]
        message: Option<Content>,
    }
    #[derive(Deserialize)]
    struct Content {
        content: Option<String>,
    }
    let Body { choices } = serde_json::from_slice(body).ok()?;
    let first = choices.into_iter().find(|choice| choice.index == 0)?;
    first.text.or_else(|| first.message?.content)
}

/// The text of a reply or of a part of it; none if the body is not a transcript.
fn transcript(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Reply {
        text: Option<String>,
        delta: Option<String>,
    }
    let reply: Reply = serde_json::from_slice(body).ok()?;
    reply.text.or(reply.delta)
}

/// The caption in the body of a reply; none if it has another form, or several captions.
fn caption(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Reply {
        generated_text: String,
    }
    let [Reply { generated_text }] = serde_json::from_slice::<[Reply; 1]>(body).ok()?;
    Some(generated_text)
}

/// The tokens of a task, as its reply states them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ReplyUsage {
    /// Tokens of its inputs and its answer.
    pub total_tokens: Option<u64>,
    /// Tokens of its answer, if text was generated.
    pub completion_tokens: Option<u64>,
}

/// The usage that a reply states; empty for a reply that is not JSON.
pub fn usage_of(reply: &Message) -> ReplyUsage {
    #[derive(Deserialize)]
    struct Body {
        usage: Option<ReplyUsage>,
    }
    if !reply.is_json() {
        return ReplyUsage::default();
    }
    let body = serde_json::from_slice::<Body>(&reply.body).ok();
    body.and_then(|body| body.usage).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::endpoints::{CLASSIFY_URL, COMPLETIONS_URL, EMBEDDINGS_URL, SPARSE_URL};

    #[test]
    fn texts_become_bodies_that_their_url_takes() {
        let texts = ["a".to_owned(), "b".to_owned()];
        for (url, expected) in [
            (EMBEDDINGS_URL, vec![json!({"input": "a"}), json!({"input": "b"})]),
            (CLASSIFY_URL, vec![json!({"input": "a"}), json!({"input": "b"})]),
            (SPARSE_URL, vec![json!({"inputs": "a"}), json!({"inputs": "b"})]),
            (COMPLETIONS_URL, vec![json!({"prompt": "a"}), json!({"prompt": "b"})]),
            (RERANK_URL, vec![json!({"query": "a", "documents": ["b"]})]),
            (SCORE_URL, vec![json!({"text_1": "a", "text_2": ["b"]})]),
        ] {
            let bodies = bodies_of_texts(url, &texts, false);
            let bodies: Vec<Value> = bodies.iter().map(|body| serde_json::from_str(body).unwrap()).collect();
            assert_eq!(bodies, expected, "{url}");
        }
        let chat = &bodies_of_texts(CHAT_URL, &texts, true)[1];
        let expected = json!({"messages": [{"role": "user", "content": "b"}], "stream": true});
        assert_eq!(serde_json::from_str::<Value>(chat).unwrap(), expected);
    }

    #[test]
    fn inputs_are_counted_as_the_pool_counts_them() {
        for (body, inputs) in [
            (r#"{"input":"a"}"#, 1),
            (r#"{"input":["a","b"]}"#, 2),
            (r#"{"input":[101,102,103]}"#, 1),
            (r#"{"input":[[101],[102]]}"#, 2),
            (r#"{"inputs":["a","b","c"],"top_k":2}"#, 3),
            (r#"{"query":"a","documents":["b","c","d"]}"#, 3),
            (r#"{"text_1":"a","text_2":["b","c"]}"#, 2),
            (r#"{"prompt":["a","b"]}"#, 2),
            (r#"{"image":"…"}"#, 1),
            ("GIF89a", 1),
        ] {
            assert_eq!(count_inputs(body.as_bytes()), inputs, "{body}");
        }
    }

    #[test]
    fn a_request_whose_reply_is_a_list_shares_no_task() {
        let shares = |body: &str| ShareableRequest::from_request(CLASSIFY_URL, body.as_bytes()).is_some();
        assert!(shares(r#"{"input":"a","top_k":2}"#));
        assert!(!shares(r#"{"input":"a","labels":["x"]}"#));
        assert!(!shares(r#"{"input":"a","parameters":{"candidate_labels":["x"]}}"#));
    }

    #[test]
    fn a_reply_that_cannot_be_divided_is_refused() {
        let reply = |body: &str| Message { body: body.to_owned().into(), ..Message::default() };
        for (body, message) in [
            ("7", "not a JSON object"),
            ("[1]", "1 items, and its task had 3 inputs"),
            ("{}", "no data"),
            (r#"{"data":[1]}"#, "a reply's data"),
            (r#"{"data":[{}]}"#, "1 items, and its task had 3 inputs"),
            (r#"{"data":[{},{},{}],"usage":1}"#, "a reply's usage"),
        ] {
            let shares = [1, 2].map(|inputs| ReplyShare { inputs, is_unwrapped: false });
            let error = divide_reply(&reply(body), &shares).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
