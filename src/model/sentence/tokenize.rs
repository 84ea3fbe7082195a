//! From texts and token ids to the ids of a forward pass. Decides where a text is cut and which special tokens
//! are added, as sentence-transformers does.

use std::borrow::Cow;
use std::path::PathBuf;

use tokenizers::normalizers::{Lowercase, NormalizerWrapper, Sequence};
use tokenizers::{Tokenizer, TruncationParams};

use super::fast_word_piece::FastWordPiece;
use super::settings::SentenceSettings;
use crate::model::LoadError;
use crate::model::source;
use crate::protocol::{TaskError, TaskErrorKind};

/// A model's tokenizer and its limits.
pub struct TextTokenizer {
    tokenizer: Tokenizer,
    plain: Option<FastWordPiece>,
    /// The special tokens before and after each text.
    around: (Vec<u32>, Vec<u32>),
    /// Token ids are below this number.
    vocabulary: u32,
    max_tokens: usize,
    prompt: String,
}

impl TextTokenizer {
    /// Reads `tokenizer.json`. Its truncation and padding are replaced, since published files have those of the
    /// training. `max_tokens` and `vocabulary` are the network's.
    ///
    /// # Errors
    /// [`LoadError::File`] if the file is not a tokenizer, or the limit leaves no room for text.
    pub fn read(
        path: PathBuf,
        settings: &SentenceSettings,
        max_tokens: usize,
        vocabulary: usize,
    ) -> Result<Self, LoadError> {
        let bytes = source::read(&path)?;
        let fault = |reason: String| LoadError::File { path: path.clone(), reason };
        let of_library = |error: tokenizers::Error| fault(error.to_string());
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(of_library)?;
        if settings.lower_case {
            let mut steps = vec![NormalizerWrapper::Lowercase(Lowercase)];
            steps.extend(tokenizer.get_normalizer().cloned());
            tokenizer.with_normalizer(Some(Sequence::new(steps))).map_err(of_library)?;
        }
        tokenizer.with_padding(None).with_truncation(None).map_err(of_library)?;
        let sample = tokenizer.encode("a", true).map_err(of_library)?;
        let around = around(sample.get_ids(), sample.get_special_tokens_mask());
        let max_tokens = settings.max_tokens.unwrap_or(max_tokens).min(max_tokens);
        if max_tokens <= around.0.len() + around.1.len() {
            return Err(fault(format!("no text fits into {max_tokens} tokens")));
        }
        let truncation = TruncationParams { max_length: max_tokens, ..Default::default() };
        tokenizer.with_truncation(Some(truncation)).map_err(of_library)?;
        let vocabulary = u32::try_from(vocabulary).unwrap_or(u32::MAX);
        let prompt = settings.prompt.clone();
        let plain = FastWordPiece::of(&tokenizer);
        Ok(Self { tokenizer, plain, around, vocabulary, max_tokens, prompt })
    }

    /// The most tokens of a text without special tokens.
    pub fn room(&self) -> usize {
        self.max_tokens - self.around.0.len() - self.around.1.len()
    }

    /// Token ids are below this number.
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    /// The ids of the prompt and the text, cut to the limit.
    ///
    /// # Errors
    /// `Internal` if the tokenizer fails, or gives an id outside the vocabulary.
    pub fn text(&self, text: &str) -> Result<Vec<u32>, TaskError> {
        let internal = |reason: String| TaskError::new(TaskErrorKind::Internal, reason);
        let text = match self.prompt.as_str() {
            "" => Cow::Borrowed(text),
            prompt => Cow::Owned(format!("{prompt}{text}")),
        };
        let (before, behind) = &self.around;
        let most = self.max_tokens - before.len() - behind.len();
        let plain = self.plain.as_ref().and_then(|plain| plain.ids(&self.tokenizer, &text, most));
        let ids = match plain {
            Some(ids) => [before, &*ids, behind].concat(),
            None => {
                let encoding = self.tokenizer.encode_fast(text, true);
                let failed = |error| internal(format!("the tokenizer failed: {error}"));
                encoding.map_err(failed)?.get_ids().to_vec()
            }
        };
        if ids.is_empty() {
            return Err(internal("the tokenizer made no tokens of the text".into()));
        }
        match ids.iter().find(|id| **id >= self.vocabulary) {
            Some(id) => Err(internal(format!("the tokenizer gave {id}, of {}", self.vocabulary))),
            None => Ok(ids),
        }
    }

    /// Checks given token ids, and adds the special tokens unless they are there.
    ///
    /// # Errors
    /// `BadInput` naming `path` if an id is unknown or there are too many; given ids are never cut.
    pub fn ids(&self, ids: Vec<u32>, path: &str) -> Result<Vec<u32>, TaskError> {
        if let Some(id) = ids.iter().find(|id| **id >= self.vocabulary) {
            let known = self.vocabulary;
            let message = format!("{path} holds the token id {id}; this model has ids below {known}");
            return Err(TaskError::bad_input(path, message));
        }
        let given = ids.len();
        let (before, behind) = &self.around;
        let complete =
            given >= before.len() + behind.len() && ids.starts_with(before) && ids.ends_with(behind);
        let ids = if complete { ids } else { [before, &*ids, behind].concat() };
        if ids.len() > self.max_tokens {
            let (total, most) = (ids.len(), self.max_tokens);
            let with = if complete { String::new() } else { format!(" ({total} with special tokens)") };
            let message = format!("{path} holds {given} token ids{with}; this model takes at most {most}");
            return Err(TaskError::bad_input(path, message));
        }
        Ok(ids)
    }
}

/// The special tokens at the two ends of an encoded text.
fn around(ids: &[u32], special: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let before = special.iter().take_while(|mark| **mark == 1).count();
    let behind = special[before..].iter().rev().take_while(|mark| **mark == 1).count();
    (ids[..before].to_vec(), ids[ids.len() - behind..].to_vec())
}
