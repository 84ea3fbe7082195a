//! The tokens of a model that generates text: turns texts into ids, and ids into the bytes of a text. Reads
//! `tokenizer.json` or a GGUF file. Decides which tokens end an answer, and which kinds of tokenizers are refused.

use std::collections::BTreeSet;

use serde::Deserialize;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, DecoderWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

use super::ModelFiles;
use super::chat_template::{ChatTemplates, SpecialTokens, TemplateField};
use super::gguf::Gguf;
use super::long_text::{Side, TextIds, ids_of};
use super::tokenizer::no_ids;
use crate::model::{LoadError, TaskError};

/// The files beside `tokenizer.json` that are read, if the model has them.
const CONFIGS: [&str; 3] = ["config.json", "generation_config.json", "tokenizer_config.json"];

/// A model's tokens.
pub struct Vocabulary {
    tokenizer: Tokenizer,
    /// The token that is put before each prompt that is not a conversation. For a conversation the template adds it.
    begin: Option<u32>,
    /// Tokens that end an answer.
    pub ends: BTreeSet<u32>,
    /// None if the model has no chat templates.
    pub chat: Option<ChatTemplates>,
    texts: TokenTexts,
}

/// The tokens that are kept of a prompt that is too long.
#[derive(Clone, Copy, Debug)]
pub struct TokenLimit {
    /// The largest number of tokens that fit.
    pub max_tokens: usize,
    /// The side from which they are taken.
    pub side: Side,
}

/// The bytes that each token adds to a text.
#[derive(Clone)]
pub struct TokenTexts {
    bytes: std::sync::Arc<[Box<[u8]>]>,
}

impl TokenTexts {
    /// A token's bytes; empty for special tokens.
    pub fn get(&self, id: u32) -> &[u8] {
        self.bytes.get(id as usize).map_or(&[], |bytes| bytes)
    }

    /// Tokens with these texts, for tests.
    #[cfg(test)]
    pub fn of(texts: &[impl AsRef<[u8]>]) -> Self {
        Self { bytes: texts.iter().map(|text| text.as_ref().into()).collect() }
    }
}

/// A token in `tokenizer_config.json`: its text, or an object with it.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum TokenField {
    Text(String),
    Object { content: String },
}

impl TokenField {
    pub fn text(self) -> String {
        match self {
            Self::Text(text) | Self::Object { content: text } => text,
        }
    }
}

/// `additional_special_tokens` in `tokenizer_config.json`. Only chat templates use them, so another form is ignored.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokensField {
    Tokens(Vec<TokenField>),
    Other(serde::de::IgnoredAny),
}

impl TokensField {
    /// Their texts. None if there are none.
    fn texts(self) -> Option<Vec<String>> {
        match self {
            Self::Tokens(tokens) => Some(tokens.into_iter().map(TokenField::text).collect()),
            Self::Other(_) => None,
        }
        .filter(|texts: &Vec<_>| !texts.is_empty())
    }
}

/// The fields of `tokenizer_config.json` that are used.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    bos_token: Option<TokenField>,
    eos_token: Option<TokenField>,
    pad_token: Option<TokenField>,
    unk_token: Option<TokenField>,
    sep_token: Option<TokenField>,
    cls_token: Option<TokenField>,
    mask_token: Option<TokenField>,
    additional_special_tokens: Option<TokensField>,
    chat_template: Option<TemplateField>,
}

/// One id or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

#[derive(Default, Deserialize)]
struct Ends {
    eos_token_id: Option<Ids>,
}

impl Vocabulary {
    /// Requests the files that [`from_files`](Self::from_files) reads.
    ///
    /// # Errors
    /// [`LoadError::File`] if `tokenizer.json` is missing, [`LoadError::Hub`] if the hub cannot be reached.
    pub fn request_files(files: &ModelFiles) -> Result<(), LoadError> {
        files.required("tokenizer.json")?;
        CONFIGS.iter().try_for_each(|name| files.optional(name).map(drop))?;
        ChatTemplates::request_files(files)
    }

