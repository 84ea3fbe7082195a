//! Classification of texts: turns `/classify` bodies into token ids, and the labels' logits into response bodies.
//! Decides, by `config.json` as the transformers library does, the labels' names, whether a model classifies by labels of
//! the request (zero-shot), and whether softmax or sigmoid is applied to their logits. Only the network uses the
//! device, not the processor.

mod body;
mod entailment;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use self::body::{ClassifyRequest, KEYS, ZeroShot, write_labels};
pub(super) use self::body::{highest_indices, write_best_labels};
use self::entailment::Entailment;
use super::names::ServedNames;
use super::{
    MAX_SEQ_LENGTH, OnError, SharedReport, TextInputs, Usage, check_text_files, effort_of_texts,
    load_text_model, request_text_files, text_input, text_limits,
};
use crate::model::family::{Description, Example, Family, FileRules, Sample, Serves};
use crate::model::fields::{Texts, excerpt};
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::{TextTokenizer, Tokens};
use crate::model::nets::encoder::text_config::{NAMES, TextConfig};
use crate::model::nets::encoder::{Output, TextNetwork};
pub use crate::model::ops::probabilities::{sigmoid, softmax};
use crate::model::{
    Body, Device, Effort, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, TaskError,
};
use crate::protocol::endpoints::CLASSIFY_URL as URL;

/// The maximum number of labels of a classifier, far more than any model has. The bound is needed because a name is
/// made for each label before the shape of a tensor confirms their number.
const MAX_LABELS: usize = 1 << 20;

/// The most labels of a model whose replies are brief work: a number takes about 30 ns to write.
const MAX_BRIEF_LABELS: usize = 1_000;

/// The labels of a classifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels {
    /// The names, in the order of the network's logits.
    pub names: Vec<String>,
    /// The function that turns the logits into probabilities.
    pub function: Function,
}

/// The function that turns a network's logits into probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// The labels exclude each other; the sum of their probabilities is 1.
    Softmax,
    /// Each label applies or not, independently of the others.
    Sigmoid,
    /// The logits are the answer, unchanged (regression).
    None,
}

#[derive(Deserialize)]
struct Config {
    id2label: Option<BTreeMap<String, String>>,
    num_labels: Option<usize>,
    problem_type: Option<String>,
}

impl Labels {
    /// Reads the labels from `config.json`. The transformers library omits `id2label` for two labels without names.
    ///
    /// # Errors
    /// [`LoadError::File`] if the labels are not numbered from 0 or are too many, [`LoadError::Unsupported`] for an
    /// unknown `problem_type`.
    pub fn read(files: &ModelFiles, source: &str) -> Result<Self, LoadError> {
        let path = files.required("config.json")?;
        let config: Config = files.required_json("config.json")?;
        if let Some(count) = config.num_labels.filter(|count| *count > MAX_LABELS) {
            let reason = format!("num_labels is {count}; at most {MAX_LABELS} are read");
            return Err(LoadError::File { path, reason });
        }
        let names = match config.id2label {
            None => (0..config.num_labels.unwrap_or(2)).map(|id| format!("LABEL_{id}")).collect(),
            Some(mut names) => {
                let mut in_order = Vec::with_capacity(names.len());
                while let Some(name) = names.remove(&in_order.len().to_string()) {
                    in_order.push(name);
                }
                if let Some(unexpected) = names.keys().next() {
                    let reason = format!("id2label has the key {unexpected:?}; its keys must be 0, 1, 2 …");
                    return Err(LoadError::File { path, reason });
                }
                in_order
            }
        };
        let function = match config.problem_type.as_deref() {
            Some("multi_label_classification") => Function::Sigmoid,
            Some("single_label_classification") => Function::Softmax,
            Some("regression") => Function::None,
            None if names.len() == 1 => Function::Sigmoid,
            None => Function::Softmax,
            Some(other) => {
                let reason = format!(
                    "problem_type is {other:?}; multi_label_classification, single_label_classification and \
                     regression are supported"
                );
                return Err(LoadError::Unsupported { model: source.to_owned(), reason });
            }
        };
        Ok(Self { names, function })
    }

