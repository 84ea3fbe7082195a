//! Turns texts and token ids into the ids of a forward pass. Decides where a text is cut and which special tokens are
//! added, as sentence-transformers does.

use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;
use tokenizers::normalizers::{Lowercase, NormalizerWrapper, Sequence};

use super::fast_word_piece::FastWordPiece;
use super::long_text::{NoIds, Side, ids_of};
use crate::model::{LoadError, TaskError, TaskErrorKind};

/// One text or pair of texts for a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Token ids with the special ones; at least one, all within the vocabulary.
    pub ids: Vec<u32>,
    /// The index at which the second text of a pair begins, for models that distinguish the two; else the number of
    /// ids.
    pub second: usize,
    /// Whether a text was cut to the model's limit.
    pub truncated: bool,
}

/// A model's settings for texts, besides those of its tokenizer.
#[derive(Clone, Copy, Debug, Default)]
pub struct TextLimits {
    /// The largest number of tokens of a text, special ones included. None if the model's files have no such limit.
    pub max_tokens: Option<usize>,
    /// Whether texts are lower-cased before the tokenizer's own normalising.
    pub lower_case: bool,
}

/// A model's tokenizer and its limits.
pub struct TextTokenizer {
    tokenizer: Tokenizer,
    fast: Option<FastWordPiece>,
    /// The special tokens before and after a text.
    special: [Vec<u32>; 2],
    /// The special tokens before, between and after two texts.
    pair_special: [Vec<u32>; 3],
    /// Whether the model has token types, which distinguish the two texts of a pair.
    has_token_types: bool,
    /// Token ids are below this number.
    vocabulary: u32,
    max_tokens: usize,
}

impl TextTokenizer {
    /// Reads `tokenizer.json`. Its truncation and padding are ignored, since the file has those that were used in
    /// training. `max_tokens` and `vocabulary` are the network's.
    ///
    /// # Errors
    /// [`LoadError::File`] if the file is not a tokenizer, or the limit leaves no room for text.
    pub fn read(
        path: PathBuf,
        limits: TextLimits,
        max_tokens: usize,
        vocabulary: usize,
    ) -> Result<Self, LoadError> {
        let bytes = super::read(&path)?;
        Self::of_json(&path, &bytes, limits, max_tokens, vocabulary)
    }