    /// Reads `tokenizer.json` and the files beside it.
    ///
    /// # Errors
    /// [`LoadError::File`] for a file that is missing, broken or of a kind that is not supported.
    pub fn from_files(files: &ModelFiles, vocab_size: usize) -> Result<Self, LoadError> {
        let path = files.required("tokenizer.json")?;
        let fault = |reason: String| LoadError::File { path: path.clone(), reason };
        let mut tokenizer =
            Tokenizer::from_bytes(super::read(&path)?).map_err(|error| fault(error.to_string()))?;
        let configured = tokenizer.with_padding(None).with_truncation(None).map(drop);
        configured.map_err(|error| fault(error.to_string()))?;
        if !matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err(fault(
                "its decoder is not ByteLevel; no other kind is read for generation".to_owned(),
            ));
        }
        let config: TokenizerConfig = files.json("tokenizer_config.json")?.unwrap_or_default();
        let mut ends = BTreeSet::new();
        for name in ["generation_config.json", "config.json"] {
            match files.json::<Ends>(name)?.unwrap_or_default().eos_token_id {
                Some(Ids::One(id)) => _ = ends.insert(id),
                Some(Ids::Many(ids)) => ends.extend(ids),
                None => {}
            }
        }
        let end = config.eos_token.map(TokenField::text);
        ends.extend(end.as_deref().and_then(|end| tokenizer.token_to_id(end)));
        let others =
            [config.pad_token, config.unk_token, config.sep_token, config.cls_token, config.mask_token];
        let begin = config.bos_token.map(TokenField::text);
        let texts = [begin, end].into_iter().chain(others.map(|token| token.map(TokenField::text)));
        let mut special_tokens = special_tokens(texts);
        let additional = config.additional_special_tokens.and_then(TokensField::texts);
        special_tokens.extend(additional.map(|texts| ("additional_special_tokens", texts.into())));
        let chat = ChatTemplates::from_files(files, config.chat_template, &special_tokens)?;
        let texts = TokenTexts::read(&tokenizer, vocab_size);
        // The tokenizer adds the first token itself, if the model has one.
        Ok(Self { tokenizer, begin: None, ends, chat, texts })
    }

    /// Reads the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a value that is missing or not supported.
    pub fn from_gguf(gguf: &Gguf, vocab_size: usize) -> Result<Self, LoadError> {
        let missing = |name: &str| gguf.fault(format!("the metadata has no {name}"));
        let texts = |name: &str| -> Option<Vec<String>> {
            gguf.value(name)?.to_vec().ok()?.iter().map(|text| text.to_string().ok().cloned()).collect()
        };
        let tokens = texts("tokenizer.ggml.tokens").ok_or_else(|| missing("tokenizer.ggml.tokens"))?;
        let merges = texts("tokenizer.ggml.merges").ok_or_else(|| missing("tokenizer.ggml.merges"))?;
        let kind = gguf.text("tokenizer.ggml.model").unwrap_or("(none)");
        let split = gguf.text("tokenizer.ggml.pre").unwrap_or("default");
        let pre = Some(kind).filter(|kind| *kind == "gpt2").and_then(|_| pre_tokenizer(split));
        let pre = pre.ok_or_else(|| {
            gguf.fault(format!(
                "its tokenizer is {kind:?} with {split:?}; read are \"gpt2\" with default, gpt-2, smollm, qwen2 and \
                 llama-bpe"
            ))
        })?;
        let vocabulary: Vocab = tokens.iter().zip(0..).map(|(text, id)| (text.clone(), id)).collect();
        let merges =
            merges.iter().map(|merge| merge.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())));
        let merges: Option<Vec<_>> = merges.collect();
        let merges =
            merges.ok_or_else(|| gguf.fault("tokenizer.ggml.merges has one without a space".to_owned()))?;
        let model = BPE::builder().vocab_and_merges(vocabulary, merges).build();
        let mut tokenizer = Tokenizer::new(model.map_err(|error| gguf.fault(error.to_string()))?);
        if split == "qwen2" {
            tokenizer.with_normalizer(Some(NFC)).map_err(|error| gguf.fault(error.to_string()))?;
        }
        tokenizer.with_pre_tokenizer(Some(pre));
        let kinds = gguf.value("tokenizer.ggml.token_type").and_then(|kinds| kinds.to_vec().ok());
        let kinds = kinds.map_or(&[][..], |kinds| kinds);
        let special: Vec<AddedToken> = tokens
            .iter()
            .zip(kinds)
            .filter_map(|(text, kind)| match kind.to_i32() {
                Ok(CONTROL) => Some(AddedToken::from(text.clone(), true)),
                Ok(USER_DEFINED) => Some(AddedToken::from(text.clone(), false).normalized(false)),
                _ => None,
            })
            .collect();
        tokenizer.add_tokens(special).map_err(|error| gguf.fault(error.to_string()))?;
        let id = |name: &str| gguf.number(name).and_then(|id| u32::try_from(id).ok());
        let (begin, end) = (id("tokenizer.ggml.bos_token_id"), id("tokenizer.ggml.eos_token_id"));
        let text = |id: Option<u32>| tokens.get(id? as usize).cloned();
        let [pad, unknown] = [id("tokenizer.ggml.padding_token_id"), id("tokenizer.ggml.unknown_token_id")];
        let special_tokens = special_tokens([begin, end, pad, unknown].map(text));
        let chat = gguf.text("tokenizer.chat_template");
        let chat = chat.and_then(|template| ChatTemplates::from_text(template, &special_tokens));
        let adds_begin = gguf.value("tokenizer.ggml.add_bos_token").and_then(|adds| adds.to_bool().ok());
        let texts = TokenTexts::read(&tokenizer, vocab_size);
        let ends = end.into_iter().chain(id("tokenizer.ggml.eot_token_id")).collect();
        let begin = begin.filter(|_| adds_begin == Some(true));
        Ok(Self { tokenizer, begin, ends, chat, texts })
    }

    /// The tokens of a prompt. For a long text they may be incomplete (see [`ids_of`]).
    ///
    /// # Errors
    /// `Internal` if the tokenizer fails.
    pub fn prompt(&self, text: &str, limit: TokenLimit) -> Result<TextIds, TaskError> {
        let mut prompt = self.ids(text, true, limit)?;
        prompt.ids.splice(0..0, self.begin);
        Ok(prompt)
    }

    /// The tokens of a rendered conversation, which already has its special tokens from the template.
    ///
    /// # Errors
    /// As [`Vocabulary::prompt`].
    pub fn conversation(&self, text: &str, limit: TokenLimit) -> Result<TextIds, TaskError> {
        self.ids(text, false, limit)
    }

    fn ids(&self, text: &str, add_special: bool, limit: TokenLimit) -> Result<TextIds, TaskError> {
        let encode = |text: &str| Ok(self.tokenizer.encode_fast(text, add_special)?.get_ids().to_vec());
        ids_of(text, limit.max_tokens, limit.side, encode).map_err(no_ids)
    }

    /// The bytes of each token.
    pub fn texts(&self) -> TokenTexts {
        self.texts.clone()
    }

    /// The token with this name, such as a special one.
    pub fn id(&self, name: &str) -> Option<u32> {
        self.tokenizer.token_to_id(name)
    }

    /// The name of a token.
    pub fn name(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }
}

