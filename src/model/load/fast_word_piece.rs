//! Tokenises the ASCII words of a text by BERT's WordPiece. The ids equal those of the tokenizers library, and take a
//! tenth of its time, since the library also records the origin of each character. Decides which tokenizers, texts and
//! words are handled here; the library handles the others.

use tokenizers::models::wordpiece::WordPiece;
use tokenizers::{Model as _, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer};

use super::long_text::{Side, ids_of};

/// The ASCII characters between words.
const BLANKS: [char; 4] = [' ', '\t', '\n', '\r'];

/// The properties of a tokenizer that tokenising needs.
pub(super) struct FastWordPiece {
    lowercase: bool,
    /// The prefix of pieces that continue a word.
    prefix: String,
    /// The id of words that have no pieces in the vocabulary.
    unknown: u32,
    /// The largest number of letters in a word; a longer word is unknown.
    max_letters: usize,
    /// The special tokens, which the library also finds inside texts.
    special_tokens: Vec<String>,
}

impl FastWordPiece {
    /// Reads the properties. None if the tokenizer is of another kind.
    pub(super) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let NormalizerWrapper::BertNormalizer(normalizer) = tokenizer.get_normalizer()? else { return None };
        let PreTokenizerWrapper::BertPreTokenizer(_) = tokenizer.get_pre_tokenizer()? else { return None };
        let model = model_of(tokenizer)?;
        let added = tokenizer.get_added_tokens_decoder();
        if !normalizer.clean_text || added.values().any(|token| token.normalized || token.content.is_empty())
        {
            return None;
        }
        Some(Self {
            lowercase: normalizer.lowercase,
            prefix: model.continuing_subword_prefix.clone(),
            unknown: model.token_to_id(&model.unk_token)?,
            max_letters: model.max_input_chars_per_word,
            special_tokens: added.into_values().map(|token| token.content).collect(),
        })
    }

    /// The ids of `text` without special tokens, at most `max_ids`. None if the library must tokenise the whole text.
    /// `tokenizer` must be the one that was passed to [`new`](Self::new).
    pub(super) fn ids(&self, tokenizer: &Tokenizer, text: &str, max_ids: usize) -> Option<Vec<u32>> {
        let model = model_of(tokenizer)?;
        if self.special_tokens.iter().any(|token| text.contains(token)) {
            return None;
        }
        let (mut ids, mut rest) = (Vec::with_capacity(max_ids.min(text.len() / 2)), text);
        while !rest.is_empty() && ids.len() < max_ids {
            // BERT tokenises each word independently of its neighbours.
            let (ascii, after) = rest.split_at(length_of_words(rest, true));
            self.add_words(model, ascii, &mut ids, max_ids);
            let (foreign, after) = after.split_at(length_of_words(after, false));
            if !foreign.is_empty() && ids.len() < max_ids {
                let encode =
                    |text: &str| tokenizer.encode_fast(text, false).map(|encoded| encoded.get_ids().to_vec());
                let foreign = ids_of(foreign, max_ids - ids.len(), Side::Beginning, encode);
                ids.extend(foreign.ok()?.ids);
            }
            rest = after;
        }
        ids.truncate(max_ids);
        Some(ids)
    }

    /// Adds the pieces of an ASCII text, until there are `max_ids` ids.
    fn add_words(&self, model: &WordPiece, text: &str, ids: &mut Vec<u32>, max_ids: usize) {
        let mut word = String::new();
        for letter in text.chars() {
            match letter {
                _ if BLANKS.contains(&letter) => self.add_pieces(model, &mut word, ids),
                // The library removes control characters, and joins the text on both sides.
                _ if letter.is_ascii_control() => {}
                _ if letter.is_ascii_punctuation() => {
                    self.add_pieces(model, &mut word, ids);
                    word.push(letter);
                    self.add_pieces(model, &mut word, ids);
                }
                _ if self.lowercase => word.push(letter.to_ascii_lowercase()),
                _ => word.push(letter),
            }
            if ids.len() >= max_ids {
                return;
            }
        }
        self.add_pieces(model, &mut word, ids);
    }

    /// Adds the pieces of `word`, each as long as possible, and empties it.
    fn add_pieces(&self, model: &WordPiece, word: &mut String, ids: &mut Vec<u32>) {
        let before = ids.len();
        let mut known = word.len() <= self.max_letters;
        // The first piece has no prefix; further ones have one.
        let mut prefix = 0;
        while known && word.len() > prefix {
            let piece = |end: &usize| model.token_to_id(&word[..*end]).map(|id| (id, *end));
            let found = (prefix + 1..=word.len()).rev().find_map(|end| piece(&end));
            known = found.is_some();
            if let Some((id, end)) = found {
                ids.push(id);
                word.replace_range(..end, &self.prefix);
                prefix = self.prefix.len();
            }
        }
        if !known {
            ids.truncate(before);
            ids.push(self.unknown);
        }
        word.clear();
    }
}

