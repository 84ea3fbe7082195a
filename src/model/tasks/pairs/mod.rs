//! Reranking and scoring by cross-encoders and by causal models (`logit_score`), equal to
//! `sentence_transformers.CrossEncoder` within 1e-5. Turns `/v1/rerank` and `/v1/score` bodies into pairs of texts, and
//! their scores into response bodies. Each pair is an input of its own, so that many documents share batches with other
//! tasks. Only the network uses the device, not the processor.

mod body;

use std::sync::{Arc, OnceLock};

use serde_json::json;

use self::body::{Form, PairsRequest, RERANK, SCORE, write_scores};
use super::labels::{label_count, sigmoid};
use super::logit_score::{LOGIT_SCORE, PairPrompts, is_logit_score};
use super::names::ServedNames;
use super::{
    MAX_SEQ_LENGTH, OnError, ReportedInputs, SharedReport, TextInputs, Usage, check_text_files,
    effort_of_texts, read_tokenizer, request_text_files, text_input, text_limits,
};
use crate::model::family::{Description, Example, Family, FileRules, Sample, Serves};
use crate::model::load::ModelFiles;
use crate::model::load::chat_template::ChatTemplates;
use crate::model::load::tokenizer::{TextTokenizer, Tokens};
use crate::model::nets::encoder::text_config::{NAMES, TextConfig};
use crate::model::nets::encoder::{Output, TextNetwork};
use crate::model::{
    Body, Device, Effort, LoadError, LoadSpec, Message, Preprocessed, Processor, Route, TaskError,
    TaskErrorKind,
};
use crate::protocol::endpoints::{RERANK_URL, SCORE_URL};

/// Models that score pairs of texts.
pub static FAMILY: Family = Family {
    name: "rerank",
    routes: &[Route::json(RERANK_URL), Route::json(SCORE_URL)],
    fields: &[(RERANK_URL, &RERANK), (SCORE_URL, &SCORE)],
    serves: Serves::Files(FileRules {
        configs: &NAMES,
        libraries: &["CrossEncoder"],
        modules: &[LOGIT_SCORE],
        accepts: |model| label_count(model) == Some(1) || is_logit_score(model),
        heads: &["ForSequenceClassification"],
        assumptions,
        ..FileRules::new(request_files, check)
    }),
    options: &[MAX_SEQ_LENGTH],
    sample: |texts| {
        let body = json!({"query": texts.first(), "documents": texts});
        Sample::json(RERANK_URL, &body, texts.len())
    },
    example: Example { model: "score-bert", options: &[] },
};

/// The prompt of Qwen3-Reranker is not in its files.
fn assumptions(model: &Description) -> Vec<String> {
    let is_assumed = label_count(model) != Some(1) && !model.has_module(LOGIT_SCORE);
    let assumption = "the prompt of a pair, and the tokens \"yes\" and \"no\" whose logits are the score, are those of \
                      Qwen3-Reranker's model card: the model has no modules.json with LogitScore";
    is_assumed.then(|| assumption.to_owned()).into_iter().collect()
}

fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
    ChatTemplates::request_files(files)?;
    request_text_files(files)
}

fn check(spec: &LoadSpec) -> Result<(), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    if has_label(&Description::read(&files)?) {
        PairPrompts::of_chat_model(spec, &files)?;
    } else {
        PairPrompts::of_files(spec, &files)?;
    }
    check_text_files(&FAMILY, &files, spec)
}

/// Whether a model's score is the output of a head with one label. Otherwise it is computed from the logits of tokens.
fn has_label(model: &Description) -> bool {
    label_count(model) == Some(1) && !model.has_module(LOGIT_SCORE)
}

