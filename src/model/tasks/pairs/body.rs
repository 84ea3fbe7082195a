//! Reads and writes the bodies of `/v1/rerank` (Cohere's, Jina's and vLLM's form; text-embeddings-inference's
//! names are accepted too) and `/v1/score` (vLLM's): pairs of texts, each with a score. Pure; knows no model.

use serde::Serialize;

use crate::model::fields::{Fields, Keys, each_item, keys, list, string, texts};
use crate::model::tasks::labels::highest_indices;
use crate::model::tasks::{Usage, to_json};
use crate::protocol::{TaskError, TaskErrorKind};

pub const RERANK: Keys = keys! {
    "model", "query", "documents", "texts", "top_n", "return_documents", "return_text", "raw_scores",
    "truncate", "instruction";
    "chat_template_kwargs" = "null", "max_chunks_per_doc" = "null",
    "max_tokens_per_doc" = "0", "max_tokens_per_query" = "0", "mm_processor_kwargs" = "null",
    "padding" = "null", "rank_fields" = "null", "relevant_spans" = "null", "truncate_prompt_tokens" = "null",
    "truncation_direction" = "\"Right\"", "truncation_side" = "\"right\"", "use_activation" = "true"
};
const DOCUMENT: Keys = keys! { "text" };
pub const SCORE: Keys = keys! {
    "model", "text_1", "text_2", "raw_scores", "truncate", "instruction";
    "chat_template_kwargs" = "null", "data_1" = "null", "data_2" = "null", "documents" = "null",
    "items" = "null", "max_tokens_per_doc" = "0", "max_tokens_per_query" = "0",
    "mm_processor_kwargs" = "null", "padding" = "null", "queries" = "null", "truncate_prompt_tokens" = "null",
    "truncation_direction" = "\"Right\"", "truncation_side" = "\"right\"", "use_activation" = "true"
};

/// Pairs of texts to score.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairsRequest {
    /// The first texts: one that all pairs share, or one for each pair.
    pub first: Vec<String>,
    /// The second text of each pair.
    pub second: Vec<String>,
    /// The field of the second texts, for errors that name one of them.
    pub field: &'static str,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// What makes a second text relevant for the first, in words, for models whose prompts have an instruction.
    pub instruction: Option<String>,
    /// Whether the reply has the model's raw scores instead of their sigmoid.
    pub raw_scores: bool,
    /// Whether pairs that are too long are cut; otherwise they are refused.
    pub truncate: bool,
    /// How the reply is written.
    pub form: Form,
}

/// The reply's form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The best documents first.
    Rerank {
        /// Maximum number of results; none: all.
        top_n: Option<usize>,
        /// Whether the results repeat the documents.
        return_documents: bool,
    },
    /// The scores in the order of the pairs.
    Score,
}

impl PairsRequest {
    /// Reads the body of `/v1/rerank`; `max_documents` bounds the number of documents.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not JSON, `TooLarge` for too many documents, else `BadInput` with the
    /// field and the value.
    pub fn rerank(body: &[u8], max_documents: usize) -> Result<Self, TaskError> {
        let fields = Fields::parse(body, &RERANK)?;
        let query = string(fields.required("query")?.get(), "query")?;
        let field = fields.either("documents", "texts")?;
        let documents = list(fields.required(field)?.get(), field, max_documents)?;
        Ok(Self {
            first: vec![query],
            second: each_item(&documents, field, document)?,
            field,
            model: fields.string("model")?,
            instruction: instruction(&fields)?,
            raw_scores: fields.boolean("raw_scores", false)?,
            truncate: fields.boolean("truncate", true)?,
            form: Form::Rerank {
                top_n: fields.positive("top_n")?,
                return_documents: fields.boolean("return_documents", false)?
                    || fields.boolean("return_text", false)?,
            },
        })
    }

