//! The tokenizer of a GGUF file, with the rules of llama.cpp: what the metadata leaves open follows from the name of the
//! tokenizer. Decides how a text is split, which token begins a prompt and which tokens end an answer.

use std::collections::{BTreeSet, HashSet};

use candle_core::quantized::gguf_file::Value;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, BpeBuilder, Vocab};
use tokenizers::normalizers::{NFC, NormalizerWrapper, Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, DecoderWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

use super::gguf::Gguf;
use crate::model::LoadError;

/// The kinds of tokens that are not parts of words (`tokenizer.ggml.token_type`).
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// Tokens that end an answer, whatever the metadata says of them. Many files name only one end, or a wrong one.
const ENDS: [&str; 19] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<eos>",
    // The ends of files and of blanks in code.
    "<|fim_pad|>",
    "<fim_pad>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<reponame>",
];
/// As [`ENDS`], if it is a control token: in other vocabularies it is a word of HTML.
const CONTROL_END: &str = "</s>";

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How a byte-level vocabulary splits texts into words.
struct Words {
    /// The names of this way (`tokenizer.ggml.pre`).
    names: &'static [&'static str],
    /// The patterns by which a text is split, one after the other.
    patterns: &'static [&'static str],
    /// Whether a word that is a token stays whole where no merges lead to it, and whether a prompt begins with the first
    /// token if the metadata does not say so.
    is_whole_and_begun: bool,
}

const WORDS: [Words; 8] = [
    words(&["default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    words(&["gpt-2", "phi-2", "olmo", "granite-docling"], &[GPT2]),
    words(&["smollm", "refact", "starcoder"], &[r"\p{N}", GPT2]),
    words(&["qwen2", "deepseek-r1-qwen", "megrez"], &[QWEN2]),
    words(&["dbrx", "smaug-bpe"], &[LLAMA3]),
    words(&["gpt-4o", "llama4"], &[GPT4O]),
    Words {
        is_whole_and_begun: true,
        ..words(&["llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3"], &[LLAMA3])
    },
    Words { is_whole_and_begun: true, ..words(&["tekken"], &[TEKKEN]) },
];

const fn words(names: &'static [&'static str], patterns: &'static [&'static str]) -> Words {
    Words { names, patterns, is_whole_and_begun: false }
}

/// A tokenizer, and what the metadata says of its tokens.
pub struct GgufTokenizer {
    pub tokenizer: Tokenizer,
    /// The token that is put before a prompt.
    pub begin: Option<u32>,
    /// Tokens that end an answer.
    pub ends: BTreeSet<u32>,
    /// The texts of the first, the last, the padding and the unknown token.
    pub named: [Option<String>; 4],
}

