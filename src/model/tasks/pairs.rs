//! Reranking and scoring by cross-encoders, equal to `sentence_transformers.CrossEncoder` within 1e-5. Turns
//! `/v1/rerank` and `/v1/score` bodies into pairs of texts, and their scores into response bodies. Each pair is an
//! input of its own, so that many documents share batches with other tasks. Never touches the device.

use std::sync::Arc;

use serde_json::json;

use super::labels::{label_count, sigmoid};
use super::names::ServedNames;
use super::sentence_settings::SentenceSettings;
use super::{
    BRIEF_BODY, OnError, ReportedInputs, SharedReport, TextInputs, check_text_files, load_text_model,
    request_text_files, text_input,
};
use crate::model::family::{Example, Family, FileRules, Sample, Serves};
use crate::model::load::ModelFiles;
use crate::model::load::tokenizer::{TextTokenizer, Tokens};
use crate::model::nets::encoder::config::{Family as Architecture, NetworkConfig};
use crate::model::nets::encoder::{Output, TextNetwork};
use crate::model::{
    Body, Device, Effort, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, TaskError,
};
use crate::protocol::reply::Usage;
use crate::protocol::rerank::{Form, PairsRequest, RERANK_URL, SCORE_URL, write_scores};

/// Models that score pairs of texts.
pub static FAMILY: Family = Family {
    name: "rerank",
    routes: &[Route::json(RERANK_URL), Route::json(SCORE_URL)],
    serves: Serves::Files(FileRules {
        configs: &Architecture::NAMES,
        ggufs: &[],
        pipelines: &[],
        libraries: &["CrossEncoder"],
        modules: &["LogitScore"],
        accepts: |model| label_count(model) == Some(1),
        heads: &[],
        fewer_routes: None,
        assumptions: |_| Vec::new(),
        request_files: request_text_files,
        check: |spec| check_text_files(&ModelFiles::locate(&spec.source)?, spec),
    }),
    options: &[],
    sample: |texts| {
        let body = json!({"query": texts.first(), "documents": texts});
        Sample::json(RERANK_URL, &body, texts.len())
    },
    example: Example { model: "score-bert", options: &[] },
};

/// Loads a model with one label for pairs of texts.
///
/// # Errors
/// As [`embed::load`](super::embed::load).
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(PairProcessor, TextNetwork), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = NetworkConfig::read(&files, &spec.source)?;
    let limits = SentenceSettings::limits(&files)?;
    let (tokenizer, network) = load_text_model(spec, device, &files, &config, limits, &Output::Labels(1))?;
    let (tokenizer, names) = (Arc::new(tokenizer), ServedNames::new(spec));
    let processor = PairProcessor { tokenizer, names, max_inputs: spec.max_inputs };
    Ok((processor, network))
}

/// Turns requests to score pairs into tokens, and scores into responses.
pub struct PairProcessor {
    tokenizer: Arc<TextTokenizer>,
    names: ServedNames,
    max_inputs: usize,
}

/// The parts of a request that its response needs.
pub struct PairContext {
    /// The request with its documents, which the reply may repeat.
    request: Arc<PairsRequest>,
    report: Arc<SharedReport>,
}

impl Processor for PairProcessor {
    type Context = PairContext;
    type Input = Tokens;
    type Piece = ();
    type Output = Vec<f32>;

    fn routes(&self) -> &[Route] {
        FAMILY.routes
    }

    fn probe(&self) -> Option<Message> {
        let body = r#"{"query":"what is a sconce?","documents":["a holder for candles"]}"#;
        Some(Message { body: body.into(), ..Message::default() })
    }

    fn preprocess(&self, message: &Message) -> Result<Preprocessed<Self>, TaskError> {
        let request = match message.url() {
            Some(SCORE_URL) => PairsRequest::score(&message.body, self.max_inputs),
            _ => PairsRequest::rerank(&message.body, self.max_inputs),
        }?;
        self.names.check(request.model.as_deref())?;
        let request = Arc::new(request);
        let (report, inputs) = self.inputs(request.clone())?;
        Ok((PairContext { request, report }, inputs))
    }

    fn effort(&self, message: &Message) -> Effort {
        Effort::brief_if(message.body.len() <= BRIEF_BODY)
    }

    fn finish(&self, context: PairContext, outputs: Vec<Vec<f32>>) -> Result<Body, TaskError> {
        let (request, counts) = (&context.request, context.report.take().counts);
        let score = |logit: f32| if request.raw_scores { logit } else { sigmoid(logit) };
        let scores: Vec<f32> = outputs.into_iter().flatten().map(score).collect();
        let (model, usage) = (self.names.reply_name(), Usage::new(counts.tokens));
        let written = write_scores(request.form, &request.second, &scores, model, usage);
        written.map(|body| counts.body(body))
    }
}

impl PairProcessor {
    /// Makes the inputs, and the report of their counts and errors.
    fn inputs(&self, request: Arc<PairsRequest>) -> Result<ReportedInputs<Tokens>, TaskError> {
        let has_several_first = request.first.len() > 1;
        let tokenizer = self.tokenizer.clone();
        let first_pieces = {
            let (tokenizer, request) = (tokenizer.clone(), request.clone());
            move |index: usize| {
                let path = || match request.form {
                    Form::Rerank { .. } => "query".to_owned(),
                    Form::Score if has_several_first => format!("text_1[{index}]"),
                    Form::Score => "text_1".to_owned(),
                };
                tokenizer.pieces(&request.first[index]).map_err(|error| error.with_param(path()))
            }
        };
        // A first text that all pairs share is tokenised once.
        let shared_first = if has_several_first { None } else { Some(first_pieces(0)?) };
        // Each item is the number of bytes that must be tokenised for a pair. The texts stay in the request.
        let pair_bytes = |(index, second): (usize, &String)| {
            second.len() + if has_several_first { request.first[index].len() } else { 0 }
        };
        let lengths: Vec<usize> = request.second.iter().enumerate().map(pair_bytes).collect();
        let texts = TextInputs::new(
            lengths,
            |length| *length,
            OnError::FailTask,
            move |index, _| {
                let path = || format!("{}[{index}]", request.field);
                let second =
                    tokenizer.pieces(&request.second[index]).map_err(|error| error.with_param(path()))?;
                let tokens = match &shared_first {
                    Some(first) => tokenizer.pair(first, &second),
                    None => tokenizer.pair(&first_pieces(index)?, &second),
                };
                text_input(tokens, request.truncate, path, tokenizer.max_tokens())
            },
        );
        texts.into_inputs()
    }
}
