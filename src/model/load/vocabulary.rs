//! The tokens of a model that generates text: turns texts into ids, and ids into the bytes of a text. Reads
//! `tokenizer.json` or a GGUF file. Decides which tokens end an answer, and which kinds of decoders are refused.

use std::collections::BTreeSet;

use serde::Deserialize;
use tokenizers::{PostProcessorWrapper, Tokenizer};

use super::ModelFiles;
use super::chat_template::{ChatTemplates, PairTemplate, SpecialTokens, TemplateField};
use super::gguf::Gguf;
use super::gguf_tokenizer::GgufTokenizer;
use super::long_text::{Side, TextIds, ids_of};
use super::tokenizer::no_ids;
use crate::model::{LoadError, TaskError};

/// The files beside `tokenizer.json` that are read, if the model has them.
const CONFIGS: [&str; 3] = ["config.json", "generation_config.json", "tokenizer_config.json"];

/// The name of the chat template in the metadata of GGUF files.
const GGUF_TEMPLATE: &str = "tokenizer.chat_template";

/// A model's tokens.
pub struct Vocabulary {
    tokenizer: Tokenizer,
    /// The token that is put before each prompt that is not a conversation, unless the tokenizer adds it itself. For a
    /// conversation the template adds it.
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
    /// How many spaces that the tokenizer puts before a text are not part of it.
    spaces: usize,
}

impl TokenTexts {
    /// The bytes that a token adds behind other tokens; empty for special tokens.
    pub fn get(&self, id: u32) -> &[u8] {
        self.bytes.get(id as usize).map_or(&[], |bytes| bytes)
    }

    /// The text of all tokens from the first one on. An answer is no such text: its first space belongs to it.
    pub fn whole(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| self.get(*id)).copied().collect();
        let spaces = bytes.iter().take(self.spaces).take_while(|byte| **byte == b' ').count();
        String::from_utf8_lossy(&bytes[spaces..]).into_owned()
    }

    /// Tokens with these texts, for tests.
    #[cfg(test)]
    pub fn of(texts: &[impl AsRef<[u8]>]) -> Self {
        Self { bytes: texts.iter().map(|text| text.as_ref().into()).collect(), spaces: 0 }
    }
}

/// A token in `tokenizer_config.json`: its text, or an object with it.
#[derive(Clone, Deserialize)]
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
    /// Whether prompts begin with the first token. Without it, `tokenizer.json` decides.
    add_bos_token: Option<bool>,
    chat_template: Option<TemplateField>,
}

impl TokenizerConfig {
    /// The special tokens that chat templates may use, and the templates in the file.
    fn for_templates(self) -> (SpecialTokens, Option<TemplateField>) {
        let named = [
            self.bos_token,
            self.eos_token,
            self.pad_token,
            self.unk_token,
            self.sep_token,
            self.cls_token,
            self.mask_token,
        ];
        let mut special_tokens = special_tokens(named.map(|token| token.map(TokenField::text)));
        let additional = self.additional_special_tokens.and_then(TokensField::texts);
        special_tokens.extend(additional.map(|texts| ("additional_special_tokens", texts.into())));
        (special_tokens, self.chat_template)
    }
}

