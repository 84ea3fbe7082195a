//! Turns texts and token ids into the ids of a forward pass. Decides where a text is cut and which special tokens are
//! added, as sentence-transformers does.

use std::path::{Path, PathBuf};

use tokenizers::normalizers::{Lowercase, NormalizerWrapper, Sequence};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{
    Decoder as _, Encoding, ModelWrapper, PostProcessor as _, PostProcessorWrapper, Tokenizer,
    TruncationDirection,
};

use super::fast_word_piece::FastWordPiece;
use super::long_text::{MAX_BYTES, NoIds, Side, ids_of};
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
    /// The number of ids at the beginning that are left out of the pooling: those of a prompt, if the model says so.
    /// Below the number of ids.
    pub unpooled: usize,
}

impl Tokens {
    /// The bytes of memory that they take.
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.ids)
    }

    /// Leaves the first `count` tokens out of the pooling.
    ///
    /// # Errors
    /// `BadInput` if there are no others.
    pub fn without_first(self, count: usize) -> Result<Self, TaskError> {
        if self.ids.len() <= count {
            let message = format!(
                "no token is left for the vector: the text has {} tokens with its prompt, of which the first {count} are left \
                 out as the prompt's",
                self.ids.len()
            );
            return Err(TaskError::new(TaskErrorKind::BadInput, message));
        }
        Ok(Self { unpooled: count, ..self })
    }
}

/// The tokens of a text or of a part of it, with their places in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// The tokens for the network, special ones included.
    pub tokens: Tokens,
    /// For each token the characters of the text that it stands for, `[start, end]`; none for the special tokens that are
    /// added to the text.
    pub spans: Vec<Option<[u32; 2]>>,
}

/// How a text is read that is longer than the model takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// It is cut.
    Cut,
    /// It is read in windows, each as long as the model takes.
    Windows {
        /// The number of tokens that two neighbouring windows share, which [`TextTokenizer::check_stride`] has checked.
        stride: usize,
        /// The most windows.
        max_windows: usize,
    },
}

/// A model's settings for texts, besides those of its tokenizer.
#[derive(Clone, Copy, Debug, Default)]
pub struct TextLimits {
    /// The largest number of tokens of a text, special ones included. None if the model's files have no such limit.
    pub max_tokens: Option<usize>,
    /// Whether texts are lower-cased before the tokenizer's own normalising.
    pub lower_case: bool,
    /// The part of a text that is kept if it is too long. None if only `tokenizer.json` may say it.
    pub kept: Option<Side>,
    /// What `tokenizer_config.json` sets instead of `tokenizer.json`.
    pub overrides: Overrides,
}

/// The settings of `tokenizer_config.json` that the transformers library puts in the place of those of `tokenizer.json`,
/// for some classes of tokenizers. None: those of `tokenizer.json` stay.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overrides {
    /// For tokenizers like BERT's.
    pub bert: Option<BertOverrides>,
    /// For tokenizers like RoBERTa's: whether a space is put before the text.
    pub adds_prefix_space: Option<bool>,
}

/// What BERT's normalizer does.
#[derive(Clone, Copy, Debug)]
pub struct BertOverrides {
    /// Whether it makes letters small.
    pub lower_case: bool,
    /// Whether it removes accents. None: if it makes letters small.
    pub strips_accents: Option<bool>,
    /// Whether it puts spaces around Chinese characters.
    pub splits_chinese: bool,
}

impl Overrides {
    fn apply(self, tokenizer: &mut Tokenizer) -> tokenizers::Result<()> {
        if let (Some(bert), Some(NormalizerWrapper::BertNormalizer(normalizer))) =
            (self.bert, tokenizer.get_normalizer().cloned())
        {
            let mut normalizer = normalizer;
            normalizer.lowercase = bert.lower_case;
            normalizer.strip_accents = bert.strips_accents;
            normalizer.handle_chinese_chars = bert.splits_chinese;
            tokenizer.with_normalizer(Some(normalizer))?;
        }
        if let (Some(adds), Some(PreTokenizerWrapper::ByteLevel(byte_level))) =
            (self.adds_prefix_space, tokenizer.get_pre_tokenizer().cloned())
        {
            let mut byte_level = byte_level;
            byte_level.add_prefix_space = adds;
            tokenizer.with_pre_tokenizer(Some(byte_level));
        }
        Ok(())
    }
}

