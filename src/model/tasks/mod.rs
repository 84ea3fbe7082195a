//! Kinds of requests: each file has the processor of one kind, and loads a network for it. The bodies are read
//! and written by `protocol`, the networks are in `nets`.

pub mod embed;
pub mod generate;
pub mod image;
pub mod labels;
mod names;
pub mod pairs;
mod sentence_settings;

use rayon::prelude::*;

use self::sentence_settings::SentenceSettings;
use super::load::ModelFiles;
use super::load::tokenizer::{TextLimits, TextTokenizer, Tokens};
use super::nets::text::config::NetworkConfig;
use super::nets::text::{Output, TextNetwork};
use super::{Device, LoadError, LoadSpec, SizedInput, TaskError};
use crate::protocol::Body;

/// From this number on, texts are divided among the threads of the caller's pool.
const MANY_TEXTS: usize = 64;

/// The digest of all files that the model `source` is loaded from, by [`ModelFiles::digest`]. It stays the same
/// when a folder is copied or other files are added. A hub model that is not in the cache is downloaded.
///
/// # Errors
/// As the tasks' `load`, for a file that is missing or invalid.
pub fn digest(source: &str) -> Result<String, LoadError> {
    let files = ModelFiles::locate(source)?;
    if files.gguf().is_some() {
        return files.digest();
    }
    files.required("config.json")?;
    SentenceSettings::find(&files)?;
    files.optional("tokenizer.json")?;
    files.optional("preprocessor_config.json")?;
    files.weights()?;
    files.digest()
}

/// A network for texts with its tokenizer.
fn text_model(
    (spec, device): (&LoadSpec, &Device),
    (files, config): (&ModelFiles, &NetworkConfig),
    limits: TextLimits,
    output: &Output,
) -> Result<(TextTokenizer, TextNetwork), LoadError> {
    let path = files.required("tokenizer.json")?;
    let tokenizer = TextTokenizer::read(path, limits, config.max_tokens(), config.vocabulary)?;
    let network = TextNetwork::load((spec, device), files, config, &tokenizer, output)?;
    Ok((tokenizer, network))
}

/// Prepares each item, with its index; `many` items are shared among the threads of the caller's pool.
fn prepared<T: Send, O: Send>(
    items: Vec<T>,
    many: usize,
    prepare: impl Fn(usize, T) -> Result<O, TaskError> + Sync,
) -> Result<Vec<O>, TaskError> {
    // Outside a pool rayon would use its global threads, which may be computing for long.
    if items.len() < many || rayon::current_thread_index().is_none() {
        return items.into_iter().enumerate().map(|(index, item)| prepare(index, item)).collect();
    }
    let shared = items.into_par_iter().enumerate().with_min_len((many / 4).max(1));
    // All are prepared before the check, so that the error is that of the first failing item.
    let all: Vec<_> = shared.map(|(index, item)| prepare(index, item)).collect();
    all.into_iter().collect()
}

/// An input of a text network. Texts that are too long are refused unless they may be cut.
fn sized(
    tokens: Tokens,
    truncate: bool,
    path: impl FnOnce() -> String,
    most: usize,
) -> Result<SizedInput<Tokens>, TaskError> {
    if tokens.truncated && !truncate {
        let path = path();
        let message = format!(
            "{path} is too long: this model takes at most {most} tokens, special ones included, and truncate is false"
        );
        return Err(TaskError::bad_input(path, message));
    }
    let size = tokens.ids.len();
    Ok(SizedInput::new(tokens, size))
}

/// What a text reply's usage and headers say of its inputs.
#[derive(Clone, Copy, Debug)]
struct InputCounts {
    tokens: usize,
    truncated: usize,
}

impl InputCounts {
    fn of(inputs: &[SizedInput<Tokens>]) -> Self {
        Self {
            tokens: inputs.iter().map(|sized| sized.tokens).sum(),
            truncated: inputs.iter().filter(|sized| sized.input.truncated).count(),
        }
    }

    /// A body of JSON with the header `truncated`, if any input was cut.
    fn body(self, json: Vec<u8>) -> Body {
        let body = Body::json(json);
        if self.truncated == 0 { body } else { body.header("truncated", self.truncated as i64) }
    }
}
