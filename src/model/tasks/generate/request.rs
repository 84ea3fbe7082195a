//! Reads requests to generate text. Decides what is accepted and what an absent field means; errors name the
//! field and the value.

use std::ops::RangeInclusive;

use serde_json::value::RawValue;

use crate::model::fields::{
    Fields, FirstItems, Keys, bounded_string, deserialize, each_item, first_items, invalid, is_number, keys,
    list, string, token_ids, whole,
};
use crate::model::load::chat_template::ChatMessage;
use crate::model::sequences::grammar::Format;
use crate::model::sequences::sampler::Sampling;
use crate::protocol::{TaskError, TaskErrorKind};

/// Maximum number of answers to one prompt.
const MAX_CHOICES: usize = 8;
/// Maximum number of stop strings; OpenAI has the same limit.
const MAX_STOP_STRINGS: usize = 4;
/// Maximum length of a stop string in bytes. It is searched for after each token, and text that may be its beginning is
/// held back.
const MAX_STOP_BYTES: usize = 1_024;
/// Maximum length of `user` and `cache_salt` in bytes. `user` is a label of metrics.
const MAX_NAME_BYTES: usize = 256;
/// Maximum number of messages of a conversation, and of parts of a message. Each takes several hundred bytes of memory
/// when the template is rendered, but may take only 26 bytes in the body.
const MAX_MESSAGES: usize = 16_384;
/// Maximum length of `response_format` in bytes of JSON. A value of the schema takes 32 bytes in memory, but may take
/// only two in the body.
const MAX_FORMAT_BYTES: usize = 128 << 10;
/// Maximum number of tokens listed beside each token of a completion; OpenAI has the same limit.
const MAX_LOGPROBS: usize = 5;
/// Maximum number of tokens listed beside each token of a chat's answer; OpenAI has the same limit.
const MAX_TOP_LOGPROBS: usize = 20;
/// The roles that a message can have. Tools are not supported.
const ROLES: [&str; 4] = ["system", "developer", "user", "assistant"];

/// The fields of both endpoints, and these of one of them.
macro_rules! endpoint {
    ($($supported:literal),+; $($key:literal = $only_value:literal),+) => {
        keys! {
            "cache_salt", "frequency_penalty", "ignore_eos", "logprobs", "max_tokens", "min_p", "model", "n",
            "presence_penalty", "repetition_penalty", "response_format", "seed", "stop", "stream",
            "stream_options", "temperature", "top_k", "top_p", "user", $($supported),+;
            "allowed_token_ids" = "null", "bad_words" = "[]", "best_of" = "1", "guided_choice" = "null",
            "guided_grammar" = "null", "guided_json" = "null", "guided_regex" = "null",
            "include_stop_str_in_output" = "false", "logit_bias" = "{}", "min_tokens" = "0",
            "prompt_logprobs" = "null", "stop_token_ids" = "[]", "structured_outputs" = "null",
            "ec_transfer_params" = "null", "kv_transfer_params" = "null", "length_penalty" = "1",
            "logprob_token_ids" = "null", "mm_payload" = "\"tensors\"", "repetition_detection" = "null",
            "return_mm_kwargs" = "false", "return_token_ids" = "false", "return_token_offsets" = "false",
            "return_tokens_as_token_ids" = "false", "return_weight_versions" = "false",
            "routed_experts_prompt_start" = "0", "skip_special_tokens" = "true",
            "spaces_between_special_tokens" = "true", "suffix" = "\"\"", "thinking_token_budget" = "null",
            "tool_choice" = "\"none\"", "tools" = "[]", "truncate_prompt_tokens" = "null",
            "truncation_side" = "null", "use_beam_search" = "false", "vllm_xargs" = "null",
            "watermarking" = "null", "grammar" = "null", "guided_decoding_backend" = "null",
            "guided_whitespace_pattern" = "null", "json_schema" = "null", "repeat_penalty" = "1",
            "template_date" = "null",
            $($key = $only_value),+
        }
    };
}
pub const COMPLETIONS: Keys = endpoint! {
    "echo", "prompt";
    "add_special_tokens" = "true", "chat_template_name" = "null", "max_completion_tokens" = "null",
    "prompt_embeds" = "null", "top_logprobs" = "null"
};
pub const CHAT: Keys = endpoint! {
    "chat_template_name", "max_completion_tokens", "messages", "top_logprobs";
    "add_generation_prompt" = "true", "add_special_tokens" = "false", "audio" = "null", "chat_template" = "null",
    "chat_template_kwargs" = "{}", "citation_options" = "null", "continue_final_message" = "false",
    "documents" = "[]", "echo" = "false", "function_call" = "\"none\"", "functions" = "[]", "k" = "0",
    "media_io_kwargs" = "null", "mm_processor_kwargs" = "null", "modalities" = "[\"text\"]",
    "moderation" = "null", "p" = "null", "parallel_tool_calls" = "true", "prediction" = "null",
    "return_prompt_text" = "false", "safety_mode" = "\"OFF\"", "stop_sequences" = "[]",
    "strict_tools" = "false", "verbosity" = "\"medium\"", "web_search_options" = "null",
    "chat_history" = "[]", "instructions" = "null", "max_output_tokens" = "null", "preamble" = "null",
    "text" = "null"
};
const MESSAGE: Keys = keys! {
    "content", "name", "role";
    "audio" = "null", "function_call" = "null", "images" = "[]", "prefix" = "false", "reasoning" = "\"\"",
    "reasoning_content" = "\"\"", "thinking" = "\"\"", "tool_calls" = "[]"
};
const PART: Keys = keys! { "text", "type" };
const STREAM_OPTIONS: Keys = keys! { "include_usage"; "continuous_usage_stats" = "false" };
const RESPONSE_FORMAT: Keys = keys! { "json_schema", "pattern", "regex", "type"; "schema" = "null" };
const JSON_SCHEMA: Keys = keys! { "schema" };

