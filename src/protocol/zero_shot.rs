//! Reads requests for zero-shot classification of images, whose labels are in the request. They have the URL of `images`,
//! and give images in the same ways. Pure: images are not decoded here.

use std::collections::HashMap;

use serde_json::value::RawValue;

use super::fields::{Fields, Keys, bounded_string, each_item, excerpt, keys, list, string};
use super::images::{ImageFile, RequestedImages, images_in, raw_image, urls_of_images};
use super::message::{boolean_header, count_header, text_header};
use super::{FileUrl, Files, Headers, Message, TaskError, TaskErrorKind, Value};

/// Maximum number of labels.
pub const MAX_LABELS: usize = 1_000;
/// Maximum size of a reply, in bytes.
const MAX_REPLY_BYTES: usize = 8 << 20;
/// Bytes of a label in the reply beside the label itself: the names of the fields, and a score with the most digits.
const BYTES_PER_SCORE: usize = 40;
/// Maximum size of a label, in bytes. It is far above what a model reads.
const MAX_LABEL_BYTES: usize = 1_000;
/// Maximum size of a template, in bytes. The bound limits memory, because each label gets a copy.
const MAX_TEMPLATE_BYTES: usize = 1_000;
/// The template of a request that has none, as in the pipelines of the transformers library.
const DEFAULT_TEMPLATE: &str = "This is a photo of {}.";
/// The placeholder in the template, which a label replaces.
const PLACEHOLDER: &str = "{}";

const KEYS: Keys = keys! {
    "hypothesis_template", "image_url", "input", "inputs", "labels", "model", "parameters", "raw_scores", "top_k",
    "truncate";
    "function_to_apply" = "null"
};
/// The fields of `parameters`, as Hugging Face's clients send them.
const PARAMETERS: Keys = keys! { "candidate_labels", "hypothesis_template" };

/// Images to classify by the labels of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZeroShotRequest {
    /// At least one.
    pub images: Vec<ImageFile>,
    /// Whether they came as a list. If so, the reply is a list too.
    pub is_list: bool,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// At least one; all are different.
    pub labels: Vec<String>,
    /// The sentence into which a label is put.
    template: String,
    /// The number of labels in the reply for each image, highest score first.
    pub top_k: usize,
    /// Whether the reply has the model's raw scores instead of probabilities.
    pub raw_scores: bool,
    /// Whether labels that are too long are cut; otherwise they are refused.
    pub truncate: bool,
}

impl ZeroShotRequest {
    /// Reads a message; `max_images` bounds the number of images.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not JSON, `TooLarge` for too many images or labels, else `BadInput` with the
    /// field and the value.
    pub fn parse(message: &Message, max_images: usize, files: &Files) -> Result<Self, TaskError> {
        let request = match raw_image(message)? {
            Some(image) => Self::from_headers(&message.properties.headers, image)?,
            None => Self::from_json(&message.body, max_images, files)?,
        };
        let (images, bytes) = (request.images.len(), request.reply_bytes());
        if bytes > MAX_REPLY_BYTES {
            let message = format!(
                "the labels of {images} images would take up to {bytes} bytes in the reply; at most {MAX_REPLY_BYTES} \
                 are allowed: send fewer images or a smaller top_k"
            );
            return Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param("labels"));
        }
        Ok(request)
    }

    /// The largest size that the reply can have, in bytes.
    fn reply_bytes(&self) -> usize {
        let written = |label: &String| serde_json::to_string(label).map_or(usize::MAX, |json| json.len());
        let mut sizes: Vec<usize> = self.labels.iter().map(written).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let of_image: usize = sizes.iter().take(self.top_k).map(|bytes| bytes + BYTES_PER_SCORE).sum();
        of_image.saturating_mul(self.images.len())
    }

    /// The URLs of images in a message, except data URLs. Empty if the message cannot be read.
    pub fn file_urls(message: &Message, max_images: usize) -> Vec<FileUrl> {
        urls_of_images(message, &KEYS, max_images)
    }

    /// The sentence with this label.
    pub fn sentence(&self, label: &str) -> String {
        self.template.replace(PLACEHOLDER, label)
    }

    fn from_headers(headers: &Headers, image: ImageFile) -> Result<Self, TaskError> {
        let not_a_list = || TaskError::bad_input("labels", "labels must be a list of texts");
        let labels = match headers.get("labels") {
            None | Some(Value::Void) => return Err(missing_labels()),
            Some(Value::Array(values)) => {
                check_count(values.len())?;
                let text = |value: &Value| value.as_str().map(str::to_owned).ok_or_else(not_a_list);
                values.iter().map(text).collect::<Result<Vec<_>, _>>()?
            }
            // Some clients can send only strings as headers: the list is then JSON.
            Some(value) => {
                let raw: &RawValue =
                    serde_json::from_str(value.as_str().ok_or_else(not_a_list)?).map_err(|error| {
                        TaskError::bad_input("labels", format!("labels is not JSON: {error}"))
                    })?;
                each_item(&list(raw.get(), "labels", MAX_LABELS)?, "labels", string)?
            }
        };
        let labels = checked_labels(labels, "labels")?;
        Ok(Self {
            images: vec![image],
            is_list: false,
            model: text_header(headers, "model")?,
            top_k: count_header(headers, "top_k")?.unwrap_or(labels.len()),
            labels,
            template: checked_template(text_header(headers, "hypothesis_template")?, "hypothesis_template")?,
            raw_scores: boolean_header(headers, "raw_scores", false)?,
            truncate: boolean_header(headers, "truncate", true)?,
        })
    }

    fn from_json(body: &[u8], max_images: usize, files: &Files) -> Result<Self, TaskError> {
        let fields = Fields::parse(body, &KEYS)?;
        let parameters = match fields.get("parameters") {
            Some(raw) => Some(Fields::parse(raw.get().as_bytes(), &PARAMETERS)?),
            None => None,
        };
        let RequestedImages { images, is_list } = images_in(&fields, max_images, files)?;
        let in_parameters = |key: &str| parameters.as_ref().and_then(|parameters| parameters.get(key));
        let (raw, path) = match (fields.get("labels"), in_parameters("candidate_labels")) {
            (Some(raw), _) => (raw, "labels"),
            (None, Some(raw)) => (raw, "parameters.candidate_labels"),
            (None, None) => return Err(missing_labels()),
        };
        let read = |raw: &str, path: &str| bounded_string(raw, path, MAX_LABEL_BYTES);
        let labels = each_item(&list(raw.get(), path, MAX_LABELS)?, path, read)?;
        let labels = checked_labels(labels, path)?;
        let template = match fields.get("hypothesis_template") {
            Some(raw) => Some((raw, "hypothesis_template")),
            None => in_parameters("hypothesis_template").map(|raw| (raw, "parameters.hypothesis_template")),
        };
        let template = match template {
            Some((raw, path)) => {
                checked_template(Some(bounded_string(raw.get(), path, MAX_TEMPLATE_BYTES)?), path)?
            }
            None => DEFAULT_TEMPLATE.to_owned(),
        };
        Ok(Self {
            images,
            is_list,
            model: fields.string("model")?,
            top_k: fields.positive("top_k")?.unwrap_or(labels.len()),
            labels,
            template,
            raw_scores: fields.boolean("raw_scores", false)?,
            truncate: fields.boolean("truncate", true)?,
        })
    }
}