    /// Applies the function to the network's logits for one input, in place.
    pub fn apply_function(&self, logits: &mut [f32]) {
        match self.function {
            Function::Softmax => softmax(logits),
            Function::Sigmoid => logits.iter_mut().for_each(|x| *x = sigmoid(*x)),
            Function::None => {}
        }
    }
}

/// Models that classify texts.
pub static FAMILY: Family = Family {
    name: "classify",
    routes: &[Route::json(URL)],
    fields: &[(URL, &KEYS)],
    serves: Serves::Files(FileRules {
        configs: &NAMES,
        libraries: &["CrossEncoder"],
        accepts: |model| label_count(model).is_some(),
        assumptions,
        ..FileRules::new(request_text_files, check)
    }),
    options: &[MAX_SEQ_LENGTH],
    sample: |texts| Sample::of_texts(URL, "input", texts),
    example: Example { model: "score-roberta", options: &[] },
};

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    Entailment::read(&files, &Labels::read(&files, &spec.source)?.names)?;
    check_text_files(&FAMILY, &files, spec)
}

/// Labels are numbered if the model does not name them.
pub(super) fn assumptions(model: &Description) -> Vec<String> {
    let has_names = model.fields.contains_key("id2label");
    let assumption = || "the labels are called LABEL_0 and so on: config.json has no id2label".to_owned();
    (!has_names).then(assumption).into_iter().collect()
}

/// The suffix in `architectures` of classes with a classification head.
const HEAD_SUFFIX: &str = "ForSequenceClassification";

/// The number of a model's labels; none if it has no classification head.
pub(super) fn label_count(model: &Description) -> Option<u64> {
    let field = |name: &str| model.fields.get(name);
    // The heads of T5 also need its decoder.
    if model.architecture == "t5" {
        return None;
    }
    let mut classes = field("architectures").and_then(Value::as_array).into_iter().flatten();
    if !classes.any(|class| class.as_str().is_some_and(|class| class.ends_with(HEAD_SUFFIX))) {
        return None;
    }
    let labels = field("id2label").and_then(Value::as_object).map(|labels| labels.len() as u64);
    // The transformers library omits the default of two labels.
    Some(labels.or(field("num_labels").and_then(Value::as_u64)).unwrap_or(2))
}

/// Loads a model that classifies texts.
///
/// # Errors
/// As [`embed::load`](super::embed::load).
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(LabelProcessor, TextNetwork), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = TextConfig::read(&files, &spec.source)?;
    let labels = Labels::read(&files, &spec.source)?;
    let entailment = Entailment::read(&files, &labels.names)?;
    let limits = text_limits(&FAMILY, spec, &files, &config)?;
    let output = Output::Labels(labels.names.len());
    let (tokenizer, network) = load_text_model(spec, device, &files, &config, limits, &output)?;
    let (tokenizer, names) = (Arc::new(tokenizer), ServedNames::new(spec));
    let processor = LabelProcessor { tokenizer, labels, entailment, names, max_inputs: spec.max_inputs };
    Ok((processor, network))
}

/// Turns requests to classify texts into tokens, and the labels' logits into responses.
pub struct LabelProcessor {
    pub(in crate::model) tokenizer: Arc<TextTokenizer>,
    labels: Labels,
    /// For a model of natural language inference, which also takes labels of the request.
    entailment: Option<Entailment>,
    names: ServedNames,
    max_inputs: usize,
}

/// The parts of a request that its response needs.
pub struct LabelContext {
    top_k: Option<usize>,
    raw_scores: bool,
    /// The labels of the request, with which its texts were paired.
    zero_shot: Option<(Entailment, ZeroShot)>,
    /// Whether the texts came as a list.
    is_list: bool,
    report: Arc<SharedReport>,
}

impl Processor for LabelProcessor {
    type Context = LabelContext;
    type Input = Tokens;
    type Piece = ();
    type Output = Vec<f32>;

    fn routes(&self) -> &[Route] {
        FAMILY.routes
    }

