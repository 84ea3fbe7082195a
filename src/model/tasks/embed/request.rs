//! Reads the request body of `/v1/embeddings`. Decides what is accepted; errors name the field and the value.

use serde_json::value::RawValue;

use super::reply::Encoding;
use crate::model::fields::{Fields, Keys, first_items, invalid, is_number, keys, list, string, token_ids};
use crate::model::tasks::image::request::{ImageFile, ImageMessage, image_in_object, object_url};
use crate::protocol::{FileUrl, Files, Message, TaskError};

pub const KEYS: Keys = keys! {
    "input", "model", "encoding_format", "dimensions", "errors", "prompt_name", "truncate";
    "add_generation_prompt" = "false", "add_special_tokens" = "true", "chat_template" = "null",
    "chat_template_kwargs" = "{}", "continue_final_message" = "false", "embed_dtype" = "\"float32\"",
    "embedding_types" = "[\"float\"]", "endianness" = "\"native\"", "images" = "null", "input_type" = "null",
    "inputs" = "null", "late_chunking_params" = "null", "max_tokens" = "null", "media_io_kwargs" = "null",
    "messages" = "null", "mm_processor_kwargs" = "null", "normalize" = "true", "output_dimension" = "null",
    "padding" = "null", "texts" = "null", "truncate_prompt_tokens" = "null",
    "truncation_direction" = "\"Right\"", "truncation_side" = "\"right\"", "use_activation" = "null", "instruction" = "null",
    "late_chunking" = "false", "output_dtype" = "\"float\"", "pooling" = "null", "precision" = "\"float32\"",
    "prompt" = "null", "task" = "null"
};