/// Returns the length in bytes of the run of words at the beginning of `text` that are ASCII, or not ASCII if
/// `is_ascii` is false.
fn length_of_words(text: &str, is_ascii: bool) -> usize {
    let words = text.split_inclusive(BLANKS);
    words.take_while(|word| word.is_ascii() == is_ascii).map(str::len).sum()
}

fn model_of(tokenizer: &Tokenizer) -> Option<&WordPiece> {
    match tokenizer.get_model() {
        ModelWrapper::WordPiece(model) => Some(model),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tokenizer(name: &str) -> Tokenizer {
        let path = format!("{}/tests/fixtures/{name}/tokenizer.json", env!("CARGO_MANIFEST_DIR"));
        let mut tokenizer = Tokenizer::from_file(path).unwrap();
        tokenizer.with_padding(None).with_truncation(None).unwrap();
        tokenizer
    }

    fn ids(tokenizer: &Tokenizer, text: &str) -> Option<Vec<u32>> {
        FastWordPiece::new(tokenizer).unwrap().ids(tokenizer, text, usize::MAX)
    }

    #[test]
    fn other_tokenizers_and_texts_with_special_tokens_are_left_to_the_library() {
        let bert = tokenizer("tiny-bert-cls");
        assert!(ids(&bert, "plain").is_some());
        assert_eq!(ids(&bert, "a [SEP] b"), None);
        for other in ["tiny-roberta", "tiny-xlm-roberta"] {
            assert!(FastWordPiece::new(&tokenizer(other)).is_none(), "{other}");
        }
    }

    #[test]
    fn a_text_is_cut_after_the_last_piece_that_fits() {
        let bert = tokenizer("tiny-bert-cls");
        let whole = ids(&bert, "unbelievable things, again").unwrap();
        for max_ids in 0..whole.len() {
            let cut = FastWordPiece::new(&bert).unwrap().ids(&bert, "unbelievable things, again", max_ids);
            assert_eq!(cut.unwrap(), whole[..max_ids]);
        }
    }

    proptest! {
        #[test]
        fn any_text_gets_the_librarys_ids(
            text in "[ -~]{0,80}|[a-eE-H .,'\t\n\u{0}\u{1}\u{b}\u{7f}]{0,80}|[a-z]{95,105}|\\PC{0,40}\
                |([a-d]{1,3}|[éßΣ中。’\u{301}\u{a0}\u{2003}\u{200d}]{1,2}|[ \n\r\u{c}]){0,30}",
            cased in any::<bool>(),
        ) {
            let mut bert = tokenizer("tiny-bert-cls");
            if cased {
                let cased = tokenizers::normalizers::BertNormalizer::new(true, true, None, false);
                bert.with_normalizer(Some(cased)).unwrap();
            }
            let library = bert.encode(text.as_str(), false).unwrap();
            if let Some(own) = ids(&bert, &text) {
                prop_assert_eq!(own, library.get_ids());
            }
        }
    }
}
