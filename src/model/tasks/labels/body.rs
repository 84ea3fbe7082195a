//! Reads and writes the bodies of `/classify` for texts: by the model's labels (vLLM's form), or by labels of the request
//! (that of Hugging Face's pipeline for zero-shot classification). Pure; knows no model.

use serde::Serialize;

use crate::model::fields::{Fields, Keys, Texts, keys};
use crate::model::tasks::candidate_labels::CandidateLabels;
use crate::model::tasks::{Usage, to_json};
use crate::protocol::{TaskError, TaskErrorKind};

pub const KEYS: Keys = keys! {
    "hypothesis_template", "input", "inputs", "labels", "model", "multi_label", "parameters", "raw_scores", "top_k",
    "truncate";
    "activation" = "true", "add_generation_prompt" = "false", "add_special_tokens" = "true",
    "chat_template" = "null", "chat_template_kwargs" = "{}", "continue_final_message" = "false",
    "examples" = "[]", "media_io_kwargs" = "null", "messages" = "null", "mm_processor_kwargs" = "null",
    "padding" = "null", "preset" = "null", "truncate_prompt_tokens" = "null",
    "truncation_direction" = "\"Right\"", "truncation_side" = "\"right\"", "use_activation" = "true"
};

/// The fields of `parameters`, as Hugging Face's clients send them.
const PARAMETERS: Keys = keys! {
    "candidate_labels", "hypothesis_template", "multi_label"; "function_to_apply" = "null", "top_k" = "null"
};
/// The template of a request that has none, as in the pipelines of the transformers library.
const DEFAULT_TEMPLATE: &str = "This example is {}.";

/// Texts to classify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassifyRequest {
    /// The texts.
    pub texts: Texts,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// How many of the best labels to list with their names; none: no list.
    pub top_k: Option<usize>,
    /// Whether the reply has the model's raw scores instead of probabilities.
    pub raw_scores: bool,
    /// Whether texts that are too long are cut; otherwise they are refused.
    pub truncate: bool,
    /// The request's labels; none: the model's.
    pub zero_shot: Option<ZeroShot>,
}

/// Labels of the request, by which texts are classified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZeroShot {
    /// The labels.
    pub labels: CandidateLabels,
    /// Whether each label applies or not, independently of the others; otherwise the sum of their probabilities is 1.
    pub multi_label: bool,
}

impl ClassifyRequest {
    /// Reads a body; `max_texts` bounds the number of texts, or of pairs of a text and a label of the request.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not JSON, `TooLarge` for too many texts or pairs, else `BadInput` with the field
    /// and the value.
    pub fn parse(body: &[u8], max_texts: usize) -> Result<Self, TaskError> {
        let fields = Fields::parse(body, &KEYS)?;
        let texts = Texts::read(&fields, "input", "inputs", max_texts)?;
        let zero_shot = zero_shot(&fields)?;
        if let Some(ZeroShot { labels, .. }) = &zero_shot {
            let (texts, names) = (texts.items.len(), labels.names.len());
            if texts * names > max_texts {
                let message = format!(
                    "{texts} texts and {names} labels are {} pairs; this pool takes at most {max_texts}",
                    texts * names
                );
                return Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param(labels.field));
            }
            let top_k = fields.positive("top_k")?.unwrap_or(names);
            labels.check_reply(top_k, texts, "texts")?;
            if fields.boolean("raw_scores", false)? {
                let message =
                    "raw_scores is not supported with labels of the request; leave it out, or send false";
                return Err(TaskError::bad_input("raw_scores", message));
            }
        }
        Ok(Self {
            texts,
            zero_shot,
            model: fields.string("model")?,
            top_k: fields.positive("top_k")?,
            raw_scores: fields.boolean("raw_scores", false)?,
            truncate: fields.boolean("truncate", true)?,
        })
    }
}

/// The labels of the request, if it has any.
fn zero_shot(fields: &Fields<'_>) -> Result<Option<ZeroShot>, TaskError> {
    let parameters = fields.object("parameters", &PARAMETERS)?;
    let Some(labels) = CandidateLabels::in_json(fields, parameters.as_ref(), DEFAULT_TEMPLATE)? else {
        for field in ["hypothesis_template", "multi_label"] {
            if [Some(fields), parameters.as_ref()].into_iter().flatten().any(|it| it.get(field).is_some()) {
                return Err(TaskError::bad_input(field, format!("{field} needs labels in the request")));
            }
        }
        return Ok(None);
    };
    let of_field = fields.get("multi_label").map(|_| fields).or(parameters.as_ref()).unwrap_or(fields);
    Ok(Some(ZeroShot { labels, multi_label: of_field.boolean("multi_label", false)? }))
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
struct Label<'a> {
    label: &'a str,
    score: f32,
}