/// Loads a model with one label for pairs of texts, or a causal model whose logits are the score.
///
/// # Errors
/// As [`embed::load`](super::embed::load).
pub fn load(spec: &LoadSpec, device: &Device) -> Result<(PairProcessor, TextNetwork), LoadError> {
    let files = ModelFiles::locate(&spec.source)?;
    let config = TextConfig::read(&files, &spec.source)?;
    let limits = text_limits(&FAMILY, spec, &files, &config)?;
    let tokenizer = read_tokenizer(&files, &config, limits)?;
    let model = Description::read(&files)?;
    let (prompts, output) = if has_label(&model) {
        (PairPrompts::of_chat_model(spec, &files)?.map(Arc::new), Output::Labels(1))
    } else {
        let (prompts, tokens) = PairPrompts::read(spec, &files, &tokenizer)?;
        (Some(Arc::new(prompts)), Output::LogitScore(tokens))
    };
    let network = TextNetwork::load(spec, device, &files, &config, &tokenizer, &output)?;
    let (tokenizer, names) = (Arc::new(tokenizer), ServedNames::new(spec));
    let processor = PairProcessor { tokenizer, prompts, names, max_inputs: spec.max_inputs };
    Ok((processor, network))
}

/// About the bytes of a prompt's template.
const TEMPLATE_BYTES: usize = 512;
/// The most bytes of all prompts of a task.
const MAX_PROMPT_BYTES: usize = 64 << 20;

/// Turns requests to score pairs into tokens, and scores into responses.
pub struct PairProcessor {
    tokenizer: Arc<TextTokenizer>,
    /// How prompts are made of pairs. Without it, the tokenizer joins the two texts.
    prompts: Option<Arc<PairPrompts>>,
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
        let takes_instruction = self.prompts.as_ref().is_some_and(|prompts| prompts.takes_instruction());
        if request.instruction.is_some() && !takes_instruction {
            let message = "instruction: this model takes none; leave it out, or send null";
            return Err(TaskError::bad_input("instruction", message));
        }
        let request = Arc::new(request);
        let (report, inputs) = self.inputs(request.clone())?;
        Ok((PairContext { request, report }, inputs))
    }

    fn effort(&self, message: &Message) -> Effort {
        // The prompt of each document is longer than its part of the body.
        match self.prompts {
            None => effort_of_texts(&message.body, 0),
            Some(_) => Effort::Usual,
        }
    }

    fn bytes(&self, tokens: &Tokens) -> usize {
        tokens.bytes()
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
        if let Some(prompts) = &self.prompts {
            return self.prompt_inputs(prompts.clone(), request);
        }
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
                tokenizer.pieces_of_pair(&request.first[index]).map_err(|error| error.with_param(path()))
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
                let second = tokenizer
                    .pieces_of_pair(&request.second[index])
                    .map_err(|error| error.with_param(path()))?;
                let tokens = match &shared_first {
                    Some(first) => tokenizer.pair(first, &second),
                    None => tokenizer.pair(&first_pieces(index)?, &second),
                };
                text_input(tokens, request.truncate, path, tokenizer.max_tokens())
            },
        );
        texts.into_inputs()
    }

    /// Makes the inputs of a model that scores prompts.
    fn prompt_inputs(
        &self,
        prompts: Arc<PairPrompts>,
        request: Arc<PairsRequest>,
    ) -> Result<ReportedInputs<Tokens>, TaskError> {
        let tokenizer = self.tokenizer.clone();
        let has_several_first = request.first.len() > 1;
        let first_index = move |index: usize| if has_several_first { index } else { 0 };
        let instruction = request.instruction.as_ref().map_or(0, String::len);
        let lengths = request.second.iter().enumerate();
        let lengths = lengths.map(|(index, second)| {
            second.len() + request.first[first_index(index)].len() + instruction + TEMPLATE_BYTES
        });
        let lengths: Vec<usize> = lengths.collect();
        let bytes: usize = lengths.iter().sum();
        if bytes > MAX_PROMPT_BYTES {
            let message = format!(
                "the prompts of this task have {bytes} bytes together, since each has the query and the instruction; at most \
                 {MAX_PROMPT_BYTES} are allowed"
            );
            return Err(TaskError::new(TaskErrorKind::TooLarge, message));
        }
        let end = OnceLock::new();
        let texts = TextInputs::new(
            lengths,
            |length| *length,
            OnError::FailTask,
            move |index, _| {
                let path = || format!("{}[{index}]", request.field);
                let (query, document) = (&request.first[first_index(index)], &request.second[index]);
                let tokens =
                    prompts.tokens(&tokenizer, request.instruction.as_deref(), query, document, &end);
                let tokens = tokens.map_err(|error| error.with_param(path()))?;
                text_input(tokens, request.truncate, path, tokenizer.max_tokens())
            },
        );
        texts.into_inputs()
    }
}