/// The kinds of special tokens in GGUF files (`tokenizer.ggml.token_type`).
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// The names of special tokens in chat templates, in the order of [`special_tokens`].
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"];

/// Names those special tokens that the model has. The texts are in the order of [`SPECIAL_TOKENS`].
fn special_tokens(texts: impl IntoIterator<Item = Option<String>>) -> SpecialTokens {
    let named = SPECIAL_TOKENS.into_iter().zip(texts);
    named.filter_map(|(name, text)| Some((name, text?.into()))).collect()
}

/// The pre-tokenizer with this name in GGUF files (`tokenizer.ggml.pre`).
fn pre_tokenizer(name: &str) -> Option<PreTokenizerWrapper> {
    const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const LLAMA: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let split = |pattern: &str| {
        let split =
            Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false);
        Some(Sequence::new(vec![split.ok()?.into(), ByteLevel::new(false, true, false).into()]).into())
    };
    match name {
        "default" | "gpt-2" => Some(ByteLevel::new(false, true, true).into()),
        "smollm" => Some(
            Sequence::new(vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()]).into(),
        ),
        "qwen2" => split(QWEN),
        "llama-bpe" => split(LLAMA),
        _ => None,
    }
}

impl TokenTexts {
    fn read(tokenizer: &Tokenizer, vocab_size: usize) -> Self {
        let special: BTreeSet<u32> = tokenizer
            .get_added_tokens_decoder()
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(id, _)| *id)
            .collect();
        let (added, letters) = (tokenizer.get_added_tokens_decoder(), bytes_of_letters());
        let bytes = (0..u32::try_from(vocab_size).unwrap_or(u32::MAX)).map(|id| -> Box<[u8]> {
            match tokenizer.id_to_token(id) {
                _ if special.contains(&id) => Box::default(),
                None => Box::default(),
                Some(text) if added.contains_key(&id) => text.into_bytes().into(),
                Some(text) => text.chars().filter_map(|letter| *letters.get(letter as usize)?).collect(),
            }
        });
        Self { bytes: bytes.collect() }
    }
}

/// The byte that each letter of byte-level tokens represents, by the letter's code point. Printable bytes represent
/// themselves; the others are numbered from U+0100 on.
fn bytes_of_letters() -> Vec<Option<u8>> {
    let is_printable = |byte: &u8| matches!(*byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let printable = (0..=255_u8).map(|byte| Some(byte).filter(is_printable));
    printable.chain((0..=255).filter(|byte| !is_printable(byte)).map(Some)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_has_one_letter() {
        let letters = bytes_of_letters();
        let found: BTreeSet<u8> = letters.iter().flatten().copied().collect();
        assert_eq!((found.len(), letters.iter().flatten().count()), (256, 256));
        let byte = |letter: char| letters[letter as usize];
        assert_eq!(['Ġ', 'Ċ', 'a', 'ÿ'].map(byte), [b' ', b'\n', b'a', 0xff].map(Some));
    }
}
