//! Reads and writes the bodies of `/token-classification` (Hugging Face's form): labels of tokens, and the entities that
//! they make up. Decides the bounds of a request's options and of a reply. Pure; knows no model.

use std::borrow::Cow;
use std::collections::HashSet;

use serde::Serialize;

use crate::model::fields::{
    Fields, Keys, Texts, bounded_string, each_item, first_items, invalid, keys, whole,
};
use crate::protocol::{TaskError, TaskErrorKind};

/// Maximum number of labels to leave out.
const MAX_IGNORED: usize = 1_000;
/// Maximum size of a label to leave out, in bytes.
const MAX_LABEL_BYTES: usize = 1_000;
/// Maximum size of a reply, in bytes.
pub const MAX_REPLY_BYTES: usize = 8 << 20;
/// The fewest bytes of an entity in a reply and the comma after it, without its name.
pub const MIN_ENTITY_BYTES: usize = 54;

pub const KEYS: Keys = keys! {
    "aggregation_strategy", "ignore_labels", "input", "inputs", "model", "parameters", "stride", "truncate";
    "delimiter" = "null", "grouped_entities" = "true", "is_split_into_words" = "false", "offset_mapping" = "null"
};
/// The fields of `parameters`, as Hugging Face's clients send them.
const PARAMETERS: Keys = keys! { "aggregation_strategy", "ignore_labels", "stride", "truncate" };

named_enum! {
    /// How the labels of tokens become the reply, as in the pipeline of the transformers library.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Strategy as name {
        /// Each token by itself.
        None => "none",
        /// Neighbouring tokens of the same kind are one entity.
        Simple => "simple",
        /// As `simple`, with words in the place of tokens; a word has the label of its first token.
        First => "first",
        /// As `first`; a word has the label with the highest mean of its tokens' probabilities.
        Average => "average",
        /// As `first`; a word has the label of its token with the highest probability.
        Max => "max",
    }
}

/// Texts whose tokens are to be labelled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenLabelsRequest {
    /// The texts. If they came as a list, the reply is a list of lists.
    pub texts: Texts,
    /// The model asked for, if any.
    pub model: Option<String>,
    /// How the tokens become entities.
    pub strategy: Strategy,
    /// Labels of tokens, or kinds of entities, that are left out.
    pub ignored: HashSet<String>,
    /// The number of tokens that neighbouring windows of a long text share. None: a long text is cut.
    pub stride: Option<usize>,
    /// Whether texts that are too long are cut; otherwise they are refused.
    pub truncate: bool,
}

impl TokenLabelsRequest {
    /// Reads a body; `max_texts` bounds the number of texts.
    ///
    /// # Errors
    /// `Undecodable` for a body that is not JSON, `TooLarge` for too many texts or labels, else `BadInput` with the field
    /// and the value.
    pub fn parse(body: &[u8], max_texts: usize) -> Result<Self, TaskError> {
        let fields = Fields::parse(body, &KEYS)?;
        let parameters = fields.object("parameters", &PARAMETERS)?;
        if parameters.is_some()
            && let Some(key) = PARAMETERS.supported.iter().find(|key| fields.get(key).is_some())
        {
            let message = format!("{key} is beside parameters; send all options in one of the two places");
            return Err(TaskError::bad_input(*key, message));
        }
        let options = parameters.as_ref().unwrap_or(&fields);
        let request = Self {
            texts: Texts::read(&fields, "input", "inputs", max_texts)?,
            model: fields.string("model")?,
            strategy: strategy(options)?,
            ignored: ignored(options)?,
            stride: stride(options)?,
            truncate: options.boolean("truncate", true)?,
        };
        if request.stride.is_some() && request.strategy == Strategy::None {
            let message = "stride joins the entities of several windows; it needs another aggregation_strategy than none";
            return Err(TaskError::bad_input("stride", message));
        }
        Ok(request)
    }
}

fn strategy(options: &Fields<'_>) -> Result<Strategy, TaskError> {
    let key = "aggregation_strategy";
    let Some(raw) = options.get(key) else { return Ok(Strategy::Simple) };
    let name = serde_json::from_str::<Cow<'_, str>>(raw.get()).ok();
    let found = Strategy::ALL.into_iter().find(|(_, known)| name.as_deref() == Some(*known));
    found.map(|(strategy, _)| strategy).ok_or_else(|| {
        let known = Strategy::ALL.map(|(_, name)| name).join(", ");
        invalid(key, &format!("one of {known}"), raw.get())
    })
}