const PENALTIES: RangeInclusive<f32> = -2.0..=2.0;
/// From a tenth to ten times the neutral value, 1. A logit is divided by the penalty: one near 0 would make it
/// infinite.
const REPETITION_PENALTIES: RangeInclusive<f32> = 0.1..=10.0;

/// The endpoint, which decides the fields of the request and the form of the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

impl Api {
    fn keys(self) -> &'static Keys {
        match self {
            Self::Completions => &COMPLETIONS,
            Self::Chat => &CHAT,
        }
    }
}

/// The texts to continue, or the conversation to answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompts {
    /// Texts to continue.
    Texts {
        /// At least one; each may be empty.
        texts: Vec<String>,
    },
    /// Token ids of the model's own tokenizer to continue: at least one list, none of them empty.
    Tokens(Vec<Vec<u32>>),
    /// One conversation to answer; at least one message.
    Messages(Vec<ChatMessage>),
}

impl Prompts {
    /// The number of prompts; a conversation counts as one.
    pub fn count(&self) -> usize {
        match self {
            Self::Texts { texts } => texts.len(),
            Self::Tokens(tokens) => tokens.len(),
            Self::Messages(_) => 1,
        }
    }
}

/// A request to generate text.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// The endpoint.
    pub api: Api,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// The prompts to continue or answer.
    pub prompts: Prompts,
    /// The name of the model's chat template to be used; none for its default one.
    pub chat_template_name: Option<String>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Maximum number of tokens of each answer; at least 1.
    pub max_tokens: Option<usize>,
    /// Whether the answer goes on after the model's end-of-text token.
    pub ignore_eos: bool,
    /// Number of answers to each prompt, from 1 to 8.
    pub n: usize,
    /// Whether the text of a completion begins with its prompt; never together with `logprobs`.
    pub echo: bool,
    /// If set, the reply has the log probabilities of each token and of this many of the most probable tokens.
    pub logprobs: Option<usize>,
    /// Strings that end the answer and are not part of it: at most 4, none empty, each of at most 1 KiB.
    pub stop: Vec<String>,
    /// Whether reply parts are sent before the reply.
    pub stream: bool,
    /// Whether the last reply part has the usage; only with `stream`.
    pub include_usage: bool,
    /// The seed of the random numbers.
    pub seed: Option<u64>,
    /// The form that the text must have.
    pub format: Format,
    /// The owner of cached prompts: the cache of a prompt is reused only for the same owner. This is `cache_salt`, else
    /// `user`; at most 256 bytes.
    pub owner: Option<String>,
    /// The requester's name for its own user; at most 256 bytes.
    pub user: Option<String>,
}

impl GenerateRequest {
    /// Reads a body; `max_inputs` bounds the number of inputs, which is the number of prompts times `n`.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not UTF-8 or not JSON, `TooLarge` for too many inputs, else `BadInput`
    /// with the field and the value.
    pub fn read(api: Api, body: &[u8], max_inputs: usize) -> Result<Self, TaskError> {
        let fields = Fields::parse(body, api.keys())?;
        let n = integer(&fields, "n", 1..=MAX_CHOICES)?.unwrap_or(1);
        let prompts = match api {
            Api::Completions => completion_prompts(fields.required("prompt")?.get(), max_inputs)?,
            Api::Chat => Prompts::Messages(messages(fields.required("messages")?.get())?),
        };
        check_input_count(&prompts, n, max_inputs)?;
        let logprobs = match api {
            Api::Completions => integer(&fields, "logprobs", 0..=MAX_LOGPROBS)?,
            Api::Chat => chat_logprobs(&fields)?,
        };
        let stream = fields.boolean("stream", false)?;
        let user = fields.bounded_string("user", MAX_NAME_BYTES)?;
        Ok(Self {
            api,
            model: fields.string("model")?,
            prompts,
            chat_template_name: fields.bounded_string("chat_template_name", MAX_NAME_BYTES)?,
            sampling: sampling(&fields)?,
            max_tokens: max_tokens(&fields)?,
            ignore_eos: fields.boolean("ignore_eos", false)?,
            n,
            echo: echo(&fields, logprobs)?,
            logprobs,
            stop: fields.get("stop").map_or(Ok(Vec::new()), |raw| stop_strings(raw.get()))?,
            stream,
            include_usage: include_usage(&fields, stream)?,
            seed: fields.get("seed").map(seed).transpose()?,
            format: fields
                .get("response_format")
                .map_or(Ok(Format::Text), |raw| response_format(raw.get()))?,
            owner: fields.bounded_string("cache_salt", MAX_NAME_BYTES)?.or_else(|| user.clone()),
            user,
        })
    }

