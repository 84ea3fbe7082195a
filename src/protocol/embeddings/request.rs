//! Reads the request body of `/v1/embeddings`. Decides what is accepted; errors name the field and the value.

use serde_json::value::RawValue;

use super::Encoding;
use crate::protocol::TaskError;
use crate::protocol::fields::{Fields, Keys, invalid, is_number, keys, list, string, token_ids};

const KEYS: Keys = keys! {
    "input", "model", "encoding_format", "dimensions", "errors", "prompt_name", "truncate";
    "add_special_tokens" = "true", "input_type" = "null", "normalize" = "true",
    "truncate_prompt_tokens" = "null", "truncation_direction" = "\"Right\""
};

/// One input: what a vector is computed for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A text, possibly empty.
    Text(String),
    /// Token ids of the model's own tokenizer; at least one.
    Ids(Vec<u32>),
}

/// A decoded request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingRequest {
    /// The inputs in order: at least one, and at most the pool's `max_inputs`. An input is an error only if
    /// `errors_per_input` is set.
    pub inputs: Vec<Result<Input, TaskError>>,
    /// Whether a bad input is answered by an error in its place; otherwise it fails the task.
    pub errors_per_input: bool,
    /// Whether the field `input` was a list of inputs, so that errors say `input[i]`.
    pub is_list: bool,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// How the reply's vectors are written.
    pub encoding: Encoding,
    /// Number of dimensions to keep of each vector; at least 1.
    pub dimensions: Option<usize>,
    /// The name of the prompt that is put before each text, instead of the default.
    pub prompt_name: Option<String>,
    /// Whether texts that are too long are cut; otherwise they are refused.
    pub truncate: bool,
}

impl EmbeddingRequest {
    /// Reads a body; `max_inputs` bounds the number of inputs.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not UTF-8 or not JSON, `TooLarge` over `max_inputs`, else `BadInput`
    /// with the field and the value.
    pub fn parse(body: &[u8], max_inputs: usize) -> Result<Self, TaskError> {
        let fields = Fields::parse(body, &KEYS)?;
        let errors_per_input = fields.get("errors").map(wants_errors_per_input).transpose()?.unwrap_or(false);
        let Inputs { items: inputs, is_list } = read_inputs(fields.required("input")?.get(), max_inputs)?;
        if !errors_per_input && let Some(error) = inputs.iter().find_map(|input| input.as_ref().err()) {
            return Err(error.clone());
        }
        Ok(Self {
            inputs,
            errors_per_input,
            is_list,
            model: fields.string("model")?,
            encoding: fields.get("encoding_format").map(encoding).transpose()?.unwrap_or_default(),
            dimensions: fields.positive("dimensions")?,
            prompt_name: fields.string("prompt_name")?,
            truncate: fields.boolean("truncate", true)?,
        })
    }

    /// The path of input `index` in the body: `input`, or `input[3]`.
    pub fn path(&self, index: usize) -> String {
        if self.is_list { format!("input[{index}]") } else { "input".to_owned() }
    }
}

/// Whether each bad input is answered by an error in its place.
fn wants_errors_per_input(raw: &RawValue) -> Result<bool, TaskError> {
    match string(raw.get(), "errors").as_deref() {
        Ok("each") => Ok(true),
        Ok("task") => Ok(false),
        _ => Err(invalid("errors", "\"task\" or \"each\"", raw.get())),
    }
}

/// The inputs of the field `input`, and whether it was a list of them.
struct Inputs {
    items: Vec<Result<Input, TaskError>>,
    is_list: bool,
}

fn read_inputs(raw: &str, max_inputs: usize) -> Result<Inputs, TaskError> {
    const EXPECTED: &str = "a string, a list of strings, a list of token ids or a list of such lists";
    match raw.as_bytes().first() {
        Some(b'"') => {
            let input = Input::Text(string(raw, "input")?);
            return Ok(Inputs { items: vec![Ok(input)], is_list: false });
        }
        Some(b'[') => {}
        _ => return Err(invalid("input", EXPECTED, raw)),
    }
    // A list of token ids is one input: `max_inputs` does not bound the ids.
    if is_number(raw[1..].trim_start()) {
        let input = Input::Ids(token_ids(raw, "input")?);
        return Ok(Inputs { items: vec![Ok(input)], is_list: false });
    }
    let items = list(raw, "input", max_inputs)?;
    let expects_strings = items.first().is_some_and(|first| first.get().starts_with('"'));
    let inputs = items.iter().enumerate().map(|(index, item)| read_item(item.get(), index, expects_strings));
    Ok(Inputs { items: inputs.collect(), is_list: true })
}