    /// As [`read`](Self::read), from the content of a `tokenizer.json`. Errors name `path`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn of_json(
        path: &Path,
        json: &[u8],
        limits: TextLimits,
        max_tokens: usize,
        vocabulary: usize,
    ) -> Result<Self, LoadError> {
        let fault = |reason: String| LoadError::File { path: path.to_owned(), reason };
        let library_fault = |error: tokenizers::Error| fault(error.to_string());
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(library_fault)?;
        if limits.lower_case {
            let mut steps = vec![NormalizerWrapper::Lowercase(Lowercase)];
            steps.extend(tokenizer.get_normalizer().cloned());
            tokenizer.with_normalizer(Some(Sequence::new(steps))).map_err(library_fault)?;
        }
        tokenizer.with_padding(None).with_truncation(None).map_err(library_fault)?;
        let one = tokenizer.encode("a", true).map_err(library_fault)?;
        let [before, after]: [Vec<u32>; 2] = special_runs(one.get_ids(), &one.get_sequence_ids());
        let two = tokenizer.encode(("a", "b"), true).map_err(library_fault)?;
        let [before_pair, between, after_pair]: [Vec<u32>; 3] =
            special_runs(two.get_ids(), &two.get_sequence_ids());
        // A larger id would be outside the network's token embeddings.
        let largest = tokenizer.get_vocab(false).into_values().chain(two.get_ids().iter().copied()).max();
        if let Some(largest) = largest.filter(|largest| *largest as usize >= vocabulary) {
            return Err(fault(format!(
                "it belongs to another model: its token ids go up to {largest}, and the network knows {vocabulary} \
                 (vocab_size)"
            )));
        }
        let max_tokens = limits.max_tokens.unwrap_or(max_tokens).min(max_tokens);
        let special_count =
            (before.len() + after.len()).max(before_pair.len() + between.len() + after_pair.len());
        if max_tokens <= special_count {
            return Err(fault(format!("no text fits into {max_tokens} tokens")));
        }
        Ok(Self {
            fast: FastWordPiece::new(&tokenizer),
            tokenizer,
            special: [before, after],
            pair_special: [before_pair, between, after_pair],
            has_token_types: two.get_type_ids().contains(&1),
            vocabulary: u32::try_from(vocabulary).unwrap_or(u32::MAX),
            max_tokens,
        })
    }

    /// The largest number of tokens of a text, without special tokens.
    pub fn room(&self) -> usize {
        self.max_tokens - self.special.iter().map(Vec::len).sum::<usize>()
    }

    /// The largest number of tokens of a text or pair, special tokens included.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// The id of a token, also of a special one.
    pub fn id_of_token(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// The text of tokens, without special ones.
    ///
    /// # Errors
    /// `Internal` if the tokenizer fails.
    #[cfg(feature = "candle-transformers")]
    pub fn decode(&self, ids: &[u32]) -> Result<String, TaskError> {
        let text = self.tokenizer.decode(ids, true);
        text.map_err(|error| TaskError::internal(format!("the tokenizer failed: {error}")))
    }

    /// Token ids are below this number.
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    /// The tokens of a text, cut to the limit.
    ///
    /// # Errors
    /// `Internal` if the tokenizer fails, gives no tokens, or an id outside the vocabulary.
    pub fn text(&self, text: &str) -> Result<Tokens, TaskError> {
        let pieces = self.pieces(text)?;
        let [before, after] = &self.special;
        let ids = [before, &pieces[..pieces.len().min(self.room())], after].concat();
        if ids.is_empty() {
            return Err(TaskError::internal("the tokenizer made no tokens of the text"));
        }
        Ok(Tokens { second: ids.len(), ids, truncated: pieces.len() > self.room() })
    }

    /// Returns the ids of a text without special tokens. If the text is too long, these are its first ids, one more
    /// than fits.
    ///
    /// # Errors
    /// `Internal` if the tokenizer fails, or gives an id outside the vocabulary.
    pub fn pieces(&self, text: &str) -> Result<Vec<u32>, TaskError> {
        // One more than fits, to know whether a text is cut.
        let max_ids = self.max_tokens + 1;
        let fast = self.fast.as_ref().and_then(|fast| fast.ids(&self.tokenizer, text, max_ids));
        let ids = match fast {
            Some(ids) => ids,
            None => {
                let encode = |text: &str| Ok(self.tokenizer.encode_fast(text, false)?.get_ids().to_vec());
                let mut ids = ids_of(text, max_ids, Side::Beginning, encode).map_err(no_ids)?.ids;
                ids.truncate(max_ids);
                ids
            }
        };
        match ids.iter().find(|id| **id >= self.vocabulary) {
            Some(id) => {
                let vocabulary = self.vocabulary;
                let message =
                    format!("the tokenizer gave the id {id}; this model has ids below {vocabulary}");
                Err(TaskError::internal(message))
            }
            None => Ok(ids),
        }
    }

    /// The tokens of a pair of texts, from the [`pieces`](Self::pieces) of each. If both together are too long, the
    /// longer one is cut first (`longest_first`).
    pub fn pair(&self, first: &[u32], second: &[u32]) -> Tokens {
        let [before, between, after] = &self.pair_special;
        let room = self.max_tokens - before.len() - between.len() - after.len();
        let (a, b) = longest_first(first.len(), second.len(), room);
        let ids = [before, &first[..a], between, &second[..b], after].concat();
        let start_of_second = before.len() + a + between.len();
        Tokens {
            second: if self.has_token_types { start_of_second } else { ids.len() },
            ids,
            truncated: a < first.len() || b < second.len(),
        }
    }

    /// Checks given token ids, and adds the special tokens unless they are present.
    ///
    /// # Errors
    /// `BadInput` naming `path` if an id is unknown or there are too many; given ids are never cut.
    pub fn ids(&self, ids: Vec<u32>, path: &str) -> Result<Tokens, TaskError> {
        if let Some(id) = ids.iter().find(|id| **id >= self.vocabulary) {
            let known = self.vocabulary;
            let message = format!("{path} holds the token id {id}; this model has ids below {known}");
            return Err(TaskError::bad_input(path, message));
        }
        let given = ids.len();
        let [before, after] = &self.special;
        let complete = given >= before.len() + after.len() && ids.starts_with(before) && ids.ends_with(after);
        let ids = if complete { ids } else { [before, &*ids, after].concat() };
        if ids.len() > self.max_tokens {
            let (total, max) = (ids.len(), self.max_tokens);
            let with = if complete { String::new() } else { format!(" ({total} with special tokens)") };
            let message = format!("{path} holds {given} token ids{with}; this model takes at most {max}");
            return Err(TaskError::bad_input(path, message));
        }
        Ok(Tokens { second: ids.len(), ids, truncated: false })
    }
}