    /// The path of prompt `index` in the body, for errors: `prompt`, `prompt[3]` or `messages`.
    pub fn path(&self, index: usize) -> String {
        match self.api {
            Api::Chat => "messages".to_owned(),
            Api::Completions if self.prompts.count() == 1 => "prompt".to_owned(),
            Api::Completions => format!("prompt[{index}]"),
        }
    }
}

fn sampling(fields: &Fields<'_>) -> Result<Sampling, TaskError> {
    let number = |key: &str, default, range| fields.number_within(key, range).map(|it| it.unwrap_or(default));
    Ok(Sampling {
        temperature: number("temperature", 1.0, 0.0..=2.0)?,
        top_k: fields.get("top_k").map_or(Ok(0), top_k)?,
        top_p: fields.get("top_p").map_or(Ok(1.0), top_p)?,
        min_p: number("min_p", 0.0, 0.0..=1.0)?,
        frequency_penalty: number("frequency_penalty", 0.0, PENALTIES)?,
        presence_penalty: number("presence_penalty", 0.0, PENALTIES)?,
        repetition_penalty: number("repetition_penalty", 1.0, REPETITION_PENALTIES)?,
    })
}

fn top_p(raw: &RawValue) -> Result<f32, TaskError> {
    match serde_json::from_str::<f32>(raw.get()) {
        Ok(number) if number > 0.0 && number <= 1.0 => Ok(number),
        _ => Err(invalid("top_p", "a number above 0 and at most 1", raw.get())),
    }
}

/// Reads an integer.
fn integer(fields: &Fields<'_>, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, TaskError> {
    let Some(raw) = fields.get(key) else { return Ok(None) };
    match serde_json::from_str(whole(raw.get())) {
        Ok(number) if range.contains(&number) => Ok(Some(number)),
        _ => {
            let wanted = format!("an integer from {} to {}", range.start(), range.end());
            Err(invalid(key, &wanted, raw.get()))
        }
    }
}

fn top_k(raw: &RawValue) -> Result<usize, TaskError> {
    match serde_json::from_str::<i64>(whole(raw.get())) {
        Ok(-1) => Ok(0),
        Ok(number) if number >= 0 => Ok(usize::try_from(number).unwrap_or(usize::MAX)),
        _ => Err(invalid("top_k", "an integer from 0, or -1 (both 0 and -1 mean all tokens)", raw.get())),
    }
}

/// Reads a seed: any integer of 64 bits. A negative one is read as its two's complement.
fn seed(raw: &RawValue) -> Result<u64, TaskError> {
    let text = raw.get();
    serde_json::from_str::<u64>(text)
        .or_else(|_| serde_json::from_str::<i64>(text).map(i64::cast_unsigned))
        .map_err(|_| invalid("seed", "an integer of 64 bits", text))
}

fn max_tokens(fields: &Fields<'_>) -> Result<Option<usize>, TaskError> {
    let older = fields.positive("max_tokens")?;
    let newer = fields.positive("max_completion_tokens")?;
    if let (Some(older), Some(newer)) = (older, newer)
        && older != newer
    {
        let message = format!(
            "max_completion_tokens is {newer}, and max_tokens is {older}; both mean the same: send one of them"
        );
        return Err(TaskError::bad_input("max_completion_tokens", message));
    }
    Ok(newer.or(older))
}

fn chat_logprobs(fields: &Fields<'_>) -> Result<Option<usize>, TaskError> {
    let wanted = fields.boolean("logprobs", false)?;
    match (wanted, integer(fields, "top_logprobs", 0..=MAX_TOP_LOGPROBS)?) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None) => Ok(None),
        (false, Some(top)) => {
            let message = format!("top_logprobs is {top}, but logprobs is not true");
            Err(TaskError::bad_input("top_logprobs", message))
        }
    }
}

/// Reads `echo`. It is refused together with `logprobs`, because the prompt's own log probabilities are not computed.
fn echo(fields: &Fields<'_>, logprobs: Option<usize>) -> Result<bool, TaskError> {
    let echo = fields.boolean("echo", false)?;
    match logprobs {
        Some(k) if echo => {
            let message = format!("echo is true and logprobs is {k}; both together are not supported here");
            Err(TaskError::bad_input("echo", message))
        }
        _ => Ok(echo),
    }
}

fn include_usage(fields: &Fields<'_>, stream: bool) -> Result<bool, TaskError> {
    const PATH: &str = "stream_options";
    let Some(raw) = fields.get(PATH) else { return Ok(false) };
    if !stream {
        return Err(TaskError::bad_input(PATH, "stream_options is set, but stream is not true"));
    }
    match object(raw.get(), PATH, &STREAM_OPTIONS)?.get("include_usage").map(RawValue::get) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => Err(invalid("stream_options.include_usage", "true or false", other)),
    }
}

