//! Rerankers that are causal models: their score is the logit of one token after the prompt, minus that of another.
//! Decides by a model's files which tokens these are and how a pair becomes a prompt, as sentence-transformers does.
//! Files of Qwen3-Reranker as Qwen published them get what its model card says. Refuses rerankers whose files do not
//! define the prompt.

use std::sync::OnceLock;

use serde::Deserialize;

use super::sentence_settings::SentenceSettings;
use crate::model::family::{Description, MODULES, Module};
use crate::model::load::ModelFiles;
use crate::model::load::chat_template::PairTemplate;
use crate::model::load::tokenizer::{TextTokenizer, Tokens, no_tokens};
use crate::model::load::vocabulary::pair_template;
use crate::model::nets::encoder::ScoreTokens;
use crate::model::{LoadError, LoadSpec, TaskError};

/// The module of sentence-transformers that computes a score from logits.
pub(super) const LOGIT_SCORE: &str = "LogitScore";

/// The prompt of Qwen3-Reranker, from its model card.
const QWEN3_PREFIX: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and \
                            the Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n\
                            <|im_start|>user\n";
const QWEN3_SUFFIX: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
/// The instruction of requests that have none, from the same card.
const QWEN3_INSTRUCTION: &str = "Given a web search query, retrieve relevant passages that answer the query";

/// The `config.json` of a LogitScore module.
#[derive(Deserialize)]
struct ModuleConfig {
    true_token_id: u32,
    false_token_id: Option<u32>,
    module_input_name: Option<String>,
}

/// Makes the prompts of pairs.
pub(super) struct PairPrompts {
    template: Template,
    /// The instruction of requests that have none.
    instruction: Option<String>,
}

enum Template {
    /// The model's chat template.
    OfModel(Box<PairTemplate>),
    /// The prompt of Qwen3-Reranker's model card.
    Qwen3,
}

/// Whether the logits of tokens are the score of a model that serves `rerank`.
pub(super) fn is_logit_score(model: &Description) -> bool {
    let is_qwen3 = || model.classes().next() == Some("Qwen3ForCausalLM");
    model.has_module(LOGIT_SCORE) || (is_qwen3() && !model.has_pooling())
}

impl PairPrompts {
    /// Reads how a model makes prompts, and the tokens of its score.
    ///
    /// # Errors
    /// As [`PairPrompts::of_files`], and [`LoadError::Unsupported`] for a token that the tokenizer or the network does not
    /// have.
    pub fn read(
        spec: &LoadSpec,
        files: &ModelFiles,
        tokenizer: &TextTokenizer,
    ) -> Result<(Self, ScoreTokens), LoadError> {
        let (prompts, tokens) = Self::of_files(spec, files)?;
        let id_of = |token: &str| {
            let missing = || {
                spec.unsupported(format!(
                    "its tokenizer has no token {token:?}, whose logit would be the score"
                ))
            };
            tokenizer.id_of_token(token).ok_or_else(missing)
        };
        let tokens = match tokens {
            Some(tokens) => tokens,
            None => ScoreTokens { yes: id_of("yes")?, no: Some(id_of("no")?) },
        };
        let vocabulary = tokenizer.vocabulary();
        match std::iter::once(tokens.yes).chain(tokens.no).find(|id| *id >= vocabulary) {
            Some(id) => Err(spec.unsupported(format!(
                "the token whose logit is the score has the id {id}, but the network has only {vocabulary} tokens"
            ))),
            None => Ok((prompts, tokens)),
        }
    }

    /// Reads how a model makes prompts, and the tokens of its score if its files name them; otherwise they are `yes` and
    /// `no`.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] naming the property that is not supported, [`LoadError::File`] for an invalid file.
    pub fn of_files(spec: &LoadSpec, files: &ModelFiles) -> Result<(Self, Option<ScoreTokens>), LoadError> {
        let modules: Vec<Module> = files.json(MODULES)?.unwrap_or_default();
        let kinds: Vec<&str> = modules.iter().map(Module::kind).collect();
        match *kinds {
            // Without modules.json: the files that Qwen published.
            [] => {
                let instruction = Some(QWEN3_INSTRUCTION.to_owned());
                Ok((Self { template: Template::Qwen3, instruction }, None))
            }
            ["Transformer", LOGIT_SCORE] => {
                let config: ModuleConfig =
                    files.required_json(&format!("{}/config.json", modules[1].path))?;
                if let Some(name) = config.module_input_name.filter(|name| name != "causal_logits") {
                    let reason = format!("module_input_name is {name:?}; causal_logits is supported");
                    return Err(spec.unsupported(reason));
                }
                let unknown = "modality_config in sentence_bert_config.json has no message, so pairs are not rendered \
                               by a chat template";
                let prompts = Self::of_chat_model(spec, files)?;
                let prompts = prompts.ok_or_else(|| spec.unsupported(unknown))?;
                Ok((prompts, Some(ScoreTokens { yes: config.true_token_id, no: config.false_token_id })))
            }
            _ => {
                let kinds = kinds.join(", ");
                Err(spec.unsupported(format!(
                    "{MODULES} has the modules {kinds}; Transformer, {LOGIT_SCORE} are supported"
                )))
            }
        }
    }