/// The `count` labels with the highest scores, highest first.
fn best_labels<'a>(scores: &[f32], labels: &'a [String], count: usize) -> Vec<Label<'a>> {
    let label = |index: usize| Label { label: &labels[index], score: scores[index] };
    highest_indices(scores, count).into_iter().map(label).collect()
}

/// The body of the reply to a request for images, or with labels: the best labels of each input, highest first. It is a
/// list of such lists if the inputs came as a list.
///
/// # Errors
/// `Internal` if the body cannot be written.
pub fn write_best_labels(
    scores: &[Vec<f32>],
    labels: &[String],
    top_k: usize,
    is_list: bool,
) -> Result<Vec<u8>, TaskError> {
    let all: Vec<_> = scores.iter().map(|scores| best_labels(scores, labels, top_k)).collect();
    match all.as_slice() {
        [only] if !is_list => to_json(only),
        _ => to_json(&all),
    }
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
        assert_eq!((one.texts.path(0).as_str(), one.top_k, one.truncate), ("input", Some(2), false));
        let many = ClassifyRequest::parse(br#"{"inputs":["a","b"]}"#, 2).unwrap();
        assert_eq!((many.texts.path(1).as_str(), many.texts.items.len()), ("inputs[1]", 2));
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
    fn labels_of_the_request_come_in_either_form_and_each_pair_with_a_text_counts() {
        let parse = |body: &str| ClassifyRequest::parse(body.as_bytes(), 8);
        let ours =
            parse(r#"{"input":"a","labels":["x","y"],"hypothesis_template":"It is {}!","multi_label":true}"#);
        let ZeroShot { labels, multi_label } = ours.unwrap().zero_shot.unwrap();
        assert_eq!(
            (labels.sentences().collect::<Vec<_>>().join(" "), multi_label),
            ("It is x! It is y!".into(), true)
        );
        let theirs =
            parse(r#"{"inputs":["a"],"parameters":{"candidate_labels":["x"],"multi_label":true}}"#).unwrap();
        let ZeroShot { labels, multi_label } = theirs.zero_shot.unwrap();
        assert_eq!(
            (labels.sentences().collect::<Vec<_>>(), multi_label),
            (vec!["This example is x.".into()], true)
        );
        assert_eq!(parse(r#"{"input":"a"}"#).unwrap().zero_shot, None);
        assert!(parse(r#"{"input":["a","b"],"labels":["w","x","y","z"]}"#).is_ok());
        let error = parse(r#"{"input":["a","b","c"],"labels":["x","y","z"]}"#).unwrap_err();
        assert_eq!(error.message, "3 texts and 3 labels are 9 pairs; this pool takes at most 8");
        assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::TooLarge, Some("labels")));
        let many: Vec<String> = (0..1_001).map(|index| format!("\"{index}\"")).collect();
        let error = parse(&format!(r#"{{"input":"a","labels":[{}]}}"#, many.join(","))).unwrap_err();
        assert_eq!(error.kind, TaskErrorKind::TooLarge, "{error}");
    }

    #[test]
    fn wrong_labels_of_the_request_are_refused_by_name() {
        for (fields, param, part) in [
            (r#""labels":[]"#, "labels", "empty list"),
            (r#""labels":"a,b""#, "labels", "must be a list"),
            (r#""labels":["a","a"]"#, "labels[1]", "the same as label 0"),
            (
                r#""labels":["a"],"hypothesis_template":"It is.""#,
                "hypothesis_template",
                "must contain {} once",
            ),
            (r#""labels":["a"],"multi_label":1"#, "multi_label", "true or false"),
            (r#""labels":["a"],"raw_scores":true"#, "raw_scores", "not supported with labels"),
            (r#""multi_label":true"#, "multi_label", "needs labels"),
            (r#""parameters":{"hypothesis_template":"{}"}"#, "hypothesis_template", "needs labels"),
            (r#""parameters":{"candidate_labels":["a"],"top_k":1}"#, "top_k", "not supported here"),
        ] {
            let body = format!(r#"{{"input":"a",{fields}}}"#);
            let error = ClassifyRequest::parse(body.as_bytes(), 8).unwrap_err();
            assert_eq!(
                (error.kind, error.param.as_deref()),
                (TaskErrorKind::BadInput, Some(param)),
                "{error}"
            );
            assert!(error.message.contains(part), "{error}");
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

    #[test]
    fn best_labels_are_a_list_for_each_input_or_one_list() {
        let names: Vec<String> = ["cat", "dog"].map(Into::into).into();
        let one = write_best_labels(&[vec![0.25, 0.75]], &names, 1, false).unwrap();
        assert_eq!(one, br#"[{"label":"dog","score":0.75}]"#);
        let list = write_best_labels(&[vec![0.25, 0.75]], &names, 9, true).unwrap();
        assert_eq!(list, br#"[[{"label":"dog","score":0.75},{"label":"cat","score":0.25}]]"#);
    }
}