/// Reads the stop strings: one, or a list, which may be empty.
fn stop_strings(raw: &str) -> Result<Vec<String>, TaskError> {
    if raw.starts_with('"') {
        return Ok(vec![stop_string(raw, "stop")?]);
    }
    if !raw.starts_with('[') {
        return Err(invalid("stop", "a string or a list of strings", raw));
    }
    let FirstItems { items, count } = first_items(raw, "stop", MAX_STOP_STRINGS)?;
    if count > MAX_STOP_STRINGS {
        let message = format!("stop holds {count} strings; at most {MAX_STOP_STRINGS} are taken");
        return Err(TaskError::bad_input("stop", message));
    }
    each_item(&items, "stop", stop_string)
}

fn stop_string(raw: &str, path: &str) -> Result<String, TaskError> {
    let text = bounded_string(raw, path, MAX_STOP_BYTES)?;
    if text.is_empty() { Err(invalid(path, "a string that is not empty", raw)) } else { Ok(text) }
}

fn response_format(raw: &str) -> Result<Format, TaskError> {
    const PATH: &str = "response_format";
    const TYPE: &str = "response_format.type";
    if raw.len() > MAX_FORMAT_BYTES {
        let message = format!("{PATH} has {} bytes; at most {MAX_FORMAT_BYTES} are taken", raw.len());
        return Err(TaskError::bad_input(PATH, message));
    }
    let fields = object(raw, PATH, &RESPONSE_FORMAT)?;
    let kind = required(&fields, PATH, "type")?;
    match string(kind, TYPE)?.as_str() {
        "text" => Ok(Format::Text),
        "json_object" => Ok(Format::JsonObject),
        "json_schema" => json_schema(required(&fields, PATH, "json_schema")?).map(Format::JsonSchema),
        "regex" => regex(&fields, PATH).map(Format::Regex),
        _ => Err(invalid(TYPE, r#""text", "json_object", "json_schema" or "regex""#, kind)),
    }
}

fn json_schema(raw: &str) -> Result<serde_json::Value, TaskError> {
    const PATH: &str = "response_format.json_schema";
    const SCHEMA: &str = "response_format.json_schema.schema";
    let fields = object(raw, PATH, &JSON_SCHEMA)?;
    let schema = required(&fields, PATH, "schema")?;
    if schema.starts_with('{') {
        deserialize(schema, SCHEMA)
    } else {
        Err(invalid(SCHEMA, "an object", schema))
    }
}

/// Reads a regular expression. Its field may be named `regex` or `pattern`: clients use both names.
fn regex(fields: &Fields<'_>, path: &str) -> Result<String, TaskError> {
    let key = match (fields.get("regex"), fields.get("pattern")) {
        (Some(_), Some(_)) => {
            let message = format!("{path}.pattern means the same as {path}.regex: send one of them");
            return Err(TaskError::bad_input(format!("{path}.pattern"), message));
        }
        (None, Some(_)) => "pattern",
        _ => "regex",
    };
    string(required(fields, path, key)?, &format!("{path}.{key}"))
}

/// Reads the prompts of a completion; `max_prompts` bounds their number.
fn completion_prompts(raw: &str, max_prompts: usize) -> Result<Prompts, TaskError> {
    const EXPECTED: &str = "a string, a list of strings, a list of token ids or a list of such lists";
    match raw.as_bytes().first() {
        Some(b'"') => return Ok(Prompts::Texts { texts: vec![string(raw, "prompt")?] }),
        Some(b'[') => {}
        _ => return Err(invalid("prompt", EXPECTED, raw)),
    }
    // A list of token ids is one prompt: `max_prompts` does not bound the ids.
    if is_number(raw[1..].trim_start()) {
        return Ok(Prompts::Tokens(vec![token_ids(raw, "prompt")?]));
    }
    let items = list(raw, "prompt", max_prompts)?;
    match raw[1..].trim_start().as_bytes().first() {
        Some(b'"') => {
            let text = |item: &str, path: &str| match item.starts_with('"') {
                true => string(item, path),
                false => Err(invalid(path, "a string, as prompt[0] is", item)),
            };
            Ok(Prompts::Texts { texts: each_item(&items, "prompt", text)? })
        }
        Some(b'[') => {
            let ids = |item: &str, path: &str| match item.starts_with('[') {
                true => token_ids(item, path),
                false => Err(invalid(path, "a list of token ids, as prompt[0] is", item)),
            };
            Ok(Prompts::Tokens(each_item(&items, "prompt", ids)?))
        }
        _ => Err(invalid("prompt", EXPECTED, raw)),
    }
}

/// Checks that the number of inputs, which is the number of prompts times `n`, is at most `max_inputs`.
fn check_input_count(prompts: &Prompts, n: usize, max_inputs: usize) -> Result<(), TaskError> {
    let count = prompts.count();
    let inputs = count.saturating_mul(n);
    if inputs <= max_inputs {
        return Ok(());
    }
    let prompts = if count == 1 { "prompt" } else { "prompts" };
    let message =
        format!("n = {n} for {count} {prompts} makes {inputs} inputs; this pool takes at most {max_inputs}");
    Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param("n"))
}

/// Reads the messages of a conversation, at least one.
fn messages(raw: &str) -> Result<Vec<ChatMessage>, TaskError> {
    each_item(&list(raw, "messages", MAX_MESSAGES)?, "messages", message)
}

fn message(raw: &str, path: &str) -> Result<ChatMessage, TaskError> {
    let fields = object(raw, path, &MESSAGE)?;
    let role_path = format!("{path}.role");
    let raw_role = required(&fields, path, "role")?;
    let role = string(raw_role, &role_path)?;
    if !ROLES.contains(&role.as_str()) {
        return Err(invalid(&role_path, r#""system", "developer", "user" or "assistant""#, raw_role));
    }
    Ok(ChatMessage {
        role,
        content: content(required(&fields, path, "content")?, &format!("{path}.content"))?,
        name: fields.get("name").map(|raw| string(raw.get(), &format!("{path}.name"))).transpose()?,
    })
}

fn content(raw: &str, path: &str) -> Result<String, TaskError> {
    if raw.starts_with('"') {
        return string(raw, path);
    }
    if !raw.starts_with('[') {
        return Err(invalid(path, "a string or a list of text parts", raw));
    }
    // vLLM and llama.cpp also join text parts by line breaks.
    Ok(each_item(&list(raw, path, MAX_MESSAGES)?, path, part)?.join("\n"))
}

fn part(raw: &str, path: &str) -> Result<String, TaskError> {
    let fields = object(raw, path, &PART)?;
    let type_path = format!("{path}.type");
    let kind = required(&fields, path, "type")?;
    if string(kind, &type_path)? != "text" {
        return Err(invalid(&type_path, r#""text" (images, audio and files are not supported here)"#, kind));
    }
    string(required(&fields, path, "text")?, &format!("{path}.text"))
}

/// Reads the fields of an object within the body.
fn object<'a>(raw: &'a str, path: &str, keys: &Keys) -> Result<Fields<'a>, TaskError> {
    if !raw.starts_with('{') {
        return Err(invalid(path, "an object", raw));
    }
    // Messages about a field begin with the field's name, so the object's path is put before them.
    Fields::parse(raw.as_bytes(), keys).map_err(|error| match error.param {
        Some(param) => TaskError::bad_input(format!("{path}.{param}"), format!("{path}.{}", error.message)),
        None => TaskError::bad_input(path, format!("{path}: {}", error.message)),
    })
}

/// A field that the object at `path` must have.
fn required<'a>(fields: &Fields<'a>, path: &str, key: &str) -> Result<&'a str, TaskError> {
    let path = format!("{path}.{key}");
    match fields.get(key) {
        Some(raw) => Ok(raw.get()),
        None => Err(TaskError::bad_input(path.as_str(), format!("{path} is missing"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::random::Seed;
    use crate::model::sequences::sampler::Sampler;

    fn completion(rest: &str) -> Result<GenerateRequest, TaskError> {
        GenerateRequest::read(Api::Completions, format!(r#"{{"prompt":"a"{rest}}}"#).as_bytes(), 8)
    }

    fn prompts(prompt: &str) -> Result<Prompts, TaskError> {
        let body = format!(r#"{{"prompt":{prompt}}}"#);
        GenerateRequest::read(Api::Completions, body.as_bytes(), 3).map(|request| request.prompts)
    }

    fn chat(rest: &str) -> Result<GenerateRequest, TaskError> {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"hi"}}]{rest}}}"#);
        GenerateRequest::read(Api::Chat, body.as_bytes(), 8)
    }

    fn conversation(messages: &str) -> Result<Prompts, TaskError> {
        let body = format!(r#"{{"messages":{messages}}}"#);
        GenerateRequest::read(Api::Chat, body.as_bytes(), 8).map(|request| request.prompts)
    }

    /// Checks that each text is refused: the error has this `param`, and its message is `param` and then `rest`.
    fn refused<T>(read: fn(&str) -> Result<T, TaskError>, cases: &[(&str, &str, &str)]) {
        for (text, param, rest) in cases {
            let Err(error) = read(text) else { panic!("{text} is accepted") };
            assert_eq!(error.kind, TaskErrorKind::BadInput, "{text}");
            assert_eq!((error.param.as_deref(), error.message), (Some(*param), format!("{param}{rest}")));
        }
    }

    #[test]
    fn an_absent_field_and_null_mean_the_default() {
        let request = completion("").unwrap();
        let sampling = Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
        };
        assert_eq!((request.sampling, request.n, request.logprobs), (sampling, 1, None));
        assert_eq!((request.max_tokens, request.seed, &request.format), (None, None, &Format::Text));
        assert!(!request.echo && !request.stream && !request.ignore_eos && request.stop.is_empty());
        let nulls = r#","temperature":null,"stop":null,"response_format":null,"tools":null,"seed":null"#;
        assert_eq!(completion(nulls).unwrap(), request);
        let others = r#","metadata":{"a":1},"store":true,"service_tier":"auto","stop":[],"logit_bias":{}"#;
        assert_eq!(completion(others).unwrap(), request);
    }

    #[test]
    fn each_of_the_four_forms_of_prompt_is_read() {
        let texts = |texts: &[&str]| Prompts::Texts { texts: texts.iter().map(|&it| it.into()).collect() };
        assert_eq!(prompts(r#""""#).unwrap(), texts(&[""]));
        assert_eq!(prompts(r#"[ "a" , "é\n" ]"#).unwrap(), texts(&["a", "é\n"]));
        assert_eq!(
            prompts("[ 1,2,3,4,4294967295]").unwrap(),
            Prompts::Tokens(vec![vec![1, 2, 3, 4, u32::MAX]])
        );
        assert_eq!(prompts("[[1,2],[3]]").unwrap(), Prompts::Tokens(vec![vec![1, 2], vec![3]]));
        refused(
            prompts,
            &[
                ("[]", "prompt", " is an empty list"),
                ("null", "prompt", " is missing"),
                ("[[1],[]]", "prompt[1]", " is an empty list"),
                ("[1,-2]", "prompt[1]", " must be a token id (an integer from 0), got -2"),
                ("[[4294967296]]", "prompt[0][0]", " must be a token id (an integer from 0), got 4294967296"),
                (r#"["a",[1]]"#, "prompt[1]", " must be a string, as prompt[0] is, got [1]"),
                (r#"[[1],"a"]"#, "prompt[1]", r#" must be a list of token ids, as prompt[0] is, got "a""#),
            ],
        );
        for body in ["7", "{}", "[null]", "[{}]"] {
            let message = prompts(body).unwrap_err().message;
            assert!(
                message.starts_with("prompt must be a string, a list of strings, a list of"),
                "{message}"
            );
        }
    }

    #[test]
    fn prompts_times_n_are_bounded() {
        let read = |body: &str| GenerateRequest::read(Api::Completions, body.as_bytes(), 4);
        let two = read(r#"{"prompt":["a","b"],"n":2}"#).unwrap();
        assert_eq!((two.n, two.path(1).as_str()), (2, "prompt[1]"));
        for (body, param, message) in [
            (r#"{"prompt":[[1],[2]],"n":3}"#, "n", "n = 3 for 2 prompts makes 6 inputs"),
            (r#"{"prompt":["a","b","c","d","e"]}"#, "prompt", "prompt holds 5 items"),
        ] {
            let error = read(body).unwrap_err();
            assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::TooLarge, Some(param)));
            assert_eq!(error.message, format!("{message}; this pool takes at most 4"));
        }
    }

    #[test]
    fn numbers_are_read_within_their_bounds() {
        let rest = r#","temperature":0,"top_k":-1,"top_p":1e-3,"min_p":1,"frequency_penalty":-2.0,
            "presence_penalty":2,"repetition_penalty":10,"n":8,"max_tokens":7,"logprobs":5"#;
        let request = completion(rest).unwrap();
        let Sampling { temperature, top_k, top_p, frequency_penalty, .. } = request.sampling;
        assert_eq!((temperature, top_k, top_p, frequency_penalty), (0.0, 0, 1e-3, -2.0));
        assert_eq!((request.n, request.max_tokens, request.logprobs), (8, Some(7), Some(5)));
        refused(
            completion,
            &[
                (r#","temperature":2.5"#, "temperature", " must be a number from 0 to 2, got 2.5"),
                (r#","temperature":"1""#, "temperature", r#" must be a number from 0 to 2, got "1""#),
                (r#","temperature":1e999"#, "temperature", " must be a number from 0 to 2, got 1e999"),
                (r#","top_p":0"#, "top_p", " must be a number above 0 and at most 1, got 0"),
                (r#","top_p":1e-300"#, "top_p", " must be a number above 0 and at most 1, got 1e-300"),
                (
                    r#","presence_penalty":-2.1"#,
                    "presence_penalty",
                    " must be a number from -2 to 2, got -2.1",
                ),
                (
                    r#","repetition_penalty":1e-38"#,
                    "repetition_penalty",
                    " must be a number from 0.1 to 10, got 1e-38",
                ),
                (r#","n":9"#, "n", " must be an integer from 1 to 8, got 9"),
                (r#","logprobs":true"#, "logprobs", " must be an integer from 0 to 5, got true"),
                (r#","max_tokens":0"#, "max_tokens", " must be a positive integer, got 0"),
                (r#","seed":1.5"#, "seed", " must be an integer of 64 bits, got 1.5"),
            ],
        );
        assert!(completion(r#","top_k":-2"#).unwrap_err().message.ends_with("got -2"));
        let lowest = completion(r#","repetition_penalty":0.1"#).unwrap().sampling;
        assert_eq!(lowest.repetition_penalty, 0.1);
    }

    #[test]
    fn any_integer_of_64_bits_is_a_seed() {
        for (written, read) in [("0", 0), ("-1", u64::MAX), ("18446744073709551615", u64::MAX)] {
            assert_eq!(completion(&format!(r#","seed":{written}"#)).unwrap().seed, Some(read));
        }
        assert!(completion(r#","seed":18446744073709551616"#).is_err());
    }

    #[test]
    fn stop_strings_are_few_and_not_empty() {
        assert_eq!(completion(r#","stop":"\n""#).unwrap().stop, ["\n"]);
        assert_eq!(completion(r#","stop":["a","b","c","d"]"#).unwrap().stop, ["a", "b", "c", "d"]);
        refused(
            completion,
            &[
                (r#","stop":["1","2","3","4","5"]"#, "stop", " holds 5 strings; at most 4 are taken"),
                (r#","stop":["a",""]"#, "stop[1]", r#" must be a string that is not empty, got """#),
                (r#","stop":["a",7]"#, "stop[1]", " must be a string, got 7"),
                (r#","stop":7"#, "stop", " must be a string or a list of strings, got 7"),
            ],
        );
    }

    #[test]
    fn texts_formats_and_conversations_are_bounded_in_size() {
        let quoted = |length: usize| format!("\"{}\"", "a".repeat(length));
        for (field, max_bytes) in [("user", 256), ("cache_salt", 256), ("stop", 1_024)] {
            assert!(completion(&format!(r#","{field}":{}"#, quoted(max_bytes))).is_ok());
            let error = completion(&format!(r#","{field}":{}"#, quoted(max_bytes + 1))).unwrap_err();
            assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::BadInput, Some(field)));
            assert_eq!(
                error.message,
                format!("{field} has {} bytes; at most {max_bytes} are taken", max_bytes + 1)
            );
        }
        let error = completion(&format!(r#","stop":["a",{}]"#, quoted(2_000))).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("stop[1]"));
        let schema = format!(r#"{{"enum":[{}]}}"#, quoted(MAX_FORMAT_BYTES));
        let format = format!(r#"{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}"#);
        let error = completion(&format!(r#","response_format":{format}"#)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("response_format"));
        assert!(error.message.ends_with("bytes; at most 131072 are taken"), "{}", error.message);
        let many = "[".to_owned() + &r#"{"role":"user","content":""},"#.repeat(MAX_MESSAGES) + "0]";
        let error = conversation(&many).unwrap_err();
        assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::TooLarge, Some("messages")));
    }

    #[test]
    fn fields_that_need_or_exclude_another_are_checked_together() {
        let request = chat(r#","logprobs":true,"top_logprobs":20,"max_tokens":5,"max_completion_tokens":5"#);
        let request = request.unwrap();
        assert_eq!((request.logprobs, request.max_tokens), (Some(20), Some(5)));
        assert_eq!(chat(r#","logprobs":true"#).unwrap().logprobs, Some(0));
        assert!(chat(r#","stream":true,"stream_options":{"include_usage":true}"#).unwrap().include_usage);
        refused(
            chat,
            &[
                (r#","top_logprobs":2"#, "top_logprobs", " is 2, but logprobs is not true"),
                (
                    r#","max_tokens":5,"max_completion_tokens":6"#,
                    "max_completion_tokens",
                    " is 6, and max_tokens is 5; both mean the same: send one of them",
                ),
                (r#","stream_options":{}"#, "stream_options", " is set, but stream is not true"),
                (
                    r#","stream":true,"stream_options":{"include_usage":1}"#,
                    "stream_options.include_usage",
                    " must be true or false, got 1",
                ),
            ],
        );
        let both = " is true and logprobs is 0; both together are not supported here";
        refused(completion, &[(r#","echo":true,"logprobs":0"#, "echo", both)]);
    }

    #[test]
    fn the_owner_is_the_salt_else_the_user() {
        let request = chat(r#","user":"u","cache_salt":"s""#).unwrap();
        assert_eq!((request.owner.as_deref(), request.user.as_deref()), (Some("s"), Some("u")));
        assert_eq!(chat(r#","user":"u""#).unwrap().owner.as_deref(), Some("u"));
        refused(chat, &[(r#","user":{}"#, "user", " must be a string, got {}")]);
    }

    #[test]
    fn messages_are_texts_or_parts_of_text() {
        let read = conversation(
            r#"[{"role":"system","content":"s"},{"role":"user","name":"n","content":
                [{"type":"text","text":"a"},{"type":"text","text":"b"}],"tool_calls":null}]"#,
        );
        let Prompts::Messages(messages) = read.unwrap() else { panic!("no messages") };
        let expected = json!([
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a\nb", "name": "n"},
        ]);
        assert_eq!(serde_json::to_value(messages).unwrap(), expected);
        refused(
            conversation,
            &[
                ("[]", "messages", " is an empty list"),
                (r#""hi""#, "messages", r#" must be a list, got "hi""#),
                (r#"["hi"]"#, "messages[0]", r#" must be an object, got "hi""#),
                (r#"[{"content":"a"}]"#, "messages[0].role", " is missing"),
                (
                    r#"[{"role":"tool","tool_call_id":"c","content":"a"}]"#,
                    "messages[0].role",
                    r#" must be "system", "developer", "user" or "assistant", got "tool""#,
                ),
                (r#"[{"role":"assistant","content":null}]"#, "messages[0].content", " is missing"),
                (
                    r#"[{"role":"assistant","content":null,"tool_calls":[{}]}]"#,
                    "messages[0].tool_calls",
                    " is not supported here; leave it out, or send []",
                ),
                (
                    r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url"}]}]"#,
                    "messages[0].content[1].type",
                    r#" must be "text" (images, audio and files are not supported here), got "image_url""#,
                ),
                (
                    r#"[{"role":"user","content":[{"type":"text"}]}]"#,
                    "messages[0].content[0].text",
                    " is missing",
                ),
                (
                    r#"[{"role":"user","contents":"a"}]"#,
                    "messages[0].contents",
                    " is not a field of this request; did you mean content?",
                ),
            ],
        );
    }

    #[test]
    fn each_response_format_is_read() {
        let read = |format: &str| chat(&format!(r#","response_format":{format}"#)).map(|it| it.format);
        assert_eq!(read(r#"{"type":"text"}"#).unwrap(), Format::Text);
        assert_eq!(read(r#"{"type":"json_object"}"#).unwrap(), Format::JsonObject);
        let schema =
            r#"{"type":"json_schema","json_schema":{"name":"n","strict":true,"schema":{"type":"null"}}}"#;
        assert_eq!(read(schema).unwrap(), Format::JsonSchema(json!({"type": "null"})));
        for key in ["regex", "pattern"] {
            let format = format!(r#"{{"type":"regex","{key}":"\\d+"}}"#);
            assert_eq!(read(&format).unwrap(), Format::Regex(r"\d+".into()));
        }
        for (format, param) in [
            ("7", "response_format"),
            ("{}", "response_format.type"),
            (r#"{"type":"xml"}"#, "response_format.type"),
            (r#"{"type":"regex"}"#, "response_format.regex"),
            (r#"{"type":"regex","regex":"a","pattern":"b"}"#, "response_format.pattern"),
            (r#"{"type":"json_object","schema":{}}"#, "response_format.schema"),
            (r#"{"type":"json_schema"}"#, "response_format.json_schema"),
            (r#"{"type":"json_schema","json_schema":{}}"#, "response_format.json_schema.schema"),
            (r#"{"type":"json_schema","json_schema":{"schema":[]}}"#, "response_format.json_schema.schema"),
        ] {
            let error = read(format).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
            assert!(error.message.starts_with(param), "{}", error.message);
        }
    }

    #[test]
    fn unsupported_fields_are_refused_by_name() {
        let fields = ["tools", "logit_bias", "best_of", "suffix", "prompt_logprobs", "tool_choice"];
        for (field, chat_only) in fields.map(|field| (field, false)).into_iter().chain(
            ["functions", "function_call", "modalities", "audio", "parallel_tool_calls", "prediction"]
                .map(|field| (field, true)),
        ) {
            let rest = format!(r#","{field}":[7]"#);
            assert_eq!(chat(&rest).unwrap_err().param.as_deref(), Some(field));
            if !chat_only {
                assert_eq!(completion(&rest).unwrap_err().param.as_deref(), Some(field));
            }
        }
        let defaults = r#","tool_choice":"none","modalities":["text"],"reasoning_effort":"low","tools":[]"#;
        assert!(chat(defaults).is_ok());
    }

    #[test]
    fn no_truncated_or_deeply_nested_body_panics() {
        let body = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"é\ud83d\ude00"}]}],"n":2,
            "stop":["a"],"response_format":{"type":"json_schema","json_schema":{"schema":{}}},"seed":-1}"#;
        assert!(GenerateRequest::read(Api::Chat, body.as_bytes(), 8).is_ok());
        for end in 0..body.len() {
            let error = GenerateRequest::read(Api::Chat, &body.as_bytes()[..end], 8).unwrap_err();
            assert_eq!(error.kind, TaskErrorKind::Undecodable, "{}", error.message);
        }
        let deep = "[".repeat(60_000) + &"]".repeat(60_000);
        let schema = format!(r#"{{"type":"json_schema","json_schema":{{"schema":{{"a":{deep}}}}}}}"#);
        let error = chat(&format!(r#","response_format":{schema}"#)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("response_format.json_schema.schema"));
        assert_eq!(prompts(&deep).unwrap_err().param.as_deref(), Some("prompt[0][0]"));
        let surrogate = r#"[{"role":"user","content":"a","\ud800":1}]"#;
        assert_eq!(conversation(surrogate).unwrap_err().kind, TaskErrorKind::BadInput);
    }

    #[test]
    fn no_accepted_parameter_makes_finite_logits_infinite() {
        let seed = Seed { task: 7, sequence: 0 };
        let edges = [
            ("temperature", "0"),
            ("temperature", "1e-38"),
            ("temperature", "1.1e-4"),
            ("temperature", "2"),
            ("top_p", "1e-38"),
            ("min_p", "1e-38"),
            ("min_p", "1"),
            ("top_k", "9223372036854775807"),
            ("presence_penalty", "-2"),
            ("presence_penalty", "2"),
            ("frequency_penalty", "-2"),
            ("frequency_penalty", "2"),
            ("repetition_penalty", "0.1"),
            ("repetition_penalty", "10"),
        ];
        // The largest repetition penalty makes 3e38 of 3e37, which is just below the largest f32.
        for size in [0.0, 1e-38, 1.0, 1e3, 3e37] {
            for (one, one_value) in edges {
                for (other, other_value) in edges.into_iter().filter(|(other, _)| *other != one) {
                    let body = format!(r#"{{"prompt":"a","{one}":{one_value},"{other}":{other_value}}}"#);
                    let request = GenerateRequest::read(Api::Completions, body.as_bytes(), 1).unwrap();
                    let mut sampler = Sampler::new(request.sampling, seed, &[0, 1]);
                    for position in 0..4 {
                        let chosen = sampler.choose(&mut [size, -size, size / 2.0, 0.0], position);
                        assert!(chosen.is_some(), "{body}, {size}");
                    }
                }
            }
        }
    }
}
