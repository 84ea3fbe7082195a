//! Reranking and scoring by cross-encoders, equal to `sentence_transformers.CrossEncoder` to 1e-5: from
//! `/v1/rerank` and `/v1/score` bodies to pairs of texts, and from their numbers to response bodies. Each pair
//! is an input of its own, so that many documents share batches with other tasks. Never touches the device.

use super::labels::sigmoid;
use super::names::ServedNames;
use super::sentence_settings::SentenceSettings;
use super::{InputCounts, MANY_TEXTS, prepared, sized, text_model};
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::{TextTokenizer, Tokens};
use crate::model::nets::text::config::NetworkConfig;
use crate::model::nets::text::{Output, TextNetwork};
use crate::model::{
    Body, Device, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, SizedInput, TaskError,
};
use crate::protocol::reply::Usage;
use crate::protocol::rerank::{Form, PairsRequest, write_scores};

const RERANK: &str = "/v1/rerank";
const SCORE: &str = "/v1/score";

/// Loads a model with one label for pairs of texts.
///
/// # Errors
/// As [`embed::load`](super::embed::load).
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(PairProcessor, TextNetwork), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = NetworkConfig::read(&files, &spec.source)?;
    let limits = SentenceSettings::limits(&files)?;
    let (tokenizer, network) = text_model((spec, device), (&files, &config), limits, &Output::Labels(1))?;
    let processor = PairProcessor { tokenizer, names: ServedNames::new(spec), max_inputs: spec.max_inputs };
    Ok((processor, network))
}

/// Turns requests to score pairs into tokens, and scores into responses.
pub struct PairProcessor {
    tokenizer: TextTokenizer,
    names: ServedNames,
    max_inputs: usize,
}

/// What the response needs of its request.
pub struct PairOptions {
    form: Form,
    raw_scores: bool,
    /// The documents, if the reply repeats them.
    documents: Vec<String>,
    counts: InputCounts,
}

impl Processor for PairProcessor {
    type Context = PairOptions;
    type Input = Tokens;
    type Piece = ();
    type Output = Vec<f32>;

    fn routes(&self) -> &[Route] {
        const ROUTES: &[Route] = &[Route::json(RERANK), Route::json(SCORE)];
        ROUTES
    }

    fn probe(&self) -> Option<Message> {
        let body = r#"{"query":"what is a sconce?","documents":["a holder for candles"]}"#;
        Some(Message { body: body.into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let request = match message.url() {
            Some(SCORE) => PairsRequest::score(&message.body, self.max_inputs),
            _ => PairsRequest::rerank(&message.body, self.max_inputs),
        }?;
        self.names.check(request.model.as_deref())?;
        let inputs = self.inputs(&request)?;
        let PairsRequest { second, raw_scores, form, .. } = request;
        let is_repeated = matches!(form, Form::Rerank { return_documents: true, .. });
        let documents = if is_repeated { second } else { Vec::new() };
        Ok((PairOptions { form, raw_scores, documents, counts: InputCounts::of(&inputs) }, inputs))
    }

    fn finish(&self, request: PairOptions, outputs: Vec<Vec<f32>>) -> Result<Body, TaskError> {
        let score = |logit: f32| if request.raw_scores { logit } else { sigmoid(logit) };
        let scores: Vec<f32> = outputs.into_iter().flatten().map(score).collect();
        let PairOptions { form, documents, counts, .. } = request;
        let written = write_scores((form, &documents), &scores, self.names.own(), Usage::of(counts.tokens));
        written.map(|body| counts.body(body))
    }
}

impl PairProcessor {
    fn inputs(&self, request: &PairsRequest) -> Result<Vec<SizedInput<Tokens>>, TaskError> {
        let listed = request.first.len() > 1;
        let first = |index: usize| match request.form {
            Form::Rerank { .. } => "query".to_owned(),
            Form::Score if listed => format!("text_1[{index}]"),
            Form::Score => "text_1".to_owned(),
        };
        let firsts = prepared(request.first.iter().collect(), MANY_TEXTS, |index, text| {
            self.tokenizer.pieces(text).map_err(|error| error.at(first(index)))
        })?;
        prepared(request.second.iter().collect(), MANY_TEXTS, |index, text| {
            let path = || format!("{}[{index}]", request.field);
            let second = self.tokenizer.pieces(text).map_err(|error| error.at(path()))?;
            let tokens = self.tokenizer.pair(&firsts[if listed { index } else { 0 }], &second);
            sized(tokens, request.truncate, path, self.tokenizer.max_tokens())
        })
    }
}