/// The bytes of a text up to which its tokens are counted although more of them than fit. The library takes up to 200 bytes
/// of memory for each.
const MAX_COMPARED_BYTES: usize = 32 << 10;

/// A model's tokenizer and its limits.
pub struct TextTokenizer {
    /// Without its post-processor, which would have an effect on the places of tokens only.
    tokenizer: Tokenizer,
    /// Adds special tokens to an encoding, and with some tokenizers moves the places of tokens.
    post_processor: Option<PostProcessorWrapper>,
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
    /// The part of a text that is kept if it is too long.
    kept: Side,
}

impl TextTokenizer {
    /// Reads `tokenizer.json`. Its padding and the length of its truncation are ignored, since the file has those that
    /// were used in training. `max_tokens` and `vocabulary` are the network's.
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
        limits.overrides.apply(&mut tokenizer).map_err(library_fault)?;
        if limits.lower_case {
            let mut steps = vec![NormalizerWrapper::Lowercase(Lowercase)];
            steps.extend(tokenizer.get_normalizer().cloned());
            tokenizer.with_normalizer(Some(Sequence::new(steps))).map_err(library_fault)?;
        }
        let direction = tokenizer.get_truncation().map_or(TruncationDirection::Right, |it| it.direction);
        let kept = limits.kept.unwrap_or(match direction {
            TruncationDirection::Right => Side::Beginning,
            TruncationDirection::Left => Side::End,
        });
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
        let post_processor = tokenizer.get_post_processor().cloned();
        tokenizer.with_post_processor(None::<PostProcessorWrapper>);
        Ok(Self {
            fast: FastWordPiece::new(&tokenizer),
            tokenizer,
            post_processor,
            special: [before, after],
            pair_special: [before_pair, between, after_pair],
            has_token_types: two.get_type_ids().contains(&1),
            vocabulary: u32::try_from(vocabulary).unwrap_or(u32::MAX),
            max_tokens,
            kept,
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

    /// The token with an id, as it is in the vocabulary; empty for an id that it lacks.
    pub fn token(&self, id: u32) -> String {
        self.tokenizer.id_to_token(id).unwrap_or_default()
    }

    /// The text that the tokenizer's decoder makes of tokens, which are given as they are in the vocabulary. Without a
    /// decoder they are joined by spaces, as in the transformers library.
    ///
    /// # Errors
    /// `Internal` if the decoder fails.
    pub fn join(&self, tokens: Vec<String>) -> Result<String, TaskError> {
        match self.tokenizer.get_decoder() {
            Some(decoder) => decoder.decode(tokens).map_err(|error| no_ids(NoIds::Failed(error))),
            None => Ok(tokens.join(" ")),
        }
    }

    /// Whether tokens that continue a word begin with a prefix, such as `##`.
    pub fn has_prefix_of_continuations(&self) -> bool {
        match self.tokenizer.get_model() {
            ModelWrapper::WordPiece(model) => !model.continuing_subword_prefix.is_empty(),
            ModelWrapper::BPE(model) => {
                model.continuing_subword_prefix.as_ref().is_some_and(|prefix| !prefix.is_empty())
            }
            _ => false,
        }
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
        let ids = [before, self.cut(&pieces, self.room()), after].concat();
        if ids.is_empty() {
            return Err(no_tokens());
        }
        Ok(Tokens { second: ids.len(), ids, truncated: pieces.len() > self.room(), unpooled: 0 })
    }

    /// The number of tokens at the beginning of a text that are those of the prompt before it. They are counted as
    /// sentence-transformers does: the prompt is tokenised alone, and a special token at its end is not counted.
    ///
    /// # Errors
    /// As [`text`](Self::text).
    pub fn prompt_length(&self, prompt: &str) -> Result<usize, TaskError> {
        let ids = self.text(prompt)?.ids;
        let added = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let ends_specially = ids.last().and_then(|id| added.get(id)).is_some_and(|token| token.special);
        Ok(ids.len() - usize::from(ends_specially))
    }

    /// `count` ids of a text at the side that is kept, or all if there are fewer.
    fn cut<'a>(&self, ids: &'a [u32], count: usize) -> &'a [u32] {
        let count = count.min(ids.len());
        match self.kept {
            Side::Beginning => &ids[..count],
            Side::End => &ids[ids.len() - count..],
        }
    }

