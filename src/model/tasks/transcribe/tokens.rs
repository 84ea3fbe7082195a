//! Whisper's special tokens, and the settings in `generation_config.json` that restrict the tokens of a text. Decides
//! which languages a model knows, and what the tokens of a preceding text may be.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;

use super::request::SpeechTask;
use super::rules::Rules;
use crate::model::load::ModelFiles;
use crate::model::load::long_text::Side;
use crate::model::load::vocabulary::{TokenLimit, TokenTexts, Vocabulary};
use crate::model::nets::whisper::config::WhisperConfig;
use crate::model::{LoadError, TaskError};
use crate::protocol::shorten;

/// A model whose settings lack `is_multilingual` is taken for multilingual if it has at least this many tokens. A model
/// of English only has fewer.
const MULTILINGUAL_TOKENS: usize = 51_865;
/// The latest time with which a text may begin, in steps of 0.02 s from the beginning of its window, if the settings
/// lack `max_initial_timestamp_index`.
const MAX_INITIAL_TIMESTAMP: u32 = 50;
/// Special tokens that are never written, whatever the settings say.
const NEVER: [&str; 7] =
    [START, "<|translate|>", "<|transcribe|>", "<|startoflm|>", PREVIOUS, "<|nospeech|>", "<|nocaptions|>"];
const START: &str = "<|startoftranscript|>";
const PREVIOUS: &str = "<|startofprev|>";

/// Whisper's special tokens, and the rules of decoding.
pub struct SpecialTokens {
    vocabulary: Vocabulary,
    /// `<|startoftranscript|>`, which precedes the tokens of the language and the task, and then the text.
    pub start: u32,
    /// The token that introduces a preceding text.
    previous: u32,
    /// The token whose probability after `start` is the probability of no speech; none for models without it.
    pub no_speech: Option<u32>,
    /// None for a model of English only.
    pub multilingual: Option<Multilingual>,
    /// Which tokens may follow which.
    pub rules: Rules,
    /// The maximum number of tokens of a preceding text.
    max_previous: usize,
}

/// The tokens that only a model of several languages has.
#[derive(Clone, Debug)]
pub struct Multilingual {
    /// The tokens of the languages, by their codes.
    pub languages: Arc<BTreeMap<String, u32>>,
    transcribe: u32,
    translate: u32,
}

/// The fields of `generation_config.json`. Models without that file have them in `config.json`.
#[derive(Default, Deserialize)]
pub(super) struct Settings {
    suppress_tokens: Option<Vec<i64>>,
    begin_suppress_tokens: Option<Vec<i64>>,
    is_multilingual: Option<bool>,
    max_initial_timestamp_index: Option<u32>,
}

impl Settings {
    /// Reads them.
    ///
    /// # Errors
    /// [`LoadError::File`] for a file that is missing or broken.
    pub(super) fn read(files: &ModelFiles) -> Result<Self, LoadError> {
        match files.json("generation_config.json")? {
            Some(settings) => Ok(settings),
            None => files.required_json("config.json"),
        }
    }

    /// Whether the model knows more languages than English.
    pub(super) fn is_multilingual(&self, config: &WhisperConfig) -> bool {
        self.is_multilingual.unwrap_or(config.vocabulary >= MULTILINGUAL_TOKENS)
    }
}

impl SpecialTokens {
    /// Reads `tokenizer.json` and the files beside it.
    ///
    /// # Errors
    /// [`LoadError::File`] for a file that is missing or broken, or a token that is missing.
    pub fn read(files: &ModelFiles, config: &WhisperConfig) -> Result<Self, LoadError> {
        let vocabulary = Vocabulary::from_files(files, config.vocabulary)?;
        let path = files.required("tokenizer.json")?;
        let invalid = |reason: String| LoadError::File { path: path.clone(), reason };
        let is_known = |id: &u32| (*id as usize) < config.vocabulary;
        let required = |name: &str| {
            let id = vocabulary.id(name).filter(is_known);
            id.ok_or_else(|| invalid(format!("it has no token {name} within the model's vocabulary")))
        };
        let settings = Settings::read(files)?;
        let end = required("<|endoftext|>")?;
        let first_time = required("<|notimestamps|>")? + 1;
        // Times follow all other tokens. They are not looked up by name, because older files do not list them.
        if first_time as usize >= config.vocabulary {
            let vocabulary = config.vocabulary;
            return Err(invalid(format!("its times begin at {first_time}, and vocab_size is {vocabulary}")));
        }
        if end >= first_time {
            return Err(invalid(format!(
                "<|endoftext|> is {end}; it must be less than {first_time}, the first time"
            )));
        }
        let known_ids = |ids: Option<Vec<i64>>| -> Vec<u32> {
            let ids = ids.unwrap_or_default().into_iter();
            ids.filter_map(|id| u32::try_from(id).ok()).filter(is_known).collect()
        };
        let is_multilingual = settings.is_multilingual(config);
        let mut suppressed = known_ids(settings.suppress_tokens);
        suppressed.extend(NEVER.iter().filter_map(|name| vocabulary.id(name)).filter(is_known));
        let no_timestamps = first_time - 1;
        suppressed.push(no_timestamps);
        let (start, previous) = (required(START)?, required(PREVIOUS)?);
        let multilingual = if is_multilingual {
            let (translate, transcribe) = (required("<|translate|>")?, required("<|transcribe|>")?);
            Some(Multilingual {
                languages: languages(&vocabulary, start..translate).into(),
                transcribe,
                translate,
            })
        } else {
            None
        };
        let no_speech = ["<|nospeech|>", "<|nocaptions|>"].iter().find_map(|name| vocabulary.id(name));
        Ok(Self {
            start,
            previous,
            no_speech: no_speech.filter(is_known),
            multilingual,
            rules: Rules {
                suppressed,
                suppressed_first: known_ids(settings.begin_suppress_tokens),
                end,
                first_time,
                last_initial: first_time
                    + settings.max_initial_timestamp_index.unwrap_or(MAX_INITIAL_TIMESTAMP),
            },
            // As in openai/whisper: half of the context, less the token that introduces the text.
            max_previous: (config.context / 2).saturating_sub(1),
            vocabulary,
        })
    }