impl GgufTokenizer {
    /// Reads the metadata.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a value that is missing or not supported.
    pub fn read(gguf: &Gguf) -> Result<Self, LoadError> {
        let library_fault = |error: tokenizers::Error| gguf.fault(error.to_string());
        let tokens = texts(gguf, "tokenizer.ggml.tokens")?;
        let kinds: Vec<i32> =
            list(gguf, "tokenizer.ggml.token_type", |kind| kind.to_i32().ok()).unwrap_or_default();
        let id = |name: &str, default: Option<usize>| {
            let name = format!("tokenizer.ggml.{name}_token_id");
            let id = gguf.number(&name).or(default)?;
            if id >= tokens.len() {
                tracing::warn!(name, id, "the file has no such token; the value is ignored");
            }
            u32::try_from(id).ok().filter(|_| id < tokens.len())
        };
        let named = |[begin, end, unknown]: [Option<usize>; 3]| {
            [id("bos", begin), id("eos", end), id("padding", None), id("unknown", unknown)]
        };
        let text = |id: Option<u32>| tokens.get(id? as usize).cloned();
        let model = gguf.text("tokenizer.ggml.model").unwrap_or("(none)");
        let (mut tokenizer, is_begun, named) = match model {
            "llama" => {
                // These are the ids of every SentencePiece vocabulary, unless the file says otherwise.
                let named = named([Some(1), Some(2), Some(0)]);
                (pieces(gguf, &tokens, text(named[3]))?, true, named)
            }
            "gpt2" => {
                let words = find_words(gguf)?;
                (byte_level(gguf, &tokens, words)?, words.is_whole_and_begun, named([None; 3]))
            }
            _ => {
                return Err(
                    gguf.fault(format!("tokenizer.ggml.model is {model:?}; read are \"llama\" and \"gpt2\""))
                );
            }
        };
        let found_ends: BTreeSet<u32> = tokens
            .iter()
            .enumerate()
            .filter(|(index, text)| {
                ENDS.contains(&text.as_str()) || *text == CONTROL_END && kinds.get(*index) == Some(&CONTROL)
            })
            .filter_map(|(index, _)| u32::try_from(index).ok())
            .collect();
        // Microsoft's tokenizer drops the white space behind these tokens.
        let strips = model == "llama" && gguf.text("general.architecture") == Some("phi3");
        let keeps_space = ["<unk>", "<s>", "<|endoftext|>"];
        let special: Vec<AddedToken> = (0..)
            .zip(&tokens)
            .filter_map(|(id, text)| {
                let is_end = found_ends.contains(&id);
                let token = |is_special| AddedToken::from(text.clone(), is_special).normalized(false);
                let token = match kinds.get(id as usize).copied() {
                    Some(CONTROL | UNKNOWN) => token(true),
                    _ if is_end => token(true),
                    Some(USER_DEFINED) => token(false),
                    _ => return None,
                };
                Some(token.rstrip(strips && !keeps_space.contains(&text.as_str())))
            })
            .collect();
        tokenizer.add_tokens(special).map_err(library_fault)?;
        let mut ends: BTreeSet<u32> =
            [named[1], id("eot", None), id("eom", None)].into_iter().flatten().collect();
        let unnamed: Vec<&str> =
            found_ends.difference(&ends).map(|id| tokens[*id as usize].as_str()).collect();
        if !unnamed.is_empty() {
            let tokens = unnamed.join(" ");
            tracing::info!(tokens, "answers also end at these tokens, which the file does not name as ends");
        }
        ends.extend(found_ends);
        let adds_begin = gguf.value("tokenizer.ggml.add_bos_token").and_then(|adds| adds.to_bool().ok());
        let begin = named[0].filter(|_| adds_begin.unwrap_or(is_begun));
        Ok(Self { tokenizer, begin, ends, named: named.map(text) })
    }
}

/// The items of a list. None if it is missing, or if an item has another type.
fn list<T>(gguf: &Gguf, name: &str, read: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    gguf.value(name)?.to_vec().ok()?.iter().map(read).collect()
}

fn texts(gguf: &Gguf, name: &str) -> Result<Vec<String>, LoadError> {
    let texts = list(gguf, name, |text| text.to_string().ok().cloned());
    texts.ok_or_else(|| gguf.fault(format!("the metadata has no {name}")))
}

fn bpe(tokens: &[String], merges: Vec<(String, String)>) -> BpeBuilder {
    let vocabulary: Vocab = tokens.iter().zip(0..).map(|(text, id)| (text.clone(), id)).collect();
    BPE::builder().vocab_and_merges(vocabulary, merges)
}