/// Reads the chat template of a reranker, which gets `variables` beside the pair.
///
/// # Errors
/// As [`PairTemplate::from_files`].
pub fn pair_template(
    files: &ModelFiles,
    variables: serde_json::Map<String, serde_json::Value>,
) -> Result<Result<PairTemplate, String>, LoadError> {
    let config: TokenizerConfig = files.json("tokenizer_config.json")?.unwrap_or_default();
    let (special_tokens, template) = config.for_templates();
    PairTemplate::from_files(files, template, special_tokens, variables)
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
        let texts = TokenTexts::read(&tokenizer, vocab_size).map_err(fault)?;
        let config: TokenizerConfig = files.json("tokenizer_config.json")?.unwrap_or_default();
        let mut ends = BTreeSet::new();
        for name in ["generation_config.json", "config.json"] {
            match files.json::<Ends>(name)?.unwrap_or_default().eos_token_id {
                Some(Ids::One(id)) => _ = ends.insert(id),
                Some(Ids::Many(ids)) => ends.extend(ids),
                None => {}
            }
        }
        let end = config.eos_token.clone().map(TokenField::text);
        ends.extend(end.as_deref().and_then(|end| tokenizer.token_to_id(end)));
        let begin = config.bos_token.clone().map(TokenField::text);
        let mut begin_id = None;
        if let Some(adds_begin) = config.add_bos_token {
            tokenizer.with_post_processor(None::<PostProcessorWrapper>);
            begin_id = begin.as_deref().filter(|_| adds_begin).and_then(|begin| tokenizer.token_to_id(begin));
        }
        let (special_tokens, template) = config.for_templates();
        let chat = ChatTemplates::from_files(files, template, &special_tokens)?;
        Ok(Self { tokenizer, begin: begin_id, ends, chat, texts })
    }

    /// Reads the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a value that is missing or not supported.
    pub fn from_gguf(gguf: &Gguf, vocab_size: usize) -> Result<Self, LoadError> {
        let GgufTokenizer { tokenizer, begin, ends, named } = GgufTokenizer::read(gguf)?;
        let chat = gguf.text(GGUF_TEMPLATE);
        let chat = chat.and_then(|template| ChatTemplates::from_text(template, &special_tokens(named)));
        let texts = TokenTexts::read(&tokenizer, vocab_size).map_err(|reason| gguf.fault(reason))?;
        Ok(Self { tokenizer, begin, ends, chat, texts })
    }

    /// Whether the model has a chat template. Reads no vocabulary.
    ///
    /// # Errors
    /// [`LoadError::File`] for a file that cannot be read.
    pub fn has_chat(files: &ModelFiles) -> Result<bool, LoadError> {
        if let Some(path) = files.gguf() {
            return Ok(Gguf::read(&path)?.text(GGUF_TEMPLATE).is_some());
        }
        let config: TokenizerConfig = files.json("tokenizer_config.json")?.unwrap_or_default();
        ChatTemplates::are_in(files, config.chat_template)
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

/// The names of special tokens in chat templates, in the order of [`special_tokens`].
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"];

/// Names those special tokens that the model has. The texts are in the order of [`SPECIAL_TOKENS`].
fn special_tokens(texts: impl IntoIterator<Item = Option<String>>) -> SpecialTokens {
    let named = SPECIAL_TOKENS.into_iter().zip(texts);
    named.filter_map(|(name, text)| Some((name, text?.into()))).collect()
}

/// A decoder in `tokenizer.json`, or one step of it. Other kinds are refused.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Step {
    Sequence { decoders: Vec<Step> },
    ByteLevel,
    ByteFallback,
    Fuse,
    Metaspace { replacement: String, prepend_scheme: String },
    Replace { pattern: Pattern, content: String },
    Strip { content: char, start: usize, stop: usize },
}

/// What is replaced; a regular expression is refused.
#[derive(Deserialize)]
enum Pattern {
    String(String),
}

/// How a decoder makes the bytes of one token, whichever tokens are beside it.
#[derive(Default)]
struct Decoding {
    is_byte_level: bool,
    /// Whether tokens such as `<0x0A>` are bytes.
    has_bytes: bool,
    replaced: Vec<(String, String)>,
    is_fused: bool,
    /// The spaces that are removed from the beginning of a whole text.
    spaces: usize,
}

impl Decoding {
    fn read(tokenizer: &Tokenizer) -> Result<Self, String> {
        let decoder = tokenizer.get_decoder().ok_or("it has no decoder")?;
        let step = serde_json::to_value(decoder).and_then(Step::deserialize);
        let step = step.map_err(|error| format!("its decoder is not read for generation: {error}"))?;
        let mut decoding = Self::default();
        decoding.add(step).map(|()| decoding)
    }

