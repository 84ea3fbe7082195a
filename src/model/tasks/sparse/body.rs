//! Reads and writes the bodies of `/embed_sparse` (text-embeddings-inference's form): texts, each with a sparse vector.
//! Decides which fields are accepted. Pure; knows no model.

use serde::Serialize;

use crate::model::fields::{Fields, Keys, Texts, keys};
use crate::model::tasks::to_json;
use crate::protocol::TaskError;

pub const KEYS: Keys = keys! {
    "inputs", "input", "model", "prompt_name", "threshold", "top_k", "truncate";
    "add_special_tokens" = "true", "dimensions" = "null", "encoding_format" = "\"float\"", "errors" = "\"task\"",
    "normalize" = "false", "truncate_prompt_tokens" = "null", "truncation_direction" = "\"Right\""
};

/// Texts to compute sparse vectors for.
#[derive(Clone, Debug, PartialEq)]
pub struct SparseRequest {
    /// The texts.
    pub texts: Texts,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// The name of the prompt that is put before each text, instead of the default.
    pub prompt_name: Option<String>,
    /// How many of a vector's largest values are kept; none: as many as the model says.
    pub top_k: Option<usize>,
    /// The smallest value that is kept; 0 keeps all.
    pub threshold: f32,
    /// Whether texts that are too long are cut; otherwise they are refused.
    pub truncate: bool,
}

impl SparseRequest {
    /// Reads a body; `max_texts` bounds the number of texts.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not JSON, `TooLarge` for too many texts, else `BadInput` with the field
    /// and the value.
    pub fn parse(body: &[u8], max_texts: usize) -> Result<Self, TaskError> {
        let fields = Fields::parse(body, &KEYS)?;
        Ok(Self {
            texts: Texts::read(&fields, "inputs", "input", max_texts)?,
            model: fields.string("model")?,
            prompt_name: fields.string("prompt_name")?,
            top_k: fields.positive("top_k")?,
            threshold: fields.number_within("threshold", 0.0..=f32::MAX)?.unwrap_or(0.0),
            truncate: fields.boolean("truncate", true)?,
        })
    }
}

/// A number of a sparse vector, with its index.
#[derive(Serialize)]
struct SparseValue {
    index: u32,
    value: f32,
}

/// Writes the body of the reply: for each text, the list of its vector's numbers with their indices.
///
/// # Errors
/// `Internal` if the body cannot be written.
pub fn write_vectors<'a>(vectors: impl Iterator<Item = &'a [(u32, f32)]>) -> Result<Vec<u8>, TaskError> {
    let value = |(index, value): &(u32, f32)| SparseValue { index: *index, value: *value };
    let all: Vec<Vec<SparseValue>> = vectors.map(|pairs| pairs.iter().map(value).collect()).collect();
    to_json(&all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::TaskErrorKind;

    #[test]
    fn one_text_or_a_list_is_read_and_a_refusal_names_the_field_and_the_value() {
        let one = SparseRequest::parse(br#"{"inputs":"a","top_k":3,"threshold":0.5,"truncate":false}"#, 2);
        let one = one.unwrap();
        assert_eq!(
            (one.texts.path(0).as_str(), one.top_k, one.threshold, one.truncate),
            ("inputs", Some(3), 0.5, false)
        );
        let many = SparseRequest::parse(br#"{"input":["a",""]}"#, 2).unwrap();
        assert_eq!(
            (many.texts.path(1).as_str(), many.texts.items.len(), many.threshold),
            ("input[1]", 2, 0.0)
        );
        for (body, message) in [
            (r#"{"top_k":1}"#, "inputs is missing"),
            (r#"{"inputs":[]}"#, "inputs is an empty list"),
            (r#"{"inputs":["a",7]}"#, "inputs[1] must be a string, got 7"),
            (r#"{"inputs":"a","top_k":0}"#, "top_k must be a positive integer, got 0"),
            (r#"{"inputs":"a","top_kk":1}"#, "top_kk is not a field of this request; did you mean top_k?"),
            (
                r#"{"inputs":"a","truncation_direction":"Left"}"#,
                "truncation_direction is not supported here; leave it out, or send \"Right\"",
            ),
        ] {
            let error = SparseRequest::parse(body.as_bytes(), 2).unwrap_err();
            assert_eq!((error.kind, error.message.as_str()), (TaskErrorKind::BadInput, message), "{body}");
        }
        for threshold in ["-0.1", "1e39", "\"0\"", "NaN"] {
            let body = format!(r#"{{"inputs":"a","threshold":{threshold}}}"#);
            assert!(SparseRequest::parse(body.as_bytes(), 2).is_err(), "{threshold}");
        }
        let error = SparseRequest::parse(br#"{"inputs":["a","b","c"]}"#, 2).unwrap_err();
        assert_eq!(error.kind, TaskErrorKind::TooLarge);
        assert_eq!(error.message, "inputs holds 3 items; this pool takes at most 2");
    }

    #[test]
    fn each_text_has_a_list_of_its_own() {
        let vectors: [&[(u32, f32)]; 2] = [&[(7, 0.1), (30_521, 2.0)], &[]];
        let body = String::from_utf8(write_vectors(vectors.into_iter()).unwrap()).unwrap();
        assert_eq!(body, r#"[[{"index":7,"value":0.1},{"index":30521,"value":2.0}],[]]"#);
    }
}