/// The error of a text whose ids are not found.
pub fn no_ids(reason: NoIds<tokenizers::Error>) -> TaskError {
    match reason {
        NoIds::Failed(error) => TaskError::internal(format!("the tokenizer failed: {error}")),
        NoIds::TooFewTokens { read, tokens } => TaskError::new(
            TaskErrorKind::BadInput,
            format!(
                "the text is longer than {read} bytes, of which only {tokens} tokens could be made; remove long runs of \
                 characters that mean nothing, such as spaces"
            ),
        ),
    }
}

/// The runs of special tokens in an encoded text or pair: before, between (of a pair) and after. `texts` has the index of
/// each token's text; none for special tokens.
fn special_runs<const RUNS: usize>(ids: &[u32], texts: &[Option<usize>]) -> [Vec<u32>; RUNS] {
    let mut runs = [const { Vec::new() }; RUNS];
    let mut run = 0;
    for (id, text) in ids.iter().zip(texts) {
        match text {
            Some(text) => run = (text + 1).min(RUNS - 1),
            None => runs[run].push(*id),
        }
    }
    runs
}

/// The numbers of tokens that are kept of two texts with `first` and `second` tokens, if `room` tokens fit.
fn longest_first(first: usize, second: usize, room: usize) -> (usize, usize) {
    if first + second <= room {
        return (first, second);
    }
    let shorter = first.min(second);
    let (short, long) =
        if shorter <= room / 2 { (shorter, room - shorter) } else { (room / 2, room - room / 2) };
    if first <= second { (short, long) } else { (long, short) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_of_two_texts_is_cut_first() {
        assert_eq!(longest_first(3, 4, 7), (3, 4));
        assert_eq!(longest_first(3, 40, 7), (3, 4));
        assert_eq!(longest_first(40, 3, 7), (4, 3));
        assert_eq!(longest_first(40, 40, 7), (3, 4));
        assert_eq!(longest_first(41, 40, 7), (4, 3));
        assert_eq!(longest_first(0, 9, 7), (0, 7));
    }

    #[test]
    fn special_tokens_are_found_before_between_and_after() {
        let (a, b) = (Some(0), Some(1));
        let texts = [None, a, a, None, None, b, None];
        let found: [Vec<u32>; 3] = special_runs(&[1, 10, 11, 2, 2, 12, 2], &texts);
        assert_eq!(found, [vec![1], vec![2, 2], vec![2]]);
        let found: [Vec<u32>; 3] = special_runs(&[10, 12], &[a, b]);
        assert!(found.iter().all(Vec::is_empty), "{found:?}");
        let found: [Vec<u32>; 3] = special_runs(&[10, 12, 2], &[a, b, None]);
        assert_eq!((&*found[1], &*found[2]), (&[][..], &[2][..]));
        let found: [Vec<u32>; 2] = special_runs(&[10, 2], &[a, None]);
        assert_eq!((found[0].len(), &*found[1]), (0, &[2][..]));
    }

    #[test]
    fn a_tokenizer_of_another_model_is_refused_and_its_file_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let model = r#"{"type":"WordLevel","vocab":{"a":0,"b":1,"[UNK]":2},"unk_token":"[UNK]"}"#;
        let file = format!(
            r#"{{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
            "pre_tokenizer":{{"type":"Whitespace"}},"post_processor":null,"decoder":null,"model":{model}}}"#
        );
        std::fs::write(&path, file).unwrap();
        let limits = || TextLimits { lower_case: false, max_tokens: None };
        assert!(TextTokenizer::read(path.clone(), limits(), 8, 3).is_ok());
        let error = TextTokenizer::read(path, limits(), 8, 2).err().unwrap();
        assert!(matches!(error, LoadError::File { .. }));
        let message = error.to_string();
        assert!(
            message.contains("tokenizer.json") && message.contains("up to 2") && message.contains("knows 2"),
            "{message}"
        );
    }
}
