//! Zero-shot classification of texts by models of natural language inference, equal to the pipeline of the transformers
//! library within 1e-5. Each text is the premise of a pair with each label's sentence. Decides which of the model's
//! labels mean entailment and contradiction, and how logits become the labels' scores. Runs on the CPU only.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use serde::Deserialize;
use serde_json::Value;

use super::body::{ClassifyRequest, ZeroShot};
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::{TextTokenizer, Tokens};
use crate::model::ops::probabilities::softmax;
use crate::model::tasks::{OnError, ReportedInputs, TextInputs, text_input};
use crate::model::{LoadError, TaskError};

/// The beginning of the name of the label that means entailment, in lower case.
const ENTAILMENT: &str = "entail";

/// The labels of a model of natural language inference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entailment {
    entailment: usize,
    /// The first label, or the last one if the first is entailment, as in the pipeline.
    contradiction: usize,
}

#[derive(Deserialize)]
struct Config {
    label2id: Option<BTreeMap<String, Value>>,
}

impl Entailment {
    /// Finds the labels in `label2id` of `config.json`, or without it among the `names`. None for a model of another
    /// kind.
    ///
    /// # Errors
    /// [`LoadError::File`] if `label2id` gives entailment a number that no label has.
    pub fn read(files: &ModelFiles, names: &[String]) -> Result<Option<Self>, LoadError> {
        let is_entailment = |name: &str| name.to_lowercase().starts_with(ENTAILMENT);
        let config: Config = files.required_json("config.json")?;
        let ids: Vec<Value> = match config.label2id {
            Some(ids) => ids.into_iter().filter(|(name, _)| is_entailment(name)).map(|(_, id)| id).collect(),
            None => (0..names.len()).filter(|id| is_entailment(&names[*id])).map(Value::from).collect(),
        };
        // If there are several such labels, the pipeline takes the first in the file, whose order means nothing. Here
        // there must be one.
        let [id] = &*ids else { return Ok(None) };
        let number = id.as_u64().or_else(|| id.as_str()?.parse().ok());
        let Some(entailment) = number.map(|id| id as usize).filter(|id| *id < names.len()) else {
            let reason =
                format!("label2id gives entailment the number {id}, and there are {} labels", names.len());
            return Err(LoadError::File { path: files.required("config.json")?, reason });
        };
        let contradiction = if entailment == 0 { names.len() - 1 } else { 0 };
        Ok((entailment != contradiction).then_some(Self { entailment, contradiction }))
    }

    /// The scores of a text's labels, given the model's logits for its pair with each.
    pub fn scores(self, logits: &[Vec<f32>], multi_label: bool) -> Vec<f32> {
        if multi_label || logits.len() == 1 {
            let score = |logits: &Vec<f32>| {
                let mut both = [logits[self.contradiction], logits[self.entailment]];
                softmax(&mut both);
                both[1]
            };
            return logits.iter().map(score).collect();
        }
        let mut scores: Vec<f32> = logits.iter().map(|logits| logits[self.entailment]).collect();
        softmax(&mut scores);
        scores
    }
}

/// A text of several pairs, which is tokenised once.
struct SharedText {
    text: String,
    path: String,
    pieces: OnceLock<Result<Vec<u32>, TaskError>>,
}

impl SharedText {
    fn new(text: String, path: String) -> Arc<Self> {
        Arc::new(Self { text, path, pieces: OnceLock::new() })
    }

    fn pieces(&self, tokenizer: &TextTokenizer) -> Result<&[u32], TaskError> {
        let make = || tokenizer.pieces_of_pair(&self.text).map_err(|error| error.with_param(&*self.path));
        self.pieces.get_or_init(make).as_deref().map_err(Clone::clone)
    }
}

/// A text and the sentence with a label.
struct Pair {
    premise: Arc<SharedText>,
    hypothesis: Arc<SharedText>,
    /// The bytes of the texts that no earlier pair has.
    new_bytes: usize,
}

/// Makes the inputs of a request with labels, one for each pair: those of the first text, then those of the next.
///
/// # Errors
/// `BadInput` naming a text that is too long, if texts may not be cut, or a label whose sentence leaves no room for a
/// text.
pub(super) fn inputs(
    tokenizer: &Arc<TextTokenizer>,
    request: &mut ClassifyRequest,
    zero_shot: &ZeroShot,
) -> Result<ReportedInputs<Tokens>, TaskError> {
    let field = zero_shot.labels.field;
    let hypotheses = zero_shot.labels.sentences().enumerate();
    let hypotheses: Vec<_> =
        hypotheses.map(|(index, sentence)| SharedText::new(sentence, format!("{field}[{index}]"))).collect();
    let texts = std::mem::take(&mut request.texts.items);
    let mut pairs = Vec::with_capacity(texts.len() * hypotheses.len());
    for (index, text) in texts.into_iter().enumerate() {
        let premise = SharedText::new(text, request.texts.path(index));
        for (label, hypothesis) in hypotheses.iter().enumerate() {
            let of_premise = if label == 0 { premise.text.len() } else { 0 };
            let of_hypothesis = if index == 0 { hypothesis.text.len() } else { 0 };
            pairs.push(Pair {
                premise: premise.clone(),
                hypothesis: hypothesis.clone(),
                new_bytes: of_premise + of_hypothesis,
            });
        }
    }
    let (tokenizer, truncate) = (tokenizer.clone(), request.truncate);
    let new_bytes = |pair: &Pair| pair.new_bytes;
    let inputs = TextInputs::new(pairs, new_bytes, OnError::FailTask, move |_, pair| {
        let Pair { premise, hypothesis, .. } = pair;
        let (first, second) = (premise.pieces(&tokenizer)?, hypothesis.pieces(&tokenizer)?);
        let max = tokenizer.max_tokens();
        let tokens = tokenizer.pair_with_whole_second(first, second).ok_or_else(|| {
            let path = &hypothesis.path;
            let message = format!(
                "{path} is too long: its sentence leaves no room for a text; this model takes at most {max} tokens of both, \
                 special ones included"
            );
            TaskError::bad_input(path, message)
        })?;
        text_input(tokens, truncate, || premise.path.clone(), max)
    });
    inputs.into_inputs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entailment_is_found_by_the_beginning_of_its_name_and_contradiction_by_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let read = |config: &str, names: &[&str]| {
            std::fs::write(folder.path().join("config.json"), config).unwrap();
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let files = ModelFiles::locate(folder.path().to_str().unwrap()).unwrap();
            Entailment::read(&files, &names).map_err(|error| error.to_string())
        };
        let three = ["contradiction", "neutral", "entailment"];
        let of = |entailment, contradiction| Ok(Some(Entailment { entailment, contradiction }));
        assert_eq!(read("{}", &three), of(2, 0));
        assert_eq!(read(r#"{"label2id":{"ENTAILMENT":0,"b":1,"c":2}}"#, &["a", "b", "c"]), of(0, 2));
        assert_eq!(read(r#"{"label2id":{"entailment":"0","not_entailment":1}}"#, &["a", "b"]), of(0, 1));
        assert_eq!(read(r#"{"label2id":{"a":0,"b":1}}"#, &["a", "b"]), Ok(None));
        assert_eq!(read(r#"{"label2id":{"entailment":0,"Entailed":1}}"#, &["a", "b"]), Ok(None));
        assert_eq!(read("{}", &["entailment"]), Ok(None));
        let error = read(r#"{"label2id":{"entailment":3}}"#, &three).unwrap_err();
        assert!(error.contains("the number 3, and there are 3 labels"), "{error}");
    }
}
