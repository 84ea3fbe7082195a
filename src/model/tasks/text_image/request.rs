//! Reads requests for zero-shot classification of images, whose labels are in the request. They have the same
//! URL and the same ways to give images as `image::request`. Pure: images are not decoded here.

use crate::model::fields::{Fields, Keys, keys};
use crate::model::tasks::candidate_labels::CandidateLabels;
use crate::model::tasks::image::request::{ImageFile, ImageMessage, RequestedImages, urls_of_images};
use crate::protocol::{FileUrl, Files, Message, TaskError};

/// The template of a request that has none, as in the pipelines of the transformers library.
const DEFAULT_TEMPLATE: &str = "This is a photo of {}.";

pub const KEYS: Keys = keys! {
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
    /// The labels.
    pub labels: CandidateLabels,
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
        let names = ["hypothesis_template", "labels", "model", "raw_scores", "top_k", "truncate"];
        let sent = ImageMessage::read(message, &names)?;
        let fields = Fields::parse(&sent.fields, &KEYS)?;
        let parameters = fields.object("parameters", &PARAMETERS)?;
        let RequestedImages { images, is_list } = sent.images(&fields, max_images, files)?;
        let labels = CandidateLabels::in_json(&fields, parameters.as_ref(), DEFAULT_TEMPLATE)?;
        let labels = labels.ok_or_else(|| {
            let message = "labels is missing; this model compares images with the labels of the request";
            TaskError::bad_input("labels", message)
        })?;
        let request = Self {
            images,
            is_list,
            model: fields.string("model")?,
            top_k: fields.positive("top_k")?.unwrap_or(labels.names.len()),
            labels,
            raw_scores: fields.boolean("raw_scores", false)?,
            truncate: fields.boolean("truncate", true)?,
        };
        request.labels.check_reply(request.top_k, request.images.len(), "images")?;
        Ok(request)
    }

    /// The URLs of images in a message, except data URLs. Empty if the message cannot be read.
    pub fn file_urls(message: &Message, max_images: usize) -> Vec<FileUrl> {
        urls_of_images(message, &KEYS, max_images)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tasks::candidate_labels::MAX_LABELS;
    use crate::protocol::{Properties, TaskErrorKind, Value};

    fn json(body: &str) -> Result<ZeroShotRequest, TaskError> {
        let message = Message { body: body.to_owned().into(), ..Message::default() };
        ZeroShotRequest::parse(&message, 200, &Files::default())
    }

    #[test]
    fn labels_come_in_our_form_or_in_that_of_hugging_face() {
        let ours =
            json(r#"{"inputs":"ZmlsZQ==","labels":["cat","dog"],"hypothesis_template":"a {}","top_k":1}"#);
        let ours = ours.unwrap();
        let sentences = |request: &ZeroShotRequest| request.labels.sentences().collect::<Vec<_>>();
        assert_eq!((&*sentences(&ours).join(", "), ours.top_k), ("a cat, a dog", 1));
        let theirs =
            json(r#"{"inputs":"ZmlsZQ==","parameters":{"candidate_labels":["cat","dog"]}}"#).unwrap();
        assert_eq!((&*sentences(&theirs)[0], theirs.top_k), ("This is a photo of cat.", 2));
        let list = json(r#"{"image_url":["data:image/png;base64,ZmlsZQ=="],"labels":["a{}b"]}"#).unwrap();
        assert!(list.is_list && sentences(&list) == ["This is a photo of a{}b."]);
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
        assert_eq!((request.labels.names.join(" ").as_str(), request.top_k), ("cat dog", 1));
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