    /// Returns the ids of a text without special tokens. If the text is too long, these are its first ids, or its last
    /// ones if the model keeps those, one more than fits.
    ///
    /// # Errors
    /// `Internal` if the tokenizer fails, or gives an id outside the vocabulary.
    pub fn pieces(&self, text: &str) -> Result<Vec<u32>, TaskError> {
        // One more than fits, to know whether a text is cut.
        self.first_pieces(text, self.max_tokens + 1)
    }

    /// As [`pieces`](Self::pieces), for one of two texts: all its ids, unless it has more than
    /// [`MAX_COMPARED_BYTES`] bytes. Which of two long texts is the longer one decides where the last token is cut.
    ///
    /// # Errors
    /// As [`pieces`](Self::pieces).
    pub fn pieces_of_pair(&self, text: &str) -> Result<Vec<u32>, TaskError> {
        let is_short = text.len() <= MAX_COMPARED_BYTES;
        self.first_pieces(
            text,
            if is_short { text.len().max(self.max_tokens + 1) } else { self.max_tokens + 1 },
        )
    }

    /// At most `max_ids` ids of a text, at the side that is kept.
    fn first_pieces(&self, text: &str, max_ids: usize) -> Result<Vec<u32>, TaskError> {
        // It reads texts from their beginning.
        let fast = self.fast.as_ref().filter(|_| self.kept == Side::Beginning);
        let ids = match fast.and_then(|fast| fast.ids(&self.tokenizer, text, max_ids)) {
            Some(ids) => ids,
            None => {
                let encode = |text: &str| Ok(self.tokenizer.encode_fast(text, false)?.get_ids().to_vec());
                let ids = ids_of(text, max_ids, self.kept, encode).map_err(no_ids)?.ids;
                self.cut(&ids, max_ids).to_vec()
            }
        };
        self.check_made(&ids)?;
        Ok(ids)
    }

    /// The tokens of a text with their places in it. It is one window unless the text is longer than the model takes and
    /// `reading` is [`Reading::Windows`]. The windows and places are those of the transformers library.
    ///
    /// # Errors
    /// `TooLarge` with the numbers for more windows than `max_windows`, and for a text that is read in windows and has more
    /// bytes than are tokenised at once. `Internal` if the tokenizer fails, or gives no tokens or an id outside the
    /// vocabulary.
    pub fn windows(&self, text: &str, reading: Reading) -> Result<Vec<Window>, TaskError> {
        let room = self.room();
        let encode = |text: &str| self.tokenizer.encode_char_offsets(text, false);
        let (mut encoding, stride) = match reading {
            Reading::Cut if self.kept == Side::Beginning => {
                (ids_of(text, room + 1, self.kept, encode).map_err(no_ids)?.ids, 0)
            }
            // The places of tokens count from the beginning of the text, so that all of it is read.
            Reading::Cut if text.len() > MAX_BYTES => {
                let bytes = text.len();
                return Err(too_large(format!(
                    "the text has {bytes} bytes; at most {MAX_BYTES} are allowed, since this model keeps the ends of texts"
                )));
            }
            Reading::Cut => (encode(text).map_err(|error| no_ids(NoIds::Failed(error)))?, 0),
            Reading::Windows { stride, max_windows } => {
                if text.len() > MAX_BYTES {
                    let bytes = text.len();
                    return Err(too_large(format!(
                        "the text has {bytes} bytes; with stride at most {MAX_BYTES} are allowed"
                    )));
                }
                let encoding = encode(text).map_err(|error| no_ids(NoIds::Failed(error)))?;
                let tokens = encoding.len();
                let windows = 1 + tokens.saturating_sub(room).div_ceil(room - stride);
                if windows > max_windows {
                    return Err(too_large(format!(
                        "the text has {tokens} tokens, which are {windows} windows of {room} tokens with {stride} in common; \
                         at most {max_windows} are allowed"
                    )));
                }
                (encoding, stride)
            }
        };
        self.check_made(encoding.get_ids())?;
        let truncated = reading == Reading::Cut && encoding.len() > room;
        let direction = match self.kept {
            Side::Beginning => TruncationDirection::Right,
            Side::End => TruncationDirection::Left,
        };
        encoding.truncate(room, stride, direction);
        let mut parts = encoding.take_overflowing();
        if reading == Reading::Cut {
            parts.clear();
        }
        parts.insert(0, encoding);
        parts.into_iter().map(|part| self.window(part, truncated)).collect()
    }