/// Reads item `index` of a list of inputs. All items must be of the same kind: strings if `expects_strings`, else
/// lists of token ids.
fn read_item(raw: &str, index: usize, expects_strings: bool) -> Result<Input, TaskError> {
    let path = format!("input[{index}]");
    match (raw.as_bytes().first(), expects_strings) {
        (Some(b'"'), true) => Ok(Input::Text(string(raw, &path)?)),
        (Some(b'['), false) => Ok(Input::Ids(token_ids(raw, &path)?)),
        (Some(b'"'), false) => Err(invalid(&path, "a list of token ids, as input[0] is", raw)),
        (Some(b'['), true) => Err(invalid(&path, "a string, as input[0] is", raw)),
        _ => Err(invalid(&path, "a string or a list of token ids", raw)),
    }
}

fn encoding(raw: &RawValue) -> Result<Encoding, TaskError> {
    match string(raw.get(), "encoding_format").as_deref() {
        Ok("float") => Ok(Encoding::Float),
        Ok("base64") => Ok(Encoding::Base64),
        _ => Err(invalid("encoding_format", "\"float\" or \"base64\"", raw.get())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::TaskErrorKind;

    fn parse(body: &str) -> Result<EmbeddingRequest, TaskError> {
        EmbeddingRequest::parse(body.as_bytes(), 4)
    }

    fn refusal(body: &str) -> (TaskErrorKind, String, Option<String>) {
        let error = parse(body).expect_err(body);
        (error.kind, error.message, error.param)
    }

    fn plain(texts: &[&str]) -> Vec<Result<Input, TaskError>> {
        texts.iter().map(|text| Ok(Input::Text((*text).to_owned()))).collect()
    }

    #[test]
    fn each_of_the_four_forms_of_input_is_read() {
        assert_eq!(parse(r#"{"input":"a\u00e9\n"}"#).unwrap().inputs, plain(&["aé\n"]));
        assert_eq!(parse(r#" {"input" : [ "a" , "" ]}"#).unwrap().inputs, plain(&["a", ""]));
        assert_eq!(parse(r#"{"input":[7, 8]}"#).unwrap().inputs, [Ok(Input::Ids(vec![7, 8]))]);
        let two = parse(r#"{"input":[[1],[2,3]]}"#).unwrap();
        assert_eq!(two.inputs, [Ok(Input::Ids(vec![1])), Ok(Input::Ids(vec![2, 3]))]);
        assert_eq!(two.path(1), "input[1]");
        assert_eq!(parse(r#"{"input":[7, 8]}"#).unwrap().path(0), "input");
    }

    #[test]
    fn an_empty_text_is_an_input() {
        assert_eq!(parse(r#"{"input":""}"#).unwrap().inputs, plain(&[""]));
    }

    #[test]
    fn optional_fields_may_be_null_and_unknown_ones_are_ignored() {
        let body = r#"{"input":"a","model":null,"dimensions":null,"encoding_format":null,"user":{}}"#;
        let request = parse(body).unwrap();
        assert_eq!((request.model, request.dimensions), (None, None));
        assert_eq!(request.encoding, Encoding::Float);
        let body = r#"{"input":"a","model":"m","dimensions":3,"encoding_format":"base64"}"#;
        let request = parse(body).unwrap();
        assert_eq!((request.model.as_deref(), request.dimensions), (Some("m"), Some(3)));
        assert_eq!(request.encoding, Encoding::Base64);
    }

    #[test]
    fn a_refusal_names_the_field_and_the_value() {
        let cases = [
            (r#"{}"#, "input", "input is missing"),
            (r#"{"input":[]}"#, "input", "input is an empty list"),
            (r#"{"input":[[1],[]]}"#, "input[1]", "input[1] is an empty list"),
            (
                r#"{"input":["a","b","c",1.5]}"#,
                "input[3]",
                "input[3] must be a string or a list of token ids, got 1.5",
            ),
            (r#"{"input":["a",[1]]}"#, "input[1]", "input[1] must be a string, as input[0] is, got [1]"),
            (
                r#"{"input":[[1],"a"]}"#,
                "input[1]",
                r#"input[1] must be a list of token ids, as input[0] is, got "a""#,
            ),
            (r#"{"input":[1,-2]}"#, "input[1]", "input[1] must be a token id (an integer from 0), got -2"),
            (
                r#"{"input":[[1,"x"]]}"#,
                "input[0][1]",
                r#"input[0][1] must be a token id (an integer from 0), got "x""#,
            ),
            (r#"{"input":"a","model":5}"#, "model", "model must be a string, got 5"),
            (
                r#"{"input":"a","dimensions":-1}"#,
                "dimensions",
                "dimensions must be a positive integer, got -1",
            ),
            (r#"{"input":"a","dimensions":0}"#, "dimensions", "dimensions must be a positive integer, got 0"),
            (
                r#"{"input":"a","encoding_format":"int8"}"#,
                "encoding_format",
                r#"encoding_format must be "float" or "base64", got "int8""#,
            ),
        ];
        for (body, param, message) in cases {
            let expected = (TaskErrorKind::BadInput, message.to_owned(), Some(param.to_owned()));
            assert_eq!(refusal(body), expected, "{body}");
        }
    }

    #[test]
    fn with_errors_each_a_bad_input_becomes_an_error_in_its_place() {
        let request = parse(r#"{"input":["a",7,"b"],"errors":"each"}"#).unwrap();
        let errors: Vec<_> =
            request.inputs.iter().map(|input| input.as_ref().err().map(|it| it.param.clone())).collect();
        assert_eq!(errors, [None, Some(Some("input[1]".to_owned())), None]);
        assert_eq!(refusal(r#"{"input":["a",7],"errors":"task"}"#).2.as_deref(), Some("input[1]"));
        assert_eq!(refusal(r#"{"input":["a"],"errors":"all"}"#).2.as_deref(), Some("errors"));
    }

    #[test]
    fn a_long_value_is_shortened() {
        let (_, message, _) = refusal(&format!(r#"{{"input":{{"é":"{}"}}}}"#, "é".repeat(500)));
        assert!(message.ends_with('…') && message.len() < 250, "{message}");
    }

    #[test]
    fn too_many_inputs_are_too_large_but_many_ids_are_one_input() {
        let (kind, message, param) = refusal(r#"{"input":["a","b","c","d","e"]}"#);
        assert_eq!(kind, TaskErrorKind::TooLarge);
        assert_eq!(message, "input holds 5 items; this pool takes at most 4");
        assert_eq!(param.as_deref(), Some("input"));
        assert_eq!(parse(r#"{"input":[1,2,3,4,5]}"#).unwrap().inputs.len(), 1);
    }

    #[test]
    fn what_is_not_json_is_undecodable_and_json_of_another_kind_is_bad_input() {
        for body in ["", "STOP", "{\"input\":\"a\"", "{\"input\":\"a\"} x", "[1,", "{'input':1}"] {
            let (kind, message, _) = refusal(body);
            assert_eq!(kind, TaskErrorKind::Undecodable, "{body}");
            assert!(message.contains("line 1 column"), "{message}");
        }
        for body in ["[\"a\"]", "3", "\"text\"", "true", "null"] {
            assert_eq!(refusal(body).0, TaskErrorKind::BadInput, "{body}");
        }
        let error = EmbeddingRequest::parse(b"{\"input\":\"\xff\"}", 4).unwrap_err();
        assert_eq!(error.kind, TaskErrorKind::Undecodable);
    }

    #[test]
    fn half_a_surrogate_pair_and_a_repeated_field_are_bad_input() {
        assert_eq!(refusal(r#"{"input":["a","\ud800"]}"#).2.as_deref(), Some("input[1]"));
        assert_eq!(refusal(r#"{"input":"a","input":"b"}"#).0, TaskErrorKind::BadInput);
    }

    #[test]
    fn deep_nesting_is_refused_without_overflowing_the_stack() {
        let body = format!("{{\"input\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(refusal(&body).2.as_deref(), Some("input[0][0]"));
    }
}