    /// Reads the body of `/v1/score`; `max_pairs` bounds the number of pairs.
    ///
    /// # Errors
    /// As [`PairsRequest::rerank`].
    pub fn score(body: &[u8], max_pairs: usize) -> Result<Self, TaskError> {
        let fields = Fields::parse(body, &SCORE)?;
        let first = texts(fields.required("text_1")?, "text_1", max_pairs)?;
        let second = texts(fields.required("text_2")?, "text_2", max_pairs)?;
        if first.len() != 1 && first.len() != second.len() {
            let (first_count, second_count) = (first.len(), second.len());
            let message = format!(
                "text_1 holds {first_count} texts and text_2 {second_count}; text_1 must be one text, or as many as text_2"
            );
            return Err(TaskError::bad_input("text_1", message));
        }
        Ok(Self {
            first,
            second,
            field: "text_2",
            model: fields.string("model")?,
            instruction: instruction(&fields)?,
            raw_scores: fields.boolean("raw_scores", false)?,
            truncate: fields.boolean("truncate", true)?,
            form: Form::Score,
        })
    }
}

/// The largest instruction in bytes. It is a part of the prompt of each pair.
const MAX_INSTRUCTION: usize = 4 << 10;

/// The `instruction` of a request.
fn instruction(fields: &Fields<'_>) -> Result<Option<String>, TaskError> {
    let instruction = fields.string("instruction")?;
    match instruction.as_ref().map(String::len).filter(|bytes| *bytes > MAX_INSTRUCTION) {
        None => Ok(instruction),
        Some(bytes) => {
            let message = format!("instruction has {bytes} bytes; at most {MAX_INSTRUCTION} are allowed");
            Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param("instruction"))
        }
    }
}

/// A document: a text, or an object with a `text`, whose other fields are not ranked, as in Cohere's server.
fn document(raw: &str, path: &str) -> Result<String, TaskError> {
    if !raw.starts_with('{') {
        return string(raw, path);
    }
    let path = format!("{path}.text");
    let fields = Fields::parse(raw.as_bytes(), &DOCUMENT)?;
    let missing = || TaskError::bad_input(path.as_str(), format!("{path} is missing"));
    string(fields.get("text").ok_or_else(missing)?.get(), &path)
}

#[derive(Serialize)]
struct Reranked<'a> {
    id: String,
    model: &'a str,
    results: Vec<Ranked<'a>>,
    usage: Usage,
}

#[derive(Serialize)]
struct Ranked<'a> {
    index: usize,
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Document<'a>>,
}

#[derive(Serialize)]
struct Document<'a> {
    text: &'a str,
}

#[derive(Serialize)]
struct Scored<'a> {
    object: &'static str,
    model: &'a str,
    data: Vec<Score>,
    usage: Usage,
}

#[derive(Serialize)]
struct Score {
    index: usize,
    object: &'static str,
    score: f32,
}