    fn add(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Sequence { decoders } => return decoders.into_iter().try_for_each(|step| self.add(step)),
            Step::ByteLevel => self.is_byte_level = true,
            Step::ByteFallback => self.has_bytes = true,
            Step::Fuse => self.is_fused = true,
            Step::Metaspace { replacement, prepend_scheme } => {
                self.replaced.push((replacement, " ".to_owned()));
                self.spaces = usize::from(prepend_scheme != "never");
            }
            Step::Replace { pattern: Pattern::String(text), content } => self.replaced.push((text, content)),
            Step::Strip { content: ' ', start, stop: 0 } if self.is_fused => self.spaces = start,
            Step::Strip { content, start, stop } => {
                return Err(format!(
                    "its decoder strips {content:?} ({start} at the start, {stop} at the end{}); for generation only \
                     spaces at the start of a whole text are stripped",
                    if self.is_fused { "" } else { ", of each token" }
                ));
            }
        }
        Ok(())
    }

    fn bytes(&self, token: &str) -> Vec<u8> {
        if let Some(byte) = byte_of(token).filter(|_| self.has_bytes) {
            return vec![byte];
        }
        let replace = |text: String, (from, to): &(String, String)| text.replace(from, to);
        self.replaced.iter().fold(token.to_owned(), replace).into_bytes()
    }
}

/// The byte of a token such as `<0x0A>`.
fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2)
}