    /// Refuses a number of common tokens of two windows that is not smaller than a window.
    ///
    /// # Errors
    /// `BadInput` with both numbers.
    pub fn check_stride(&self, stride: usize) -> Result<(), TaskError> {
        let room = self.room();
        if stride < room {
            return Ok(());
        }
        let message = format!(
            "stride is {stride}; it must be less than {room}, the tokens of a text that this model takes without special ones"
        );
        Err(TaskError::bad_input("stride", message))
    }

    /// Makes a window of an encoding without special tokens.
    fn window(&self, encoding: Encoding, truncated: bool) -> Result<Window, TaskError> {
        let encoding = match &self.post_processor {
            Some(processor) => {
                processor.process(encoding, None, true).map_err(|error| no_ids(NoIds::Failed(error)))?
            }
            None => encoding,
        };
        let ids = encoding.get_ids().to_vec();
        if ids.is_empty() {
            return Err(no_tokens());
        }
        let spans = encoding.get_offsets().iter().zip(encoding.get_special_tokens_mask());
        let span = |((start, end), mask): (&(usize, usize), &u32)| {
            (*mask == 0).then_some([*start as u32, *end as u32])
        };
        let spans = spans.map(span).collect();
        Ok(Window { tokens: Tokens { second: ids.len(), ids, truncated, unpooled: 0 }, spans })
    }

    /// Refuses ids of the tokenizer that are outside the network's vocabulary.
    fn check_made(&self, ids: &[u32]) -> Result<(), TaskError> {
        let Some(id) = ids.iter().find(|id| **id >= self.vocabulary) else { return Ok(()) };
        let vocabulary = self.vocabulary;
        let message = format!("the tokenizer gave the id {id}; this model has ids below {vocabulary}");
        Err(TaskError::internal(message))
    }

    /// The tokens of a pair of texts, from the [`pieces_of_pair`](Self::pieces_of_pair) of each. If both together are too long, the
    /// longer one is cut first (`longest_first`).
    pub fn pair(&self, first: &[u32], second: &[u32]) -> Tokens {
        let (a, b) = longest_first(first.len(), second.len(), self.pair_room());
        self.pair_of_first_pieces((first, a), (second, b))
    }

    /// As [`pair`](Self::pair), but only the first text is cut (`only_first`). None if the second one leaves no room for
    /// it.
    pub fn pair_with_whole_second(&self, first: &[u32], second: &[u32]) -> Option<Tokens> {
        let room = self.pair_room().checked_sub(second.len()).filter(|room| *room > 0)?;
        Some(self.pair_of_first_pieces((first, first.len().min(room)), (second, second.len())))
    }

    /// The largest number of tokens of a pair, without special tokens.
    fn pair_room(&self) -> usize {
        self.max_tokens - self.pair_special.iter().map(Vec::len).sum::<usize>()
    }