/// The body of the reply; `documents` are the texts that were scored.
///
/// # Errors
/// `Internal` if a score is not finite.
pub fn write_scores(
    form: Form,
    documents: &[String],
    scores: &[f32],
    model: &str,
    usage: Usage,
) -> Result<Vec<u8>, TaskError> {
    if let Some(index) = scores.iter().position(|score| !score.is_finite()) {
        return Err(TaskError::internal(format!(
            "the model gave {} as the score of pair {index}",
            scores[index]
        )));
    }
    match form {
        Form::Rerank { top_n, return_documents } => {
            let result = |index: usize| Ranked {
                index,
                relevance_score: scores[index],
                document: return_documents.then(|| Document { text: &documents[index] }),
            };
            let results =
                highest_indices(scores, top_n.unwrap_or(usize::MAX)).into_iter().map(result).collect();
            let id = format!("rerank-{}", uuid::Uuid::new_v4().simple());
            to_json(&Reranked { id, model, results, usage })
        }
        Form::Score => {
            let numbered = |(index, score): (usize, &f32)| Score { index, object: "score", score: *score };
            let data = scores.iter().enumerate().map(numbered).collect();
            to_json(&Scored { object: "list", model, data, usage })
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn refusal(result: Result<PairsRequest, TaskError>) -> (TaskErrorKind, String) {
        let error = result.expect_err("a refusal");
        (error.kind, error.message)
    }

    #[test]
    fn documents_and_texts_mean_the_same() {
        let cohere = PairsRequest::rerank(
            br#"{"query":"q","documents":["a","b"],"top_n":1,"return_documents":true,"raw_scores":true}"#,
            9,
        );
        let tei = br#"{"query":"q","texts":["a","b"],"top_n":1,"return_text":true,"raw_scores":true}"#;
        let tei = PairsRequest::rerank(tei, 9).unwrap();
        assert_eq!(PairsRequest { field: "documents", ..tei }, cohere.unwrap());
    }

    #[test]
    fn a_document_may_be_an_object_with_a_text() {
        let body = br#"{"query":"q","documents":["a",{"title":"t","text":"b"}],"top_n":1.0}"#;
        assert_eq!(PairsRequest::rerank(body, 3).unwrap().second, ["a", "b"]);
        let (_, message) = refusal(PairsRequest::rerank(br#"{"query":"q","documents":[{"title":"t"}]}"#, 3));
        assert_eq!(message, "documents[0].text is missing");
    }

    #[test]
    fn a_refusal_names_the_field_and_the_value() {
        let cases = [
            (r#"{"documents":["a"]}"#, "query is missing"),
            (r#"{"query":"q"}"#, "documents is missing"),
            (r#"{"query":"q","documents":[]}"#, "documents is an empty list"),
            (r#"{"query":"q","documents":"a"}"#, r#"documents must be a list, got "a""#),
            (r#"{"query":"q","documents":["a",3]}"#, "documents[1] must be a string, got 3"),
            (r#"{"query":"q","documents":["a"],"top_n":0}"#, "top_n must be a positive integer, got 0"),
            (r#"{"query":"q","documents":["a"],"raw_scores":1}"#, "raw_scores must be true or false, got 1"),
            (
                r#"{"query":"q","documents":["a"],"max_tokens_per_doc":9}"#,
                "max_tokens_per_doc is not supported here; leave it out, or send 0",
            ),
        ];
        for (body, message) in cases {
            let expected = (TaskErrorKind::BadInput, message.to_owned());
            assert_eq!(refusal(PairsRequest::rerank(body.as_bytes(), 3)), expected, "{body}");
        }
        let (kind, message) =
            refusal(PairsRequest::rerank(br#"{"query":"q","documents":["a","b","c","d"]}"#, 3));
        assert_eq!(kind, TaskErrorKind::TooLarge);
        assert_eq!(message, "documents holds 4 items; this pool takes at most 3");
    }

    #[test]
    fn one_text_is_paired_with_many_and_two_lists_item_by_item() {
        let one = PairsRequest::score(br#"{"text_1":"a","text_2":["b","c"]}"#, 9).unwrap();
        assert_eq!((one.first.len(), one.second.len()), (1, 2));
        let many = PairsRequest::score(br#"{"text_1":["a","b"],"text_2":["c","d"]}"#, 9).unwrap();
        assert_eq!((many.first.len(), many.second.len()), (2, 2));
        let (_, message) = refusal(PairsRequest::score(br#"{"text_1":["a","b"],"text_2":["c"]}"#, 9));
        assert!(message.starts_with("text_1 holds 2 texts and text_2 1;"), "{message}");
    }

    #[test]
    fn results_are_sorted_and_equal_scores_keep_their_order() {
        let documents: Vec<String> = ["a", "b", "c", "d"].map(Into::into).into();
        let form = Form::Rerank { top_n: Some(3), return_documents: true };
        let body = write_scores(form, &documents, &[0.5, 0.9, 0.5, 0.1], "m", Usage::new(7)).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        let order: Vec<_> =
            body["results"].as_array().unwrap().iter().map(|it| it["index"].as_u64()).collect();
        assert_eq!(order, [Some(1), Some(0), Some(2)]);
        assert_eq!(body["results"][0]["document"]["text"], "b");
        assert_eq!(body["usage"], json!({"prompt_tokens": 7, "total_tokens": 7}));
        assert!(body["id"].as_str().unwrap().starts_with("rerank-"));
        assert!(write_scores(Form::Score, &documents, &[f32::NAN], "m", Usage::new(1)).is_err());
    }
}