fn ignored(options: &Fields<'_>) -> Result<HashSet<String>, TaskError> {
    let key = "ignore_labels";
    let Some(raw) = options.get(key) else { return Ok(["O".to_owned()].into()) };
    if !raw.get().starts_with('[') {
        return Err(invalid(key, "a list of labels", raw.get()));
    }
    let labels = first_items(raw.get(), key, MAX_IGNORED)?;
    if labels.count > MAX_IGNORED {
        let message = format!("{key} holds {} items; at most {MAX_IGNORED} are allowed", labels.count);
        return Err(TaskError::new(TaskErrorKind::TooLarge, message).with_param(key));
    }
    let labels = each_item(&labels.items, key, |raw, path| bounded_string(raw, path, MAX_LABEL_BYTES))?;
    Ok(labels.into_iter().collect())
}

fn stride(options: &Fields<'_>) -> Result<Option<usize>, TaskError> {
    let Some(raw) = options.get("stride") else { return Ok(None) };
    let stride = serde_json::from_str(whole(raw.get()));
    stride.map(Some).map_err(|_| invalid("stride", "a whole number of tokens from 0", raw.get()))
}

/// A token with its label, or an entity of several tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Entity<'a> {
    /// The kind of an entity: a label without the prefix `B-` or `I-`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entity_group: Option<&'a str>,
    /// The label of a token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entity: Option<&'a str>,
    /// The probability of the label, or the mean of those of an entity.
    pub score: f32,
    /// The index of a token among those of the text, special ones included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<usize>,
    /// The token, or the text that the tokenizer makes of the entity's tokens.
    pub word: String,
    /// The first character in the text.
    pub start: u32,
    /// The character after the last one.
    pub end: u32,
}

/// The error of a task whose entities do not fit into a reply.
pub fn reply_too_large() -> TaskError {
    let message = format!(
        "the reply would have more than {MAX_REPLY_BYTES} bytes; send fewer texts, or more ignore_labels"
    );
    TaskError::new(TaskErrorKind::TooLarge, message)
}

/// Writes the body of a reply, entity by entity.
#[derive(Debug)]
pub struct EntityWriter {
    body: Vec<u8>,
    is_list: bool,
}

impl EntityWriter {
    /// Begins a reply, which is a list of lists or, for one text, the list of its entities.
    pub fn new(is_list: bool) -> Self {
        let body = if is_list { vec![b'['] } else { Vec::new() };
        Self { body, is_list }
    }

    /// Begins the list of the next text.
    pub fn begin_text(&mut self) {
        if self.body.last() == Some(&b']') {
            self.body.push(b',');
        }
        self.body.push(b'[');
    }

    /// Writes the next entity of the text.
    ///
    /// # Errors
    /// `TooLarge` if the reply is larger than allowed.
    pub fn push(&mut self, entity: &Entity<'_>) -> Result<(), TaskError> {
        if self.body.last() == Some(&b'}') {
            self.body.push(b',');
        }
        serde_json::to_writer(&mut self.body, entity)
            .map_err(|error| TaskError::internal(format!("the reply cannot be written: {error}")))?;
        if self.body.len() > MAX_REPLY_BYTES { Err(reply_too_large()) } else { Ok(()) }
    }

    /// Ends the list of a text.
    pub fn end_text(&mut self) {
        self.body.push(b']');
    }