    /// The bytes of each token.
    pub fn texts(&self) -> TokenTexts {
        self.vocabulary.texts()
    }

    /// Returns the token that introduces a preceding text, and then the tokens of a request's keywords and of its
    /// prompt. Returns no tokens if both are empty. If there is a prompt, the keywords may fill half of the room, and
    /// the prompt the rest. If keywords are too long, their first tokens are kept. If a prompt is too long, its last
    /// tokens are kept.
    ///
    /// # Errors
    /// `BadInput` if one of them holds a special token, which could command the model.
    pub fn previous_text(&self, keywords: &[String], prompt: Option<&str>) -> Result<Vec<u32>, TaskError> {
        let keywords: Vec<&str> = keywords.iter().map(|it| it.trim()).filter(|it| !it.is_empty()).collect();
        let prompt = prompt.unwrap_or_default().trim();
        let room = if prompt.is_empty() { self.max_previous } else { self.max_previous / 2 };
        let mut ids = self.text_ids("keywords", &keywords.join(", "), room, Side::Beginning)?;
        ids.truncate(room);
        let room = self.max_previous - ids.len();
        let prompt_ids = self.text_ids("prompt", prompt, room, Side::End)?;
        ids.extend_from_slice(&prompt_ids[prompt_ids.len().saturating_sub(room)..]);
        if !ids.is_empty() {
            ids.insert(0, self.previous);
        }
        Ok(ids)
    }

    /// The tokens of the text in the request's `field`. The caller keeps at most `room` of them, from one side. A long
    /// text may therefore be tokenised only at that side, to at least `room` tokens.
    fn text_ids(&self, field: &str, text: &str, room: usize, side: Side) -> Result<Vec<u32>, TaskError> {
        if text.is_empty() || room == 0 {
            return Ok(Vec::new());
        }
        let ids =
            self.vocabulary.conversation(&format!(" {text}"), TokenLimit { max_tokens: room, side })?.ids;
        if ids.iter().any(|id| !self.rules.is_text(*id)) {
            let message = format!("{field} holds a special token of the model, got {:?}", shorten(text, 40));
            return Err(TaskError::bad_input(field, message));
        }
        Ok(ids)
    }

    /// The token of the task; none for a model of English only.
    ///
    /// # Errors
    /// `BadInput` if a model of English only is asked to translate.
    pub fn task(&self, task: SpeechTask) -> Result<Option<u32>, TaskError> {
        match (&self.multilingual, task) {
            (Some(tokens), SpeechTask::Transcribe) => Ok(Some(tokens.transcribe)),
            (Some(tokens), SpeechTask::Translate) => Ok(Some(tokens.translate)),
            (None, SpeechTask::Transcribe) => Ok(None),
            (None, SpeechTask::Translate) => {
                let message = "task is \"translate\"; this model knows English only, and transcribes it";
                Err(TaskError::bad_input("task", message))
            }
        }
    }

    /// The token of a requested language; none if it is to be detected, or is the only one.
    ///
    /// # Errors
    /// `BadInput` if the model does not know it.
    pub fn language(&self, code: Option<&str>) -> Result<Option<u32>, TaskError> {
        let Some(code) = code else { return Ok(None) };
        let known = match &self.multilingual {
            None if code == ENGLISH => return Ok(None),
            None => "English only (\"en\")".to_owned(),
            Some(tokens) => match tokens.languages.get(code) {
                Some(id) => return Ok(Some(*id)),
                None => tokens.languages.keys().cloned().collect::<Vec<_>>().join(", "),
            },
        };
        Err(TaskError::bad_input("language", format!("language is {code:?}; this model knows {known}")))
    }

    /// The code of a language's token. For a model of English only, which has no such tokens, it is always `en`.
    pub fn code(&self, language: Option<u32>) -> Option<String> {
        let Some(tokens) = &self.multilingual else { return Some(ENGLISH.to_owned()) };
        let found = tokens.languages.iter().find(|(_, id)| Some(**id) == language);
        found.map(|(code, _)| code.clone())
    }
}

/// The code of English.
const ENGLISH: &str = "en";

/// The tokens of the languages by their codes. They lie between `<|startoftranscript|>` and `<|translate|>`.
fn languages(vocabulary: &Vocabulary, ids: std::ops::Range<u32>) -> BTreeMap<String, u32> {
    let code = |id: u32| {
        let name = vocabulary.name(id)?;
        let code = name.strip_prefix("<|")?.strip_suffix("|>")?;
        Some((code.to_owned(), id))
    };
    ids.skip(1).filter_map(code).collect()
}