fn missing_labels() -> TaskError {
    let message = "labels is missing; this model compares images with the labels of the request";
    TaskError::bad_input("labels", message)
}

/// Bounds the labels in a header; `list` bounds those in JSON.
fn check_count(count: usize) -> Result<(), TaskError> {
    if count <= MAX_LABELS {
        return Ok(());
    }
    let message = format!("labels holds {count} items; at most {MAX_LABELS} are allowed");
    Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param("labels"))
}

/// Returns the labels, or an error if one is empty, too long, or occurs twice.
fn checked_labels(labels: Vec<String>, path: &str) -> Result<Vec<String>, TaskError> {
    if labels.is_empty() {
        return Err(TaskError::bad_input(path, format!("{path} is an empty list")));
    }
    let mut seen = HashMap::new();
    for (index, label) in labels.iter().enumerate() {
        let path = format!("{path}[{index}]");
        if label.trim().is_empty() {
            return Err(TaskError::bad_input(&*path, format!("{path} is empty")));
        }
        if label.len() > MAX_LABEL_BYTES {
            let message = format!("{path} has {} bytes; at most {MAX_LABEL_BYTES} are allowed", label.len());
            return Err(TaskError::bad_input(path, message));
        }
        if let Some(first) = seen.insert(label, index) {
            let message = format!("{path} is the same as label {first}: {}", excerpt(label));
            return Err(TaskError::bad_input(path, message));
        }
    }
    Ok(labels)
}

