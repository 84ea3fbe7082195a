//! Reads and writes the bodies of `/classify` for texts (vLLM's form). Pure; knows no model.

use serde::Serialize;

use super::TaskError;
use super::fields::{Fields, Keys, keys, texts};
use super::reply::{Usage, to_json};
use super::requests::SharingEndpoint;

/// The URL of these requests.
pub const URL: &str = "/classify";
/// The fields that may hold the inputs.
pub(super) const INPUTS: &[&str] = &["input", "inputs"];
/// Requests that can share a task.
pub(super) const SHARING: SharingEndpoint = SharingEndpoint { url: URL, input_field: "input" };

const KEYS: Keys = keys! {
    "input", "inputs", "model", "top_k", "raw_scores", "truncate";
    "activation" = "true", "add_generation_prompt" = "false", "add_special_tokens" = "true",
    "chat_template" = "null", "chat_template_kwargs" = "{}", "continue_final_message" = "false",
    "examples" = "[]", "media_io_kwargs" = "null", "messages" = "null", "mm_processor_kwargs" = "null",
    "padding" = "null", "preset" = "null", "truncate_prompt_tokens" = "null",
    "truncation_direction" = "\"Right\"", "truncation_side" = "\"right\"", "use_activation" = "true"
};

/// Texts to classify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassifyRequest {
    /// At least one.
    pub texts: Vec<String>,
    /// The field of the texts, for errors that name one of them.
    pub field: &'static str,
    /// Whether the texts came as a list, so that errors name a text by its index.
    pub is_list: bool,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// How many of the best labels to list with their names; none: no list.
    pub top_k: Option<usize>,
    /// Whether the reply has the model's raw scores instead of probabilities.
    pub raw_scores: bool,
    /// Whether texts that are too long are cut; otherwise they are refused.
    pub truncate: bool,
}

impl ClassifyRequest {
    /// Reads a body; `max_texts` bounds the number of texts.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not JSON, `TooLarge` for too many texts, else `BadInput` with the field
    /// and the value.
    pub fn parse(body: &[u8], max_texts: usize) -> Result<Self, TaskError> {
        let fields = Fields::parse(body, &KEYS)?;
        let field = fields.either("input", "inputs")?;
        let input = fields.required(field)?;
        Ok(Self {
            texts: texts(input, field, max_texts)?,
            field,
            is_list: input.get().starts_with('['),
            model: fields.string("model")?,
            top_k: fields.positive("top_k")?,
            raw_scores: fields.boolean("raw_scores", false)?,
            truncate: fields.boolean("truncate", true)?,
        })
    }

    /// The path of text `index` in the body.
    pub fn path(&self, index: usize) -> String {
        if self.is_list { format!("{}[{index}]", self.field) } else { self.field.to_owned() }
    }
}

/// The indices of the `count` highest numbers, highest first; equal numbers keep their order.
pub fn highest_indices(numbers: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..numbers.len()).collect();
    order.sort_by(|a, b| numbers[*b].total_cmp(&numbers[*a]));
    order.truncate(count);
    order
}

#[derive(Serialize)]
struct Classified<'a> {
    id: String,
    object: &'static str,
    model: &'a str,
    data: Vec<Classification<'a>>,
    usage: Usage,
}

#[derive(Serialize)]
struct Classification<'a> {
    index: usize,
    label: Option<&'a str>,
    probs: &'a [f32],
    num_classes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    labels: Option<Vec<Label<'a>>>,
}

/// A label with its score.
#[derive(Serialize)]
pub struct Label<'a> {
    label: &'a str,
    score: f32,
}

/// The `count` labels with the highest scores, highest first.
pub fn best_labels<'a>(scores: &[f32], labels: &'a [String], count: usize) -> Vec<Label<'a>> {
    let label = |index: usize| Label { label: &labels[index], score: scores[index] };
    highest_indices(scores, count).into_iter().map(label).collect()
}

/// The body of the reply: for each text its best label, and the scores of all labels.
///
/// # Errors
/// `Internal` if the body cannot be written.
pub fn write_labels(
    scores: &[Vec<f32>],
    labels: &[String],
    top_k: Option<usize>,
    model: &str,
    usage: Usage,
) -> Result<Vec<u8>, TaskError> {
    let classification = |(index, scores)| Classification {
        index,
        label: highest_indices(scores, 1).first().map(|best| labels[*best].as_str()),
        probs: scores,
        num_classes: labels.len(),
        labels: top_k.map(|count| best_labels(scores, labels, count)),
    };
    let data = scores.iter().map(Vec::as_slice).enumerate().map(classification).collect();
    let id = format!("classify-{}", uuid::Uuid::new_v4().simple());
    to_json(&Classified { id, object: "list", model, data, usage })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn one_text_or_a_list_is_read_and_a_refusal_names_the_field() {
        let one = ClassifyRequest::parse(br#"{"input":"a","top_k":2,"truncate":false}"#, 2).unwrap();
        assert_eq!((one.path(0).as_str(), one.top_k, one.truncate), ("input", Some(2), false));
        let many = ClassifyRequest::parse(br#"{"inputs":["a","b"]}"#, 2).unwrap();
        assert_eq!((many.path(1).as_str(), many.texts.len()), ("inputs[1]", 2));
        for (body, message) in [
            (r#"{"input":["a",7]}"#, "input[1] must be a string, got 7"),
            (r#"{"input":7}"#, "input must be a string or a list of strings, got 7"),
            (r#"{"input":["a","b","c"]}"#, "input holds 3 items; this pool takes at most 2"),
            (r#"{"input":"a","top_k":-1}"#, "top_k must be a positive integer, got -1"),
            (
                r#"{"input":"a","activation":false}"#,
                "activation is not supported here; leave it out, or send true",
            ),
        ] {
            assert_eq!(ClassifyRequest::parse(body.as_bytes(), 2).unwrap_err().message, message, "{body}");
        }
    }

    #[test]
    fn the_reply_names_the_best_label_and_as_many_as_are_asked_for() {
        let names: Vec<String> = ["no", "maybe", "yes"].map(Into::into).into();
        let numbers = [vec![0.25, 0.5, 0.25], vec![0.125, 0.125, 0.75]];
        let body = write_labels(&numbers, &names, Some(2), "m", Usage::new(5)).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!((&body["data"][0]["label"], &body["data"][1]["label"]), (&json!("maybe"), &json!("yes")));
        assert_eq!(body["data"][1]["probs"], json!([0.125, 0.125, 0.75]));
        assert_eq!(body["data"][0]["num_classes"], 3);
        let labels = json!([{"label": "maybe", "score": 0.5}, {"label": "no", "score": 0.25}]);
        assert_eq!(body["data"][0]["labels"], labels);
    }
}