    /// Reads the prompts of a model that renders pairs by its chat template. None if its settings do not say that it
    /// does.
    ///
    /// # Errors
    /// As [`PairPrompts::read`].
    pub fn of_chat_model(spec: &LoadSpec, files: &ModelFiles) -> Result<Option<Self>, LoadError> {
        let mut config = SentenceSettings::template_config(files)?;
        if !config.modality_config.contains_key("message") {
            return Ok(None);
        }
        let variables = config.processing_kwargs.remove("chat_template").unwrap_or_default();
        if let Some((name, settings)) = config.processing_kwargs.iter().find(|(_, it)| !it.is_empty()) {
            let keys: Vec<&str> = settings.keys().map(String::as_str).collect();
            let keys = keys.join(", ");
            return Err(
                spec.unsupported(format!("processing_kwargs.{name} has {keys}, which is not supported"))
            );
        }
        let reserved =
            ["truncation", "max_length", "padding", "restore_suffix", "messages", "documents", "tools"];
        if let Some(name) = variables.keys().find(|name| reserved.contains(&name.as_str())) {
            return Err(spec
                .unsupported(format!("processing_kwargs.chat_template has {name}, which is not supported")));
        }
        let template = pair_template(files, variables)?.map_err(|reason| spec.unsupported(reason))?;
        let prompts = SentenceSettings::prompts(files, &spec.source)?;
        let instruction = prompts.default().to_owned();
        Ok(Some(Self {
            template: Template::OfModel(Box::new(template)),
            instruction: (!instruction.is_empty()).then_some(instruction),
        }))
    }

    /// Whether the prompts can have an instruction.
    pub fn takes_instruction(&self) -> bool {
        match &self.template {
            Template::OfModel(template) => template.takes_instruction(),
            Template::Qwen3 => true,
        }
    }

    /// The tokens of a pair. A prompt that is too long is cut before the suffix that all prompts of a task have in common,
    /// which `suffix` keeps for the next one.
    ///
    /// # Errors
    /// `BadInput` if the template refuses the pair, `Internal` if the tokenizer fails.
    pub fn tokens(
        &self,
        tokenizer: &TextTokenizer,
        instruction: Option<&str>,
        query: &str,
        document: &str,
        suffix: &OnceLock<Vec<u32>>,
    ) -> Result<Tokens, TaskError> {
        let ids_of = |query, document| tokenizer.pieces(&self.render(instruction, query, document)?);
        let (mut ids, max) = (ids_of(query, document)?, tokenizer.max_tokens());
        if ids.is_empty() {
            return Err(no_tokens());
        }
        let truncated = ids.len() > max;
        if truncated {
            let suffix = match suffix.get() {
                Some(suffix) => suffix,
                None => {
                    let found = common_suffix(ids_of("0", "0")?, &ids_of("1 2 3 4", "1 2 3 4")?, max);
                    suffix.get_or_init(|| found)
                }
            };
            ids.truncate(max - suffix.len());
            ids.extend_from_slice(suffix);
        }
        Ok(Tokens { second: ids.len(), ids, truncated, unpooled: 0 })
    }

    fn render(&self, instruction: Option<&str>, query: &str, document: &str) -> Result<String, TaskError> {
        let instruction = instruction.or(self.instruction.as_deref());
        match &self.template {
            Template::OfModel(template) => template.render(instruction, query, document),
            Template::Qwen3 => {
                let instruction = instruction.unwrap_or_default();
                Ok(format!(
                    "{QWEN3_PREFIX}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}{QWEN3_SUFFIX}"
                ))
            }
        }
    }
}

/// The last tokens that two prompts have in common, at most `max`: those of all prompts. If one of the two is wholly a suffix
/// of the other, it also holds tokens of the texts, and the result is empty.
fn common_suffix(mut short: Vec<u32>, long: &[u32], max: usize) -> Vec<u32> {
    let same = short.iter().rev().zip(long.iter().rev()).take_while(|(a, b)| a == b).count();
    let count = if same < short.len().min(long.len()) { same.min(max) } else { 0 };
    short.split_off(short.len() - count)
}