fn checked_template(template: Option<String>, path: &str) -> Result<String, TaskError> {
    let Some(template) = template else { return Ok(DEFAULT_TEMPLATE.to_owned()) };
    if template.len() > MAX_TEMPLATE_BYTES {
        let message =
            format!("{path} has {} bytes; at most {MAX_TEMPLATE_BYTES} are allowed", template.len());
        return Err(TaskError::bad_input(path, message));
    }
    if template.matches(PLACEHOLDER).count() != 1 {
        let message =
            format!("{path} must contain {PLACEHOLDER} once, for the label, got {}", excerpt(&template));
        return Err(TaskError::bad_input(path, message));
    }
    Ok(template)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Properties;

    fn json(body: &str) -> Result<ZeroShotRequest, TaskError> {
        let message = Message { body: body.to_owned().into(), ..Message::default() };
        ZeroShotRequest::parse(&message, 200, &Files::default())
    }

    #[test]
    fn labels_come_in_our_form_or_in_that_of_hugging_face() {
        let ours =
            json(r#"{"inputs":"ZmlsZQ==","labels":["cat","dog"],"hypothesis_template":"a {}","top_k":1}"#);
        let ours = ours.unwrap();
        assert_eq!((ours.labels.len(), ours.sentence("cat").as_str(), ours.top_k), (2, "a cat", 1));
        let theirs =
            json(r#"{"inputs":"ZmlsZQ==","parameters":{"candidate_labels":["cat","dog"]}}"#).unwrap();
        assert_eq!((theirs.sentence("cat").as_str(), theirs.top_k), ("This is a photo of cat.", 2));
        let list = json(r#"{"image_url":["data:image/png;base64,ZmlsZQ=="],"labels":["a{}b"]}"#).unwrap();
        assert!(list.is_list && list.sentence(&list.labels[0]) == "This is a photo of a{}b.");
    }

    #[test]
    fn labels_and_the_template_are_checked() {
        let many: Vec<String> = (0..=MAX_LABELS).map(|index| format!("\"{index}\"")).collect();
        for (fields, param, part) in [
            (String::new(), "labels", "labels is missing"),
            (r#""labels":[]"#.to_owned(), "labels", "empty list"),
            (r#""labels":["a"," "]"#.to_owned(), "labels[1]", "labels[1] is empty"),
            (r#""labels":["a","b","a"]"#.to_owned(), "labels[2]", "the same as label 0: a"),
            (r#""labels":"a,b""#.to_owned(), "labels", "labels must be a list"),
            (r#""labels":["a",7]"#.to_owned(), "labels[1]", "must be a string, got 7"),
            (format!(r#""labels":["{}"]"#, "x".repeat(1_001)), "labels[0]", "has 1001 bytes"),
            (r#""labels":["a"],"hypothesis_template":"a photo""#.to_owned(), "hypothesis_template", "once"),
            (r#""labels":["a"],"hypothesis_template":"{} {}""#.to_owned(), "hypothesis_template", "once"),
            (
                format!(r#""labels":["a"],"hypothesis_template":"{{}}{}""#, "x".repeat(1_000)),
                "hypothesis_template",
                "1002 bytes",
            ),
        ] {
            let separator = if fields.is_empty() { "" } else { "," };
            let error = json(&format!(r#"{{"inputs":"ZmlsZQ=="{separator}{fields}}}"#)).unwrap_err();
            assert_eq!(
                (error.kind, error.param.as_deref()),
                (TaskErrorKind::BadInput, Some(param)),
                "{error}"
            );
            assert!(error.message.contains(part), "{error}");
        }
        let error = json(&format!(r#"{{"inputs":"ZmlsZQ==","labels":[{}]}}"#, many.join(","))).unwrap_err();
        assert_eq!(error.kind, TaskErrorKind::TooLarge, "{error}");
    }

    #[test]
    fn the_size_of_the_reply_is_bounded_before_anything_is_computed() {
        // Labels of 900 bytes in the request, of which a control character takes six bytes in the reply.
        let body = |images: usize, top_k: usize, character: &str| {
            let images = vec!["\"ZmlsZQ==\""; images].join(",");
            let label = |index: usize| format!("\"{index:04}{}\"", character.repeat(896));
            let labels: Vec<String> = (0..MAX_LABELS).map(label).collect();
            format!(r#"{{"inputs":[{images}],"labels":[{}],"top_k":{top_k}}}"#, labels.join(","))
        };
        assert_eq!(json(&body(8, 1_000, "x")).unwrap().images.len(), 8);
        assert_eq!(json(&body(200, 44, "x")).unwrap().images.len(), 200);
        for (images, top_k, character) in [(9, 1_000, "x"), (200, 45, "x"), (2, 1_000, "\\u0001")] {
            let error = json(&body(images, top_k, character)).unwrap_err();
            assert_eq!(
                (error.kind, error.param.as_deref()),
                (TaskErrorKind::TooLarge, Some("labels")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_raw_image_has_its_labels_in_a_header() {
        let parse = |labels: Value| {
            let headers = [("labels".to_owned(), labels), ("top_k".to_owned(), Value::I32(1))].into();
            let content_type = Some("image/png".to_owned());
            let properties = Properties { headers, content_type, ..Properties::default() };
            ZeroShotRequest::parse(&Message { properties, body: b"file"[..].into() }, 3, &Files::default())
        };
        let request = parse(Value::Array(vec!["cat".into(), "dog".into()])).unwrap();
        assert_eq!((request.labels.join(" ").as_str(), request.top_k), ("cat dog", 1));
        let as_json = parse(r#"["cat","dog"]"#.into()).unwrap();
        assert_eq!(as_json.labels, request.labels);
        for bad in
            [Value::Void, "cat".into(), "7".into(), Value::Array(vec![Value::I32(1)]), Value::Array(vec![])]
        {
            assert_eq!(parse(bad).unwrap_err().param.as_deref(), Some("labels"));
        }
        let many = vec![Value::from("a"); MAX_LABELS + 1];
        assert_eq!(parse(Value::Array(many)).unwrap_err().kind, TaskErrorKind::TooLarge);
    }
}