/// One input: what a vector is computed for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A text, possibly empty.
    Text(String),
    /// Token ids of the model's own tokenizer; at least one.
    Ids(Vec<u32>),
    /// An image, for models of texts and images.
    Image(ImageFile),
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
        Self::from_json(body, max_inputs, None)
    }

    /// Reads a message whose inputs may be images: objects with `image_url` in the place of texts, or one image as the
    /// whole body, with parameters as headers. `files` are the fetched ones.
    ///
    /// # Errors
    /// As [`EmbeddingRequest::parse`].
    pub fn parse_with_images(message: &Message, max_inputs: usize, files: &Files) -> Result<Self, TaskError> {
        let sent = ImageMessage::read(message, &["dimensions", "encoding_format", "model"])?;
        let Some(image) = sent.image else {
            return Self::from_json(&message.body, max_inputs, Some(files));
        };
        let inputs = Inputs { items: vec![Ok(Input::Image(image))], is_list: false };
        Self::from_fields(&Fields::parse(&sent.fields, &KEYS)?, inputs)
    }

    /// The URLs of images in a message, except data URLs. Empty if the message cannot be read.
    pub fn file_urls(message: &Message, max_inputs: usize) -> Vec<FileUrl> {
        let fields = message.is_json().then(|| Fields::parse(&message.body, &KEYS).ok()).flatten();
        let Some(raw) = fields.as_ref().and_then(|fields| fields.get("input")) else { return Vec::new() };
        if !raw.get().starts_with('[') {
            return object_url(raw, "input").into_iter().collect();
        }
        let Ok(first) = first_items(raw.get(), "input", max_inputs) else { return Vec::new() };
        let numbered = first.items.iter().enumerate();
        numbered.filter_map(|(index, item)| object_url(item, &format!("input[{index}]"))).collect()
    }

    /// Reads JSON. Without `files`, images are refused.
    fn from_json(body: &[u8], max_inputs: usize, files: Option<&Files>) -> Result<Self, TaskError> {
        let fields = Fields::parse(body, &KEYS)?;
        let inputs = read_inputs(fields.required("input")?, max_inputs, files)?;
        Self::from_fields(&fields, inputs)
    }

    fn from_fields(fields: &Fields<'_>, inputs: Inputs) -> Result<Self, TaskError> {
        let Inputs { items: inputs, is_list } = inputs;
        let errors_per_input = fields.get("errors").map(wants_errors_per_input).transpose()?.unwrap_or(false);
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

fn read_inputs(input: &RawValue, max_inputs: usize, files: Option<&Files>) -> Result<Inputs, TaskError> {
    const EXPECTED: &str = "a string, a list of strings, a list of token ids or a list of such lists";
    let raw = input.get();
    match (raw.as_bytes().first(), files) {
        (Some(b'"'), _) => {
            let input = Input::Text(string(raw, "input")?);
            return Ok(Inputs { items: vec![Ok(input)], is_list: false });
        }
        (Some(b'{'), Some(files)) => {
            let image = image_in_object(input, "input", files)?;
            return Ok(Inputs { items: vec![Ok(Input::Image(image))], is_list: false });
        }
        (Some(b'['), _) => {}
        _ => return Err(invalid("input", EXPECTED, raw)),
    }
    // A list of token ids is one input: `max_inputs` does not bound the ids.
    if is_number(raw[1..].trim_start()) {
        let input = Input::Ids(token_ids(raw, "input")?);
        return Ok(Inputs { items: vec![Ok(input)], is_list: false });
    }
    let items = list(raw, "input", max_inputs)?;
    let expects_ids = items.first().is_some_and(|first| first.get().starts_with('['));
    let inputs = items.iter().enumerate().map(|(index, item)| read_item(item, index, expects_ids, files));
    Ok(Inputs { items: inputs.collect(), is_list: true })
}

/// Reads item `index` of a list of inputs. All items must be of the same kind: lists of token ids if `expects_ids`, else
/// strings, and images if there are `files`.
fn read_item(
    item: &RawValue,
    index: usize,
    expects_ids: bool,
    files: Option<&Files>,
) -> Result<Input, TaskError> {
    let (raw, path) = (item.get(), format!("input[{index}]"));
    match (raw.as_bytes().first(), expects_ids) {
        (Some(b'"'), false) => Ok(Input::Text(string(raw, &path)?)),
        (Some(b'['), true) => Ok(Input::Ids(token_ids(raw, &path)?)),
        (Some(b'"'), true) => Err(invalid(&path, "a list of token ids, as input[0] is", raw)),
        (Some(b'['), false) if index > 0 => Err(invalid(&path, "a string, as input[0] is", raw)),
        (Some(b'{'), _) => match files {
            Some(_) if expects_ids => Err(invalid(&path, "a list of token ids, as input[0] is", raw)),
            Some(files) => image_in_object(item, &path, files).map(Input::Image),
            None => Err(invalid(&path, "a string or a list of token ids (this model takes no images)", raw)),
        },
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
    use crate::protocol::{Properties, TaskErrorKind, Value};

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
    fn images_are_inputs_for_models_that_take_them() {
        let with_images = |body: &str| {
            let message = Message { body: body.to_owned().into(), ..Message::default() };
            EmbeddingRequest::parse_with_images(&message, 4, &Files::default())
        };
        let url = r#"{"image_url":{"url":"data:image/png;base64,ZmlsZQ=="}}"#;
        let both = with_images(&format!(r#"{{"input":["a",{url}]}}"#)).unwrap();
        let Ok(Input::Image(image)) = &both.inputs[1] else { panic!("{:?}", both.inputs) };
        assert_eq!((&*image.bytes, image.path.as_deref()), (&b"file"[..], Some("input[1].image_url.url")));
        assert_eq!(both.inputs[0], Ok(Input::Text("a".to_owned())));
        let alone = with_images(&format!(r#"{{"input":{url},"dimensions":2}}"#)).unwrap();
        assert_eq!((alone.inputs.len(), alone.is_list, alone.dimensions), (1, false, Some(2)));
        // Only a model of texts and images takes them.
        assert!(refusal(&format!(r#"{{"input":["a",{url}]}}"#)).1.contains("this model takes no images"));
        let error =
            with_images(r#"{"input":["a",{"image_url":{"url":"https://example.org/a"}}]}"#).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("input[1].image_url.url"));
        let error = with_images(r#"{"input":[{"image":"a"}]}"#).unwrap_err();
        assert!(error.message.contains("image_url is missing"), "{error}");

        let message = Message {
            body: br#"{"input":[{"image_url":"https://example.org/a"},"b"]}"#[..].into(),
            ..Message::default()
        };
        let urls = EmbeddingRequest::file_urls(&message, 4);
        assert_eq!((urls.len(), urls[0].path.as_str()), (1, "input[0].image_url"));
    }

    #[test]
    fn an_image_may_be_the_whole_body() {
        let message = |headers: &[(&str, Value)]| {
            let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
            let content_type = Some("image/png".to_owned());
            let properties = Properties { headers, content_type, ..Properties::default() };
            Message { properties, body: b"file"[..].into() }
        };
        let parse = |headers: &[(&str, Value)]| {
            EmbeddingRequest::parse_with_images(&message(headers), 4, &Files::default())
        };
        let request = parse(&[("dimensions", Value::I32(3)), ("encoding_format", "base64".into())]).unwrap();
        assert_eq!((request.dimensions, request.encoding), (Some(3), Encoding::Base64));
        for (name, value) in [("dimensions", Value::I32(0)), ("encoding_format", "int8".into())] {
            assert_eq!(parse(&[(name, value)]).unwrap_err().param.as_deref(), Some(name));
        }
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
