//! Labels that come with a request, for zero-shot classification of images and texts: reads them with the sentence into
//! which each is put, and bounds their number, their sizes and the size of the reply. Pure; knows no model.

use std::collections::HashMap;

use crate::model::fields::{Fields, bounded_string, each_item, excerpt, list};
use crate::protocol::{TaskError, TaskErrorKind};

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
/// The placeholder in the template, which a label replaces.
const PLACEHOLDER: &str = "{}";

/// The labels of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CandidateLabels {
    /// At least one; all are different.
    pub names: Vec<String>,
    /// The field of the labels, for errors that name one of them.
    pub field: &'static str,
    /// The sentence into which a label is put.
    template: String,
}

impl CandidateLabels {
    /// The labels in a JSON body: in `labels` and `hypothesis_template`, or as Hugging Face's clients send them in
    /// `parameters`. None if the body has no labels.
    ///
    /// # Errors
    /// `TooLarge` for too many labels, else `BadInput` with the field and the value.
    pub fn in_json(
        fields: &Fields<'_>,
        parameters: Option<&Fields<'_>>,
        default_template: &str,
    ) -> Result<Option<Self>, TaskError> {
        let in_parameters = |key: &str| parameters.and_then(|parameters| parameters.get(key));
        let (raw, field) = match (fields.get("labels"), in_parameters("candidate_labels")) {
            (Some(raw), _) => (raw, "labels"),
            (None, Some(raw)) => (raw, "parameters.candidate_labels"),
            (None, None) => return Ok(None),
        };
        let read = |raw: &str, path: &str| bounded_string(raw, path, MAX_LABEL_BYTES);
        let names = each_item(&list(raw.get(), field, MAX_LABELS)?, field, read)?;
        check_labels(&names, field)?;
        let template = match fields.get("hypothesis_template") {
            Some(raw) => Some((raw, "hypothesis_template")),
            None => in_parameters("hypothesis_template").map(|raw| (raw, "parameters.hypothesis_template")),
        };
        let template = match template {
            Some((raw, path)) => {
                checked_template(bounded_string(raw.get(), path, MAX_TEMPLATE_BYTES)?, path)?
            }
            None => default_template.to_owned(),
        };
        Ok(Some(Self { names, field, template }))
    }

    /// The sentences with the labels, one after the other.
    pub fn sentences(&self) -> impl Iterator<Item = String> {
        self.names.iter().map(|label| self.template.replace(PLACEHOLDER, label))
    }

    /// Checks the largest size that the reply can have. It lists `top_k` labels for each of `count` inputs, which
    /// errors call `noun`, such as "texts".
    ///
    /// # Errors
    /// `TooLarge` if the reply could have more bytes than allowed.
    pub fn check_reply(&self, top_k: usize, count: usize, noun: &str) -> Result<(), TaskError> {
        let written = |label: &String| serde_json::to_string(label).map_or(usize::MAX, |json| json.len());
        let mut sizes: Vec<usize> = self.names.iter().map(written).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let of_input: usize = sizes.iter().take(top_k).map(|bytes| bytes + BYTES_PER_SCORE).sum();
        let bytes = of_input.saturating_mul(count);
        if bytes <= MAX_REPLY_BYTES {
            return Ok(());
        }
        let message = format!(
            "the labels of {count} {noun} would take up to {bytes} bytes in the reply; at most {MAX_REPLY_BYTES} are \
             allowed: send fewer {noun} or a smaller top_k"
        );
        Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param("labels"))
    }
}

/// Refuses an empty label, and one that occurs twice.
fn check_labels(labels: &[String], path: &str) -> Result<(), TaskError> {
    let mut seen = HashMap::new();
    for (index, label) in labels.iter().enumerate() {
        let path = format!("{path}[{index}]");
        if label.trim().is_empty() {
            return Err(TaskError::bad_input(&*path, format!("{path} is empty")));
        }
        if let Some(first) = seen.insert(label, index) {
            let message = format!("{path} is the same as label {first}: {}", excerpt(label));
            return Err(TaskError::bad_input(path, message));
        }
    }
    Ok(())
}

fn checked_template(template: String, path: &str) -> Result<String, TaskError> {
    if template.matches(PLACEHOLDER).count() != 1 {
        let message =
            format!("{path} must contain {PLACEHOLDER} once, for the label, got {}", excerpt(&template));
        return Err(TaskError::bad_input(path, message));
    }
    Ok(template)
}