    fn probe(&self) -> Option<Message> {
        Some(Message { body: r#"{"input":"a candle in a sconce"}"#.into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let mut request = ClassifyRequest::parse(&message.body, self.max_inputs)?;
        self.names.check(request.model.as_deref())?;
        let ClassifyRequest { top_k, raw_scores, texts: Texts { is_list, .. }, .. } = request;
        if let Some(zero_shot) = request.zero_shot.take() {
            let field = zero_shot.labels.field;
            let entailment = self.entailment.ok_or_else(|| {
                let message = format!(
                    "{field} needs a model of natural language inference, with entailment among its labels; this model has {}",
                    excerpt(&self.labels.names.join(", "))
                );
                TaskError::bad_input(field, message)
            })?;
            let (report, inputs) = entailment::inputs(&self.tokenizer, &mut request, &zero_shot)?;
            let zero_shot = Some((entailment, zero_shot));
            return Ok((LabelContext { top_k, raw_scores, zero_shot, is_list, report }, inputs));
        }
        let (texts, tokenizer) = (std::mem::take(&mut request.texts.items), self.tokenizer.clone());
        let texts = TextInputs::new(texts, String::len, OnError::FailTask, move |index, text| {
            let path = || request.texts.path(index);
            let tokens = tokenizer.text(&text).map_err(|error| error.with_param(path()))?;
            text_input(tokens, request.truncate, path, tokenizer.max_tokens())
        });
        let (report, inputs) = texts.into_inputs()?;
        Ok((LabelContext { top_k, raw_scores, zero_shot: None, is_list, report }, inputs))
    }

    fn effort(&self, message: &Message) -> Effort {
        // Each label of a request puts a sentence of its template into the texts. The reply has a number for each label of
        // the model.
        match self.entailment {
            None if self.labels.names.len() <= MAX_BRIEF_LABELS => effort_of_texts(&message.body, 0),
            _ => Effort::Usual,
        }
    }

    fn bytes(&self, tokens: &Tokens) -> usize {
        tokens.bytes()
    }

    fn finish(&self, context: LabelContext, mut outputs: Vec<Vec<f32>>) -> Result<Body, TaskError> {
        if let Some((entailment, ZeroShot { labels, multi_label })) = context.zero_shot {
            let of_texts = outputs.chunks(labels.names.len());
            let scores: Vec<_> = of_texts.map(|logits| entailment.scores(logits, multi_label)).collect();
            let top_k = context.top_k.unwrap_or(labels.names.len());
            let written = write_best_labels(&scores, &labels.names, top_k, context.is_list);
            return written.map(|body| context.report.take().counts.body(body));
        }
        if !context.raw_scores {
            outputs.iter_mut().for_each(|logits| self.labels.apply_function(logits));
        }
        let (top_k, counts) = (context.top_k, context.report.take().counts);
        let usage = Usage::new(counts.tokens);
        let written = write_labels(&outputs, &self.labels.names, top_k, self.names.reply_name(), usage);
        written.map(|body| counts.body(body))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(config: &str) -> Result<Labels, String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        let source = folder.path().to_str().unwrap();
        Labels::read(&ModelFiles::locate(source).unwrap(), source).map_err(|error| error.to_string())
    }

    #[test]
    fn names_are_in_order_of_ids_and_problem_type_chooses_the_function() {
        let names: Vec<String> = (0..12).map(|id| format!(r#""{id}":"label {id}""#)).collect();
        let twelve = labels(&format!(r#"{{"id2label":{{{}}}}}"#, names.join(","))).unwrap();
        assert_eq!((twelve.names[2].as_str(), twelve.names[11].as_str()), ("label 2", "label 11"));
        assert_eq!(twelve.function, Function::Softmax);
        assert_eq!(labels(r#"{"id2label":{"0":"a"}}"#).unwrap().function, Function::Sigmoid);
        let typed = |problem: &str| labels(&format!(r#"{{"num_labels":3,"problem_type":"{problem}"}}"#));
        assert_eq!(typed("multi_label_classification").unwrap().function, Function::Sigmoid);
        assert_eq!(typed("regression").unwrap().names, ["LABEL_0", "LABEL_1", "LABEL_2"]);
        assert!(typed("ranking").unwrap_err().contains("\"ranking\""));
        assert!(labels(r#"{"id2label":{"0":"a","7":"b"}}"#).unwrap_err().contains("\"7\""));
        assert!(labels(r#"{"num_labels":18446744073709551615}"#).unwrap_err().contains("at most 1048576"));
    }
}