    /// The tokens of a pair of the first `a` and `b` pieces of two texts.
    fn pair_of_first_pieces(&self, (first, a): (&[u32], usize), (second, b): (&[u32], usize)) -> Tokens {
        let [before, between, after] = &self.pair_special;
        let ids = [before, self.cut(first, a), between, self.cut(second, b), after].concat();
        let start_of_second = before.len() + a + between.len();
        Tokens {
            second: if self.has_token_types { start_of_second } else { ids.len() },
            ids,
            truncated: a < first.len() || b < second.len(),
            unpooled: 0,
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
        Ok(Tokens { second: ids.len(), ids, truncated: false, unpooled: 0 })
    }
}

/// The error of a text without tokens, such as an empty one of a model that adds no special tokens.
pub fn no_tokens() -> TaskError {
    TaskError::new(TaskErrorKind::BadInput, "the text has no tokens")
}

fn too_large(message: String) -> TaskError {
    TaskError::new(TaskErrorKind::TooLarge, message)
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

    /// The tokenizer of a language of three words, with these further parts of `tokenizer.json`.
    fn of_words(parts: &serde_json::Value, limits: TextLimits) -> TextTokenizer {
        let mut json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "decoder": null,
            "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
            "added_tokens": [{"id": 2, "content": "[UNK]", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2, "c": 3}, "unk_token": "[UNK]"}
        });
        json.as_object_mut().unwrap().extend(parts.as_object().unwrap().clone());
        TextTokenizer::of_json(Path::new("it"), json.to_string().as_bytes(), limits, 4, 4).unwrap()
    }

    #[test]
    fn the_side_that_is_cut_is_the_settings_else_the_tokenizers() {
        let left = serde_json::json!({"truncation":
            {"direction": "Left", "max_length": 2, "strategy": "LongestFirst", "stride": 0}});
        let none = serde_json::json!({});
        for (file, kept, ids) in [
            (&none, None, [0, 0, 1, 1]),
            (&left, None, [1, 1, 3, 3]),
            (&left, Some(Side::Beginning), [0, 0, 1, 1]),
            (&none, Some(Side::End), [1, 1, 3, 3]),
        ] {
            let tokenizer = of_words(file, TextLimits { kept, ..TextLimits::default() });
            let tokens = tokenizer.text("a a b b c c").unwrap();
            assert_eq!((tokens.ids, tokens.truncated), (ids.to_vec(), true));
            let [first, .., last] = ids;
            let pieces = tokenizer.pieces(&format!("a {}c", "b ".repeat(40_000))).unwrap();
            assert_eq!(pieces.len(), 5);
            assert_eq!((pieces[0] == 0, pieces[4] == 3), (first == 0, last == 3), "of a long text too");
            let pair = tokenizer.pair(&[0, 0, 1], &[3, 1, 1]);
            assert_eq!(pair.ids, if first == 0 { [0, 0, 3, 1] } else { [0, 1, 1, 1] });
            let whole = tokenizer.text("c b").unwrap();
            assert_eq!((whole.ids, whole.truncated), (vec![3, 1], false));
        }
    }

    #[test]
    fn a_prompts_tokens_are_counted_without_a_special_one_at_its_end() {
        let tokenizer = of_words(&serde_json::json!({}), TextLimits::default());
        assert_eq!(tokenizer.prompt_length("a b").unwrap(), 2);
        assert_eq!(tokenizer.prompt_length("a what").unwrap(), 1, "the unknown word's token is special");
        assert_eq!(tokenizer.text("a b c").unwrap().without_first(2).unwrap().unpooled, 2);
        let error = tokenizer.text("a b").unwrap().without_first(2).unwrap_err();
        assert_eq!(error.kind, TaskErrorKind::BadInput);
        assert!(error.message.contains("2 tokens with its prompt"), "{error}");
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
        let limits = TextLimits::default();
        assert!(TextTokenizer::read(path.clone(), limits, 8, 3).is_ok());
        let error = TextTokenizer::read(path, limits, 8, 2).err().unwrap();
        assert!(matches!(error, LoadError::File { .. }));
        let message = error.to_string();
        assert!(
            message.contains("tokenizer.json") && message.contains("up to 2") && message.contains("knows 2"),
            "{message}"
        );
    }
}