/// A SentencePiece vocabulary: its pieces are merged in the order of their scores, and a character without a piece is
/// written as bytes.
fn pieces(gguf: &Gguf, tokens: &[String], unknown: Option<String>) -> Result<Tokenizer, LoadError> {
    let library_fault = |error: tokenizers::Error| gguf.fault(error.to_string());
    let name = "tokenizer.ggml.scores";
    let scores: Vec<f32> = list(gguf, name, |score| score.to_f32().ok())
        .filter(|scores| scores.len() == tokens.len())
        .ok_or_else(|| gguf.fault(format!("{name} is not a list of one number for each token")))?;
    let mut model = bpe(tokens, merges_of(tokens, &scores)).byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = unknown {
        model = model.unk_token(unknown);
    }
    let mut tokenizer = Tokenizer::new(model.build().map_err(library_fault)?);
    let begins_with_space =
        gguf.value("tokenizer.ggml.add_space_prefix").and_then(|adds| adds.to_bool().ok());
    let begins_with_space = begins_with_space.unwrap_or(true);
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if begins_with_space {
        steps.push(Prepend::new("▁".to_owned()).into());
    }
    steps.push(Replace::new(" ", "▁").map_err(library_fault)?.into());
    tokenizer.with_normalizer(Some(Normalizers::new(steps))).map_err(library_fault)?;
    let mut steps: Vec<DecoderWrapper> = vec![
        Replace::new("▁", " ").map_err(library_fault)?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if begins_with_space {
        steps.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer.with_decoder(Some(Decoders::new(steps)));
    Ok(tokenizer)
}

/// A longer piece is not split: the work grows with the square of its length.
const MAX_PIECE: usize = 1_024;

/// Each way in which a piece consists of two others, the piece with the highest score first.
fn merges_of(tokens: &[String], scores: &[f32]) -> Vec<(String, String)> {
    let known: HashSet<&str> = tokens.iter().map(String::as_str).collect();
    let mut merges: Vec<(f32, &str, &str)> = Vec::new();
    for (text, score) in tokens.iter().zip(scores).filter(|(text, _)| text.len() <= MAX_PIECE) {
        let parts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        let parts = parts.filter(|(left, right)| known.contains(left) && known.contains(right));
        merges.extend(parts.map(|(left, right)| (*score, left, right)));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| b.1.len().cmp(&a.1.len())));
    merges.into_iter().map(|(_, left, right)| (left.to_owned(), right.to_owned())).collect()
}

/// How the vocabulary splits texts.
fn find_words(gguf: &Gguf) -> Result<&'static Words, LoadError> {
    let name = gguf.text("tokenizer.ggml.pre").unwrap_or_else(|| {
        tracing::warn!(
            "the file has no tokenizer.ggml.pre; texts are split as for \"default\", which may be wrong"
        );
        "default"
    });
    WORDS.iter().find(|words| words.names.contains(&name)).ok_or_else(|| {
        let known: Vec<&str> = WORDS.iter().flat_map(|words| words.names).copied().collect();
        gguf.fault(format!("tokenizer.ggml.pre is {name:?}; read are {}", known.join(", ")))
    })
}

/// A byte-level vocabulary.
fn byte_level(gguf: &Gguf, tokens: &[String], words: &Words) -> Result<Tokenizer, LoadError> {
    let library_fault = |error: tokenizers::Error| gguf.fault(error.to_string());
    let merges = texts(gguf, "tokenizer.ggml.merges")?;
    let merges: Option<Vec<_>> = merges
        .iter()
        .map(|merge| merge.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned())))
        .collect();
    let merges =
        merges.ok_or_else(|| gguf.fault("tokenizer.ggml.merges has one without a space".to_owned()))?;
    let model = bpe(tokens, merges).ignore_merges(words.is_whole_and_begun).build();
    let mut tokenizer = Tokenizer::new(model.map_err(library_fault)?);
    if gguf.text("tokenizer.ggml.pre") == Some("qwen2") {
        tokenizer.with_normalizer(Some(NFC)).map_err(library_fault)?;
    }
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for pattern in words.patterns {
        let pattern = SplitPattern::Regex((*pattern).to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(library_fault)?;
        steps.push(split.into());
    }
    steps.push(ByteLevel::new(false, true, false).into());
    tokenizer.with_pre_tokenizer(Some(Sequence::new(steps)));
    tokenizer.with_decoder(Some(ByteLevel::new(false, true, false)));
    Ok(tokenizer)
}