impl TokenTexts {
    fn read(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Self, String> {
        let decoding = Decoding::read(tokenizer)?;
        let (added, letters) = (tokenizer.get_added_tokens_decoder(), bytes_of_letters());
        let bytes = (0..u32::try_from(vocab_size).unwrap_or(u32::MAX)).map(|id| -> Box<[u8]> {
            let added = added.get(&id);
            match tokenizer.id_to_token(id) {
                _ if added.is_some_and(|token| token.special) => Box::default(),
                None => Box::default(),
                Some(text) if decoding.is_byte_level && added.is_none() => {
                    text.chars().filter_map(|letter| *letters.get(letter as usize)?).collect()
                }
                Some(text) => decoding.bytes(&text).into(),
            }
        });
        Ok(Self { bytes: bytes.collect(), spaces: decoding.spaces })
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
    use std::fs::File;
    use std::path::Path;

    use candle_core::quantized::gguf_file::{self, Value as Metadata};
    use proptest::prelude::*;
    use serde_json::Value as Json;
    use tokenizers::DecoderWrapper;
    use tokenizers::decoders::metaspace::Metaspace;
    use tokenizers::models::unigram::Unigram;
    use tokenizers::pre_tokenizers::metaspace::PrependScheme;
    use tokenizers::processors::template::TemplateProcessing;

    use super::*;
    use crate::model::sequences::text::Text;

    fn fixture() -> Json {
        serde_json::from_slice(&std::fs::read("tests/fixtures/vocabularies.json").unwrap()).unwrap()
    }

    fn metadata(value: &Json) -> Metadata {
        match value {
            Json::Bool(value) => Metadata::Bool(*value),
            Json::String(text) => Metadata::String(text.clone()),
            Json::Array(items) => Metadata::Array(items.iter().map(metadata).collect()),
            number if number.is_f64() => Metadata::F32(number.as_f64().unwrap() as f32),
            number => Metadata::I32(number.as_i64().unwrap() as i32),
        }
    }

    /// A GGUF file of a vocabulary with these values, or without the values that are null.
    fn gguf(vocabulary: &Json, architecture: &str, changes: &Json) -> Gguf {
        let mut values = vocabulary.as_object().unwrap().clone();
        values.extend(changes.as_object().unwrap().clone());
        values.retain(|_, value| !value.is_null());
        let mut values: Vec<(String, Metadata)> =
            values.iter().map(|(name, value)| (format!("tokenizer.ggml.{name}"), metadata(value))).collect();
        values.push(("general.architecture".to_owned(), Metadata::String(architecture.to_owned())));
        let values: Vec<(&str, &Metadata)> =
            values.iter().map(|(name, value)| (name.as_str(), value)).collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.gguf");
        gguf_file::write(&mut File::create(&path).unwrap(), &values, &[]).unwrap();
        Gguf::read(&path).unwrap()
    }

    fn made(kind: &str, changes: &Json) -> Gguf {
        gguf(&fixture()["vocabularies"][kind], "llama", changes)
    }

    fn ids(value: &Json) -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    const LIMIT: TokenLimit = TokenLimit { max_tokens: 1 << 12, side: Side::Beginning };

    /// `scripts/compare-vocabularies` writes the fixture, and sets the variable for a file with further vocabularies.
    #[test]
    fn tokens_are_those_of_llama_cpp() {
        let further = std::env::var("SCONCE_VOCABULARIES").ok();
        let further = further.map(|path| serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap());
        let mut count = 0;
        for cases in [Some(fixture()), further].into_iter().flatten() {
            let texts = cases["texts"].as_array().unwrap();
            for case in cases["cases"].as_array().unwrap() {
                let gguf = match case["file"].as_str() {
                    Some(file) => Gguf::read(Path::new(file)).unwrap(),
                    None => {
                        let vocabulary = &cases["vocabularies"][case["vocabulary"].as_str().unwrap()];
                        gguf(vocabulary, case["architecture"].as_str().unwrap(), &case["metadata"])
                    }
                };
                let name = format!("{} {}", case["file"], case["metadata"]);
                let vocabulary = Vocabulary::from_gguf(&gguf, 1 << 19).unwrap();
                // Unlike in llama.cpp, "</s>" may be a word of HTML.
                let is_word = |id: u32| !vocabulary.texts.get(id).is_empty();
                let word = vocabulary.id("</s>").filter(|id| is_word(*id));
                for (index, text) in texts.iter().enumerate() {
                    let text = text.as_str().unwrap();
                    if case["ids"][index].is_null() || word.is_some() && text.contains("</s>") {
                        continue;
                    }
                    let found = vocabulary.prompt(text, LIMIT).unwrap().ids;
                    assert_eq!(found, ids(&case["ids"][index]), "{name} {text:?}");
                    let bytes: String = found
                        .iter()
                        .flat_map(|id| vocabulary.texts.get(*id))
                        .map(|byte| format!("{byte:02x}"))
                        .collect();
                    assert_eq!(bytes, case["bytes"][index].as_str().unwrap(), "{name} {text:?}");
                    count += 1;
                }
                let mut ends = BTreeSet::from_iter(ids(&case["ends"]));
                ends.retain(|id| Some(*id) != word);
                assert_eq!(vocabulary.ends, ends, "{name}");
            }
        }
        assert!(count > 500, "{count}");
    }

    #[test]
    fn what_a_gguf_vocabulary_lacks_is_named() {
        for (kind, changes, message) in [
            (
                "byte_level",
                r#"{"model": "gpt2", "pre": "kimi-k2"}"#,
                "tokenizer.ggml.pre is \"kimi-k2\"; read are default",
            ),
            (
                "byte_level",
                r#"{"model": "gpt2", "pre": "qwen2", "merges": null}"#,
                "no tokenizer.ggml.merges",
            ),
            (
                "byte_level",
                r#"{"model": "t5"}"#,
                "tokenizer.ggml.model is \"t5\"; read are \"llama\" and \"gpt2\"",
            ),
            (
                "pieces",
                r#"{"model": "llama", "scores": [1.5]}"#,
                "tokenizer.ggml.scores is not a list of one number",
            ),
            ("pieces", r#"{"model": "llama", "tokens": null}"#, "no tokenizer.ggml.tokens"),
        ] {
            let gguf = made(kind, &serde_json::from_str(changes).unwrap());
            let error = Vocabulary::from_gguf(&gguf, 600).err().unwrap().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    /// Phi-3's tokenizer drops the white space behind its special tokens, by their own rule in `tokenizer.json`.
    #[test]
    fn white_space_behind_special_tokens_of_phi3_is_dropped() {
        let pieces = fixture()["vocabularies"]["pieces"].clone();
        let changes = serde_json::json!({"model": "llama"});
        let tokens = |architecture: &str| {
            let vocabulary = Vocabulary::from_gguf(&gguf(&pieces, architecture, &changes), 600).unwrap();
            let ids = vocabulary.conversation("<|im_end|>\n\nx<s>\n", LIMIT).unwrap().ids;
            ids.into_iter().map(|id| vocabulary.name(id).unwrap()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(tokens("phi3"), "<|im_end|> ▁x <s> ▁ <0x0A>");
        assert_eq!(tokens("llama"), "<|im_end|> ▁ <0x0A> <0x0A> x <s> ▁ <0x0A>");
    }

    /// A vocabulary of which a folder holds the tokenizer, and that tokenizer.
    fn from_folder(tokenizer: &Tokenizer, config: &str) -> Result<Vocabulary, LoadError> {
        let folder = tempfile::tempdir().unwrap();
        tokenizer.save(folder.path().join("tokenizer.json"), false).unwrap();
        std::fs::write(folder.path().join("config.json"), r#"{"eos_token_id": [3, 4]}"#).unwrap();
        std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        Vocabulary::from_files(&ModelFiles::locate(folder.path().to_str().unwrap()).unwrap(), 1 << 11)
    }

    /// The kinds of tokenizers in `tokenizer.json`: byte-level, SentencePiece with and without a space before the text,
    /// and Unigram pieces, once without tokens for bytes.
    fn tokenizers() -> [Tokenizer; 5] {
        let read = |kind, changes| GgufTokenizer::read(&made(kind, &changes)).unwrap().tokenizer;
        let byte_level = read("byte_level", serde_json::json!({"model": "gpt2", "pre": "llama-bpe"}));
        let spaced = read("pieces", serde_json::json!({"model": "llama"}));
        let bare = read("pieces", serde_json::json!({"model": "llama", "add_space_prefix": false}));
        let pieces = fixture()["vocabularies"]["pieces"].clone();
        let tokens =
            pieces["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap().to_owned());
        let scores = pieces["scores"].as_array().unwrap().iter().map(|score| score.as_f64().unwrap());
        let scored: Vec<(String, f64)> = tokens.zip(scores).collect();
        let unigram = |has_bytes| {
            let mut tokenizer = Tokenizer::new(Unigram::from(scored.clone(), Some(0), has_bytes).unwrap());
            tokenizer.with_pre_tokenizer(Some(Metaspace::new('▁', PrependScheme::Always, true)));
            match has_bytes {
                true => _ = tokenizer.with_decoder(spaced.get_decoder().cloned()),
                false => _ = tokenizer.with_decoder(Some(Metaspace::new('▁', PrependScheme::Always, true))),
            }
            tokenizer
        };
        let (with_bytes, without) = (unigram(true), unigram(false));
        [byte_level, spaced, bare, with_bytes, without]
    }

    /// The parts of a text as they are sent.
    fn parts<'a>(bytes: impl Iterator<Item = &'a [u8]>) -> Vec<String> {
        let mut text = Text::new([].into());
        let mut parts: Vec<String> = bytes
            .map(|bytes| {
                assert!(!text.push(bytes));
                text.new_part()
            })
            .collect();
        parts.push(text.end());
        assert_eq!(parts.concat(), text.text());
        parts
    }

    #[test]
    fn streamed_parts_are_whole_characters_and_join_to_the_text_of_the_library() {
        let loaded = tokenizers().map(|tokenizer| (from_folder(&tokenizer, "{}").unwrap(), tokenizer));
        let text = prop::collection::vec(
            "[ \\n]{0,3}|[a-z]{1,5}|[😀👍🏽東京今天مرحباहिन्दीéệ]{1,3}|<0x4[0-9]>|.{0,3}",
            0..8,
        );
        proptest!(|(text in text, cut in any::<prop::sample::Index>())| {
            let text = text.concat();
            for (vocabulary, tokenizer) in &loaded {
                let ids = vocabulary.prompt(&text, LIMIT).unwrap().ids;
                let whole = tokenizer.decode(&ids, true).unwrap();
                // The library drops all spaces before a text that are in the first piece of a Metaspace.
                let is_cut = matches!(tokenizer.get_decoder(), Some(DecoderWrapper::Metaspace(_)))
                    && text.starts_with([' ', '▁']);
                if is_cut {
                    continue;
                }
                prop_assert_eq!(vocabulary.texts.whole(&ids), &*whole);
                let bytes = |ids: &[u32]| -> Vec<u8> {
                    ids.iter().flat_map(|id| vocabulary.texts.get(*id)).copied().collect()
                };
                let sent = parts(ids.iter().map(|id| vocabulary.texts.get(*id)));
                let has_half = |part: &String| part.contains(char::REPLACEMENT_CHARACTER);
                prop_assert!(!sent.iter().any(has_half) || has_half(&text));
                prop_assert!(sent.concat().ends_with(&whole));
                prop_assert!(sent.concat().len() <= whole.len() + 1, "only one space is not of the text");
                // An answer that begins anywhere continues the text before it.
                let (prompt, answer) = ids.split_at(cut.index(ids.len() + 1));
                if let (Ok(before), false) = (String::from_utf8(bytes(prompt)), prompt.is_empty()) {
                    let sent = parts(answer.iter().map(|id| vocabulary.texts.get(*id)));
                    prop_assert_eq!(before + &sent.concat(), String::from_utf8(bytes(&ids)).unwrap());
                }
            }
        });
    }

    #[test]
    fn tokens_of_any_bytes_are_shown_as_far_as_they_are_characters() {
        let [byte_level, spaced, ..] = tokenizers();
        let letters = bytes_of_letters();
        let letter = |byte: u8| {
            let letter = letters.iter().position(|found| *found == Some(byte)).unwrap();
            char::from_u32(letter as u32).unwrap().to_string()
        };
        let piece = |byte: u8| format!("<0x{byte:02X}>");
        let loaded = [&byte_level, &spaced].map(|tokenizer| from_folder(tokenizer, "{}").unwrap());
        let byte = prop_oneof![any::<u8>(), prop::sample::select("é€😀".as_bytes())];
        proptest!(|(bytes in prop::collection::vec(byte, 0..24))| {
            let names: [Vec<String>; 2] =
                [bytes.iter().map(|byte| letter(*byte)).collect(), bytes.iter().map(|byte| piece(*byte)).collect()];
            for (vocabulary, names) in loaded.iter().zip(names) {
                let ids: Vec<u32> = names.iter().map(|name| vocabulary.id(name).unwrap()).collect();
                let sent = parts(ids.iter().map(|id| vocabulary.texts.get(*id)));
                prop_assert_eq!(sent.concat(), String::from_utf8_lossy(&bytes));
            }
        });
    }

    #[test]
    fn the_ends_of_a_folder_are_read_and_its_decoder_is_refused_by_name() {
        let [_, mut tokenizer, ..] = tokenizers();
        assert_eq!(from_folder(&tokenizer, "{}").unwrap().ends, BTreeSet::from([3, 4]));
        let mut error = |decoder: &str| {
            let decoder: Option<DecoderWrapper> = serde_json::from_str(decoder).unwrap();
            tokenizer.with_decoder(decoder);
            from_folder(&tokenizer, "{}").err().unwrap().to_string()
        };
        let word_pieces = error(r###"{"type": "WordPiece", "prefix": "##", "cleanup": true}"###);
        assert!(
            word_pieces.contains("not read for generation: unknown variant `WordPiece`"),
            "{word_pieces}"
        );
        let regex = error(r#"{"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}"#);
        assert!(regex.contains("unknown variant `Regex`"), "{regex}");
        let strip = error(r#"{"type": "Strip", "content": " ", "start": 1, "stop": 0}"#);
        assert!(strip.contains("strips ' ' (1 at the start, 0 at the end, of each token)"), "{strip}");
        assert!(error("null").contains("it has no decoder"));
    }

    #[test]
    fn a_folder_says_whether_prompts_begin_with_the_first_token() {
        let [_, _, mut bare, ..] = tokenizers();
        let first = |tokenizer: &Tokenizer, config: &str| {
            from_folder(tokenizer, config).unwrap().prompt("a", LIMIT).unwrap().ids.len()
        };
        let (adds, not) = (
            r#"{"add_bos_token": true, "bos_token": "<s>"}"#,
            r#"{"add_bos_token": false, "bos_token": "<s>"}"#,
        );
        let mut template = TemplateProcessing::builder();
        template.try_single("<s> $0").unwrap().special_tokens(vec![("<s>", 1)]);
        assert_eq!(["{}", not, adds].map(|config| first(&bare, config)), [1, 1, 2]);
        bare.with_post_processor(Some(template.build().unwrap()));
        assert_eq!(["{}", not, adds].map(|config| first(&bare, config)), [2, 1, 2]);
    }

    #[test]
    fn each_byte_has_one_letter() {
        let letters = bytes_of_letters();
        let found: BTreeSet<u8> = letters.iter().flatten().copied().collect();
        assert_eq!((found.len(), letters.iter().flatten().count()), (256, 256));
        let byte = |letter: char| letters[letter as usize];
        assert_eq!(['Ġ', 'Ċ', 'a', 'ÿ'].map(byte), [b' ', b'\n', b'a', 0xff].map(Some));
    }
}