    /// The body.
    pub fn finish(mut self) -> Vec<u8> {
        if self.is_list {
            self.body.push(b']');
        }
        self.body
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(body: &str) -> Result<TokenLabelsRequest, TaskError> {
        TokenLabelsRequest::parse(body.as_bytes(), 2)
    }

    #[test]
    fn options_are_fields_or_those_of_hugging_face_and_have_defaults() {
        let plain = parse(r#"{"input":"a"}"#).unwrap();
        assert_eq!((plain.strategy, plain.stride, plain.truncate), (Strategy::Simple, None, true));
        assert_eq!((plain.ignored, plain.texts.is_list), (["O".to_owned()].into(), false));
        let theirs =
            r#"{"inputs":["a"],"parameters":{"aggregation_strategy":"max","ignore_labels":[],"stride":4.0}}"#;
        let theirs = parse(theirs).unwrap();
        assert_eq!(
            (theirs.strategy, theirs.stride, theirs.texts.path(0).as_str()),
            (Strategy::Max, Some(4), "inputs[0]")
        );
        assert!(theirs.ignored.is_empty() && theirs.texts.is_list);
    }

    #[test]
    fn a_refusal_names_the_field_and_the_value() {
        let many = format!(r#"{{"input":"a","ignore_labels":[{}"O"]}}"#, r#""O","#.repeat(1_000));
        let long = format!(r#"{{"input":"a","ignore_labels":["{}"]}}"#, "x".repeat(1_001));
        for (body, kind, param, message) in [
            (
                r#"{"input":"a","aggregation_strategy":"mean"}"#,
                TaskErrorKind::BadInput,
                "aggregation_strategy",
                "mean",
            ),
            (
                r#"{"input":"a","ignore_labels":"O"}"#,
                TaskErrorKind::BadInput,
                "ignore_labels",
                "a list of labels",
            ),
            (r#"{"input":"a","ignore_labels":[7]}"#, TaskErrorKind::BadInput, "ignore_labels[0]", "got 7"),
            (r#"{"input":"a","stride":-1}"#, TaskErrorKind::BadInput, "stride", "got -1"),
            (
                r#"{"input":"a","stride":1,"aggregation_strategy":"none"}"#,
                TaskErrorKind::BadInput,
                "stride",
                "than none",
            ),
            (
                r#"{"input":"a","stride":1,"parameters":{}}"#,
                TaskErrorKind::BadInput,
                "stride",
                "beside parameters",
            ),
            (
                r#"{"input":"a","parameters":{"strid":1}}"#,
                TaskErrorKind::BadInput,
                "strid",
                "did you mean stride",
            ),
            (
                r#"{"input":["a"],"is_split_into_words":true}"#,
                TaskErrorKind::BadInput,
                "is_split_into_words",
                "not supported",
            ),
            (r#"{"input":["a","b","c"]}"#, TaskErrorKind::TooLarge, "input", "at most 2"),
            (&many, TaskErrorKind::TooLarge, "ignore_labels", "1001 items"),
            (&long, TaskErrorKind::BadInput, "ignore_labels[0]", "1001"),
        ] {
            let error = parse(body).unwrap_err();
            assert_eq!((error.kind, error.param.as_deref()), (kind, Some(param)), "{error}");
            assert!(error.message.contains(message), "{error}");
        }
    }

    #[test]
    fn a_reply_is_a_list_of_entities_for_each_text_and_is_bounded() {
        let entity = Entity {
            entity_group: Some("PER"),
            entity: None,
            score: 0.5,
            index: None,
            word: "\"é".into(),
            start: 1,
            end: 3,
        };
        let write = |is_list: bool, counts: &[usize]| {
            let mut writer = EntityWriter::new(is_list);
            for count in counts {
                writer.begin_text();
                (0..*count).for_each(|_| writer.push(&entity).unwrap());
                writer.end_text();
            }
            serde_json::from_slice::<Value>(&writer.finish()).unwrap()
        };
        let one = json!({"entity_group": "PER", "score": 0.5, "word": "\"é", "start": 1, "end": 3});
        assert_eq!(write(false, &[2]), json!([one, one]));
        let least = Entity {
            entity_group: None,
            entity: Some(""),
            score: 1.0,
            word: String::new(),
            ..entity.clone()
        };
        assert!(serde_json::to_string(&least).unwrap().len() + ",".len() >= MIN_ENTITY_BYTES);
        assert_eq!(write(false, &[0]), json!([]));
        assert_eq!(write(true, &[0, 1, 0, 2]), json!([[], [one], [], [one, one]]));
        let mut writer = EntityWriter::new(false);
        writer.begin_text();
        let long = Entity { word: "x".repeat(1 << 20), ..entity };
        let error = (0..9).find_map(|_| writer.push(&long).err()).unwrap();
        assert_eq!(error.kind, TaskErrorKind::TooLarge);
    }
}
